"""torchao's three classes of int4, in files and in live models: values, contradicting parts, and the library's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import infuse
from infuse.ground.errors import CheckpointError
from infuse.native import kernels
from infuse.quant.parse import quant_format
from infuse.weights.checkpoint import Checkpoint
from infuse.weights.in_model import CodesInModel, codes_in
from infuse.weights.lazy import LazyTensor
from infuse.weights.sources import find_files
from tests.support.checkpoints import on_meta
from tests.support.libraries import stand_in
from tests.support.quantized_files import ROOM, llama
from tests.support.quantized_models import logits, with_values

KEYS: dict[str, Any] = dict(progress=False, replace_with_kernel_inject=True)
WEIGHT = torch.randn(88, 256, generator=torch.Generator().manual_seed(2)) * 0.05
AT = "model.layers.0.mlp.up_proj"
Made = tuple[dict[str, Tensor], Tensor]


def codes_of(weight: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes from -8 to 7 in groups, scales and the values of code 0, [out, groups, …]."""
    groups = weight.reshape(len(weight), -1, size)
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    scale = ((high - low) / 15).to(dtype)
    zero = (low + 8 * scale.float()).to(dtype)
    return ((groups - zero.float()) / scale.float()).round().clamp(-8, 7), scale, zero


def plain(weight: Tensor, size: int = 32, dtype: torch.dtype = torch.bfloat16, symmetric: bool = False) -> Made:
    codes, scale, zero = codes_of(weight, size, dtype)
    if symmetric:
        zero = torch.zeros_like(zero)
    values = scale.float() * codes + zero.float()
    both = codes.reshape(len(weight), -1, 2).to(torch.int8)
    parts = {"qdata": both[..., 0] & 15 | both[..., 1] << 4}
    parts |= {"scale": scale[..., 0].t().contiguous(), "zero_point": zero[..., 0].t().contiguous()}
    return parts, values.reshape(weight.shape)


def words(weight: Tensor, size: int = 32, dtype: torch.dtype = torch.bfloat16) -> Made:
    codes, scale, zero = codes_of(weight, size, dtype)
    zeros = (8 - zero.float() / scale.float()).round().clamp(0, 15)
    unsigned = (codes + 8).reshape(len(weight), -1, 8).long()
    data = sum(unsigned[..., place] << 4 * place for place in range(8))
    parts = {"qdata": torch.as_tensor(data).to(torch.int32), "scale": scale[..., 0].t().contiguous()}
    parts["zero_point"] = zeros[..., 0].t().contiguous().to(torch.int8)
    return parts, (scale.float() * (codes + 8 - zeros)).reshape(weight.shape)


