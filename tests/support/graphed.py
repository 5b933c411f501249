"""A model with graphs on a recorder, as the engine installs them on a GPU."""

from __future__ import annotations

from typing import Any

from torch import nn

import infuse
from infuse.generate.install import GraphUse, install, uninstall
from tests.support.fake_graph import FakeBackend


def graphed(
    model: nn.Module,
    *,
    forward: bool = False,
    limit_tokens: int | None = None,
    dtype: str = "fp32",
    backend: FakeBackend | None = None,
) -> tuple[Any, FakeBackend]:
    """`model` injected, its decode steps and, where asked for, its forward recorded by the backend that comes along."""
    engine = infuse.init_inference(model, dtype=dtype, max_out_tokens=limit_tokens)
    uninstall(model, engine._handles)
    backend = backend or FakeBackend()
    graphs = GraphUse(backend, steps=True, forward=forward)
    engine._handles = install(model, limit_tokens=limit_tokens, min_new_tokens=1, caches=True, graphs=graphs)
    return engine, backend
