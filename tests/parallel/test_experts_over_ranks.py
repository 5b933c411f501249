"""Ranks share experts, by whole ones, by their width, or by both, and give what one process gives."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import infuse
from infuse.parallel.slices import Band, Cut, Tiling, bands_of
from infuse.weights.names import placed
from tests.models.mixtures import OVER_RANKS
from tests.support.ranks import Ranks, same

TOLERANCE = 5e-5  # of logits, over the root mean square of the original's


def given() -> Tensor:
    return torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(3))


def on_rank(name: str, tp: int, ep: int, keys: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, int], int, str]:
    model: Any = OVER_RANKS[name].make()
    engine = infuse.init_inference(
        model, dtype="fp32", progress=False, tensor_parallel={"tp_size": tp, "tp_grain_size": 8}, ep_size=ep, **keys
    )
    with torch.no_grad():
        logits = engine(given()).logits
    tokens = engine.generate(given(), max_new_tokens=6, do_sample=False)
    depths = Counter(step.depth for step in engine.plan.steps)
    experts = [
        tensor
        for module in model.modules()
        if type(module).__name__ == "Experts"
        for tensor in (*module.parameters(), *module.buffers())
    ]
    refused = "; ".join(f"{left.path}: {left.why}" for left in engine.plan.left if left.why.startswith("refused"))
    return logits, tokens, dict(depths), sum(tensor.nbytes for tensor in experts), refused


WAYS = {"experts": (2, 1, 2), "width": (2, 2, 1), "within": (2, 2, 2), "three": (3, 1, 3), "both": (4, 2, 2)}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for name in OVER_RANKS for way in ("experts", "both")),
        ("mixtral", "width"),
        ("mixtral", "within"),
        ("mixtral", "three"),
        ("gpt_oss", "width"),
    ],
)
def test_ranks_give_what_one_process_gives(name: str, way: str, ranks: Ranks) -> None:
    size, tp, ep = WAYS[way]
    results = ranks.run(size, on_rank, name, tp, ep, {})
    model: Any = OVER_RANKS[name].make()
    with torch.no_grad():
        exact = model(given()).logits
    wanted = model.generate(given(), max_new_tokens=6, do_sample=False)
    whole = sum(p.nbytes for key, p in model.named_parameters() if ".experts." in key)
    assert not results[0][4], results[0][4]
    assert same([logits for logits, *_ in results])
    assert (results[0][0] - exact).abs().max() / exact.square().mean().sqrt() < TOLERANCE
    for _, tokens, depths, held, _ in results:
        assert torch.equal(tokens, wanted)
        assert depths.get("experts", depths.get("block")) == 3 and 0 < held < whole


def whole(name: str, **keys: Any) -> Tensor:
    engine = infuse.init_inference(OVER_RANKS[name].make(), dtype="fp32", progress=False, **keys)
    with torch.no_grad():
        return engine(given()).logits


@pytest.mark.parametrize(
    ("name", "way", "format"),
    [("mixtral", "experts", "int8:8"), ("gpt_oss", "both", "int4:8"), ("mixtral", "width", "int4:8:asymmetric")],
)
def test_quantized_parts_are_parts_of_the_quantized(name: str, way: str, format: str, ranks: Ranks) -> None:
    """Groups of 8 lie within each rank's part, so codes and scales are those of one process."""
    size, tp, ep = WAYS[way]
    logits, *_, refused = ranks.run(size, on_rank, name, tp, ep, {"quant": format})[0]
    exact = whole(name, quant=format)
    assert not refused and (logits - exact).abs().max() / exact.square().mean().sqrt() < TOLERANCE


def saves(name: str, way: str, folder: str, keys: dict[str, Any]) -> Tensor:
    _, tp, ep = WAYS.get(way, (1, 1, 1))
    return on_rank(name, tp, ep, {"save_mp_checkpoint_path": folder, **keys})[0]


def loads(name: str, way: str, folder: str, more: dict[str, Any]) -> tuple[Tensor, list[str]]:
    """Logits, and the tensors that differ from those of this rank's part of the original, cut and then quantized."""
    _, tp, ep = WAYS.get(way, (1, 1, 1))
    keys = dict(progress=False, tensor_parallel={"tp_size": tp, "tp_grain_size": 8}, ep_size=ep)
    engine = infuse.init_inference(OVER_RANKS[name].make(seed=1), checkpoint=folder, **keys)
    fresh = infuse.init_inference(OVER_RANKS[name].make(), dtype="fp32", verify="off", **keys, **more)
    found, wanted = placed(engine.module), placed(fresh.module)
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    with torch.no_grad():
        return engine(given()).logits, [key for key in found if not torch.equal(found[key], wanted[key])]


