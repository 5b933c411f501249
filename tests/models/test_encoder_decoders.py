"""Models of an encoder and a decoder: whole blocks in both halves, results and answers equal to the original's."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.generate.pairs.cache import PairCache
from infuse.ground.cache_names import cache_argument
from infuse.ground.errors import InfuseError, UnsupportedCall
from infuse.layers.block import Block
from tests.models.encoder_decoders import BY_NAME, ENCODER_DECODERS, RELATIVES, TEXTS, both, encoded, made
from tests.models.every_architecture import inputs_of, tiny_model
from tests.models.families import Family, enlarge
from tests.models.models_page import model_types
from tests.support.ranks import Ranks
from tests.support.relatives import less

EXACT = 5e-5
NAME = cache_argument(t.BartForConditionalGeneration.forward)  # of the argument that carries a cache


@cache
def pair(name: str) -> tuple[nn.Module, Any]:
    """The original in float32, and its engine."""
    family = BY_NAME[name]
    return made(family), infuse.init_inference(made(family), dtype="fp32", progress=False)


def assert_near(found: Tensor, exact: Tensor, allowed: float = EXACT) -> None:
    assert found.shape == exact.shape and float((found - exact).abs().max()) <= allowed * float(exact.abs().max())


NAMES = [family.name for family in ENCODER_DECODERS]
by_family = pytest.mark.parametrize("name", NAMES)
by_kind = pytest.mark.parametrize("name", less(RELATIVES, NAMES))


@by_family
def test_all_layers_are_blocks(name: str) -> None:
    _, engine = pair(name)
    layers = [path for path, module in engine.module.named_modules() if isinstance(module, Block)]
    halves = [path for path in layers if "vision_tower" not in path]
    assert len(halves) == 4 and sum("decoder." in path for path in halves) == 2


@by_family
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_forward(name: str, padding: str | None) -> None:
    original, engine = pair(name)
    given = both(BY_NAME[name], padding=padding)
    with torch.no_grad():
        exact, found = (model(**given, output_attentions=False) for model in (original, engine))
        assert_near(found.logits, exact.logits)
        assert_near(found.encoder_last_hidden_state, exact.encoder_last_hidden_state)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": dict(num_beams=4, length_penalty=0.7),
    "several beams": dict(num_beams=3, num_return_sequences=2, eos_token_id=5),
    "sampling": dict(do_sample=True, top_k=20),
    "sampled beams": dict(do_sample=True, num_beams=2),
    "forced first token": dict(forced_bos_token_id=9),
    "bad words": dict(bad_words_ids=[[7], [8, 9]], no_repeat_ngram_size=2),
    "penalty": dict(repetition_penalty=1.4),
    "static": dict(cache_implementation="static"),
    "no cache": dict(use_cache=False),
    "a prompt": dict(decoder_input_ids=torch.tensor([[2, 9, 11]] * 3)),
}


@by_kind
@pytest.mark.parametrize("way", WAYS)
def test_answers(name: str, way: str) -> None:
    original, engine = pair(name)
    for padding in (None, "right"):
        given, answers = encoded(BY_NAME[name], padding=padding), []
        for model in (original, engine):
            torch.manual_seed(3)
            answers.append(model.generate(**given, **WAYS[way], max_new_tokens=12))
        assert torch.equal(*answers)


@pytest.mark.parametrize(
    "name",
    [
        "bart",
        "mbart",
        "whisper",
        "t5",
        "umt5",
        "trocr",
        "seamless",
        "moonshine",
        "t5gemma",
        "t5gemma2",
        "two-berts",
        "vit-gpt2",
        "bigbird-pegasus",
        "switch-dropping",
        "nllb-moe-dropping",
    ],
)
def test_scores_states_and_attentions_of_an_answer(name: str) -> None:
    original, engine = (copy.deepcopy(each) for each in pair(name))
    for model in (original, engine.module):
        model.set_attn_implementation("eager")
    asked = dict(return_dict_in_generate=True, output_scores=True, output_attentions=True, output_hidden_states=True)
    exact, found = (
        model.generate(**encoded(BY_NAME[name], padding="left"), **asked, max_new_tokens=5)
        for model in (original, engine)
    )
    assert torch.equal(found.sequences, exact.sequences)
    for kind in ("scores", "encoder_attentions", "encoder_hidden_states"):
        for ours, theirs in zip(found[kind], exact[kind], strict=True):
            assert_near(ours, theirs)
    for kind in ("decoder_attentions", "cross_attentions", "decoder_hidden_states"):
        assert len(found[kind]) == len(exact[kind]) == 5
        for of_ours, of_theirs in zip(found[kind], exact[kind], strict=True):
            for ours, theirs in zip(of_ours, of_theirs, strict=True):
                assert_near(ours, theirs)


@pytest.mark.parametrize("name", ["bart", "mbart", "whisper", "t5", "umt5", "switch-dropping", "nllb-moe-dropping"])
def test_an_attention_function_of_the_users(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called for states, too: with their mask, without causal order, and without the bias of earlier tokens."""
    original, engine = (copy.deepcopy(each) for each in pair(name))
    called: list[tuple[Any, ...]] = []

    def own(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Any:
        bias = more.get("position_bias")
        called.append((module.is_causal, q.shape, k.shape, None if bias is None else bias.shape))
        return sdpa_attention_forward(module, q, k, v, mask, **more)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "of_a_user", own)
    masks = ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setitem(masks._global_mapping, "of_a_user", masks["sdpa"])
    results = []
    for model in (original, engine.module):
        called.clear()
        model.set_attn_implementation("of_a_user")
        with torch.no_grad():
            results.append((model(**both(BY_NAME[name], padding="right")).logits, [*called]))
    (exact, theirs), (found, ours) = results
    assert_near(found, exact)
    assert ours == theirs and len(ours) == 6


