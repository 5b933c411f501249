"""A bucket's cache in the hands of a loop that calls the model itself: transformers' own for beams, ours where the host
chooses tokens.

A call of the model with it that is a decode step, one token for each row, is a replay; every other call runs as it is.
No loop here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infuse import interrupts
from infuse.errors import RankError
from infuse.graphs.bucket import Given
from infuse.graphs.device_loop import Run
from infuse.graphs.signature import Unsupported
from infuse.layers.cache import KVCache, KVSlot

_GIVEN = ("input_ids", "attention_mask", "position_ids", "past_key_values")


class LentCache(KVCache):
    """The cache of the bucket that `run` is in, whichever that is; one of its own once the run is over."""

    def __init__(self, run: Run):
        self.run: Run | None = run
        self._own: list[KVSlot] = []
        self._takes_mask: bool | None = None
        super().__init__(run.bucket.capacity_tokens, run.bucket.limit_tokens)

    @property  # type: ignore[override]
    def layers(self) -> list[KVSlot]:
        return self._own if self.run is None else self.run.bucket.cache.layers

    @layers.setter
    def layers(self, layers: list[KVSlot]) -> None:  # type: ignore[override]
        self._own = layers

    @interrupts.held_back()
    def end(self, keep: bool) -> None:
        """The run is over, and the next one may have the bucket: `keep` a copy of what the cache holds, or nothing."""
        if self.run is not None:
            run = self.run
            with run.buckets.backend.turn():  # else another stream may write to what is still copied from, or filled
                self._own = [slot.copied() for slot in self.layers] if keep else []
                self.run = None
                run.end()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row beam_idx[b] was, where it lies while a run lasts: graphs write to these addresses."""
        for slot in self.layers:
            (slot.reorder_cache if self.run is None else slot.reorder_in_place)(beam_idx)

    def __reduce__(self) -> Any:  # a copy has the tokens, not the run
        return _plain, (self._make_slot, [slot.copied() for slot in self.layers])

    def step(self, forward: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """What `forward` returns for these arguments, by way of a graph; None where they are no decode step, or no
        graph can be one.
        """
        inputs = None if self.run is None or args or torch.is_grad_enabled() else self._inputs(forward, kwargs)
        if self.run is None or inputs is None:
            return None
        constants = {name: value for name, value in kwargs.items() if name not in _GIVEN}
        key = self.run.key(constants)
        if key is None:
            return None
        try:
            output = self.run.given(partial(_logits_alone, forward, constants), key, inputs)
        except (torch.OutOfMemoryError, RankError):
            raise
        except Exception as error:  # whatever a graph cannot hold; an error of the model's own comes again without one
            self.run.refuse(key, None if isinstance(error, Unsupported) else error)
            return None
        output["past_key_values"] = self
        return output

    def _inputs(self, forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> Given | None:
        """What a step is given, as far as these arguments are one token for each row of the cache, at one place for
        all.
        """
        tokens, mask, positions = (kwargs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.shape[1] != 1 or tokens.dtype != torch.long:
            return None
        if not self.even(tokens.shape[0]) or self.storages()[0].device != tokens.device:
            return None
        place, limit_tokens = self.layers[0].length, self.layers[0].limit_tokens
        if limit_tokens is not None and place >= limit_tokens:  # an error, which the call itself raises
            return None
        if positions is not None and (not isinstance(positions, Tensor) or positions.shape[-1] != 1):
            return None
        if mask is None and self._model_takes_mask(forward):  # without a mask some models make one on the host
            mask = torch.ones(tokens.shape[0], place + 1, dtype=torch.long, device=tokens.device)
        if mask is not None and (not isinstance(mask, Tensor) or tuple(mask.shape) != (tokens.shape[0], place + 1)):
            return None
        return Given(tokens, positions, mask, place)

    def _model_takes_mask(self, forward: Callable[..., Any]) -> bool:
        if self._takes_mask is None:
            self._takes_mask = "attention_mask" in inspect.signature(forward).parameters
        return self._takes_mask


def _logits_alone(
    forward: Callable[..., Any], constants: dict[str, Any], *, past_key_values: KVCache, **inputs: Any
) -> Any:
    """The output without its cache. Unsupported where there is more in it than logits: hidden states, attention over
    empty room.
    """
    output: Any = forward(past_key_values=past_key_values, **constants, **inputs)
    if (
        not isinstance(output, Mapping)
        or set(output) != {"logits", "past_key_values"}
        or output["past_key_values"] is not past_key_values
    ):
        raise Unsupported(f"a step that returns {type(output).__name__}")
    kind: Any = type(output)
    return kind(logits=output["logits"])


def _plain(make_slot: Callable[[], KVSlot], layers: list[KVSlot]) -> KVCache:
    cache = KVCache()
    cache._make_slot, cache.layers = make_slot, layers  # type: ignore[assignment]
    return cache
