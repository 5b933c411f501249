"""Find how a layer calls its inner modules, by running its forward once on placeholders.

Modules are not run: each returns a placeholder, so the run needs no weights, no sizes and no device. What the code does
to a placeholder is not followed beyond sums: an argument that is computed is unclear, and its call is left out.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from infuse.architectures.inner_call import BIAS, CONSTANT, HIDDEN, OUTPUT, RESIDUAL, WEIGHTS, Argument, InnerCall

_PLAIN = (bool, int, float, str)
_STREAM, _COMPUTED, _REST = "<stream>", "<computed>", "rest_of_the_keywords"
_RESHAPES = frozenset({"view", "reshape", "flatten"})
_SAME = _RESHAPES | {"dropout", "contiguous", "to", "clone", "float"}  # keep a stream what it is
_SIZES = (2, 3, 8)  # of the hidden states
_WEIGHT_WORDS = ("weight", "prob", "score")


class Unclear(Exception):
    """Raised where code does with a placeholder what cannot be followed."""


class _Placeholder:
    """A value of the run. `source`: the layer's argument that it is, _STREAM, or _COMPUTED. `in_rows`: a stream was
    reshaped.
    """

    shape, dtype, device, ndim, is_cuda = torch.Size(_SIZES), torch.float32, torch.device("cpu"), 3, False

    def __init__(self, source: str, function: str = "", *, in_rows: bool = False):
        self.source, self._function, self.in_rows = source, function, in_rows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> _Placeholder:
        return _made_by(getattr(func, "__name__", ""), args[0] if args else None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(self.source, name, in_rows=self.in_rows)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function == "size":
            return torch.Size(_SIZES)[args[0]] if args else torch.Size(_SIZES)
        return _made_by(self._function, self)

    def __bool__(self) -> bool:
        return False  # a setting such as output_attentions, which is off

    def __iter__(self) -> Iterator[Any]:
        raise Unclear

    def __add__(self, other: Any) -> _Placeholder:
        return _Placeholder(_STREAM)

    __radd__ = __iadd__ = __add__

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


def _computed(self: _Placeholder, *_: Any) -> _Placeholder:
    return _Placeholder(_COMPUTED)


_OPERATORS = "mul rmul truediv rtruediv sub rsub matmul pow neg invert and or getitem lt le gt ge"
for _name in _OPERATORS.split():
    setattr(_Placeholder, f"__{_name}__", _computed)


def _made_by(function: str, given: Any) -> _Placeholder:
    is_stream = isinstance(given, _Placeholder) and given.source == _STREAM and function in _SAME
    in_rows = is_stream and (given.in_rows or function in _RESHAPES)
    return _Placeholder(_STREAM if is_stream else _COMPUTED, in_rows=in_rows)


class _Run:
    """One run of a layer's forward. `calls`: those of the `paths` found so far."""

    def __init__(self, layer: nn.Module, paths: Iterable[str]):
        self._layer, self._paths = layer, frozenset(paths)
        self.calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def go(self, *, given: bool) -> None:
        """Run the layer with all of its arguments `given`, or with those alone that have no default."""
        forward = inspect.unwrap(type(self._layer).forward)
        defaults = defaults_of(forward)
        names = [name for name in _by_name(forward)[1:] if given or defaults[name] is not None]
        rest = {_REST: _Placeholder(_REST)} if _takes_rest(forward) else {}
        try:
            self.run(self._layer, "", (_Placeholder(_STREAM),), {name: _Placeholder(name) for name in names} | rest)
        except Exception:  # code may do anything with a placeholder; what was called before is known
            return

    def run(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return inspect.unwrap(type(module).forward)(_Inside(self, module, path), *args, **kwargs)

    def called(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if path in self._paths:
            self.calls.setdefault(path, (args, kwargs))
            returns = returns_of(type(module).forward)
            if returns is None or len(returns[0]) == 1:
                return _Placeholder(_STREAM)
            return tuple(_Placeholder(_STREAM if name == OUTPUT else name) for name in returns[0])
        if any(other.startswith(f"{path}.") for other in self._paths):
            return self.run(module, path, args, kwargs)
        return _Placeholder(_STREAM)


class _Inside:
    """Stands for `module`: its modules are called through the run, and everything else is the module's own."""

    def __init__(self, run: _Run, module: nn.Module, path: str):
        self._run, self._module, self._path = run, module, path

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        return self._inside(name, getattr(self._module, name))

    def __getitem__(self, index: int) -> Any:
        children: Any = self._module
        return self._inside(str(index % len(children)), children[index])

    def __len__(self) -> int:
        children: Any = self._module
        return len(children)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.called(self._module, self._path, args, kwargs)

    def _inside(self, name: str, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return _Inside(self._run, value, f"{self._path}.{name}" if self._path else name)
        if isinstance(value, MethodType) and value.__self__ is self._module:
            return MethodType(inspect.unwrap(value.__func__), self)
        return value


def inner_calls(layer: nn.Module, paths: Iterable[str]) -> dict[str, InnerCall]:
    """Find how the layer calls its modules at these paths; those that are unclear are left out."""
    run = _Run(layer, paths)
    run.go(given=True)
    run.go(given=False)  # for those behind modules that this layer has not
    defaults = defaults_of(inspect.unwrap(type(layer).forward))
    found = {path: _call(layer.get_submodule(path), path, *call, defaults) for path, call in run.calls.items()}
    return {path: call for path, call in found.items() if call is not None}


def in_rows(layer: nn.Module, path: str) -> bool:
    """Whether the layer reshapes its hidden states before it calls its module at this path."""
    run = _Run(layer, (path,))
    run.go(given=True)
    args, kwargs = run.calls.get(path, ((), {}))
    return any(isinstance(value, _Placeholder) and value.in_rows for value in (*args, *kwargs.values()))


def defaults_of(forward: Callable[..., Any]) -> dict[str, Any]:
    """The default of each parameter, None for those that have none."""
    parameters = inspect.signature(forward).parameters.items()
    return {name: None if each.default is each.empty else each.default for name, each in parameters}


def _call(
    module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], defaults: dict[str, Any]
) -> InnerCall | None:
    parameters, returns = _by_name(inspect.unwrap(type(module).forward)), returns_of(type(module).forward)
    if returns is None or len(args) > len(parameters):
        return None
    rest = kwargs.pop(_REST, None) is not None
    passed = [(name, value, False) for name, value in zip(parameters, args, strict=False)]
    passed += [(name, value, True) for name, value in kwargs.items()]
    arguments = [_argument(name, value, by_name, parameters[0], defaults) for name, value, by_name in passed]
    known = tuple(argument for argument in arguments if argument is not None)
    if len(known) < len(arguments) or all(argument.source != HIDDEN for argument in known):
        return None
    elements, alone, always = returns
    return InnerCall(
        path, known, parameters, elements, alone, rest, frozenset(defaults), always_weights=always and not alone
    )


def _argument(name: str, value: Any, by_name: bool, first: str, defaults: dict[str, Any]) -> Argument | None:
    if value is None or isinstance(value, _PLAIN):
        return Argument(name, CONSTANT, by_name, value)
    source = value.source if isinstance(value, _Placeholder) else _COMPUTED
    if source == _STREAM and name in (first, RESIDUAL.strip("<>")):
        return Argument(name, HIDDEN if name == first else RESIDUAL, by_name)
    return Argument(name, source, by_name, defaults[source]) if source in defaults else None


def _by_name(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters of a forward but for `self`, `*args` and `**kwargs`."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))


def _takes_rest(forward: Callable[..., Any]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(forward).parameters.values())


@lru_cache(maxsize=512)
def returns_of(forward: Callable[..., Any]) -> tuple[tuple[str, ...], bool, bool] | None:
    """Read in the source of a forward what it returns: the elements, whether one is returned alone, and whether weights
    are computed always. None if unclear.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))
    except (OSError, TypeError):
        return None
    nodes = list(_of_itself(ast.parse(source).body[0]))
    values = [node.value for node in nodes if isinstance(node, ast.Return)]
    found = {_elements(value) for value in values}
    elements = found.pop() if len(found) == 1 else None
    assigned = [pair for node in nodes for pair in _assigned(node)]
    tuples = {name for name, value in assigned if _holds_tuple(value)}
    if elements is None or any(isinstance(value, ast.Name) and value.id in tuples for value in values):
        return None
    unsure = {name for name, value in assigned if value is None or _is_none(value)}
    weights = [each for value in values for each in getattr(value, "elts", ()) if _element(each) == WEIGHTS]
    always = bool(weights) and all(isinstance(each, ast.Name) and each.id not in unsure for each in weights)
    return *elements, always


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """The names that a statement assigns, each with its value; None for a part of one."""
    if not isinstance(node, (ast.Assign, ast.AugAssign)):
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        for each in ast.walk(target):
            if isinstance(each, ast.Name):
                yield each.id, node.value if each is target else None


def _holds_tuple(value: ast.expr | None) -> bool:
    if not isinstance(value, (ast.Tuple, ast.BinOp, ast.IfExp)):
        return False
    return any(isinstance(each, ast.Tuple) for each in ast.walk(value))


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _of_itself(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, (ast.FunctionDef, ast.Lambda)):
            yield child
            yield from _of_itself(child)


def _elements(value: ast.expr | None) -> tuple[tuple[str, ...], bool] | None:
    if not isinstance(value, ast.Tuple):
        return ((OUTPUT,), True)
    names = [_element(each) for each in value.elts[1:]]
    return None if None in names else ((OUTPUT, *map(str, names)), False)


def _element(value: ast.expr) -> str | None:
    if _is_none(value):
        return WEIGHTS
    name = value.id if isinstance(value, ast.Name) else ""
    if any(word in name for word in _WEIGHT_WORDS):
        return WEIGHTS
    return BIAS if "bias" in name else None
