"""What a plan looks up in a model: paths, configs, and which modules hold the same weight."""

from __future__ import annotations

from typing import Any

from torch import nn


def path_of(model: Any, getter: str) -> str | None:
    """The path of what `model.getter()` gives, None where it has no such module."""
    try:
        wanted = getattr(model, getter)()
    except (AttributeError, NotImplementedError):  # no such method, or a class that has none of these embeddings
        return None
    return next((name for name, module in model.named_modules() if module is wanted), None)


def shared_weights(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Module path → the other modules that hold the same weight (tied embeddings)."""
    by_weight: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        if leaf == "weight":
            by_weight.setdefault(id(parameter), []).append(owner)
    tied = (paths for paths in by_weight.values() if len(paths) > 1)
    return {path: tuple(other for other in paths if other != path) for paths in tied for path in paths}


def config_around(model: nn.Module, path: str) -> Any:
    """The config of the nearest model around a module."""
    owners = [model.get_submodule(".".join(path.split(".")[:end])) for end in range(path.count(".") + 1)]
    return next((config for owner in reversed(owners) if (config := getattr(owner, "config", None)) is not None), None)
