"""The ops: each file declares its own, and importing this package registers them all."""

import infuse.ops.cpu.activation  # noqa: F401  (declares bodies)
import infuse.ops.cpu.attention  # noqa: F401  (declares bodies)
import infuse.ops.cpu.experts  # noqa: F401  (declares bodies)
import infuse.ops.cpu.group_norm  # noqa: F401  (declares bodies)
import infuse.ops.cpu.joined  # noqa: F401  (declares bodies)
import infuse.ops.cpu.latent_attention  # noqa: F401  (declares bodies)
import infuse.ops.cpu.linear  # noqa: F401  (declares bodies)
import infuse.ops.cpu.modulated  # noqa: F401  (declares bodies)
import infuse.ops.cpu.norm  # noqa: F401  (declares bodies)
import infuse.ops.cpu.quantize  # noqa: F401  (declares bodies)
import infuse.ops.cpu.quantized_linear  # noqa: F401  (declares bodies)
import infuse.ops.cpu.recurrence  # noqa: F401  (declares bodies)
import infuse.ops.cpu.rotary  # noqa: F401  (declares bodies)
import infuse.ops.cpu.router  # noqa: F401  (declares bodies)
import infuse.ops.cpu.selective_scan  # noqa: F401  (declares bodies)
import infuse.ops.dequantized  # noqa: F401  (declares bodies)
import infuse.ops.triton.activation  # noqa: F401  (declares bodies)
import infuse.ops.triton.attention  # noqa: F401  (declares bodies)
import infuse.ops.triton.experts  # noqa: F401  (declares bodies)
import infuse.ops.triton.group_norm  # noqa: F401  (declares bodies)
import infuse.ops.triton.joined  # noqa: F401  (declares bodies)
import infuse.ops.triton.linear  # noqa: F401  (declares bodies)
import infuse.ops.triton.modulated  # noqa: F401  (declares bodies)
import infuse.ops.triton.norm  # noqa: F401  (declares bodies)
import infuse.ops.triton.quantized_linear  # noqa: F401  (declares bodies)
import infuse.ops.triton.recurrence  # noqa: F401  (declares bodies)
import infuse.ops.triton.rotary  # noqa: F401  (declares bodies)
import infuse.ops.triton.selective_scan  # noqa: F401  (declares bodies)
from infuse.ground.activations import ExpertGate
from infuse.ops.activation import activation, gated_activation
from infuse.ops.attention import attention, attention_weights, both_masks
from infuse.ops.causal_conv import causal_conv
from infuse.ops.decay import decay
from infuse.ops.dequantized import HELD
from infuse.ops.embedding import quantized_embedding
from infuse.ops.experts import experts, quantized_experts
from infuse.ops.gated_norm import gated_norm
from infuse.ops.group_norm import group_norm
from infuse.ops.joined import joined_heads
from infuse.ops.latent_attention import latent_attention
from infuse.ops.linear import FEW_ROWS, NO_NORM, linear, quantized_linear
from infuse.ops.modulated import gated_add, gated_add_norm, modulated_norm
from infuse.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from infuse.ops.op import PREFERENCE, REFERENCE, Body, Bound, Case, Choice, Op, registered
from infuse.ops.quantize import dequantize, quantize
from infuse.ops.recurrence import linear_attention
from infuse.ops.rotary import rotary, rotary_append
from infuse.ops.router import router
from infuse.ops.selective_scan import selective_scan

__all__ = [
    "FEW_ROWS", "HELD", "NO_NORM", "PREFERENCE", "REFERENCE", "Body", "Bound", "Case", "Choice", "ExpertGate", "Op",
    "activation", "add_layer_norm", "add_rms_norm", "attention", "attention_weights", "both_masks", "causal_conv",
    "decay", "dequantize", "experts", "gated_activation", "gated_add", "gated_add_norm", "gated_norm", "group_norm",
    "joined_heads", "latent_attention", "layer_norm", "linear", "linear_attention", "modulated_norm", "quantize",
    "quantized_embedding", "quantized_experts", "quantized_linear", "registered", "rms_norm", "rotary",
    "rotary_append", "router", "selective_scan",
]  # fmt: skip
