"""Our decode loop gives the original's tokens in float32 where its steps are replays: families, padding, ends, growth,
streamers, fallbacks.

The graphs are those of a recorder (fake_graph.py): what depends on a number of the host, or on a buffer that was
written over, is wrong tokens here as it would be on a GPU.
"""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.graphs.pool import BucketPool
from tests.support.decoding import NAMES, ON_HOST, PROMPT, SAMPLING, made, original, padded, rows_of, same, seeded
from tests.support.fake_graph import RunAgainBackend
from tests.support.graphed import graphed

# ---- tokens


@pytest.mark.parametrize("name", NAMES)
def test_families(name: str) -> None:
    engine, backend = graphed(made(name))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for padding in ("left", None):
            for seed in (11, 12):
                same(name, engine.module, **padded(name, padding=padding, seed=seed))
        same(name, engine, **padded(name, batch=1), max_new_tokens=60)
    assert len(backend.captures) == 2 and backend.replays > 60  # 3 rows and 64 tokens, 1 row and 128


@pytest.mark.parametrize("mode", SAMPLING)
def test_ways_to_choose(mode: str) -> None:
    """One graph: it ends with the logits."""
    engine, backend = graphed(made("llama"))
    for padding in ("left", None, "left"):
        same("llama", engine, **padded(padding=padding), **SAMPLING[mode])
    for seed in (12, 13):
        same("llama", engine, **padded(seed=seed), **SAMPLING[mode])
    assert len(backend.captures) == 1
    many = dict(num_return_sequences=2) if SAMPLING[mode].get("do_sample") else {}
    same("llama", engine, **padded(), **SAMPLING[mode], **many)
    assert len(backend.captures) == 1 + bool(many)


def test_a_penalty_learns_of_another_padding() -> None:
    """transformers excludes padding from the penalty by a tensor; a kept graph must not use the first call's."""
    engine, backend = graphed(made("llama"))
    answers = set()
    for hidden in (1, 4, 6, 2, 7):
        given = padded(batch=2, padding=None, seed=21)
        given["attention_mask"][0, :hidden] = 0
        given["input_ids"][0, :hidden] = torch.arange(20, 20 + hidden)
        answers.add(
            tuple(same("llama", engine, **given, repetition_penalty=3.0, max_new_tokens=30)[0, PROMPT:].tolist())
        )
    assert len(backend.captures) == 1 and len(answers) > 1


@pytest.mark.parametrize("mode", [dict(top_k=1), dict(top_k=40, top_p=1e-6), dict(top_k=0, temperature=1e-4)], ids=str)
def test_samples_in_16_bits_from_the_kept_alone(mode: dict[str, Any]) -> None:
    """Where only the likeliest token is kept, it is what greedy search takes."""
    engine, backend = graphed(made("llama"), dtype="fp16")  # not bfloat16, in which the likeliest are often two
    exact = engine.generate(**padded(), max_new_tokens=14, do_sample=False)
    for _ in range(2):
        assert torch.equal(engine.generate(**padded(), max_new_tokens=14, do_sample=True, **mode), exact)
    assert len(backend.captures) == 1


def test_samples_in_16_bits_are_many() -> None:
    """Drawn anew at each step and for each row, and as often as they are likely."""
    engine, backend = graphed(made("llama"), dtype="bf16")
    given = padded(batch=1, padding=None)
    drawn = engine.generate(**given, max_new_tokens=8, do_sample=True, top_k=5, num_return_sequences=200)[:, PROMPT:]
    assert backend.captures and len(set(map(tuple, drawn.tolist()))) > 150
    first = drawn[:, 0].bincount().argmax()  # rows that began alike go on as their scores say
    rows = drawn[drawn[:, 0] == first]
    with torch.no_grad():
        begun = torch.cat((given["input_ids"], first.view(1, 1)), dim=1)
        scores = engine.module(begun).logits[0, -1].float()
    kept = set(scores.topk(5).indices.tolist())
    assert len(rows) > 40 and set(rows[:, 1].tolist()) <= kept
    expected = torch.zeros_like(scores).index_copy(0, scores.topk(5).indices, scores.topk(5).values.softmax(0))
    found = rows[:, 1].bincount(minlength=len(scores)) / len(rows)
    assert float((found - expected).abs().max()) < 4 * (0.25 / len(rows)) ** 0.5


