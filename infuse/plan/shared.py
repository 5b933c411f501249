"""Weights shared by several layers: transform them once and share the result, or note in the plan why not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

from torch import nn

from infuse.architectures.packing import Fill
from infuse.ground.errors import SpecMismatch
from infuse.plan.step import Step
from infuse.weights.fill import moves
from infuse.weights.lazy import tensor_at


class Sharing:
    """Finds fills of `steps` that produce the same result from the same tensors.

    `model` must not have been changed by any of the steps yet.
    """

    def __init__(self, model: nn.Module, steps: Iterable[Step]):
        self._steps = [step for step in steps if step.shape is not None]
        self._names: dict[tuple[str, str], str] = {}  # (path of a step, source) → first name of the tensor
        first: dict[int, str] = {}
        sources: set[tuple[int, str]] = set()
        for step in self._steps:
            module = model.get_submodule(step.path)
            for source in (source for fill in step.fills for source in fill.sources):
                name = first.setdefault(id(tensor_at(module, source)), f"{step.path}.{source}")
                self._names[step.path, source] = name
                owner, _, leaf = source.rpartition(".")
                sources.add((id(module.get_submodule(owner)), leaf))
        spots: dict[str, int] = defaultdict(int)
        self._outside: set[str] = set()  # tensors that are also in a module that stays
        for module in model.modules():
            for leaf, tensor in module._parameters.items():
                if (known := first.get(id(tensor))) is not None:
                    spots[known] += 1
                    if (id(module), leaf) not in sources:
                        self._outside.add(known)
        # A module shared by several layers has one spot, but several users.
        users: dict[str, set[str]] = defaultdict(set)
        for (path, _), name in self._names.items():
            users[name].add(path)
        self._shared = {name for name, paths in users.items() if max(len(paths), spots[name]) > 1}

    def key(self, step: Step, fill: Fill) -> Hashable | None:
        """Key that is equal for fills with the same result from the same tensors; None if no source is shared."""
        names = tuple(self._names[step.path, source] for source in fill.sources)
        if self._shared.isdisjoint(names):
            return None
        return names, replace(fill, target="", sources=()), step.depth, step.bodies

    def notes(self) -> tuple[str, ...]:
        """A note if layers get copies of shared tensors, because they merge or convert them in different ways."""
        made: dict[str, set[Hashable]] = defaultdict(set)
        copied: dict[str, str] = {}
        for step in (step for step in self._steps if not step.shares):
            for fill in step.fills:
                for name in self._shared.intersection(self._names[step.path, source] for source in fill.sources):
                    made[name].add(() if moves(fill) else self.key(step, fill))
                    if not moves(fill):
                        copied[name] = f"{step.path}.{fill.target}"
        lost = [name for name in copied if len(made[name]) > 1 or name in self._outside]
        if not lost:
            return ()
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        why = f"{copied[lost[0]]} merges or converts it with others, so each layer has its own copy"
        return (f"{lost[0]}{more}: shared before, not shared now: {why}",)


def same_indices(model: nn.Module, steps: Iterable[Step]) -> tuple[str, ...]:
    """A note if layers of one list have the same index in the cache, as copies of layers do that keep their number."""
    indices = {id(model.get_submodule(step.path)): step.index for step in steps if step.decodes}
    places: dict[tuple[str, int | None], list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in indices:
            places[path.rpartition(".")[0], indices[id(module)]].append(path)
    several = [(index, paths) for (_, index), paths in places.items() if len(paths) > 1]
    if not several:
        return ()
    index, paths = several[0]
    more = f", and {len(several) - 1} more numbers" if len(several) > 1 else ""
    return (
        f"{' and '.join(paths)} have the same layer_idx {index}{more}: no cache can hold the keys of both (the "
        "original mixes them); give each layer its own layer_idx before init_inference, or call without a cache",
    )


def refuse_shared(model: nn.Module, path: str, shared: Mapping[str, tuple[str, ...]]) -> None:
    """Raise SpecMismatch if another layer shares weights with the layer at `path`: ranks would cut them twice.

    A single layer used in several places is allowed.
    """
    layer = model.get_submodule(path)
    for other in (other for name, others in shared.items() if name.startswith(f"{path}.") for other in others):
        parts = other.split(".")
        if all(model.get_submodule(".".join(parts[: end + 1])) is not layer for end in range(len(parts))):
            raise SpecMismatch(type(layer).__name__, [f"it shares weights with {other}"])
