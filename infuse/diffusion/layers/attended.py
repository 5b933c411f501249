"""Attention over an image or a text: the part that does not depend on how queries, keys and values are made.

Suffixes: B batch, T tokens, L tokens attended to, C width, N heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.diffusion.layers.derived import Derived
from infuse.ground.errors import UnsupportedCall
from infuse.layers.gradient import Settled, is_recorded
from infuse.layers.linear import has_no_hooks, product

_T = TypeVar("_T")


class Attended(Settled):
    """Attention with the output projection `out`. A subclass makes the heads."""

    settled = frozenset({"processor"})
    shape: Any

    def __init__(self, bodies: Mapping[str, str], scale: float):
        super().__init__()
        self._attend, self._scale = ops.attention.bound(bodies.get("attention", ops.REFERENCE)), scale
        self._of_text = Derived()

    def heads_of(self, x_BTC: Tensor, context_BLC: Tensor | None, cos_sin: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, N, T, D] of x, keys and values [B, N, L, D] of the context or, without one, of x."""
        raise NotImplementedError

    def attended(
        self,
        x_BTC: Tensor,
        context_BLC: Tensor | None,
        mask: Tensor | None,
        residual: Tensor | None,
        cos_sin: Any = None,
    ) -> Tensor:
        """residual + out(attention of x over `context` or, without one, over x): [B, T, C]; `cos_sin` rotate heads."""
        q, k, v = self.heads_of(x_BTC, context_BLC, cos_sin)
        if mask is not None:
            mask = spread_mask(mask, x_BTC.shape[0], q.shape[1], k.shape[2])
        out = self._attend(q, k, v, mask, None, self._scale, False, 0, 0.0)
        return product(self._modules["out"], out.flatten(2), None, residual)  # type: ignore[arg-type]

    def called(
        self,
        x_BTC: Tensor,
        context_BLC: Tensor | None,
        mask: Tensor | None,
        residual: Tensor | None,
        cos_sin: Any = None,
    ) -> Tensor:
        """Like `attended`, but call this module with the original's arguments, so that its hooks run."""
        leaves_out = cos_sin is None or (context_BLC is not None and not self.shape.text_cos_sin)
        named = {} if leaves_out else {self.shape.cos_sin: cos_sin}
        y: Tensor = self(x_BTC, encoder_hidden_states=context_BLC, attention_mask=mask, **named)
        return y if residual is None else residual + y

    def set_processor(self, processor: Any) -> None:
        """Raise UnsupportedCall for any processor but the original's."""
        self.processor = processor

    def once(self, parts: Iterable[nn.Module], text: Tensor, make: Callable[[], _T]) -> _T:
        """Return make(), which computes from `text` by `parts`: once for each text and state of the weights."""
        parts = tuple(parts)
        recorded = torch.is_grad_enabled() and any(is_recorded(part, text) for part in parts)
        if recorded or not all(map(has_no_hooks, parts)):
            return make()
        tensors = [t for part in parts for t in (*part._parameters.values(), *part._buffers.values()) if t is not None]
        return self._of_text.of((text, *tensors), make)  # type: ignore[no-any-return]


def spread_mask(mask: Tensor, batch: int, heads: int, length: int) -> Tensor:
    """Reshape a mask of diffusers, [B or B N, 1 or T, L] or [B, L], to [B, N or 1, 1 or T, L]."""
    if mask.dim() == 2:
        mask = mask[:, None]
    if mask.shape[-1] != length or mask.shape[0] not in (1, batch, batch * heads):
        raise UnsupportedCall(
            f"attention_mask has shape {list(mask.shape)}; {batch} rows of {length} keys need [{batch}, {length}], "
            f"[{batch}, 1 or queries, {length}] or the same for each of the {heads} heads"
        )
    if mask.dim() == 3 and mask.shape[0] == batch * heads and heads > 1:
        return mask.view(batch, heads, -1, length)
    return mask if mask.dim() == 4 else mask[:, None]
