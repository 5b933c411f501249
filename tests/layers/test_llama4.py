"""Llama 4's layers: queries that grow with the cache, norms after complex rotations, experts with weighed inputs."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cache_utils import DynamicCache
from transformers.models.llama4 import modeling_llama4

import infuse
from infuse.architectures import bind_any, specs_for
from infuse.cache.kv_cache import KVCache
from infuse.ground.errors import SpecMismatch
from infuse.layers.attention import self_attention as attention
from infuse.layers.attention.position import PassedCosSin, grown
from infuse.layers.block import Block
from infuse.layers.mixture.moe import MoE
from infuse.layers.mixture.router import ScoringRouter
from tests.models.families import BY_NAME, LLAMA4, LLAMA4_TEXT, enlarge, inputs
from tests.support.one_calls import part_by_part
from tests.support.side_by_side import TOLERANCE, injected, original

NAMES = [family.name for family in LLAMA4]
GROWING = 2  # the layer of "llama4" that does not rotate


def ids(tokens: int = 13, batch: int = 2) -> Tensor:
    return torch.randint(3, 96, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


@torch.no_grad()
def logits(model: Any, *prompts: Tensor, cache: Any = None, **more: Any) -> Tensor:
    """Logits of the prompts one after the other on a cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    return torch.cat([model(each, cache=cache, use_cache=True, **more).logits for each in prompts], dim=1)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


# ---- the proof


_TURNS = PassedCosSin.cos_sin


def _without_norms(self: attention.Attention, qkv: Tensor) -> Tensor:
    return qkv


