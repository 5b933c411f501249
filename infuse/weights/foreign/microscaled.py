"""Read experts stored in mxfp4, as in gpt-oss checkpoints: their codes unchanged, or dequantized values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from infuse.ground.errors import CheckpointError, ConfigError
from infuse.quant.microscaling import BLOCK, from_blocks
from infuse.weights.foreign.layout import Recognised, Unread
from infuse.weights.lazy import Coded, CodedTensor, LazyTensor, Shape, Slices, Transposed, of_all_axes

FORMAT = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"  # suffixes that transformers adds to the tensor's name
_BYTES = BLOCK // 2  # per block


@dataclass(frozen=True)
class _Codes:
    """View `blocks`, uint8 [experts, rows, inputs / 32, 16], as codes [experts, rows, inputs / 2]."""

    blocks: LazyTensor

    dtype, coded = torch.uint8, None

    @property
    def shape(self) -> Shape:
        *outer, groups, width = self.blocks.shape
        return (*outer, groups * width)

    def read(self, part: Slices = ()) -> Tensor:
        *outer, columns = of_all_axes(part, 3)
        start, stop, _ = columns.indices(self.shape[2])
        assert start % _BYTES == stop % _BYTES == 0, (columns, self.blocks)
        return self.blocks.read((*outer, slice(start // _BYTES, stop // _BYTES))).flatten(2)


@dataclass(frozen=True)
class _Scales:
    """Scales [experts, rows, inputs / 32] from `exponents`, uint8 of the same shape, stored under `name`."""

    exponents: LazyTensor
    name: str

    dtype, coded = torch.bfloat16, None

    @property
    def shape(self) -> Shape:
        return self.exponents.shape

    def read(self, part: Slices = ()) -> Tensor:
        exponents = self.exponents.read(part)
        *outer, groups = exponents.shape
        rows = exponents.reshape(math.prod(outer), groups)
        try:
            scale = from_blocks(rows.new_empty(*rows.shape, 0), rows).tensors["scale"]
        except ConfigError as error:
            raise CheckpointError(f"{self.name}: {error}") from error
        return scale.reshape(*outer, groups)


def microscaled(unread: Unread) -> Recognised:
    """Recognise tensors [experts, inputs, rows] that are stored transposed, in blocks of 32 inputs."""
    wanted = {name: shape for name, shape in unread.missing.items() if len(shape) == 3}
    pairs: dict[str, dict[str, str]] = {}
    for name in unread.names if wanted else ():
        for suffix in (_BLOCKS, _SCALES):
            variants = unread.naming.variants(name.removesuffix(suffix)) if name.endswith(suffix) else ()
            targets = [target for target in variants if target in wanted]
            if targets:
                pairs.setdefault(targets[0], {})[suffix] = name
    pairs = {target: pair for target, pair in pairs.items() if len(pair) == 2}
    tensors: dict[str, LazyTensor] = {}
    faults: dict[str, str] = {}
    for target, pair in pairs.items():
        experts, inputs, rows = wanted[target]
        sizes = (experts, rows, inputs // BLOCK)
        blocks = unread.checkpoint.joined(pair[_BLOCKS], (*sizes, _BYTES))
        exponents = unread.checkpoint.joined(pair[_SCALES], sizes)
        if blocks and exponents and blocks.dtype == exponents.dtype == torch.uint8 and inputs % BLOCK == 0:
            coded = Coded(FORMAT, {"data": _Codes(blocks), "scale": _Scales(exponents, pair[_SCALES])})
            # bfloat16 represents every value of the format exactly.
            tensors[target] = Transposed(CodedTensor((experts, rows, inputs), torch.bfloat16, coded))
            continue
        stored = " and ".join(unread.stored(pair[suffix]) for suffix in (_BLOCKS, _SCALES))
        faults[target] = f"in blocks, {stored}, the model has {wanted[target]}"
    return Recognised(tensors, {name for pair in pairs.values() for name in pair.values()}, faults)
