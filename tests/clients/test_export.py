"""torch.export of a replaced model, and transformers' own exporters: the program gives the original's numbers on other
inputs too.

torch.jit.trace, which cannot record the kernels, says so.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from families import BY_NAME
from graphed import graphed
from side_by_side import arguments, first
from tolerance import assert_near
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache, convert_and_export_with_cache

import infuse
from infuse.errors import UnsupportedCall
from infuse.ops import registered

TIMES = 8  # as in test_compile.py


pytestmark = pytest.mark.usefixtures("nothing_compiled")


def pair(name: str, **keys: Any) -> tuple[nn.Module, nn.Module]:
    """The original, of one layer, and a replaced copy of it."""
    original = BY_NAME[name].make(num_hidden_layers=1)
    return original, infuse.init_inference(copy.deepcopy(original), **{"dtype": "fp32", **keys}).module


def exported(model: nn.Module, name: str, strict: bool) -> ExportedProgram:
    """For any batch and length."""
    given = arguments(name, padding="left")
    sizes = {0: Dim("batch", min=2, max=64), 1: Dim("tokens", min=3, max=100)}
    shapes = {key: sizes if isinstance(value, Tensor) else None for key, value in given.items()}
    with torch.no_grad():
        return torch.export.export(model, (), given, dynamic_shapes=shapes, strict=strict)


def operations(program: ExportedProgram) -> set[str]:
    return {str(node.target) for node in program.graph.nodes}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_exported_for_any_batch_and_length(name: str, strict: bool) -> None:
    original, model = pair(name)
    program = exported(model, name, strict)
    assert "infuse.attention.default" in operations(program)
    given = arguments(name, batch=3, tokens=17, padding="right", seed=5)
    assert_near(first(program.module(), given), first(original, given), torch.float32, name, TIMES)


def test_an_exported_model_is_saved_with_its_quantized_weights() -> None:
    _, model = pair("llama", quant="int8:16")
    file = io.BytesIO()
    torch.export.save(exported(model, "llama", strict=False), file)
    file.seek(0)
    program = torch.export.load(file)
    assert "infuse.quantized_linear.default" in operations(program)
    given = arguments("llama", batch=3, tokens=17, seed=5)
    assert_near(first(program.module(), given), first(model, given), torch.float32, times=TIMES)


def test_a_model_with_graphs_is_exported() -> None:
    original = BY_NAME["bert"].make(num_hidden_layers=1)
    model = graphed(copy.deepcopy(original), forward=True)[0].module
    given = arguments("bert", batch=3, tokens=17)
    assert_near(
        first(exported(model, "bert", strict=False).module(), given), first(original, given), torch.float32, times=TIMES
    )


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_step_over_a_static_cache(name: str) -> None:
    """As ExecuTorch has it; the original's own module runs beside it, not exported."""
    original, model = pair(name)
    for one in (original, model):
        one.generation_config.cache_implementation, one.generation_config.use_cache = "static", True
        one.generation_config.cache_config = {"batch_size": 1, "max_cache_len": 32}
    stepped, ours = (
        TorchExportableModuleWithStaticCache(original),
        convert_and_export_with_cache(model, strict=False).module(),
    )
    for place, token in enumerate((5, 60, 7, 80, 9, 11, 42)):
        given = dict(input_ids=torch.tensor([[token]]), cache_position=torch.tensor([place]))
        with torch.no_grad():
            assert_near(ours(**given), stepped(**given), torch.float32, f"token {place}", TIMES)


def test_transformers_exporter() -> None:
    original, model = pair("bert")
    program = DynamoExporter().export(model, arguments("bert", padding="left"), config=DynamoConfig(dynamic=True))
    given = arguments("bert", tokens=17, padding="right", seed=4)
    assert_near(first(program, given), first(original, given), torch.float32, times=TIMES)


@pytest.mark.parametrize("kernels", [True, False])
def test_jit_trace_says_that_it_is_not_served(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        for op in registered().values():
            monkeypatch.delitem(op.bodies, "cpu", raising=False)
    _, model = pair("bert")
    with torch.no_grad(), pytest.raises(UnsupportedCall, match=r"torch\.export\.export"):
        torch.jit.trace(model, example_kwarg_inputs=arguments("bert"), strict=False, check_trace=False)
    assert first(model, arguments("bert")).isfinite().all()
