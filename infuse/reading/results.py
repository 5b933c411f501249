"""What operations give on meta, looked up by what their arguments are.

PyTorch works out most results on meta in Python: 0.1 ms each, and 1 ms where sizes are variables. A model's layers, its
calls and a layer's norms ask for the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_MOST = 1 << 14  # entries, each of some numbers


class Results:
    """Results by operation and arguments. Variables among sizes are told apart by name: those of one call only."""

    def __init__(self) -> None:
        self._known: dict[tuple, list[tuple]] = {}

    def of(self, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """`func(*args, **kwargs)` without gradients; where it gave new tensors on meta before, new ones like these."""
        if not _gives_new(func):
            return func(*args, **kwargs)
        try:
            key = (func, torch.get_default_dtype(), _traits(args), _traits(tuple(kwargs.items())))
            known = self._known.get(key)
        except TypeError:  # an argument has more to it, such as values
            return func(*args, **kwargs)
        if known is not None:
            made = tuple(torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in known)
            return made if len(func._schema.returns) > 1 else made[0]
        made = func(*args, **kwargs)
        results = made if isinstance(made, tuple) else (made,)
        if len(self._known) < _MOST and all(map(_is_plain, results)) and not _share(results, (args, kwargs)):
            self._known[key] = [(tuple(one.shape), one.stride(), one.dtype) for one in results]
        return made


RESULTS = Results()  # where all sizes are numbers


@cache
def _gives_new(func: Any) -> bool:
    """Whether an operation writes nothing and, by its signature, returns new tensors alone."""
    schema = func._schema
    is_alone = all(one.alias_info is None for one in (*schema.arguments, *schema.returns))
    return is_alone and bool(schema.returns) and all(str(one.type) == "Tensor" for one in schema.returns)


def _traits(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not _is_plain(value):
            raise TypeError(f"a {type(value).__name__} on {value.device}")
        return value.dtype, *map(_size, value.shape), *map(_size, value.stride())
    if isinstance(value, (tuple, list)):
        return type(value), *map(_traits, value)
    return type(value), _size(value)


def _size(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else value


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor on meta of which dtype, shape and strides tell all."""
    is_tensor = type(value) in (Tensor, nn.Parameter) and value.is_meta
    return is_tensor and value.layout == torch.strided and not value.is_complex()


def _share(results: tuple, given: Any) -> bool:
    """Whether a result is an argument after all, or a view of one, as of a dropout that drops nothing."""
    held = {leaf.untyped_storage()._cdata for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
    return any(one.untyped_storage()._cdata in held for one in results)
