"""Quantized weights on CPUs without kernels: dequantize once, when a layer takes its weight.

Products then run as fast as PyTorch's own. The values equal those of the reference, which dequantizes in every call.
They need the memory of a plain weight, and the codes can be recovered from them. There is one body per dtype, since a
layout does not know the dtype of the activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from infuse import memory
from infuse.device import Device
from infuse.ops.embedding import quantized_embedding
from infuse.ops.linear import linear, quantized_linear
from infuse.ops.op import DEQUANTIZED, Layout
from infuse.quant.format import QuantizedWeight

HELD: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, name.removeprefix("dequantized_")) for name in DEQUANTIZED}
)


def _needs(held: torch.dtype, device: Device, dtype: torch.dtype) -> str | None:
    return None if device.kind == "cpu" and dtype == held else ""  # "": not worth reporting


def _values(dtype: torch.dtype, weight: QuantizedWeight) -> QuantizedWeight | None:
    """Replace the codes by their values; None if the codes cannot be recovered, as with a scale that is not finite."""
    held = _gathered(dtype, [weight], weight.shape)
    return held if torch.equal(_codes(held).data, weight.data) else None


def _gathered(dtype: torch.dtype, parts: Iterable[QuantizedWeight], shape: tuple[int, int]) -> QuantizedWeight:
    """The same from parts of the rows, in order. Unchecked: from float32 and bfloat16 the codes can be recovered."""
    data, scales, zeros, first = memory.empty(shape, dtype), [], [], 0
    for part in parts:
        data[first : first + part.shape[0]] = part.format.dequantize(part, dtype)
        first += part.shape[0]
        scales.append(part.scale)
        zeros += [] if part.zero is None else [part.zero]
    assert first == shape[0], (first, shape)
    return QuantizedWeight(data, torch.cat(scales), torch.cat(zeros) if zeros else None, shape, part.format)


def _codes(held: QuantizedWeight) -> QuantizedWeight:
    return replace(held, data=held.format.codes(held.data, held.scale, held.zero))


def _linear(x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, *given: Any) -> Tensor:
    """`given`: outputs, inputs and format, then the fields of Fusion."""
    return linear.reference(x, data if data.dtype is x.dtype else data.to(x.dtype), bias, *given[3:])


def _embedding(
    index: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, rows: int, width: int, format: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return data.index_select(0, index.reshape(-1)).to(dtype).view(*index.shape, width)


for _name, _dtype in HELD.items():
    # float16 loses the codes of tiny scales, so it converts whole weights only and checks them.
    _layout = Layout(partial(_values, _dtype), _codes)
    if _dtype is not torch.float16:
        _layout = replace(_layout, part_rows=1, gather=partial(_gathered, _dtype))
    for _op, _function in ((quantized_linear, _linear), (quantized_embedding, _embedding)):
        _op.implement(_name, partial(_needs, _dtype), _layout)(_function)
