"""Disentangled attention (He et al. 2021, DeBERTa, section 3): scores of the content with distances.

Query i is multiplied with the key of its distance from j, and key j with the query of that distance.

Suffixes: B batch, H heads, T tokens, D head width, C channels, N distances.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infuse.architectures.parts.disentangled import DisentangledShape
from infuse.ground.errors import UnsupportedCall
from infuse.ground.modes import is_traced
from infuse.layers.attention.position import Positions, additive, missing
from infuse.layers.calls.inputs import Inputs
from infuse.layers.linear import direct


class DisentangledScores(Positions):
    """The model passes the bucket of each distance, `relative_pos`, and a vector for each, `rel_embeddings`."""

    def __init__(self, position: DisentangledShape):
        super().__init__()
        self._position = position

    def added(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an additive mask: a query that sees nothing sees all alike, as the original fills in the lowest."""
        return additive(mask, dtype)

    def scores(
        self, attention: nn.Module, q_BHTD: Tensor, k_BHTD: Tensor, inputs: Inputs, scale: float
    ) -> Tensor | None:
        """Return the bias [B, H, T, T] of the scores. `attention` has the linears."""
        position, tokens = self._position, q_BHTD.shape[2]
        if not position.by_key and not position.by_query:
            return None
        passed: Any = [inputs.values.get(name) for name in DisentangledShape.values]
        for name, value in zip(DisentangledShape.values, passed, strict=True):
            if value is None:
                raise missing(name)
        buckets, vectors_NC = passed
        if [*buckets.shape] != [1, tokens, tokens]:
            raise _of_other_shape("relative_pos", buckets, f"[1, {tokens}, {tokens}]")
        if len(vectors_NC) < 2 * position.span:
            raise _of_other_shape("rel_embeddings", vectors_NC, f"[at least {2 * position.span}, width]")
        pairs_TT = buckets[0].long()
        line = None if is_traced() or pairs_TT.device.type != "cpu" else _line(pairs_TT)  # its values are read
        last, total = 2 * position.span - 1, None
        for x, target, is_wanted in ((q_BHTD, "pos_key", position.by_key), (k_BHTD, "pos_query", position.by_query)):
            if not is_wanted:
                continue
            rows = pairs_TT if line is None else line
            rows = ((rows if target == "pos_key" else -rows) + position.span).clamp(0, last)
            first = 0 if line is None else int(rows.min())
            end = last if line is None else int(rows.max())
            y_HDN = self._of_vectors(attention, target, vectors_NC[first : end + 1].to(x.dtype), x.shape[1]) * scale
            found = _placed(x, y_HDN, rows - first, is_line=line is not None)
            found = found if target == "pos_key" else found.transpose(2, 3)
            total = found if total is None else total + found
        return total

    def _of_vectors(self, attention: nn.Module, target: str, vectors_NC: Tensor, heads: int) -> Tensor:
        """Keys or queries of distances, [H, D, N]."""
        parts: dict[str, Any] = attention._modules
        if not self._position.is_shared:
            return direct(parts[target], vectors_NC[None])[0].unflatten(-1, (heads, -1)).permute(1, 2, 0)
        q, k, _ = direct(parts["qkv"], vectors_NC[None])[0].chunk(3, dim=-1)
        return (k if target == "pos_key" else q).unflatten(-1, (heads, -1)).permute(1, 2, 0)


def _of_other_shape(argument: str, passed: Tensor, wanted: str) -> UnsupportedCall:
    return UnsupportedCall(f"{argument} has shape {list(passed.shape)}, not {wanted}: pass what the model passes")


def _line(pairs_TT: Tensor) -> Tensor | None:
    """The values at the distances T - 1, ..., 1 - T; None if they depend on more than the distance."""
    tokens = len(pairs_TT)
    line = torch.cat((pairs_TT[:, 0].flip(0), pairs_TT[0, 1:]))
    return line if torch.equal(line.unfold(0, tokens, 1).flip(0), pairs_TT) else None


def _placed(x_BHTD: Tensor, y_HDN: Tensor, rows: Tensor, *, is_line: bool) -> Tensor:
    """The product [B, H, T, T] of each x with the y of `rows`: of each pair, or of the distances T - 1, ..., 1 - T.

    Those of distances are put in place by a view whose rows start one column further left each.
    """
    batch, heads, tokens, _ = x_BHTD.shape
    if not is_line:
        products = torch.matmul(x_BHTD, y_HDN)
        return products.gather(-1, rows.expand(batch, heads, tokens, tokens))
    return placed_by_distance(torch.matmul(x_BHTD, y_HDN.index_select(-1, rows)))


def placed_by_distance(products_BHTN: Tensor) -> Tensor:
    """The product of query i and the distance of key j in the place i, j: a view [B, H, T, T].

    The distances are those of the keys T - 1 places to the left, ..., T - 1 to the right: N = 2 T - 1.
    """
    batch, heads, tokens, _ = products_BHTN.shape
    of_head, wide = tokens * (2 * tokens - 1), 2 * tokens - 2
    strides = (heads * of_head, of_head, wide, 1)
    return products_BHTN.contiguous().as_strided((batch, heads, tokens, tokens), strides, tokens - 1)
