"""The decode loop on a device with graphs: the host asks for steps ahead of the device and reads what was made a while
later.

    host    ask 8 | ask 8 | read 1st 8 | ask 8 | read 2nd 8 | ...
    device        | step x 8           | step x 8           | ...

Stop checks lag by as much, and what was made beyond the end is cut off. One wait for each 8 tokens, none while the
device is idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infuse import interrupts, logs
from infuse.errors import RankError
from infuse.graphs.bucket import NEVER, Given, State
from infuse.graphs.buckets import Buckets
from infuse.graphs.capture import Letter
from infuse.graphs.choose import Choice, Choose
from infuse.graphs.graph import modes, where
from infuse.graphs.signature import Unsupported, rebuilt, signature

TOKENS_AHEAD = 8  # steps between two looks at what was made


class Run:
    """One call of `generate` on a bucket: which steps it makes, and the bucket that it is in, which growth changes."""

    @interrupts.held_back()
    def __init__(self, call: Callable[..., Any], buckets: Buckets, batch: int, tokens: int):
        """`call` is the model's forward itself: its hooks are the caller's affair."""
        self.buckets, self.bucket = buckets, buckets.take(batch, tokens)
        with buckets.backend.turn():  # what was asked of the bucket before, on another stream, comes before the prompt
            pass
        self._call, self._state = call, buckets.look()
        self._forward: Any = None
        self._key: Hashable = None

    def key(self, constants: dict[str, Any], choice: Choice | None = None) -> Hashable:
        """What tells steps with these arguments apart; None for those that cannot be graphs, as far as is known."""
        tensors: list[Tensor] = []
        try:
            key = (self._state, modes(), signature(constants, tensors), choice)
        except Unsupported:
            return None
        return None if tensors or key in self.buckets.refused else key  # a graph would read the tensors of another call

    def begin(self, state: State, constants: dict[str, Any], choice: Choice) -> bool:
        """Take over a batch whose prompt is in the bucket's cache, where its steps are known to work or were never
        tried.

        `constants` are the arguments that every step passes.
        """
        self._key = self.key(constants, choice)
        if self._key is None:
            return False
        self._forward = partial(self._call, **constants)
        self.bucket.prepare(state)
        return True

    def stop(self, error: BaseException) -> None:
        """A step of the batch that was taken over could not be made."""
        self.refuse(self._key, error)
        self.bucket.release()

    def refuse(self, key: Hashable, error: BaseException | None = None) -> None:
        """Steps of this kind run without graphs from now on; one warning tells why, where it is an error."""
        self.buckets.refused.add(key)
        if error is not None and not self.buckets.warned:
            self.buckets.warned = True
            logs.warn(f"infuse: no CUDA graph of the decode step, so it runs without: {where(error)}", stacklevel=8)

    def step(self, choose: Choose) -> None:
        """One step, in a larger bucket where this one is full. Raises what the model raises; the batch stands where it
        stood.
        """
        with self.buckets.backend.turn():
            if not self.bucket.room():
                state = self.bucket.state()
                self._grow()
                self.bucket.prepare(state)
            self.bucket.advance(self.buckets.backend, self._forward, self._key, choose)

    def given(self, forward: Callable[..., Any], key: Hashable, inputs: Given) -> Any:
        """The same for one step of a loop that is not ours; returns a copy of what `forward` returns."""
        with self.buckets.backend.turn():
            self.bucket.stand(inputs.place)
            if not self.bucket.room():
                self._grow()
            found: list[Tensor] = []
            result = self.bucket.given(self.buckets.backend, forward, key, inputs)
            signature(result, found)
            return rebuilt(result, iter([tensor.clone() for tensor in found]))

    @interrupts.held_back()  # else the old bucket could be given back a second time
    def _grow(self) -> None:
        self.bucket = self.buckets.grown(self.bucket)

    def end(self) -> None:
        """Give the bucket back."""
        self.buckets.give_back(self.bucket)


class Interrupted(Exception):
    """A step could not be made; `state` is where the batch stands. The streamer has all tokens up to there."""

    def __init__(self, state: State):
        self.state = state


def finish(run: Run, choose: Choose, limit_tokens: int | None, streamer: Any) -> Tensor:
    """Steps until every row has ended or there are `limit_tokens` ids; returns the ids [B, I].

    Raises Interrupted from the error where a step cannot be made and the batch has not ended before.
    """
    news = _News(run, streamer)
    watches = streamer is not None or choose.ends is not None
    while news.length is None and (limit_tokens is None or run.bucket.column < limit_tokens):
        count = TOKENS_AHEAD if limit_tokens is None else min(TOKENS_AHEAD, limit_tokens - run.bucket.column)
        try:
            for _ in range(count):
                run.step(choose)
        except (torch.OutOfMemoryError, RankError):
            raise
        except Exception as error:  # whatever a graph cannot hold; an error of the model's own comes again without one
            news.send()
            news.read(keep=0)
            if news.length is None:
                raise Interrupted(run.bucket.state()) from error
        if watches and news.length is None:
            news.send()
            news.read(keep=1)
    news.read(keep=0)
    if streamer is not None:
        streamer.end()
    return run.bucket.ids_BI[:, : run.bucket.column if news.length is None else news.length].clone()


class _News:
    """What the host hears of the steps, in order and a while later. `length`: the columns of ids, once all rows have
    ended.
    """

    def __init__(self, run: Run, streamer: Any):
        self._run, self._streamer = run, streamer
        self._letters: deque[tuple[Letter, int]] = deque()
        self._sent = run.bucket.column
        self.length: int | None = None

    def send(self) -> None:
        """Post the tokens since the last time, and which rows have ended."""
        bucket, first = self._run.bucket, self._sent
        if bucket.column == first:
            return
        content = torch.cat((bucket.ends_B[:, None], bucket.ids_BI[:, first : bucket.column]), dim=1)
        self._letters.append((self._run.buckets.backend.post(content), first))
        self._sent = bucket.column

    def read(self, keep: int) -> None:
        """Read all but the last `keep` letters and show their tokens, up to the end of the last row."""
        while len(self._letters) > keep and self.length is None:
            letter, first = self._letters.popleft()
            content = letter.read()
            last, tokens = int(content[:, 0].max()), content[:, 1:]
            if last < NEVER:
                self.length, tokens = last, tokens[:, : last - first]
            if self._streamer is not None:
                for column in tokens.unbind(dim=1):
                    self._streamer.put(ordinary(column))


@torch.inference_mode(False)
def ordinary(tensor: Tensor) -> Tensor:
    """A tensor that the caller may use in any way, unlike those made in inference mode."""
    return tensor.clone()
