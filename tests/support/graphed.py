"""A model with graphs on a recorder, as the engine installs them on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse.generate.install import GraphUse, install, uninstall
from tests.support.fake_graph import FakeBackend


def graphed(
    model: nn.Module,
    *,
    forward: bool = False,
    limit_tokens: int | None = None,
    dtype: str = "fp32",
    kv_cache: str | None = None,
    backend: FakeBackend | None = None,
) -> tuple[Any, FakeBackend]:
    """`model` injected, its decode steps and, where asked for, its forward recorded by the backend that comes along."""
    engine = infuse.init_inference(model, dtype=dtype, max_out_tokens=limit_tokens, kv_cache=kv_cache)
    uninstall(model)
    backend = backend or FakeBackend()
    graphs = GraphUse(backend, steps=True, forward=forward)
    install(model, limit_tokens=limit_tokens, min_new_tokens=1, caches=True, graphs=graphs, kv_cache=kv_cache)
    return engine, backend


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A capture that fails warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="infuse")
        yield


class Greedy(nn.Module):
    """Runs out of memory on more than 4 rows."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.rows = layer, 4

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden.shape[0] > self.rows:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 1 GiB"
            )
        return self.layer(hidden, *args, **kwargs)
