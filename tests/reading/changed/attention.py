"""Changed projections, scales, masks and gates of attention. See tests/reading/layers.py for the legend."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reading.cases import EITHER, LEFT, READ, WORDS, Case
from tests.reading.layers import Attention, Config, Layer, RMSNorm

# ---- norms of queries, keys and values ----


class NormedHeads(Attention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x)
        return self.q_norm(q), self.k_norm(k), v


class LayerNormedHeads(NormedHeads):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)


class NormedAfterRotation(NormedHeads):
    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return Attention.qkv(self, x)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().rotate(q, k, cos, sin)
        return self.q_norm(q), self.k_norm(k)


class QueriesNormedAfterRotation(Attention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.q_norm = RMSNorm(self.head_dim)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().rotate(q, k, cos, sin)
        return self.q_norm(q), k


class KeysNormedAfterQueriesBefore(NormedHeads):
    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = Attention.qkv(self, x)
        return self.q_norm(q), k, v

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().rotate(q, k, cos, sin)
        return q, self.k_norm(k)


class NormedOverAllHeads(Attention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.q_norm, self.k_norm = RMSNorm(self.q_proj.out_features), RMSNorm(self.k_proj.out_features)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
        return self.heads(q), self.heads(k), self.heads(self.v_proj(x))


class QueriesOfLengthOne(Attention):
    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x)
        return F.normalize(q, dim=-1) * 4.0, k, v


class ValuesNormed(Attention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.v_norm = RMSNorm(self.head_dim)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x)
        return q, k, self.v_norm(v)


class ValuesOfLengthOne(Attention):
    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x)
        return q, k, v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)


class ValuesOfLengthOneTogether(Attention):
    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x)
        return q, k, v * torch.rsqrt(v.pow(2).mean((1, 3), keepdim=True) + 1e-6)


# ---- projections ----


class ValuesOfStream(Layer):
    def attended(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        q, k, _ = self.self_attn.qkv(self.input_layernorm(x))
        v = self.self_attn.heads(self.self_attn.v_proj(x))
        return self.self_attn.mixed(q, k, v, **given)[0]


class ValuesOfOtherNorm(Layer):
    def attended(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        q, k, _ = self.self_attn.qkv(self.input_layernorm(x))
        v = self.self_attn.qkv(self.post_attention_layernorm(x))[2]
        return self.self_attn.mixed(q, k, v, **given)[0]


class KeysFromValues(Attention):
    """The linears of keys and values have each other's names."""

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x)
        return q, v, k


class ValuesAsKeys(Attention):
    """Keys and values change places between the cache and attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        return super().attend(q, v, k, mask, **kwargs)


class OneLinearForKeysAndValues(Attention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.v_proj = self.k_proj


class FlippedQueryHeads(Attention):
    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x)
        return q.flip(1), k, v


class FlippedKeyHeads(Attention):
    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x)
        return q, k.flip(1), v


class FlippedOutputHeads(Attention):
    def output(self, attended: Tensor) -> Tensor:
        return super().output(attended.flip(2))


class WidthBeforeHeads(Attention):
    """The output linear reads [D, H] instead of [H, D]."""

    def output(self, attended: Tensor) -> Tensor:
        return super().output(attended.transpose(2, 3))


class NotTransposed(Attention):
    """Heads are cut out of several tokens: the same only for one token."""

    def heads(self, projected: Tensor) -> Tensor:
        batch, tokens, _ = projected.shape
        return projected.view(batch, -1, tokens, self.head_dim)


class ValuesOfOtherWidth(Attention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.v_proj = nn.Linear(config.hidden_size, 24 * config.num_key_value_heads, bias=False)
        self.o_proj = nn.Linear(24 * config.num_attention_heads, config.hidden_size, bias=False)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v = self.v_proj(x).view(*x.shape[:2], -1, 24).transpose(1, 2)
        return self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), v


class HeadsOfLayer(Attention):
    """Each layer has another number of heads."""

    def __init__(self, config: Config, layer_idx: int):
        own = copy.copy(config)
        own.num_attention_heads = (4, 6)[layer_idx]
        super().__init__(own, layer_idx)
        self.config = config


class KeysTiled(Attention):
    """Query head h uses key head h % K instead of h // (H / K)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        return super().attend(q, k, v, mask, **kwargs)


