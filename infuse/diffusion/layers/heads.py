"""The projections of one stream in attention with joined heads: SD3's and Flux's.

Suffixes: B batch, T tokens, N heads of queries, keys and values together, D head width, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.diffusion.layers.unheard import Unheard
from infuse.diffusion.shapes.dit import HeadsShape
from infuse.ground.modes import is_traced
from infuse.layers.build_context import BuildContext
from infuse.layers.linear import direct, product, takes_around

_PART_BYTES = 1 << 24


class Heads(Unheard):
    """Attention over this stream (`attended`), or over it and another one (`over`, then `projected` of each)."""

    settled = frozenset({"processor"})

    def __init__(self, shape: HeadsShape, context: BuildContext):
        super().__init__()
        self.shape, bodies = shape, context.bodies
        matrices = {matrix.target: matrix for matrix in shape.matrices}
        for name in ("qkv", "up", "out"):
            self.add_module(name, context.linear(matrices[name]) if name in matrices else None)
        for name in ("q_norm", "k_norm"):
            there = getattr(shape, name)
            empty = nn.Parameter(torch.empty(shape.head_width), requires_grad=False) if there else None
            self.register_parameter(name, empty)
        self._join = ops.joined_heads.bound(bodies.get("joined_heads", ops.REFERENCE))
        self._attend = ops.attention.bound(bodies.get("attention", ops.REFERENCE))
        self._act = ops.activation.bound(bodies.get("activation", ops.REFERENCE))

    def attended(
        self, x_BTC: Tensor, context: None, mask: None, residual: Tensor | None, cos_sin: tuple[Tensor, Tensor] | None
    ) -> Tensor | None:
        """residual + the output projection of the attention of x over itself."""
        heads = self.over(x_BTC, None, None, cos_sin)
        return self._beside(heads, x_BTC) if self.shape.beside else self.projected(heads, residual)

    def over(
        self, x_BTC: Tensor, second: Heads | None, other_BTC: Tensor | None, cos_sin: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Return the heads' outputs for x, then for `other` of the stream `second`: [B, T1 + T2, H D]."""
        shape = self.shape
        cos, sin = (None, None) if cos_sin is None else (table.float().contiguous() for table in cos_sin)
        of_first, of_second = self._heads(x_BTC), None if second is None else second._heads(other_BTC)
        norms = (*self._norms, *((None, None) if second is None else second._norms))
        qkv_BTND = self._join(of_first, of_second, *norms, cos, sin, shape.eps)
        q, k, v = qkv_BTND.transpose(1, 2).split(shape.heads, dim=1)
        return self._attend(q, k, v, None, None, shape.head_width**-0.5, False, 0, 0.0).flatten(2)

    def projected(self, heads_BTC: Tensor, residual: Tensor | None = None) -> Tensor | None:
        """Return residual + the output projection; None if there is no projection."""
        out: Any = self._modules["out"]
        return None if out is None else product(out, heads_BTC.contiguous(), None, residual)

    def _heads(self, x_BTC: Any) -> Tensor:
        """Queries, keys and values [B, T, N, D]."""
        parts: dict[str, Any] = self._modules
        return direct(parts["qkv"], x_BTC).unflatten(-1, (3 * self.shape.heads, self.shape.head_width))

    @property
    def _norms(self) -> tuple[Tensor | None, Tensor | None]:
        return self._parameters["q_norm"], self._parameters["k_norm"]

    def _beside(self, attended: Tensor, y_BTC: Tensor) -> Tensor:
        """The output projection of attention and MLP side by side.

        On CPUs by some rows at a time, so that both stay in the caches: 1536 x 15360 values are 45 MiB of new memory.
        """
        parts: dict[str, Any] = self._modules
        up, out, act = parts["up"], parts["out"], self.shape.activation
        fused = takes_around(up)

        def inner(y: Tensor) -> Tensor:
            return product(up, y, None, None, act) if fused else self._act(direct(up, y), act)

        in_parts = y_BTC.device.type == "cpu" and fused and takes_around(out) and out._combine is None
        if not in_parts or is_traced():
            return direct(out, torch.cat((attended, inner(y_BTC)), dim=2))
        most = max(_PART_BYTES // (self.shape.matrices[-1].inputs * y_BTC.element_size()), 1)
        rows = y_BTC.flatten(0, 1)
        each = -(-len(rows) // -(-max(len(rows), 1) // most))  # as equal as possible
        pairs = zip(attended.flatten(0, 1).split(max(each, 1)), rows.split(max(each, 1)), strict=True)
        return torch.cat([direct(out, torch.cat((rows, inner(y)), dim=1)) for rows, y in pairs]).view_as(y_BTC)
