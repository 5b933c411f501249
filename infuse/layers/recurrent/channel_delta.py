"""Kimi Delta Attention over any cache: one product for queries, keys, values and beta, the convolution, the delta rule
with a decay for each channel, norm and gate.

Suffixes: B batch, T new tokens, C hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from infuse import ops
from infuse.architectures.parts.channel_delta import ChannelDeltaShape
from infuse.cache.recurrence_slot import CONV, STATE
from infuse.layers.build_context import BuildContext
from infuse.layers.linear import direct
from infuse.layers.native.part import PartWriter, decline_if
from infuse.layers.recurrent.convolved import Recurrent, empty


class ChannelDelta(Recurrent[ChannelDeltaShape]):
    struct, mixed = "channel_delta", True

    def __init__(self, shape: ChannelDeltaShape, context: BuildContext):
        super().__init__(shape, context)
        self.A_log, self.dt_bias, self.norm = empty(shape.heads), empty(shape.rows), empty(shape.width)
        self._scan = ops.linear_attention.bound(context.bodies.get("linear_attention", ops.REFERENCE))
        self._norm = ops.gated_norm.bound(context.bodies.get("gated_norm", ops.REFERENCE))

    def projected(self, x_BTC: Tensor) -> tuple[Tensor, ...]:
        """What the convolution sees, and what beta, decay and gate are made of."""
        shape = self.shape
        parts: dict[str, Any] = self._modules
        ranks = (shape.decay_rank, shape.gate_rank)
        first = [shape.channels, shape.heads, *(shape.rows for rank in ranks if not rank)]
        seen, beta, *rest = direct(parts["in"], x_BTC).split(first, dim=-1)
        low = direct(parts["low"], x_BTC).split([rank for rank in ranks if rank], dim=-1) if any(ranks) else ()
        made, of_rank = iter(rest), iter(low)
        decay, gate = (
            direct(parts[target], next(of_rank).contiguous()) if rank else next(made)
            for target, rank in zip(("decay", "gate"), ranks, strict=True)
        )
        return seen, beta, decay, gate

    def over_time(
        self, made: tuple[Tensor, ...], before: Mapping[str, Tensor], mask_BT: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        shape, (seen, beta, decay, gate) = self.shape, made
        convolved, conv = self.convolved(seen, before.get(CONV))
        q, k, v = convolved.unflatten(-1, (3, shape.heads, shape.width)).unbind(2)
        decay = self._decay(decay.unflatten(-1, (shape.heads, -1)), seen.dtype)
        beta = beta.float().sigmoid()
        out, state = self._scan(q, k, v, decay, beta, None, before.get(STATE), shape.scale, True, True)
        norm, weight = shape.norm, self._parameters["norm"]
        y = self._norm(out.flatten(2), gate, weight, norm.width, norm.eps, norm.gate_first, norm.sigmoid)
        return y, {CONV: conv, STATE: state}

    def seen(self, made: tuple[Tensor, ...]) -> Tensor:
        return made[0]

    def _decay(self, made_BTHD: Tensor, dtype: torch.dtype) -> Tensor:
        """The logarithm of each channel's decay, [B, T, H, D] in float32."""
        shape = self.shape
        rate = self.A_log.float().exp()[:, None]
        y = made_BTHD.float() + self.dt_bias.float().view(shape.heads, -1)
        decay = -rate * softplus(y) if shape.bound is None else shape.bound * (rate * y).sigmoid()
        return decay.to(dtype).float() if shape.rounded else decay

    def native(self, to: PartWriter) -> None:
        shape, bound = self.shape, self.shape.bound
        decline_if({"an encoder has no states": to.of_encoder})
        to.put(heads=shape.heads, width=shape.width, decay_rank=shape.decay_rank, gate_rank=shape.gate_rank)
        to.put(bounded=bound is not None, rounded=shape.rounded)
        to.put_reals(scale=shape.scale, bound=bound or 0.0, eps=shape.norm.eps)
        self.native_conv(to)
        for leaf in ("A_log", "dt_bias", "norm"):
            to.tensor(leaf)
        to.part("in", as_field="into")
        for name in ("low", "decay", "gate", "out"):
            to.part(name)
        to.storage("convolved", "state")
