"""Checkpoints and ranks together: every form is read by ranks, and our own shards by another number of ranks than wrote
them.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import infuse
from infuse.native import kernels
from infuse.plan.bytes import parameter_bytes
from infuse.weights import fill
from infuse.weights.names import placed
from tests.models.families import BY_NAME
from tests.support.checkpoints import (
    bart_by_rank,
    bin_shards,
    description,
    engine_from,
    file_glob,
    on_meta,
    outputs,
    safetensors,
    save,
    saved,
    shards,
    state_of,
    training,
)
from tests.support.over_ranks import TOLERANCE, distance
from tests.support.ranks import Ranks, same

FAMILIES = ["llama", "gpt2", "bloom", "falcon-40b", "bert"]
WHOLE = {
    "safetensors": safetensors,
    "bin": bin_shards,
    "glob": file_glob,
    "description": description,
    "training": training,
}


def loaded_by_rank(name: str, source: Any, keys: dict) -> tuple[Tensor, int]:
    engine = engine_from(name, source, **{"dtype": "fp32", **keys})
    assert not [n for n, x in (*engine.module.named_parameters(), *engine.module.named_buffers()) if x.is_meta]
    return outputs(engine, name), parameter_bytes(engine.module)


def original(name: str) -> Tensor:
    return outputs(BY_NAME[name].make(), name)


@pytest.mark.parametrize(
    ("name", "form"), [*(("llama", form) for form in WHOLE), *zip(FAMILIES[1:], WHOLE, strict=False)]
)
def test_a_whole_checkpoint_is_read_by_two_ranks(name: str, form: str, tmp_path: Path, ranks: Ranks) -> None:
    source = WHOLE[form](BY_NAME[name].make(), tmp_path)
    results = ranks.run(2, loaded_by_rank, name, source, {})
    assert same([found for found, _ in results]) and distance(results[0][0], original(name)) < TOLERANCE


@pytest.mark.parametrize(("form", "size"), [("training", 4), ("description", 2)])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_two_ranks_trained_is_read_by_two_and_by_four(
    name: str, form: str, size: int, tmp_path: Path, ranks: Ranks
) -> None:
    files = [
        save({"module": piece}, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
        for rank, piece in enumerate(shards(name, 2))
    ]
    source: Any = str(tmp_path)
    if form == "description":
        source = {"type": "Megatron", "checkpoints": files, "version": 2.0, "base_dir": str(tmp_path)}
    results = ranks.run(size, loaded_by_rank, name, source, {})
    assert same([found for found, _ in results]) and distance(results[0][0], original(name)) < TOLERANCE


# ---- our own shards ----

# Groups of 4 inputs are whole in every part of these models, whatever the number of ranks.
INT8, INT4 = {"quant": "int8:4"}, {"quant": "int4:4:asymmetric"}
DEGREES = [
    (1, 2, {}), (2, 1, {}), (2, 4, {}), (1, 2, INT8), (2, 1, INT8), (2, 4, INT8), (4, 3, INT8), (2, 2, INT4),
    (1, 4, INT4), (3, 2, INT4),
]  # fmt: skip


def read_by_rank(name: str, folder: str, keys: dict) -> tuple[Tensor, list[str]]:
    """Outputs, and the names of tensors that differ by a bit from those that are cut, then quantized, from the live
    model.
    """
    engine, fresh = engine_from(name, folder), engine_from(name, None, **{"verify": "off", **keys})
    state, wanted = placed(engine.module), placed(fresh.module)
    assert state.keys() == wanted.keys()
    return outputs(engine, name), [key for key in state if not torch.equal(state[key], wanted[key])]


def read_in_parts_by_rank(name: str, folder: str, keys: dict) -> tuple[Tensor, list[str], int]:
    """As read_by_rank, with matrices read in parts of 16 rows; and how many parts were read."""
    with pytest.MonkeyPatch.context() as patch:
        parts, of = [], fill.QuantizedWeight.of
        patch.setattr(fill, "SAVED_BYTES", 1)
        patch.setattr(fill.QuantizedWeight, "of", lambda *given: parts.append(1) or of(*given))
        return (*read_by_rank(name, folder, keys), len(parts))


def read(name: str, folder: Path, size: int, ranks: Ranks, **keys: Any) -> list[tuple[Tensor, list[str]]]:
    return (
        ranks.run(size, read_by_rank, name, str(folder), keys) if size > 1 else [read_by_rank(name, str(folder), keys)]
    )


# One family at all degrees, the others at three each, in turn.
AT_DEGREES = [("llama", *degree) for degree in DEGREES]
AT_DEGREES += [(name, *DEGREES[(3 * i + j) % 10]) for i, name in enumerate(FAMILIES[1:]) for j in range(3)]


@pytest.mark.parametrize(("name", "writers", "readers", "keys"), AT_DEGREES, ids=str)
def test_shards_are_read_by_another_number_of_ranks(
    name: str, writers: int, readers: int, keys: dict, tmp_path: Path, ranks: Ranks
) -> None:
    """Quantized and then cut is, bit for bit, cut and then quantized."""
    first = saved(name, tmp_path, writers, ranks, **keys)
    assert len(list(tmp_path.glob("*.safetensors"))) == writers
    for found, differing in read(name, tmp_path, readers, ranks, **keys):
        assert not differing and distance(found, first) < TOLERANCE
    if not keys:
        assert distance(first, original(name)) < TOLERANCE


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (3, 2)])
def test_ranks_read_matrices_in_parts(writers: int, readers: int, tmp_path: Path, ranks: Ranks) -> None:
    """Parts of rows of parts of ranks: whole pieces, pieces cut along both axes, and several joined."""
    if isinstance(kernels(), str):
        pytest.skip(kernels())
    first = saved("llama", tmp_path, writers, ranks, **INT8)
    if readers > 1:
        results = ranks.run(readers, read_in_parts_by_rank, "llama", str(tmp_path), INT8)
    else:
        results = [read_in_parts_by_rank("llama", str(tmp_path), INT8)]
    for found, differing, parts in results:
        assert not differing and distance(found, first) < TOLERANCE and parts > 30


@pytest.mark.parametrize(
    ("name", "writers", "readers"),
    [
        # On each of four ranks the graphs of these two are read.
        pytest.param(
            name, *sizes, marks=[pytest.mark.variants] if sizes[1] == 4 and name in ("cohere-qk", "phi3") else []
        )
        for name in ("llama-bias", "cohere-qk", "phi3", "stablelm-parallel", "opt-350m")
        for sizes in ((2, 1), (2, 4), (1, 3))
    ],
)
def test_norms_tables_and_tied_heads(name: str, writers: int, readers: int, tmp_path: Path, ranks: Ranks) -> None:
    first = saved(name, tmp_path, writers, ranks, quant="int8:4")
    for found, differing in read(name, tmp_path, readers, ranks, quant="int8:4"):
        assert not differing and distance(found, first) < TOLERANCE


def test_a_format_counted_in_groups_keeps_their_size(tmp_path: Path, ranks: Ranks) -> None:
    first = saved("llama", tmp_path, 1, ranks, quant="int8:groups=2")
    assert all(
        distance(found, first) < TOLERANCE
        for found, _ in ranks.run(2, loaded_by_rank, "llama", str(tmp_path), {"dtype": None})
    )
    wanted = saved("llama", tmp_path, 2, ranks, quant="int8:groups=2")
    assert distance(loaded_by_rank("llama", str(tmp_path), {"dtype": None})[0], wanted) < TOLERANCE


@pytest.mark.parametrize("quant", ["fp8", "int8:row:asymmetric"])
def test_a_scale_of_a_row_goes_along_with_a_part_and_is_not_merged(quant: str, tmp_path: Path, ranks: Ranks) -> None:
    """Two ranks have a scale each for their half of a row: four ranks have that of their half, one is refused."""
    first = saved("llama", tmp_path, 2, ranks, quant=quant, grain=4)
    results = ranks.run(4, loaded_by_rank, "llama", str(tmp_path), {"dtype": None, "grain": 4})
    assert all(distance(other, first) < TOLERANCE for other, _ in results)
    model = on_meta("llama")
    before = state_of(model)
    with pytest.raises(infuse.CheckpointError) as caught:
        infuse.init_inference(model, checkpoint=str(tmp_path), progress=False)
    assert "shards of 2 ranks cannot be read by rank 0 of 1; load the original checkpoint, or shard" in str(
        caught.value
    )
    assert f"mlp.down.weight: {quant}: inputs of 2 ranks, each with a scale for its rows, would be" in str(caught.value)
    assert state_of(model) == before


def test_what_would_cut_a_group_is_refused_with_its_numbers(tmp_path: Path, ranks: Ranks) -> None:
    saved("llama", tmp_path, 1, ranks, quant="int8:16")
    for error in ranks.run_expecting_errors(2, loaded_by_rank, "llama", str(tmp_path), {"dtype": None}):
        assert isinstance(error, infuse.InfuseError)
        assert (
            "self_attn.out.weight: int8:16: groups of 16 inputs would be cut at [24]; possible: a multiple of 16"
            in str(error)
        )


def test_what_did_not_fit_then_stays_as_it_was_saved(tmp_path: Path, ranks: Ranks) -> None:
    """With two ranks the out matrix has 24 inputs, which groups of 16 do not divide: it is stored plain, and read
    plain.
    """
    first = saved("llama", tmp_path, 2, ranks, quant="int8:16")
    found = engine_from("llama", str(tmp_path))
    assert all("self_attn.out.weight" not in step.formats for step in found.plan.steps if step.depth == "block")
    assert distance(outputs(found, "llama"), first) < TOLERANCE


# ---- at the same degree ----


def test_each_rank_reads_its_own_file_alone(tmp_path: Path, ranks: Ranks) -> None:
    """The other's is not even there; nothing is quantized."""
    first = saved("llama", tmp_path, 2, ranks, quant="int8:4")
    found = ranks.run(2, read_alone, "llama", str(tmp_path))
    assert all(torch.equal(one, first) for one, _ in found)
    files = sorted(tmp_path.glob("*.safetensors"))
    for (_, read_bytes), file in zip(found, files, strict=True):
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        assert read_bytes == file.stat().st_size - header  # each byte once


