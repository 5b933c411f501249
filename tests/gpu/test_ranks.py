"""On two NVIDIA GPUs: ranks whose sums by NCCL are part of the graphs of decode steps and of forward."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import infuse
from tests.models.families import BY_NAME, inputs
from tests.support.on_gpu import needs_gpu

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs: NCCL has one rank on each"),
]
SIZE = 2
MODES: list[dict[str, Any]] = [{}, dict(do_sample=True, top_k=20), dict(num_beams=2), dict(no_repeat_ngram_size=2)]
SAMPLED = (2, 3)  # of the answers: another rounding may draw another token


def on_rank(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    os.environ["LOCAL_RANK"] = str(rank)
    store = dist.FileStore(f"{folder}/store", SIZE)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=90)
    )
    family, device = BY_NAME["llama"], torch.device("cuda", rank)
    original = family.make(tie_word_embeddings=False).to(device)
    model = family.make(tie_word_embeddings=False).to(device)
    engine = infuse.init_inference(
        model, dtype="fp32", enable_cuda_graph=True, progress=False, tensor_parallel={"tp_size": SIZE}
    )

    def given(seed: int) -> dict[str, Tensor]:
        return {name: value.to(device) for name, value in inputs(family, batch=2, padding="left", seed=seed).items()}

    def answers(model: Any) -> list[Tensor]:
        found = []
        for mode in MODES:
            for seed in (11, 12):
                torch.manual_seed(5)
                found.append(model.generate(**given(seed), **mode, max_new_tokens=24).cpu())
        with torch.no_grad():
            found += [model(**given(seed), use_cache=False).logits.cpu() for seed in range(5)]
        return found

    found, exact = answers(engine.module), answers(original)
    captured = [bucket.graphs.captured() for bucket in engine.module._infuse.buckets.idle]
    torch.save(
        (found, exact, captured, engine.module.forward.graphs.captured(), engine.group.describe()), f"{folder}/{rank}"
    )
    dist.destroy_process_group()


def test_nccl_inside_graphs(tmp_path: Path) -> None:
    mp.spawn(on_rank, (str(tmp_path),), nprocs=SIZE)
    results = [torch.load(tmp_path / str(rank)) for rank in range(SIZE)]
    for found, exact, captured, forwards, name in results:
        assert name == "nccl" and captured and all(captured) and forwards == 1
        for i, (ours, theirs, of_rank_0) in enumerate(zip(found, exact, results[0][0], strict=True)):
            assert torch.equal(ours, of_rank_0)
            assert i in SAMPLED or torch.allclose(ours.float(), theirs.float(), atol=1e-3)
