"""Routers choose and weigh experts bit for bit as transformers' own: the same logits, index and weights."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infuse.architectures.bind import Binder
from infuse.architectures.families.mixtures import (
    DEEPSEEK_ROUTER,
    ERNIE_ROUTER,
    GRANITE_ROUTER,
    HUNYUAN_ROUTER,
    HY_ROUTER,
    MINIMAX_ROUTER,
    MIXTRAL_ROUTER,
    PHI_ROUTER,
    QWEN_ROUTER,
)
from infuse.architectures.parts.router import Groups, Router
from infuse.ground.routing import (
    ACTIVATIONS,
    FLOAT32,
    MAX,
    PICKED,
    SIGMOID,
    SIGMOID_OF_SCORES,
    SOFTMAX_OF_SCORES,
    SQRT_SOFTPLUS,
    WIDENED,
)
from infuse.layers.mixture.router import Router as RouterLayer
from infuse.ops.router import sparse_mixer
from infuse.weights.fill import fill_module
from infuse.weights.lazy import live

HIDDEN, TOKENS = 32, 33
BIAS = "mlp.gate.e_score_correction_bias"
# Class, by its folder and name in transformers → its rule: one for each distinct forward, more where we have specs.
RULES: dict[str, Router] = {
    "mixtral.MixtralTopKRouter": MIXTRAL_ROUTER,
    "minimax.MiniMaxTopKRouter": MIXTRAL_ROUTER,
    "qwen2_moe.Qwen2MoeTopKRouter": QWEN_ROUTER,
    "qwen3_moe.Qwen3MoeTopKRouter": QWEN_ROUTER,
    "olmoe.OlmoeTopKRouter": QWEN_ROUTER,
    "flex_olmo.FlexOlmoTopKRouter": QWEN_ROUTER,
    "qwen3_vl_moe.Qwen3VLMoeTextTopKRouter": replace(QWEN_ROUTER, normalise=True),
    "jamba.JambaTopKRouter": Router("mlp.gate", cast=ACTIVATIONS),
    "deepseek_v3.DeepseekV3TopkRouter": DEEPSEEK_ROUTER,
    "glm4_moe.Glm4MoeTopkRouter": DEEPSEEK_ROUTER,
    "dots1.Dots1TopkRouter": DEEPSEEK_ROUTER,
    "exaone_moe.ExaoneMoeTopkRouter": DEEPSEEK_ROUTER,
    "solar_open.SolarOpenTopkRouter": DEEPSEEK_ROUTER,
    "beam.BeamTopKRouter": replace(DEEPSEEK_ROUTER, scale=None, in_order=True),
    "mistral4.Mistral4TopkRouter": Router(
        "mlp.gate", rounded_score=True, groups=Groups(fill=0.0), normalise="norm_topk_prob", eps=1e-20,
        scale="routed_scaling_factor", in_order=False,
    ),
    "deepseek_v2.DeepseekV2TopkRouter": Router(
        "mlp.gate", logits=FLOAT32, groups=Groups(MAX, fill=0.0), weights=PICKED, scale="routed_scaling_factor",
        in_order=False,
    ),
    "deepseek_v4.DeepseekV4TopKRouter": Router(
        "mlp.gate", score=SQRT_SOFTPLUS, rounded_score=True, correction=BIAS, normalise=True, eps=1e-20,
        scale="routed_scaling_factor", in_order=False,
    ),
    "gpt_oss.GptOssTopKRouter": Router("mlp.gate", score=None, rounded_score=True, weights=SOFTMAX_OF_SCORES),
    "aria.AriaTextTopKRouter": Router("mlp.gate", score=None, rounded_score=True, weights=SOFTMAX_OF_SCORES),
    "granitemoe.GraniteMoeTopKRouter": replace(GRANITE_ROUTER, module="mlp.gate"),
    "granitemoeshared.GraniteMoeSharedTopKRouter": replace(GRANITE_ROUTER, module="mlp.gate"),
    "phimoe.PhimoeTopKRouter": replace(PHI_ROUTER, module="mlp.gate"),
    "ernie4_5_moe.Ernie4_5_MoeTopKRouter": ERNIE_ROUTER,
    "minimax_m2.MiniMaxM2TopKRouter": MINIMAX_ROUTER,
    "step3p7.Step3p7TopKRouter": replace(MINIMAX_ROUTER, correction=BIAS),
    "hunyuan_v1_moe.HunYuanMoEV1Gate": HUNYUAN_ROUTER,
    "hy_v3.HYV3TopKRouter": HY_ROUTER,
    "afmoe.AfmoeTokenChoiceRouter": Router(
        "mlp.gate", weight="gate.weight", logits=WIDENED, score=SIGMOID, correction="mlp.expert_bias", normalise=True,
        eps=1e-20, scale="route_scale",
    ),
    "lfm2_moe.Lfm2MoeTopKRouter": Router(
        "mlp.gate", score=SIGMOID, rounded_score=True, correction="mlp.expert_bias", normalise="norm_topk_prob",
        eps=1e-6, scale="routed_scaling_factor",
    ),
    "laguna.LagunaTopKRouter": Router(
        "mlp.gate", logits=WIDENED, score=SIGMOID, correction=BIAS, normalise=True, cap="router_logit_softcapping",
        cast=ACTIVATIONS,
    ),
    "cohere2_moe.Cohere2MoeTopKRouter": Router(
        "mlp.gate", score=None, rounded_score=True, weights=SIGMOID_OF_SCORES, normalise="norm_topk_prob",
    ),
    "flint.FlintTopKRouter": Router("mlp.gate", logits=FLOAT32, score=SIGMOID, normalise="norm_topk_prob"),
    "kolibri1.Kolibri1TopKRouter": Router(
        "mlp.gate", logits=FLOAT32, score=None, correction=BIAS, weights=SIGMOID_OF_SCORES, normalise="norm_topk_prob",
    ),
}  # fmt: skip
# Not among them, since they are no such routers: llama4 (scores of all experts), gemma4 (norm and scales of its own),
# deepseek_v4's hash layers (chosen by token id), inkling, muse_spark, zaya, longcat_flash, dbrx, switch, nllb_moe.


# Keys that differ from those of `config`, and what is added to corrections. More experts of a token than two show the
# order of torch.topk; one group fewer than all, and fewer experts than are chosen, show the groups and their fill. So
# do corrections that make all scores negative.
OTHER_KEYS: dict[str, tuple[dict[str, Any], float]] = {
    "order": (dict(num_experts_per_tok=5, moe_topk=5, moe_k=5, topk_group=3), 0.0),
    "fill": (dict(num_experts_per_tok=4, moe_topk=4, moe_k=4, topk_group=1), 0.0),
    "negative": (dict(topk_group=1, norm_topk_prob=False), -2.0),
}


def config(experts: int, **changes: Any) -> Any:
    """Every key that a router reads."""
    keys: dict[str, Any] = dict(
        hidden_size=HIDDEN, num_experts=experts, num_local_experts=experts, n_routed_experts=experts,
        moe_num_experts=experts, num_experts_per_tok=2, moe_topk=2, norm_topk_prob=True, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, router_scaling_factor=1.7, route_scale=1.3, scoring_func="sqrtsoftplus",
        topk_method="group_limited_greedy", moe_norm_min=0.6, router_jitter_noise=0.05, input_jitter_noise=0.0,
        use_expert_bias=True, moe_router_logit_softcapping=1.5, expert_selection_fn="sigmoid", moe_k=2,
    )  # fmt: skip
    return SimpleNamespace(**{**keys, **changes})


def original(
    name: str, experts: int, dtype: torch.dtype, shift: float = 0.0, **changes: Any
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A layer that holds transformers' router at mlp.gate, and what its forward takes besides the hidden states."""
    folder, _, cls = name.partition(".")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    layer, more = nn.Module(), []
    layer.mlp = nn.Module()
    layer.mlp.gate = getattr(module, cls)(config(experts, **changes)).eval()
    if (path := RULES[name].correction) and path.count(".") == 1:  # held by the block
        layer.mlp.register_buffer(path.partition(".")[2], torch.zeros(experts))
        more.append(layer.mlp.get_buffer(path.partition(".")[2]))
    generator = torch.Generator().manual_seed(experts)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
            parameter.data = parameter.data.to(dtype)
        for buffer in layer.buffers():
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1 + shift)
    return layer, tuple(more)


