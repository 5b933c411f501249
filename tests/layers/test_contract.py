"""The contract of a call: a replaced layer equals the original or raises an error that names the argument."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from transformers.cache_utils import StaticCache

import infuse
from infuse.layers.block import Block
from tests.models.families import BY_NAME, GQA, enlarge
from tests.models.unknown import HOOKED, hooked
from tests.support.tolerance import assert_near


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, infuse.InferenceEngine]:
    return BY_NAME["llama"].make(), infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32")


def one_block(model: nn.Module) -> Block:
    return next(module for module in model.modules() if isinstance(module, Block))


# ---- arguments ----


def call(block: Block, *args: Any, **kwargs: Any) -> Any:
    hidden, cos_sin = torch.randn(1, 4, 48), (torch.ones(1, 4, 12), torch.zeros(1, 4, 12))
    with torch.no_grad():
        return block(hidden, *args, **{"position_embeddings": cos_sin, **kwargs})


@pytest.mark.parametrize("argument", ["encoder_hidden_states", "softcap", "position_bias"])
def test_an_argument_that_is_not_served_is_refused_by_name(argument: str) -> None:
    model = infuse.init_inference(BY_NAME["gpt2"].make(), dtype="fp32").module
    with pytest.raises(infuse.UnsupportedCall, match=argument):
        one_block(model)(torch.randn(1, 4, 48), **{argument: torch.ones(1, 4, 48)})


def test_an_argument_of_none_says_nothing(pair: Any) -> None:
    assert call(one_block(pair[1].module), encoder_hidden_states=None).shape == (1, 4, 48)


def test_token_types_of_a_tokenizer_say_nothing_in_a_model_without_them(pair: Any) -> None:
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        exact, found = (model(ids, token_type_ids=torch.zeros_like(ids)).logits for model in pair)
    assert torch.allclose(found, exact, atol=1e-4)


def test_labels_say_nothing_to_layers(pair: Any) -> None:
    """T5's encoder gets them from `generate`, as Seq2SeqTrainer calls it; layers, what a loss is to be made with."""
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        exact, found = (model(ids, labels=ids, shift_labels=ids, ignore_index=7).loss for model in pair)
    assert torch.allclose(found, exact, atol=1e-4)
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, d_model=48, d_kv=12, d_ff=80, num_layers=2, num_heads=4, decoder_start_token_id=0)
    t5 = t.T5ForConditionalGeneration(t.T5Config(**sizes)).eval()
    wanted = t5.generate(ids, labels=ids, max_new_tokens=5)
    engine = infuse.init_inference(t5, dtype="fp32")
    assert "block" in {step.depth for step in engine.plan.steps}
    assert torch.equal(engine.generate(ids, labels=ids, max_new_tokens=5), wanted)


def test_numbers_that_are_no_token_ids_are_refused() -> None:
    """A mask, or values, in the place of ids: a quantized table converted them."""
    model = infuse.init_inference(BY_NAME["llama-bias"].make(), dtype="fp32", quant="int8:16").module
    ids = torch.arange(5, 15)[None]
    assert torch.equal(model(ids.int()).logits, model(ids).logits)
    for wrong in (ids.float(), ids > 7, ids.byte()):
        with pytest.raises(RuntimeError, match="token ids|indices"):
            model(wrong)


def test_too_many_and_repeated_arguments_are_type_errors(pair: Any) -> None:
    block = one_block(pair[1].module)
    with pytest.raises(TypeError, match="positional arguments"):
        call(block, *[None] * 12)
    with pytest.raises(TypeError, match="multiple values for argument 'attention_mask'"):
        call(block, None, attention_mask=None)


@pytest.mark.parametrize(
    ("name", "argument"), [("llama", "position_embeddings"), ("gptj", "position_(ids|embeddings)"), ("bloom", "alibi")]
)
def test_missing_positions_are_refused(name: str, argument: str) -> None:
    """Without them a layer would compute as if it had no positions at all."""
    model = infuse.init_inference(BY_NAME[name].make(), dtype="fp32").module
    with pytest.raises(infuse.UnsupportedCall, match=argument):
        one_block(model)(torch.randn(1, 4, 48))


# ---- caches and masks ----


@pytest.mark.parametrize(
    "cache", [((torch.zeros(1, 2, 3, 12),) * 2,), {"keys": 1}, object()], ids=lambda cache: type(cache).__name__
)
def test_a_cache_of_another_kind_is_refused(pair: Any, cache: Any) -> None:
    with pytest.raises(infuse.UnsupportedCall, match=f"{type(cache).__name__} as its cache"):
        call(one_block(pair[1].module), past_key_values=cache)


