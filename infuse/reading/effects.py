"""What a layer's code reads or changes outside of its modules and arguments, which no graph shows."""

from __future__ import annotations

import dis
import re
from collections import UserDict, UserList, deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from infuse.ground.authors import package_of, with_wrapped

INDEX_NAMES = frozenset({"layer_idx", "layer_id", "layer_number"})  # transformers' names for a layer's index
_MODULES = frozenset({"random", "time", "os", "datetime", "secrets", "uuid", "numpy.random", "threading"})
# Questions about how a call is made, to which the trace of a layer has other answers than later calls, and settings.
_ASKS = frozenset({
    "is_grad_enabled", "is_inference_mode_enabled", "is_inference", "is_compiling", "is_exporting",
    "is_dynamo_compiling", "is_tracing", "is_scripting", "initial_seed", "manual_seed", "perf_counter",
    "requires_grad", "is_cuda", "is_cpu", "is_meta", "set_default_dtype", "set_default_device", "set_num_threads",
})  # fmt: skip
_CALLS = frozenset({"print", "input", "open", "type", "id", "setattr", "globals", "vars"})
_NO_STEPS = frozenset({"CACHE", "NOP", "PRECALL", "KW_NAMES", "EXTENDED_ARG", "PUSH_NULL", "NOT_TAKEN"})
_CALLED_BY = ("__call__", "_call_impl", "__getattr__", "__getattribute__")  # what runs around every forward
_DEVICES = frozenset({"cpu", "cuda", "meta"})
_HOLD = (list, tuple, dict, set, frozenset, deque)
_DEEPEST = 5
_AROUND = re.compile(r"torch\.|transformers\.(?!models\.)")  # modules of code around all layers


def outside_reads(layer: nn.Module) -> Iterator[str]:
    """What the forwards of the layer's modules, and the functions that they call in their files, read or change."""
    for cls in dict.fromkeys(type(module) for module in layer.modules()):
        for kind in cls.__mro__:
            if kind not in (nn.Module, object) and not _AROUND.match(kind.__module__):
                yield from (f"{kind.__name__} has its own `{name}`" for name in _CALLED_BY if name in vars(kind))
    for function in _reached(layer):
        yield from _found(function, function.__code__)


def reads_index(layer: nn.Module) -> bool:
    """Whether code of the layer may compute with its index, and not only say where it appends to a cache."""
    return any(_computes_with_index(function.__code__) for function in _reached(layer))


def _computes_with_index(code: CodeType) -> bool:
    """Whether code does more with an index than `cache.update(keys, values, index)` does."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _NO_STEPS]
    called = ""  # the method whose arguments are being loaded
    for place, step in enumerate(steps):
        is_load = step.opname.startswith("LOAD_")
        if step.opname == "LOAD_METHOD" or (step.opname == "LOAD_ATTR" and "NULL" in step.argrepr):
            called = step.argval
        elif not is_load:
            called = ""
        elif _is_index(step.argval):
            following = next((other.opname for other in steps[place:] if not other.opname.startswith("LOAD_")), "")
            if called != "update" or not following.startswith("CALL"):
                return True
    return any(_computes_with_index(inner) for inner in code.co_consts if isinstance(inner, CodeType))


def _is_index(name: Any) -> bool:
    return not INDEX_NAMES.isdisjoint(name if isinstance(name, tuple) else (name,))


def code_of(layer: nn.Module) -> tuple[Any, ...]:
    """The code that a call of the layer may run, besides that of libraries around it, and constants that it names."""
    return tuple((function.__code__, *_constants(function)) for function in _reached(layer))


def _constants(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Globals that a function names: numbers, words, and the code of functions from other files."""
    for name in _names(function):
        value = function.__globals__.get(name)
        if isinstance(value, (bool, int, float, str)):
            yield name, value
        elif isinstance(value, FunctionType):
            yield name, value.__code__


def containers(layer: nn.Module) -> dict[str, Any]:
    """Lists, dicts, sets, and what counts on, of the layer's files, or around its functions, that its code names."""
    named = [(name, function.__globals__.get(name)) for function in _reached(layer) for name in _names(function)]
    named += [pair for function in _reached(layer) for pair in _enclosed(function)]
    return {name: value for name, value in named if isinstance(value, (*_HOLD, Iterator)) and not callable(value)}


def _names(function: FunctionType) -> tuple[str, ...]:
    return function.__code__.co_names


