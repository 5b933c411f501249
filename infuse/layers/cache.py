"""KVCache: one slot per layer, of the kind that the layer requests, behind transformers' Cache protocol.

The model's mask applies sliding windows. Our attention reads an int8 cache as stored; others get dequantized values.

A CUDA graph must not depend on a host number that changes at every step. For a capture, `hold_place` gives the slots a
device tensor with the next token's index. Attention then reads all S keys, and a mask hides the unused ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar, overload

from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from infuse.errors import InfuseError, UnsupportedCall
from infuse.layers.recurrence_slot import StateSlot
from infuse.layers.slot import KVSlot, Slot
from infuse.native import kernels

Kind = TypeVar("Kind", bound=Slot)
OF_NOTHING = "DummyLayer"  # the class of a layer of transformers' caches that holds nothing; not all versions have it


class KVCache(Cache):
    """A cache of slots, created when layers first request them.

    `capacity_tokens` preallocates room for that many tokens; `limit_tokens` caps them (ContextLimitError beyond).
    Without them the storage starts with room for the first call and doubles. `format`: None or one of
    ops.cache_rows.FORMATS.
    """

    layers: list[Any]  # Slots

    def __init__(self, capacity_tokens: int = 0, limit_tokens: int | None = None, format: str | None = None):
        self.format, self.limit_tokens = format, limit_tokens
        self._settings = capacity_tokens, limit_tokens, format
        self.more: dict[tuple[int, str], Slot] = {}  # slots of a layer's other parts, by its index and their names
        make_slot = partial(KVSlot, capacity_tokens, limit_tokens, format)
        super().__init__(layer_class_to_replicate=make_slot)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, None]]:
        """Iterate over (keys, values, no window) of each layer, like DynamicCache."""
        return ((getattr(slot, "keys", None), getattr(slot, "values", None), None) for slot in self.layers)

    @property
    def max_cache_len(self) -> int:
        """Maximum number of tokens, -1 without a limit; read by PEFT's prefix tuning."""
        return -1 if self.limit_tokens is None else self.limit_tokens

    @overload
    def slot(self, index: int) -> KVSlot: ...
    @overload
    def slot(self, index: int, kind: type[Kind]) -> Kind: ...
    def slot(self, index: int, kind: Any = KVSlot) -> Any:
        """Return the slot of layer `index`, creating it if necessary. UnsupportedCall if it is of another kind."""
        layers = self.layers
        while len(layers) <= index:
            layers.append(kind(*self._settings))
        slot = layers[index]
        if type(slot) is not kind:
            if slot.length:
                raise UnsupportedCall(
                    f"past_key_values: layer {index} of the cache was filled as a {type(slot).__name__} by another "
                    "model; fill a new cache with this one"
                )
            slot = layers[index] = kind(*self._settings)  # created as a filler for a later layer, or by another model
        return slot

    def slot_of(self, index: int, part: str, kind: type[Kind]) -> Kind:
        """Return the slot of a further part of layer `index`, creating it if necessary."""
        slot = self.more.get((index, part))
        if type(slot) is not kind:
            slot = self.more[index, part] = kind(*self._settings)
        return slot

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether layer `layer_idx`, or the last one with a state, has one. ValueError if it has none at any time."""
        states = {index: slot for index, slot in enumerate(self.layers) if isinstance(slot, StateSlot)}
        states |= {index: slot for (index, _), slot in self.more.items() if isinstance(slot, StateSlot)}
        index = max(states, default=None) if layer_idx is None else layer_idx
        return states[index].length > 0 if index in states else super().has_previous_state(layer_idx, state_idx)

    @property
    def slots(self) -> list[Slot]:
        return [*self.layers, *self.more.values()]

    @property
    def is_croppable(self) -> bool:
        """Whether tokens may be dropped: transformers' loops ask before they verify candidates."""
        return all(slot.is_croppable for slot in self.slots)

    def reset(self) -> None:
        for slot in self.slots:
            slot.reset()

    def crop(self, tokens: int) -> None:
        for slot in self.slots:
            slot.crop(tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for slot in self.slots:
            slot.reorder_cache(beam_idx)

    def reorder_in_place(self, beam_idx: Tensor) -> None:
        """Reorder rows where they are stored, so that a program that holds the storages goes on."""
        slots, library = [slot for slot in self.slots if slot.is_initialized], kernels()
        plain = all(type(slot) is KVSlot and slot.row_lengths is None and slot.rows == len(beam_idx) for slot in slots)
        lengths, storages = {slot.length for slot in slots}, [storage for slot in slots for storage in slot.storages]
        plain = plain and all(each.device.type == "cpu" and each.is_contiguous() for each in storages)
        if plain and len(lengths) == 1 and not isinstance(library, str):
            return library.reorder.default(storages, beam_idx.tolist(), lengths.pop())
        for slot in self.slots:
            slot.reorder_in_place(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for slot in self.slots:
            slot.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        for slot in self.slots:
            slot.batch_select_indices(indices)

    def snapshot(self, *, each: bool = False) -> None:
        """Mark a point that `rewind` can return to; with `each`, the same after each later token, until the next call.

        A recurrence keeps its state at each of these points.
        """
        for slot in self.slots:
            slot.snapshot(each=each)

    def rewind(self, tokens: int) -> int:
        """Drop the last tokens so that at most `tokens` are left; return how many are left.

        Layers with a recurrent state can only go back to the points that `snapshot` marked, or to zero tokens.
        """
        while (left := min((slot.rewind(tokens) for slot in self.held_slots), default=0)) != tokens:
            tokens = left  # until all layers have a point of as many tokens
        return tokens

    def crop_rows(self, lengths: Tensor) -> None:
        """Keep the first lengths[b] tokens of row b ([B] integers) in every layer: a right-padded batch becomes dense.

        Later tokens are appended at each row's own end, with the caller's position ids and without an attention mask.
        A sliding window in the model's mask counts from the longest row: for a row that is d tokens shorter, the window
        is d tokens smaller.
        """
        for slot in self.slots:
            slot.crop_rows(lengths)

    def hold_place(self, place: Tensor | None, count: Tensor | None = None, room: int = 0) -> None:
        """Write the next token at index `place`; the cache then holds `count` = place + 1 tokens, of at most `room`.

        Both are integer tensors on the device that the caller increments. None: count on the host again.
        All layers must hold the same tokens. Raise InfuseError if rows have different lengths.
        """
        if any(slot.row_lengths is not None for slot in self.layers):
            raise InfuseError("rows of different lengths have no common place")
        for slot in self.slots:
            slot.hold_place(place, count, room)

    @property
    def held_slots(self) -> list[Slot]:
        """Those that have been filled; the others keep a place for a layer that caches nothing."""
        return [slot for slot in self.slots if slot.is_initialized]

    def even(self, batch: int) -> bool:
        """Whether all layers hold `batch` rows of equal lengths and capacities from which a graph can go on."""
        held = self.held_slots
        lengths, rooms = {slot.length for slot in held}, {each.shape[2] for each in self.token_storages()}
        even = len(lengths) == 1 and 0 not in lengths and len(rooms) <= 1
        return even and all(slot.can_hold_place for slot in self.slots) and all(slot.rows == batch for slot in held)

    def settle(self) -> None:
        """Move the states of recurrences to where graphs find them."""
        for slot in self.slots:
            if isinstance(slot, StateSlot):
                slot.settle()

    def token_storages(self) -> list[Tensor]:
        """Storage of keys and values alone, [B, K, S, D] each."""
        return [storage for slot in self.slots if isinstance(slot, KVSlot) for storage in slot.storages]

    def storages(self) -> list[Tensor]:
        """Storage of all layers: keys and values, [B, K, S, D] each, and states."""
        return [storage for slot in self.slots for storage in slot.storages]

    def nbytes(self) -> int:
        """Size of all storage in bytes."""
        return sum(t.nbytes for t in self.storages())


def first_counts(cache: Cache) -> bool:
    """Whether the first layer of a cache of transformers holds something: models ask it how many tokens there are."""
    return [type(layer).__name__ for layer in cache.layers[:1]] != [OF_NOTHING]


def pair_of(cache: Any) -> EncoderDecoderCache | None:
    """The cache if it is a pair, of tokens and of an encoder's states."""
    return cache if isinstance(cache, EncoderDecoderCache) else None


def keys_in(cache: Any, index: int | None, tokens: int) -> tuple[Any, int]:
    """The place of the first of some new tokens among a layer's keys, and how many keys there are with the tokens."""
    if cache is None:
        return 0, tokens
    if isinstance(cache, KVCache):
        slot = cache.slot(index or 0)
        return slot.get_seq_length(), slot.get_mask_sizes(tokens)[0]
    return cache.get_seq_length(index), cache.get_mask_sizes(tokens, index)[0]


def tokens_in(cache: Any) -> Any:
    """The number of tokens that a cache has seen, or a tensor with it; None for a cache of transformers that holds
    nothing but states, and does not know.
    """
    try:
        return cache.get_seq_length()
    except ValueError:
        return None


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
