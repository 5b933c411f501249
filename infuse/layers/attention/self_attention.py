"""Self-attention over any cache: one product for q, k and v, rotary fused with the append, then the attention op.

Suffixes: B batch, T new tokens, L keys, N all heads (H query + 2 K key/value), D head width, C hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from infuse import ops
from infuse.architectures.parts.attention import (
    GATE_SIGMOID,
    SHARED_STATES,
    AttentionShape,
    GateShape,
    Lender,
    NoPosition,
    PassedScores,
    RelativeBias,
)
from infuse.architectures.parts.disentangled import DisentangledShape
from infuse.cache.kv_cache import KVCache
from infuse.ground.errors import UnsupportedCall
from infuse.ground.modes import is_traced
from infuse.layers.attention.disentangled import DisentangledScores
from infuse.layers.attention.named_attention import attribute, is_paged, named_attention
from infuse.layers.attention.position import LearnedBias, Positions, additive, grown, make_positions, missing
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.inputs import Inputs
from infuse.layers.linear import direct, product
from infuse.layers.mixer import Mixer
from infuse.layers.multipliers import times, times_sections
from infuse.layers.native.part import NONE, NativeInputs, NativeMixer, PartWriter, decline_if
from infuse.layers.norm import Norm, scaled
from infuse.ops.cache_rows import values_of

_BIASES = (NoPosition, PassedScores, RelativeBias)  # nothing, or what is added to the mask


class Attention(Mixer[AttentionShape], NativeMixer):
    """Compute residual + attention(norm(x)); norm and residual are optional and run inside the products if they fuse.

    `mix` returns (output [B, T, C], weights [B, H, T, L] or None).
    """

    struct, mixed, calls_named = "attention", True, True

    def __init__(self, shape: AttentionShape, context: BuildContext):
        super().__init__(shape, context)
        self._rows, self.by_name = shape.cached_rows, shape.by_name
        self._all_heads = shape.heads + (0 if shape.borrows else 2 * shape.kv_heads)
        bodies, matrices = context.bodies, {matrix.target: matrix for matrix in shape.matrices}
        for name in ("qkv", "out", "gate"):
            self.add_module(name, context.linear(matrices.pop(name)) if name in matrices else None)
        for name, matrix in matrices.items():  # of keys and queries of distances
            self.add_module(name, context.linear(matrix))
        self.add_module("q_norm", Norm(shape.q_norm, bodies) if shape.q_norm else None)
        self.add_module("k_norm", Norm(shape.k_norm, bodies) if shape.k_norm else None)
        self.add_module("v_norm", Norm(shape.v_norm, bodies) if shape.v_norm else None)
        self.add_module("out_norm", Norm(shape.out_norm, bodies) if shape.out_norm else None)
        if shape.borrows is not None:
            self._index = shape.borrows.index
        if shape.sinks:  # else there is no such attribute, which transformers' paged attention asks for
            empty = torch.empty(shape.heads, device="meta")
            self.register_parameter("sinks", nn.Parameter(empty, requires_grad=False))
        self.positions = (
            DisentangledScores(shape.position)
            if isinstance(shape.position, DisentangledShape)
            else make_positions(shape.position, shape.all_heads)
        )
        self._rotary = ops.rotary.bound(bodies.get("rotary", ops.REFERENCE))
        self._append = ops.rotary_append.bound(bodies.get("rotary_append", ops.REFERENCE))
        self._attend = ops.attention.bound(bodies.get("attention", ops.REFERENCE))
        # Inside a CUDA graph: whether the bodies read the append's place and the number of keys on the device.
        self._appends_at_place = bodies.get("rotary_append", ops.REFERENCE) != "cpu"
        self._counts_keys = bodies.get("attention") == "triton"

    def mix(
        self, x_BTC: Tensor, inputs: Inputs, norm: nn.Module | None = None, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        out, gate, weights = self._attended(x_BTC, inputs, norm)
        return self._projected(out, gate, residual), weights

    def mix_inside(self, x_BTC: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """The heads, which the last matrix takes, and the weights."""
        out, gate, weights = self._attended(x_BTC, inputs, None)
        assert gate is None, self.shape.name
        return out, weights

    def finished(self, output: Tensor) -> Tensor:
        return self._projected(output, None, None)

    def _attended(
        self, x_BTC: Tensor, inputs: Inputs, norm: nn.Module | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The heads [B, T, H D] (or of real tokens alone), their gate and the weights."""
        shape, packed = self.shape, inputs.packed
        parts: dict[str, Any] = self._modules
        positions: Positions = parts["positions"]
        self._check(inputs, x_BTC.shape[1] if packed is None else packed.tokens)
        qkv, gate = self._products(x_BTC, norm)
        if packed is not None:
            qkv = packed.spread(qkv)
        batch, tokens, _ = qkv.shape
        if not shape.norm_after and not parts["q_norm"] is parts["k_norm"] is parts["v_norm"] is None:
            qkv = self._normalised(qkv)
        if shape.clip:
            qkv = qkv.clamp(-shape.clip, shape.clip)
        qkv_BTND = qkv.view(batch, tokens, self._all_heads, shape.head_width)
        if inputs.more is not None:
            out, weights = self._by_name(qkv_BTND, inputs, inputs.more)
            return out, gate, weights
        q, k, v = self._rotated(qkv_BTND, inputs, positions)
        causal = shape.causal if inputs.causal is None else inputs.causal
        if inputs.mask is None and causal and not isinstance(inputs.cache, KVCache):
            k, v = in_order(tokens, k, v)
        mask, bias = inputs.mask, self._bias(positions, q, k, inputs)
        if mask is not None:
            mask = positions.added(self.allowed(mask, k.shape[2], q.dtype), q.dtype)
        if shape.head_counts:
            mask, bias = self._of_own_heads(mask), self._of_own_heads(bias)
        window = shape.window
        count: tuple[Tensor | None, ...] = ()
        if isinstance(inputs.cache, KVCache) and self._index is not None:
            slot = inputs.cache.slot(self._index)
            mask = ops.both_masks(mask, slot.seen(tokens), q.dtype)
            if slot.place is not None and self._counts_keys:
                count = (slot.count,)
            elif slot.place is not None and (mask is None or window):
                # The last key is not the last query's, so a mask has to express causal order and window.
                mask, window = ops.both_masks(mask, slot.allowed(window), q.dtype), 0
        # A mask that the model passes includes the causal order already. A window applies on top of it.
        causal = (mask is None and causal) or window > 0
        sinks = self._parameters.get("sinks")
        out_BTHD = self.attend(q, k, v, mask, bias, shape.scale, causal, window, shape.softcap, sinks, *count)
        weights = None
        if inputs.want_weights:
            counted = sinks if shape.sinks_in_weights else None
            scored = ops.attention_weights(q, k, mask, bias, shape.scale, causal, window, shape.softcap, counted)
            weights = scored.to(x_BTC.dtype)
            if shape.head_counts:
                weights = self._group.all_gather(weights, shape.head_counts, 1, f"weights of {shape.name}")
        out = out_BTHD.reshape(batch, tokens, shape.heads * shape.head_width)
        if packed is not None:
            out = packed.taken(out)
        return out, gate, weights

    def _products(self, x_BTC: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor | None]:
        """Queries, keys and values of norm(x), and the output gate, if there is one."""
        shape, gate = self.shape, None
        parts: dict[str, Any] = self._modules
        if shape.factors is not None:
            x_BTC, norm = times(x_BTC if norm is None else direct(norm, x_BTC), shape.factors.before), None
        qkv = direct(parts["qkv"], x_BTC) if norm is None else product(parts["qkv"], x_BTC, norm)
        if parts["gate"] is not None:
            gate = direct(parts["gate"], x_BTC) if norm is None else product(parts["gate"], x_BTC, norm)
        if shape.merges_gate:
            qkv, gate = qkv.split((self._all_heads * shape.head_width, shape.heads * shape.head_width), dim=-1)
        if shape.factors is not None:
            qkv = times_sections(qkv, shape.factors, self._widths)
        return qkv, gate

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values in the first product."""
        shape = self.shape
        return shape.heads * shape.head_width, *(shape.kv_heads * shape.head_width,) * 2

    def _projected(self, out: Tensor, gate: Tensor | None, residual: Tensor | None) -> Tensor:
        """Normalise and gate the heads, and multiply them with the last matrix."""
        last: Any = self._modules["out"]
        out = self._out_normed(out)
        if gate is not None and self.shape.gate is not None:
            out = gated(self.shape.gate, out, gate)
        if self.shape.factors is not None:
            out = times(direct(last, out), self.shape.factors.after)
            return out if residual is None else residual + out
        return direct(last, out) if residual is None else product(last, out, None, residual)

    def native(self, to: PartWriter) -> None:
        shape = self.shape
        decline_if(
            {
                "q, k and v are clipped": shape.clip,
                "q and k are normalised after the rotation": shape.norm_after,
                "attention's output gate is no sigmoid": shape.gate is not None and shape.gate.function != GATE_SIGMOID,
                "an encoder normalises values or heads": to.of_encoder and (shape.v_norm or shape.out_norm),
                "an encoder's attention has an output gate": to.of_encoder and shape.gate is not None,
                "ranks share the heads": shape.head_counts,
                "an encoder's attention has a window": to.of_encoder and shape.window,
                "an encoder's attention has positions": to.of_encoder and not isinstance(shape.position, _BIASES),
            }
        )
        to.put(heads=shape.heads, kv_heads=shape.kv_heads, width=shape.head_width)
        to.window(shape.window)
        to.turns()
        to.put(interleaved=self.positions.interleaved, borrowed=shape.borrows is not None, gated=shape.merges_gate)
        to.put_reals(scale=shape.scale, softcap=shape.softcap)
        to.tensor("sinks")
        for name in ("qkv", "out", "gate", "q_norm", "k_norm", "v_norm", "out_norm"):
            to.part(name)
        to.factors(shape.factors, self._widths)
        to.storage("keys", "values")
        if isinstance(self.positions, LearnedBias):
            to.storage("bias")
        else:
            to.put(bias=NONE)

    def native_inputs(self, x_BTC: Tensor, inputs: Inputs) -> NativeInputs | None:
        cache, mask, (batch, tokens, _) = inputs.cache, inputs.mask, x_BTC.shape
        growth = self._growth(inputs, tokens, x_BTC.device)
        if growth is not None and not bool((growth == 1).all()):
            return None
        if cache is None:
            mask = None if mask is None else self.allowed(mask, tokens, x_BTC.dtype)
            return NativeInputs(mask=self._with_bias(mask, inputs, batch, tokens, x_BTC.dtype))
        slot = cache.slot(self._index)
        if slot.place is not None or slot.row_lengths is not None:
            return None
        if self.shape.borrows is None:
            start = slot.reserve(batch, tokens, self._rows, x_BTC, self.filler)
        elif slot.key_storage is None:
            return None
        else:
            start = slot.length - tokens
        positions: Any = self._modules["positions"]
        cos, sin = positions.cos_sin(inputs) or (None, None)
        bias = positions.bias(inputs, batch, start + tokens)
        if mask is not None:
            mask = self.allowed(mask, start + tokens, x_BTC.dtype)
        return NativeInputs(cos, sin, -1, mask, bias, slot.key_storage, slot.value_storage, start)

    def was_run(self, x_BTC: Tensor, inputs: Inputs) -> None:
        if self.shape.borrows is not None:
            return
        slot = inputs.cache.slot(self._index)  # type: ignore[union-attr]
        slot.advance(x_BTC.shape[1])
        if self.shape.lends:
            keys, values = slot.held()
            self._lend(inputs, keys, values, x_BTC.dtype)

    def _with_bias(
        self, mask: Tensor | None, inputs: Inputs, batch: int, tokens: int, dtype: torch.dtype
    ) -> Tensor | None:
        """The mask with the bias of the scores added, [B or 1, H or 1, T or 1, T]."""
        positions: Any = self._modules["positions"]
        bias = positions.bias(inputs, batch, tokens)
        if bias is None:
            return mask
        return bias if mask is None else additive(mask, dtype) + bias

    def _bias(self, positions: Positions, q_BHTD: Tensor, k_BHLD: Tensor, inputs: Inputs) -> Tensor | None:
        if isinstance(positions, DisentangledScores):
            return positions.scores(self, q_BHTD, k_BHLD, inputs, self.shape.scale)
        return positions.bias(inputs, q_BHTD.shape[0], k_BHLD.shape[2])

    def _by_name(self, qkv_BTND: Tensor, inputs: Inputs, more: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Attend by the function that the config names, called as the original does: (heads [B, T, H D], weights)."""
        shape = self.shape
        self.check_named(inputs.cache, over_ranks=bool(shape.head_counts))
        attend = named_attention(self)
        q, k, v = self._rotated(qkv_BTND, inputs, self._modules["positions"])  # type: ignore[arg-type]
        passed = {keyword: attribute(self, name) for keyword, name in shape.passes}
        k, v = values_of(k, q.dtype), values_of(v, q.dtype)
        out_BTHD, weights = attend(self, q, k, v, inputs.mask, dropout=0.0, scaling=shape.scale, **passed, **more)
        return out_BTHD.reshape(*qkv_BTND.shape[:2], -1).contiguous(), weights

    def _growth(self, inputs: Inputs, tokens: int, device: torch.device) -> Tensor | None:
        """The factors of the new tokens' queries, [B or 1, T, 1]; None if they do not grow. Before they are cached."""
        growth, cache = self.shape.growth, inputs.cache
        if growth is None or not growth.counted:
            return None if growth is None else grown(growth, inputs)
        start: Any = 0
        if isinstance(cache, KVCache):
            slot = cache.slot(self.index)
            start = slot.get_seq_length() if slot.row_lengths is None else slot.row_lengths[:, None]
        elif is_paged(cache):
            raise UnsupportedCall(f"queries grow with positions in the cache, which a {type(cache).__name__} has not")
        elif cache is not None:
            start = cache.get_seq_length(self._index)
        return grown(growth, inputs, start + torch.arange(tokens, device=device)[None])

    def _grown(self, q_BHTD: Tensor, growth_BT1: Tensor | None) -> Tensor:
        if growth_BT1 is None or self.shape.growth is None:
            return q_BHTD
        factor = growth_BT1[:, None]
        # Llama 4 rounds the product alone, Ministral rounds the factors, too.
        return (q_BHTD * (factor if self.shape.growth.counted else factor.to(q_BHTD.dtype))).to(q_BHTD.dtype)

    def _rotated(self, qkv_BTND: Tensor, inputs: Inputs, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate q and k, let q grow, append k and v to the cache, and lend them to other layers.

        Return q [B, H, T, D] and all k and v as they are stored.
        """
        growth, lender = self._growth(inputs, qkv_BTND.shape[1], qkv_BTND.device), self.shape.borrows
        if lender is not None:
            q, k, v = self._borrowed(qkv_BTND, inputs, positions, lender)
        else:
            q, k, v = self._appended(qkv_BTND, inputs, positions)
        if self.shape.lends:
            self._lend(inputs, k, v, q.dtype)
        return self._grown(q, growth), k, v

    def _lend(self, inputs: Inputs, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        shared = inputs.values[SHARED_STATES]
        if shared is None:
            raise missing(SHARED_STATES)
        shared[self.shape.lends] = values_of(k, dtype), values_of(v, dtype)

    def _borrowed(
        self, q_BTHD: Tensor, inputs: Inputs, positions: Positions, lender: Lender
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate q, and take the keys and values that another layer has made."""
        cos_sin = positions.cos_sin(inputs)
        q = q_BTHD if cos_sin is None else self._rotary(q_BTHD, *cos_sin, positions.interleaved)
        k, v = self._lent(inputs, lender)
        if inputs.more is None and inputs.mask is not None and inputs.mask.shape[-1] not in (1, k.shape[2]):
            raise _of_other_keys(inputs.mask, k.shape[2])
        return q.transpose(1, 2), k, v

    def _lent(self, inputs: Inputs, lender: Lender) -> tuple[Tensor, Tensor]:
        """The lender's keys and values: as they are stored in our cache, or as they are passed."""
        cache, shared = inputs.cache, inputs.values[SHARED_STATES]
        if isinstance(cache, KVCache):
            slot = cache.slot(lender.index)
            if slot.key_storage is not None:
                return slot.held() if slot.place is None else slot.whole()
        if shared is None or lender.name not in shared:
            raise missing(f'{SHARED_STATES}["{lender.name}"]')
        k, v = shared[lender.name]
        if k.shape[1] != self.shape.kv_heads:  # those of all ranks, from a layer that stayed as it was
            first, count = self.shape.first_kv_head, self.shape.kv_heads
            k, v = k[:, first : first + count], v[:, first : first + count]
        return k, v

    def _appended(self, qkv_BTND: Tensor, inputs: Inputs, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate q and k and append k and v to the cache."""
        shape, cos_sin = self.shape, positions.cos_sin(inputs)
        cache: Any = inputs.cache
        cos, sin = cos_sin if cos_sin is not None else (None, None)
        interleaved = positions.interleaved
        if shape.norm_after:
            qk, v = qkv_BTND.split((shape.heads + shape.kv_heads, shape.kv_heads), dim=2)
            qk = qk if cos is None or sin is None else self._rotary(qk, cos, sin, interleaved)
            qkv_BTND = self._normalised(torch.cat((qk, v), dim=2).flatten(2)).view_as(qkv_BTND)
            cos, sin = None, None
        slot = cache.slot(self._index) if isinstance(cache, KVCache) and self._index is not None else None
        if slot is not None and slot.place is not None and self._appends_at_place:
            keys, values = slot.whole()
            return self._append(qkv_BTND, cos, sin, keys, values, slot.place, shape.heads, interleaved), keys, values
        if slot is not None and slot.row_lengths is None and slot.place is None:
            batch, tokens = qkv_BTND.shape[:2]
            start = slot.reserve(batch, tokens, self._rows, qkv_BTND, self.filler)
            q = self._append(qkv_BTND, cos, sin, slot.key_storage, slot.value_storage, start, shape.heads, interleaved)
            slot.advance(tokens)
            keys, values = slot.held()
            return q, keys, values
        qk = qkv_BTND[:, :, : shape.heads + shape.kv_heads]
        if cos is not None and sin is not None:
            qk = self._rotary(qk, cos, sin, interleaved)
        q, k = qk.transpose(1, 2).split((shape.heads, shape.kv_heads), dim=1)
        v = qkv_BTND[:, :, shape.heads + shape.kv_heads :].transpose(1, 2)
        if slot is not None:
            k, v = slot.update(k, v, filler=self.filler)
        elif is_paged(cache):
            k, v = cache.update(k, v, self._index, kwargs=inputs.more)
        elif cache is not None:
            k, v = cache.update(k, v, self._index)
        return q, k, v

    def _normalised(self, qkv: Tensor) -> Tensor:
        """Normalise q, k and v, over each head or over all heads, depending on the shape of the norm's weight."""
        shape = self.shape
        q_rows, k_rows = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        parts: dict[str, Any] = self._modules
        if shape.borrows is not None:
            return _normed(qkv, parts["q_norm"], shape.heads)
        q, k, v = qkv.split((q_rows, k_rows, k_rows), dim=-1)
        v = _normed(v, parts["v_norm"], shape.kv_heads)
        if any(norm is not None and norm.whole for norm in (shape.q_norm, shape.k_norm)):
            q, k = self._over_ranks((q, parts["q_norm"], shape.heads), (k, parts["k_norm"], shape.kv_heads))
            return torch.cat((q, k, v), dim=-1)
        q, k = _normed(q, parts["q_norm"], shape.heads), _normed(k, parts["k_norm"], shape.kv_heads)
        return torch.cat((q, k, v), dim=-1)

    def _out_normed(self, out: Tensor) -> Tensor:
        norm: Norm | None = self._modules["out_norm"]  # type: ignore[assignment]
        if norm is None:
            return out
        if norm.shape.whole:
            return self._over_ranks((out, norm, self.shape.heads))[0]
        return direct(norm, out)

    def _over_ranks(self, *given: tuple[Tensor, Norm | None, int]) -> list[Tensor]:
        """Apply RMS norms over the heads of all ranks. One all-reduce adds up the squares for all norms."""
        wide = [(x, norm) for x, norm, _ in given if norm is not None and norm.shape.whole]
        squares = torch.stack([x.float().square().sum(-1) / norm.shape.copies for x, norm in wide])
        totals = iter(self._group.all_reduce(squares, f"q and k norms of {self.shape.name}"))
        return [
            scaled(x, norm, next(totals)) if norm is not None and norm.shape.whole else _normed(x, norm, heads)
            for x, norm, heads in given
        ]

    def _check_window(self, cache: Any, tokens: int) -> None:
        """Refuse caches with room after their last token: a window counts back from the last key, the last query's.

        A window as large as the whole room hides nothing of it.
        """
        if isinstance(cache, KVCache) or is_paged(cache):
            return
        length = cache.get_mask_sizes(tokens, self._index)[0]
        if length <= self.shape.window or length == cache.get_seq_length(self._index) + tokens:
            return
        raise UnsupportedCall(
            f"a layer with a local window was given a {type(cache).__name__} that holds room for more tokens "
            "(a static cache); give a DynamicCache, or leave cache_implementation out"
        )

    def _check(self, inputs: Inputs, tokens: int) -> None:
        """Raise UnsupportedCall for a mask or a cache that this attention cannot serve."""
        if inputs.mask is not None and inputs.more is None:
            self._check_mask(inputs.mask, inputs.cache, tokens)
        if self.shape.window and inputs.cache is not None:
            self._check_window(inputs.cache, tokens)

    def _check_mask(self, mask: Tensor, cache: Any, tokens: int) -> None:
        """Refuse a mask over other keys than there will be. Other caches than ours tell how many only when appended."""
        if self.shape.borrows is not None:  # the number of the lender's keys is known where they are taken
            return
        if cache is None:
            length = tokens
        elif isinstance(cache, KVCache) and self._index is not None:
            slot = cache.slot(self._index)
            length = slot.length + tokens if slot.place is None else slot.whole()[0].shape[2]
        else:
            return
        if mask.shape[-1] != length and mask.shape[-1] != 1:
            raise _of_other_keys(mask, length)

    def _of_own_heads(self, of_all: Tensor | None) -> Tensor | None:
        """Select this rank's heads from a mask or bias [B, H or 1, T, L]; one that is computed here has them alone."""
        if of_all is None or of_all.dim() < 4 or of_all.shape[1] != self.shape.all_heads:
            return of_all
        return of_all[:, self.shape.first_head : self.shape.first_head + self.shape.heads]

    def allowed(self, mask: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Return the mask over `length` keys. In a boolean result, True means: may attend."""
        if mask.shape[-1] > length:
            raise _of_other_keys(mask, length)
        if not self.shape.inverted_mask or mask.dtype != torch.bool:
            return mask
        # Models with such masks fill the lowest score in: a query that sees nothing, as padding, then sees all alike.
        unread = is_traced() or mask.device.type != "cpu"  # values that must not be looked at
        if mask.shape[-2] > 1 and (unread or bool(mask.all(-1).any())):
            return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, torch.finfo(dtype).min)
        return ~mask


def in_order(tokens: int, k_BKLD: Tensor, v_BKLD: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the keys that `tokens` causal queries attend to if the model passes no mask, as transformers' sdpa does.

    Extra keys are then the empty room of a static cache that receives its first prompt.
    """
    return (k_BKLD[:, :, :tokens], v_BKLD[:, :, :tokens]) if 1 < tokens < k_BKLD.shape[2] else (k_BKLD, v_BKLD)


def _of_other_keys(mask: Tensor, length: int) -> UnsupportedCall:
    return UnsupportedCall(
        f"attention_mask has shape {list(mask.shape)}, and this call has {length} keys: its last axis must be {length}"
    )


def _normed(x_BTM: Tensor, norm: Norm | None, heads: int) -> Tensor:
    if norm is None:
        return x_BTM
    if norm.shape.weight == (x_BTM.shape[-1],):  # over all heads
        return norm(x_BTM)
    return norm(x_BTM.unflatten(-1, (heads, -1))).flatten(-2)


def gated(shape: GateShape, out: Tensor, gate: Tensor) -> Tensor:
    """Multiply the heads [..., H D] by the function of their gates, [..., H] or [..., H D]; rounded once, as in C++."""
    factor = gate.float().sigmoid() if shape.function == GATE_SIGMOID else softplus(gate.float())
    return (out * factor if shape.width > 1 else _per_head(out, factor)).to(out.dtype)


def _per_head(out: Tensor, factor: Tensor) -> Tensor:
    return (out.unflatten(-1, (factor.shape[-1], -1)) * factor.unsqueeze(-1)).flatten(-2)
