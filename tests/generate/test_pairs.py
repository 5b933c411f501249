"""Decode steps over an encoder's states: all blocks in one call, in every loop, and only where that is known."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import LogitsProcessor

import infuse
from infuse.cache.encoded_slot import EncodedSlot, StatesCache
from infuse.cache.kv_cache import KVCache
from infuse.generate.pairs.cache import PairCache
from infuse.ground.cache_names import cache_in
from infuse.ground.errors import ContextLimitError, InfuseError
from infuse.layers.block import Block
from infuse.layers.native.stack import DecodeSession
from infuse.native import kernels
from tests.models.encoder_decoders import BY_NAME, RELATIVES, encoded, made
from tests.support.relatives import less

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
NEW = 9
# Of these, the prompt's step and the first decode step are the model's; that one is made again to compare.
DIRECT = NEW - 1
IN_ALL = ["marian", "pegasus", "t5", "t5-gated", "mt5", "umt5", "bart", "mbart", "blenderbot", "whisper", "m2m-100",
          "speech-to-text", "plbart", "blenderbot-small", "bigbird-pegasus", "seamless", "trocr",
          "vit-gpt2", "moonshine"]  # fmt: skip
TO_TOKENS = ["marian", "t5", "umt5"]  # nothing but our own parts from ids to logits
WORDS = 8000  # so many that our kernel multiplies by the head
Counted = dict[str, int]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """How many steps were made in one call, one by one and several at once."""
    found = {"one": 0, "many": 0}
    step, tokens = DecodeSession.step, DecodeSession.tokens

    def noted(self: DecodeSession, *args: Any) -> Tensor | None:
        out = step(self, *args)
        found["one"] += out is not None
        return out

    def all_noted(self: DecodeSession, *args: Any) -> Tensor | None:
        out = tokens(self, *args)
        found["many"] += 0 if out is None else out.shape[1]
        return out

    monkeypatch.setattr(DecodeSession, "step", noted)
    monkeypatch.setattr(DecodeSession, "tokens", all_noted)
    return found


def pair(name: str, **changes: Any) -> tuple[Any, Any]:
    original = made(BY_NAME[name], **changes)
    for buffer in original.buffers():
        if buffer.dim() == 2 and buffer.shape[0] == 1:  # BART's and Marian's shift of the logits
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(5)))
    return original, infuse.init_inference(copy.deepcopy(original), dtype="fp32", progress=False)


def counted(steps: Counted) -> int:
    total = steps["one"] + steps["many"]
    steps.update(one=0, many=0)
    return total


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", less(RELATIVES - set(TO_TOKENS), IN_ALL))
def test_greedy_steps_are_made_in_one_call(name: str, padding: str | None, steps: Counted) -> None:
    original, engine = pair(name)
    given = encoded(BY_NAME[name], padding=padding)
    wanted = original.generate(**given, max_new_tokens=NEW)
    assert torch.equal(engine.generate(**given, max_new_tokens=NEW), wanted)
    assert counted(steps) == DIRECT
    assert torch.equal(engine.generate(**given, max_new_tokens=NEW), wanted)
    assert counted(steps) == DIRECT - 1, "the second answer's first step is traced, but not made again"


@pytest.mark.parametrize("name", ["marian", "t5", "bart", "whisper", "m2m-100"])
def test_beams_and_samples_and_their_scores(name: str, steps: Counted) -> None:
    original, engine = pair(name)
    given = encoded(BY_NAME[name], batch=2, padding="left")
    ways: list[dict[str, Any]] = [
        dict(num_beams=4, length_penalty=2.0, num_return_sequences=2),
        dict(num_beams=3, do_sample=True),
        dict(do_sample=True, top_k=5),
        dict(return_dict_in_generate=True, output_scores=True, output_logits=True),
        dict(num_beams=2, return_dict_in_generate=True, output_scores=True),
    ]
    for asked in ways:
        answers = []
        for model in (original, engine):
            torch.manual_seed(11)
            answers.append(model.generate(**given, max_new_tokens=NEW, **asked))
        assert counted(steps) >= DIRECT - 1, asked
        if not isinstance(answers[0], Tensor):
            for key in ("scores", "logits", "sequences_scores"):
                wanted, found = (getattr(answer, key, None) for answer in answers)
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=5e-4)
            answers = [answer.sequences for answer in answers]
        assert torch.equal(*answers), asked


@pytest.mark.parametrize("name", ["marian", "t5", "whisper"])
@pytest.mark.parametrize("quant", [None, "int8"])
def test_in_sixteen_bits_and_in_a_format(name: str, quant: str | None, steps: Counted) -> None:
    """The steps give the bits of the model's own forward over our blocks."""
    given = {key: value.bfloat16() if value.is_floating_point() else value
             for key, value in encoded(BY_NAME[name]).items()}  # fmt: skip
    engine = infuse.init_inference(made(BY_NAME[name], vocab_size=WORDS), dtype="bf16", quant=quant, progress=False)
    for how in ({"num_beams": 3}, {}):
        found = engine.generate(**given, max_new_tokens=NEW, **how)
        assert (steps["many"] > 0) == (not how and name in TO_TOKENS) and counted(steps) >= DIRECT - 1
        with listened(engine.module):
            wanted = engine.generate(**given, max_new_tokens=NEW, **how)
        assert counted(steps) == 0 and torch.equal(found, wanted)


