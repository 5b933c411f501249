"""Keys of a model's GGUF files, each checked for its kind and range, so that no config is made of nonsense."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from infuse.ground.errors import CheckpointError
from infuse.weights.gguf.file import Entry, GGUFFile

DEFAULT_BASE = 10000.0  # of rotary frequencies, if a file does not say it
NEXT = "nextn_predict_layers"
PATTERN = "attention.sliding_window_pattern"
_LAYER = re.compile(r"blk\.([0-9]{1,6})\.")
_MISSING = object()
_REMEDY = (
    "convert the model again with llama.cpp's convert_hf_to_gguf.py, or put the original model's config.json beside "
    "the file and give the folder"
)
_MOST_LAYERS = 999_999  # what names of tensors have digits for


@dataclass(frozen=True)
class _Kind:
    """What values of a key can be, in words and as a test."""

    told: str
    accepts: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_COUNT = _Kind("a whole number from 1 on", lambda value: _is_count(value) and value >= 1)
_ANY_COUNT = _Kind("a whole number from 0 on", lambda value: _is_count(value) and value >= 0)
_LAYERS = _Kind(
    f"a whole number from 1 to {_MOST_LAYERS}", lambda value: _is_count(value) and 1 <= value <= _MOST_LAYERS
)
_POSITIVE = _Kind("a number above 0", lambda value: _is_number(value) and value > 0)
_NOT_NEGATIVE = _Kind("a number from 0 on", lambda value: _is_number(value) and value >= 0)
_NUMBER = _Kind("a finite number", _is_number)
_BOOL = _Kind("true or false", lambda value: isinstance(value, bool))
_TEXT = _Kind("a text", lambda value: isinstance(value, str))
KINDS: Mapping[str, _Kind] = MappingProxyType({
    "block_count": _LAYERS,
    **dict.fromkeys(
        ("embedding_length", "context_length", "vocab_size", "attention.head_count", "attention.head_count_kv",
         "rope.dimension_count", "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank",
         "ssm.inner_size", "shortconv.l_cache", "attention.value_length_mla", "attention.key_length_mla",
         "attention.kv_lora_rank", "attention.value_length", "attention.key_length_swa",
         "interleave_moe_layer_step",         "rope.dimension_count_swa"), _COUNT
    ),
    **dict.fromkeys(
        ("feed_forward_length", "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_count",
         "expert_used_count", "expert_shared_count", "expert_group_count", "expert_group_used_count",
         "expert_gating_func", "leading_dense_block_count", "attention.q_lora_rank", "attention.key_length",
         "attention.shared_kv_layers", "embedding_length_per_layer_input",
         "attention.sliding_window", "rope.scaling.original_context_length", NEXT, PATTERN), _ANY_COUNT
    ),
    **dict.fromkeys(
        ("rope.freq_base", "rope.freq_base_swa", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor",
         "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"), _POSITIVE
    ),
    **dict.fromkeys(
        ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.scaling.factor",
         "rope.scale_linear", "rope.scaling.yarn_log_multiplier", "attn_logit_softcapping",
         "final_logit_softcapping"), _NOT_NEGATIVE
    ),
    **dict.fromkeys(
        ("rope.scaling.yarn_ext_factor", "attention.scale", "logit_scale", "embedding_scale", "residual_scale",
         "expert_weights_scale", "attention.temperature_scale"), _NUMBER
    ),
    "rope.scaling.type": _TEXT, "expert_weights_norm": _BOOL, "rope.scaling.finetuned": _BOOL,
})  # fmt: skip


def layer_of(tensor: str) -> int | None:
    """The number of the layer that a tensor belongs to by its name."""
    matched = _LAYER.match(tensor)
    return None if matched is None else int(matched[1])


def model_layers(values: Mapping[str, Any], architecture: str) -> float:
    """The number of layers, inf if the file does not say it; those after them predict further tokens."""
    count, further = values.get(f"{architecture}.block_count"), values.get(f"{architecture}.{NEXT}")
    return count - further if isinstance(count, int) and isinstance(further, int) else math.inf


@dataclass(frozen=True)
class Metadata:
    """Keys and tensors of a model's files, looked up for its architecture. `asked`: the keys that were looked up."""

    files: tuple[GGUFFile, ...]
    architecture: str
    asked: set[str] = field(default_factory=set, compare=False, repr=False)

    @property
    def entries(self) -> dict[str, Entry]:
        return {name: entry for file in self.files for name, entry in file.entries.items()}

    def has(self, tensor: str) -> bool:
        return any(tensor in file.entries for file in self.files)

    def has_in_a_layer(self, leaf: str) -> bool:
        return any(_LAYER.sub("", name, 1) == leaf for name in self.entries)

    def get(self, key: str, default: Any = _MISSING, layers: list[int] | None = None) -> Any:
        """The value of `key` of the architecture; a list for each layer must have one value, zeros aside.

        `layers`: those whose values of a list count.

        CheckpointError if it is missing and has no default, or is not of the kind and range of that key.
        """
        value = self._value(key, _MISSING)
        if value is _MISSING:
            if default is not _MISSING:
                return default
            raise self.missing(key)
        if isinstance(value, list):
            value = value if layers is None else [value[one] for one in layers if one < len(value)]
            different = {one for one in value if one} or {0}
            if len(different) != 1:
                told = f"differs between layers: {str(sorted(different)):.80}"
                raise CheckpointError(f"{self.files[0].path}: {self.architecture}.{key} {told}; possible: one value")
            value = different.pop()
        kind = KINDS[key]
        if not kind.accepts(value):
            raise self.fault(key, value, kind.told)
        return value

    def missing(self, *keys: str) -> CheckpointError:
        """The error of keys that are not there."""
        told = ", ".join(f"{self.architecture}.{key}" for key in keys)
        return CheckpointError(f"{self.files[0].path}: has no {told}, which its config needs; {_REMEDY}")

    def fault(self, key: str, value: Any, possible: str) -> CheckpointError:
        """The error of a key whose value cannot be taken."""
        told = f"{self.architecture}.{key} is {value!r:.40}"
        return CheckpointError(f"{self.files[0].path}: {told}; possible: {possible}")

    @property
    def layers(self) -> int:
        """The number of layers, without those that predict further tokens."""
        count, further = self.get("block_count"), self.get(NEXT, 0)
        if further >= count:
            raise self.fault(NEXT, further, f"less than block_count, {count}")
        return int(count - further)

    def stores(self, key: str) -> bool:
        return self._value(key, _MISSING) is not _MISSING

    def of_layers(self, key: str) -> list[Any] | None:
        """The list of `key`, None if it is no list; CheckpointError if it is not as long as there are layers."""
        value = self.listed(key)
        if value is None:
            return None
        if len(value) != self.get("block_count"):
            raise self.fault(key, value, f"a value for each of {self.get('block_count')} layers")
        return value

    def listed(self, key: str) -> list[Any] | None:
        """The list of `key`, None if it is no list."""
        value = self._value(key, None)
        return value if isinstance(value, list) else None

    def _value(self, key: str, default: Any) -> Any:
        self.asked.add(key)
        return self.files[0].values.get(f"{self.architecture}.{key}", default)

    def not_asked(self, harmless: Set[str]) -> list[str]:
        """The architecture's keys, by their whole names, that nobody looked up and that are not `harmless`."""
        start, known = f"{self.architecture}.", self.asked | harmless
        return [key for key in self.files[0].values if key.startswith(start) and key[len(start) :] not in known]

    def rows(self, tensor: str, axis: int = -2) -> int | None:
        """The size of a tensor along `axis`, None if it is not there."""
        entry = self.entries.get(tensor)
        return None if entry is None or len(entry.shape) < -axis else entry.shape[axis]

    @property
    def head_dim(self) -> int:
        size = self.get("attention.key_length", None)
        width, heads = (
            self.rows("blk.0.attn_q.weight") or self.get("embedding_length"),
            self.get("attention.head_count"),
        )
        if not size and heads > width:
            raise self.fault("attention.head_count", heads, f"up to {width}, the rows of queries")
        return size or width // heads
