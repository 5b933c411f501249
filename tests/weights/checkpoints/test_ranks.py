"""Checkpoints that several ranks saved: cut here by hand, merged on reading; and slices that read no more than their
bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import infuse
from infuse.parallel.slices import Span, taken
from infuse.weights.checkpoint import Checkpoint
from infuse.weights.model_tensors import model_tensors
from infuse.weights.pieces import Packed, tiling
from infuse.weights.sources import find_files
from tests.models.families import BY_NAME
from tests.support.checkpoints import CUT, loaded, on_meta, outputs, piece, save, shards, wanted


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", list(CUT))
def test_a_training_checkpoint_of_several_ranks_is_merged(family: str, size: int, tmp_path: Path) -> None:
    if family == "phi3" and size == 4:
        pytest.skip("two key heads cannot be cut in four by chunks")
    (tmp_path / "latest").write_text("step")
    for rank, shard in enumerate(shards(family, size)):
        save({"module": shard, "mp_world_size": size}, tmp_path / "step" / f"mp_rank_{rank:02d}_model_states.pt")
    assert torch.equal(outputs(loaded(family, str(tmp_path)), family), wanted(family))


@pytest.mark.parametrize("form", ["Megatron", "parallelization", "list", "dict"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "falcon-40b", "bert"])
def test_a_description_of_ranks_is_merged(family: str, form: str, tmp_path: Path) -> None:
    parts = shards(family, 2)
    files = [save(shard, tmp_path / f"tp_{rank:02d}.pt") for rank, shard in enumerate(parts)]
    written: Any = {
        "Megatron": {"type": "Megatron", "checkpoints": files, "version": 2.0},
        "parallelization": {"type": "BLOOM", "checkpoints": files, "parallelization": "tp", "tp_size": 2},
        "list": {"type": "BLOOM", "checkpoints": files},
    }.get(form)
    if form == "dict":  # DeepSpeed's own: what is not cut in one file, the pieces of each partition for all ranks
        whole = {name for name in parts[0] if torch.equal(parts[0][name], parts[1][name])}
        cut = sorted(set(parts[0]) - whole)
        listed = []
        for m, names in enumerate((cut[::2], cut[1::2])):
            listed += [
                save({name: part[name] for name in names}, tmp_path / f"tp_{r:02d}_{m:02d}.pt")
                for r, part in enumerate(parts)
            ]
        files = [save({name: parts[0][name] for name in whole}, tmp_path / "non-tp.pt")] * 2
        written = {
            "type": "ds_model",
            "checkpoints": {"non_tp": files, "tp": listed},
            "parallelization": "tp",
            "tp_size": 2,
        }
    (tmp_path / "ranks.json").write_text(json.dumps(written))
    assert torch.equal(outputs(loaded(family, str(tmp_path / "ranks.json")), family), wanted(family))
    if form != "dict":
        assert torch.equal(outputs(loaded(family, written, base_dir=str(tmp_path)), family), wanted(family))


def test_a_rank_that_is_missing_is_told(tmp_path: Path) -> None:
    parts = shards("llama", 2)
    save({"module": parts[0]}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(
        infuse.CheckpointError, match=r"misshaped  model.layers.0.self_attn.q_proj.weight: \(24, 48\), the model has"
    ):
        loaded("llama", str(tmp_path))


# ---- how pieces make up a tensor ----


@pytest.mark.parametrize(
    ("shapes", "whole", "packed", "wanted"),
    [
        ([(2, 6)], (2, 6), None, [(0, 0, 2)]),
        ([(), ()], (), None, [(0, 0, 1)]),
        ([(3,), (2,)], (5,), None, [(0, 0, 3), (1, 0, 2)]),
        ([(2, 3), (2, 4), (2, 5)], (2, 12), None, [(0, 0, 3), (1, 0, 4), (2, 0, 5)]),
        ([(4,), (4,), (4,), (4,)], (8,), None, [(0, 0, 4), (2, 0, 4)]),  # each twice
        ([(6,), (6,)], (12,), Packed((4, 4, 4)), [(0, 0, 2), (1, 0, 2), (0, 2, 4), (1, 2, 4), (0, 4, 6), (1, 4, 6)]),
        # uneven heads
        ([(6,), (3,)], (9,), Packed((3, 3, 3)), [(0, 0, 2), (1, 0, 1), (0, 2, 4), (1, 1, 2), (0, 4, 6), (1, 2, 3)]),
        ([(4,), (4,)], (8,), Packed((4, 2, 2)), [(0, 0, 2), (1, 0, 2), (0, 2, 3), (1, 2, 3), (0, 3, 4), (1, 3, 4)]),
        # the one key head on both
        ([(4,), (4,)], (6,), Packed((4, 1, 1)), [(0, 0, 2), (1, 0, 2), (0, 2, 3), (0, 3, 4)]),
        (
            [(3,)] * 4,
            (8,),
            Packed((2, 1, 1), 2),
            [(0, 0, 1), (1, 0, 1), (0, 1, 2), (0, 2, 3), (2, 0, 1), (3, 0, 1), (2, 1, 2), (2, 2, 3)],
        ),
    ],
)
def test_pieces_make_up_a_tensor(shapes: list, whole: tuple, packed: Packed | None, wanted: list) -> None:
    found = tiling(shapes, whole, packed)
    assert found is not None and [(span.source, span.start, span.stop) for span in found.spans()] == wanted


@pytest.mark.parametrize(
    ("shapes", "whole", "packed"),
    [
        ([(2, 3)], (4, 6), None),
        ([(2,)], (2, 1), None),
        ([(3,), (3,)], (7,), None),
        ([(5,), (5,)], (12,), Packed((4, 4, 4))),
        ([()], (1,), None),
        ([(0, 3)], (4, 3), None),
        ([(3,)], (0,), None),
    ],
)
def test_what_makes_up_no_tensor(shapes: list, whole: tuple, packed: Packed | None) -> None:
    assert tiling(shapes, whole, packed) is None


def test_ranges_of_what_spans_make_up() -> None:
    found = (Span(0, 0, 3), Span(1, 2, 4), Span(0, 5, 9))
    assert taken(found, [(0, 9)]) == list(found) and taken(found, [(4, 4)]) == []
    assert taken(found, [(2, 6)]) == [Span(0, 2, 3), Span(1, 2, 4), Span(0, 5, 6)]
    assert taken(found, [(0, 1), (1, 2), (6, 8)]) == [Span(0, 0, 2), Span(0, 6, 8)]


# ---- slices ----


def read_characters() -> int:
    """The bytes that this process asked the system for, whoever asked."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


