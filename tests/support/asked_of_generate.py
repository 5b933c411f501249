"""What tests ask of `generate`: a processor and a criterion of the caller's own."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t
from torch import Tensor


class OddTokensOnly(t.LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        even = torch.arange(scores.shape[-1]) % 2 == 0
        return scores.masked_fill(even, float("-inf"))


class StopAtLength(t.StoppingCriteria):
    """Row i stops at `length` + i tokens."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] >= self.length + torch.arange(len(input_ids))
