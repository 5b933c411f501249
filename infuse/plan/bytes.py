"""Predict the memory that a plan will need, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from infuse.architectures.layer import LayerShape
from infuse.architectures.part import MixerShape
from infuse.ground.dtype_cast import buffers_to_cast, kept_in_float32
from infuse.ops.cache_rows import SCALE_BYTES
from infuse.plan.formats import quantized_bytes
from infuse.plan.shared import Sharing
from infuse.plan.step import Step
from infuse.weights.lazy import tensor_at


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; tied ones count once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(map(_held_bytes, tensors.values()))


def _held_bytes(tensor: Any) -> int:
    """Bytes of a tensor; of one that consists of others, as torchao's, of these."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_held_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def token_bytes(steps: Iterable[Step], dtype: torch.dtype, kv_cache: str | None) -> tuple[int, int]:
    """Bytes of one token's keys and values in a cache in `dtype`, and in one of format `kv_cache`."""
    rows = [row for mixer in _cached(steps) for row in mixer.cached_rows]
    plain = sum(heads * width for heads, width in rows) * dtype.itemsize
    return plain, sum(heads * (width + SCALE_BYTES) for heads, width in rows) if kv_cache else plain


def state_bytes(steps: Iterable[Step]) -> int:
    """Bytes of recurrent state per sequence in a cache, independent of its length."""
    return sum(mixer.state_values for mixer in _cached(steps)) * torch.float32.itemsize


def has_state(step: Step) -> bool:
    """Whether a part of the step's module keeps a recurrent state in the cache."""
    return any(mixer.state_values for mixer in _cached([step]))


def _cached(steps: Iterable[Step]) -> list[MixerShape]:
    """List the parts that keep keys, values or states in a cache."""
    shapes = [step.shape for step in steps if step.decodes]
    return [mixer for shape in shapes if isinstance(shape, LayerShape) for mixer in shape.mixers.values()]


def bytes_after(model: nn.Module, steps: Iterable[Step], dtype: torch.dtype, sharing: Sharing) -> int:
    """Predict `parameter_bytes` after `steps`, which have this `sharing`, with all other parameters cast to `dtype`."""
    total, seen, made = 0, set(), set()
    for step in steps:
        if step.shape is None:
            continue
        module = model.get_submodule(step.path)
        if id(module) in seen:
            continue
        seen.add(id(module))
        quantized = quantized_bytes(step.fills, step.shape, step.bodies)
        for fill in step.fills:
            key = sharing.key(step, fill)
            again = key is not None and key in made
            made.add(key)
            total += 0 if step.shares or again else quantized.get(fill.target, 0)
            sources = [tensor_at(module, name) for name in fill.sources]
            seen.update(id(source) for source in sources)
            if fill.target not in quantized and not step.shares and not again:
                numel = sum(source.numel() for source in sources)
                if fill.cut is not None:
                    numel = numel // sum(fill.cut.sizes) * fill.cut.length
                itemsize = (torch.float32 if fill.exact else dtype).itemsize
                total += numel * (itemsize if isinstance(sources[0], nn.Parameter) else sources[0].element_size())
        if not step.keeps_forward:  # a split layer keeps its other tensors
            seen.update(id(tensor) for tensor in (*module.parameters(), *module.buffers()))
    kept = kept_in_float32(model, dtype)
    exact = {id(parameter) for name, parameter in model.named_parameters() if name in kept}
    cast_too = {id(buffer) for _, _, buffer in buffers_to_cast(model, dtype)}
    for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
        if id(tensor) not in seen:
            cast = isinstance(tensor, nn.Parameter) and tensor.is_floating_point() or id(tensor) in cast_too
            itemsize = (torch.float32 if id(tensor) in exact else dtype).itemsize
            total += tensor.numel() * (itemsize if cast else tensor.element_size())
    return total