PARTS = [(slice(100, 200),), (slice(None), slice(32, 96)), (slice(5, 9), slice(1, 2)), (slice(7, 7),), ()]


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("form", ["safetensors", "bin", "ranks"])
def test_a_slice_reads_its_bytes_alone(form: str, part: tuple, tmp_path: Path) -> None:
    model = BY_NAME["llama"].make(hidden_size=256, intermediate_size=1024)
    name, wanted = "model.layers.1.mlp.up_proj.weight", model.model.layers[1].mlp.up_proj.weight.detach()
    if form == "safetensors":
        model.save_pretrained(tmp_path)
    elif form == "bin":
        save(model.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        for rank in range(4):
            state = {
                key: piece("llama", key, tensor, rank, 4) if "mlp" in key else tensor
                for key, tensor in model.state_dict().items()
            }
            save({"module": state}, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    checkpoint = Checkpoint(find_files(str(tmp_path)))
    with torch.device("meta"):
        meta = BY_NAME["llama"].make(hidden_size=256, intermediate_size=1024)
    tensors, before = model_tensors(meta, checkpoint).tensors, checkpoint.bytes_read
    at_first = read_characters()
    found = tensors[name].read(part)
    asked = read_characters() - at_first
    assert torch.equal(found, wanted[part]) and found.is_contiguous()
    assert checkpoint.bytes_read - before == found.nbytes
    if form == "safetensors":  # the others are mapped, and the system tells nothing
        assert found.nbytes <= asked <= found.nbytes + 200  # and /proc/self/io itself


def test_the_whole_load_reads_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BY_NAME["llama"].make().save_pretrained(tmp_path)
    opened: list[Checkpoint] = []
    check = Checkpoint.__init__
    monkeypatch.setattr(Checkpoint, "__init__", lambda self, *given: (check(self, *given), opened.append(self))[0])
    loaded("llama", str(tmp_path), dtype="bf16", quant="int8:16")
    stored = sum(tensor.nbytes for tensor in on_meta("llama").state_dict().values())
    assert len(opened) == 1 and opened[0].bytes_read == stored
