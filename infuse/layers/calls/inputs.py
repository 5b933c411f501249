"""The arguments of one call of a layer, in the form that its parts take.

Suffixes: B batch, T new tokens, N real tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from infuse.architectures.inner_call import InnerCall


class Packed(NamedTuple):
    """Row indices of the real tokens in [B T] of a padded batch. Norms and linears run only on these."""

    rows: Tensor
    batch: int
    tokens: int

    def taken(self, x_BTC: Tensor) -> Tensor:
        """Gather the real tokens: [B, T, C] → [1, N, C]."""
        return x_BTC.flatten(0, 1).index_select(0, self.rows)[None]

    def spread(self, x_1NC: Tensor) -> Tensor:
        """Scatter back, with zeros at the padding: [1, N, C] → [B, T, C]."""
        full = x_1NC.new_zeros(self.batch * self.tokens, x_1NC.shape[-1])
        return full.index_copy_(0, self.rows, x_1NC[0]).view(self.batch, self.tokens, -1)


class Inputs(NamedTuple):
    """What the model passed to the layer, unchanged.

    `more` is None if our own op computes the attention. Otherwise it holds every keyword argument that the layer itself
    does not consume, for the attention function that the config names. `values`: what steps read by name. `pair`: the
    EncoderDecoderCache of which `cache` is the first half. `given`: the layer's arguments by name, and `calls`: how the
    original calls its modules, for parts that are heard (called_part.py).
    """

    mask: Tensor | None
    cache: Any
    position_embeddings: tuple[Tensor, Tensor] | Tensor | None
    position_ids: Tensor | None
    bias: Tensor | None
    causal: bool | None
    want_weights: bool
    heads: int
    packed: Packed | None = None
    more: Mapping[str, Any] | None = None
    values: Mapping[str, Any] = MappingProxyType({})
    pair: Any = None
    given: Mapping[str, Any] = MappingProxyType({})
    calls: Mapping[str, InnerCall | None] = MappingProxyType({})
