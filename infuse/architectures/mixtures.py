"""Mixtures of experts: their routers, and decoders whose feed-forward part is a mixture."""

from infuse.architectures.router import (
    ACTIVATIONS,
    FLOAT32,
    LOGITS,
    SIGMOID,
    SOFTMAX_OF_SCORES,
    SPARSE_MIXER,
    WIDENED,
    Groups,
    Router,
)

_BIAS = "e_score_correction_bias"

MIXTRAL_ROUTER = Router("mlp.gate", normalise=True)
QWEN_ROUTER = Router("mlp.gate", normalise="norm_topk_prob", cast=LOGITS)
DEEPSEEK_ROUTER = Router(
    "mlp.gate", logits=FLOAT32, score=SIGMOID, correction=f"mlp.gate.{_BIAS}", groups=Groups(),
    normalise="norm_topk_prob", eps=1e-20, scale="routed_scaling_factor", in_order=False,
)  # fmt: skip
GRANITE_ROUTER = Router(
    "block_sparse_moe.router", logits=WIDENED, score=None, weights=SOFTMAX_OF_SCORES, cast=ACTIVATIONS
)
PHI_ROUTER = Router("mlp.router", score=SPARSE_MIXER, rounded_score=True, jitter="router_jitter_noise")
ERNIE_ROUTER = Router(
    "mlp.gate", logits=FLOAT32, correction=f"mlp.gate.moe_statics.{_BIAS}", normalise=True, least="norm_min",
    cast=ACTIVATIONS,
)  # fmt: skip
MINIMAX_ROUTER = Router("mlp.gate", score=SIGMOID, correction=f"mlp.{_BIAS}", normalise=True, in_order=False)
HUNYUAN_ROUTER = Router("mlp.gate", weight="wg.weight", bias="wg.bias", normalise=True, cast=LOGITS)
HY_ROUTER = Router(
    "mlp.gate", logits=FLOAT32, score=SIGMOID, correction=f"mlp.{_BIAS}", normalise=True, eps=1e-20,
    scale="router_scaling_factor", in_order=False,
)  # fmt: skip
