"""What a model passes to a layer in one call, as the parts of the layer take it.

Suffixes: B batch, T new tokens, N real tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Packed(NamedTuple):
    """The real tokens of a padded batch, by their rows in [B T]: norms and linears then run on these alone."""

    rows: Tensor
    batch: int
    tokens: int

    def taken(self, x_BTC: Tensor) -> Tensor:
        """[B, T, C] → the real tokens, [1, N, C]."""
        return x_BTC.flatten(0, 1).index_select(0, self.rows)[None]

    def spread(self, x_1NC: Tensor) -> Tensor:
        """The inverse, with zeros in place of the padding."""
        full = x_1NC.new_zeros(self.batch * self.tokens, x_1NC.shape[-1])
        return full.index_copy_(0, self.rows, x_1NC[0]).view(self.batch, self.tokens, -1)


class Inputs(NamedTuple):
    """What the model passed to the layer for this call, as it is.

    `more` is None where our own op computes the attention. Where the function that the config names does, it holds
    every keyword argument that the layer itself does not consume.
    """

    mask: Tensor | None
    cache: Any
    position_embeddings: tuple[Tensor, Tensor] | None
    position_ids: Tensor | None
    bias: Tensor | None
    causal: bool | None
    want_weights: bool
    heads: int
    packed: Packed | None = None
    more: Mapping[str, Any] | None = None
