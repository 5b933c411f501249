"""Find the keywords that a layer takes and never reads, in the source of all that a call of it runs.

A keyword reaches other functions under its own name: in `**kwargs`, or as `name=name`. It counts as read where a
parameter of that name is used for anything else, or where a function looks it up in its `kwargs`. Where a function does
more with its `kwargs`, or hands them to something that is not known, no keyword counts as unread.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import nn

from infuse.architectures.layer import NOTHING_UNREAD, Unread
from infuse.ground.authors import package_of, with_wrapped, words_of
from infuse.reading.uses import Scope, Unclear, uses_of

_PLAIN = (bool, int, float, str, type(None), torch.Tensor, torch.dtype)
_OF_MODULES = frozenset(vars(nn.Module()))
_BASES = (nn.Module, object)
_CALLED = ("forward", "__call__", "_call_impl")  # what runs when a module is called
_OF_TRAINING = "transformers.modeling_layers"  # what it reads, it reads to recompute layers in training alone
_LOOKED_UP = ("__getattr__", "__getattribute__")
_LISTS = frozenset({"enumerate", "zip", "reversed", "list", "tuple"})  # through which a loop over modules may go


def unread_by(layer: nn.Module) -> Unread:
    """The keywords that a layer takes and never reads."""
    inside = list(layer.modules())
    if any("forward" in vars(module) for module in inside):
        return NOTHING_UNREAD
    cls: Any = type(layer)
    return _unread(cls, frozenset(map(_Class.of, inside)))


@dataclass(frozen=True)
class _Class:
    """The class of a module, the names of its children, and of attributes that may hold other modules or functions."""

    cls: Any
    children: frozenset[str]
    others: frozenset[str]

    @staticmethod
    def of(module: nn.Module) -> _Class:
        others = (
            name for name, value in vars(module).items() if name not in _OF_MODULES and not isinstance(value, _PLAIN)
        )
        return _Class(type(module), frozenset(module._modules), frozenset(others))


@lru_cache(maxsize=256)
def _unread(cls: Any, inside: frozenset[_Class]) -> Unread:
    try:
        reads = _Reads(inside)
    except Unclear:
        return NOTHING_UNREAD
    parameters = inspect.signature(cls.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    plain = frozenset(reads.found)
    return Unread(frozenset(parameters), takes_any, plain | reads.of_attention, plain, reads.to_cache)


class _Reads:
    """Find what a call of a layer may read that has modules of these classes `inside`.

    `found`: keywords, maybe with more than are read; of the functions that a config may name for its attention, sdpa's
    alone. `of_attention`: those of all these functions, which get what a layer hands on. `to_cache`: a cache gets all
    keywords.
    """

    def __init__(self, inside: Iterable[_Class]):
        self._attention = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
        self.found, self.of_attention = set(_words_below(self._attention["sdpa"])), _words_of(self._attention.values())
        self.to_cache = False
        self._classes = {each.cls for each in inside}
        self._children = frozenset[str]().union(*(each.children for each in inside))
        self._others = {(each.cls, name) for each in inside for name in each.others}
        self._seen = set[tuple[Any, FunctionType]]()
        self._waiting = list[tuple[Any, FunctionType]]()
        for cls in self._classes:
            if any(name in vars(kind) for kind in cls.__mro__ if kind not in _BASES for name in _LOOKED_UP):
                raise Unclear
            for name in _CALLED:
                self._add_method(cls, name)
        while self._waiting:
            owner, function = self._waiting.pop()
            if (owner, function) not in self._seen:
                self._seen.add((owner, function))
                self._follow(owner, function)

    def _add_method(self, cls: Any, name: str) -> bool:
        """Follow the methods of this name of a class and its bases. Return whether there are any."""
        kinds = [kind for kind in cls.__mro__ if name in vars(kind) and kind not in _BASES]
        for kind in kinds:
            value = vars(kind)[name]
            value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if package_of(kind) == "torch":
                self._add_parameters(value)
            else:
                self._add(cls, value)
        return bool(kinds)

    def _add_parameters(self, function: Any) -> None:
        parameters = inspect.signature(function).parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            raise Unclear
        self.found.update(each.name for each in parameters)

    def _add(self, owner: Any, value: Any) -> None:
        found = [each for each in with_wrapped(value) if isinstance(each, FunctionType)]
        if not found:
            raise Unclear
        self._waiting += [(owner, function) for function in found]

    def _follow(self, owner: Any, function: FunctionType) -> None:
        """Note what a function reads, and follow what it hands keywords to."""
        uses = uses_of(function.__code__)
        scope = Scope(function, uses)
        self.to_cache |= uses.to_cache
        if function.__globals__.get("__name__") != _OF_TRAINING:
            self.found |= uses.loaded | {text for key in uses.asked if (text := scope.text(key)) is not None}
        for callee in uses.callees:
            self._hand(owner, scope, callee, frozenset())
        for name, callee in uses.handed:
            try:
                self._hand(owner, scope, callee, frozenset())
            except Unclear:
                self.found.add(name)

    def _hand(self, owner: Any, scope: Scope, callee: ast.expr, through: frozenset[str]) -> None:
        """Follow all that an expression may be which is called with keywords. Unclear if that is not known.

        `through`: names that led to it.
        """
        match callee:
            case ast.Name(id=name):
                self._hand_name(owner, scope, name, through)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=method) if owner is not None:
                if not self._add_method(owner, method):
                    raise Unclear
            case ast.Attribute(value=ast.Name(id=name), attr=method) if name == scope.itself and owner is not None:
                if (owner, method) in self._others:
                    raise Unclear
                self._add_method(owner, method)  # else a child; a module that has neither does not come here
            case ast.IfExp(body=body, orelse=other):
                self._hand(owner, scope, body, through)
                self._hand(owner, scope, other, through)
            case ast.Call() | ast.Subscript() | ast.Attribute():
                self._hand_result(owner, scope, callee, through)
            case _:
                raise Unclear

    def _hand_name(self, owner: Any, scope: Scope, name: str, through: frozenset[str]) -> None:
        if name in scope.bindings:
            for value in scope.bindings[name]:
                if value is None:
                    raise Unclear
                if name not in through:
                    self._hand(owner, scope, value, through | {name})
            return
        value = scope.value(name)
        if not isinstance(value, FunctionType):
            raise Unclear
        self._add(owner if name in scope.enclosed else None, value)

    def _hand_result(self, owner: Any, scope: Scope, callee: ast.expr, through: frozenset[str]) -> None:
        """Follow what is looked up in a registry of functions, or among a module's children."""
        match callee:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="get_interface"), args=[_, *others]):
                self._look_up(scope, name)
                for each in others:
                    self._hand(owner, scope, each, through)
            case ast.Subscript(value=ast.Name(id=name)) if name not in scope.bindings:
                self._look_up(scope, name)
            case ast.Call(func=ast.Name(id=name), args=args) if name in _LISTS:
                for each in args:
                    self._hand(owner, scope, each, through)
            case ast.Call(func=ast.Attribute(value=inner, attr="__get__")) | ast.Subscript(value=inner):
                self._hand(owner, scope, inner, through)
            case ast.Attribute(value=inner, attr=method):
                self._hand(owner, scope, inner, through)
                followed = [cls for cls in self._classes if self._add_method(cls, method)]
                is_unknown = method not in self._children and not followed
                if is_unknown or any((cls, method) in self._others for cls in self._classes):
                    raise Unclear
            case _:
                raise Unclear

    def _look_up(self, scope: Scope, name: str) -> None:
        """Note what all functions of a registry may read."""
        registry = None if name in scope.bindings else scope.value(name)
        functions = list(registry.values()) if isinstance(registry, Mapping) else []
        if not functions or any(isinstance(function, type) for function in functions):
            raise Unclear
        if registry is not self._attention:
            self.found |= _words_of(functions)


def _words_of(functions: Iterable[Any]) -> frozenset[str]:
    return frozenset[str]().union(*map(_words_below, functions))


def _words_below(function: Any) -> frozenset[str]:
    """All words and parameters of a function, and of those that it names, of the same package."""
    waiting, seen, found = [function], set[FunctionType](), set[str]()
    while waiting:
        new = {each for each in with_wrapped(waiting.pop()) if isinstance(each, FunctionType)} - seen
        seen |= new
        for each in new:
            code = each.__code__
            words = {*words_of(each), *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
            found |= words
            named = (each.__globals__.get(word) for word in words)
            functions = [value for value in named if isinstance(value, FunctionType)]
            waiting += [value for value in functions if _package(value) == _package(each)]
    return frozenset(found)


def _package(function: FunctionType) -> str:
    return function.__module__.partition(".")[0]
