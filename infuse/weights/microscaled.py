"""Experts that a checkpoint stores in mxfp4, as gpt-oss is published: read their codes as they are, or their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from infuse.errors import CheckpointError, ConfigError
from infuse.quant.format import QuantizedWeight
from infuse.quant.microscaling import BLOCK, from_blocks
from infuse.weights.checkpoint import Checkpoint, Joined
from infuse.weights.pieces import Shape
from infuse.weights.reader import Coded, Slices
from infuse.weights.saved_shards import SavedShards

FORMAT = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"  # what transformers adds to the tensor's name
_BYTES = BLOCK // 2  # of a block


@dataclass(frozen=True)
class Microscaled:
    """A tensor [experts, inputs, rows] whose transposed matrices a checkpoint stores in blocks of 32 inputs.

    `blocks`: uint8 [experts, rows, inputs / 32, 16]; `exponents`: uint8 [experts, rows, inputs / 32].
    """

    blocks: Joined
    exponents: Joined

    dtype = torch.bfloat16  # has all values of the format

    @property
    def shape(self) -> Shape:
        experts, rows, groups = self.exponents.shape
        return experts, groups * BLOCK, rows

    def read(self, part: Slices = ()) -> Tensor:
        """Read the values of the tensor, or of `part` of it."""
        experts, inputs, rows = (*part, *(slice(None),) * (3 - len(part)))
        start, stop, _ = inputs.indices(self.shape[1])
        first, last = start // BLOCK, -(-stop // BLOCK)
        weight, sizes = self._weight(experts, rows, slice(first, last))
        values = weight.format.dequantize(weight, self.dtype)[:, start - first * BLOCK : stop - first * BLOCK]
        return values.unflatten(0, sizes).transpose(1, 2)

    def coded(self, device: torch.device) -> Coded:
        """The codes [experts, inputs / 2, rows] and the scales [experts, inputs / 32, rows] as they are."""
        experts, inputs, rows = self.shape
        return Coded(
            FORMAT,
            _Part((experts, inputs // 2, rows), self._codes, device),
            _Part((experts, inputs // BLOCK, rows), self._scales, device),
        )

    def _codes(self, experts: slice, inputs: slice, rows: slice) -> Tensor:
        start, stop, _ = inputs.indices(self.shape[1] // 2)
        assert start % _BYTES == stop % _BYTES == 0, (inputs, self.blocks.name)
        found = self.blocks.read((experts, rows, slice(start // _BYTES, stop // _BYTES)))
        return found.flatten(2).transpose(1, 2)

    def _scales(self, experts: slice, groups: slice, rows: slice) -> Tensor:
        weight, sizes = self._weight(experts, rows, groups, without_codes=True)
        return weight.tensors["scale"].unflatten(0, sizes).transpose(1, 2)

    def _weight(
        self, experts: slice, rows: slice, groups: slice, *, without_codes: bool = False
    ) -> tuple[QuantizedWeight, tuple[int, int]]:
        """Experts below one another as one weight, and the numbers of experts and of rows of each."""
        part = (experts, rows, groups)
        exponents = self.exponents.read(part)
        blocks = self.blocks.read(part) if not without_codes else exponents.new_empty(*exponents.shape, 0)
        try:
            weight = from_blocks(blocks.flatten(0, 1), exponents.flatten(0, 1))
        except ConfigError as error:
            raise CheckpointError(f"{self.exponents.name}: {error}") from error
        return weight, (exponents.shape[0], exponents.shape[1])


@dataclass(frozen=True)
class _Part:
    """Reader of codes or scales, whatever the name: [experts, inputs or fewer, rows]."""

    sizes: Shape
    read_part: Callable[[slice, slice, slice], Tensor]
    device: torch.device

    def shape(self, name: str) -> Shape:
        return self.sizes

    def read(self, name: str, part: Slices = ()) -> Tensor:
        experts, inputs, rows = (*part, *(slice(None),) * (3 - len(part)))
        return self.read_part(experts, inputs, rows).to(self.device)

    def coded(self, name: str) -> Coded | None:
        return None


def microscaled(
    checkpoint: Checkpoint | SavedShards,
    names: Iterable[str],
    variants: Callable[[str], Iterable[str]],
    wanted: Mapping[str, Shape],
) -> tuple[dict[str, Microscaled], list[str], list[str]]:
    """The tensors of `wanted` shapes that `names` store in blocks, the names that are left, and what does not fit.

    `variants` lists the names that a tensor of the checkpoint may have in the model.
    """
    given = list(names)
    found: dict[str, dict[str, str]] = {}
    for name in given:
        for suffix in (_BLOCKS, _SCALES):
            targets = [one for one in variants(name.removesuffix(suffix)) if one in wanted]
            if name.endswith(suffix) and targets:
                found.setdefault(targets[0], {})[suffix] = name
    pairs = {target: (both[_BLOCKS], both[_SCALES]) for target, both in found.items() if len(both) == 2}
    made: dict[str, Microscaled] = {}
    misshaped = []
    for target, pair in pairs.items():
        experts, inputs, rows = wanted[target]
        sizes = (experts, rows, inputs // BLOCK)
        blocks, exponents = (
            checkpoint.joined(name, shape, None) for name, shape in zip(pair, ((*sizes, _BYTES), sizes), strict=True)
        )
        if blocks and exponents and blocks.dtype == exponents.dtype == torch.uint8 and inputs % BLOCK == 0:
            made[target] = Microscaled(blocks, exponents)
            continue
        shapes = " and ".join(f"{checkpoint.pieces[name].dtype} {checkpoint.pieces[name].shapes[0]}" for name in pair)
        misshaped.append(f"{target}: in blocks, {shapes}, the model has {wanted[target]}")
    used = {name for pair in pairs.values() for name in pair}
    return made, [name for name in given if name not in used], misshaped
