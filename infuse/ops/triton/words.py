"""Convert quantized weights to the 32-bit words that the kernels read, and back (drawing in kernels/words.py).

Suffixes: O outputs, N segments of a row, W words of a segment, C codes in a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from infuse.ops.op import Layout
from infuse.quant.blocks import BlockFormat, pack_codes, unpack_codes
from infuse.quant.floating import pack_fp6, unpack_fp6
from infuse.quant.format import QuantFormat, QuantizedWeight
from infuse.quant.grouped import GroupedFormat, scales_of
from infuse.quant.integer import pack_unsigned, unpack_unsigned
from infuse.quant.parse import quant_format

LARGEST_SEGMENT = 64
# Codes in a word. Of those with more bits than 32 divided by this, it has the low parts.
CODES: Mapping[str, int] = MappingProxyType(
    {
        "int8": 4, "fp8": 4, "int4": 8, "mxfp4": 8, "fp6": 8, "int3": 16, "int2": 16, "q4_1": 8, "q5_0": 8, "q5_1": 8,
        "q2_k": 16, "q3_k": 16, "q4_k": 8, "q5_k": 8, "q6_k": 8,
    }
)  # fmt: skip


def segment_of(inputs: int, groups: int) -> int:
    """Inputs per segment: the largest power of two, at most 64, that divides the group."""
    length = inputs // max(groups, 1)
    return min(length & -length, LARGEST_SEGMENT)


def groups_of(format: QuantFormat, inputs: int) -> int:
    """Groups of inputs in a row that have a scale of their own."""
    if isinstance(format, BlockFormat):
        return inputs // format.block.group
    assert isinstance(format, GroupedFormat)
    return format.group_count(inputs)


def _in_words(weight: QuantizedWeight) -> QuantizedWeight | None:
    """data [O, bytes] → int32 [O, bytes / 4]; what groups have is unchanged. None if _declined."""
    (outputs, inputs), format = weight.shape, weight.format
    if _declined(format, inputs) or not inputs:
        return None
    data, *of_groups = weight.tensors.values()
    name, segment, codes = format.name, segment_of(inputs, groups_of(format, inputs)), CODES[format.name]
    codes_ONWC = _unpacked(data.contiguous(), format).view(outputs, -1, codes, segment // codes).transpose(-1, -2)
    low_bits = 32 // codes
    bytes_ = _joined(codes_ONWC & (1 << low_bits) - 1, low_bits).flatten(-2)
    if name == "fp6":
        bytes_ = torch.cat((bytes_, _high_words(codes_ONWC >> 4)), dim=-1)
    elif format.bits > low_bits:  # behind all words of the row
        high = _joined(codes_ONWC >> low_bits, format.bits - low_bits)
        bytes_ = torch.cat((bytes_.flatten(1), high.flatten(1)), dim=-1)
    words = bytes_.contiguous().view(outputs, -1).view(torch.int32)
    return QuantizedWeight.listed([words, *of_groups], weight.shape, format)


def _high_words(high_ONWC: Tensor) -> Tensor:
    """Two high bits of 8 codes for each of W words → bytes of W / 2 words.

    Byte 2 l + h of word w holds codes 4 l to 4 l + 3 of word w + h W / 2.
    """
    split = high_ONWC.unflatten(-2, (2, -1)).unflatten(-1, (2, 4))  # half, word, lane, field
    split = split.permute(0, 1, 3, 4, 2, 5)  # word, lane, half, field
    return _joined(split, 2).flatten(2)


def _in_rows(weight: QuantizedWeight) -> QuantizedWeight:
    """The inverse of _in_words."""
    (outputs, inputs), format = weight.shape, weight.format
    in_words, *of_groups = weight.tensors.values()
    name, segment, codes = format.name, segment_of(inputs, groups_of(format, inputs)), CODES[format.name]
    words, low_bits = segment // codes, 32 // codes
    bytes_ = in_words.contiguous().view(torch.uint8)
    if name == "fp6":
        bytes_ = bytes_.view(outputs, inputs // segment, -1)
        high = bytes_[..., 4 * words :].unflatten(-1, (words // 2, 2, 2))  # word, lane, half
        fields = torch.stack([high >> 2 * field & 3 for field in range(4)], dim=-1)
        high = fields.permute(0, 1, 4, 2, 3, 5).reshape(outputs, -1, words, codes)
        codes_ONWC = _split(bytes_[..., : 4 * words], low_bits).view(high.shape) | high << low_bits
    else:
        low_bytes = inputs * low_bits // 8
        codes_ONWC = _split(bytes_[:, :low_bytes], low_bits).view(outputs, -1, words, codes)
        if format.bits > low_bits:
            high = _split(bytes_[:, low_bytes:], format.bits - low_bits).view(codes_ONWC.shape)
            codes_ONWC = codes_ONWC | high << low_bits
    data = _packed(codes_ONWC.transpose(-1, -2).reshape(outputs, inputs), format)
    return QuantizedWeight.listed([data, *of_groups], weight.shape, format)


def _unpacked(data: Tensor, format: QuantFormat) -> Tensor:
    """The codes of rows of `data`, unsigned, uint8 [O, in]."""
    if isinstance(format, BlockFormat):
        return unpack_codes(data, format.bits)
    if format.name == "fp6":
        return unpack_fp6(data)
    if format.bits == 8:
        return data.view(torch.uint8) ^ 128 if format.name == "int8" else data
    return unpack_unsigned(data, format.bits)


def _packed(codes: Tensor, format: QuantFormat) -> Tensor:
    """The inverse of _unpacked."""
    if isinstance(format, BlockFormat):
        return pack_codes(codes, format.bits)
    if format.name == "fp6":
        return pack_fp6(codes)
    if format.bits == 8:
        return (codes ^ 128).view(torch.int8) if format.name == "int8" else codes
    return pack_unsigned(codes, format.bits)


def _joined(fields: Tensor, bits: int) -> Tensor:
    """Fields of 1, 2, 4 or 8 bits, uint8 [..., n], in bytes [..., n * bits / 8], lowest bits first."""
    each = 8 // bits
    joined = fields[..., ::each]
    for place in range(1, each):
        joined = joined | fields[..., place::each] << bits * place
    return joined


def _split(bytes_: Tensor, bits: int) -> Tensor:
    """The inverse of _joined."""
    if bits == 8:
        return bytes_.contiguous()
    return torch.stack([bytes_ >> place & (1 << bits) - 1 for place in range(0, 8, bits)], dim=-1).flatten(-2)


def _declined(format: QuantFormat, inputs: int) -> str | None:
    name, codes = format.name, CODES.get(format.name, 0)
    if not codes:
        return f"{format}: there is no kernel for it yet"
    if not inputs:
        return None
    smallest = 16 if name == "fp6" else codes
    groups = groups_of(format, inputs)
    if segment_of(inputs, groups) < smallest:
        return f"{format}: groups of {inputs // groups} are not multiples of {smallest}"
    high = 0 if name == "fp6" else inputs * (format.bits - 32 // codes)
    return f"{format}: {inputs} inputs are not a multiple of 32" if high % 32 else None


class Unpacked(NamedTuple):
    """The buffers of a weight as the kernels take them, and its number of groups in a row.

    `zero`: zero points in int8 or offsets in float32; of blocks, `scale` again as float16.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    groups: int


def unpacked(buffers: Sequence[Tensor], inputs: int, format: str) -> Unpacked:
    """The buffers of a weight in words; numbers in float32 are stored as the bits of int32."""
    data, scale, *rest = buffers
    chosen = quant_format(format)
    if isinstance(chosen, BlockFormat):
        return Unpacked(data, scale, scale.view(torch.float16), inputs // chosen.block.group)
    return Unpacked(data, scales_of(scale), scales_of(rest[0]) if rest else None, scale.shape[1])


WORDS = Layout(_in_words, _in_rows, _declined)
