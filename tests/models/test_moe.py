"""Mixtures as parts of blocks: which layers have experts, what is recorded and proven of routers, and formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import infuse
from infuse import architectures, ops
from infuse.architectures.families import mixtures
from infuse.architectures.layer import LayerSpec
from infuse.architectures.parts.experts import ExpertsShape
from infuse.architectures.parts.moe import MoE, MoEShape
from infuse.config.values import parse_dtype
from infuse.ground.activations import ExpertGate
from infuse.ground.dtype_cast import in_dtype
from infuse.ground.routing import SIGMOID
from infuse.layers.block import Block
from infuse.layers.mixture.experts import Experts
from infuse.layers.mixture.moe import MoE as MoELayer
from infuse.proof.routes import Route, routes_mismatch
from tests.models.families import BY_NAME, inputs
from tests.support.side_by_side import assert_close, injected, logits, original
from tests.support.tolerance import assert_near


def recorded(model: Any, name: str) -> tuple[Tensor, ...]:
    """Router logits [B T, E] of each layer that has a router."""
    with torch.no_grad():
        return model(**inputs(BY_NAME[name]), output_router_logits=True).router_logits


def routers(model: nn.Module) -> list[nn.Module]:
    return [module.router for module in model.modules() if isinstance(module, MoELayer)]


# ---- which layers have experts


@pytest.mark.parametrize(("name", "sparse"), [("mixtral", [0, 1, 2]), ("qwen3-moe", [0, 2]), ("glm4-moe", [1, 2])])
def test_each_layer_tells_whether_it_has_experts(name: str, sparse: list[int]) -> None:
    engine = injected(BY_NAME[name].make())
    shapes = [module.shape.parts["mlp"] for module in engine.module.modules() if isinstance(module, Block)]
    assert [i for i, shape in enumerate(shapes) if isinstance(shape, MoEShape)] == sparse and len(shapes) == 3


def test_what_a_mixture_has_besides_is_told() -> None:
    model = BY_NAME["mixtral"].make()
    model.model.layers[1].mlp.register_parameter("gain", nn.Parameter(torch.ones(2)))
    model.model.layers[2].mlp.gate.weight = nn.Parameter(torch.ones(5, 48))
    text = str(infuse.plan(model, dtype="fp32"))
    assert "parameter mlp.gain (2,) is not claimed" in text
    assert "mlp.gate chooses among 5 experts; mlp.experts has 4" in text


def test_what_a_gate_or_a_sum_of_experts_may_not_be_is_told() -> None:
    cohere, laguna = BY_NAME["cohere2-moe"].make(), BY_NAME["laguna"].make()
    cohere.model.layers[1].mlp.shared_expert_combination_strategy = "max"
    laguna.model.layers[1].self_attn.g_proj = nn.Linear(48, 9, bias=False)
    told = "mlp.shared_expert_combination_strategy is 'max'; only 'sum' and 'average' are understood"
    assert told in str(infuse.plan(cohere, dtype="fp32"))
    assert "self_attn.g_proj has 9 outputs; 6 heads of 12 want 6 or 72" in str(infuse.plan(laguna, dtype="fp32"))


@pytest.mark.parametrize("name", ["laguna", "cohere2-moe"])
def test_quantized_gates_and_shared_experts(name: str) -> None:
    """The values of the original with the same weights, rounded to the format."""
    engine = injected(BY_NAME[name].make(), quant="int8:4")
    held = [step for step in engine.plan.steps if step.depth == "block"]
    assert all("self_attn.gate.weight" in step.formats for step in held) == (name == "laguna")
    with infuse.dequantized(engine.module):
        state = engine.module.state_dict()
    rounded = BY_NAME[name].make()
    rounded.load_state_dict(state)
    assert_close(logits(engine, **inputs(BY_NAME[name])), logits(rounded, **inputs(BY_NAME[name])))


# ---- what transformers records


@pytest.mark.parametrize("name", ["mixtral", "phimoe", "granite-moe", "glm4-moe", "ernie4_5-moe"])
@pytest.mark.parametrize("before", [False, True])
def test_router_logits_are_recorded(name: str, before: bool) -> None:
    """Also on a model that recorded before: transformers puts its hooks in at the first such call."""
    model = BY_NAME[name].make()
    exact = recorded(model if before else original(name), name)
    engine = injected(model)
    found = recorded(engine, name)
    assert len(found) == len(exact) == len(routers(engine.module))
    for a, b in zip(found, exact, strict=True):
        assert_close(a, b)


def test_a_router_stays_an_instance_of_its_class() -> None:
    engine = injected(BY_NAME["mixtral"].make())
    assert all(isinstance(router, MixtralTopKRouter) and router.num_experts == 4 for router in routers(engine.module))


def test_hooks_on_a_router_of_the_caller_are_called() -> None:
    seen: list[Tensor] = []
    model = BY_NAME["mixtral"].make()
    model.model.layers[0].mlp.gate.register_forward_hook(lambda router, args, output: seen.append(output[0]))
    engine = injected(model)
    seen.clear()  # the proof runs it
    logits(engine, **inputs(BY_NAME["mixtral"]))
    assert len(seen) == 1 and seen[0].shape == (22, 4)


# ---- proof


def with_router(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Mixtral's spec says these words of its router, as long as the patch holds."""
    spec: LayerSpec = mixtures.MIXTRAL
    assert isinstance(spec.mlp, MoE)
    wrong = spec.but(mlp=dict(router=replace(spec.mlp.router, **changes)))
    monkeypatch.setattr(architectures, "BY_CLASS", {**architectures.BY_CLASS, spec.layer: (wrong,)})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (dict(normalise=False), "weighs experts differently"),
        (dict(score=SIGMOID), "weighs experts differently"),
        (dict(cast="activations"), "weights are torch.bfloat16, not torch.float32"),
    ],
)
def test_a_wrong_router_is_refused(changes: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_router(monkeypatch, **changes)
    with pytest.raises(infuse.ground.errors.ProofError, match=told):
        infuse.init_inference(BY_NAME["mixtral"].make(), dtype="bf16", verify="strict")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["mixtral", "glm4-moe", "granite-moe", "phimoe"])
