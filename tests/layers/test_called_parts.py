"""Parts of a block that something listens to are called as the original's modules, and what it changes counts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse.ground.errors import UnsupportedCall
from infuse.layers.block import Block
from infuse.layers.calls.called_part import CalledPart
from infuse.layers.mixture.experts import Experts
from infuse.layers.mixture.router import Router
from tests.models.encoder_decoders import T5, TEXTS
from tests.models.families import FAMILIES, inputs

BY_NAME = {family.name: family for family in (*FAMILIES, *TEXTS, *T5)}
PAIRS = ("t5", "umt5", "bart", "mbart")
NAMES = (
    "llama", "gemma3", "gpt2", "gpt-neox", "gpt-neo", "codegen", "opt", "bloom", "mpt", "falcon-7b", "mixtral",
    "gpt-oss", "qwen3_next", "jamba", "falcon_h1", "gemma4", "bert", "distilbert", "deberta-v3", "vit", *PAIRS,
)  # fmt: skip
# T5 hands on zeros as the bias of states, and its replacement hands on None.
LEFT_OUT = {"position_bias"}


def made(name: str, quant: str | None = None) -> tuple[nn.Module, nn.Module]:
    """The original, and another one that is replaced."""
    family = BY_NAME[name]
    settings = {"quant": quant} if quant else {}
    return family.make(), infuse.init_inference(family.make(), dtype="fp32", progress=False, **settings).module


def given(name: str) -> dict[str, Any]:
    family = BY_NAME[name]
    if name not in PAIRS:
        return inputs(family) if family.kind == "vision" else inputs(family, padding="left")
    generator = torch.Generator().manual_seed(1)
    ids = {key: torch.randint(3, 96, (2, n), generator=generator) for key, n in KEYS.items()}
    mask = torch.ones(2, KEYS["input_ids"], dtype=torch.long)
    mask[1, 4:] = 0
    return {**ids, "attention_mask": mask}


KEYS = {"input_ids": 7, "decoder_input_ids": 5}


def run(model: Any, name: str, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(**given(name), **more)[0]  # type: ignore[no-any-return]


def parts(model: nn.Module) -> dict[str, nn.Module]:
    """The parts of a replaced model by the paths of the original's modules whose calls are known."""
    blocks = [(path, module) for path, module in model.named_modules() if isinstance(module, Block)]
    return {
        f"{path}.{call.path}": block._modules[name]  # type: ignore[misc]
        for path, block in blocks
        for name, call in block._calls.items()
        if call is not None
    }


class Heard:
    """The calls that hooks on modules hear: path, arguments, keywords and results, in order."""

    def __init__(self, modules: dict[str, nn.Module]):
        self.calls: list[tuple[str, Any]] = []
        for path, module in modules.items():
            module.register_forward_pre_hook(partial(self._before, path), with_kwargs=True)
            module.register_forward_hook(partial(self._after, path), with_kwargs=True)

    def _before(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.calls.append((path, kept((args, kwargs))))

    def _after(self, path: str, _: nn.Module, args: Any, kwargs: Any, returned: Any) -> None:
        self.calls.append((path, kept(returned)))


def kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, (tuple, list)):
        return type(value)(map(kept, value))
    return {name: kept(each) for name, each in value.items()} if isinstance(value, dict) else value


