"""A mixer with a state instead of keys and values: a decaying sum of outer products, after a short convolution.

Every third layer has attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from infuse.architectures.bind import Binder
from infuse.architectures.families.llama import LLAMA
from infuse.architectures.packing import Fill
from infuse.architectures.part import COLUMN, ROW, Extent, Matrix, MixerShape, Parameter, Share
from infuse.architectures.part import HEADS as OF_HEADS
from infuse.architectures.parts.attention import Attention
from infuse.ground.cache_names import cache_in
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.inputs import Inputs
from infuse.layers.linear import direct
from infuse.layers.mixer import Mixer
from tests.parts.made_up import HEADS, HIDDEN, path_of
from tests.parts.made_up import LAYERS as COUNT

WIDTH, TAPS = HIDDEN // HEADS, 4
TYPES = ["linear_attention", "linear_attention", "full_attention"] * (COUNT // 3)


def mixed(
    qkv_BTN: Tensor, conv: Tensor, decay_H: Tensor, before: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Values [B, T, H D] and the states after them: S = decay S + v k^T, y = S q, of the convolved q, k, v."""
    x_BNT, heads = qkv_BTN.transpose(1, 2), decay_H.shape[0]
    x_BNT = torch.cat((before["conv"], x_BNT), dim=-1) if before else pad(x_BNT, (TAPS, 0))
    tokens, kept = qkv_BTN.shape[1], x_BNT[..., -TAPS:].contiguous()
    x_BNT = conv1d(x_BNT, conv[:, None], groups=conv.shape[0])[..., -tokens:]
    q, k, v = torch.nn.functional.silu(x_BNT).unflatten(1, (3, heads, WIDTH)).float().unbind(1)
    state = before["state"] if before else q.new_zeros(len(q), heads, WIDTH, WIDTH)
    decay, found = decay_H.float().sigmoid()[:, None, None], []
    for t in range(tokens):
        state = decay * state + v[..., t, None] * k[..., None, :, t]
        found.append((state * q[..., None, :, t]).sum(-1) / WIDTH)
    return torch.stack(found, dim=1).flatten(2).to(qkv_BTN.dtype), {"conv": kept, "state": state}


# ---- the original


class Recurrence(nn.Module):
    def __init__(self, config: Any, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.in_proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.conv = nn.Parameter(torch.randn(3 * HIDDEN, TAPS))
        self.decay = nn.Parameter(torch.randn(HEADS))
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        cache = cache_in(kwargs)
        layer = None if cache is None else cache.layers[self.layer_idx]
        there = layer is not None and layer.has_previous_state[0]
        before = {"conv": layer.conv_states[0], "state": layer.recurrent_states[0]} if there else {}
        y, after = mixed(self.in_proj(hidden_states), self.conv, self.decay, before)
        if layer is not None:
            if not there:
                layer.lazy_initialization(conv_states=after["conv"], recurrent_states=after["state"])
                layer.has_previous_state[0] = True
            layer.conv_states[0].copy_(after["conv"])
            layer.recurrent_states[0].copy_(after["state"])
        return self.o_proj(y), None


class RecurrentLayer(LlamaDecoderLayer):
    def __init__(self, config: Any, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.layer_types[layer_idx] == "linear_attention":
            self.self_attn = Recurrence(config, layer_idx)


# ---- what infuse is told of it


@dataclass(frozen=True)
class Recurrent:
    module: str
    attention: Attention

    def of_layer(self, layer: nn.Module, config: Any) -> Any:
        return self if isinstance(layer.self_attn, Recurrence) else self.attention

    def bind(self, binder: Binder, name: str) -> RecurrentShape:
        binder.linear(f"{self.module}.in_proj")
        binder.linear(f"{self.module}.o_proj")
        binder.fill_linear(f"{name}.qkv", (f"{self.module}.in_proj",), bias=False)
        binder.fill_linear(f"{name}.out", (f"{self.module}.o_proj",), bias=False)
        for target in ("conv", "decay"):
            binder.claim(f"{self.module}.{target}")
            binder.fills.append(Fill(f"{name}.{target}", (f"{self.module}.{target}",)))
        return RecurrentShape(replaces=(self.module,))


@dataclass(frozen=True)
class RecurrentShape(MixerShape):
    heads: int = HEADS
    replaces: tuple[str, ...] = ()
    causal: bool = True
    inverted_mask: bool = False

    @property
    def state_values(self) -> int:
        return self.heads * (WIDTH * WIDTH + 3 * WIDTH * TAPS)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        heads = Extent(OF_HEADS, self.heads, WIDTH)
        return (
            Matrix("qkv", 3 * heads.length, HIDDEN, False, COLUMN, (heads, heads, heads)),
            Matrix("out", HIDDEN, heads.length, False, ROW, (heads,)),
        )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        heads = Extent(OF_HEADS, self.heads, WIDTH)
        return (
            *super().parameters,
            Parameter("conv", (heads, heads, heads)),
            Parameter("decay", (Extent(OF_HEADS, self.heads),)),
        )

    def of_rank(self, share: Share) -> RecurrentShape:
        return replace(self, heads=share.count(OF_HEADS))


SPEC = LLAMA.but(layer=path_of(RecurrentLayer), attn=Recurrent("self_attn", LLAMA.attn))  # type: ignore[arg-type]


# ---- and its layer


class RecurrentLayerOfOurs(Mixer[RecurrentShape]):
    def __init__(self, shape: RecurrentShape, context: BuildContext):
        super().__init__(shape, context)
        self.qkv, self.out = (context.linear(matrix) for matrix in shape.matrices)
        self.conv = nn.Parameter(torch.empty(3 * shape.heads * WIDTH, TAPS), requires_grad=False)
        self.decay = nn.Parameter(torch.empty(shape.heads), requires_grad=False)

    def mix(self, x_BTC: Tensor, inputs: Inputs, *_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        batch, tokens, _ = x_BTC.shape
        slot = self.states(inputs)
        before = {} if slot is None else dict(slot.begin(batch, tokens, self.filler))
        y, after = mixed(direct(self.qkv, x_BTC), self.conv, self.decay, before)
        if slot is not None:
            slot.end(tokens, after)
        return direct(self.out, y), None


LAYERS = {RecurrentShape: RecurrentLayerOfOurs}
