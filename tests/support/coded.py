"""A made-up layout of checkpoints: any tensor in any number format, under `NAME@FORMAT@BUFFER`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format
from infuse.weights import foreign
from infuse.weights.foreign.layout import Recognised, Unread
from infuse.weights.lazy import Coded, CodedTensor, LazyTensor
from tests.models.families import BY_NAME


def as_named(unread: Unread) -> Recognised:
    """The recogniser."""
    found: dict[str, dict[str, str]] = {}
    formats: dict[str, str] = {}
    for stored in unread.names:
        name, *rest = stored.split("@")
        if len(rest) == 2 and name in unread.missing:
            formats[name] = rest[0]
            found.setdefault(name, {})[rest[1]] = stored
    tensors: dict[str, LazyTensor] = {}
    for name, buffers in found.items():
        coded = Coded(formats[name], {buffer: unread.whole(stored) for buffer, stored in buffers.items()})
        tensors[name] = CodedTensor(unread.missing[name], torch.float32, coded)
    return Recognised(tensors, {stored for buffers in found.values() for stored in buffers.values()})


@contextmanager
def registered() -> Iterator[None]:
    take_back = foreign.register(as_named)
    try:
        yield
    finally:
        take_back()


def publish(
    folder: Path, family: str, format_of: Callable[[str], str | None], **changes: Any
) -> tuple[dict[str, QuantizedWeight], Any]:
    """Write a checkpoint of the family's model. Return its coded matrices, by name, and the model with their values."""
    model = BY_NAME[family].make(**changes)
    state, weights = dict[str, Tensor](), dict[str, QuantizedWeight]()
    values = model.state_dict()
    tied = {tensor.data_ptr(): name for name, tensor in reversed(values.items())}  # the first name of each
    for name, tensor in values.items():
        if tied[tensor.data_ptr()] != name:
            continue
        format = format_of(name)
        if format is None:
            state[name] = tensor.contiguous()
            continue
        coder = quant_format(format)
        rows = tensor.reshape(-1, tensor.shape[-1])
        weights[name] = coder.quantize(rows)
        values[name].copy_(coder.dequantize(weights[name]).view_as(tensor))
        for buffer, codes in weights[name].tensors.items():
            state[f"{name}@{format}@{buffer}"] = codes.view(*tensor.shape[:-1], -1).clone()
    folder.mkdir(exist_ok=True, parents=True)
    save_file(state, folder / "model.safetensors")
    return weights, model.eval()