class listened:
    """While a hook hears the decoder's first block, all steps are the model's."""

    def __init__(self, model: nn.Module):
        self.block = next(part for part in model.modules() if isinstance(part, Block) and len(part.shape.mixers) > 1)
        self.heard = 0

    def __enter__(self) -> listened:
        self.handle = self.block.register_forward_hook(self.hear)
        return self

    def hear(self, *args: Any) -> None:
        self.heard += 1

    def __exit__(self, *args: Any) -> None:
        self.handle.remove()


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}])
def test_whoever_listens_hears_each_step(how: dict[str, Any], steps: Counted) -> None:
    _, engine = pair("t5")
    engine.generate(**encoded(BY_NAME["t5"]), max_new_tokens=NEW, **how)
    with listened(engine.module) as block:
        engine.generate(**encoded(BY_NAME["t5"]), max_new_tokens=NEW, **how)
    assert block.heard == NEW


def test_a_module_that_is_exchanged_is_called(steps: Counted) -> None:
    original, engine = pair("marian")
    given = encoded(BY_NAME["marian"])
    engine.generate(**given, max_new_tokens=NEW)

    class Louder(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).flip(-1)

    for model in (original, engine.module):
        head = Louder(48, 96, bias=False)
        head.weight = nn.Parameter(original.lm_head.weight.detach().clone())
        model.lm_head = head
    counted(steps)
    found = engine.generate(**given, max_new_tokens=NEW)
    assert counted(steps) == 0 and torch.equal(found, original.generate(**given, max_new_tokens=NEW))


def test_attentions_and_hidden_states_are_the_models(steps: Counted) -> None:
    original, engine = pair("bart")
    for model in (original, engine.module):
        model.set_attn_implementation("eager")
    asked = dict(max_new_tokens=5, return_dict_in_generate=True, output_attentions=True, output_hidden_states=True)
    wanted, found = (model.generate(**encoded(BY_NAME["bart"]), **asked) for model in (original, engine))
    assert len(found.cross_attentions) == len(wanted.cross_attentions) == 5
    for kind in ("cross_attentions", "decoder_attentions", "decoder_hidden_states"):
        for ours, theirs in zip(getattr(found, kind), getattr(wanted, kind), strict=True):
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}])
def test_a_decoders_prompt_and_its_mask(how: dict[str, Any], steps: Counted) -> None:
    """A mask that hides tokens of the prompt is the model's affair."""
    for name in ("bart", "t5", "whisper"):
        original, engine = pair(name)
        given = encoded(BY_NAME[name], batch=2) | {"decoder_input_ids": torch.tensor([[0, 5, 7], [4, 5, 6]])}
        wanted = original.generate(**given, max_new_tokens=NEW, **how)
        assert torch.equal(engine.generate(**given, max_new_tokens=NEW, **how), wanted) and counted(steps)
        given["decoder_attention_mask"] = torch.tensor([[0, 1, 1], [1, 1, 1]])
        wanted = original.generate(**given, max_new_tokens=NEW, **how)
        assert torch.equal(engine.generate(**given, max_new_tokens=NEW, **how), wanted) and counted(steps) == 0


class Padding(LogitsProcessor):
    """Chooses the padding token at one length."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == 5:
            scores = scores.clone()
            scores[:, 1] = 1e4
        return scores


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}])
def test_padding_in_an_answer_has_another_place(how: dict[str, Any], steps: Counted) -> None:
    """M2M-100 counts places by the ids: steps from such a token on are the model's."""
    original, engine = pair("m2m-100", pad_token_id=1, bos_token_id=0)
    for model in (original, engine.module):
        model.generation_config.pad_token_id = 1
    given = encoded(BY_NAME["m2m-100"])
    wanted, found = (model.generate(**given, max_new_tokens=NEW, logits_processor=[Padding()], **how)
                     for model in (original, engine))  # fmt: skip
    assert torch.equal(found, wanted) and bool((wanted[:, 5] == 1).any()) and 0 < counted(steps) < DIRECT


