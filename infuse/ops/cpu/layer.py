"""A layer in one call of C++, by the same kernels that its parts call one by one: over a few new tokens of a decoder
(src/binding_layer.cpp), and over the many of an encoder (src/binding_encoder.cpp)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infuse.native import kernels
from infuse.ops.cpu.activation import ACTIVATION_NUMBERS
from infuse.ops.cpu.quantized_linear import code_of

# Up to so many rows (tokens of all batches) the products are those that stream the weights once: ops/cpu/linear.py,
# binding_panels.cpp.
MOST_STEP_ROWS = 8
RESIDUALS = ("pre", "post", "parallel", "sandwich")  # the order of `enum Residual`


@dataclass(frozen=True)
class NormForm:
    """Of one norm: what it computes, and the places of its weight and bias among the layer's tensors (-1: none)."""

    centred: bool
    eps: float
    offset: float
    weight: int
    bias: int


@dataclass(frozen=True)
class LinearForm:
    """Of one product: `format` None is plain, whose weight is at `weight`; of a quantized one its data is there."""

    format: str | None
    outputs: int
    weight: int
    scale: int
    zero: int
    bias: int


@dataclass(frozen=True)
class LayerForm:
    """What does not change from call to call. `norms` are norm1, norm2, post1, post2 and those of q and k; `linears`
    qkv, out, up, down.
    """

    residual: str
    heads: int
    kv_heads: int
    head_width: int
    activation: str
    interleaved: bool
    gated: bool
    scale: float
    softcap: float
    norms: tuple[NormForm | None, ...]
    linears: tuple[LinearForm, ...]

    def numbers(self) -> tuple[Tensor, Tensor]:
        """The integers and the reals of it in the order in which `layer_of` (src/binding_layer.h) reads them.

        As tensors: a list of so many costs 5 us in each call.
        """
        integers = [RESIDUALS.index(self.residual), self.heads, self.kv_heads, self.head_width]
        integers += [ACTIVATION_NUMBERS[self.activation], int(self.interleaved), int(self.gated)]
        reals = [self.scale, self.softcap]
        for norm in self.norms:
            integers += [0, 0, -1, -1] if norm is None else [1, int(norm.centred), norm.weight, norm.bias]
            reals += [0.0, 0.0] if norm is None else [norm.eps, norm.offset]
        for linear in self.linears:
            code = -1 if linear.format is None else code_of(linear.format)
            integers += [code, linear.outputs, linear.weight, linear.scale, linear.zero, linear.bias]
        return torch.tensor(integers, device="cpu"), torch.tensor(reals, dtype=torch.float64, device="cpu")


def layer_step(
    x_BTC: Tensor,
    tensors: list[Tensor],
    turns: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
    bias: Tensor | None,
    storage: tuple[Tensor, Tensor],
    start: int,
    causal: bool,
    window: int,
    numbers: tuple[Tensor, Tensor],
) -> Tensor | None:
    """The layer's result [B, T, C]. Keys and values, `storage` [B, K, S, D] each, receive those of the new tokens from
    `start` on.

    `turns`: cos and sin as ops.rotary takes them; mask, bias, causal and window as ops.attention does. None where a
    kernel does not take what is given: nothing before `start` was changed.
    """
    cos, sin = turns if turns is not None else (None, None)
    return kernels().layer_step.default(x_BTC, tensors, cos, sin, mask, bias, *storage, start, causal, window, *numbers)


def encoder_layer(
    x_BTC: Tensor, tensors: list[Tensor], mask: Tensor | None, numbers: tuple[Tensor, Tensor]
) -> Tensor | None:
    """The layer's result [B, T, C], of tokens that all look at each other, less what `mask` hides, as ops.attention
    takes it.

    None where a kernel does not take what is given: other dtypes than bfloat16, and few rows.
    """
    return kernels().encoder_layer.default(x_BTC, tensors, mask, *numbers)
