"""Which linears of a layer are split by outputs (column), which by inputs (row), and who feeds whom.

Told by a policy of the caller, by the model's own plan for tensor parallelism, or found from the layer's structure: a
linear that reads the hidden state is column, one that reads what column linears made is row, and its sum over ranks
meets the residual.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from infuse.architectures.plain import LinearShape, linears
from infuse.architectures.split import COLUMN, ROW, WHOLE
from infuse.errors import SpecMismatch
from infuse.unknown.trace import Trace, traced

# The last words of what transformers' models name the linears that close an attention or an MLP; for layers that cannot
# be traced.
_ROW_NAMES = frozenset((
    "o", "o_proj", "out_proj", "wo", "c_proj", "down_proj", "dense_4h_to_h", "fc2", "w2", "fc_out", "out_lin", "lin2", "output.dense",
    "attention.dense", "self_attention.dense", "linear2", "to_out.0", "attn.out", "attn.proj", "attn_out", "ff_out", "mlp.out",
))  # fmt: skip
_STYLES = {"colwise": COLUMN, "rowwise": ROW}
Policy = Mapping[Any, tuple[str, ...]]


@dataclass(frozen=True)
class Chain:
    """Column linears and the row linears that read what they make: what must be cut alike."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]


@dataclass(frozen=True)
class Roles:
    """The chains of a layer; `left` are the linears that stay whole; `why` tells where the roles come from."""

    chains: tuple[Chain, ...]
    left: tuple[str, ...]
    why: str

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(row for chain in self.chains for row in chain.rows)


def matches(path: str, name: str) -> bool:
    """Whether `name` means the linear at `path`: it is its end, as in DeepSpeed's policies."""
    return f".{path}".endswith(f".{name.lstrip('.')}")


def policy_names(policy: Policy | None, layer: nn.Module) -> tuple[str, ...] | None:
    """The row linears that `policy` names for the layer's class, given itself or by name; None where it has none for
    it.
    """
    for key, names in (policy or {}).items():
        if isinstance(layer, key) if isinstance(key, type) else any(cls.__name__ == key for cls in type(layer).__mro__):
            return names
    return None


def policy_problems(policy: Policy | None, model: nn.Module) -> list[str]:
    """One line for each class of `policy` that is in no module, and for each name that is in none of the class's
    layers.
    """
    problems = []
    for key, names in (policy or {}).items():
        layers = [module for module in model.modules() if policy_names({key: names}, module) is not None]
        paths = dict.fromkeys(path for layer in layers for path, _ in linears(layer) if path)
        cls = key.__name__ if isinstance(key, type) else key
        if not layers:
            known = dict.fromkeys(type(layer).__name__ for layer in layer_paths(model).values())
            problems.append(
                f"injection_policy: there is no {cls} in the model; its layers are {', '.join(known) or 'none'}"
            )
        elif unknown := [name for name in names if not any(matches(path, name) for path in paths)]:
            problems.append(
                f"injection_policy: {cls} has no linear {' or '.join(map(repr, unknown))}; "
                f"its linears: {', '.join(paths) or 'none'}"
            )
    return problems