def test_the_end_of_the_places(steps: Counted) -> None:
    """Beyond its table a decoder raises its own error; up to it, steps are made in one call."""
    for name in ("bart", "marian"):
        original, engine = pair(name, max_position_embeddings=16)
        given = encoded(BY_NAME[name])
        wanted = original.generate(**given, max_length=16)
        assert torch.equal(engine.generate(**given, max_length=16), wanted) and wanted.shape[1] == 16
        assert counted(steps) == 14
        for model in (original, engine):
            with pytest.raises(IndexError):
                model.generate(**given, max_length=24)
        counted(steps)


def test_a_long_answer_grows_the_cache(steps: Counted) -> None:
    for name in ("t5", "umt5", "whisper"):
        original, engine = pair(name, **({"max_target_positions": 256} if name == "whisper" else {}))
        given = encoded(BY_NAME[name], batch=2)
        found = engine.generate(**given, max_new_tokens=150, num_beams=2)
        assert counted(steps) == 149 and torch.equal(found, original.generate(**given, max_new_tokens=150, num_beams=2))


@pytest.mark.parametrize("format", [None, "int8"])
def test_beams_of_a_text_share_its_states(format: str | None, steps: Counted) -> None:
    engine = infuse.init_inference(made(BY_NAME["bart"]), dtype="fp32", kv_cache=format, progress=False)
    given = encoded(BY_NAME["bart"], batch=2, padding="right")
    answer = engine.generate(**given, max_new_tokens=NEW, num_beams=3, return_dict_in_generate=True)
    cache: Any = cache_in(answer)
    assert isinstance(cache, PairCache) and isinstance(cache.cross_attention_cache, StatesCache)
    for slot in cache.cross_attention_cache.layers:
        assert slot.repeats == 3 and {len(each) for each in slot.storages} == {2} and slot.keys.shape == (6, 4, 11, 12)
        assert {each.dtype for each in slot.storages} == {torch.int8 if format else torch.float32}
    assert counted(steps) >= DIRECT - 1
    if format is None:
        exact = made(BY_NAME["bart"]).generate(**given, max_new_tokens=NEW, num_beams=3)
        assert torch.equal(answer.sequences, exact)


def test_equal_texts_with_other_masks_do_not_share(steps: Counted) -> None:
    original, engine = pair("bart")
    states = torch.randn(1, 11, 48, generator=torch.Generator().manual_seed(2)).repeat(3, 1, 1)
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, 4:] = 0
    ids = torch.tensor([[5, 6, 7]] * 3)
    with torch.no_grad():
        answers = []
        for model in (original, engine.module):
            cache = PairCache(KVCache(), StatesCache()) if model is not original else None
            given = {"encoder_outputs": (states,), "attention_mask": mask, "use_cache": True}
            out = model(**given, decoder_input_ids=ids, **({} if cache is None else {"past_key_values": cache}))
            later = model(**given, decoder_input_ids=ids[:, :1], past_key_values=cache_in(out))
            answers.append(torch.cat((out.logits, later.logits), dim=1))
    torch.testing.assert_close(*answers, rtol=1e-4, atol=5e-4)
    assert not torch.allclose(answers[0][0], answers[0][1])


def test_a_slot_of_states_does_what_a_dynamic_layer_does() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 3, 5, 4, generator=generator) for _ in range(2))
    ours, theirs = StatesCache(), DynamicCache()
    ours.slot(0).fill(keys, values, 2)
    theirs.update(keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0), 0)
    held = ours.slot(0).storages

    def alike() -> None:
        for name in ("keys", "values"):
            assert torch.equal(getattr(ours.layers[0], name), getattr(theirs.layers[0], name))
        assert ours.get_seq_length(0) == theirs.get_seq_length(0) and ours.slot(0).rows == len(theirs.layers[0].keys)

    alike()
    for cache in (ours, theirs):
        cache.reorder_cache(torch.tensor([1, 1, 3, 2]))
    alike()
    assert all(a is b for a, b in zip(ours.slot(0).storages, held, strict=True)), "nothing moved"
    for act in (
        lambda c: c.batch_repeat_interleave(2),
        lambda c: c.reorder_cache(torch.tensor([4, 5, 5, 7, 0, 1, 2, 3])),
        lambda c: c.batch_select_indices(torch.tensor([0, 3, 6])),
        lambda c: c.crop(-2),
        lambda c: c.update(torch.ones(3, 3, 1, 4), torch.zeros(3, 3, 1, 4), 0),
    ):
        for cache in (ours, theirs):
            act(cache)
        alike()
    again = pickle.loads(pickle.dumps(ours))
    assert torch.equal(again.layers[0].keys, theirs.layers[0].keys)
    ours.reset()
    assert ours.get_seq_length(0) == 0 and ours.slot(0).keys is None


