"""Sizes and orders of groups: taken from the config, held against the tensors, or refused where they are unclear."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infuse.ground.errors import CheckpointError
from infuse.weights.checkpoint import Checkpoint
from infuse.weights.lazy import LazyTensor
from infuse.weights.sources import find_files
from tests.support.quantized_files import BY_CASE, awq, fp8_blocks, gptq, packed, write

WEIGHT = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)) * 0.05
AT = "a.b"


def opened(folder: Path, leaves: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[LazyTensor, str]:
    """The matrix, and the notes."""
    checkpoint = Checkpoint(find_files(write(folder, {f"{AT}.{leaf}": one for leaf, one in leaves.items()}, config)))
    return checkpoint.pieces[f"{AT}.weight"].first, "".join(checkpoint.notes)


def compressed(case: str, **weights: Any) -> dict[str, Any]:
    """The config of a case, with other values for its weights."""
    config = json.loads(json.dumps(BY_CASE[case].config))
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


def in_groups(size: int, kind: str = "int") -> tuple[dict[str, Tensor], Tensor]:
    """Codes of 8 bits with random scales for groups of `size`, and their values."""
    groups = torch.arange(96) // size
    scale = torch.rand(64, int(groups.max()) + 1, generator=torch.Generator().manual_seed(4)) + 0.5
    if kind == "float":
        codes = WEIGHT.to(torch.float8_e4m3fn)
    else:
        codes = torch.randint(-128, 128, (64, 96), generator=torch.Generator().manual_seed(5)).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale[:, groups]


@pytest.mark.parametrize("strategy", ["group", "tensor_group", None])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_partial_last_groups_of_compressed_tensors(kind: str, strategy: str | None, tmp_path: Path) -> None:
    """96 inputs with two scales are groups of 64 and 32, not of 48."""
    leaves, values = in_groups(64, kind)
    config = compressed("compressed-w8a8", type=kind, strategy=strategy, group_size=64)
    read, notes = opened(tmp_path, leaves, config)
    assert read.coded is not None and read.coded.format.split(":")[1] == "32" and "plain values" not in notes
    assert torch.equal(read.read(), values)
    leaves, values = in_groups(32, kind)
    read, notes = opened(tmp_path / "whole", leaves, {**config, **compressed(
        "compressed-w8a8", type=kind, strategy=strategy, group_size=32)})  # fmt: skip
    assert read.coded is not None and read.coded.format.split(":")[1] == "32"
    assert torch.equal(read.read(), values) and "plain values" not in notes


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_partial_last_groups_of_packed_codes(bits: int, sym: bool, tmp_path: Path) -> None:
    leaves, values = packed(WEIGHT, bits=bits, size=64, sym=sym)
    config = compressed("compressed-w4a16", num_bits=bits, group_size=64, symmetric=sym)
    read, notes = opened(tmp_path, leaves, config)
    assert read.coded is not None and read.coded.format.startswith(f"int{bits}:32") and not notes
    assert torch.equal(read.read(), values)
    assert torch.equal(read.read((slice(3, 9), slice(60, 70))), values[3:9, 60:70])


REFUSED = [
    (dict(strategy="channel", group_size=None), "for a weight (64, 96); possible: (64, 1), one for each 1 x 96"),
    (dict(strategy="tensor", group_size=None), "for a weight (64, 96); possible: (1, 1), one for each 64 x 96"),
    (dict(strategy="group", group_size=64), "for a weight (64, 96); possible: (64, 2), one for each 1 x 64"),
    (dict(strategy="group", group_size=None), "group_size is None for the strategy 'group'; possible: 1 or more"),
    (dict(strategy="group", group_size=-1), "group_size is -1 for the strategy 'group'; possible: 1 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("weights", "told"), REFUSED)
def test_scales_against_the_strategy(weights: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, in_groups(32)[0], compressed("compressed-w8a8", **weights))
    assert told in str(caught.value)


@pytest.mark.parametrize(("strategy", "shape"), [
    ("channel", (64,)), ("channel", (64, 1)), ("tensor", (1,)), ("tensor", ()), ("tensor", (1, 1)),
])  # fmt: skip
def test_shapes_of_whole_scales(strategy: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    leaves, _ = in_groups(96)
    scale = leaves["weight_scale"].flatten()[: torch.Size(shape).numel()]
    config = compressed("compressed-w8a8", strategy=strategy, group_size=None)
    read, _ = opened(tmp_path, {**leaves, "weight_scale": scale.reshape(shape)}, config)
    assert read.coded is not None and read.coded.format == "int8:row:f32:a8"
    assert torch.equal(read.read(), leaves["weight"].float() * scale[:, None])


@pytest.mark.parametrize("axes", [2, 4])
@pytest.mark.parametrize("shape", [(256, 384), (320, 256), (256, 128), (96, 256), (130, 130), (100, 100)])
def test_tiles_of_modelopt(shape: tuple[int, int], axes: int, tmp_path: Path) -> None:
    """It exports [tiles of rows, 1, tiles of inputs, 1]."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.05
    leaves, values = fp8_blocks(weight, leaf="weight_scale")
    if axes == 4:
        leaves["weight_scale"] = leaves["weight_scale"][:, None, :, None]
    config = dict(quant_method="modelopt", quant_algo="FP8_PB_WO")
    read, _ = opened(tmp_path, leaves, config)
    assert torch.equal(read.read(), values)
    assert torch.equal(read.read((slice(90, 100), slice(60, 100))), values[90:100, 60:100])
    if shape[1] % 128 == 0:
        assert read.coded is not None and read.coded.format == ("fp8:f32" if shape[1] == 128 else "fp8:128:f32")


