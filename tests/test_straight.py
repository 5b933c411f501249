"""Decode steps without the outer modules (runtime/straight.py): the original's tokens, and whoever listens or changes a
thing is heard.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as t
from families import BY_NAME, DECODERS, Family, inputs
from ranks import Ranks
from torch import Tensor, nn
from transformers.utils import can_return_tuple

import infuse
from infuse.generate import straight as straight_module
from infuse.generate.course import Course, Record
from infuse.generate.straight import Straight
from infuse.layers.cache import KVCache

# The others make a mask or a bias of their own at every step, or compute outside of modules: scaled embeddings, learned
# positions, logits.
STRAIGHT = {
    "llama", "llama-bias", "llama-linear", "llama-dynamic", "llama-yarn", "llama-longrope", "llama-llama3", "qwen2", "qwen3", "phi3",
    "gemma", "olmo2", "stablelm", "stablelm-parallel", "smollm3", "nemotron", "phi", "phi-qk", "gpt-neox", "gpt-neox-serial",
}  # fmt: skip
PROMPT, NEW = 11, 12
RECORDED = 2  # steps, after the prompt
ALL = NEW - 1 - RECORDED  # the steps of an answer that go straight where nothing speaks against it


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Course]:
    """The course of each step that went straight."""
    found: list[Course] = []
    run = Course.run

    def noted(self: Course, *given: Any) -> Any:
        found.append(self)
        return run(self, *given)

    monkeypatch.setattr(Course, "run", noted)
    return found


@pytest.fixture
def llama() -> tuple[nn.Module, infuse.InferenceEngine]:
    """The original with a head of its own, which does not repeat one token for ever, and the same model injected."""
    make = functools.partial(BY_NAME["llama"].make, tie_word_embeddings=False)
    return make(), infuse.init_inference(make(), dtype="fp32")


def generate(model: Any, name: str = "llama", batch: int = 2, **asked: Any) -> Tensor:
    torch.manual_seed(5)
    padding = asked.pop("padding", None)
    return model.generate(
        **inputs(BY_NAME[name], batch, PROMPT, padding), **{"max_new_tokens": NEW, "do_sample": False, **asked}
    )


class After:
    """A streamer that does something once, after so many tokens."""

    def __init__(self, tokens: int, act: Callable[[], Any]):
        self.left, self.act = tokens + 1, act  # the prompt is put first

    def put(self, tokens: Tensor) -> None:
        self.left -= 1
        if not self.left:
            self.act()

    def end(self) -> None:
        pass


# ---- which models, and with what


@pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.name)
def test_families(family: Family, ran: list[Course]) -> None:
    engine = infuse.init_inference(family.make(), dtype="fp32")
    assert torch.equal(generate(engine, family.name), generate(family.make(), family.name))
    assert len(ran) == (ALL if family.name in STRAIGHT else 0)


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope", "phi3", "gpt-neox"])
def test_beyond_the_positions_of_the_config(name: str, ran: list[Course]) -> None:
    """Where turns depend on how far a row has got, the module that makes them is asked at every step."""
    engine = infuse.init_inference(BY_NAME[name].make(), dtype="fp32")
    assert torch.equal(
        generate(engine, name, max_new_tokens=140), generate(BY_NAME[name].make(), name, max_new_tokens=140)
    )
    assert len(ran) == 140 - 1 - RECORDED


@pytest.mark.parametrize(
    ("window", "straight"), [(PROMPT + NEW, ALL), (PROMPT + NEW - 1, ALL - 1), (PROMPT + 6, 5 - RECORDED), (6, 0)]
)
@pytest.mark.parametrize("name", ["mistral", "starcoder2"])
def test_a_window_that_is_met_later(name: str, window: int, straight: int, ran: list[Course]) -> None:
    family = BY_NAME[name]
    engine = infuse.init_inference(family.make(sliding_window=window), dtype="fp32")
    assert torch.equal(generate(engine, name), generate(family.make(sliding_window=window), name))
    assert len(ran) == straight


@pytest.mark.parametrize("name", ["mistral", "starcoder2"])
def test_a_window_that_is_met_after_embeddings(name: str, ran: list[Course]) -> None:
    """Where a prompt of embeddings is given, the limit that transformers tells counts the new tokens alone."""
    original = BY_NAME[name].make(sliding_window=PROMPT + 6)
    engine = infuse.init_inference(BY_NAME[name].make(sliding_window=PROMPT + 6), dtype="fp32")
    embeddings = original.get_input_embeddings()(inputs(BY_NAME[name], 2, PROMPT)["input_ids"]).detach()
    asked: dict[str, Any] = dict(inputs_embeds=embeddings, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(engine.generate(**asked), original.generate(**asked))
    assert len(ran) == 5 - RECORDED


def test_a_preparation_that_begins_anew(ran: list[Course]) -> None:
    """Phi3 drops its cache where the short frequencies end."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    changes = dict(
        original_max_position_embeddings=PROMPT + 5,
        rope_parameters={**rope, "original_max_position_embeddings": PROMPT + 5},
    )
    engine = infuse.init_inference(BY_NAME["phi3"].make(**changes), dtype="fp32")
    assert torch.equal(generate(engine, "phi3"), generate(BY_NAME["phi3"].make(**changes), "phi3"))
    assert not ran


