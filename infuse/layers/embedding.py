"""The embedding that is put in where a quantized head shares its table: rows are looked up in the head's weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.layers.linear import QuantizedLinear
from infuse.quant.format import QuantizedWeight


class QuantizedEmbedding(nn.Module):
    """index [...] → rows [..., width] of a quantized table, in the dtype that the model computes in."""

    data: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(self, rows: int, width: int, format: str, dtype: torch.dtype, bodies: Mapping[str, str]):
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.format, self.dtype = rows, width, format, dtype
        for name in ("data", "scale", "zero"):
            self.register_buffer(name, None)
        self._chosen = ops.quantized_embedding.bodies[bodies.get("quantized_embedding", ops.REFERENCE)]
        self._body = self._chosen.function

    def hold(self, weight: QuantizedWeight) -> None:
        """Take a table of its own (for a proof), in the layout of the body."""
        prepared = self._chosen.layout.prepare(weight) if self._chosen.layout else weight
        self._take(prepared or weight, prepared is not None)

    def share(self, head: QuantizedLinear) -> None:
        """Look up in the weight of `head`, which has the same layout."""
        assert (head.out_features, head.in_features, head.format) == (self.num_embeddings, self.embedding_dim, self.format)
        self._take(head, head.prepared)

    def _take(self, source: QuantizedWeight | QuantizedLinear, prepared: bool) -> None:
        self.data, self.scale, self.zero = source.data, source.scale, source.zero
        self._body = self._chosen.function if prepared else ops.quantized_embedding.reference

    @property
    def weight(self) -> Tensor:
        return self.data.view(torch.int8)  # as QuantizedLinear.weight

    def forward(self, index: Tensor) -> Tensor:
        return self._body(
            index, self.data, self.scale, self.zero, self.num_embeddings, self.embedding_dim, self.format, self.dtype
        )

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format}"