def ours(layer: nn.Module, rule: Router, experts: int, dtype: torch.dtype, **changes: Any) -> RouterLayer:
    binder = Binder(layer, config(experts, **changes), 0, False)
    shape = rule.bind(binder, "router")
    assert not binder.differences and not binder.unclaimed()
    made = nn.Module()
    made.router = RouterLayer(shape)
    fill_module(made, binder.fills, live(layer), dtype, {})
    return made.router


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_logits_index_and_weights_are_the_originals(name: str, dtype: torch.dtype) -> None:
    for experts in (8, 256):  # torch.topk sorts the many in another way
        layer, more = original(name, experts, dtype)
        for tied in (False, True):
            if tied:  # each expert has a twin, so that all choices are between equals
                weight = next(p for p in layer.parameters() if p.shape == (experts, HIDDEN))
                weight.data[1::2] = weight.data[::2]
            router = ours(layer, RULES[name], experts, dtype)
            for tokens in (1, TOKENS):
                assert_alike(name, router, layer.mlp.gate, more, torch.randn(1, tokens, HIDDEN).to(dtype))


def assert_alike(name: str, router: RouterLayer, gate: nn.Module, more: tuple[Tensor, ...], x: Tensor) -> None:
    with torch.no_grad():
        wanted, found = gate(x if "afmoe" in name else x[0], *more), router(x)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("keys", OTHER_KEYS)