def _reached(layer: nn.Module) -> Iterator[FunctionType]:
    """The forwards of the layer's modules, and what they call: methods, and functions of their own files."""
    seen: set[CodeType] = set()
    for cls in dict.fromkeys(type(module) for module in layer.modules()):
        if package_of(cls) == "torch":
            continue
        waiting = _functions(getattr(cls, "forward", None))
        while waiting:
            function = waiting.pop()
            if function.__code__ not in seen and not _AROUND.match(function.__globals__.get("__name__", "")):
                seen.add(function.__code__)
                yield function
                waiting += _called(cls, function)


def _functions(value: Any) -> list[FunctionType]:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return [function for function in with_wrapped(value) if isinstance(function, FunctionType)]


def _called(cls: type, function: FunctionType) -> list[FunctionType]:
    """The methods of the class and the functions of its file that a function names."""
    found: list[FunctionType] = []
    for name in _names(function):
        methods = _functions(getattr(cls, name, None)) if not hasattr(nn.Module, name) else []
        own = [each for each in _functions(function.__globals__.get(name)) if each.__module__ == function.__module__]
        found += [*methods, *own]
    inside = [one for _, value in _enclosed(function) for one in _functions(value)]
    return found + [one for one in inside if one.__module__ == function.__module__]


def _enclosed(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Names that a function has from the one around it, with their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a name that is bound later
            yield name, cell.cell_contents


def _found(function: FunctionType, code: CodeType) -> Iterator[str]:
    line, before = code.co_firstlineno, None
    for step in dis.get_instructions(code):
        line = getattr(step, "line_number", None) or (
            step.starts_line if step.starts_line not in (None, True, False) else line
        )
        if what := _reads(function, step) or _compares_device(step, before):
            yield f"{what} at {Path(code.co_filename).name}:{line}"
        before = step
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _found(function, inner)


def _compares_device(step: dis.Instruction, before: dis.Instruction | None) -> str:
    """What an instruction asks if it compares with the name of a device, of which a trace has another than a call."""
    if before is None or not step.opname.startswith(("COMPARE_OP", "CONTAINS_OP")):
        return ""
    names = before.argval if isinstance(before.argval, (tuple, frozenset)) else (before.argval,)
    return "asks for the device" if before.opname.startswith("LOAD_CONST") and not _DEVICES.isdisjoint(names) else ""


def _reads(function: FunctionType, step: dis.Instruction) -> str:
    """What an instruction reads or changes that a graph does not show; empty for any other."""
    name = step.argval
    if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
        return f"keeps state: sets the global `{name}`"
    if step.opname == "STORE_DEREF" and name in function.__code__.co_freevars:
        return f"keeps state: sets `{name}` around it"
    if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
        return f"keeps state: sets `{name}`"
    if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and value.__name__ in _MODULES:
            return f"reads `{name}`, which is no argument"
        if name in _CALLS and value is None:
            return f"calls `{name}`"
    is_attribute = step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL"))
    return f"asks `{name}`" if isinstance(name, str) and name in _ASKS and is_attribute else ""


class _Same:
    """Equal to nothing but the same object."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value


Attributes = dict[tuple[str, str], Any]


def attributes(layer: nn.Module, *more: tuple[str, Any]) -> Attributes:
    """What every attribute of every module holds, and `more` values by name."""
    named = [((path, name), value) for path, module in layer.named_modules() for name, value in vars(module).items()]
    named += [((name, "of its file"), value) for name, value in more]
    return {key: _held(value) for key, value in named}


def changed(before: Attributes, after: Attributes) -> list[str]:
    """The names of attributes that hold something else now."""
    others = [key for key, value in after.items() if key not in before or value != before[key]]
    others += [key for key in before if key not in after]
    return [".".join(part for part in key if part) for key in others]


def _held(value: Any, depth: int = 0) -> Any:
    """What a value holds, to be compared with what it holds later. An iterator is never as it was."""
    if isinstance(value, (bool, int, float, str, bytes)):
        return type(value), value
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(value)
    if isinstance(value, (UserDict, UserList)):
        return type(value), _held(value.data, depth)
    if isinstance(value, Iterator):
        return object() if not isinstance(value, count) else repr(value)
    if not isinstance(value, _HOLD) or depth > _DEEPEST:
        return _Same(value)
    return type(value), [_held(one, depth + 1) for one in (value.items() if isinstance(value, dict) else value)]
