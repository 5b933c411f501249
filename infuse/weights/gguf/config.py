"""The config of a GGUF file's model, as keys and values of transformers' configs.

Sizes that tensors show are taken from the tensors. Nothing of transformers is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from infuse.errors import CheckpointError
from infuse.weights.gguf.file import Entry, GGUFFile
from infuse.weights.gguf.names import DEFAULT_BASE, family_of
from infuse.weights.gguf.rotary import rope_parameters

_MISSING = object()
# Blocks of the models whose queries are scaled by the width of a head as if heads tiled the hidden state; others by the
# head's own width. The files do not say it: llama.cpp knows these sizes too.
_GEMMA2_27B_BLOCKS, _GEMMA3_27B_BLOCKS = 46, 62
_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}


@dataclass(frozen=True)
class Metadata:
    """Keys and tensors of a model's files, looked up for its architecture."""

    files: tuple[GGUFFile, ...]
    architecture: str

    @property
    def entries(self) -> dict[str, Entry]:
        return {name: entry for file in self.files for name, entry in file.entries.items()}

    def has(self, tensor: str) -> bool:
        return any(tensor in file.entries for file in self.files)

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """The value of `key` of the architecture; a list for each layer must have one value, zeros aside."""
        value = self.files[0].values.get(f"{self.architecture}.{key}", default)
        if value is _MISSING:
            raise CheckpointError(f"{self.files[0].path}: has no {self.architecture}.{key}, which the config needs")
        if isinstance(value, list):
            different = {one for one in value if one}
            if len(different) != 1:
                told = f"{self.architecture}.{key} differs between layers"
                raise CheckpointError(f"{self.files[0].path}: {told}: {sorted(different)}; possible: one value")
            return different.pop()
        return value

    def rows(self, tensor: str, axis: int = -2) -> int | None:
        """The size of a tensor along `axis`, None if it is not there."""
        entry = self.entries.get(tensor)
        return None if entry is None or len(entry.shape) < -axis else entry.shape[axis]

    @property
    def head_dim(self) -> int:
        size = self.get("attention.key_length", None)
        width = self.rows("blk.0.attn_q.weight") or self.get("embedding_length")
        return size or width // self.get("attention.head_count")


def config_values(files: tuple[GGUFFile, ...]) -> dict[str, Any]:
    """`model_type` and the values of its config in transformers; CheckpointError for what is missing or not known."""
    architecture, _ = family_of(files[0].values, files[0].path)
    meta = Metadata(files, architecture)
    values = _of_all(meta)
    for key, name in _IDS.items():
        values[key] = files[0].values.get(f"tokenizer.ggml.{name}")
    end_of_turn = files[0].values.get("tokenizer.ggml.eot_token_id")
    if end_of_turn not in (None, values["eos_token_id"]):
        values["eos_token_id"] = [one for one in (values["eos_token_id"], end_of_turn) if one is not None]
    epsilon = meta.get("attention.layer_norm_rms_epsilon", None)
    return values | ({} if epsilon is None else {"rms_norm_eps": epsilon}) | OF_ARCHITECTURE[architecture](meta)


def _of_all(meta: Metadata) -> dict[str, Any]:
    heads = meta.get("attention.head_count")
    return {
        "model_type": meta.architecture,
        "vocab_size": meta.rows("token_embd.weight") or meta.get("vocab_size"),
        "hidden_size": meta.get("embedding_length"),
        "intermediate_size": meta.get("feed_forward_length", 0) or meta.get("expert_feed_forward_length"),
        "num_hidden_layers": meta.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", heads),
        "head_dim": meta.head_dim,
        "max_position_embeddings": meta.get("context_length"),
        "tie_word_embeddings": not meta.has("output.weight"),
        "rope_parameters": _rotation(meta),
    }


