"""The products of ops/linear.py with quantized weights, and embedding lookups in them, in C++.

Weights are converted once, to panels of 16 interleaved rows (src/panels.h). Few rows of x stream the codes. Many rows
multiply tiles that are dequantized in a core's cache (src/tile.h), with the activation fused. For formats with :a8 they
round x to 8 bits and multiply integers (src/integer_tile.h). If the instruction set has no bfloat16 products, many rows
use PyTorch's product with the whole dequantized weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ground import memory
from infuse.native import CODES, DTYPES, kernels, needs
from infuse.ops.cpu.activation import ACTIVATION_NUMBERS
from infuse.ops.cpu.linear import fits
from infuse.ops.embedding import quantized_embedding
from infuse.ops.linear import Fusion, quantized_linear
from infuse.ops.op import Layout
from infuse.quant.blocks import Block, BlockFormat
from infuse.quant.format import QuantFormat, QuantizedWeight
from infuse.quant.grouped import SCALE_DTYPE, GroupedFormat
from infuse.quant.parse import quant_format

PANEL_ROWS = 16
SHORT_ACTIVATIONS = 64  # flag added to a code: kShortX in src/binding.h
UNIT = {8: 4, 4: 8, 6: 16, 5: 32, 2: 16, 3: 32}  # bits → consecutive codes of a row that fill whole words


def _declined(format: QuantFormat, inputs: int) -> str | None:
    if format.name not in CODES or not isinstance(format, (GroupedFormat, BlockFormat)):
        return f"{format}: there is no kernel for it yet"
    unit = UNIT[format.bits]
    if inputs == 0:
        return f"{format}: there are no inputs"
    if isinstance(format, BlockFormat):
        return None
    if inputs % (format.group_count(inputs) * unit):
        return f"{format}: groups of {inputs // format.group_count(inputs)} are not multiples of {unit}"
    return None


def _in_panels(weight: QuantizedWeight) -> QuantizedWeight | None:
    """data [O, bytes] → [panels, words, 64]; scale and zero [O, groups] → [panels, groups, 16], also bytes of blocks.

    None if a group ends inside a word, or if fp8 codes contain a NaN, which quantizing never produces.
    """
    if _declined(weight.format, weight.shape[1]) or weight.device.type != "cpu":
        return None
    return _gathered([weight], weight.shape, memory.empty)


def _gathered(
    parts: Iterable[QuantizedWeight], shape: tuple[int, int], empty: Callable[..., Tensor] = memory.lasting
) -> QuantizedWeight | None:
    """As _in_panels, for a weight of `shape` in parts of its rows. All parts but the last are whole panels."""
    (outputs, inputs), first = shape, 0
    panels = -(-outputs // PANEL_ROWS)
    whole: dict[str, Tensor] = {}
    for part in parts:
        data, *of_groups = part.tensors.values()
        if not whole:
            room = empty((panels, inputs * part.format.bits // 32, 4 * PANEL_ROWS), data.dtype)
            rooms = [empty((panels, each.shape[1], PANEL_ROWS), each.dtype) for each in of_groups]
            whole = dict(zip(part.tensors, (room, *rooms), strict=True))
        here = slice(first, first - (-part.shape[0] // PANEL_ROWS))
        first = here.stop
        to, *to_groups = (each[here] for each in whole.values())
        if part.shape[0] % PANEL_ROWS:
            for each in (to, *to_groups):
                each[-1] = 0
        if not kernels().pack_panels.default(data.contiguous(), CODES.index(part.format.name), to):
            return None
        for of_rows, to_panels in zip(of_groups, to_groups, strict=True):
            _interleave(of_rows, to_panels, _block_of(part.format))
    assert first == panels, (first, shape)
    return QuantizedWeight(whole, shape, part.format)


def _in_rows(weight: QuantizedWeight) -> QuantizedWeight:
    """The inverse of _in_panels."""
    outputs, inputs = weight.shape
    in_panels, *of_groups = weight.tensors.values()
    data = torch.empty(outputs, inputs * weight.format.bits // 8, dtype=in_panels.dtype)
    kernels().unpack_panels.default(in_panels, CODES.index(weight.format.name), data)
    rows = (_deinterleaved(each, _block_of(weight.format))[:outputs].contiguous() for each in of_groups)
    return QuantizedWeight.listed([data, *rows], weight.shape, weight.format)


def _shaped(weight: QuantizedWeight) -> QuantizedWeight:
    """View panels that were stored in the shapes of rows, [O, bytes] and [O, groups], as panels again."""
    panels = weight.shape[0] // PANEL_ROWS
    data, *of_groups = weight.tensors.values()
    views = (each.view(panels, -1, PANEL_ROWS) for each in of_groups)
    return QuantizedWeight.listed([data.view(panels, -1, 4 * PANEL_ROWS), *views], weight.shape, weight.format)


def _block_of(format: QuantFormat) -> Block | None:
    return format.block if isinstance(format, BlockFormat) else None


def _interleave(of_rows: Tensor, to: Tensor, block: Block | None) -> None:
    """[O, groups] → [panels, groups, 16]; bytes of blocks field by field: each is [count][16 rows] of its numbers."""
    if block is None:
        whole = len(of_rows) // PANEL_ROWS
        to[:whole] = of_rows[: whole * PANEL_ROWS].view(whole, PANEL_ROWS, of_rows.shape[1]).transpose(1, 2)
        to[whole:, :, : len(of_rows) % PANEL_ROWS] = of_rows[whole * PANEL_ROWS :].t()
        return
    missing = -len(of_rows) % PANEL_ROWS
    rows = of_rows if not missing else torch.cat((of_rows, of_rows.new_zeros(missing, of_rows.shape[1])))
    rows_PRSB = rows.view(len(to), PANEL_ROWS, -1, block.nbytes)
    parts = rows_PRSB.split([field.nbytes for field in block.fields], dim=-1)
    in_panels = [
        part.unflatten(-1, (field.count, -1)).permute(0, 2, 3, 1, 4).flatten(2)
        for field, part in zip(block.fields, parts, strict=True)
    ]
    to.copy_(torch.cat(in_panels, dim=-1).view(to.shape))


def _deinterleaved(in_panels: Tensor, block: Block | None) -> Tensor:
    """The inverse: [panels * 16, groups]."""
    if block is None:
        return in_panels.transpose(1, 2).flatten(0, 1)
    panels_PSB = in_panels.reshape(len(in_panels), -1, block.nbytes * PANEL_ROWS)
    parts = panels_PSB.split([field.nbytes * PANEL_ROWS for field in block.fields], dim=-1)
    in_rows = [
        part.unflatten(-1, (field.count, PANEL_ROWS, -1)).permute(0, 3, 1, 2, 4).flatten(3)
        for field, part in zip(block.fields, parts, strict=True)
    ]
    return torch.cat(in_rows, dim=-1).flatten(2).flatten(0, 1)


@cache
def code_of(format: str) -> int:
    """Return the kernels' number of a format; -1 if they do not support it."""
    chosen = quant_format(format)
    if chosen.name not in CODES:
        return -1
    return CODES.index(chosen.name) + (SHORT_ACTIVATIONS if chosen.activation_bits == 8 else 0)