@pytest.mark.parametrize(
    ("rows", "repeats"), [("aaaa", 4), ("aabb", 2), ("abab", 1), ("aab", 1), ("a", 1), ("abba", 1), ("aabbbb", 1)]
)
def test_how_many_rows_read_the_same_states(rows: str, repeats: int) -> None:
    states = torch.stack([torch.full((2, 3), float(ord(row))) for row in rows])
    assert StatesCache().repeats_of(states) == repeats


def test_rows_of_the_batch_must_fit_the_states() -> None:
    _, engine = pair("bart")
    cache = PairCache(KVCache(), StatesCache())
    states = torch.randn(2, 11, 48)
    with torch.no_grad():
        engine.module(encoder_outputs=(states,), decoder_input_ids=torch.ones(2, 1, dtype=torch.long),
                      past_key_values=cache, use_cache=True)  # fmt: skip
        with pytest.raises(InfuseError, match="2 rows, a batch of 4"):
            cache.self_attention_cache.reset()
            engine.module(encoder_outputs=(states.repeat(2, 1, 1),), past_key_values=cache, use_cache=True,
                          decoder_input_ids=torch.ones(4, 1, dtype=torch.long))  # fmt: skip


def test_a_slot_has_the_protocol_of_other_slots() -> None:
    slot = EncodedSlot("int8")
    slot.fill(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 3)
    copied = slot.copied()
    assert copied.storages[0] is not slot.storages[0] and torch.equal(copied.keys, slot.keys) and copied.rows == 3
    assert slot.rewind(1) == 1 and slot.get_mask_sizes(4) == (3, 0)


class Swapping(LogitsProcessor):
    """Gives two rows of a cache each other's tokens and states at one length."""

    def __init__(self, cache: Any):
        self.cache = cache

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == 5:
            self.cache.reorder_cache(torch.tensor([1, 0, 2]))
        return scores


def test_rows_of_states_may_move_in_the_middle_of_an_answer(steps: Counted) -> None:
    original, engine = pair("bart")
    answers = []
    for model, cache in (
        (original, EncoderDecoderCache(DynamicCache(), DynamicCache())),
        (engine, PairCache(KVCache(), StatesCache())),
    ):
        asked = {"logits_processor": [Swapping(cache)], "past_key_values": cache, "max_new_tokens": NEW}
        answers.append(model.generate(**encoded(BY_NAME["bart"]), **asked))
    assert torch.equal(*answers) and counted(steps) == DIRECT
    assert not torch.equal(answers[0], original.generate(**encoded(BY_NAME["bart"]), max_new_tokens=NEW))


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"return_dict_in_generate": True}])
def test_a_users_own_preparation_is_called_at_each_step(how: dict[str, Any], steps: Counted) -> None:
    """Set on the model, as PEFT does."""
    _, engine = pair("t5")
    prepare, called = engine.module.prepare_inputs_for_generation, []

    def own(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return prepare(*args, **kwargs)

    engine.module.prepare_inputs_for_generation = own
    engine.generate(**encoded(BY_NAME["t5"]), max_new_tokens=NEW, **how)
    assert len(called) == NEW and counted(steps) == 0


def test_rows_that_are_stored_in_another_order_move_too() -> None:
    """Keys that a caller assigned may be a view, of which our kernel knows nothing."""
    generator = torch.Generator().manual_seed(0)
    cache, theirs = PairCache(KVCache(), StatesCache()), EncoderDecoderCache(DynamicCache(), DynamicCache())
    keys, values = (torch.randn(2, 5, 3, 4, generator=generator).transpose(1, 2) for _ in range(2))
    for each in (cache, theirs):
        each.self_attention_cache.update(keys.contiguous(), values.contiguous(), 0)
        each.self_attention_cache.layers[0].keys = keys.clone(memory_format=torch.preserve_format)
        each.reorder_cache(torch.tensor([1, 0]))
    for name in ("keys", "values"):
        ours, wanted = (getattr(each.self_attention_cache.layers[0], name) for each in (cache, theirs))
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_the_cap_on_tokens_holds_in_a_decoder(name: str) -> None:
    engine = infuse.init_inference(made(BY_NAME[name]), dtype="fp32", max_out_tokens=40, progress=False)
    with pytest.raises(ContextLimitError):
        engine.generate(**encoded(BY_NAME[name]), max_new_tokens=50)
    assert engine.generate(**encoded(BY_NAME[name]), max_new_tokens=8).shape[1] >= 8
