"""Decode steps over the Triton bodies, which read the place of an append and the number of keys on the device: run
under Triton's interpreter by test_triton.py, where a replay is another run.
"""

from __future__ import annotations

from typing import Any

import pytest
import quick_interpreter  # noqa: F401
from fake_graph import RunAgainBackend
from graphed import graphed
from test_graph_decode import made, padded, same

from infuse import ops
from infuse.layers.attention import Attention


def taking_tensors(module: Attention) -> None:
    """Give `module` the Triton bodies for what only they do inside a graph."""
    attend, append = module._attend, module._append
    module._counts_keys = module._appends_at_place = True
    counted, placed = ops.attention.body("triton"), ops.rotary_append.body("triton")
    module._attend = lambda *args: (counted if len(args) > 10 else attend)(*args)
    module._append = lambda *args: (append if isinstance(args[5], int) else placed)(*args)


@pytest.mark.parametrize(
    "name", ["llama", "bloom", "gpt-neo", "gemma2"]
)  # grouped heads; ALiBi; a window of the layer's; soft caps
def test_tokens(name: str) -> None:
    engine, backend = graphed(made(name), backend=RunAgainBackend())
    modules: list[Any] = [module for module in engine.module.modules() if isinstance(module, Attention)]
    for module in modules:
        taking_tensors(module)
    for padding in ("left", None):
        same(name, engine, **padded(name, padding=padding), max_new_tokens=3)
    assert modules and backend.warmed == 1 and backend.replays == 2 * 2 - 2
