"""The weight of a quantized module as callers read it: the original's shape, dtype and values, in no memory of its own.

Each use dequantizes the codes anew. Whatever would write into the values raises, because nothing would read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from infuse.ground.errors import WAY_BACK, UnsupportedCall

# Methods that PyTorch refuses to subclasses without memory, or that would make another one: they get ordinary values.
_OF_VALUES = frozenset(
    (Tensor.tolist, Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.__repr__, Tensor.__format__, Tensor.__dlpack__)
)
_ARRAYS: frozenset[Any] = frozenset((Tensor.numpy, Tensor.__array__))  # type: ignore[arg-type]
_WRITES = frozenset((Tensor.__setitem__, Tensor.data.__set__))  # type: ignore[attr-defined]
_TRAINS = frozenset((Tensor.requires_grad_, Tensor.requires_grad.__set__))  # type: ignore[attr-defined]


class DequantizedWeight(Tensor):
    """A tensor that `values()` computes whenever an operation reads it. Results are ordinary tensors; views of it are
    read-only, too.

    `what` describes the weight in errors. UnsupportedCall for writes, training and a pointer to its memory.
    """

    values: Callable[[], Tensor]
    what: str

    @staticmethod
    def of(
        shape: Sequence[int], dtype: torch.dtype, device: torch.device, values: Callable[[], Tensor], what: str
    ) -> DequantizedWeight:
        """Make one of a contiguous matrix."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return DequantizedWeight.of(shape, dtype, device, values, what)
        made = Tensor._make_wrapper_subclass(DequantizedWeight, shape, dtype=dtype, device=device)
        made.values, made.what = values, what
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _WRITES and isinstance(args[0], DequantizedWeight):
            _refuse("cannot be written to", args[0].what)
        if func in _TRAINS and (*args[1:], *given.values(), True)[0]:
            _refuse("cannot be trained", args[0].what)
        if func is Tensor.data_ptr:
            _refuse("has no memory of its own (`is` tells whether two weights are tied)", args[0].what)
        if func in _ARRAYS:
            array = func(*tree_map_only(DequantizedWeight, _computed, tuple(args)), **given)
            array.setflags(write=False)
            return array
        if func in _OF_VALUES:
            return func(*tree_map_only(DequantizedWeight, _computed, tuple(args)), **given)
        return torch._C._disabled_torch_function_impl(func, types, tuple(args), dict(given))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        made = func.decompose(*args, **given)  # inference mode passes compound operations on
        if made is not NotImplemented:
            return made
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[number] if number < len(args) else given.get(argument.name)
                for each in tree_leaves(written):
                    if isinstance(each, DequantizedWeight):
                        _refuse("cannot be written to", each.what)
        first = args[0] if args else None
        if func is torch.ops.aten.detach.default:
            assert isinstance(first, DequantizedWeight)
            return _viewed(first, first.values, first.what)
        result = func(*tree_map_only(DequantizedWeight, _computed, tuple(args)), **_all_computed(given))
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if is_view and isinstance(first, DequantizedWeight):
            return tree_map_only(Tensor, lambda view: _viewed(view, lambda: view, first.what), result)
        return result


class Reading:
    """Hands out the weight of a quantized module, the same one to all modules that share the codes while it is in use.

    So `head.weight is table.weight` tells whether they are tied. It does not keep the weight, which holds the module.
    """

    def __init__(self) -> None:
        self._last: Callable[[], DequantizedWeight | None] = _nothing
        self._made_for: tuple[torch.dtype, torch.device] | None = None

    def weight(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        dequantized: Callable[[torch.dtype], Tensor],
        format: object,
    ) -> DequantizedWeight:
        last, wanted = self._last(), (dtype, device)
        if last is None or self._made_for != wanted:
            what = f"a weight quantized in {format}"
            last = DequantizedWeight.of(shape, dtype, device, partial(dequantized, dtype), what)
            self._last, self._made_for = ref(last), wanted
        return last

    def __reduce__(self) -> tuple:
        return Reading, ()  # copies of modules that share one share a new one


def _nothing() -> None:
    return None


def _viewed(like: Tensor, values: Callable[[], Tensor], what: str) -> DequantizedWeight:
    """One with the sizes and strides of `like`."""
    with torch.inference_mode(False):
        made = Tensor._make_wrapper_subclass(
            DequantizedWeight, like.size(), like.stride(), like.storage_offset(), dtype=like.dtype, device=like.device
        )
    made.values, made.what = values, what
    return made


def _computed(weight: DequantizedWeight) -> Tensor:
    with torch.no_grad():
        return weight.values()


def _all_computed(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tree_map_only(DequantizedWeight, _computed, value) for name, value in given.items()}


def _refuse(what: str, weight: str) -> NoReturn:
    raise UnsupportedCall(
        f"{weight} {what}: its values are computed from codes each time that they are read. weight.clone() is an "
        "ordinary tensor; model.load_state_dict({name: values}, strict=False) quantizes new values; to work on the "
        f"weight itself, leave `quant` out, or do so on the original: {WAY_BACK}"
    )
