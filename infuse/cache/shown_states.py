"""A recurrence's states as transformers' layers of linear attention show them, so that its models go on with them.

The convolution's state is [B, C, taps] there and [B, taps, C] in a StateSlot; for state spaces the other state has its
last two axes the other way round, too. What these models get are views: they write to them in place.

5.10 has one state of each kind; later versions number them, and ours have number 0.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

CONV, STATE = "conv", "state"  # names of states in transformers' caches, too
NUMBERS_STATES = "number_of_states" in inspect.signature(LinearAttentionCacheLayerMixin.__init__).parameters


def first_of(states: Any) -> Any:
    """State number 0, or what is known of it, in a layer of transformers' caches of any version."""
    return states.get(0) if isinstance(states, Mapping) else states


def _numbered(value: Any) -> Any:
    return MappingProxyType({0: value}) if NUMBERS_STATES else value


class _Shown(dict):
    """The states of one kind by number. One that is assigned is stored in the slot."""

    def __init__(self, slot: Any, name: str):
        super().__init__({0: slot.shown(name)})
        self._slot, self._name = slot, name

    def __setitem__(self, number: int, state: Tensor) -> None:
        super().__setitem__(number, state)
        self._slot.assign(self._name, state)


class LinearLayer:
    """Gives a slot's states the attributes of transformers' LinearAttentionLayer."""

    number_of_states = 1

    @property
    @abstractmethod
    def of_states(self) -> Any:
        """The StateSlot with the states."""

    @property
    def conv_states(self) -> Any:
        """The convolution's last inputs, [B, C, taps], or None, by number."""
        return _Shown(self.of_states, CONV) if NUMBERS_STATES else self.of_states.shown(CONV)

    @conv_states.setter
    def conv_states(self, state: Any) -> None:
        self.of_states.assign(CONV, first_of(state))

    @property
    def recurrent_states(self) -> Any:
        """The recurrence's state, or None, by number."""
        return _Shown(self.of_states, STATE) if NUMBERS_STATES else self.of_states.shown(STATE)

    @recurrent_states.setter
    def recurrent_states(self, state: Any) -> None:
        self.of_states.assign(STATE, first_of(state))

    @property
    def has_previous_state(self) -> Any:
        return _numbered(self.of_states.length > 0)

    @property
    def is_conv_states_initialized(self) -> Any:
        return _numbered(CONV in self.of_states.states)

    @property
    def is_recurrent_states_initialized(self) -> Any:
        return _numbered(STATE in self.of_states.states)

    @property
    def conv_kernel_size(self) -> Any:
        conv = self.of_states.states.get(CONV)
        return _numbered(None if conv is None else conv.shape[1])

    @property
    def record_past(self) -> bool:
        """Whether `crop` can drop tokens that another model's layer has appended to a convolution's state."""
        return self.of_states.records

    @record_past.setter
    def record_past(self, records: bool) -> None:
        self.of_states.record(records)

    def activate_past_recording(self) -> None:
        self.of_states.record(True)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Append the convolution's inputs [B, C, T]; return them behind those before, as transformers' version does."""
        slot = self.of_states
        if slot.length:
            before = slot.shown(CONV)
            assert before is not None
            taps, full = before.shape[-1], torch.cat((before, conv_states), dim=-1)
        else:
            taps = conv_kernel_size or conv_states.shape[-1]
            full = F.pad(conv_states, (max(taps - conv_states.shape[-1], 0), 0))
        # Without the kernel's size, models of earlier versions pad or cut what they give.
        slot.append_conv(full, taps, conv_states.shape[-1], counted=conv_kernel_size is not None)
        return full if NUMBERS_STATES else full[..., -taps:]

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        slot = self.of_states
        slot.assign(STATE, recurrent_states)
        state = slot.shown(STATE)
        assert state is not None
        return state

    def initialize_states(
        self, conv_states: Tensor | None = None, recurrent_states: Tensor | None = None,
        state_idx: int = 0, conv_kernel_size: int | None = None,
    ) -> None:  # fmt: skip
        """Hold zeros of these shapes, which do not count as a previous state."""
        slot = self.of_states
        if conv_states is not None:
            taps = conv_kernel_size or conv_states.shape[-1]
            slot.assign(CONV, conv_states.new_zeros(*conv_states.shape[:-1], taps))
        if recurrent_states is not None:
            slot.assign(STATE, torch.zeros_like(recurrent_states))
