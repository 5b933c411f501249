"""Find the tensors that a model computes when constructed and no checkpoint holds, such as rotary frequencies."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infuse.architectures.part import named
from infuse.ground.errors import CheckpointError


def computed_tensors(model: nn.Module) -> list[tuple[MutableMapping[str, Any], str, Tensor]]:
    """List the tensors that the model computes itself: owning mapping, key and value.

    Values on meta are recomputed by a new model of the same class and config whose parameters are on meta.
    CheckpointError names those that cannot be recomputed.
    """
    tensors: list[tuple[MutableMapping[str, Any], str, Tensor]] = []
    lost: list[str] = []
    twins: dict[str, nn.Module] = {}
    optional = set(model.state_dict())
    for path, module in model.named_modules():
        buffers = module._buffers
        plain = {leaf: value for leaf, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta}
        for leaf, value in [*buffers.items(), *plain.items()]:
            name = named(path, leaf)
            persistent = name in optional
            if value is None or (persistent and not value.is_meta):
                continue
            owner: Any = buffers if leaf in buffers else vars(module)
            if value.is_meta:
                twins = twins or {
                    place: again
                    for root, part in _models(model)
                    for place, again in _twin(part).named_modules(prefix=root)
                }
                again = _held(twins.get(path), leaf)
                if again is None:
                    if not persistent:
                        lost.append(name)
                    continue
                value = again
            tensors.append((owner, leaf, value))
    if lost:
        what = "the model computes these itself, they are on meta, and it cannot be made anew from its config"
        raise CheckpointError(f"{what}: {', '.join(lost)}; make the model with its buffers on the CPU")
    return tensors


def _models(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that can be constructed from a config alone."""
    if hasattr(model, "config") and hasattr(model, "base_model_prefix"):
        yield path, model
        return
    for name, child in model.named_children():
        yield from _models(child, named(path, name))


def _twin(model: nn.Module) -> nn.Module:
    """Construct a new model of the same class and config, with buffers computed on the CPU and parameters on meta."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    before, handle = torch.get_default_dtype(), register_module_parameter_registration_hook(on_meta)
    try:
        torch.set_default_dtype(torch.float32)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            make: Any = type(model)
            return make(copy.deepcopy(model.config))
    except Exception as error:  # a user's class may raise anything
        raise CheckpointError(
            f"{type(model).__name__} cannot be made anew from its config, to compute its buffers: {error}"
        ) from error
    finally:
        torch.set_default_dtype(before)
        handle.remove()


def _held(module: nn.Module | None, leaf: str) -> Tensor | None:
    """Return the value that a module of the twin computed; None if there is none."""
    tensor = None if module is None else module._buffers.get(leaf, vars(module).get(leaf))
    return tensor if isinstance(tensor, Tensor) and not tensor.is_meta else None
