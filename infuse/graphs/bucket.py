"""One decode step on buffers of our own, to the logits or to the chosen token: what a graph of it needs. No loop, no
stopping here.

A bucket is for one batch size and one capacity: the cache, the ids so far, masks and counters, all in place for as long
as the bucket lives, and the graphs that were captured on them.

Suffixes: B batch, S capacity of the cache, I columns of ids (at most S + 1: the last token chosen is not in the cache),
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infuse import interrupts
from infuse.graphs.capture import Backend, Captured, without_autocast_cache
from infuse.graphs.choose import Choose
from infuse.layers.cache import KVCache

NEVER = 1 << 62  # the end of a row that has none yet
_WARM_STEPS = 2  # real steps, run as they are: what libraries set up on first use is set up before the capture


class Bucket:
    """The state of one batch of `generate` on the device.

    `prepare` fills it and `advance` makes steps, whose inputs follow from each other; or each step is `given` its
    inputs.
    """

    def __init__(self, capacity_tokens: int, limit_tokens: int | None = None):
        self.capacity_tokens, self.limit_tokens = capacity_tokens, limit_tokens
        self.cache = KVCache(capacity_tokens, limit_tokens)
        self.batch = 0
        self.place = self.column = 0  # on the host: tokens in the cache, columns of ids
        self._storages: list[int] = []  # where they were when it last stood
        self._places: tuple = ()
        self._steps: dict[Hashable, _Step] = {}

    # -- buffers

    def stand(self, place: int) -> list[Tensor]:
        """From now on `place` tokens are in the cache, as it lies; returns its storages."""
        storages = self.cache.storages()
        self.batch, self.capacity_tokens = storages[0].shape[0], storages[0].shape[2]
        lie = [storage.data_ptr() for storage in storages]
        if place != self.place or lie != self._storages:  # else what lies beyond is as this bucket left it
            for storage in storages:  # attention multiplies what a mask hides by zero, which NaN and infinity survive
                storage[:, :, place:] = 0
        self.place, self._storages = place, lie
        return storages

    @torch.inference_mode(False)
    def _lay(self, place: int, positions: Tensor | None, mask_BS: Tensor | None) -> None:
        """Buffers for a cache of `place` tokens, and for positions and mask like these; those of before where all lies
        as it lay.
        """
        storages = self.stand(place)
        forms = [
            None if given is None else (given.dtype, *given.shape[:axes])
            for given, axes in ((positions, None), (mask_BS, 1))
        ]
        places = (*self._storages, self.batch, *forms)
        if places != self._places:
            self._places, self._steps = places, {}
            counts: dict[str, Any] = dict(dtype=torch.long, device=storages[0].device)
            self.tokens_B1 = torch.empty(self.batch, 1, **counts)
            self.ids_BI = torch.empty(self.batch, self.capacity_tokens + 1, **counts)
            self.unfinished_B, self.ends_B = torch.empty(self.batch, **counts), torch.empty(self.batch, **counts)
            self.device_place, self.device_count, self.device_column = (torch.zeros((), **counts) for _ in range(3))
            self.positions = None if positions is None else torch.empty_like(positions)
            self.mask_BS = None if mask_BS is None else mask_BS.new_empty(self.batch, self.capacity_tokens)
        self.device_place.fill_(place)
        self.device_count.fill_(place + 1)

    def _fill(self, positions: Tensor | None, mask_BS: Tensor | None) -> None:
        if self.positions is not None and positions is not None:
            self.positions.copy_(positions)
        if self.mask_BS is not None and mask_BS is not None:
            self.mask_BS[:, : mask_BS.shape[1]] = mask_BS
            self.mask_BS[:, mask_BS.shape[1] :] = 0

    def prepare(self, state: State) -> None:
        """Take over a batch whose prompt is in the cache."""
        self.place = -1  # another answer may lie beyond
        self._lay(state.place, state.positions, state.mask_BS)
        self._fill(state.positions, state.mask_BS)
        columns = state.ids_BI.shape[1]
        self.ids_BI[:, :columns] = state.ids_BI
        self.ids_BI[:, columns:] = state.ids_BI[
            :, -1:
        ]  # a token that is there already: penalties for repetition do not change
        self.tokens_B1.copy_(state.tokens_B1)
        self.unfinished_B.copy_(state.unfinished_B)
        self.ends_B.copy_(state.ends_B)
        self.column = columns
        self.device_column.fill_(columns)
        self.cache.hold_place(self.device_place, self.device_count)

    def state(self) -> State:
        """Copies of where the batch stands, for another bucket or a loop on the host."""
        mask = None if self.mask_BS is None else self.mask_BS[:, : self.place].clone()
        positions = None if self.positions is None else self.positions.clone()
        ids = self.ids_BI[:, : self.column].clone()
        return State(
            ids, self.tokens_B1.clone(), self.unfinished_B.clone(), self.ends_B.clone(), positions, mask, self.place
        )

    def release(self) -> None:
        """Give the cache its own count back."""
        self.cache.hold_place(None)
        for slot in self.cache.layers:
            slot.length = self.place

    def room(self) -> int:
        """How many steps fit."""
        return self.capacity_tokens - self.place

    def nbytes(self) -> int:
        """The device memory that it holds."""
        return self.cache.nbytes() + sum(
            step.captured.nbytes for step in self._steps.values() if step.captured is not None
        )

    def standing(self) -> list[tuple[int, bool]]:
        """How far each step is."""
        return [(step.warmed, step.captured is not None) for step in self._steps.values()]

    # -- steps

    def advance(self, backend: Backend, forward: Callable[..., Any], key: Hashable, choose: Choose) -> None:
        """One step from the last one's state, to the next tokens. `key` tells steps apart that run other kernels."""
        step = self._steps.setdefault(key, _Step())
        if step.captured is not None and step.choose is not None:
            step.choose.take(choose)
        if step.captured is None:
            step.choose = choose  # whose tensors a graph will read
        self._run(backend, step, lambda: self._advance(forward, choose))
        self.place += 1
        self.column += 1

    def given(self, backend: Backend, forward: Callable[..., Any], key: Hashable, inputs: Given) -> Any:
        """One step on these inputs; returns what `forward` returns, which the next step writes over.

        The cache, which holds `inputs.place` tokens, is left as if the step had run without a graph. What is raised
        leaves it as it was.
        """
        self._lay(inputs.place, inputs.positions, inputs.mask_BS)
        self._fill(inputs.positions, inputs.mask_BS)
        self.tokens_B1.copy_(inputs.tokens_B1)
        result = self._run(backend, self._steps.setdefault(key, _Step()), lambda: self._of_given(forward))
        self.place += 1
        self.release()
        return result

    def _run(self, backend: Backend, step: _Step, work: Callable[[], Any]) -> Any:
        """Do `work`: warm at first, then captured, then replayed. All of it in one mode: graphs outlive the mode of the
        call.
        """
        with torch.inference_mode(False), torch.no_grad():
            if step.captured is None and step.warmed < _WARM_STEPS:
                step.warmed += 1
                return backend.warm(work)
            if step.captured is None:
                with interrupts.held_back(), without_autocast_cache():
                    step.captured, step.result = backend.capture(work)
            step.captured.replay()
            return step.result

    # What is captured: nothing here may depend on a number of the host that changes.

    def _inputs(self) -> dict[str, Any]:
        inputs: dict[str, Any] = dict(past_key_values=self.cache, input_ids=self.tokens_B1)
        if self.mask_BS is not None:
            inputs["attention_mask"] = self.mask_BS
        if self.positions is not None:
            inputs["position_ids"] = self.positions
        return inputs

    def _of_given(self, forward: Callable[..., Any]) -> Any:
        self.cache.hold_place(self.device_place, self.device_count)
        try:
            return forward(**self._inputs())
        finally:
            self.cache.hold_place(None)

    def _advance(self, forward: Callable[..., Any], choose: Choose) -> None:
        if self.mask_BS is not None:
            self.mask_BS.index_fill_(1, self.device_place[None], 1)
        logits = forward(**self._inputs(), return_dict=True).logits[:, -1].float()
        self._take(choose(self.ids_BI, logits, self.unfinished_B), choose.ends)
        self.device_place.add_(1)
        self.device_count.add_(1)
        if self.positions is not None:
            self.positions.add_(1)

    def _take(self, chosen_B: Tensor, ends: Tensor | None) -> None:
        self.ids_BI.index_copy_(1, self.device_column[None], chosen_B[:, None])
        self.tokens_B1.copy_(chosen_B[:, None])
        self.device_column.add_(1)
        if ends is not None:
            ended = (chosen_B[:, None] == ends).any(dim=1)
            now = ended & (self.unfinished_B > 0)
            self.ends_B.copy_(torch.where(now, self.device_column, self.ends_B))
            self.unfinished_B.mul_(~ended)


@dataclass
class State:
    """A batch of which `place` tokens are in the cache: the prompt, and what was made so far but `tokens_B1`, which
    come next.

    `ends_B`: for each row the columns of ids with which it ended, NEVER for one that goes on. A mask covers `place`
    columns or more.
    """

    ids_BI: Tensor
    tokens_B1: Tensor
    unfinished_B: Tensor
    ends_B: Tensor
    positions: Tensor | None
    mask_BS: Tensor | None
    place: int


@dataclass(frozen=True)
class Given:
    """The inputs of one step after `place` tokens: each row's next token, and a mask of place + 1 columns where the
    model takes one.
    """

    tokens_B1: Tensor
    positions: Tensor | None
    mask_BS: Tensor | None
    place: int


@dataclass
class _Step:
    captured: Captured | None = None
    result: Any = None
    warmed: int = 0
    choose: Choose | None = None
