"""Rows whose last group is partial, as of fp8 in tiles of 128 x 128: the same codes in shorter groups that divide them.

A group of 128 inputs is two groups of 64 with one scale. So 320 inputs, 128 + 128 + 64, are five groups of 64, and no
code and no value changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from infuse.ground.errors import ConfigError
from infuse.quant.format import QuantFormat
from infuse.quant.grouped import GroupedFormat
from infuse.weights.lazy import LazyTensor, Rearranged, Shape, Slices, of_all_axes

# Groups are a multiple of these inputs, by bits: a lane of all kernels for a code of so many bits. With 16, the scales
# of fp8 in float32 cost 2 bits a weight; of shorter groups they would cost more than half of what codes save.
_UNIT: Mapping[int, int] = {3: 32}
SHORTEST = 16


def in_shorter_groups(format: QuantFormat, inputs: int) -> GroupedFormat | None:
    """The format with the longest groups that divide both its own groups and `inputs`; None if they are too short."""
    if not isinstance(format, GroupedFormat) or format.group_size is None:
        return None
    size = math.gcd(format.group_size, inputs)
    if size % _UNIT.get(format.bits, SHORTEST):
        return None
    try:
        shorter = replace(format, group_size=size)
    except ConfigError:  # a format whose groups have one size
        return None
    return shorter if shorter.fits(inputs) is None else None


def of_shorter_groups(
    buffers: Mapping[str, LazyTensor], format: QuantFormat, shorter: GroupedFormat, inputs: int
) -> dict[str, LazyTensor]:
    """The buffers of `format` as those of `shorter`: whatever a group has is repeated, codes stay."""
    assert isinstance(format, GroupedFormat) and format.group_size is not None and shorter.group_size is not None
    long, short = format.group_size, shorter.group_size
    return {
        name: buffer if name == "data" else _Repeated(buffer, long, short, inputs // short)
        for name, buffer in buffers.items()
    }


@dataclass(frozen=True)
class _Repeated(Rearranged):
    """Columns of `source`, one for each `long` inputs, as `columns`, one for each `short` inputs."""

    long: int
    short: int
    columns: int

    @property
    def shape(self) -> Shape:
        return (self.source.shape[0], self.columns)

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        start, stop, _ = columns.indices(self.columns)
        groups = torch.arange(start, stop) * self.short // self.long
        if start >= stop:
            return self.source.read((rows, slice(0, 0)))
        first, last = int(groups[0]), int(groups[-1]) + 1
        return self.source.read((rows, slice(first, last)))[:, groups - first]
