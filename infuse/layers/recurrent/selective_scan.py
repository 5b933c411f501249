"""Selective scan over any cache: product, convolution, what the steps are made of, scan with gate, product.

Suffixes: B batch, T new tokens, C hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from infuse import ops
from infuse.architectures.parts.selective_scan import DT, KEYS, QUERIES, SelectiveScanShape
from infuse.cache.recurrence_slot import CONV, STATE
from infuse.layers.build_context import BuildContext
from infuse.layers.linear import direct
from infuse.layers.native.part import PartWriter, decline_if
from infuse.layers.norm import Norm
from infuse.layers.recurrent.convolved import Recurrent, empty


class SelectiveScan(Recurrent[SelectiveScanShape]):
    struct, mixed = "selective_scan", True

    def __init__(self, shape: SelectiveScanShape, context: BuildContext):
        super().__init__(shape, context)
        self.dt_bias, self.D = empty(shape.channels), empty(shape.channels)
        self.A_log = empty(shape.channels, shape.states)
        for name, norm in shape.norms:
            self.add_module(name, Norm(norm, context.bodies))
        self._scan = ops.selective_scan.bound(context.bodies.get("selective_scan", ops.REFERENCE))

    def projected(self, x_BTC: Tensor) -> tuple[Tensor, ...]:
        """What the convolution sees, and the gate."""
        into: Any = self._modules["in"]
        return direct(into, x_BTC).chunk(2, dim=-1)

    def over_time(
        self, made: tuple[Tensor, ...], before: Mapping[str, Tensor], mask_BT: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        shape, (seen, gate) = self.shape, made
        parts: dict[str, Any] = self._modules
        x, conv = self.convolved(seen, before.get(CONV))
        x = self.masked(x, mask_BT)  # the convolution's bias is in padding, too
        projected = direct(parts["x"], x)
        if shape.shared:
            projected = self._group.all_reduce(projected, f"x of {self._name}")
        of_scan = projected.split([shape.rank, shape.states, shape.states], dim=-1)
        dt, keys, queries = (
            direct(parts[name], each.contiguous()) if name in parts else each
            for name, each in zip((DT, KEYS, QUERIES), of_scan, strict=True)
        )
        dt = direct(parts["dt"], dt.contiguous())
        own: Any = self._parameters
        # Originals begin several tokens with no state, whatever the cache holds, though the convolution goes on.
        state = before.get(STATE) if seen.shape[1] == 1 else None
        y, state = self._scan(x, dt, keys, queries, gate, own["A_log"], own["dt_bias"], own["D"], state)
        return y, {CONV: conv, STATE: state}

    def seen(self, made: tuple[Tensor, ...]) -> Tensor:
        return made[0]

    def native(self, to: PartWriter) -> None:
        shape = self.shape
        decline_if({"an encoder has no states": to.of_encoder, "ranks share the channels": shape.shared})
        to.put(channels=shape.channels, states=shape.states, rank=shape.rank)
        self.native_conv(to)
        for leaf in ("A_log", "dt_bias", "D"):
            to.tensor(leaf)
        to.part("in", as_field="into")
        for name in ("x", "dt", "out", DT, KEYS, QUERIES):
            to.part(name)
        to.storage("convolved", "state")
