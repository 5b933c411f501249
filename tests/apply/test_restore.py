"""The way back: original modules, the very Parameters that someone holds, today's values; training between answers."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import infuse
from infuse.apply.restore import BEFORE
from infuse.ground.errors import UnsupportedCall
from infuse.layers.gradient import InferenceModule
from infuse.weights.skeleton import Was
from tests.diffusion import tiny_pipelines
from tests.models import encoder_decoders
from tests.models.families import BY_NAME, FAMILIES, inputs
from tests.support.copies import by_pickle, by_torch
from tests.support.side_by_side import ids

BART = encoder_decoders.TEXTS[0]
FIVE = ("llama", "gpt2", "bert", "mixtral", "bart")
INTERLEAVED = (
    "bloom",
    "gpt-neo",
    "gpt-neox",
    "codegen",
    "falcon-40b",
    "phi3",
    "gpt-oss",
    "deepseek-v3",
    "llama4",
    "gemma4",
    "t5",
)
STATES = ("mamba", "qwen3_next", "granitemoehybrid", "kimi_linear")
FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fp32", dict(dtype="fp32")),
    ("bf16", dict(dtype="bf16")),
    ("int8", dict(dtype="fp32", quant="int8:16")),
)
TRANSFORMERS_OWN = {"_is_hf_initialized", "_weight_conversions", "_use_kernels"}
TINY = Path(__file__).parents[2] / "examples" / "tiny_llama"


def made(name: str) -> Any:
    return (encoder_decoders.made(BART) if name == "bart" else BY_NAME[name].make()).float()


def given_to(name: str, seed: int = 1) -> dict[str, Tensor]:
    return encoder_decoders.both(BART) if name == "bart" else inputs(BY_NAME[name], seed=seed)


def answered(model: Any, **settings: Any) -> Any:
    """The model after an `init_inference` and `restore`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return infuse.restore(infuse.init_inference(model, progress=False, **settings))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def described(model: nn.Module) -> dict[str, tuple[type, set[str], bool]]:
    """Class, attributes and mode of each module by path. (transformers marks the modules that it has initialised.)"""
    modules = model.named_modules(remove_duplicate=False)
    return {path: (type(each), {*vars(each)} - TRANSFORMERS_OWN, each.training) for path, each in modules}


def assert_restored(model: nn.Module, twin: nn.Module) -> None:
    assert described(model) == described(twin)
    found, wanted = model.state_dict(), twin.state_dict()
    assert list(found) == list(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in twin.named_parameters()]
    buffers = dict(model.named_buffers())
    assert [name for name, buffer in twin.named_buffers() if not torch.equal(buffers[name], buffer)] == []
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    assert len({buffer.data_ptr() for buffer in buffers.values()}) == len({each.data_ptr() for each in twin.buffers()})


# ---- everything is what it was ----


