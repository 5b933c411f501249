"""A cache goes both ways: what a replaced model fills, the original goes on with, and the other way round.

To other libraries it is a DynamicCache, whose layers have what transformers' own have.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

import infuse
from infuse.cache.encoded_slot import StatesCache
from infuse.cache.kv_cache import KVCache
from infuse.cache.recurrence_slot import StateSlot
from infuse.cache.shown_states import NUMBERS_STATES
from infuse.generate.pairs.cache import PairCache
from infuse.ground.errors import UnsupportedCall
from tests.models import encoder_decoders
from tests.models.families import BY_NAME
from tests.models.families import inputs as inputs_of
from tests.support.side_by_side import TOLERANCE
from tests.support.states import ALL_NAMES, family_of

ATTENTIONS = ("llama", "mistral", "gemma3", "gpt-oss", "gemma4", "deepseek-v3", "llama4", "falcon", "gpt2")
HYBRIDS = ("lfm2", "qwen3_5", "granitemoehybrid", "kimi_linear", "jamba", "mamba2", "falcon_h1-gated-norm", "zamba2")
CUTS = ((0, 7), (7, 8), (8, 9), (9, 11), (11, 12))
# Who makes each of these calls: the original, or the model with replaced layers.
TURNS = {"ours, then the original": "rooooo", "the original, then ours": "orrrr", "by turns": "roror", "again": "orror"}

numbers_states = pytest.mark.skipif(not NUMBERS_STATES, reason="this version's layers have one state, without a number")


def family(name: str) -> Any:
    return family_of(name) if name in ALL_NAMES else BY_NAME[name]


@once
def pair(name: str) -> dict[str, Any]:
    """The original and the model with replaced layers: never to be changed."""
    return {
        "o": family(name).make(),
        "r": infuse.init_inference(family(name).make(), dtype="fp32", progress=False).module,
    }


@once
def ids(name: str) -> Tensor:
    return inputs_of(family(name), batch=2, tokens=12)["input_ids"]


def dynamic(name: str) -> DynamicCache:
    return DynamicCache(config=pair(name)["o"].config.get_text_config(decoder=True))


@torch.no_grad()
def step(name: str, who: str, cache: Any, start: int, stop: int) -> Tensor:
    """The logits of tokens from `start` on."""
    more = {} if name == "mamba2" else {"position_ids": torch.arange(start, stop).expand(2, -1)}
    return pair(name)[who](input_ids=ids(name)[:, start:stop], cache=cache, use_cache=True, **more).logits


@once
def exact(name: str) -> tuple[list[Tensor], DynamicCache]:
    """The original's own calls, and its own cache after them."""
    cache = dynamic(name)
    return [step(name, "o", cache, *cut) for cut in CUTS], cache


def check(found: Tensor, wanted: Tensor) -> None:
    error = float((found - wanted).abs().max() / wanted.abs().max())
    assert error < 2 * TOLERANCE, f"{error:.1e}"


def filled(name: str, who: str = "r", cache: Any = None, calls: int = len(CUTS)) -> Any:
    cache = KVCache() if cache is None else cache
    for cut in CUTS[:calls]:
        step(name, who, cache, *cut)
    return cache


# ---- both ways


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("name", [name for name in (*ATTENTIONS, *HYBRIDS) if name in BY_NAME])
def test_each_goes_on_with_the_others_cache(name: str, turns: str) -> None:
    for cache in (KVCache(), dynamic(name)):
        for who, cut, wanted in zip(TURNS[turns], CUTS, exact(name)[0], strict=False):
            check(step(name, who, cache, *cut), wanted)


@pytest.mark.parametrize("name", ["llama", "mistral", "falcon_h1-gated-norm"])
def test_int8_caches_go_both_ways(name: str) -> None:
    """Rounded when appended, whoever appends."""
    alone = [step(name, "r", cache, *cut) for cache in [KVCache(format="int8")] for cut in CUTS]
    for turns in TURNS.values():
        cache = KVCache(format="int8")
        found = [step(name, who, cache, *cut) for who, cut in zip(turns, CUTS, strict=False)]
        assert all(float((one - other).norm() / other.norm()) < 2e-2 for one, other in zip(found, alone, strict=True))
        assert cache.layers[-1].keys.dtype == torch.float32


