"""StatesCache: keys and values of an encoder's states, the second half of an encoder-decoder's cache.

Rows of a batch that read the same states, such as the beams of one text, share them: they are computed, stored and read
once, and beams that change places move nothing. `keys` and `values` give each row its own, as transformers' caches do.
MadeSlot holds whatever else is computed once of another input.

Suffixes: R rows of states, H heads, L states, D head width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from infuse.cache.slot import Slot
from infuse.ground import memory
from infuse.ground.errors import UnsupportedCall
from infuse.ops.cache_rows import dequantize_rows, quantize_rows


class EncodedSlot(Slot, DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values [R, H, L, D], each row for `repeats` consecutive rows of the batch.

    With format "int8" rows are stored as in ops/cache_rows.py.
    """

    is_croppable = True
    is_compileable = False

    def __init__(self, format: str | None = None):
        super().__init__(format=format)
        self.repeats = 1
        self._dtype = torch.float32  # of the layer's keys and values
        self._held: tuple[Tensor, ...] = ()

    @property
    def storages(self) -> list[Tensor]:
        """Stored keys and values [R, H, L, D]; none before the first call."""
        return list(self._held)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return self._of_each_row(0)

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._assign(0, states)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self._of_each_row(1)

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._assign(1, states)

    def _assign(self, index: int, states: Tensor | None) -> None:
        """Replace keys or values by `states` [B, H, L, D], as callers do that change or move them."""
        held = self.rows_of_batch()
        if not held or states is None:
            raise UnsupportedCall(
                "keys and values of an encoder's states: only tensors can be assigned, and only after the first call; "
                "reset() drops them"
            )
        held[index] = self._stored(states)
        self._held, self.repeats, self.length = tuple(held), 1, states.shape[2]

    def _of_each_row(self, index: int) -> Tensor | None:
        if not self._held:
            return None
        readable = self.readable()[index]
        return readable if self.repeats == 1 else readable.repeat_interleave(self.repeats, 0)

    def readable(self) -> tuple[Tensor, ...]:
        """Keys and values [R, H, L, D] in the layer's dtype."""
        return self._held if self.format is None else tuple(dequantize_rows(each, self._dtype) for each in self._held)

    def fill(self, keys: Tensor, values: Tensor, repeats: int = 1) -> None:
        """Store keys and values [R, H, L, D], one row after another, for `repeats` rows of the batch each."""
        self._dtype, self.repeats, self.length = keys.dtype, repeats, keys.shape[2]
        self._held, self.is_initialized = tuple(map(self._stored, (keys, values))), True

    def _stored(self, states: Tensor) -> Tensor:
        if self.format is not None:
            return quantize_rows(states)
        with torch.inference_mode(False):
            made = memory.empty(states.shape, states.dtype, states.device)
        return made.copy_(states.detach())

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._held:  # as transformers' caches do
            keys, values = self.keys, self.values
            assert keys is not None and values is not None
            key_states, value_states = torch.cat((keys, key_states), 2), torch.cat((values, value_states), 2)
        self.fill(key_states, value_states)
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        return keys, values

    @property
    def rows(self) -> int:
        return self._held[0].shape[0] * self.repeats if self._held else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def reset(self) -> None:
        self._held, self.length, self.repeats, self.is_initialized = (), 0, 1, False

    def crop(self, tokens: int) -> None:
        self.length = min(self.length, tokens) if tokens > 0 else max(self.length + tokens, 0)
        self._held = tuple(each[:, :, : self.length] for each in self._held)

    def rewind(self, tokens: int) -> int:
        return tokens

    def move(self, device: torch.device) -> None:
        self._held = tuple(each.to(device) for each in self._held)

    def copied(self) -> EncodedSlot:
        slot = copy.copy(self)
        slot._held = tuple(each.clone() for each in self._held)
        return slot

    def rows_of_batch(self) -> list[Tensor]:
        """Stored keys and values [B, H, L, D], with a row for each row of the batch."""
        return [each if self.repeats == 1 else each.repeat_interleave(self.repeats, 0) for each in self._held]

    def with_room(self, more: int) -> EncodedSlot:
        """Return a copy with its own storage, a row for each row of the batch, and zeros for `more` states."""
        slot = copy.copy(self)
        slot._held = tuple(F.pad(each, (0, 0, 0, more)).clone() for each in self.rows_of_batch())
        slot.repeats, slot.length = 1, self.length + more if self._held else 0
        return slot

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.repeats *= repeats

    def reorder_in_place(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def _select(self, rows: Tensor) -> None:
        if not self._held:
            return
        device = self._held[0].device
        if self.repeats == 1 and device.type != "cpu":  # where asking for numbers would make the host wait
            self._held = tuple(each.index_select(0, rows.to(device)) for each in self._held)
            return
        sources = (rows // self.repeats).tolist()
        together = sources[:: self.repeats]
        if [source for source in together for _ in range(self.repeats)] != sources:
            together, self.repeats = sources, 1
        if together != list(range(self._held[0].shape[0])):
            index = torch.tensor(together, device=device)
            self._held = tuple(each.index_select(0, index) for each in self._held)


class StatesCache(DynamicCache):
    """Slots of an encoder's states, behind transformers' protocol for caches."""

    layers: list[Any]  # EncodedSlots

    def __init__(self, format: str | None = None):
        self.format = format
        self._repeats: tuple[Tensor | None, int] = None, 1
        Cache.__init__(self, layer_class_to_replicate=partial(EncodedSlot, format))  # type: ignore[arg-type]

    def slot(self, index: int) -> EncodedSlot:
        """Return the slot of layer `index`, creating it if necessary."""
        while len(self.layers) <= index:
            self.layers.append(EncodedSlot(self.format))
        return self.layers[index]

    def repeats_of(self, states: Tensor) -> int:
        """How many consecutive rows of states [B, L, C] are equal: 1 if it is not the same number in all of the batch.

        Each layer of a call asks for the same tensor.
        """
        if self._repeats[0] is not states:
            self._repeats = states, _repeats_of(states)
        return self._repeats[1]

    def reset(self) -> None:
        super().reset()
        self._repeats = None, 1


def _repeats_of(states: Tensor) -> int:
    batch = max(states.shape[0], 1)
    if states.device.type != "cpu":  # counting would make the host wait there
        return 1
    equal = [torch.equal(states[row], states[row - 1]) for row in range(1, batch)]
    starts = [0, *(row for row, same in enumerate(equal, 1) if not same)]
    each = starts[1] if len(starts) > 1 else batch
    return each if [*range(0, batch, each)] == starts and batch % each == 0 else 1


class MadeSlot(Slot):
    """Tensors [B, ...] computed once from another input, such as cross-attention keys and values of encoder states.

    They are recomputed if the input is another tensor or was modified.
    """

    is_croppable = True
    is_compileable = False

    def __init__(self, capacity_tokens: int = 0, limit_tokens: int | None = None, format: str | None = None):
        super().__init__(capacity_tokens, limit_tokens, format)
        self._source: tuple[Tensor | None, int] = (None, 0)  # with its version
        self._made: tuple[Tensor, ...] = ()

    def made(self, source: Tensor, make: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return make(source), cached while `source` stays the same unmodified tensor."""
        version = 0 if source.is_inference() else source._version
        if self._source[0] is not source or self._source[1] != version:
            self._source, self._made = (source, version), make(source)
        return self._made

    @property
    def storages(self) -> list[Tensor]:
        return list(self._made)

    def rewind(self, tokens: int) -> int:
        return tokens

    def crop(self, tokens: int) -> None:
        """Do nothing: it does not grow with the tokens."""

    def crop_rows(self, lengths: Tensor) -> None:
        """Do nothing: rows of the source keep their lengths."""

    def move(self, device: torch.device) -> None:
        """Do nothing: it is made again from a source on another device."""

    def copied(self) -> MadeSlot:
        slot = copy.copy(self)
        slot._made = tuple(each.clone() for each in self._made)
        return slot

    def reset(self) -> None:
        self._source, self._made = (None, 0), ()

    def _select(self, rows: Tensor) -> None:
        self._made = tuple(each.index_select(0, rows.to(each.device)) for each in self._made)

    def reorder_in_place(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)
