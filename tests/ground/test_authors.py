"""Which methods are the user's: overridden in a subclass, patched, wrapped; and none in transformers itself."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn
from transformers.models.llama import modeling_llama as llama

from infuse.ground.authors import is_librarys, users_methods


class Silent(llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0


class Below(Silent):
    """Overrides nothing itself."""


class Mixin:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Mixed(Mixin, llama.LlamaMLP):
    pass


class Added(llama.LlamaMLP):
    """As its base, however it is made."""

    config_class = t.LlamaConfig

    def __init__(self, config: Any):
        super().__init__(config)

    def told(self) -> str:
        return "mine"


class Counting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("cls", "found"),
    [
        (Silent, ["Silent.forward"]),
        (Below, ["Silent.forward"]),
        (Mixed, ["Mixin.forward"]),
        (Counting, ["Counting.forward"]),
        (Added, []),
        (llama.LlamaMLP, []),
        (nn.Linear, []),
    ],
)
def test_a_users_methods(cls: type, found: list[str]) -> None:
    assert list(users_methods(cls)) == found


def test_a_class_that_is_the_users_from_module_on_overrides_nothing_of_transformers() -> None:
    assert not list(users_methods(Counting, {"transformers"}))
    assert list(users_methods(Silent, {"transformers"}))


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return run


def nameless(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


class Called:
    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


@pytest.mark.parametrize("patch", [wrapped, nameless, Called, lambda f: functools.partial(nameless(f))])
def test_a_patched_method_is_the_users(patch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_librarys(llama.LlamaMLP.forward)
    monkeypatch.setattr(llama.LlamaMLP, "forward", patch(llama.LlamaMLP.forward))
    assert list(users_methods(llama.LlamaMLP)) == ["LlamaMLP.forward"]


def test_a_users_function_under_a_librarys_decorator_is_the_users() -> None:
    assert is_librarys(torch.no_grad()(torch.nn.functional.linear))
    assert not is_librarys(torch.no_grad()(lambda x: x))
    assert not is_librarys(functools.partial(lambda x: x))


def test_no_class_of_transformers_or_torch_is_taken_for_the_users() -> None:
    files: list[ModuleType] = [sys.modules[cls.__module__] for cls in (
        t.LlamaForCausalLM, t.BertModel, t.MixtralForCausalLM, t.T5Model, t.GPT2Model, t.BigBirdModel, t.MambaModel,
        t.CLIPModel, t.Gemma3ForConditionalGeneration, t.DeepseekV3ForCausalLM, t.GptOssForCausalLM,
    )]  # fmt: skip
    classes = [cls for file in files for cls in vars(file).values() if isinstance(cls, type)]
    modules = {cls for cls in classes if issubclass(cls, nn.Module)}
    assert len(modules) > 150
    assert not [name for cls in modules for name in users_methods(cls)]
