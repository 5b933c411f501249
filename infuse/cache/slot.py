"""Slots: the cached data of one layer, behind transformers' protocol for cache layers.

KVSlot holds rows of tokens, [B, K, S, D] for keys and for values, whose numbers of heads and widths may differ; `keys`
and `values` are views of its first `length` tokens. All tokens are kept, so cropping back is always possible. A slot of
format "int8" stores rows of ops/cache_rows.py instead, [B, K, S, D + 4]. recurrence_slot.py has slots of states.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from infuse.cache.held_count import HeldCount
from infuse.ground import memory
from infuse.ground.errors import ContextLimitError, InfuseError, UnsupportedCall
from infuse.ops.cache_rows import SCALE_BYTES, dequantize_rows, quantize_rows

_ROUND_TOKENS = 64  # capacities are multiples of this, so that growth is rare
Rows = tuple[tuple[int, int], ...]  # heads and width of keys, and of values


@dataclass(frozen=True)
class Filler:
    """Identifies one of our layers in a cache, also in copies and pickles of its model.

    `model`: equal for the layers of a model. `layer`: the path in it.
    """

    model: str
    layer: str = ""


class Slot(ABC):
    """Cached data of one layer for `length` tokens so far, written by our layer `filler`.

    Each kind is also the class of transformers' cache layers that holds the same, so that other libraries know it.
    """

    is_sliding = False
    is_croppable: bool  # whether tokens may be dropped
    place: Tensor | None = None  # index of the next token, inside a CUDA graph
    row_lengths: Tensor | None = None  # set if rows have different lengths
    keeps_each = False  # whether it keeps what it held after each token since the last snapshot
    _left: torch.device | None = None  # the device that `offload` moved it from

    def __init__(self, capacity_tokens: int = 0, limit_tokens: int | None = None, format: str | None = None):
        self.length = 0
        self.filler: Filler | None = None
        self.capacity_tokens, self.limit_tokens, self.format = capacity_tokens, limit_tokens, format
        self.is_initialized = False

    # -- implemented by each kind

    @property
    @abstractmethod
    def storages(self) -> list[Tensor]:
        """The storage tensors, [B, ...] each; empty before the first token."""

    def snapshot(self, *, each: bool = False) -> None:  # noqa: B027
        """Mark a point that `rewind` can return to, and with `each` all later points until the next snapshot.

        Does nothing where any point works.
        """

    @abstractmethod
    def rewind(self, tokens: int) -> int:
        """Go back to at most `tokens` tokens, keeping as many as possible; return how many are kept."""

    @abstractmethod
    def copied(self) -> Slot:
        """Return a copy with its own storage, without room for more."""

    @abstractmethod
    def reorder_in_place(self, beam_idx: Tensor) -> None:
        """Reorder without new storage if the number of rows stays the same."""

    @abstractmethod
    def crop(self, tokens: int) -> None:
        """Keep the first `tokens` if positive, drop the last `-tokens` if negative (both conventions are in use)."""

    @abstractmethod
    def reset(self) -> None:
        """Hold no tokens."""

    @abstractmethod
    def _select(self, rows: Tensor) -> None: ...

    @abstractmethod
    def move(self, device: torch.device) -> None:
        """Move what is held to another device."""

    # -- common to all kinds

    @property
    def device(self) -> torch.device | None:
        """The device on which layers write to it, also while it is offloaded; None before the first token."""
        storages = self.storages
        return self._left or (storages[0].device if storages else None)

    def offload(self) -> None:
        """Move to the CPU, until `prefetch`."""
        if self.storages:
            self._left = self.device
            self.move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move back to the device that `offload` moved from."""
        if self._left is not None:
            self.move(self._left)
            self._left = None

    @property
    def rows(self) -> int:
        """Number of rows; 0 if empty."""
        storages = self.storages
        return storages[0].shape[0] if storages and self.length else 0

    def check_room(self, tokens: int) -> None:
        """Raise ContextLimitError if `tokens` more exceed the limit."""
        if self.limit_tokens is not None and self.length + tokens > self.limit_tokens:
            excess = f"the cache holds {self.length} tokens, {tokens} more were given"
            raise ContextLimitError(f"{excess}, and max_out_tokens is {self.limit_tokens}")

    def fill_by(self, filler: Filler | None) -> None:
        """Raise UnsupportedCall if another layer filled this slot. None: the layer is unknown."""
        if filler is None or filler is self.filler:  # comparing records takes 0.5 us, in each layer of each step
            return
        if self.length and self.filler is not None and self.filler != filler:
            if self.filler.model == filler.model:
                raise UnsupportedCall(_same_number(self.filler.layer, filler.layer))
            raise UnsupportedCall(
                "past_key_values: the cache was filled by another model; fill a new cache with this model, or reset() "
                "this one"
            )
        self.filler = filler

    def check_batch(self, rows: int, batch: int) -> None:
        if self.length and rows != batch:  # a batch of one would be broadcast silently
            raise InfuseError(f"the cache holds a batch of {rows}, a batch of {batch} was given")

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1 if self.limit_tokens is None else self.limit_tokens

    def get_max_cache_shape(self) -> int:
        """Same as `get_max_length`, under its name before transformers 5.2x."""
        return self.get_max_length()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if storages := self.storages:
            self._select(torch.arange(storages[0].shape[0]).repeat_interleave(repeats))

    def crop_rows(self, lengths: Tensor) -> None:
        raise UnsupportedCall("crop_rows: this cache holds a recurrence's state, which cannot drop tokens")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.update(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise UnsupportedCall("past_key_values: this layer of the cache takes no new keys and values")

    # -- inside a graph

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """If True, models pass a mask over the whole storage."""
        return self.place is not None

    @property
    def can_hold_place(self) -> bool:
        """Whether a graph can go on from what is held, and write to where it is."""
        return False

    def take(self, other: Any) -> None:
        """Append what another slot of the same kind and format holds, to an empty one."""
        raise UnsupportedCall("past_key_values: this layer of the cache takes nothing from others")

    def hold_place(self, place: Tensor | None, count: Tensor | None, room: int) -> None:
        if place is not None:
            raise UnsupportedCall("hold_place: this cache holds more than keys, values and states: no graphs are made")


class KVSlot(Slot, DynamicLayer):  # type: ignore[misc, override]
    """One layer's keys and values. `reserve` makes room, the caller writes, `advance` counts the tokens."""

    is_croppable = True

    def __init__(self, capacity_tokens: int = 0, limit_tokens: int | None = None, format: str | None = None):
        super().__init__(capacity_tokens, limit_tokens, format)
        self.dtype = torch.float32  # dtype of the layer's keys and values
        self.count: Tensor | None = None
        self.key_storage: Tensor | None = None
        self.value_storage: Tensor | None = None
        self.unpaired = ""  # the storage that was assigned, until the other one has as many tokens
        self.former_length = 0  # of that other one until then

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Keys so far, [B, K, length, D], dequantized if stored in a format."""
        return self._read("key_storage")

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._assign("key_storage", states)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self._read("value_storage")

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._assign("value_storage", states)

    def _read(self, storage: str) -> Tensor | None:
        stored: Tensor | None = getattr(self, storage)
        length = self.length if self.unpaired in ("", storage) else self.former_length
        return None if stored is None else self._readable(stored[:, :, :length])

    def _assign(self, storage: str, states: Tensor | None) -> None:
        """Replace the storage by `states`, as callers that drop tokens do. Keys and values must end up equally long."""
        if self.row_lengths is not None or self.place is not None:
            raise UnsupportedCall("keys and values of a KVCache cannot be assigned while its rows have own lengths")
        tokens = 0 if states is None else states.shape[2]
        if tokens != self.length:
            if storage != self.unpaired:
                self.former_length = self.length
            self.unpaired = storage
        elif storage != self.unpaired:
            self.unpaired = ""
        self.length = tokens
        setattr(self, storage, None if states is None else self._stored(states))
        if states is not None:
            self.dtype, self.is_initialized = states.dtype, True

    def _readable(self, stored: Tensor) -> Tensor:
        return stored if self.format is None else dequantize_rows(stored, self.dtype)

    def _stored(self, states: Tensor) -> Tensor:
        return states if self.format is None else quantize_rows(states)

    def reserve(self, batch: int, tokens: int, rows: Rows, like: Tensor, filler: Filler | None = None) -> int:
        """Make room for `tokens` more, in the dtype and on the device of `like`. Return the index of the first.

        Raise ContextLimitError beyond `limit_tokens`, InfuseError for another batch than is held, and UnsupportedCall
        for other heads, width, dtype or device, or another filler.
        """
        needed = self.length + tokens
        if self.limit_tokens is not None:
            self.check_room(tokens)
        keys, values = self.key_storage, self.value_storage
        if keys is None or values is None:
            self._grow(batch, needed, rows, like)
            self.filler = filler
            return self.length
        if self.length and keys.shape[0] != batch:
            self.check_batch(keys.shape[0], batch)
        scale = 0 if self.format is None else SCALE_BYTES
        (k_heads, k_width), (v_heads, v_width) = rows
        alike = keys.shape[1] == k_heads and keys.shape[3] == k_width + scale
        alike = alike and values.shape[1] == v_heads and values.shape[3] == v_width + scale
        alike = alike and self.dtype == like.dtype and keys.device == like.device
        if self.length and not alike:
            theirs = tuple((states.shape[1], states.shape[3] - scale) for states in (keys, values))
            raise UnsupportedCall(
                f"past_key_values: the cache was filled with {_told(theirs, self.dtype, keys.device)}, and this layer "
                f"makes {_told(rows, like.dtype, like.device)}; fill a new cache with this model, or reset() this one"
            )
        if filler is not self.filler:
            self.fill_by(filler)
        if keys.shape[2] < needed or keys.shape[0] != batch or not alike:
            self._grow(batch, needed, rows, like)
        return self.length

    def _grow(self, batch: int, needed: int, rows: Rows, like: Tensor) -> None:
        if self.unpaired:  # assigned states have no spare room, so _grow runs next
            raise UnsupportedCall("past_key_values: its keys and values were assigned with different numbers of tokens")
        doubled = 2 * self.key_storage.shape[2] if self.length and self.key_storage is not None else 0
        capacity = max(needed, doubled, self.capacity_tokens)
        capacity = -(-capacity // _ROUND_TOKENS) * _ROUND_TOKENS
        if self.limit_tokens is not None:
            capacity = min(capacity, self.limit_tokens)
        dtype, scale = (like.dtype, 0) if self.format is None else (torch.int8, SCALE_BYTES)
        with torch.inference_mode(False):  # inference tensors cannot be written to outside inference mode
            made = [memory.empty((batch, heads, capacity, width + scale), dtype, like.device) for heads, width in rows]
        keys, values = made
        if self.length:
            for new, old in zip(made, self.held(), strict=True):
                new[:, :, : self.length] = old
        self.key_storage, self.value_storage, self.dtype = keys, values, like.dtype
        self.is_initialized = True

    def held(self) -> tuple[Tensor, Tensor]:
        """Return keys and values so far as stored, [B, K, length, D] each. The storage must exist."""
        assert self.key_storage is not None and self.value_storage is not None
        return self.key_storage.narrow(2, 0, self.length), self.value_storage.narrow(2, 0, self.length)

    @property
    def storages(self) -> list[Tensor]:
        """Stored keys and values, [B, K, S, D] each."""
        return [each for each in (self.key_storage, self.value_storage) if each is not None]

    def move(self, device: torch.device) -> None:
        if self.key_storage is not None and self.value_storage is not None:
            self.key_storage, self.value_storage = self.key_storage.to(device), self.value_storage.to(device)

    def take(self, other: KVSlot) -> None:
        assert other.format == self.format and other.key_storage is not None
        scale = 0 if self.format is None else SCALE_BYTES
        rows = tuple((each.shape[1], each.shape[3] - scale) for each in other.storages)
        like = torch.empty(0, dtype=other.dtype, device=other.key_storage.device)
        start = self.reserve(other.key_storage.shape[0], other.length, rows, like, other.filler)
        self.advance(other.length)
        for mine, its in zip(self.held(), other.held(), strict=True):
            mine[:, :, start:] = its

    def copied(self) -> KVSlot:
        """Copy the tokens to new storage, without room for more."""
        slot = copy.copy(self)
        if self.key_storage is not None and self.value_storage is not None:
            slot.key_storage, slot.value_storage = (states.clone() for states in self.held())
        return slot

    # -- rows of different lengths

    def crop_rows(self, lengths: Tensor) -> None:
        """Keep the first lengths[b] tokens of row b ([B] integers). Later tokens are appended at each row's own end."""
        storage = self.key_storage
        if storage is None or lengths.shape != storage.shape[:1] or bool((lengths > self.length).any()):
            raise InfuseError(f"lengths {lengths.tolist()} do not fit a cache of {self.length} tokens")
        self.row_lengths = lengths.to(storage.device, torch.long, copy=True)
        self.length = int(lengths.max())

    def seen(self, tokens: int) -> Tensor | None:
        """Mask of keys that the last `tokens` may attend to, bool [B, 1, T, length]; None unless row lengths differ."""
        if self.row_lengths is None:
            return None
        device = self.row_lengths.device
        last = self.row_lengths[:, None] - tokens + torch.arange(tokens, device=device)
        return (torch.arange(self.length, device=device) <= last[:, :, None])[:, None]

    def _update_rows(self, key_states: Tensor, value_states: Tensor) -> None:
        assert self.row_lengths is not None and self.key_storage is not None and self.value_storage is not None
        batch, _, tokens, _ = key_states.shape
        rows = torch.arange(batch, device=key_states.device)[:, None]
        places = self.row_lengths[:, None] + torch.arange(tokens, device=key_states.device)
        # Clear the places that shorter rows skip: a mask hides them, but NaN would survive it.
        for storage in (self.key_storage, self.value_storage):
            storage[:, :, self.length : self.length + tokens] = 0
        self.key_storage[rows, :, places] = self._stored(key_states).transpose(1, 2)
        self.value_storage[rows, :, places] = self._stored(value_states).transpose(1, 2)
        self.row_lengths = self.row_lengths + tokens

    # -- inside a graph

    @property
    def can_hold_place(self) -> bool:
        return self.row_lengths is None

    def hold_place(self, place: Tensor | None, count: Tensor | None, room: int) -> None:
        self.place, self.count = place, count

    def allowed(self, window: int) -> Tensor:
        """Mask of the keys that the token at `place` may attend to, bool [1, 1, 1, S]; `window` as in ops.attention."""
        assert self.place is not None and self.key_storage is not None
        keys = torch.arange(self.key_storage.shape[2], device=self.place.device)
        seen = keys <= self.place
        return (seen & (keys > self.place - window) if window else seen)[None, None, None]

    def whole(self) -> tuple[Tensor, Tensor]:
        """Stored keys and values over the whole capacity, [B, K, S, D] each. The storage must exist."""
        assert self.key_storage is not None and self.value_storage is not None
        return self.key_storage, self.value_storage

    def _update_place(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        assert self.place is not None and self.key_storage is not None and self.value_storage is not None
        if key_states.shape[2] != 1:
            raise InfuseError(f"one token at a time goes to a place that is held, {key_states.shape[2]} were given")
        self.key_storage.index_copy_(2, self.place[None], self._stored(key_states))
        self.value_storage.index_copy_(2, self.place[None], self._stored(value_states))
        return self._readable(self.key_storage), self._readable(self.value_storage)

    # -- transformers' protocol for one layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        values = key_states if value_states is None else value_states
        self.reserve(key_states.shape[0], 0, _rows_of(key_states, values), key_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, filler: Filler | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.place is not None:
            return self._update_place(key_states, value_states)
        batch, _, tokens, _ = key_states.shape
        start = self.reserve(batch, tokens, _rows_of(key_states, value_states), key_states, filler)
        assert self.key_storage is not None and self.value_storage is not None
        if self.row_lengths is not None:
            self._update_rows(key_states, value_states)
        else:
            self.key_storage[:, :, start : start + tokens] = self._stored(key_states)
            self.value_storage[:, :, start : start + tokens] = self._stored(value_states)
        self.advance(tokens)
        keys, values = self.held()
        return self._readable(keys), self._readable(values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.place is not None:
            assert self.key_storage is not None
            return self.key_storage.shape[2], 0
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Number of tokens, or the tensor `place` while it is set; transformers' static cache returns a tensor, too."""
        if self.place is None or self.key_storage is None:
            return self.length
        return HeldCount.of(self.place, 1, self.key_storage.shape[2] - 1)  # type: ignore[return-value]

    def reset(self) -> None:
        self.length, self.row_lengths, self.unpaired = 0, None, ""
        self.place = self.count = None

    def crop(self, tokens: int) -> None:
        self.length = min(self.length, tokens) if tokens > 0 else max(self.length + tokens, 0)
        rows = self.row_lengths
        if rows is not None:
            self.row_lengths = rows.clamp(max=tokens) if tokens > 0 else (rows + tokens).clamp(min=0)

    def rewind(self, tokens: int) -> int:
        self.crop(min(tokens, self.length) - self.length)
        return self.length

    def _select(self, rows: Tensor) -> None:
        if self.key_storage is not None and self.value_storage is not None:
            rows = rows.to(self.key_storage.device)
            with torch.inference_mode(False), torch.no_grad():  # as in `_grow`
                self.key_storage = self.key_storage.index_select(0, rows)
                self.value_storage = self.value_storage.index_select(0, rows)
        if self.row_lengths is not None:
            self.row_lengths = self.row_lengths.index_select(0, rows.to(self.row_lengths.device))

    def reorder_in_place(self, beam_idx: Tensor) -> None:
        """Reorder without new storage if the number of rows stays the same. This copies the tokens twice."""
        if self.key_storage is None or len(beam_idx) != self.key_storage.shape[0]:
            return self._select(beam_idx)
        rows = beam_idx.to(self.key_storage.device)
        for states in self.held():
            states.copy_(states.index_select(0, rows))
        if self.row_lengths is not None:
            self.row_lengths = self.row_lengths.index_select(0, rows)


def _rows_of(key_states: Tensor, value_states: Tensor) -> Rows:
    return (key_states.shape[1], key_states.shape[3]), (value_states.shape[1], value_states.shape[3])


def _same_number(first: str, second: str) -> str:
    return (
        f"past_key_values: {first} and {second} of this model have the same layer_idx, and a cache has one place for "
        "each number (a DynamicCache of transformers appends the keys of one layer to those of the other). Load the "
        "model again and number its layers before init_inference, such as: for i, layer in "
        "enumerate(model.model.layers): layer.self_attn.layer_idx = i. Or call it without a cache (use_cache=False)"
    )


def _told(rows: Rows, dtype: torch.dtype, device: torch.device) -> str:
    (heads, width), values = rows
    other = "" if values == (heads, width) else f" (values: {values[0]} of {values[1]})"
    return f"{heads} heads of {width}{other} in {dtype} on {device}"
