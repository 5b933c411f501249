"""Methods of a replaced model and of its engine look like those of the original: libraries read and wrap them."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import types
import weakref
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor

import infuse
from infuse.generate.pairs.cache import PREPARES
from infuse.ground.instance_method import InstanceMethod
from tests.diffusion.tiny_pipelines import made
from tests.models.encoder_decoders import BY_NAME as PAIRS
from tests.models.families import BY_NAME, inputs
from tests.support.graphed import graphed

NAMES = ("__name__", "__qualname__", "__doc__", "__annotations__", "__defaults__", "__kwdefaults__")
DECODERS = ("generate", "forward", "generate_batch", "init_continuous_batching")


def replaced(model: Any, **config: Any) -> infuse.InferenceEngine:
    return infuse.init_inference(model, **{"dtype": "fp32", "progress": False, "verify": "off", **config})


def answer(generate: Any, *instance: Any, **mode: Any) -> Tensor:
    given = inputs(BY_NAME["llama"], batch=2, padding="left")
    return generate(*instance, **{**given, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **mode})


def assert_alike(found: Any, original: Any, instance: Any) -> None:
    """The method `found` of `instance` looks like the original's bound method."""
    assert inspect.signature(found) == inspect.signature(original)
    assert inspect.signature(found.__func__) == inspect.signature(original.__func__)
    assert [getattr(found, name) for name in NAMES] == [getattr(original, name) for name in NAMES]
    assert inspect.ismethod(found) and found.__self__ is instance
    assert inspect.unwrap(found) in (inspect.unwrap(original), original.__func__)
    assert getattr(found, "__wrapped__", None) in (getattr(original, "__wrapped__", None), original.__func__)
    assert inspect.getdoc(found) == inspect.getdoc(original) and inspect.isroutine(found)


@pytest.mark.parametrize("name", DECODERS)
def test_of_a_decoder(name: str) -> None:
    original, engine = BY_NAME["llama"].make(), replaced(BY_NAME["llama"].make())
    for each in (engine, engine.module):
        instance = each if name in ("generate", "forward") else engine.module
        assert_alike(getattr(each, name), getattr(original, name), instance)
    assert inspect.signature(getattr(type(engine), "generate")) != inspect.signature(original.generate)  # noqa: B009
    assert engine.generate == engine.generate != engine.module.generate


def test_of_a_model_with_an_encoder() -> None:
    original, engine = PAIRS["t5"].make(), replaced(PAIRS["t5"].make())
    assert isinstance(vars(engine.module)[PREPARES], InstanceMethod)
    for name in (PREPARES, "generate"):
        assert_alike(getattr(engine.module, name), getattr(original, name), engine.module)


def test_of_a_quantized_table_and_head() -> None:
    original = BY_NAME["llama"].make()
    model = replaced(BY_NAME["llama"].make(tie_word_embeddings=True), quant="int8:16").module
    for name in ("resize_token_embeddings", "num_parameters", "get_submodule"):
        assert isinstance(vars(model)[name], InstanceMethod)
        assert_alike(getattr(model, name), getattr(original, name), model)
    assert model.resize_token_embeddings.__func__(BY_NAME["llama"].make(), 100).num_embeddings == 100


def test_of_a_forward_with_graphs() -> None:
    original, (engine, backend) = BY_NAME["llama"].make(), graphed(BY_NAME["llama"].make(), forward=True)
    model, given = engine.module, inputs(BY_NAME["llama"])
    assert_alike(model.forward, original.forward, model)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(model.forward.__func__(model, **given, use_cache=False).logits,
                               model(**given, use_cache=False).logits)  # fmt: skip
        exact = original(**given).logits
        assert torch.equal(types.MethodType(model.forward.__func__, original)(**given).logits, exact)
    assert backend.captures


def test_of_a_forward_that_was_put_on_the_module() -> None:
    """accelerate and others put functions there that are bound already."""
    model = BY_NAME["bert"].make()
    own = model.forward
    model.forward = functools.update_wrapper(functools.partial(type(model).forward, model), own)
    engine = replaced(model)
    original = BY_NAME["bert"].make()
    assert inspect.signature(engine.forward) == inspect.signature(original.forward)
    assert inspect.signature(engine.forward.__func__) != inspect.signature(engine.forward)
    given = inputs(BY_NAME["bert"])
    with torch.no_grad():
        assert torch.equal(engine.forward.__func__(engine, **given)[0], engine(**given)[0])


