"""Read from a function's source which keywords it uses or looks up in its `kwargs`, and to what it hands them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

_ASKS = frozenset({"get", "pop", "setdefault"})  # methods of a dict that look up one key
_TO_CACHE = ("kwargs", "cache_kwargs")  # arguments of a cache's `update`
_WORD = re.compile(r"[A-Za-z_]\w*")
# Code with these may look at all variables of a function.
_SEES_ALL = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"})


class Unclear(Exception):
    """Raised where source does not tell which keywords are read."""


class Uses:
    """`loaded`: parameters that are used, but for handing them on as `name=name`. `asked`: keys that are looked up in
    `kwargs`. `callees`: what is called with all of `kwargs`. `handed`: parameters, and what is called with each under
    its own name. `to_cache`: a cache gets `kwargs`. `bindings`: what local names may hold; None where that is unclear.
    """

    def __init__(self, function: ast.FunctionDef):
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        self._parameters = {each.arg for each in named}
        self._kwargs = set() if arguments.kwarg is None else {arguments.kwarg.arg}
        self.itself = named[0].arg if named else ""
        known = -1
        while known != len(self._kwargs):  # again if a name was found to hold `kwargs`, which may be used before
            known = len(self._kwargs)
            self._begin()
            for statement in function.body:
                self._visit(statement)

    def _begin(self) -> None:
        self.loaded = set[str]()
        self.asked = list[ast.expr]()
        self.callees = list[ast.expr]()
        self.handed = list[tuple[str, ast.expr]]()
        self.to_cache = False
        self.bindings: dict[str, list[ast.expr | None]] = {name: [None] for name in self._parameters}

    def _visit(self, node: ast.AST) -> None:
        match node:
            case ast.Call():
                self._visit_call(node)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if self._derives(value):
                self._kwargs.add(name)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ):
                self._bind(name, value)
            case ast.For(target=target, iter=source) | ast.comprehension(target=target, iter=source):
                self._loop(node, target, source)
            case ast.Subscript(value=ast.Name(id=name), slice=key) if name in self._kwargs:
                self.asked.append(key)
                self._visit(key)
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[ast.Name(id=name)]) if (
                name in self._kwargs
            ):
                self.asked.append(key)
                self._visit(key)
            case ast.Name():
                self._visit_name(node)
            case ast.Attribute(attr=name) if name in _SEES_ALL:
                raise Unclear
            case _:
                self._visit_other(node)

    def _visit_name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.bindings.setdefault(node.id, []).append(None)
            if node.id in self._kwargs:
                raise Unclear
        elif node.id in self._kwargs or node.id in _SEES_ALL:
            raise Unclear
        elif node.id in self._parameters:
            self.loaded.add(node.id)

    def _visit_other(self, node: ast.AST) -> None:
        names = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            each = node.args
            inside = [*each.posonlyargs, *each.args, *each.kwonlyargs, *filter(None, (each.vararg, each.kwarg))]
            names = [argument.arg for argument in inside]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        for name in names:
            self.bindings.setdefault(name, []).append(None)
        for child in ast.iter_child_nodes(node):
            self._visit(child)

    def _visit_call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Attribute(value=ast.Name(id=name), attr=method) if name in self._kwargs:
                if method not in _ASKS or not node.args:
                    raise Unclear
                self.asked.append(node.args[0])
            case _:
                self._visit(node.func)
        is_partial = isinstance(node.func, ast.Name) and node.func.id == "partial" and node.args
        callee = node.args[0] if is_partial else node.func
        for argument in node.args:
            self._visit(argument)
        is_update = isinstance(node.func, ast.Attribute) and node.func.attr == "update"
        for keyword in node.keywords:
            name = keyword.value.id if isinstance(keyword.value, ast.Name) else ""
            if keyword.arg is None and name in self._kwargs:
                self.callees.append(callee)
            elif keyword.arg in _TO_CACHE and name in self._kwargs and is_update:
                self.to_cache = True
            elif keyword.arg == name and name in self._parameters:
                self.handed.append((name, callee))
            else:
                self._visit(keyword.value)

    def _derives(self, value: ast.expr) -> bool:
        """Whether a value is `kwargs` with more entries, or with those alone whose names pass a test."""
        match value:
            case ast.BinOp(left=ast.Name(id=name), op=ast.BitOr(), right=ast.Dict() as more) if name in self._kwargs:
                self._visit(more)
                return True
            case ast.DictComp(
                key=ast.Name(id=key),
                value=ast.Name(id=each),
                generators=[
                    ast.comprehension(
                        target=ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)]),
                        iter=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="items")),
                        ifs=tests,
                    )
                ],
            ) if name in self._kwargs and (key, each) == (first, second):
                for test in tests:
                    self._visit(test)
                return not any(
                    isinstance(part, ast.Name) and part.id == each for test in tests for part in ast.walk(test)
                )
        return False

    def _bind(self, name: str, value: ast.expr | None) -> None:
        if name in self._kwargs:
            raise Unclear
        self.bindings.setdefault(name, []).append(value)
        if value is not None:
            self._visit(value)

    def _loop(self, node: Any, target: ast.expr, source: ast.expr) -> None:
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        for each in targets:
            if isinstance(each, ast.Name):
                self._bind(each.id, None)
                self.bindings[each.id][-1] = source
            else:
                self._visit(each)
        self._visit(source)
        rest: list[ast.AST] = [*node.body, *node.orelse] if isinstance(node, ast.For) else node.ifs
        for part in rest:
            self._visit(part)


@lru_cache(maxsize=2048)
def uses_of(code: CodeType) -> Uses:
    """Read what the function with this code does; unclear without its source."""
    try:
        source = inspect.getsource(code)
        tree: Any = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
    except (OSError, SyntaxError):
        raise Unclear from None
    found = tree.body[0].body[0] if source[:1].isspace() else tree.body[0]
    if not isinstance(found, ast.FunctionDef) or found.name != code.co_name:
        raise Unclear
    if not set(code.co_names) <= set(_WORD.findall(source)):  # a file that was changed since it was imported
        raise Unclear
    return Uses(found)


class Scope:
    """Finds what a name in a function stands for."""

    def __init__(self, function: FunctionType, uses: Uses):
        self.itself, self.bindings = uses.itself, uses.bindings
        self.enclosed = dict(_enclosed(function))
        self._globals = function.__globals__

    def value(self, name: str) -> Any:
        """The value of a name that is not local."""
        return self.enclosed.get(name, self._globals.get(name))

    def text(self, key: ast.expr) -> str | None:
        """The key that an expression is: a text, or None. Unclear for any other."""
        value: Any = key
        if isinstance(key, ast.Constant):
            value = key.value
        elif isinstance(key, ast.Name) and key.id in self.enclosed and key.id not in self.bindings:
            value = self.enclosed[key.id]
        if not isinstance(value, (str, type(None))):
            raise Unclear
        return value


def _enclosed(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a name that is bound later
            continue