def read_alone(name: str, folder: str) -> tuple[Tensor, int]:
    """Read while the other rank's file has another name, in a folder of this rank's own."""
    import shutil

    from infuse.weights.checkpoint import Checkpoint

    rank = dist.get_rank()
    own = Path(folder) / f"only-{rank}"
    own.mkdir()
    for file in ("infuse.json", f"rank-{rank:02d}-of-02.safetensors"):
        shutil.copyfile(Path(folder) / file, own / file)
    opened: list[Checkpoint] = []
    from infuse.weights import saved_shards as module

    class Counted(module.SavedShards):
        def __init__(self, *args: Any):
            super().__init__(*args)
            opened.append(self)

    import infuse.shards.save
    from infuse.quant.integer import IntegerFormat

    def refuse(self: Any, weight: Tensor) -> Any:
        assert weight.is_meta, "quantized again"
        return quantize(self, weight)

    before, infuse.shards.save.SavedShards = infuse.shards.save.SavedShards, Counted
    quantize, IntegerFormat.quantize = IntegerFormat.quantize, refuse
    try:
        engine = engine_from(name, str(own))
    finally:
        infuse.shards.save.SavedShards, IntegerFormat.quantize = before, quantize
    assert not any(left.why.startswith("refused") for left in engine.plan.left)
    return outputs(engine, name), opened[0].bytes_read


