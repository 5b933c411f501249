"""HeldCount: a number of tokens on the device, of which the host knows the least and the most.

Inside a CUDA graph the host cannot read the number of tokens in a cache. Models compare it with the size of a table,
which is answered on the host where all numbers that it may be give the same answer; and they take as many rows of a
table, or as many integers, after it as there are new tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from infuse.ground.modes import Transparent

_COMPARED: dict[Any, Callable[[int, int], bool]] = {
    Tensor.gt: operator.gt,
    Tensor.ge: operator.ge,
    Tensor.lt: operator.lt,
    Tensor.le: operator.le,
}


class HeldCount(Tensor):
    """An integer tensor [], `offset` more than `counted`, which is between `least` and `most`.

    With a number added it is another one; all else gives tensors. It never changes in place: `count += 1`, of a number
    in the model, would move the token.
    """

    counted: Tensor
    offset: int
    least: int
    most: int

    @staticmethod
    def of(counted: Tensor, least: int, most: int, offset: int = 0) -> HeldCount:
        """Let the host know that `counted` is between the two."""
        held = (counted + offset if offset else counted).as_subclass(HeldCount)
        held.counted, held.offset, held.least, held.most = counted, offset, least, most
        return held

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        # Not `with DisableTorchFunctionSubclass()`: an interrupt as it begins would leave subclasses off for good.
        return torch._C._disabled_torch_function_impl(cls._answered, types, (function, args, kwargs or {}), {})

    @classmethod
    def _answered(cls, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        first, *more = args or (None,)
        if isinstance(first, cls) and not kwargs:
            if (decided := _decided(function, first, more)) is not None:
                return decided
            if function in (Tensor.add, Tensor.add_) and [type(each) for each in more] == [int]:
                return cls.of(first.counted, first.least, first.most, first.offset + more[0])
        name = getattr(function, "__name__", "")
        if isinstance(first, cls) and name.endswith("_") and not name.endswith("__"):
            args = (first.counted + first.offset, *more)
        return function(*args, **kwargs)


class HeldCounts(Transparent, TorchFunctionMode):
    """Context in which integers from one HeldCount to another, and such rows of a table, are made on the device.

    PyTorch asks no tensor what these are: it reads numbers.
    """

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.arange and len(args) == 2 and (places := _between(*args)) is not None:
            return places.to(kwargs.get("dtype") or torch.long)
        if function is Tensor.__getitem__ and (rows := _rows(*args)) is not None:
            return rows
        return function(*args, **kwargs)


def _decided(function: Any, count: HeldCount, more: list[Any]) -> bool | None:
    """The answer to a question on the host; None if it is no such question, or numbers differ in it."""
    least, most = count.least + count.offset, count.most + count.offset
    if function is Tensor.__bool__:
        return True if least > 0 else None
    if [type(each) for each in more] != [int]:
        return None
    number = more[0]
    if function in (Tensor.__eq__, Tensor.ne):
        return None if least <= number <= most else function is Tensor.ne
    compare = _COMPARED.get(function)
    if compare is None or compare(least, number) is not compare(most, number):
        return None
    return compare(least, number)


def _between(first: Any, last: Any) -> Tensor | None:
    """The integers from one count on to another, without it; None if their number is not known."""
    if not isinstance(first, HeldCount) or not isinstance(last, HeldCount) or first.counted is not last.counted:
        return None
    return first.counted + torch.arange(first.offset, last.offset, device=first.counted.device)


def _rows(table: Tensor, index: Any) -> Tensor | None:
    """What the slices before the last, which take all, and the last, between two counts, take of a table."""
    *all_of, last = index if isinstance(index, tuple) else (index,)
    if not isinstance(last, slice) or last.step is not None or any(each != slice(None) for each in all_of):
        return None
    places, axis = _between(last.start, last.stop), len(all_of)
    if (
        places is None
        or last.start.least + last.start.offset < 0
        or last.stop.most + last.stop.offset > table.shape[axis]
    ):
        return None  # a slice has fewer rows where a table ends
    return table.index_select(axis, places)
