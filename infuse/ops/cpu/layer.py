"""A layer in one call of C++, by the same kernels that its parts call one by one: over a few new tokens of a decoder
(src/binding_layer.cpp), and over the many of an encoder (src/binding_encoder.cpp).
"""

from __future__ import annotations

import torch
from torch import Tensor

from infuse.native import kernels
from infuse.ops.cpu.activation import ACTIVATION_NUMBERS
from infuse.ops.cpu.quantized_linear import code_of

# The steps of layers/program.py in the order of `enum class Does` in src/binding_layer.h.
_STEPS = ("norm", "norm_branch", "attention", "mlp", "add", "add_norm", "add_norm_stream")


class LayerCode:
    """A layer's program in integers and reals, in the order in which `Reader` (src/binding_layer.h) takes them.

    After each step comes what its part is made of. Weights are given by their places among the call's tensors, -1 where
    there is none.
    """

    def __init__(self) -> None:
        self._integers: list[int] = []
        self._reals: list[float] = []

    def step(self, does: str) -> None:
        self._integers.append(_STEPS.index(does))

    def norm(self, centred: bool, eps: float, offset: float, weight: int, bias: int) -> None:
        self._integers += [int(centred), weight, bias]
        self._reals += [eps, offset]

    def linear(self, format: str | None, outputs: int, weight: int, scale: int, zero: int, bias: int) -> None:
        """`weight` is the place of a quantized one's data; `format` None is plain."""
        self._integers += [-1 if format is None else code_of(format), outputs, weight, scale, zero, bias]

    def attention(self, sizes: tuple[int, int, int], interleaved: bool, scale: float, softcap: float) -> None:
        """`sizes` are heads, key and value heads, and head width. Behind it come the linears qkv and out, and for the
        norms of q and k whether each is there, and it.
        """
        self._integers += [*sizes, int(interleaved)]
        self._reals += [scale, softcap]

    def there(self, there: bool) -> None:
        self._integers.append(int(there))

    def mlp(self, activation: str, gated: bool) -> None:
        """Behind it come the linears up and down."""
        self._integers += [ACTIVATION_NUMBERS[activation], int(gated)]

    def numbers(self) -> tuple[Tensor, Tensor]:
        """As tensors: a list of so many costs 5 us in each call."""
        return (
            torch.tensor(self._integers, device="cpu"),
            torch.tensor(self._reals, dtype=torch.float64, device="cpu"),
        )


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
