"""Values of files and configs that cannot be kept, or cannot be trusted: refused by name, or read as they are meant."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from infuse.ground.errors import CheckpointError, ConfigError
from infuse.quant.parse import quant_format
from infuse.weights.checkpoint import Checkpoint
from infuse.weights.coded.buffers import Tiled
from infuse.weights.coded.patterns import pattern_fault
from infuse.weights.lazy import InMemory, LazyTensor
from infuse.weights.sources import find_files
from tests.support.quantized_files import BY_CASE, Case, auto_round, gptq, packed, write

WEIGHT = torch.randn(256, 128, generator=torch.Generator().manual_seed(2)) * 0.05
AT = "a.b"


def tensors_of(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    leaves, values = case.pack(WEIGHT)
    return {f"{AT}.{leaf}": one.clone() for leaf, one in leaves.items()}, values


def opened(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None) -> Checkpoint:
    return Checkpoint(find_files(write(folder, tensors, config)))


def matrix(checkpoint: Checkpoint) -> LazyTensor:
    return checkpoint.pieces[f"{AT}.weight"].first


def format_of(tensor: LazyTensor) -> str | None:
    return None if tensor.coded is None else tensor.coded.format


# ---- GPTQ ----


@pytest.mark.parametrize("more", [
    dict(dynamic={"-:.*head": {}}),
    dict(dynamic={"+:.*down.*": {"bits": 8}}),
    dict(dynamic={".*down.*": {"sym": False}}),
    dict(extra_config={"lm_head": {"bits": 16}}),
])  # fmt: skip
@pytest.mark.parametrize("bits", [3, 4])
def test_zeros_of_the_other_version_beside_other_modules(more: dict[str, Any], bits: int, tmp_path: Path) -> None:
    leaves, values = gptq(WEIGHT, bits=bits, version=2)
    config = {**BY_CASE["gptq-4-sym-v1"].config, "bits": bits, **more}
    checkpoint = opened(tmp_path, {f"{AT}.{leaf}": one for leaf, one in leaves.items()}, config)
    read = matrix(checkpoint)
    assert torch.equal(read.read(), values)
    assert "asymmetric" not in str(format_of(read))
    assert "zeros are stored as they are, against the config's gptq" in "".join(checkpoint.notes)


ASYMMETRIC = [
    (dict(dynamic={"-:.*head": {}}), False),
    (dict(dynamic={"-:.*head": {"sym": False}}), False),
    (dict(dynamic={"+:.*": {"sym": True, "desc_act": False}}), False),
    (dict(extra_config={"lm_head": {"bits": 16, "data_type": "float"}}), False),
    (dict(dynamic={"+:.*a.b": {"sym": False}}), True),
    (dict(extra_config={"a.b": {"sym": False}}), True),
]  # fmt: skip


@pytest.mark.parametrize(("more", "is_read"), ASYMMETRIC)
def test_modules_vary_where_the_config_says_so(more: dict[str, Any], is_read: bool, tmp_path: Path) -> None:
    leaves, values = gptq(WEIGHT, sym=False)
    config, tensors = {**BY_CASE["gptq-4-sym-v1"].config, **more}, {f"{AT}.{leaf}": one for leaf, one in leaves.items()}
    if is_read:
        assert torch.equal(matrix(opened(tmp_path, tensors, config)).read(), values)
        return
    with pytest.raises(CheckpointError, match="holds other zeros than 7 or 8, the config says sym"):
        opened(tmp_path, tensors, config)


@pytest.mark.parametrize("quantizer", ["gptqmodel:2.2.0", ["gptqmodel:7.7.0"], "auto_gptq:0.7.1", None])
def test_zeros_of_3_bits_depend_on_who_wrote_them(quantizer: Any, tmp_path: Path) -> None:
    """gptqmodel subtracts the three words of ones in the reverse order, so other zeros lose another number."""
    leaves, values = gptq(WEIGHT, bits=3, sym=False, version=2)
    is_of_gptqmodel = "gptqmodel" in str(quantizer)
    ones = [0x49249249, 0x92492492, 0x24924924][:: -1 if is_of_gptqmodel else 1]
    words = torch.tensor(ones, dtype=torch.int64).repeat(leaves["qzeros"].shape[1] // 3)
    leaves["qzeros"] = (leaves["qzeros"].long() - words).to(torch.int32)
    config = dict(BY_CASE["gptq-3-asym-v1"].config, meta={"quantizer": quantizer})
    read = matrix(opened(tmp_path, {f"{AT}.{leaf}": one for leaf, one in leaves.items()}, config))
    assert torch.equal(read.read(), values)


@pytest.mark.parametrize(("packing", "version"), [
    ("auto_round:auto_gptq", 1), ("auto_gptq", 1), ("auto_round:gptqmodel", 2), ("auto_round", 2),
])  # fmt: skip
def test_zeros_of_auto_round(packing: str, version: int, tmp_path: Path) -> None:
    leaves, values = auto_round(WEIGHT, sym=False, version=version)
    config = {**BY_CASE["auto-round"].config, "sym": False, "packing_format": packing}
    read = matrix(opened(tmp_path, {f"{AT}.{leaf}": one for leaf, one in leaves.items()}, config))
    assert torch.equal(read.read(), values)


# ---- numbers that are NaN ----


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("name", ["fp8-blocks", "fbgemm", "compressed-fp8", "compressed-mxfp8", "modelopt-fp8"])
def test_codes_that_are_nan(name: str, byte: int, tmp_path: Path) -> None:
    tensors, values = tensors_of(BY_CASE[name])
    tensors[f"{AT}.weight"].view(torch.uint8)[200, 3] = byte
    read = matrix(opened(tmp_path, tensors, BY_CASE[name].config))
    assert torch.equal(read.read((slice(0, 200),)), values[:200])
    assert read.coded is not None
    for wanted in (read, read.coded.buffers["data"]):
        with pytest.raises(CheckpointError, match=r"model.safetensors: a.b.weight: a number in e4m3 is NaN"):
            wanted.read((slice(128, 256),))


def test_codes_of_experts_that_are_nan(tmp_path: Path) -> None:
    leaves, values = BY_CASE["fp8-blocks"].pack(WEIGHT)
    codes = torch.stack([leaves["weight"]] * 2)
    codes.view(torch.uint8)[1, 0, 0] = 0x7F
    scales = torch.stack([leaves["weight_scale_inv"]] * 2)
    tensors = {"a.experts.up": codes, "a.experts.up_scale_inv": scales}
    read = opened(tmp_path, tensors, BY_CASE["fp8-blocks"].config).pieces["a.experts.up"].first
    assert torch.equal(read.read((slice(0, 1),))[0], values)
    with pytest.raises(CheckpointError, match=r"a.experts.up: a number in e4m3 is NaN"):
        read.read()


@pytest.mark.parametrize("name", ["compressed-nvfp4", "modelopt-nvfp4"])
@pytest.mark.parametrize("inputs", [128, 80])  # of 80, codes become plain values
def test_scales_of_nvfp4_that_are_nan(name: str, inputs: int, tmp_path: Path) -> None:
    leaves, values = BY_CASE[name].pack(WEIGHT[:, :inputs].contiguous())
    leaves["weight_scale"].view(torch.uint8)[7, 2] = 0xFF
    read = matrix(opened(tmp_path, {f"{AT}.{leaf}": one for leaf, one in leaves.items()}, BY_CASE[name].config))
    assert torch.equal(read.read((slice(8, 256),)), values[8:])
    with pytest.raises(CheckpointError, match=r"a.b.weight_scale: a number in e4m3 is NaN"):
        read.read()


# ---- numbers of configs ----


def test_tiles_taller_than_the_matrix(tmp_path: Path) -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    tiled = Tiled(InMemory(rows), 4, 10)
    assert torch.equal(tiled.read(), rows.repeat_interleave(4, dim=0)[:10])
    for first in range(10):
        assert torch.equal(tiled.read((slice(first, 10), slice(1, 2))), tiled.read()[first:, 1:])
    assert torch.equal(Tiled(InMemory(rows[:1]), 1 << 40, 5).read(), rows[:1].expand(5, 2))
    case = BY_CASE["fp8-blocks"]
    tensors, _ = tensors_of(case)
    tensors[f"{AT}.weight_scale_inv"] = torch.full((1, 1), 0.5)
    read = matrix(opened(tmp_path, tensors, {**case.config, "weight_block_size": [1 << 31, 1 << 31]}))
    assert torch.equal(read.read(), tensors[f"{AT}.weight"].float() * 0.5)


HUGE: list[tuple[str, dict[str, Any]]] = [
    ("fp8-blocks", dict(weight_block_size=[2**40, 128])),
    ("fp8-blocks", dict(weight_block_size=[128, 2**80])),
    ("gptq-4-sym-v1", dict(group_size=2**80)),
    ("awq", dict(group_size=2**80)),
    ("compressed-fp8-block", dict(config_groups={"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [2**80, 128]}}})),
]  # fmt: skip


@pytest.mark.parametrize(("name", "more"), HUGE)
def test_huge_sizes(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    """With one group or tile, which any huge size fits."""
    tensors, _ = tensors_of(BY_CASE[name])
    for leaf in ("scales", "qzeros", "weight_scale_inv", "weight_scale"):
        if (scale := tensors.get(f"{AT}.{leaf}")) is not None:
            tensors[f"{AT}.{leaf}"] = scale[:1].clone()
    if f"{AT}.g_idx" in tensors:
        tensors[f"{AT}.g_idx"].zero_()
    with pytest.raises(CheckpointError):
        opened(tmp_path, tensors, {**BY_CASE[name].config, **more})


def test_json_of_bitsandbytes_is_bounded(tmp_path: Path) -> None:
    tensors, _ = tensors_of(BY_CASE["nf4"])
    name = f"{AT}.weight.quant_state.bitsandbytes__nf4"
    spaces = torch.full((1 << 17,), ord(" "), dtype=torch.uint8)
    deep = torch.full((1 << 15,), ord("["), dtype=torch.uint8)
    state = json.loads(bytes(tensors[name].tolist()))
    huge = torch.tensor(list(json.dumps({**state, "blocksize": 2**80}).encode()), dtype=torch.uint8)
    for changed, told in (
        (torch.cat((tensors[name], spaces)), "bytes of JSON; possible: up to 65536"),
        (deep, "is not the JSON of a matrix"),
        (huge, "is not the JSON of a matrix"),
    ):
        with pytest.raises(CheckpointError, match=told):
            opened(tmp_path, {**tensors, name: changed}, BY_CASE["nf4"].config)


# ---- patterns ----

READ = [
    r".*self_attn\.(q|k|v)_proj$", r"model\.layers\.[0-9]+\.mlp\.experts\.\d+\.(?:gate|up|down)_proj", r"(?!.*head).*",
    r"(.*\.)?q_proj", r"a{2,3}(b)+", r"[(*+]+\(\*", r"(?P<layer>[)|+])*", r"[]+)]*", r"(?:ab)*c",
]  # fmt: skip
REFUSED = [
    (r"(a+)+$", "repeats a group that has repeats"),
    (r"(?:(a*))*b", "repeats a group that has repeats"),
    (r"(a|aa)+$", "repeats a group that has repeats or alternatives"),
    (r"(a?){50}$", "repeats a group that has repeats"),
    (r"(?P<n>x{2,}y){3}", "repeats a group that has repeats"),
    (r"(\(+[a-z]?){2,}", "repeats a group that has repeats"),
    (".*a" * 7, "has more than 6 repeats"),
    ("a" * 201, "has 201 characters; possible: up to 200"),
]


@pytest.mark.parametrize("pattern", READ)
def test_patterns_that_are_matched(pattern: str) -> None:
    assert pattern_fault(pattern) is None


@pytest.mark.parametrize(("pattern", "told"), REFUSED)
def test_patterns_that_could_take_forever(pattern: str, told: str, tmp_path: Path) -> None:
    case = BY_CASE["compressed-w4a16"]
    config = json.loads(json.dumps(case.config))
    config["config_groups"]["group_0"]["targets"] = [f"re:{pattern}"]
    leaves, _ = case.pack(WEIGHT)
    tensors = {f"{'a' * 60}.{leaf}": one for leaf, one in leaves.items()}
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, tensors, config)
    assert told in str(caught.value)


@pytest.mark.parametrize("pattern", ["a{99999999999}", "(" * 100 + ")" * 100, "(", r"\\"])
def test_patterns_that_are_none(pattern: str, tmp_path: Path) -> None:
    """They name no module; the only group is for all."""
    case = BY_CASE["compressed-w4a16"]
    config = json.loads(json.dumps(case.config))
    config["config_groups"]["group_0"]["targets"] = [f"re:{pattern}"]
    tensors, values = tensors_of(case)
    assert torch.equal(matrix(opened(tmp_path, tensors, config)).read(), values)


def test_a_pattern_is_matched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compressed = import_module("infuse.weights.coded.compressed")
    case, tried = BY_CASE["compressed-w4a16"], list[str]()
    config = json.loads(json.dumps(case.config))
    group = config["config_groups"]["group_0"]
    config["config_groups"] = {
        "1": {**group, "targets": ["re:no", "re:no"]},
        "2": {**group, "targets": ["re:no", "re:a"]},
    }
    names = compressed._names

    def counted(target: str, path: str) -> bool:
        tried.append(target)
        return names(target, path)

    monkeypatch.setattr(compressed, "_names", counted)
    opened(tmp_path, tensors_of(case)[0], config)
    assert tried == ["re:no", "re:a"]


# ---- zeros and codes of int4 ----


@pytest.mark.parametrize(("zero", "is_read"), [(-8, True), (7, True), (-9, False), (8, False)])
def test_zeros_of_int4_that_do_not_fit(zero: int, is_read: bool, tmp_path: Path) -> None:
    case = BY_CASE["compressed-w4a16-asym"]
    leaves, values = packed(WEIGHT, sym=True)
    zeros = torch.zeros(leaves["weight_scale"].shape, dtype=torch.int8)
    zeros[3, 1] = zero
    tensors = {f"{AT}.{leaf}": one for leaf, one in {**leaves, "weight_zero_point": zeros}.items()}
    if not is_read:
        with pytest.raises(CheckpointError, match=r"a.b.weight_zero_point holds zeros .*-8 to 7"):
            opened(tmp_path, tensors, case.config)
        return
    scale = leaves["weight_scale"].float()
    values[3, 32:64] -= scale[3, 1] * zero
    assert torch.allclose(matrix(opened(tmp_path, tensors, case.config)).read(), values, atol=1e-6)


def unpacked_of_torchao(folder: Path, codes: Tensor, zeros: Tensor) -> LazyTensor:
    """A matrix of 4 bits in bytes, with scales of a half for 32 inputs."""
    scale = torch.full(zeros.shape, 0.5)
    data = {"block_size": [1, 32], "target_dtype": "torch.int4"}
    metadata = {f"{AT}.weight": json.dumps({"_type": "IntxUnpackedToInt8Tensor", "_data": data})}
    tensors = {f"{AT}._weight_qdata": codes, f"{AT}._weight_scale": scale, f"{AT}._weight_zero_point": zeros}
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
    save_file(tensors, folder / "model.safetensors", metadata)
    return matrix(Checkpoint(find_files(str(folder))))


@pytest.mark.parametrize(("kind", "more", "format"), [
    ("Int8Tensor", {}, "int8:row"),
    ("Int8Tensor", {"act_quant_kwargs": {"_type": "QuantizeTensorToInt8Kwargs"}}, "int8:row:a8"),
    ("IntxUnpackedToInt8Tensor", {"target_dtype": "torch.int8"}, "int8:row"),
    ("IntxUnpackedToInt8Tensor", {"target_dtype": "torch.int8", "activation_quantization": "int8_asym_per_token"},
     "int8:row:a8"),
])  # fmt: skip
def test_activations_of_torchao(kind: str, more: dict[str, Any], format: str, tmp_path: Path) -> None:
    data = {"block_size": [1, 128], **more}
    metadata = {f"{AT}.weight": json.dumps({"_type": kind, "_data": data})}
    codes, scale = torch.randint(-128, 128, (64, 128), dtype=torch.int8), torch.rand(64, 1).bfloat16()
    save_file({f"{AT}._weight_qdata": codes, f"{AT}._weight_scale": scale}, tmp_path / "model.safetensors", metadata)
    read = matrix(Checkpoint(find_files(str(tmp_path))))
    assert format_of(read) == str(quant_format(format)) and torch.equal(read.read(), codes.float() * scale.float())


@pytest.mark.parametrize(("zero", "format"), [(7, "int4"), (8, "int8"), (-100, "int8")])
def test_zeros_of_torchao(zero: int, format: str, tmp_path: Path) -> None:
    codes = torch.randint(-8, 8, (64, 128), dtype=torch.int8)
    zeros = torch.full((64, 4), zero, dtype=torch.int8)
    read = unpacked_of_torchao(tmp_path, codes, zeros)
    assert str(format_of(read)).startswith(f"{format}:32:asymmetric")
    assert torch.equal(read.read(), 0.5 * (codes.float() - zero))


def test_codes_of_torchao(tmp_path: Path) -> None:
    codes = torch.randint(-8, 8, (64, 128), dtype=torch.int8)
    codes[5, 5] = 9
    read = unpacked_of_torchao(tmp_path, codes, torch.zeros(64, 4, dtype=torch.int8))
    assert torch.equal(read.read((slice(6, 64),)), 0.5 * codes[6:])
    with pytest.raises(CheckpointError, match=r"a.b._weight_qdata: has codes -8 to 9; possible.*-8 to 7"):
        read.read()


# ---- tensors beside ----


@pytest.mark.parametrize("leaf", ["k_scale", "v_scale", "kv_scale"])
@pytest.mark.parametrize("name", ["fp8-blocks", "fbgemm", "gptq-4-sym-v1", "awq", "modelopt-fp8", "compressed-w4a16"])
def test_scales_of_caches_are_noted(name: str, leaf: str, tmp_path: Path) -> None:
    tensors, _ = tensors_of(BY_CASE[name])
    checkpoint = opened(tmp_path, {**tensors, f"a.{leaf}": torch.ones(1)}, BY_CASE[name].config)
    assert list(checkpoint.pieces) == [f"{AT}.weight"]
    assert f"e.g. a.{leaf}: scales of cached keys and values are not used" in "".join(checkpoint.notes)


@pytest.mark.parametrize("leaf", ["weight_scale", "scale", "weight_scale_2"])
@pytest.mark.parametrize("config", [None, BY_CASE["gptq-4-sym-v1"].config], ids=["no config", "another"])
def test_a_scale_that_no_form_takes(leaf: str, config: Mapping[str, Any] | None, tmp_path: Path) -> None:
    tensors = {f"{AT}.weight": WEIGHT.to(torch.float8_e4m3fn), f"{AT}.{leaf}": torch.ones(1)}
    with pytest.raises(CheckpointError, match=rf"a.b.weight is float8_e4m3fn, and a.b.{leaf} beside it is not read"):
        opened(tmp_path, tensors, config)
    del tensors[f"{AT}.{leaf}"]
    if config is None:  # plain values in this dtype
        assert format_of(matrix(opened(tmp_path / "plain", tensors, None))) is None


def test_a_scale_of_a_norm(tmp_path: Path) -> None:
    """A plain module may call its own parameter so, or have it beside a weight."""
    case = BY_CASE["fp8-blocks"]
    tensors, values = tensors_of(case)
    plain = {"n.scale": torch.ones(4), "m.scale": torch.ones(4), "m.weight": torch.ones(4)}
    checkpoint = opened(tmp_path, {**tensors, **plain}, case.config)
    assert set(checkpoint.pieces) == {f"{AT}.weight", *plain}
    assert torch.equal(matrix(checkpoint).read(), values)


def test_experts_without_their_scale(tmp_path: Path) -> None:
    leaves, _ = BY_CASE["fp8-blocks"].pack(WEIGHT)
    tensors = {"a.experts.up": torch.stack([leaves["weight"]] * 2)}
    with pytest.raises(CheckpointError, match=r"a.experts.up is float8_e4m3fn, and its scale is missing"):
        opened(tmp_path, tensors, BY_CASE["fp8-blocks"].config)


@pytest.mark.parametrize("leaf", ["_weight_act_pre_scale", "_weight_act_quant_scale"])
def test_parts_of_torchao_that_are_not_read(leaf: str, tmp_path: Path) -> None:
    """The inputs of such a linear would have to be scaled."""
    tensors = {f"{AT}._weight_qdata": torch.ones(64, 128, dtype=torch.int8), f"{AT}._weight_scale": torch.ones(64, 1)}
    metadata = {f"{AT}.weight": json.dumps({"_type": "Int8Tensor", "_data": {"block_size": [1, 128]}})}
    write(tmp_path, {}, {"quant_method": "torchao"})
    save_file({**tensors, f"{AT}.{leaf}": torch.ones(1)}, tmp_path / "model.safetensors", metadata)
    with pytest.raises(CheckpointError, match=rf"a.b.{leaf} is a part of a.b.weight that is not read; possible: _wei"):
        Checkpoint(find_files(str(tmp_path)))


# ---- methods ----


def test_a_method_that_is_not_applied(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, {f"{AT}.weight": WEIGHT}, {"quant_method": "bitnet", "linear_class": "autobitlinear"})
    (note,) = checkpoint.notes
    assert note.endswith("names bitnet, which is not applied; the weights are taken as plain values")
    assert torch.equal(matrix(checkpoint).read(), WEIGHT)
    assert not opened(tmp_path / "mxfp4", {f"{AT}.weight": WEIGHT}, {"quant_method": "mxfp4"}).notes


@pytest.mark.parametrize(("name", "method"), [
    ("modelopt-nvfp4", "modelopt_fp4"), ("modelopt-nvfp4", "ModelOpt"), ("auto-round-awq", "intel/auto-round"),
])  # fmt: skip
def test_other_names_of_methods(name: str, method: str, tmp_path: Path) -> None:
    tensors, values = tensors_of(BY_CASE[name])
    checkpoint = opened(tmp_path, tensors, {**BY_CASE[name].config, "quant_method": method})
    assert torch.equal(matrix(checkpoint).read(), values) and not checkpoint.notes
    config = {**BY_CASE[name].config, "quant_method": method}
    told = opened(tmp_path / "plain", {f"{AT}.weight": WEIGHT}, config).notes
    assert told[0].endswith("but no tensor is stored in it")


def without_method(name: str) -> dict[str, Any]:
    return {key: value for key, value in BY_CASE[name].config.items() if key != "quant_method"}


@pytest.mark.parametrize(("name", "key"), [
    ("nf4", "quantization_config"), ("bitsandbytes-int8", "quantization_config"),
    ("compressed-w4a16", "quantization_config"), ("compressed-w4a16", "compression_config"),
])  # fmt: skip
def test_old_configs_without_a_method(name: str, key: str, tmp_path: Path) -> None:
    """What they hold tells it."""
    tensors, values = tensors_of(BY_CASE[name])
    write(tmp_path, tensors, None)
    (tmp_path / "config.json").write_text(json.dumps({key: without_method(name)}))
    checkpoint = Checkpoint(find_files(str(tmp_path)))
    assert torch.equal(matrix(checkpoint).read(), values) and not checkpoint.notes


def test_all_methods_that_are_read_are_possible(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, {f"{AT}.qweight": torch.ones(4, 4, dtype=torch.int32)}, {"quant_method": "aqlm"})
    assert checkpoint.hint is not None and "'aqlm'" in checkpoint.hint
    for method in ("gptq", "auto-round", "fbgemm-fp8", "modelopt-fp4", "torchao", "mxfp4"):
        assert f" {method}" in checkpoint.hint


# ---- int8 of bitsandbytes ----


def test_values_of_int8_that_no_format_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(format: str) -> None:
        raise ConfigError(f"{format} is refused")

    monkeypatch.setattr(import_module("infuse.weights.coded.form"), "quant_format", refuse)
    tensors, values = tensors_of(BY_CASE["bitsandbytes-int8"])
    checkpoint = opened(tmp_path, tensors, BY_CASE["bitsandbytes-int8"].config)
    assert format_of(matrix(checkpoint)) is None and "is refused" in "".join(checkpoint.notes)
    assert torch.equal(matrix(checkpoint).read(), values)
