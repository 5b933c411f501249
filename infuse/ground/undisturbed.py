"""Run a model without leaving a trace: restore the contents of its modules, buffers and configs afterwards.

Some models change themselves when they run: BigBird gives up block-sparse attention for good on a short text,
recurrent layers keep their last state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

_CONFIGS = ("config", "generation_config")
_CONTAINERS = (dict, OrderedDict, list, set)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Context after which `model` holds what it held before: attributes, modules, buffers, hooks, configs.

    Buffers are copied, parameters are not: if the model itself has changed some, as RWKV scales its weights before its
    first run, its attributes stay as it left them.
    """
    modules = list(model.modules())
    objects: dict[int, Any] = {id(module): module for module in modules}
    for module in modules:
        for name in _CONFIGS:
            _add_configs(vars(module).get(name), objects)
    states = [_Held(owner) for owner in objects.values()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not buffer.is_meta]
    parameters = list(model.parameters())
    before = _ends_of(parameters)
    try:
        yield
    finally:
        if _ends_of(parameters) == before:
            for state in states:
                state.restore()
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


class _Held:
    """The attributes of an object, and what the containers among them contain."""

    def __init__(self, owner: Any):
        self._owner, self._attributes = owner, dict(vars(owner))
        inside = (value for value in self._attributes.values() if type(value) in _CONTAINERS)
        self._inside = [(value, value.copy() if value else None) for value in inside]  # most are dicts without hooks

    def restore(self) -> None:
        for container, content in self._inside:
            if content is None:
                container.clear()
            elif not _same(container, content):
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)
        attributes = vars(self._owner)
        if not _same(attributes, self._attributes):
            attributes.clear()
            attributes.update(self._attributes)


def _same(container: Any, content: Any) -> bool:
    """Whether two containers have the very same members in the same order."""
    if len(container) != len(content) or not all(map(is_, container, content)):
        return False
    return not isinstance(container, dict) or all(map(is_, container.values(), content.values()))


def _add_configs(config: Any, objects: dict[int, Any]) -> None:
    """Add a config and those inside it."""
    if id(config) in objects or not hasattr(config, "to_dict") or not hasattr(config, "__dict__"):
        return
    objects[id(config)] = config
    for value in vars(config).values():
        _add_configs(value, objects)


def _ends_of(parameters: list[nn.Parameter]) -> list[tuple[float, float]]:
    """The first and the last value of each parameter: enough to notice that the model changed all of its values."""
    return [_ends(parameter.detach()) for parameter in parameters if parameter.numel() and not parameter.is_meta]


def _ends(tensor: Tensor) -> tuple[float, float]:
    return tensor[(0,) * tensor.dim()].item(), tensor[(-1,) * tensor.dim()].item()
