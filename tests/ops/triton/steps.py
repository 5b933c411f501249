"""Decode steps over the Triton bodies, which read the place of an append and the number of keys on the device: run
under Triton's interpreter by test_interpreter.py, where a replay is another run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor

import infuse
import tests.ops.triton.quick_interpreter  # noqa: F401
from infuse import ops
from infuse.layers.attention.self_attention import Attention
from infuse.layers.mixture.experts import Experts
from tests.support.decoding import made, padded, same
from tests.support.fake_graph import RunAgainBackend, forbidding
from tests.support.graphed import graphed


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


def on_the_device(launch: Callable) -> Callable:
    """Hide what the interpreter does inside of a launch, which a GPU does by itself."""

    def launched(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return launch(*args, **kwargs)

    return launched


class CaptureBackend(RunAgainBackend):
    """As RunAgainBackend; what a capture on a device forbids around the kernels raises."""

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        inside = patch("torch.cuda.is_current_stream_capturing", lambda: True)
        with patch.object(GridExecutor, "__call__", on_the_device(GridExecutor.__call__)), inside, forbidding():
            return super().capture(run)


def with_triton_experts(engine: infuse.InferenceEngine) -> list[Any]:
    """For the steps: prompts, which no graph has, would take the interpreter's time."""
    experts: list[Any] = [module for module in engine.module.modules() if isinstance(module, Experts)]
    triton, reference = ops.experts.body("triton"), ops.experts.reference
    for module in experts:
        module._bound = lambda x, *args: (triton if len(x) <= 2 else reference)(x, *args)
    return experts


@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss"])  # a gated shared expert; sinks, biases, clamps
def test_steps_of_mixtures_are_captured(name: str) -> None:
    engine, backend = graphed(made(name), backend=CaptureBackend())
    assert len(with_triton_experts(engine)) == 3
    for module in engine.module.modules():
        if isinstance(module, Attention):
            taking_tensors(module)
    for padding in ("left", None):
        same(name, engine, **padded(name, batch=2, padding=padding), max_new_tokens=3)
    assert len(backend.captures) == 1 and backend.replays == 2 * 2 - 2


def test_the_reference_of_experts_cannot_be_captured() -> None:
    """Which shows that the test above would notice a value that is read on the host."""
    engine, backend = graphed(made("mixtral"), backend=CaptureBackend())
    for module in with_triton_experts(engine):
        module._bound = ops.experts.reference
    with pytest.warns(UserWarning, match="is not permitted when stream is capturing"):
        same("mixtral", engine, **padded("mixtral", batch=2), max_new_tokens=6)
    assert backend.captures == []


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_experts_do_not_wait_for_the_device(tokens: int) -> None:
    """Few routes and many, which are sorted by expert."""
    case = next(iter(ops.registered()["experts"].case_maker(torch.float32, torch.device("cpu"))))
    _, index, _, up, *rest = case.args
    experts = case.args[5].shape[0] // up.shape[1]
    x, index = torch.randn(tokens, up.shape[1]), torch.randint(0, experts, (tokens, index.shape[1]))
    args = x, index, torch.rand(index.shape), up, *rest
    with patch.object(GridExecutor, "__call__", on_the_device(GridExecutor.__call__)), forbidding():
        found = ops.experts.body("triton")(*args)
    torch.testing.assert_close(found, ops.experts.reference(*args), rtol=1e-4, atol=1e-4)
