"""Linears whose weight another module's code reads: `self.dt_proj.weight @ x`, `block.attention.output.weight.div_(2)`.

Such a linear is not replaced: the module in its place may have no such weight. Code that reads only its dtype
(`x.to(self.lm_head.weight.dtype)`) forbids a quantized weight alone, unless it handles int8. Reads are found in the
source of classes, without running it; reads through a variable that holds the linear itself are missed.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from re import match
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from infuse.architectures.foreign.plain import linears
from infuse.ground.authors import with_wrapped

_ANY = "*"  # stands for any module of a container
# Attributes that do not depend on a weight's values, and that every kind of parameter has.
_HARMLESS = frozenset({
    "device", "shape", "size", "dim", "ndim", "numel", "element_size", "itemsize", "is_cuda", "is_meta",
    "requires_grad", "is_floating_point", "layout",
})  # fmt: skip
_ASKS = frozenset({"isinstance", "hasattr", "type", "id"})
# Methods that build, initialise, tie, resize or print modules: no call of the model runs them.
_NOT_IN_CALLS = (
    "__init__ __post_init__ post_init _init* init_* reset_parameters *tie_* *resize* *set_*_embeddings _set_* "
    "set_default* *prune* *load_* from_* save_* extra_repr __repr__ *_num_qa_labels *freeze* remove_* *_replace_module"
)
_NOT_CALLED = [translate(pattern) for pattern in _NOT_IN_CALLS.split()]


@dataclass(frozen=True)
class Read:
    """One read of a weight, or of its dtype alone. `names`: the path to its linear from `self`, or, unless `rooted`,
    the end of that path.

    It runs only where all attributes `needs` of `self` hold.
    """

    names: tuple[str, ...]
    rooted: bool
    needs: frozenset[str]
    where: str
    dtype_only: bool = False

    def __str__(self) -> str:
        return f"{self.where} reads {'.'.join(self.names)}.weight{'.dtype' if self.dtype_only else ''}"

    def runs(self, reader: nn.Module) -> bool:
        return "training" not in self.needs and all(_holds(getattr(reader, name, True)) for name in self.needs)

    def means(self, path: Sequence[str]) -> bool:
        """Whether it reads the linear at `path`, relative to the module that reads."""
        end = path if self.rooted else path[-len(self.names) :]
        return len(end) == len(self.names) and all(
            name in (_ANY, part) for name, part in zip(self.names, end, strict=True)
        )


def read_linears(model: nn.Module) -> Mapping[str, Read]:
    """Path of each plain linear whose weight is read → the read: "MambaMixer.forward reads dt_proj.weight"."""
    by_class: dict[type, list[Read]] = {}
    by_path: dict[str, Read] = {}
    for path, module in model.named_modules():
        if module._modules and type(module) not in by_class:
            by_class[type(module)] = list(_reads(type(module)))
        reads = [read for read in by_class.get(type(module), ()) if read.runs(module)]
        for name, _ in linears(module, path) if reads else ():
            inside = name.removeprefix(f"{path}.").split(".")
            for read in (candidate for candidate in reads if candidate.means(inside)):
                if name not in by_path or by_path[name].dtype_only:
                    by_path[name] = read
    return by_path


def _holds(value: Any) -> bool:
    return value is not None and value is not False


def _reads(cls: type) -> Iterator[Read]:
    """The reads of weights in a class's methods, and in the functions of its own file that these call."""
    seen: set[str] = set()
    waiting: list[tuple[str, Any]] = []
    for kind in cls.__mro__:
        if kind in (nn.Module, object) or _is_frame(kind):
            continue
        for name, value in vars(kind).items():
            if name not in seen and not any(match(pattern, name) for pattern in _NOT_CALLED):
                waiting += [(f"{cls.__name__}.{name}", function) for function in _functions(value)]
            seen.add(name)
    known: set[CodeType] = set()
    while waiting:
        where, function = waiting.pop()
        if function.__code__ not in known:
            known.add(function.__code__)
            yield from _reads_in(function, where)
            named = (function.__globals__.get(word) for word in function.__code__.co_names)
            callees = [callee for callee in named if isinstance(callee, FunctionType)]
            waiting += [(callee.__name__, callee) for callee in callees if callee.__module__ == function.__module__]


