"""A third branch: attention over an encoder's states, whose keys and values are computed once for an answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from infuse.architectures.bind import Binder
from infuse.architectures.families.llama import LLAMA
from infuse.architectures.part import COLUMN, ROW, Extent, Matrix, MixerShape, Share
from infuse.architectures.part import HEADS as OF_HEADS
from infuse.architectures.parts.norm import RMS, Norm
from infuse.architectures.program import ADD, ATTENTION, MLP, NORM, Step
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.inputs import Inputs
from infuse.layers.linear import direct
from infuse.layers.mixer import Mixer
from tests.parts.made_up import HEADS, HIDDEN, path_of

WIDTH = HIDDEN // HEADS
STATES = "encoder_hidden_states"


# ---- the original


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, hidden_states: Tensor, states: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
            for linear, x in ((self.q_proj, hidden_states), (self.k_proj, states), (self.v_proj, states))
        )
        return self.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class CrossLayer(LlamaDecoderLayer):
    def __init__(self, config: Any, layer_idx: int):
        super().__init__(config, layer_idx)
        self.cross, self.cross_norm = CrossAttention(), LlamaRMSNorm(HIDDEN)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **kwargs: Any) -> Tensor:  # type: ignore[override]
        assert encoder_hidden_states is not None
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        hidden_states = hidden_states + self.cross(self.cross_norm(hidden_states), encoder_hidden_states)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Reader(LlamaForCausalLM):
    """Reads the states of an encoder in each layer; where none are given, those of one empty token."""

    def forward(self, input_ids: Any = None, encoder_hidden_states: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        given = kwargs["inputs_embeds"] if input_ids is None else input_ids
        if encoder_hidden_states is None:
            encoder_hidden_states = torch.zeros(given.shape[0], 1, HIDDEN, dtype=self.dtype, device=self.device)
        return super().forward(input_ids, encoder_hidden_states=encoder_hidden_states, **kwargs)


# ---- what infuse is told of it


@dataclass(frozen=True)
class Cross:
    module: str

    def bind(self, binder: Binder, name: str) -> CrossShape:
        paths = {target: f"{self.module}.{target}_proj" for target in ("q", "k", "v", "o")}
        for path in paths.values():
            binder.linear(path)
        binder.fill_linear(f"{name}.q", (paths["q"],), bias=True)
        binder.fill_linear(f"{name}.kv", (paths["k"], paths["v"]), bias=True)
        binder.fill_linear(f"{name}.out", (paths["o"],), bias=True)
        return CrossShape(replaces=(self.module,))


@dataclass(frozen=True)
class CrossShape(MixerShape):
    heads: int = HEADS
    out_bias: bool = True
    replaces: tuple[str, ...] = ()
    causal: bool = True
    inverted_mask: bool = False

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        heads = Extent(OF_HEADS, self.heads, WIDTH)
        return (
            Matrix("q", heads.length, HIDDEN, True, COLUMN, (heads,)),
            Matrix("kv", 2 * heads.length, HIDDEN, True, COLUMN, (heads, heads)),
            Matrix("out", HIDDEN, heads.length, self.out_bias, ROW, (heads,)),
        )

    def of_rank(self, share: Share) -> CrossShape:
        return replace(self, heads=share.count(OF_HEADS), out_bias=share.is_first)


SPEC = LLAMA.but(
    layer=path_of(CrossLayer),
    more=(("cross", Cross("cross")), ("cross_norm", Norm("cross_norm", RMS))),
    program=(
        Step(NORM, "norm1"),
        Step(ATTENTION, "self_attn"),
        Step(ADD),
        Step(NORM, "cross_norm"),
        Step(ATTENTION, "cross", over=STATES),
        Step(ADD),
        Step(NORM, "norm2"),
        Step(MLP, "mlp"),
        Step(ADD),
    ),
    values=(STATES,),
)


# ---- and its layer


class CrossLayerOfOurs(Mixer[CrossShape]):
    def __init__(self, shape: CrossShape, context: BuildContext):
        super().__init__(shape, context)
        self.q, self.kv, self.out = (context.linear(matrix) for matrix in shape.matrices)
        self.computed = 0  # keys and values, how often

    def mix(self, x_BTC: Tensor, inputs: Inputs, states_BLC: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        k, v = self.made_once(inputs, states_BLC, self.keys_and_values)
        q = direct(self.q, x_BTC).unflatten(-1, (self.shape.heads, WIDTH)).transpose(1, 2)
        return direct(self.out, scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), None

    def keys_and_values(self, states_BLC: Tensor) -> tuple[Tensor, ...]:
        self.computed += 1
        kv = direct(self.kv, states_BLC).unflatten(-1, (2, self.shape.heads, WIDTH))
        return tuple(kv.permute(2, 0, 3, 1, 4))


LAYERS = {CrossShape: CrossLayerOfOurs}