def test_the_index_says_how_tensors_were_cut(tmp_path: Path, ranks: Ranks) -> None:
    saved("llama", tmp_path, 2, ranks, quant="int8:4")
    index = json.loads((tmp_path / "infuse.json").read_text())
    files = index["files"]
    assert [file["name"] for file in files] == ["rank-00-of-02.safetensors", "rank-01-of-02.safetensors"]

    def cuts(name: str) -> list[str]:
        return [file["cuts"][name] for file in files]

    wanted = ["axis 0 of 96: 0:24 48:60 72:84", "axis 0 of 96: 24:48 60:72 84:96"]
    assert cuts("model.layers.0.self_attn.qkv.weight") == wanted
    assert cuts("model.layers.2.mlp.down.weight") == ["axis 1 of 80: 0:48", "axis 1 of 80: 48:80"]
    assert cuts("lm_head.weight") == cuts("model.embed_tokens.weight") == ["axis 0 of 96: 0:64", "axis 0 of 96: 64:96"]


# ---- what a rank reads ----


def bytes_by_rank(name: str, folder: str, keys: dict) -> int:
    """The bytes that this rank's load asked its files for, beside the sample of each tensor that ranks compare."""
    from infuse.weights.checkpoint import Checkpoint

    opened: list[Checkpoint] = []
    check, load = Checkpoint.__init__, importlib.import_module("infuse.apply.load")
    sums, sampled = load.sampled_sums, 0

    def counted(self: Checkpoint, *args: Any) -> None:
        check(self, *args)
        opened.append(self)

    def counted_sums(reader: Any) -> dict[str, int]:
        nonlocal sampled
        found = sums(reader)
        sampled = opened[0].bytes_read
        return found

    Checkpoint.__init__, load.sampled_sums = counted, counted_sums  # type: ignore[method-assign]
    try:
        engine_from(name, folder, verify="off", **{"dtype": "fp32", **keys})
    finally:
        Checkpoint.__init__, load.sampled_sums = check, sums  # type: ignore[method-assign]
    (checkpoint,) = opened
    assert sampled > 0
    return checkpoint.bytes_read - sampled


@pytest.mark.parametrize("keys", [{}, {"quant": "int4:4"}], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_touches_the_bytes_of_its_part(tied: bool, keys: dict, tmp_path: Path, ranks: Ranks) -> None:
    """Half of the heads, of the inner features and of the vocabulary, and all norms; each byte is read once."""
    name = "llama-bias" if tied else "llama"
    BY_NAME[name].make().save_pretrained(tmp_path)
    hidden, inner, layers, vocabulary, keys_width = 48, (48, 32), 3, (64, 32), 24
    for rank, found in enumerate(ranks.run(2, bytes_by_rank, name, str(tmp_path), keys)):
        matrices = 2 * hidden * hidden // 2 + 2 * keys_width * hidden // 2 + 3 * hidden * inner[rank]
        biases = (hidden // 2 + keys_width + 2 * inner[rank] + (2 * hidden if rank == 0 else 0)) if tied else 0
        tables = (1 if tied else 2) * hidden * vocabulary[rank]
        assert found == 4 * (layers * (matrices + biases + 2 * hidden) + hidden + tables)


# ---- layers without a spec ----


def test_layers_that_are_split_in_place(tmp_path: Path, ranks: Ranks) -> None:
    first = ranks.run(2, bart_by_rank, str(tmp_path), True, {})
    for size in (2, 3):
        assert all(
            distance(found, first[0]) < TOLERANCE for found in ranks.run(size, bart_by_rank, str(tmp_path), False, {})
        )
