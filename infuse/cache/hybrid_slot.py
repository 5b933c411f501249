"""HybridSlot: keys and values of a layer whose states of a recurrence lie beside them, as in Falcon-H1 and Zamba2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

from infuse.cache.recurrence_slot import StateSlot
from infuse.cache.shown_states import LinearLayer
from infuse.cache.slot import KVSlot


class HybridSlot(LinearLayer, KVSlot, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """A KVSlot with the slot of the states, `beside`.

    To our layers, which ask the cache for each of the two, it is the KVSlot. What moves or drops rows and tokens does
    that in both.
    """

    def __init__(self, capacity_tokens: int = 0, limit_tokens: int | None = None, format: str | None = None):
        super().__init__(capacity_tokens, limit_tokens, format)
        self.beside = StateSlot(capacity_tokens, limit_tokens, format)

    @classmethod
    def of(cls, slot: KVSlot | StateSlot) -> HybridSlot:
        """Take over what a slot of one kind holds."""
        made = cls(slot.capacity_tokens, slot.limit_tokens, slot.format)
        if isinstance(slot, StateSlot):
            made.beside = slot
        else:
            vars(made).update(vars(slot))
        return made

    @property
    def of_states(self) -> StateSlot:
        return self.beside

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return self.beside.is_croppable

    def lazy_initialization(self, *args: Any, **states: Any) -> None:
        """Store keys and values by position, states by name, as transformers' layers call it."""
        if args:
            super().lazy_initialization(*args)
        else:
            self.beside.lazy_initialization(**states)

    def move(self, device: torch.device) -> None:
        super().move(device)
        self.beside.move(device)

    def copied(self) -> HybridSlot:
        slot: Any = super().copied()
        slot.beside = self.beside.copied()
        return slot

    def reset(self) -> None:
        super().reset()
        self.beside.reset()

    def crop(self, tokens: int) -> None:
        self.beside.crop(tokens)  # first, as it may refuse
        super().crop(tokens)

    def rewind(self, tokens: int) -> int:
        kept = self.beside.rewind(tokens) if self.beside.is_initialized else tokens
        KVSlot.crop(self, min(kept, self.length) - self.length)
        return self.length

    def _select(self, rows: Tensor) -> None:
        super()._select(rows)
        self.beside._select(rows)

    def reorder_in_place(self, beam_idx: Tensor) -> None:
        if self.rows != len(beam_idx):
            return self._select(beam_idx)
        super().reorder_in_place(beam_idx)
        self.beside.reorder_in_place(beam_idx)
