"""The next token of each row from its scores, on the device: processors, the largest or a sample, padding for rows that
have ended.

And on the host, step by step: processors as transformers calls them, for less (Processed), and which rows end
(ends_of).

Suffixes: B batch, I columns of ids, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from infuse import ops
from infuse.device import Device
from infuse.parallel.group import LOCAL, Group

# Processors that never look at a value on the host, and at the ids only for which of them are there.
_ON_DEVICE = (
    EpsilonLogitsWarper, InfNanRemoveLogitsProcessor, LogitNormalization, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper,
)  # fmt: skip
# What one kernel does at once, in this order: class, its setting.
_FUSED = ((TemperatureLogitsWarper, "temperature"), (TopKLogitsWarper, "top_k"), (TopPLogitsWarper, "top_p"))


@dataclass(frozen=True)
class Choice:
    """How a step chooses tokens, by values alone: equal choices share a graph. `processors` is None where the host
    chooses.
    """

    samples: bool
    ends: tuple[int, ...]
    pad: int | None
    processors: tuple[Hashable, ...] | None


def choice_of(processors: Any, criteria: Any, config: Any) -> Choice:
    """How tokens are chosen, from what `generate` prepared; its `processors` are None where any part needs the host."""
    ends: list[int] = []
    needs_host = False
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            ends += criterion.eos_token_id.reshape(-1).tolist()
        elif type(criterion) is not MaxLengthCriteria:
            needs_host = True
    keys = [_values(processor) for processor in processors]
    pad = config._pad_token_tensor
    known = None if needs_host or None in keys else tuple(keys)
    return Choice(bool(config.do_sample), tuple(ends), None if pad is None else int(pad), known)


def _values(processor: Any) -> Hashable | None:
    """A processor's class and settings, of tensors their form; None for one that may need the host."""
    if type(processor) not in _ON_DEVICE:
        return None
    settings = sorted(vars(processor).items())
    forms = ((name, (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v) for name, v in settings)
    return (type(processor), tuple(forms))


class Choose:
    """Tokens from scores, all on the device.

    In float32 samples are drawn as transformers draws them, number for number. In 16 bits, where scores differ from one
    kernel to the next anyway, temperature, top-k and top-p are one kernel that draws by one number for each row: the
    same distribution, other tokens.
    """

    def __init__(
        self, choice: Choice, processors: Iterable[Any], device: torch.device, dtype: torch.dtype, group: Group = LOCAL
    ):
        self._choice, self._group = choice, group
        self._processors = [copy.copy(processor) for processor in processors]  # whose tensors are our own: see `take`
        self._tensors: list[Tensor] = []
        for processor in self._processors:
            for name, value in sorted(vars(processor).items()):
                if isinstance(value, Tensor):
                    setattr(processor, name, value.to(device, copy=True))
                    self._tensors.append(getattr(processor, name))
        self._taken = self
        self.ends = torch.tensor(choice.ends, dtype=torch.long, device=device) if choice.ends else None
        kind = Device.of(device)
        self._argmax = ops.argmax.body(ops.argmax.choose(kind, torch.float32).body)
        self._sample = ops.sample.body(ops.sample.choose(kind, torch.float32).body)
        self._settings = fused_settings(self._processors) if choice.samples and dtype.itemsize == 2 else None

    def take(self, other: Choose) -> None:
        """The values of `other`, an equal choice of another call, into the tensors that a graph reads."""
        if other is not self._taken:
            for own, given in zip(self._tensors, other._tensors, strict=True):
                own.copy_(given)
            self._taken = other

    def __call__(self, ids_BI: Tensor, scores_BV: Tensor, unfinished_B: Tensor) -> Tensor:
        """The tokens [B], int64, rank 0's on all ranks; rows that have ended get the padding where there are ends."""
        chosen = self._group.broadcast(self._drawn(ids_BI, scores_BV), "the tokens")
        if self.ends is None or self._choice.pad is None:
            return chosen
        return chosen * unfinished_B + self._choice.pad * (1 - unfinished_B)

    def _drawn(self, ids_BI: Tensor, scores_BV: Tensor) -> Tensor:
        if self._settings is not None:
            uniform = torch.rand(scores_BV.shape[0], device=scores_BV.device)
            return self._sample(scores_BV, uniform, *self._settings)
        for process in self._processors:
            scores_BV = process(ids_BI, scores_BV)
        if not self._choice.samples:
            return self._argmax(scores_BV)
        # torch.multinomial as it is inside, draw for draw, without its look at the probabilities on the host.
        probabilities = F.softmax(scores_BV, dim=-1)
        return (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(dim=-1)


def fused_settings(processors: Iterable[Any]) -> tuple[float, int, float] | None:
    """(temperature, top_k, top_p) where `processors` are these at most, in the order in which they are applied; else
    None.
    """
    found: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    order = [kind for kind, _ in _FUSED]
    last = -1
    for processor in processors:
        place = order.index(type(processor)) if type(processor) in order else -1
        plain = (
            getattr(processor, "filter_value", -float("inf")) == -float("inf")
            and getattr(processor, "min_tokens_to_keep", 1) == 1
        )
        if place <= last or not plain:
            return None
        last = place
        found[_FUSED[place][1]] = getattr(processor, _FUSED[place][1])
    return found["temperature"], found["top_k"], found["top_p"]


# ---- on the host, step by step


class Processed:
    """The scores that transformers' list of processors gives, without its look at the signature of each one at every
    step.
    """

    def __init__(self, processors: Any):
        self._processors = processors
        self._calls: dict[int, tuple[Any, Any]] = {}  # by the id of a processor: itself, and what is called

    def __bool__(self) -> bool:
        return bool(self._processors)

    def __call__(self, ids_BI: Tensor, scores_BV: Tensor) -> Tensor:
        """May change `scores_BV`."""
        if type(self._processors) is not LogitsProcessorList:
            return self._processors(ids_BI, scores_BV)
        for processor in self._processors:
            found = self._calls.get(id(processor))
            if found is None:
                found = self._calls[id(processor)] = processor, _call_of(processor)
            scores_BV = found[1](ids_BI, scores_BV)
        return scores_BV


def _call_of(processor: Any) -> Any:
    """The processor itself where it takes ids and scores alone; else transformers' list of it, which says what is
    wrong.
    """
    if type(processor) is MinNewTokensLengthLogitsProcessor:
        return partial(_without_ends, processor, processor.eos_token_id.reshape(-1).tolist())
    try:
        takes_two = len(inspect.signature(processor.__call__).parameters) <= 2
    except (TypeError, ValueError):
        takes_two = False
    return processor if takes_two else LogitsProcessorList([processor])


def _without_ends(processor: Any, ends: list[int], ids_BI: Tensor, scores_BV: Tensor) -> Tensor:
    """What MinNewTokensLengthLogitsProcessor does: it looks for the ends in the whole vocabulary at every step."""
    if ids_BI.shape[-1] - processor.prompt_length_to_skip >= processor.min_new_tokens:
        return scores_BV
    inside = torch.tensor(
        [end for end in ends if 0 <= end < scores_BV.shape[-1]], dtype=torch.long, device=scores_BV.device
    )
    return scores_BV.index_fill(-1, inside, -math.inf)


def ends_of(criteria: Iterable[Any]) -> tuple[int | None, set[int], list[Any]]:
    """How many tokens there may be and at which tokens a row ends, as transformers' own criteria say it; and those to
    ask at each step.
    """
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
