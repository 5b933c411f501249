"""What a replaced layer keeps of values follows them: weights that are written or moved, mapped files, caches."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest
import torch
from fake_graph import FakeBackend
from test_mapped_experts import MMAP, loaded, logits, model, with_kernels

import infuse
from infuse.errors import CheckpointError
from infuse.graphs.pool import BucketPool


@with_kernels
def test_a_mapped_file_that_got_its_old_mtime_back(tmp_path: Path) -> None:
    """Renaming it changes its ctime alone, and nothing that is read."""
    engine = infuse.init_inference(model(), save_mp_checkpoint_path=str(tmp_path), **MMAP, dtype="fp32", quant="int8")
    (file,) = tmp_path.glob("*.safetensors")
    mapped, before = loaded(tmp_path), file.stat()
    wanted = logits(mapped)
    file.chmod(0o600)
    assert torch.equal(logits(mapped), wanted)
    held, data = file.read_bytes(), engine.module.model.layers[1].mlp.experts.down.data
    at = held.index(bytes(data.flatten()[:64].view(torch.uint8).tolist()))
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes([held[at] ^ 64]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match="down.data is not what was saved"):
        logits(mapped)


def test_a_copied_pool_of_graphs_keeps_the_format_of_its_caches() -> None:
    pool = BucketPool(FakeBackend(), 1 << 20, format="int8")
    assert copy.deepcopy(pool).take(1, 5).cache.format == "int8"
    pool.backend = None  # type: ignore[assignment]
    assert pickle.loads(pickle.dumps(pool)).format == "int8"