def assert_alike(found: Any, exact: Any, tolerance: float | None, where: tuple[Any, ...]) -> None:
    """The same types, names, numbers and shapes and, within the tolerance, values."""
    if isinstance(exact, Tensor):
        assert (type(found), found.shape, found.dtype) == (type(exact), exact.shape, exact.dtype), where
        if tolerance is not None:
            found, exact = (torch.nan_to_num(each.double(), neginf=0.0) for each in (found, exact))
            assert float((found - exact).abs().max()) <= tolerance * max(1.0, float(exact.abs().max())), where
    elif isinstance(exact, dict):
        assert list(found) == list(exact), where
        for key in exact.keys() - LEFT_OUT:
            assert_alike(found[key], exact[key], tolerance, (*where, key))
    elif isinstance(exact, (tuple, list)):
        assert type(found) is type(exact) and len(found) == len(exact), where
        for number, (one, other) in enumerate(zip(found, exact, strict=True)):
            assert_alike(one, other, tolerance, (*where, number))
    elif isinstance(exact, (bool, int, float, str, type(None))):
        assert type(found) is type(exact) and found == exact, where
    else:
        assert type(found).__module__.split(".")[0] == "transformers" or "Cache" in type(found).__name__, where


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_hooks_hear_the_originals_calls(name: str, quant: str | None) -> None:
    original, replaced = made(name, quant)
    found = parts(replaced)
    assert found
    modules = dict(original.named_modules())
    theirs, ours = Heard({path: modules[path] for path in found}), Heard(found)
    exact, result = run(original, name), run(replaced, name)
    assert [path for path, _ in ours.calls] == [path for path, _ in theirs.calls]
    for (path, one), (_, other) in zip(ours.calls, theirs.calls, strict=True):
        assert_alike(one, other, None if quant else 1e-3, (path,))
    assert_alike(result, exact, None if quant else 1e-3, ("result",))


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek-v3", "qwen2-moe"])
def test_routers_and_experts(name: str) -> None:
    original, replaced = made(name)
    ours = {path: module for path, module in replaced.named_modules() if isinstance(module, (Router, Experts))}
    kinds = tuple({type(module).__bases__[-1] for module in ours.values() if isinstance(module, Router)})
    theirs = {
        path: module
        for path, module in original.named_modules()
        if isinstance(module, kinds) or path.endswith(".experts")
    }
    heard = Heard(theirs), Heard(ours)
    run(original, name), run(replaced, name)
    assert len(heard[1].calls) == len(heard[0].calls) > 0
    for (path, exact), (_, found) in zip(*(each.calls for each in heard), strict=True):
        assert_alike(found, exact, 1e-3, (path,))


EDITED = ("llama", "gpt2", "bert", "mixtral", "gemma3", "bloom", "bart", "t5", "qwen3_next", "deberta-v3")


def keys_hidden(path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Let nothing see the third key."""
    name = next((name for name in ("attention_mask", "mask") if name in kwargs), None)
    mask = args[1] if name is None and len(args) > 1 else kwargs.get(name)
    if mask is None or mask.dim() != 4:
        return None
    mask = mask.clone()
    mask[..., 4] = torch.finfo(mask.dtype).min if mask.dtype.is_floating_point else 0
    return ((args[0], mask, *args[2:]), kwargs) if name is None else (args, {**kwargs, name: mask})


def turned(path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Roll the hidden states' channels."""
    if args:
        return (args[0].roll(1, -1), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": kwargs["hidden_states"].roll(1, -1)}


@pytest.mark.parametrize("edit", [keys_hidden, turned])
@pytest.mark.parametrize("name", EDITED)
def test_what_a_hook_does_to_arguments_counts(name: str, edit: Any) -> None:
    original, replaced = made(name)
    before, found = run(original, name), parts(replaced)
    modules = dict(original.named_modules())
    for path, part in found.items():
        for module in (modules[path], part):
            module.register_forward_pre_hook(partial(edit, path), with_kwargs=True)
    exact = run(original, name)
    assert not torch.allclose(exact, before), "the hook changes nothing"
    assert_alike(run(replaced, name), exact, 1e-3, (name,))


def louder(module: nn.Module, args: Any, kwargs: Any, returned: Any) -> Any:
    return (returned[0] * 1.5, *returned[1:]) if isinstance(returned, tuple) else returned * 1.5


@pytest.mark.parametrize("name", [*EDITED, "falcon_h1", "gpt-oss", "mpt"])
def test_what_a_hook_returns_counts(name: str) -> None:
    original, replaced = made(name)
    before, found = run(original, name), parts(replaced)
    modules = dict(original.named_modules())
    for path, part in found.items():
        for module in (modules[path], part):
            module.register_forward_hook(louder, with_kwargs=True, always_call=True)
    exact = run(original, name)
    assert not torch.allclose(exact, before)
    assert_alike(run(replaced, name), exact, 1e-3, (name,))


class Press:
    """Drops two keys of each prompt from the cache, as libraries that compress caches do."""

    def __init__(self, keeps: int):
        self.keeps = keeps

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        cache, tokens = kwargs["cache"], kwargs["hidden_states"].shape[1]
        if tokens > 1:
            layer = cache.layers[module.layer_idx]
            layer.keys = layer.keys[:, :, -self.keeps :].contiguous()  # values are read after keys are assigned
            layer.values = layer.values[:, :, -self.keeps :].contiguous()
        return output


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmoe"])
def test_a_press_of_the_cache(name: str) -> None:
    original, replaced = made(name)
    asked = dict(input_ids=given(name)["input_ids"], max_new_tokens=10, do_sample=False)
    plain = original.generate(**asked)  # type: ignore[operator]
    for model in (original, replaced):
        for path, module in model.named_modules():
            if path.endswith("self_attn"):
                module.register_forward_hook(Press(3), with_kwargs=True)
    exact = original.generate(**asked)  # type: ignore[operator]
    assert not torch.equal(exact, plain)
    assert torch.equal(replaced.generate(**asked), exact)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "bart", "t5", "qwen3_next"])
