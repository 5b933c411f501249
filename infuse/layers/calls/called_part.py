"""CalledPart: a part that hooks, wrappers and callers see called as the original's module in its place was.

A block computes its parts by `mix`, with objects of ours. Only where something listens does it call them, with the
arguments of architectures/inner_call.py, and no object of ours goes through that call.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from infuse.architectures.inner_call import InnerCall
from infuse.ground.errors import UnsupportedCall
from infuse.layers.calls.recorders import has_recorders_alone
from infuse.layers.gradient import InferenceModule, Settled, is_recorded, unrecorded
from infuse.layers.linear import has_global_hooks, has_no_hooks
from infuse.layers.replaced import KEEPS_LAYERS


class BlockRef:
    """Refers to the block around a part, and does not keep it alive. A copy leads to the copy of the block, if any."""

    def __init__(self, block: nn.Module):
        self._block = weakref.ref(block)

    def __call__(self) -> Any:
        return self._block()

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockRef:
        block = self()
        return BlockRef(memo.get(id(block), block))

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockRef, (self(),)


class CalledPart(InferenceModule):
    """`mix` computes; `forward` takes and returns what the original's module does, as `inner_call` says.

    Without an `inner_call`, because the part is not in a model or its original's call is unclear, `forward` is `mix`.
    A class that can stop where its original's module ends has `mix_inside`, which is `mix` without what the layer does
    to the result of that module, and `finished`, which does that.
    """

    inner_call: InnerCall | None = None
    _around: BlockRef | None = None

    def mix(self, x: Tensor, inputs: Any, *more: Any) -> Any:
        """Return the branch [B, T, C], or that and attention weights [B, H, T, L] or None."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self.inner_call
        if call is None:
            return self.mix(*args, **kwargs)
        block = self._around() if self._around is not None else None
        if block is None:
            raise UnsupportedCall(f"{call.path} was called without the layer that it is a part of: call that layer")
        hidden, residual, given = call.received(args, kwargs)
        if torch.is_grad_enabled() and is_recorded(self, hidden):
            return unrecorded(block.of_part, self, hidden, residual, given)
        return block.of_part(self, hidden, residual, given)

    def be_called(self, call: InnerCall, block: nn.Module) -> None:
        """From now on, be called as `call` says, inside of `block`."""
        object.__setattr__(self, "inner_call", call)
        object.__setattr__(self, "_around", BlockRef(block))


def is_heard(part: nn.Module) -> bool:
    """Whether something listens to a part that is a CalledPart, or stands in its place."""
    return not isinstance(part, CalledPart) or type(part).forward is not CalledPart.forward or has_listeners(part)


def has_listeners(part: nn.Module) -> bool:
    """Whether something listens to a part, or to all modules, or stands in its place."""
    return not isinstance(part, Settled) or not has_no_hooks(part) or has_global_hooks()


def heard(name: str, part: nn.Module, stream: Any, *over: Any) -> Any:
    """Call a part as the original is called, and return its branch and its attention weights. `over`: see `mix`."""
    inputs = stream.inputs
    call = inputs.calls.get(name)
    is_ours = isinstance(part, CalledPart)
    if call is None or (not is_ours and (call.is_nested or call.unfinished)):
        return _heard_if_unclear(name, part, stream, *over)
    args, kwargs = call.passed(stream.y, stream.x, inputs.given)
    branch, weights, bias = call.taken_from(part(*args, **kwargs))
    if bias is not None and not call.over:
        stream.inputs = inputs._replace(bias=bias)
    if call.unfinished:
        branch = part.finished(branch)  # type: ignore[operator]
    if call.adds_residual:
        stream.x = torch.zeros_like(stream.x)
    return branch, weights


def _heard_if_unclear(name: str, part: nn.Module, stream: Any, *over: Any) -> Any:
    """Compute a part of which the original's call is unclear. UnsupportedCall if hooks of users listen to it.

    transformers' recorders get its result. Hooks on all modules do not hear it, as they do not hear modules inside.
    """
    is_called = isinstance(part, CalledPart)
    is_own = isinstance(part, Settled) and (not is_called or type(part).forward is CalledPart.forward)
    if is_own and has_recorders_alone(part):
        made: Any = part
        returned = made.mix(stream.y, stream.inputs, *over) if is_called else made.forward(stream.y)
        for recorder in part._forward_hooks.values():
            recorder(part, (stream.y,), returned)
        return returned
    raise UnsupportedCall(
        f"{name} of {type(part).__name__} has hooks or was exchanged, and how the original calls it is unclear; "
        f"{KEEPS_LAYERS}"
    )


def heard_mlp(name: str, part: nn.Module, stream: Any) -> Any:
    """Call an MLP, or a mixture, that is heard: as the original is called, if the original has such a module."""
    calls = stream.inputs.calls
    call = calls.get(name)
    if call is None and name in calls:
        return _heard_if_unclear(name, part, stream)
    if call is None:
        return part(stream.y)
    args, kwargs = call.passed(stream.y, stream.x, stream.inputs.given)
    branch, _, _ = call.taken_from(part(*args, **kwargs))
    if call.adds_residual:
        stream.x = torch.zeros_like(stream.x)
    return branch
