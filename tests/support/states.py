"""Families whose mixers keep states, one for each kind of them, and what their tests share."""

from __future__ import annotations

import transformers as t
from torch import Tensor

from tests.models.families import BY_NAME, GQA, Family, inputs

JAMBA = Family(
    "jamba", t.JambaConfig, t.JambaForCausalLM,
    values=dict(
        GQA, num_experts=2, num_experts_per_tok=1, expert_layer_period=2, expert_layer_offset=1, attn_layer_period=3,
        attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=6, use_mamba_kernels=False,
    ),
)  # fmt: skip
NAMES = (
    "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "olmo_hybrid", "granitemoehybrid", "bamba", "nemotron_h", "mamba2",
    "kimi_linear", "jamba",
)  # fmt: skip
ONE_OF_EACH = ("lfm2", "qwen3_5", "granitemoehybrid", "kimi_linear", "jamba")  # each kind of mixer
TOLERANCE = 5e-5  # of the root mean square of the original's
TOKENS = 12


def family_of(name: str) -> Family:
    return JAMBA if name == "jamba" else BY_NAME[name]


def ids_of(name: str, batch: int = 2) -> Tensor:
    return inputs(family_of(name), batch=batch, tokens=TOKENS)["input_ids"]


def close(found: Tensor, exact: Tensor) -> None:
    assert found.shape == exact.shape and found.dtype == exact.dtype
    error = float((found - exact).abs().max() / exact.square().mean().sqrt())
    assert error < TOLERANCE, f"{error:.1e}"
