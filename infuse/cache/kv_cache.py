"""KVCache: one slot per layer, of the kind that the layer requests, behind transformers' Cache protocol.

The model's mask applies sliding windows. Our attention reads an int8 cache as stored; others get dequantized values.

A CUDA graph must not depend on a host number that changes at every step. For a capture, `hold_place` gives the slots a
device tensor with the next token's index. Attention then reads all S keys, and a mask hides the unused ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, overload

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from infuse.cache.hybrid_slot import HybridSlot
from infuse.cache.recurrence_slot import StateSlot
from infuse.cache.shown_states import CONV, STATE, LinearLayer
from infuse.cache.slot import KVSlot, Slot
from infuse.ground.authors import LIBRARIES, package_of
from infuse.ground.errors import InfuseError, UnsupportedCall
from infuse.native import kernels

Kind = TypeVar("Kind", bound=Slot)
OF_NOTHING = "DummyLayer"  # the class of a layer of transformers' caches that holds nothing; not all versions have it


class KVCache(DynamicCache):
    """A cache of slots, created when layers first request them. Models that are not ours may fill it and go on with it.

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
        self.counts_states = False  # see `is_linear`
        self._are_lent = False  # whether another model was ever shown states
        self._records = False  # whether transformers' loops drop tokens that another model appends
        Cache.__init__(self, layer_class_to_replicate=make_slot)  # type: ignore[arg-type]

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
        if not isinstance(slot, kind):
            slot = layers[index] = self._replaced(index, slot, kind)
        return slot

    def _replaced(self, index: int, slot: Slot, kind: type[Kind]) -> Any:
        """The slot that takes the place of one of another kind, of a layer that fills it for the first time."""
        if not slot.length:  # created as a filler for a later layer, or by another model
            return kind(*self._settings)
        if kind is KVSlot and isinstance(slot, StateSlot) and slot.filler is None:  # as other models' hybrids call it
            return HybridSlot.of(slot)
        raise UnsupportedCall(
            f"past_key_values: layer {index} of the cache was filled as a {type(slot).__name__} by another "
            "model; fill a new cache with this one"
        )

    def slot_of(self, index: int, part: str, kind: type[Kind]) -> Kind:
        """Return the slot of a further part of layer `index`, creating it if necessary.

        That of states is also in `layers`, in a HybridSlot.
        """
        slot: Any = self.more.get((index, part))
        if type(slot) is not kind:
            slot = self._beside(index) if kind is StateSlot else kind(*self._settings)
            self.more[index, part] = slot
        return slot

    def _beside(self, index: int) -> StateSlot:
        """The states beside the keys and values of layer `index`."""
        slot = self.slot(index)
        if not isinstance(slot, HybridSlot):
            slot = self.layers[index] = HybridSlot.of(slot)
        return slot.beside

    # -- models that are not ours

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        slot = self.slot(layer_idx)
        keys_values = slot.update(key_states, value_states, *args, **kwargs)
        if self._are_lent:
            self._count_states(layer_idx, slot.length, key_states.shape[2])
        return keys_values

    def _count_states(self, index: int, length: int, tokens: int) -> None:
        """Count the tokens of all states, of which those behind layer `index` have yet to see the last `tokens`."""
        for place, layer in enumerate(self.layers):
            if isinstance(layer, LinearLayer) and layer.of_states.states:
                layer.of_states.count(length, ahead=tokens if place >= index else 0)

    def states_slots(self) -> list[StateSlot]:
        """All slots of states, those beside keys and values, too."""
        own = [slot.beside if isinstance(slot, HybridSlot) else slot for slot in self.layers]
        return [slot for slot in own if isinstance(slot, StateSlot)]

    def _lent(self, index: int, number: int) -> StateSlot:
        """The states of layer `index`, for a layer of another model."""
        if number:
            raise UnsupportedCall(
                f"state_idx: state {number} of layer {index} was asked for, and a KVCache holds one state of a kind a "
                "layer; leave the cache to generate(), or give DynamicCache(config=model.config)"
            )
        self._are_lent = True
        layer = self.layers[index] if index < len(self.layers) else None
        beside = isinstance(layer, KVSlot) and (layer.length or isinstance(layer, HybridSlot))
        slot = self._beside(index) if beside else self.slot(index, StateSlot)
        if self._records and not slot.length:
            slot.record(True)
        return slot

    def activate_past_recording(self) -> None:
        self._records = True
        for slot in self.states_slots():
            slot.record(True)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        slot = self._lent(layer_idx, state_idx)
        return slot.shown(CONV) if slot.length else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        slot = self._lent(layer_idx, state_idx)
        return slot.shown(STATE) if slot.length else None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return self._lent(layer_idx, state_idx).update_conv_state(conv_states, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return self._lent(layer_idx, state_idx).update_recurrent_state(recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether layer `layer_idx`, or the last one with a state, has one. ValueError if it has none at any time."""
        layers = self.layers
        if layer_idx is not None and layer_idx >= len(layers):
            return False
        asked = reversed(layers) if layer_idx is None else [layers[layer_idx]]
        for slot in asked:
            if isinstance(slot, LinearLayer):
                return slot.of_states.length > 0
        if layer_idx is not None and not any(slot.length for slot in layers):  # no layer has shown its kind yet
            return False
        which = "no layer" if layer_idx is None else f"layer {layer_idx} not"
        raise ValueError(f"has_previous_state was asked of a cache of which {which} holds a recurrence's state")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens. ValueError if there are states alone, and another model has appended uncounted tokens."""
        slot = self._counting(layer_idx)
        if type(slot) is StateSlot and slot.place is None and not slot.counts:
            raise ValueError("get_seq_length: another model appended tokens to states, which do not count them")
        return 0 if slot is None else slot.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        slot = self._counting(layer_idx)
        return (query_length, 0) if slot is None else slot.get_mask_sizes(query_length)

    def _counting(self, index: int) -> Any:
        """The slot that counts the tokens of layer `index`: for states the first with keys, if there is one."""
        layers = self.layers
        if index >= len(layers):
            return None
        slot = layers[index]
        if type(slot) is StateSlot and slot.place is None:
            return next((each for each in layers if each.length and isinstance(each, KVSlot)), slot)
        return slot

    @property
    def is_linear(self) -> list[bool]:
        """Which layers hold states alone.

        transformers' `generate` runs the whole text again if all do, as their own count no tokens. Ours do, so the
        `generate` of our models sets `counts_states` for the call.
        """
        linear = [type(slot) is StateSlot for slot in self.layers]
        counted = self.counts_states and all(linear) and all(slot.counts for slot in self.layers)
        return [False] * len(linear) if counted else linear

    @property
    def is_dummy(self) -> list[bool]:
        """Which layers hold nothing: transformers looks for a mask's size in the first of the others."""
        return [not slot.length for slot in self.layers]

    # -- all layers

    @property
    def slots(self) -> list[Slot]:
        return [*self.layers, *self.more.values()]

    @property
    def _apart(self) -> list[Slot]:
        """All slots but those of states beside others, to which a HybridSlot passes on what it does."""
        return [*self.layers, *(slot for slot in self.more.values() if not isinstance(slot, StateSlot))]

    def copied_slots(self) -> tuple[list[Any], dict[tuple[int, str], Slot]]:
        """Copies for `layers` and `more` of another cache."""
        layers = [slot.copied() for slot in self.layers]
        more = {
            place: layers[place[0]].beside if isinstance(slot, StateSlot) else slot.copied()
            for place, slot in self.more.items()
        }
        return layers, more

    @property
    def is_croppable(self) -> bool:
        """Whether tokens may be dropped: transformers' loops ask before they verify candidates."""
        return all(slot.is_croppable for slot in self.slots)

    def reset(self) -> None:
        for slot in self.slots:
            slot.reset()

    def crop(self, tokens: int) -> None:
        for slot in self._apart:
            slot.crop(tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for slot in self._apart:
            slot.reorder_cache(beam_idx)

    def reorder_in_place(self, beam_idx: Tensor) -> None:
        """Reorder rows where they are stored, so that a program that holds the storages goes on."""
        slots, library = [slot for slot in self.slots if slot.is_initialized], kernels()
        plain = all(type(slot) is KVSlot and slot.row_lengths is None and slot.rows == len(beam_idx) for slot in slots)
        lengths, storages = {slot.length for slot in slots}, [storage for slot in slots for storage in slot.storages]
        plain = plain and all(each.device.type == "cpu" and each.is_contiguous() for each in storages)
        if plain and len(lengths) == 1 and not isinstance(library, str):
            return library.reorder.default(storages, beam_idx.tolist(), lengths.pop())
        for slot in self._apart:
            slot.reorder_in_place(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for slot in self._apart:
            slot.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        for slot in self._apart:
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
        for slot in self.states_slots():
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


@contextmanager
def counting_states(cache: Any) -> Iterator[None]:
    """Let transformers' `generate` ask a cache of nothing but states for its tokens, in a call of a model of ours."""
    if not isinstance(cache, KVCache):
        yield
        return
    cache.counts_states = True
    try:
        yield
    finally:
        cache.counts_states = False


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


def reads_keywords(cache: Any) -> bool:
    """Whether a cache may look at keywords of the call: one of a user's class, or with such a half or layer."""
    halves = [cache] if pair_of(cache) is None else [cache, cache.self_attention_cache, cache.cross_attention_cache]
    layers = [layer for each in halves for layer in getattr(each, "layers", ())]
    return any(package_of(type(each)) not in LIBRARIES for each in (*halves, *layers) if each is not None)


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
