"""Broken quantized files: each is a CheckpointError that names the tensor, or loads with the whole file's values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from infuse.ground.errors import CheckpointError
from infuse.weights.checkpoint import Checkpoint
from infuse.weights.lazy import LazyTensor
from infuse.weights.model_tensors import model_tensors
from infuse.weights.sources import find_files
from tests.support.checkpoints import on_meta
from tests.support.quantized_files import BY_CASE, CASES, ROOM, Case, llama, publish, write

ONE = dict(ROOM, num_hidden_layers=1)
AT = "model.layers.0.mlp.up_proj"
AMBIGUOUS = ("no ('checkpoint_format',)", "('checkpoint_format',) = None")  # version 1, or so it seems
# Primes, so that a part has all tensors and keys, and all ways of breaking them.
TENSOR_PARTS, CONFIG_PARTS = 5, 7
METHODS = ("gptq", "awq", "auto-round", "compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "bitsandbytes", "aqlm")


@cache
def empty() -> nn.Module:
    """A model on meta, which all broken files are read for: only its names and shapes are looked at."""
    return on_meta("llama", **ONE)


def taken(folder: Path) -> LazyTensor:
    """The tensor of the matrix that is broken."""
    return model_tensors(empty(), Checkpoint(find_files(str(folder)))).tensors[f"{AT}.weight"]


def broken(tensors: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each tensor of the matrix dropped, cut along each axis, with an axis more, of other dtypes and bytes."""
    for name in (name for name in tensors if name.startswith(f"{AT}.")):
        one = tensors[name]
        yield f"no {name}", {key: value for key, value in tensors.items() if key != name}
        changed = {f"cut along {axis}": one.narrow(axis, 0, one.shape[axis] - 1) for axis in range(one.dim())}
        changed |= {f"empty along {axis}": one.narrow(axis, 0, 0) for axis in range(one.dim())}
        changed["with an axis more"] = one.unsqueeze(0).repeat(2, *(1,) * one.dim())
        for dtype in (torch.int64, torch.bool, torch.float64):
            changed[f"of {dtype}"] = one.to(torch.float32).nan_to_num(0).to(dtype) if one.dtype != dtype else one.int()
        if name.rpartition(".")[2] in ("g_idx", "weight_shape", "weight_format") or "quant_state" in name:
            changed["of other numbers"] = torch.full_like(one, 7)
            changed["negative"] = torch.zeros_like(one) - 1
        for what, value in changed.items():
            yield f"{name} {what}", {**tensors, name: value.contiguous()}


