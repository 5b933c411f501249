"""Run whole layers in one C++ call, with the same kernels that their parts call one by one.

For a few new tokens of a decoder (src/binding_layer.cpp) and the many tokens of an encoder (src/binding_encoder.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import finalize

from torch import Tensor

from infuse.native import kernels

# The steps of architectures/program.py that C++ can run; that a decoder's layer begins; and the lookups and the product
# around its layers. In the order of `enum class Does` in src/binding_layer.h.
STEPS = (
    *("norm", "norm_branch", "attention", "mlp", "moe", "add", "add_norm", "add_norm_stream", "layer"),
    *("embed", "head"),
)


def layers_step(
    x_BTC: Tensor, tensors: list[Tensor], cos_sin: tuple[Tensor, Tensor] | None, mask: Tensor | None,
    bias: Tensor | None, storage: tuple[Sequence[Tensor], Sequence[Tensor]], start: int, numbers: tuple[Tensor, Tensor],
    routes: tuple[Tensor, Tensor] | None = None, before_experts: bool = False,
) -> Tensor | None:  # fmt: skip
    """The result [B, T, C] of one or several layers, or None if a kernel does not support the arguments.

    With `before_experts`, the input of the first mixture instead. `routes`: index (int64) and weights [B T, K] that
    take the place of its router's.

    Appends the keys and values of the new tokens to each layer's `storage` (keys and values, [B, K, S, D] each) at
    `start`; nothing before `start` changes, even if the result is None. `cos_sin` are as in ops.rotary; mask and bias
    as in ops.attention, which is causal without a mask.
    """
    cos, sin = cos_sin if cos_sin is not None else (None, None)
    index, weights = routes if routes is not None else (None, None)
    return kernels().layers_step.default(
        x_BTC, tensors, cos, sin, mask, bias, *storage, start, index, weights, before_experts, *numbers
    )


@dataclass(frozen=True)
class CosSin:
    """cos and sin of tokens in a row, [1 or B, tokens, D] each, or none; a step's token is at `index`."""

    cos: Tensor | None = None
    sin: Tensor | None = None
    index: int = 0


class HeldLayers:
    """A program with its tensors and caches, as in layers_step, held in C++ for many steps of one shape.

    Passing 240 tensors takes 0.1 ms in each step. What is stored in these tensors later counts; what takes their place
    in a module does not.
    """

    def __init__(self, held: int):
        self._held, self._step, self._tokens = held, kernels().held_step.default, kernels().held_tokens.default
        finalize(self, kernels().drop_layers.default, held)

    @classmethod
    def of(
        cls, like_BTC: Tensor, tensors: list[Tensor], storage: tuple[Sequence[Tensor], Sequence[Tensor]],
        numbers: tuple[Tensor, Tensor],
    ) -> HeldLayers | None:  # fmt: skip
        """Hold them for steps of the shape and dtype of `like`; None if a kernel does not support them."""
        held = kernels().hold_layers.default(like_BTC, tensors, *storage, *numbers)
        return cls(held) if held else None

    def step(self, x: Tensor, cos_sin: CosSin, start: int) -> Tensor | None:
        """As layers_step without a mask. If the program begins with a table, x are token ids [B, T]."""
        return self._step(self._held, x, cos_sin.cos, cos_sin.sin, cos_sin.index, start)

    def tokens(self, ids_B1: Tensor, cos_sin: CosSin, start: int, count: int, ends: Sequence[int]) -> Tensor | None:
        """The likeliest tokens [B, steps] of up to `count` steps, each but the last one the input of the next step.

        A step that gives one of `ends` is the last one. None, with nothing done, if the program does not begin with a
        table and end with a head, or if a kernel does not support the arguments.
        """
        return self._tokens(self._held, ids_B1, cos_sin.cos, cos_sin.sin, cos_sin.index, start, count, ends)


def encoder_layer(
    x_BTC: Tensor, tensors: list[Tensor], mask: Tensor | None, numbers: tuple[Tensor, Tensor]
) -> Tensor | None:
    """The layer's result [B, T, C], with bidirectional attention under `mask`, which is as in ops.attention.

    None if a kernel does not support the arguments: another dtype than bfloat16 and float32, or few rows.
    """
    return kernels().encoder_layer.default(x_BTC, tensors, mask, *numbers)