def _rotation(meta: Metadata) -> dict[str, Any]:
    theta = meta.get("rope.freq_base", DEFAULT_BASE)
    plain = {"rope_type": "default", "rope_theta": theta}
    for file in meta.files:
        if "rope_freqs.weight" in file.stored:
            return rope_parameters(file.read("rope_freqs.weight"), theta, meta.get("context_length"))
    kind = meta.get("rope.scaling.type", "none")
    factor = meta.get("rope.scaling.factor", meta.get("rope.scale_linear", 1.0))
    if kind in ("none", "longrope") or (kind == "linear" and factor == 1.0):
        return plain
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        original = meta.get("rope.scaling.original_context_length", None)
        context = meta.get("context_length")
        more = {name: value for name in ("beta_fast", "beta_slow") if (value := _yarn(meta, name)) is not None}
        scaled = {"factor": factor, "original_max_position_embeddings": original or int(context / factor)}
        return {"rope_type": "yarn", "rope_theta": theta} | scaled | more
    raise CheckpointError(
        f"{meta.files[0].path}: {meta.architecture}.rope.scaling.type is {kind!r:.40}; "
        "possible: none, linear, yarn, longrope"
    )


def _yarn(meta: Metadata, name: str) -> Any:
    return meta.get(f"rope.scaling.yarn_{name}", None)


