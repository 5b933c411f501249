"""After `set_attn_implementation` a replaced model attends by the function that it names, called as the original calls
it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.cache_utils import DynamicCache
from transformers.integrations.flex_attention import WrappedFlexAttention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.layers.attention.latent_attention import LatentAttention
from infuse.layers.attention.named_attention import calls_by_name
from infuse.layers.attention.self_attention import Attention
from tests.models.families import BY_NAME, FAMILIES, HYBRIDS, MIXTURES, inputs
from tests.support.tolerance import assert_near

SERVES_NO_OTHER = ("gpt-neo", "gptj", "codegen", "bloom", "falcon", "mpt", "mpnet", "deberta")
Call = dict[str, Any]


@pytest.fixture
def calls() -> Iterator[list[Call]]:
    """What the attention function "recorded" is called with, whose result is half of sdpa's."""
    made: list[Call] = []

    def recorded(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        given = {"query": query, "key": key, "value": value, "mask": attention_mask}
        made.append({"class": type(module).__name__, **given, **kwargs})
        known = {name: kwargs[name] for name in ("dropout", "scaling", "is_causal") if name in kwargs}
        return 0.5 * sdpa_attention_forward(module, query, key, value, attention_mask, **known)[0], None

    AttentionInterface.register("recorded", recorded)
    AttentionMaskInterface.register("recorded", sdpa_mask)
    yield made
    del AttentionInterface._global_mapping["recorded"], AttentionMaskInterface._global_mapping["recorded"]


def pair(name: str, **config: Any) -> tuple[Any, Any]:
    """The original and the replaced model."""
    family = BY_NAME[name]
    engine = infuse.init_inference(family.make(**config), dtype="fp32")
    assert any(isinstance(module, (Attention, LatentAttention)) for module in engine.module.modules())
    return family.make(**config), engine.module


def run(model: Any, given: Call) -> Tensor:
    with torch.no_grad():
        return next(value for value in model(**given).values() if isinstance(value, Tensor))


def same(name: str, ours: Any, theirs: Any, times: int) -> None:
    if isinstance(theirs, Tensor) and theirs.is_floating_point():
        assert_near(ours, theirs, theirs.dtype, times=times)
    else:
        assert torch.equal(ours, theirs) if isinstance(theirs, Tensor) else ours == pytest.approx(theirs), name


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if not f.name.startswith(SERVES_NO_OTHER)], ids=lambda family: family.name
)
def test_a_registered_function_is_called_as_the_original_calls_it(family: Any, calls: list[Call]) -> None:
    results, made = [], []
    for model in pair(family.name):
        model.set_attn_implementation("recorded")
        results.append(run(model, inputs(family, padding="left")))
        made.append(list(calls))
        calls.clear()
    # Routers magnify rounding, and so do scores that are not scaled, mT5's (2.9e-6 on an Intel Xeon) and Gemma 4's, and
    # norms of what a state gives.
    magnify = family in (*MIXTURES, *HYBRIDS) or family.name.startswith(("mt5", "gemma4", "embedding-gemma2"))
    times = 2 if magnify else 1
    assert_near(results[1], results[0], torch.float32, times=times)
    assert len(made[0]) == len(made[1]) > 0
    for theirs, ours in zip(*made, strict=True):
        if family.name.startswith("opt"):  # which scales its queries itself
            ours["query"], ours["scaling"] = ours["query"] * ours["scaling"], 1.0
        for name in (
            "use_cache",
            "output_attentions",
            "encoder_hidden_states",
        ):  # which say nothing to an attention function
            theirs.pop(name, None), ours.pop(name, None)
        assert theirs.keys() == ours.keys()
        for name in theirs:
            same(name, ours[name], theirs[name], times)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["bert", "llama", "gemma2"])
def test_flex_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, replaced = pair(name, num_hidden_layers=2 if name == "gemma2" else 1)
    # Compiled, it and its mask need seconds for each shape; what they compute is the same.
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: flex_attention)
    monkeypatch.setattr(
        masking_utils, "create_block_mask", lambda *, _compile, **asked: create_block_mask(**asked, _compile=False)
    )
    original.set_attn_implementation("flex_attention")
    replaced.set_attn_implementation("flex_attention")
    given = inputs(BY_NAME[name], padding="left")
    assert_near(run(replaced, given), run(original, given), torch.float32)
    if name == "llama":
        settings = dict(max_new_tokens=2, do_sample=False)
        assert torch.equal(replaced.generate(**given, **settings), original.generate(**given, **settings))


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_back_and_forth(name: str, calls: list[Call]) -> None:
    """Each implementation gives the original's logits, in any order, over one cache."""
    given = inputs(BY_NAME[name])["input_ids"]
    results = []
    for model in pair(name):
        cache, logits = DynamicCache(config=model.config), []
        for names, ids in zip(("sdpa", "recorded", "eager", "recorded"), given.split((5, 1, 4, 1), dim=1), strict=True):
            model.set_attn_implementation(names)
            logits.append(run(model, {"input_ids": ids, "past_key_values": cache}))
        results.append(torch.cat(logits, dim=1))
    assert_near(results[1], results[0], torch.float32)


