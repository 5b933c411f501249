"""torchao's tensors, of files of safetensors or of a live model: int8, fp8, packed int4, and integers that take a byte.

The file's metadata has an entry for each tensor `PATH.weight`, JSON with its class, block sizes and parts. Parts are
called `PATH._weight_qdata`, `PATH._weight_scale` and `PATH._weight_zero_point`.

    weight = scale * (qdata - zero_point)

Those of int4 are in int4_tensors.py.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from infuse.ground.errors import CheckpointError
from infuse.quant.integer import pack_integers
from infuse.weights.coded.buffers import NIBBLES, Rows, mapped, scale_buffer, without_nan
from infuse.weights.coded.form import FLOATS, Found, Members, Raw, is_single
from infuse.weights.coded.int4_tensors import PARTS as INT4_PARTS
from infuse.weights.coded.int4_tensors import Windows, add_int4
from infuse.weights.coded.modules import Memory
from infuse.weights.coded.scaled import group_text, spread
from infuse.weights.coded.settings import MOST
from infuse.weights.coded.values import Values, of_fp8, of_integers, regular_groups
from infuse.weights.lazy import FileTensor, LazyTensor, Shape
from infuse.weights.safetensors_file import SafetensorsFile

_INT8, _FP8, _INTX = "Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"
_KINDS = (_INT8, _FP8, _INTX, *INT4_PARTS)
_PARTS = ("qdata", "scale", "zero_point")
_NAME = re.compile(r"_(\w+?)_(qdata|scale_and_zero|scale|zero_point)")
_TOLD = (SafetensorsFile, Memory)  # files with metadata


class _Data(BaseModel):
    """The attributes of a tensor of torchao."""

    block_size: list[int]
    shape: list[int] | None = None
    target_dtype: Any = None
    act_quant_kwargs: Any = None
    activation_quantization: str | None = None

    @property
    def bits(self) -> int:
        """Bits of a code: `int4` → 4."""
        name = self.target_dtype.get("_data") if isinstance(self.target_dtype, dict) else self.target_dtype
        matched = re.fullmatch(r"(?:torch\.)?int([1-8])", str(name))
        return int(matched[1]) if matched else 8


class _Entry(BaseModel):
    """The JSON of a tensor."""

    kind: str = Field(alias="_type")
    data: dict[str, Any] = Field(alias="_data", default_factory=dict)


def torchao(raw: Raw) -> Found:
    """Take the tensors that the metadata of safetensors files gives a class of torchao."""
    found = Found("torchao")
    paths: dict[str, FileTensor] = {}
    windows = Windows.new()
    for name, tensor in raw.tensors.items():
        path, _, leaf = name.rpartition(".")
        matched = _NAME.fullmatch(leaf)
        if matched and isinstance(tensor.file, _TOLD) and f"{path}.{matched[1]}" in tensor.file.metadata:
            paths.setdefault(f"{path}.{matched[1]}", tensor)
        elif matched and matched[2] == "qdata" and raw.form == "torchao":
            found.used.add(name)
            found.faults.append(
                f"{tensor.file.path}: {name} has no entry in the file's metadata, which tells its class"
            )
    for name, part in paths.items():
        _add(found, raw, name, part, windows)
    return found


def _add(found: Found, raw: Raw, name: str, part: FileTensor, windows: Windows) -> None:
    assert isinstance(part.file, _TOLD)
    path, _, leaf = name.rpartition(".")
    members = Members(raw, path, found)
    try:
        entry = _Entry.model_validate(json.loads(part.file.metadata[name]))
        data = _Data.model_validate(entry.data) if entry.kind in _KINDS else None
    except (ValueError, TypeError, ValidationError, RecursionError) as error:
        members.fault(f"_{leaf}_qdata", f"has metadata that cannot be read: {str(error).partition(chr(10))[0]}", part)
        return
    if data is None:
        possible = f"possible: {', '.join(_KINDS)}"
        members.fault(f"_{leaf}_qdata", f"is part of a {entry.kind} of torchao, which is not read; {possible}", part)
        return
    known = [f"_{leaf}_{one}" for one in INT4_PARTS.get(entry.kind, _PARTS)]
    if others := [one for one in raw.by_path[path] if one.startswith(f"_{leaf}_") and one not in known]:
        for other in others:
            members.fault(other, f"is a part of {name} that is not read; possible: {', '.join(known)}")
        return
    if entry.kind in INT4_PARTS:
        if (matrix := _matrix(members, leaf, data, part)) is not None:
            add_int4(found, members, leaf, entry.kind, matrix, windows)
        return
    _add_bytes(found, members, name, entry.kind, data)


def _matrix(members: Members, leaf: str, data: _Data, part: FileTensor) -> tuple[Shape, int] | None:
    """The shape of a tensor of int4 and the inputs of a group; None after a fault."""
    shape, block = data.shape or (), data.block_size
    if len(shape) != 2 or min(shape) < 1 or max(shape) > MOST:
        members.fault(f"_{leaf}_qdata", f"has the shape {data.shape} in its metadata; possible: [out, in]", part)
        return None
    (out, inputs), size = shape, block[-1] if block else 0
    if block != [1, size] or size < 2 or size % 2 or inputs % size:
        members.fault(f"_{leaf}_qdata", f"has blocks {block} of {shape}; possible: [1, an even group]", part)
        return None
    return (out, inputs), size


def _add_bytes(found: Found, members: Members, name: str, kind: str, data: _Data) -> None:
    """Add codes that take a byte each."""
    leaf = name.rpartition(".")[2]
    dtype = torch.float8_e4m3fn if kind == _FP8 else torch.int8
    qdata = members.take(f"_{leaf}_qdata", (dtype,), (-1, -1))
    scale = members.take(f"_{leaf}_scale", FLOATS)
    zero = None
    if members.has(f"_{leaf}_zero_point"):
        zero = members.take(f"_{leaf}_zero_point", (torch.int8,), *(() if scale is None else (scale.shape,)))
    if qdata is None or scale is None or not members.are_sound:
        return
    (out, inputs), block = qdata.shape, data.block_size
    tall, size = block[-2:] if len(block) == 2 else (0, 0)
    if tall not in (1, out) or size < 1 or inputs % size or (tall > 1 and not is_single(scale.shape)):
        members.fault(f"_{leaf}_scale", f"has blocks {block} of {qdata.shape}; possible: [1, group], or the whole")
        return
    spread_out = spread(scale, qdata.shape, None)
    if spread_out is None or spread_out[1] != size:
        members.fault(f"_{leaf}_scale", f"is {scale.shape} for {qdata.shape} in blocks of {block}")
        return
    if zero is not None and not bool(zero.read().any()):
        zero = None
    _add_checked(found, name, kind, data, qdata, spread_out[0], zero)


def _add_checked(
    found: Found, name: str, kind: str, data: _Data, qdata: FileTensor, scale: LazyTensor, zero: FileTensor | None
) -> None:
    """Add codes as int8, int4 or fp8."""
    (out, inputs), size = qdata.shape, data.block_size[-1]
    group, groups = group_text(size, inputs), regular_groups(inputs, size)
    spread_zero = None if zero is None else spread(zero, qdata.shape, None)
    zeros = None if spread_zero is None else spread_zero[0]
    if kind == _FP8:
        codes = without_nan(qdata, qdata)
        option, buffer = scale_buffer(scale, has_float16=False)
        found.add(
            name, (out, inputs), f"fp8:{group}{option}", {"data": codes, "scale": buffer},
            lambda: Values((out, inputs), codes, of_fp8, scale, groups),
        )  # fmt: skip
        return
    option, buffer = scale_buffer(scale, has_float16=True)
    buffers: dict[str, LazyTensor] = {"data": qdata, "scale": buffer}
    if zeros is not None:
        buffers["zero"] = zeros
    bits = 8
    if data.bits <= 4 and inputs % 2 == 0 and (zero is None or _in_nibbles(zero.read())):
        bits = 4
        buffers["data"] = Rows(qdata, inputs // 2, torch.uint8, partial(_nibbles, qdata))
        if zeros is not None:
            buffers["zero"] = mapped(zeros, torch.int8, lambda read: read * 16)
    is_rounding = data.act_quant_kwargs is not None or "int8" in (data.activation_quantization or "")
    text = f"int{bits}:{group}{'' if zeros is None else ':asymmetric'}{option}{':a8' if is_rounding else ''}"
    found.add(
        name, (out, inputs), text, buffers,
        lambda: Values((out, inputs), buffers["data"], of_integers(bits), scale, groups, zeros),
    )  # fmt: skip


def _in_nibbles(codes: Tensor) -> bool:
    return not codes.numel() or NIBBLES[0] <= int(codes.amin()) and int(codes.amax()) <= NIBBLES[1]


def _nibbles(of: FileTensor, codes: Tensor) -> Tensor:
    if not _in_nibbles(codes):
        raise CheckpointError(
            f"{of.file.path}: {of.name}: has codes {int(codes.amin())} to {int(codes.amax())}; possible, as its "
            f"metadata says 4 bits or less: {NIBBLES[0]} to {NIBBLES[1]}"
        )
    return pack_integers(codes)