def test_tied_logits_choose_the_originals_experts(name: str, dtype: str) -> None:
    """All experts have equal logits, or every second one those of the one before."""
    family = BY_NAME[name]
    for equal in (True, False):
        model, other = family.make(), family.make()
        for each in (model, other):
            for path, parameter in each.named_parameters():
                if path.endswith(("gate.weight", "router.weight")) and parameter.shape[0] < 16:
                    parameter.data = parameter * 0 if equal else parameter[::2].repeat_interleave(2, dim=0)
        engine = infuse.init_inference(model, dtype=dtype, verify="strict")
        assert len(routers(engine.module)) > 1
        if dtype == "fp32":
            assert_close(logits(engine, **inputs(family)), logits(other, **inputs(family)))


@pytest.mark.parametrize("keys", [dict(dtype="bf16"), dict(dtype="bf16", quant="int8:8"), dict(dtype="fp32")], ids=str)
def test_a_model_in_16_bits_is_proven(keys: dict[str, Any]) -> None:
    """Its structure in float32: the matrices of experts are cast while the experts run."""
    model = BY_NAME["qwen2-moe"].make()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    engine = infuse.init_inference(model, verify="strict", **keys)
    assert len(routers(engine.module)) == 3


def route(logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor) -> Route:
    return Route((), logits_TE, weights_TK, index_TK)


def test_routes_from_equal_logits_must_be_equal_in_any_order() -> None:
    scores, weights, index = torch.randn(3, 4), torch.rand(3, 2), torch.tensor([[0, 1], [2, 3], [1, 3]])
    wanted = route(scores, weights, index)
    assert routes_mismatch([route(scores, weights.flip(1), index.flip(1))], [wanted], 0.0) is None
    assert "other experts" in str(routes_mismatch([route(scores, weights, (index + 1) % 4)], [wanted], 0.0))
    assert "weighs" in str(routes_mismatch([route(scores, weights + 1e-6, index)], [wanted], 0.0))
    assert "chooses 1 experts, not 2" in str(
        routes_mismatch([route(scores, weights[:, :1], index[:, :1])], [wanted], 0)
    )
    near = scores + 1e-6
    assert routes_mismatch([route(near, weights, (index + 1) % 4)], [wanted], 1e-5) is None
    assert "logits differ" in str(routes_mismatch([route(near, weights, index)], [wanted], 1e-8))


# ---- formats


def test_formats_apply_to_experts_and_not_to_routers() -> None:
    engine = infuse.init_inference(BY_NAME["qwen2-moe"].make(), dtype="bf16", quant="int8:8", verify="strict")
    step = next(step for step in engine.plan.steps if step.path == "model.layers.0")
    assert {"mlp.experts.up.weight", "mlp.experts.down.weight", "mlp.shared.up.weight"} <= step.formats.keys()
    assert not any("router" in target or "gate" in target for target in step.formats)
    mixture = engine.module.model.layers[0].mlp
    assert mixture.router.weight.dtype == mixture.shared_gate.weight.dtype == torch.bfloat16


# ---- what transformers keeps in float32