def one_group(model: Any) -> None:
    """What the attention function repeats: nothing, as the layer repeats keys itself."""
    for layer in model.model.layers:
        layer.self_attn.num_key_value_groups = 1


class KeysRepeated(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        return super().attend(q, k, v, mask, **kwargs)


class Packed(Attention):
    """[q | k | v] in one linear."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.sizes = [linear.out_features for linear in (self.q_proj, self.k_proj, self.v_proj)]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=config.attention_bias)
        del self.q_proj, self.k_proj, self.v_proj

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        return self.heads(q), self.heads(k), self.heads(v)


class PackedValuesFirst(Packed):
    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v, k, q = self.qkv_proj(x).split(self.sizes[::-1], dim=-1)
        return self.heads(q), self.heads(k), self.heads(v)


class PackedPerHead(Packed):
    """(q | k | v) of each head, for as many heads of keys as of queries."""

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv_proj(x).view(*x.shape[:2], -1, 3, self.head_dim).unbind(3)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class PackedPerGroup(Packed):
    """(queries of the group | k | v) of each head of keys."""

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grouped = self.qkv_proj(x).view(*x.shape[:2], 2, 4, self.head_dim)
        q, k, v = grouped[..., :2, :].flatten(2, 3), grouped[..., 2, :], grouped[..., 3, :]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class PackedPerFeature(Packed):
    """(q, k, v) of each feature."""

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv_proj(x).view(*x.shape[:2], -1, 3).unbind(3)
        return self.heads(q), self.heads(k), self.heads(v)


class BiasOfQueries(Attention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.q_proj = nn.Linear(config.hidden_size, self.q_proj.out_features)


class BiasOfProjections(BiasOfQueries):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.k_proj = nn.Linear(config.hidden_size, self.k_proj.out_features)
        self.v_proj = nn.Linear(config.hidden_size, self.v_proj.out_features)


# ---- gates ----


class Gated(Attention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.gate = nn.Linear(config.hidden_size, self.q_proj.out_features, bias=False)

    def opened(self, hidden_states: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(hidden_states))

    def forward(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor, Any]:
        q, k, v = self.qkv(hidden_states)
        q, k = self.rotate(q, k, *given["position_embeddings"])
        k, v = self.append(k, v, given["cache"])
        attended, weights = self.attend(q, k, v, given["attention_mask"])
        return self.o_proj(attended.flatten(2) * self.opened(hidden_states)), weights


class GatedBySilu(Gated):
    def opened(self, hidden_states: Tensor) -> Tensor:
        return F.silu(self.gate(hidden_states))


class GatedAfterOutput(Attention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.gate = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor, Any]:
        attended, weights = super().forward(hidden_states, **given)
        return attended * torch.sigmoid(self.gate(hidden_states)), weights


# ---- scales ----


class OtherScale(Attention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.scaling = 1.01 * self.head_dim**-0.5


class QueriesScaled(Attention):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().rotate(q, k, cos, sin)
        return q * 1.01, k


class ScaledTwice(Attention):
    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x)
        return q * self.scaling, k, v


class LearnedTemperature(Attention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.temperature = nn.Parameter(torch.ones(1))

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x)
        return q * self.temperature, k, v


class ColderForLongTexts(Attention):
    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x)
        return (q * 1.5 if x.shape[1] > 16 else q), k, v


class ColderForManyKeys(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        return super().attend(q * 1.5 if k.shape[2] > 8 else q, k, v, mask, **kwargs)


class ScaledByLogOfLength(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        return super().attend(q * math.log(k.shape[2] + 1.0), k, v, mask, **kwargs)


class ScaledByPosition(Attention):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Any]:
        q = q * (1 + 0.1 * torch.log1p(given["position_ids"].float()))[:, None, :, None]
        return super().mixed(q, k, v, **given)


# ---- masks ----


class NotCausal(Attention):
    """Sees later tokens where the model passes no mask, as the attention function then asks this attribute."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = False


class MaskIgnored(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        return super().attend(q, k, v, None, **kwargs)


class MaskAsked(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        if mask is None:
            return super().attend(q, k, v * 1.01, mask, **kwargs)
        return super().attend(q, k, v, mask, **kwargs)


class OwnFunction(Attention):
    """Calls PyTorch's attention, as code from the hub often does."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        causal = mask is None and q.shape[2] > 1
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return attended.transpose(1, 2).contiguous(), None


CASES = (
    Case("queries and keys normed", READ, attention=NormedHeads),
    Case("queries and keys normed after the rotation", READ, attention=NormedAfterRotation),
    Case("queries alone normed after the rotation", EITHER, attention=QueriesNormedAfterRotation, words=("q_norm",)),
    Case(
        "keys normed after the rotation, queries before",
        LEFT,
        attention=KeysNormedAfterQueriesBefore,
        words=("q_norm", "k_norm"),
    ),
    Case("values normed without weights", READ, attention=ValuesOfLengthOne),
    Case("values normed over all heads without weights", LEFT, attention=ValuesOfLengthOneTogether),
    Case("values of the stream", LEFT, layer=ValuesOfStream),
    Case("values of another norm", LEFT, layer=ValuesOfOtherNorm),
    Case("keys from values", READ, attention=KeysFromValues),
    Case("values as keys", LEFT, attention=ValuesAsKeys, words=("attention", "values")),
    Case("flipped key heads", LEFT, attention=FlippedKeyHeads),
    Case("width before heads", LEFT, attention=WidthBeforeHeads),
    Case("heads of several tokens", LEFT, attention=NotTransposed),
    Case("keys tiled", LEFT, attention=KeysTiled, words=("repeat", "attention"), changes=one_group),
    Case("keys repeated", READ, attention=KeysRepeated, changes=one_group, like=None),
    Case("packed", READ, attention=Packed, like=None),
    Case("packed per head", READ, attention=PackedPerHead, config={"num_key_value_heads": 4}, like=None),
    Case("a bias of queries alone", READ, attention=BiasOfQueries),
    Case("gated by a sigmoid", EITHER, attention=Gated),
    Case("another scale", READ, attention=OtherScale),
    Case("scaled twice", EITHER, attention=ScaledTwice),
    Case("a learned temperature", LEFT, attention=LearnedTemperature, words=("temperature",)),
    Case("colder for long texts", LEFT, attention=ColderForLongTexts, words=WORDS["branch"]),
    Case("not causal", EITHER, attention=NotCausal, words=("causal",)),
    Case("mask ignored", LEFT, attention=MaskIgnored, words=("mask",)),
    Case("mask asked", LEFT, attention=MaskAsked, words=("mask",)),
)
VARIANTS = (
    Case("queries and keys layer-normed", READ, attention=LayerNormedHeads),
    Case("queries and keys normed over all heads", READ, attention=NormedOverAllHeads),
    Case("queries of length one", LEFT, attention=QueriesOfLengthOne),
    Case("values normed", LEFT, attention=ValuesNormed, words=("v_norm",)),
    Case(
        "one linear for keys and values",
        EITHER,
        attention=OneLinearForKeysAndValues,
        words=("held", "shared", "twice", "module", "packs two"),
        like=None,
    ),
    Case("flipped query heads", LEFT, attention=FlippedQueryHeads),
    Case("flipped output heads", LEFT, attention=FlippedOutputHeads),
    Case("values of another width", LEFT, attention=ValuesOfOtherWidth, words=("width",), like=None),
    Case("other heads in each layer", READ, attention=HeadsOfLayer, like=None),
    Case("packed, with biases", READ, attention=Packed, config={"attention_bias": True}, like=None),
    Case("packed, values first", EITHER, attention=PackedValuesFirst, like=None),
    Case("packed per group", READ, attention=PackedPerGroup, like=None),
    Case("packed per feature", LEFT, attention=PackedPerFeature, config={"num_key_value_heads": 4}, like=None),
    Case("biases of q, k and v, not of the output", READ, attention=BiasOfProjections),
    Case("gated by silu", LEFT, attention=GatedBySilu),
    Case("gated after the output", LEFT, attention=GatedAfterOutput),
    Case("queries scaled", EITHER, attention=QueriesScaled),
    Case("colder for many keys", LEFT, attention=ColderForManyKeys, words=WORDS["branch"]),
    Case("scaled by the length's logarithm", LEFT, attention=ScaledByLogOfLength, words=("size", "log")),
    Case("scaled by position", LEFT, attention=ScaledByPosition),
    Case("a function of its own", EITHER, attention=OwnFunction, like=None),
    Case("values of the stream, in one layer", LEFT, layer=ValuesOfStream, only=(0,)),
    Case("mask ignored, in one layer", LEFT, attention=MaskIgnored, words=("mask",), only=(1,)),
)
