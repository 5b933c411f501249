"""The experts of ops/experts.py in C++: all products in one parallel region (src/binding_experts.cpp).

Experts with few tokens stream their rows once, those with many multiply tiles. Many tokens in float32 or float16 with
plain weights are left to the reference, which runs PyTorch's product for each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from infuse.ground.activations import ExpertGate
from infuse.native import DTYPES, kernels, needs
from infuse.ops.cpu.activation import ACTIVATION_NUMBERS
from infuse.ops.cpu.linear import fits
from infuse.ops.cpu.quantized_linear import PANELS, code_of, with_stored_scales
from infuse.ops.experts import experts, quantized_experts
from infuse.quant.parse import quant_format

PLAIN = -1  # code of a matrix that is not quantized
Matrix = tuple[Sequence[Tensor], Tensor | None]  # the elements alone or the buffers of a QuantizedWeight; bias


@experts.implement("cpu", needs)
def _experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *gate: Any,
) -> Any:
    dtype = x.dtype
    _check_width(x, up.shape[-1])
    if dtype in DTYPES and up.dtype is dtype and down.dtype is dtype and up.is_contiguous() and down.is_contiguous():
        matrices = ([up], up_bias), ([down], down_bias)
        y = _summed(x, index, weights, matrices, (down.shape[1], PLAIN, PLAIN), ExpertGate(*gate))
        if y is not None:
            return y
    return experts.reference(x, index, weights, up, up_bias, down, down_bias, *gate)


@quantized_experts.implement("cpu", needs, PANELS)
def _quantized_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Sequence[Tensor],
    up_bias: Tensor | None,
    down: Sequence[Tensor],
    down_bias: Tensor | None,
    inner: int,
    up_format: str,
    down_format: str,
    *gate: Any,
) -> Any:
    matrices = (with_stored_scales(up, up_format), up_bias), (with_stored_scales(down, down_format), down_bias)
    codes = inner, code_of(up_format), code_of(down_format)
    dtype = x.dtype
    _check_width(x, up[0].shape[-2] * 32 // _bits(up_format))
    return _summed(x if dtype in DTYPES else x.float(), index, weights, matrices, codes, ExpertGate(*gate)).to(dtype)


@cache
def _bits(format: str) -> int:
    return quant_format(format).bits


def _check_width(x: Tensor, inputs: int) -> None:
    """Raise RuntimeError for x that the kernel would read beyond its end."""
    if x.shape[-1] != inputs:
        raise RuntimeError(f"x has {x.shape[-1]} columns, and the experts take {inputs}")


def _summed(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    matrices: tuple[Matrix, Matrix],
    sizes: tuple[int, int, int],
    gate: ExpertGate,
) -> Any:
    """Run the kernel; None if PyTorch is faster for so many tokens. `sizes`: inner width, codes of both matrices."""
    arguments: list[Any] = []
    for buffers, bias in matrices:
        if not fits(bias, x.dtype) and bias is not None:
            bias = bias.to(x.dtype).contiguous()
        arguments += [buffers, bias]
    index, weights = index.to(torch.int64).contiguous(), weights.to(torch.float32).contiguous()
    number = ACTIVATION_NUMBERS[gate.activation]
    return kernels().experts.default(x.contiguous(), index, weights, *arguments, *sizes, number, *gate[1:])
