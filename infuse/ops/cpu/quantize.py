"""ops/quantize.py in C++ (src/quantize.h): search each group's grid among the candidates of infuse/quant; dequantize.

Scales, zeros and codes equal the reference's, unless two candidates' errors differ only by the order of summation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infuse.native import CODES, DTYPES, kernels, needs
from infuse.ops.cpu.quantized_linear import PANELS, code_of
from infuse.ops.quantize import dequantize, quantize, quantized_like
from infuse.quant.floating import GRIDS, FloatFormat, positions
from infuse.quant.format import LARGEST_WEIGHT, QuantizedWeight
from infuse.quant.grouped import SCALE_DTYPE
from infuse.quant.integer import DIVISORS, ENDS, INT8_LARGEST, INT8_SPANS, IntegerFormat
from infuse.quant.offset import OffsetFormat
from infuse.quant.parse import quant_format

COPIED_VALUES = 1 << 20  # copied at a time from a weight that is not contiguous (transposed): 4 MiB in float32


@quantize.implement("cpu", needs)
def _quantize(weight: Tensor, format: str) -> list[Tensor]:
    chosen = quant_format(format)
    if not isinstance(chosen, (IntegerFormat, FloatFormat)) or isinstance(chosen, OffsetFormat) or chosen.bits < 4:
        return quantize.reference(weight, format)
    if chosen.dtype_of_scales is not SCALE_DTYPE:
        return quantize.reference(weight, format)
    if weight.dim() != 2 or weight.dtype not in DTYPES or weight.device.type != "cpu":
        return quantize.reference(weight, format)
    buffers = quantized_like(weight, format)
    rows = len(weight) if weight.is_contiguous() else max(1, COPIED_VALUES // max(weight.size(1), 1))
    length = weight.size(1) // max(chosen.group_count(weight.size(1)), 1)
    code, candidates = CODES.index(chosen.name), _candidates(chosen, length)
    for start in range(0, len(weight), max(rows, 1)):
        part = slice(start, start + rows)
        written = [buffer[part] for buffer in buffers]
        if not kernels().quantize(weight.detach()[part].contiguous(), candidates, LARGEST_WEIGHT, code, written):
            return quantize.reference(weight, format)  # raises the error that names the problem
    return buffers


@dequantize.implement("cpu", needs)
def _dequantize(buffers: Sequence[Tensor], outputs: int, inputs: int, format: str, dtype: torch.dtype) -> Tensor:
    weight = QuantizedWeight.listed(buffers, (outputs, inputs), quant_format(format))
    panels = PANELS.prepare(weight) if dtype in DTYPES and outputs and inputs else None
    if panels is None:
        return dequantize.reference(buffers, outputs, inputs, format, dtype)
    values = torch.empty(outputs, inputs, dtype=dtype)
    kernels().dequantize.default([*panels.tensors.values()], code_of(format), values)
    return values


def _candidates(format: IntegerFormat | FloatFormat, length: int) -> Tensor:
    """The candidates for groups of `length`, float32, in the form of `enum class Grids` in src/quantize_kernels.h."""
    if isinstance(format, FloatFormat):
        return torch.tensor(tuple(positions(GRIDS[format.name], length)), dtype=torch.float32)
    if format.bits == 8:
        return torch.tensor(INT8_LARGEST if format.symmetric else INT8_SPANS, dtype=torch.float32)
    if format.symmetric:
        return torch.tensor(DIVISORS[4], dtype=torch.float32)
    return torch.tensor([(high, (2 - high - low) / 15) for high, low in ENDS], dtype=torch.float32)