def test_scales_of_modelopt_that_are_no_tiles(tmp_path: Path) -> None:
    leaves, _ = fp8_blocks(torch.randn(256, 256), leaf="weight_scale")
    leaves["weight_scale"] = leaves["weight_scale"][:, None, :, None].expand(2, 1, 2, 2)
    with pytest.raises(CheckpointError, match=r"a.b.weight_scale is \(2, 1, 2, 2\) for a weight \(256, 256\)"):
        opened(tmp_path, leaves, dict(quant_method="modelopt", quant_algo="FP8_PB_WO"))


def of_gptq(**more: Any) -> dict[str, Any]:
    return {**BY_CASE["gptq-4-sym-v1"].config, **more}


@pytest.mark.parametrize("more", [
    dict(dynamic={"+:.*b": {"group_size": 64}}), dict(extra_config={"a.b": {"group_size": 64}}),
    dict(dynamic={"+:.*b": {"group_size": 64}, "+:.*c": {"group_size": 96}, "+:.*d": {"bits": 8}}),
])  # fmt: skip
def test_groups_of_other_modules_sizes(more: dict[str, Any], tmp_path: Path) -> None:
    """96 inputs in two groups are of 64, as an entry says, not of 48."""
    leaves, values = gptq(WEIGHT, size=64)
    read, notes = opened(tmp_path, leaves, of_gptq(**more))
    assert read.coded is not None and read.coded.format == "int4:32:f16" and not notes
    assert torch.equal(read.read(), values)


@pytest.mark.parametrize(("more", "told"), [
    (dict(dynamic={"+:.*b": {"group_size": 16}}), "groups of 32, and no entry for some modules fits"),
    (dict(dynamic={"+:.*b": {"group_size": "64"}}), "groups of 32, and no entry for some modules fits"),
    (dict(dynamic={"-:.*b": {"group_size": 64}}), "has 2 groups for 96 inputs, the config says groups of 32"),
    (dict(dynamic={"b": {"group_size": 64}}, extra_config={"c": {"group_size": 48}}),
     "has 2 groups for 96 inputs, which fits several sizes in the config: 48, 64"),
])  # fmt: skip
def test_unclear_sizes_of_other_modules(more: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, gptq(WEIGHT, size=64)[0], of_gptq(**more))
    assert told in str(caught.value)


