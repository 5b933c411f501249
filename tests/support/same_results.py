"""Results of two models that are to be the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.cache_utils import Cache


def assert_same(found: Any, exact: Any) -> None:
    """Equal tokens, and near scores, times and states, in whatever holds them."""
    if isinstance(exact, Tensor):
        assert isinstance(found, Tensor) and found.shape == exact.shape
        if exact.is_floating_point():
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=5e-4, equal_nan=True)
        else:
            assert torch.equal(found, exact)
    elif isinstance(exact, EncoderDecoderCache):
        for half in ("self_attention_cache", "cross_attention_cache"):
            assert_same(getattr(found, half), getattr(exact, half))
    elif isinstance(exact, Cache):
        caches: tuple[Any, Any] = found, exact
        assert_same(*([(each.keys, each.values) for each in held.layers] for held in caches))
    elif isinstance(exact, dict):
        assert [*found] == [*exact]
        for key, value in exact.items():
            assert_same(found[key], value)
    elif isinstance(exact, (list, tuple)):
        alike = type(found) is type(exact) and len(found) == len(exact)
        assert alike, f"{exact} became {found}"[:500]
        for one, other in zip(found, exact, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(exact) and found == exact
