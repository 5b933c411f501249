"""An attention whose cache holds one latent and one rotated key for a token; heads are expanded from the latent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, apply_rotary_pos_emb

from infuse.architectures.bind import Binder
from infuse.architectures.families.llama import LLAMA
from infuse.architectures.part import COLUMN, ROW, Extent, Matrix, MixerShape, Parameter, Share, inside
from infuse.architectures.part import HEADS as OF_HEADS
from infuse.architectures.parts.norm import RMS, Norm, NormShape
from infuse.ground.cache_names import cache_in
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.inputs import Inputs
from infuse.layers.linear import direct
from infuse.layers.mixer import Mixer
from infuse.layers.norm import Norm as NormLayer
from tests.parts.made_up import HEADS, HIDDEN, path_of

LATENT, ROTATED, PLAIN, VALUE = 24, 8, 16, 12  # widths: the cache's two rows, a head's unrotated key, its value


# ---- the original


class LatentAttention(nn.Module):
    def __init__(self, config: Any, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.q_proj = nn.Linear(HIDDEN, HEADS * (PLAIN + ROTATED), bias=False)
        self.compress = nn.Linear(HIDDEN, LATENT + ROTATED, bias=False)
        self.norm = LlamaRMSNorm(LATENT)
        self.expand = nn.Linear(LATENT, HEADS * (PLAIN + VALUE), bias=False)
        self.o_proj = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        cache = cache_in(kwargs)
        batch, tokens, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(batch, tokens, HEADS, PLAIN + ROTATED).transpose(1, 2)
        latent, key = self.compress(hidden_states).split((LATENT, ROTATED), dim=-1)
        latent, (plain, rotated) = self.norm(latent)[:, None], q.split((PLAIN, ROTATED), dim=-1)
        rotated, key = apply_rotary_pos_emb(rotated, key[:, None], *position_embeddings)
        if cache is not None:
            latent, key = cache.update(latent, key, self.layer_idx)
        heads = self.expand(latent[:, 0]).view(batch, -1, HEADS, PLAIN + VALUE).transpose(1, 2)
        k, v = heads.split((PLAIN, VALUE), dim=-1)
        causal = attention_mask is None and tokens > 1
        k, v = (k[:, :, :tokens], v[:, :, :tokens]) if causal else (k, v)
        k = torch.cat((k, key[:, :, : k.shape[2]].expand(-1, HEADS, -1, -1)), dim=-1)
        q = torch.cat((plain, rotated), dim=-1)
        out = scaled_dot_product_attention(q, k, v, attention_mask, is_causal=causal)
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, HEADS * VALUE)), None


class LatentLayer(LlamaDecoderLayer):
    def __init__(self, config: Any, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = LatentAttention(config, layer_idx)


# ---- what infuse is told of it


@dataclass(frozen=True)
class Latent:
    module: str = "self_attn"

    def of_layer(self, layer: nn.Module, config: Any) -> Latent:
        return self

    def bind(self, binder: Binder, name: str) -> LatentShape:
        for target, path in (("q", "q_proj"), ("compress", "compress"), ("expand", "expand"), ("out", "o_proj")):
            binder.linear(f"{self.module}.{path}")
            binder.fill_linear(f"{name}.{target}", (f"{self.module}.{path}",), bias=False)
        norm = Norm(f"{self.module}.norm", RMS).bind(binder, f"{name}.norm")
        assert norm is not None
        return LatentShape(norm=norm, replaces=(self.module,))


@dataclass(frozen=True)
class LatentShape(MixerShape):
    norm: NormShape
    heads: int = HEADS
    first_head: int = 0
    replaces: tuple[str, ...] = ()
    causal: bool = True
    inverted_mask: bool = False
    all_heads = HEADS
    cached_rows = ((1, LATENT), (1, ROTATED))

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        of = [Extent(OF_HEADS, self.heads, width) for width in (PLAIN + ROTATED, PLAIN + VALUE, VALUE)]
        return (
            Matrix("q", of[0].length, HIDDEN, False, COLUMN, (of[0],)),
            Matrix("compress", LATENT + ROTATED, HIDDEN, False),
            Matrix("expand", of[1].length, LATENT, False, COLUMN, (of[1],)),
            Matrix("out", HIDDEN, of[2].length, False, ROW, (of[2],)),
        )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*super().parameters, *(inside("norm", one) for one in self.norm.parameters))

    @property
    def ops(self) -> tuple[str, ...]:
        return self.norm.ops

    def of_rank(self, share: Share) -> LatentShape:
        return replace(self, heads=share.count(OF_HEADS), first_head=share.own[OF_HEADS][0])


SPEC = LLAMA.but(layer=path_of(LatentLayer), attn=Latent())


# ---- and its layer


class LatentLayerOfOurs(Mixer[LatentShape]):
    def __init__(self, shape: LatentShape, context: BuildContext):
        super().__init__(shape, context)
        self.q, self.compress, self.expand, self.out = (context.linear(matrix) for matrix in shape.matrices)
        self.norm = NormLayer(shape.norm, context.bodies)

    def mix(self, x_BTC: Tensor, inputs: Inputs, *_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        batch, tokens, _ = x_BTC.shape
        assert inputs.position_embeddings is not None
        cos, sin = (each[:, None] for each in inputs.position_embeddings)
        q = direct(self.q, x_BTC).unflatten(-1, (self.shape.heads, -1)).transpose(1, 2)
        plain, rotated = q.split((PLAIN, ROTATED), dim=-1)
        latent, key = direct(self.compress, x_BTC).split((LATENT, ROTATED), dim=-1)
        latent, key = direct(self.norm, latent.contiguous())[:, None], _turned(key[:, None], cos, sin)
        latent, key, mask, causal = self.append(inputs, latent, key)
        heads = direct(self.expand, latent[:, 0]).unflatten(-1, (self.shape.heads, -1)).transpose(1, 2)
        k, v = heads.split((PLAIN, VALUE), dim=-1)
        k = torch.cat((k, key.expand(-1, self.shape.heads, -1, -1)), dim=-1)
        q = torch.cat((plain, _turned(rotated, cos, sin)), dim=-1)
        out = scaled_dot_product_attention(q, k, v, mask, is_causal=causal and tokens > 1)
        return direct(self.out, out.transpose(1, 2).flatten(2)), None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


LAYERS = {LatentShape: LatentLayerOfOurs}
