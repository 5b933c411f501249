"""What the made-up families have in common: a small Llama whose layers are exchanged."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM

from tests.models.families import BY_NAME

HIDDEN, HEADS, LAYERS = 64, 4, 3


def made_up(layer: type[nn.Module], model: type[LlamaForCausalLM] = LlamaForCausalLM, **more: Any) -> LlamaForCausalLM:
    """A Llama with layers of this class, and large enough weights that positions and masks count."""
    torch.manual_seed(0)
    llama = BY_NAME["llama"]
    sizes = dict(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS)
    made = model(llama.config(**{**llama.values, **sizes, **more}))
    made.model.layers = nn.ModuleList(layer(made.config, index) for index in range(LAYERS))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
    return made.eval()


def path_of(layer: type) -> str:
    return f"{layer.__module__}.{layer.__qualname__}"
