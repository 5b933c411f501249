"""HeldStates: what decode steps read of an encoder, at addresses that stay, so that other answers replay their graphs.

These are each layer's keys and values of the states, the states themselves, and their mask. With a mask they are padded
to a multiple of 64 states, which the mask hides: texts of about the same length share a graph.

Suffixes: B batch, L states, C hidden width.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache

from infuse.cache.encoded_slot import StatesCache
from infuse.cache.kv_cache import KVCache

ENCODED, MASK = "encoder_outputs", "attention_mask"  # arguments of a model with an encoder
SHOWN = "encoder_last_hidden_state"  # the states in what it returns
_STATES = "last_hidden_state"
_ROUND_STATES = 64


class GivenStates:
    """The states of a call: their keys and values in its cache, and the arguments with the states and their mask."""

    def __init__(self, cache: StatesCache, arguments: Mapping[str, Any]):
        self.cache, self.encoded = cache, arguments[ENCODED]
        self.states_BLC: Tensor = self.encoded[_STATES]
        self.mask: Tensor | None = arguments.get(MASK)
        self._tensors = [*_stored(cache), *self.encoded.values(), self.mask]
        self._counts = [slot.repeats for slot in cache.layers]
        self._versions = [0 if each is None or each.is_inference() else each._version for each in self._tensors]

    @staticmethod
    def of(cache: Any, arguments: Mapping[str, Any]) -> GivenStates | None:
        """Those of a call with this second half of a cache; None if it reads an encoder otherwise, or more of it."""
        encoded, mask = arguments.get(ENCODED), arguments.get(MASK)
        if not isinstance(cache, StatesCache) or not isinstance(encoded, Mapping) or _STATES not in encoded:
            return None
        tensors = [*encoded.values(), *([] if mask is None else [mask])]
        known = encoded[_STATES].dim() == 3 and all(isinstance(each, Tensor) and each.dim() > 1 for each in tensors)
        return GivenStates(cache, arguments) if known else None

    def are(self, other: GivenStates | None) -> bool:
        """Whether the other's are the same tensors with the same values, for the same rows."""
        if other is None or len(self._tensors) != len(other._tensors):
            return False
        if (self._counts, self._versions) != (other._counts, other._versions):
            return False
        return all(mine is its for mine, its in zip(self._tensors, other._tensors, strict=True))

    def follows(self, tensor: Tensor) -> bool:
        """Whether a tensor is [B, L, ...]: it has an element for each state."""
        return tensor.shape[:2] == self.states_BLC.shape[:2]

    def room(self) -> int:
        """Number of states to hold. None are added to a row of which the mask hides all: it would see them."""
        length, masks = self.states_BLC.shape[1], [self.mask, self.encoded.get(MASK)]
        padded = any(mask is not None and self.follows(mask) and bool(mask.any(dim=-1).all()) for mask in masks)
        return -(-length // _ROUND_STATES) * _ROUND_STATES if padded else length

    def key(self, room: int) -> Hashable:
        """Two answers with the same key fit into the same tensors."""
        stored = tuple((each.dtype, each.shape[1], each.shape[3]) for each in _stored(self.cache))
        encoded = tuple((name, self._kind(each)) for name, each in self.encoded.items())
        mask = None if self.mask is None else self._kind(self.mask)
        return room, type(self.encoded), encoded, mask, self.cache.format, stored

    def _kind(self, tensor: Tensor) -> Hashable:
        follows, shape = self.follows(tensor), tuple(tensor.shape)
        return tensor.dtype, follows, (shape[0], *shape[2:]) if follows else shape


class HeldStates:
    """Room for the states of answers with the same key."""

    def __init__(self, given: GivenStates, room: int):
        more = room - given.states_BLC.shape[1]

        def held(tensor: Tensor) -> Tensor:
            padding = (0, 0) * (tensor.dim() - 2) + (0, more if given.follows(tensor) else 0)
            return F.pad(tensor.detach(), padding).clone(memory_format=torch.contiguous_format)

        with torch.inference_mode(False), torch.no_grad():
            self._encoded = type(given.encoded)(**{name: held(each) for name, each in given.encoded.items()})
            self._mask = None if given.mask is None else held(given.mask)
            self.cache = StatesCache(given.cache.format)
            self.cache.layers = [slot.with_room(more) for slot in given.cache.layers]

    @property
    def states_BLC(self) -> Tensor:
        return self._encoded[_STATES]

    def fill(self, given: GivenStates) -> None:
        """Copy the states of an answer, and zeros behind them."""
        for name, tensor in given.encoded.items():
            _copy(self._encoded[name], tensor, 1)
        if self._mask is not None and given.mask is not None:
            _copy(self._mask, given.mask, 1)
        for mine, its in zip(self.cache.layers, given.cache.layers, strict=True):
            for storage, rows in zip(mine.storages, its.rows_of_batch(), strict=True):
                _copy(storage, rows, 2)

    def nbytes(self) -> int:
        """Device memory in bytes."""
        tensors = *_stored(self.cache), *self._encoded.values(), self._mask
        return sum(each.nbytes for each in tensors if each is not None)

    def arguments(self) -> dict[str, Any]:
        """The arguments of a step over these states."""
        return {ENCODED: self._encoded, **({} if self._mask is None else {MASK: self._mask})}

    def pair(self, cache: KVCache) -> EncoderDecoderCache:
        """The cache of a step over these states."""
        return EncoderDecoderCache(cache, self.cache)


def _copy(to: Tensor, source: Tensor, axis: int) -> None:
    count = source.shape[axis]
    to.narrow(axis, 0, count).copy_(source)
    to.narrow(axis, count, to.shape[axis] - count).zero_()


def _stored(cache: StatesCache) -> list[Tensor]:
    return [storage for slot in cache.layers for storage in slot.storages]
