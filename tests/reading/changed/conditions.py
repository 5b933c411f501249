"""Layers that use a condition on sizes as a value, as most people write `scaled_dot_product_attention`; and sizes as
numbers to compute with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from tests.reading.cases import DECODER, ENCODER, LEFT, READ, WORDS, Case
from tests.reading.layers import (
    MLP,
    Attention,
    Config,
    Encoder,
    EncoderAttention,
    EncoderLayer,
    GatedMLP,
    Pieces,
    RMSNorm,
    RotaryEmbedding,
    repeat_kv,
    rotated,
)

sdpa = F.scaled_dot_product_attention
Mixed = tuple[Tensor, Any]


class Unmasked(Encoder):
    """A decoder without a cache and masks, whose layers know that they are causal."""

    def __init__(self, config: Config, of_layer: tuple[Pieces, ...]):
        super().__init__(config, of_layer)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> BaseModelOutput:
        x = self.embed_tokens(input_ids)
        angles = self.rotary_emb(x, torch.arange(input_ids.shape[1], device=x.device)[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=angles)
        return BaseModelOutput(last_hidden_state=x)


# ---- attention as people write it, on a cache ----


def _with(condition: Callable[[Tensor, Tensor, Tensor | None], Any]) -> type:
    """Attention whose `is_causal` is this condition on queries, keys and mask."""

    class Conditional(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Mixed:
            k, v = repeat_kv(k, self.num_key_value_groups), repeat_kv(v, self.num_key_value_groups)
            return sdpa(q, k, v, attn_mask=mask, is_causal=condition(q, k, mask)).transpose(1, 2), None

    return Conditional


def _and(q: Tensor, k: Tensor, mask: Tensor | None) -> Any:
    return mask is None and q.shape[2] > 1


def _bitwise(q: Tensor, k: Tensor, mask: Tensor | None) -> Any:
    return (mask is None) & (q.shape[-2] > 1)


def _equal_lengths(q: Tensor, k: Tensor, mask: Tensor | None) -> Any:
    return mask is None and q.size(2) == k.size(2)


def _not(q: Tensor, k: Tensor, mask: Tensor | None) -> Any:
    return not (mask is not None or q.shape[2] == 1)


def _product(q: Tensor, k: Tensor, mask: Tensor | None) -> Any:
    return (mask is None) * (1 < q.shape[2] <= k.shape[2]) == 1


def _looked_up(q: Tensor, k: Tensor, mask: Tensor | None) -> Any:
    return {True: (False, True)[q.shape[2] > 1], False: False}[mask is None]


def _formatted(q: Tensor, k: Tensor, mask: Tensor | None) -> Any:
    return f"{mask is None} {q.shape[2] > 1}" == "True True"


def _with_mask(q: Tensor, k: Tensor, mask: Tensor | None) -> Any:
    return bool(q.shape[2] > 1)


def _for_one_token(q: Tensor, k: Tensor, mask: Tensor | None) -> Any:
    return mask is None


def _few_tokens(q: Tensor, k: Tensor, mask: Tensor | None) -> Any:
    return mask is None and 1 < q.shape[2] < 30


def _few_tokens_bitwise(q: Tensor, k: Tensor, mask: Tensor | None) -> Any:
    return (q.shape[2] < 30) & (mask is None) & (q.shape[2] > 1)


class Interleaved(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Mixed:
        k, v = (each.repeat_interleave(self.num_key_value_groups, dim=1) for each in (k, v))
        tokens = q.size(-2)
        options: dict[str, Any] = dict(attn_mask=mask, dropout_p=self.attention_dropout * self.training)
        return sdpa(q, k, v, is_causal=mask is None and tokens > 1, **options).transpose(1, 2), None


class Grouped(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Mixed:
        dropout = self.attention_dropout if self.training else 0.0
        causal = mask is None and q.shape[2] > 1
        return sdpa(q, k, v, mask, dropout, causal, enable_gqa=True).transpose(1, 2), None


class Unflattened(Interleaved):
    def heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).permute(0, 2, 1, 3)


class Fused(Attention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.widths = [each.out_features for each in (self.q_proj, self.k_proj, self.v_proj)]
        self.wqkv = nn.Linear(config.hidden_size, sum(self.widths), bias=False)
        del self.q_proj, self.k_proj, self.v_proj

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.wqkv(x).split(self.widths, dim=-1)
        return self.heads(q), self.heads(k), self.heads(v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Mixed:
        batch, _, tokens, width = q.shape
        assert tokens > 0, f"{tokens > 0}"
        k = k[:, :, None].expand(batch, -1, self.num_key_value_groups, -1, -1).reshape(batch, -1, k.shape[2], width)
        v = v[:, :, None].expand(batch, -1, self.num_key_value_groups, -1, -1).reshape(batch, -1, v.shape[2], width)
        return sdpa(q, k, v, attn_mask=mask, is_causal=mask is None and tokens > 1).transpose(1, 2).contiguous(), None


class NormedHeads(Grouped):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.q_norm, self.k_norm = Norm(self.head_dim), Norm(self.head_dim)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x)
        return self.q_norm(q), self.k_norm(k), v


class Norm(nn.Module):
    """As in Llama's own code."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class FeedForward(nn.Module):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class OneGate(nn.Module):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class TanhMLP(MLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


