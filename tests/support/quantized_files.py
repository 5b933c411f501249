"""Files of quantized forms, by their published layouts: packers that know nothing of our readers, and a table of cases.

Each packer takes a matrix and returns the tensors that the file has for it, by the ends of their names, and the values
that its library gives it, in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.families import BY_NAME

Packed = tuple[dict[str, Tensor], Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
ROOM: dict[str, Any] = dict(hidden_size=128, intermediate_size=256)  # of Llama: whole blocks of all forms


def dense_words(codes: Tensor, bits: int) -> Tensor:
    """int32 words [n, ⌈m * bits / 32⌉] of unsigned codes [n, m], bit by bit."""
    rows = []
    for row in codes.tolist():
        bit_string = sum(code << bits * place for place, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append(list(numpy.frombuffer(bit_string.to_bytes(4 * count, "little"), "<i4")))
    return torch.tensor(numpy.array(rows).reshape(len(rows), -1), dtype=torch.int32)


def random(shape: tuple[int, ...], low: int, high: int, seed: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def scales_of(weight: Tensor, groups: Tensor, steps: float) -> Tensor:
    """Scales [out, groups] for which the largest weight of a group is `steps`."""
    count = int(groups.max()) + 1
    largest = torch.stack([weight[:, groups == group].abs().amax(dim=1) for group in range(count)], dim=1)
    return largest / steps


def gptq(
    weight: Tensor,
    *,
    bits: int = 4,
    size: int = 32,
    sym: bool = True,
    version: int = 1,
    order: bool = False,
    seed: int = 3,
    **_: Any,
) -> Packed:
    """GPTQ; with `order` the groups have inputs anywhere; zeros are random in 0 to 2**bits - 1 if not `sym`."""
    out, inputs = weight.shape
    groups = torch.arange(inputs) // (size if size > 0 else inputs)
    if order:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    scales = scales_of(weight, groups, 2 ** (bits - 1)).half()
    middle = 2 ** (bits - 1)
    zeros = torch.full(scales.shape, middle) if sym else random(scales.shape, 0, 2**bits, 5)
    codes = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, 2**bits - 1).long()
    values = scales.float()[:, groups] * (codes - zeros[:, groups]).float()
    words = dense_words(zeros.t(), bits)
    if version == 1:  # one is taken from each code of the words, with borrows
        total = sum(1 << bits * place for place in range(32))
        ones = [total >> 32 * number & 0xFFFFFFFF for number in range(bits)]
        take = numpy.array([ones[number % bits] for number in range(words.shape[1])], dtype=numpy.uint32)
        words = torch.from_numpy((words.numpy().view(numpy.uint32) - take).view(numpy.int32).copy())
    tensors = {
        "qweight": dense_words(codes.t().t(), bits).t().contiguous(),
        "qzeros": words,
        "scales": scales.t().contiguous(),
        "g_idx": groups.int(),
    }
    return tensors, values


def auto_round(weight: Tensor, **options: Any) -> Packed:
    """GPTQ's packing without g_idx."""
    tensors, values = gptq(weight, **options)
    return {leaf: tensor for leaf, tensor in tensors.items() if leaf != "g_idx"}, values


def awq(weight: Tensor, *, size: int = 32) -> Packed:
    out, inputs = weight.shape
    groups = torch.arange(inputs) // size
    scales = scales_of(weight, groups, 8).half()
    zeros = random(scales.shape, 0, 16, 6)
    codes = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, 15).long()

    def words(rows: Tensor) -> Tensor:  # [n, out] → [n, out / 8]
        ordered = rows.reshape(len(rows), -1, 8)[:, :, AWQ_ORDER].reshape(rows.shape)
        return dense_words(ordered, 4)

    tensors = {"qweight": words(codes.t()), "qzeros": words(zeros.t()), "scales": scales.t().contiguous()}
    return tensors, scales.float()[:, groups] * (codes - zeros[:, groups]).float()


