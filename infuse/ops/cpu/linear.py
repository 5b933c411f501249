"""The products of ops/linear.py with plain weights in C++.

Few rows stream the weight once, in its own layout (src/plain_linear.h). More rows in bfloat16 and float32 multiply
tiles of it (src/tile.h), with the activation fused. In bfloat16 with AMX, and in float32 on Intel's processors, they
use PyTorch's product instead, which oneDNN and MKL compute.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ground.modes import PLAIN
from infuse.native import DTYPES, isa, kernels, limits, needs
from infuse.ops.cpu.activation import ACTIVATION_NUMBERS
from infuse.ops.linear import Fusion, linear

# F.linear is as fast for weights that fit a core's cache: up to this many elements with one row, or with few rows in
# float32. For one row in float16 it is faster at any size: 21 GB/s against 16 on one thread.
SMALL_ONE_ROW, SMALL_FLOAT32 = 1 << 13, 1 << 18
# With more values of x than threads share, tiles pay if they activate, for this many outputs per input and up to these
# inputs: 1024 x 4096 times 22016 outputs, gated, take 225 ms in tiles and 292 ms in F.linear and activation; 2048 x
# 2048 times 16384 202 and 236 ms, 8192 x 320 times 2560 20 and 30 ms. Without an activation both are equally fast, but
# 1024 x 12288 times 3072 outputs takes 168 and 108 ms.
MANY_OUTPUTS, MOST_INPUTS = 2, 4096


@linear.implement("cpu", needs)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, *around: Any) -> Any:
    if around:
        return _with_around(x, weight, bias, Fusion(*around))
    inputs, dtype = weight.size(1), x.dtype
    values = x.numel()
    if values > limits().plain_rows * inputs:
        y = _tiled(x, weight, bias, -1, False) if _takes(x, weight, bias) else None
        return F.linear(x, weight, bias) if y is None else y
    small = SMALL_ONE_ROW if values <= inputs else SMALL_FLOAT32 if dtype is torch.float32 else 0
    if weight.numel() <= small or not _takes(x, weight, bias) or (dtype is torch.float16 and values <= inputs):
        return F.linear(x, weight, bias)
    return kernels().linear.default(x, weight, bias)


def always_streams(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether few rows like those of x are multiplied by our kernel, however many they are."""
    return weight.numel() > SMALL_FLOAT32 and x.dtype is not torch.float16 and _takes(x, weight, bias)


def _with_around(x: Tensor, weight: Tensor, bias: Tensor | None, around: Fusion) -> Any:
    x, name = around.before(x, "cpu"), around.activation
    if name is not None and x.numel() > limits().plain_rows * weight.size(1) and _takes(x, weight, bias):
        y = _tiled(x, weight, bias, ACTIVATION_NUMBERS[name], around.gated)
        if y is not None:
            return y if around.residual is None else around.residual + y
    return around.after(_linear(x, weight, bias), "cpu")


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    dtype = x.dtype
    if type(weight) not in PLAIN:  # another library's, which multiplies in its own way
        return False
    if x.size(-1) != weight.size(1):  # the kernel would read past x; PyTorch's product raises
        return False
    return (
        dtype is weight.dtype and dtype in DTYPES and x.is_contiguous() and weight.is_contiguous() and fits(bias, dtype)
    )


@cache
def takes_tiles(dtype: torch.dtype) -> bool:
    """Whether many rows of `dtype` use our tiles.

    Not in bfloat16 with AMX: PyTorch's product (oneDNN) uses AMX too, and which is faster has not been measured. Nor in
    float32 on Intel's processors: MKL is made for them. To compare, run `python bench/ops.py --op linear --set llama`
    with and without INFUSE_CPU_ISA=avx512_amx! (or avx512!), which uses our tiles.
    """
    if dtype is torch.float32:
        library = kernels()
        return not isinstance(library, str) and bool(library.has_float_tiles())
    return dtype is torch.bfloat16 and (isa() != "avx512_amx" or os.environ.get("INFUSE_CPU_ISA") == "avx512_amx!")


def _tiled(x: Tensor, weight: Tensor, bias: Tensor | None, act: int, gated: bool) -> Tensor | None:
    """The product by tiles; None if tiles are not supported here or F.linear is faster."""
    if not takes_tiles(x.dtype):
        return None
    outputs, inputs = weight.shape
    if x.dtype is torch.bfloat16 and inputs % 2:
        return None
    many = x.dtype is torch.bfloat16 and x.numel() > limits().tiled_values
    if many and (act < 0 or outputs < MANY_OUTPUTS * inputs or inputs > MOST_INPUTS):
        return None
    return kernels().tiled_linear.default(x, weight, bias, act, gated)


def fits(bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the kernels support this bias."""
    return bias is None or (bias.dtype is dtype and bias.is_contiguous())
