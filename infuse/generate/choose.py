"""Logits processors and stopping criteria, applied at each step as in transformers but with less host time.

Suffixes: B batch, I columns of ids, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinNewTokensLengthLogitsProcessor,
)

from infuse.native import DTYPES, kernels


class Processed:
    """A LogitsProcessorList that inspects each processor's signature once instead of at every step."""

    def __init__(self, processors: Any):
        self._processors = processors
        self._calls: dict[int, tuple[Any, Any]] = {}  # id of a processor → (processor, callable)

    def __bool__(self) -> bool:
        return bool(self._processors)

    def __call__(self, ids_BI: Tensor, scores_BV: Tensor) -> Tensor:
        """Return the processed scores. May change `scores_BV` in place."""
        if type(self._processors) is not LogitsProcessorList:
            return self._processors(ids_BI, scores_BV)
        for processor in self._processors:
            entry = self._calls.get(id(processor))
            if entry is None:
                entry = self._calls[id(processor)] = processor, _call_of(processor)
            scores_BV = entry[1](ids_BI, scores_BV)
        return scores_BV


def likeliest(logits_BTV: Tensor) -> Tensor:
    """Return the index of the largest of each row's last logits, [B]; the first one of equals."""
    if logits_BTV.device.type == "cpu" and logits_BTV.dtype in DTYPES and not isinstance(library := kernels(), str):
        last_BV = logits_BTV[:, -1] if logits_BTV.shape[1] > 1 else logits_BTV
        return library.largest.default(last_BV.contiguous()).view(-1)
    return logits_BTV[:, -1].argmax(dim=-1)


def _call_of(processor: Any) -> Any:
    """Return the processor if it takes only ids and scores, else a list with it, which raises transformers' error."""
    if type(processor) is MinNewTokensLengthLogitsProcessor:
        return partial(_without_ends, processor, processor.eos_token_id.reshape(-1).tolist())
    try:
        takes_two = len(inspect.signature(processor.__call__).parameters) <= 2
    except (TypeError, ValueError):
        takes_two = False
    return processor if takes_two else LogitsProcessorList([processor])


def _without_ends(processor: Any, ends: list[int], ids_BI: Tensor, scores_BV: Tensor) -> Tensor:
    """Do the same as MinNewTokensLengthLogitsProcessor, without comparing the whole vocabulary with the end tokens."""
    if ids_BI.shape[-1] - processor.prompt_length_to_skip >= processor.min_new_tokens:
        return scores_BV
    inside = [end for end in ends if 0 <= end < scores_BV.shape[-1]]
    return scores_BV.index_fill(-1, torch.tensor(inside, dtype=torch.long, device=scores_BV.device), -math.inf)


def ends_of(criteria: Iterable[Any]) -> tuple[int | None, set[int], list[Any]]:
    """Split stopping criteria into max_length, end-of-sequence ids and the rest, which must be called at each step."""
    ends: set[int] = set()
    limits, asked = [], []
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            ends.update(criterion.eos_token_id.reshape(-1).tolist())
        elif type(criterion) is MaxLengthCriteria:
            limits.append(criterion.max_length)
        else:
            asked.append(criterion)
    return min(limits, default=None), ends, asked
