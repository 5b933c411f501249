"""Recurrent states in every call that transformers' caches serve: parts of prompts, padding, beams, copies, caches that
the original filled or goes on with, and what is refused.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.cache.recurrence_slot import CONV, STATE, StateSlot
from infuse.ground.errors import InfuseError, UnsupportedCall
from infuse.native import kernels
from tests.models.families import BY_NAME
from tests.support.side_by_side import injected
from tests.support.states import ALL_NAMES, ONE_OF_EACH, TOKENS, close, family_of, ids_of

# Whose originals begin parts of a prompt with no state, whatever the cache holds.
FORGETS = ("jamba", "mamba", "falcon_mamba")
# Whose parts are not the whole: prompts have limits of dt, and single tokens have none.
PARTS_DIFFER = ("bamba", "nemotron_h", "nemotron_h-latent", "zamba2")
# Whose masks are of the new tokens alone.
MASKS_NEW_TOKENS = ("mamba", "falcon_mamba")


@once
def pair(name: str) -> tuple[Any, Any]:
    """The original, and the same model injected: never to be changed."""
    made = family_of(name).make()
    if name == "zamba2":  # whose shared blocks stay
        return made, infuse.init_inference(family_of(name).make(), dtype="fp32").module
    return made, injected(family_of(name).make()).module


def dynamic(name: str) -> DynamicCache:
    return DynamicCache(config=pair(name)[0].config)


def static(name: str) -> StaticCache:
    return StaticCache(config=pair(name)[0].config, max_cache_len=TOKENS + 4)


CACHES: dict[str, Callable[[str], Any]] = {"ours": lambda name: KVCache(), "dynamic": dynamic, "static": static}


@torch.no_grad()
def step(model: Any, ids: Tensor, cache: Any, start: int = 0, **more: Tensor) -> Tensor:
    """The logits of new tokens on a cache that holds `start`."""
    mask = more.get("attention_mask")
    positions = torch.arange(start, start + ids.shape[1])[None].expand(len(ids), -1)
    if mask is not None:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    if "mamba2" not in type(model).__name__.lower():
        more["position_ids"] = positions
    return model(input_ids=ids, cache=cache, use_cache=True, **more).logits


@once
def whole(name: str) -> Tensor:
    """The original's logits of all tokens in one call."""
    with torch.no_grad():
        return pair(name)[0](input_ids=ids_of(name), use_cache=False).logits


def same_states(found: Any, exact: Any) -> None:
    """Both are caches of transformers."""
    count = 0
    for one, other in zip(found.layers, exact.layers, strict=True):
        for kind in ("conv_states", "recurrent_states"):
            state = getattr(other, kind, {}).get(0)
            if state is not None:
                close(getattr(one, kind)[0], state)
                count += 1
    assert count


def slots(cache: KVCache) -> list[StateSlot]:
    return [slot for slot in cache.layers if isinstance(slot, StateSlot)]


# ---- calls


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ALL_NAMES)
def test_parts_of_a_prompt(name: str, kind: str) -> None:
    """Several tokens on a state, one token on it, and the same as the original's own parts."""
    (original, model), ids = pair(name), ids_of(name)
    if kind == "static" and name in ("mamba2",):
        pytest.skip("the model has no layer that counts the tokens of a static cache")
    ours, own = CACHES[kind](name), dynamic(name)
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, 10), (10, 11), (11, 12)):
        found = step(model, ids[:, start:stop], ours, start)
        close(found, step(original, ids[:, start:stop], own, start))
        if name not in (*FORGETS, *PARTS_DIFFER):
            close(found, whole(name)[:, start:stop])
    if kind == "dynamic":
        same_states(ours, own)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_padded_row_is_the_row_alone(name: str) -> None:
    (_, model), ids = pair(name), ids_of(name)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    both, alone = KVCache(), KVCache()
    close(step(model, ids, both, attention_mask=mask)[:1, 3:], step(model, ids[:1, 3:], alone))
    more = torch.ones(2, 1, dtype=torch.long)
    for token in (5, 9):
        mask = torch.cat((mask, more), dim=1)
        given = more if name in MASKS_NEW_TOKENS else mask
        new = torch.full((2, 1), token)
        close(step(model, new, both, attention_mask=given)[:1], step(model, new[:1], alone, start=mask.shape[1] - 4))


