"""Notes of a plan on settings that have no effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from infuse.architectures.parts.experts import drops_tokens
from infuse.config.inference import InferenceConfig
from infuse.ground.device import Device
from infuse.layers.block import Block
from infuse.plan.step import Step

_NO_ENCODER = "no encoder layer without convolutions is a block"


def without_effect(model: nn.Module, config: InferenceConfig, device: Device, steps: Collection[Step]) -> Iterator[str]:
    """Yield notes on settings without effect on `model` if `steps`, not executed yet, replace its layers."""
    if config.skip_padding and device.kind == "cpu" and not any(step.skips_padding for step in steps):
        why = "padding counts in mixtures that drop tokens" if drops_tokens(model) else _NO_ENCODER
        yield f"skip_padding: no effect here: {why}"
    if config.kv_cache and not any(step.decodes for step in steps):
        why = "no decoder layer is replaced as a block"
        if any(isinstance(module, Block) for module in model.modules()):
            why = "layers that are replaced already keep the format of the cache that they were replaced with"
        yield f"kv_cache: no effect here: {why}"
