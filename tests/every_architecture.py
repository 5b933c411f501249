"""Tiny models of every architecture of transformers whose config says by the names of its numbers what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as t
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from infuse.architectures.model_inputs import random_inputs

# The names that configs give to their numbers, by what is asked of them here.
NUMBERS: dict[int, str] = {
    32: """hidden_size d_model n_embd dim embed_dim encoder_hidden_size decoder_hidden_size word_embed_proj_dim \
embedding_size d_embed
        emb_dim text_embed_dim projection_dim hidden_dim attention_hidden_size lru_width backbone_hidden_size \
head_hidden_size""",
    48: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size \
moe_intermediate_size inner_dim
        shared_expert_intermediate_size moe_shared_expert_intermediate_size dim_feedforward mlp_dim \
encoder_feed_forward_size
        intermediate_size_mlp mamba_d_ssm mamba_chunk_size""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
        num_encoder_attention_heads num_decoder_attention_heads num_local_experts num_experts n_routed_experts \
moe_num_experts""",
    6: "mamba_n_heads",
    2: """num_hidden_layers n_layer n_layers num_layers hidden_layers encoder_layers decoder_layers \
num_encoder_layers num_decoder_layers
        num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token top_k moe_topk moe_k""",
    8: """head_dim d_kv attention_head_size kv_channels qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim \
q_lora_rank kv_lora_rank
        patch_size num_mel_bins feature_size global_head_dim input_feat_per_channel""",
    16: "image_size qk_head_dim",
    1: "n_group topk_group first_k_dense_replace",
    96: "vocab_size",
    64: (
        "max_position_embeddings n_positions max_source_positions max_target_positions n_ctx max_sequence_length "
        "max_seq_len"
    ),
}
# Windows, budgets and blocks of attention: so short that a text of TOKENS is longer than each of them.
SHORT: dict[int, str] = {
    8: """sliding_window sliding_window_size attention_window_size keep_window_size local_attention
        attention_chunk_size max_window_size local_transformer_stride""",
    12: "relative_attention_max_distance segment_means_seq_len",
    4: """index_topk index_block_size global_block_size local_radius attention_window num_landmarks
        position_bias_num_buckets context_size""",
    2: "block_size index_topk_blocks",
    1: "num_random_blocks index_local_blocks max_window_layers",
}
TOKENS = 24
NEEDED = ("head_dim", "num_experts_per_tok", "sliding_window")  # which are None in some configs
BY_NAME = {name: number for number, names in (*NUMBERS.items(), *SHORT.items()) for name in names.split()}
TOKEN_IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


def tiny_config(cls: type) -> Any:
    """A small config of a class: its numbers by their names, lists of numbers for layers cut to two."""
    plain = cls()
    values: dict[str, Any] = {}
    for name, value in plain.to_dict().items():
        if name in BY_NAME and (type(value) is int or name in NEEDED):
            values[name] = BY_NAME[name]
        elif name == "compress_rates":
            values[name] = {kind: min(rate, BY_NAME["index_topk"]) for kind, rate in value.items()}
        elif name == "use_sliding_window":
            values[name] = True
        elif name == "image_size" and isinstance(value, list):
            values[name] = [BY_NAME[name]] * len(value)
        elif name in TOKEN_IDS and isinstance(value, (int, list)):
            values[name] = TOKEN_IDS[name]
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type", "block_types") and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            if len(kinds) > 1 or not hasattr(plain, "use_sliding_window"):
                values[name] = (kinds * 2)[:2] if len(kinds) > 1 else value[:2]
    if "kv_lora_rank" in values and "num_key_value_heads" in values:  # latent attention has as many as heads
        values["num_key_value_heads"] = BY_NAME["num_attention_heads"]
    for name in getattr(cls, "sub_configs", {}):
        held = getattr(plain, name, None)
        if held is not None:
            values[name] = tiny_config(type(held))
    return cls(**values)


def not_tiny() -> dict[str, str]:
    """The model types that cannot be made tiny here, and why."""
    text = (Path(__file__).parent / "architectures_not_tiny.txt").read_text(encoding="utf-8")
    return dict(line.split(": ", 1) for line in text.splitlines() if not line.startswith("#"))


def architectures() -> dict[str, tuple[type, type]]:
    """Model type → its config's class and a model: one for generation where there is one, else the plain one. Not those
    of `not_tiny`.
    """
    away = not_tiny()
    found: dict[str, tuple[type, type]] = {}
    for names in (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
                  auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, auto.MODEL_MAPPING_NAMES):  # fmt: skip
        for kind, name in names.items():
            if kind in found or kind in away:  # not even imported
                continue
            model = getattr(t, name if isinstance(name, str) else name[0], None)
            config = getattr(t, CONFIG_MAPPING_NAMES.get(kind, ""), None)
            if model is not None and config is not None:
                found[kind] = config, model
    return found


LARGEST = 3_000_000  # parameters of a model that is tiny: others have sizes under names that are not above


def tiny_model(config: type, model: type) -> nn.Module:
    """A model with random weights. ValueError: it would not be tiny; or whatever the class raises for such a config."""
    small = tiny_config(config)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model(small).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.1f} million parameters")
    torch.manual_seed(0)
    return model(tiny_config(config)).eval()


@torch.no_grad()
def first_output(model: nn.Module) -> Tensor:
    """What the model gives for random inputs: its first tensor of floating point."""
    inputs = random_inputs(model)
    if hasattr(model.config, "input_feat_per_channel"):
        values = torch.randn(2, 24, model.config.input_feat_per_channel, generator=torch.Generator().manual_seed(1))
        inputs["input_features"] = values.to(next(model.parameters()).dtype)
        inputs.pop("attention_mask", None)
    output = model(**inputs)
    values = output.values() if hasattr(output, "values") else output
    return next(value for value in values if isinstance(value, Tensor) and value.is_floating_point())