def test_generate_with_hooks(name: str) -> None:
    original, replaced = made(name)
    asked: dict[str, Any] = dict(input_ids=given(name)["input_ids"], max_new_tokens=5, do_sample=False)
    found, modules = parts(replaced), dict(original.named_modules())
    for path, part in found.items():
        for module in (modules[path], part):
            module.register_forward_hook(louder, with_kwargs=True)
    heard = Heard({path: modules[path] for path in found}), Heard(found)
    exact = original.generate(**asked)  # type: ignore[operator]
    assert torch.equal(replaced.generate(**asked), exact)  # type: ignore[operator]
    assert [path for path, _ in heard[0].calls] == [path for path, _ in heard[1].calls]


class Wrapped(nn.Module):
    """A user's module around another one, which hands on what it is given and makes the result louder."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside = inside

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return louder(self, (), {}, self.inside(hidden_states, *args, **kwargs))


def wrap(owner: Any, name: str) -> None:
    setattr(owner, name, Wrapped(getattr(owner, name)))


def assign(owner: Any, name: str) -> None:
    module = getattr(owner, name)
    forward = module.forward
    module.forward = lambda *args, **kwargs: louder(module, args, kwargs, forward(*args, **kwargs))


@pytest.mark.parametrize("change", [wrap, assign])
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("llama", "self_attn"), ("llama", "mlp"), ("gpt2", "attn"), ("bloom", "self_attention"), ("bloom", "mlp"),
        ("gpt-oss", "mlp"), ("bart", "encoder_attn"), ("qwen3_next", "linear_attn"), ("mixtral", "mlp"),
    ],
)  # fmt: skip
def test_modules_around_parts_and_forwards_of_users(name: str, place: str, change: Any) -> None:
    original, replaced = made(name)
    before = run(original, name)
    for model in (original, replaced):
        owners = [
            model.get_submodule(path.rpartition(".")[0])
            for path, _ in original.named_modules()
            if path.endswith(f".{place}")
        ]
        for owner in owners:
            change(owner, place)
    exact = run(original, name)
    assert not torch.allclose(exact, before)
    assert_alike(run(replaced, name), exact, 1e-3, (name,))


@contextmanager
def hook_on_all(hook: Any) -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(hook)
    yield
    handle.remove()


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "bart", "albert"])
def test_hooks_on_all_modules(name: str) -> None:
    """They change what parts return, and no object of ours reaches them."""
    original, replaced = made(name)
    found, modules = parts(replaced), dict(original.named_modules())

    def hook(inside: Any, module: nn.Module, args: Any, returned: Any) -> Any:
        assert not any(type(arg).__module__.startswith("infuse.") for arg in args)
        return louder(module, args, {}, returned) if module in inside else None

    results = []
    for model, inside in ((original, [modules[path] for path in found]), (replaced, [*found.values()])):
        with hook_on_all(partial(hook, inside)):
            results.append(run(model, name))
    assert_alike(results[1], results[0], 1e-3, (name,))


def test_parts_of_copies_are_called_inside_of_these() -> None:
    original, replaced = made("llama")
    exact = run(original, "llama")
    for twin in (copy.deepcopy(replaced), pickle.loads(pickle.dumps(replaced))):
        heard = Heard(parts(twin))
        assert_alike(run(twin, "llama"), exact, 1e-3, ())
        assert len(heard.calls) == 12
        assert all(
            part._around() is twin.model.layers[i // 2] for i, part in enumerate(parts(twin).values()) if i % 2 == 0
        )


def test_hooks_see_padded_rows() -> None:
    """Padding is not skipped while something listens."""
    family = BY_NAME["bert"]
    module = infuse.init_inference(family.make(), dtype="fp32", skip_padding=True, progress=False).module
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 3:] = 0
    asked = dict(input_ids=torch.full((2, 9), 5), attention_mask=mask)
    shapes = []
    for part in parts(module).values():
        part.register_forward_hook(lambda _, args, returned: shapes.append(args[0].shape))
    with torch.no_grad():
        module(**asked)
    assert set(shapes) == {torch.Size((2, 9, 48))}


@pytest.mark.parametrize("way", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_the_module_around_a_part_is_not_heard(way: str) -> None:
    """BERT's `attention` has a norm that another part computes; its `self` is called."""
    _, replaced = made("bert")
    attention = replaced.get_submodule("bert.encoder.layer.0.attention")
    with pytest.raises(UnsupportedCall, match=r"attention\.self"):
        getattr(attention, way)(louder)
    with pytest.raises(UnsupportedCall, match=r"attention\.self"):
        attention.self = Wrapped(attention.self)
    assert isinstance(attention.self, CalledPart) and attention.self.num_attention_heads == 4


