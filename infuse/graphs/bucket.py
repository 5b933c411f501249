"""Bucket: a cache of one batch size and capacity, and the CUDA graphs of decode steps that update it in place.

Steps of models with recurrences write their states to where they are, those that read an encoder's hold these, too. It
neither loops nor samples.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from infuse.cache.held_count import HeldCounts
from infuse.cache.kv_cache import KVCache
from infuse.cache.recurrence_slot import StateSlot
from infuse.graphs.capture import Backend
from infuse.graphs.held_states import SHOWN, GivenStates, HeldStates
from infuse.graphs.runner import FirstError, GraphRunner
from infuse.graphs.signature import Unsupported
from infuse.ground.cache_names import CACHE_NAMES, FORMER
from infuse.ground.questions import attribute

_KNOWN_STATES = 16  # most places of states: a batch of ever other shapes would add them without end


class Bucket:
    """`weights` returns state that graphs depend on besides the cache's addresses; `warn` gets capture errors."""

    def __init__(
        self,
        backend: Backend,
        capacity_tokens: int,
        limit_tokens: int | None = None,
        format: str | None = None,
        *,
        weights: Callable[[], Hashable] | None = None,
        warn: FirstError | None = None,
    ):
        self.cache = KVCache(capacity_tokens, limit_tokens, format)
        self.limit_tokens = limit_tokens
        self._step = _Step(self.cache, weights)
        self.graphs = GraphRunner(self._step, backend, state=self._step.state, warn=warn, undone=self._step.undone)
        self._asked_tokens = capacity_tokens
        self._zero_from = -1  # the storages hold zeros from this token on; -1: unknown

    @property
    def batch(self) -> int:
        """Rows of the cache; 0 before the first call."""
        return next((storage.shape[0] for storage in self.cache.storages()), 0)

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens that the cache has room for."""
        return next((storage.shape[2] for storage in self.cache.token_storages()), self._asked_tokens)

    def nbytes(self) -> int:
        """Device memory of the cache and the graphs in bytes."""
        states = sum(held.nbytes() for held in self._step.states.values())
        return self.cache.nbytes() + states + self.graphs.nbytes()

    def reset(self) -> None:
        """Empty the cache for another call of `generate`, and keep the graphs."""
        self.cache.reset()
        self._zero_from = -1

    def bind(self, tokens: int) -> None:
        """Prepare the next step after `tokens`: zero the room beyond them and record the storages' addresses.

        Graphs are dropped if the addresses have changed.
        """
        self.cache.settle()
        addresses = tuple(storage.data_ptr() for storage in self.cache.storages())
        if tokens != self._zero_from or addresses != self._step.addresses:
            # Attention multiplies masked values by zero, so they must not be NaN or infinite.
            for storage in self.cache.token_storages():
                storage[:, :, tokens:] = 0
        self._step.addresses = addresses
        self._zero_from = tokens + 1  # the step writes one token, with or without a graph

    def hold(self, given: GivenStates) -> Hashable:
        """Copy an answer's states to where graphs read them, and return the key of the place."""
        states = self._step.states
        key = given.key(room := given.room())
        if key in states:
            states[key].fill(given)
            return key
        if len(states) >= _KNOWN_STATES:
            states.clear()
            self.graphs.clear()
        states[key] = HeldStates(given, room)
        return key

    def replay(
        self,
        forward: Callable[..., Any],
        tokens: int,
        inputs: Mapping[str, Any],
        cache_name: str,
        states: Hashable = None,
    ) -> Any:
        """Replay one step of `forward` after `tokens` and return its output; None if there is no graph (yet).

        A mask of tokens in `inputs` must cover the whole capacity. `states`: the key of an encoder's states that are
        held, which are not in `inputs`. A replay adds the step's token to the cache's length.
        """
        self.bind(tokens)
        self._step.forward, self._step.cache_name, self._step.room = forward, cache_name, self.capacity_tokens
        places = torch.arange(tokens, tokens + 2, device=self.cache.storages()[0].device)
        output = self.graphs.replay((places, states), inputs)
        if output is not None:
            for slot in self.cache.held_slots:
                slot.length = tokens + 1
        return output

    def complete(self, output: Any, cache: Any, given: GivenStates | None) -> None:
        """Put into a replay's output what the forward returns besides the logits."""
        output[self._step.result_name] = cache
        if given is not None and self._step.shows_states:
            output[SHOWN] = given.states_BLC


class _Step:
    """The captured decode step: a forward over one cache. Not a method of Bucket: a cycle would delay freeing it."""

    def __init__(self, cache: KVCache, weights: Callable[[], Hashable] | None):
        self.cache = cache
        self.forward: Callable[..., Any] | None = None
        self.cache_name = self.result_name = FORMER  # of the argument, and in what the forward returns
        self.shows_states = False  # whether the forward returns the encoder's states, too
        self.addresses: tuple[int, ...] = ()  # of the cache's storages
        self.states: dict[Hashable, HeldStates] = {}
        self.room = 0  # tokens in the cache
        self._weights = weights

    def state(self) -> Hashable:
        """State that graphs depend on besides their arguments."""
        return None if self._weights is None else self._weights(), self.addresses

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Put back what a step writes over: the states of recurrences."""
        states = [state for slot in self.cache.slots if isinstance(slot, StateSlot) for state in slot.storages]
        before = [state.clone() for state in states]
        try:
            yield
        finally:
            for state, earlier in zip(states, before, strict=True):
                state.copy_(earlier)

    def __call__(self, places: Tensor, states: Hashable, **inputs: Any) -> Any:
        """Return the logits, and hidden states of the token.

        `places` holds the index at which the token is written, and the tokens including it.
        """
        assert self.forward is not None
        model = getattr(self.forward, "__self__", None)
        foreign = any(slot.filler is None for slot in self.cache.held_slots)
        if foreign and not attribute(model, "_can_compile_fullgraph"):
            raise RuntimeError(f"{type(model).__name__} has attentions of its own, which may not mask free room")
        held = None if states is None else self.states[states]
        cache: Any = self.cache if held is None else held.pair(self.cache)
        try:
            self.cache.hold_place(places[0], places[1], self.room)
            more = {} if held is None else held.arguments()
            with HeldCounts():
                output: Any = self.forward(**{self.cache_name: cache}, **inputs, **more)
        finally:
            self.cache.hold_place(None)
        caches = [name for name in output if name in CACHE_NAMES] if isinstance(output, Mapping) else []
        shown = [SHOWN] if held is not None and SHOWN in output else []
        results = {name: value for name, value in output.items() if name not in (*caches, *shown)} if caches else {}
        # Others, such as attentions, would cover empty room.
        of_token = all(name == "logits" or _is_of_one_token(value) for name, value in results.items())
        if len(caches) != 1 or "logits" not in results or not of_token or output[caches[0]] is not cache:
            raise Unsupported(f"a step that returns {type(output).__name__}")
        self.result_name, self.shows_states = caches[0], bool(shown)
        kind: Any = type(output)
        return kind(**results)


def _is_of_one_token(value: Any) -> bool:
    """Whether it is a tensor [B, 1, C], or a tuple of such tensors: hidden states of the step's token."""
    if isinstance(value, tuple):
        return all(map(_is_of_one_token, value))
    return isinstance(value, Tensor) and value.dim() == 3 and value.shape[1] == 1
