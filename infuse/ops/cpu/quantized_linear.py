"""The products of ops/linear.py with quantized weights, and embedding lookups in them, in C++.

Weights are converted once, to panels of 16 interleaved rows (src/panels.h). Few rows of x stream the codes. Many rows
multiply tiles that are dequantized in a core's cache (src/tile.h), with the activation fused. For formats with :a8 they
round x to 8 bits and multiply integers (src/integer_tile.h). If the instruction set has no bfloat16 products, many rows
use PyTorch's product with the whole dequantized weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse import memory
from infuse.native import CODES, DTYPES, kernels, needs
from infuse.ops.cpu.activation import ACTIVATION_NUMBERS
from infuse.ops.cpu.linear import fits
from infuse.ops.embedding import quantized_embedding
from infuse.ops.linear import Fusion, quantized_linear
from infuse.ops.op import Layout
from infuse.quant.format import SCALE_DTYPE, QuantFormat, QuantizedWeight
from infuse.quant.parse import quant_format

PANEL_ROWS = 16
SHORT_ACTIVATIONS = 8  # flag added to a code: kShortX in src/binding.h
UNIT = {8: 4, 4: 8, 6: 16}  # bits → consecutive codes of a row that fill whole words


def _declined(format: QuantFormat, inputs: int) -> str | None:
    unit = UNIT[format.bits]
    if inputs == 0:
        return f"{format}: there are no inputs"
    if inputs % (format.group_count(inputs) * unit):
        return f"{format}: groups of {inputs // format.group_count(inputs)} are not multiples of {unit}"
    return None


def _in_panels(weight: QuantizedWeight) -> QuantizedWeight | None:
    """data [O, bytes] → [panels, words, 64]; scale and zero [O, groups] → [panels, groups, 16].

    None if a group ends inside a word, or if fp8 codes contain a NaN, which quantizing never produces.
    """
    if _declined(weight.format, weight.shape[1]) or weight.data.device.type != "cpu":
        return None
    return _gathered([weight], weight.shape)


def _gathered(parts: Iterable[QuantizedWeight], shape: tuple[int, int]) -> QuantizedWeight | None:
    """As _in_panels, for a weight of `shape` in parts of its rows. All parts but the last are whole panels."""
    (outputs, inputs), first = shape, 0
    panels = -(-outputs // PANEL_ROWS)
    whole: QuantizedWeight | None = None
    for part in parts:
        if whole is None:
            groups = part.scale.shape[1]
            data = memory.empty((panels, inputs * part.format.bits // 32, 4 * PANEL_ROWS), part.data.dtype)
            scale = torch.zeros(panels, groups, PANEL_ROWS, dtype=part.scale.dtype)
            zero = None if part.zero is None else torch.zeros(panels, groups, PANEL_ROWS, dtype=part.zero.dtype)
            whole = QuantizedWeight(data, scale, zero, shape, part.format)
        here = slice(first, first - (-part.shape[0] // PANEL_ROWS))
        first = here.stop
        if part.shape[0] % PANEL_ROWS:
            whole.data[here.stop - 1] = 0
        if not kernels().pack_panels.default(part.data.contiguous(), CODES.index(part.format.name), whole.data[here]):
            return None
        _interleave(part.scale, whole.scale[here])
        if part.zero is not None and whole.zero is not None:
            _interleave(part.zero, whole.zero[here])
    assert first == panels, (first, shape)
    return whole


def _in_rows(weight: QuantizedWeight) -> QuantizedWeight:
    """The inverse of _in_panels."""
    outputs, inputs = weight.shape
    data = torch.empty(outputs, inputs * weight.format.bits // 8, dtype=weight.data.dtype)
    kernels().unpack_panels.default(weight.data, CODES.index(weight.format.name), data)
    scale, zero = (
        None if t is None else t.transpose(1, 2).flatten(0, 1)[:outputs].contiguous()
        for t in (weight.scale, weight.zero)
    )
    assert scale is not None
    return replace(weight, data=data, scale=scale, zero=zero)


def _shaped(weight: QuantizedWeight) -> QuantizedWeight:
    """View panels that were stored in the shapes of rows, [O, bytes] and [O, groups], as panels again."""
    panels = weight.shape[0] // PANEL_ROWS
    scale, zero = (None if t is None else t.view(panels, -1, PANEL_ROWS) for t in (weight.scale, weight.zero))
    assert scale is not None
    return replace(weight, data=weight.data.view(panels, -1, 4 * PANEL_ROWS), scale=scale, zero=zero)


def _interleave(of_rows: Tensor, to: Tensor) -> None:
    """[O, groups] → [panels, groups, 16]."""
    whole = len(of_rows) // PANEL_ROWS
    to[:whole] = of_rows[: whole * PANEL_ROWS].view(whole, PANEL_ROWS, of_rows.shape[1]).transpose(1, 2)
    to[whole:, :, : len(of_rows) % PANEL_ROWS] = of_rows[whole * PANEL_ROWS :].t()


@cache
def code_of(format: str) -> int:
    """The kernels' number of a format."""
    chosen = quant_format(format)
    return CODES.index(chosen.name) + (SHORT_ACTIVATIONS if chosen.activation_bits == 8 else 0)