@pytest.mark.parametrize(("format", "settings"), FORMATS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("name", (*FIVE, *INTERLEAVED, *STATES))
def test_the_original_is_back(name: str, format: str, settings: dict[str, Any]) -> None:
    model = made(name)
    twin, held = copy.deepcopy(model), dict(model.named_parameters(remove_duplicate=False))
    assert answered(model, **settings) is model
    assert_restored(model, twin)
    again = dict(model.named_parameters(remove_duplicate=False))
    assert all(again[path] is parameter for path, parameter in held.items())
    given = given_to(name)
    with torch.no_grad():
        assert torch.equal(model(**given)[0], twin(**given)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_the_original_of_each_family_is_back(name: str) -> None:
    model = made(name)
    twin = copy.deepcopy(model)
    answered(model, dtype="fp32")
    assert_restored(model, twin)


@pytest.mark.parametrize("name", FIVE)
def test_without_anybody_who_holds_them_parameters_are_new(name: str) -> None:
    model = made(name)
    twin, alive = copy.deepcopy(model), [ref(parameter) for parameter in model.parameters()]
    layers = [ref(layer) for layer in model.modules() if isinstance(layer, nn.Linear)]
    engine = infuse.init_inference(model, dtype="bf16", progress=False)
    gc.collect()
    assert [each() for each in alive if each() is not None and each().dtype == torch.float32] == []
    assert sum(each() is not None for each in layers) <= 2  # the head, and what else no block has
    with pytest.warns(UserWarning, match="tensors have the rounding"):
        engine.restore()
    assert described(model) == described(twin)
    found = model.state_dict()
    for path, value in twin.state_dict().items():
        assert found[path].dtype == value.dtype
        wanted = value.to(torch.bfloat16).to(value.dtype) if value.is_floating_point() else value
        assert torch.equal(found[path], wanted) or torch.equal(found[path], value), path


def test_quantized_values_come_back_rounded_with_a_warning() -> None:
    model = made("llama")
    twin, engine = copy.deepcopy(model), infuse.init_inference(model, dtype="fp32", quant="int8:16", progress=False)
    with infuse.dequantized(model):
        wanted = state(model)
    with pytest.warns(UserWarning, match="tensors have the rounding"):
        infuse.restore(engine)
    assert described(model) == described(twin)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in wanted.items())


def test_nothing_warns_where_nothing_was_rounded() -> None:
    model = made("llama").bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infuse.init_inference(model, dtype="fp32", progress=False).restore()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_a_held_parameter_takes_no_second_memory(name: str) -> None:
    """In the same dtype, where matrices are merged as they are."""
    model = made(name)
    held = list(model.parameters())
    infuse.init_inference(model, dtype="fp32", progress=False)
    ours = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    assert all(parameter.untyped_storage().data_ptr() in ours for parameter in held)
    with torch.no_grad():
        for parameter in held:
            parameter.mul_(0.5)
    infuse.restore(model)
    twin = made(name)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    assert_restored(model, twin)


@pytest.mark.parametrize("held", [False, True])
def test_pieces_of_merged_matrices_begin_where_pytorch_begins_memory(held: bool) -> None:
    """Else products may add up in another order than those of the original."""
    model: Any = BY_NAME["llama"].make(hidden_size=44, intermediate_size=50, head_dim=10).float()
    twin, holder = copy.deepcopy(model), list(model.parameters()) if held else []
    answered(model, dtype="fp32")
    assert_restored(model, twin)
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())
    assert all(one is other for one, other in zip(holder, model.parameters(), strict=False))


# ---- training between answers ----


