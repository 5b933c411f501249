"""Look up paths, configs and tied weights in a model for a plan."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

from infuse.architectures.foreign.adapters import base_path, is_adapter
from infuse.ground.questions import attribute, returned
from infuse.inputs.model import reads_states

_TABLE = "get_input_embeddings"
_PLACES = ("layer_idx", "layer_id", "layer_number")  # transformers' names for a layer's index


def path_of(model: Any, getter: str) -> str | None:
    """Path of the module that `model.getter()` returns, without an adapter around it; None without one."""
    wanted = returned(model, getter)
    path = next((name for name, module in model.named_modules() if module is wanted), None)
    return None if path is None else base_path(model, path)


def shared_weights(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Path of each module with a tied weight → paths of the other modules that hold it."""
    by_weight: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        if leaf == "weight":
            by_weight.setdefault(id(parameter), []).append(owner)
    tied = (paths for paths in by_weight.values() if len(paths) > 1)
    return {path: tuple(other for other in paths if other != path) for paths in tied for path in paths}


def config_around(model: nn.Module, path: str) -> Any:
    """Config of the nearest model around the module at `path`."""
    owners = [model.get_submodule(".".join(path.split(".")[:end])) for end in range(path.count(".") + 1)]
    return next((config for owner in reversed(owners) if (config := getattr(owner, "config", None)) is not None), None)


def model_around(model: nn.Module, path: str) -> str:
    """Path of the nearest model around the module at `path`: a module with embeddings and a config."""
    return next(models_around(model, path))


def models_around(model: nn.Module, path: str) -> Iterator[str]:
    """Paths of the models around the module at `path`, nearest first and the whole model last.

    Those that read only what a model around them has computed come after the others.
    """
    places = [path.rsplit(".", count)[0] for count in range(1, path.count(".") + 1)]
    inside = [place for place in places if _is_model(model.get_submodule(place))]
    yield from sorted([*inside, ""], key=lambda place: place != "" and reads_states(model.get_submodule(place)))


def one_by_one(model: nn.Module, waiting: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the models around the modules at paths, nearest first, each with its paths that are still in `waiting`."""
    around = {path: list(models_around(model, path)) for path in waiting}
    for number in range(max(map(len, around.values()), default=0)):
        by_model: dict[str, list[str]] = {}
        for path, models in around.items():
            if path in waiting and number < len(models):
                by_model.setdefault(models[number], []).append(path)
        yield from by_model.items()


def _is_model(module: nn.Module) -> bool:
    has_table = hasattr(type(module), _TABLE) or attribute(module, _TABLE) is not None  # an adapter passes it on
    return hasattr(module, "config") and has_table


def traits(model: nn.Module, path: str, *, is_called: bool) -> tuple:
    """Traits besides weights that may differ between modules of one kind: the classes of all inner modules, their plain
    attributes and their functions, except the layer's index.

    For a module that its parent calls (a linear, experts), also its name and the structure of that parent.
    """
    inner = tuple(
        (place, type(module), *_attributes(module)) for place, module in model.get_submodule(path).named_modules()
    )
    if not is_called:
        return (inner,)
    where, _, name = path.rpartition(".")
    around = model.get_submodule(where)
    inside = around.named_modules() if is_adapter(around) else around.named_children()
    structure = tuple((place, type(module)) for place, module in inside)
    return inner, type(around), None if name.isdecimal() else name, structure


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name in _PLACES:
            continue
        if isinstance(value, (bool, int, float, str, FunctionType, BuiltinFunctionType)):
            yield name, value
        elif isinstance(value, partial):
            yield name, (value.func, repr(value.args), repr(value.keywords))


def is_table_or_norm(module: nn.Module) -> bool:
    """Whether a module without children has no matrix to multiply with."""
    own = (parameter for parameter in module._parameters.values() if parameter is not None)
    return isinstance(module, nn.Embedding) or all(parameter.dim() == 1 for parameter in own)


def grouped(rows: Sequence[tuple[str, ...]], path_column: int = 1) -> list[tuple[str, ...]]:
    """Merge rows that differ only in a number in their path into one row: layers.{0-15}.mlp."""
    groups: dict[tuple, list[str]] = {}
    for row in rows:
        template = re.sub(r"(?<=\.)\d+(?=\.|:|$)", "#", row[path_column], count=1)
        numbers = groups.setdefault((*row[:path_column], template, *row[path_column + 1 :]), [])
        numbers += re.findall(r"(?<=\.)\d+(?=\.|:|$)", row[path_column])[:1]
    out = []
    for row, numbers in groups.items():
        path = row[path_column].replace("#", _ranges([int(n) for n in numbers]), 1)
        out.append((*row[:path_column], path, *row[path_column + 1 :]))
    return out


def _ranges(numbers: list[int]) -> str:
    """Write [0, 1, 2, 5] as {0-2,5}, and a single number as itself."""
    if len(numbers) == 1:
        return str(numbers[0])
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return "{" + ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans) + "}"