PAIRS: dict[str, Callable[[], EncoderDecoderCache]] = {
    "ours": lambda: PairCache(KVCache(), StatesCache()),
    "transformers'": lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()),
    "two of ours": lambda: EncoderDecoderCache(KVCache(), KVCache()),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_caches_of_pairs_go_both_ways(name: str, kind: str) -> None:
    made = encoder_decoders.BY_NAME[name]
    models = {"o": encoder_decoders.made(made)}
    models["r"] = infuse.init_inference(encoder_decoders.made(made), dtype="fp32", progress=False).module
    given = encoder_decoders.encoded(made, batch=2)
    tokens = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(3))

    @torch.no_grad()
    def answer(turns: str, cache: EncoderDecoderCache) -> list[Tensor]:
        states = models["o"].get_encoder()(**given)
        more = {name: given[name] for name in ("attention_mask",) if name in given}
        return [
            models[who](encoder_outputs=states, decoder_input_ids=tokens[:, a:b], cache=cache, use_cache=True, **more)[
                "logits"
            ]
            for who, (a, b) in zip(turns, CUTS, strict=False)
        ]

    wanted = answer("ooooo", PAIRS["transformers'"]())
    for turns in TURNS.values():
        cache = PAIRS[kind]()
        for found, one in zip(answer(turns, cache), wanted, strict=True):
            check(found, one)
        assert isinstance(cache.self_attention_cache, DynamicCache)
        assert isinstance(cache.cross_attention_cache, DynamicCache)
        cache.crop(-1)  # transformers does this for a pair of DynamicCaches alone
        assert cache.get_seq_length() == 11
        assert len(list(cache)) == len(cache) and all(len(entry) == 6 for entry in cache)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5", "falcon_h1-gated-norm", "lfm2"])
def test_the_originals_generate_goes_on_from_an_answers_cache(name: str) -> None:
    asked = dict(max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    answers = {}
    for who in "or":
        first = pair(name)[who].generate(ids(name), **asked)
        text = torch.cat((first.sequences, ids(name)[:, :3]), dim=1)
        answers[who] = pair(name)["o"].generate(text, cache=first.cache, **asked)
        assert isinstance(first.cache, DynamicCache)
    assert torch.equal(answers["r"].sequences, answers["o"].sequences)
    # And back: ours goes on from the cache that the original has just gone on with.
    text = torch.cat((answers["o"].sequences, ids(name)[:, :2]), dim=1)
    last = [
        pair(name)[who].generate(text, cache=answers[given].cache, **asked).sequences for who, given in ("oo", "rr")
    ]
    assert torch.equal(*last)


@numbers_states
def test_a_model_of_states_runs_the_whole_text_again_on_a_cache_that_the_original_went_on_with() -> None:
    """The original counts no tokens of a single one's steps, so neither can the cache."""
    cache = filled("mamba2", calls=1)
    assert cache.get_seq_length() == 7
    assert cache.layers[0].conv_states[0].shape[-1] == cache.layers[0].conv_kernel_size[0]  # to look changes nothing
    assert cache.get_seq_length() == 7 and cache.is_linear == [True] * len(cache)
    step("mamba2", "o", cache, 7, 8)
    with pytest.raises(ValueError, match="do not count"):
        cache.get_seq_length()
    own = dynamic("mamba2")
    for cut in CUTS[:2]:
        step("mamba2", "o", own, *cut)
    asked = dict(max_new_tokens=4, do_sample=False)
    found = pair("mamba2")["r"].generate(ids("mamba2"), cache=cache, **asked)
    assert torch.equal(found, pair("mamba2")["o"].generate(ids("mamba2"), cache=own, **asked))


def test_the_originals_lookup_takes_back_tokens_of_a_cache_that_it_filled() -> None:
    """LFM2 keeps a convolution's inputs alone, and transformers verifies candidates for it."""
    text = torch.cat((ids("lfm2")[:1], ids("lfm2")[:1, 3:9]), dim=1)
    asked = dict(max_new_tokens=12, do_sample=False)
    wanted = pair("lfm2")["o"].generate(text, **asked)
    cache = KVCache()
    assert torch.equal(pair("lfm2")["o"].generate(text, cache=cache, prompt_lookup_num_tokens=3, **asked), wanted)
    # `generate` leaves the last token out, which the next call begins with.
    assert cache.get_seq_length() == wanted.shape[1] - 1


def test_a_second_state_of_a_layer_is_refused() -> None:
    with pytest.raises(UnsupportedCall, match="one state of a kind a layer"):
        KVCache().get_conv_state(0, state_idx=1)


# ---- what transformers' own layers have


SHARED = ("device", "dtype", "is_sliding", "is_compileable", "record_past", "number_of_states")
NUMBERED = ("has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized", "conv_kernel_size")


@numbers_states
@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "lfm2", "qwen3_5", "jamba", "mamba2", "falcon_h1-gated-norm"])
def test_layers_have_what_transformers_own_have(name: str) -> None:
    ours, own = filled(name), exact(name)[1]
    assert isinstance(ours, DynamicCache) and len(ours) == len(own)
    for mine, its in zip(ours.layers, own.layers, strict=True):
        assert isinstance(mine, type(its))
        for attribute in SHARED if isinstance(its, DynamicLayer) is False else SHARED[:3]:
            if hasattr(its, attribute) and attribute != "is_compileable":
                assert getattr(mine, attribute) == getattr(its, attribute), attribute
        for attribute in NUMBERED if isinstance(its, LinearAttentionLayer) else ():
            assert dict(getattr(mine, attribute)) == getattr(its, attribute), attribute
        for attribute in ("keys", "values"):
            if isinstance(its, DynamicLayer):
                check(getattr(mine, attribute), getattr(its, attribute))
                assert getattr(mine, attribute).dtype == getattr(its, attribute).dtype
        for attribute in ("conv_states", "recurrent_states"):
            state = getattr(its, attribute, {0: None})[0]
            if state is not None:
                check(getattr(mine, attribute)[0], state)
                assert getattr(mine, attribute)[0].dtype == state.dtype
        missing = [each for each in dir(its) if not each.startswith("_") and not hasattr(mine, each)]
        assert not missing
    missing = [each for each in dir(own) if not each.startswith("_") and not hasattr(ours, each)]
    assert not missing
    assert ours.is_linear == own.is_linear and ours.is_dummy == own.is_dummy and ours.is_sliding == own.is_sliding


