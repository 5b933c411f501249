"""Convert quantized weights to the 32-bit words that the kernels read, and back (drawing in kernels/words.py).

Suffixes: O outputs, N segments of a row, W words of a segment, C codes in a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from infuse.ops.op import Layout
from infuse.quant.floating import pack_fp6, unpack_fp6
from infuse.quant.format import QuantFormat, QuantizedWeight

LARGEST_SEGMENT = 64
# Codes in a word; for fp6, their low parts.
CODES: Mapping[str, int] = MappingProxyType({"int8": 4, "fp8": 4, "int4": 8, "mxfp4": 8, "fp6": 8})
SMALLEST_SEGMENT: Mapping[str, int] = MappingProxyType({"int8": 4, "fp8": 4, "int4": 8, "mxfp4": 8, "fp6": 16})

_NIBBLES = ("int4", "mxfp4")  # two codes in a byte


def segment_of(inputs: int, groups: int) -> int:
    """Inputs per segment: the largest power of two, at most 64, that divides the group."""
    length = inputs // max(groups, 1)
    return min(length & -length, LARGEST_SEGMENT)


def _in_words(weight: QuantizedWeight) -> QuantizedWeight | None:
    """data [O, bytes] → int32 [O, bytes / 4]; scale and zero unchanged. None if a group ends inside a word."""
    (outputs, inputs), name = weight.shape, weight.format.name
    if _declined(weight.format, inputs) or not inputs:
        return None
    data, *of_groups = weight.tensors.values()
    segment, data = segment_of(inputs, of_groups[0].shape[1]), data.contiguous()
    if segment < SMALLEST_SEGMENT[name]:
        return None
    if name in _NIBBLES:
        data = torch.stack((data & 15, data >> 4), dim=-1)
    elif name == "fp6":
        data = unpack_fp6(data)
    elif name == "int8":
        data = data.view(torch.uint8) ^ 128
    codes_ONWC = data.view(outputs, -1, CODES[name], segment // CODES[name]).transpose(-1, -2)
    if name in _NIBBLES:
        bytes_ = codes_ONWC[..., ::2] | codes_ONWC[..., 1::2] << 4
    elif name == "fp6":
        low, high = codes_ONWC & 15, codes_ONWC >> 4
        bytes_ = torch.cat(((low[..., ::2] | low[..., 1::2] << 4).flatten(-2), _high_words(high)), dim=-1)
    else:
        bytes_ = codes_ONWC
    words = bytes_.contiguous().view(outputs, -1).view(torch.int32)
    return QuantizedWeight.listed([words, *of_groups], weight.shape, weight.format)


def _high_words(high_ONWC: Tensor) -> Tensor:
    """Two high bits of 8 codes for each of W words → bytes of W / 2 words.

    Byte 2 l + h of word w holds codes 4 l to 4 l + 3 of word w + h W / 2.
    """
    split = high_ONWC.unflatten(-2, (2, -1)).unflatten(-1, (2, 4))  # half, word, lane, field
    split = split.permute(0, 1, 3, 4, 2, 5)  # word, lane, half, field
    return (split[..., 0] | split[..., 1] << 2 | split[..., 2] << 4 | split[..., 3] << 6).flatten(2)


def _in_rows(weight: QuantizedWeight) -> QuantizedWeight:
    """The inverse of _in_words."""
    (outputs, inputs), name = weight.shape, weight.format.name
    in_words, *of_groups = weight.tensors.values()
    segment, codes = segment_of(inputs, of_groups[0].shape[1]), CODES[name]
    bytes_ = in_words.contiguous().view(torch.uint8).view(outputs, inputs // segment, -1)
    words = segment // codes
    if name in (*_NIBBLES, "fp6"):
        low = bytes_[..., : 4 * words]
        codes_ONWC = torch.stack((low & 15, low >> 4), dim=-1).view(outputs, -1, words, codes)
        if name == "fp6":
            high = bytes_[..., 4 * words :].unflatten(-1, (words // 2, 2, 2))  # word, lane, half
            fields = torch.stack([high >> 2 * field & 3 for field in range(4)], dim=-1)
            codes_ONWC = codes_ONWC | fields.permute(0, 1, 4, 2, 3, 5).reshape(codes_ONWC.shape) << 4
    else:
        codes_ONWC = bytes_.view(outputs, -1, words, codes)
    data = codes_ONWC.transpose(-1, -2).reshape(outputs, inputs)
    if name in _NIBBLES:
        data = data[:, ::2] | data[:, 1::2] << 4
    elif name == "fp6":
        data = pack_fp6(data)
    elif name == "int8":
        data = (data ^ 128).view(torch.int8)
    return QuantizedWeight.listed([data, *of_groups], weight.shape, weight.format)


def _declined(format: QuantFormat, inputs: int) -> str | None:
    wide = (
        getattr(format, "scale_dtype", None) is torch.float32
    )  # stored as int32, which these kernels would read as such
    return f"{format}: there is no kernel for it yet" if wide or format.name not in CODES else None


def unpacked(buffers: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """data, scale and zero, as the kernels take them; float32 in the place of zero is an offset."""
    data, scale, *rest = buffers
    if not rest:
        return data, scale, None
    return data, scale, rest[0].view(torch.float32) if rest[0].dtype is torch.int32 else rest[0]


WORDS = Layout(_in_words, _in_rows, _declined)
