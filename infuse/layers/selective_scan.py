"""Selective scan over any cache: product, convolution, what the steps are made of, scan with gate, product.

Suffixes: B batch, T new tokens, C hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.selective_scan import DT, KEYS, QUERIES, SelectiveScanShape
from infuse.layers.build_context import BuildContext
from infuse.layers.inputs import Inputs
from infuse.layers.linear import direct
from infuse.layers.native_part import NotNative, PartWriter
from infuse.layers.norm import Norm
from infuse.layers.recurrent import Recurrent
from infuse.layers.slot import CONV, STATE


class SelectiveScan(Recurrent[SelectiveScanShape]):
    """`forward` returns (output [B, T, C], None)."""

    struct, mixed = "selective_scan", True

    def __init__(self, shape: SelectiveScanShape, context: BuildContext):
        super().__init__(shape, context)
        for matrix in shape.matrices:
            self.add_module(matrix.target, context.linear(matrix))
        self.hold_conv(shape.conv, shape.channels, context.bodies)
        sizes = {"dt_bias": (shape.channels,), "A_log": (shape.channels, shape.states), "D": (shape.channels,)}
        for leaf, size in sizes.items():
            self.register_parameter(leaf, nn.Parameter(torch.empty(size), requires_grad=False))
        for name, norm in shape.norms:
            self.add_module(name, Norm(norm, context.bodies))
        self._scan = ops.selective_scan.bound(context.bodies.get("selective_scan", ops.REFERENCE))

    def forward(self, x_BTC: Tensor, inputs: Inputs) -> tuple[Tensor, None]:  # type: ignore[override]
        shape, tokens = self.shape, x_BTC.shape[1]
        parts: dict[str, Any] = self._modules
        slot, before = self.begin(x_BTC, inputs)
        seen, gate = direct(parts["in"], self.masked(x_BTC, inputs)).chunk(2, dim=-1)
        x, conv = self.convolved(seen, before.get(CONV))
        x = self.masked(x, inputs)  # the convolution's bias is in padding, too
        made = direct(parts["x"], x).split([shape.rank, shape.states, shape.states], dim=-1)
        dt, keys, queries = (
            direct(parts[name], each.contiguous()) if name in parts else each
            for name, each in zip((DT, KEYS, QUERIES), made, strict=True)
        )
        dt = direct(parts["dt"], dt.contiguous())
        own: Any = self._parameters
        # Originals begin several tokens with no state, whatever the cache holds, though the convolution goes on.
        state = before.get(STATE) if tokens == 1 else None
        y, state = self._scan(x, dt, keys, queries, gate, own["A_log"], own["dt_bias"], own["D"], state)
        self.end(slot, tokens, {CONV: conv, STATE: state}, lambda: seen)
        return direct(parts["out"], y), None

    def native(self, to: PartWriter) -> None:
        raise NotNative("a selective scan has no struct in C++")
