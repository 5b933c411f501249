"""The number formats in which a checkpoint stores matrices, which a plan keeps unless the config sets others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from infuse.weights.lazy import LazyTensor


@dataclass(frozen=True)
class StoredFormats:
    """`formats`: name of a tensor in the model → the number format in which its values are stored.

    `stacked`: those of the names that are tensors of several matrices, as of experts.
    """

    formats: Mapping[str, str] = field(default_factory=dict)
    stacked: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tensors: Mapping[str, LazyTensor]) -> StoredFormats:
        """The formats of those tensors that are coded; no values are read."""
        coded = {name: (tensor, code) for name, tensor in tensors.items() if (code := tensor.coded) is not None}
        stacked = frozenset(name for name, (tensor, _) in coded.items() if len(tensor.shape) > 2)
        return cls({name: code.format for name, (_, code) in coded.items()}, stacked)


NOTHING_STORED = StoredFormats()
