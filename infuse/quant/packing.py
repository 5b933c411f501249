"""Unsigned codes of 1 to 8 bits that lie densely in the bytes of a row, lowest bits first."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

_AT_ONCE = 1 << 20  # codes that cross bytes and are unpacked at once, by way of 4 or 8 bytes each


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of up to 3 bits, uint8 [R, n], into uint8 [R, n * bits / 8]; the codes of a row must fill bytes."""
    each = 8 // math.gcd(8, bits)  # codes that fill whole bytes
    codes_RUN = codes.reshape(len(codes), codes.shape[1] // each, each).to(torch.int32)
    units = (codes_RUN << torch.arange(0, each * bits, bits, dtype=torch.int32, device=codes.device)).sum(-1)
    shifts = torch.arange(0, each * bits, 8, device=codes.device)
    return (units.unsqueeze(-1) >> shifts & 255).to(torch.uint8).flatten(1)


def unpack_bits(data: Tensor, bits: int) -> Tensor:
    """Unpack codes, uint8 [R, n * 8 / bits], of bytes, uint8 [R, n]; missing bits of the last codes are zeros."""
    if bits == 8:
        return data
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        return torch.stack([data >> shift & mask for shift in range(0, 8, bits)], dim=-1).flatten(1)
    units = -(-data.shape[1] // bits)  # of `bits` bytes, which hold 8 codes
    data = pad(data, (0, units * bits - data.shape[1])).reshape(len(data), units, bits)
    codes = torch.empty(len(data), units, 8, dtype=torch.uint8, device=data.device)
    step = max(_AT_ONCE // max(units * 8, 1), 1)
    for first in range(0, len(data), step):
        codes[first : first + step] = _of_units(data[first : first + step], bits)
    return codes.flatten(1)


def _of_units(data: Tensor, bits: int) -> Tensor:
    """8 codes of each unit of `bits` bytes [R, units, bits]."""
    wide = torch.int32 if bits <= 3 else torch.int64
    unit = data[..., 0].to(wide)
    for place in range(1, bits):
        unit |= data[..., place].to(wide) << 8 * place
    shifts = torch.arange(0, 8 * bits, bits, dtype=wide, device=data.device)
    return (unit.unsqueeze(-1) >> shifts & (1 << bits) - 1).to(torch.uint8)