PANELS = Layout(_in_panels, _in_rows, _declined, PANEL_ROWS, _gathered, f"panels of {PANEL_ROWS} rows", _shaped)


@quantized_linear.implement("cpu", needs, PANELS)
def _quantized_linear(
    x: Tensor, buffers: Sequence[Tensor], bias: Tensor | None, outputs: int, inputs: int, format: str, *around: Any
) -> Any:
    if around:
        return _with_around(x, (buffers, bias, outputs, inputs, format), Fusion(*around))
    code, dtype = code_of(format), x.dtype
    if x.size(-1) != inputs:
        raise RuntimeError(f"x has {x.size(-1)} columns, and the weight takes {inputs}")
    if dtype not in DTYPES:
        x, bias = x.float(), None if bias is None else bias.float()
        return _quantized_linear(x, buffers, bias, outputs, inputs, format).to(dtype)
    if bias is not None and not fits(bias, dtype):
        bias = bias.to(dtype).contiguous()
    if not x.is_contiguous():
        x = x.contiguous()
    if buffers[1].dtype is not SCALE_DTYPE:
        buffers = with_stored_scales(buffers, format)
    zero = buffers[2] if len(buffers) > 2 else None
    y = kernels().quantized_linear.default(x, buffers[0], buffers[1], zero, bias, code, outputs, -1, False)
    if y is not None:
        return y
    weight = torch.empty(outputs, inputs, dtype=dtype)
    kernels().dequantize.default(buffers, code, weight)
    return F.linear(x, weight, bias)


def with_stored_scales(buffers: Sequence[Tensor], format: str) -> Sequence[Tensor]:
    """The buffers with their scales in the format's dtype: casting a model also casts its scales."""
    data, scale, *zero = buffers
    stored = dtype_of_scales(format)
    return buffers if scale.dtype is stored else [data, scale.to(stored), *zero]


@cache
def dtype_of_scales(format: str) -> torch.dtype:
    """The dtype in which kernels read the scales of a format: bfloat16, or float16 with :f16."""
    _, scale, *_ = quant_format(format).buffers(0)
    return scale.dtype


def _with_around(x: Tensor, weight: tuple, around: Fusion) -> Any:
    """`weight`: the op's arguments from buffers to format."""
    buffers, bias, outputs, inputs, format = weight
    x, act = around.before(x, "cpu"), ACTIVATION_NUMBERS.get(around.activation or "")
    fitting = x.dtype in DTYPES and x.is_contiguous() and fits(bias, x.dtype)
    fitting = fitting and buffers[1].dtype is dtype_of_scales(format)
    if act is not None and fitting and x.size(-1) == inputs:
        (data, scale, *zeros), code = buffers, code_of(format)
        zero = zeros[0] if zeros else None
        y = kernels().quantized_linear.default(x, data, scale, zero, bias, code, outputs, act, around.gated)
        if y is not None:
            return y if around.residual is None else around.residual + y
    return around.after(_quantized_linear(x, *weight), "cpu")


@quantized_embedding.implement("cpu", needs, PANELS)
def _quantized_embedding(
    index: Tensor, buffers: Sequence[Tensor], rows: int, width: int, format: str, dtype: torch.dtype
) -> Any:
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < rows:
        raise IndexError(f"token ids from {int(index.min())} to {int(index.max())} for a table of {rows} rows")
    out = torch.empty(*index.shape, width, dtype=dtype)
    panels = with_stored_scales(buffers, format)
    kernels().gather_rows.default(panels, code_of(format), index.to(torch.int64).contiguous(), out)
    return out
