"""What transformers records of a run stays recorded: hidden states, attentions, scores and logits equal the original's.

transformers records by two ways: a hook on the classes of layers and attentions (llama, gpt2, bert), or tuples that the
layers return (bloom, falcon, gptj). Injected layers must serve both.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infuse
from tests.models.families import BY_NAME, inputs
from tests.support.side_by_side import injected

# Not falcon-rw: transformers' eager Falcon adds ALiBi twice, so its attentions are not those of the model as it runs.
HOOKED, TUPLES = ("llama", "gpt2", "bert", "t5"), ("bloom", "falcon-7b", "gptj")
TOLERANCE = 2e-5  # of the largest value: float32, three layers
WANTED = dict(output_hidden_states=True, output_attentions=True)
SCORES = dict(output_scores=True, output_logits=True)


def eager(name: str) -> nn.Module:
    """The model with transformers' own eager attention, the only one of which it tells the weights."""
    return BY_NAME[name].make(attn_implementation="eager")


@cache
def pair(name: str) -> tuple[nn.Module, infuse.InferenceEngine]:
    """The original, and the same model injected, both in float32."""
    return eager(name), injected(eager(name))


def run(model: Any, name: str, **more: Any) -> Any:
    with torch.no_grad():
        return model(**inputs(BY_NAME[name], padding="left"), **more)


def flat(value: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, in order; None for what is missing."""
    if isinstance(value, (tuple, list)):
        for inner in value:
            yield from flat(inner)
    elif isinstance(value, Tensor):
        yield value


def assert_same(found: Any, exact: Any, real: Tensor | None = None) -> None:
    """The same tensors in the same nesting. Only the positions `real` [B, T] count: a padded query sees nothing."""
    assert shape_of(found) == shape_of(exact)
    tensors = list(zip(flat(found), flat(exact), strict=True))
    assert tensors
    for a, b in tensors:
        if real is not None:
            where = real if b.dim() == 3 else real[:, None, :, None].expand_as(b)
            a, b = a[where], b[where]
        assert torch.equal(torch.isfinite(a), torch.isfinite(b))
        a, b = a[torch.isfinite(a)], b[torch.isfinite(b)]
        assert float((a - b).abs().max()) <= TOLERANCE * float(b.abs().max())


def shape_of(value: Any) -> Any:
    """The nesting of tuples with the shapes of their tensors."""
    return (
        tuple(shape_of(inner) for inner in value) if isinstance(value, (tuple, list)) else getattr(value, "shape", None)
    )


@pytest.mark.parametrize("name", (*HOOKED, *TUPLES))
def test_forward(name: str) -> None:
    original, engine = pair(name)
    exact, found = run(original, name, **WANTED), run(engine, name, **WANTED)
    real = inputs(BY_NAME[name], padding="left")["attention_mask"].bool()
    assert len(exact.hidden_states) == 4 and len(exact.attentions) == 3
    assert_same(found.hidden_states, exact.hidden_states, real)
    assert_same(found.attentions, exact.attentions, real)
    for wanted in (dict(), dict(output_hidden_states=True), dict(output_attentions=True)):
        exact, found = run(original, name, **wanted), run(engine, name, **wanted)
        assert found.keys() == exact.keys(), "only what is asked for"
        assert all((found.get(key) is None) == (exact.get(key) is None) for key in ("hidden_states", "attentions"))


@pytest.mark.parametrize("name", (*HOOKED, *TUPLES))
def test_model_that_recorded_before_it_was_injected(name: str) -> None:
    """transformers puts its hooks in at the first such call; those of the old layers must not be lost or doubled."""
    model = eager(name)
    exact = run(model, name, **WANTED)
    engine = injected(model)
    real = inputs(BY_NAME[name], padding="left")["attention_mask"].bool()
    for _ in range(2):
        found = run(engine.module, name, **WANTED)
        assert_same((found.hidden_states, found.attentions), (exact.hidden_states, exact.attentions), real)


def test_model_whose_config_asks_always() -> None:
    engine = injected(
        BY_NAME["llama"].make(attn_implementation="eager", output_hidden_states=True, output_attentions=True)
    )
    exact = run(pair("llama")[0], "llama", **WANTED)
    real = inputs(BY_NAME["llama"], padding="left")["attention_mask"].bool()
    found = run(engine, "llama")
    assert_same((found.hidden_states, found.attentions), (exact.hidden_states, exact.attentions), real)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("llama", dict(num_beams=3)),
        ("gpt2", dict(do_sample=True)),
        ("bloom", dict()),
        ("falcon-7b", dict(num_beams=3)),
        ("gptj", dict(do_sample=True)),
    ],
    ids=str,
)
def test_generate(name: str, mode: dict[str, Any]) -> None:
    original, engine = pair(name)
    given = inputs(BY_NAME[name])  # not padded: attentions of padded queries mean nothing
    results = []
    for model in (original, engine):
        torch.manual_seed(5)
        results.append(
            model.generate(**given, max_new_tokens=5, return_dict_in_generate=True, **SCORES, **WANTED, **mode)
        )
    exact, found = results
    assert type(found) is type(exact) and found.keys() == exact.keys()
    assert torch.equal(found.sequences, exact.sequences)
    for part in ("scores", "logits", "hidden_states", "attentions"):
        assert_same(found[part], exact[part])
    if "num_beams" in mode:
        assert_same((found.sequences_scores,), (exact.sequences_scores,))
        assert torch.equal(found.beam_indices, exact.beam_indices)


def test_a_hook_of_the_caller_on_a_layer() -> None:
    """A hook that was on a layer before init, and one that is put on after it, both see what the layer returns."""
    family, seen = BY_NAME["llama"], []
    model = family.make()
    model.model.layers[1].register_forward_hook(lambda layer, args, output: seen.append(output))
    engine = injected(model)
    seen.clear()  # the proof runs the layers
    engine.module.model.layers[1].register_forward_hook(lambda layer, args, output: seen.append(output))
    run(engine, "llama")
    exact = run(family.make(), "llama", output_hidden_states=True).hidden_states[2]
    assert len(seen) == 2
    real = inputs(family, padding="left")["attention_mask"].bool()
    assert_same(seen, [exact, exact], real)
