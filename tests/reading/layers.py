"""A small decoder-only language model and a small encoder, written as code from the hub is.

Their layers consist of short methods, so that a changed layer overrides a few lines. Nothing here knows infuse.

Legend: B batch, T new tokens, L keys, H heads, K heads of keys, D head width, C hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

VOCABULARY = 96


class Config(PreTrainedConfig):
    """Sizes of both models: 4 heads of 16 in a hidden width of 48, so no size follows from the others."""

    model_type = "read-from-its-graph"

    def __init__(
        self,
        vocab_size: int = VOCABULARY,
        hidden_size: int = 48,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        head_dim: int = 16,
        intermediate_size: int = 80,
        norm_eps: float = 1e-5,
        rotary_width: int = 16,
        attention_bias: bool = False,
        attention_dropout: float = 0.1,
        branch_scale: float = 1.25,
        max_position_embeddings: int = 128,
        **kwargs: Any,
    ):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.head_dim, self.intermediate_size, self.norm_eps = head_dim, intermediate_size, norm_eps
        self.rotary_width, self.attention_bias = rotary_width, attention_bias
        self.attention_dropout, self.branch_scale = attention_dropout, branch_scale
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **kwargs})


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        x = hidden_states.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class RotaryEmbedding(nn.Module):
    inv_freq: Tensor

    def __init__(self, config: Config):
        super().__init__()
        width = config.rotary_width
        inv_freq = 1.0 / (10000.0 ** (torch.arange(0, width, 2, dtype=torch.float) / width))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[..., None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def repeat_kv(x: Tensor, times: int) -> Tensor:
    batch, heads, length, width = x.shape
    if times == 1:
        return x
    return x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def eager_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    key, value = repeat_kv(key, module.num_key_value_groups), repeat_kv(value, module.num_key_value_groups)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class Attention(nn.Module):
    """Grouped queries and rotary embedding, on a cache."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.is_causal = config.head_dim**-0.5, True
        self.attention_dropout = config.attention_dropout
        width, bias = config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * width, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * width, config.hidden_size, bias=bias)

    def heads(self, projected: Tensor) -> Tensor:
        """[B, T, H D] → [B, H, T, D]."""
        return projected.view(*projected.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(q, cos, sin), rotated(k, cos, sin)

    def append(self, k: Tensor, v: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        return k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        """[B, H, T, D], and keys and values [B, K, L, D], → [B, T, H, D]."""
        function: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        return function(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **kwargs)

    def output(self, attended: Tensor) -> Tensor:
        return self.o_proj(attended.reshape(*attended.shape[:2], -1).contiguous())

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        q, k, v = self.qkv(hidden_states)
        given = dict(position_embeddings=position_embeddings, attention_mask=attention_mask, cache=cache, **kwargs)
        return self.mixed(q, k, v, **given)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Any]:
        """Attention after the projections; `given` is what `forward` takes besides the hidden states."""
        q, k = self.rotate(q, k, *given.pop("position_embeddings"))
        k, v = self.append(k, v, given.pop("cache"))
        attended, weights = self.attend(q, k, v, given.pop("attention_mask"), **given)
        return self.output(attended), weights


class GatedMLP(nn.Module):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def activation(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def inner(self, x: Tensor) -> Tensor:
        return self.activation(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.inner(x))


class MLP(nn.Module):
    """Without a gate, and with biases."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


@dataclass(frozen=True)
class Pieces:
    """The classes that a layer is made of."""

    layer: type
    attention: type
    mlp: type
    norm: type


class Layer(nn.Module):
    """A decoder's layer. `given`: everything that attention takes besides the hidden states."""

    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__()
        self.hidden_size, self.layer_idx = config.hidden_size, layer_idx
        self.self_attn = pieces.attention(config=config, layer_idx=layer_idx)
        self.mlp = pieces.mlp(config=config, layer_idx=layer_idx)
        self.input_layernorm = pieces.norm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = pieces.norm(config.hidden_size, config.norm_eps)

    def attended(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return self.self_attn(hidden_states=self.input_layernorm(x), **given)[0]

    def transformed(self, x: Tensor) -> Tensor:
        return self.mlp(self.post_attention_layernorm(x))

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = x + self.attended(x, given)
        return x + self.transformed(x)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        given = dict(
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        return self.both(hidden_states, given)


class _PreTrained(PreTrainedModel):
    config_class = Config
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class Decoder(_PreTrained):
    """`of_layer`: the pieces of each layer."""

    def __init__(self, config: Config, of_layer: tuple[Pieces, ...]):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(pieces.layer(config, i, pieces) for i, pieces in enumerate(of_layer))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        hidden_states = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(input_ids.shape[1], device=input_ids.device) + past).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        more: Any = 0.0
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                position_ids=position_ids,
                cache=cache,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **kwargs,
            )
            if isinstance(hidden_states, tuple):
                hidden_states, *others = hidden_states
                more = more + sum(others)
        return self.norm(hidden_states + more), cache


class CausalLM(_PreTrained, GenerationMixin):
    def __init__(self, config: Config, of_layer: tuple[Pieces, ...]):
        super().__init__(config)
        self.model = Decoder(config, of_layer)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        kwargs.pop("return_dict", None)
        hidden_states, cache = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            **kwargs,
        )
        return CausalLMOutputWithPast(logits=self.lm_head(hidden_states[:, -logits_to_keep:]), cache=cache)


# ---- the encoder ----


class EncoderAttention(nn.Module):
    """Without positions: they are in the embeddings."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups, self.is_causal = 1, False
        self.scaling, self.dropout_p = config.head_dim**-0.5, config.attention_dropout
        width = config.num_attention_heads * config.head_dim
        self.query, self.key = nn.Linear(config.hidden_size, width), nn.Linear(config.hidden_size, width)
        self.value, self.dense = nn.Linear(config.hidden_size, width), nn.Linear(width, config.hidden_size)

    def heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        function: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.dropout_p if self.training else 0.0
        return function(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **kwargs)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Any]:
        attended, weights = self.attend(*self.qkv(hidden_states), attention_mask, **kwargs)
        return self.dense(attended.reshape(*attended.shape[:2], -1).contiguous()), weights


class EncoderLayer(nn.Module):
    """A norm after each sum."""

    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__()
        self.layer_idx = layer_idx
        self.attention = pieces.attention(config=config, layer_idx=layer_idx)
        self.mlp = pieces.mlp(config=config, layer_idx=layer_idx)
        self.norm1 = pieces.norm(config.hidden_size, config.norm_eps)
        self.norm2 = pieces.norm(config.hidden_size, config.norm_eps)
        self.dropout = nn.Dropout(config.attention_dropout)

    def attended(self, x: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
        return self.dropout(self.attention(x, mask, **kwargs)[0])

    def transformed(self, x: Tensor) -> Tensor:
        return self.dropout(self.mlp(x))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        x = self.norm1(hidden_states + self.attended(hidden_states, attention_mask, **kwargs))
        return self.norm2(x + self.transformed(x))


class Encoder(_PreTrained):
    def __init__(self, config: Config, of_layer: tuple[Pieces, ...]):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(pieces.layer(config, i, pieces) for i, pieces in enumerate(of_layer))
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> BaseModelOutput:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden_states = self.embed_tokens(input_ids) + self.embed_positions(positions)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=mask, **kwargs)
            if isinstance(hidden_states, tuple):
                hidden_states = hidden_states[0]
        return BaseModelOutput(last_hidden_state=hidden_states)
