"""Layers that are read from their own graph: each becomes a block that computes exactly what it computes, or stays.

Each case is a layer with one small change (tests/reading/changed). A reader that overlooks the change makes another
layer of it, which a call here shows; that the calls would show it is tested, too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import infuse
from tests.reading.cases import EITHER, LAYERS, LEFT, READ, Case
from tests.reading.changed import BY_NAME, CASES
from tests.reading.layers import VOCABULARY

TOLERANCE = 5e-5  # of the norm of a result: docs/guarantees.md
VISIBLE = 4 * TOLERANCE  # by which a change has to show
NOT_A_BLOCK, READ_FROM = "not as a whole block:", "read from"
PLACES = re.compile(r"\w+\.py:\d+")
# Together the variants take minutes: each one is exported.
NAMES = [pytest.param(name, marks=() if name in CASES else pytest.mark.variants) for name in BY_NAME]
COMPARABLE = [each for each in NAMES if BY_NAME[each.values[0]].like is not None]
Results = Mapping[str, Tensor]


# ---- the calls ----


def ids(batch: int, tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def padded(batch: int, tokens: int) -> dict[str, Tensor]:
    """Texts of different lengths, padded on the left."""
    mask = torch.ones(batch, tokens, dtype=torch.long)
    for row in range(batch):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids(batch, tokens).masked_fill(mask == 0, 0), "attention_mask": mask}


def first(out: Any) -> Tensor:
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def once(*, keywords: bool = False, **given: Any) -> Callable[[Any, Case], Results]:
    """One call; `keywords`: with those of the case."""
    return lambda model, case: {"output": first(model(**given, **(case.calls if keywords else {})))}


def on_cache(model: Any, batch: dict[str, Tensor], lengths: tuple[int, ...]) -> Results:
    """Calls of these numbers of tokens on one cache: their outputs, and what is cached in the end."""
    cache, results, start = DynamicCache(), {}, 0
    for length in lengths:
        given = {"input_ids": batch["input_ids"][:, start : start + length]}
        if "attention_mask" in batch:
            given["attention_mask"] = batch["attention_mask"][:, : start + length]
        results[f"output from {start}"] = first(model(**given, cache=cache, use_cache=True))
        start += length
    for i, layer in enumerate(cache.layers):
        if layer.is_initialized:
            results |= {f"keys {i}": layer.keys, f"values {i}": layer.values}
    return results


def steps(batch: dict[str, Tensor], lengths: tuple[int, ...] = (5, 3, 1, 1)) -> Callable[[Any, Case], Results]:
    return lambda model, case: on_cache(model, batch, lengths)


def generated(batch: dict[str, Tensor]) -> Callable[[Any, Case], Results]:
    return lambda model, case: {"ids": model.generate(**batch, max_new_tokens=4, do_sample=False)}


# What each model is called with, in this order: some layers remember.
ENCODER_CALLS: Mapping[str, Callable[[Any, Case], Results]] = MappingProxyType(
    {
        "5 tokens": once(input_ids=ids(1, 5)),
        "40 tokens": once(input_ids=ids(1, 40)),
        "3 texts of 5": once(input_ids=ids(3, 5)),
        "3 texts of 40": once(input_ids=ids(3, 40)),
        "one token": once(input_ids=ids(1, 1)),
        "padded": once(**padded(3, 9)),
    }
)
DECODER_CALLS: Mapping[str, Callable[[Any, Case], Results]] = MappingProxyType(
    {
        **ENCODER_CALLS,
        "later positions": once(input_ids=ids(2, 6), position_ids=torch.arange(7, 13).expand(2, 6)),
        "two texts in a row": once(input_ids=ids(1, 7), position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2]])),
        "steps on a cache": steps({"input_ids": ids(2, 10)}),
        "padded steps on a cache": steps(padded(2, 10)),
        "steps of 6 texts": steps({"input_ids": ids(6, 7)}, (5, 1, 1)),
        "steps on a long cache": steps({"input_ids": ids(1, 67)}, (30, 30, 5, 1, 1)),
        "generate": generated({"input_ids": ids(1, 5), "attention_mask": torch.ones(1, 5, dtype=torch.long)}),
        "generate, padded": generated(padded(2, 6)),
    }
)
KEYWORDS = {"keywords": once(input_ids=ids(1, 5), keywords=True)}


def calls_of(case: Case) -> Mapping[str, Callable[[Any, Case], Results]]:
    calls = DECODER_CALLS if case.decodes else ENCODER_CALLS
    return {**calls, **KEYWORDS} if case.calls else calls


def results(model: Any, case: Case, call: Callable[[Any, Case], Results]) -> Results | None:
    """The results of one call; None if the model refuses it."""
    with torch.no_grad():
        try:
            return {name: value.clone() for name, value in call(model, case).items()}
        except (ValueError, RuntimeError, IndexError, AssertionError):
            return None


def difference(found: Tensor, exact: Tensor) -> float:
    """Of the norm of `exact`; infinite where one of them has numbers and the other has none."""
    if found.shape != exact.shape or found.dtype != exact.dtype:
        return float("inf")
    found, exact = found.double(), exact.double()
    if not torch.equal(found.isfinite(), exact.isfinite()):
        return float("inf")
    found, exact = found.nan_to_num(0.0, 0.0, 0.0), exact.nan_to_num(0.0, 0.0, 0.0)
    return float((found - exact).norm() / exact.norm().clamp(min=1e-30))


# ---- the engines ----


@dataclass(frozen=True)
class Pair:
    """A model and its engine. Both are called alike, and neither was called before the tests."""

    original: Any
    engine: infuse.InferenceEngine


@lru_cache(maxsize=2)  # one case's tests follow each other
def pair(name: str) -> Pair:
    model = BY_NAME[name].make()
    return Pair(copy.deepcopy(model), injected(model))


def injected(model: Any, dtype: torch.dtype = torch.float32) -> infuse.InferenceEngine:
    return infuse.init_inference(model, dtype=dtype, replace_with_kernel_inject=True, verify="off")


def layers_of(model: Any) -> Iterable[Any]:
    return model.model.layers if hasattr(model, "model") else model.layers


def remembered(layer: Any) -> dict[str, Any]:
    """What a layer counts or lists: reading it must not have counted, too."""
    return {name: value for name, value in vars(layer).items() if isinstance(value, (int, float, list))}


def entries(case: Case, plan: Any) -> Iterator[tuple[int, list[Any], list[str]]]:
    """Each layer's number, steps as a whole block, and reasons for being none."""
    for i in range(LAYERS):
        path = f"model.layers.{i}" if case.decodes else f"layers.{i}"
        blocks = [step for step in plan.steps if step.path == path and step.depth == "block"]
        yield i, blocks, [left.why for left in plan.left if left.path == path and left.why.startswith(NOT_A_BLOCK)]


