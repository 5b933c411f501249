"""Which keywords a layer takes and never reads: found in its source, and nothing where the source does not tell."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from infuse.architectures.layer import NOTHING_UNREAD
from infuse.reading.calls import UNTOUCHED
from infuse.reading.keywords import unread_by
from tests.models.families import BY_NAME

# Keywords that transformers' attention functions read.
OF_ATTENTION = ["is_causal", "sliding_window", "softcap", "s_aux", "cu_seq_lens_q", "max_length_q", "output_attentions",
                "position_bias", "position_ids"]  # fmt: skip


def own_attention(module: nn.Module, x: Tensor, scale: float | None = None, **kwargs: Any) -> Tensor:
    return x * (kwargs.get("temperature") or 1.0)


def renamed(old: str, new: str) -> Callable[[Any], Any]:
    def decorator(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorator


class Inner(nn.Module):
    def forward(self, x: Tensor, gate: Any = None, idle: Any = None, **kwargs: Any) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface("eager", own_attention)
        return attend(self, x if gate is None else x * gate, **kwargs)


class Layer(nn.Module):
    """Reads `bias`, `mode`, and hands on all else to `inner`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.many = Inner(), nn.ModuleList([Inner()])

    def forward(self, x: Tensor, bias: Any = None, unused: Any = None, gate: Any = None, **kwargs: Any) -> Tensor:
        if "mode" in kwargs and kwargs["mode"] is not None:
            x = x + 1
        for module in self.many:
            x = module(x, gate=gate)
        return self.inner(x, gate=gate, **kwargs) + (0 if bias is None else bias)


class Wrapped(Layer):
    @renamed("shift", "bias")
    @renamed("offset", "bias")
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        more = kwargs | {"scale": 1.0}
        return super().forward(*args, **more)


class Filtered(Layer):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        known = {name: value for name, value in kwargs.items() if name in ("gate", "mode")}
        return self.inner(x, **known)


class Checkpointed(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.inner(x, **kwargs)


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        (Layer, {"bias", "mode", "gate", "temperature", "scale"}),
        (Wrapped, {"bias", "mode", "gate", "temperature", "scale", "shift", "offset"}),
        (Filtered, {"gate", "temperature"}),
        (Checkpointed, {"gate", "temperature"}),
    ],
)
def test_keywords_that_are_read_and_that_are_not(kind: type[nn.Module], read: set[str]) -> None:
    layer = kind()
    unread = unread_by(layer)
    assert unread is not NOTHING_UNREAD
    assert [name for name in (*read, *OF_ATTENTION) if name in unread] == []
    idle = [name for name in ("idle", "unused", "nobody_names_this") if name in unread]
    assert idle == ["idle", "unused", "nobody_names_this"]
    x = torch.randn(2, 3)
    assert torch.equal(layer(x, **dict.fromkeys(idle, UNTOUCHED)), layer(x))


def test_a_layer_takes_no_more_than_it_names() -> None:
    class Strict(nn.Module):
        def forward(self, x: Tensor, idle: Any = None) -> Tensor:
            return x

    unread = unread_by(Strict())
    assert "idle" in unread and "other" not in unread and "x" not in unread


class Scaled:
    def __init__(self, factor: float = 1.0) -> None:
        self._factor = factor

    def scaled(self, x: Tensor) -> Tensor:
        return x * self._factor


KINDS = {"scaled": Scaled}


class Iterates(Layer):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return x + sum(kwargs.values())


class ByValue(Layer):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        known = {name: value for name, value in kwargs.items() if value is not None}
        return self.inner(x, **known) * len(known)


class AnyKey(Layer):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return x + (kwargs.get(self.named) or 0)

    named = "hidden"


class HandsOver(Layer):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return own_attention(self, x, None, temperature=kwargs)


class ToAnything(Layer):
    def forward(self, x: Tensor, function: Any = None, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return function(x, **kwargs)


class ToBuiltin(Layer):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return torch.add(x, 1, **kwargs)


class ToKept(Layer):
    """To a module that is not its child."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [Inner()]

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return self.kept[0](x, **kwargs)


class ToAttribute(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.function: Any = own_attention

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return self.function(self, x, **kwargs)


class ToRegistered(Layer):
    """To a class that a table names."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return KINDS["scaled"](**kwargs).scaled(x)


class ToPatched(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner.scaled = lambda x, **kwargs: x * len(kwargs)  # type: ignore[assignment]

    def scaled(self, x: Tensor, **kwargs: Any) -> Tensor:
        return x

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return self.inner.scaled(x, **kwargs)  # type: ignore[operator]


class UsesLater(Layer):
    """What it hands over is its `kwargs` from the second round on."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        more: dict[str, Any] = {}
        for _ in range(2):
            x = torch.add(x, 1, **more)
            more = kwargs | {"alpha": 1}
        return x


class LooksAtAll(Layer):
    def forward(self, x: Tensor, idle: Any = None, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return x + len(locals())


class LooksUp(Layer):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


@pytest.mark.parametrize(
    "kind",
    [
        Iterates,
        ByValue,
        AnyKey,
        HandsOver,
        ToAnything,
        ToBuiltin,
        ToKept,
        ToAttribute,
        ToRegistered,
        ToPatched,
        UsesLater,
        LooksAtAll,
        LooksUp,
    ],
)
def test_what_the_source_does_not_tell_counts_as_read(kind: type[nn.Module]) -> None:
    assert unread_by(kind()) is NOTHING_UNREAD


def test_a_forward_without_source_or_of_an_instance_counts_as_read() -> None:
    scope: dict[str, Any] = {"nn": nn}
    exec("class Made(nn.Module):\n    def forward(self, x, **kwargs):\n        return x", scope)
    patched = Layer()
    patched.inner.forward = lambda x, **kwargs: x  # type: ignore[method-assign]
    assert unread_by(scope["Made"]()) is unread_by(patched) is NOTHING_UNREAD


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "qwen2-moe", "qwen3_5", "mamba", "gemma3"])
def test_layers_of_transformers(name: str) -> None:
    with torch.device("meta"):
        model = BY_NAME[name].make(0)
    layers = [part for part in model.modules() if isinstance(part, nn.ModuleList)][0]
    for unread in map(unread_by, layers):
        assert "nobody_names_this" in unread and "generation_mode" in unread
        assert [word for word in (*OF_ATTENTION, "hidden_states", "attention_mask") if word in unread] == []
