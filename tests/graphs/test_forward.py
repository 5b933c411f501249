"""Forward as graphs on a recorder: families without a cache, the face of the module, memory that runs out."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

import infuse
from infuse.generate.install import uninstall
from infuse.ground.errors import InfuseError, OutOfMemory
from tests.models.families import BERT_LINEAGE, BY_NAME, Family, inputs
from tests.support.graphed import Greedy, graphed


def tensors(output: Any) -> list[Tensor]:
    """All tensors of an output, in order."""
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, ModelOutput) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for value in values for tensor in tensors(value)]


def assert_same(found: Any, exact: Any) -> None:
    assert type(found) is type(exact)
    for a, b in zip(tensors(found), tensors(exact), strict=True):
        assert torch.allclose(a, b, atol=1e-4 * float(b.abs().max()) + 1e-6)


ENCODERS = [family for family in BERT_LINEAGE if family.kind != "decoder"]


@pytest.mark.parametrize("family", ENCODERS, ids=lambda family: family.name)
def test_encoders(family: Family) -> None:
    original = family.make()
    engine, backend = graphed(family.make(), forward=True)
    kept = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for step in range(5):
            for batch, padding in ((2, None), (3, "right")):
                given = inputs(family, batch=batch, padding=padding, seed=step)
                kept.append((engine.module(**given), original(**given)))
    for found, exact in kept:
        assert_same(found, exact)
    assert len(backend.captures) == 2 and backend.replays == 6


def test_a_backward_pass_through_a_graph_is_refused() -> None:
    """A replay records nothing: without a refusal a head on top would train, and the model below would not, without a
    word.
    """
    family = BY_NAME["bert"]
    engine, backend = graphed(family.make(), forward=True)
    head = nn.Linear(96, 2)
    for step in range(4):
        hidden = engine.module(**inputs(family, seed=step)).logits
        with pytest.raises(infuse.UnsupportedCall, match="backward"):
            head(hidden).sum().backward()
    assert backend.replays == 2
    engine.module.requires_grad_(False)
    head(engine.module(**inputs(family)).logits).sum().backward()
    assert head.weight.grad is not None


@pytest.mark.parametrize("arguments", [dict(output_hidden_states=True), dict(return_dict=False)], ids=str)
def test_what_is_asked_of_the_output_is_part_of_the_key(arguments: dict[str, Any]) -> None:
    family = BY_NAME["vit"]
    original = family.make()
    engine, _ = graphed(family.make(), forward=True)
    with torch.no_grad():
        for step in range(4):
            given = inputs(family, seed=step)
            assert_same(engine.module(**given), original(**given))
            assert_same(engine.module(**given, **arguments), original(**given, **arguments))


def test_decoders_without_a_cache_and_with_one() -> None:
    family = BY_NAME["llama"]
    original = family.make()
    engine, backend = graphed(family.make(), forward=True)
    with torch.no_grad():
        for step in range(5):
            ids = inputs(family, seed=step)["input_ids"]
            for cached in (False, True):
                assert_same(engine.module(ids, use_cache=cached).logits, original(ids, use_cache=cached).logits)
    assert len(backend.captures) == 1
    given = inputs(family, batch=2, padding="left")
    for _ in range(2):
        assert torch.equal(engine.generate(**given, max_new_tokens=12), original.generate(**given, max_new_tokens=12))


def test_the_module_keeps_its_face() -> None:
    family = BY_NAME["vit"]
    original, model = family.make(), family.make()
    engine, backend = graphed(model, forward=True)
    assert inspect.signature(model.forward) == inspect.signature(original.forward)
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(family.make()))
    with torch.no_grad():
        for step in range(5):
            given = inputs(family, seed=step)
            assert_same(copied(**given), original(**given))
            assert_same(loaded(**given), original(**given))
        assert len(backend.captures) == 1
        copied.classifier.bias.add_(1)
        assert_same(copied(**given).logits, original(**given).logits + 1)
        assert_same(model(**given), original(**given))
    uninstall(model)
    assert "forward" not in vars(model) and "forward" in vars(copied)


def test_a_forward_that_was_put_on_the_module_is_kept() -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    model = Doubles()
    exact = copy.deepcopy(model.linear)

    def own(x: Tensor) -> Tensor:
        return model.linear(x) * 2

    model.forward = own  # type: ignore[method-assign, assignment]
    engine, backend = graphed(model, forward=True)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 64)
            assert torch.allclose(engine(x), exact(x) * 2, atol=1e-5)
    assert len(backend.captures) == 1
    uninstall(model)
    assert vars(model)["forward"] is own


# ---- memory


@pytest.mark.parametrize("graphs", [False, True])
def test_out_of_memory_in_forward(graphs: bool) -> None:
    family = BY_NAME["vit"]
    original = family.make()
    engine, backend = graphed(family.make(), forward=graphs)
    model = engine.module
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    layers[1] = Greedy(layers[1])
    small, large = inputs(family, batch=2), inputs(family, batch=6)
    with torch.no_grad():
        for _ in range(4):
            model(**small)
        with pytest.raises(OutOfMemory, match=r"no memory left.*Tried to allocate 3.*fewer rows.*quant=") as caught:
            model(**large)
        assert isinstance(caught.value, (InfuseError, torch.OutOfMemoryError)) and infuse.OutOfMemory is OutOfMemory
        for _ in range(4):
            assert_same(model(**small), original(**small))
    assert len(backend.captures) == (2 if graphs else 0), "the graphs went, and came again"


def test_out_of_memory_in_generate() -> None:
    """In the prompt, and in a step: the batch grows no smaller by itself, but the engine goes on with the next call."""
    family = BY_NAME["llama"]
    original = family.make()
    engine, backend = graphed(family.make())
    layer = Greedy(engine.module.model.layers[1])
    engine.module.model.layers[1] = layer
    small = inputs(family, batch=2)
    exact = original.generate(**small, max_new_tokens=12)
    assert torch.equal(engine.generate(**small, max_new_tokens=12), exact)
    for rows, given in ((4, inputs(family, batch=6)), (0, small)):
        layer.rows = rows
        with pytest.raises(OutOfMemory, match="no memory left"):
            engine.generate(**given, max_new_tokens=12)
        assert not engine.module._infuse.buckets.idle, "what was kept for later calls is given back"
        layer.rows = 4
        for _ in range(2):
            assert torch.equal(engine.generate(**small, max_new_tokens=12), exact)
    layer.rows = 2
    handle = engine.module.lm_head.register_forward_hook(lambda module, args, output: setattr(layer, "rows", 0))
    with pytest.raises(OutOfMemory):
        engine.generate(**inputs(family, batch=1), max_new_tokens=12)  # the prompt is done, a step finds no memory
    handle.remove()
    layer.rows = 4
    assert torch.equal(engine.generate(**small, max_new_tokens=12), exact)
    assert all(not eager for bucket in engine.module._infuse.buckets.idle for *_, eager in bucket.graphs.standing())


# ---- the configuration


def test_which_graphs_the_configuration_asks_for() -> None:
    def asked(**settings: Any) -> tuple[bool, bool]:
        config = infuse.InferenceConfig(**settings)
        return config.step_graphs, config.enable_cuda_graph

    assert asked() == (True, False)
    assert asked(enable_cuda_graph=True) == (True, True)
    assert asked(enable_cuda_graph=False) == (False, False)
