"""The number formats in which a checkpoint stores matrices, which a plan keeps unless the config sets others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from infuse.weights.lazy import LazyTensor


@dataclass(frozen=True)
class StoredFormats:
    """`formats`: name of a tensor in the model → the number format in which its values are stored.

    `stacked`: those of the names that are tensors of several matrices, as of experts. `orders`: name of a tensor in
    act-order → digest of its order of inputs.
    """

    formats: Mapping[str, str] = field(default_factory=dict)
    stacked: frozenset[str] = frozenset()
    orders: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, LazyTensor]) -> StoredFormats:
        """The formats of those tensors that are coded; no values are read."""
        coded = {name: (tensor, code) for name, tensor in tensors.items() if (code := tensor.coded) is not None}
        stacked = frozenset(name for name, (tensor, _) in coded.items() if len(tensor.shape) > 2)
        orders = {name: code.order.digest for name, (_, code) in coded.items() if code.order is not None}
        return cls({name: code.format for name, (_, code) in coded.items()}, stacked, orders)

    def without_orders(self, names: Collection[str]) -> StoredFormats:
        """Those without the tensors of `names` that are in act-order, as if these were stored as plain values."""
        left = {name: format for name, format in self.formats.items() if not (name in names and name in self.orders)}
        return replace(self, formats=left, orders={name: self.orders[name] for name in self.orders if name in left})

    def text(self, name: str) -> str:
        """The format of a tensor that has one, and whether it is in act-order."""
        return in_words(self.formats[name], ordered=name in self.orders)


def in_words(format: str, *, ordered: bool) -> str:
    """A format, and whether its codes are in act-order."""
    return f"{format} in act-order" if ordered else format


NOTHING_STORED = StoredFormats()