# The same ranks as saved, one rank, and ranks that share experts along the same axis.
DEGREES = [
    *(("mixtral", "both", reader, {"quant": "int8:8"}) for reader in ("both", "one")),
    ("mixtral", "one", "both", {}),
    ("mixtral", "one", "width", {"quant": "int4:8:asymmetric"}),
    ("gpt_oss", "both", "both", {"quant": "int4:8"}),
    ("gpt_oss", "both", "one", {"quant": "int4:8"}),
    ("gpt_oss", "width", "width", {}),
    ("gpt_oss", "width", "one", {}),
    ("mixtral", "within", "experts", {}),
    ("mixtral", "experts", "experts", {"quant": "int8:8"}),
    ("mixtral", "experts", "one", {"quant": "int8:8"}),
    ("qwen2_moe", "three", "experts", {}),
    ("mixtral", "three", "one", {"quant": "int4:8:asymmetric"}),
]
ACROSS = [
    *(("mixtral", "both", reader, {"quant": "int8:8"}) for reader in ("experts", "width", "within")),
    ("qwen2_moe", "experts", "both", {}),
    ("gpt_oss", "width", "both", {}),
    ("mixtral", "experts", "width", {"quant": "int8:8"}),
    ("mixtral", "width", "experts", {}),
]
AXES = {"experts": "its outputs", "within": "its outputs", "width": "its inputs", "both": "its inputs and by experts"}


@pytest.mark.parametrize(("name", "writer", "reader", "keys"), DEGREES, ids=str)
def test_shards_are_read_by_other_ranks_than_wrote_them(
    name: str, writer: str, reader: str, keys: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    """Quantized and then cut is, bit for bit, cut and then quantized."""
    sizes = [WAYS.get(way, (1, 1, 1))[0] for way in (writer, reader)]
    saved = (
        ranks.run(sizes[0], saves, name, writer, str(tmp_path), keys)
        if sizes[0] > 1
        else [saves(name, writer, str(tmp_path), keys)]
    )
    assert len(list(tmp_path.glob("*.safetensors"))) == sizes[0]
    if sizes[1] > 1:
        results = ranks.run(sizes[1], loads, name, reader, str(tmp_path), keys)
    else:
        results = [loads(name, reader, str(tmp_path), keys)]
    for found, differing in results:
        assert not differing
        assert (found - saved[0]).abs().max() / saved[0].square().mean().sqrt() < TOLERANCE


@pytest.mark.parametrize(("name", "writer", "reader", "keys"), ACROSS, ids=str)
def test_shards_are_not_read_along_another_axis(
    name: str, writer: str, reader: str, keys: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(WAYS[writer][0], saves, name, writer, str(tmp_path), keys)
    down = f"experts.down.weight: saved by {AXES[writer]}, needed by {AXES[reader]}"
    for error in ranks.run_expecting_errors(WAYS[reader][0], loads, name, reader, str(tmp_path), keys):
        assert isinstance(error, infuse.InfuseError)
        told = str(error)
        assert told.count(down) == 3, told
        assert f"the shards of {WAYS[writer][0]} ranks cannot be read by rank" in told
        assert "shard the model again for so many ranks (`infuse shard" in told and "save_mp_checkpoint_path" in told


def test_slices_with_a_scale_for_each_row_are_not_merged(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(4, saves, "mixtral", "both", str(tmp_path), {"quant": "int8:row"})
    with pytest.raises(infuse.CheckpointError, match="inputs of 2 ranks, each with a scale for its rows, would be mer"):
        infuse.init_inference(OVER_RANKS["mixtral"].make(), checkpoint=str(tmp_path), progress=False)


def test_an_index_of_parts_that_are_no_matrix_is_refused() -> None:
    whole = [Cut(1, (half,), (8,), rows) for rows in ((0, 6), (6, 9)) for half in ((0, 4), (4, 8))]
    bands = bands_of(whole)
    assert bands == (
        Band((0, 6), Tiling(1, 8, (((0, 4),), ((4, 8),), (), ()))),
        Band((6, 9), Tiling(1, 8, ((), (), ((0, 4),), ((4, 8),)))),
    )
    for cuts, told in (
        (whole[:3], "position 4 of 8 is on no rank"),
        (whole[2:], "rows .* do not follow each other"),
        ([*whole[:2], Cut(1, ((0, 8),), (8,), (5, 9))], "do not follow"),
        ([*whole[:3], replace(whole[3], rows=None)], "not cut alike"),
        ([*whole[:3], replace(whole[3], sizes=(9,))], "not cut alike"),
    ):
        with pytest.raises(ValueError, match=told):
            bands_of(cuts)


def dies() -> None:
    """Rank 1's process ends inside of the second layer's experts."""
    model: Any = OVER_RANKS["mixtral"].make()
    engine = infuse.init_inference(model, dtype="fp32", progress=False, moe={"ep_size": 2}, verify="off")
    if dist.get_rank() == 1:
        model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda *_: os._exit(3))
    with torch.no_grad():
        engine(given())


def test_a_rank_that_dies_in_its_experts_is_named(ranks: Ranks) -> None:
    error, _ = ranks.run_expecting_errors(2, dies)
    assert isinstance(error, infuse.RankError)
    assert "model.layers.1.mlp" in str(error) and "the process of rank 1 has ended" in str(error)