@pytest.mark.parametrize("name", ALL_NAMES)
def test_without_a_cache(name: str) -> None:
    (_, model), ids = pair(name), ids_of(name)
    with torch.no_grad():
        for _ in range(2):  # nothing is left behind
            close(model(input_ids=ids, use_cache=False).logits, whole(name))


@pytest.mark.parametrize("name", ALL_NAMES)
def test_each_goes_on_with_a_cache_that_the_other_filled(name: str) -> None:
    (original, model), ids = pair(name), ids_of(name)
    theirs, ours = dynamic(name), dynamic(name)
    close(step(model, ids[:, :7], ours), step(original, ids[:, :7], theirs))
    same_states(ours, theirs)
    close(step(model, ids[:, 7:8], theirs, 7), step(original, ids[:, 7:8], ours, 7))
    same_states(ours, theirs)
    close(step(original, ids[:, 8:11], theirs, 8), step(model, ids[:, 8:11], ours, 8))
    same_states(ours, theirs)
    for each in (theirs, ours):
        each.reset()
    close(step(model, ids[:, :2], theirs), step(original, ids[:, :2], ours))  # fewer than the convolution sees
    same_states(ours, theirs)
    close(step(model, ids[:, 2:3], ours, 2), step(original, ids[:, 2:3], theirs, 2))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_state_that_the_user_gives(name: str) -> None:
    """In the layers of transformers' cache, as the original takes it."""
    (original, model), ids = pair(name), ids_of(name)
    first, second = dynamic(name), dynamic(name)
    for each in (first, second):
        step(original, ids[:, :4], each)
        for layer in each.layers:
            for states in (getattr(layer, kind, {}) for kind in ("conv_states", "recurrent_states")):
                if states and states[0] is not None:
                    states[0].copy_(torch.linspace(-1, 1, states[0].numel()).view_as(states[0]))
    close(step(model, ids[:, 4:5], first, 4), step(original, ids[:, 4:5], second, 4))
    same_states(first, second)


# ---- what callers do with caches


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "reset", "repeat", "select", "reorder"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_operations_on_our_cache(name: str, how: str) -> None:
    (original, model), ids = pair(name), ids_of(name)
    ours, own = KVCache(), dynamic(name)
    for each, cache in ((model, ours), (original, own)):
        step(each, ids[:, :6], cache)
    rows = torch.tensor([0, 1])
    if how in ("deepcopy", "pickle"):
        left, ours = ours, copy.deepcopy(ours) if how == "deepcopy" else pickle.loads(pickle.dumps(ours))
        for storage in left.storages():
            storage.fill_(float("nan"))
    elif how == "reset":
        for each, cache in ((model, ours), (original, own)):
            cache.reset()
            step(each, ids[:, :6], cache)
    elif how == "repeat":
        rows = torch.tensor([0, 0, 1, 1])
        ours.batch_repeat_interleave(2)
        own.reorder_cache(rows)
    elif how == "select":
        rows = torch.tensor([1])
        ours.batch_select_indices(rows)
        own.reorder_cache(rows)
    else:
        rows = torch.tensor([1, 1])
        ours.reorder_cache(rows)
        own.reorder_cache(rows)
    for token in (6, 7):
        new = ids[rows, token : token + 1]
        close(step(model, new, ours, token), step(original, new, own, token))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_states_of_copies_are_their_own(name: str) -> None:
    """Steps in one call write to the states where they are."""
    (_, model), ids = pair(name), ids_of(name)
    cache = KVCache()
    step(model, ids[:, :6], cache)
    twin = copy.deepcopy(cache)
    step(model, ids[:, 6:7], cache, 6)
    again = step(model, ids[:, 6:7], twin, 6)
    step(model, ids[:, 7:8], cache, 7)
    close(step(model, ids[:, 7:8], twin, 7), whole(name)[:, 7:8])
    assert torch.isfinite(again).all()


