"""NVIDIA's ModelOpt: NVFP4 and FP8.

weight          uint8 [out, in / 2], two e2m1 codes, or e4m3 [out, in]
weight_scale    e4m3 [out, in / 16] of NVFP4; float32 for the tensor, or for tiles, of FP8:
                [tiles of rows, tiles of inputs] or [tiles of rows, 1, tiles of inputs, 1]
weight_scale_2  float32, of NVFP4

weight = code * weight_scale * weight_scale_2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import BaseModel
from torch import Tensor

from infuse.weights.coded.form import FLOATS, Found, Members, Raw, ceil_div
from infuse.weights.coded.scaled import add_fp8, add_nvfp4
from infuse.weights.lazy import FileTensor, Shape, Slices, of_all_axes

_ALGORITHMS = ("NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MIXED_PRECISION")
_UNUSED = ("input_scale",)
_SMOOTHED = "pre_quant_scale"  # of AWQ: activations would have to be scaled
_TILE = (128, 128)


class _Config(BaseModel):
    """The keys that we read."""

    quant_algo: str | None = None


@dataclass(frozen=True)
class _OfTiles(FileTensor):
    """Scales [tiles of rows, 1, tiles of inputs, 1] as a matrix."""

    @property
    def shape(self) -> Shape:
        rows, _, columns, _ = self.file.stored[self.name].shape
        return (rows, columns)

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        return self.file.read(self.name, (rows, slice(None), columns)).squeeze(3).squeeze(1)


def modelopt(raw: Raw) -> Found:
    """Take the matrices of ModelOpt, if the config names it."""
    found = Found("ModelOpt")
    if raw.settings is None or raw.form != "modelopt":
        return found
    config = raw.settings.read(_Config)
    paths = raw.paths(("weight_scale", "weight_scale_2"))
    if paths and config.quant_algo not in (None, *_ALGORITHMS):
        found.faults.append(
            f"{raw.settings.origin}: quant_algo {config.quant_algo!r} is not read; possible: {', '.join(_ALGORITHMS)}"
        )
        return found
    for path in paths:
        members = Members(raw, path, found)
        if members.has(_SMOOTHED):
            members.fault(_SMOOTHED, "scales the inputs of this linear, which is not supported")
        elif members.dtype("weight") is torch.float8_e4m3fn:
            _add_fp8(found, members)
        else:
            _add_nvfp4(found, members)
    if paths:
        unused = (name for name in raw.tensors if name.rpartition(".")[2] in _UNUSED)
        found.leave(raw, unused, "scales of activations")
        found.leave_cache(raw)
    return found


def _add_fp8(found: Found, members: Members) -> None:
    weight = members.take("weight", (torch.float8_e4m3fn,), (-1, -1))
    scale = members.take("weight_scale", FLOATS)
    if weight is None or scale is None:
        return
    if len(scale.shape) == 4 and scale.shape[1] == scale.shape[3] == 1:
        scale = _OfTiles(scale.file, scale.name)
    of_tiles = len(scale.shape) == 2 and scale.shape not in ((weight.shape[0], 1), (1, 1))
    add_fp8(found, members, weight, scale, _TILE if of_tiles else None)


def _add_nvfp4(found: Found, members: Members) -> None:
    weight = members.take("weight", (torch.uint8,), (-1, -1))
    groups = None if weight is None else (weight.shape[0], ceil_div(weight.shape[1] * 2, 16))
    scale = members.take("weight_scale", (torch.float8_e4m3fn,), *(() if groups is None else (groups,)))
    of_all = members.take("weight_scale_2", (torch.float32,), (), (1,))
    if weight is not None and scale is not None and of_all is not None:
        add_nvfp4(found, f"{members.path}.weight", weight, scale, of_all, inverse=False)
