"""The experts implementation that the config names computes replaced experts too, on the original's weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

import infuse
from infuse.layers.mixture.experts import Experts
from tests.models.families import BY_NAME, GQA, Family, inputs
from tests.support.side_by_side import assert_close, logits, original

NAME = "recorded"
Calls = list[dict[str, Any]]


@pytest.fixture
def calls() -> Iterator[Calls]:
    """What the function "recorded" is called with, whose result is half of the default's."""
    made: Calls = []

    def recorded(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        held = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        told = {name: getattr(module, name) for name in ("num_experts", "has_gate", "is_transposed", "training")}
        made.append({"class": type(module).__name__, "index": index, **held, **told})
        return 0.5 * grouped_mm_experts_forward(module, hidden, index, weights)

    ALL_EXPERTS_FUNCTIONS.register(NAME, recorded)
    yield made
    del ALL_EXPERTS_FUNCTIONS._global_mapping[NAME]


def engine_of(name: str, before: bool = False, **keys: Any) -> infuse.InferenceEngine:
    model = BY_NAME[name].make()
    if before:
        model.set_experts_implementation(NAME)
    return infuse.init_inference(model, **{"dtype": "fp32", "verify": "strict", **keys})


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("name", "blocks"), [("mixtral", True), ("qwen2-moe", True), ("glm4-moe", True), ("mixtral", False)]
)
def test_a_registered_function_gets_the_originals_weights(name: str, blocks: bool, before: bool, calls: Calls) -> None:
    engine = engine_of(name, before, replace_with_kernel_inject=blocks)
    held = [module for module in engine.module.modules() if isinstance(module, Experts)]
    assert bool(held) == (blocks or not before)
    given, wanted = inputs(BY_NAME[name], padding="left"), BY_NAME[name].make()
    results, made = [], []
    for model in (engine.module, wanted):
        model.set_experts_implementation(NAME)
        calls.clear()
        results.append(logits(model, **given))
        made.append(list(calls))
    assert_close(*results)
    assert len(made[0]) == len(made[1]) > 0
    for ours, theirs in zip(*made, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(ours[key], value) if isinstance(value, Tensor) else ours[key] == value
    plain = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    calls.clear()
    assert torch.equal(engine.module.generate(**given, **plain), wanted.generate(**given, **plain))
    assert len(calls) == 2 * 4 * len(made[0])


def test_back_and_forth_copied_and_pickled(calls: Calls) -> None:
    engine, given = engine_of("mixtral"), inputs(BY_NAME["mixtral"])
    exact = logits(original("mixtral"), **given)
    copies = (engine.module, copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module)))
    for model in copies:
        model.set_experts_implementation(NAME)
        assert (logits(model, **given) - exact).abs().max() > 0.01 and len(calls) == 3
        for name in ("eager", "batched_mm", "grouped_mm"):
            model.set_experts_implementation(name)
            assert_close(logits(model, **given), exact)
        assert len(calls) == 3
        calls.clear()


def test_weights_that_changed_are_the_functions(calls: Calls) -> None:
    engine, given = engine_of("mixtral"), inputs(BY_NAME["mixtral"])
    engine.module.set_experts_implementation(NAME)
    state = {
        name: tensor * 1.5 for name, tensor in BY_NAME["mixtral"].make().state_dict().items() if ".experts." in name
    }
    engine.module.load_state_dict(state, strict=False)
    logits(engine.module, **given)
    assert torch.equal(calls[0]["down_proj"], state["model.layers.0.mlp.experts.down_proj"])


def refused(model: Any, told: str) -> None:
    """A call says that the replacement's weights are not the function's, and the default computes it again."""
    ids = torch.arange(3, 13)[None]
    model.set_experts_implementation(NAME)
    with pytest.raises(infuse.UnsupportedCall, match=f'the experts implementation "recorded".*{told}.*"grouped_mm"'):
        logits(model, ids)
    model.set_experts_implementation("grouped_mm")
    assert torch.isfinite(logits(model, ids)).all()


def test_what_the_function_cannot_have_is_said(calls: Calls) -> None:
    refused(engine_of("mixtral", quant="int8:8").module, "the replacement holds quantized ones")
    shape = dict(GQA, head_dim=12, num_local_experts=4, num_experts_per_tok=2)
    model = Family("gpt-oss", t.GptOssConfig, t.GptOssForCausalLM, values=shape).make()
    engine = infuse.init_inference(model, dtype="fp32", verify="strict")
    refused(engine.module, "the rows of gate and up apart, which the original has in turns")
    experts = next(one for one in engine_of("mixtral").module.modules() if isinstance(one, Experts))
    experts.up.weight = torch.nn.Parameter(experts.up.weight[:24])
    experts.named.config._experts_implementation = NAME
    with pytest.raises(infuse.UnsupportedCall, match="one rank's part of them"):
        experts(torch.ones(2, 48), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2))
    assert not calls


def test_experts_outside_of_blocks_stay_if_another_implementation_is_named(calls: Calls) -> None:
    model = BY_NAME["mixtral"].make()
    model.set_experts_implementation(NAME)
    text = str(infuse.plan(model, dtype="fp32", quant="int8:8", replace_with_kernel_inject=False))
    assert 'its experts stay: the config names the implementation "recorded", not ours' in text


@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("blocks", [True, False])
def test_a_default_registered_anew_is_called(blocks: bool, later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function counts, not its name; and transformers' own counts again when it is back."""

    def halved(module: Any, hidden: Tensor, *args: Any) -> Tensor:
        out = grouped_mm_experts_forward(module, hidden, *args)
        return out * 0.5 if len(hidden) > 40 else out  # beyond what a proof sees

    given, wanted = inputs(BY_NAME["mixtral"], tokens=24), BY_NAME["mixtral"].make()
    wanted.set_experts_implementation("grouped_mm")
    plain = logits(wanted, **given)
    made = BY_NAME["mixtral"].make()
    made.set_experts_implementation("grouped_mm")
    keys: dict[str, Any] = dict(dtype="fp32", replace_with_kernel_inject=blocks)
    with monkeypatch.context() as patch:
        if later:
            engine = infuse.init_inference(made, **keys)
        patch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", halved)
        if not later:
            engine = infuse.init_inference(made, **keys)
        other = logits(wanted, **given)
        assert (other - plain).abs().max() > 0.01
        assert_close(logits(engine.module, **given), other)
    assert_close(logits(engine.module, **given), plain)
