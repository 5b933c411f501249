"""Models that pass more keywords to their layers than these read: pictures' states, or what `generate` was given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.kosmos2.configuration_kosmos2 import Kosmos2Config
from transformers.models.kosmos2.modeling_kosmos2 import Kosmos2ForConditionalGeneration, Kosmos2VisionEncoderLayer
from transformers.models.mllama.configuration_mllama import MllamaConfig
from transformers.models.mllama.modeling_mllama import MllamaForConditionalGeneration, MllamaSelfAttentionDecoderLayer
from transformers.models.parakeet.configuration_parakeet import ParakeetEncoderConfig
from transformers.models.parakeet.modeling_parakeet import ParakeetEncoder, ParakeetEncoderBlock

import infuse
from infuse.ground.cache_names import cache_argument
from infuse.layers.block import Block
from tests.models.families import enlarge

pytestmark = pytest.mark.filterwarnings("ignore:infuse")
EXACT = 5e-5
NAME = cache_argument(Kosmos2ForConditionalGeneration.forward) or ""


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _ids(tokens: int) -> Tensor:
    return torch.randint(5, 90, (2, tokens), generator=torch.Generator().manual_seed(2))


def _enlarged(model: Any) -> Any:
    enlarge(model.eval())
    return model


def mllama() -> tuple[Any, dict[str, Any], type]:
    """Llama 3.2 Vision: two layers of tokens, and one that attends to a picture, whose gate is open here."""
    text = dict(
        vocab_size=96, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=80, max_position_embeddings=128, rope_parameters={"rope_type": "default"}, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, cross_attention_layers=[1],
    )  # fmt: skip
    sight = dict(
        image_size=16, patch_size=4, hidden_size=24, intermediate_layers_indices=[0], vision_output_dim=48,
        num_hidden_layers=2, num_global_layers=1, attention_heads=4, intermediate_size=40,
        supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]], max_num_tiles=2,
    )  # fmt: skip
    model = MllamaForConditionalGeneration(MllamaConfig(text_config=text, vision_config=sight, image_token_index=4))
    _enlarged(model)
    for name, parameter in model.named_parameters():
        if "cross_attn" in name and "gate" in name:
            parameter.data.fill_(0.7)
    ids = _ids(7)
    ids[:, 1] = 4
    return (
        model,
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": _random(2, 1, 2, 3, 16, 16),
            "aspect_ratio_ids": torch.tensor([[2], [3]]),
            "aspect_ratio_mask": torch.ones(2, 1, 2),
            "cross_attention_mask": torch.ones(2, 7, 1, 2),
        },
        MllamaSelfAttentionDecoderLayer,
    )


def kosmos2() -> tuple[Any, dict[str, Any], type]:
    """Its `generate` hands all that it is given to the tower that sees the picture."""
    text = dict(vocab_size=96, embed_dim=48, layers=2, attention_heads=4, ffn_dim=80, max_position_embeddings=64)
    sight = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, image_size=16,
                 patch_size=8)  # fmt: skip
    model = _enlarged(
        Kosmos2ForConditionalGeneration(Kosmos2Config(text_config=text, vision_config=sight, latent_query_num=3))
    )
    ids = _ids(8)
    places = torch.zeros_like(ids)
    places[:, 1:4] = 1
    given = {"pixel_values": _random(2, 3, 16, 16), "input_ids": ids, "image_embeds_position_mask": places}
    return model, given, Kosmos2VisionEncoderLayer


def layers_of(engine: Any, kind: type) -> list[Any]:
    return [part for part in engine.module.modules() if isinstance(part, kind)]


def infused(model: Any, kind: type) -> Any:
    engine = infuse.init_inference(copy.deepcopy(model), dtype="fp32", progress=False)
    layers = layers_of(engine, kind)
    assert layers and all(isinstance(layer, Block) for layer in layers)
    return engine


def assert_near(found: Tensor, exact: Tensor) -> None:
    assert found.shape == exact.shape and float((found - exact).norm() / exact.norm()) < EXACT


@torch.no_grad()
def test_states_of_a_picture_go_to_layers_that_ignore_them() -> None:
    model, given, kind = mllama()
    engine = infused(model, kind)
    exact = model(**given).logits
    assert_near(engine(**given).logits, exact)
    text = {name: given[name] for name in ("input_ids", "attention_mask")}
    assert_near(engine(**text).logits, model(**text).logits)
    assert not torch.allclose(model(**text).logits, exact, atol=1e-3)  # the picture counts
    for more in ({}, {"num_beams": 2}):
        answers = [each.generate(**given, max_new_tokens=6, do_sample=False, **more) for each in (model, engine)]
        assert torch.equal(*answers)


@torch.no_grad()
def test_what_generate_is_given_goes_to_a_tower_that_ignores_it() -> None:
    model, given, kind = kosmos2()
    engine = infused(model, kind)
    assert_near(engine(**given).logits, model(**given).logits)
    more = dict(
        eos_token_id=-1, pad_token_id=0, repetition_penalty=1.3, bad_words_ids=[[7]], remove_invalid_values=True,
        no_repeat_ngram_size=3,
    )  # fmt: skip
    for beams in (1, 2):
        asked = dict(more, num_beams=beams, max_new_tokens=6, do_sample=False)
        assert torch.equal(engine.generate(**given, **asked), model.generate(**given, **asked))
    answers: list[Tensor] = []
    for each in (model, engine):
        asked = dict(max_new_tokens=3, do_sample=False, eos_token_id=-1, return_dict_in_generate=True)
        first = each.generate(**given, **asked)
        later = given | {"input_ids": first.sequences, "image_embeds_position_mask": torch.zeros_like(first.sequences)}
        cached = {NAME: first[NAME], "attention_mask": torch.ones_like(first.sequences)}  # the tower gets it, too
        answers.append(each.generate(**later, **cached, **asked).sequences)
    assert torch.equal(*answers)


@torch.no_grad()
def test_a_mask_of_a_decoder_goes_to_a_conformer_that_ignores_it() -> None:
    sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, conv_kernel_size=5,
                 num_mel_bins=16, subsampling_conv_channels=8)  # fmt: skip
    model = _enlarged(ParakeetEncoder(ParakeetEncoderConfig(**sizes)))
    given = {"input_features": _random(2, 64, 16), "attention_mask": torch.ones(2, 64, dtype=torch.long)}
    engine = infused(model, ParakeetEncoderBlock)
    exact = model(**given).last_hidden_state
    found = engine(**given, decoder_attention_mask=torch.ones(2, 3)).last_hidden_state
    assert_near(found, exact)


@pytest.mark.slow
@torch.no_grad()
def test_a_registered_function_gets_what_the_original_hands_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keyword that a layer takes by name ends there; others go to the attention function."""
    seen: list[set[str]] = []

    def registered(module: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.keys() & {"cross_attention_states", "nobody_names_this"})
        return sdpa_attention_forward(module, *args, **kwargs)

    model, given, kind = mllama()
    engine = infused(model, kind)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "registered", registered)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "registered", sdpa_mask)
    heard = []
    for each in (model, engine.module):
        each.set_attn_implementation("registered")
        each(**given, nobody_names_this=3)
        heard.append(list(seen))
        seen.clear()
    assert heard[0] == heard[1] and {"nobody_names_this"} in heard[0]