def caches(model: Any) -> dict[str, Any]:
    static = [StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=n) for n in (16, 11)]
    return {"dynamic": EncoderDecoderCache(DynamicCache(), DynamicCache()), "static": EncoderDecoderCache(*static)}


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["bart", "mbart", "pegasus", "t5", "umt5", "switch-dropping", "nllb-moe-dropping"])
def test_a_users_cache(name: str, kind: str) -> None:
    """A prompt in parts, what the cache holds, reordered rows, and a cache that the original has filled."""
    original, engine = pair(name)
    given, ids = encoded(BY_NAME[name], padding="right"), torch.arange(5, 20).view(3, 5)
    ours, theirs = (caches(original)[kind] for _ in range(2))
    with torch.no_grad():
        states = original.get_encoder()(**given)
        rest = dict(encoder_outputs=states, attention_mask=given["attention_mask"], use_cache=True)
        for first, last in ((0, 3), (3, 4), (4, 5)):
            found = engine(decoder_input_ids=ids[:, first:last], **{NAME: ours}, **rest).logits
            exact = original(decoder_input_ids=ids[:, first:last], **{NAME: theirs}, **rest).logits
            assert_near(found, exact)
        assert ours.is_updated == theirs.is_updated
        for half in ("self_attention_cache", "cross_attention_cache"):
            for mine, yours in zip(getattr(ours, half).layers, getattr(theirs, half).layers, strict=True):
                assert_near(mine.keys, yours.keys)
                assert_near(mine.values, yours.values)
        if kind == "dynamic":
            order = torch.tensor([2, 0, 0])
            for each in (ours, theirs):
                each.reorder_cache(order)
            rest = dict(
                encoder_outputs=type(states)(last_hidden_state=states.last_hidden_state[order]),
                attention_mask=given["attention_mask"][order],
            )
            for mixed in (copy.deepcopy(theirs), ours):  # one that the original has filled, too
                found = engine(decoder_input_ids=ids[:, :1], **{NAME: mixed}, **rest).logits
                exact = original(decoder_input_ids=ids[:, :1], **{NAME: copy.deepcopy(theirs)}, **rest).logits
                assert_near(found, exact)


