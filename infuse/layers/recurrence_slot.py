"""StateSlot: the states of one layer's recurrence in our cache. ForeignStates: those in a cache of transformers.

States go on from token to token, so a slot can go back only to those that were kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from infuse.errors import InfuseError, UnsupportedCall
from infuse.layers.held_count import HeldCount
from infuse.layers.slot import Slot

CONV, STATE = "conv", "state"  # names of states in transformers' caches, too


class StateSlot(Slot):
    """Recurrent states after all tokens so far: `states` [B, ...] by name, replaced as a whole by each step."""

    is_croppable = False

    def __init__(self, capacity_tokens: int = 0, limit_tokens: int | None = None, format: str | None = None):
        super().__init__(capacity_tokens, limit_tokens, format)
        self.states: Mapping[str, Tensor] = {}
        self._kept: list[tuple[int, Mapping[str, Tensor]]] = []  # to go back to: tokens and the states after them
        self._made: dict[str, Tensor] = {}  # of `row_of_states`
        self._home: dict[str, Tensor] = {}  # where graphs find the states
        self._room = 0  # most tokens inside a graph

    def begin(self, batch: int, tokens: int, filler: str | None = None) -> Mapping[str, Tensor]:
        """Return the states before the next `tokens` of each row; empty at first. Raises like KVSlot.reserve."""
        self.check_room(tokens)
        self.fill_by(filler)
        if self.length:
            self.check_batch(self.rows, batch)
        return self.states if self.length else {}

    def end(self, tokens: int, states: Mapping[str, Tensor]) -> None:
        """Store the states after these tokens. They must be new tensors, because snapshots hold the old ones.

        While `keeps_each`, call it after each token. Inside a graph they are written to where the old ones are.
        """
        if self.place is not None:
            for name, state in states.items():
                self.states[name].copy_(state)
            return
        self.states, self.is_initialized, self._made = states, True, {}
        self.advance(tokens)

    def advance(self, tokens: int) -> None:
        made, self._made = self._made, {}
        for token in range(1, tokens + 1) if made else ():
            self.end(1, {name: states[token] for name, states in made.items()})
        if made:
            return
        self.length += tokens
        if self.keeps_each:
            self._kept.append((self.length, self.states))

    def row_of_states(self, tokens: int, filler: str | None = None) -> Mapping[str, Tensor]:
        """Room for the states after each of the next `tokens`, behind those before them: [tokens + 1, B, ...] each.

        `advance` then keeps them. There must be states.
        """
        states = self.begin(1, tokens, filler)
        with torch.inference_mode(False):
            self._made = {name: state.new_empty(tokens + 1, *state.shape) for name, state in states.items()}
        for name, state in states.items():
            self._made[name][0] = state
        return self._made

    def in_place(self, batch: int, tokens: int, filler: str | None = None) -> Mapping[str, Tensor]:
        """Like `begin`, but the states may be written to; call `advance` then. There must be some."""
        states = self.begin(batch, tokens, filler)
        if any(states is kept for _, kept in self._kept):
            with torch.inference_mode(False):
                self.states = _cloned(states)
        return self.states

    @property
    def storages(self) -> list[Tensor]:
        return list((self.states or self._home).values())

    # -- inside a graph

    @property
    def can_hold_place(self) -> bool:
        return not self._kept and not self.keeps_each

    def settle(self) -> None:
        """Move the states to where they were at the last call, as a graph holds addresses; other sizes move house."""
        home, states = self._home, self.states
        if states is home:
            return
        if _kinds(home) != _kinds(states):
            with torch.inference_mode(False), torch.no_grad():
                self._home = _cloned(states)
        else:
            for name, state in states.items():
                home[name].copy_(state)
        self.states = self._home

    def hold_place(self, place: Tensor | None, count: Tensor | None, room: int) -> None:
        self.place, self._room = place, room

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length) if self.place is None else (self._room, 0)

    def get_seq_length(self) -> int:
        """Like KVSlot's."""
        place: Any = self.place
        return self.length if place is None else HeldCount.of(place, 1, self._room - 1)  # type: ignore[return-value]

    # -- back to earlier tokens, to other rows

    def snapshot(self, *, each: bool = False) -> None:
        self._kept, self.keeps_each = [(self.length, self.states)], each

    def rewind(self, tokens: int) -> int:
        if tokens < self.length:
            self._kept = [kept for kept in self._kept if kept[0] <= tokens]
            self.length, self.states = self._kept[-1] if self._kept else (0, {})
        return self.length

    def crop(self, tokens: int) -> None:
        """Crop like other slots, but only to zero tokens or to states that were kept."""
        wanted = min(self.length, tokens) if tokens > 0 else max(self.length + tokens, 0)
        if wanted not in (0, self.length, *(length for length, _ in self._kept)):
            text = f"past_key_values: a recurrence's state of {self.length} tokens cannot go back to {wanted} of them"
            raise UnsupportedCall(f"{text}; fill a new cache")
        self.rewind(wanted)

    def copied(self) -> StateSlot:
        slot = copy.copy(self)
        slot.states = _cloned(self.states)
        slot._kept, slot._home = [(length, _cloned(states)) for length, states in self._kept], {}
        return slot

    def take(self, other: StateSlot) -> None:
        self.states = _cloned(other.states)
        self.length, self.filler, self.is_initialized = other.length, other.filler, True

    def reset(self) -> None:
        self.length, self.states, self._kept, self.keeps_each = 0, {}, [], False
        self._made = {}

    def _select(self, rows: Tensor) -> None:
        def selected(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: state.index_select(0, rows.to(state.device)) for name, state in states.items()}

        self.states = selected(self.states)
        self._kept = [(length, selected(states)) for length, states in self._kept]

    def reorder_in_place(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)


def _cloned(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: state.clone() for name, state in states.items()}


def _kinds(states: Mapping[str, Tensor]) -> list[tuple]:
    return [(name, state.shape, state.dtype, state.device) for name, state in states.items()]


class ForeignStates:
    """Adapter with StateSlot's interface for the recurrent states in a transformers cache.

    The convolution's inputs are the state CONV, [B, C, K or more]; the other state is STATE, if there is one.
    """

    def __init__(self, layer: Any):
        self._layer = layer

    def begin(self, batch: int, tokens: int, filler: str | None = None) -> Mapping[str, Tensor]:
        states = {CONV: self._layer.conv_states.get(0), STATE: self._layer.recurrent_states.get(0)}
        there = {name: state for name, state in states.items() if state is not None}
        if not self._layer.has_previous_state.get(0) or CONV not in there:
            return {}
        for state in there.values():
            if len(state) != batch:
                raise InfuseError(f"the cache holds a batch of {len(state)}, a batch of {batch} was given")
        return there

    def end(self, tokens: int, states: Mapping[str, Tensor], seen: Callable[[], Tensor] | None = None) -> None:
        """Store the states. `seen` makes all inputs of the convolution in this call, [B, C, T], for a cache that
        records them until it is cropped.
        """
        layer, first = self._layer, not self._layer.has_previous_state.get(0)
        for name, state in states.items():
            if first:
                layer.lazy_initialization(**{"conv_states" if name == CONV else "recurrent_states": state})
            held = layer.conv_states if name == CONV else layer.recurrent_states
            if name == CONV and seen is not None and getattr(layer, "record_past", False):
                held[0] = seen() if first else torch.cat((held[0], seen()), dim=-1)
            else:
                held[0].copy_(state)
        layer.has_previous_state[0] = True