@pytest.mark.parametrize(
    "mask", [torch.ones(1, 4), torch.ones(1, 1, 4, 4, dtype=torch.long), "causal"], ids=["2-d", "integers", "text"]
)
def test_a_mask_of_another_kind_is_refused(pair: Any, mask: Any) -> None:
    with pytest.raises(infuse.UnsupportedCall, match="attention_mask"):
        call(one_block(pair[1].module), attention_mask=mask)


@pytest.mark.parametrize("causal", [False, None])
def test_queries_that_see_all_keys_see_those_of_a_static_cache_too(pair: Any, causal: bool | None) -> None:
    """Without a mask, only a causal layer takes the first keys alone."""
    results = []
    for model in (pair[0], pair[1].module):
        layer, cache = model.model.layers[0], StaticCache(config=model.config, max_cache_len=9)
        torch.manual_seed(3)
        kwargs = {} if causal is None else {"is_causal": causal}
        results.append(call(layer, past_key_values=cache, **kwargs))
    assert_near(results[1], results[0], torch.float32)


# ---- what users put on a layer before ----


def test_a_forward_that_a_user_set_goes_on_being_called() -> None:
    """As accelerate's dispatch sets it, too; the other layers are replaced."""
    model, calls = BY_NAME["llama"].make(), []
    mlp, linear = model.model.layers[1].mlp, model.model.layers[2].self_attn.q_proj
    mlp.forward, linear.forward = louder(mlp, calls), louder(linear, calls)
    wanted = model(torch.ones(1, 4, dtype=torch.long)).logits
    engine = infuse.init_inference(model, dtype="fp32", quant="int8:16")
    assert not isinstance(model.model.layers[1], Block) and isinstance(model.model.layers[0], Block)
    assert "mlp has a forward set on the instance" in str(engine.plan)
    assert model.model.layers[2].self_attn.q_proj is linear, "not quantized: its forward is the user's"
    calls.clear()
    with torch.no_grad():
        assert_near(engine(torch.ones(1, 4, dtype=torch.long)).logits, wanted, torch.bfloat16)
    assert calls == [linear, mlp] or calls == [mlp, linear]


def louder(module: nn.Module, calls: list[nn.Module]) -> Any:
    forward = module.forward

    def own(*args: Any) -> Any:
        calls.append(module)
        return forward(*args)

    return own


@pytest.mark.parametrize("part", ["", "self_attn", "mlp", "mlp.up_proj", "input_layernorm"])
def test_a_hook_from_before_goes_on_being_heard(part: str) -> None:
    model, heard = BY_NAME["llama"].make(), []
    layer = model.model.layers[0]
    layer.get_submodule(part).register_forward_hook(lambda module, args, out: heard.append(part))
    engine = infuse.init_inference(model, dtype="fp32")
    heard.clear()
    with torch.no_grad():
        engine(torch.ones(1, 4, dtype=torch.long))
    assert heard == [part]
    assert isinstance(model.model.layers[0], Block) == (part in ("", "self_attn")), str(engine.plan)


@pytest.mark.parametrize("name", ["gpt-neo", "mpt", "gptj", "llama"])
def test_rows_of_padding_equal_the_originals(name: str) -> None:
    """Each family's way with a query that sees nothing: zeros, all keys alike, or all up to itself."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    given = dict(input_ids=torch.randint(3, 96, (2, 12)), attention_mask=mask, output_hidden_states=True)
    models = BY_NAME[name].make(), infuse.init_inference(BY_NAME[name].make(), dtype="fp32", verify="off")
    with torch.no_grad():
        wanted, found = (model(**given).hidden_states for model in models)
    for one, other in zip(found, wanted, strict=True):
        assert_near(one, other, torch.float32)


def test_gpt_neo_keeps_its_causal_order_under_any_mask() -> None:
    """Its layers hide later tokens themselves; those of other families take a mask's word for it."""
    mask = torch.zeros(1, 1, 9, 9).masked_fill_(torch.ones(9, 9).triu(5).bool(), torch.finfo(torch.float32).min)
    ids = torch.randint(3, 96, (1, 9))
    models = BY_NAME["gpt-neo"].make(), infuse.init_inference(BY_NAME["gpt-neo"].make(), dtype="fp32", verify="off")
    with torch.no_grad():
        wanted, found = (model(ids, attention_mask=mask, use_cache=False).logits for model in models)
    assert_near(found, wanted, torch.float32)