# ---- attention without masks ----


class CausalSelfAttention(nn.Module):
    """All heads in one linear, as in nanoGPT."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__()
        self.n_head, self.n_embd = config.num_attention_heads, config.hidden_size
        self.c_attn = nn.Linear(self.n_embd, 3 * self.n_embd)
        self.c_proj = nn.Linear(self.n_embd, self.n_embd)

    def forward(self, x: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Mixed:
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for each in (q, k, v))
        y = sdpa(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)), None


class InOneView(CausalSelfAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Mixed:
        batch, tokens, width = x.shape
        qkv = self.c_attn(x).reshape(batch, tokens, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = sdpa(q, k, v, is_causal=(mask is None) & (tokens > 1))
        return self.c_proj(y.transpose(1, 2).flatten(2)), None


class Turned(Attention):
    """Rotary, and grouped queries."""

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, position_embeddings: Any = None, **kwargs: Any
    ) -> Mixed:
        q, k, v = self.qkv(x)
        q, k = rotated(q, *position_embeddings), rotated(k, *position_embeddings)
        k, v = (each.repeat_interleave(self.num_key_value_groups, dim=1) for each in (k, v))
        tokens, keys = q.shape[-2], k.shape[-2]
        attended = sdpa(q, k, v, attn_mask=mask, is_causal=mask is None and tokens == keys and tokens > 1)
        return self.output(attended.transpose(1, 2)), None


class BothWays(EncoderAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Mixed:
        tokens = q.shape[2]
        return sdpa(q, k, v, attn_mask=mask, is_causal=self.is_causal and tokens > 1).transpose(1, 2), None


class Stream(EncoderLayer):
    """Norms first."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_embeddings: Any = None, **kwargs: Any
    ) -> Any:
        x = hidden_states + self.attended(self.norm1(hidden_states), None, position_embeddings=position_embeddings)
        return x + self.transformed(self.norm2(x))


class NormLast(EncoderLayer):
    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_embeddings: Any = None, **kwargs: Any
    ) -> Any:
        x = self.norm1(hidden_states + self.attended(hidden_states, None, position_embeddings=position_embeddings))
        return self.norm2(x + self.transformed(x))


# ---- sizes that are computed with ----


