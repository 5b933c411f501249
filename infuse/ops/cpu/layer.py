"""A layer in one call of C++, by the same kernels that its parts call one by one: over a few new tokens of a decoder
(src/binding_layer.cpp), and over the many of an encoder (src/binding_encoder.cpp).
"""

from __future__ import annotations

from torch import Tensor

from infuse.native import kernels

# The steps of layers/program.py that C++ runs, in the order of `enum class Does` in src/binding_layer.h.
STEPS = ("norm", "norm_branch", "attention", "mlp", "add", "add_norm", "add_norm_stream")


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
