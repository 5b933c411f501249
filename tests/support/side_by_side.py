"""The original and the same model with its layers replaced, side by side: what most tests compare."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import infuse
from tests.models.families import BY_NAME, inputs

TOLERANCE = 2e-5  # of the largest value: float32, three layers


@cache
def original(name: str) -> nn.Module:
    """The family's model in float32, for all tests of this process: never to be changed."""
    return BY_NAME[name].make()


def injected(model: nn.Module, **config: Any) -> infuse.InferenceEngine:
    """An engine in float32 in which every layer of the model is a block. Proofs, which have tests of their own, take
    most of the time and are off.
    """
    engine = infuse.init_inference(model, **{"dtype": "fp32", "verify": "off", **config})
    assert {step.depth for step in engine.plan.steps if re.search(r"(layers?|h)\.\d", step.path)} <= {"block"}
    assert engine.plan.steps
    return engine


def unproven(name: str, **keys: Any) -> infuse.InferenceEngine:
    """An engine of a model of the family, in float32 and without proofs."""
    keys = {"dtype": torch.float32, "verify": "off", "progress": False, **keys}
    return infuse.init_inference(BY_NAME[name].make(), **keys)


def replaced(name: str, **keys: Any) -> Any:
    """The model of such an engine."""
    return unproven(name, **keys).module


@cache
def pair(name: str) -> tuple[nn.Module, infuse.InferenceEngine]:
    """The original, and the same model injected, for all tests of this process: never to be changed."""
    return original(name), injected(BY_NAME[name].make())


def arguments(name: str, **how: Any) -> dict[str, Any]:
    """Inputs of one call without a cache."""
    family = BY_NAME[name]
    return {**inputs(family, **how), **({"use_cache": False} if family.kind == "decoder" else {})}


def first(model: Callable, given: dict[str, Any]) -> Tensor:
    """The first output, padding aside."""
    with torch.no_grad():
        out = model(**given)[0]
    mask = given.get("attention_mask")
    return out if mask is None or mask.shape != out.shape[:2] else out[mask.bool()]


def logits(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(*args, **kwargs).logits


def assert_close(found: Tensor, exact: Tensor) -> None:
    assert found.shape == exact.shape and bool(torch.isfinite(exact).all())
    assert float((found - exact).abs().max()) <= TOLERANCE * float(exact.abs().max())


def ids(batch: int, tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 96, (batch, tokens), generator=torch.Generator().manual_seed(seed))