@torch.no_grad()
@pytest.mark.parametrize("name", less(RELATIVES, ["bart", "t5", "whisper", "moonshine", "trocr", "vit-gpt2"]))
@pytest.mark.parametrize(("rows", "batch"), [(1, 4), (2, 1), (4, 2)])
def test_states_of_another_number_of_rows(name: str, rows: int, batch: int) -> None:
    """Most originals broadcast one row; in some, as in Whisper's, the rows of tokens share all states out."""
    original, engine = pair(name)
    width = original.get_decoder().config.hidden_size
    states = torch.randn(rows, 12, width, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(3, 90, (batch, 5), generator=torch.Generator().manual_seed(2))
    original, engine = original.get_decoder(), engine.module.get_decoder()
    given = {"input_ids": ids, "encoder_hidden_states": states}
    try:
        exact = original(**given, use_cache=False)[0]
    except Exception:
        exact = None
    if exact is None or len(exact) != batch:  # GPT-2's layers return a row for each row of states
        with pytest.raises(UnsupportedCall, match="one row of states"):
            engine(**given, use_cache=False)
        return
    assert_near(engine(**given, use_cache=False)[0], exact)
    caches = [EncoderDecoderCache(DynamicCache(), DynamicCache()) for _ in (original, engine)]
    for _ in range(2):  # which fills the cache with the states' keys, and reads these
        results = [each(**given, **{NAME: held})[0] for each, held in zip((original, engine), caches, strict=True)]
        assert_near(results[1], results[0])


def test_states_of_another_batch() -> None:
    """As in the original, keys of one row in a cache are those of all rows; of more rows, they are none's."""
    original, engine = pair("bart")
    exact, found = [], []
    with torch.no_grad():
        for model, results in ((original, exact), (engine, found)):
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            model(**both(BY_NAME["bart"], batch=1), **{NAME: cache})
            other = EncoderDecoderCache(DynamicCache(), cache.cross_attention_cache)
            other.is_updated = dict.fromkeys(range(2), True)
            results.append(model(**both(BY_NAME["bart"], batch=2), **{NAME: other}).logits)
        assert_near(found[0], exact[0])
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        engine(**both(BY_NAME["bart"], batch=2), **{NAME: cache})
        other = EncoderDecoderCache(DynamicCache(), cache.cross_attention_cache)
        with pytest.raises(InfuseError, match="states of 2 rows, a batch of 3 was given"):
            engine(**both(BY_NAME["bart"], batch=3), **{NAME: other})


def test_a_cache_without_a_place_for_states() -> None:
    """The original appends the states' keys to those of the tokens, and says nothing."""
    _, engine = pair("bart")
    decoder, states = engine.module.get_decoder(), torch.randn(2, 4, 48)
    with pytest.raises(UnsupportedCall, match="given with a DynamicCache.*EncoderDecoderCache"):
        decoder(torch.ones(2, 3, dtype=torch.long), encoder_hidden_states=states, **{NAME: DynamicCache()})
    with pytest.raises(UnsupportedCall, match="one row of states"):
        decoder(input_ids=torch.ones(3, 3, dtype=torch.long), encoder_hidden_states=states, use_cache=False)


@pytest.mark.parametrize("name", ["bart", "mbart", "t5", "umt5", "switch-dropping", "nllb-moe-dropping"])
def test_a_decoder_without_states(name: str) -> None:
    """It leaves its third branch out, as a language model made of it does."""
    original, engine = pair(name)
    ids = torch.arange(3, 21).view(3, 6)
    with torch.no_grad():
        exact, found = (model.get_decoder()(input_ids=ids).last_hidden_state for model in (original, engine.module))
    assert_near(found, exact)


@pytest.mark.parametrize("family", TEXTS, ids=lambda family: family.name)
def test_decoders_alone_generate(family: Family) -> None:
    kinds = {"bart": "BartForCausalLM", "mbart": "MBartForCausalLM", "marian": "MarianForCausalLM",
             "pegasus": "PegasusForCausalLM", "blenderbot": "BlenderbotForCausalLM"}  # fmt: skip
    if family.name not in kinds:
        pytest.skip("transformers has no such model, or one like another's here")
    alone = Family(family.name, family.config, getattr(t, kinds[family.name]), "decoder", family.values)
    changes = dict(is_decoder=True, is_encoder_decoder=False)
    original, engine = made(alone, **changes), infuse.init_inference(made(alone, **changes), dtype="fp32")
    assert any(isinstance(module, Block) for module in engine.module.modules())
    ids = torch.randint(3, 90, (3, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    for way in ({}, dict(num_beams=3)):
        answers = (model.generate(ids, attention_mask=mask, max_new_tokens=10, **way) for model in (original, engine))
        assert torch.equal(*answers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@by_kind
def test_16_bits_err_as_the_original_does(name: str, dtype: torch.dtype) -> None:
    family = BY_NAME[name]
    exact, own = made(family), made(family).to(dtype)
    engine = infuse.init_inference(made(family), dtype=dtype, progress=False)
    errors = {"own": 0.0, "ours": 0.0}
    for seed in range(3):
        given = both(family, padding="right", seed=seed)
        cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in given.items()}
        with torch.no_grad():
            wanted = exact(**given).logits
            errors["own"] += float((own(**cast).logits.float() - wanted).norm() / wanted.norm())
            errors["ours"] += float((engine(**cast).logits.float() - wanted).norm() / wanted.norm())
    assert errors["ours"] <= 2 * errors["own"]


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["bart", "whisper", "m2m-100"])
def test_formats(name: str, format: str) -> None:
    """Near the original as the format is; matrices of the third branch are quantized, too."""
    wide = dict(d_model=128, encoder_ffn_dim=128, decoder_ffn_dim=128)
    original = made(BY_NAME[name], **wide)
    engine = infuse.init_inference(made(BY_NAME[name], **wide), dtype="fp32", quant=format, progress=False)
    fills = [fill for step in engine.plan.steps for fill in step.fills if fill.target.startswith("encoder_attn.")]
    kinds = {str(fill.format).split(":")[0] for fill in fills if fill.target.endswith("weight")}
    assert kinds == {format}
    given = both(BY_NAME[name], padding="right")
    with torch.no_grad():
        exact, found = original(**given).logits, engine(**given).logits
    assert float((found - exact).norm() / exact.norm()) < {"int8": 0.05, "fp8": 0.2, "int4": 0.6}[format]


def of_rank(name: str) -> tuple[Tensor, Tensor, Tensor, int]:
    """Logits, a greedy and a beam answer, and how many blocks there are, on one of several ranks."""
    family = BY_NAME[name]
    size = torch.distributed.get_world_size()
    engine = infuse.init_inference(made(family), dtype="fp32", progress=False, tensor_parallel={"tp_size": size})
    given = encoded(family, padding="right")
    with torch.no_grad():
        logits = engine(**both(family, padding="right")).logits
    answers = [engine.generate(**given, max_new_tokens=8, **way) for way in ({}, dict(num_beams=3))]
    named = engine.module.named_modules()
    return logits, *answers, sum(isinstance(module, Block) and "vision_tower" not in path for path, module in named)


RANKS = [("bart", 2), ("mbart", 3), ("whisper", 2), ("t5", 3), ("umt5", 2), ("t5gemma", 2), ("t5gemma", 3),
         ("t5gemma2", 2), ("moonshine", 2), ("trocr", 3), ("vit-gpt2", 2), ("seamless", 2), ("two-berts", 3),
         ("switch-dropping", 2), ("nllb-moe-dropping", 2)]  # fmt: skip


@pytest.mark.parametrize(("name", "size"), RANKS)
def test_ranks(name: str, size: int, ranks: Ranks) -> None:
    """Heads of both attentions are shared, keys and values of the states, too."""
    original, family = made(BY_NAME[name]), BY_NAME[name]
    given = encoded(family, padding="right")
    with torch.no_grad():
        exact = original(**both(family, padding="right")).logits
    answers = [original.generate(**given, max_new_tokens=8, **way) for way in ({}, dict(num_beams=3))]
    for logits, greedy, beams, blocks in ranks.run(size, of_rank, name):
        assert_near(logits, exact)
        assert blocks == 4 and torch.equal(greedy, answers[0]) and torch.equal(beams, answers[1])


@pytest.mark.parametrize(
    "name",
    [
        "bart",
        "whisper",
        "t5",
        "t5gemma",
        "t5gemma2",
        "moonshine",
        "vit-gpt2",
        "trocr",
        "two-berts",
        "switch-dropping",
        "nllb-moe-dropping",
    ],
)
def test_checkpoints_and_state_dicts(name: str, tmp_path: Path) -> None:
    """Weights come from files, and go back to files, under the original's names."""
    family = BY_NAME[name]
    original = made(family)
    original.save_pretrained(tmp_path / "plain")
    with torch.device("meta"):
        empty = family.model(family.config(**family.values)).eval()
    engine = infuse.init_inference(empty, checkpoint=str(tmp_path / "plain"), dtype="fp32", progress=False)
    engine.module.generation_config = original.generation_config
    given = encoded(family)
    assert torch.equal(engine.generate(**given, max_new_tokens=8), original.generate(**given, max_new_tokens=8))
    engine.module.save_pretrained(tmp_path / "again")
    again = family.model.from_pretrained(tmp_path / "again").state_dict()
    for key, value in original.state_dict().items():
        assert torch.equal(again[key], value), key


def test_our_cache_is_in_the_pair_and_goes_with_copies() -> None:
    _, engine = pair("bart")
    given = encoded(BY_NAME["bart"])
    answer = engine.generate(**given, max_new_tokens=4, return_dict_in_generate=True)
    cache = answer[NAME if NAME in answer else "past_key_values"]
    assert isinstance(cache, PairCache) and isinstance(cache.self_attention_cache, KVCache)
    copied = copy.deepcopy(engine.module)
    assert torch.equal(copied.generate(**given, max_new_tokens=4), answer.sequences)
    again = copied.generate(**given, max_new_tokens=4, return_dict_in_generate=True)
    assert isinstance(again[NAME if NAME in again else "past_key_values"], PairCache)
    plain = infuse.init_inference(made(BY_NAME["bart"]), dtype="fp32", replace_with_kernel_inject=False)
    assert torch.equal(plain.generate(**given, max_new_tokens=4), answer.sequences)


@pytest.mark.parametrize("name", ["bart", "t5", "switch-dropping", "nllb-moe-dropping"])
def test_an_int8_cache(name: str) -> None:
    engine = infuse.init_inference(made(BY_NAME[name]), dtype="fp32", kv_cache="int8", progress=False)
    given = encoded(BY_NAME[name])
    answer = engine.generate(**given, max_new_tokens=6, return_dict_in_generate=True, output_scores=True)
    cache = answer[NAME if NAME in answer else "past_key_values"]
    assert cache.self_attention_cache.storages()[0].dtype == torch.int8
    exact = made(BY_NAME[name]).generate(**given, max_new_tokens=6, return_dict_in_generate=True, output_scores=True)
    assert float((answer.scores[0] - exact.scores[0]).norm() / exact.scores[0].norm()) < 0.05


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_assisted_answers(name: str) -> None:
    """Candidates are cropped from both our cache and the caller's assistant."""
    original, engine = pair(name)
    assistant = made(BY_NAME[name], seed=1)
    given = encoded(BY_NAME[name], batch=1)
    answers = [model.generate(**given, assistant_model=copy.deepcopy(assistant), max_new_tokens=10)
               for model in (original, engine)]  # fmt: skip
    assert torch.equal(*answers)


def test_blip_captions() -> None:
    """A decoder that reads states of a vision tower, of another width, and ignores their mask."""
    text = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, vocab_size=96,
                max_position_embeddings=64, encoder_hidden_size=32, bos_token_id=3, eos_token_id=2, sep_token_id=2,
                pad_token_id=0)  # fmt: skip
    sight = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
                 patch_size=4)  # fmt: skip
    torch.manual_seed(0)
    original = t.BlipForConditionalGeneration(t.BlipConfig(text_config=text, vision_config=sight)).eval()
    enlarge(original)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32", progress=False)
    assert sum(isinstance(module, Block) for module in engine.module.modules()) == 4
    given = {"pixel_values": torch.randn(2, 3, 16, 16), "input_ids": torch.tensor([[3, 7, 8], [3, 9, 5]])}
    for asked in ({}, {"num_beams": 3}):
        answers = [model.generate(**given, max_new_tokens=9, **asked) for model in (original, engine)]
        assert torch.equal(*answers)
    with torch.no_grad():
        exact, found = (model(**given).logits for model in (original, engine))
    assert_near(found, exact)


