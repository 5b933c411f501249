"""Families whose mixers keep states, one for each kind of them, and what their tests share."""

from __future__ import annotations

from torch import Tensor

from tests.models.families import BY_NAME, Family, inputs

NAMES = (
    "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "olmo_hybrid", "granitemoehybrid", "bamba", "nemotron_h", "mamba2",
    "kimi_linear", "jamba", "falcon_h1-gated-norm",
)  # fmt: skip
ONE_OF_EACH = ("lfm2", "qwen3_5", "granitemoehybrid", "kimi_linear", "jamba")  # each kind of mixer
TOLERANCE = 5e-5  # of the root mean square of the original's
TOKENS = 12


def family_of(name: str) -> Family:
    return BY_NAME[name]


def ids_of(name: str, batch: int = 2) -> Tensor:
    return inputs(family_of(name), batch=batch, tokens=TOKENS)["input_ids"]


def close(found: Tensor, exact: Tensor) -> None:
    assert found.shape == exact.shape and found.dtype == exact.dtype
    error = float((found - exact).abs().max() / exact.square().mean().sqrt())
    assert error < TOLERANCE, f"{error:.1e}"
