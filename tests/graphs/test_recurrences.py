"""Graphs of models with recurrences: a step writes its states to where they were, once, for every loop and batch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers as t

from infuse.cache.recurrence_slot import StateSlot
from infuse.graphs.graphed_cache import GraphedCache
from tests.models.families import enlarge, inputs
from tests.support.fake_graph import FakeBackend
from tests.support.graphed import graphed, quiet  # noqa: F401  (a fixture)
from tests.support.same_results import assert_same
from tests.support.states import ALL_NAMES, ONE_OF_EACH, family_of

EAGER = 2  # calls before the capture
NEW = 14
FAMILIES = [name for name in ALL_NAMES if name != "zamba2"]  # whose attentions are its own
NEAR = ("lfm2_moe", "qwen3_next", "qwen3_5_moe", "lara_mini", "nemotron_h-latent", "lfm3")
by_kind = pytest.mark.parametrize("name", ONE_OF_EACH)


def pair(name: str, **how: Any) -> tuple[tuple[Any, Any], FakeBackend]:
    engine, backend = graphed(family_of(name).make(), **how)
    return (family_of(name).make(), engine), backend


def agree(models: tuple[Any, Any], name: str, seed: int = 1, *, batch: int = 3, padding: str | None = "left",
          tokens: int = 11, **asked: Any) -> Any:  # fmt: skip
    """The answer of both models, which is the same."""
    given, said = inputs(family_of(name), batch=batch, tokens=tokens, padding=padding, seed=seed), []
    for model in models:
        torch.manual_seed(3)
        said.append(model.generate(**given, **{"max_new_tokens": NEW, "pad_token_id": 0, **asked}))
    ours, theirs = (each if isinstance(each, torch.Tensor) else each.sequences for each in reversed(said))
    assert_same(ours, theirs)
    return said


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.variants] if name in NEAR else []) for name in FAMILIES]
)
def test_families(name: str) -> None:
    """One graph for greedy search and sampling of three rows, one for their beams; every later step is a replay."""
    models, backend = pair(name)
    asked = ({}, dict(num_beams=3), dict(do_sample=True))
    for seed, padding in ((1, "left"), (2, None)):
        for how in asked:
            agree(models, name, seed, padding=padding, **how)
    assert len(backend.captures) == 2 and backend.replays == 2 * len(asked) * (NEW - 1) - 2 * EAGER


@by_kind
def test_answers_in_turn(name: str) -> None:
    """Rows of another number have states of their own; an answer of one token leaves no step to capture."""
    models, backend = pair(name)
    for batch, tokens, new in ((2, 5, 12), (1, 9, 7), (2, 3, 12), (1, 6, 1), (1, 6, 12), (2, 11, 2)):
        agree(models, name, batch=batch, tokens=tokens, padding=None, max_new_tokens=new)
    assert len(backend.captures) == 2


@by_kind
def test_growth(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger bucket goes on from the states of the smaller one."""
    monkeypatch.setattr("infuse.generate.install.PREPARED_TOKENS", 20)
    models, backend = pair(name)
    for call in (1, 2):
        agree(models, name, max_new_tokens=90)
        assert backend.replays == 89 * call - 2 * EAGER
    assert [bucket.capacity_tokens for bucket in models[1].module._infuse.buckets.idle] == [64, 128]


@by_kind
def test_a_returned_cache_is_the_callers(name: str) -> None:
    """Later answers do not write to it, and it can be gone on from."""
    models, backend = pair(name)
    asked = dict(return_dict_in_generate=True, max_new_tokens=8)
    theirs, ours = agree(models, name, padding=None, **asked)
    states = [slot for slot in ours.past_key_values.slots if isinstance(slot, StateSlot)]
    before = [state.clone() for slot in states for state in slot.storages]
    agree(models, name, 2, **asked)
    after = [state for slot in states for state in slot.storages]
    assert before and all(map(torch.equal, before, after))
    again = copy.deepcopy(ours.past_key_values)
    assert isinstance(ours.past_key_values, GraphedCache) and len(again.slots) == len(ours.past_key_values.slots)
    if name == "lfm2":  # the caches of the others' originals count no tokens, or begin anew
        mask = torch.ones(3, theirs.sequences.shape[1], dtype=torch.long)
        more = [
            model.generate(input_ids=each.sequences, attention_mask=mask, past_key_values=cache, max_new_tokens=6)
            for model, each, cache in (
                (models[0], theirs, theirs.past_key_values),
                (models[1], ours, ours.past_key_values),
                (models[1], ours, again),
            )
        ]
        assert torch.equal(more[0], more[1]) and torch.equal(more[0], more[2])
    assert len(backend.captures) == 1


