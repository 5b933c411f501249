"""InferenceConfig: every key of DeepSpeed-Inference, and infuse's own; validated before any weight is touched.

config.keys reads names and sources, config.values single values. Nothing here looks at a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from pydantic import ValidationError, field_serializer

from infuse.config import keys as config_keys
from infuse.config import values
from infuse.config.keys import Section
from infuse.config.quant import Quant
from infuse.config.values import parse_dtype, parse_format
from infuse.ground.device import Device
from infuse.ground.errors import ConfigError
from infuse.parallel.join import AskedRanks

__all__ = ["WITHOUT_EFFECT", "InferenceConfig", "parse_dtype", "parse_format"]


class TensorParallel(Section):
    """`tensor_parallel`: the ranks are those of `mpu` or `tp_group`, else `tp_size` ranks; enabled=False means one.

    infuse's own: `timeout_s`, the seconds after which missing ranks are an error.
    """

    enabled: bool = True
    tp_size: values.Count = 1
    tp_grain_size: values.Count = 64
    mpu: values.Mpu = None
    tp_group: values.Group = None
    timeout_s: values.Count = 300


class Moe(Section):
    """`moe`: how ranks share experts. A bool stands for {"enabled": bool}.

    The ranks of `ep_group`, or `ep_size` ranks, have whole experts; those of `ep_mp_group` have slices of each.
    `moe_experts` is checked against the model, unless it is (1,). infuse's own: `without_drops` computes every token of
    DeepSpeed's layers by its best experts, where DeepSpeed drops tokens or samples experts.
    """

    aliases = MappingProxyType({"num_experts": "moe_experts", "expert_group": "ep_group"})
    shorthand = (bool, "enabled")
    forms = "a bool or a dict"
    enabled: bool = True
    ep_size: values.Count = 1
    moe_experts: values.Counts = (1,)
    type: Literal["standard", "residual"] = "standard"
    without_drops: bool = False
    ep_mp_group: values.Group = None
    ep_group: values.Group = None


class Checkpoint(Section):
    """`checkpoint_config`: where weights are read from and written to."""

    checkpoint_dir: str | None = None
    save_mp_checkpoint_path: str | None = None
    base_dir: str | None = None


class InferenceConfig(Section):
    """How to run a model. Takes nothing, a dict or a JSON path, keywords, or both merged. Raises ConfigError with all
    problems.

    Each key has an effect, or a line in WITHOUT_EFFECT. Defaults are
    DeepSpeed-Inference's, except dtype (None: the device's best), replace_with_kernel_inject (True: proven blocks
    replace layers; False: layers stay, linears are replaced) and max_out_tokens (None: the cache grows; an int
    pre-allocates and caps). dtype int8 means int8 weights and 16-bit activations. infuse's own keys: verify (which
    steps are proven before the swap), device (None: where the model is), progress (None: bars on a terminal only),
    skip_padding (True: encoder layers return zeros at the padding instead of computing it; not for models that score
    with hidden tokens, such as ColBERT's expanded queries), experts ("mmap": experts saved in our shards are mapped
    from their file instead of read) and kv_cache ("int8": generate keeps keys and values in int8; None: in the compute
    dtype). The caller's dict is not changed.
    """

    aliases = MappingProxyType(
        {
            "kernel_inject": "replace_with_kernel_inject",
            "tp": "tensor_parallel",
            "tm": "triangular_masking",
            "args": "config",
            "ckpt_config": "checkpoint_config",
            "injection_dict": "injection_policy",
            "max_tokens": "max_out_tokens",
            "min_tokens": "min_out_tokens",
        }
    )
    moved = MappingProxyType(
        {
            "mp_size": "tensor_parallel.tp_size",
            "mpu": "tensor_parallel.mpu",
            "tp_grain_size": "tensor_parallel.tp_grain_size",
            "ep_size": "moe.ep_size",
            "ep_group": "moe.ep_group",
            "expert_group": "moe.ep_group",
            "ep_mp_group": "moe.ep_mp_group",
            "expert_mp_group": "moe.ep_mp_group",
            "moe_experts": "moe.moe_experts",
            "moe_type": "moe.type",
        }
    )

    replace_with_kernel_inject: bool = True
    dtype: values.Dtype = None
    tensor_parallel: TensorParallel = TensorParallel()
    enable_cuda_graph: bool = False
    use_triton: bool = False
    triton_autotune: bool = False
    zero: dict[str, Any] = {}
    triangular_masking: bool = True
    moe: Moe = Moe()
    keep_module_on_host: bool = False
    quant: Quant = Quant()
    checkpoint: values.CheckpointSource = None
    base_dir: str = ""
    set_empty_params: bool = False
    save_mp_checkpoint_path: str | None = None
    checkpoint_config: Checkpoint = Checkpoint()
    return_tuple: bool = True
    training_mp_size: values.Count = 1
    replace_method: str = "auto"
    injection_policy: values.Policy = None
    injection_policy_tuple: tuple[str, ...] | None = None
    config: Any = None
    max_out_tokens: values.Count | None = None
    min_out_tokens: values.Count = 1
    transposed_mode: bool = False
    verify: Literal["sample", "all", "strict", "off"] = "sample"
    device: values.DeviceName = None
    progress: bool | None = None
    skip_padding: bool = False
    experts: Literal["memory", "mmap"] = "memory"
    kv_cache: Literal["int8"] | None = None

    def __init__(self, config: Any = None, /, **kwargs: Any):
        try:
            leaves, problems = config_keys.read(type(self), config, kwargs)
        except RecursionError as error:
            raise ConfigError("config: its dicts or lists are nested too deeply, or hold themselves") from error
        try:
            super().__init__(**config_keys.nested(leaves))
            problems += self._contradictions()
        except ValidationError as error:
            problems += config_keys.explain(error, leaves)
        if problems:
            raise config_keys.failure(problems) from None

    @classmethod
    def make(cls, config: Any = None, **kwargs: Any) -> InferenceConfig:
        """Make a configuration from nothing, a dict, a JSON path or an InferenceConfig, merged with keywords."""
        return config if isinstance(config, cls) and not kwargs else cls(config, **kwargs)

    @property
    def tp_size(self) -> int:
        """How many ranks share each matrix."""
        return self.tensor_parallel.tp_size if self.tensor_parallel.enabled else 1

    @property
    def ep_size(self) -> int:
        """How many ranks share the experts."""
        return self.moe.ep_size if self.moe.enabled else 1

    @property
    def ranks(self) -> AskedRanks:
        """The numbers and groups of ranks. A section that is not enabled asks for one rank."""
        tp = {name: getattr(self.tensor_parallel, name) for name in ("tp_size", "mpu", "tp_group")}
        ep = {name: getattr(self.moe, name) for name in ("ep_size", "ep_group", "ep_mp_group")}
        return AskedRanks(**(tp if self.tensor_parallel.enabled else {}), **(ep if self.moe.enabled else {}))

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """The numbers of experts that the user says the model has; () if the user says nothing."""
        return self.moe.moe_experts if self.moe.enabled and self.moe.moe_experts != (1,) else ()

    @property
    def step_graphs(self) -> bool:
        """Whether decode steps of generate may be CUDA graphs: yes unless the user gave enable_cuda_graph=False."""
        return self.enable_cuda_graph or self._complete or "enable_cuda_graph" not in self.model_fields_set

    @property
    def weight_format(self) -> str | None:
        """The format of the weights ("int8", "int4:128", …), see parse_format; None: the compute dtype."""
        return self.quant.everywhere or ("int8" if self.dtype == torch.int8 else None)

    @property
    def module_formats(self) -> dict[str, str | None]:
        """Part of a module's path → the format of its matrices instead of weight_format; None leaves them alone."""
        return self.quant.by_name

    @property
    def checkpoint_files(self) -> tuple[Any, str, str | None]:
        """Where weights are read from (None: the model has them), where relative paths start, where the result is
        saved.
        """
        group = self.checkpoint_config
        save = self.save_mp_checkpoint_path or group.save_mp_checkpoint_path
        return self.checkpoint or group.checkpoint_dir, self.base_dir or group.base_dir or "", save

    def resolved_dtype(self, device: Device) -> torch.dtype:
        """The dtype of activations and unquantized weights. Raises ConfigError if `device` does not compute in it."""
        if self.dtype is None or self.dtype == torch.int8:
            return device.default_dtype
        if self.dtype not in device.dtypes:
            possible = ", ".join(str(dtype) for dtype in device.dtypes)
            raise ConfigError(
                f"dtype: found {self.dtype}; {device.kind} {device.name} computes in {possible}; None takes the best"
            )
        return self.dtype

    def notes(self, device: Device | None = None) -> list[str]:
        """One line for each key that the user set without effect: in general, or on `device`.

        If every key is set, as in default_inference_config(), only those that differ from the defaults count.
        """
        kind = device.kind if device is not None else (self.device.type if self.device is not None else "")
        asked = {key for key, differs in _given_keys(self) if differs or not self._complete}
        sections = {key.rpartition(".")[0] for key in asked} | asked  # a line may be of a key or of its section
        lines = [f"{key}: accepted without effect: {why}" for key, why in WITHOUT_EFFECT.items() if key in sections]
        idle = [(key, why) for key, is_idle, why in _IDLE if key in asked and is_idle(self, kind)]
        return [*lines, *(f"{key}: no effect here: {why}" for key, why in idle)]

    def __str__(self) -> str:
        changed = [f"{key}={config_keys.shown(self._value(key))}" for key, differs in _given_keys(self) if differs]
        return f"InferenceConfig({', '.join(changed)})"

    @property
    def _complete(self) -> bool:
        """Whether every key was set."""
        return self.model_fields_set == set(type(self).model_fields)

    def _value(self, key: str) -> Any:
        value: Any = self
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def _contradictions(self) -> Iterator[str]:
        """Keys that contradict each other."""
        yield from self.quant.contradictions()
        if self.dtype == torch.int8 and self.quant.enabled is False:
            yield "dtype: found torch.int8 beside quant.enabled=False; possible: another dtype, or quant enabled"
        elif self.dtype == torch.int8 and not (self.weight_format or "").startswith("int8"):
            possible = 'quant="int8[:group_size]", or another dtype'
            yield f"dtype: found torch.int8 beside quant={self.weight_format!r}; possible: {possible}"
        if self.max_out_tokens is not None and self.min_out_tokens > self.max_out_tokens:
            yield f"min_out_tokens: found {self.min_out_tokens}; possible: at most max_out_tokens={self.max_out_tokens}"
        if self.experts == "mmap" and self.checkpoint_files[0] is None and self.checkpoint_files[2] is None:
            yield (
                'experts: found "mmap" for a model whose weights are in memory; experts are mapped from infuse\'s own '
                'shards. Save them by init_inference(model, ..., experts="mmap", save_mp_checkpoint_path=FOLDER), '
                'then load them into a model on meta by init_inference(empty, checkpoint=FOLDER, experts="mmap")'
            )
        for key, name in (("checkpoint", "checkpoint_dir"), ("base_dir",) * 2, ("save_mp_checkpoint_path",) * 2):
            outer, inner = getattr(self, key), getattr(self.checkpoint_config, name)
            if outer and inner and outer != inner:
                yield f"{key}: found {outer!r} beside checkpoint_config.{name}={inner!r}; give one of them"

    @field_serializer("dtype", "device", when_used="json-unless-none")
    def _as_text(self, value: torch.dtype | torch.device) -> str:
        return str(value)


