"""Layers that do otherwise in some calls alone: of a size, with a mask or without, on a cache or on an empty one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.reading.cases import ENCODER, LEFT, WORDS, Case
from tests.reading.layers import EncoderLayer, Layer

Given = dict[str, Any]


def _decoder(where: Callable[[Tensor, Given], bool]) -> type:
    class Otherwise(Layer):
        def both(self, x: Tensor, given: Given) -> Tensor:
            is_here = where(x, given)
            y = super().both(x, given)
            return y * 1.5 if is_here else y

    return Otherwise


class LongWithoutMask(EncoderLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        y = super().forward(hidden_states, attention_mask, **kwargs)
        return y * 1.5 if attention_mask is None and hidden_states.shape[1] > 20 else y


def _long(x: Tensor) -> bool:
    return x.shape[1] > 20


def _long_without_cache(x: Tensor, given: Given) -> bool:
    return given["cache"] is None and _long(x)


def _long_without_mask(x: Tensor, given: Given) -> bool:
    return given["attention_mask"] is None and _long(x)


def _one_long_text(x: Tensor, given: Given) -> bool:
    return x.shape[0] == 1 and _long(x)


def _step_of_many(x: Tensor, given: Given) -> bool:
    return x.shape[1] == 1 and x.shape[0] > 4


def _step_on_a_long_cache(x: Tensor, given: Given) -> bool:
    return x.shape[1] == 1 and given["cache"] is not None and given["cache"].get_seq_length() > 60


def _long_on_an_empty_cache(x: Tensor, given: Given) -> bool:
    return given["cache"] is not None and given["cache"].get_seq_length() == 0 and _long(x)


def _many_values_without_mask(x: Tensor, given: Given) -> bool:
    return given["attention_mask"] is None and x.shape[0] * x.shape[1] > 64


def _round_number(x: Tensor, given: Given) -> bool:
    return given["attention_mask"] is None and x.shape[1] % 40 == 0


def _plain_number(x: Tensor, given: Given) -> bool:
    return isinstance(x.shape[1], int) and given["attention_mask"] is None and _long(x)


CASES = (
    Case("otherwise for a long text without a cache", LEFT, layer=_decoder(_long_without_cache), words=WORDS["branch"]),
    Case("otherwise for a step of many texts", LEFT, layer=_decoder(_step_of_many), words=WORDS["branch"]),
    Case("otherwise on a long cache in a step", LEFT, layer=_decoder(_step_on_a_long_cache), words=WORDS["branch"]),
    Case("otherwise on an empty cache", LEFT, layer=_decoder(_long_on_an_empty_cache), words=WORDS["branch"]),
)
VARIANTS = (
    Case("otherwise for a long text without a mask", LEFT, layer=_decoder(_long_without_mask), words=WORDS["branch"]),
    Case("otherwise for one long text", LEFT, layer=_decoder(_one_long_text), words=WORDS["branch"]),
    Case("otherwise for many values", LEFT, layer=_decoder(_many_values_without_mask), words=WORDS["branch"]),
    Case("otherwise for a round number of tokens", LEFT, layer=_decoder(_round_number), words=WORDS["branch"]),
    Case("otherwise if sizes are plain numbers", LEFT, layer=_decoder(_plain_number), words=WORDS["branch"]),
    Case(
        "encoder: otherwise for a long text without a mask",
        LEFT,
        layer=LongWithoutMask,
        of=ENCODER,
        like=ENCODER,
        words=WORDS["branch"],
    ),
)
