"""Run whole layers in one C++ call, with the same kernels that their parts call one by one.

For a few new tokens of a decoder (src/binding_layer.cpp) and the many tokens of an encoder (src/binding_encoder.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from infuse.native import kernels

# The steps of layers/program.py that C++ can run and, before a decoder's, that a layer begins: in the order of
# `enum class Does` in src/binding_layer.h.
STEPS = ("norm", "norm_branch", "attention", "mlp", "moe", "add", "add_norm", "add_norm_stream", "layer")


def layers_step(
    x_BTC: Tensor, tensors: list[Tensor], turns: tuple[Tensor, Tensor] | None, mask: Tensor | None, bias: Tensor | None,
    storage: tuple[Sequence[Tensor], Sequence[Tensor]], start: int, numbers: tuple[Tensor, Tensor],
    routes: tuple[Tensor, Tensor] | None = None, before_experts: bool = False,
) -> Tensor | None:  # fmt: skip
    """The result [B, T, C] of one or several layers, or None if a kernel does not support the arguments.

    With `before_experts`, the input of the first mixture instead. `routes`: index (int64) and weights [B T, K] that
    take the place of its router's.

    Appends the keys and values of the new tokens to each layer's `storage` (keys and values, [B, K, S, D] each) at
    `start`; nothing before `start` changes, even if the result is None. `turns`: cos and sin as in ops.rotary; mask and
    bias as in ops.attention, which is causal without a mask.
    """
    cos, sin = turns if turns is not None else (None, None)
    index, weights = routes if routes is not None else (None, None)
    return kernels().layers_step.default(
        x_BTC, tensors, cos, sin, mask, bias, *storage, start, index, weights, before_experts, *numbers
    )


def encoder_layer(
    x_BTC: Tensor, tensors: list[Tensor], mask: Tensor | None, numbers: tuple[Tensor, Tensor]
) -> Tensor | None:
    """The layer's result [B, T, C], with bidirectional attention under `mask`, which is as in ops.attention.

    None if a kernel does not support the arguments: another dtype than bfloat16 and float32, or few rows.
    """
    return kernels().encoder_layer.default(x_BTC, tensors, mask, *numbers)
