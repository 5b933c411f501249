"""StateSlot: the states of one layer's recurrence in our cache. ForeignStates: those in a cache of transformers.

States go on from token to token, so a slot can go back only to those that were kept. Models that are not ours go on
with a StateSlot as with a layer of transformers' (shown_states.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from infuse.cache.held_count import HeldCount
from infuse.cache.shown_states import CONV, NUMBERS_STATES, STATE, LinearLayer, first_of
from infuse.cache.slot import Filler, Slot
from infuse.ground.errors import InfuseError, UnsupportedCall


class StateSlot(LinearLayer, Slot, LinearAttentionLayer):  # type: ignore[misc, override]
    """Recurrent states after all tokens so far: `states` [B, ...] by name, replaced as a whole by each step.

    `turns`: whether our layer has the last two axes of STATE the other way round than transformers' layer; None until
    our layer says so, and again after another model was shown the states.
    """

    turns: bool | None = None
    records = False  # whether it keeps a convolution's state after each token that another model's layer appends
    _turned: bool | None = None  # like `turns`, but of the states that are held: None if another model made them
    _counts = True  # whether `length` is known to count all tokens
    _ahead = 0  # tokens that `length` counts before the states have seen them

    def __init__(self, capacity_tokens: int = 0, limit_tokens: int | None = None, format: str | None = None):
        super().__init__(capacity_tokens, limit_tokens, format)
        self.states: Mapping[str, Tensor] = {}
        self._kept: list[tuple[int, Mapping[str, Tensor]]] = []  # to go back to: tokens and the states after them
        self._made: dict[str, Tensor] = {}  # of `row_of_states`
        self._home: dict[str, Tensor] = {}  # where graphs find the states
        self._room = 0  # most tokens inside a graph
        self._seen: dict[str, tuple[Tensor, int]] = {}  # states that others were shown, with their versions

    def begin(self, batch: int, tokens: int, filler: Filler | None = None) -> Mapping[str, Tensor]:
        """Return the states before the next `tokens` of each row; empty at first. Raises like KVSlot.reserve."""
        self.check_room(tokens)
        if filler is not self.filler:
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

    def row_of_states(self, tokens: int, filler: Filler | None = None) -> Mapping[str, Tensor]:
        """Room for the states after each of the next `tokens`, behind those before them: [tokens + 1, B, ...] each.

        `advance` then keeps them. There must be states.
        """
        states = self.begin(1, tokens, filler)
        with torch.inference_mode(False):
            self._made = {name: state.new_empty(tokens + 1, *state.shape) for name, state in states.items()}
        for name, state in states.items():
            self._made[name][0] = state
        return self._made

    def in_place(self, batch: int, tokens: int, filler: Filler | None = None) -> Mapping[str, Tensor]:
        """Like `begin`, but the states may be written to; call `advance` then. There must be some."""
        states = self.begin(batch, tokens, filler)
        if self._is_kept():
            with torch.inference_mode(False):
                self.states = _cloned(states)
        return self.states

    def _is_kept(self) -> bool:
        return any(self.states is kept for _, kept in self._kept)

    @property
    def storages(self) -> list[Tensor]:
        return list((self.states or self._home).values())

    # -- other models' layers

    @property
    def of_states(self) -> StateSlot:
        return self

    @property
    def dtype(self) -> torch.dtype | None:  # type: ignore[override]
        """That of the convolution's inputs; the other state is in float32."""
        return next((state.dtype for state in self.states.values()), None)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether tokens that another model's layers append can be dropped again, as transformers' loops ask."""
        return self.records and self.filler is None and CONV in self.states and STATE not in self.states

    @property
    def counts(self) -> bool:
        """Whether `length` counts all tokens: layers of other models write one token's states in place, uncounted."""
        unchanged = all(self.states.get(name) is not it or it._version == n for name, (it, n) in self._seen.items())
        return self._counts and unchanged

    def count(self, tokens: int, *, ahead: int) -> None:
        """Set the number of tokens, of which the states have yet to see the last `ahead`."""
        self._seen, self._counts = {}, True
        self.length, self._ahead = tokens, ahead

    def turn(self, turns: bool, dtype: torch.dtype) -> None:
        """Take the states back for our layer, which has the axes of STATE so, and activations of `dtype`."""
        if self._turned is None:

            def made(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
                taken = {name: state.to(dtype if name == CONV else torch.float32) for name, state in states.items()}
                if turns and STATE in taken:
                    taken[STATE] = taken[STATE].transpose(-1, -2).contiguous()
                return taken

            self.states = made(self.states)
            self._kept = [(length, made(states)) for length, states in self._kept]
        self._note_writes()
        self.turns, self._turned, self._ahead = turns, turns, 0

    def shown(self, name: str) -> Tensor | None:
        """A view of a state as transformers' layers have it, which may be written to; None if there is none."""
        if name not in self.states:
            return None
        if self.place is None and (self.states[name].is_inference() or self._is_kept()):
            self._note_writes()
            with torch.inference_mode(False):
                self.states = _cloned(self.states)
        state, self.turns = self.states[name], None
        if name not in self._seen and not state.is_inference():
            self._seen[name] = state, state._version
        return self._as_other(name, state)

    def _note_writes(self) -> None:
        self._counts, self._seen = self.counts, {}

    def _as_other(self, name: str, state: Tensor) -> Tensor:
        if name == CONV:
            return state.transpose(1, 2)
        return state.transpose(-1, -2) if self._turned else state

    def assign(self, name: str, state: Tensor | None) -> None:
        """Hold a copy of a state that is as transformers' layers have it; None drops it."""
        self._note_writes()
        states, self.turns = dict(self.states), None
        if not states:
            self._turned = None
        if state is None:
            states.pop(name, None)
        else:
            with torch.inference_mode(False), torch.no_grad():
                mine = self._as_other(name, state.detach())
                states[name] = mine.clone(memory_format=torch.contiguous_format)
        self.states = {name: states[name] for name in (CONV, STATE) if name in states}
        self.is_initialized = True

    def append_conv(self, full_BCT: Tensor, taps: int, tokens: int, *, counted: bool) -> None:
        """Hold the last `taps` of a convolution's inputs, of which the last `tokens` are new."""
        before, earlier, self._ahead = self.length - self._ahead, self.states, 0
        self.assign(CONV, full_BCT[..., -taps:])
        self._counts, self.length = self._counts and counted, before + tokens
        if self.records and STATE not in self.states:
            self._kept = self._kept or [(before, earlier)]
            rows_BTC = F.pad(full_BCT, (taps, 0)).transpose(1, 2)
            for token in range(1, tokens + 1):
                stop = rows_BTC.shape[1] - tokens + token
                self._kept.append((before + token, {CONV: rows_BTC[:, stop - taps : stop].contiguous()}))

    def record(self, records: bool) -> None:
        """Keep the convolution's state after each token that another model's layer appends, until it is dropped."""
        if self.records and not records:
            self._kept = []
        self.records = records

    def lazy_initialization(self, *args: Tensor, **states: Any) -> None:  # type: ignore[override]
        assert not args, "states are given by name"
        self.initialize_states(**states)

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
        if self.records and self._kept:
            self._kept = [(self.length, self.states)]

    def __getstate__(self) -> dict[str, Any]:  # copies have versions of their own
        return {**vars(self), "_seen": {}, "_counts": self.counts}

    def copied(self) -> StateSlot:
        slot = copy.copy(self)
        slot.states = _cloned(self.states)
        slot._kept, slot._home = [(length, _cloned(states)) for length, states in self._kept], {}
        return slot

    def move(self, device: torch.device) -> None:
        self.states = {name: state.to(device) for name, state in self.states.items()}
        self._kept, self._home = [], {}

    def take(self, other: StateSlot) -> None:
        self.states = _cloned(other.states)
        self.turns, self._turned = other.turns, other._turned
        self.length, self.filler, self.is_initialized = other.length, other.filler, True

    def reset(self) -> None:
        self.length, self.states, self._kept, self.keeps_each = 0, {}, [], False
        self._made, self._seen, self._counts, self._ahead = {}, {}, True, 0

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

    def begin(self, batch: int, tokens: int, filler: Filler | None = None) -> Mapping[str, Tensor]:
        states = {CONV: first_of(self._layer.conv_states), STATE: first_of(self._layer.recurrent_states)}
        there = {name: state for name, state in states.items() if state is not None}
        if not first_of(self._layer.has_previous_state) or CONV not in there:
            return {}
        for state in there.values():
            if len(state) != batch:
                raise InfuseError(f"the cache holds a batch of {len(state)}, a batch of {batch} was given")
        return there

    def end(self, tokens: int, states: Mapping[str, Tensor], seen: Callable[[], Tensor] | None = None) -> None:
        """Store the states. `seen` makes all inputs of the convolution in this call, [B, C, T], for a cache that
        records them until it is cropped.
        """
        layer, first = self._layer, not first_of(self._layer.has_previous_state)
        for name, state in states.items():
            if first:
                layer.lazy_initialization(**{"conv_states" if name == CONV else "recurrent_states": state})
            held = layer.conv_states if name == CONV else layer.recurrent_states
            if name == CONV and seen is not None and getattr(layer, "record_past", False):
                held[0] = seen() if first else torch.cat((held[0], seen()), dim=-1)
            else:
                first_of(held).copy_(state)
        if NUMBERS_STATES:
            layer.has_previous_state[0] = True
        else:
            layer.has_previous_state = True
