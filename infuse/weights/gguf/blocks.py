"""Split the blocks of GGUF's types into codes and scales in our formats' layouts: pure functions of bytes.

`split_blocks` is the only door; kernels take the place of what is here where there are some. Values do not change.

Legend: b_RB is bytes of blocks, R rows of B blocks (all blocks flattened to N where rows do not matter).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from infuse.native import kernels
from infuse.quant.floating import pack_fp6
from infuse.quant.microscaling import scales_of_exponents
from infuse.quant.packing import pack_bits
from infuse.quant.parse import quant_format
from infuse.weights.gguf.file import TYPES

# The format in which each type is kept.
FORMATS: Mapping[str, str] = MappingProxyType({
    "Q4_0": "int4:32:f16", "Q8_0": "int8:32:f16", "MXFP4": "mxfp4", "NVFP4": "nvfp4",
    "Q4_1": "q4_1", "Q5_0": "q5_0", "Q5_1": "q5_1", "IQ4_NL": "iq4_nl", "Q2_K": "q2_k", "Q3_K": "q3_k",
    "Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k", "IQ4_XS": "iq4_xs",
})  # fmt: skip
# Values in a block and bytes of a block of each type.
_SIZES = MappingProxyType({name: (values, size) for name, values, size in TYPES.values()})
# In the order of kSplits in ops/cpu/src/binding_blocks.cpp.
COMPILED = ("Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q2_K", "Q3_K")


def split_blocks(raw: Tensor, type: str) -> tuple[Tensor, Tensor]:
    """Split rows of blocks, uint8 [rows, blocks * bytes], into `data` and `scale` of FORMATS[type], [rows, ...] each.

    ConfigError if a block's scale is not a number that the format has: an exponent of 255 in MXFP4.
    """
    rows, (_, size) = len(raw), _SIZES[type]
    assert raw.dtype == torch.uint8 and raw.shape[1] % size == 0, (raw.dtype, raw.shape, type)
    blocks = raw.shape[1] // size
    if type in COMPILED and raw.device.type == "cpu" and not isinstance(kernels(), str):
        data, scale = _split_by_kernel(raw, type)
        return _as_numbers(data, scale, type)
    parts = (part.flatten(1) for part in _SPLIT[type](raw.reshape(rows * blocks, size)))
    data, scale = (part.reshape(rows, blocks * part.shape[1]) for part in parts)
    return _as_numbers(data, scale, type)


def _as_numbers(data: Tensor, scale: Tensor, type: str) -> tuple[Tensor, Tensor]:
    """The bytes of both in the dtypes of the format's buffers."""
    if type == "Q8_0":
        return data.view(torch.int8), scale.view(torch.float16)
    if type == "Q4_0":
        return data, scale.view(torch.float16)
    return data, scales_of_exponents(scale) if type == "MXFP4" else scale


def _split_by_kernel(raw: Tensor, type: str) -> tuple[Tensor, Tensor]:
    """The same in C++: twenty times as fast."""
    values, size = _SIZES[type]
    rows, inputs = len(raw), raw.shape[1] // size * values
    buffers = quant_format(FORMATS[type]).buffers(inputs)
    sizes = [buffer.width(inputs) * buffer.dtype.itemsize for buffer in buffers]
    data, scale = (torch.empty(rows, size, dtype=torch.uint8) for size in sizes)
    raw = raw if raw.stride(1) == 1 else raw.contiguous()
    kernels().split_blocks.default(raw, COMPILED.index(type), data, scale)
    return data, scale


def _neighbours(nibbles: Tensor) -> tuple[Tensor, Tensor]:
    """Pack low and high nibbles of bytes [..., 2n] anew: neighbouring values share a byte, in two tensors [..., n]."""
    even, odd = nibbles[..., 0::2], nibbles[..., 1::2]
    return even & 15 | odd << 4, even >> 4 | odd & 0xF0


def _halves(nibbles: Tensor) -> Tensor:
    """Repack runs of bytes [..., n] whose low nibbles come before their high ones."""
    return torch.cat(_neighbours(nibbles), dim=-1)


