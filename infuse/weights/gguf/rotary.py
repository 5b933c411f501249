"""Rotation by a GGUF file as rope_parameters of transformers: its keys, and its factors (`rope_freqs`), which are Llama
3.1's, or any by longrope.

frequency i = base**(-2i / width) / factors[i]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from infuse.weights.gguf.metadata import DEFAULT_BASE, Metadata

# Tensors of factors for short and for long texts, which only phi3's files have.
FACTORS: Mapping[str, str] = MappingProxyType({
    "short": "rope_factors_short.weight", "long": "rope_factors_long.weight",
})  # fmt: skip
# Of Llama 3.1 to 3.3, with factors of 8 and 32; the files hold only what comes of them.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_CLOSE = 1e-4  # relative: factors are computed in float32, by several formulas


def rope_parameters(factors: Tensor, theta: float, context: int) -> dict[str, Any]:
    """The rope_parameters that divide each frequency to the base `theta` by its one of `factors`.

    `context`: tokens that the model was made for.
    """
    plain = {"rope_type": "default", "rope_theta": theta}
    factors = factors.double()
    if bool((factors == 1).all()):
        return plain
    largest = float(factors.max())
    if torch.allclose(factors, _of_llama3(len(factors), theta, largest), rtol=_CLOSE, atol=0):
        ends = {"low_freq_factor": _LOW, "high_freq_factor": _HIGH}
        return plain | {"rope_type": "llama3", "factor": largest, "original_max_position_embeddings": _ORIGINAL} | ends
    both = {"short_factor": factors.tolist(), "long_factor": factors.tolist()}
    return (
        plain | {"rope_type": "longrope", "original_max_position_embeddings": context, "attention_factor": 1.0} | both
    )


def _of_llama3(count: int, theta: float, factor: float) -> Tensor:
    """What Llama 3.1 divides the frequencies by: nothing, the factor, or a mean of both by wavelength. float64"""
    lengths = 2 * math.pi * theta ** (torch.arange(count, dtype=torch.float64) / count)
    smooth = ((_ORIGINAL / lengths - _LOW) / (_HIGH - _LOW)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def rotation(meta: Metadata) -> dict[str, Any]:
    """The rope_parameters that a file's keys and `rope_freqs` say."""
    theta = meta.get("rope.freq_base", DEFAULT_BASE)
    plain = {"rope_type": "default", "rope_theta": theta}
    # As llama.cpp: linear without a type, the older key without the newer one, and 0 for none.
    kind = meta.get("rope.scaling.type", "linear")
    key = "rope.scaling.factor" if meta.stores("rope.scaling.factor") else "rope.scale_linear"
    factor = meta.get(key, 1.0)
    if kind == "yarn":
        found = _yarn(meta, theta, key, factor)
    elif kind == "none" or (kind == "longrope" and has_factors(meta)) or (kind == "linear" and factor in (0, 1)):
        found = plain
    elif kind == "linear":
        found = {"rope_type": "linear", "rope_theta": theta, "factor": float(factor)}
    else:
        possible = f"none, linear, yarn; of phi3 also longrope, with {' and '.join(FACTORS.values())}"
        raise meta.fault("rope.scaling.type", kind, possible)
    attention = meta.get("rope.scaling.attn_factor", 1.0)
    if kind != "yarn" and attention != 1 and not has_factors(meta):
        raise meta.fault("rope.scaling.attn_factor", attention, "1, or scaling by yarn or by rope_factors")
    for file in meta.files:
        if "rope_freqs.weight" in file.stored:
            if found != plain:
                raise meta.fault(key, factor, "1, or a file without rope_freqs.weight")
            return rope_parameters(file.read("rope_freqs.weight"), theta, meta.get("context_length"))
    return found


def has_factors(meta: Metadata) -> bool:
    """Whether a phi3 has factors for short and for long texts."""
    stored = {name for file in meta.files for name in file.stored}
    return meta.architecture == "phi3" and stored.issuperset(FACTORS.values())


def _yarn(meta: Metadata, theta: float, key: str, factor: float) -> dict[str, Any]:
    if factor <= 0:
        raise meta.fault(key, factor, "a number above 0 for yarn")
    if (mixed := meta.get("rope.scaling.yarn_ext_factor", 1.0)) != 1 and mixed >= 0:  # below 0: not set
        raise meta.fault("rope.scaling.yarn_ext_factor", mixed, "1")
    original = meta.get("rope.scaling.original_context_length", 0) or meta.get("context_length")  # as llama.cpp
    scaled = {"factor": float(factor), "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if meta.stores(f"rope.scaling.yarn_{name}"):
            scaled[name] = float(meta.get(f"rope.scaling.yarn_{name}"))
    names = ("attn_factor", "yarn_attn_factor", "yarn_log_multiplier")
    if any(meta.stores(f"rope.scaling.{name}") for name in names):
        scaled["attention_factor"] = _attention_factor(meta, factor)
    return {"rope_type": "yarn", "rope_theta": theta} | scaled


def _attention_factor(meta: Metadata, factor: float) -> float:
    """What cosines and sines are multiplied by: `attn_factor` times the factor of yarn's own formula.

    `yarn_attn_factor` is the attention_factor of the config that a file was made of, and replaces the formula.
    """

    def by_formula(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    own = by_formula(1.0) / by_formula(meta.get("rope.scaling.yarn_log_multiplier", 0.0))
    return float(meta.get("rope.scaling.attn_factor", 1.0) * meta.get("rope.scaling.yarn_attn_factor", own))


def partly_rotated(meta: Metadata) -> dict[str, Any]:
    """The same of a model that rotates the first numbers of a head."""
    rotated = meta.get("rope.dimension_count", meta.head_dim)
    if rotated > meta.head_dim:
        raise meta.fault("rope.dimension_count", rotated, f"up to {meta.head_dim}, the width of a head")
    return rotation(meta) | {"partial_rotary_factor": rotated / meta.head_dim}
