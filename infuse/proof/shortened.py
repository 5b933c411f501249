"""Run a model with few of its layers: one of each class is enough to find out which module calls which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn


@contextmanager
def shortened(model: nn.Module, keep: Iterable[nn.Module]) -> Iterator[None]:
    """Run `model` with one layer per class in each list of layers, plus the layers that contain a module of `keep`."""
    kept = {id(module) for module in keep}
    with ExitStack() as undo:
        for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]:
            first: dict[tuple, list[Any]] = {}
            for layer in dict.fromkeys(layers):  # one layer may be listed several times
                like = (type(layer), tuple(parameter.shape for parameter in layer.parameters()))
                if like not in first:
                    first[like] = []
                    undo.callback(layer.register_forward_hook(partial(_note, first[like])).remove)
                elif not any(id(module) in kept for module in layer.modules()):
                    _skip(layer, first[like], undo)
        yield


def _note(returned: list[Any], module: nn.Module, args: Any, output: Any) -> None:
    returned[:] = [output]


def _skip(layer: nn.Module, returned: list[Any], undo: ExitStack) -> None:
    """Make `layer` return its input until `undo`. It stays in place, because transformers looks up layers by class.

    The lookup happens only once. The layer's current hooks are not called, as one of them may load its weights; hooks
    registered meanwhile are kept.
    """
    for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
        undo.callback(hooks.update, dict(hooks))
        hooks.clear()
    if "forward" in vars(layer):
        undo.callback(setattr, layer, "forward", vars(layer)["forward"])
    else:
        undo.callback(delattr, layer, "forward")
    layer.forward = partial(_hand_on, returned)  # type: ignore[method-assign]


def _hand_on(returned: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Return the hidden states that the layer was given, in the output format of the last similar layer that ran."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if returned and isinstance(output := returned[0], tuple) else hidden
