"""KVCache and transformers' DynamicCache hold the same after random sequences of operations; what a cache refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import EncoderDecoderCache

import infuse
from infuse.cache.kv_cache import KVCache, self_attention_cache
from infuse.cache.slot import KVSlot
from infuse.ground import errors
from infuse.ground.errors import UnsupportedCall
from infuse.ops.cache_rows import dequantize_rows, quantize_rows
from tests.models.families import BY_NAME, inputs

LAYERS, HEADS, WIDTH = 2, 2, 4

# A step is (operation, number); what the number means is told in `run`.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 40)),  # tokens
        st.tuples(st.just("update"), st.just(1)),
        st.tuples(st.just("drop"), st.integers(0, 30)),  # tokens off the end
        st.tuples(st.just("keep"), st.integers(1, 30)),  # tokens from the start
        st.tuples(st.sampled_from(["reorder", "select", "select by mask"]), st.integers(0, 1000)),  # seed of the rows
        st.tuples(st.just("repeat"), st.integers(1, 2)),  # how often
        st.tuples(st.just("reset"), st.just(0)),
        st.tuples(st.just("copy"), st.just(0)),
    ),
    max_size=12,
)


def states(batch: int, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    keys, values = (torch.randn(batch, HEADS, tokens, WIDTH, generator=generator) for _ in range(2))
    return keys, values


def rounded(values: Tensor) -> Tensor:
    return dequantize_rows(quantize_rows(values))


def reset(ours: KVCache, theirs: DynamicCache) -> KVCache:
    ours.reset()
    theirs.reset()
    return ours


def copied(ours: KVCache) -> KVCache:
    """A deep copy, with NaN in the original: the copy must not feel it."""
    copy_of_it = copy.deepcopy(ours)
    for slot in ours.layers:
        for storage in (slot.key_storage, slot.value_storage):
            if storage is not None:
                storage.fill_(float("nan"))
    return copy_of_it


def both(
    ours: KVCache, theirs: DynamicCache, step: tuple[str, int], batch: int, generator: torch.Generator
) -> tuple[KVCache, int]:
    """One step on both caches; returns ours (which may be a copy now) and the rows there are."""
    operation, number = step
    rows = torch.Generator().manual_seed(number)
    if operation == "update":
        for layer in range(LAYERS):
            new = states(batch, number, generator)
            for a, b in zip(ours.update(*new, layer), theirs.update(*new, layer), strict=True):
                assert torch.equal(a, b)
    elif operation == "drop":
        ours.crop(-number)
        theirs.crop(-number)
    elif operation == "keep":  # DynamicCache takes this form no longer; ours does, for callers of both ages
        ours.crop(number)
        theirs.crop(-max(theirs.get_seq_length() - number, 0))
    elif operation in ("reset", "copy"):
        ours = reset(ours, theirs) if operation == "reset" else copied(ours)
    elif not theirs.get_seq_length():
        pass  # rows of nothing: DynamicCache ignores these, and keeps its batch
    elif operation == "reorder":
        index = torch.randint(batch, (batch,), generator=rows)
        ours.reorder_cache(index)
        theirs.reorder_cache(index)
    elif operation.startswith("select"):
        index = torch.rand(batch, generator=rows) > 0.4
        index[0] = True
        chosen = index if operation == "select by mask" else index.nonzero().flatten()
        ours.batch_select_indices(chosen)
        theirs.batch_select_indices(chosen)
        batch = int(index.sum())
    elif operation == "repeat" and batch < 8:
        ours.batch_repeat_interleave(number)
        theirs.batch_repeat_interleave(number)
        batch *= number
    return ours, batch


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, batch=st.integers(1, 3), capacity_tokens=st.sampled_from([0, 16, 100]))
def test_holds_what_transformers_cache_holds(steps: list[tuple[str, int]], batch: int, capacity_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = KVCache(capacity_tokens), DynamicCache()
    ours, batch = both(ours, theirs, ("update", 3), batch, generator)
    for step in steps:
        ours, batch = both(ours, theirs, step, batch, generator)
        assert len(ours) == len(theirs) == LAYERS
        for layer in range(LAYERS):
            assert ours.get_seq_length(layer) == theirs.get_seq_length(layer)
            assert ours.get_mask_sizes(5, layer) == theirs.get_mask_sizes(5, layer)
            if theirs.get_seq_length(layer):
                slot = ours.layers[layer]
                assert slot.keys is not None and slot.values is not None
                assert torch.equal(slot.keys, theirs.layers[layer].keys)
                assert torch.equal(slot.values, theirs.layers[layer].values)


@pytest.mark.parametrize("empty", [KVCache, DynamicCache])
def test_an_empty_cache(empty: type) -> None:
    cache = empty()
    assert cache.get_seq_length() == 0 and cache.get_mask_sizes(4, 0) == (4, 0) and len(cache) == 0
    cache.reset()
    cache.crop(-3)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([0]))


def test_layers_may_come_in_any_order() -> None:
    cache, theirs, generator = KVCache(), DynamicCache(), torch.Generator().manual_seed(0)
    new = states(1, 2, generator)
    cache.update(*new, 1)
    theirs.update(*new, 1)
    assert cache.get_seq_length(0) == theirs.get_seq_length(0) == 0
    assert cache.get_seq_length(1) == theirs.get_seq_length(1) == 2


def test_growth_keeps_the_contents_and_is_rare() -> None:
    cache, generator = KVCache(), torch.Generator().manual_seed(0)
    given_keys, storages = [], set()
    for _ in range(300):
        keys, values = states(2, 1, generator)
        given_keys.append(keys)
        found, _ = cache.update(keys, values, 0)
        storage = cache.layers[0].key_storage
        assert storage is not None
        storages.add((storage.data_ptr(), storage.shape[2]))
        assert storage.shape[2] >= found.shape[2]
    assert torch.equal(found, torch.cat(given_keys, dim=2))
    assert sorted(size for _, size in storages) == [64, 128, 256, 512]


def test_a_capacity_is_allocated_at_once() -> None:
    cache, generator = KVCache(capacity_tokens=200), torch.Generator().manual_seed(0)
    places = set()
    for tokens in (1, 150, 49):
        cache.update(*states(1, tokens, generator), 0)
        places.add(cache.layers[0].key_storage.data_ptr())  # type: ignore[union-attr]
    assert len(places) == 1


def test_appending_does_not_copy_what_is_there() -> None:
    """What was returned before is the same memory, and a token that is dropped makes room for the next."""
    cache, generator = KVCache(), torch.Generator().manual_seed(0)
    first, _ = cache.update(*states(1, 4, generator), 0)
    cache.crop(-1)
    second, _ = cache.update(*states(1, 2, generator), 0)
    assert first.data_ptr() == second.data_ptr() and second.shape[2] == 5


@pytest.mark.parametrize("held", [0, 7])
def test_limit_is_told_before_anything_is_written(held: int) -> None:
    cache, generator = KVCache(limit_tokens=10), torch.Generator().manual_seed(0)
    if held:
        cache.update(*states(1, held, generator), 0)
    slot = cache.slot(0)
    before = copy.deepcopy((slot.length, slot.key_storage, slot.value_storage))
    with pytest.raises(errors.ContextLimitError, match=f"holds {held} tokens, {11 - held} more.* 10") as raised:
        cache.update(*states(1, 11 - held, generator), 0)
    assert isinstance(raised.value, ValueError)
    after = (slot.length, slot.key_storage, slot.value_storage)
    for a, b in zip(
        before, after, strict=True
    ):  # bits: what no token has been written to may hold anything, NaN as well
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)) if isinstance(a, Tensor) else a == b
    keys, _ = cache.update(*states(1, 10 - held, generator), 0)
    assert keys.shape[2] == 10 == cache.get_max_length()
    assert slot.key_storage is not None and slot.key_storage.shape[2] == 10, "no more than the limit is allocated"


def test_nbytes_counts_the_storage() -> None:
    cache, generator = KVCache(capacity_tokens=64), torch.Generator().manual_seed(0)
    assert cache.nbytes() == 0
    for layer in range(LAYERS):
        cache.update(*(t.to(torch.bfloat16) for t in states(3, 5, generator)), layer)
    assert cache.nbytes() == LAYERS * 2 * (3 * HEADS * 64 * WIDTH) * 2
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes() > 0, "a reset keeps the storage for the next call"


def refill(slot: KVSlot, **changes: Any) -> Tensor:
    """Eight values of batch, heads, tokens, width 1, 2, 1, 4 but for `changes`, appended to the slot."""
    shape = {"batch": 1, "heads": HEADS, "tokens": 1, "width": WIDTH} | changes
    dtype = shape.pop("dtype", torch.float32)
    new = torch.arange(1, 1 + shape["batch"] * shape["heads"] * shape["width"], dtype=dtype).view(*shape.values())
    keys, values = slot.update(new, new + 1)
    assert torch.equal(values, keys + 1)
    return keys


@pytest.mark.parametrize("changes", [dict(batch=3), dict(heads=1), dict(width=8), dict(dtype=torch.bfloat16)], ids=str)
def test_after_a_reset_another_shape_is_welcome(changes: dict[str, Any]) -> None:
    slot = KVSlot()
    refill(slot)
    slot.reset()
    wanted = refill(KVSlot(), **changes)
    found = refill(slot, **changes)
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_batches_that_change_after_resets_do_not_pile_up_storage() -> None:
    slot = KVSlot()
    for batch in (1, 2, 1, 2, 1, 2):
        refill(slot, batch=batch)
        assert slot.key_storage is not None and slot.key_storage.shape[2] == 64
        slot.reset()


@pytest.mark.parametrize("cache", [KVCache, DynamicCache])
def test_another_batch_in_the_middle_raises(cache: type) -> None:
    """A batch of one must not be spread silently over the rows that are there."""
    made, generator = cache(), torch.Generator().manual_seed(0)
    made.update(*states(2, 3, generator), 0)
    with pytest.raises((errors.InfuseError, RuntimeError), match="Sizes of tensors|holds a batch of 2, a batch of 1"):
        made.update(*states(1, 1, generator), 0)
    assert made.get_seq_length() == 3


def test_self_attention_cache_of_a_pair_is_its_first() -> None:
    ours, theirs = KVCache(), DynamicCache()
    assert self_attention_cache(EncoderDecoderCache(ours, theirs), "layer", 0) is ours
    assert self_attention_cache(ours, "layer", 0) is ours


# ---- rows of different lengths ----


@pytest.mark.parametrize("name", ["llama", "gpt2", "gptj", "falcon-40b"])
def test_rows_of_different_lengths_decode_as_if_alone(name: str) -> None:
    """A batch padded on the right, made dense by crop_rows: each row goes on at its own end, without a mask."""
    family = BY_NAME[name]
    model = family.make()
    engine = infuse.init_inference(model, dtype=torch.float32)
    lengths, positions = torch.tensor([4, 7]), "position_ids"
    ids = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(3))
    later = torch.randint(3, 96, (2, 3), generator=torch.Generator().manual_seed(4))
    cache = KVCache()
    with torch.no_grad():
        engine(input_ids=ids, past_key_values=cache)
        cache.crop_rows(lengths)
        found = []
        for step in range(3):
            given = {positions: (lengths + step)[:, None]}
            found.append(engine(input_ids=later[:, step : step + 1], past_key_values=cache, **given).logits[:, -1])
        for row, length in enumerate(lengths.tolist()):
            alone = engine(input_ids=torch.cat((ids[row, :length], later[row]))[None]).logits[0, -3:]
            torch.testing.assert_close(torch.stack([logits[row] for logits in found]), alone, rtol=1e-4, atol=1e-5)


def test_what_shorter_rows_have_not_written_is_no_nan() -> None:
    """It is hidden by the mask, but 0 times NaN is NaN: storage begins with whatever the memory held."""
    slot = KVSlot()
    slot.update(torch.ones(2, 1, 4, 8), torch.ones(2, 1, 4, 8))
    for storage in (slot.key_storage, slot.value_storage):
        assert storage is not None
        storage[:, :, 4:] = float("nan")
    slot.crop_rows(torch.tensor([1, 4]))
    for _ in range(3):
        held = slot.update(torch.ones(2, 1, 2, 8), torch.ones(2, 1, 2, 8))
        assert all(bool(torch.isfinite(part).all()) for part in held)


def test_crop_rows_refuses_lengths_that_do_not_fit() -> None:
    cache = KVCache()
    cache.update(torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8), 0)
    for lengths in ([5, 1], [1]):
        with pytest.raises(infuse.InfuseError, match="do not fit"):
            cache.crop_rows(torch.tensor(lengths))
    cache.crop_rows(torch.tensor([1, 3]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.layers[0].row_lengths.tolist() == [3, 1]
    cache.crop(-1)
    assert cache.layers[0].row_lengths.tolist() == [2, 0] and cache.get_seq_length() == 2


def filled(cache: KVCache, dtype: str, **changes: int) -> tuple[KVCache, nn.Module]:
    model = infuse.init_inference(BY_NAME["llama"].make(**changes), dtype=dtype).module
    with torch.no_grad():
        model(**inputs(BY_NAME["llama"]), past_key_values=cache, use_cache=True)
    return cache, model


@pytest.mark.parametrize("rows", [None, torch.tensor([4, 11])])
@pytest.mark.parametrize(("first", "then"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_a_cache_of_another_dtype_is_refused(first: str, then: str, rows: torch.Tensor | None) -> None:
    cache, _ = filled(KVCache(), first)
    if rows is not None:
        cache.crop_rows(rows)
    model = infuse.init_inference(BY_NAME["llama"].make(), dtype=then).module
    before = [held.clone() for slot in cache.layers for held in slot.held()]
    for tokens in (1, 3):
        with pytest.raises(UnsupportedCall, match=r"past_key_values: .*float.*float"), torch.no_grad():
            model(torch.ones(2, tokens, dtype=torch.long), past_key_values=cache, use_cache=True)
    after = [held for slot in cache.layers for held in slot.held()]
    assert cache.get_seq_length() == 11 and all(map(torch.equal, before, after)), "and stays as it was"


def test_a_cache_of_another_model_is_refused() -> None:
    cache, _ = filled(KVCache(), "fp32")
    other = infuse.init_inference(BY_NAME["llama"].make(num_key_value_heads=4), dtype="fp32").module
    with pytest.raises(UnsupportedCall, match="past_key_values: .* 2 heads of 12 .* 4 heads of 12 "), torch.no_grad():
        other(torch.ones(2, 1, dtype=torch.long), past_key_values=cache, use_cache=True)


def test_a_cache_that_is_reset_serves_any_dtype() -> None:
    cache, _ = filled(KVCache(), "fp32")
    cache.reset()
    filled(cache, "bf16")
    assert {storage.dtype for storage in cache.storages()} == {torch.bfloat16}


@pytest.mark.parametrize("format", [None, "int8"])
def test_values_may_have_other_heads_and_another_width_than_keys(format: str | None) -> None:
    """As latent attention makes them; also where the cache grows, is reordered, cropped and copied."""
    ours, theirs, generator = KVCache(format=format), DynamicCache(), torch.Generator().manual_seed(0)
    for tokens in (3, 70, 1):
        new = (torch.randn(2, 1, tokens, 16, generator=generator), torch.randn(2, 2, tokens, 4, generator=generator))
        found, wanted = ours.update(*new, 0), theirs.update(*new, 0)
    for cache in (ours, theirs):
        cache.crop(-2)
        cache.reorder_cache(torch.tensor([1, 1]))
    for a, b, c in zip(ours.layers[0].copied().held(), found, wanted, strict=True):
        torch.testing.assert_close(b, c, rtol=0, atol=0 if format is None else 0.05)
        assert a.shape[:3] == (2, b.shape[1], 72)
    with pytest.raises(UnsupportedCall, match="1 heads of 16 .values: 2 of 4. in torch.float32 .* 1 heads of 16 in"):
        ours.update(torch.ones(2, 1, 1, 16), torch.ones(2, 1, 1, 16), 0)


@pytest.mark.parametrize("format", [None, "int8"])
def test_keys_and_values_may_be_assigned_and_read_by_layer(format: str | None) -> None:
    """As callers do that drop tokens, or keep a cache elsewhere."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = KVCache(format=format), DynamicCache()
    for layer in range(LAYERS):
        for cache in (theirs, ours):
            cache.update(*states(2, 9, generator.manual_seed(layer)), layer)
    for slot, one in zip(ours.layers, theirs.layers, strict=True):
        one.keys, one.values = slot.keys[:, :, 2::3], slot.values[:, :, 2::3]
        slot.values, slot.keys = one.values, one.keys
    for layer in range(LAYERS):
        new = states(2, 1, generator)
        new = new if format is None else tuple(map(rounded, new))
        for a, b in zip(ours.update(*new, layer), theirs.update(*new, layer), strict=True):
            assert torch.equal(a, b)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] is b[2] is None
    ours.layers[0].keys = ours.layers[0].keys[:, :, 1:]
    with pytest.raises(UnsupportedCall, match="assigned with different numbers of tokens"):
        ours.update(*states(2, 1, generator), 0)
    ours.layers[0].keys = ours.layers[0].values = None
    assert ours.get_seq_length() == 0
    ours.update(*states(3, 1, generator), 0)