# ---- layers that stay: the attention hook ----


def generated(model: Any, cache: str, **more: Any) -> Tensor:
    prompt = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(5))
    return model.generate(prompt, max_new_tokens=6, do_sample=False, cache_implementation=cache, **more)


@pytest.mark.parametrize("name", HOOKED)
@pytest.mark.usefixtures("unread")
def test_layers_that_stay_fill_a_static_cache_as_before(name: str) -> None:
    model = hooked(name)
    wanted = generated(model, "static")
    engine = infuse.init_inference(model, dtype="fp32")
    assert "attention" in {step.depth for step in engine.plan.steps}, str(engine.plan)
    assert torch.equal(generated(engine.module, "static"), wanted)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    padded = generated(hooked(name), "static", attention_mask=mask)
    assert torch.equal(generated(engine.module, "static", attention_mask=mask), padded)


SETTLED: dict[str, float] = {
    "self_attn.scaling": 0.5,
    "self_attn.layer_idx": 0,
    "self_attn.is_causal": False,
    "mlp.router.top_k": 1,
    "mlp.top_k": 1,
    "mlp.experts.num_experts": 2,
}


@pytest.mark.parametrize(
    "copied", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_numbers_with_which_a_layer_was_replaced_do_not_change_in_silence(copied: Any) -> None:
    """The original would compute something else from then on."""
    model = copied(infuse.init_inference(BY_NAME["mixtral"].make(), dtype="fp32", verify="off").module)
    for name, value in SETTLED.items():
        path, _, name = name.rpartition(".")
        part = model.model.layers[1].get_submodule(path)
        before = getattr(part, name)
        with pytest.raises(infuse.UnsupportedCall, match=f"{name} = {value}: .* was {before}"):
            setattr(part, name, value)
        setattr(part, name, before)
        part.attention_dropout = 0.3  # not of inference


# ---- keywords that a model passes through its layers, which ignore them ----

_PICTURES = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, image_size=16,
                 patch_size=8, projection_dim=48)  # fmt: skip
_TEXT = dict(GQA, num_hidden_layers=2)


def video_llava() -> tuple[Any, dict[str, Any]]:
    config = t.VideoLlavaConfig(
        text_config=t.LlamaConfig(**_TEXT),
        vision_config=t.CLIPVisionConfig(**_PICTURES),
        image_token_index=95,
        video_token_index=94,
        image_seq_length=4,
    )
    ids = torch.randint(3, 90, (1, 60), generator=torch.Generator().manual_seed(1))
    ids[:, 1:41] = 94
    videos = torch.randn(1, 8, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    return t.VideoLlavaForConditionalGeneration(config), {"input_ids": ids, "pixel_values_videos": videos}


def janus() -> tuple[Any, dict[str, Any]]:
    sizes = dict(_PICTURES, mlp_ratio=2.0, num_image_tokens=4)
    codes = dict(
        embed_dim=8, num_embeddings=32, base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1,
        latent_channels=8, projection_dim=48, image_token_embed_dim=48, num_hidden_layers=2, hidden_size=48,
    )  # fmt: skip
    config = t.JanusConfig(
        text_config=t.LlamaConfig(**_TEXT),
        vision_config=t.JanusVisionConfig(**sizes),
        vq_config=t.JanusVQVAEConfig(**codes),
        image_token_id=95,
    )
    ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(1))
    ids[:, 1:5] = 95
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    return t.JanusForConditionalGeneration(config), {
        "input_ids": ids,
        "pixel_values": pixels,
        "generation_mode": "text",
    }


@torch.no_grad()
@pytest.mark.parametrize("make", [video_llava, janus])
def test_a_keyword_that_the_layers_take_and_ignore(make: Any) -> None:
    torch.manual_seed(0)
    model, given = make()
    enlarge(model.eval())
    wanted = model(**given).logits
    engine = infuse.init_inference(copy.deepcopy(model), dtype="fp32")
    assert sum(step.depth == "block" for step in engine.plan.steps) >= 2
    found = engine(**given).logits
    assert float((found - wanted).norm() / wanted.norm()) < 5e-5
    answers = [each.generate(**given, max_new_tokens=4, do_sample=False) for each in (model, engine)]
    assert torch.equal(*answers)
    assert torch.equal(engine(**given, nobody_names_this=torch.ones(1)).logits, found)
    with pytest.raises(infuse.UnsupportedCall, match="softcap"):  # which attention functions read
        engine(**given, softcap=30.0)
