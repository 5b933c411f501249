"""The config of a GGUF file's model, as keys and values of transformers' configs.

Sizes that tensors show are taken from the tensors. Nothing of transformers is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from infuse.ground.errors import CheckpointError
from infuse.weights.gguf.families import family_of
from infuse.weights.gguf.file import GGUFFile
from infuse.weights.gguf.gemma4 import gemma4
from infuse.weights.gguf.hybrids import HYBRIDS
from infuse.weights.gguf.metadata import DEFAULT_BASE, PATTERN, Metadata, layer_of
from infuse.weights.gguf.mixtures import MIXTURES
from infuse.weights.gguf.needed import refuse_missing
from infuse.weights.gguf.rotary import FACTORS, has_factors, partly_rotated, rotation
from infuse.weights.gguf.settings import causal_lm, experts, granite_scales, layer_types

# Blocks of the models whose queries are scaled by the width of a head as if heads tiled the hidden state; others by the
# head's own width. The files do not say it: llama.cpp knows these sizes too.
_GEMMA2_27B_BLOCKS, _GEMMA3_27B_BLOCKS = 46, 62
_EXAONE4_32B = 4096  # the window of the model with 64 blocks, in llama.cpp too if a file does not say it
_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
# Keys that change what a model computes, and the architectures whose configs have a value for them.
_TAKEN_BY: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "rope.dimension_count": ("phi3", "stablelm", "nemotron", "qwen35", "qwen35moe", "qwen3next", "glm4", "glm4moe",
                             "deepseek2"),
    PATTERN: ("gemma2", "gemma3", "gpt-oss", "cohere2", "exaone4", "gemma4"),
    "attention.scale": ("granite", "granitehybrid"),
    "logit_scale": ("granite", "granitehybrid", "command-r", "cohere2"),
    "embedding_scale": ("granite", "granitehybrid"),
    "residual_scale": ("granite", "granitehybrid"),
    "attention.sliding_window": ("mistral", "gemma2", "gemma3", "phi3", "gpt-oss", "cohere2", "exaone4",
                                 "gemma4"),
    "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": ("gemma2", "gemma3", "gemma4"),
    "expert_weights_scale": ("lfm2moe", "glm4moe", "deepseek2"),
    "attention.temperature_scale": (),
})  # fmt: skip
# Keys that need not be looked up: tensors show what they say, or they say nothing of what a model computes.
HARMLESS = frozenset((
    "vocab_size", "context_length", "attention.value_length", "feed_forward_length", "expert_feed_forward_length",
    "expert_shared_feed_forward_length", "use_parallel_residual", "tensor_data_layout", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "attention.recurrent_layers", "full_attention_interval",
    "attention.value_length_swa",
))  # fmt: skip
_CLOSE = 1e-5  # relative: scales are stored in float32


def config_values(files: tuple[GGUFFile, ...]) -> dict[str, Any]:
    """`model_type` and the values of its config in transformers; CheckpointError for what is missing or not known."""
    return _values(_metadata(files))


def config_notes(files: tuple[GGUFFile, ...]) -> tuple[str, ...]:
    """Notes for a plan: the keys that the config is not made of, or why there is no config of these files."""
    meta = _metadata(files)
    try:
        _values(meta)
    except CheckpointError as error:
        return (f"the model's own config is not compared with the GGUF file's, which cannot be made: {error}",)
    notes = []
    if left := meta.not_asked(HARMLESS):
        notes.append(f"keys of the GGUF file that are not used: {', '.join(left)}")
    if unused := [name for name in meta.entries if (place := layer_of(name)) is not None and place >= meta.layers]:
        notes.append(f"{len(unused)} tensors of the GGUF file that predict further tokens are not used: {unused[0]}, …")
    return tuple(notes)


def _metadata(files: tuple[GGUFFile, ...]) -> Metadata:
    architecture, _ = family_of(files[0].values, files[0].path)
    return Metadata(files, architecture)


def _values(meta: Metadata) -> dict[str, Any]:
    files, architecture = meta.files, meta.architecture
    refuse_missing(meta)
    values = _of_all(meta)
    _refuse_dropped(meta)
    for key, name in _IDS.items():
        values[key] = files[0].values.get(f"tokenizer.ggml.{name}")
    end_of_turn = files[0].values.get("tokenizer.ggml.eot_token_id")
    if end_of_turn not in (None, values["eos_token_id"]):
        values["eos_token_id"] = [one for one in (values["eos_token_id"], end_of_turn) if one is not None]
    epsilon = meta.get("attention.layer_norm_rms_epsilon", None)
    return values | ({} if epsilon is None else {"rms_norm_eps": epsilon}) | OF_ARCHITECTURE[architecture](meta)


def _of_all(meta: Metadata) -> dict[str, Any]:
    heads = meta.get("attention.head_count")
    first = [0] if meta.architecture == "gemma4" else None  # whose layers differ; its own values replace these
    return {
        "model_type": meta.architecture,
        "vocab_size": meta.rows("token_embd.weight") or meta.get("vocab_size"),
        "hidden_size": meta.get("embedding_length"),
        "intermediate_size": _mlp_width(meta, first),
        "num_hidden_layers": meta.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", heads, first),
        "head_dim": meta.head_dim,
        "max_position_embeddings": meta.get("context_length"),
        "tie_word_embeddings": not meta.has("output.weight"),
        "rope_parameters": rotation(meta),
    }


def _mlp_width(meta: Metadata, layers: list[int] | None) -> int:
    """The width of MLPs; that of an expert, without effect, if all layers have experts and the file does not say it."""
    if width := meta.get("feed_forward_length", 0, layers):
        return int(width)
    if meta.has_in_a_layer("ffn_up.weight") or not meta.stores("expert_feed_forward_length"):
        raise meta.missing("feed_forward_length")
    return int(meta.get("expert_feed_forward_length"))


def _refuse_dropped(meta: Metadata) -> None:
    """Raise CheckpointError for all keys that have no place in the config and would change what the model computes."""
    context = meta.get("context_length")
    harmless: dict[str, tuple[float, ...]] = {
        "rope.dimension_count": (meta.head_dim,),
        "attention.scale": (0, meta.head_dim**-0.5),
        "logit_scale": (0, 1),
        "embedding_scale": (0, 1),
        "residual_scale": (0, 1),
        PATTERN: (),
        "attention.sliding_window": (0, max(meta.get("attention.sliding_window", 0), context)),
        "attn_logit_softcapping": (0,),
        "final_logit_softcapping": (0,),
        "expert_weights_scale": (0, 1),
        "attention.temperature_scale": (0,),
    }
    faults = []
    for key, architectures in _TAKEN_BY.items():
        if meta.architecture in architectures or not meta.stores(key):
            continue
        if harmless[key] and any(math.isclose(meta.get(key), one, rel_tol=_CLOSE) for one in harmless[key]):
            continue
        possible = " or ".join(f"{one:.12g}" for one in harmless[key]) or "none"
        value = meta.of_layers(key) or meta.get(key)
        faults.append(f"{meta.architecture}.{key} is {str(value):.40} (possible: {possible})")
    if faults:
        what = f"keys that a {meta.architecture} of transformers has no value for"
        raise CheckpointError(f"{meta.files[0].path}: has {what}: {'; '.join(faults)}")
    factors = [tensor for tensor in FACTORS.values() if meta.has(tensor)]
    if factors and not has_factors(meta):
        possible = f"{' and '.join(FACTORS.values())} in plain numbers, of phi3"
        told = f"a {meta.architecture} has {', '.join(factors)}"
        raise CheckpointError(f"{meta.files[0].path}: {told}; possible: {possible}")


def _llama(meta: Metadata) -> dict[str, Any]:
    if count := meta.get("expert_count", 0):
        used = meta.get("expert_used_count")
        return {"model_type": "mixtral", "num_local_experts": count, "num_experts_per_tok": used} | causal_lm("Mixtral")
    biases = {"attention_bias": meta.has("blk.0.attn_q.bias"), "mlp_bias": meta.has("blk.0.ffn_up.bias")}
    return {"model_type": "llama"} | biases | causal_lm("Llama")


def _mistral(meta: Metadata) -> dict[str, Any]:
    return {"sliding_window": meta.get("attention.sliding_window", 0) or None} | causal_lm("Mistral")


def _granite(meta: Metadata) -> dict[str, Any]:
    return {"attention_bias": meta.has("blk.0.attn_q.bias")} | granite_scales(meta) | causal_lm("Granite")


def _biased(name: str) -> Callable[[Metadata], dict[str, Any]]:
    """A model whose attention has biases if the file has them."""
    return lambda meta: {"attention_bias": meta.has("blk.0.attn_q.bias")} | causal_lm(name)


def _qwen2moe(meta: Metadata) -> dict[str, Any]:
    shared = meta.rows("blk.0.ffn_gate_shexp.weight") or meta.get("expert_shared_feed_forward_length")
    own = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": shared, "norm_topk_prob": False}
    return experts(meta) | own | causal_lm("Qwen2Moe")


def _qwen3moe(meta: Metadata) -> dict[str, Any]:
    # llama.cpp runs every file of this architecture with weights that sum to 1.
    own = {"model_type": "qwen3_moe", "norm_topk_prob": True, "attention_bias": meta.has("blk.0.attn_q.bias")}
    return experts(meta) | own | causal_lm("Qwen3Moe")


def _gemma2(meta: Metadata) -> dict[str, Any]:
    return (
        {
            "sliding_window": meta.get("attention.sliding_window", 4096),
            "attn_logit_softcapping": meta.get("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": meta.get("final_logit_softcapping", 30.0),
            "query_pre_attn_scalar": _query_scale(meta, _GEMMA2_27B_BLOCKS),
        }
        | layer_types(meta)
        | causal_lm("Gemma2")
    )


def _gemma3(meta: Metadata) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": meta.get("rope.freq_base_swa", DEFAULT_BASE)}
    return (
        {
            "model_type": "gemma3_text",
            "sliding_window": meta.get("attention.sliding_window"),
            "final_logit_softcapping": meta.get("final_logit_softcapping", None),
            "query_pre_attn_scalar": _query_scale(meta, _GEMMA3_27B_BLOCKS),
            "rope_parameters": {"full_attention": rotation(meta), "sliding_attention": local},
        }
        | layer_types(meta)
        | causal_lm("Gemma3")
    )


def _query_scale(meta: Metadata, blocks_of_27b: int) -> int:
    if meta.get("block_count") == blocks_of_27b:
        return meta.get("embedding_length") // meta.get("attention.head_count")
    return meta.head_dim


def _phi3(meta: Metadata) -> dict[str, Any]:
    original = meta.get("rope.scaling.original_context_length", 0) or meta.get("context_length")
    rotated = partly_rotated(meta) | {"original_max_position_embeddings": original}
    if has_factors(meta):
        if rotated["rope_type"] != "default":
            told = "longrope or none, beside rope_factors"
            raise meta.fault("rope.scaling.type", meta.get("rope.scaling.type", "linear"), told)
        read = {
            f"{name}_factor": file.read(tensor).tolist()
            for name, tensor in FACTORS.items()
            for file in meta.files
            if tensor in file.stored
        }
        rotated |= read | {"rope_type": "longrope"}
        if meta.stores("rope.scaling.attn_factor"):
            rotated["attention_factor"] = float(meta.get("rope.scaling.attn_factor"))
    return {
        "original_max_position_embeddings": original,
        "sliding_window": meta.get("attention.sliding_window", 0) or None,
        "rope_parameters": rotated,
    } | causal_lm("Phi3")


def _gpt_oss(meta: Metadata) -> dict[str, Any]:
    rotated = rotation(meta)
    if rotated["rope_type"] == "yarn":
        rotated = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} | rotated
    return (
        {
            "model_type": "gpt_oss",
            "intermediate_size": meta.rows("blk.0.ffn_gate_exps.weight") or meta.get("expert_feed_forward_length"),
            "num_local_experts": meta.get("expert_count"),
            "num_experts_per_tok": meta.get("expert_used_count"),
            "sliding_window": meta.get("attention.sliding_window"),
            "rope_parameters": rotated,
        }
        | layer_types(meta)
        | causal_lm("GptOss")
    )


def _cohere(meta: Metadata) -> dict[str, Any]:
    own = {"model_type": "cohere", "use_qk_norm": meta.has("blk.0.attn_q_norm.weight")}
    return own | _scaled_logits(meta) | causal_lm("Cohere")


def _cohere2(meta: Metadata) -> dict[str, Any]:
    own = {"sliding_window": meta.get("attention.sliding_window")} | layer_types(meta)
    return own | _scaled_logits(meta) | causal_lm("Cohere2")


def _scaled_logits(meta: Metadata) -> dict[str, Any]:
    return {"layer_norm_eps": meta.get("attention.layer_norm_epsilon"), "logit_scale": meta.get("logit_scale")}


def _stablelm(meta: Metadata) -> dict[str, Any]:
    return {
        "layer_norm_eps": meta.get("attention.layer_norm_epsilon"),
        "use_qkv_bias": meta.has("blk.0.attn_q.bias"),
        "use_parallel_residual": not meta.has("blk.0.ffn_norm.weight"),
        "qk_layernorm": meta.has("blk.0.attn_q_norm.weight"),
        "rope_parameters": partly_rotated(meta),
    } | causal_lm("StableLm")


def _starcoder2(meta: Metadata) -> dict[str, Any]:
    biased = meta.has("blk.0.attn_q.bias")
    return {"norm_epsilon": meta.get("attention.layer_norm_epsilon"), "use_bias": biased} | causal_lm("Starcoder2")


def _nemotron(meta: Metadata) -> dict[str, Any]:
    return {"norm_eps": meta.get("attention.layer_norm_epsilon"), "rope_parameters": partly_rotated(meta)} | causal_lm(
        "Nemotron"
    )


def _glm4(meta: Metadata) -> dict[str, Any]:
    if (sections := meta.listed("rope.dimension_sections")) is not None:  # rows of queries and keys are then permuted
        raise meta.fault("rope.dimension_sections", sections, "none: a text model")
    biased = {"attention_bias": meta.has("blk.0.attn_q.bias")}
    return {"rope_parameters": partly_rotated(meta)} | biased | causal_lm("Glm4")


def _ernie4_5(meta: Metadata) -> dict[str, Any]:
    return {"use_bias": meta.has("blk.0.attn_q.bias")} | causal_lm("Ernie4_5")


def _exaone4(meta: Metadata) -> dict[str, Any]:
    window = meta.get("attention.sliding_window", 0) or (_EXAONE4_32B if meta.get("block_count") == 64 else None)
    if window is None:
        return {"sliding_window": None, "layer_types": ["full_attention"] * meta.layers} | causal_lm("Exaone4")
    return {"sliding_window": window, "sliding_window_pattern": 4} | layer_types(meta) | causal_lm("Exaone4")


def _hunyuan(meta: Metadata) -> dict[str, Any]:
    own = {"model_type": "hunyuan_v1_dense", "attention_bias": meta.has("blk.0.attn_q.bias")}
    return own | causal_lm("HunYuanDenseV1")


OF_ARCHITECTURE: Mapping[str, Callable[[Metadata], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _llama,
        "mistral": _mistral,
        "granite": _granite,
        "smollm3": _biased("SmolLM3"),
        "qwen2": lambda meta: causal_lm("Qwen2"),
        "qwen3": _biased("Qwen3"),
        "qwen2moe": _qwen2moe,
        "qwen3moe": _qwen3moe,
        "gemma": lambda meta: causal_lm("Gemma"),
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "phi3": _phi3,
        "gpt-oss": _gpt_oss,
        "olmo2": _biased("Olmo2"),
        "command-r": _cohere,
        "cohere2": _cohere2,
        "stablelm": _stablelm,
        "starcoder2": _starcoder2,
        "nemotron": _nemotron,
        "gemma4": gemma4,
        "glm4": _glm4,
        "ernie4_5": _ernie4_5,
        "exaone4": _exaone4,
        "hunyuan-dense": _hunyuan,
        **HYBRIDS,
        **MIXTURES,
    }
)