def test_of_a_pipeline_and_its_models() -> None:
    original, engine = made("sd15"), infuse.init_inference(made("sd15"), dtype="fp32", progress=False)
    assert inspect.signature(engine) == inspect.signature(original)
    assert_alike(engine.__call__, original.__call__, engine)
    for name in ("load_lora_adapter", "set_attn_processor", "fuse_qkv_projections", "enable_cache"):
        if hasattr(original.unet, name):
            assert_alike(getattr(engine.unet, name), getattr(original.unet, name), engine.unet)
    again = pickle.loads(pickle.dumps(engine.unet.set_attn_processor))
    with pytest.raises(infuse.UnsupportedCall, match=r"UNet2DConditionModel\.set_attn_processor: "):
        again({})


def test_keywords_that_are_filtered_arrive() -> None:
    original, engine = BY_NAME["llama"].make(), replaced(BY_NAME["llama"].make())
    settings = {"streamer": None, "logits_processor": t.LogitsProcessorList(), "no_such_word": 3}
    for method in (engine.generate, engine.module.generate):
        known = set(inspect.signature(method).parameters)
        assert {name: value for name, value in settings.items() if name in known}.keys() == settings.keys() - {
            "no_such_word"
        }
    columns = list(inspect.signature(original.forward).parameters)
    assert list(inspect.signature(engine.forward).parameters) == columns and "labels" in columns


def test_functions_bound_to_others() -> None:
    """On a model that is not replaced, the class's own runs; on one that is, ours."""
    original, engine, other = BY_NAME["llama"].make(), replaced(BY_NAME["llama"].make()), replaced(
        BY_NAME["llama"].make(), max_out_tokens=20
    )  # fmt: skip
    exact = answer(original.generate)
    for method in (engine.generate, engine.module.generate):
        for instance in (engine, engine.module, original, other, other.module):
            assert torch.equal(answer(method.__func__, instance), exact)
            bound = types.MethodType(method.__func__, instance)
            assert torch.equal(answer(bound), exact) and inspect.signature(bound) == inspect.signature(method)
        for instance in (other, other.module):
            with pytest.raises(infuse.ContextLimitError):
                answer(method.__func__, instance, max_new_tokens=20)
        without = method.__wrapped__  # as those do who want gradients of an answer
        assert torch.equal(answer(without, engine.module), exact)


def test_wrapped_by_others() -> None:
    """As accelerate and PEFT do it: over `__func__`, and over the method itself."""
    engine = replaced(BY_NAME["llama"].make())
    model, exact = engine.module, answer(BY_NAME["llama"].make().generate)
    wrapper = functools.wraps(model.generate)(lambda *args, **kwargs: None)
    assert wrapper.__name__ == "generate" and not hasattr(wrapper, "__self__") and not hasattr(wrapper, "_function")
    assert inspect.signature(wrapper) == inspect.signature(model.generate)
    seen = []

    def counted(function: Any) -> Any:
        @functools.wraps(function)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(self)
            return function(self, *args, **kwargs)

        return run

    model.generate = types.MethodType(counted(copy.deepcopy(model.generate.__func__)), model)
    assert torch.equal(answer(model.generate), exact) and torch.equal(answer(engine.generate), exact)
    assert seen == [model, model]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_are_bound_to_the_copy(way: Any) -> None:
    original, engine = BY_NAME["llama"].make(), replaced(BY_NAME["llama"].make(), max_out_tokens=20)
    for copied in (way(engine), way(engine.generate).__self__):
        assert copied is not engine and copied.module is not engine.module
        for instance in (copied, copied.module):
            assert_alike(instance.generate, original.generate, instance)
            with pytest.raises(infuse.ContextLimitError):
                answer(instance.generate, max_new_tokens=20)
    method = way(engine.module.generate)
    assert method.__self__ is not engine.module and torch.equal(answer(method), answer(original.generate))


def test_an_engine_of_a_model_without_generate() -> None:
    engine = replaced(BY_NAME["vit"].make())
    assert inspect.signature(engine.forward) == inspect.signature(BY_NAME["vit"].make().forward)
    assert inspect.signature(engine.generate).parameters.keys() == {"args", "kwargs"}
    with pytest.raises(infuse.InfuseError, match="has no generate"):
        engine.generate()


def test_an_engine_is_freed_at_once() -> None:
    """Its methods do not hold it."""
    engine = replaced(BY_NAME["bert"].make())
    engine.forward(**inputs(BY_NAME["bert"]))
    gone = weakref.ref(engine)
    del engine
    assert gone() is None


def test_peft_over_a_replaced_model() -> None:
    from peft import LoraConfig, get_peft_model
    from peft.helpers import update_forward_signature, update_generate_signature

    adapted = get_peft_model(BY_NAME["llama"].make(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    engine = replaced(adapted)
    exact = answer(adapted.generate)
    update_forward_signature(engine.module)
    update_generate_signature(engine.module)
    assert {"input_ids", "labels"} <= inspect.signature(engine.module.forward).parameters.keys()
    assert "streamer" in inspect.signature(engine.module.generate).parameters
    assert torch.equal(answer(engine.generate), exact)
