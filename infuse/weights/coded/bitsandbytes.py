"""bitsandbytes: nf4 and fp4 (with plain or quantized scales), and int8.

weight                          uint8 [out * in / 2, 1], row by row, the first of two codes in the high nibble
weight.absmax                   float32 [blocks], or uint8 with the next two: the largest magnitude of each block
weight.nested_absmax            float32 [blocks of 256 blocks]
weight.nested_quant_map         float32 [256]
weight.quant_map                float32 [16], the values of the codes
weight.quant_state.bitsandbytes__nf4, or __fp4: JSON as uint8

weight, SCB, weight_format      int8 [out, in], float32 [out], 0:  weight = code * SCB / 127
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from infuse.quant.tables import TABLES
from infuse.weights.coded.buffers import BITS, InRows, Tiled, mapped, scale_buffer
from infuse.weights.coded.form import Found, Members, Raw, ceil_div
from infuse.weights.coded.ragged import SHORTEST
from infuse.weights.coded.settings import Size
from infuse.weights.coded.values import Values, of_int8, regular_groups
from infuse.weights.lazy import FileTensor, LazyTensor, Shape, Slices, of_all_axes

_STATE = "quant_state.bitsandbytes__"
_LEAVES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *(f"{_STATE}{name}" for name in TABLES))
_STORAGE = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.int8)  # dtypes that only hold the bytes
_LONGEST = 1 << 16  # bytes of JSON that are read; libraries write some 200
_BYTE = 1 / 127  # SCB is the largest magnitude of a row, which has the code 127


class _State(BaseModel):
    """The JSON beside a matrix."""

    quant_type: str
    blocksize: Size
    shape: tuple[Size, Size]
    nested_blocksize: Size = 256
    nested_offset: float = 0.0


@dataclass(frozen=True)
class _Flat:
    """Bytes [rows, width] of a tensor of any dtype that lies row by row."""

    source: FileTensor
    shape: Shape

    dtype, coded = torch.uint8, None

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        start, stop, _ = rows.indices(self.shape[0])
        width, size = self.shape[1], self.source.dtype.itemsize
        first = start * width // size
        read = self.source.read((slice(first, ceil_div(stop * width, size)),)).reshape(-1).view(torch.uint8)
        at = start * width - first * size
        return read[at : at + (stop - start) * width].reshape(-1, width)[:, columns]


@dataclass(frozen=True)
class _Largest:
    """The largest magnitudes of blocks, float32 [blocks]: as stored, or from codes with a second table."""

    absmax: FileTensor
    nested: tuple[FileTensor, Tensor] | None = None  # the scales of blocks of codes, and the table
    block: int = 256
    offset: float = 0.0

    dtype, coded = torch.float32, None

    @property
    def shape(self) -> Shape:
        return self.absmax.shape

    def read(self, part: Slices = ()) -> Tensor:
        read = self.absmax.read(part)
        if self.nested is None:
            return read.float()
        start, stop, _ = (part[0] if part else slice(None)).indices(self.shape[0])
        scales, table = self.nested
        first = start // self.block
        of_blocks = scales.read((slice(first, ceil_div(stop, self.block)),))
        blocks = torch.arange(start, stop) // self.block - first
        return table[read.long()] * of_blocks[blocks] + torch.tensor(self.offset)


@dataclass(frozen=True)
class _FlatValues:
    """Values [out, in] of a matrix whose blocks cross rows."""

    shape: Shape
    data: FileTensor
    largest: _Largest
    block: int
    table: tuple[float, ...]

    dtype, coded = torch.float32, None

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        start, stop, _ = rows.indices(self.shape[0])
        first, last = start * self.shape[1], stop * self.shape[1]
        read = _Flat(self.data, (ceil_div(math.prod(self.shape), 2), 1)).read((slice(first // 2, ceil_div(last, 2)),))
        codes = torch.stack((read >> 4, read & 15), dim=-1).flatten()[first % 2 :][: last - first]
        block = first // self.block
        largest = self.largest.read((slice(block, ceil_div(last, self.block)),))
        values = torch.tensor(self.table)[codes.long()] * largest[torch.arange(first, last) // self.block - block]
        return values.reshape(-1, self.shape[1])[:, columns]


def bitsandbytes(raw: Raw) -> Found:
    """Take the matrices of bitsandbytes; its tensors tell all."""
    found = Found("bitsandbytes")
    of_four: dict[str, None] = {}
    for name in raw.tensors:
        path, dot, leaf = name.rpartition(".weight.")
        if dot and leaf in _LEAVES:
            of_four[f"{path}.weight"] = None
    for path in of_four:
        _add_table(found, raw, path)
    for path in raw.paths(("SCB",), ("weight_format",)):
        _add_int8(found, Members(raw, path, found))
    return found


def _add_table(found: Found, raw: Raw, name: str) -> None:
    """Add a matrix of nf4 or fp4."""
    path, _, leaf = name.rpartition(".")
    of_weight, members = Members(raw, path, found), Members(raw, name, found)
    kinds = [kind for kind in TABLES if members.has(f"{_STATE}{kind}")]
    weight = of_weight.take(leaf, _STORAGE)
    state = _state(members, kinds[0] if kinds else "nf4")
    table = members.take("quant_map", (torch.float32,), (16,))
    if weight is None or state is None or table is None:
        return
    values, kind = math.prod(state.shape), kinds[0]
    blocks = ceil_div(values, state.blocksize)
    if weight.shape[1:] not in ((1,), ()) or weight.shape[0] * weight.dtype.itemsize != ceil_div(values, 2):
        of_weight.fault(leaf, f"is {weight.dtype} {weight.shape}, not the {ceil_div(values, 2)} bytes of {state.shape}")
    if not torch.equal(table.read(), torch.tensor(TABLES[kind])):
        members.fault("quant_map", f"is not the table of {kind}")
    nested = members.has("nested_absmax") or members.dtype("absmax") is torch.uint8
    absmax = members.take("absmax", (torch.uint8 if nested else torch.float32,), (blocks,))
    of_blocks = of_codes = None
    if nested:
        of_blocks = members.take("nested_absmax", (torch.float32,), (ceil_div(blocks, state.nested_blocksize),))
        of_codes = members.take("nested_quant_map", (torch.float32,), (256,))
    if absmax is None or not (of_weight.are_sound and members.are_sound):
        return
    both = None if of_blocks is None or of_codes is None else (of_blocks, of_codes.read())
    largest = _Largest(absmax, both, state.nested_blocksize, state.nested_offset)
    (out, inputs), size = state.shape, state.blocksize
    flat = _FlatValues(state.shape, weight, largest, size, TABLES[kind])
    group = math.gcd(size, inputs)  # blocks that cross rows are cut where rows end
    if group < size and group % SHORTEST:
        found.dequantize(name, f"blocks of {size} cross rows of {inputs}", flat)
        return
    of_groups = largest if group == size else Tiled(largest, size // group, out * inputs // group)
    data = mapped(_Flat(weight, (out, inputs // 2)), torch.uint8, lambda read: read >> 4 | read << 4)
    bits = mapped(InRows(of_groups, (out, inputs // group)), BITS, lambda read: read.view(BITS))
    found.add(name, state.shape, f"{kind}:{group}", {"data": data, "scale": bits}, lambda: flat)


def _state(members: Members, kind: str) -> _State | None:
    """The JSON beside a matrix; None after a fault."""
    leaf = f"{_STATE}{kind}"
    stored = members.take(leaf, (torch.uint8,), (-1,))
    if stored is None:
        return None
    if stored.shape[0] > _LONGEST:
        members.fault(leaf, f"is {stored.shape[0]} bytes of JSON; possible: up to {_LONGEST}")
        return None
    try:
        state = _State.model_validate(json.loads(bytes(stored.read().tolist())))
    except (ValueError, ValidationError, RecursionError) as error:
        members.fault(leaf, f"is not the JSON of a matrix: {str(error).partition(chr(10))[0]}")
        return None
    if state.quant_type != kind or min(state.blocksize, state.nested_blocksize, *state.shape) < 1:
        members.fault(leaf, f"describes {state.quant_type} {state.shape} in blocks of {state.blocksize}")
        return None
    return state


def _add_int8(found: Found, members: Members) -> None:
    """Add an int8 matrix with a scale for each row."""
    weight = members.take("weight", (torch.int8,), (-1, -1))
    scale = members.take("SCB", (torch.float32,))
    layout = members.take("weight_format", (torch.uint8,)) if members.has("weight_format") else None
    if weight is None or scale is None:
        return
    if scale.shape not in ((weight.shape[0],), (weight.shape[0], 1)):
        members.fault("SCB", f"is {scale.shape} for {weight.shape[0]} rows")
        return
    if layout is not None and bool((layout.read() != 0).any()):
        members.fault("weight_format", "names a layout of one kernel; possible: 0, which is by rows")
        return
    (out, inputs) = weight.shape
    rows = mapped(Tiled(scale, 1, out), torch.float32, lambda read: read * _BYTE)
    option, bits = scale_buffer(rows, has_float16=True)
    buffers: dict[str, LazyTensor] = {"data": weight, "scale": bits}

    def values() -> LazyTensor:
        return Values(weight.shape, weight, of_int8, rows, regular_groups(inputs, inputs))

    found.add(weight.name, weight.shape, f"int8:row{option}", buffers, values)
