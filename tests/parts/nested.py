"""A number format with scales of scales, and how a file of other people stores a matrix in it.

    weight[o, i] = super[o, i // 256] * sub[o, i // 32] * code[o, i]

    codes  uint8 [out, in / 2]: code + 8 of -8 ... 7, input 2j in the low nibble
    subs   uint8 [out, 6 * in / 256]: 0 ... 63, eight of 6 bits, the first in the lowest bits of a little-endian word
    super  float16 [out, in / 256]

Legend: R rows, B super-blocks of a row, S sub-blocks of one, N their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infuse.ground.errors import ConfigError
from infuse.quant.format import Buffer, QuantFormat, QuantizedWeight
from infuse.weights.foreign.layout import Recognised, Unread
from infuse.weights.lazy import Coded, CodedTensor, LazyTensor, Slices

NAME, BLOCK, SUB, BITS_OF_SUB = "nested", 256, 32, 6
SUBS = BLOCK // SUB
LARGEST_SUB, SUB_BYTES = 2**BITS_OF_SUB - 1, SUBS * BITS_OF_SUB // 8
BLOCK_BYTES = 2 + SUB_BYTES + BLOCK // 2  # in the file: the super-scale, the sub-scales, the codes
DIVISORS = (7.0, 7.5, 8.0, 8.5, 9.0)  # candidates: a sub-block's largest value is up to this many steps
ERROR = 0.0874  # relative RMS error of a round trip, measured on 2**20 values of N(0,1)


@dataclass(frozen=True)
class NestedFormat(QuantFormat):
    """Codes of 4 bits, a scale of 6 bits for 32 of them, and a float16 scale for eight of those."""

    def __str__(self) -> str:
        return NAME

    def buffers(self, in_features: int) -> tuple[Buffer, ...]:
        return (
            Buffer("codes", torch.uint8, 2),
            Buffer("subs", torch.uint8, BLOCK, SUB_BYTES),
            Buffer("super", torch.float16, BLOCK),
        )

    def fits(self, in_features: int) -> str | None:
        return None if in_features % BLOCK == 0 else f"{self}: blocks of {BLOCK} do not divide {in_features} inputs"

    @property
    def expected_error(self) -> float:
        return ERROR

    def encode(self, w_RI: Tensor) -> Sequence[Tensor]:
        w_RBSN = w_RI.reshape(len(w_RI), -1, SUBS, SUB)
        wanted_RBS = _best_steps(w_RBSN)
        super_RB = (wanted_RBS.amax(-1) / LARGEST_SUB).to(torch.float16)
        steps_RB1 = super_RB.float().unsqueeze(-1)
        subs_RBS = torch.where(steps_RB1 > 0, wanted_RBS / steps_RB1, 0.0).round().clamp_(0, LARGEST_SUB)
        codes_RI = _codes(w_RBSN, steps_RB1 * subs_RBS).flatten(1)
        return codes_RI[:, 0::2] | codes_RI[:, 1::2] << 4, _packed(subs_RBS.to(torch.uint8)), super_RB

    def decode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        codes, super_RB = tensors["codes"], tensors["super"].float()
        steps_RBS1 = (super_RB.unsqueeze(-1) * _unpacked(tensors["subs"])).unsqueeze(-1)
        values = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).float().sub_(8)
        return (values.view(*steps_RBS1.shape[:3], SUB) * steps_RBS1).flatten(1)


def parse(options: Sequence[str]) -> NestedFormat:
    """For infuse.quant.parse.register."""
    if options:
        raise ConfigError(f"{NAME} has no options; found {':'.join(options)}")
    return NestedFormat(NAME, 4)


def to_file(weight: QuantizedWeight) -> Tensor:
    """A matrix as a file has it: uint8 [out, in / 256 * 136]."""
    rows = weight.shape[0]
    parts = (weight.tensors[name].contiguous().view(torch.uint8) for name in ("super", "subs", "codes"))
    return torch.cat([part.view(rows, weight.shape[1] // BLOCK, -1) for part in parts], dim=-1).flatten(1)


def from_file(blocks: Tensor) -> QuantizedWeight:
    """The inverse of to_file."""
    rows, count = blocks.shape[0], blocks.shape[1] // BLOCK_BYTES
    parts = blocks.view(rows, count, BLOCK_BYTES).split([2, SUB_BYTES, BLOCK // 2], dim=-1)
    super_, subs, codes = (part.reshape(rows, -1) for part in parts)
    tensors = {"codes": codes, "subs": subs, "super": super_.view(torch.float16)}
    return QuantizedWeight.of(tensors, (rows, count * BLOCK), parse(()))


@dataclass(frozen=True)
class InBlocks:
    """One buffer of a matrix that a file stores in blocks."""

    blocks: LazyTensor
    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    coded = None

    def read(self, part: Slices = ()) -> Tensor:
        return from_file(self.blocks.read(part[:1])).tensors[self.name][(slice(None), *part[1:])]


def recognised(unread: Unread) -> Recognised:
    """For infuse.weights.foreign.register: matrices that a file has under PATH.blocks."""
    tensors: dict[str, LazyTensor] = {}
    stored = {f"{name.removesuffix('blocks')}weight": name for name in unread.names if name.endswith(".blocks")}
    for target, name in stored.items():
        (rows, inputs), blocks = unread.missing[target], unread.whole(name)
        parts = [InBlocks(blocks, one.name, (rows, one.width(inputs)), one.dtype) for one in parse(()).buffers(inputs)]
        coded = Coded(NAME, {part.name: part for part in parts})
        tensors[target] = CodedTensor((rows, inputs), torch.float32, coded)
    return Recognised(tensors, set(stored.values()))


def _best_steps(w_RBSN: Tensor) -> Tensor:
    """The step of least squared error for each sub-block, not yet rounded, [R, B, S]."""
    largest_RBS = w_RBSN.abs().amax(-1)
    steps = torch.stack([largest_RBS / divisor for divisor in DIVISORS])
    errors = torch.stack([_error(w_RBSN, step) for step in steps])
    return steps.gather(0, errors.argmin(0, keepdim=True))[0]


def _error(w_RBSN: Tensor, steps_RBS: Tensor) -> Tensor:
    values = (_codes(w_RBSN, steps_RBS).float() - 8) * steps_RBS.unsqueeze(-1)
    return (w_RBSN - values).square().sum(-1)


def _codes(w_RBSN: Tensor, steps_RBS: Tensor) -> Tensor:
    """The nearest codes, plus 8."""
    steps = steps_RBS.unsqueeze(-1)
    return torch.where(steps > 0, w_RBSN / steps, 0.0).round().clamp_(-8, 7).add_(8).to(torch.uint8)


def _packed(subs_RBS: Tensor) -> Tensor:
    """[R, B, 8] → [R, 6 B]."""
    shifts = torch.arange(SUBS, device=subs_RBS.device) * BITS_OF_SUB
    words_RB1 = (subs_RBS.long() << shifts).sum(-1, keepdim=True)
    bytes_ = words_RB1 >> torch.arange(SUB_BYTES, device=subs_RBS.device) * 8
    return (bytes_ & 255).to(torch.uint8).flatten(1)


def _unpacked(subs: Tensor) -> Tensor:
    """[R, 6 B] → [R, B, 8]."""
    bytes_ = subs.view(len(subs), -1, SUB_BYTES).long() << torch.arange(SUB_BYTES, device=subs.device) * 8
    words_RB1 = bytes_.sum(-1, keepdim=True)
    return words_RB1 >> torch.arange(SUBS, device=subs.device) * BITS_OF_SUB & LARGEST_SUB
