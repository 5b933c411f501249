"""What a caller sees or keeps of an answer can be trained on and changed, as after transformers' own loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

import infuse
from infuse.generate.loop import CACHE_NAME
from infuse.ground.cache_names import cache_in
from tests.models.encoder_decoders import BY_NAME as PAIRS
from tests.models.encoder_decoders import encoded
from tests.models.families import BY_NAME, inputs
from tests.support.graphed import graphed

NEW = 5


class Curious(t.LogitsProcessor):
    """Keeps what it gets, makes a mask when it is first called, and takes a gradient."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.mask: Tensor | None = None
        self.slopes: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.zeros(scores.shape[-1])
        self.kept += [input_ids, scores]
        with torch.enable_grad():
            x = scores.detach().requires_grad_()
            x.tanh().sum().backward()
        assert x.grad is not None
        self.slopes.append(x.grad)
        return scores + self.mask


class Keeps(t.StoppingCriteria):
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.kept.append(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Stream(BaseStreamer):
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.kept.append(value)

    def end(self) -> None: ...


def decoder(name: str, **config: Any) -> Any:
    return infuse.init_inference(BY_NAME[name].make(), dtype="fp32", progress=False, **config).module


def pair(name: str) -> Any:
    return infuse.init_inference(PAIRS[name].make(), dtype="fp32", progress=False).module


def with_adapter() -> Any:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(BY_NAME["llama"].make(), LoraConfig(target_modules=["q_proj"]))
    return infuse.init_inference(adapted, dtype="fp32", progress=False).module


# A model and its modes.
LOOPS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "greedy": (partial(decoder, "llama"), {}),
    "sampling": (partial(decoder, "llama"), dict(do_sample=True)),
    "recorded": (partial(decoder, "llama"), dict(return_dict_in_generate=True, output_scores=True, output_logits=True)),
    "prompt lookup": (
        partial(decoder, "llama"),
        dict(prompt_lookup_num_tokens=2, return_dict_in_generate=True, output_scores=True, output_logits=True),
    ),
    "beams": (partial(decoder, "llama"), dict(num_beams=2, return_dict_in_generate=True, output_scores=True)),
    "int8 cache": (partial(decoder, "llama", kv_cache="int8"), dict(return_dict_in_generate=True)),
    "hybrid": (partial(decoder, "qwen3_next"), {}),
    "states alone": (partial(decoder, "mamba"), {}),
    "graphs": (lambda: graphed(BY_NAME["llama"].make())[0].module, {}),
    "adapter": (with_adapter, {}),
    "encoder": (partial(pair, "t5"), {}),
    "encoder, beams": (partial(pair, "t5"), dict(num_beams=2, return_dict_in_generate=True, output_scores=True)),
}


def asked(loop: str) -> dict[str, Any]:
    if "encoder" in loop:
        return encoded(PAIRS["t5"])
    return inputs(BY_NAME["llama"], batch=1, tokens=9)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in([*value.values()])
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)
    elif cache_in({CACHE_NAME: value}) is not None and hasattr(value, "layers"):
        yield from tensors_in([vars(layer) for layer in value.layers])
    elif hasattr(value, "self_attention_cache"):
        yield from tensors_in([value.self_attention_cache, value.cross_attention_cache])