def configs(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each key dropped, of other types and values, at any depth; other methods; no config, and nonsense."""
    yield "none", None
    for nonsense in ("text", 3, [], {}):
        yield f"{nonsense!r}", nonsense
    for method in METHODS:
        yield f"of {method}", {**config, "quant_method": method}
    for path, value in _paths(config):
        yield f"no {path}", _with(config, path, lambda holder, key: holder.pop(key))
        others = [None, "text", -1, 0, 2, 8, 64, True, [], {"a": 1}, 1.5]
        others += [not value] if isinstance(value, bool) else []
        for other in others:
            if other != value:
                yield f"{path} = {other!r}", _with(config, path, lambda holder, key, it=other: holder.update({key: it}))


def _paths(config: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in config.items():
        yield (*at, key), value
        if isinstance(value, dict):
            yield from _paths(value, (*at, key))


def _with(config: Any, path: tuple[str, ...], change: Callable[[Any, str], Any]) -> Any:
    copied = json.loads(json.dumps(config))
    holder = copied
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return copied


def judged(folder: Path, exact: Tensor, what: str) -> str | None:
    """The text of the CheckpointError; None if the values are the whole file's. Anything else fails the test."""
    try:
        values = taken(folder).read()
    except CheckpointError as error:
        return str(error)
    assert torch.equal(values.float(), exact), f"{what}: other values"
    return None


def in_parts(count: int) -> list[Any]:
    """Parts of the broken files of a case: 0 always runs, the others, which together take minutes, with --variants."""
    return [pytest.param(part, marks=[pytest.mark.variants] if part else []) for part in range(count)]


@pytest.mark.parametrize("part", in_parts(TENSOR_PARTS))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_broken_tensors_are_refused(case: Case, part: int, tmp_path: Path) -> None:
    exact = publish(tmp_path, case, llama(**ONE))[f"{AT}.weight"]
    whole = load_file(tmp_path / "model.safetensors")
    loads = []
    for what, tensors in islice(broken(whole), part, None, TENSOR_PARTS):
        save_file(tensors, tmp_path / "model.safetensors")
        told = judged(tmp_path, exact, what)
        if told is None:
            loads.append(what)
        else:
            assert AT in told, (what, told)
    harmless = (
        "g_idx",
        "weight_format",
        "weight_shape of torch.int64",
        f"no {AT}.input_scale",
        f"no {AT}.output_scale",
    )
    assert all(any(one in what for one in harmless) for what in loads), loads


@pytest.mark.parametrize("part", in_parts(CONFIG_PARTS))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contradicting_configs_are_refused_or_harmless(case: Case, part: int, tmp_path: Path) -> None:
    exact = publish(tmp_path, case, llama(**ONE))[f"{AT}.weight"]
    for what, config in islice(configs(dict(case.config)), part, None, CONFIG_PARTS):
        if "asym" in case.name and what in AMBIGUOUS:
            continue
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        judged(tmp_path, exact, what)


@pytest.mark.parametrize("name", ["gptq-4-sym-v1", "awq", "compressed-w4a16"])
def test_a_plain_weight_beside_its_codes_is_refused(name: str, tmp_path: Path) -> None:
    """Which of the two is meant, the file does not say."""
    case = BY_CASE[name]
    publish(tmp_path, case, llama(**ONE))
    tensors = load_file(tmp_path / "model.safetensors")
    write(tmp_path, {**tensors, f"{AT}.weight": torch.zeros(2, 2)}, case.config)
    with pytest.raises(CheckpointError, match=f"stored both as plain values and in codes: {AT}.weight"):
        taken(tmp_path)


def test_all_faults_are_in_one_error(tmp_path: Path) -> None:
    case = BY_CASE["gptq-4-asym-v1"]
    publish(tmp_path, case, llama(**ONE))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{AT}.scales"]
    tensors["model.layers.0.mlp.gate_proj.qzeros"] = torch.zeros(2, 2, dtype=torch.int32)
    tensors["model.layers.0.self_attn.q_proj.g_idx"] = torch.full((128,), 9, dtype=torch.int32)
    tensors["model.layers.0.self_attn.k_proj.qweight"] = torch.zeros(16, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="4 faults") as caught:
        taken(tmp_path)
    file = tmp_path / "model.safetensors"
    for told in (
        f"GPTQ: {file}: {AT}.scales is missing",
        f"{file}: model.layers.0.mlp.gate_proj.qweight is (16, 256), scales (4, 256) and qzeros (2, 2) do not fit",
        f"{file}: model.layers.0.self_attn.q_proj.g_idx names the groups 9 to 9 of 4",
        f"{file}: model.layers.0.self_attn.k_proj.qweight is float32 (16, 64), not int32 (any, any)",
    ):
        assert told in str(caught.value), (told, str(caught.value))


def _changed(case: str, **more: Any) -> dict[str, Any]:
    return {**BY_CASE[case].config, **more}


REFUSED = [
    ("gptq-4-sym-v1", _changed("gptq-4-sym-v1", is_marlin_format=True), "the layout 'marlin' is not read"),
    ("gptq-4-sym-v1", _changed("gptq-4-sym-v1", checkpoint_format="bitblas"), "the layout 'bitblas' is not read"),
    ("gptq-4-sym-v1", _changed("gptq-4-sym-v1", bits=8), "has 4 bits, the config says 8"),
    ("gptq-4-asym-v1", _changed("gptq-4-asym-v1", sym=True), "holds other zeros than 7 or 8, the config says sym"),
    ("gptq-4-asym-v1", _changed("gptq-4-asym-v1", group_size=64), "has 4 groups for 128 inputs, the config says"),
    ("awq", _changed("awq", version="marlin"), "the layout 'marlin' is not read; possible: gemm, gemv, gemv_fast"),
    ("awq", _changed("awq", bits=8), "AWQ of 8 bits is not read; possible: 4"),
    ("awq", dict(quant_method="aqlm"), "the method 'aqlm' of model.layers.0.mlp.down_proj.qweight is not read"),
    ("compressed-w4a16", _changed("compressed-w4a16", format="marlin-24"), "has the format 'marlin-24'"),
    ("compressed-w4a16", _changed("compressed-w4a16", sparsity_config={"format": "sparse-24-bitmask"}),
     "sparsity_config with the format 'sparse-24-bitmask'"),
    ("compressed-w4a16", _changed("compressed-w4a16", transform_config={"config_groups": {"R1": {}}}),
     "transform_config, whose rotations"),
    ("compressed-w4a16", _changed("compressed-w4a16", quantization_status="frozen"), "status 'frozen'"),
    ("compressed-w4a16", _changed("compressed-w4a16", ignore=[AT]), "but the config lists this module in `ignore`"),
    ("modelopt-nvfp4", _changed("modelopt-nvfp4", quant_algo="W4A16_AWQ"), "quant_algo 'W4A16_AWQ' is not read"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "config", "told"), REFUSED)
def test_variants_are_refused_by_name(case: str, config: dict[str, Any], told: str, tmp_path: Path) -> None:
    publish(tmp_path, BY_CASE[case], llama(**ONE))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(CheckpointError) as caught:
        taken(tmp_path)
    assert told in str(caught.value)


def test_scaled_activations_are_refused(tmp_path: Path) -> None:
    case = BY_CASE["awq"]
    publish(tmp_path, case, llama(**ONE))
    tensors = load_file(tmp_path / "model.safetensors") | {"model.layers.0.mlp.act.scales": torch.ones(256)}
    write(tmp_path, tensors, case.config)
    with pytest.raises(CheckpointError, match="act.scales divides activations before the next linear"):
        taken(tmp_path)


def test_zeros_of_the_other_version_are_known_if_symmetric(tmp_path: Path) -> None:
    """Some published files hold version 2's zeros and say version 1."""
    for stored, said in (("gptq-4-sym-v1", "gptq_v2"), ("gptq-3-sym-v1", "gptq_v2")):
        exact = publish(tmp_path, BY_CASE[stored], llama(**ONE))[f"{AT}.weight"]
        (tmp_path / "config.json").write_text(
            json.dumps({"quantization_config": _changed(stored, checkpoint_format=said)})
        )
        assert torch.equal(taken(tmp_path).read(), exact)
        assert "zeros are stored less one, against the config's gptq_v2" in "".join(
            Checkpoint(find_files(str(tmp_path))).notes
        )


def test_an_exponent_that_is_no_number(tmp_path: Path) -> None:
    case = BY_CASE["compressed-mxfp4"]
    publish(tmp_path, case, llama(**ONE))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{AT}.weight_scale"][3, 1] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="up_proj.weight_scale: an exponent is 255"):
        taken(tmp_path).read()


ENTRY = {"_type": "Int8Tensor", "_data": {"block_size": [1, 128]}}
TORCHAO = [
    ({"_type": "MXTensor", "_data": {}}, "is part of a MXTensor of torchao, which is not read"),
    ({"_type": "Int8Tensor", "_data": {"block_size": [1, 64]}}, "is (256, 1) for (256, 128) in blocks of [1, 64]"),
    ({"_type": "Int8Tensor", "_data": {"block_size": [1, 0]}}, "has blocks [1, 0]"),
    ({"_type": "Int8Tensor", "_data": {}}, "has metadata that cannot be read"),
    ({"_data": {}}, "has metadata that cannot be read"),
    ({"_type": "Float8Tensor", "_data": {"block_size": [1, 128]}}, "is int8 (256, 128), not float8_e4m3fn"),
    ("text", "has metadata that cannot be read"),
    (ENTRY, None),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "told"), TORCHAO)
def test_metadata_of_torchao(entry: Any, told: str | None, tmp_path: Path) -> None:
    state = llama(**ONE).state_dict()
    weight = state.pop(f"{AT}.weight")
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    tensors = {**state, f"{AT}._weight_qdata": codes, f"{AT}._weight_scale": scale}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
    save_file(tensors, tmp_path / "model.safetensors", {f"{AT}.weight": json.dumps(entry)})
    if told is None:
        assert torch.equal(taken(tmp_path).read(), codes * scale)
        save_file(tensors, tmp_path / "model.safetensors")
        told = "has no entry in the file's metadata"
    with pytest.raises(CheckpointError) as caught:
        taken(tmp_path)
    assert told in str(caught.value)