def test_modes_share_a_graph_and_give_tokens_of_their_own() -> None:
    engine, backend = graphed(made("llama"))
    for _ in range(2):
        found = {
            mode: tuple(same("llama", engine, **padded(), **SAMPLING[mode]).flatten().tolist()) for mode in SAMPLING
        }
    assert len(set(found.values())) > 5
    for temperature in (0.7, 0.9, 0.7):
        same("llama", engine, **padded(), do_sample=True, temperature=temperature)
    assert len(backend.captures) == 1


def test_prompts() -> None:
    """One token; a column of masked ones; embeddings, of which no ids are known; right padding."""
    engine, backend = graphed(made("llama"))
    for _ in range(2):
        same("llama", engine, **padded(tokens=1, padding=None))
        same("llama", engine, **padded(tokens=4))
        same("llama", engine, **padded(padding="right"))
        given = padded()
        embedded = original("llama").get_input_embeddings()(given["input_ids"]).detach() * 1.1
        for penalty in (1.0, 1.4):
            found = same(
                "llama",
                engine,
                inputs_embeds=embedded,
                attention_mask=given["attention_mask"],
                repetition_penalty=penalty,
            )
            assert found.shape[1] == 14
    assert backend.captures


def test_batches_and_lengths_that_change() -> None:
    engine, backend = graphed(made("llama"))
    for batch, tokens, new in (
        (2, 5, 20),
        (1, 40, 9),
        (3, 3, 30),
        (2, 7, 9),
        (1, 70, 12),
        (2, 5, 3),
        (2, 5, 1),
        (3, 60, 5),
        (1, 40, 30),
    ):
        same("llama", engine, **padded(batch=batch, tokens=tokens), max_new_tokens=new)
    assert len(backend.captures) <= 5


# ---- ends


@pytest.mark.parametrize("new", [4, 14, 40])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gemma2"])
def test_rows_that_end_at_different_times(name: str, new: int) -> None:
    """For each length, three tokens that end the last row there: at the first step, in the middle, at the end."""
    engine, backend = graphed(made(name))
    rows = rows_of(name, **padded(name), max_new_tokens=new)
    by_length: dict[int, tuple[int, ...]] = {}
    for ends in product(*(sorted(set(row)) for row in rows)):
        by_length[1 + max(min(row.index(end) for end in ends if end in row) for row in rows)] = ends
    for length, ends in list(by_length.items())[:12]:
        found = same(name, engine, **padded(name), max_new_tokens=new, eos_token_id=list(ends), pad_token_id=0)
        assert found.shape[1] == PROMPT + length
    assert len(by_length) > 1 or name == "bloom"  # which soon says one token for ever
    assert new < 14 or name == "bloom" or backend.replays


def test_no_token_too_many_and_none_too_few() -> None:
    """One row that ends at each step there is."""
    engine, _ = graphed(made("llama"))
    row = rows_of("llama", **padded(batch=1), max_new_tokens=40)[0]
    seen = set()
    for at, token in enumerate(row):
        if token in row[:at]:
            continue
        found = same("llama", engine, **padded(batch=1), max_new_tokens=40, eos_token_id=token, pad_token_id=0)
        assert found.shape[1] == PROMPT + at + 1
        seen.add(at)
    assert len(seen) > 2 and max(seen) > 8


@pytest.mark.parametrize("new", [1, 2, 3, 7, 8, 9, 10, 16, 17, 18, 25])
def test_the_number_of_new_tokens(new: int) -> None:
    engine, _ = graphed(made("llama"))
    for _ in range(2):
        assert same("llama", engine, **padded(), max_new_tokens=new).shape[1] == PROMPT + new
        assert same("llama", engine, **padded(), max_length=PROMPT + new, max_new_tokens=None).shape[1] == PROMPT + new


class Collected:
    """A streamer: what was put, and how often the end was told."""

    def __init__(self) -> None:
        self.columns: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu" and not value.is_inference()
        self.columns.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("mode", ["greedy", "top-k", "repetition penalty"])
@pytest.mark.parametrize("ends", [None, 2])
def test_streamers_get_tokens_in_order(mode: str, ends: int | None) -> None:
    engine, backend = graphed(made("llama"))
    kwargs = dict(padded(batch=1), max_new_tokens=45, pad_token_id=0, **SAMPLING[mode])
    if ends is not None:
        kwargs["eos_token_id"] = rows_of("llama", **kwargs)[0][20]
    for _ in range(2):
        ours, theirs = Collected(), Collected()
        exact = seeded(original("llama"), **kwargs, streamer=theirs)
        assert torch.equal(seeded(engine, **kwargs, streamer=ours), exact)
        assert ours.columns == theirs.columns and ours.ended == 1
        assert sum(ours.columns[1:], []) == exact[0, PROMPT:].tolist()
    assert backend.replays