def _is_frame(kind: type) -> bool:
    """Whether a class is ours, or transformers' frame around all models, as PreTrainedModel and GenerationMixin are."""
    return kind.__module__.startswith(("transformers.", "infuse.")) and ".models." not in kind.__module__


def _functions(value: Any) -> list[FunctionType]:
    """The functions of an attribute of a class, with those that decorators wrapped."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return [function for function in with_wrapped(value) if isinstance(function, FunctionType)]


def _reads_in(function: FunctionType, where: str) -> Iterator[Read]:
    names = _names(function.__code__)
    if "weight" not in names:
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, SyntaxError, TypeError):  # typed in, or a lambda in the middle of a line: any name counts
        yield from (Read((name,), False, frozenset(), where) for name in sorted(names - {"weight"}))
        return
    visitor = _Visitor(where)
    visitor.visit(tree)
    yield from (read for read in visitor.found if not (read.dtype_only and "int8" in names))


def _names(code: CodeType) -> set[str]:
    """The attributes and globals that a function's code names, and functions inside of it."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)


class _Visitor(ast.NodeVisitor):
    """Collects the reads of weights in one function; `aliases`: variables that hold modules, by the modules' paths."""

    def __init__(self, where: str):
        self.where, self.found = where, dict[Read, None]()
        self.needs: frozenset[str] = frozenset()
        self.aliases: dict[str, tuple[tuple[str, ...], bool]] = {"self": ((), True)}

    def path(self, node: ast.AST) -> tuple[tuple[str, ...], bool] | None:
        """The path of a module that an expression names, and whether it begins at `self`; None for no path."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, ((), False))
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            start = self.path(node.value)
            name = node.attr if isinstance(node, ast.Attribute) else _ANY
            return None if start is None else ((*start[0], name), start[1])
        return None

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.aliases[target.id] = self.path(node.value) or ((), False)
            else:
                self.visit(target)

    def visit_For(self, node: ast.For) -> None:
        path = self.path(node.iter)
        if isinstance(node.target, ast.Name) and path is not None:
            self.aliases[node.target.id] = ((*path[0], _ANY), path[1])
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._branches(node.test, node.body, node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._branches(node.test, [node.body], [node.orelse])

    def _branches(self, test: ast.expr, body: Sequence[ast.AST], otherwise: Sequence[ast.AST]) -> None:
        self.visit(test)
        before, self.needs = self.needs, self.needs.union(_needed(test))
        for node in body:
            self.visit(node)
        self.needs = before
        for node in otherwise:
            self.visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        asks = isinstance(node.func, ast.Name) and node.func.id in _ASKS
        if not asks:
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        is_none = all(isinstance(operand, ast.Constant) and operand.value is None for operand in node.comparators)
        if not is_none:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        inner = node.value
        while isinstance(inner, ast.Attribute) and inner.attr == "data":
            inner = inner.value
        of_weight = isinstance(inner, ast.Attribute) and inner.attr == "weight"
        if node.attr in _HARMLESS and of_weight:
            return
        asks_dtype = node.attr == "dtype" and of_weight
        holder = inner.value if asks_dtype else node.value  # type: ignore[union-attr, attr-defined]
        if (asks_dtype or node.attr == "weight") and (path := self.path(holder)) is not None and path[0]:
            self.found[Read(*path, self.needs, self.where, asks_dtype)] = None
        if not asks_dtype:
            self.generic_visit(node)


def _needed(test: ast.AST) -> Iterator[str]:
    """The attributes of `self` that must hold for a condition: `self.training`, or that and more."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for condition in test.values:
            yield from _needed(condition)
    elif isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name) and test.value.id == "self":
        yield test.attr