@pytest.mark.parametrize(("name", "place"), [("albert", "attention"), ("falcon_h1", "self_attn"), ("axk1", "mlp")])
def test_parts_whose_call_is_unclear_refuse_hooks(name: str, place: str) -> None:
    original, replaced = made(name)
    exact = run(original, name)
    block = next(
        module for module in replaced.modules() if isinstance(module, Block) and module._calls.get(place, 0) is None
    )
    handle = block.get_submodule(place).register_forward_hook(louder, with_kwargs=True)
    with pytest.raises(UnsupportedCall, match="replace_with_kernel_inject"):
        run(replaced, name)
    handle.remove()
    assert_alike(run(replaced, name), exact, 1e-3, (name,))


def test_what_a_part_does_behind_its_module_is_not_lost() -> None:
    """Falcon-H1's mamba is scaled by the layer, which our part does itself: a module around it cannot."""
    original, replaced = made("falcon_h1")
    for model in (original, replaced):
        for layer in model.get_submodule("model.layers").children():
            assign(layer, "mamba")
    assert_alike(run(replaced, "falcon_h1"), run(original, "falcon_h1"), 1e-3, ())
    wrap(replaced.get_submodule("model.layers.0"), "mamba")
    with pytest.raises(UnsupportedCall, match="was exchanged"):
        run(replaced, "falcon_h1")


def test_a_part_called_by_itself() -> None:
    """It returns what the original's module does, and its result refuses a backward pass."""
    original, replaced = made("llama")
    generator = torch.Generator().manual_seed(3)
    x, turns = torch.randn(2, 5, 48, generator=generator), torch.randn(2, 2, 5, 12, generator=generator)
    asked = dict(hidden_states=x, position_embeddings=(turns[0], turns[1]), attention_mask=None)
    attention = replaced.get_submodule("model.layers.1.self_attn")
    exact = original.get_submodule("model.layers.1.self_attn")(**asked)
    found = attention(**asked)
    assert_alike(found[0].detach(), exact[0].detach(), 1e-4, ())
    with pytest.raises(UnsupportedCall, match="backward"):
        found[0].sum().backward()


def test_hooks_that_are_there_before() -> None:
    """Those on a module that a part is called as move to it; those on the module around it keep the layer."""
    exact, seen = made("llama")[0], list[set[str]]()
    model = BY_NAME["llama"].make()
    for layer in model.model.layers:  # type: ignore[operator, union-attr]
        layer.self_attn.register_forward_hook(lambda _, __, kwargs, ___: seen.append({*kwargs}), with_kwargs=True)
    replaced = infuse.init_inference(model, dtype="fp32", progress=False).module
    assert any(isinstance(module, Block) for module in replaced.modules())
    seen.clear()
    assert_alike(run(replaced, "llama"), run(exact, "llama"), 1e-3, ())
    assert len(seen) == 3 and all("position_embeddings" in names for names in seen)
    model = BY_NAME["t5"].make()
    model.encoder.block[0].layer[0].register_forward_hook(louder, with_kwargs=True)  # type: ignore[operator, union-attr, index]
    plan = infuse.init_inference(model, dtype="fp32", progress=False).plan
    assert any("has a hook" in left.why for left in plan.left if left.path == "encoder.block.0"), str(plan)
