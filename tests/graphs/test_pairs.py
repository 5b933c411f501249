"""Graphs of models with an encoder: of the encoder by shape, and of decode steps with the encoder's states held."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers as t

import infuse
from infuse.cache.encoded_slot import StatesCache
from infuse.cache.held_count import HeldCount, HeldCounts
from infuse.graphs.graphed_cache import GraphedCache
from tests.models.encoder_decoders import BY_NAME, ENCODER_DECODERS, RELATIVES, encoded, made
from tests.models.families import enlarge
from tests.models.whisper import FALLBACK, sounds, whisper
from tests.support.fake_graph import FakeBackend, forbidding
from tests.support.graphed import graphed, quiet  # noqa: F401  (a fixture)
from tests.support.relatives import less
from tests.support.same_results import assert_same

EAGER = 2  # calls before the capture
NEW = 12


def agree(models: tuple[Any, Any], **asked: Any) -> Any:
    """The answer of both models, which is the same."""
    said = []
    for model in models:
        torch.manual_seed(3)
        said.append(model.generate(**asked))
    assert_same(*reversed(said))
    return said[0]


def pair(name: str, **how: Any) -> tuple[tuple[Any, Any], FakeBackend]:
    engine, backend = graphed(made(BY_NAME[name]), **how)
    return (made(BY_NAME[name]), engine), backend


READING_MASKS = ("nllb-moe", "nllb-moe-dropping")


NAMES = [family.name for family in ENCODER_DECODERS if family.name not in READING_MASKS]


@pytest.mark.parametrize("name", less(RELATIVES, NAMES))
def test_families(name: str) -> None:
    """One graph of the encoder, one for greedy search and sampling, one for beams."""
    models, backend = pair(name, forward=True)
    for call in (1, 2, 3):
        for asked in ({}, dict(num_beams=4, length_penalty=0.7), dict(do_sample=True)):
            agree(models, **encoded(BY_NAME[name], padding="right", seed=call), **asked, max_new_tokens=NEW)
    assert len(backend.captures) == 3
    steps = 9 * (NEW - 1) - 2 * EAGER
    assert backend.replays == steps + 9 - EAGER


@pytest.mark.parametrize("name", READING_MASKS)
def test_routers_that_read_the_mask(name: str) -> None:
    """A bucket's mask covers its room, and routers take what it hides for padding: only the encoder is captured."""
    models, backend = pair(name, forward=True)
    for call in (1, 2, 3):
        for asked in ({}, dict(num_beams=4, length_penalty=0.7)):
            agree(models, **encoded(BY_NAME[name], padding="right", seed=call), **asked, max_new_tokens=NEW)
    assert len(backend.captures) == 1