def test_layers_of_hybrids_are_of_both_kinds() -> None:
    layer = filled("falcon_h1-gated-norm").layers[0]
    assert isinstance(layer, LinearAttentionAndFullAttentionLayer)
    layer = filled("mamba2").layers[0]
    assert isinstance(layer, LinearAttentionLayer) and not isinstance(layer, DynamicLayer)


@numbers_states
@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_states_that_are_assigned_or_written_are_gone_on_with(name: str) -> None:
    ours, own = filled(name, calls=1), dynamic(name)
    step(name, "o", own, *CUTS[0])
    for cache in (ours, own):
        for layer in cache.layers:
            if isinstance(layer, LinearAttentionLayer):
                layer.conv_states[0] = layer.conv_states[0] * 0.5
                layer.recurrent_states[0].mul_(0.25)
    check(step(name, "r", ours, *CUTS[1]), step(name, "o", own, *CUTS[1]))


def saved(cache: Any) -> Any:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def joined(cache: Any) -> Any:
    """As libraries do that gather caches, or keep parts of them."""
    return DynamicCache([(keys, values) for keys, values, *_ in cache])


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "torch.save": saved,
    "joined": joined,
    "again": lambda cache: DynamicCache(cache),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "falcon_h1-gated-norm"])
def test_copies_go_on_in_the_original(name: str, how: str) -> None:
    if how in ("joined", "again") and name != "llama":
        pytest.skip("these ways of transformers take keys and values alone")
    cache = filled(name, calls=2)
    copied = COPIES[how](cache)
    for storage in cache.storages():
        storage.fill_(float("nan"))
    for who, number in (("o", 2), ("r", 3), ("o", 4)):
        check(step(name, who, copied, *CUTS[number]), exact(name)[0][number])


@pytest.mark.parametrize("name", ["llama", "mamba2", "falcon_h1-gated-norm"])
def test_layers_are_offloaded_and_come_back(name: str) -> None:
    cache = filled(name, calls=2)
    for layer in cache.layers:
        layer.offload()
        assert layer.device == torch.device("cpu")
        layer.prefetch()
    check(step(name, "r", cache, *CUTS[2]), exact(name)[0][2])


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "falcon_h1-gated-norm"])
def test_rows_move_layer_by_layer(name: str) -> None:
    """As callers do that go over `cache.layers` themselves."""
    rows = torch.tensor([1, 0])
    cache = filled(name, calls=2)
    for layer in cache.layers:
        layer.reorder_cache(rows)
    with torch.no_grad():
        for start in (8, 9):
            more = {"position_ids": torch.full((2, 1), start)}
            model, new = pair(name)["o" if start == 8 else "r"], ids(name)[rows, start : start + 1]
            found = model(input_ids=new, cache=cache, use_cache=True, **more).logits
            own = dynamic(name)
            step(name, "o", own, 0, 7)
            for each in range(7, start):
                step(name, "o", own, each, each + 1)
            check(found, step(name, "o", own, start, start + 1)[rows])


def test_a_cache_is_counted_layer_by_layer() -> None:
    cache = filled("qwen3_5")
    kinds = [isinstance(layer, StateSlot) for layer in cache.layers]
    assert any(kinds) and not all(kinds)
    assert [cache.get_seq_length(index) for index in range(len(cache))] == [12] * len(cache)
    assert cache.get_seq_length(len(cache)) == 0 and isinstance(cache, Cache)
    step("qwen3_5", "o", cache, 11, 12)
    assert cache.get_seq_length() == 13
    assert {slot.length for slot in cache.layers} == {13}, "our steps of all layers in one call need one length"
