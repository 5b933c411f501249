"""generate with our cache."""

from __future__ import annotations

from typing import Any

from torch import nn

from infuse.layers.cache import KVCache


def install(model: nn.Module, settings: Any) -> None:
    pass
