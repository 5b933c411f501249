"""fp8 in tiles, per row and per tensor: e4m3 weights with `weight_scale_inv` (DeepSeek-V3, Qwen3) or `weight_scale`.

weight            e4m3 [out, in]
weight_scale_inv  [⌈out / 128⌉, ⌈in / 128⌉], or for the tensor; a factor, in spite of its name
weight_scale      float32 [out, 1] of fbgemm_fp8

experts.NAME, experts.NAME_scale_inv: the same for each expert, with experts as the first axis, as transformers saves
mixtures
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from infuse.weights.coded.form import FLOATS, Found, Members, Raw
from infuse.weights.coded.scaled import E8M0, add_fp8
from infuse.weights.coded.settings import Size
from infuse.weights.lazy import Coded, CodedTensor, FileTensor, LazyTensor, Shape, Slices, Stacked

_SCALES = ("weight_scale_inv", "weight_scale", "scale")
_SHORT = "scale"  # of DeepSeek-V4; norms may have one too
_OF_EXPERTS = "_scale_inv"
_UNUSED = ("input_scale", "activation_scale", "input_scale_ub")
_TILE = (128, 128)


class _Config(BaseModel):
    """The keys that we read."""

    weight_block_size: tuple[Size, Size] | None = Field(default=None)
    activation_scheme: str | None = None


@dataclass(frozen=True)
class _OfExpert(FileTensor):
    """The matrix of one expert in a tensor of all."""

    expert: int = 0

    @property
    def shape(self) -> Shape:
        return self.file.stored[self.name].shape[1:]

    def read(self, part: Slices = ()) -> Tensor:
        return self.file.read(self.name, (slice(self.expert, self.expert + 1), *part))[0]


def fp8(raw: Raw) -> Found:
    """Take e4m3 weights with their scales, if the config names fp8; without config, those of `weight_scale_inv`."""
    found = Found("fp8")
    if raw.settings is not None and raw.form != "fp8":
        return found
    config = _Config() if raw.settings is None else raw.settings.read(_Config)
    tile = _TILE if raw.settings is None else config.weight_block_size
    if tile is not None and min(tile) < 1:
        assert raw.settings is not None
        found.faults.append(f"{raw.settings.origin}: weight_block_size is {list(tile)}; possible: [128, 128]")
        return found
    leaves = _SCALES[:1] if raw.settings is None else _SCALES
    for path in raw.paths(leaves):
        members = Members(raw, path, found)
        is_coded = members.dtype("weight") is torch.float8_e4m3fn
        if is_coded or any(members.has(leaf) for leaf in leaves if leaf != _SHORT):
            _add(found, members, leaves, tile)
    for name, tensor in raw.tensors.items():
        if tensor.dtype is torch.float8_e4m3fn and len(tensor.shape) == 3 and f"{name}{_OF_EXPERTS}" in raw:
            _add_experts(found, raw, name, tile)
    if raw.settings is not None and found.used:
        unused = (name for name in raw.tensors if name.rpartition(".")[2] in _UNUSED)
        found.leave(raw, unused, "scales of activations")
        found.leave_cache(raw)
    return found


def _add(found: Found, members: Members, leaves: tuple[str, ...], tile: tuple[int, int] | None) -> None:
    weight = members.take("weight", (torch.float8_e4m3fn,), (-1, -1))
    leaf = next(leaf for leaf in leaves if members.has(leaf))
    scale = members.take(leaf, (*FLOATS, *E8M0))
    if weight is not None and scale is not None:
        add_fp8(found, members, weight, scale, tile)


def _add_experts(found: Found, raw: Raw, name: str, tile: tuple[int, int] | None) -> None:
    """Add a tensor [experts, out, in], with scales [experts, ...] as those of one matrix."""
    path, _, leaf = name.rpartition(".")
    members = Members(raw, path, found)
    weight = members.take(leaf, (torch.float8_e4m3fn,), (-1, -1, -1))
    scale = members.take(f"{leaf}{_OF_EXPERTS}", (*FLOATS, *E8M0))
    if weight is None or scale is None:
        return
    if not scale.shape or scale.shape[0] != weight.shape[0]:
        members.fault(f"{leaf}{_OF_EXPERTS}", f"is {scale.shape} for {weight.shape[0]} experts")
        return
    matrices: list[LazyTensor] = []
    for expert in range(weight.shape[0]):
        of_one = Found(found.title)
        one = Members(raw, path, of_one)
        its_scale = _OfExpert(scale.file, scale.name, expert)
        add_fp8(of_one, one, _OfExpert(weight.file, weight.name, expert), its_scale, tile)
        if of_one.faults:
            found.faults += of_one.faults
            return
        matrices += of_one.tensors.values()
        for note in of_one.notes if expert == 0 else ():
            found.note(note, name)
    coded = [matrix.coded for matrix in matrices]
    if coded[0] is None:
        found.tensors[name] = Stacked(matrices)
        return
    buffers: dict[str, LazyTensor] = {
        each: Stacked([one.buffers[each] for one in coded if one is not None]) for each in coded[0].buffers
    }
    found.tensors[name] = CodedTensor(weight.shape, torch.float32, Coded(coded[0].format, buffers))
