"""Keys without which a model cannot be made of a GGUF file, by architecture; llama.cpp refuses such a file as well.

Keys for which it has a default are not here: the config takes the same one. Nor are those that only some files of an
architecture need, which the configs ask for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from infuse.weights.gguf.metadata import PATTERN, Metadata

_ALL = ("block_count", "context_length", "embedding_length", "attention.head_count")
_RMS_EPSILON, _EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_WITH_MEANS = ("command-r", "cohere2", "stablelm", "starcoder2", "nemotron")  # layer norms
_WINDOW = "attention.sliding_window"
_EXPERTS = ("expert_count", "expert_used_count")
_WIDE_EXPERTS = (*_EXPERTS, "expert_feed_forward_length")
_SECTIONS = "rope.dimension_sections"
_STATE = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count")
_OWN: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "granite": ("logit_scale",),
    "command-r": ("logit_scale",),
    "cohere2": ("logit_scale", _WINDOW),
    "gemma3": (_WINDOW,),
    "gemma4": (_WINDOW, PATTERN, "attention.key_length", "attention.key_length_swa", "rope.freq_base_swa",
               "embedding_length_per_layer_input"),
    "gpt-oss": (_WINDOW, *_EXPERTS),
    "qwen2moe": _EXPERTS,
    "qwen3moe": _EXPERTS,
    "qwen35": (*_STATE, _SECTIONS),
    "qwen35moe": (*_STATE, _SECTIONS, *_EXPERTS),
    "qwen3next": (*_STATE, *_EXPERTS),
    "granitehybrid": _STATE,
    "lfm2": ("shortconv.l_cache",),
    "lfm2moe": ("shortconv.l_cache", *_WIDE_EXPERTS, "leading_dense_block_count", "expert_gating_func"),
    "glm4moe": _WIDE_EXPERTS,
    "ernie4_5-moe": (*_WIDE_EXPERTS, "leading_dense_block_count", "interleave_moe_layer_step"),
    "deepseek2": ("attention.kv_lora_rank", "expert_feed_forward_length"),
})  # fmt: skip


def needed_keys(architecture: str) -> tuple[str, ...]:
    """The keys that each file of an architecture must have."""
    epsilon = _EPSILON if architecture in _WITH_MEANS else _RMS_EPSILON
    return (*_ALL, epsilon, *_OWN.get(architecture, ()))


def refuse_missing(meta: Metadata) -> None:
    """Raise CheckpointError for all keys that are not there."""
    routed = _EXPERTS if meta.has_in_a_layer("ffn_gate_inp.weight") else ()
    needed = dict.fromkeys((*needed_keys(meta.architecture), *routed))
    if absent := [key for key in needed if not meta.stores(key)]:
        raise meta.missing(*absent)
