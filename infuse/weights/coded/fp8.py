"""fp8 in tiles, per row and per tensor: e4m3 weights with `weight_scale_inv` (DeepSeek-V3, Qwen3) or `weight_scale`.

weight            e4m3 [out, in]
weight_scale_inv  [⌈out / 128⌉, ⌈in / 128⌉], or for the tensor; a factor, in spite of its name
weight_scale      float32 [out, 1] of fbgemm_fp8
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, Field

from infuse.weights.coded.form import FLOATS, Found, Members, Raw
from infuse.weights.coded.scaled import E8M0, add_fp8

METHODS = ("fp8", "fbgemm-fp8")
_SCALES = ("weight_scale_inv", "weight_scale", "scale")  # the last as DeepSeek-V4 has it
_UNUSED = ("input_scale", "activation_scale", "input_scale_ub")
_TILE = (128, 128)


class _Config(BaseModel):
    """The keys that we read."""

    weight_block_size: tuple[int, int] | None = Field(default=None)
    activation_scheme: str | None = None


def fp8(raw: Raw) -> Found:
    """Take e4m3 weights with their scales, if the config names fp8; without config, those of `weight_scale_inv`."""
    found = Found("fp8")
    if raw.settings is not None and raw.method not in METHODS:
        return found
    config = _Config() if raw.settings is None else raw.settings.read(_Config)
    tile = _TILE if raw.settings is None else config.weight_block_size
    if tile is not None and min(tile) < 1:
        assert raw.settings is not None
        found.faults.append(f"{raw.settings.origin}: weight_block_size is {list(tile)}; possible: [128, 128]")
        return found
    leaves = _SCALES[:1] if raw.settings is None else _SCALES
    for path in raw.paths(leaves):
        _add(found, Members(raw, path, found), leaves, tile)
    if raw.settings is not None:
        for name, tensor in raw.tensors.items():
            path, _, leaf = name.rpartition(".")
            if leaf == "weight" and tensor.dtype is torch.float8_e4m3fn and name not in found.used:
                Members(raw, path, found).take("weight_scale_inv", FLOATS)
        if found.used:
            unused = (name for name in raw.tensors if name.rpartition(".")[2] in _UNUSED)
            found.leave(raw, unused, "scales of activations")
    return found


def _add(found: Found, members: Members, leaves: tuple[str, ...], tile: tuple[int, int] | None) -> None:
    weight = members.take("weight", (torch.float8_e4m3fn,), (-1, -1))
    leaf = next(leaf for leaf in leaves if members.has(leaf))
    scale = members.take(leaf, (*FLOATS, *E8M0))
    if weight is not None and scale is not None:
        add_fp8(found, members, weight, scale, tile)
