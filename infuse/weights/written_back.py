"""WrittenBack: a tensor of a state dict whose values a replaced layer holds in another order than the original.

It is an ordinary contiguous tensor with memory of its own. Each operation reads the layer's values first, and what it
writes is passed on to the layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from infuse.ground.errors import UnsupportedCall

# Methods whose results are independent of the layer, or name the class of the tensor: they get an ordinary one.
_COPIES = frozenset(
    (Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.__repr__, Tensor.__format__, Tensor.__dlpack__, Tensor.tolist)
)
_ARRAYS: frozenset[Any] = frozenset((Tensor.numpy, Tensor.__array__))  # type: ignore[arg-type]
_SIZES = frozenset((Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.is_contiguous, Tensor.element_size))
_UNCOUNTED = frozenset((Tensor.apply_, Tensor.map_, Tensor.map2_))  # they write without raising the tensor's version


class Link:
    """Ties the `values` of a tensor of the original to the layer: `pairs` are views of them and of the layer's weights
    that have the same values.

    `weights`: what these are views of. `refused`: why nothing can be written; None: writes are passed on. `keeps`: what
    has to live as long.
    """

    def __init__(
        self,
        values: Tensor,
        pairs: Sequence[tuple[Tensor, Tensor]] = (),
        weights: Sequence[Tensor] = (),
        refused: str | None = None,
        keeps: Any = None,
    ):
        self._values, self._pairs, self._weights, self._refused, self._keeps = values, pairs, weights, refused, keeps

    def tensor(self) -> WrittenBack:
        """Return the tensor of the original."""
        tensor = self._values.as_subclass(WrittenBack)
        tensor._link = self
        return tensor

    @torch.no_grad()
    def read(self) -> None:
        """Copy the layer's values."""
        for ours, layers in self._pairs:
            ours.copy_(layers)

    @torch.no_grad()
    def write(self) -> None:
        """Copy the values to the layer."""
        if self._refused is not None:
            raise UnsupportedCall(self._refused)
        for ours, layers in self._pairs:
            layers.copy_(ours)

    def is_of(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the layer's weights, in the memory that the link writes to."""
        if len(weights) != len(self._weights) or any(weight.requires_grad for weight in weights):
            return False
        return all(is_same_memory(one, other) for one, other in zip(self._weights, weights, strict=True))

    def has(self, tensor: Any) -> bool:
        """Whether `tensor` is a plain view of the values."""
        if type(tensor) is not Tensor:
            return False
        try:
            return tensor.untyped_storage()._cdata == self._values.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError):  # sparse tensors and those of torch.func have no storage
            return False


class WrittenBack(Tensor):
    """A tensor with a Link, and so are its views. Results are ordinary tensors. UnsupportedCall for refused writes."""

    _link: Link

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> Any:
        """Libraries call type(parameter)(data, requires_grad): make an ordinary parameter."""
        return nn.Parameter(data.as_subclass(Tensor), requires_grad)

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    def __copy__(self) -> Tensor:
        return self.detach()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Not `with DisableTorchFunctionSubclass()`: an interrupt as it begins would leave subclasses off for good.
        return torch._C._disabled_torch_function_impl(_operated, types, (func, tuple(args), dict(kwargs or {})), {})


def _operated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read the layers, call the function, and pass on what it has written."""
    found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, WrittenBack)]
    if func not in _SIZES and func.__name__ != "__get__":
        for each in found:
            each._link.read()
    if func in _COPIES or func in _ARRAYS:
        first, *others = tree_map_only(WrittenBack, _plain, list(args))
        result = getattr(first, func.__name__)(*others, **kwargs)
        if func in _ARRAYS:
            result.setflags(write=False)  # what is written into an array is not seen
        return result
    versions = [each._version for each in found]
    result = func(*args, **kwargs)
    for each, version in zip(found, versions, strict=True):
        if each._version != version or func in _UNCOUNTED:
            each._link.write()
    return tree_map_only(Tensor, lambda made: _linked(made, found), result)


def ordinary(tensor: Tensor) -> Tensor:
    """Return the same memory as an ordinary tensor, without asking the layer."""
    return torch._C._disabled_torch_function_impl(Tensor.as_subclass, (), (tensor, Tensor), {})


def _plain(tensor: WrittenBack) -> Tensor:
    """Return the same memory as an ordinary tensor, or as a parameter if a module holds it as one."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().as_subclass(Tensor), tensor.requires_grad)
    return tensor.as_subclass(Tensor)


def _linked(made: Tensor, found: Sequence[WrittenBack]) -> Tensor:
    link = next((each._link for each in found if each._link.has(made)), None)
    if link is None:
        return made
    view = made.as_subclass(WrittenBack)
    view._link = link
    return view


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    alike = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
    return alike and one.data_ptr() == other.data_ptr() and one.device == other.device
