"""Linear attention over any cache: one product for all sections, the convolution, the recurrence, norm and gate.

Suffixes: B batch, T new tokens, H heads, C hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from infuse import ops
from infuse.architectures.parts.state_attention import BETA, GATE, STEP, K, LinearAttentionShape, Q, V
from infuse.cache.recurrence_slot import CONV, STATE
from infuse.layers.build_context import BuildContext
from infuse.layers.linear import direct
from infuse.layers.multipliers import times, times_sections
from infuse.layers.native.part import PartWriter, decline_if
from infuse.layers.recurrent.convolved import Recurrent, empty

_STATE_SPACE_TURNED = MappingProxyType({CONV: (1, 2), STATE: (2, 3)})


class LinearAttention(Recurrent[LinearAttentionShape]):
    struct, mixed = "linear_attention", True

    def __init__(self, shape: LinearAttentionShape, context: BuildContext):
        super().__init__(shape, context)
        if not shape.delta:
            self.turned = dict(_STATE_SPACE_TURNED)  # a dict, as the view of one cannot be pickled
            self.turns_state = True
        for leaf, there in (("A_log", True), ("dt_bias", True), ("D", shape.skip)):
            self.register_parameter(leaf, empty(shape.heads) if there else None)
        self.register_parameter("norm", empty(shape.norm.columns) if shape.norm.there else None)
        self._decays = ops.decay.bound(context.bodies.get("decay", ops.REFERENCE))
        self._scan = ops.linear_attention.bound(context.bodies.get("linear_attention", ops.REFERENCE))
        self._norm = ops.gated_norm.bound(context.bodies.get("gated_norm", ops.REFERENCE))

    def projected(self, x_BTC: Tensor) -> tuple[Tensor, ...]:
        into: Any = self._modules["in"]
        factors = self.shape.factors
        if factors is None:
            return (direct(into, x_BTC),)
        projected = direct(into, times(x_BTC, factors.before))
        return (times_sections(projected, factors, [*self.shape.rows.values()]),)

    def finished(self, output: Tensor) -> Tensor:
        return output if self.shape.factors is None else times(output, self.shape.factors.after)

    def over_time(
        self, made: tuple[Tensor, ...], before: Mapping[str, Tensor], mask_BT: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        shape, of, tokens = self.shape, self._sections(*made), made[0].shape[1]
        convolved, conv = self.convolved(of["convolved"], before.get(CONV))
        if not shape.delta:
            convolved = self.masked(convolved, mask_BT)  # the convolution's bias is in padding, too
        q, k, v = self._heads(convolved)
        decay, beta = self._decay(of, in_steps=bool(before) and tokens == 1)
        factor, scale, delta = self._parameters["D"], shape.scale, shape.delta
        skip = None if factor is None else factor.float()
        out, state = self._scan(q, k, v, decay, beta, skip, before.get(STATE), scale, delta, delta)
        return self._normed(out.flatten(2), of[GATE]), {CONV: conv, STATE: state}

    def seen(self, made: tuple[Tensor, ...]) -> Tensor:
        return self._sections(*made)["convolved"]

    def _normed(self, out_BTN: Tensor, gate_BTN: Tensor) -> Tensor:
        norm, weight = self.shape.norm, self._parameters["norm"]
        if weight is None or not norm.shared_by:
            return self._norm(out_BTN, gate_BTN, weight, norm.width, norm.eps, norm.gate_first, norm.sigmoid)
        y, gate = out_BTN.float(), gate_BTN.float()
        factor = gate.sigmoid() if norm.sigmoid else silu(gate)
        y = y * factor if norm.gate_first else y
        squares = y.new_zeros(*y.shape[:2], norm.shared_by)
        squares[..., norm.place] = y.square().sum(-1)
        squares = self._group.all_reduce(squares, f"norm of {self._name}")[..., norm.place, None]
        y = y * torch.rsqrt(squares / norm.width + norm.eps) * weight.float()
        return (y if norm.gate_first else y * factor).to(out_BTN.dtype)

    def _sections(self, projected: Tensor) -> dict[str, Tensor]:
        """The sections of the first product; those that are convolved together, as one."""
        of = dict(zip(self.shape.rows, projected.split([*self.shape.rows.values()], dim=-1), strict=True))
        sections = [*self.shape.rows]
        first = min(map(sections.index, (Q, K, V)))
        start = sum(self.shape.rows[section] for section in sections[:first])
        of["convolved"] = projected.narrow(-1, start, self.shape.channels)
        return of

    def _heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, T, G, D], and values [B, T, H, V]."""
        shape = self.shape
        rows = {section: rows for section, rows in shape.rows.items() if section in (Q, K, V)}
        of = dict(zip(rows, convolved.split([*rows.values()], dim=-1), strict=True))
        heads = {Q: shape.key_heads, K: shape.key_heads, V: shape.heads}
        q, k, v = (of[section].unflatten(-1, (heads[section], -1)) for section in (Q, K, V))
        return q, k, v

    def _decay(self, of: dict[str, Tensor], *, in_steps: bool) -> tuple[Tensor, Tensor]:
        """The logarithm of each head's decay, and beta, [B, T, H] in float32."""
        shape, parameters = self.shape, self._parameters
        a_log: Any = parameters["A_log"]
        dt_bias: Any = parameters["dt_bias"]
        limits = (0.0, math.inf) if shape.delta or in_steps else shape.limits  # originals clamp it in prompts alone
        beta = of[BETA] if shape.delta else None
        return self._decays(of[STEP], beta, a_log, dt_bias, *limits, shape.beta_factor)

    def native(self, to: PartWriter) -> None:
        shape, norm = self.shape, self.shape.norm
        least, most = shape.limits
        decline_if({"an encoder has no states": to.of_encoder, "ranks share a norm": norm.shared_by})
        to.put(heads=shape.heads, key_heads=shape.key_heads, key_width=shape.key_width, value_width=shape.value_width)
        starts, at = {}, 0
        for section, rows in shape.rows.items():
            starts[section], at = at, at + rows
        to.put(
            q_at=starts[Q], k_at=starts[K], v_at=starts[V], gate_at=starts[GATE], beta_at=starts.get(BETA, -1),
            step_at=starts[STEP],
        )  # fmt: skip
        to.put(
            beside=shape.beside,
            delta=shape.delta,
            gate_first=norm.gate_first,
            sigmoid=norm.sigmoid,
            norm_width=norm.width,
        )
        to.put_reals(scale=shape.scale, beta_factor=shape.beta_factor, least=least, most=most, eps=norm.eps)
        self.native_conv(to)
        for leaf in ("A_log", "dt_bias", "D", "norm"):
            to.tensor(leaf)
        to.part("in", as_field="into")
        to.part("out")
        to.factors(shape.factors, [*shape.rows.values()])
        to.storage("convolved", "state")
