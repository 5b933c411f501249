"""Decide which linears of a layer are split by outputs (column) or inputs (row), and which feed which.

Roles come from the caller's policy, from the model's own tensor-parallel plan, or from a trace. In a trace, a linear
that reads the hidden state is column, and one that reads the output of column linears is row; its sum over ranks is
added to the residual.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from infuse.architectures.foreign.plain import linears
from infuse.architectures.part import COLUMN, ROW, WHOLE
from infuse.ground.errors import SpecMismatch
from infuse.unknown.trace import Trace, traced

_STYLES = {"colwise": COLUMN, "rowwise": ROW}
Policy = Mapping[Any, tuple[str, ...]]


@dataclass(frozen=True)
class Chain:
    """Column linears and the row linears that read their outputs; all of them must be cut consistently."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]


@dataclass(frozen=True)
class Roles:
    """The chains of a layer; `left` are linears that stay whole; `why` is the source of the roles."""

    chains: tuple[Chain, ...]
    left: tuple[str, ...]
    why: str

    def outside(self, prefixes: tuple[str, ...]) -> Roles:
        """Return the roles without the linears below the paths `prefixes`, which ranks share in another way."""
        kept = (chain for chain in self.chains if not all(path.startswith(prefixes) for path in chain.columns))
        return replace(
            self, chains=tuple(kept), left=tuple(path for path in self.left if not path.startswith(prefixes))
        )


def matches(path: str, name: str) -> bool:
    """True if `name` refers to the linear at `path`, i.e. is a suffix of it, as in DeepSpeed's policies."""
    return f".{path}".endswith(f".{name.lstrip('.')}")


def policy_names(policy: Policy | None, layer: nn.Module) -> tuple[str, ...] | None:
    """Row linears that `policy` names for the layer's class or its name; None if it has no entry for it."""
    classes = type(layer).__mro__
    known = {*classes, *(cls.__name__ for cls in classes)}
    return next((names for key, names in (policy or {}).items() if key in known), None)


def policy_problems(policy: Policy | None, model: nn.Module) -> list[str]:
    """One line for each class in `policy` that has no module, and for each name that no layer of its class has."""
    problems = []
    for key, names in (policy or {}).items():
        layers = [module for module in model.modules() if policy_names({key: names}, module) is not None]
        paths = dict.fromkeys(path for layer in layers for path, _ in linears(layer) if path)
        cls = key.__name__ if isinstance(key, type) else key
        if not layers:
            known = ", ".join(dict.fromkeys(type(layer).__name__ for layer in layer_paths(model).values()))
            problems.append(f"injection_policy: there is no {cls} in the model; its layers are {known or 'none'}")
        elif unknown := [name for name in names if not any(matches(path, name) for path in paths)]:
            asked = " or ".join(map(repr, unknown))
            problems.append(f"injection_policy: {cls} has no linear {asked}; its linears: {', '.join(paths) or 'none'}")
    return problems


def layer_paths(model: nn.Module) -> dict[str, nn.Module]:
    """Repeated layers by path: members of the outermost module lists with at least two linears."""
    return dict(_layers(model, "", set()))