@pytest.mark.parametrize("name", [name for name in RULES if "phimoe" not in name])  # which always has two
def test_other_keys_give_the_originals_too(name: str, keys: str) -> None:
    changes, shift = OTHER_KEYS[keys]
    layer, more = original(name, 8, torch.float32, shift, **changes)
    router = ours(layer, RULES[name], 8, torch.float32, **changes)
    assert_alike(name, router, layer.mlp.gate, more, torch.randn(1, TOKENS, HIDDEN))


def test_an_expert_at_the_limit_of_the_sparse_mixer_is_near() -> None:
    weights, index = sparse_mixer(torch.tensor([[1.0, 0.5, 0.25]]), 0.25)  # half of the best: a distance of 2 * jitter
    assert index.tolist() == [[0, 1]]
    torch.testing.assert_close(weights[0, 0], torch.tensor([1.0, 0.5]).softmax(dim=0)[0])
    torch.testing.assert_close(weights[0, 1], torch.tensor([0.5, 0.25]).softmax(dim=0)[0])


def test_a_router_that_the_layer_does_not_have_is_told() -> None:
    layer, _ = original("qwen3_moe.Qwen3MoeTopKRouter", 8, torch.float32)
    for rule, wanted in (
        (replace(QWEN_ROUTER, weight="wg"), "there is no parameter mlp.gate.wg"),
        (replace(QWEN_ROUTER, scale="factor"), "mlp.gate has no factor"),
        (replace(QWEN_ROUTER, scale="training"), ""),
        (
            replace(QWEN_ROUTER, groups=Groups(count="hidden_dim", kept="top_k")),
            "32 groups do not divide the 8 experts",
        ),
        (replace(QWEN_ROUTER, correction="mlp.gate.weight"), "has shape (8, 32); there are 8 experts"),
    ):
        binder = Binder(layer, config(8), 0, False)
        rule.bind(binder, "router")
        assert wanted in "\n".join(binder.differences)