# Layers with windows keep the whole text until there are pages: how much larger that is than transformers' own cache,
# of 400 tokens, without windows of less than 64 tokens' room.
WINDOWED = {"mistral": (8, 64.0), "gemma3": (64, 3.0), "gpt-oss": (64, 2.65)}


@pytest.mark.parametrize("name", WINDOWED)
def test_what_windows_cost_does_not_grow(name: str) -> None:
    """docs/long-contexts.md tells how to compute it; generate asks for no more than the room for the answer."""
    window, most = WINDOWED[name]
    family, tokens = BY_NAME[name], 400
    models = [family.make(sliding_window=window, max_position_embeddings=512) for _ in range(2)]
    given = torch.randint(3, 96, (1, tokens - 8), generator=torch.Generator().manual_seed(1))
    asked = dict(max_new_tokens=9, do_sample=False, return_dict_in_generate=True)  # the last one is not in the cache
    own = models[0].generate(given, **asked).cache
    ours = infuse.init_inference(models[1], dtype="fp32", progress=False).generate(given, **asked).cache
    its_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in own.layers)
    row_bytes = [2 * layer.keys.shape[1] * layer.keys.shape[3] * 4 for layer in own.layers]
    held = [min(tokens, layer.sliding_window - 1) if layer.is_sliding else tokens for layer in own.layers]
    assert its_bytes == sum(map(int.__mul__, held, row_bytes))
    assert ours.nbytes() <= 448 * sum(row_bytes), "room for multiples of 64 tokens"
    assert ours.nbytes() / its_bytes <= most
