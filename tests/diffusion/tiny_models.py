"""Tiny random denoisers of diffusers, and the blocks that each has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor


def cos_sin(*shape: int) -> tuple[Tensor, Tensor]:
    angles = torch.randn(*shape[:-1], shape[-1] // 2).repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


MODELS: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "LTX-Video": (
        lambda: diffusers.LTXVideoTransformer3DModel(
            in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=12, cross_attention_dim=48,
            num_layers=2, caption_channels=16,
        ), {"LTXVideoTransformerBlock": 2},
    ),
    "Wan": (
        lambda: diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
            ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=64,
        ), {"WanTransformerBlock": 2},
    ),
    "Sana": (
        lambda: diffusers.SanaTransformer2DModel(
            in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=12,
            num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=8,
            sample_size=8, patch_size=1,
        ), {"Attention": 2},
    ),
    "Hunyuan-DiT": (
        lambda: diffusers.HunyuanDiT2DModel(
            sample_size=8, num_layers=4, patch_size=2, attention_head_dim=8, num_attention_heads=3, in_channels=4,
            cross_attention_dim=16, cross_attention_dim_t5=16, pooled_projection_dim=4, hidden_size=24, text_len=4,
            text_len_t5=4, activation_fn="gelu-approximate",
        ), {"HunyuanDiTBlock": 4},
    ),
}  # fmt: skip
