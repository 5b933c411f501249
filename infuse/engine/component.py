"""Methods of diffusers' models that change inner layers, adapted to models in which whole modules are replaced.

Methods that would find nothing to change raise UnsupportedCall instead of silently doing nothing. Caches over steps
that hook whole blocks hook ours.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn

from infuse.diffusion.layers.convolution import share_memory
from infuse.ground.errors import WAY_BACK, UnsupportedCall
from infuse.ground.instance_method import InstanceMethod
from infuse.inputs.component import is_component
from infuse.plan.kinds import MODULE
from infuse.plan.plan import Plan

_FIRST = f"do so before init_inference ({WAY_BACK})"
_LINEARS = f"{_FIRST}, or keep the original modules with replace_with_kernel_inject=False, which replaces linears alone"
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "load_lora_adapter": f"adapters go onto linears that are merged into whole modules now: {_LINEARS}",
        "add_adapter": f"adapters go onto linears that are merged into whole modules now: {_LINEARS}",
        "load_attn_procs": f"processors of attention modules that were replaced would not run: {_FIRST}",
        "set_attn_processor": f"processors of attention modules that were replaced would not run: {_FIRST}",
        "set_attention_backend": "replaced attention modules run infuse's kernels: leave it out",
        "fuse_qkv_projections": "replaced attention modules are merged already: leave it out",
    }
)
_OF_BLOCKS = frozenset({"FirstBlockCacheConfig", "MagCacheConfig"})  # the others hook what is inside of blocks
_PLAIN = frozenset({"FeedForward"})  # no cache hooks these


def install_changes(model: nn.Module, plan: Plan) -> None:
    """Install these methods on a component of diffusers whose modules were replaced; its convolutions share memory."""
    if not is_component(model) or all(step.depth != MODULE for step in plan.steps):
        return
    share_memory(model)
    for name, why in _REFUSED.items():
        if hasattr(type(model), name):
            setattr(model, name, InstanceMethod(partial(_refuse, name, why), model, name))
    if hasattr(type(model), "enable_cache"):
        model.enable_cache = InstanceMethod(enable_cache, model, "enable_cache")  # type: ignore[assignment]


def _refuse(name: str, why: str, model: Any, *args: Any, **kwargs: Any) -> None:
    raise UnsupportedCall(f"{type(model).__name__}.{name}: {why}")


def enable_cache(model: Any, config: Any) -> None:
    """Call diffusers' own `enable_cache` after registering our blocks like those that they replace."""
    from diffusers.hooks._helpers import TransformerBlockRegistry

    replaced = {type(module): vars(module)["replaces"] for module in model.modules() if "replaces" in vars(module)}
    hidden = sorted({original.__name__ for original in replaced.values()} - _PLAIN)
    name = type(config).__name__
    if hidden and name not in _OF_BLOCKS:
        raise UnsupportedCall(
            f"{type(model).__name__}.enable_cache: {name} hooks modules inside of {', '.join(hidden)}, which were "
            f"replaced; possible now: {', '.join(sorted(_OF_BLOCKS))}; for {name}, {_FIRST}"
        )
    for ours, original in replaced.items():
        try:
            told = copy.copy(TransformerBlockRegistry.get(original))
        except ValueError:  # no block
            continue
        TransformerBlockRegistry.register(ours, told)
        told._cls = original  # its forward names the arguments
    type(model).enable_cache(model, config)