def _with_weighed_outputs(self: MoE, x_TH: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    return self.experts(x_TH, index, weights)


def _turned_back(self: PassedCosSin, inputs: Any) -> tuple[Tensor, Tensor]:
    cos, sin = _TURNS(self, inputs)
    return cos, -sin


# What is changed, to what, and which layers notice.
WRONG: dict[str, tuple[Any, str, Any, str]] = {
    "no growth": (attention, "grown", lambda *given: torch.ones_like(grown(*given)), "[2]"),
    "counted from 0": (attention, "grown", lambda growth, given, at: grown(growth, given, at - 1), "[2]"),
    "no norm after the rotation": (attention.Attention, "_normalised", _without_norms, "[013]"),
    "turned back": (PassedCosSin, "cos_sin", _turned_back, "[013]"),
    "weighed outputs": (MoE, "_of_weighed_inputs", _with_weighed_outputs, "[12]"),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_proof_refuses(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, layers = WRONG[what]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(infuse.ProofError, match=rf"model\.layers\.{layers}: "):
        infuse.init_inference(BY_NAME["llama4"].make(), dtype="fp32", verify="strict")


def test_the_proof_refuses_scores_of_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = ScoringRouter._routes

    def softmax(self: ScoringRouter, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, index = routes(self, x)
        return logits, logits.softmax(-1).gather(1, index).to(weights.dtype), index

    monkeypatch.setattr(ScoringRouter, "_routes", softmax)
    with pytest.raises(infuse.ProofError, match=r"model\.layers\.[12]: .*router weighs experts differently"):
        infuse.init_inference(BY_NAME["llama4"].make(), dtype="fp32", verify="strict")


# ---- binding


def test_layers_are_bound_by_what_they_have() -> None:
    layers: Any = original("llama4").model.layers
    shapes = [bind_any(specs_for(layer), layer, original("llama4").config).shape.parts["self_attn"] for layer in layers]
    assert [shape.growth is not None for shape in shapes] == [index == GROWING for index in range(4)]  # type: ignore[attr-defined]
    assert [shape.norm_after for shape in shapes] == [index != GROWING for index in range(4)]  # type: ignore[attr-defined]
    growth = shapes[GROWING].growth  # type: ignore[attr-defined]
    assert (growth.beta, growth.every, growth.offset, growth.counted) == (0.8, 3.0, 1.0, True)


def test_a_scale_that_divides_by_nothing_is_refused() -> None:
    layer = copy.deepcopy(original("llama4").model.layers[GROWING])  # type: ignore[union-attr,index]
    layer.self_attn.floor_scale = 0
    with pytest.raises(SpecMismatch, match="floor_scale 0"):
        bind_any(specs_for(layer), layer, original("llama4").config)


# ---- calls


@pytest.mark.parametrize("name", NAMES)
def test_prompts_in_parts_on_every_cache(name: str) -> None:
    model, parts = injected(BY_NAME[name].make()).module, (ids(9), ids(5), ids(1), ids(3))
    wanted = logits(original(name), *parts)
    for cache in (DynamicCache(config=model.config), KVCache()):
        assert error(logits(model, *parts, cache=cache), wanted) < TOLERANCE


def test_growth_follows_the_cache_and_not_the_positions_that_are_passed() -> None:
    model, place = injected(BY_NAME["llama4"].make()).module, torch.arange(40, 53)[None]
    plain, moved = (logits(original("llama4"), ids(), position_ids=at) for at in (None, place))
    assert error(logits(model, ids(), position_ids=place), moved) < TOLERANCE
    assert error(logits(model, ids(), cache=KVCache(), position_ids=place), moved) < TOLERANCE
    assert error(moved, plain) < 1e-3  # rotations are relative; with positions that counted it would be another


def test_a_cropped_cache() -> None:
    model, found = injected(BY_NAME["llama4"].make()).module, []
    for each, cache in ((original("llama4"), DynamicCache()), (model, DynamicCache()), (model, KVCache())):
        logits(each, ids(9), cache=cache)
        cache.crop(-3)
        found.append(logits(each, ids(4), cache=cache))
    assert error(found[1], found[0]) < TOLERANCE and error(found[2], found[0]) < TOLERANCE


def test_rows_of_different_lengths() -> None:
    """Queries of each row grow from its own length."""
    model = injected(BY_NAME["llama4-even"].make(attn_temperature_tuning=True)).module
    prompt, more, cache = ids(9), ids(2), KVCache()
    logits(model, prompt, cache=cache)
    cache.crop_rows(torch.tensor([4, 9]))
    place = torch.tensor([[4, 5], [9, 10]])
    found = logits(model, more, cache=cache, position_ids=place)
    for row, length in enumerate((4, 9)):
        wanted = logits(model, prompt[row : row + 1, :length], more[row : row + 1])[:, length:]
        assert error(found[row : row + 1], wanted) < TOLERANCE


def test_continuous_batches() -> None:
    """Without chunks and growth, which transformers' cache of continuous batching does not know."""
    requests = [[5, 6, 7, 8], [20], [5, 6, 7, 8, 9, 10, 11]]
    engine = injected(BY_NAME["llama4-even"].make())
    settings = GenerationConfig(max_new_tokens=5, eos_token_id=-1, pad_token_id=0, do_sample=False)
    room = ContinuousBatchingConfig(page_size=4, num_blocks=16, max_batch_tokens=16)
    found = engine.generate_batch(requests, generation_config=settings, continuous_batching_config=room)
    exact: Any = original("llama4-even")
    for given, one in zip(requests, found.values(), strict=True):
        wanted = exact.generate(torch.tensor([given]), max_new_tokens=5, do_sample=False)
        assert one.error is None and one.generated_tokens == wanted[0, len(given) :].tolist()


def test_turns_of_another_form_are_refused() -> None:
    layer: Any = injected(BY_NAME["llama4"].make()).module.model.layers[0]
    turns = torch.ones(1, 5, 12)
    for given in ((turns, turns), turns):
        with pytest.raises(infuse.UnsupportedCall, match="one complex tensor"):
            layer(torch.randn(1, 5, 48), position_embeddings=given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_routers_are_recorded_and_heard_as_the_originals(dtype: torch.dtype) -> None:
    exact, engine = BY_NAME["llama4"].make().to(dtype), injected(BY_NAME["llama4"].make(), dtype=dtype)
    with torch.no_grad():
        ours, theirs = (model(ids(7), output_router_logits=True).router_logits for model in (engine.module, exact))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype == dtype and a.shape == b.shape == (14, 4)
        assert error(a, b) < (TOLERANCE if dtype is torch.float32 else 0.2)  # experts may differ

    def halved(router: nn.Module, args: tuple, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return output[0] / 2, output[1]

    before = logits(exact, ids(7))
    exact.model.layers[1].feed_forward.router.register_forward_hook(halved)
    engine.module.model.layers[1].mlp.router.register_forward_hook(halved)
    assert error(logits(exact, ids(7)), before) > 0.01
    assert error(logits(engine.module, ids(7)), logits(exact, ids(7))) < (TOLERANCE if dtype is torch.float32 else 0.2)


def test_attention_weights() -> None:
    exact, engine = BY_NAME["llama4"].make(), injected(BY_NAME["llama4"].make())
    found = []
    for model in (exact, engine.module):
        model.set_attn_implementation("eager")  # type: ignore[operator]
        with torch.no_grad():
            found.append(model(ids(7), output_attentions=True).attentions)
    assert all(error(ours, theirs) < TOLERANCE for theirs, ours in zip(*found, strict=True)) and len(found[1]) == 4


def test_a_step_in_one_call_is_what_its_parts_compute() -> None:
    engine, steps = injected(BY_NAME["llama4-plain"].make()), []
    reasons = [layer._runs_in_parts for layer in engine.module.model.layers]
    assert [bool(reason) for reason in reasons] == [False, True, True, False]
    assert all("weights multiply the experts' inputs" in reason for reason in reasons[1:3])
    for way in (nullcontext(), part_by_part(engine.module)):
        with way:
            steps.append(logits(engine.module, ids(7), ids(1), cache=KVCache()))
    assert error(*steps) < TOLERANCE


# ---- formats and files


@pytest.mark.parametrize("format", ["int8:8", "int4:8"])
def test_formats_and_our_own_files(format: str, tmp_path: Path) -> None:
    family, given = BY_NAME["llama4"], inputs(BY_NAME["llama4"], padding="left")
    engine = injected(family.make(), quant=format, save_mp_checkpoint_path=str(tmp_path))
    steps = [step for step in engine.plan.steps if step.depth == "block"]
    assert all(format in step.formats.values() for step in steps) and len(steps) == 4
    rounded = family.make()
    with infuse.dequantized(engine.module):
        rounded.load_state_dict(engine.module.state_dict())
    with torch.device("meta"):
        empty = family.model(family.config(**family.values))
    again = injected(empty, checkpoint=str(tmp_path), quant=format)
    with torch.no_grad():
        wanted = rounded(**given).logits
        for each in (engine, again):
            assert error(each(**given).logits, wanted) < 5 * TOLERANCE


def test_checkpoints_of_transformers(tmp_path: Path) -> None:
    family, model = BY_NAME["llama4"], BY_NAME["llama4"].make()
    held = {key: value.clone() for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = family.model(family.config(**family.values))
    engine = injected(empty, checkpoint=str(tmp_path))
    assert error(logits(engine.module, ids()), logits(model, ids())) < TOLERANCE
    state = engine.module.state_dict()
    assert state.keys() == held.keys() and all(torch.equal(state[key], held[key]) for key in held)


# ---- text among pictures

_VISION = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128, image_size=28, patch_size=7,
    vision_output_dim=48, projector_input_dim=48, projector_output_dim=48, pixel_shuffle_ratio=0.5,
)  # fmt: skip


def test_the_text_model_of_one_that_also_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers 5.24 reads this of what the text model returns, which has no such field.
    monkeypatch.setattr(modeling_llama4.MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)
    config = t.Llama4Config(text_config=dict(LLAMA4_TEXT), vision_config=_VISION, image_token_index=90)
    config.pad_token_id = 0
    torch.manual_seed(0)
    exact = t.Llama4ForConditionalGeneration(config).eval()
    enlarge(exact)
    engine = infuse.init_inference(copy.deepcopy(exact), dtype="fp32")
    assert all(isinstance(layer, Block) for layer in engine.module.language_model.model.layers)
    prompt = ids().masked_fill(ids() == 90, 5)
    prompt[:, 2:6] = 90
    given = dict(input_ids=prompt, pixel_values=torch.randn(2, 3, 28, 28))
    with torch.no_grad():
        assert error(engine.module(**given).logits, exact(**given).logits) < TOLERANCE
    how = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(engine.module.generate(**given, **how), exact.generate(**given, **how))
