"""Models that no spec knows, as users write them: layers with q, k, v in one matrix or apart, and layers that ranks
cannot share; and some of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as t
from torch import Tensor, nn

from tests.models.families import GQA, enlarge

WIDTH, HEADS, INNER, VOCABULARY, LAYERS = 48, 4, 80, 96, 2


class Fused(nn.Module):
    """Pre-norm, q, k, v in one matrix: "blocks" [q|k|v], "per head" (q|k|v) for each, "per group" (q q|k|v) for each of
    2.
    """

    def __init__(self, packing: str):
        super().__init__()
        self.packing, self.heads, self.kv_heads = packing, HEADS, 2 if packing == "per group" else HEADS
        self.head_dim = WIDTH // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (self.heads + 2 * self.kv_heads) * self.head_dim)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        d, h, k = self.head_dim, self.heads, self.kv_heads
        if self.packing == "blocks":
            return tuple(part.unflatten(-1, (-1, d)) for part in qkv.split((h * d, k * d, k * d), dim=-1))
        if self.packing == "per head":
            return qkv.unflatten(-1, (h, 3, d)).unbind(-2)
        groups = qkv.unflatten(-1, (k, h // k + 2, d))
        q, keys, values = groups[..., :-2, :], groups[..., -2, :], groups[..., -1, :]
        return q.flatten(-3, -2), keys, values

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.split(self.qkv(self.norm1(x))))
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(attended.transpose(1, 2).reshape(*x.shape[:2], -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Apart(nn.Module):
    """Pre-norm, grouped queries, a gated MLP whose two halves are one matrix, and a gate for each token that stays
    whole.
    """

    def __init__(self, kv_heads: int = 2):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.embed_dim = HEADS, kv_heads, WIDTH
        d = WIDTH // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, kv_heads * d), nn.Linear(WIDTH, kv_heads * d)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up, self.down, self.token_gate = (
            nn.Linear(WIDTH, 2 * INNER),
            nn.Linear(INNER, WIDTH),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm1(x)
        q = self.q(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = (linear(h).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2) for linear in (self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape[0], x.shape[1], self.embed_dim))
        h = self.norm2(x)
        gate, up = self.gate_up(h).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up) * torch.sigmoid(self.token_gate(h))


class Fixed(Apart):
    """A layer whose forward has its head counts written into it: no rank can have some of them."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm1(x)
        q = self.q(h).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        k, v = (linear(h).view(*x.shape[:2], 2, -1).transpose(1, 2) for linear in (self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return x + self.o(attended.transpose(1, 2).reshape(*x.shape))


class Normed(Apart):
    """A layer that normalises the queries of all heads at once, with a weight for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm1(x)
        q = self.q_norm(self.q(h)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = (linear(h).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2) for linear in (self.k, self.v))
        return x + self.o(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2).flatten(2)
        )


class Unknown(nn.Module):
    """A decoder of such layers."""

    def __init__(self, make_layer: Any):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(make_layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


MAKERS: dict[str, Any] = {
    "blocks": lambda: Fused("blocks"),
    "per head": lambda: Fused("per head"),
    "per group": lambda: Fused("per group"),
    "grouped": lambda: Apart(),
    "one key head": lambda: Apart(1),
    "fixed": lambda: Fixed(),
    "normed": lambda: Normed(),
}


def make(name: str) -> Unknown:
    torch.manual_seed(0)
    model = Unknown(MAKERS[name]).eval()
    enlarge(model)
    return model


def bart() -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    small = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    wide = {
        "encoder_ffn_dim": 80,
        "decoder_ffn_dim": 80,
        "vocab_size": 96,
        "d_model": 48,
        "max_position_embeddings": 64,
    }
    return BartForConditionalGeneration(BartConfig(**small, **wide)).eval()


NEW_TOKENS = 8
T5 = dict(d_model=48, d_kv=12, d_ff=80, num_layers=2, num_heads=4, vocab_size=96, decoder_start_token_id=0)


def t5(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = t.T5ForConditionalGeneration(t.T5Config(**(T5 | changes))).eval()
    enlarge(model)
    model.generation_config.eos_token_id = None
    return model


def continued(model: Any) -> tuple[Tensor, Tensor]:
    """Logits of a prompt, and the tokens that greedy search appends."""
    ids = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits = model(ids)
        for _ in range(NEW_TOKENS):
            ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), dim=1)
    return logits, ids


# Families without a spec whose attention goes through transformers' interface, where ours takes its place.
HOOKED: dict[str, dict[str, Any]] = {
    "Glm": dict(GQA, head_dim=12), "Glm4": dict(GQA, head_dim=12), "Olmo": GQA, "Cohere2": GQA, "Exaone4": GQA,
    "Ernie4_5": dict(GQA, head_dim=12), "Helium": dict(GQA, head_dim=12),
    "HunYuanDenseV1": dict(GQA, head_dim=12), "Arcee": GQA, "SeedOss": dict(GQA, head_dim=12),
}  # fmt: skip


def hooked(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = getattr(t, f"{name}ForCausalLM")(getattr(t, f"{name}Config")(**HOOKED[name])).eval()
    enlarge(model)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model