def made_in_inference_mode(model: nn.Module) -> list[str]:
    """Parameters, buffers and attributes of a model's modules."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if any(tensor.is_inference() for tensor in tensors_in(value))
    ]


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_kept_of_an_answer(loop: str, hooked: bool) -> None:
    make, mode = LOOPS[loop]
    model = make()
    processor, criterion, streamer, states = Curious(), Keeps(), Stream(), list[Tensor]()
    if hooked:
        head = model.get_output_embeddings()
        head.register_forward_hook(lambda module, args, output: states.extend((args[0], output)))
    streams = {} if mode.get("num_beams") else dict(streamer=streamer)
    torch.manual_seed(3)
    result = model.generate(
        **asked(loop), **{"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **mode}, **streams,
        logits_processor=t.LogitsProcessorList([processor]), stopping_criteria=t.StoppingCriteriaList([criterion]),
    )  # fmt: skip
    kept = [*processor.kept, *processor.slopes, *criterion.kept, *streamer.kept, *states, *tensors_in(result)]
    assert processor.mask is not None and len(processor.slopes) >= 2 and bool(states) is hooked
    assert not any(tensor.is_inference() for tensor in (*kept, processor.mask))
    assert not made_in_inference_mode(model)
    for ids, scores in zip(processor.kept[::2], processor.kept[1::2], strict=True):
        ids.add_(1)
        scores.mul_(2)
    weight = torch.ones(len(processor.mask), requires_grad=True)
    (weight * processor.mask + weight * processor.kept[1]).sum().backward()
    if hooked:  # a probe on the states
        probe = nn.Linear(states[0].shape[-1], 2)
        probe(states[-2]).square().sum().backward()
        assert probe.weight.grad is not None and bool(probe.weight.grad.any())


def test_many_steps_in_a_call() -> None:
    model = decoder("llama")
    assert not model.generate(torch.tensor([[5, 7, 9]]), max_new_tokens=12, do_sample=False).is_inference()


def test_an_assistant() -> None:
    model, assistant = decoder("llama"), decoder("llama")
    processor = Curious()
    mode = dict(assistant_model=assistant, return_dict_in_generate=True, output_scores=True, max_new_tokens=NEW)
    made = t.LogitsProcessorList([processor])
    result = model.generate(torch.tensor([[5, 7, 9]]), logits_processor=made, do_sample=False, **mode)
    assert not any(tensor.is_inference() for tensor in (*processor.kept, *tensors_in(result)))
    assert not made_in_inference_mode(model) and not made_in_inference_mode(assistant)


@pytest.mark.parametrize("mode", [{}, {"prompt_lookup_num_tokens": 2}])
def test_what_a_model_keeps_of_an_answer(mode: dict[str, Any]) -> None:
    """Dynamic rotations put new frequencies on the model where an answer is longer than the texts of training."""
    model = decoder("llama-dynamic")
    longest = model.config.max_position_embeddings
    before = model.model.rotary_emb.inv_freq
    prompt = torch.arange(3, 3 + longest).remainder(90)[None]
    model.generate(prompt, do_sample=False, max_new_tokens=NEW, **mode)
    assert model.model.rotary_emb.inv_freq is not before
    assert not made_in_inference_mode(model)


@pytest.mark.parametrize("name", ["mixtral", "bert", "t5", "qwen3_next"])
def test_what_init_inference_leaves_on_a_model(name: str) -> None:
    assert not made_in_inference_mode(infuse.init_inference(BY_NAME[name].make(), dtype="fp32", progress=False))


@pytest.mark.parametrize("config", [{}, {"quant": "int8"}], ids=str)
def test_a_model_replaced_in_inference_mode(config: dict[str, Any]) -> None:
    """Its new weights can be written to outside of it, as the original's."""
    model = BY_NAME["llama"].make()
    with torch.inference_mode():
        engine = infuse.init_inference(model, dtype="fp32", progress=False, **config)
    assert not made_in_inference_mode(engine)
    if config:
        return
    other = BY_NAME["llama"].make(seed=5)
    engine.module.load_state_dict(other.state_dict())
    given = inputs(BY_NAME["llama"], batch=2)
    assert torch.equal(engine.generate(**given, max_new_tokens=NEW), other.generate(**given, max_new_tokens=NEW))


@pytest.mark.parametrize("mode", [{}, {"do_sample": True}, {"prompt_lookup_num_tokens": 2}, {"num_beams": 2}], ids=str)
def test_answers_within_the_callers_inference_mode(mode: dict[str, Any]) -> None:
    """They are what transformers' are, and hinder none outside of it."""
    original, model = BY_NAME["llama"].make(), decoder("llama")
    given: dict[str, Any] = dict(**inputs(BY_NAME["llama"], batch=1, tokens=9), max_new_tokens=NEW, **mode)
    said = []
    for each in (original, model):
        torch.manual_seed(3)
        with torch.inference_mode():
            inside = each.generate(**given)
        torch.manual_seed(3)
        said.append((inside, each.generate(**given)))
    (exact, again), (found, found_again) = said
    assert torch.equal(found, exact) and torch.equal(found_again, again)
    assert found.is_inference() is exact.is_inference() and not found_again.is_inference()


@pytest.mark.parametrize(("name", "format"), [("deepseek-v3", None), ("deepseek-v3", "int8"), ("qwen3_next", None)])
@pytest.mark.parametrize("beams", [1, 2])
def test_a_cache_filled_in_inference_mode_is_continued_outside(name: str, format: str | None, beams: int) -> None:
    """Also where rows were selected in it."""
    model = decoder(name, **({"kv_cache": format} if format else {}))
    given, mode = inputs(BY_NAME[name], batch=2, tokens=9), dict(do_sample=False, pad_token_id=0)
    more = dict(num_beams=beams, num_return_sequences=beams, return_dict_in_generate=True)
    answers = []
    for mode_of_first in (torch.inference_mode, torch.no_grad):
        with mode_of_first():
            first = model.generate(**given, max_new_tokens=NEW, **more, **mode)
        ids = first.sequences.clone()
        held = {CACHE_NAME: cache_in(first), "attention_mask": torch.ones_like(ids)}
        answers.append(model.generate(ids, max_new_tokens=NEW, **held, **mode))
    assert torch.equal(*answers) and answers[0].shape[1] == 9 + 2 * NEW
