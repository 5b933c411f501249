"""KVCache: keys and values in preallocated, growing storage, behind transformers' Cache protocol.

Each layer's storage is [B, K, S, D]; `keys` and `values` are views of its first `length` tokens. All tokens are kept,
so cropping back is always possible; the model's mask applies sliding windows. A cache of format "int8" stores rows of
ops/cache_rows.py instead, [B, K, S, D + 4]: our attention reads them as they are, all others get dequantized values.

A CUDA graph must not depend on a host number that changes at every step. For a capture, `hold_place` gives the slots a
device tensor with the next token's index. Attention then reads all S keys, and a mask hides the unused ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from infuse import memory
from infuse.errors import ContextLimitError, InfuseError, UnsupportedCall
from infuse.ops.cache_rows import SCALE_BYTES, dequantize_rows, quantize_rows

_ROUND_TOKENS = 64  # capacities are multiples of this, so that growth is rare


class KVSlot(CacheLayerMixin):
    """One layer's keys and values. `reserve` makes room, the caller writes, `advance` counts the tokens."""

    is_sliding = False
    is_croppable = True

    def __init__(self, capacity_tokens: int = 0, limit_tokens: int | None = None, format: str | None = None):
        self.length = 0
        self.filler: str | None = None  # what identifies the layer of ours that fills it, in copies and pickles, too
        self.format, self.dtype = format, torch.float32  # dtype: of the layer's keys and values
        self.row_lengths: Tensor | None = None
        self.place: Tensor | None = None
        self.count: Tensor | None = None
        self.key_storage: Tensor | None = None
        self.value_storage: Tensor | None = None
        self.capacity_tokens, self.limit_tokens = capacity_tokens, limit_tokens
        self.is_initialized = False
        self.unpaired = ""  # the storage to which tokens were assigned, until the other one has as many

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """True makes models pass a mask over the whole storage."""
        return self.place is not None

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Keys so far, [B, K, length, D]; dequantized if they are stored in another format."""
        return None if self.key_storage is None else self._readable(self.key_storage[:, :, : self.length])

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._assign("key_storage", states)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return None if self.value_storage is None else self._readable(self.value_storage[:, :, : self.length])

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._assign("value_storage", states)

    def _assign(self, storage: str, states: Tensor | None) -> None:
        """Hold `states` instead, as callers do that drop tokens; keys and values must end up with as many."""
        if self.row_lengths is not None or self.place is not None:
            raise UnsupportedCall("keys and values of a KVCache cannot be assigned while its rows have own lengths")
        tokens = 0 if states is None else states.shape[2]
        if tokens != self.length:
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

    def reserve(
        self, batch: int, tokens: int, kv_heads: int, width: int, like: Tensor, filler: str | None = None
    ) -> int:
        """Make room for `tokens` more, in the dtype and on the device of `like`. Return the index of the first.

        Raise ContextLimitError beyond `limit_tokens`, InfuseError for another batch than is held, and UnsupportedCall
        for other heads, width, dtype or device, or another filler.
        """
        needed = self.length + tokens
        if self.limit_tokens is not None and needed > self.limit_tokens:
            held = f"the cache holds {self.length} tokens, {tokens} more were given"
            raise ContextLimitError(f"{held}, and max_out_tokens is {self.limit_tokens}")
        storage = self.key_storage
        if storage is None:
            self._grow(batch, needed, kv_heads, width, like)
            self.filler = filler
            return self.length
        rows, heads, room, _ = storage.shape
        held_width = storage.shape[3] - (0 if self.format is None else SCALE_BYTES)
        alike = heads == kv_heads and held_width == width and self.dtype == like.dtype and storage.device == like.device
        if self.length and rows != batch:  # a batch of one would be broadcast silently
            raise InfuseError(f"the cache holds a batch of {rows}, a batch of {batch} was given")
        if self.length and not alike:
            held = f"{heads} heads of {held_width} in {self.dtype} on {storage.device}"
            given = f"{kv_heads} heads of {width} in {like.dtype} on {like.device}"
            what = f"the cache was filled with {held}, and this layer makes {given}"
            raise UnsupportedCall(f"past_key_values: {what}; fill a new cache with this model, or reset() this one")
        if filler is not self.filler:
            self._fill_by(filler)
        if room < needed or rows != batch or not alike:
            self._grow(batch, needed, kv_heads, width, like)
        return self.length

    def _fill_by(self, filler: str | None) -> None:
        """Raise UnsupportedCall if another layer has filled this slot; None: it is not known which one."""
        if filler is None:
            return
        if self.length and self.filler is not None and self.filler != filler:
            raise UnsupportedCall(
                "past_key_values: the cache was filled by another model; fill a new cache with this model, or reset() "
                "this one"
            )
        self.filler = filler

    def _grow(self, batch: int, needed: int, kv_heads: int, width: int, like: Tensor) -> None:
        if self.unpaired:  # what is assigned has no room for more, so that this is called next
            raise UnsupportedCall("past_key_values: its keys and values were assigned with different numbers of tokens")
        doubled = 2 * self.key_storage.shape[2] if self.length and self.key_storage is not None else 0
        capacity = max(needed, doubled, self.capacity_tokens)
        capacity = -(-capacity // _ROUND_TOKENS) * _ROUND_TOKENS
        if self.limit_tokens is not None:
            capacity = min(capacity, self.limit_tokens)
        with torch.inference_mode(False):  # inference tensors cannot be written to outside inference mode
            dtype, row = (like.dtype, width) if self.format is None else (torch.int8, width + SCALE_BYTES)
            shape = batch, kv_heads, capacity, row
            keys, values = (memory.empty(shape, dtype, like.device) for _ in range(2))
        if self.length:
            for new, old in zip((keys, values), self.held(), strict=True):
                new[:, :, : self.length] = old
        self.key_storage, self.value_storage, self.dtype = keys, values, like.dtype
        self.is_initialized = True

    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values so far as they are stored, [B, K, length, D] each. The storage must exist."""
        assert self.key_storage is not None and self.value_storage is not None
        return self.key_storage.narrow(2, 0, self.length), self.value_storage.narrow(2, 0, self.length)

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def take(self, other: KVSlot) -> None:
        """Append the tokens of another slot, as they are stored there in the same format."""
        assert other.format == self.format and other.key_storage is not None
        batch, kv_heads, _, width = other.key_storage.shape
        like = torch.empty(0, dtype=other.dtype, device=other.key_storage.device)
        width -= 0 if self.format is None else SCALE_BYTES
        start = self.reserve(batch, other.length, kv_heads, width, like, other.filler)
        self.advance(other.length)
        for mine, its in zip(self.held(), other.held(), strict=True):
            mine[:, :, start:] = its

    def copied(self) -> KVSlot:
        """Copy the tokens to new storage, without room for more."""
        slot = copy.copy(self)
        if self.key_storage is not None and self.value_storage is not None:
            slot.key_storage, slot.value_storage = (held.clone() for held in self.held())
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
        batch, kv_heads, _, width = key_states.shape
        self.reserve(batch, 0, kv_heads, width, key_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, filler: str | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.place is not None:
            return self._update_place(key_states, value_states)
        batch, kv_heads, tokens, width = key_states.shape
        if value_states.shape[3] != width:  # as in latent attention
            raise UnsupportedCall(
                f"past_key_values: a KVCache holds keys and values of one width, and this layer makes keys of {width} "
                f"and values of {value_states.shape[3]}; give a DynamicCache"
            )
        start = self.reserve(batch, tokens, kv_heads, width, key_states, filler)
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
        return self.length if self.place is None else self.place  # type: ignore[return-value]

    def get_max_length(self) -> int:
        return -1 if self.limit_tokens is None else self.limit_tokens

    def get_max_cache_shape(self) -> int:
        """Same as `get_max_length`, under its name before transformers 5.2x."""
        return self.get_max_length()

    def reset(self) -> None:
        self.length, self.row_lengths, self.unpaired = 0, None, ""
        self.place = self.count = None

    def crop(self, tokens: int) -> None:
        """Keep the first `tokens` if positive, drop the last `-tokens` if negative (both conventions are in use)."""
        self.length = min(self.length, tokens) if tokens > 0 else max(self.length + tokens, 0)
        rows = self.row_lengths
        if rows is not None:
            self.row_lengths = rows.clamp(max=tokens) if tokens > 0 else (rows + tokens).clamp(min=0)

    def _select(self, rows: Tensor) -> None:
        if self.key_storage is not None and self.value_storage is not None:
            rows = rows.to(self.key_storage.device)
            self.key_storage = self.key_storage.index_select(0, rows)
            self.value_storage = self.value_storage.index_select(0, rows)
        if self.row_lengths is not None:
            self.row_lengths = self.row_lengths.index_select(0, rows.to(self.row_lengths.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def reorder_in_place(self, beam_idx: Tensor) -> None:
        """Reorder without new storage if the number of rows stays the same. This copies the tokens twice."""
        if self.key_storage is None or len(beam_idx) != self.key_storage.shape[0]:
            return self._select(beam_idx)
        rows = beam_idx.to(self.key_storage.device)
        for held in self.held():
            held.copy_(held.index_select(0, rows))
        if self.row_lengths is not None:
            self.row_lengths = self.row_lengths.index_select(0, rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.key_storage is not None:
            self._select(torch.arange(self.key_storage.shape[0]).repeat_interleave(repeats))


class KVCache(Cache):
    """A cache of KVSlots, created when layers first ask for them.

    `capacity_tokens` preallocates room for that many tokens; `limit_tokens` caps them (ContextLimitError beyond).
    Without them the storage starts with room for the first call and doubles. `format`: None or one of
    ops.cache_rows.FORMATS.
    """

    layers: list[KVSlot]  # type: ignore[assignment]

    def __init__(self, capacity_tokens: int = 0, limit_tokens: int | None = None, format: str | None = None):
        self.format, self.limit_tokens = format, limit_tokens
        self._make_slot = partial(KVSlot, capacity_tokens, limit_tokens, format)
        super().__init__(layer_class_to_replicate=self._make_slot)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, None]]:
        """Keys and values of each layer, and no window, as DynamicCache gives them."""
        return ((slot.keys, slot.values, None) for slot in self.layers)

    @property
    def max_cache_len(self) -> int:
        """Most tokens, -1 without a limit: PEFT's prefix tuning asks for it."""
        return -1 if self.limit_tokens is None else self.limit_tokens

    def slot(self, index: int) -> KVSlot:
        """Return the slot of layer `index`, creating it if necessary."""
        layers = self.layers
        while len(layers) <= index:
            layers.append(self._make_slot())
        return layers[index]

    def crop_rows(self, lengths: Tensor) -> None:
        """Keep the first lengths[b] tokens of row b ([B] integers) in every layer: a right-padded batch becomes dense.

        Later tokens are appended at each row's own end, with the caller's position ids and without an attention mask.
        A sliding window in the model's mask counts from the longest row: for a row that is d tokens shorter, the window
        is d tokens smaller.
        """
        for slot in self.layers:
            slot.crop_rows(lengths)

    def hold_place(self, place: Tensor | None, count: Tensor | None = None) -> None:
        """Write the next token at index `place`; the cache then holds `count` = place + 1 tokens.

        Both are integer tensors on the device that the caller increments. None: count on the host again.
        All layers must hold the same tokens. Raise InfuseError if rows have different lengths.
        """
        if any(slot.row_lengths is not None for slot in self.layers):
            raise InfuseError("rows of different lengths have no common place")
        for slot in self.layers:
            slot.place, slot.count = place, count

    def even(self, batch: int) -> bool:
        """Whether all layers hold `batch` rows of the same number of tokens, at least one, with the same capacity."""
        storages = self.storages()
        capacities = {tuple(storage.shape[::2]) for storage in storages}
        lengths = {slot.length if slot.row_lengths is None else 0 for slot in self.layers}
        alike = len(storages) == 2 * len(self.layers) and len(capacities) == len(lengths) == 1 and 0 not in lengths
        return alike and storages[0].shape[0] == batch

    def storages(self) -> list[Tensor]:
        """Stored keys and values of all layers that have storage, [B, K, S, D] each."""
        return [t for slot in self.layers for t in (slot.key_storage, slot.value_storage) if t is not None]

    def nbytes(self) -> int:
        """Size of all storage in bytes."""
        return sum(t.nbytes for t in self.storages())


def self_attention_cache(cache: Any, layer: str, index: int | None) -> Any:
    """Return the cache for self-attention, which is the first half of an encoder-decoder pair.

    Raise UnsupportedCall if the layer has no index or `cache` is not a transformers Cache.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if index is None:
        raise UnsupportedCall(
            f"{layer} was given a cache, but it has no layer index to store keys and values under; call it without"
        )
    if not isinstance(cache, Cache) and not callable(getattr(cache, "get_mask_sizes", None)):
        raise UnsupportedCall(
            f"{layer} was given {type(cache).__name__} as its cache; "
            "give a transformers Cache (DynamicCache, StaticCache, ...)"
        )
    return cache
