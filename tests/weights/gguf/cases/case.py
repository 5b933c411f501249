"""What a case of a family is, and the names and sizes that most cases have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GEMMA = LAYER | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
QWEN_MOE = LAYER | {
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
EXPERTS = {"expert_count": 4, "expert_used_count": 2}

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """`changes` of a config of `model_type`; the names of tensors in a layer; and more keys of the file.

    `written`: changes the tensors, by their names in the file, to what the converter writes. `top`: names outside of
    layers. `layer_norm`: whether a `norm` that does not say `rms` is one. `codes`: the type of matrices in a quantized
    file. `dequantized`: a matrix whose codes are not kept, as the plan says.
    """

    architecture: str
    model_type: str
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    changes: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False
    shifted: bool = False
    norm: str = "rms_norm_eps"
    layer_norm: bool = True
    written: Callable[[Tensors, Any], None] = lambda tensors, config: None
    top: Mapping[str, str] = field(default_factory=dict)
    codes: str = "Q8_0"
    dequantized: str = ""
