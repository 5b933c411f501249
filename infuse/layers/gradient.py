"""Gradients and training: replaced layers compute no gradients and apply no dropout, and say so where someone asks for
either.

A call that would be recorded runs without recording, and its result raises when a backward pass reaches it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from infuse.errors import UnsupportedCall

_INSTEAD = "train an unreplaced copy of the model, adapters included, and call init_inference on it after training"


class InferenceModule(nn.Module):
    """A module that is put in: `train()` warns, by the one that the engine chose to speak for all."""

    warns_of_training = False

    def train(self, mode: bool = True) -> Any:
        if mode and not self.training and self.warns_of_training:
            what = "train(): replaced layers apply no dropout and compute no gradients"
            warnings.warn(f"infuse: {what}; {_INSTEAD}", stacklevel=2)
        return super().train(mode)


def is_recorded(module: nn.Module, x: Tensor) -> bool:
    """Whether the original would record this call for a backward pass. Ask only where `torch.is_grad_enabled()`."""
    return x.requires_grad or any(parameter.requires_grad for parameter in module.parameters())


def unrecorded(forward: Callable[..., Any], module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """forward(module, x, ...) without recording; a backward pass that reaches the result raises UnsupportedCall."""
    with torch.no_grad():
        result = forward(module, x, *args, **kwargs)
    name = type(module).__name__
    if isinstance(result, tuple):
        return tuple(refusing(one, x, name) if isinstance(one, Tensor) else one for one in result)
    return refusing(result, x, name)


def refusing(result: Tensor, x: Tensor, name: str) -> Tensor:
    """`result`, whose backward pass raises UnsupportedCall for the replaced module `name`; `x` is what it was computed
    from.
    """
    if torch.compiler.is_compiling():  # a traced graph can neither look at views nor make leaves
        return _Refusal.apply(result.clone(), x, None, name)
    own = (
        result.clone() if result._is_view() or result is x else result
    )  # views that a Function returns cannot be changed in place
    return _Refusal.apply(
        own, x, torch.empty(0, requires_grad=True), name
    )  # the third argument makes the result require a gradient


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, x: Tensor, recorded: Tensor | None, name: str) -> Tensor:  # type: ignore[override]
        ctx.name = name
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        refused = torch.ops.infuse.refuse_backward(grad, ctx.name)
        return None, refused, None, None


def _refuse(grad: Tensor, name: str) -> Tensor:
    raise UnsupportedCall(f"backward(): {name} was replaced by infuse, which computes no gradients; {_INSTEAD}")


# An op, so that torch.compile traces the backward pass without running it: it raises where it runs.
_LIBRARY = torch.library.Library("infuse", "FRAGMENT")
_LIBRARY.define("refuse_backward(Tensor grad, str name) -> Tensor")
_LIBRARY.impl("refuse_backward", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake("infuse::refuse_backward", lambda grad, name: torch.empty_like(grad), lib=_LIBRARY)
