"""Matrices whose codes no format can keep: read as float32 values, with the arithmetic of their library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from infuse.quant.integer import unpack_integers, unpack_nibbles
from infuse.quant.microscaling import E2M1
from infuse.weights.lazy import LazyTensor, Shape, Slices, of_all_axes


@dataclass(frozen=True)
class Values:
    """scale[g] * (code - zero[g]) + offset[g], [out, in], in float32, where g = groups[i] is the group of input i.

    `codes` turns rows of `data` into numbers. Groups may have any inputs, and the last one fewer.
    """

    shape: Shape
    data: LazyTensor
    codes: Callable[[Tensor], Tensor]
    scale: LazyTensor
    groups: Tensor
    zero: LazyTensor | None = None
    offset: LazyTensor | None = None

    dtype, coded = torch.float32, None

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        groups = self.groups[columns]
        values = self.codes(self.data.read((rows,)))[:, : self.shape[1]][:, columns].float()
        if self.zero is not None:
            values = values - self.zero.read((rows,)).float()[:, groups]
        values = values * self.scale.read((rows,)).float()[:, groups]
        return values if self.offset is None else values + self.offset.read((rows,))[:, groups]


def regular_groups(inputs: int, size: int) -> Tensor:
    """The group of each input, for groups of `size` neighbours; the last one may have fewer."""
    return torch.arange(inputs) // size


def is_regular(groups: Tensor, size: int) -> bool:
    """Whether the inputs of each group are neighbours, in order."""
    return torch.equal(groups, regular_groups(len(groups), size))


def has_regular_sizes(groups: Tensor, size: int) -> bool:
    """Whether each group has `size` inputs, anywhere, but the last one those that are left."""
    sizes = regular_groups(len(groups), size).bincount()
    return torch.equal(groups.bincount(minlength=len(sizes)), sizes)


def inputs_by_group(groups: Tensor, size: int) -> Tensor | None:
    """The inputs, int32, sorted by group; None if not every group has `size` of them."""
    if len(groups) % size or not bool((groups.bincount() == size).all()):
        return None
    return groups.argsort(stable=True).to(torch.int32)


def of_integers(bits: int) -> Callable[[Tensor], Tensor]:
    """The codes of int8, int4, int3 or int2."""
    return of_int8 if bits == 8 else partial(unpack_integers, bits=bits)


def of_int8(data: Tensor) -> Tensor:
    return data


def of_fp8(data: Tensor) -> Tensor:
    return data.view(torch.float8_e4m3fn).float()


def of_e2m1(data: Tensor) -> Tensor:
    return torch.tensor(E2M1, device=data.device)[unpack_nibbles(data).long()]
