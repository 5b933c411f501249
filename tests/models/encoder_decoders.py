"""Tiny models of an encoder and a decoder that reads it: the case list of their tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t
from torch import Tensor

from tests.models.families import Family, enlarge

_TEXT = dict(
    d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=80, decoder_ffn_dim=72, vocab_size=96, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, decoder_start_token_id=2,
)  # fmt: skip
_SPEECH = {name: value for name, value in _TEXT.items() if name != "max_position_embeddings"}
_WHISPER = dict(_SPEECH, num_mel_bins=16, max_source_positions=20, max_target_positions=64,
                suppress_tokens=None, begin_suppress_tokens=None)  # fmt: skip
_SPEECH_TO_TEXT = dict(_TEXT, input_feat_per_channel=16, max_source_positions=64, max_target_positions=64,
                       conv_channels=32)  # fmt: skip

_T5 = dict(d_model=48, d_kv=8, d_ff=80, num_layers=2, num_heads=4, vocab_size=96, decoder_start_token_id=0,
           relative_attention_num_buckets=8, relative_attention_max_distance=11)  # fmt: skip

TEXTS = [
    Family("bart", t.BartConfig, t.BartForConditionalGeneration, "text", _TEXT),
    Family("plbart", t.PLBartConfig, t.PLBartForConditionalGeneration, "text", _TEXT),
    Family("marian", t.MarianConfig, t.MarianMTModel, "text", _TEXT),
    Family("blenderbot-small", t.BlenderbotSmallConfig, t.BlenderbotSmallForConditionalGeneration, "text", _TEXT),
    Family("mbart", t.MBartConfig, t.MBartForConditionalGeneration, "text", _TEXT),
    Family("pegasus", t.PegasusConfig, t.PegasusForConditionalGeneration, "text", _TEXT),
    Family("m2m-100", t.M2M100Config, t.M2M100ForConditionalGeneration, "text", _TEXT),
    Family("blenderbot", t.BlenderbotConfig, t.BlenderbotForConditionalGeneration, "text", _TEXT),
]
T5 = [
    Family("t5", t.T5Config, t.T5ForConditionalGeneration, "text", _T5),
    Family("t5-gated", t.T5Config, t.T5ForConditionalGeneration, "text", dict(_T5, feed_forward_proj="gated-gelu")),
    Family("mt5", t.MT5Config, t.MT5ForConditionalGeneration, "text", _T5),
    Family("umt5", t.UMT5Config, t.UMT5ForConditionalGeneration, "text", _T5),
]
_SWITCH = dict(
    d_model=48, d_kv=8, d_ff=40, num_heads=4, num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1, num_experts=4, vocab_size=96, decoder_start_token_id=2, pad_token_id=0,
    relative_attention_num_buckets=8, relative_attention_max_distance=11,
)  # fmt: skip
_NLLB_MOE = dict(_TEXT, encoder_sparse_step=2, decoder_sparse_step=2, num_experts=4)
MIXTURES = [
    Family("switch", t.SwitchTransformersConfig, t.SwitchTransformersForConditionalGeneration, "text", _SWITCH),
    Family("switch-dropping", t.SwitchTransformersConfig, t.SwitchTransformersForConditionalGeneration, "text",
           dict(_SWITCH, num_sparse_encoder_layers=2, expert_capacity=2, router_bias=True)),
    Family("nllb-moe", t.NllbMoeConfig, t.NllbMoeForConditionalGeneration, "text", _NLLB_MOE),
    Family("nllb-moe-dropping", t.NllbMoeConfig, t.NllbMoeForConditionalGeneration, "text",
           dict(_NLLB_MOE, moe_eval_capacity_token_fraction=0.3, batch_prioritized_routing=True)),
]  # fmt: skip
SPEECH = [
    Family("whisper", t.WhisperConfig, t.WhisperForConditionalGeneration, "speech", _WHISPER),
    Family("speech-to-text", t.Speech2TextConfig, t.Speech2TextForConditionalGeneration, "speech", _SPEECH_TO_TEXT),
]
_SEAMLESS = dict(
    hidden_size=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=80, decoder_ffn_dim=72, vocab_size=96, max_position_embeddings=64, pad_token_id=0,
    decoder_start_token_id=3,
)  # fmt: skip
_MOONSHINE = dict(
    hidden_size=72, intermediate_size=64, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
    encoder_num_attention_heads=2, decoder_num_attention_heads=2, encoder_num_key_value_heads=2,
    decoder_num_key_value_heads=2, vocab_size=96, max_position_embeddings=64,
)  # fmt: skip
_GEMMA = dict(vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=5)  # fmt: skip
_BERT = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, vocab_size=96,
             max_position_embeddings=64)  # fmt: skip
_VIT = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, image_size=16,
            patch_size=4)  # fmt: skip
_TROCR = dict(d_model=48, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=72, vocab_size=96,
              max_position_embeddings=64, cross_attention_hidden_size=48)  # fmt: skip


def _t5gemma(**values: Any) -> Any:
    return t.T5GemmaConfig(encoder=dict(_GEMMA), decoder=dict(_GEMMA, cross_attention_hidden_size=48), vocab_size=96)


def _t5gemma2(**values: Any) -> Any:
    text = dict(_GEMMA, vocab_size=104, layer_types=["sliding_attention", "full_attention"], pad_token_id=0)
    pictures = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    encoder = dict(
        text_config=text, vision_config=pictures, image_token_index=100, boi_token_index=101, eoi_token_index=102
    )
    return t.T5Gemma2Config(encoder=encoder, decoder=text, image_token_index=100, eoi_token_index=102, **values)


def _two_berts(**values: Any) -> Any:
    halves = t.BertConfig(**_BERT), t.BertConfig(**_BERT)
    return t.EncoderDecoderConfig.from_encoder_decoder_configs(*halves, decoder_start_token_id=2, pad_token_id=0)


def _trocr(**values: Any) -> Any:
    halves = t.ViTConfig(**_VIT), t.TrOCRConfig(**_TROCR)
    return t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*halves, decoder_start_token_id=2, pad_token_id=0)


def _vit_gpt2(**values: Any) -> Any:
    halves = t.ViTConfig(**_VIT), t.GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=96, n_positions=64)
    return t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*halves, decoder_start_token_id=2, pad_token_id=0)


MORE = [
    Family("bigbird-pegasus", t.BigBirdPegasusConfig, t.BigBirdPegasusForConditionalGeneration, "text",
           dict(_TEXT, attention_type="original_full")),
    Family("seamless", t.SeamlessM4TConfig, t.SeamlessM4TForTextToText, "text", _SEAMLESS),
    Family("seamless-v2", t.SeamlessM4Tv2Config, t.SeamlessM4Tv2ForTextToText, "text", _SEAMLESS),
    Family("t5gemma", _t5gemma, t.T5GemmaForConditionalGeneration, "text"),  # type: ignore[arg-type]
    Family("t5gemma2", _t5gemma2, t.T5Gemma2ForConditionalGeneration, "text"),  # type: ignore[arg-type]
    Family("two-berts", _two_berts, t.EncoderDecoderModel, "text"),  # type: ignore[arg-type]
    Family("trocr", _trocr, t.VisionEncoderDecoderModel, "vision"),  # type: ignore[arg-type]
    Family("vit-gpt2", _vit_gpt2, t.VisionEncoderDecoderModel, "vision"),  # type: ignore[arg-type]
    Family("moonshine", t.MoonshineConfig, t.MoonshineForConditionalGeneration, "speech", _MOONSHINE),
]  # fmt: skip
# Each has the layers of BART, MBart, T5 or SeamlessM4T, and computes in float32 in every run; more, with --variants.
RELATIVES = frozenset({"plbart", "marian", "blenderbot-small", "pegasus", "blenderbot", "mt5", "seamless-v2"})
ENCODER_DECODERS = [*TEXTS, *T5, *MIXTURES, *SPEECH, *MORE]
BY_NAME = {family.name: family for family in ENCODER_DECODERS}
# The families of the fast gate (tests/support/gate.py): each kind of encoder, decoder and position.
COVERING = frozenset({"bart", "t5", "whisper", "switch-dropping", "moonshine", "trocr", "t5gemma2"})


def made(family: Family, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """The model, which never ends an answer by itself."""
    model = family.make(seed, **changes)
    enlarge(model)
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def encoded(family: Family, batch: int = 3, padding: str | None = None, seed: int = 1) -> dict[str, Tensor]:
    """Arguments for the encoder; `padding` "left" or "right" hides three tokens of the first text."""
    generator = torch.Generator().manual_seed(seed)
    if family.name == "whisper":
        return {"input_features": torch.randn(batch, 16, 40, generator=generator)}
    if family.name == "moonshine":
        return {"input_values": torch.randn(batch, 4000, generator=generator)}
    if family.kind == "vision":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}
    mask = torch.ones(batch, 11, dtype=torch.long)
    if padding:
        mask[0, slice(3) if padding == "left" else slice(-3, None)] = 0
    if family.kind == "speech":
        return {"input_features": torch.randn(batch, 11, 16, generator=generator), "attention_mask": mask}
    return {"input_ids": torch.randint(3, 96, (batch, 11), generator=generator), "attention_mask": mask}


def both(family: Family, tokens: int = 5, **given: Any) -> dict[str, Tensor]:
    """Arguments for the whole model."""
    inputs = encoded(family, **given)
    batch = len(next(iter(inputs.values())))
    generator = torch.Generator().manual_seed(7)
    return inputs | {"decoder_input_ids": torch.randint(3, 96, (batch, tokens), generator=generator)}