@pytest.mark.parametrize("kind", ["ours", "dynamic"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_another_batch_is_refused(name: str, kind: str) -> None:
    (_, model), ids = pair(name), ids_of(name)
    cache = CACHES[kind](name)
    step(model, ids[:, :6], cache)
    with pytest.raises(InfuseError, match="a batch of 2, a batch of 1 was given"):
        step(model, ids[:1, 6:7], cache, 6)
    close(step(model, ids[:, 6:7], cache, 6), whole(name)[:, 6:7])


def test_a_cache_of_another_model_is_refused() -> None:
    (_, model), other = pair("qwen3_5"), injected(BY_NAME["qwen3_5"].make(seed=3)).module
    cache = KVCache()
    step(other, ids_of("qwen3_5")[:, :6], cache)
    with pytest.raises(UnsupportedCall, match="filled by another model"):
        step(model, ids_of("qwen3_5")[:, 6:7], cache, 6)
    cache.reset()
    close(step(model, ids_of("qwen3_5"), cache), whole("qwen3_5"))


# ---- states that are kept


@pytest.mark.parametrize("name", ALL_NAMES)
def test_going_back_to_any_token(name: str) -> None:
    """Tokens whose states are kept are computed as in steps: the same numbers, whatever is in a call."""
    (_, model), ids = pair(name), ids_of(name)
    by_steps, cache = KVCache(), KVCache()
    for each in (by_steps, cache):
        step(model, ids[:, :5], each)
    exact = {n: step(model, ids[:, n : n + 1], by_steps, n) for n in range(5, 11)}
    for back in (10, 9, 7, 6, 5):
        cache.snapshot(each=True)
        found = step(model, ids[:, 5:10], cache, 5)
        close(found, torch.cat([exact[n] for n in range(5, 10)], dim=1))
        assert cache.rewind(back) == back == cache.get_seq_length()
        close(step(model, ids[:, back : back + 1], cache, back), exact[back])
        assert cache.rewind(5) == 5  # to where it began
    cache.snapshot()
    assert all(len(slot._kept) == 1 for slot in slots(cache))
    step(model, ids[:, 5:10], cache, 5)
    assert cache.rewind(7) == 5


@pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "olmo_hybrid", "granitemoehybrid", "bamba", "mamba2"])
def test_kept_states_in_bfloat16_are_those_of_steps_bit_for_bit(name: str) -> None:
    """So verified candidates are the tokens of plain decoding also where two of them are nearly alike."""
    model = infuse.init_inference(family_of(name).make(), dtype="bf16", progress=False).module
    ids, by_steps, together = ids_of(name, batch=1), KVCache(), KVCache()
    for each in (by_steps, together):
        step(model, ids[:, :5], each)
    for n in range(5, 9):
        step(model, ids[:, n : n + 1], by_steps, n)
    together.snapshot(each=True)
    step(model, ids[:, 5:9], together, 5)
    pairs = [*zip(slots(together), slots(by_steps), strict=True)]
    assert pairs
    for one, other in pairs:
        assert all(torch.equal(one.states[key], other.states[key]) for key in (CONV, STATE) if key in other.states)


def test_kept_states_follow_the_rows() -> None:
    (_, model), ids = pair("qwen3_5"), ids_of("qwen3_5")
    cache = KVCache()
    step(model, ids[:, :5], cache)
    cache.snapshot(each=True)
    step(model, ids[:, 5:8], cache, 5)
    twin = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    for each, rows in ((cache, [1, 0]), (twin, [0, 1])):
        assert each.rewind(6) == 6
        close(step(model, ids[rows, 6:7], each, 6), whole("qwen3_5")[rows, 6:7])


def test_layers_find_a_length_that_all_have() -> None:
    one, other = StateSlot(), StateSlot()
    cache = KVCache()
    cache.layers = [one, other]
    for slot, lengths in ((one, (4, 6, 9)), (other, (4, 7, 9))):
        for length in lengths:
            slot.end(length - slot.length, {CONV: torch.full((1, 2), float(length)), STATE: torch.zeros(1)})
            slot.snapshot(each=True) if length == 4 else None
    assert cache.rewind(8) == 4 == one.length == other.length
    assert float(one.states[CONV][0, 0]) == 4
    assert cache.rewind(2) == 0