PANELS = Layout(_in_panels, _in_rows, _declined, PANEL_ROWS, _gathered, f"panels of {PANEL_ROWS} rows", _shaped)


@quantized_linear.implement("cpu", needs, PANELS)
def _quantized_linear(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, outputs: int, inputs: int,
    format: str, *around: Any,
) -> Any:  # fmt: skip
    if around:
        return _with_around(x, (data, scale, zero, bias, outputs, inputs, format), Fusion(*around))
    code, dtype = code_of(format), x.dtype
    if x.size(-1) != inputs:
        raise RuntimeError(f"x has {x.size(-1)} columns, and the weight takes {inputs}")
    if dtype not in DTYPES:
        x, bias = x.float(), None if bias is None else bias.float()
        return _quantized_linear(x, data, scale, zero, bias, outputs, inputs, format).to(dtype)
    if bias is not None and not fits(bias, dtype):
        bias = bias.to(dtype).contiguous()
    if not x.is_contiguous():
        x = x.contiguous()
    if scale.dtype is not SCALE_DTYPE:  # casting the model also casts its scales
        scale = scale.to(SCALE_DTYPE)
    y = kernels().quantized_linear.default(x, data, scale, zero, bias, code, outputs, -1, False)
    if y is not None:
        return y
    weight = torch.empty(outputs, inputs, dtype=dtype)
    kernels().dequantize.default(data, scale, zero, code, weight)
    return F.linear(x, weight, bias)


def _with_around(x: Tensor, weight: tuple, around: Fusion) -> Any:
    """`weight`: the op's arguments from data to format."""
    data, scale, zero, bias, outputs, inputs, format = weight
    x, act = around.before(x, "cpu"), ACTIVATION_NUMBERS.get(around.activation or "")
    fitting = x.dtype in DTYPES and x.is_contiguous() and fits(bias, x.dtype) and scale.dtype is SCALE_DTYPE
    if act is not None and fitting and x.size(-1) == inputs:
        code = code_of(format)
        y = kernels().quantized_linear.default(x, data, scale, zero, bias, code, outputs, act, around.gated)
        if y is not None:
            return y if around.residual is None else around.residual + y
    return around.after(_quantized_linear(x, *weight), "cpu")


@quantized_embedding.implement("cpu", needs, PANELS)
def _quantized_embedding(
    index: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, rows: int, width: int, format: str,
    dtype: torch.dtype,
) -> Any:  # fmt: skip
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < rows:
        raise IndexError(f"token ids from {int(index.min())} to {int(index.max())} for a table of {rows} rows")
    out = torch.empty(*index.shape, width, dtype=dtype)
    scale = scale.to(SCALE_DTYPE)
    kernels().gather_rows.default(data, scale, zero, code_of(format), index.to(torch.int64).contiguous(), out)
    return out
