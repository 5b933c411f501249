"""GPTQ, and AutoRound's files in its packing: codes of 2, 3, 4 and 8 bits in words along inputs.

    qweight  int32 [in * bits / 32, out], a word holds neighbouring inputs
    qzeros   int32 [groups, out * bits / 32], a word holds neighbouring outputs; version 1 stores zero - 1
    scales   [groups, out]
    g_idx    int32 [in], the group of each input; AutoRound has none

    weight = scale * (code - zero), codes and zeros unsigned

In act-order, the inputs of a group are not neighbours: their codes are sorted by group.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from infuse.weights.coded.buffers import Kept, Turned, Window, mapped, scale_buffer, unpacked
from infuse.weights.coded.form import FLOATS, Found, Members, Raw, ceil_div
from infuse.weights.coded.settings import Size
from infuse.weights.coded.values import (
    Values,
    has_regular_sizes,
    inputs_by_group,
    is_regular,
    of_integers,
    regular_groups,
)
from infuse.weights.lazy import FileTensor, LazyTensor, Shape

LEAVES = ("qweight", "qzeros", "scales", "g_idx")
BITS = (2, 3, 4, 8)
_LESS_ONE = ("gptq", "auto_gptq")  # layouts that store zeros less one
_LAYOUTS = (*_LESS_ONE, "gptq_v2", "gptqmodel", "auto_round")
# What version 1 subtracted from whole words: one from each code. Three words hold 32 codes of 3 bits.
_ONES = {2: (0x55555555,), 3: (0x49249249, 0x92492492, 0x24924924), 4: (0x11111111,), 8: (0x01010101,)}
_GPTQMODEL = (0x24924924, 0x92492492, 0x49249249)  # for 3 bits gptqmodel subtracts, and adds, these: in reverse order


class _Config(BaseModel):
    """The keys that we read. `dynamic` and `extra_config` give some modules other bits and groups."""

    bits: int
    group_size: Size = -1
    sym: bool = True
    desc_act: bool = False
    format: str | None = None
    checkpoint_format: str | None = None
    packing_format: str | None = None
    is_marlin_format: bool = False
    dynamic: dict | None = None
    extra_config: dict | None = None
    meta: dict | None = None

    @property
    def layout(self) -> str:
        """One of _LAYOUTS, or another that is not read: `auto_round:gptqmodel` → `gptqmodel`."""
        named = self.checkpoint_format or self.packing_format or self.format or "gptq"
        return "marlin" if self.is_marlin_format else named.rpartition(":")[2].lower()

    def subtracted(self, bits: int) -> tuple[int, ...]:
        """What was subtracted from words of zeros; nothing in version 2."""
        if self.layout not in _LESS_ONE:
            return ()
        by_gptqmodel = bits == 3 and "gptqmodel" in str((self.meta or {}).get("quantizer")).lower()
        return _GPTQMODEL if by_gptqmodel else _ONES[bits]

    @property
    def varies(self) -> bool:
        """Whether some modules have other bits, groups or zeros than the rest."""
        return bool(self._overriding)

    def sizes(self, inputs: int, groups: int) -> list[int]:
        """The sizes of groups, of the config and of its entries for some modules, that make `groups` of `inputs`."""
        named = [self.group_size, *(entry.get("group_size") for entry in self._overriding)]
        sizes = {min(size, inputs) if size > 0 else inputs for size in named if isinstance(size, int)}
        return sorted(size for size in sizes if ceil_div(inputs, size) == groups)

    @property
    def _overriding(self) -> list[dict[str, Any]]:
        """The entries for some modules that change what the config says."""
        entries = [entry for pattern, entry in (self.dynamic or {}).items() if not str(pattern).startswith("-:")]
        return [entry for entry in (*entries, *(self.extra_config or {}).values()) if self._differs(entry)]

    def _differs(self, entry: Any) -> bool:
        """Whether an entry for some modules changes what the config says; those of 16 bits are not in codes."""
        if not isinstance(entry, dict) or entry.get("bits") in (16, 32):
            return False
        return any(entry.get(key, own) != own for key, own in self._own.items())

    @property
    def _own(self) -> dict[str, Any]:
        return {"bits": self.bits, "group_size": self.group_size, "sym": self.sym}


@dataclass(frozen=True)
class _Windows:
    """What was read last of each kind of tensor."""

    codes: Window = field(default_factory=Window)
    scales: Window = field(default_factory=Window)
    zeros: Window = field(default_factory=Window)


@dataclass(frozen=True)
class _Matrix:
    """One matrix: its tensors, its sizes, and what was subtracted from its words of zeros."""

    qweight: FileTensor
    qzeros: FileTensor
    scales: FileTensor
    shape: Shape
    bits: int
    groups: Tensor  # of each input
    size: int  # of each group
    subtracted: tuple[int, ...] = ()
    symmetric: bool = False

    @property
    def name(self) -> str:
        return self.qweight.name.removesuffix("qweight") + "weight"

    @property
    def middle(self) -> int:
        return 1 << self.bits - 1


def gptq(raw: Raw) -> Found:
    """Take the matrices of GPTQ's packing, if the config names this or AutoRound's method."""
    if raw.settings is None or raw.form != "gptq":
        return Found("GPTQ")
    is_of_auto_round = raw.settings.is_of_auto_round
    found = Found("AutoRound" if is_of_auto_round else "GPTQ")
    config = raw.settings.read(_Config)
    paths = raw.paths(("qweight",), LEAVES)
    if paths and is_of_auto_round and not (config.sym or config.packing_format):
        found.faults.append(f"{raw.settings.origin}: packing_format is missing, which tells how zeros are stored")
        return found
    if paths and config.layout not in _LAYOUTS:
        found.faults.append(
            f"{raw.settings.origin}: the layout {config.layout!r} is not read; possible: {', '.join(_LAYOUTS)}; "
            "convert the files with their library"
        )
        return found
    windows = _Windows()
    for path in paths:
        if (matrix := _checked(Members(raw, path, found), config, found)) is not None:
            _add(found, matrix, windows)
    if paths:
        found.leave_cache(raw)
    return found


def _checked(members: Members, config: _Config, found: Found) -> _Matrix | None:
    """Check the tensors of one matrix against each other and the config."""
    qweight = members.take("qweight", (torch.int32,), (-1, -1))
    scales = members.take("scales", FLOATS, (-1, -1))
    qzeros = members.take("qzeros", (torch.int32,), (-1, -1))
    if qweight is None or scales is None or qzeros is None:
        return None
    (words, rows), (groups, out) = qweight.shape, scales.shape
    bits, left = divmod(qzeros.shape[1] * 32, out)
    if rows != out or qzeros.shape[0] != groups or left or bits not in BITS or words * 32 % bits:
        what = (
            f"is {qweight.shape}, scales {scales.shape} and qzeros {qzeros.shape} do not fit: possible: [in * bits / 32"
        )
        members.fault("qweight", f"{what}, out], [groups, out] and [groups, out * bits / 32] of {BITS} bits")
        return None
    if bits != config.bits and not config.varies:
        members.fault("qweight", f"has {bits} bits, the config says {config.bits}")
        return None
    inputs = words * 32 // bits
    ordered = _groups(members, config, found, inputs, groups)
    if ordered is None:
        return None
    matrix = _Matrix(qweight, qzeros, scales, (out, inputs), bits, *ordered, config.subtracted(bits))
    return _symmetric(members, config, matrix, found) if config.sym else matrix


def _symmetric(members: Members, config: _Config, matrix: _Matrix, found: Found) -> _Matrix | None:
    """Check that all zeros are in the middle of the codes, in the version that the config names or in another."""
    words = matrix.qzeros.read()
    for subtracted in dict.fromkeys((matrix.subtracted, (), _ONES[matrix.bits], _GPTQMODEL)):
        if subtracted is _GPTQMODEL and matrix.bits != 3:
            continue
        one = replace(matrix, subtracted=subtracted, symmetric=True)
        if bool((_unsigned_zeros(one, words) == matrix.middle).all()):
            if subtracted != matrix.subtracted:
                version = "stored less one" if subtracted else "stored as they are"
                found.note(f"zeros are {version}, against the config's {config.layout}", matrix.name)
            return one
    if config.varies:  # this module may be asymmetric
        return matrix
    middle = matrix.middle
    members.fault("qzeros", f"holds other zeros than {middle - 1} or {middle}, the config says sym")
    return None


def _groups(members: Members, config: _Config, found: Found, inputs: int, groups: int) -> tuple[Tensor, int] | None:
    """The group of each input, and the size of groups; None after a fault."""
    sizes = config.sizes(inputs, groups)
    if not sizes:
        size = config.group_size if config.group_size > 0 else inputs
        other = ", and no entry for some modules fits" if config.varies else ""
        members.fault("scales", f"has {groups} groups for {inputs} inputs, the config says groups of {size}{other}")
        return None
    if len(sizes) > 1:
        told = ", ".join(map(str, sizes))
        members.fault(
            "scales", f"has {groups} groups for {inputs} inputs, which fits several sizes in the config: {told}"
        )
        return None
    size = sizes[0]
    regular = regular_groups(inputs, size)
    if not members.has("g_idx"):
        if config.desc_act:
            members.fault("g_idx", "is missing, the config says desc_act")
            return None
        return regular, size
    g_idx = members.take("g_idx", (torch.int32, torch.int64), (inputs,))
    if g_idx is None:
        return None
    indices = g_idx.read().long()
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= groups:
        members.fault("g_idx", f"names the groups {low} to {high} of {groups}")
        return None
    if not config.desc_act and groups > 1 and high == 0:  # as some libraries write it without act-order
        found.note("g_idx is all zeros, so groups are taken in order, as without desc_act", f"{members.path}.weight")
        return regular, size
    if not has_regular_sizes(indices, size):
        members.fault("g_idx", f"does not give each of {groups} groups {size} of the {inputs} inputs")
        return None
    if not config.desc_act and not is_regular(indices, size):
        found.note("g_idx is in act-order, which is kept, against the config's desc_act", f"{members.path}.weight")
    return indices, size


def _add(found: Found, matrix: _Matrix, windows: _Windows) -> None:
    """Add the matrix in its codes; by its values if groups differ in size."""
    out, inputs = matrix.shape
    groups, bits = matrix.scales.shape[0], matrix.bits
    dtype = torch.int8 if bits == 8 else torch.uint8
    data = Turned(matrix.qweight, (out, inputs * bits // 8), dtype, partial(_codes, matrix), windows.codes)
    scale = Kept(matrix.scales, (out, groups), matrix.scales.dtype, _turned, windows.scales)
    zero = None
    if not matrix.symmetric:
        zero = Kept(matrix.qzeros, (out, groups), torch.int8, partial(_zeros, matrix), windows.zeros)

    def values() -> LazyTensor:
        return Values(matrix.shape, data, of_integers(bits), scale, matrix.groups, zero)

    order = None if is_regular(matrix.groups, matrix.size) else inputs_by_group(matrix.groups, matrix.size)
    if order is None and not is_regular(matrix.groups, matrix.size):
        found.dequantize(matrix.name, "groups differ in their numbers of inputs (desc_act)", values())
        return
    option, buffer = scale_buffer(scale, has_float16=True)
    buffers: dict[str, LazyTensor] = {"data": data, "scale": buffer}
    if zero is not None:
        buffers["zero"] = mapped(zero, torch.int8, lambda read: read * (256 >> bits))
    size = "row" if groups == 1 else str(matrix.size)
    kind = "" if zero is None else ":asymmetric"
    found.add(matrix.name, matrix.shape, f"int{bits}:{size}{kind}{option}", buffers, values, order)


def _turned(read: Tensor) -> Tensor:
    return read.t().contiguous()


def _codes(matrix: _Matrix, words: Tensor) -> Tensor:
    """Rows of the format's codes, of columns of words: only int8 is signed."""
    codes = words.t().contiguous().view(torch.uint8)
    return (codes ^ 128).view(torch.int8) if matrix.bits == 8 else codes


def _unsigned_zeros(matrix: _Matrix, words: Tensor) -> Tensor:
    """Zeros, uint8 [groups, out], of words. Whole words are added, since subtracting borrowed across codes."""
    if matrix.subtracted:
        added = torch.tensor(matrix.subtracted, dtype=torch.int64).to(torch.int32)
        words = words + added.repeat(ceil_div(words.shape[1], len(added)))[: words.shape[1]]
    return unpacked(words, matrix.bits)[:, : matrix.shape[0]]


def _zeros(matrix: _Matrix, words: Tensor) -> Tensor:
    """Zeros [out, groups] of signed codes."""
    codes = _unsigned_zeros(matrix, words).to(torch.int16)
    return (codes - matrix.middle).to(torch.int8).t().contiguous()
