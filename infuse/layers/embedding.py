"""Embeddings that share a head's quantized table, or hold one rank's rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.foreign.plain import EmbeddingShape
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.linear import Linear, Quantized
from infuse.layers.native.part import NONE, NativePart, PartWriter
from infuse.parallel.group import Combine


class QuantizedEmbedding(Quantized, NativePart):
    """Look up rows of a quantized table: index [...] → [..., width] in the model's compute dtype."""

    struct = "linear"

    def __init__(
        self,
        shape: EmbeddingShape,
        format: str,
        dtype: torch.dtype,
        bodies: Mapping[str, str],
        combine: Combine | None = None,
    ):
        super().__init__(ops.quantized_embedding, bodies, (shape.rows, shape.width), format)
        self.shape, self.dtype, self._combine = shape, dtype, combine
        self.num_embeddings, self.embedding_dim = shape.all_rows or shape.rows, shape.width

    def forward(self, index: Tensor) -> Tensor:
        if index.dtype is not torch.int64 and index.dtype is not torch.int32:
            raise RuntimeError(f"token ids are {index.dtype}; a table takes torch.int64 or torch.int32")
        return looked_up(index, self.shape, self._rows, self._combine)

    def _rows(self, index: Tensor) -> Tensor:
        return self._body(index, self.listed(), *self._sizes, self.dtype)

    def native(self, to: PartWriter) -> None:
        self.write_weight(to)
        to.put(bias=NONE)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format}"


class RankEmbedding(InferenceModule):
    """Look up rows of a table that is split by rows over ranks: index [...] → [..., width]."""

    weight: nn.Parameter

    def __init__(self, shape: EmbeddingShape, combine: Combine | None):
        super().__init__()
        self.shape, self._combine = shape, combine
        self.num_embeddings, self.embedding_dim = shape.all_rows or shape.rows, shape.width
        self.weight = nn.Parameter(torch.empty(shape.rows, shape.width, device="meta"), requires_grad=False)

    def share(self, head: Linear) -> None:
        """Share the weight of `head`, which has the same rows."""
        self._parameters["weight"] = head._parameters["weight"]

    def forward(self, index: Tensor) -> Tensor:
        if torch.is_grad_enabled() and is_recorded(self, index):
            return unrecorded(RankEmbedding.forward, self, index)
        return looked_up(index, self.shape, lambda local: F.embedding(local, self.weight), self._combine)

    def extra_repr(self) -> str:
        return f"{self.shape.rows} of {self.num_embeddings}, {self.embedding_dim}"


def looked_up(
    index: Tensor, shape: EmbeddingShape, rows: Callable[[Tensor], Tensor], combine: Combine | None
) -> Tensor:
    """Look up rows of a table. If ranks share it, each returns zeros for other ranks' rows, and `combine` sums them.

    Raise IndexError on CPUs if ids are outside of a shared table.
    """
    if combine is None:
        return _scaled(rows(index), shape)
    if index.device.type == "cpu" and index.numel():  # on other devices the host would have to wait
        check(index, shape.all_rows)
    local = index - shape.first_row
    elsewhere = (local < 0) | (local >= shape.rows)
    return _scaled(combine(rows(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)), shape)


def _scaled(found: Tensor, shape: EmbeddingShape) -> Tensor:
    return found if shape.scale == 1.0 else found * torch.tensor(shape.scale, dtype=found.dtype)


def check(index: Tensor, rows: int) -> None:
    """Raise IndexError for ids outside the table, as an embedding on one rank does."""
    least, most = int(index.min()), int(index.max())
    if least < 0 or most >= rows:
        raise IndexError(f"token ids from {least} to {most} for a table of {rows} rows")