def gates(model: nn.Module) -> dict[str, Tensor]:
    """The router weights of ERNIE's layers, by the original's names."""
    return {name: value for name, value in model.state_dict().items() if name.endswith("mlp.gate.weight")}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_transformers_keeps_in_float32_stays_so(dtype: str, tmp_path: Path) -> None:
    """From a live model, from its checkpoint and from our shards, as transformers itself loads the checkpoint."""
    model = BY_NAME["ernie4_5-moe"].make()
    model.save_pretrained(tmp_path / "original")
    wanted = type(model).from_pretrained(tmp_path / "original", dtype=parse_dtype(dtype)).eval()
    exact = gates(wanted)
    assert exact and all(not torch.equal(one, one.to(parse_dtype(dtype)).float()) for one in exact.values())
    keys = dict(dtype=dtype, verify="strict", progress=False)
    engines = [infuse.init_inference(model, save_mp_checkpoint_path=str(tmp_path / "shards"), **keys)]
    for folder in ("original", "shards"):
        with torch.device("meta"):
            empty = type(model)(model.config)
        engines.append(infuse.init_inference(empty, checkpoint=str(tmp_path / folder), **keys))
    theirs = [module for module in wanted.modules() if isinstance(module, Ernie4_5_MoeTopKRouter)]
    x = torch.randn(19, model.config.hidden_size).to(parse_dtype(dtype))  # more than our kernel takes: the same bits
    for engine in engines:
        found = gates(engine.module)
        assert len(routers(engine.module)) == len(found) == len(exact)
        assert all(found[name].dtype == torch.float32 and torch.equal(found[name], exact[name]) for name in exact)
        assert engine.plan.after_bytes == sum(p.nbytes for p in tensors(engine.module))
        for router, original_router in zip(routers(engine.module), theirs, strict=True):
            with torch.no_grad():
                assert all(torch.equal(a, b) for a, b in zip(router(x), original_router(x), strict=True))
                assert_near(router(x[:1])[0], original_router(x[:1])[0], torch.float32)


def tensors(model: nn.Module) -> list[Tensor]:
    """Each parameter and buffer once."""
    return list({id(one): one for one in (*model.parameters(), *model.buffers())}.values())


def test_a_model_that_was_cast_as_a_whole_stays_in_16_bits() -> None:
    engine = injected(BY_NAME["ernie4_5-moe"].make().to(torch.bfloat16), dtype="bf16")
    assert {one.dtype for one in gates(engine.module).values()} == {torch.bfloat16}


def test_linears_and_experts_that_stay_in_float32_are_left() -> None:
    model = BY_NAME["ernie4_5-moe"].make()
    model._keep_in_fp32_modules_strict = ["layers.0.mlp", "layers.1.mlp.experts"]
    text = str(infuse.plan(model, dtype="bf16", replace_with_kernel_inject=False))
    assert "model.layers.0.mlp.down_proj: stays in float32, as transformers loads it" in " ".join(text.split())
    assert "its experts stay: gate_up_proj stays in float32" in text
    engine = infuse.init_inference(model, dtype="bf16")
    assert engine.module.model.layers[0].mlp.down_proj.weight.dtype == torch.float32
    assert engine.module.model.layers[1].mlp.experts.gate_up_proj.dtype == torch.float32
    # The inner model's own list counts too.
    assert engine.module.model.layers[2].mlp.router.weight.dtype == torch.float32


# ---- experts in another dtype


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_only_experts_in_use_are_cast(ours: bool, tokens: int) -> None:
    """The others hold NaN. Results are those of float32 copies, and afterwards all is as it was."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=32, num_experts=40)
    experts: Any = Qwen3MoeExperts(config).to(torch.bfloat16).requires_grad_(False)
    up, down = (nn.init.normal_(parameter, std=0.1) for parameter in (experts.gate_up_proj, experts.down_proj))
    x, weights = torch.randn(tokens, 64), torch.rand(tokens, 3)
    index = torch.rand(tokens, 20).topk(3).indices * 2
    unused = sorted(set(range(40)) - set(index.flatten().tolist()))
    up[unused], down[unused] = float("nan"), float("nan")
    tall = [matrix.data.flatten(0, 1) for matrix in (up, down)]
    if ours:
        experts = Experts(ExpertsShape(40, 64, 32, ExpertGate("silu")), {}, {})
        experts.up.weight, experts.down.weight = (nn.Parameter(matrix, requires_grad=False) for matrix in tall)
    held = [(parameter, parameter.data_ptr()) for parameter in experts.parameters()]
    with in_dtype(experts, torch.float32):
        found = experts(x, index, weights)
    wide = [matrix.float() for matrix in tall]
    wanted = ops.experts.reference(x, index, weights, wide[0], None, wide[1], None, "silu")
    assert found.dtype == torch.float32
    assert_near(found, wanted, torch.float32)
    assert all(parameter.data_ptr() == at and parameter.dtype == torch.bfloat16 for parameter, at in held)
    assert experts.num_experts == 40 and len(unused) >= 20
