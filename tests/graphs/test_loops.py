"""Loops that are not ours over graphs of decode steps: transformers' beams, callers' own; tokens and counts are the
original's.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as t
from transformers import DynamicCache

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.cache.slot import KVSlot
from infuse.graphs.bucket import Bucket
from infuse.graphs.graphed_cache import GraphedCache
from infuse.ground.authors import LibraryCalls
from tests.support.decoding import PROMPT, made, original, padded, rows_of, same, seeded
from tests.support.fake_graph import FakeBackend
from tests.support.graphed import graphed

EAGER = 2  # steps before the capture
BEAMS: dict[str, dict[str, Any]] = {
    "2 beams": dict(num_beams=2),
    "3 beams, 2 returned": dict(num_beams=3, num_return_sequences=2),
    "4 beams, short wanted": dict(num_beams=4, length_penalty=-1.0, num_return_sequences=4),
    "sampled": dict(num_beams=2, do_sample=True, top_k=20),
    "no repeated n-gram": dict(num_beams=3, no_repeat_ngram_size=2),
}


@pytest.mark.parametrize("mode", BEAMS)
def test_beams(mode: str) -> None:
    """One graph, captured at the third step of the first call; all steps but the first two are replays."""
    engine, backend = graphed(made("llama"))
    for call, padding in enumerate(("left", None, "left"), start=1):
        same("llama", engine, **padded(padding=padding), **BEAMS[mode])
        assert (len(backend.captures), backend.warmed, backend.replays) == (1, 1, 13 * call - EAGER)


@pytest.mark.parametrize(
    "name", ["gpt2", "bloom", "gemma2", "falcon-7b", "opt", "gpt-neo", "bert-decoder", "mistral", "bigcode"]
)
def test_beams_of_families(name: str) -> None:
    engine, backend = graphed(made(name))
    for _ in range(2):
        same(name, engine, **padded(name), num_beams=3)
    assert len(backend.captures) == 1 and backend.replays == 2 * 13 - EAGER


@pytest.mark.parametrize("early", [True, False, "never"])
def test_beams_that_end(early: Any) -> None:
    engine, backend = graphed(made("llama"))
    rows = rows_of("llama", **padded(), max_new_tokens=30)
    for ends in ([rows[0][2]], [rows[0][4], rows[1][9], rows[2][1]], [rows[1][20]]):
        for beams in (2, 4):
            same(
                "llama",
                engine,
                **padded(),
                max_new_tokens=30,
                num_beams=beams,
                early_stopping=early,
                eos_token_id=ends,
                pad_token_id=0,
            )
    assert len(backend.captures) == 2 and backend.replays


def test_beams_grow_into_another_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infuse.generate.install.PREPARED_TOKENS", 20)
    engine, backend = graphed(made("llama"))
    for call in (1, 2):
        same("llama", engine, **padded(), max_new_tokens=90, num_beams=2)
        assert backend.replays == 89 * call - 2 * EAGER
    assert [bucket.capacity_tokens for bucket in engine.module._infuse.buckets.idle] == [64, 128] and len(
        backend.captures
    ) == 2


def test_a_bucket_serves_our_loop_and_others() -> None:
    """By one graph for each number of rows: what one loop makes in inference mode the other writes to without it."""
    engine, backend = graphed(made("llama"))
    for _ in range(2):
        same("llama", engine, **padded())
        same("llama", engine, **padded(batch=1), num_beams=3)
        same("llama", engine, **padded(), no_repeat_ngram_size=2)
        same("llama", engine, **padded(), no_repeat_ngram_size=2, do_sample=True)
    assert len(engine.module._infuse.buckets.idle) == 1 and len(backend.captures) == 1


def test_a_cap_on_tokens() -> None:
    engine, backend = graphed(made("llama"), limit_tokens=40)
    same("llama", engine, **padded(), max_new_tokens=40 - PROMPT, num_beams=2)
    with pytest.raises(infuse.ground.errors.ContextLimitError):
        engine.generate(**padded(), max_new_tokens=40, num_beams=2)
    assert len(backend.captures) == 1


@pytest.mark.parametrize("beams", [1, 3])
def test_results_are_the_callers(beams: int) -> None:
    """Scores, logits and the cache of one call are not written over by the next, and the cache can be gone on from."""
    engine, backend = graphed(made("llama"))
    asked: dict[str, Any] = dict(
        num_beams=beams, return_dict_in_generate=True, output_scores=True, output_logits=True, max_new_tokens=8
    )
    exact = [seeded(original("llama"), **padded(seed=seed), **asked) for seed in (11, 12)]
    found = [seeded(engine, **padded(seed=seed), **asked) for seed in (11, 12)]
    seeded(engine, **padded(seed=13), **asked)
    assert len(backend.captures) == 1 and backend.replays == 3 * 7 - EAGER
    for ours, theirs in zip(found, exact, strict=True):
        assert type(ours) is type(theirs) and torch.equal(ours.sequences, theirs.sequences)
        for name in ("scores", "logits"):
            for a, b in zip(ours[name], theirs[name], strict=True):
                assert torch.allclose(a, b, atol=1e-4)
        assert ours.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length()
        for a, b in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
            assert torch.allclose(a.keys, b.keys, atol=1e-4) and torch.allclose(a.values, b.values, atol=1e-4)
    if beams == 1:
        mask = torch.cat((padded()["attention_mask"], torch.ones(3, 8, dtype=torch.long)), dim=1)
        longer = [
            seeded(
                model,
                input_ids=given.sequences,
                attention_mask=mask,
                past_key_values=given.past_key_values,
                max_new_tokens=6,
            )
            for model, given in ((engine, found[0]), (original("llama"), exact[0]))
        ]
        assert torch.equal(*longer)


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_more_than_logits(asked: str) -> None:
    """Hidden states are the token's; attentions would be of all room, so that no graph is made."""
    engine, backend = graphed(made("llama"))
    kwargs: dict[str, Any] = {
        **padded(),
        "num_beams": 2,
        "return_dict_in_generate": True,
        "max_new_tokens": 6,
        asked: True,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found, exact = seeded(engine, **kwargs), seeded(original("llama"), **kwargs)
    assert torch.equal(found.sequences, exact.sequences)
    assert len(backend.captures) == (asked == "output_hidden_states")
    if asked == "output_hidden_states":
        for ours, theirs in zip(found.hidden_states, exact.hidden_states, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert torch.allclose(a, b, atol=1e-4)
    else:
        assert {tuple(weights.shape[2:]) for weights in found.attentions[-1]} == {(1, PROMPT + 5)}


def test_other_steps_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt lookup asks for several tokens at once and drops some again; a prompt in pieces may end with a piece of
    one token.
    """
    steps: list[int] = []
    model = type(original("llama"))
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda self, **given: steps.append(given["input_ids"].shape[1]) or forward(self, **given)
    )
    monkeypatch.setattr(LibraryCalls, "__call__", lambda self, modules: True)  # though forward is patched to count
    engine, backend = graphed(made("llama"))
    for seed in (11, 12):
        given = padded(batch=1, padding=None, seed=seed)
        given["input_ids"][:, 5:] = given["input_ids"][:, :4]
        same("llama", engine, **given, prompt_lookup_num_tokens=3, max_new_tokens=40)
        same("llama", engine, **given, assistant_model=made("llama"), max_new_tokens=20)
    assert backend.replays and set(steps) - {1, PROMPT}
    same("llama", engine, **padded(), prefill_chunk_size=4, max_new_tokens=20, num_beams=2)


def test_a_model_that_reads_the_device_goes_on_without() -> None:
    engine, backend = graphed(made("llama-dynamic"))
    kwargs = dict(padded("llama-dynamic"), max_new_tokens=25, num_beams=2)
    with pytest.warns(UserWarning, match="no CUDA graph of the decode step.*not permitted when stream is capturing"):
        same("llama-dynamic", engine, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        same("llama-dynamic", engine, **kwargs)
    assert not backend.captures and backend.warmed == 1, "it is not tried again"


class OwnInputs(t.LlamaForCausalLM):
    """Its steps are prepared by code of its own, which our loop asks each time."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().prepare_inputs_for_generation(*args, **kwargs)


def test_inputs_of_the_models_own_making() -> None:
    model = OwnInputs(made("llama").config).eval()
    model.load_state_dict(original("llama").state_dict())
    model.generation_config = original("llama").generation_config
    engine, backend = graphed(model)
    for call in (1, 2):
        same("llama", engine, **padded())
        assert backend.replays == 13 * call - EAGER


def test_other_kernels_are_another_graph() -> None:
    engine, backend = graphed(made("llama"))
    same("llama", engine, **padded())
    torch.set_autocast_enabled("cuda", True)
    try:
        same("llama", engine, **padded())
        same("llama", engine, **padded())
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert len(backend.captures) == 2


# ---- a caller's own loop


def graphed_cache(engine: Any, batch: int = 3, tokens: int = 40) -> GraphedCache:
    return GraphedCache(engine.module._infuse.buckets, batch, tokens)


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt2"])
@torch.no_grad()
def test_calls_of_every_kind(name: str) -> None:
    """Several tokens, one, crops, other rows, other arguments: logits and counts are those of the original with its own
    cache.
    """
    engine, backend = graphed(made(name))
    exact, ours, theirs = original(name), graphed_cache(engine), DynamicCache(config=original(name).config)
    generator = torch.Generator().manual_seed(7)
    mask, kept = padded(name)["attention_mask"], []
    sizes = [PROMPT, 1, 1, 1, 1, 3, 1, 1, "crop", 1, 1, "rows", 1, 1, "hidden", 1, 60, 1, 1, 1, 1]
    for step, size in enumerate(sizes):
        if size == "crop":
            ours.crop(-2), theirs.crop(-2)
            mask = mask[:, :-2]
        elif size == "rows":
            rows = torch.tensor([2, 0, 0])
            ours.reorder_cache(rows), theirs.reorder_cache(rows)
            mask = mask[rows]
        else:
            more: dict[str, Any] = dict(output_hidden_states=True) if size == "hidden" else {}
            count = 1 if size == "hidden" else size
            if step:
                mask = torch.cat((mask, mask.new_ones(3, count)), dim=1)
            ids = torch.randint(3, 90, (3, count), generator=generator)
            given: dict[str, Any] = dict(input_ids=ids, attention_mask=mask, return_dict=True)
            kept.append(
                (engine.module(**given, past_key_values=ours, **more), exact(**given, past_key_values=theirs, **more))
            )
            assert kept[-1][0].past_key_values is ours and type(kept[-1][0]) is type(kept[-1][1])
            assert len(kept[-1][0]) == len(kept[-1][1])
        assert ours.get_seq_length() == theirs.get_seq_length() == mask.shape[1]
    assert backend.replays > 6
    for found, expected in kept:
        seen = (
            mask.new_ones(3, found.logits.shape[1]).bool()
            if found.logits.shape[1] != PROMPT
            else padded(name)["attention_mask"].bool()
        )
        assert torch.allclose(found.logits[seen], expected.logits[seen], atol=1e-4)


@torch.no_grad()
@pytest.mark.filterwarnings("error::UserWarning")
def test_calls_that_are_no_steps() -> None:
    """Other rows than the cache has, a mask of another length, embeddings, four axes, tuples, gradients: they run as
    they are.
    """
    engine, backend = graphed(made("llama"))
    ids = torch.full((3, 1), 5)

    exact = original("llama")

    def ready() -> tuple[GraphedCache, DynamicCache]:
        ours, theirs = graphed_cache(engine), DynamicCache(config=exact.config)
        for model, cache in ((engine.module, ours), (exact, theirs)):
            model(input_ids=padded()["input_ids"], past_key_values=cache)
        return ours, theirs

    def calls(cases: list[dict[str, Any]]) -> tuple[int, int, int]:
        """One call after the other; how many were warm, captures and replays."""
        before = (backend.warmed, len(backend.captures), backend.replays)
        ours, theirs = ready()
        for place, case in enumerate(cases, start=1):
            found = engine.module(**{"return_dict": True, **case, "past_key_values": ours})
            expected = exact(**{"return_dict": True, **case, "past_key_values": theirs})
            assert torch.allclose(found[0], expected[0], atol=1e-4) and type(found) is type(expected)
            assert ours.get_seq_length() == theirs.get_seq_length() == PROMPT + place
        ours.end(keep=False)
        after = (backend.warmed, len(backend.captures), backend.replays)
        return tuple(b - a for a, b in zip(before, after, strict=True))  # type: ignore[return-value]

    step: dict[str, Any] = dict(input_ids=ids)
    longer = dict(step, attention_mask=torch.ones(3, PROMPT + 4, dtype=torch.long))
    four_axes = dict(step, attention_mask=torch.zeros(3, 1, 1, PROMPT + 1))
    embedded = dict(inputs_embeds=torch.randn(3, 1, exact.config.hidden_size))
    assert calls([longer, step, step, step, step]) == (1, 1, 2), "the first is no step, those after it are"
    assert calls([four_axes, step, step, step]) == (0, 0, 3)
    hiding = [torch.zeros(3, 1, 1, PROMPT + place) for place in range(1, 6)]
    for mask in hiding:
        mask[..., 1:3] = torch.finfo(mask.dtype).min
    assert calls([dict(step, attention_mask=mask) for mask in hiding]) == (0, 0, 0), "graphs take masks of two axes"
    assert calls([embedded] * 4) == (0, 0, 0)
    assert calls([dict(step, return_dict=False)] * 4) == (1, 0, 0), "a tuple is found out once"
    assert calls([dict(step, position_ids=torch.ones(3, 1, dtype=torch.long), use_cache=False)] * 4) == (1, 1, 2)
    with torch.enable_grad():
        assert calls([step] * 4) == (0, 0, 0)
    ours, _ = ready()
    with pytest.raises(infuse.InfuseError, match="holds a batch of 3, a batch of 2"):
        engine.module(input_ids=ids[:2], past_key_values=ours, return_dict=True)


@torch.no_grad()
def test_a_cache_after_its_run() -> None:
    engine, _ = graphed(made("llama"))
    cache, other = graphed_cache(engine), KVCache()
    for each in (cache, other):
        engine.module(input_ids=padded()["input_ids"], past_key_values=each)
    copies = [copy.deepcopy(cache), copy.copy(cache), pickle.loads(pickle.dumps(cache))]
    cache.end(keep=True)
    same("llama", engine, **padded(seed=20))
    ids = torch.full((3, 1), 5)
    exact = engine.module(input_ids=ids, past_key_values=other, return_dict=True).logits
    for each in (cache, *copies):
        assert torch.allclose(
            engine.module(input_ids=ids, past_key_values=each, return_dict=True).logits, exact, atol=1e-5
        )
        assert each.get_seq_length() == PROMPT + 1
    dropped = graphed_cache(engine)
    dropped.end(keep=False)
    assert dropped.get_seq_length() == 0


def test_beams_are_reordered_where_they_lie() -> None:
    """While there may be graphs of it; into new storages, in one pass, once there are none."""
    engine, _ = graphed(made("llama"))
    cache = graphed_cache(engine)
    keys, values = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 4)
    cache.update(keys, values, 0)
    before = [storage.data_ptr() for storage in cache.storages()]
    for storage in cache.storages():
        storage[:, :, 5:] = torch.arange(3.0).view(3, 1, 1, 1)
    rows = torch.tensor([1, 1, 0])
    cache.reorder_cache(rows)
    assert [storage.data_ptr() for storage in cache.storages()] == before
    assert torch.equal(cache.layers[0].keys, keys[rows]) and torch.equal(cache.layers[0].values, values[rows])
    assert cache.storages()[0][2, 0, 6, 0] == 2, "room that is empty stays where it is"
    cache.reorder_cache(torch.tensor([2, 1]))
    assert cache.layers[0].keys.shape[0] == 2 and torch.equal(cache.layers[0].keys, keys[rows][[2, 1]])
    cache.crop_rows(torch.tensor([2, 5]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.layers[0].row_lengths.tolist() == [5, 2]
    cache.end(keep=True)
    kept, before = cache.layers[0].keys, [storage.data_ptr() for storage in cache.storages()]
    cache.reorder_cache(torch.tensor([1, 0]))
    assert (
        torch.equal(cache.layers[0].keys, kept[[1, 0]])
        and [storage.data_ptr() for storage in cache.storages()] != before
    )


def test_a_bucket_is_handed_on_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream may be given it at once: what is copied from it comes before that."""
    engine, backend = graphed(made("llama"))
    cache, buckets, seen = graphed_cache(engine), engine.module._infuse.buckets, []
    engine.module(input_ids=padded()["input_ids"], past_key_values=cache)
    turn, inside = backend.turn, [False]

    @contextmanager
    def turned() -> Iterator[None]:
        with turn():
            inside[0] = True
            yield
            inside[0] = False

    for owner, name in ((KVSlot, "copied"), (type(buckets), "give_back")):
        original_of = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, run=original_of: (seen.append(inside[0]), run(*args))[1])
    monkeypatch.setattr(backend, "turn", turned)
    cache.end(keep=True)
    assert seen == [True] * (len(cache.layers) + 1)


@pytest.mark.parametrize("how", ["place", "storages"])
def test_room_that_is_empty_holds_no_rubbish(how: str) -> None:
    bucket = Bucket(FakeBackend(), 64)
    bucket.cache.update(torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 4), 0)
    bucket.bind(5)
    slot = bucket.cache.layers[0]
    if how == "storages":
        slot.key_storage, slot.value_storage = (torch.full_like(storage, torch.nan) for storage in slot.whole())
    else:
        for storage in slot.whole():
            storage[:, :, 3:] = torch.nan
    tokens = 6 if how == "storages" else 3
    bucket.bind(tokens)
    for storage in bucket.cache.storages():
        assert not storage[:, :, tokens:].any()