def test_a_preparation_of_the_models_own(llama: tuple, ran: list[Course]) -> None:
    original, engine = llama
    prepare, calls = engine.module.prepare_inputs_for_generation, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return prepare(*args, **kwargs)

    engine.module.prepare_inputs_for_generation = counted
    assert torch.equal(generate(engine), generate(original))
    assert len(calls) == NEW and not ran


def test_fewer_layers_from_a_step_on(llama: tuple, ran: list[Course]) -> None:
    original, engine = llama

    def fewer(model: Any) -> Callable[[], None]:
        return lambda: setattr(model.config, "num_hidden_layers", 2)

    exact = generate(original, batch=1, streamer=After(6, fewer(original)))
    assert torch.equal(generate(engine, batch=1, streamer=After(6, fewer(engine.module))), exact)
    assert len(ran) == 6 - 1 - RECORDED


def test_whoever_puts_a_call_around_all_modules(
    llama: tuple, ran: list[Course], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, engine = llama
    exact, heard, call = generate(original), [], nn.Module.__call__

    def traced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        heard.append(type(self))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", traced)
    assert torch.equal(generate(engine), exact)
    assert heard.count(t.LlamaModel) == NEW and not ran


@pytest.mark.parametrize("quant", [None, "int8"])
def test_sixteen_bits(quant: str | None, ran: list[Course], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = infuse.init_inference(BY_NAME["qwen3"].make(), dtype="bf16", **({"quant": quant} if quant else {}))
    found = generate(engine, "qwen3", batch=1)
    assert len(ran) == ALL
    monkeypatch.setattr(Straight, "_is_unchanged", lambda *_: False)
    assert torch.equal(found, generate(engine, "qwen3", batch=1))
    assert len(ran) == ALL


@pytest.mark.parametrize(
    ("asked", "straight"),
    [
        (dict(padding="left"), 0),
        (dict(batch=1), ALL),
        (dict(batch=5), ALL),
        (dict(do_sample=True, top_k=12), ALL),
        (dict(do_sample=True, num_return_sequences=3), ALL),
        (dict(repetition_penalty=1.5, min_new_tokens=NEW), ALL),
        (dict(eos_token_id=[5, 17, 40], pad_token_id=0), None),
        (dict(num_beams=3), 0),
        (dict(use_cache=False), 0),
        (dict(cache_implementation="static"), 0),
        (dict(max_new_tokens=3), 0),
        (dict(max_new_tokens=4), 1),
    ],
    ids=str,
)
def test_modes(asked: dict[str, Any], straight: int | None, llama: tuple, ran: list[Course]) -> None:
    original, engine = llama
    assert torch.equal(generate(engine, **asked), generate(original, **asked))
    assert straight is None or len(ran) == straight


def test_up_to_the_cap(ran: list[Course]) -> None:
    """The cap's own hook on the model says nothing that `generate` did not."""
    engine = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32", max_out_tokens=PROMPT + NEW)
    assert engine.module._forward_pre_hooks
    assert torch.equal(generate(engine), generate(BY_NAME["llama"].make()))
    assert len(ran) == ALL
    with pytest.raises(infuse.ContextLimitError):
        generate(engine, max_new_tokens=NEW + 1)


def on_rank() -> tuple[Tensor, int]:
    engine = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32", tensor_parallel={"tp_size": 2})
    with mock.patch.object(Course, "run", autospec=True, side_effect=Course.run) as run:
        return generate(engine), run.call_count


def test_ranks_agree_on_each_step(ranks: Ranks) -> None:
    """By a hook on the model, which is called at every one."""
    exact = generate(BY_NAME["llama"].make())
    for tokens, straight in ranks.run(2, on_rank):
        assert torch.equal(tokens, exact) and not straight


# ---- who listens


def outer(model: nn.Module, which: str) -> nn.Module:
    return {"model": model, "inside": model.model, "layer": model.model.layers[1], "head": model.lm_head}[which]  # type: ignore


@pytest.fixture
def everywhere() -> Iterator[list[Any]]:
    """Handles of hooks for all modules, to be removed."""
    handles: list[Any] = []
    yield handles
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize(("which", "straight"), [("model", 0), ("inside", 0), ("layer", ALL), ("head", ALL)])
def test_hooks_are_called_at_every_step(which: str, straight: int, kind: str, llama: tuple, ran: list[Course]) -> None:
    original, engine = llama
    heard: list[object] = []
    getattr(outer(engine.module, which), kind)(lambda module, *given: heard.append(given[-1]))
    assert torch.equal(generate(engine), generate(original))
    assert len(heard) == NEW and len(ran) == straight


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("at", [1, 2, 3, 6])
@pytest.mark.parametrize("which", ["model", "inside", "layer", "everywhere"])
def test_a_hook_that_comes_in_the_middle_is_heard_from_then_on(
    which: str, at: int, kind: str, llama: tuple, ran: list[Course], everywhere: list[Any]
) -> None:
    original, engine = llama
    heard: list[nn.Module] = []

    def listen() -> None:
        if which == "everywhere":
            register = getattr(torch.nn.modules.module, kind.replace("register_", "register_module_"))
            everywhere.append(register(lambda module, *_: heard.append(module)))
        else:
            getattr(outer(engine.module, which), kind)(lambda module, *_: heard.append(module))

    found = generate(engine, streamer=After(at, listen), batch=1)
    for handle in everywhere:
        handle.remove()
    assert torch.equal(found, generate(original, batch=1))
    wanted = engine.module if which == "everywhere" else outer(engine.module, which)
    assert heard.count(wanted) == NEW - at
    assert len(ran) == (ALL if which == "layer" else max(at - 1 - RECORDED, 0))


@pytest.mark.parametrize("at", [1, 2, 3, 6])
def test_a_hook_that_changes_what_a_layer_is_given(at: int, llama: tuple, ran: list[Course]) -> None:
    """It comes after what is recorded, whenever it was put on."""

    def louder(module: nn.Module, args: tuple) -> tuple:
        return (args[0] * 1.5, *args[1:])

    results = []
    for model in (llama[0], llama[1].module):
        results.append(
            generate(
                model, batch=1, streamer=After(at, lambda m=model: m.model.layers[1].register_forward_pre_hook(louder))
            )
        )
        results.append(generate(model, batch=1))
    assert torch.equal(results[2], results[0]) and torch.equal(results[3], results[1])
    assert not torch.equal(results[0], results[1])
    assert len(ran) == 2 * ALL


def test_a_layers_hook_that_runs_the_model(llama: tuple, ran: list[Course]) -> None:
    """What runs inside a layer's call is no part of the course."""
    original, engine = llama
    runs: list[Tensor] = []

    def look(module: nn.Module, args: tuple, output: Any) -> None:
        if len(runs) < 2 * NEW and not hook.inside:
            hook.inside = True
            runs.append(engine.module(torch.tensor([[3, 4]])).logits)
            hook.inside = False

    hook = look
    hook.inside = False  # type: ignore[attr-defined]
    engine.module.model.layers[1].register_forward_hook(look)
    assert torch.equal(generate(engine), generate(original))
    assert len(runs) == NEW and len(ran) == ALL


def test_times_of_each_forward(llama: tuple, ran: list[Course]) -> None:
    _, engine = llama
    engine.profile_model_time()
    generate(engine)
    assert len(engine.model_times()) == NEW and not ran


# ---- who changes something


class Wrapped:
    """A forward that counts and calls another."""

    def __init__(self, forward: Callable[..., Any]):
        self.forward, self.calls = forward, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.forward(*args, **kwargs)


@pytest.mark.parametrize("at", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("which", ["model", "inside"])
def test_a_forward_that_is_put_on_an_outer_module(which: str, at: int, llama: tuple, ran: list[Course]) -> None:
    original, engine = llama
    module = outer(engine.module, which)
    wrapped = Wrapped(module.forward)

    def put() -> None:
        module.forward = wrapped  # type: ignore[method-assign]

    if not at:
        put()
    assert torch.equal(generate(engine, streamer=After(at, put) if at else None, batch=1), generate(original, batch=1))
    assert wrapped.calls == NEW - at
    assert len(ran) == max(at - 1 - RECORDED, 0)


@pytest.mark.parametrize("around", [lambda wrapped: wrapped, can_return_tuple], ids=["", "by one of transformers"])
@pytest.mark.parametrize("at", [0, 3, 6])
def test_a_class_whose_forward_is_wrapped(
    at: int, around: Callable, llama: tuple, ran: list[Course], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by one that gives itself the original's name and module."""
    original, engine = llama
    exact, calls, forward = generate(original, batch=1), [], t.LlamaModel.forward

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return forward(self, *args, **kwargs)

    def put() -> None:
        monkeypatch.setattr(t.LlamaModel, "forward", around(wrapped))

    if not at:
        put()
    assert torch.equal(generate(engine, streamer=After(at, put) if at else None, batch=1), exact)
    assert len(calls) == NEW - at
    assert len(ran) == max(at - 1 - RECORDED, 0)


class Counting(t.LlamaForCausalLM):
    """A class of somebody's own, in which a forward of transformers is only a part; with a wrapper of transformers
    around it.
    """

    calls = 0

    @can_return_tuple
    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        self.calls += 1
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


def test_a_class_of_somebodys_own(ran: list[Course]) -> None:
    family = Family("counting", t.LlamaConfig, Counting, values=BY_NAME["llama"].values)
    engine = infuse.init_inference(family.make(), dtype="fp32")
    engine.module.calls = 0  # type: ignore[assignment]
    assert torch.equal(generate(engine), generate(family.make()))
    assert engine.module.calls == NEW and not ran


@pytest.mark.parametrize("which", ["inside", "layer"])
def test_what_is_compiled_is_left_alone(which: str, llama: tuple, ran: list[Course]) -> None:
    original, engine = llama
    module = outer(engine.module, which)
    module._compiled_call_impl = module._call_impl  # what `module.compile()` sets
    assert torch.equal(generate(engine), generate(original))
    assert not ran


class Loud(nn.Module):
    """Another head."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        return -self.head(hidden)


def another_head(model: Any) -> None:
    model.lm_head = Loud(model.lm_head)


def no_norm(model: Any) -> None:
    model.model.norm = nn.Identity()


def a_layer_less(model: Any) -> None:
    del model.model.layers[1]


def another_inside(model: Any) -> None:
    inside = type(model.model).__new__(type(model.model))
    inside.__dict__ = dict(model.model.__dict__, _modules=dict(model.model._modules, norm=nn.Identity()))
    model.model = inside


@pytest.mark.parametrize("at", [1, 2, 3, 6])
@pytest.mark.parametrize("change", [another_head, no_norm, a_layer_less, another_inside])
def test_a_module_that_is_replaced_in_the_middle(
    change: Callable[[Any], None], at: int, llama: tuple, ran: list[Course]
) -> None:
    original, engine = llama
    unchanged = generate(original, batch=1)
    results = [
        generate(model, batch=1, streamer=After(at, lambda m=model: change(m))) for model in (original, engine.module)
    ]
    assert torch.equal(*results)
    assert not torch.equal(results[0], unchanged) and torch.equal(
        results[0][:, : PROMPT + at], unchanged[:, : PROMPT + at]
    )
    assert len(ran) == (ALL if at == 1 else max(at - 1 - RECORDED, 0))  # after one token there is no course yet


def test_a_cache_that_is_changed_in_the_middle(
    llama: tuple, ran: list[Course], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token is forgotten: as without going straight."""
    _, engine = llama
    caches: list[KVCache] = []
    made = KVCache.__init__

    def noted(self: KVCache, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        caches.append(self)

    monkeypatch.setattr(KVCache, "__init__", noted)
    forget = dict(streamer=After(6, lambda: caches[-1].crop(-2)), batch=1)
    found = generate(engine, **forget)
    assert len(ran) == ALL
    monkeypatch.setattr(Straight, "_is_unchanged", lambda *_: False)
    assert torch.equal(found, generate(engine, **dict(forget, streamer=After(6, lambda: caches[-1].crop(-2)))))
    assert not torch.equal(found, generate(engine, batch=1))


# ---- what stays behind


def hooks(model: nn.Module) -> list[tuple]:
    return [(tuple(module._forward_hooks), tuple(module._forward_pre_hooks)) for module in model.modules()]


def fails() -> None:
    raise KeyError("enough")


class FailsAt(t.LogitsProcessor):
    def __init__(self, tokens: int):
        self.tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] - PROMPT == self.tokens:
            fails()
        return scores


@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("who", ["streamer", "processor", "layer", "nobody"])
def test_nothing_stays_behind(who: str, at: int, llama: tuple, ran: list[Course]) -> None:
    original, engine = llama
    calls: list[int] = []

    def layer_fails(module: nn.Module, args: tuple, output: Any) -> None:
        calls.append(1)
        if who == "layer" and len(calls) == at + 1:
            fails()

    engine.module.model.layers[1].register_forward_hook(layer_fails)
    before, seen = hooks(engine.module), []
    asked: dict[str, Any] = {"streamer": After(at, lambda: seen.append(hooks(engine.module)))}
    if who == "streamer":
        asked["streamer"] = After(at, fails)
    if who == "processor":
        asked["logits_processor"] = t.LogitsProcessorList([FailsAt(at)])
    if who == "nobody":
        generate(engine, batch=1, **asked)
    else:
        with pytest.raises(KeyError, match="enough"):
            generate(engine, batch=1, **asked)
    assert hooks(engine.module) == before and all(found == before for found in seen)
    who = "nobody"  # the layer fails no more
    ran.clear()
    assert torch.equal(generate(engine), generate(original))
    assert len(ran) == ALL


# ---- what a course is, on an outer module of a few lines


class Note(nn.Module):
    """Something of its first argument, whatever else it is given."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        for value in given:
            parts = value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else (value,)
            hidden = hidden + sum(part for part in parts if part is not None)
        return hidden * self.factor


class Two(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, None, Tensor]:
        return hidden * 2, None, hidden.sin()


class Dictionary(nn.Module):
    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        return {"hidden": hidden * 3}


class Nested(nn.Module):
    def forward(self, x: Tensor) -> tuple:
        return (x, x), x * 2


class Outer(t.PreTrainedModel):
    """`between` is what it does between its modules."""

    config_class = t.LlamaConfig

    def __init__(self, between: Callable[[Any, Tensor, Tensor], Tensor]):
        super().__init__(t.LlamaConfig())
        self.embedding, self.first, self.two, self.dictionary = nn.Embedding(9, 4), Note(2.0), Two(), Dictionary()
        self.nested = Nested()
        self.head = Note(3.0)
        self.scale = nn.Parameter(torch.ones(1))
        self.between, self.step = between, 0

    def forward(self, input_ids: Tensor, position_ids: Tensor, past_key_values: Any, return_dict: bool) -> Any:
        self.step += 1
        return t.modeling_outputs.CausalLMOutput(logits=self.between(self, self.embedding(input_ids), position_ids))


def on_a_whole(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return self.head(self.first(x, None, flag=True, number=2))


def of_an_element(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    doubled, _, other = self.two(x)
    return self.head(doubled, other)


def a_tuple_put_together(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    doubled, _, other = self.two(x)
    return self.head(x, (doubled, (other.view(other.shape))))


def a_tuple_passed_on(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return self.head(self.embedding(positions), other=self.two(x))


def a_tuple_inside_an_output(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return self.head(x, self.nested(x)[0])


def twice(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return self.head(self.head(x))


def another_view(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return self.head(self.first(x).view(-1).view(x.shape)[:, -x.shape[1] :])


def a_number_that_counts(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return self.head(x, self.step)


def one_for_true(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return self.head(x, True if self.step % 2 else 1.0)


def a_tensor_of_its_own(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return self.head(x, torch.zeros(1))


def a_parameter(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return self.head(x, self.scale)


def scaled(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return self.head(self.first(x) * 2)


def changed_in_place(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return self.head(self.first(x).mul_(2))


def changed_inside_a_tuple(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    found = self.two(x)
    found[2].mul_(2)
    return self.head(x, found)


def changed_inside_a_dictionary(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    found = self.dictionary(x)
    found["hidden"] = found["hidden"] * 2
    return self.head(x, found)


def logits_changed(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return -self.head(x)


def not_the_last_output(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    found = self.head(x)
    self.first(x)
    return found


def out_of_a_dictionary(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return self.head(self.dictionary(x)["hidden"])


def positions_turned(self: Any, x: Tensor, positions: Tensor) -> Tensor:
    return self.head(x, self.embedding(positions.t()))


STRAIGHT_COURSES = (
    on_a_whole,
    of_an_element,
    a_tuple_put_together,
    a_tuple_passed_on,
    a_tuple_inside_an_output,
    twice,
    another_view,
)
OTHERS = (
    a_number_that_counts, one_for_true, a_tensor_of_its_own, a_parameter, scaled, changed_in_place, changed_inside_a_tuple,
    changed_inside_a_dictionary, logits_changed, not_the_last_output, out_of_a_dictionary, positions_turned,
)  # fmt: skip


def made(between: Callable, monkeypatch: pytest.MonkeyPatch) -> tuple[Outer, Straight, Callable[[int], dict[str, Any]]]:
    """The model, its steps, and what the model is given at a step."""
    monkeypatch.setattr(straight_module, "_hands_on", lambda *_: True)
    torch.manual_seed(0)
    model, cache = Outer(between).eval(), KVCache()
    cache.slot(0)

    def given(step: int) -> dict[str, Any]:
        # Positions that are the same when turned, while steps are recorded.
        positions = torch.full((2, 2), step) if step < RECORDED else torch.tensor([[0, 1], [2, 3]]) + step % 2
        return dict(input_ids=torch.randint(0, 9, (2, 2)), position_ids=positions, past_key_values=cache)

    return model, Straight(model, lambda module: False), given


@torch.no_grad()
@pytest.mark.parametrize("between", [*STRAIGHT_COURSES, *OTHERS], ids=lambda between: between.__name__)
def test_what_goes_straight(between: Callable, ran: list[Course], monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps, given = made(between, monkeypatch)
    exact = Outer(between)
    exact.load_state_dict(model.state_dict())
    for step in range(6):
        inputs = given(step)
        assert torch.equal(steps.logits(inputs), exact(**inputs, return_dict=True).logits)
    assert len(ran) == (6 - RECORDED if between in STRAIGHT_COURSES else 0)


class Kept(KVCache):
    pass


def held(model: nn.Module, inputs: dict[str, Any]) -> None:
    inputs["past_key_values"].slot(0).place = torch.tensor(3)


def another_cache(model: nn.Module, inputs: dict[str, Any]) -> None:
    inputs["past_key_values"] = Kept()
    inputs["past_key_values"].slot(0)


def trained(model: nn.Module, inputs: dict[str, Any]) -> None:
    model.train()


def compiled(model: nn.Module, inputs: dict[str, Any]) -> None:
    model._compiled_call_impl = model._call_impl


@torch.no_grad()
@pytest.mark.parametrize("change", [held, another_cache, trained, compiled])
def test_what_ends_it(change: Callable, ran: list[Course], monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps, given = made(on_a_whole, monkeypatch)
    for step in range(4):
        steps.logits(given(step))
    assert (len(ran), model.step) == (4 - RECORDED, RECORDED)
    inputs = given(4)
    change(model, inputs)
    for _ in range(3):
        steps.logits(inputs)
    assert (len(ran), model.step) == (4 - RECORDED, RECORDED + 3)


@torch.no_grad()
def test_what_another_thread_runs_is_no_part_of_the_course() -> None:
    first, second, ids = nn.Embedding(9, 4), Note(2.0), torch.tensor([[1, 2]])
    courses = []
    for disturbed in (False, True):
        record, handles = Record(ids), []
        for module in (first, second):
            handles.append(module.register_forward_pre_hook(record.before, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(record.after))
        hidden = first(ids)
        if disturbed:
            thread = threading.Thread(target=lambda: torch.no_grad()(lambda: second(first(ids)))())
            thread.start()
            thread.join()
        courses.append(record.course(second(hidden)))
        for handle in handles:
            handle.remove()
    assert courses[0] is not None and courses[0] == courses[1]
    assert torch.equal(courses[1].run(ids + 1), second(first(ids + 1)))
