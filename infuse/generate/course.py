"""The course of a step through a model: which modules are called, and where each of their arguments comes from.

Recorded by hooks on these modules during one call of the model; run by calling them one after the other, without what
is around them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Where an argument comes from: the number of a value, or a tuple of such. Numbered are what the step is given, the
# constants, the outputs of the calls and, of an output that is a tuple, its elements.
_Source = Any
_CONSTANTS = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Call:
    """`output` is the number of what it returns; `taken` are the elements of that which are used: (number, place)."""

    module: nn.Module
    args: tuple[_Source, ...]
    kwargs: tuple[tuple[str, _Source], ...]
    output: int
    taken: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Course:
    """`constants` are (number, type, value); equal courses differ in nothing but what they are given."""

    calls: tuple[Call, ...]
    constants: tuple[tuple[int, type, Any], ...]
    size: int

    def run(self, *given: Any) -> Any:
        """What the last call returns."""
        values: list[Any] = [None] * self.size
        values[: len(given)] = given
        for number, _, value in self.constants:
            values[number] = value
        output = None
        for call in self.calls:
            args = [values[at] if type(at) is int else _gathered(at, values) for at in call.args]
            kwargs = {name: values[at] if type(at) is int else _gathered(at, values) for name, at in call.kwargs}
            values[call.output] = output = call.module(*args, **kwargs)
            for number, place in call.taken:
                values[number] = output[place]
        return output


def _gathered(source: _Source, values: list[Any]) -> Any:
    return values[source] if type(source) is int else tuple([_gathered(at, values) for at in source])


class Record:
    """The hooks that note a course; `given` are the values that it starts from."""

    def __init__(self, *given: Any):
        self._values: list[Any] = []  # kept, so that no other tensor comes to lie where one of them was
        self._numbers: dict[tuple, int] = {}  # of tensors, tuples and what is given
        self._constants: dict[tuple[type, Any], int] = {}
        self._copies: dict[int, Tensor] = {}  # of tensors, as they were when they came: they may be changed in place
        self._calls: list[tuple[nn.Module, tuple[_Source, ...], tuple[tuple[str, _Source], ...], int]] = []
        self._elements: dict[
            int, list[tuple[int, int]]
        ] = {}  # of an output that is a tuple: each element's number and place
        self._used: set[int] = set()
        self._is_known, self._depth = True, 0
        self._thread: int | None = threading.get_ident()
        self._args: tuple[_Source, ...] = ()
        self._kwargs: tuple[tuple[str, _Source], ...] = ()
        for value in given:
            self._add(value)

    def close(self) -> None:
        """Note nothing from now on."""
        self._thread = None

    # Calls on other threads are not of this step; one that runs while the hooks are taken off may call them without
    # keywords.

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        """Forward pre-hook, with keywords, before all others."""
        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        if self._depth == 1 and self._is_known:
            assert kwargs is not None
            self._args = tuple(map(self._source, args))
            self._kwargs = tuple((name, self._source(value)) for name, value in kwargs.items())

    def after(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Forward hook, after all others."""
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if self._depth or not self._is_known:
            return
        number = self._add(output, type(output) in (Tensor, tuple))
        if type(output) is tuple:
            self._elements[number] = [
                (self._add(one, type(one) in (Tensor, tuple)), place) for place, one in enumerate(output)
            ]
        self._calls.append((module, self._args, self._kwargs, number))

    def course(self, result: Any) -> Course | None:
        """The course to `result`; None where it takes more than these calls."""
        end = self._source(result)
        if not self._is_known or not self._calls or end != self._calls[-1][-1]:
            return None
        calls = []
        for module, args, kwargs, output in self._calls:
            taken = [element for element in self._elements.get(output, ()) if element[0] in self._used]
            calls.append(Call(module, args, kwargs, output, tuple(taken)))
        constants = ((number, *key) for key, number in self._constants.items())
        return Course(tuple(calls), tuple(constants), len(self._values))

    def _add(self, value: Any, is_known: bool = True) -> int:
        self._values.append(value)
        number = len(self._values) - 1
        if is_known:
            self._numbers[_key(value)] = number
        if type(value) is Tensor:
            self._copies[number] = value.clone()
        return number

    def _source(self, given: Any) -> _Source:
        """Where an argument comes from. From nowhere: the course is not known."""
        if type(given) in _CONSTANTS:
            key = type(given), given
            if key not in self._constants:
                self._constants[key] = self._add(given, is_known=False)
            return self._constants[key]
        number = self._numbers.get(_key(given))
        if number is not None and type(given) is Tensor:
            known = self._values[number]
            alike = known.stride() == given.stride() or (known.is_contiguous() and given.is_contiguous())
            number = number if alike and torch.equal(self._copies[number], given) else None
        elif type(given) is tuple:
            inside = tuple(map(self._source, given))  # also of a known one: its tensors may have been changed
            if number is None:
                return inside
        self._is_known = self._is_known and number is not None
        self._used.add(number)  # type: ignore[arg-type]
        return number


def _key(value: Any) -> tuple:
    """Equal for tensors of one shape that lie at one place, and for nothing else but the same object."""
    if type(value) is Tensor:
        return value.data_ptr(), value.shape, value.dtype
    return (id(value),)