def losses(model: Any, name: str, between: Callable[[Any], None], steps: int = 20) -> list[float]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = torch.optim.swa_utils.AveragedModel(model)
    found, generator = [], torch.Generator().manual_seed(3)
    for number in range(steps):
        torch.manual_seed(number)  # dropout
        given = given_to(name, number)
        result = model(**given)[0]
        loss = (result - torch.randn(result.shape, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        found.append(loss.item())
        if number % 4 == 3:
            between(model)
            assert model.training
    return found + [parameter.double().sum().item() for parameter in average.parameters()]


def answer(name: str, **settings: Any) -> Callable[[Any], None]:
    def asked(model: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with infuse.inference(model, progress=False, **settings) as engine, torch.no_grad():
                engine(**given_to(name))
                if model.can_generate():
                    engine.generate(ids(2, 5), max_new_tokens=4, do_sample=False)

    return asked


@pytest.mark.parametrize(("format", "settings"), FORMATS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("name", FIVE)
def test_a_training_loop_with_answers_in_it_has_the_losses_of_one_without(
    name: str, format: str, settings: dict[str, Any]
) -> None:
    without = losses(made(name), name, lambda model: None)
    assert losses(made(name), name, answer(name, **settings)) == without


@pytest.mark.parametrize("name", FIVE)
def test_answers_are_those_of_todays_values(name: str) -> None:
    model, given = made(name), given_to(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(**given)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = model(**given)[0]
            with infuse.inference(model, dtype="fp32", progress=False) as engine:
                found = engine(**given)[0]
        torch.testing.assert_close(found, wanted, atol=5e-5, rtol=1e-4)


def test_other_formats_one_after_the_other() -> None:
    model = made("llama")
    twin, held = copy.deepcopy(model), list(model.parameters())
    for settings in ({"quant": "int4:16"}, {"dtype": "bf16"}, {"quant": "fp8"}, {"dtype": "fp16"}, {}):
        answered(model, **{"dtype": "fp32", **settings})
    assert_restored(model, twin)
    assert all(one is other for one, other in zip(model.parameters(), held, strict=True))


# ---- what is as it is now ----


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox", "mixtral"])
@pytest.mark.parametrize("quant", [None, "int8:16"])
def test_values_that_were_loaded_meanwhile(name: str, quant: str | None) -> None:
    model, other = made(name), made(name)
    held = list(model.parameters())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2.0)
    engine = infuse.init_inference(model, dtype="fp32", quant=quant, progress=False)
    engine.module.load_state_dict(other.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        infuse.restore(engine)
    for path, value in other.state_dict().items():
        torch.testing.assert_close(model.state_dict()[path], value, atol=0.05 if quant else 0.0, rtol=0.0)
    assert all(one is two for one, two in zip(model.parameters(), held, strict=True))


def test_values_that_were_loaded_before_a_second_init_inference() -> None:
    """They are today's, not those of a Parameter that somebody holds since before the first one."""
    model, other = made("llama"), made("llama")
    held = list(model.parameters())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2.0)
    infuse.init_inference(model, dtype="bf16", progress=False)
    model.load_state_dict(other.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        infuse.restore(infuse.init_inference(model, dtype="bf16", progress=False))
    for path, value in other.state_dict().items():
        torch.testing.assert_close(model.state_dict()[path], value, atol=0.0, rtol=0.01)
    assert all(one is two for one, two in zip(model.parameters(), held, strict=True))


def test_hooks_attributes_and_flags() -> None:
    model = made("llama")
    called: list[str] = []
    before = model.model.layers[0].register_forward_hook(lambda *_: called.append("before"))
    engine = infuse.init_inference(model, dtype="fp32", progress=False)
    layer = model.model.layers[0]
    after = layer.register_forward_hook(lambda *_: called.append("after"))
    layer.mlp.register_forward_hook(lambda *_: called.append("mlp"))
    layer.self_attn.register_forward_pre_hook(lambda *_: called.append("attention"))
    layer.steering = steering = torch.ones(3)
    model.generation_config.max_new_tokens = 3
    model.requires_grad_(False)
    infuse.restore(engine)
    called.clear()
    layer = model.model.layers[0]
    assert layer.steering is steering and model.generation_config.max_new_tokens == 3
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model(ids(1, 3))
    assert called == ["attention", "mlp", "before", "after"]
    before.remove()
    after.remove()
    assert not layer._forward_hooks


def test_modules_that_someone_holds_are_put_back_themselves() -> None:
    model = made("llama")
    layer, projection, head = model.model.layers[0], model.model.layers[1].self_attn.q_proj, model.lm_head
    answered(model, dtype="fp32", quant="int8:16")
    assert model.model.layers[0] is layer and model.lm_head is head
    assert model.model.layers[1].self_attn.q_proj is projection


def test_tied_weights_stay_tied() -> None:
    for tied in (True, False):
        model: Any = BY_NAME["llama"].make(tie_word_embeddings=tied).float()
        for settings in ({}, {"quant": "int8:16"}):
            answered(model, dtype="fp32", **settings)
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
            model.tie_weights()
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_a_function_around_generate() -> None:
    model = made("llama")
    engine = infuse.init_inference(model, dtype="fp32", progress=False)
    ours = model.generate
    model.generate = lambda *args, **kwargs: ours(*args, **kwargs)
    found = model.generate(ids(1, 4), max_new_tokens=4, do_sample=False)
    others = {name: getattr(model, name) for name in ("generate_batch", "init_continuous_batching")}
    infuse.restore(engine)
    assert torch.equal(model.generate(ids(1, 4), max_new_tokens=4, do_sample=False), found)
    assert others["init_continuous_batching"]() is not None  # somebody's own reference to it


# ---- copies, wrappers, other origins ----


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch])
def test_copies_are_restored_too(name: str, copied: Callable[[Any], Any]) -> None:
    model = made(name)
    twin, engine = copy.deepcopy(model), infuse.init_inference(model, dtype="fp32", progress=False)
    other = infuse.restore(copied(engine))
    assert_restored(other, twin)
    assert any(isinstance(module, InferenceModule) for module in model.modules())
    assert_restored(infuse.restore(engine), twin)
    assert other.get_output_embeddings() is not model.get_output_embeddings()


def test_adapters_stay_around_what_they_adapt() -> None:
    base = made("llama")
    wrapped: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)).eval()
    twin = copy.deepcopy(wrapped)
    infuse.restore(infuse.init_inference(wrapped, dtype="fp32", progress=False))
    assert_restored(wrapped, twin)
    engine = infuse.init_inference(made("llama"), dtype="fp32", progress=False)
    adapted: Any = get_peft_model(engine.module, LoraConfig(r=4, target_modules=["lm_head"]))
    infuse.restore(adapted)
    assert type(adapted.base_model.model.lm_head.base_layer) is nn.Linear
    assert adapted.base_model.model.lm_head.merge() is None


def test_a_checkpoint_loaded_into_a_model_on_meta() -> None:
    original = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(original.config, dtype=torch.float32).eval()
    engine = infuse.init_inference(empty, dtype="fp32", checkpoint=str(TINY), progress=False)
    assert_restored(infuse.restore(engine), original.eval())


def test_a_pipeline() -> None:
    pipe = tiny_pipelines.made("sd15")
    wanted = tiny_pipelines.images(pipe, "sd15")
    parts = {name: copy.deepcopy(model) for name, model in pipe.components.items() if isinstance(model, nn.Module)}
    assert infuse.restore(infuse.init_inference(pipe, dtype="fp32", progress=False)) is pipe
    for name, twin in parts.items():
        assert_restored(pipe.components[name], twin)
    assert torch.equal(tiny_pipelines.images(pipe, "sd15"), wanted)


# ---- errors ----


def test_a_model_without_replacements_stays() -> None:
    model = made("llama")
    twin = copy.deepcopy(model)
    assert infuse.restore(model) is model
    assert infuse.restore(answered(model, dtype="fp32")) is model
    assert_restored(model, twin)
    with pytest.raises(infuse.ConfigError):
        infuse.restore("a path")


def test_an_error_in_the_body_restores() -> None:
    model = made("llama")
    twin = copy.deepcopy(model)
    with pytest.raises(ZeroDivisionError), infuse.inference(model, dtype="fp32", progress=False):
        raise ZeroDivisionError
    assert_restored(model, twin)


def test_memory_that_runs_out_leaves_the_rest_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """And another call goes on."""
    model = made("llama")
    twin, left = copy.deepcopy(model), [3]
    infuse.init_inference(model, dtype="bf16", progress=False)
    with_values = Was.with_values

    def few(was: Was, value: Tensor) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError
        return with_values(was, value)

    with monkeypatch.context() as monkey, pytest.raises(torch.OutOfMemoryError):
        monkey.setattr(Was, "with_values", few)
        infuse.restore(model)
    assert any(isinstance(module, InferenceModule) for module in model.modules())
    with pytest.warns(UserWarning, match="tensors have the rounding"):
        infuse.restore(model)
    assert described(model) == described(twin)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.fixture
def replaced() -> Iterator[Any]:
    """A model that an error must leave replaced."""
    model = made("llama")
    engine = infuse.init_inference(model, dtype="fp32", progress=False)
    wanted = engine(ids(1, 5)).logits
    yield model
    assert BEFORE in vars(model) and torch.equal(engine(ids(1, 5)).logits, wanted)


def test_what_was_put_inside_since_is_not_lost(replaced: Any) -> None:
    layer = replaced.model.layers[0]
    mlp, layer.mlp = layer.mlp, nn.Identity()
    with pytest.raises(UnsupportedCall, match=r"layers\.0\.mlp has another module"):
        infuse.restore(replaced)
    layer.mlp = mlp
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(UnsupportedCall, match=r"layers\.0 has another module, or a forward"):
        infuse.restore(replaced)
    del layer.forward


def test_a_part_of_a_model_is_refused(replaced: Any) -> None:
    with pytest.raises(UnsupportedCall, match="a part of a model"):
        infuse.restore(replaced.model)
