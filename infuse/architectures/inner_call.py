"""InnerCall: how a layer calls one of its modules, and what that returns. Data only; `reading/inner_calls` finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Sources of an argument that no caller of the layer names: what the module works on, the stream to which it adds its
# result itself, and a value that is always the same.
HIDDEN, RESIDUAL, CONSTANT = "<hidden>", "<residual>", "<constant>"
# What a module returns.
OUTPUT, WEIGHTS, BIAS = "output", "weights", "bias"


@dataclass(frozen=True)
class Argument:
    """`name` in the module's forward, `by_name` if it is passed as a keyword. `source`: the layer's argument, or one of
    those above; `value`: the constant, or the default of the layer's argument.
    """

    name: str
    source: str
    by_name: bool
    value: Any = None


@dataclass(frozen=True)
class InnerCall:
    """A call of the module at `path` in the layer.

    `rest`: it also gets each keyword of the layer that is not in `taken`, the layer's own arguments. `parameters`: what
    the module's forward takes by position. `returns`: the elements of the tuple that it returns; `alone`: it returns
    the one element itself. `unfinished`: the layer does to its output what the part in its place does itself.
    `over`: the layer's argument with the states that it attends to. `always_weights`: it returns them also if nobody
    asks.
    """

    path: str
    arguments: tuple[Argument, ...]
    parameters: tuple[str, ...]
    returns: tuple[str, ...]
    alone: bool = False
    rest: bool = False
    taken: frozenset[str] = frozenset()
    unfinished: bool = False
    over: str = ""
    always_weights: bool = False

    @property
    def is_nested(self) -> bool:
        """Whether the module is inside of another one of the layer."""
        return "." in self.path

    @property
    def adds_residual(self) -> bool:
        return any(argument.source == RESIDUAL for argument in self.arguments)

    def passed(self, hidden: Any, residual: Any, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the call, from those `given` to the layer by name."""
        own = {HIDDEN: hidden, RESIDUAL: residual}
        args, kwargs = list[Any](), dict[str, Any]()
        for each in self.arguments:
            value = own[each.source] if each.source in own else given.get(each.source, each.value)
            if each.by_name:
                kwargs[each.name] = value
            else:
                args.append(value)
        if self.rest:
            kwargs |= {name: value for name, value in given.items() if name not in self.taken}
        return args, kwargs

    def received(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """The inverse of `passed`: what the module works on, the stream that it adds to, and the layer's arguments."""
        if len(args) > len(self.parameters):
            raise TypeError(f"{self.path} takes {len(self.parameters)} positional arguments, {len(args)} were given")
        values = dict(zip(self.parameters, args, strict=False))
        if twice := values.keys() & kwargs:
            raise TypeError(f"{self.path} got multiple values for argument {min(twice)!r}")
        values |= kwargs
        own = dict[str, Any]()
        given = dict[str, Any]()
        for each in self.arguments:
            if each.name not in values:
                continue
            value = values.pop(each.name)
            if each.source in (HIDDEN, RESIDUAL):
                own[each.source] = value
            elif each.source != CONSTANT:
                given[each.source] = value
            elif value is not each.value:
                given[each.name] = value
        if HIDDEN not in own:
            raise TypeError(f"{self.path} was called without {self.hidden_name}")
        return own[HIDDEN], own.get(RESIDUAL), given | values

    @property
    def hidden_name(self) -> str:
        return next(each.name for each in self.arguments if each.source == HIDDEN)

    def returned(self, output: Any, weights: Sequence[Any], bias: Any) -> Any:
        """Make the result of the module. `weights`: one or, of tokens and of states, two."""
        if self.alone:
            return output
        each = iter(weights)
        return tuple(
            next(each, None) if name == WEIGHTS else output if name == OUTPUT else bias for name in self.returns
        )

    def taken_from(self, returned: Any) -> tuple[Any, Any, Any]:
        """Output, weights and bias in what the module, or a hook on it, returned."""
        if not isinstance(returned, (tuple, list)):
            return returned, None, None
        of = dict(zip(reversed(self.returns), reversed(returned), strict=True))  # the first of several weights
        return of[OUTPUT], of.get(WEIGHTS), of.get(BIAS)