def test_attention_that_is_not_called_by_name_says_so() -> None:
    """Their original ignores the name, or does not let itself be set to it."""
    for name in ("falcon-7b", "falcon-40b"):
        _, replaced = pair(name)
        assert not any(calls_by_name(module) for module in replaced.modules() if isinstance(module, Attention))
        replaced.config._attn_implementation = "flex_attention"
        with pytest.raises(infuse.UnsupportedCall, match="flex_attention"):
            replaced.transformer.h[0](torch.randn(1, 3, 48))


def test_a_cache_of_rows_of_different_lengths_needs_our_attention(calls: list[Call]) -> None:
    _, replaced = pair("llama")
    cache = KVCache()
    ids = inputs(BY_NAME["llama"])["input_ids"]
    run(replaced, {"input_ids": ids, "past_key_values": cache})
    cache.crop_rows(torch.tensor([4, 7]))
    replaced.set_attn_implementation("recorded")
    with pytest.raises(infuse.UnsupportedCall, match="rows of different lengths"):
        run(replaced, {"input_ids": ids[:, :1], "past_key_values": cache, "position_ids": torch.tensor([[4], [7]])})


def assert_same(found: Tensor, wanted: Tensor) -> None:
    assert float((found - wanted).norm() / wanted.norm()) < 5e-5


def halved(own: Any) -> Any:
    """The function, with half of its result from the 9th key on: beyond what a short proof may see."""

    def run(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, weights = own(module, query, key, value, *args, **kwargs)
        return (out * 0.5 if key.shape[2] > 20 else out), weights

    return run


@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral"])
def test_sdpa_registered_anew_is_called(name: str, later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function counts, not its name; and transformers' own counts again when it is back."""
    family = BY_NAME[name]
    original, given = family.make(), inputs(BY_NAME[name], tokens=24)
    plain = run(original, given)
    with monkeypatch.context() as patch:
        if later:
            engine = infuse.init_inference(family.make(), dtype="fp32")
        patch.setitem(AttentionInterface._global_mapping, "sdpa", halved(sdpa_attention_forward))
        if not later:
            engine = infuse.init_inference(family.make(), dtype="fp32")
        wanted = run(original, given)
        assert float((wanted - plain).norm() / plain.norm()) > 0.05
        assert_same(run(engine.module, given), wanted)
    assert_same(run(engine.module, given), plain)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_eager_attention_patched_in_its_file_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = BY_NAME[name]
    original, engine = family.make(), infuse.init_inference(family.make(), dtype="fp32")
    file = sys.modules[type(original).__module__]
    monkeypatch.setattr(file, "eager_attention_forward", halved(vars(file)["eager_attention_forward"]))
    given = inputs(family, tokens=24)
    for model in (original, engine.module):
        model.set_attn_implementation("eager")
    assert_same(run(engine.module, given), run(original, given))


def test_steps_of_generate_see_sdpa_registered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    family = BY_NAME["llama"]
    original, engine = family.make(vocab_size=8192), infuse.init_inference(family.make(vocab_size=8192), dtype="fp32")
    ids = torch.arange(3, 20)[None]
    plain = original.generate(ids, max_new_tokens=12)
    assert torch.equal(engine.generate(ids, max_new_tokens=12), plain)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", halved(sdpa_attention_forward))
    wanted = original.generate(ids, max_new_tokens=12)
    assert not torch.equal(wanted, plain)
    assert torch.equal(engine.generate(ids, max_new_tokens=12), wanted)


@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
def test_layers_that_stay_call_sdpa_registered_anew(later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with another forward stays, and has our attention by transformers' interface."""
    family = BY_NAME["llama"]

    def made() -> Any:
        model: Any = family.make()
        for layer in model.model.layers:
            layer.forward = partial(type(layer).forward, layer)
        return model

    original, given = made(), inputs(family, tokens=24)
    if later:
        engine = infuse.init_inference(made(), dtype="fp32")
        assert any(step.depth == "attention" for step in engine.plan.steps)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", halved(sdpa_attention_forward))
    if not later:
        engine = infuse.init_inference(made(), dtype="fp32")
    assert_same(run(engine.module, given), run(original, given))
