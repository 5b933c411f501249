"""A block of an encoder in one call, as one_call.py has it for the steps of decoding: where all of its ops are the C++
bodies and nobody listens inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from infuse.architectures.layer import POST, PRE, LayerShape, NoPosition
from infuse.layers.inputs import Inputs
from infuse.layers.one_call import OneCall, one_call_takes
from infuse.ops.cpu.layer import encoder_layer
from infuse.ops.cpu.linear import takes_tiles


class EncoderCall(OneCall):
    """What of an encoder's block does not change from call to call."""

    def __call__(self, block: nn.Module, attention: Any, x_BTC: Tensor, inputs: Inputs) -> Tensor | None:
        """The block's result; None where it has to go part by part."""
        if x_BTC.dtype is not torch.bfloat16 or inputs.cache is not None or inputs.want_weights or inputs.causal:
            return None
        tensors = self._tensors(block, attention)
        if tensors is None:
            return None
        mask = None if inputs.mask is None else attention.allowed(inputs.mask, x_BTC.shape[1])
        return encoder_layer(x_BTC, tensors, mask, self._numbers)


def make_encoder_call(shape: LayerShape, formats: Mapping[str, str], bodies: Mapping[str, str]) -> EncoderCall | None:
    """None for blocks that go part by part, as make_one_call; where tokens have an order or see a part of the others;
    and where PyTorch's products are the better choice.
    """
    attn = shape.attn
    plain = (
        not attn.causal and not attn.window and isinstance(attn.position, NoPosition) and shape.residual in (PRE, POST)
    )
    return EncoderCall(shape, formats, 0, False) if plain and one_call_takes(shape, bodies) and takes_tiles() else None