@pytest.mark.parametrize(("target", "bits"), [
    ("re:a.*", 8), ("re:.*b", 8), ("a.b", 8), ("re:b", 4), ("re:.*\\.c", 4), ("b", 4), ("x.a.b", 4), (".b", 4),
])  # fmt: skip
def test_targets_of_compressed_tensors(target: str, bits: int, tmp_path: Path) -> None:
    """A pattern has to match from the beginning of a module's name on; a name may lack its first parts."""
    leaves, values = packed(WEIGHT, bits=bits)
    config = compressed("compressed-w4a16")
    of_class = config["config_groups"]["group_0"]
    named = {**of_class, "targets": [target], "weights": {**of_class["weights"], "num_bits": 8}}
    config["config_groups"] = {"group_0": of_class, "group_1": named}
    read, _ = opened(tmp_path, leaves, config)
    assert torch.equal(read.read(), values)


def test_whole_rows_of_awq(tmp_path: Path) -> None:
    leaves, values = awq(WEIGHT, size=96)
    read, _ = opened(tmp_path, leaves, {**BY_CASE["awq"].config, "group_size": -1})
    assert read.coded is not None and read.coded.format == "int4:row:asymmetric:f16"
    assert torch.equal(read.read(), values)


# ---- orders ----


@pytest.mark.parametrize("size", [32, 96])
def test_a_g_idx_of_zeros_without_act_order(size: int, tmp_path: Path) -> None:
    leaves, values = gptq(WEIGHT, size=size)
    leaves["g_idx"].zero_()
    read, notes = opened(tmp_path, leaves, of_gptq(group_size=size))
    assert torch.equal(read.read(), values)
    assert read.coded is not None and read.coded.order is None
    assert ("g_idx is all zeros, so groups are taken in order" in notes) == (size == 32)


def test_an_order_against_the_config(tmp_path: Path) -> None:
    leaves, values = gptq(WEIGHT, order=True)
    read, notes = opened(tmp_path, leaves, of_gptq())
    assert read.coded is not None and read.coded.order is not None and torch.equal(read.read(), values)
    assert "g_idx is in act-order, which is kept, against the config's desc_act" in notes
    assert "g_idx" not in opened(tmp_path / "in order", leaves, of_gptq(desc_act=True))[1]


@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize("indices", [[0] * 96, [0] * 33 + [1] * 31 + [2] * 32, [0, 1] * 48])
def test_a_g_idx_that_is_no_order(indices: list[int], desc_act: bool, tmp_path: Path) -> None:
    leaves, _ = gptq(WEIGHT)
    leaves["g_idx"] = torch.tensor(indices, dtype=torch.int32)
    if not any(indices) and not desc_act:
        return
    with pytest.raises(CheckpointError, match=r"a.b.g_idx does not give each of 3 groups 32 of the 96 inputs"):
        opened(tmp_path, leaves, of_gptq(desc_act=desc_act))


def test_an_order_of_compressed_tensors_that_is_none(tmp_path: Path) -> None:
    leaves, _ = packed(WEIGHT, sym=False, order=True)
    leaves["weight_g_idx"].zero_()
    with pytest.raises(CheckpointError, match=r"a.b.weight_g_idx does not give each group 32 of the 96 inputs"):
        opened(tmp_path, leaves, BY_CASE["compressed-w4a16-order"].config)


@pytest.mark.parametrize(("actorder", "is_needed"), [
    ("group", True), ("dynamic", True), ("GROUP", True), (True, True),
    ("weight", False), ("static", False), (False, False), (None, False),
])  # fmt: skip
def test_orders_that_need_a_g_idx(actorder: Any, is_needed: bool, tmp_path: Path) -> None:
    """Act-order by groups has other names in older files; by weights it changes nothing in a file."""
    leaves, values = packed(WEIGHT)
    config = compressed("compressed-w4a16", actorder=actorder)
    if is_needed:
        with pytest.raises(CheckpointError, match=f"a.b.weight_g_idx is missing, the config says actorder {actorder}"):
            opened(tmp_path, leaves, config)
        leaves["weight_g_idx"] = torch.full((96,), -1, dtype=torch.int32)  # as older files tell that there is none
    assert torch.equal(opened(tmp_path, leaves, config)[0].read(), values)
