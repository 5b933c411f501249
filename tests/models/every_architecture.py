"""Tiny models of every architecture of transformers whose config says by the names of its numbers what they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from infuse.inputs.model import RandomTensors, model_inputs

PARTS = 8  # of the architectures, for processes to share
# The names that configs give to their numbers, by what is asked of them here.
NUMBERS: dict[int, str] = {
    32: """hidden_size d_model n_embd dim embed_dim encoder_hidden_size decoder_hidden_size word_embed_proj_dim \
embedding_size d_embed
        emb_dim text_embed_dim projection_dim hidden_dim attention_hidden_size lru_width backbone_hidden_size \
head_hidden_size out_hidden_size output_channels""",
    48: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size \
moe_intermediate_size inner_dim
        shared_expert_intermediate_size moe_shared_expert_intermediate_size dim_feedforward mlp_dim \
encoder_feed_forward_size
        intermediate_size_mlp mamba_d_ssm mamba_chunk_size""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
        num_encoder_attention_heads num_decoder_attention_heads num_local_experts num_experts n_routed_experts \
moe_num_experts
        mm_tokens_per_image""",
    6: "mamba_n_heads",
    2: """num_hidden_layers n_layer n_layers num_layers hidden_layers encoder_layers decoder_layers \
num_encoder_layers num_decoder_layers
        num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token top_k moe_topk moe_k
        image_token_id image_token_index""",
    8: """head_dim d_kv attention_head_size kv_channels qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim \
q_lora_rank kv_lora_rank
        patch_size num_mel_bins feature_size global_head_dim input_feat_per_channel""",
    16: "image_size qk_head_dim",
    1: "n_group topk_group first_k_dense_replace",
    96: "vocab_size unpadded_vocab_size",
    64: (
        "max_position_embeddings n_positions max_source_positions max_target_positions n_ctx max_sequence_length "
        "max_seq_len"
    ),
}
# Windows, budgets and blocks of attention. A text of TOKENS is longer than each of them; that of a proof, of 12 tokens,
# is not, so that a sweep sees what a proof does not.
SHORT: dict[int, str] = {
    20: "relative_attention_max_distance",
    16: """sliding_window sliding_window_size attention_window_size keep_window_size local_attention index_topk
        attention_chunk_size max_window_size local_transformer_stride attention_window global_block_size
        context_size""",
    15: "local_radius",
    12: "segment_means_seq_len",
    4: "index_block_size index_topk_blocks num_landmarks",
    2: "block_size",
    1: "num_random_blocks index_local_blocks max_window_layers",
}
TOKENS = 40
LISTS_OF_NUMBERS = {"image_grid_pinpoints": [[16, 32], [32, 16]], "deepstack_visual_indexes": [0]}
# Lists with one word for each layer, and kinds of layers that the configs' own lists leave out.
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "indexer_types")
OTHER_KINDS = {"layer_types": ("sliding_attention", "minimax_m3_sparse", "conv"), "indexer_types": ("shared",)}
NEEDED = ("head_dim", "num_experts_per_tok")  # which are None in some configs
BY_NAME = {name: number for number, names in (*NUMBERS.items(), *SHORT.items()) for name in names.split()}
TOKEN_IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


