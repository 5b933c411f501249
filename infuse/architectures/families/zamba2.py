"""Zamba2: layers of a state space alone, before some of which a shared block of attention and MLP adds to the input.

The shared blocks stay, with our linears: each use of one adds products of its own (adapters) to those of the block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from infuse.architectures.layer import LayerSpec
from infuse.architectures.parts.norm import RMS, Norm
from infuse.architectures.parts.state_attention import StateSpace
from infuse.architectures.program import ADD, ATTENTION, NORM, Step

_OF_SHARED = "transformer_hidden_states"  # what the shared block adds, for the norm alone


@dataclass(frozen=True)
class SpaceOfLayer(StateSpace):
    """A state space; in layers with a shared block, that one's keys and values are in the cache, too."""

    def of_layer(self, layer: nn.Module, config: Any) -> StateSpace:
        kinds, index = getattr(config, "layers_block_type", None) or (), getattr(layer, "layer_idx", None)
        return replace(self, beside=isinstance(index, int) and tuple(kinds)[index : index + 1] == ("hybrid",))


ZAMBA2 = LayerSpec(
    layer="transformers.models.zamba2.modeling_zamba2.Zamba2MambaDecoderLayer",
    norm1=Norm("input_layernorm", RMS),
    attn=SpaceOfLayer("mamba"),
    mlp=None,
    program=(Step(NORM, "norm1", over=_OF_SHARED), Step(ATTENTION, "mamba"), Step(ADD)),
    values=(_OF_SHARED,),
    unread=("original_hidden_states", "layer_idx", "causal_mask"),
)

SPECS = (ZAMBA2,)