def says_where(why: str, case: Case) -> bool:
    """Whether a reason names the change: one of the case's words, or a line of its classes."""
    return any(word in why for word in case.words) or bool(case.lines().intersection(PLACES.findall(why)))


@pytest.mark.filterwarnings("ignore:more than 16 tokens")  # what the layer that warns says
@pytest.mark.parametrize("name", NAMES, scope="module")
def test_every_call_equals_the_originals(name: str) -> None:
    case, both, refused = BY_NAME[name], pair(name), list[str]()
    for call_name, call in calls_of(case).items():
        exact = results(both.original, case, call)
        if exact is None:
            refused.append(call_name)
            continue
        with torch.no_grad():
            try:
                found = call(both.engine, case)
            except infuse.UnsupportedCall as refusal:  # as written blocks do, for keywords that the model never passes
                assert call_name == "keywords" and any(keyword in str(refusal) for keyword in case.calls), refusal
                continue
        assert found.keys() == exact.keys(), call_name
        for result, value in exact.items():
            apart = difference(found[result], value)
            assert apart <= TOLERANCE, f"{call_name}, {result}: {apart:.1e} of its norm"
    assert len(refused) <= 2, f"the original refuses {refused}"
    for before, after in zip(layers_of(both.original), layers_of(both.engine.module), strict=True):
        if type(before) is type(after):
            assert remembered(after) == remembered(before)


@pytest.mark.parametrize("name", NAMES, scope="module")
def test_the_plan_says_what_became_of_it(name: str) -> None:
    case = BY_NAME[name]
    for i, blocks, reasons in entries(case, pair(name).engine.plan):
        expected = case.expected if i in case.only else READ
        if blocks:
            assert expected != LEFT, f"layer {i} became a block: {blocks[0].why}"
            assert len(blocks) == 1 and not reasons and blocks[0].why.startswith(READ_FROM), blocks[0].why
        else:
            assert expected in (LEFT, EITHER), f"layer {i} stayed: {reasons}"
            assert reasons and all(says_where(why, case) for why in reasons), reasons


@pytest.mark.parametrize("name", COMPARABLE)
def test_a_change_that_is_overlooked_would_show(name: str) -> None:
    case = BY_NAME[name]
    changed, like = case.make(), case.make_like()
    for call in calls_of(case).values():
        exact, without = results(changed, case, call), results(like, case, call)
        if exact is None or without is None:
            continue
        if any(key not in without or difference(without[key], value) > VISIBLE for key, value in exact.items()):
            return
    pytest.fail("no call tells this layer from the one without the change")


def test_the_dtype_asked_for_decides_what_is_read() -> None:
    """A layer that computes otherwise in float32 has to be read, or to stay, as it is in bfloat16."""
    case = BY_NAME["otherwise in float32"]
    exact, in_float32 = case.make().to(torch.bfloat16), case.make()
    engine = injected(case.make(), torch.bfloat16)
    given = ids(2, 9)
    with torch.no_grad():
        wanted, found = first(exact(given)).float(), first(engine(given)).float()
        assert difference(first(in_float32(given)), wanted) > 0.1
    assert difference(found, wanted) < 0.03
