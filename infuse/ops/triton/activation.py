"""The activations of ops/activation.py in Triton (kernels/activation.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.ops.activation import activation, gated_activation
from infuse.ops.triton import kernels, needs
from infuse.ops.triton.configurations import ACTIVATION_BLOCK, power_above

MOST_ROWS = 65535  # CUDA's limit of a grid's second axis


@activation.implement("triton", needs)
def _activation(x: Tensor, name: str) -> Any:
    x = x.contiguous()
    out, values = torch.empty_like(x), x.numel()
    if values:
        grid = (-(-values // ACTIVATION_BLOCK),)
        kernels("activation").activate[grid](x, out, values, NAME=name, BLOCK=ACTIVATION_BLOCK)
    return out


@gated_activation.implement("triton", needs)
def _gated_activation(gate_up: Tensor, name: str) -> Any:
    inner = gate_up.shape[-1] // 2
    rows = gate_up.numel() // max(2 * inner, 1)
    if gate_up.shape[-1] % 2 or rows > MOST_ROWS:
        return gated_activation.reference(gate_up, name)
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(*gate_up.shape[:-1], inner)
    if out.numel():
        block = min(power_above(inner), ACTIVATION_BLOCK)
        kernels("activation").activate_gated[(-(-inner // block), rows)](gate_up, out, inner, NAME=name, BLOCK=block)
    return out
