"""Activations by name, plain or gated (GLU): act(gate) * up over the output of one merged matrix product.

Suffixes: R rows, I inner width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from infuse.ground.activations import FUNCTIONS
from infuse.ops.op import Case, op


@op("activation(Tensor x, str name) -> Tensor")
def activation(x_RI: Tensor, name: str) -> Tensor:
    """Apply the activation `name` (a value of infuse.ground.activations.ACTIVATIONS) elementwise, in x.dtype."""
    return FUNCTIONS[name](x_RI)


@op("gated_activation(Tensor gate_up, str name) -> Tensor")
def gated_activation(gate_up_R2I: Tensor, name: str) -> Tensor:
    """act(gate) * up: [..., :I] is the gate, [..., I:] is up (Shazeer 2020)."""
    gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
    return FUNCTIONS[name](gate_RI) * up_RI


@activation.fake
def _like_x(x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@gated_activation.fake
def _half_of_x(x: Tensor, name: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@activation.cases
@gated_activation.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for name in FUNCTIONS:
        for shape in ((2, 3, 34), (1, 8), (0, 8)):
            yield Case(f"{name} {shape}", (torch.randn(shape, dtype=dtype, device=device) * 4, name))
