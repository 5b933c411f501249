"""Rows of an int8 KV cache: a head's values of one token as int8 codes, followed by their float32 scale.

    value[d] = scale * code[d]        scale = the largest magnitude / 127

A row is int8 [D + 4], its last four bytes the scale, so that a cache is one tensor [B, K, S, D + 4] and crops, reorders
and copies its rows like those of any other. A value that is not finite makes the whole row NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
LARGEST_CODE = 127
FORMATS = ("int8",)  # of a KV cache, beside the dtype of the activations


def quantize_rows(values: Tensor) -> Tensor:
    """Quantize [..., D] of any floating dtype to rows, int8 [..., D + 4]."""
    exact = values.float()
    scale = exact.abs().amax(dim=-1, keepdim=True) / LARGEST_CODE
    scale = scale.where(scale.isfinite(), float("nan"))
    codes = (exact / scale).where(scale > 0, 0.0).round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)
    bytes_of_scale = scale.flatten().view(torch.int8).view(*scale.shape[:-1], SCALE_BYTES)
    return torch.cat((codes, bytes_of_scale), dim=-1)


def dequantize_rows(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of rows [..., D + 4], as [..., D]."""
    codes, bytes_of_scale = rows.split((rows.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
    # A copy, since a view in another dtype must begin at a multiple of four bytes.
    scale = bytes_of_scale.clone(memory_format=torch.contiguous_format).flatten().view(torch.float32)
    return (codes.float() * scale.view(*rows.shape[:-1], 1)).to(dtype)


def scales_in(rows: Tensor) -> Tensor | None:
    """The scales of rows [B, K, L, D + 4] as a float32 view [B, K, L]; None if they are not at multiples of 4 bytes."""
    places = (rows.storage_offset(), *rows.stride()[:-1], rows.shape[-1])
    if rows.stride(-1) != 1 or any(place % SCALE_BYTES for place in places):
        return None
    return rows.view(torch.float32)[..., -1]


def values_of(cached: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Keys or values of a cache: dequantized if they are rows, else unchanged."""
    return dequantize_rows(cached, dtype) if cached.dtype == torch.int8 else cached