@by_kind
def test_candidates(name: str) -> None:
    """While states are kept to go back to, steps run without graphs; a later answer replays its own again."""
    models, backend = pair(name)
    agree(models, name, batch=1, padding=None)
    replayed = backend.replays
    plain = agree(models, name, 2, batch=1, padding=None)[0]
    given = inputs(family_of(name), batch=1, seed=2)
    found = models[1].generate(**given, max_new_tokens=NEW, pad_token_id=0, prompt_lookup_num_tokens=4)
    assert torch.equal(found, plain)
    agree(models, name, 3, batch=1, padding=None)
    assert len(backend.captures) == 1 and backend.replays == replayed + 2 * (NEW - 1)


@by_kind
def test_a_failed_capture_moves_no_state(name: str) -> None:
    models, backend = pair(name)
    backend.fail = RuntimeError("no room for a graph")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agree(models, name)
    assert any("no room for a graph" in str(warning.message) for warning in caught)
    assert not backend.captures


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
def test_a_chat_of_a_selective_scan_begins_anew(name: str) -> None:
    """From the cache of its last answer, too, which counts no tokens: as without graphs."""
    engine, _ = graphed(family_of(name).make())
    given = inputs(family_of(name), tokens=7, seed=1)
    told = engine.generate(**given, max_new_tokens=8, return_dict_in_generate=True, pad_token_id=0)
    ids = torch.cat((told.sequences, torch.full((2, 3), 5)), dim=1)
    asked: dict[str, Any] = dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0)
    assert torch.equal(engine.generate(**asked, past_key_values=told.past_key_values), engine.generate(**asked))


def test_what_is_made_of_another_input_is_no_graphs() -> None:
    """A decoder that attends to given states keeps their keys beside its own, in one cache: its steps run without."""
    config = t.BertConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, vocab_size=96,
        is_decoder=True, add_cross_attention=True, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    original: Any = t.BertLMHeadModel(config).eval()
    enlarge(original)
    engine, backend = graphed(copy.deepcopy(original))
    ids, states = torch.randint(3, 96, (2, 6)), torch.randn(2, 5, 48)
    asked: dict[str, Any] = dict(
        encoder_hidden_states=states, max_new_tokens=12, return_dict_in_generate=True, output_logits=True
    )
    for _ in range(2):
        exact, found = original.generate(ids, **asked, use_cache=False), engine.generate(ids, **asked)
        for ours, theirs in zip(found.logits, exact.logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert all(slot.place is None for slot in found.past_key_values.slots) and not backend.captures


def test_states_go_home() -> None:
    """A graph finds them where they were, whoever made them since; those of another size have another home."""
    slot = StateSlot()
    slot.end(3, {"conv": torch.ones(2, 4, 5), "state": torch.ones(2, 3)})
    slot.settle()
    home = [state.data_ptr() for state in slot.storages]
    slot.settle()
    slot.end(1, {"conv": torch.full((2, 4, 5), 2.0), "state": torch.full((2, 3), 3.0)})
    slot.settle()
    assert [state.data_ptr() for state in slot.storages] == home
    assert slot.states["conv"].eq(2).all() and slot.states["state"].eq(3).all() and slot.length == 4
    slot.reorder_in_place(torch.tensor([1, 1]))
    slot.settle()
    assert [state.data_ptr() for state in slot.storages] == home
    slot.reset()
    assert slot.rows == 0 and [state.data_ptr() for state in slot.storages] == home
    with torch.inference_mode():
        slot.end(3, {"conv": torch.zeros(2, 4, 5), "state": torch.zeros(2, 3)})
        slot.settle()
    assert [state.data_ptr() for state in slot.storages] == home and not slot.states["state"].is_inference()
    slot.reorder_cache(torch.tensor([0, 1, 1]))
    slot.settle()
    assert slot.rows == 3 and [state.data_ptr() for state in slot.storages] != home
    assert slot.can_hold_place
    slot.snapshot()
    assert not slot.can_hold_place


def test_inside_a_graph_states_are_written_where_they_are() -> None:
    slot = StateSlot()
    slot.end(3, {"state": torch.ones(2, 3)})
    slot.settle()
    before, place = slot.states["state"], torch.tensor(3)
    slot.hold_place(place, place + 1, room=64)
    assert slot.is_compileable and slot.get_mask_sizes(1) == (64, 0) and int(slot.get_seq_length()) == 3
    slot.end(1, {"state": torch.full((2, 3), 7.0)})
    assert slot.states["state"] is before and before.eq(7).all() and slot.length == 3
    slot.hold_place(None, None, 0)
    assert not slot.is_compileable and slot.get_mask_sizes(1) == (4, 0) and slot.get_seq_length() == 3


def test_a_state_space_alone_has_no_room_to_mask() -> None:
    """Its model takes no mask of tokens in a step, which would cover a room that there is not."""
    models, backend = pair("mamba")
    agree(models, "mamba", padding=None)
    (bucket,) = models[1].module._infuse.buckets.idle
    assert not bucket.cache.token_storages() and bucket.batch == 3 and bucket.nbytes() > 0
    assert isinstance(models[0], t.MambaForCausalLM) and len(backend.captures) == 1
