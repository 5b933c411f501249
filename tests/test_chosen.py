"""Processors and criteria as our own loop asks them (generate/choose.py): as transformers does, and what it need not
repeat each time.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch
import transformers as t
from families import BY_NAME, inputs
from torch import Tensor, nn
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinNewTokensLengthLogitsProcessor,
)

import infuse
from infuse.generate.choose import Processed, ends_of

PROMPT, NEW = 9, 10


@cache
def pair() -> tuple[nn.Module, infuse.InferenceEngine]:
    def make() -> nn.Module:
        return BY_NAME["llama"].make(tie_word_embeddings=False)

    return make(), infuse.init_inference(make(), dtype="fp32")


def generate(model: Any, **asked: Any) -> Tensor:
    torch.manual_seed(5)
    return model.generate(**inputs(BY_NAME["llama"], batch=3, tokens=PROMPT), **{"max_new_tokens": NEW, **asked})


class Plus(t.LogitsProcessor):
    """Changes the scores where they are, and keeps them."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append((input_ids.shape[1], scores.shape[0]))
        scores[:, input_ids.shape[1] % 7 :: 7] += 100
        return scores


class Asks(t.LogitsProcessor):
    """Wants to know more than `generate` tells."""

    def __call__(self, input_ids: Tensor, scores: Tensor, how: str) -> Tensor:
        return scores


class Optional(t.LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor, how: str = "") -> Tensor:
        return scores


def test_scores_may_be_changed_in_place() -> None:
    """They are the processor's own: what the head has returned stays as it is."""
    original, engine = pair()
    returned: list[tuple[Tensor, Tensor]] = []
    handle = engine.module.lm_head.register_forward_hook(
        lambda module, args, output: returned.append((output, output.clone()))
    )
    plus = Plus()
    found = generate(engine, logits_processor=LogitsProcessorList([plus]))
    handle.remove()
    assert torch.equal(found, generate(original, logits_processor=LogitsProcessorList([Plus()])))
    assert plus.seen == [(PROMPT + new, 3) for new in range(NEW)]
    assert len(returned) == NEW and all(torch.equal(*pair) for pair in returned)


@pytest.mark.parametrize("wrong", [Asks, Optional])
def test_a_processor_that_asks_for_more_is_refused_as_ever(wrong: type) -> None:
    told = []
    for model in pair():
        with pytest.raises(ValueError, match="required parameters") as caught:
            generate(model, logits_processor=LogitsProcessorList([Plus(), wrong()]))
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_signatures_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = pair()
    read: list[object] = []
    signature = inspect.signature
    monkeypatch.setattr(
        inspect, "signature", lambda *args, **kwargs: read.append(args[0]) or signature(*args, **kwargs)
    )
    counts = []
    for new in (6, 12):
        read.clear()
        generate(engine, repetition_penalty=1.5, no_repeat_ngram_size=2, max_new_tokens=new)
        counts.append(len([one for one in read if isinstance(getattr(one, "__self__", None), t.LogitsProcessor)]))
    assert counts == [2, 2]


@pytest.mark.parametrize("ends", [[2], [0, 5, 39], [5, 40, 7], [50]], ids=str)
@pytest.mark.parametrize("length", [8, 11, 12, 20])
def test_fewest_new_tokens(ends: list[int], length: int) -> None:
    """Our own way of it; an end beyond the vocabulary is none."""
    processor = MinNewTokensLengthLogitsProcessor(8, 4, torch.tensor(ends))
    scores, ids = torch.randn(3, 40), torch.zeros(3, length, dtype=torch.long)
    given = scores.clone()
    assert torch.equal(Processed(LogitsProcessorList([processor]))(ids, scores), processor(ids, given.clone()))
    assert torch.equal(scores, given)


def test_a_list_that_is_more_than_a_list() -> None:
    class Doubled(LogitsProcessorList):
        def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
            return super().__call__(input_ids, scores, **kwargs) * 2

    scores = torch.randn(2, 40)
    assert torch.equal(Processed(Doubled([t.InfNanRemoveLogitsProcessor()]))(torch.zeros(2, 3), scores), scores * 2)


def test_a_processor_that_is_added_later_is_asked() -> None:
    processors = LogitsProcessorList([Plus()])
    processed, ids, scores = Processed(processors), torch.zeros(1, 3), torch.zeros(1, 40)
    once = processed(ids, scores.clone())
    processors.append(Plus())
    assert torch.equal(processed(ids, scores.clone()), once * 2)


class Capital(EosTokenCriteria):
    """Somebody's own: ends at the second of its tokens only."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ends = super().__call__(input_ids, scores)
        return ends & (input_ids.shape[1] > PROMPT + 3)


class Shorter(MaxLengthCriteria):
    """Somebody's own, with a length of its own."""


def test_criteria() -> None:
    own, shorter = Capital([7]), Shorter(4)
    ends = [EosTokenCriteria([2, 3]), EosTokenCriteria(5), EosTokenCriteria(torch.tensor(6))]
    assert ends_of([MaxLengthCriteria(9), own, shorter, *ends]) == (9, {2, 3, 5, 6}, [own, shorter])
    assert ends_of([]) == (None, set(), [])


@pytest.mark.parametrize(
    "criteria", [[Shorter(PROMPT + 4)], [MaxLengthCriteria(PROMPT + 6), MaxLengthCriteria(PROMPT + 4)]], ids=len
)
def test_the_shortest_length_counts(criteria: list) -> None:
    original, engine = pair()
    exact, found = (
        generate(model, do_sample=False, stopping_criteria=t.StoppingCriteriaList(criteria))
        for model in (original, engine)
    )
    assert torch.equal(found, exact) and exact.shape[1] == PROMPT + 4


def test_one_end_as_a_tensor_without_axes() -> None:
    scores = torch.zeros(2, 9)
    processors = LogitsProcessorList([MinNewTokensLengthLogitsProcessor(0, 5, torch.tensor(4))])
    ids = torch.zeros(2, 3, dtype=torch.long)
    assert torch.equal(Processed(processors)(ids, scores.clone()), processors(ids, scores.clone()))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_ends(own: bool, batch: int) -> None:
    """Each row ends at another token; of a criterion of somebody's own, transformers pads what comes after, too."""
    original, engine = pair()
    given = inputs(BY_NAME["llama"], batch=batch, tokens=PROMPT)
    rows = original.generate(**given, max_new_tokens=NEW)[:, PROMPT:].tolist()
    ends = sorted({row[2 + 2 * i] for i, row in enumerate(rows)})
    asked: dict[str, Any] = dict(eos_token_id=ends, pad_token_id=1)
    if own:
        asked = dict(stopping_criteria=t.StoppingCriteriaList([Capital(ends)]), pad_token_id=1)
    exact = original.generate(**given, max_new_tokens=NEW, **asked)
    assert torch.equal(engine.generate(**given, max_new_tokens=NEW, **asked), exact)
    assert exact.shape[1] < PROMPT + NEW or (exact == 1).any()