def layer_paths(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers by their paths: what lies in the outermost lists of modules and has at least two linears."""
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


def own_plan(model: nn.Module) -> dict[str, str]:
    """The model's own plan for tensor parallelism: pattern of a path in the model (`*` any number) → style. Empty where
    it has none.
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        base = getattr(config, "base_model_tp_plan", None)
        if (
            isinstance(base, dict)
            and hasattr(module, "base_model_prefix")
            and not hasattr(module, module.base_model_prefix)
        ):  # type: ignore
            found |= {f"{path}.{pattern}" if path else pattern: style for pattern, style in base.items()}
    return found


def planned_roles(plan: Mapping[str, str], path: str, names: Iterable[str]) -> dict[str, str]:
    """The roles that the model's own plan gives to linears of the layer at `path`; other styles than column and row are
    left.
    """
    roles = {}
    for name in names:
        at = re.sub(r"(?<=\.)\d+(?=\.)", "*", f"{path}.{name}")
        style = plan.get(at) or plan.get(f"{path}.{name}")
        if style is not None:
            roles[name] = _STYLES.get(style, WHOLE)
    return roles


def find_roles(layer: nn.Module, trace: Trace | None, rows: Sequence[str] | None, planned: Mapping[str, str]) -> Roles:
    """The roles of the layer's linears: of a policy's `rows`, else as `planned`, else from structure. SpecMismatch:
    none can be found.
    """
    shapes = {path: shape for path, shape in linears(layer) if path}
    if rows is not None:
        fixed = {path: ROW if any(matches(path, name) for name in rows) else COLUMN for path in shapes}
        why = "injection_policy"
    elif ROW in planned.values():
        fixed, why = {path: planned.get(path, WHOLE) for path in shapes}, "the model's own plan"
    else:
        fixed, why = {}, "structure" if trace is not None else "names"
    if trace is None:
        return _in_order(shapes, fixed, why)
    return _settled(shapes, trace, fixed, why)


def row_names(model: nn.Module) -> list[tuple[type[nn.Module], list[str]]]:
    """For each class of repeated layers the names of its row linears, from the last number in their paths on."""
    layers, plan = layer_paths(model), own_plan(model)
    traces = traced(model, layers)
    found: dict[type[nn.Module], dict[str, None]] = {}
    for path, layer in layers.items():
        planned = planned_roles(plan, path, [name for name, _ in linears(layer)])
        with suppress(SpecMismatch):
            for row in find_roles(layer, traces.get(path), None, planned).rows:
                found.setdefault(type(layer), {})[re.sub(r"^(.*\.)?\d+\.", "", row)] = None
    return [(cls, list(rows)) for cls, rows in found.items()]


def _settled(shapes: Mapping[str, LinearShape], trace: Trace, fixed: dict[str, str], why: str) -> Roles:
    """The roles with which no part of a value leaves the layer: who makes one that does is whole, until none is left."""
    given = why != "structure"
    whole: set[str] = set()
    for _ in range(len(shapes) + 1):
        flow = _Flow(trace, fixed | dict.fromkeys(whole, WHOLE))
        open_now = (flow.returned | flow.misread) - whole
        if not open_now:
            break
        if given and flow.misread - whole:
            first = next(name for name in trace.linears if name in flow.misread)
            raise SpecMismatch(
                "roles", [f"{first} would read a part of what a column linear makes; name what closes it as row"]
            )
        whole |= open_now
    roles = flow.chains(), tuple(path for path in shapes if path not in flow.split)
    return _checked(Roles(*roles, why))


def _checked(roles: Roles) -> Roles:
    if not roles.chains:
        raise SpecMismatch("roles", ["no linear reads what others make of the hidden state"])
    return roles


class _Flow:
    """What each value of a trace was made from: column linears whose parts no row linear has summed up yet."""

    def __init__(self, trace: Trace, fixed: Mapping[str, str]):
        made: dict[int, frozenset[str]] = {}
        self.fed: dict[str, frozenset[str]] = {}  # row → its columns
        self.misread: set[str] = set()
        none: frozenset[str] = frozenset()
        for event in trace.events:
            reads = none.union(*(made.get(number, none) for number in event.reads))
            if not event.linear:
                for number in event.writes:
                    made[number] = reads | (made.get(number, none) if number not in event.reads else none)
                continue
            role = fixed.get(event.linear) or (ROW if reads else COLUMN)
            if role == ROW and reads:
                self.fed[event.linear] = self.fed.get(event.linear, none) | reads
            elif reads:  # a whole or a column linear would read a part, and so would all that follows
                self.misread.add(event.linear)
            for number in event.writes:
                made[number] = frozenset((event.linear,)) if role == COLUMN else none
        self.returned = set(none.union(*(made.get(number, none) for number in trace.returns)))
        self.order = trace.linears

    @property
    def split(self) -> set[str]:
        return set(self.fed).union(*self.fed.values())

    def chains(self) -> tuple[Chain, ...]:
        """Rows with a column in common are one chain."""
        joined: list[tuple[set[str], set[str]]] = []
        for row in (name for name in self.order if name in self.fed):
            rows, columns = {row}, set(self.fed[row])
            for other in [other for other in joined if other[1] & columns]:
                joined.remove(other)
                rows, columns = rows | other[0], columns | other[1]
            joined.append((rows, columns))
        return tuple(
            Chain(tuple(n for n in self.order if n in columns), tuple(n for n in self.order if n in rows))
            for rows, columns in joined
        )


def _in_order(shapes: Mapping[str, LinearShape], fixed: Mapping[str, str], why: str) -> Roles:
    """Roles by the order in which linears are declared: a row linear reads the columns since the one before."""
    roles = fixed or {path: ROW if any(matches(path, name) for name in _ROW_NAMES) else COLUMN for path in shapes}
    chains, columns, left = [], [], [path for path, role in roles.items() if role == WHOLE]
    for path in shapes:
        if roles[path] == COLUMN:
            columns.append(path)
        elif roles[path] == ROW and columns:
            chains.append(Chain(tuple(columns), (path,)))
            columns = []
        elif roles[path] == ROW:
            left.append(path)
    return _checked(Roles(tuple(chains), (*left, *columns), why))
