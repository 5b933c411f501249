"""quanto (optimum-quanto): 8 bits with a scale for each row; 4 and 2 bits in groups, with a scale and a shift for each.

weight._data          int8 or fp8 [out, in];  weight = _scale * _data
weight._scale         [out, 1]

weight._data._data    uint8 [n / 2, group], or [n / 4, group] of 2 bits, for n groups: the first half (quarter) of them
                      in the lowest bits, and so on
weight._scale         [n, 1]
weight._shift         [n, 1];  weight = _scale * code - _shift, or _scale * (code - _shift) if it is an integer

input_scale, output_scale: of activations; 1 unless these are quantized, too

Files do not tell how many groups a row has: the model's shape does. A file quanto_qmap.json names the types.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from infuse.quant.integer import pack_unsigned, range_of
from infuse.weights.coded.buffers import BITS, InRows, Rows, Tiled, mapped, scale_buffer, without_nan
from infuse.weights.coded.form import FLOATS, Found, Members, Raw, ceil_div
from infuse.weights.coded.scaled import group_text
from infuse.weights.coded.values import Values, of_fp8, of_int8, regular_groups
from infuse.weights.lazy import Coded, CodedTensor, LazyTensor, Shape, Slices, of_all_axes

_LEAVES = ("_data", "_scale", "_shift")
_OF_ACTIVATIONS = ("input_scale", "output_scale")
_INTEGERS = (torch.uint8, torch.int8)
_NONE = (None, "none")
_EIGHT = {
    torch.int8: "qint8",
    torch.float8_e4m3fn: "qfloat8_e4m3fn",
    torch.float8_e5m2: "qfloat8_e5m2",
    torch.float8_e4m3fnuz: "qfloat8_e4m3fnuz",
}


class _Types(BaseModel):
    """The types of one module."""

    weights: str | None = None
    activations: str | None = None


class _Config(BaseModel):
    """What quanto_qmap.json says of each module, by path."""

    modules: dict[str, _Types] = Field(default_factory=dict)


@dataclass(frozen=True)
class _Codes:
    """Codes [groups, size], uint8, of bytes: their lowest bits hold the first groups, the highest the last ones."""

    source: LazyTensor
    shape: Shape
    bits: int

    dtype, coded = torch.uint8, None

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        start, stop, _ = rows.indices(self.shape[0])
        high, pieces = self.source.shape[0], []
        for place in range(8 // self.bits):
            first, last = max(start, place * high), min(stop, (place + 1) * high)
            if first < last:
                read = self.source.read((slice(first - place * high, last - place * high), columns))
                pieces.append(read >> place * self.bits & (1 << self.bits) - 1)
        return torch.cat(pieces) if pieces else self.source.read((slice(0, 0), columns))


@dataclass(frozen=True)
class Grouped:
    """A matrix whose groups are known, but only the model knows its rows: [groups, size], float32.

    `scale` and `shift` are [groups, 1]; a format of `bits` keeps the codes. `in_shape` is the matrix [out, in].
    """

    codes: LazyTensor
    scale: LazyTensor
    shift: LazyTensor
    bits: int

    dtype, coded = torch.float32, None

    @property
    def shape(self) -> Shape:
        return self.codes.shape

    def read(self, part: Slices = ()) -> Tensor:
        matrix = self.in_shape(self.shape)
        assert matrix is not None
        return matrix.read(part)

    def in_shape(self, shape: Shape) -> LazyTensor | None:
        """The matrix [out, in], in its codes unless the groups are odd; None if it has not as many groups."""
        count, size = self.shape
        if len(shape) != 2 or count * size != shape[0] * shape[1] or shape[1] % size:
            return None
        return _matrix(shape, InRows(self.codes, shape), self.scale, self.shift, self.bits)


def _matrix(shape: Shape, codes: LazyTensor, scale: LazyTensor, shift: LazyTensor, bits: int) -> LazyTensor:
    """The matrix of codes [out, in], with scale and shift [groups, 1], in int4 or int2; by values if groups are odd."""
    (out, inputs), is_offset = shape, shift.dtype.is_floating_point
    groups = scale.shape[0] // out
    size = inputs // groups
    rows, shifts = (InRows(one, (out, groups)) for one in (scale, shift))
    if size % 2:
        zero, offset = (None, mapped(shifts, torch.float32, _negative)) if is_offset else (shifts, None)
        return Values(shape, codes, of_int8, rows, regular_groups(inputs, size), zero, offset)
    option, scales = scale_buffer(rows, has_float16=True)
    data = Rows(codes, inputs * bits // 8, torch.uint8, partial(pack_unsigned, bits=bits))
    buffers: dict[str, LazyTensor] = {"data": data, "scale": scales}
    if is_offset:
        buffers["offset"] = mapped(shifts, BITS, lambda read: _negative(read).view(BITS))
    else:
        buffers["zero"] = mapped(shifts, torch.int8, partial(_zeros, bits))
    kind = "offset" if is_offset else "asymmetric"
    coded = Coded(f"int{bits}:{group_text(size, inputs)}:{kind}{option}", buffers)
    return CodedTensor(shape, torch.float32, coded)


def _zeros(bits: int, read: Tensor) -> Tensor:
    """Zeros among unsigned codes as formats have them: among signed codes, and in parts of a step."""
    return (read.to(torch.int8) + range_of(bits)[0]) * (256 >> bits)


def _negative(read: Tensor) -> Tensor:
    return -read.float()


def quanto(raw: Raw) -> Found:
    """Take the matrices of quanto; their tensors tell all but their shapes."""
    found = Found("quanto")
    owners: dict[str, None] = {}
    for name in raw.tensors:
        path, _, leaf = name.rpartition(".")
        path = path.removesuffix("._data") if leaf == "_data" else path
        if leaf in _LEAVES and path.endswith(".weight"):
            owners[path] = None
    config = _Config()
    if owners and raw.settings is not None and raw.form == "quanto":
        config = raw.settings.read(_Config)
    for name in owners:
        path = name.removesuffix(".weight")
        members, of_module = Members(raw, name, found), Members(raw, path, found)
        if members.dtype("_data") is torch.uint8:
            kind = None
            _add_unpacked(found, members)
        else:
            kind = _add_eight(found, members) if members.has("_data") else _add_few(found, raw, members)
        _check_types(of_module, config.modules.get(path), kind)
        for leaf in _OF_ACTIVATIONS:
            _check_activations(of_module, leaf)
    return found


def _check_types(of_module: Members, types: _Types | None, kind: str | None) -> None:
    """Check what the file of types says of a module."""
    if types is None or kind is None:
        return
    if types.weights != kind:
        of_module.fault("weight", f"holds {kind}, the file of types says {types.weights}", of_module.any())
    if types.activations not in _NONE:
        what = f"has activations in {types.activations}, with one scale for all, which is not supported"
        of_module.fault("weight", f"{what}; quantize the weights alone", of_module.any())


def _check_activations(of_module: Members, leaf: str) -> None:
    """Check that activations are not quantized, which changes their scales."""
    if not of_module.has(leaf):
        return
    scale = of_module.take(leaf, FLOATS, (), (1,))
    if scale is not None and float(scale.read()) != 1:
        what = "is not 1: activations are quantized with one scale for all, which is not supported"
        of_module.fault(leaf, f"{what}; quantize the weights alone")


def _add_eight(found: Found, members: Members) -> str | None:
    """Add a matrix of 8 bits; return its type."""
    data = members.take("_data", tuple(_EIGHT), (-1, -1))
    out = -1 if data is None else data.shape[0]
    scale = members.take("_scale", FLOATS, (out, 1), (1, 1), ())
    if data is None or scale is None:
        return None
    (out, inputs), kind = data.shape, _EIGHT[data.dtype]
    rows, groups = Tiled(scale, 1 if scale.shape == (out, 1) else out, out), regular_groups(inputs, inputs)
    if kind == "qint8":
        option, scales = scale_buffer(rows, has_float16=True)
        values = Values(data.shape, data, of_int8, rows, groups)
        found.add(members.path, data.shape, f"int8:row{option}", {"data": data, "scale": scales}, lambda: values)
    elif kind == "qfloat8_e4m3fn":
        option, scales = scale_buffer(rows, has_float16=False)
        codes = without_nan(data, data)
        values = Values(data.shape, codes, of_fp8, rows, groups)
        found.add(members.path, data.shape, f"fp8:row{option}", {"data": codes, "scale": scales}, lambda: values)
    else:
        values = Values(data.shape, data, of_int8, rows, groups)
        found.dequantize(members.path, f"of fp8, {kind} has no format", values)
    return kind


def _add_unpacked(found: Found, members: Members) -> None:
    """Add a matrix whose codes [out, in] are not packed, which no file has, but a model in memory."""
    data = members.take("_data", (torch.uint8,), (-1, -1))
    scale = members.take("_scale", FLOATS, (-1, 1))
    shift = members.take("_shift", FLOATS, *(() if scale is None else (scale.shape,)))
    if data is None or scale is None or shift is None:
        return
    (out, inputs), count = data.shape, scale.shape[0]
    if count % out or inputs % (count // out):
        members.fault("_scale", f"has {count} groups for {data.shape}")
        return
    found.tensors[members.path] = _matrix(data.shape, data, scale, shift, 4)


def _add_few(found: Found, raw: Raw, members: Members) -> str | None:
    """Add a matrix of 4 or 2 bits; return its type."""
    inner = Members(raw, f"{members.path}._data", found)
    scale = members.take("_scale", FLOATS, (-1, 1))
    data = inner.take("_data", (torch.uint8,), (-1, -1))
    shift = members.take("_shift", (*FLOATS, *_INTEGERS), *(() if scale is None else (scale.shape,)))
    if data is None or scale is None or shift is None:
        return None
    (high, size), count = data.shape, scale.shape[0]
    bits = next((bits for bits in (4, 2) if high == ceil_div(count * bits, 8)), None)
    if bits is None:
        what = f"is {data.shape} for {count} groups; possible: ({ceil_div(count, 2)}, group) of 4 bits"
        inner.fault("_data", f"{what}, ({ceil_div(count, 4)}, group) of 2")
        return None
    kept = 4 if size % 4 else bits  # groups of int2 fill bytes
    if not shift.dtype.is_floating_point:
        low, most = (int(bound) for bound in torch.aminmax(shift.read()))
        if low < 0 or most > 15:
            members.fault("_shift", f"holds {low} to {most}; possible, if it is an integer: 0 to 15")
            return None
        kept = 4 if most >= 2**bits else kept
    matrix = Grouped(_Codes(data, (count, size), bits), scale, shift, kept)
    if size % 2:
        found.dequantize(members.path, f"groups of {size} are odd", matrix)
    else:
        found.tensors[members.path] = matrix
    return f"qint{bits}"