def awq_by_rows(weight: Tensor, *, fast: bool = False, size: int = 32) -> Packed:
    """AWQ's gemv, with inputs in words; or gemv_fast, in which 16 bits hold a place of four outputs."""
    out, inputs = weight.shape
    groups = torch.arange(inputs) // size
    scales = scales_of(weight, groups, 8).half()
    zeros = random(scales.shape, 0, 16, 6)
    codes = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, 15).long()
    padding = (0, 32 - scales.shape[1])  # of groups
    padded, padded_zeros = (torch.nn.functional.pad(one, padding) for one in (scales, zeros))
    if not fast:
        tensors = {"qweight": dense_words(codes, 4), "qzeros": dense_words(padded_zeros, 4), "scales": padded}
        return tensors, scales.float()[:, groups] * (codes - zeros[:, groups]).float()
    order = [8 * eights + 2 * pair + odd for pair in range(4) for odd in range(2) for eights in range(4)]
    ordered = codes.reshape(out, -1, 32)[:, :, order].reshape(out // 4, 4, -1, 64)
    stream = ordered.transpose(1, 2).reshape(out // 4, inputs, 4)  # of each 64 inputs, output after output
    words = sum(stream[..., place] << 4 * place for place in range(4))
    offsets = -(padded * padded_zeros.half())
    tensors = {"qweight": torch.as_tensor(words).to(torch.int16), "scales": padded.t(), "qzeros": offsets.t()}
    return tensors, scales.float()[:, groups] * codes.float() + offsets.float()[:, groups]


def to_fp8(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes and their values, for scales of the weight's shape."""
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, codes.float() * scale


def fp8_blocks(weight: Tensor, *, leaf: str = "weight_scale_inv", dtype: torch.dtype = torch.float32) -> Packed:
    """Tiles of 128 x 128; those at the ends may be partial."""
    out, inputs = weight.shape
    scale = torch.rand(-(-out // 128), -(-inputs // 128), generator=torch.Generator().manual_seed(1)) * 0.01 + 0.005
    if dtype is torch.float8_e8m0fnu:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    scale = scale.to(dtype)
    whole = scale.float().repeat_interleave(128, 0)[:out].repeat_interleave(128, 1)[:, :inputs]
    codes, values = to_fp8(weight, whole)
    return {"weight": codes, leaf: scale}, values


def fp8_scaled(
    weight: Tensor, *, leaf: str = "weight_scale", per: str = "row", dtype: torch.dtype = torch.float32
) -> Packed:
    """One scale for each row, [out, 1], or for the tensor, [1] or []."""
    largest = weight.abs().amax(dim=1, keepdim=True) if per == "row" else weight.abs().amax().reshape(1)
    scale = (largest / 448).to(dtype)
    codes, values = to_fp8(weight, scale.float().expand(weight.shape))
    return {"weight": codes, leaf: scale.reshape(()) if per == "number" else scale}, values


def packed(
    weight: Tensor,
    *,
    bits: int = 4,
    size: int | None = 32,
    sym: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    order: bool = False,
) -> Packed:
    """pack-quantized of compressed-tensors; with `order` the groups have inputs anywhere."""
    out, inputs = weight.shape
    groups = torch.arange(inputs) // (size or inputs)
    if order:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(11))]
    scale = scales_of(weight, groups, 2 ** (bits - 1)).to(dtype)
    middle = 2 ** (bits - 1)
    zero = torch.zeros(scale.shape, dtype=torch.long) if sym else random(scale.shape, -middle, middle, 8)
    codes = (weight / scale.float()[:, groups] + zero[:, groups]).round().clamp(-middle, middle - 1).long()
    tensors = {
        "weight_packed": dense_words(codes + middle, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([out, inputs]),
    }
    if order:
        tensors["weight_g_idx"] = groups.int()
    if not sym:
        tensors["weight_zero_point"] = dense_words((zero + middle).t(), bits).t().contiguous()
    return tensors, scale.float()[:, groups] * (codes - zero[:, groups]).float()


def int8_rows(weight: Tensor, *, sym: bool = True, dtype: torch.dtype = torch.bfloat16) -> Packed:
    """int-quantized of compressed-tensors."""
    scale = (weight.abs().amax(dim=1, keepdim=True) / 127).to(dtype)
    zero = torch.zeros(scale.shape, dtype=torch.int8) if sym else random(tuple(scale.shape), -20, 20, 9).to(torch.int8)
    codes = (weight / scale.float() + zero).round().clamp(-128, 127).to(torch.int8)
    tensors = {"weight": codes, "weight_scale": scale} | ({} if sym else {"weight_zero_point": zero})
    return tensors, scale.float() * (codes.float() - zero.float())


def e2m1_bytes(steps: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes, two in a byte, low nibble first, and their values."""
    codes = (steps.unsqueeze(-1) - E2M1).abs().argmin(dim=-1)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), E2M1[codes]


def nvfp4(weight: Tensor, *, inverse: bool = False) -> Packed:
    """ModelOpt's, or with `inverse` that of compressed-tensors. The number of the tensor is a power of two: exact."""
    factor = 2.0**-9
    largest = weight.reshape(len(weight), -1, 16).abs().amax(dim=-1) / 6
    scale = (largest / factor).to(torch.float8_e4m3fn)
    whole = (scale.float() * factor).repeat_interleave(16, 1)
    data, steps = e2m1_bytes(torch.where(whole > 0, weight / whole, 0))
    if inverse:
        of_all = torch.tensor([1 / factor])
        return {"weight_packed": data, "weight_scale": scale, "weight_global_scale": of_all}, whole * steps
    return {"weight": data, "weight_scale": scale, "weight_scale_2": torch.tensor(factor)}, whole * steps


def mxfp4(weight: Tensor) -> Packed:
    exponents = (torch.log2(weight.reshape(len(weight), -1, 32).abs().amax(dim=-1)).floor() - 2 + 127).to(torch.uint8)
    whole = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    data, steps = e2m1_bytes(weight / whole)
    return {"weight_packed": data, "weight_scale": exponents}, whole * steps


def mxfp8(weight: Tensor) -> Packed:
    exponents = (torch.log2(weight.reshape(len(weight), -1, 32).abs().amax(dim=-1)).floor() - 8 + 127).to(torch.uint8)
    codes, values = to_fp8(weight, torch.exp2(exponents.float() - 127).repeat_interleave(32, 1))
    return {"weight": codes, "weight_scale": exponents}, values


NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12


def bitsandbytes(weight: Tensor, *, kind: str = "nf4", block: int = 64, doubly: bool = False) -> Packed:
    """4 bits: blocks of the flat matrix, the first of two codes in the high nibble."""
    table = NF4 if kind == "nf4" else FP4
    flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % block)).reshape(-1, block)
    largest = flat.abs().amax(dim=1)
    state = dict(quant_type=kind, blocksize=block, dtype="float32", shape=list(weight.shape))
    made: dict[str, Tensor] = {"weight.quant_map": table.clone(), "weight.absmax": largest}
    if doubly:
        offset, codes_map = float(largest.mean()), torch.linspace(-1, 1, 256)
        centred = torch.nn.functional.pad(largest - offset, (0, -len(largest) % 256)).reshape(-1, 256)
        of_blocks = centred.abs().amax(dim=1)
        codes = (centred / of_blocks[:, None]).unsqueeze(-1).sub(codes_map).abs().argmin(dim=-1).flatten()
        codes = codes[: len(largest)]
        largest = codes_map[codes] * of_blocks[torch.arange(len(largest)) // 256] + torch.tensor(offset)
        made |= {"weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": of_blocks}
        made |= {"weight.nested_quant_map": codes_map}
        state |= dict(nested_blocksize=256, nested_dtype="float32", nested_offset=offset)
    codes = (flat / largest[:, None]).unsqueeze(-1).sub(table).abs().argmin(dim=-1).flatten()[: weight.numel()]
    values = (table[codes] * largest.repeat_interleave(block)[: weight.numel()]).reshape(weight.shape)
    made["weight"] = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1)
    made[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return made, values


def bitsandbytes_int8(weight: Tensor) -> Packed:
    """Largest magnitudes of powers of two times 127, so that no order of multiplying rounds."""
    largest = torch.exp2(torch.log2(weight.abs().amax(dim=1)).ceil()) * 127 / 128
    codes = (weight / largest[:, None] * 127).round().clamp(-127, 127).to(torch.int8)
    made = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return made, codes.float() * (largest[:, None] / 127)


_WITHOUT_ACTIVATIONS = {"input_scale": torch.ones(()), "output_scale": torch.ones(())}


def quanto(weight: Tensor, *, codes: torch.dtype = torch.int8, dtype: torch.dtype = torch.float32) -> Packed:
    """8 bits, a scale for each row."""
    most = 127 if codes == torch.int8 else torch.finfo(codes).max
    scale = (weight.abs().amax(dim=1, keepdim=True) / most).to(dtype)
    steps = (weight / scale.float()).clamp(-most, most)
    data = (steps if codes.is_floating_point else steps.round()).to(codes)
    return {"weight._data": data, "weight._scale": scale, **_WITHOUT_ACTIVATIONS}, data.float() * scale.float()


def quanto_groups(
    weight: Tensor, *, bits: int = 4, size: int = 32, dtype: torch.dtype = torch.bfloat16, zeros: bool = False
) -> Packed:
    """4 or 2 bits in groups, with a shift for each: a real number, or an integer of codes (`zeros`)."""
    groups = weight.reshape(-1, size)
    low, high = torch.aminmax(groups, dim=1, keepdim=True)
    scale, shift = ((high - low) / (2**bits - 1)).to(dtype), (-low).to(dtype)
    if zeros:
        shift = (shift.float() / scale.float()).round().clamp(0, 2**bits - 1).to(torch.uint8)
        codes = (groups / scale.float()).round() + shift
    else:
        codes = (groups + shift.float()) / scale.float()
    codes = codes.round().clamp(0, 2**bits - 1)
    if zeros:
        values = scale.float() * (codes - shift.float())
    else:
        values = scale.float() * codes - shift.float()
    rows = -(-len(codes) * bits // 8)  # of bytes: those of the first groups have the lowest bits
    padded = torch.nn.functional.pad(codes, (0, 0, 0, rows * 8 // bits - len(codes))).to(torch.uint8)
    data = torch.zeros(rows, size, dtype=torch.uint8)
    for place, part in enumerate(padded.split(rows)):
        data |= part << bits * place
    made = {"weight._data._data": data, "weight._scale": scale, "weight._shift": shift, **_WITHOUT_ACTIVATIONS}
    return made, values.reshape(weight.shape)


@dataclass(frozen=True)
class Case:
    """A form: its packer, the config's quantization, and the format of a matrix of 128 or more inputs."""

    name: str
    pack: Callable[[Tensor], Packed]
    config: Mapping[str, Any]
    format: str


def _gptq(bits: int, sym: bool, format: str, size: int = 32, **more: Any) -> Case:
    version = more.pop("version", 1)
    name = f"gptq-{bits}-{'sym' if sym else 'asym'}-v{version}{'-' + more['named'] if 'named' in more else ''}"
    config = dict(quant_method="gptq", bits=bits, group_size=size, sym=sym, desc_act=more.get("order", False))
    config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    pack = partial(gptq, bits=bits, sym=sym, size=size, version=version, order=more.get("order", False))
    return Case(name, pack, config, format)


def _compressed(
    name: str, pack: Callable[[Tensor], Packed], weights: dict[str, Any], format: str, stored: str, **more: Any
) -> Case:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, **more}
    config = dict(quant_method="compressed-tensors", format=stored, config_groups={"group_0": group})
    config |= dict(ignore=["lm_head"], quantization_status="compressed")
    return Case(f"compressed-{name}", pack, config, format)


def _int(bits: int, strategy: str = "group", sym: bool = True, size: int | None = 32) -> dict[str, Any]:
    return dict(num_bits=bits, type="int", strategy=strategy, symmetric=sym, group_size=size, dynamic=False)


def _float(bits: int = 8, strategy: str = "channel", **more: Any) -> dict[str, Any]:
    return dict(num_bits=bits, type="float", strategy=strategy, symmetric=True, dynamic=False, **more)


_DYNAMIC = dict(num_bits=8, type="int", strategy="token", symmetric=True, dynamic=True)
_FP8 = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128])
_BNB = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
_QUANTO = dict(quant_method="quanto")
_AUTO = dict(quant_method="auto-round", bits=4, group_size=32, sym=True)

CASES = [
    _gptq(4, True, "int4:32:f16"),
    _gptq(4, False, "int4:32:asymmetric:f16"),
    _gptq(4, False, "int4:32:asymmetric:f16", version=2),
    _gptq(8, True, "int8:32:f16"),
    _gptq(8, False, "int8:32:asymmetric:f16"),
    _gptq(2, True, "int2:32:f16"),
    _gptq(2, False, "int2:32:asymmetric:f16"),
    _gptq(3, True, "int3:32:f16"),
    _gptq(3, False, "int3:32:asymmetric:f16"),
    _gptq(4, True, "int4:row:f16", size=-1, named="rows"),
    _gptq(4, False, "int4:32:asymmetric:f16", order=True, named="order"),
    _gptq(8, True, "int8:32:f16", order=True, named="order"),
    _gptq(3, True, "int3:32:f16", order=True, named="order"),
    Case("auto-round", partial(auto_round, version=2), dict(_AUTO, packing_format="auto_round:gptqmodel"),
         "int4:32:f16"),
    Case("auto-round-gptq", auto_round, dict(_AUTO, packing_format="auto_round:auto_gptq"), "int4:32:f16"),
    Case("auto-round-awq", awq, dict(_AUTO, sym=False, packing_format="auto_round:auto_awq"),
         "int4:32:asymmetric:f16"),
    Case("awq", awq, dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm"),
         "int4:32:asymmetric:f16"),
    Case("awq-gemv", awq_by_rows, dict(quant_method="awq", bits=4, group_size=32, version="gemv"),
         "int4:32:asymmetric:f16"),
    Case("awq-gemv-fast", partial(awq_by_rows, fast=True),
         dict(quant_method="awq", bits=4, group_size=32, version="gemv_fast"), "int4:32:offset:f16"),
    Case("fp8-blocks", fp8_blocks, _FP8, "fp8:128:f32"),
    Case("fp8-blocks-bf16", partial(fp8_blocks, dtype=torch.bfloat16), _FP8, "fp8:128"),
    Case("fp8-blocks-e8m0", partial(fp8_blocks, dtype=torch.float8_e8m0fnu), dict(_FP8, scale_fmt="ue8m0"), "fp8:128"),
    Case("fp8-tensor", partial(fp8_scaled, leaf="weight_scale_inv", per="number"), dict(_FP8, weight_block_size=None),
         "fp8:row:f32"),
    Case("fbgemm", fp8_scaled, dict(quant_method="fbgemm_fp8"), "fp8:row:f32"),
    _compressed("w4a16", packed, _int(4), "int4:32", "pack-quantized"),
    _compressed("w4a16-asym", partial(packed, sym=False), _int(4, sym=False), "int4:32:asymmetric", "pack-quantized"),
    _compressed("w4a16-f32", partial(packed, dtype=torch.float32), _int(4), "int4:32:f32", "pack-quantized"),
    _compressed("w4a8", packed, _int(4), "int4:32:a8", "pack-quantized", input_activations=_DYNAMIC),
    _compressed("w8a16", partial(packed, bits=8, size=None), _int(8, "channel", size=None), "int8:row",
                "pack-quantized"),
    _compressed("w8a16-asym", partial(packed, bits=8, sym=False), _int(8, sym=False), "int8:32:asymmetric",
                "pack-quantized"),
    _compressed("w4a16-order", partial(packed, sym=False, order=True), _int(4, sym=False) | {"actorder": "group"},
                "int4:32:asymmetric", "pack-quantized"),
    _compressed("w3", partial(packed, bits=3, sym=False), _int(3, sym=False), "int3:32:asymmetric", "pack-quantized"),
    _compressed("w2", partial(packed, bits=2), _int(2), "int2:32", "pack-quantized"),
    _compressed("w1", partial(packed, bits=1), _int(1), "int2:32", "pack-quantized"),
    _compressed("w6", partial(packed, bits=6, sym=False), _int(6, sym=False), "int8:32:asymmetric", "pack-quantized"),
    _compressed("w8a8", int8_rows, _int(8, "channel", size=None), "int8:row:a8", "int-quantized",
                input_activations=_DYNAMIC),
    _compressed("w8a8-asym", partial(int8_rows, sym=False), _int(8, "channel", False, None), "int8:row:asymmetric:a8",
                "int-quantized", input_activations=_DYNAMIC),
    _compressed("fp8", partial(fp8_scaled, dtype=torch.bfloat16), _float(), "fp8:row", "float-quantized"),
    _compressed("fp8-tensor", partial(fp8_scaled, per="tensor"), _float(strategy="tensor"), "fp8:row:f32",
                "float-quantized"),
    _compressed("fp8-block", partial(fp8_blocks, leaf="weight_scale", dtype=torch.bfloat16),
                _float(strategy="block", block_structure=[128, 128]), "fp8:128", "float-quantized"),
    _compressed("nvfp4", partial(nvfp4, inverse=True), _float(4, "tensor_group", group_size=16), "nvfp4",
                "nvfp4-pack-quantized"),
    _compressed("mxfp4", mxfp4, _float(4, "group", group_size=32), "mxfp4", "mxfp4-pack-quantized"),
    _compressed("mxfp8", mxfp8, _float(8, "group", group_size=32), "fp8:32", "mxfp8-quantized"),
    Case("nf4", bitsandbytes, _BNB, "nf4:64"),
    Case("nf4-doubly", partial(bitsandbytes, doubly=True), _BNB, "nf4:64"),
    Case("fp4", partial(bitsandbytes, kind="fp4", block=128), dict(_BNB, bnb_4bit_quant_type="fp4"), "fp4:128"),
    Case("bitsandbytes-int8", bitsandbytes_int8, dict(quant_method="bitsandbytes", load_in_8bit=True), "int8:row:f32"),
    Case("quanto-qint8", quanto, _QUANTO, "int8:row:f32"),
    Case("quanto-qint8-f16", partial(quanto, dtype=torch.float16), _QUANTO, "int8:row:f16"),
    Case("quanto-qfloat8", partial(quanto, codes=torch.float8_e4m3fn, dtype=torch.bfloat16), _QUANTO, "fp8:row"),
    Case("quanto-qint4", quanto_groups, _QUANTO, "int4:32:offset"),
    Case("quanto-qint4-f32", partial(quanto_groups, dtype=torch.float32), _QUANTO, "int4:32:offset:f32"),
    Case("quanto-qint4-zeros", partial(quanto_groups, dtype=torch.float16, zeros=True), _QUANTO,
         "int4:32:asymmetric:f16"),
    Case("quanto-qint2", partial(quanto_groups, bits=2, dtype=torch.float16), _QUANTO, "int2:32:offset:f16"),
    Case("quanto-qint2-zeros", partial(quanto_groups, bits=2, zeros=True), _QUANTO, "int2:32:asymmetric"),
    Case("modelopt-nvfp4", nvfp4, dict(quant_method="modelopt", quant_algo="NVFP4"), "nvfp4"),
    Case("modelopt-fp8", partial(fp8_scaled, per="number"), dict(quant_method="modelopt", quant_algo="FP8"),
         "fp8:row:f32"),
]  # fmt: skip
BY_CASE = {case.name: case for case in CASES}


def write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None) -> str:
    """A folder with one file of tensors and, if anything is quantized, a config that says so."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": dict(config)}))
    return str(folder)


def publish(folder: Path, case: Case, model: Any) -> dict[str, Tensor]:
    """Write the model with its linears but the head in this form; the values of its state that the file stands for."""
    linears = {name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and name != "lm_head"}
    state, stored = {}, {}
    for name, tensor in model.state_dict().items():
        path = name.removesuffix(".weight")
        if path not in linears:
            stored[name] = state[name] = tensor
            continue
        leaves, state[name] = case.pack(tensor)
        stored |= {f"{path}.{leaf}": one.clone() for leaf, one in leaves.items()}
    write(folder, stored, case.config)
    return state


def llama(**changes: Any) -> Any:
    return BY_NAME["llama"].make(**{**ROOM, **changes})
