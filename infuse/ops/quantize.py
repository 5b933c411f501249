"""Quantize a weight matrix.

Suffixes: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from infuse.ops.op import Case, op
from infuse.quant.parse import quant_format

Buffers = tuple[Tensor, Tensor, Tensor | None]


@op("quantize(Tensor weight, str format) -> (Tensor, Tensor, Tensor?)")
def quantize(weight_OI: Tensor, format: str) -> Buffers:
    """Quantize to `format`; return the buffers data, scale and zero (None if symmetric) of a QuantizedWeight.

    Raises ConfigError as QuantFormat.quantize does.
    """
    held = quant_format(format).quantize(weight_OI)
    return held.data, held.scale, held.zero


@quantize.fake
def quantized_like(weight: Tensor, format: str) -> Buffers:
    """Uninitialised buffers for `weight` in `format`, on its device."""
    planned = quant_format(format).quantize(weight.new_empty(weight.shape, device="meta"))

    # torch.empty, not empty_like: empty_like of a meta tensor runs in Python, 40 us per call for each part of a weight.
    def made(like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=weight.device)

    return made(planned.data), made(planned.scale), None if planned.zero is None else made(planned.zero)


_TEXTS = (
    "int8", "int8:7", "int8:row:asymmetric", "int8:groups=2", "int4:32", "int4:6:asymmetric", "int4:row",
    "int4:groups=2:asymmetric", "fp8", "fp8:7", "fp8:groups=2", "fp6", "fp6:4", "fp6:row",
)  # fmt: skip
_SHAPES = ((0, 64), (1, 64), (33, 128), (7, 42), (3, 4160))


@quantize.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for text in _TEXTS:
        for outputs, inputs in _SHAPES:
            if quant_format(text).fits(inputs) is None:
                weight = torch.randn(outputs, inputs, device=device) / inputs**0.5
                yield Case(f"{text} {outputs}x{inputs}", (weight.to(dtype), text))
