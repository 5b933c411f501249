"""Families whose mixers keep states, and what their tests share."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tests.models.families import BY_NAME, ZAMBA2, Family, inputs

NAMES = (
    "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "olmo_hybrid", "granitemoehybrid", "bamba", "nemotron_h", "mamba2",
    "kimi_linear", "jamba", "falcon_h1-gated-norm", "lfm3", "qwen3_5_moe", "lara_mini", "nemotron_h-latent",
    "bailing_hybrid",
)  # fmt: skip
# And those whose generation is tested in tests/models: scans alone, whose originals cannot count the tokens in a cache
# (test_mamba.py), and Zamba2, whose layers are blocks in part (test_zamba2.py).
ALL_NAMES = (*NAMES, "mamba", "falcon_mamba", "zamba2")
ONE_OF_EACH = ("lfm2", "qwen3_5", "granitemoehybrid", "kimi_linear", "jamba")  # each kind of mixer
TOLERANCE = 5e-5  # of the root mean square of the original's
TOKENS = 12


# Of a third layer on, the original's own states are farther from those in float64 than TOLERANCE.
_TWO_LAYERS = replace(
    ZAMBA2, values=ZAMBA2.values | dict(num_hidden_layers=2, layers_block_type=["linear_attention", "hybrid"])
)


def family_of(name: str) -> Family:
    return _TWO_LAYERS if name == ZAMBA2.name else BY_NAME[name]


def ids_of(name: str, batch: int = 2) -> Tensor:
    return inputs(family_of(name), batch=batch, tokens=TOKENS)["input_ids"]


def close(found: Tensor, exact: Tensor) -> None:
    assert found.shape == exact.shape and found.dtype == exact.dtype
    error = float((found - exact).abs().max() / exact.square().mean().sqrt())
    assert error < TOLERANCE, f"{error:.1e}"