def tiles(weight: Tensor, size: int = 32, dtype: torch.dtype = torch.bfloat16) -> Made:
    """Padded to 1024 inputs. A thread has an output, and 8 of every 32 inputs in a word."""
    out, inputs = weight.shape
    codes, scale, zero = codes_of(weight, size, dtype)
    values = (scale.float() * codes + zero.float()).reshape(out, inputs)
    padded = torch.zeros(-(-out // 8) * 8, -(-inputs // 1024) * 1024, dtype=torch.int64)
    padded[:out, :inputs] = (codes + 8).reshape(out, inputs)
    data = torch.zeros(len(padded) // 8, padded.shape[1] // 128, 32, 4, dtype=torch.int64)
    for thread in range(32):
        rows = padded[thread // 4 :: 8].reshape(len(data), -1, 4, 32)  # 4 words of 32 inputs
        for place, more in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
            data[:, :, thread] |= rows[..., 2 * (thread % 4) + more] << 4 * place
    both = torch.zeros(padded.shape[1] // size, len(padded), 2, dtype=dtype)
    both[: inputs // size, :out] = torch.cat((scale, zero), dim=-1).transpose(0, 1)
    return {"qdata": data.to(torch.int32), "scale_and_zero": both}, values


KINDS: dict[str, tuple[str, Any, str]] = {
    "plain": ("Int4Tensor", plain, "int4:32:offset"),
    "plain-f16": ("Int4Tensor", lambda weight: plain(weight, 64, torch.float16), "int4:64:offset:f16"),
    "symmetric": ("Int4Tensor", lambda weight: plain(weight, symmetric=True), "int4:32"),
    "words": ("Int4PlainInt32Tensor", words, "int4:32:asymmetric"),
    "tiles": ("Int4TilePackedTo4dTensor", tiles, "int4:32:offset"),
    "tiles-128": ("Int4TilePackedTo4dTensor", lambda weight: tiles(weight, 128), "int4:128:offset"),
}


def entry(cls: str, shape: tuple[int, ...], size: int, more: dict[str, Any] | None = None) -> str:
    return json.dumps({"_type": cls, "_data": {"block_size": [1, size], "shape": list(shape), **(more or {})}})


def size_of(format: str) -> int:
    return int(format.split(":")[1])


def published(folder: Path, model: Any, kind: str) -> dict[str, Tensor]:
    """Write the model with its linears but the head in this kind; the values that the file stands for."""
    cls, pack, format = KINDS[kind]
    linears = {name for name, one in model.named_modules() if isinstance(one, nn.Linear) and name != "lm_head"}
    tensors, state, told = {}, {}, {}
    for name, tensor in model.state_dict().items():
        path = name.removesuffix(".weight")
        if path not in linears:
            tensors[name] = state[name] = tensor
            continue
        parts, state[name] = pack(tensor)
        tensors |= {f"{path}._weight_{part}": one for part, one in parts.items()}
        told[name] = entry(cls, tuple(tensor.shape), size_of(format))
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors", told)
    return state


def matrix(folder: Path, parts: dict[str, Tensor], text: str) -> LazyTensor:
    tensors = {f"a._weight_{part}": one.contiguous() for part, one in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"a.weight": text})
    return Checkpoint(find_files(str(folder))).pieces["a.weight"].first


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_layout(kind: str, tmp_path: Path) -> None:
    cls, pack, format = KINDS[kind]
    parts, values = pack(WEIGHT)
    read = matrix(tmp_path, parts, entry(cls, WEIGHT.shape, size_of(format)))
    assert read.coded is not None and read.coded.format == str(quant_format(format))
    assert torch.equal(read.read(), values)
    for part in ((slice(3, 50),), (slice(80, 88),), (slice(0, 0),), (slice(33, 34), slice(128, 256))):
        assert torch.equal(read.read(part), values[part]), part
    for name, buffer in read.coded.buffers.items():
        whole = buffer.read()
        assert whole.shape == buffer.shape and whole.dtype == buffer.dtype, name
        half = (slice(7, 41), slice(0, buffer.shape[1] // 2))
        assert torch.equal(buffer.read(half), whole[half]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_zeros_that_float32_cannot_add_to_its_scales(dtype: torch.dtype, tmp_path: Path) -> None:
    parts, values = plain(WEIGHT, dtype=dtype)
    codes, scale, _ = codes_of(WEIGHT, 32, dtype)
    parts["zero_point"][3, 5] = 2.0**-60
    values[5, 96:128] = scale.float()[5, 3] * codes[5, 3] + 2.0**-60
    read = matrix(tmp_path, parts, entry("Int4Tensor", WEIGHT.shape, 32))
    assert read.coded is None and torch.equal(read.read(), values)


def _cut(parts: dict[str, Tensor], name: str, axis: int) -> None:
    parts[name] = parts[name].narrow(axis, 0, parts[name].shape[axis] - 1)


BROKEN: list[tuple[str, Any, dict[str, Any], str]] = [
    ("plain", lambda parts: parts.pop("zero_point"), {}, "a._weight_zero_point is missing"),
    ("plain", lambda parts: parts.pop("qdata"), {}, "a._weight_qdata is missing"),
    ("plain", lambda parts: _cut(parts, "qdata", 0), {}, "a._weight_qdata is int8 (87, 128)"),
    ("plain", lambda parts: _cut(parts, "scale", 1), {}, "a._weight_scale is bfloat16 (8, 87)"),
    (
        "plain",
        lambda parts: None,
        {"shape": [88, 128]},
        "a._weight_qdata is int8 (88, 128), not int8 or uint8 (88, 64)",
    ),
    ("plain", lambda parts: None, {"shape": None}, "has the shape None in its metadata; possible: [out, in]"),
    ("plain", lambda parts: None, {"shape": [2, 88, 256]}, "has the shape [2, 88, 256] in its metadata"),
    ("plain", lambda parts: None, {"block_size": [1, 48]}, "has blocks [1, 48] of [88, 256]"),
    ("plain", lambda parts: None, {"block_size": [2, 32]}, "has blocks [2, 32] of [88, 256]"),
    ("plain", lambda parts: None, {"block_size": []}, "has blocks [] of [88, 256]"),
    ("plain", lambda parts: parts.update(act_pre_scale=torch.ones(256)), {}, "a._weight_act_pre_scale is a part of"),
    (
        "words",
        lambda parts: parts["zero_point"].fill_(16),
        {},
        "a._weight_zero_point holds 16 to 16; possible: 0 to 15",
    ),
    ("words", lambda parts: parts.update(zero_point=parts["scale"].clone()), {}, "a._weight_zero_point is bfloat16"),
    ("tiles", lambda parts: _cut(parts, "qdata", 0), {}, "a._weight_qdata is (10, 8, 32, 4), too few tiles"),
    ("tiles", lambda parts: _cut(parts, "qdata", 3), {}, "a._weight_qdata is int32 (11, 8, 32, 3)"),
    (
        "tiles",
        lambda parts: _cut(parts, "scale_and_zero", 1),
        {},
        "a._weight_scale_and_zero is (32, 87, 2) for 8 groups",
    ),
    ("tiles", lambda parts: None, {"shape": [88, 2048]}, "too few tiles for [88, 2048]"),
]


@pytest.mark.parametrize(("kind", "change", "more", "told"), BROKEN)
def test_broken_parts_are_refused(kind: str, change: Any, more: dict[str, Any], told: str, tmp_path: Path) -> None:
    cls, pack, _ = KINDS[kind]
    parts, _ = pack(WEIGHT)
    change(parts)
    with pytest.raises(CheckpointError) as caught:
        matrix(tmp_path, parts, entry(cls, WEIGHT.shape, 32, more))
    assert told.replace("[88, 2048]", "(88, 2048)") in str(caught.value).replace("[88, 2048]", "(88, 2048)")
    assert str(tmp_path / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize("kind", ["plain", "words", "tiles"])
def test_a_model_from_a_folder(kind: str, tmp_path: Path) -> None:
    exact = with_values(llama(), published(tmp_path, llama(), kind))
    engine = infuse.init_inference(on_meta("llama", **ROOM), checkpoint=str(tmp_path), dtype="fp32", **KEYS)
    torch.testing.assert_close(logits(engine), logits(exact), rtol=1e-5, atol=1e-5)
    assert {each for step in engine.plan.steps for each in step.formats.values()} == {KINDS[kind][2]}
    assert "taken as it is" in str(engine.plan)
    assert "21 matrices of the checkpoint are quantized: torchao" in str(engine.plan)


def held(kind: str) -> tuple[Any, Any]:
    """A model whose linears but the head have such weights, and one with their values."""
    cls, pack, format = KINDS[kind]
    model, exact = llama().eval(), llama().eval()
    for path, linear in model.named_modules():
        if type(linear) is nn.Linear and path != "lm_head":
            parts, values = pack(linear.weight.detach())
            flat = {"__tensor_flatten__": lambda self: (self.parts, None)}
            weight: Any = linear.weight.detach().as_subclass(stand_in(f"torchao.quantization.{cls}", Tensor, **flat))
            linear.weight = nn.Parameter(weight, requires_grad=False)
            told = dict(parts=[*parts], block_size=[1, size_of(format)], **parts)
            for name, value in told.items():
                setattr(linear.weight, name, value)
            exact.get_submodule(path).weight.data.copy_(values)
    return model, exact


@pytest.mark.parametrize("kind", ["plain", "words", "tiles"])
def test_codes_of_a_live_model_are_taken_as_they_are(kind: str) -> None:
    model, exact = held(kind)
    found = codes_in(model)
    assert isinstance(found, CodesInModel)
    assert torch.equal(found.tensors[f"{AT}.weight"].read(), exact.get_submodule(AT).weight)
    engine = infuse.init_inference(model, dtype="fp32", **KEYS)
    torch.testing.assert_close(logits(engine), logits(exact), rtol=1e-5, atol=1e-5)
    assert sum(step.depth == "block" for step in engine.plan.steps) == 3
    assert {each for step in engine.plan.steps for each in step.formats.values()} == {KINDS[kind][2]}
    if not isinstance(kernels(), str):
        assert engine.plan.after_bytes <= 1.15 * engine.plan.before_bytes


def test_scaled_activations_of_a_live_model() -> None:
    model, _ = held("plain")
    weight = model.get_submodule(AT).weight
    weight.act_pre_scale = torch.ones(weight.shape[1])
    weight.parts = [*weight.parts, "act_pre_scale"]
    plan = infuse.plan(model, dtype="fp32")
    assert not plan.steps and f"{AT}._weight_act_pre_scale is a part of {AT}.weight that is not read" in str(plan)


@pytest.mark.parametrize("kind", ["plain", "words", "tiles"])
def test_the_library_saves_these_parts(kind: str, tmp_path: Path) -> None:
    """It makes such tensors on GPUs alone, but its classes and what it writes of them are the same here."""
    library = pytest.importorskip("torchao.quantization")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    cls, pack, format = KINDS[kind]
    parts, values = pack(WEIGHT)
    weight = getattr(library, cls)(**parts, block_size=[1, size_of(format)], shape=WEIGHT.shape)
    tensors, metadata = support.flatten_tensor_state_dict({"a.weight": weight})
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    read = Checkpoint(find_files(str(tmp_path))).pieces["a.weight"].first
    assert read.coded is not None and read.coded.format == format and torch.equal(read.read(), values)
    linear = nn.Linear(256, 88, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    found = codes_in(nn.Sequential(linear))
    assert isinstance(found, CodesInModel) and torch.equal(found.tensors["0.weight"].read(), values)