def _q4(of_scale: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Blocks of 32: `of_scale` bytes, then byte j with values j and j + 16."""
    return lambda b_NB: (_halves(b_NB[:, of_scale:]), b_NB[:, :of_scale].contiguous())


def _q5(of_scale: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """As _q4, with a word of fifth bits before the nibbles."""

    def split(b_NB: Tensor) -> tuple[Tensor, Tensor]:
        high, low = b_NB[:, of_scale : of_scale + 4], _halves(b_NB[:, of_scale + 4 :])
        return torch.cat([low, high], dim=-1), b_NB[:, :of_scale].contiguous()

    return split


def _q8_0(b_NB: Tensor) -> tuple[Tensor, Tensor]:
    return b_NB[:, 2:].contiguous(), b_NB[:, :2].contiguous()


def _nvfp4(b_NB: Tensor) -> tuple[Tensor, Tensor]:
    """Four scales e4m3 without a sign (127 is 0), then four runs of 16 values; the tensor's own scale is 1 here."""
    scales = b_NB[:, :4] & 127
    scales = torch.where(scales == 127, 0, scales)
    one = torch.tensor([0, 0, 0x80, 0x3F], dtype=torch.uint8, device=b_NB.device)  # float32 1.0
    return _halves(b_NB[:, 4:].view(-1, 4, 8)), torch.cat([one.expand(len(b_NB), 4), scales], dim=-1)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima, 8 of 6 bits each, from 12 bytes."""
    scale, least, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([scale & 63, high & 15 | (scale >> 2) & 48], dim=-1)
    return scales, torch.cat([least & 63, high >> 4 | (least >> 2) & 48], dim=-1)


def _q4_k(b_NB: Tensor) -> tuple[Tensor, Tensor]:
    data = _halves(b_NB[:, 16:].reshape(-1, 4, 32))  # byte l: value l of one 32 and of the next
    return data, torch.cat([b_NB[:, :4], *_six_bits(b_NB[:, 4:16])], dim=-1)


def _q5_k(b_NB: Tensor) -> tuple[Tensor, Tensor]:
    low = _halves(b_NB[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 16)
    # Byte l of 32 has the fifth bits of value l of all eight 32s: 8 x 8 bits are transposed four times.
    high = _transposed_bits(b_NB[:, 16:48].reshape(-1, 4, 8)).transpose(1, 2)
    return torch.cat([low, high], dim=-1), torch.cat([b_NB[:, :4], *_six_bits(b_NB[:, 4:16])], dim=-1)


def _transposed_bits(rows: Tensor) -> Tensor:
    """Transpose 8 x 8 bits: bytes [..., 8] whose byte s has bit s of each of the eight (Hacker's Delight, 7-3)."""
    word = rows.contiguous().view(torch.int64)
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
        swapped = (word ^ word >> shift) & mask
        word = word ^ swapped ^ swapped << shift
    return word.view(torch.uint8)


def _two_bits(b_NB: Tensor) -> Tensor:
    """Values of two bits from 64 bytes: byte l of each half has four that are 32 apart. [N, 8, 32]"""
    halves = b_NB.reshape(-1, 2, 1, 32)
    return torch.cat([halves >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).view(-1, 8, 32)


def _q2_k(b_NB: Tensor) -> tuple[Tensor, Tensor]:
    codes = _two_bits(b_NB[:, 16:80]).flatten(1)
    return pack_bits(codes, 2), torch.cat([b_NB[:, 80:], b_NB[:, :16]], dim=-1)


def _q3_k(b_NB: Tensor) -> tuple[Tensor, Tensor]:
    high = b_NB[:, :32].reshape(-1, 1, 32)
    high = torch.cat([high >> shift & 1 for shift in range(8)], dim=1)
    low, high_of_scale = b_NB[:, 96:104], b_NB[:, 104:108]
    scales = torch.cat([low & 15, low >> 4], dim=-1)
    scales = scales | torch.cat([(high_of_scale >> shift & 3) << 4 for shift in (0, 2, 4, 6)], dim=-1)
    scales = scales - 32  # int8's bits: uint8 wraps
    codes = (_two_bits(b_NB[:, 32:96]) | high << 2).flatten(1)
    return pack_bits(codes, 3), torch.cat([b_NB[:, 108:], scales], dim=-1)


def _q6_k(b_NB: Tensor) -> tuple[Tensor, Tensor]:
    low = b_NB[:, :128].reshape(-1, 2, 64)
    low = torch.cat([low & 15, low >> 4], dim=-1).view(-1, 256)
    high = _two_bits(b_NB[:, 128:192]).view(-1, 256)
    return pack_fp6(low | high << 4), torch.cat([b_NB[:, 208:], b_NB[:, 192:208]], dim=-1)


def _iq4_xs(b_NB: Tensor) -> tuple[Tensor, Tensor]:
    high = b_NB[:, 2:4].contiguous().view(torch.int16)
    low = b_NB[:, 4:8]
    high = torch.cat([(high >> 2 * number & 3) << 4 for number in range(8)], dim=-1).to(torch.uint8)
    low = torch.stack([low & 15, low >> 4], dim=-1).flatten(1)
    scales = (low | high) - 32  # int8's bits: uint8 wraps
    return _halves(b_NB[:, 8:].reshape(-1, 8, 16)), torch.cat([b_NB[:, :2], scales], dim=-1)


_SPLIT: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = MappingProxyType({
    "Q4_0": _q4(2), "IQ4_NL": _q4(2), "Q4_1": _q4(4), "MXFP4": _q4(1), "Q5_0": _q5(2), "Q5_1": _q5(4),
    "Q8_0": _q8_0, "NVFP4": _nvfp4, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
})  # fmt: skip