def _given_keys(section: Section, at: str = "") -> Iterator[tuple[str, bool]]:
    """Each set key, dotted, and whether its value differs from the default."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section) and name in section.model_fields_set:
            yield from _given_keys(value, f"{at}{name}.")
        elif name in section.model_fields_set:
            yield at + name, value is not field.default and (field.default is None or bool(value != field.default))


# Keys and sections that are accepted because scripts set them → why they have no effect.
WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "triton_autotune": "launches are chosen by the shape of a matrix; there is nothing to search",
        "zero": "inference holds weights only; nothing is partitioned as for training",
        "triangular_masking": "the model makes the mask",
        "moe.type": "standard or residual is read from the model",
        "keep_module_on_host": "peak memory is always the result and one layer",
        "quant.activation": "activations keep the compute dtype",
        "quant.qkv": "q, k and v are quantized as the other matrices are",
        "set_empty_params": "parameters on meta are recognised",
        "return_tuple": "a layer returns the same as the layer that it replaces",
        "training_mp_size": "checkpoints say how they are sharded",
        "replace_method": "there is one method",
        "injection_policy_tuple": "DeepSpeed derives it from injection_policy",
        "config": "arguments of a training script say nothing about inference",
        "transposed_mode": "the layout of each matrix is known from the model",
    }
)

# Keys without effect in some cases: key; the cases, by config and kind of device ("" if unknown); why.
_IDLE: tuple[tuple[str, Callable[[InferenceConfig, str], bool], str], ...] = (
    ("enable_cuda_graph", lambda config, kind: config.enable_cuda_graph and kind == "cpu", "a CPU has no CUDA graphs"),
    ("use_triton", lambda config, kind: config.use_triton and kind == "cpu", "Triton's kernels need a GPU"),
    ("tensor_parallel.tp_grain_size", lambda config, kind: config.tp_size == 1, "nothing is split over one rank"),
    (
        "injection_policy",
        lambda config, kind: config.injection_policy is not None and not config.ranks.slices,
        "one rank has whole layers: tensor_parallel.tp_size is 1",
    ),
    (
        "quant.weight.post_init_quant",
        lambda config, kind: any(quant.group_dim == 0 for quant in config.quant.weight.post_init_quant.values()),
        "group_dim=0: groups lie along the inputs",
    ),
    (
        "quant.weight.quantized_initialization.group_dim",
        lambda config, kind: config.quant.weight.quantized_initialization.group_dim == 0,
        "groups lie along the inputs",
    ),
    (
        "base_dir",
        lambda config, kind: bool(config.base_dir) and config.checkpoint_files[0] is None,
        "no checkpoint is given",
    ),
    (
        "skip_padding",
        lambda config, kind: config.skip_padding and kind not in ("", "cpu"),
        "a GPU would have to wait for the host",
    ),
    (
        "min_out_tokens",
        lambda config, kind: config.max_out_tokens is None,
        "without max_out_tokens the cache grows as needed",
    ),
)
