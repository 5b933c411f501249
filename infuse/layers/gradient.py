"""Replaced layers compute no gradients, apply no dropout and fix their settings; violations raise or warn.

A call that autograd would record runs unrecorded, and a backward pass that reaches its result raises UnsupportedCall.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from infuse.ground.errors import WAY_BACK, UnsupportedCall
from infuse.layers.replaced import Replaced, WasReplaced

PLAIN = (bool, int, float, str)
_HELD = ("_parameters", "_buffers", "_modules")
_INSTEAD = f"{WAY_BACK}, adapters around them included: train these, and call init_inference again"

_REFUSED = f"{{}} was replaced by infuse, which computes no gradients; {_INSTEAD}"


class _AnyPath:
    """Has every attribute: itself."""

    def __getattr__(self, name: str) -> _AnyPath:
        if name == "_fqn_modifiers":
            raise AttributeError(name)
        return self


class _AnyName(dict[str, str]):
    """Maps every name to the attribute of `Settled` that has every path."""

    def get(self, name: str, default: Any = None) -> str:
        return "_any_path"


class Settled(nn.Module):
    """A module that refuses new values for attributes that were read when it was built.

    `settled`: names of such attributes of the original, e.g. `top_k`. Assigning another value raises UnsupportedCall,
    because nothing would read it. `followed`: those of which new values count. `_replaced` tells what stood in its
    place; what is gone cannot be assigned either.
    """

    settled: frozenset[str] = frozenset()
    followed: frozenset[str] = frozenset()
    _replaced: Replaced | None = None
    _any_path = _AnyPath()

    def _fqn_modifiers(self) -> dict[str, str]:
        """Let torch.distributed.checkpoint resolve names of the state dict, which are no paths of attributes here."""
        return _AnyName()

    def __getattr__(self, name: str) -> Any:
        """As nn.Module's, which takes as long. The error says where the modules of a replaced layer went."""
        own = self.__dict__
        for kind in _HELD:
            held = own.get(kind)
            if held is not None and name in held:
                return held[name]
        text, replaced = f"{type(self).__name__!r} object has no attribute {name!r}", self._replaced
        if replaced is not None and name in replaced.names:
            raise WasReplaced(f"{text}: {replaced.told(name)}")
        raise AttributeError(text)

    def __getitem__(self, index: Any) -> Any:
        """Raise TypeError: what was a list may be one no more."""
        text, replaced, name = f"{type(self).__name__!r} object is not subscriptable", self._replaced, str(index)
        raise TypeError(f"{text}: {replaced.told(name)}" if replaced and name in replaced.names else text)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.settled:
            setting = vars(self).get(name)
            if value is not setting and not (isinstance(value, PLAIN) and value == setting):
                raise UnsupportedCall(
                    f"{type(self).__name__}.{name} = {value!r}: this layer was replaced while {name} was {setting!r}, "
                    f"and computes with that; {WAY_BACK}: set it there, then call init_inference"
                )
        replaced = None if name in self.followed else self._replaced
        if replaced is not None and name in replaced.names and not any(name in vars(self)[kind] for kind in _HELD):
            if vars(self).get(name) is value:
                return
            raise UnsupportedCall(f"{type(self).__name__}.{name} = ...: nothing would read it: {replaced.told(name)}")
        super().__setattr__(name, value)


class InferenceModule(Settled):
    """Base class of replaced modules. `train()` warns on the one module that has `warns_of_training` set."""

    warns_of_training = False

    def train(self, mode: bool = True) -> Any:
        if mode and not self.training and self.warns_of_training:
            what = "train(): replaced layers apply no dropout and compute no gradients"
            warnings.warn(f"infuse: {what}; {_INSTEAD}", stacklevel=2)
        return super().train(mode)


def is_recorded(module: nn.Module, x: Tensor) -> bool:
    """Whether autograd would record this call in the original. Ask only if `torch.is_grad_enabled()`."""
    return is_differentiated(x) or any(parameter.requires_grad for parameter in module.parameters())


def is_differentiated(x: Tensor) -> bool:
    """Whether autograd tracks x, in backward or forward mode."""
    return x.requires_grad or _has_tangent(x)


def _has_tangent(x: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _refuse_tangent(x: Tensor, name: str) -> None:
    if not torch.compiler.is_compiling() and _has_tangent(x):
        raise UnsupportedCall(f"forward-mode differentiation: {_REFUSED.format(name)}")


def unrecorded(forward: Callable[..., Any], module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call forward(module, x, ...) unrecorded; a backward pass that reaches the result raises UnsupportedCall."""
    name = type(module).__name__
    _refuse_tangent(x, name)
    with torch.no_grad():
        result = forward(module, x, *args, **kwargs)
    if isinstance(result, tuple):
        return tuple(refusing(part, x, name) if isinstance(part, Tensor) else part for part in result)
    return refusing(result, x, name)


def refusing(result: Tensor, x: Tensor, name: str) -> Tensor:
    """Make the backward pass of `result`, which was computed from `x`, raise UnsupportedCall for the module `name`."""
    if torch.compiler.is_compiling():  # a traced graph can neither inspect views nor create leaves
        return _Refusal.apply(result.clone(), x, None, name)
    _refuse_tangent(x, name)
    if result._is_view() or result is x:  # a view returned by a Function could not be changed in place
        result = result.clone()
    requires_grad = torch.empty(0, requires_grad=True)  # so that the result requires a gradient, whether or not x does
    return _Refusal.apply(result, x, requires_grad, name)


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(result: Tensor, x: Tensor, recorded: Tensor | None, name: str) -> Tensor:  # type: ignore[override]
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:  # apart from forward, for torch.func
        ctx.name = inputs[3]
        ctx.mark_dirty(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        refused = torch.ops.infuse.refuse_backward(grad, ctx.name)
        return None, refused, None, None


def _refuse(grad: Tensor, name: str) -> Tensor:
    raise UnsupportedCall(f"backward(): {_REFUSED.format(name)}")


# An op, so that torch.compile traces the backward pass without running it. It raises when it runs.
_LIBRARY = torch.library.Library("infuse", "FRAGMENT")
_LIBRARY.define("refuse_backward(Tensor grad, str name) -> Tensor")
_LIBRARY.impl("refuse_backward", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake("infuse::refuse_backward", lambda grad, name: torch.empty_like(grad), lib=_LIBRARY)
