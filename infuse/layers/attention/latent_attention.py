"""Latent attention over any cache: a few new tokens attend to the latents themselves, many to expanded keys and values.

The cache holds what transformers' holds: normed latents as keys, rotated keys as values.

Suffixes: B batch, T new tokens, L keys, H heads, C hidden width, N plain key, E rotated key, R latent, V value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse import ops
from infuse.architectures.parts.attention import GATE_SIGMOID
from infuse.architectures.parts.latent_attention import NONE, PAIRS, LatentAttentionShape
from infuse.cache.slot import Slot
from infuse.ground.modes import is_dispatched
from infuse.layers.attention.named_attention import is_paged, named_attention
from infuse.layers.attention.position import grown, make_positions
from infuse.layers.attention.self_attention import gated
from infuse.layers.build_context import BuildContext
from infuse.layers.calls import autocast
from infuse.layers.calls.inputs import Inputs
from infuse.layers.linear import Linear, direct, has_no_hooks
from infuse.layers.mixer import Mixer
from infuse.layers.native.part import NativeInputs, NativeMixer, PartWriter, decline_if
from infuse.layers.norm import Norm

_EXPANDS_FASTER = 10


class LatentAttention(Mixer[LatentAttentionShape], NativeMixer):
    """`mix` returns (output [B, T, C], weights [B, H, T, L] or None)."""

    struct, mixed, calls_named = "latent_attention", True, True

    def __init__(self, shape: LatentAttentionShape, context: BuildContext):
        super().__init__(shape, context)
        for matrix in shape.matrices:
            self.add_module(matrix.target, context.linear(matrix))
        self.add_module("q_norm", Norm(shape.q_norm, context.bodies) if shape.q_norm else None)
        self.kv_norm = Norm(shape.kv_norm, context.bodies)
        self.positions = make_positions(shape.position, shape.all_heads)
        bodies = context.bodies
        self._rotary = ops.rotary.bound(bodies.get("rotary", ops.REFERENCE))
        self._attend = ops.attention.bound(bodies.get("attention", ops.REFERENCE))
        self._attend_latents = ops.latent_attention.bound(bodies.get("latent_attention", ops.REFERENCE))
        self._most_absorbed = most_absorbed(shape)

    def mix(self, x_BTC: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        shape = self.shape
        parts: dict[str, Any] = self._modules
        batch, tokens, _ = x_BTC.shape
        latent, key = direct(parts["kv_a"], x_BTC).split((shape.latent_width, shape.rotated_width), dim=-1)
        latent = direct(parts["kv_norm"], latent.contiguous())
        q, turned = self._queries(x_BTC).split((shape.plain_width, shape.rotated_width), dim=-1)
        key = key[:, :, None]
        if shape.rotation != NONE:
            turned, key = self._rotated(turned, key, inputs)
        if shape.growth is not None:
            factor = grown(shape.growth, inputs)[:, :, None].to(x_BTC.dtype)
            q, turned = q * factor, turned * factor
        if is_paged(inputs.cache):
            kept = inputs.cache.update(latent[:, None], key.transpose(1, 2), self._index, kwargs=inputs.more)
            (latents, keys), mask, causal = kept, inputs.mask, shape.causal
        else:
            latents, keys, mask, causal = self.append(inputs, latent[:, None], key.transpose(1, 2))
        if mask is not None and shape.head_counts and mask.shape[1] > 1:
            mask = mask[:, shape.first_head : shape.first_head + shape.heads]
        weights = None
        if inputs.more is None and not inputs.want_weights and tokens <= self._most_absorbed and self._is_plain():
            expand = parts["kv_b"].weight
            out = self._attend_latents(q, turned, latents[:, 0], keys[:, 0], expand, mask, shape.scale, causal)
        else:
            q_BHTD = torch.cat((q, turned), dim=-1).transpose(1, 2)
            k, v = self._expanded(latents[:, 0], keys)
            if inputs.more is not None:
                out, weights = self._by_name(q_BHTD, k, v, inputs, inputs.more)
            else:
                out = self._attended(q_BHTD, k, v, mask, causal)
            if inputs.want_weights and inputs.more is None:
                weights = ops.attention_weights(q_BHTD, k, mask, None, shape.scale, causal, 0, 0.0).to(x_BTC.dtype)
                if shape.head_counts:
                    weights = self._group.all_gather(weights, shape.head_counts, 1, f"weights of {shape.name}")
        out = out.reshape(batch, tokens, -1)
        if shape.gate is not None:
            out = gated(shape.gate, out, direct(parts["gate"], x_BTC))
        return direct(parts["out"], out), weights

    def _queries(self, x_BTC: Tensor) -> Tensor:
        """Return the queries, [B, T, H, N + E]."""
        parts: dict[str, Any] = self._modules
        x = x_BTC
        if self.shape.query_rank:
            x = direct(parts["q_norm"], direct(parts["q_a"], x_BTC))
        return direct(parts["q"], x).unflatten(-1, (self.shape.heads, -1))

    def _rotated(self, q_BTHE: Tensor, k_BT1E: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        positions: Any = self._modules["positions"]
        cos, sin = positions.cos_sin(inputs)
        if self.shape.rotation == PAIRS:
            q_BTHE, k_BT1E = _in_halves(q_BTHE), _in_halves(k_BT1E)
        return tuple(self._rotary(x, cos, sin, positions.interleaved) for x in (q_BTHE, k_BT1E))  # type: ignore[return-value]

    def _is_plain(self) -> bool:
        """Whether the weight of kv_b may be used without calling the module."""
        expand: Any = self._modules["kv_b"]
        return type(expand) is Linear and has_no_hooks(expand) and not (autocast.is_any_on() or is_dispatched())

    def _expanded(self, latents_BLR: Tensor, keys_B1LE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys of all heads [B, H, L, N + E], and their values [B, H, L, V]."""
        shape = self.shape
        expand: Any = self._modules["kv_b"]
        made = direct(expand, latents_BLR).unflatten(-1, (shape.heads, -1)).transpose(1, 2)
        plain, values = made.split((shape.plain_width, shape.value_width), dim=-1)
        return torch.cat((plain, keys_B1LE.expand(-1, shape.heads, -1, -1)), dim=-1), values

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Attend with heads of one width: zeros fill up the narrower of keys and values."""
        more = self.shape.key_width - self.shape.value_width
        if more > 0:
            v = F.pad(v, (0, more))
        elif more < 0:
            q, k = F.pad(q, (0, -more)), F.pad(k, (0, -more))
        out_BTHD = self.attend(q, k, v, mask, None, self.shape.scale, causal, 0, 0.0, None)
        return out_BTHD[..., : self.shape.value_width]

    def _by_name(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, more: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Attend by the function that the config names, called as the original does."""
        self.check_named(inputs.cache, over_ranks=bool(self.shape.head_counts))
        return named_attention(self)(self, q, k, v, inputs.mask, dropout=0.0, scaling=self.shape.scale, **more)

    # ---- in one call of C++

    def native(self, to: PartWriter) -> None:
        shape = self.shape
        decline_if(
            {
                "an encoder attends to latents": to.of_encoder,
                "ranks share the heads": shape.head_counts,
                "attention's output gate is no sigmoid": shape.gate is not None and shape.gate.function != GATE_SIGMOID,
            }
        )
        to.put(heads=shape.heads, plain=shape.plain_width, turned=shape.rotated_width, latent=shape.latent_width)
        to.put(value=shape.value_width, interleaved=self.positions.interleaved, pairs=shape.rotation == PAIRS)
        to.turns()
        to.put_reals(scale=shape.scale)
        for name in ("q_a", "q_norm", "q", "kv_a", "kv_norm", "kv_b", "gate", "out"):
            to.part(name)
        to.storage("keys", "values")

    def can_write(self, slot: Slot) -> bool:
        return slot.format is None

    def native_inputs(self, x_BTC: Tensor, inputs: Inputs) -> NativeInputs | None:
        slot, mask, (batch, tokens, _) = inputs.cache.slot(self.index), inputs.mask, x_BTC.shape  # type: ignore[union-attr]
        if tokens > self._most_absorbed or not self.can_write(slot):
            return None
        if slot.place is not None or slot.row_lengths is not None:
            return None
        growth = self.shape.growth
        if growth is not None and not bool((grown(growth, inputs) == 1).all()):
            return None
        start = slot.reserve(batch, tokens, self.shape.cached_rows, x_BTC, self.filler)
        if mask is not None and mask.shape[-1] not in (1, start + tokens):
            return None
        cos, sin = self.positions.cos_sin(inputs) or (None, None)
        return NativeInputs(cos, sin, mask=mask, keys=slot.key_storage, values=slot.value_storage, start=start)

    def was_run(self, x_BTC: Tensor, inputs: Inputs) -> None:
        inputs.cache.slot(self.index).advance(x_BTC.shape[1])  # type: ignore[union-attr]


def most_absorbed(shape: LatentAttentionShape) -> int:
    """The most new tokens for which attending to latents is faster than expanding all of them.

    For each key, expanding takes R (N + V) operations; a query takes 2 R + E on latents, and N + E + V on a head's own
    keys and values. The products that expand are faster for each operation: with AMX and the widths of DeepSeek V3,
    both ways took the same time for 16 to 24 tokens on any context. _EXPANDS_FASTER makes 17 of it.
    """
    widths = shape.plain_width + shape.value_width
    more = 2 * shape.latent_width - widths
    return shape.latent_width * widths // (_EXPANDS_FASTER * more) if more > 0 else 1 << 30


def _in_halves(x: Tensor) -> Tensor:
    """Move columns (2i, 2i + 1) to (i, i + E/2)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