BERTS = ["Roberta", "XLMRoberta", "Camembert", "Electra", "Ernie", "Data2VecText", "RoCBert", "BertGeneration"]


@pytest.mark.parametrize("kind", BERTS)
def test_decoders_like_berts(kind: str) -> None:
    sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, vocab_size=96,
                 max_position_embeddings=64)  # fmt: skip
    halves = t.BertConfig(**sizes), getattr(t, f"{kind}Config")(**sizes)
    config = t.EncoderDecoderConfig.from_encoder_decoder_configs(*halves, decoder_start_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    original = t.EncoderDecoderModel(config).eval()
    enlarge(original)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32", progress=False)
    assert sum(isinstance(module, Block) for module in engine.module.modules()) == 4
    given = encoded(BY_NAME["bart"], padding="right")
    answers = [
        model.generate(**given, num_beams=2, max_new_tokens=6, eos_token_id=None) for model in (original, engine)
    ]
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", ["marian", "t5", "mbart"])
def test_encoders_may_skip_padding(name: str) -> None:
    """The decoder masks the states of padding, which are zeros then: nothing else changes."""
    original, _ = pair(name)
    engine = infuse.init_inference(made(BY_NAME[name]), dtype="fp32", progress=False, skip_padding=True)
    given = encoded(BY_NAME[name])
    given["attention_mask"][0, 4:] = given["attention_mask"][1, 6:] = 0
    for how in ({}, {"num_beams": 3}):
        answers = [model.generate(**given, max_new_tokens=8, **how) for model in (original, engine)]
        assert torch.equal(*answers)
    with torch.no_grad():
        states = engine.module.get_encoder()(**given).last_hidden_state
    assert bool((states[0, 4:] == states[0, 5]).all())


def test_music_in_codebooks() -> None:
    """MusicGen's own `generate` calls transformers' loop itself; its heads are a list, one for each codebook."""
    text = t.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=96)
    sound = t.EncodecConfig(
        num_filters=4, hidden_size=16, codebook_size=32, codebook_dim=16, target_bandwidths=[60.0],
        upsampling_ratios=[4, 2], num_residual_layers=1, num_lstm_layers=1, sampling_rate=16000)  # fmt: skip
    decoder = t.MusicgenDecoderConfig(
        vocab_size=32, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, ffn_dim=72, num_codebooks=2,
        pad_token_id=32, bos_token_id=32, max_position_embeddings=64)  # fmt: skip
    halves = dict(text_encoder=text.to_dict(), audio_encoder=sound.to_dict(), decoder=decoder.to_dict())
    torch.manual_seed(0)
    original = t.MusicgenForConditionalGeneration(t.MusicgenConfig(**halves)).eval()
    enlarge(original.decoder)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32", progress=False)
    assert sum(isinstance(module, Block) for module in engine.module.modules()) == 4
    assert "refused" not in str(engine.plan)
    given = {"input_ids": torch.tensor([[5, 6, 7, 1]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    for asked in (dict(do_sample=False, guidance_scale=1.0), dict(do_sample=True, guidance_scale=3.0)):
        answers = []
        for model in (original, engine.module):
            torch.manual_seed(1)
            answers.append(model.generate(**given, max_new_tokens=10, **asked))
        assert_near(answers[1], answers[0])


def test_speech_from_text() -> None:
    sizes = dict(
        vocab_size=96, hidden_size=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, speaker_embedding_dim=8,
        speech_decoder_prenet_units=16, speech_decoder_postnet_units=16, max_text_positions=64)  # fmt: skip
    torch.manual_seed(0)
    original = t.SpeechT5ForTextToSpeech(t.SpeechT5Config(**sizes)).eval()
    enlarge(original)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32", progress=False)
    assert sum(isinstance(module, Block) for module in engine.module.speecht5.decoder.modules()) == 2
    answers = []
    for model in (original, engine.module):
        torch.manual_seed(1)
        answers.append(model.generate_speech(torch.tensor([[5, 6, 7, 2]]), torch.zeros(1, 8), maxlenratio=3.0))
    assert_near(answers[1], answers[0])


_SIZES = dict(d_kv=12, d_ff=80, num_layers=2, num_heads=4, vocab_size=96, relative_attention_num_buckets=8,
              relative_attention_max_distance=11)  # fmt: skip


def _patches(batch: int) -> dict[str, Tensor]:
    patches = torch.randn(batch, 6, 2 + 768, generator=torch.Generator().manual_seed(1))
    patches[:, :, :2] = torch.arange(1, 7).view(1, 6, 1)
    return {
        "flattened_patches": patches,
        "attention_mask": torch.tensor([[1.0] * 6] * (batch - 1) + [[1.0] * 4 + [0.0] * 2]),
    }


def _longt5(**more: Any) -> Any:
    sizes = dict(_SIZES, d_model=48, decoder_start_token_id=0, num_decoder_layers=2, local_radius=7)
    return t.LongT5ForConditionalGeneration(t.LongT5Config(**sizes, **more))


def _pix2struct() -> Any:
    text = dict(_SIZES, hidden_size=48, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    sight = dict(hidden_size=48, patch_embed_hidden_size=768, d_ff=80, d_kv=12, num_hidden_layers=2,
                 num_attention_heads=4, seq_len=32)  # fmt: skip
    return t.Pix2StructForConditionalGeneration(
        t.Pix2StructConfig(text_config=text, vision_config=sight, is_encoder_decoder=True)
    )


def _of_text(config: Any, model: Any, **more: Any) -> Any:
    sizes = dict(d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                 encoder_ffn_dim=80, decoder_ffn_dim=72, vocab_size=96, max_position_embeddings=64)  # fmt: skip
    made = model(config(**sizes, decoder_start_token_id=2, forced_eos_token_id=None, **more))
    made.generation_config.forced_eos_token_id = None
    return made


DECODERS = {
    "longt5": (_longt5, lambda: encoded(BY_NAME["t5"], padding="right")),
    "longt5-gated": (lambda: _longt5(feed_forward_proj="gated-gelu"), lambda: encoded(BY_NAME["t5"])),
    "pix2struct": (_pix2struct, lambda: _patches(3)),
    "mvp": (
        lambda: _of_text(t.MvpConfig, t.MvpForConditionalGeneration),
        lambda: encoded(BY_NAME["t5"], padding="right"),
    ),
    "pegasus-x": (
        lambda: _of_text(t.PegasusXConfig, t.PegasusXForConditionalGeneration, block_size=8, num_global_tokens=2),
        lambda: encoded(BY_NAME["t5"], padding="right"),
    ),
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_alone(name: str) -> None:
    """Of models whose encoders keep their own layers. LongT5's and Pix2Struct's return lists, as T5's blocks did."""
    make, inputs = DECODERS[name]
    torch.manual_seed(0)
    original = make().eval()
    enlarge(original)
    original.generation_config.eos_token_id = None
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32", progress=False)
    assert sum(isinstance(module, Block) for module in engine.module.get_decoder().modules()) == 2
    given = inputs()
    for how in ({}, {"num_beams": 3}, {"use_cache": False}):
        answers = [model.generate(**given, max_new_tokens=8, **how) for model in (original, engine)]
        assert torch.equal(*answers)
    asked = dict(max_new_tokens=4, return_dict_in_generate=True, output_attentions=True, output_hidden_states=True)
    for model in (original, engine.module):
        model.set_attn_implementation("eager")
    exact, found = (model.generate(**given, **asked) for model in (original, engine.module))
    if name != "pegasus-x":  # of which these are dicts
        for ours, theirs in zip(found.encoder_attentions, exact.encoder_attentions, strict=True):
            assert_near(ours, theirs)
    for kind in ("decoder_attentions", "cross_attentions", "decoder_hidden_states"):
        for of_ours, of_theirs in zip(found[kind], exact[kind], strict=True):
            for ours, theirs in zip(of_ours, of_theirs, strict=True):
                assert_near(ours, theirs)


@pytest.mark.parametrize("kind", ["canary", "cohere_asr", "nllb-moe", "pop2piano"])
def test_types_made_small(kind: str) -> None:
    """As docs/models.md makes them: logits and what is asked for besides."""
    config, model_class = (getattr(t, name) for name in model_types()[kind])
    original = tiny_model(config, model_class).float()
    enlarge(original)
    original.set_attn_implementation("eager")
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32", progress=False)
    blocks = [part for part in engine.module.modules() if isinstance(part, Block)]
    assert any(mixer.reads_states for block in blocks for mixer in block.shape.mixers.values())
    with torch.no_grad():
        exact, found = (model(**inputs_of(original), output_attentions=True) for model in (original, engine.module))
    assert_near(found.logits, exact.logits)
    for kind_of in ("decoder_attentions", "cross_attentions"):
        for ours, theirs in zip(found[kind_of], exact[kind_of], strict=True):
            assert_near(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("name", ["pix2struct", "longt5"])
def test_a_mask_with_more_columns_than_keys(name: str) -> None:
    """Pix2Struct's attention cuts it, over tokens and states; that of others raises."""
    original = (_pix2struct() if name == "pix2struct" else _longt5()).eval()
    enlarge(original)
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32", progress=False)
    decoder, width = original.get_decoder(), original.get_decoder().config.hidden_size
    mask = torch.zeros(2, 1, 5, 9)
    mask[..., 5:], mask[1, ..., :2] = -1e4, torch.finfo(torch.float32).min
    of_states = torch.tensor([0.0, -1e4, 0.0, 0.0, -1e4, 0.0]).expand(2, 1, 1, 6)
    given = {"attention_mask": mask, "use_cache": False}
    if name == "pix2struct":
        given["encoder_attention_mask"] = of_states
    path = next(path for path, part in decoder.named_modules() if isinstance(part, nn.ModuleList)) + ".0"
    layers = [each.get_decoder().get_submodule(path) for each in (original, engine.module)]
    assert isinstance(layers[1], Block)
    x, states = torch.randn(2, 5, width), torch.randn(2, 4, width)
    try:
        exact = layers[0](x, encoder_hidden_states=states, **given)[0]
    except RuntimeError:
        assert name != "pix2struct"
        with pytest.raises(UnsupportedCall, match="attention_mask has shape"):
            layers[1](x, encoder_hidden_states=states, **given)
        return
    assert_near(layers[1](x, encoder_hidden_states=states, **given)[0], exact)
    for held in (DynamicCache, KVCache):
        pairs = [EncoderDecoderCache(DynamicCache(), DynamicCache()), EncoderDecoderCache(held(), DynamicCache())]
        for part in (slice(0, 4), slice(4, 5)):  # a prompt, and one token on the cache
            given["attention_mask"] = mask[:, :, part]
            results = [
                layer(x[:, part], encoder_hidden_states=states, **given, **{NAME: each})[0]
                for layer, each in zip(layers, pairs, strict=True)
            ]
            assert_near(results[1], results[0])
