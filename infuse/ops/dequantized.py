"""Quantized weights on CPUs without kernels: dequantize once, when a layer takes its weight.

Products then run as fast as PyTorch's own. The values equal those of the reference, which dequantizes in every call.
They need the memory of a plain weight, and the codes can be recovered from them. There is one body per dtype, since a
layout does not know the dtype of the activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from infuse.ground import memory
from infuse.ground.device import Device
from infuse.ops.embedding import quantized_embedding
from infuse.ops.linear import linear, quantized_linear
from infuse.ops.op import DEQUANTIZED, Layout
from infuse.quant.format import QuantFormat, QuantizedWeight

HELD: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, name.removeprefix("dequantized_")) for name in DEQUANTIZED}
)


def _needs(weight_dtype: torch.dtype, device: Device, dtype: torch.dtype) -> str | None:
    return None if device.kind == "cpu" and dtype == weight_dtype else ""  # "": not worth reporting


def _values(dtype: torch.dtype, weight: QuantizedWeight) -> QuantizedWeight | None:
    """Replace the codes by their values; None if the codes cannot be recovered, as with a scale that is not finite."""
    if _declined(weight.format, weight.shape[1]):
        return None
    values = _gathered(dtype, [weight], weight.shape)
    return values if torch.equal(_codes_of(_codes(values)), _codes_of(weight)) else None


def _gathered(dtype: torch.dtype, parts: Iterable[QuantizedWeight], shape: tuple[int, int]) -> QuantizedWeight:
    """Like `_values`, from parts of the rows, in order; unchecked, as float32 and bfloat16 keep the codes."""
    values, others, first = memory.empty(shape, dtype), [], 0
    for part in parts:
        values[first : first + part.shape[0]] = part.format.dequantize(part, dtype)
        first += part.shape[0]
        others.append([*part.tensors.values()][1:])
    assert first == shape[0], (first, shape)
    tensors = [values, *map(torch.cat, zip(*others, strict=True))]
    return QuantizedWeight.listed(tensors, shape, part.format)


def _codes(values: QuantizedWeight) -> QuantizedWeight:
    codes = values.format.codes(_codes_of(values), values.tensors)
    return QuantizedWeight.listed([codes, *[*values.tensors.values()][1:]], values.shape, values.format)


def _codes_of(weight: QuantizedWeight) -> Tensor:
    """The first buffer: codes, or the values that stand in for them."""
    return next(iter(weight.tensors.values()))


def _declined(format: QuantFormat, inputs: int) -> str | None:
    return None if format.has_nearest else f"{format}: its codes cannot be found again from values"


def _linear(x: Tensor, buffers: Sequence[Tensor], bias: Tensor | None, *arguments: Any) -> Tensor:
    """`arguments`: outputs, inputs and format, then the fields of Fusion."""
    values = buffers[0]
    return linear.reference(x, values if values.dtype is x.dtype else values.to(x.dtype), bias, *arguments[3:])


def _embedding(
    index: Tensor, buffers: Sequence[Tensor], rows: int, width: int, format: str, dtype: torch.dtype
) -> Tensor:
    return buffers[0].index_select(0, index.reshape(-1)).to(dtype).view(*index.shape, width)


for _name, _dtype in HELD.items():
    # float16 loses the codes of tiny scales, so it converts whole weights only and checks them.
    _layout = Layout(partial(_values, _dtype), _codes, _declined)
    if _dtype is not torch.float16:
        _layout = replace(_layout, part_rows=1, gather=partial(_gathered, _dtype))
    for _op, _function in ((quantized_linear, _linear), (quantized_embedding, _embedding)):
        _op.implement(_name, partial(_needs, _dtype), _layout)(_function)
