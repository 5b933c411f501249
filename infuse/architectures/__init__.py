"""Layer specs: data only, named as in the checkpoint. `specs_for(layer)` looks them up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from torch import nn

from infuse.architectures.families import (
    conformer,
    deepseek,
    encoder_decoder,
    falcon_h1,
    gemma4,
    gpt,
    hybrids,
    kimi,
    llama,
    llama4,
    mamba,
    mixtures,
    nemotron_h,
    relative,
    t5,
    towers,
    zamba2,
)
from infuse.architectures.layer import Bound, LayerSpec
from infuse.ground.errors import SpecMismatch

_FAMILIES = (
    llama,
    llama4,
    gemma4,
    mixtures,
    deepseek,
    falcon_h1,
    hybrids,
    kimi,
    mamba,
    nemotron_h,
    gpt,
    t5,
    encoder_decoder,
    relative,
    conformer,
    towers,
    zamba2,
)
SPECS: tuple[LayerSpec, ...] = tuple(spec for family in _FAMILIES for spec in family.SPECS)


BY_CLASS: Mapping[str, tuple[LayerSpec, ...]] = MappingProxyType(
    {layer: tuple(spec for spec in SPECS if spec.layer == layer) for layer in dict.fromkeys(s.layer for s in SPECS)}
)  # layer class as "module.name" → its specs


_registered: list[LayerSpec] = []  # by `register`


def register(*specs: LayerSpec) -> Callable[[], None]:
    """Read layers of these specs' classes by them, also where others are here. Call the result to take them back."""
    _registered.extend(specs)

    def take_back() -> None:
        for spec in specs:
            _registered.remove(spec)

    return take_back


def is_extended() -> bool:
    """Whether a spec is registered from outside."""
    return bool(_registered)


def specs_for(layer: nn.Module) -> tuple[LayerSpec, ...]:
    """Return the specs of the layer's class or, for a user's subclass, of its nearest base class that has any.

    Not those for other arguments of the class's forward (`takes`), or for layers with a module that this one lacks
    (`has`).
    """
    for cls in type(layer).__mro__:
        name = f"{cls.__module__}.{cls.__qualname__}"
        specs = tuple(spec for spec in _registered if spec.layer == name) or BY_CLASS.get(name, ())
        if any(spec.takes for spec in specs):
            arguments = inspect.signature(cast(Any, cls).forward).parameters.keys()
            specs = tuple(spec for spec in specs if arguments >= {*spec.takes})
        if any(spec.has for spec in specs):
            inside = {path for path, _ in layer.named_modules()}
            specs = tuple(spec for spec in specs if not spec.has or spec.has in inside)
        if specs:
            return specs
    return ()


def bind_any(specs: tuple[LayerSpec, ...], layer: nn.Module, config: Any) -> Bound:
    """Bind the first spec whose `when` holds.

    SpecMismatch lists how the layer differs from that spec, or what does not hold if there is none.
    """
    unmet: list[str] = []
    for spec in specs:
        wrong = [
            f"config.{key} is {getattr(config, key, None)!r}, not {value!r}"
            for key, value in spec.when
            if getattr(config, key, None) != value
        ]
        if not wrong:
            return spec.bind(layer, config)
        unmet += wrong
    raise SpecMismatch(specs[0].layer.rpartition(".")[2], list(dict.fromkeys(unmet)))


__all__ = ["BY_CLASS", "SPECS", "Bound", "bind_any", "register", "specs_for"]