def test_texts_of_other_lengths_share_a_graph() -> None:
    """Padded to 64 states, which the mask hides, whatever the answers before have left there."""
    models, backend = pair("t5")
    generator = torch.Generator().manual_seed(2)
    for length in (40, 7, 1, 64, 23):
        ids = torch.randint(3, 96, (2, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, : length // 2] = 0
        agree(models, input_ids=ids, attention_mask=mask, max_new_tokens=NEW)
    assert len(backend.captures) == 1
    agree(models, input_ids=torch.randint(3, 96, (2, 65), generator=generator), max_new_tokens=NEW)
    assert len(backend.captures) == 2


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_text_of_padding_alone_sees_no_more_of_it(name: str) -> None:
    """Masks that are added to scores let such a text see all states alike."""
    engine, backend = graphed(made(BY_NAME[name]))
    plain = infuse.init_inference(made(BY_NAME[name]), dtype="fp32", progress=False)
    for model in (plain, engine):
        model.module.set_attn_implementation("eager")
    ids, mask = torch.randint(3, 96, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1] = 0
    for _ in range(2):
        agree(
            (plain, engine), input_ids=ids, attention_mask=mask, max_new_tokens=NEW, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    assert len(backend.captures) == 1


def test_a_replay_returns_what_a_step_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states are the caller's own, not those that the graph holds."""
    models, _ = pair("bart")
    returned: list[tuple[Any, Any]] = []
    replay = GraphedCache.replay

    def noted(self: GraphedCache, forward: Any, args: Any, kwargs: Any) -> Any:
        output = replay(self, forward, args, kwargs)
        returned.append((kwargs, output))
        return output

    monkeypatch.setattr(GraphedCache, "replay", noted)
    agree(models, **encoded(BY_NAME["bart"], padding="right"), max_new_tokens=NEW)
    kwargs, output = returned[-1]
    with torch.inference_mode():
        exact = models[0](**{**kwargs, "cache" if "cache" in kwargs else "past_key_values": None})
    assert type(output) is type(exact) and [*output] == [*exact]
    assert output.encoder_last_hidden_state is kwargs["encoder_outputs"].last_hidden_state


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_answers_that_outgrow_their_room(name: str, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infuse.generate.pairs.loop.PREPARED_TOKENS", 20)
    (original, engine), backend = pair(name)
    for _ in range(2):
        agree((original, engine), **encoded(BY_NAME[name], padding="left"), max_new_tokens=90, num_beams=beams)
    assert [bucket.capacity_tokens for bucket in engine.module._infuse.buckets.idle] == [64, 128]
    assert len(backend.captures) == 2 and backend.replays == 2 * 89 - 2 * EAGER


@pytest.mark.parametrize("beams", [1, 2])
def test_results_are_the_callers(beams: int) -> None:
    """Scores, states and the cache are not written over by the next answer, and one goes on from the cache."""
    models, backend = pair("bart")
    asked = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, num_beams=beams)
    given = encoded(BY_NAME["bart"], padding="right")
    exact, found = (model.generate(**given, **asked, max_new_tokens=NEW) for model in models)
    agree(models, **encoded(BY_NAME["bart"], padding="right", seed=5), **asked, max_new_tokens=NEW)
    assert_same(found, exact)
    for cache in (found.past_key_values, copy.deepcopy(found.past_key_values)):
        assert type(cache.self_attention_cache) in (GraphedCache, infuse.cache.kv_cache.KVCache)
        assert type(cache.cross_attention_cache) is StatesCache
    assert backend.captures
    if beams == 1:
        longer = [
            model.generate(
                **given, decoder_input_ids=before.sequences, past_key_values=before.past_key_values, max_new_tokens=4
            )
            for model, before in zip(models, (exact, found), strict=True)
        ]
        assert torch.equal(*longer)


def test_hidden_states_are_of_the_token() -> None:
    models, backend = pair("t5")
    asked = dict(return_dict_in_generate=True, output_hidden_states=True, max_new_tokens=6)
    exact, found = (model.generate(**encoded(BY_NAME["t5"]), **asked) for model in models)
    assert_same(found.decoder_hidden_states, exact.decoder_hidden_states)
    models[1].module.set_attn_implementation("eager")
    models[0].set_attn_implementation("eager")
    count = len(backend.captures)
    asked = dict(return_dict_in_generate=True, output_attentions=True, max_new_tokens=6)
    exact, found = (model.generate(**encoded(BY_NAME["t5"]), **asked) for model in models)
    assert_same(found.cross_attentions, exact.cross_attentions)
    assert_same(found.decoder_attentions, exact.decoder_attentions)
    assert len(backend.captures) == count


@pytest.mark.parametrize("beams", [1, 4])
def test_states_in_int8(beams: int) -> None:
    """A step over the held states is the step without a graph."""
    engine, backend = graphed(made(BY_NAME["bart"]), kv_cache="int8")
    plain = infuse.init_inference(made(BY_NAME["bart"]), dtype="fp32", kv_cache="int8")
    for seed in (1, 2):
        agree((plain, engine), **encoded(BY_NAME["bart"], padding="right", seed=seed), num_beams=beams)
    assert len(backend.captures) == 1


@pytest.mark.parametrize(
    "asked", [{}, dict(num_beams=2), FALLBACK, dict(return_segments=True), dict(return_dict_in_generate=True)], ids=str
)
def test_sounds_longer_than_a_window(asked: dict[str, Any]) -> None:
    """Whisper's own generate, whose batch becomes smaller; windows share graphs."""
    original = whisper()
    engine, backend = graphed(copy.deepcopy(original), forward=True)
    for seed in (1, 2):
        given = sounds(470, 600, 150, seed=seed)
        agree((original, engine), **given, **asked, return_timestamps=True, max_new_tokens=20)
    assert len(backend.captures) >= 3 and backend.replays > 60


@pytest.mark.parametrize("asked", [dict(use_cache=False), dict(cache_implementation="static")], ids=str)
def test_what_is_not_captured(asked: dict[str, Any]) -> None:
    models, backend = pair("t5")
    for _ in range(2):
        agree(models, **encoded(BY_NAME["t5"]), **asked, max_new_tokens=NEW)
    assert not backend.captures


def test_hooks_of_the_users_run_in_each_step() -> None:
    (original, engine), backend = pair("t5", forward=True)
    heard: list[str] = []
    parts = {"encoder": engine.module.encoder.block[0], "decoder": engine.module.decoder.block[0]}
    hooks = [part.register_forward_hook(lambda *args, name=name: heard.append(name)) for name, part in parts.items()]
    for _ in range(3):
        agree((original, engine), **encoded(BY_NAME["t5"]), max_new_tokens=NEW)
    assert heard == 3 * ["encoder", *NEW * ["decoder"]] and not backend.captures
    for hook in hooks:
        hook.remove()
    for _ in range(3):
        agree((original, engine), **encoded(BY_NAME["t5"]), max_new_tokens=NEW)
    assert len(heard) == 3 * (1 + NEW) and len(backend.captures) == 2


def test_hooks_on_all_modules_run_in_each_step() -> None:
    (original, engine), backend = pair("t5", forward=True)
    agree((original, engine), **encoded(BY_NAME["t5"]), max_new_tokens=NEW)
    captures, replays, heard = len(backend.captures), backend.replays, []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *args: heard.append(type(module)) if isinstance(module, torch.nn.Embedding) else None
    )
    try:
        for _ in range(3):
            engine.generate(**encoded(BY_NAME["t5"]), max_new_tokens=NEW)
    finally:
        hook.remove()
    assert len(heard) >= 3 * (1 + NEW) and (len(backend.captures), backend.replays) == (captures, replays)


def test_a_mask_that_changes_in_place() -> None:
    """The original reads it at each step, so what is held of it is copied again."""
    models, backend = pair("t5")
    answers = []
    for model in 2 * models:
        mask = torch.ones(3, 11, dtype=torch.long)

        def hide(ids: torch.Tensor, scores: torch.Tensor, mask: torch.Tensor = mask) -> torch.Tensor:
            if ids.shape[1] == 7:
                mask[:, 3:] = 0
            return scores

        given = encoded(BY_NAME["t5"]) | dict(attention_mask=mask)
        asked = dict(return_dict_in_generate=True, output_scores=True, max_new_tokens=NEW)
        answers.append(model.generate(**given, **asked, logits_processor=[hide]).scores)
    assert_same(answers[1], answers[0])
    assert_same(answers[3], answers[2])
    assert len(backend.captures) == 1


@pytest.mark.parametrize("name", ["fsmt", "led"])
def test_attentions_that_see_all_room_of_a_cache(name: str) -> None:
    """Without a block, and in a model that transformers gives no static cache: it would attend to the free room."""
    small: dict[str, Any] = dict(
        d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    if name == "fsmt":
        config: Any = t.FSMTConfig(langs=["a", "b"], src_vocab_size=96, tgt_vocab_size=96, **small)
    else:
        config = t.LEDConfig(vocab_size=96, attention_window=4, **small)
    model: Any = t.AutoModelForSeq2SeqLM.from_config(config).eval()
    enlarge(model)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    engine, backend = graphed(copy.deepcopy(model))
    ids = torch.randint(3, 96, (2, 12))
    with pytest.warns(UserWarning, match="no CUDA graph of the decode step.*attentions of its own"):
        agree((model, engine), input_ids=ids, max_new_tokens=NEW)
    agree((model, engine), input_ids=ids, max_new_tokens=NEW)
    assert not backend.captures


def test_a_capture_that_fails() -> None:
    models, backend = pair("t5")
    backend.fail = RuntimeError("not on this device")
    with pytest.warns(UserWarning, match="no CUDA graph of the decode step"):
        agree(models, **encoded(BY_NAME["t5"]), max_new_tokens=NEW)
    agree(models, **encoded(BY_NAME["t5"]), max_new_tokens=NEW)
    assert not backend.captures


def test_memory_counts_what_is_held() -> None:
    models, _ = pair("bart")
    agree(models, **encoded(BY_NAME["bart"], padding="right"), max_new_tokens=NEW)
    (bucket,) = models[1].module._infuse.buckets.idle
    states = 2 * 2 * 3 * 64 * 48 * 4 + 3 * 64 * 48 * 4 + 3 * 64 * 8  # of two layers, the states, the mask
    assert bucket.nbytes() == bucket.cache.nbytes() + states + bucket.graphs.nbytes()


def test_an_engine_is_copied_and_pickled() -> None:
    models, backend = pair("bart")
    for copied in (copy.deepcopy(models[1].module), pickle.loads(pickle.dumps(made(BY_NAME["bart"])))):
        agree((models[0], copied), **encoded(BY_NAME["bart"]), max_new_tokens=NEW)


@pytest.mark.parametrize("name", ["xglm", "bert-decoder"])
def test_decoders_that_count_on_the_host(name: str) -> None:
    """As many rows of a table as there are tokens, after those in the cache."""
    small: dict[str, Any] = dict(vocab_size=96, pad_token_id=0)
    if name == "xglm":
        config: Any = t.XGLMConfig(d_model=48, num_layers=2, attention_heads=4, ffn_dim=64, **small)
    else:
        config = t.BertConfig(
            hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, is_decoder=True, **small
        )
    model = t.AutoModelForCausalLM.from_config(config).eval()
    engine, backend = graphed(copy.deepcopy(model))
    ids = torch.randint(3, 96, (2, 7))
    cached = [engine.module(input_ids=ids, use_cache=True), model(input_ids=ids, use_cache=True)]
    assert_same(cached[0].logits, cached[1].logits)
    agree((model, engine), input_ids=ids, max_new_tokens=NEW, eos_token_id=None)
    assert len(backend.captures) == 1


def test_a_number_of_tokens_on_the_device() -> None:
    place = torch.tensor(5)
    count = HeldCount.of(place, 1, 9)
    table = torch.arange(40).view(20, 2)
    with HeldCounts(), forbidding():
        assert count + 1 > 1 and not count > 9 and 2 + count <= 11 and count != 0 and count != 10 and bool(count)
        assert (count == 0) is False
        rows, columns = table[count : count + 2], table.t()[:, count + 1 : 3 + count]
        places = torch.arange(count, count + 3, dtype=torch.int32)
        moved = count + torch.arange(2)
        unknown = (lambda: bool(count > 5), lambda: bool(count == 9), lambda: int(count), lambda: bool(count + -1))
        short = (
            lambda: table[count : count + 12],
            lambda: table[count + -7 : count + -5],
        )  # of tables that may end there
        for asked in (*unknown, *short):
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                asked()
    assert torch.equal(rows, table[5:7]) and torch.equal(columns, table.t()[:, 6:8])
    assert places.dtype == torch.int32 and places.tolist() == [5, 6, 7] and moved.tolist() == [5, 6]
    more = count
    with HeldCounts(), forbidding():
        more += 2
        assert more > 2 and type(more) is HeldCount
    less = count
    less -= 1
    assert (int(more), int(less), int(count), int(place)) == (7, 4, 5, 5), "the token's place stays where it is"
    assert int(count.add(1, alpha=2)) == 7 and int(torch.clamp(input=count, max=3)) == 3
    assert type(moved) is torch.Tensor and type(count.clone()) is torch.Tensor and count.dtype == torch.int64
