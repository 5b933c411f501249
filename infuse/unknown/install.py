"""Install a rank's part of a layer: replace linears, tables and counts; keep the layer's own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from infuse.architectures.foreign.split import SplitShape
from infuse.parallel.group import Group

Put = Callable[[MutableMapping[Any, Any], Any, Any], None]


def put_part(layer: nn.Module, shape: SplitShape, part: nn.Module, put: Put, group: Group, what: str) -> None:
    """Give `layer` the linears, tables and counts of `part`. `what` names the layer in error messages.

    Each change is made by `put(mapping, key, value)`.
    """
    linears = [layer.get_submodule(matrix.target) for matrix in shape.matrices]
    places = places_of(linears, layer)
    for matrix, old in zip(shape.matrices, linears, strict=True):
        for module, name in places[id(old)]:
            put(module._modules, name, part.get_submodule(matrix.target))
    for table in shape.tables:
        owner, _, leaf = table.path.rpartition(".")
        module, tensor = layer.get_submodule(owner), getattr(part.get_submodule(owner), leaf)
        put(module._buffers if table.buffer else module._parameters, leaf, tensor)
    for count in shape.counts:
        attributes = vars(layer.get_submodule(count.module))
        section, _, name = count.name.rpartition(".")
        put(attributes, section or name, _OwnCount(attributes[section], name, count.value) if section else count.value)
    if shape.all_heads:
        handle = RemovableHandle(layer._forward_pre_hooks, extra_dict=layer._forward_pre_hooks_with_kwargs)
        put(layer._forward_pre_hooks_with_kwargs, handle.id, True)
        put(layer._forward_pre_hooks, handle.id, partial(_give_own_heads, shape))
    for path in shape.attentions if group.size > 1 else ():
        hooks = layer.get_submodule(path)._forward_hooks
        gather = partial(_return_all_heads, group, shape.head_counts, f"weights of {what}.{path}")
        put(hooks, RemovableHandle(hooks).id, gather)


def places_of(modules: Iterable[nn.Module], root: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Find the places of each module inside `root`, by the module's id: its holders, and its names there."""
    places: dict[int, list[tuple[nn.Module, str]]] = {id(module): [] for module in modules}
    for holder in root.modules():
        for name, child in holder._modules.items():
            if id(child) in places:
                places[id(child)].append((holder, name))
    return places


class _OwnCount:
    """Proxy of a config that overrides one count with the rank's value."""

    def __init__(self, config: Any, name: str, value: int):
        vars(self).update(_config=config, _name=name, _value=value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_config" not in vars(self):  # while being copied it has no attributes yet
            raise AttributeError(name)
        return self._value if name == self._name else getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


def _give_own_heads(shape: SplitShape, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    """Forward pre-hook: slice this rank's heads from masks and biases, [B, heads, T, L] or [B heads, T, L]."""
    own_heads, heads = slice(*shape.heads), shape.all_heads
    hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)

    def sliced(value: Any) -> Any:
        if not isinstance(value, Tensor) or value is hidden or heads == 1:
            return value
        if value.dim() == 4 and value.shape[1] == heads:
            return value[:, own_heads]
        if value.dim() == 3 and hidden is not None and value.shape[0] == hidden.shape[0] * heads:
            return value.unflatten(0, (-1, heads))[:, own_heads].flatten(0, 1)
        return value

    return tuple(sliced(value) for value in args), {name: sliced(value) for name, value in kwargs.items()}


def _return_all_heads(
    group: Group, counts: tuple[int, ...], what: str, module: nn.Module, args: tuple, output: Any
) -> Any:
    """Forward hook: gather attention weights [B, heads, T, L], the module's last output, from all ranks."""
    last = output[-1] if isinstance(output, tuple) else None
    if not isinstance(last, Tensor) or last.dim() != 4 or last.shape[1] != counts[group.rank]:
        return None
    return (*output[:-1], group.all_gather(last, counts, 1, what))