def _changed(change: Callable[..., tuple[Tensor, ...]]) -> type:
    """Attention over what `change` makes of queries, keys, values and the mask."""

    class Sized(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Mixed:
            k, v = repeat_kv(k, self.num_key_value_groups), repeat_kv(v, self.num_key_value_groups)
            q, k, v, mask = change(q, k, v, mask)
            return sdpa(q, k, v, mask, is_causal=mask is None and q.shape[2] > 1).transpose(1, 2), None

    return Sized


def _multiplied(q: Tensor, *others: Any) -> tuple[Any, ...]:
    return (q * (q.shape[2] < 30), *others)


def _in_steps(q: Tensor, *others: Any) -> tuple[Any, ...]:
    return (q * (1 + q.shape[2] // 4096), *others)


def _by_length(q: Tensor, k: Tensor, *others: Any) -> tuple[Any, ...]:
    return (q * (k.shape[2] / 13), k, *others)


def _less_tokens(q: Tensor, *others: Any) -> tuple[Any, ...]:
    return (q * (q.shape[2] - 2), *others)


def _padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
    more = k.shape[2] // 4096
    return q, F.pad(k, (0, 0, more, 0)), F.pad(v, (0, 0, more, 0)), None if mask is None else F.pad(mask, (more, 0))


class DroppedIfLong(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Mixed:
        k, v = repeat_kv(k, self.num_key_value_groups), repeat_kv(v, self.num_key_value_groups)
        dropped, causal = 0.1 * (q.shape[2] > 4096), mask is None and q.shape[2] > 1
        return sdpa(q, k, v, mask, dropout_p=dropped, is_causal=causal).transpose(1, 2), None


def _decoder(name: str, expected: str = READ, **more: Any) -> Case:
    return Case(f"condition: {name}", expected, **{"like": None, **more})


def _unmasked(name: str, **more: Any) -> Case:
    return Case(f"unmasked: {name}", READ, of=ENCODER, around=Unmasked, **{"layer": Stream, "like": None, **more})


CASES = (
    _decoder("and", attention=_with(_and)),
    _decoder("bitwise", attention=_with(_bitwise)),
    _decoder("looked up", attention=_with(_looked_up)),
    _decoder("by a keyword", attention=Interleaved, norm=Norm, mlp=FeedForward),
    _decoder("with a mask too", LEFT, attention=_with(_with_mask), words=("is_causal",), like=DECODER),
    _decoder("for one token too", LEFT, attention=_with(_for_one_token), like=DECODER),
    _decoder("for few tokens", LEFT, attention=_with(_few_tokens), words=WORDS["branch"], like=DECODER),
    _decoder("as a factor", LEFT, attention=_changed(_multiplied), words=WORDS["branch"], like=DECODER),
    _decoder("a factor in steps", LEFT, attention=_changed(_in_steps), words=("with a size",)),
    _decoder("padded in steps", LEFT, attention=_changed(_padded), words=("on a size",)),
    _unmasked("as in nanoGPT", attention=CausalSelfAttention),
    _unmasked("rotary, gated", attention=Turned, norm=Norm, mlp=FeedForward),
    Case("encoder: never causal", READ, attention=BothWays, of=ENCODER, like=None),
)
VARIANTS = (
    _decoder("equal lengths", attention=_with(_equal_lengths)),
    _decoder("not", attention=_with(_not)),
    _decoder("product", attention=_with(_product)),
    _decoder("formatted", attention=_with(_formatted)),
    _decoder("by place", attention=Grouped, mlp=OneGate),
    _decoder("normed heads", attention=NormedHeads, norm=Norm, mlp=FeedForward),
    _decoder("unflattened", attention=Unflattened, mlp=TanhMLP),
    _decoder("fused", attention=Fused, norm=nn.LayerNorm, mlp=MLP),
    _decoder("fused, gated", attention=Fused, norm=RMSNorm, mlp=OneGate),
    _decoder("layer norm", attention=Grouped, norm=nn.LayerNorm, mlp=GatedMLP),
    _unmasked("in one view", attention=InOneView),
    _unmasked("in one view, gated", attention=InOneView, norm=Norm, mlp=OneGate),
    _unmasked("norms last", attention=CausalSelfAttention, layer=NormLast, mlp=TanhMLP),
    _unmasked("rotary, norms last", attention=Turned, layer=NormLast, norm=RMSNorm, mlp=GatedMLP),
    _unmasked("rotary, GELU", attention=Turned, norm=nn.LayerNorm),
    _decoder(
        "for few tokens, bitwise", LEFT, attention=_with(_few_tokens_bitwise), words=WORDS["branch"], like=DECODER
    ),
    _decoder("by length", LEFT, attention=_changed(_by_length), words=("with a size",), like=DECODER),
    _decoder("by tokens", LEFT, attention=_changed(_less_tokens), words=("with a size",), like=DECODER),
    _decoder("dropped if long", LEFT, attention=DroppedIfLong, words=WORDS["branch"]),
)
