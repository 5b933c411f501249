"""Candidates for a place: listed deepest first, decided alone, tried in turn, and told in the executed plan."""

from __future__ import annotations

import copy
import importlib
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

import infuse
from infuse import native
from infuse.apply.apply import apply
from infuse.apply.kinds import WORK
from infuse.architectures.parts.attention import NoPosition
from infuse.config.inference import InferenceConfig
from infuse.ground.device import Device
from infuse.ground.modes import Transparent
from infuse.parallel.mesh import ONE, Mesh
from infuse.plan.decide import make_plan
from infuse.plan.kinds import BLOCK, KINDS, LINEAR, SPLIT
from infuse.plan.plan import Plan
from tests.models.families import BY_NAME
from tests.support.formerly_written import specs_for

pytestmark = pytest.mark.usefixtures("unread")  # a spec that is broken would be replaced by a reading
CPU = Device.of(torch.device("cpu"))
PLAN = importlib.import_module("infuse.plan.decide")  # `infuse.plan` as an attribute is the function
PER_LAYER = 7  # linears of a Llama layer
A_FEW = 4096  # numbers
INT8: dict[str, Any] = {"quant": {"format": "int8:row"}}


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without C++ bodies a linear has nothing to gain."""
    monkeypatch.setattr(native, "kernels", lambda: "not built here")


def planned(model: nn.Module, mesh: Mesh = ONE, **config: Any) -> Plan:
    return make_plan(model, InferenceConfig.make(config), CPU, mesh)


def told(plan: Plan) -> list[tuple[str, list[list[str]]]]:
    """Each place, with the depths of its candidates' steps."""
    return [(place.path, [[step.depth for step in candidate.steps] for candidate in place]) for place in plan.places]


def test_each_kind_has_one_row_in_both_tables() -> None:
    assert list(KINDS) == list(WORK)


@pytest.mark.parametrize("size", [1, 2])
def test_the_candidates_of_a_layer_are_listed_deepest_first(size: int) -> None:
    model = BY_NAME["llama"].make()
    plan = planned(model, Mesh(tp=size), dtype="fp32", **INT8)
    assert [step.depth for step in plan.steps if step.path.startswith("model.layers.")] == [BLOCK] * 3
    after = [[SPLIT], [LINEAR] * PER_LAYER] if size > 1 else [[LINEAR] * PER_LAYER]
    assert told(plan) == [(f"model.layers.{i}", after) for i in range(3)]


def test_candidates_do_not_depend_on_what_was_asked_before() -> None:
    model = BY_NAME["llama"].make()
    plans = [planned(model, dtype="fp32", **INT8) for _ in range(2)]
    forward = [list(place) for place in plans[0].places]
    backward = [list(place) for place in reversed(plans[1].places)]
    assert forward == backward[::-1] and forward == [list(place) for place in plans[0].places]


def pickled(plan: Plan) -> Any:
    return pickle.loads(pickle.dumps(plan))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_of_a_plan_hold_all_candidates(copied: Callable[[Plan], Plan]) -> None:
    plan = planned(BY_NAME["llama"].make(), dtype="fp32", **INT8)
    same = copied(plan)
    plan.close()
    assert same == plan and told(same)[0][1] == [[LINEAR] * PER_LAYER] and told(plan)[0][1] == [[LINEAR] * PER_LAYER]


def test_a_closed_plan_knows_what_was_asked_for() -> None:
    plan = planned(BY_NAME["llama"].make(), dtype="fp32", **INT8)
    list(plan.places[0])
    plan.close()
    assert [len(list(place)) for place in plan.places] == [1, 0, 0]


def wrong_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    change = dict(attn=dict(position=NoPosition()))
    monkeypatch.setattr(PLAN, "specs_for", lambda layer: tuple(spec.but(**change) for spec in specs_for(layer)))


def test_what_the_next_candidate_leaves_is_told(no_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_spec(monkeypatch)
    text = str(infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32").plan)
    assert "left  model.layers.{0-2}: refused: " in text
    assert "left  model.layers.{0-2}.mlp.up_proj: nothing to gain" in text


def test_formats_that_do_not_fit_the_next_candidate_are_told(no_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_spec(monkeypatch)
    formats = {"o_proj": "int4", "down_proj": "int8:row"}  # groups of int4 do not divide the width
    model = BY_NAME["llama"].make()
    plan = infuse.init_inference(model, dtype="fp32", quant={"weight": {"post_init_quant": formats}}).plan
    assert {step.path for step in plan.steps} == {f"model.layers.{i}.mlp.down_proj" for i in range(3)}
    assert "left  model.layers.{0-2}.self_attn.o_proj: weight: in torch.float32: int4:64: " in str(plan)


def test_settings_that_the_next_candidate_makes_idle_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_spec(monkeypatch)
    plan = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32", kv_cache="int8").plan
    assert plan.kv_cache is None and "\n  cache  " not in str(plan)
    assert "note  kv_cache: no effect here: no decoder layer is replaced as a block" in str(plan)


def test_a_plan_that_was_carried_out_holds_no_old_module() -> None:
    model = BY_NAME["llama"].make()
    config = InferenceConfig(dtype="fp32")
    plan = make_plan(model, config, CPU)
    old = weakref.ref(model.get_submodule("model.layers.0"))
    done = apply(plan, model, config)
    assert done.places == () and old() is None and plan.steps


class _Created(Transparent, TorchDispatchMode):
    """Notes each tensor that is made: by which function, of how many values, on which device. Views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {one.untyped_storage()._cdata for one in args if isinstance(one, torch.Tensor)}
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in inputs:
                self.found.append((str(func), one.numel(), one.device.type))
        return result


@pytest.mark.parametrize("name", ["llama", "falcon-7b", "bloom", "mpt", "t5"])
@pytest.mark.parametrize("config", [{}, {"quant": {"format": "int4"}}, {"dtype": "bf16"}], ids=["", "int4", "bf16"])
def test_planning_creates_no_tensors(name: str, config: dict[str, Any]) -> None:
    model = BY_NAME[name].make()
    with _Created() as created:
        told(planned(model, **config))
        plan = planned(model, Mesh(tp=2), **config)
    assert created.found == []
    with _Created() as created:
        told(plan)
    # a layer that may be split runs on meta, on inputs of a few numbers
    assert max([size for _, size, device in created.found if device != "meta"], default=0) <= A_FEW


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_planning_tries_the_gates_of_experts_on_a_few_numbers(name: str) -> None:
    model = BY_NAME[name].make()
    with _Created() as created:
        planned(model, Mesh(ep=2), dtype="fp32")
    assert max(size for _, size, _ in created.found) <= A_FEW


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_has_one_step_or_one_reason(tied: bool) -> None:
    """The head is visited after the embedding whose weight it shares, and decides for both."""
    family = BY_NAME["llama"]
    model: LlamaForCausalLM = family.make(tie_word_embeddings=tied)
    for mesh in (ONE, Mesh(tp=2)):
        plan = planned(model, mesh, dtype="fp32", **INT8)
        steps = [step.path for step in plan.steps if step.path in ("model.embed_tokens", "lm_head")]
        left = [one.path for one in plan.left if one.path == "model.embed_tokens"]
        if tied:
            assert (steps, left) == (["lm_head", "model.embed_tokens"], [])
        elif mesh.tp > 1:
            assert (steps, left) == (["model.embed_tokens", "lm_head"], [])
        else:
            assert (steps, left) == (["lm_head"], ["model.embed_tokens"])