def test_streamers_that_take_batches() -> None:
    engine, backend = graphed(made("llama"))
    rows = rows_of("llama", **padded(), max_new_tokens=30)
    for _ in range(2):
        ours, theirs = Collected(), Collected()
        for model, streamer in ((engine, ours), (original("llama"), theirs)):
            ends = [rows[0][3], rows[1][20], rows[2][12]]
            seeded(model, **padded(), max_new_tokens=30, eos_token_id=ends, pad_token_id=0, streamer=streamer)
        assert ours.columns == theirs.columns
    assert backend.replays


# ---- growth


@pytest.mark.parametrize("name", ["llama", "bloom", "gemma2", "gpt-neo"])
def test_growing_changes_the_bucket(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket is for 20 tokens more than the prompt at first: 64, then 128."""
    monkeypatch.setattr("infuse.generate.install.PREPARED_TOKENS", 20)
    engine, backend = graphed(made(name))
    ends = rows_of(name, **padded(name), max_new_tokens=110)[1][90]
    for mode in (
        dict(),
        dict(repetition_penalty=1.3),
        dict(eos_token_id=ends, pad_token_id=0),
        dict(no_repeat_ngram_size=3),
        dict(),
    ):
        same(name, engine, **padded(name), max_new_tokens=110, **mode)
    kept = engine.module._infuse.buckets.idle
    captures = len(backend.captures)
    assert [bucket.capacity_tokens for bucket in kept] == [64, 128] and captures == 2
    same(name, engine, **padded(name), max_new_tokens=20)
    assert len(backend.captures) == captures, "the small bucket is as good as before"


def test_what_lies_beyond_the_end_is_not_read() -> None:
    """A kept cache is full of another answer's keys, here NaN: rows of zero weight would carry it on."""
    engine, _ = graphed(made("llama"))
    same("llama", engine, **padded(), max_new_tokens=50)
    with torch.inference_mode():
        for bucket in engine.module._infuse.buckets.idle:
            for storage in bucket.cache.storages():
                storage.fill_(float("nan"))
    same("llama", engine, **padded(tokens=3), max_new_tokens=20)


def test_a_kept_cache_that_lies_elsewhere() -> None:
    """Its old graph would read and write where the cache was."""
    engine, backend = graphed(made("llama"))
    same("llama", engine, **padded())
    (bucket,) = engine.module._infuse.buckets.idle
    for slot in bucket.cache.layers:
        slot.key_storage, slot.value_storage = slot.key_storage.clone(), slot.value_storage.clone()
    same("llama", engine, **padded(seed=12))
    assert len(backend.captures) == 2


def test_the_bound_on_kept_buckets() -> None:
    engine, _ = graphed(made("llama"))
    buckets: BucketPool = engine.module._infuse.buckets
    for batch in (1, 2, 3):
        same("llama", engine, **padded(batch=batch, padding=None))
    sizes = [bucket.nbytes() for bucket in buckets.idle]
    assert len(sizes) == 3
    buckets.limit_bytes = sizes[1] + sizes[2] + 100
    same("llama", engine, **padded(batch=3, padding=None))
    assert [bucket.batch for bucket in buckets.idle] == [2, 3]
    buckets.clear()
    same("llama", engine, **padded(batch=2))


@pytest.mark.parametrize("limit", [40, 64])
def test_a_cap_on_tokens(limit: int) -> None:
    engine, backend = graphed(made("llama"), limit_tokens=limit)
    for tokens in (9, 25, 4):
        same("llama", engine, **padded(tokens=tokens), max_new_tokens=limit - tokens)
    with pytest.raises(infuse.ground.errors.ContextLimitError):
        engine.generate(**padded(), max_new_tokens=limit)
    assert len(backend.captures) == 1 and {bucket.capacity_tokens for bucket in engine.module._infuse.buckets.idle} == {
        limit
    }


# ---- what needs the host


@pytest.mark.parametrize("mode", ON_HOST)
def test_the_host_chooses_over_a_graph_of_the_step(mode: str) -> None:
    engine, backend = graphed(made("llama"))
    for padding in ("left", None):
        same("llama", engine, **padded(padding=padding), **ON_HOST[mode]())
    assert len(backend.captures) == 1


OTHERS: list[dict[str, Any]] = [
    dict(use_cache=False),
    dict(use_cache=False, num_beams=2),
    dict(cache_implementation="static"),
]


@pytest.mark.parametrize("mode", OTHERS, ids=str)
def test_other_modes_run_without(mode: dict[str, Any]) -> None:
    engine, backend = graphed(made("llama"))
    kwargs = dict(padded(batch=1, padding=None), **mode)
    exact, found = seeded(original("llama"), **kwargs), seeded(engine, **kwargs)
    assert torch.equal(getattr(found, "sequences", found), getattr(exact, "sequences", exact))
    assert not backend.captures


# ---- what cannot be captured


@pytest.mark.parametrize("mode", [dict(), dict(no_repeat_ngram_size=2), dict(repetition_penalty=1.3)], ids=str)
@pytest.mark.parametrize("padding", ["left", None])
def test_a_model_that_reads_the_device_goes_on_without(mode: dict[str, Any], padding: str | None) -> None:
    """Dynamic RoPE looks at the positions on the host."""
    engine, backend = graphed(made("llama-dynamic"))
    kwargs = dict(padded("llama-dynamic", batch=1, padding=padding), max_new_tokens=25, **mode)
    ours, theirs = Collected(), Collected()
    exact = seeded(original("llama-dynamic"), **kwargs, streamer=theirs)
    with pytest.warns(UserWarning, match="no CUDA graph of the decode step.*not permitted when stream is capturing"):
        found = seeded(engine, **kwargs, streamer=ours)
    assert torch.equal(found, exact) and ours.columns == theirs.columns and ours.ended == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warmed = backend.warmed
        assert torch.equal(seeded(engine, **kwargs), exact) and backend.warmed == warmed, "it is not tried again"
    assert not backend.captures


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("at", [0, 1])
def test_a_capture_that_fails(at: int, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, or that in a grown bucket: the tokens so far stay, and rows that had ended stay ended."""
    monkeypatch.setattr("infuse.generate.install.PREPARED_TOKENS", 20)
    engine, backend = graphed(made("llama"))
    rows = rows_of("llama", **padded(), max_new_tokens=80)
    capture = backend.capture

    def failing(run: Callable[[], Any]) -> Any:
        if len(backend.captures) >= at:
            raise RuntimeError("a capture that fails")
        return capture(run)

    monkeypatch.setattr(backend, "capture", failing)
    with pytest.warns(UserWarning, match="no CUDA graph of the decode step.*a capture that fails"):
        same("llama", engine, **padded(), max_new_tokens=80, eos_token_id=[rows[0][7]], pad_token_id=0, num_beams=beams)
    assert len(backend.captures) == at


def test_an_error_of_the_model_comes_through() -> None:
    engine, _ = graphed(made("llama"))
    same("llama", engine, **padded())
    layer = engine.module.model.layers[1]
    layer.register_forward_pre_hook(lambda module, args: (_ for _ in ()).throw(ValueError("the model's own error")))
    with pytest.raises(ValueError, match="the model's own error"):
        engine.generate(**padded(batch=2), max_new_tokens=9)
    layer._forward_pre_hooks.clear()
    same("llama", engine, **padded(batch=2))


# ---- models


def test_weights_that_move() -> None:
    engine, backend = graphed(made("llama"))
    same("llama", engine, **padded())
    with torch.no_grad():
        for model in (engine.module,):
            for p in model.parameters():
                p.data = p.data.clone()
    same("llama", engine, **padded())
    assert len(backend.captures) == 2, "the old graph reads where the weights were"


def test_two_engines_and_copies() -> None:
    first, _ = graphed(made("llama"))
    second, _ = graphed(made("gpt2"))
    third = copy.deepcopy(first)
    for _ in range(2):
        for name, engine in (("llama", first), ("gpt2", second), ("llama", third)):
            same(name, engine, **padded(name))
    first.destroy()
    same("llama", third, **padded())
    same("gpt2", second, **padded("gpt2"))


def test_buckets_are_freed_at_once() -> None:
    """Not when Python's garbage collector comes by: a call that found no memory needs theirs."""
    engine, backend = graphed(made("llama"))
    same("llama", engine, **padded())
    kept = [weakref.ref(bucket) for bucket in engine.module._infuse.buckets.idle]
    assert kept and backend.captures
    gc.collect()
    gc.disable()
    try:
        engine.module._infuse.buckets.clear()
        assert all(bucket() is None for bucket in kept)
    finally:
        gc.enable()


def test_watched_models_run_without() -> None:
    """Who has a hook on the model is to see every forward, times and profiles among them."""
    engine, backend = graphed(made("llama"))
    engine.profile_model_time()
    same("llama", engine, **padded(), max_new_tokens=6)
    assert len(engine.model_times()) == 6 and not backend.captures
    engine.destroy()
    engine, backend = graphed(made("llama"))
    with engine.profile() as profile:
        same("llama", engine, **padded(), max_new_tokens=6)
    assert profile.as_dict()["forwards"] == 6 and not backend.captures
    same("llama", engine, **padded(), max_new_tokens=6)
    assert backend.captures


def test_hooks_inside_are_heard_in_every_step() -> None:
    """Also where they change what a layer returns: they are in no graph that is replayed after they are gone."""
    exact, (engine, backend) = made("llama"), graphed(made("llama"), forward=True)
    given = padded()
    for _ in range(2):
        handles = [
            model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 1.5)
            for model in (exact, engine.module)
        ]
        changed = [model.generate(**given, max_new_tokens=6) for model in (exact, engine)]
        logits = [model(**given, use_cache=False).logits for model in (exact, engine.module) for _ in range(4)]
        assert torch.equal(*changed) and all(torch.allclose(each, logits[0], atol=1e-4) for each in logits)
        assert not backend.captures
        for handle in handles:
            handle.remove()
    same("llama", engine, **given, max_new_tokens=6)
    assert len(backend.captures) == 1


def test_threads() -> None:
    engine, _ = graphed(made("llama"))
    given = [padded(batch=1 + i % 2, tokens=5 + i, padding=None, seed=i) for i in range(4)]
    exact = [original("llama").generate(**kwargs, max_new_tokens=30) for kwargs in given]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(3):
            if not torch.equal(engine.generate(**given[i], max_new_tokens=30), exact[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_call_inside_a_call() -> None:
    """A streamer that asks the same engine: its batch is another one."""
    engine, _ = graphed(made("llama"))
    same("llama", engine, **padded())

    class Asks(Collected):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.columns) in (3, 12):
                same("llama", engine, **padded(seed=17))

    asks = Asks()
    given = padded(batch=3, padding=None)
    torch.manual_seed(5)
    assert torch.equal(
        engine.generate(**given, max_new_tokens=20, streamer=asks),
        original("llama").generate(**given, max_new_tokens=20),
    )
    assert len(asks.columns) == 21


# ---- the cache with a place


def test_the_number_of_keys_as_a_tensor() -> None:
    """What bodies for GPUs are told, here by bodies that read it on the host: a replay is another run."""
    for name in ("llama", "bloom", "gpt-neo", "mistral"):
        engine, backend = graphed(made(name), backend=RunAgainBackend())
        for module in engine.module.modules():
            if hasattr(module, "_counts_keys"):
                module._counts_keys = module._appends_at_place = True
        same(name, engine, **padded(name), max_new_tokens=30)
        assert backend.replays == 29 - 2


def test_a_place_takes_one_token_at_a_time() -> None:
    cache = KVCache(16)
    cache.update(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4), 0)
    assert cache.even(2) and not cache.even(1) and not KVCache().even(1)
    place, count = torch.tensor(3), torch.tensor(4)
    cache.hold_place(place, count)
    assert cache.is_compileable and cache.get_seq_length().counted is place and cache.get_mask_sizes(1, 0) == (64, 0)
    keys, _ = cache.update(torch.full((2, 1, 1, 4), 5.0), torch.ones(2, 1, 1, 4), 0)
    assert keys.shape[2] == 64 and torch.equal(keys[:, :, 3], torch.full((2, 1, 4), 5.0))
    assert cache.layers[0].allowed(2)[0, 0, 0].nonzero().flatten().tolist() == [2, 3]
    with pytest.raises(infuse.InfuseError, match="one token at a time"):
        cache.update(torch.ones(2, 1, 2, 4), torch.ones(2, 1, 2, 4), 0)
    cache.hold_place(None)
    assert cache.get_seq_length() == 3 and not cache.is_compileable
    cache.crop_rows(torch.tensor([2, 3]))
    with pytest.raises(infuse.InfuseError, match="no common place"):
        cache.hold_place(place, count)