def _layers(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        if id(child) in seen:
            continue
        if isinstance(module, nn.ModuleList) and sum(1 for _ in linears(child)) > 1:
            seen.add(id(child))
            yield at, child
        else:
            yield from _layers(child, at, seen)


class ModelRoles:
    """Roles of the linears in `layers` of a model: from a policy, its own tensor-parallel plan, or a trace on meta."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module], policy: Policy | None = None):
        self._model, self._layers, self._policy = model, layers, policy

    def of(self, path: str) -> Roles:
        """Return the roles of the layer at `path`; SpecMismatch if none are found or they are inconsistent."""
        layer, trace = self._model.get_submodule(path), self._traces.get(path)
        names = [name for name, _ in linears(layer) if name]
        rows, planned = policy_names(self._policy, layer), self._planned(path, names)
        if rows is not None:
            fixed = {name: ROW if any(matches(name, row) for row in rows) else COLUMN for name in names}
            why = "injection_policy"
            if ROW not in fixed.values():
                raise SpecMismatch(type(layer).__name__, ["injection_policy names none of its linears"])
        elif ROW in planned.values():
            fixed, why = {name: planned.get(name, WHOLE) for name in names}, "the model's own plan"
        elif trace is None:
            raise SpecMismatch(
                "roles", ["a run of the model on meta does not reach it: injection_policy may name them"]
            )
        else:
            fixed, why = {}, "structure"
        chains = _in_order(fixed) if trace is None else _settled(trace, fixed)
        if not chains:
            raise SpecMismatch("roles", ["no linear reads what others make of the hidden state"])
        split = {name for chain in chains for name in (*chain.columns, *chain.rows)}
        return Roles(chains, tuple(name for name in names if name not in split), why)

    @cached_property
    def _traces(self) -> dict[str, Trace]:
        return traced(self._model, self._layers)

    @cached_property
    def _plan(self) -> dict[str, str]:
        """Path pattern (`*` is any number) → style, from the configs of all models inside."""
        styles: dict[str, str] = {}
        for path, module in self._model.named_modules():
            plan = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
            prefix = getattr(module, "base_model_prefix", None)  # identifies the base model, which owns the plan
            if isinstance(plan, dict) and prefix is not None and not hasattr(module, prefix):
                styles |= {f"{path}.{pattern}" if path else pattern: style for pattern, style in plan.items()}
        return styles

    def _planned(self, path: str, names: Iterable[str]) -> dict[str, str]:
        """Roles that the model's own plan gives to a layer's linears; WHOLE for any other style."""
        roles = {}
        for name in names:
            full = f"{path}.{name}"
            style = self._plan.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", full)) or self._plan.get(full)
            if style is not None:
                roles[name] = _STYLES.get(style, WHOLE)
        return roles


def row_names(model: nn.Module) -> list[tuple[type[nn.Module], list[str]]]:
    """Names of the row linears for each class of repeated layers, starting after the last number in their paths."""
    layers = layer_paths(model)
    roles = ModelRoles(model, layers)
    rows_by_class: dict[type[nn.Module], dict[str, None]] = {}
    for path, layer in layers.items():
        with suppress(SpecMismatch):
            for row in (row for chain in roles.of(path).chains for row in chain.rows):
                rows_by_class.setdefault(type(layer), {})[re.sub(r"^(.*\.)?\d+\.", "", row)] = None
    return [(cls, list(rows)) for cls, rows in rows_by_class.items()]


def _in_order(roles: Mapping[str, str]) -> tuple[Chain, ...]:
    """Chains of a layer that cannot be traced: each row linear reads the columns declared since the previous row."""
    chains, columns = [], []
    for path, role in roles.items():
        if role == COLUMN:
            columns.append(path)
        elif role == ROW and columns:
            chains.append(Chain(tuple(columns), (path,)))
            columns = []
    return tuple(chains)


def _settled(trace: Trace, fixed: Mapping[str, str]) -> tuple[Chain, ...]:
    """Return chains that leak no partial value out of the layer: linears that leak become whole, until none does."""
    whole: set[str] = set()
    while True:
        flow = _Flow(trace, {**fixed, **dict.fromkeys(whole, WHOLE)})
        misread = flow.misread - whole
        if fixed and misread:
            first = next(name for name in trace.linears if name in misread)
            what = f"{first} would read a part of what a column linear makes; name what closes it as row"
            raise SpecMismatch("roles", [what])
        if not (misread | flow.returned) - whole:
            return flow.chains()
        whole |= misread | flow.returned


class _Flow:
    """Track the origin of each traced value: column linears whose outputs no row linear has summed yet."""

    def __init__(self, trace: Trace, fixed: Mapping[str, str]):
        made: dict[int, set[str]] = defaultdict(set)
        self.fed: dict[str, set[str]] = defaultdict(set)  # row → its columns
        self.misread: set[str] = set()
        for event in trace.events:
            reads = set[str]().union(*(made[number] for number in event.reads))
            if not event.linear:
                for number in event.writes:
                    made[number] = made[number] | reads
                continue
            role = fixed.get(event.linear) or (ROW if reads else COLUMN)
            if role == ROW and reads:
                self.fed[event.linear] |= reads
            elif reads:  # a whole or column linear would read a partial value, as would everything after it
                self.misread.add(event.linear)
            for number in event.writes:
                made[number] = {event.linear} if role == COLUMN else set()
        self.returned = set[str]().union(*(made[number] for number in trace.returns))
        self.order = trace.linears

    def chains(self) -> tuple[Chain, ...]:
        """Merge rows with a column in common into one chain."""
        joined: list[tuple[set[str], set[str]]] = []
        for row in (name for name in self.order if name in self.fed):
            rows, columns = {row}, set(self.fed[row])
            for other in [other for other in joined if other[1] & columns]:
                joined.remove(other)
                rows, columns = rows | other[0], columns | other[1]
            joined.append((rows, columns))
        return tuple(Chain(self._in_order(columns), self._in_order(rows)) for rows, columns in joined)

    def _in_order(self, names: set[str]) -> tuple[str, ...]:
        return tuple(name for name in self.order if name in names)