def _llama(meta: Metadata) -> dict[str, Any]:
    if experts := meta.get("expert_count", 0):
        used = meta.get("expert_used_count")
        return {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": used} | _class("Mixtral")
    biases = {"attention_bias": meta.has("blk.0.attn_q.bias"), "mlp_bias": meta.has("blk.0.ffn_up.bias")}
    return {"model_type": "llama"} | biases | _class("Llama")


def _mistral(meta: Metadata) -> dict[str, Any]:
    return {"sliding_window": meta.get("attention.sliding_window", None)} | _class("Mistral")


def _granite(meta: Metadata) -> dict[str, Any]:
    return {
        "embedding_multiplier": meta.get("embedding_scale", 1.0),
        "residual_multiplier": meta.get("residual_scale", 1.0),
        "attention_multiplier": meta.get("attention.scale", 1.0),
        "logits_scaling": meta.get("logit_scale", 1.0),
        "attention_bias": meta.has("blk.0.attn_q.bias"),
    } | _class("Granite")


def _biased(name: str) -> Callable[[Metadata], dict[str, Any]]:
    """A model whose attention has biases if the file has them."""
    return lambda meta: {"attention_bias": meta.has("blk.0.attn_q.bias")} | _class(name)


def _experts(meta: Metadata) -> dict[str, Any]:
    width = meta.rows("blk.0.ffn_gate_exps.weight") or meta.get("expert_feed_forward_length")
    return {
        "num_experts": meta.get("expert_count"),
        "num_experts_per_tok": meta.get("expert_used_count"),
        "moe_intermediate_size": width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2moe(meta: Metadata) -> dict[str, Any]:
    shared = meta.rows("blk.0.ffn_gate_shexp.weight") or meta.get("expert_shared_feed_forward_length")
    own = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": shared, "norm_topk_prob": False}
    return _experts(meta) | own | _class("Qwen2Moe")


def _qwen3moe(meta: Metadata) -> dict[str, Any]:
    # llama.cpp runs every file of this architecture with weights that sum to 1.
    own = {"model_type": "qwen3_moe", "norm_topk_prob": True, "attention_bias": meta.has("blk.0.attn_q.bias")}
    return _experts(meta) | own | _class("Qwen3Moe")


def _gemma2(meta: Metadata) -> dict[str, Any]:
    return {
        "sliding_window": meta.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": meta.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scale(meta, _GEMMA2_27B_BLOCKS),
    } | _class("Gemma2")


def _gemma3(meta: Metadata) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": meta.get("rope.freq_base_swa", DEFAULT_BASE)}
    return {
        "model_type": "gemma3_text",
        "sliding_window": meta.get("attention.sliding_window", 1024),
        "final_logit_softcapping": meta.get("final_logit_softcapping", None),
        "query_pre_attn_scalar": _query_scale(meta, _GEMMA3_27B_BLOCKS),
        "rope_parameters": {"full_attention": _rotation(meta), "sliding_attention": local},
    } | _class("Gemma3")


def _query_scale(meta: Metadata, blocks_of_27b: int) -> int:
    if meta.get("block_count") == blocks_of_27b:
        return meta.get("embedding_length") // meta.get("attention.head_count")
    return meta.head_dim


def _phi3(meta: Metadata) -> dict[str, Any]:
    original = meta.get("rope.scaling.original_context_length", meta.get("context_length"))
    rotated = meta.get("rope.dimension_count", meta.head_dim) / meta.head_dim
    rotation = _rotation(meta) | {"partial_rotary_factor": rotated, "original_max_position_embeddings": original}
    factors = {name: f"rope_factors_{name}.weight" for name in ("short", "long")}
    read = {
        f"{name}_factor": file.read(tensor).tolist()
        for name, tensor in factors.items()
        for file in meta.files
        if tensor in file.stored
    }
    if len(read) == 2:
        rotation |= read | {"rope_type": "longrope"}
    return {
        "original_max_position_embeddings": original,
        "sliding_window": meta.get("attention.sliding_window", 0) or None,
        "rope_parameters": rotation,
    } | _class("Phi3")


def _gpt_oss(meta: Metadata) -> dict[str, Any]:
    rotation = _rotation(meta)
    if rotation["rope_type"] == "yarn":
        rotation = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} | rotation
    return {
        "model_type": "gpt_oss",
        "intermediate_size": meta.rows("blk.0.ffn_gate_exps.weight") or meta.get("expert_feed_forward_length"),
        "num_local_experts": meta.get("expert_count"),
        "num_experts_per_tok": meta.get("expert_used_count"),
        "sliding_window": meta.get("attention.sliding_window", 128),
        "rope_parameters": rotation,
    } | _class("GptOss")


def _cohere(meta: Metadata) -> dict[str, Any]:
    own = {"model_type": "cohere", "use_qk_norm": meta.has("blk.0.attn_q_norm.weight")}
    return own | _scaled_logits(meta) | _class("Cohere")


def _cohere2(meta: Metadata) -> dict[str, Any]:
    return {"sliding_window": meta.get("attention.sliding_window")} | _scaled_logits(meta) | _class("Cohere2")


def _scaled_logits(meta: Metadata) -> dict[str, Any]:
    return {"layer_norm_eps": meta.get("attention.layer_norm_epsilon"), "logit_scale": meta.get("logit_scale")}


def _stablelm(meta: Metadata) -> dict[str, Any]:
    return {
        "layer_norm_eps": meta.get("attention.layer_norm_epsilon"),
        "use_qkv_bias": meta.has("blk.0.attn_q.bias"),
        "use_parallel_residual": not meta.has("blk.0.ffn_norm.weight"),
        "qk_layernorm": meta.has("blk.0.attn_q_norm.weight"),
        "rope_parameters": _partly_rotated(meta),
    } | _class("StableLm")


def _starcoder2(meta: Metadata) -> dict[str, Any]:
    biased = meta.has("blk.0.attn_q.bias")
    return {"norm_epsilon": meta.get("attention.layer_norm_epsilon"), "use_bias": biased} | _class("Starcoder2")


def _nemotron(meta: Metadata) -> dict[str, Any]:
    eps = meta.get("attention.layer_norm_epsilon", meta.get("attention.layer_norm_rms_epsilon", 1e-5))
    return {"norm_eps": eps, "rope_parameters": _partly_rotated(meta)} | _class("Nemotron")


def _partly_rotated(meta: Metadata) -> dict[str, Any]:
    rotated = meta.get("rope.dimension_count", meta.head_dim)
    return _rotation(meta) | {"partial_rotary_factor": rotated / meta.head_dim}


def _class(name: str) -> dict[str, Any]:
    return {"architectures": [f"{name}ForCausalLM"]}


OF_ARCHITECTURE: Mapping[str, Callable[[Metadata], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _llama,
        "mistral": _mistral,
        "granite": _granite,
        "smollm3": _biased("SmolLM3"),
        "qwen2": lambda meta: _class("Qwen2"),
        "qwen3": _biased("Qwen3"),
        "qwen2moe": _qwen2moe,
        "qwen3moe": _qwen3moe,
        "gemma": lambda meta: _class("Gemma"),
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
    }
)