def tiny_config(cls: type) -> Any:
    """A small config of a class: its numbers by their names, lists of numbers for layers cut to two."""
    plain = cls()
    values: dict[str, Any] = {}
    given = plain.to_dict()
    kinds = _kinds(cls, "layer_types", given.get("layer_types") or ())
    layers = max(len(kinds), BY_NAME["num_hidden_layers"])
    for name, value in given.items():
        needed = name in NEEDED or (name == "sliding_window" and name in _source(cls))
        if name in BY_NAME and (type(value) is int or needed):
            values[name] = BY_NAME[name]
        elif name == "compress_rates":
            values[name] = {kind: min(rate, 8) for kind, rate in value.items()}
        elif name == "rope_parameters" and "qk_rope_head_dim" in given and "mrope_section" in (value or {}):
            half = BY_NAME["qk_rope_head_dim"] // 2  # in three sections: time, height, width
            values[name] = {**value, "mrope_section": [half - half // 4 * 2, half // 4, half // 4]}
        elif name == "rope_parameters" and value and "mrope_section" in _source(cls):
            size = (
                BY_NAME["head_dim"]
                if given.get("head_dim")
                else BY_NAME["hidden_size"] // BY_NAME["num_attention_heads"]
            )
            half = int(size * value.get("partial_rotary_factor", 1.0)) // 2
            values[name] = {**value, "mrope_section": [half - half // 4 * 2, half // 4, half // 4]}
        elif name == "use_sliding_window":
            values[name] = True
        elif name in LISTS_OF_NUMBERS and value:
            values[name] = LISTS_OF_NUMBERS[name]
        elif name in ("image_size", "patch_size") and isinstance(value, (list, tuple)):
            values[name] = [BY_NAME[name]] * len(value)
        elif name in TOKEN_IDS and isinstance(value, (int, list)):
            values[name] = TOKEN_IDS[name]
        elif name in LISTS and isinstance(value, list):
            kinds = _kinds(cls, name, value)
            if len(kinds) > 1 or not hasattr(plain, "use_sliding_window"):
                values[name] = (kinds * layers)[:layers]
    if "kv_lora_rank" in values and "num_key_value_heads" in values:  # latent attention has as many as heads
        values["num_key_value_heads"] = BY_NAME["num_attention_heads"]
    if layers > BY_NAME["num_hidden_layers"]:
        values["num_hidden_layers"] = layers
    if {"v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"} <= values.keys() and (
        given["v_head_dim"] == given["qk_nope_head_dim"] + given["qk_rope_head_dim"]
    ):
        values["v_head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    for name in getattr(cls, "sub_configs", {}):
        held = getattr(plain, name, None)
        if held is not None:
            values[name] = tiny_config(type(held))
    return cls(**values)


def _kinds(cls: type, name: str, value: Sequence[str]) -> list[str]:
    """The kinds of layers in a list of a config, and those of OTHER_KINDS that the model's source knows, too."""
    kinds = list(dict.fromkeys(value))
    if kinds and "hybrid_sliding" not in kinds:
        kinds += [one for one in OTHER_KINDS.get(name, ()) if one not in kinds and f'"{one}"' in _source(cls)]
    return kinds


@cache
def _source(cls: type) -> str:
    """The source of a config's model."""
    found = find_spec(cls.__module__.replace(".configuration_", ".modeling_"))
    return "" if found is None else Path(str(found.origin)).read_text(encoding="utf-8")


def not_tiny() -> dict[str, str]:
    """The model types that cannot be made tiny here, and why."""
    text = (Path(__file__).parent / "architectures_not_tiny.txt").read_text(encoding="utf-8")
    return dict(line.split(": ", 1) for line in text.splitlines() if not line.startswith("#"))


def model_types() -> dict[str, tuple[str, str]]:
    """Model type → the names of its config's class and of a model: one for generation where there is one, else the
    plain one. Nothing is imported.
    """
    found: dict[str, tuple[str, str]] = {}
    for names in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
    ):
        for kind, name in names.items():
            if kind in CONFIG_MAPPING_NAMES:
                found.setdefault(kind, (CONFIG_MAPPING_NAMES[kind], name if isinstance(name, str) else name[0]))
    return found


def architectures() -> dict[str, tuple[type, type]]:
    """Model type → the classes of its config and of its model. Not those of `not_tiny`, which are not even imported."""
    away = not_tiny()
    found: dict[str, tuple[type, type]] = {}
    for kind, names in model_types().items():
        if kind in away:
            continue
        config, model = (getattr(t, name, None) for name in names)
        if config is not None and model is not None:
            found[kind] = config, model
    return found


LARGEST = 3_000_000  # parameters of a model that is tiny: others have sizes under names that are not above


def parts(always: int) -> list[Any]:
    """The numbers of the parts. One always runs, the others with --variants: reading a kind of layer takes seconds."""
    return [pytest.param(part, marks=() if part == always else pytest.mark.variants) for part in range(PARTS)]


def tiny_model(config: type, model: type) -> nn.Module:
    """A model with random weights. ValueError: it would not be tiny; or whatever the class raises for such a config."""
    small = tiny_config(config)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model(small).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.1f} million parameters")
    torch.manual_seed(0)
    return model(tiny_config(config)).eval()


def inputs_of(model: nn.Module, tokens: int | None = None) -> dict[str, Tensor]:
    """Random inputs of a model; a text has `tokens`, or a few."""
    inputs = model_inputs(model, RandomTensors(model), tokens=tokens)
    if hasattr(model.config, "input_feat_per_channel"):
        values = torch.randn(2, 24, model.config.input_feat_per_channel, generator=torch.Generator().manual_seed(1))
        inputs["input_features"] = values.to(next(model.parameters()).dtype)
        inputs.pop("attention_mask", None)
    return inputs


PICTURE = 2  # the id of the tokens in whose place a picture is put; random texts have none


@torch.no_grad()
def with_pictures(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """The inputs with a random picture in each row, given as this model takes them; None for other models."""
    vision = getattr(model.config, "vision_config", None)
    if vision is None or not hasattr(model, "get_image_features") or "input_ids" not in inputs:
        return None
    for picture in _pictures(vision, len(inputs["input_ids"])):
        try:
            features = model.get_image_features(**picture)
            values = getattr(features, "pooler_output", None)
            values = features if values is None else values
            values = values if isinstance(values, Tensor) else torch.cat([one.flatten() for one in values])
            tokens = values.numel() // model.config.get_text_config().hidden_size // len(inputs["input_ids"])
            given = {**inputs, "input_ids": inputs["input_ids"].clone()}
            given["input_ids"][:, 2 : 2 + tokens] = PICTURE
            given |= picture
            if "pixel_values_images" in signature(model.forward).parameters:
                given["pixel_values_images"] = given.pop("pixel_values")
            if "mm_token_type_ids" in signature(model.forward).parameters:
                given["mm_token_type_ids"] = (given["input_ids"] == PICTURE).long()
            if "token_type_ids" in signature(model.forward).parameters:
                given["token_type_ids"] = (given["input_ids"] == PICTURE).long()
            model(**given)
        except Exception:  # as another model takes them
            continue
        return given
    return None


def _pictures(config: Any, batch: int) -> Iterator[dict[str, Tensor]]:
    """A picture for each row: whole, with its size, in tiles, as patches in a grid."""
    generator = torch.Generator().manual_seed(3)
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    size = getattr(config, "image_size", None) or BY_NAME["image_size"]
    size = size if isinstance(size, int) else size[0]
    pixels = torch.randn(batch, channels, size, size, generator=generator)
    sizes = torch.full((batch, 2), size)
    yield {"pixel_values": pixels}
    yield {"pixel_values": pixels, "image_sizes": sizes}
    yield {"pixel_values": pixels[:, None]}
    yield {"pixel_values": pixels[:, None].repeat(1, 3, 1, 1, 1), "image_sizes": sizes}
    patch, grid = getattr(config, "patch_size", None), torch.tensor([[1, 4, 4]] * batch)
    if patch is None:
        return
    patch = patch if isinstance(patch, int) else patch[0]
    for frames in (getattr(config, "temporal_patch_size", None) or 1, 1):
        width = channels * frames * patch * patch
        patches = torch.randn(batch * 16, width, generator=generator)
        yield {"pixel_values": patches, "image_grid_thw": grid}
        yield {"pixel_values": patches.view(-1, channels, patch, patch * frames), "image_grid_thw": grid}


@torch.no_grad()
def first_output(model: nn.Module) -> Tensor:
    """What the model gives for random inputs: its first tensor of floating point."""
    output = model(**inputs_of(model))
    values = output.values() if hasattr(output, "values") else output
    return next(value for value in values if isinstance(value, Tensor) and value.is_floating_point())
