"""A mixture's block over few new tokens in one call of C++ against the same block part by part. Dense layers:
test_one_call.py; every family against the original: test_families.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse.architectures.parts.experts import ExpertsShape
from infuse.architectures.parts.moe import MoEShape
from infuse.architectures.parts.router import NormedRouterShape, RouterShape
from infuse.cache.kv_cache import KVCache
from infuse.ground.activations import ExpertGate
from infuse.ground.routing import Routing
from infuse.layers.block import Block
from infuse.layers.mixture.moe import MoE
from infuse.layers.native.one_call import StepCall
from infuse.native import kernels
from tests.models.families import BY_NAME, MIXTURES, Family, inputs
from tests.support.one_calls import blocks, calls_noted, decoded, listening, part_by_part
from tests.support.side_by_side import assert_close, original
from tests.support.tolerance import assert_near

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
# Why blocks of these families run part by part.
PART_BY_PART = {
    "phimoe": "sparse mixer",
    "hunyuan-moe": "norms after the rotation",
    "olmoe-clip": "clipped",
    "laguna": "output gate",
    "laguna-channels": "output gate",
    **dict.fromkeys(("llama4", "llama4-experts", "llama4-plain", "llama4-even"), "experts whose inputs are weighed"),
}
DECODERS = [family for family in MIXTURES if family.model.__name__.endswith("ForCausalLM")]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each block that was asked to make a step, whether it did it in one call."""
    return calls_noted(StepCall, monkeypatch)


def mixtures(engine: infuse.InferenceEngine) -> list[Block]:
    return [block for block in blocks(engine.module) if isinstance(block.mlp, MoE)]


def compare(engine: infuse.InferenceEngine, family: Family, dtype: torch.dtype, **how: object) -> None:
    """Both ways round between the parts of three layers: three times what one part may differ."""
    found = decoded(engine, family, **how)  # type: ignore[arg-type]
    with part_by_part(engine.module):
        wanted = decoded(engine, family, **how)  # type: ignore[arg-type]
    for a, b in zip(found, wanted, strict=True):
        assert_near(a, b, dtype, family.name, times=3)


@pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.name)
def test_every_family(family: Family, taken: list[bool]) -> None:
    engine = infuse.init_inference(family.make(), dtype=torch.float32)
    calls = {block._one_call is not None for block in mixtures(engine)}
    assert calls == {family.name not in PART_BY_PART}
    for batch, tokens in ((1, 1), (2, 3)):
        taken.clear()
        compare(engine, family, torch.float32, batch=batch, tokens=tokens)
        in_one = [block for block in blocks(engine.module) if block._one_call is not None]
        mixers: list[Any] = [block._modules[block._mixers[0]] for block in in_one]
        grow = [mixer for mixer in mixers if mixer.shape.growth is not None]  # from the first token
        at_once = [tokens <= getattr(mixer, "_most_absorbed", tokens) for mixer in mixers if mixer not in grow]
        assert taken.count(True) == 3 * sum(at_once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("quant", [None, "int8", "int4:32", "int4:32:asymmetric", "int8:a8", "fp8", "fp6", "mxfp4"])
def test_every_format(quant: str | None, dtype: torch.dtype, taken: list[bool]) -> None:
    family = BY_NAME["qwen2-moe"]
    wide = dict(hidden_size=64, moe_intermediate_size=64, shared_expert_intermediate_size=96)
    engine = infuse.init_inference(family.make(**wide), dtype=dtype, **({"quant": quant} if quant else {}))
    taken.clear()
    compare(engine, family, dtype, padding="left")
    assert any(taken)


def test_biases_and_limits_of_experts() -> None:
    """No family that is a block has them: experts like those of gpt-oss, put into a block."""
    family = BY_NAME["mixtral"]
    engine = infuse.init_inference(family.make(), dtype=torch.float32)
    for block in mixtures(engine):
        experts = block.mlp.experts
        for matrix in (experts.up, experts.down):
            matrix.bias = nn.Parameter(torch.randn(matrix.out_features), requires_grad=False)
        object.__setattr__(experts.shape, "gate", ExpertGate("quick_gelu", limit=0.7, up_offset=1.0))
        experts._after = (*experts.shape.gate,)
        block._one_call = StepCall(block, block._program, block._index)
    compare(engine, family, torch.float32)


@pytest.mark.parametrize("way", ["register_forward_hook", "register_forward_pre_hook", "forward"])
def test_whoever_listens_to_a_part_hears_it(way: str, taken: list[bool]) -> None:
    family = BY_NAME["qwen2-moe"]
    engine = infuse.init_inference(family.make(), dtype=torch.float32)
    block = blocks(engine.module)[1]
    heard: list[str] = []
    for name in ("mlp", "mlp.router", "mlp.experts", "mlp.shared", "mlp.shared.up", "mlp.shared_gate"):
        taken.clear(), heard.clear()
        with listening(block.get_submodule(name), way, lambda name=name: heard.append(name)):
            compare(engine, family, torch.float32)
        assert heard == [name] * 8, "the prompt and three steps, twice"
        assert taken.count(True) == 6, "the other two layers, three steps"


def test_routes_that_a_hook_changes_count(taken: list[bool]) -> None:
    """The block of that router runs part by part, its attention once."""
    family = BY_NAME["qwen2-moe"]
    engine = infuse.init_inference(family.make(), dtype=torch.float32)
    before = decoded(engine, family)
    seen: list[Tensor] = []

    def other(router: nn.Module, args: tuple, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(args[0].clone())
        return output[0], output[1].flip(1) * 2, (output[2] + 1) % 6

    handle = mixtures(engine)[1].mlp.router.register_forward_hook(other)  # type: ignore[union-attr]
    taken.clear()
    compare(engine, family, torch.float32)
    assert taken.count(True) == 6 and len(seen) == 8
    for a, b in zip(seen[:4], seen[4:], strict=True):
        assert_near(a, b, torch.float32, times=3)
    assert not torch.allclose(decoded(engine, family)[0], before[0], atol=1e-3)
    handle.remove()
    assert torch.equal(decoded(engine, family)[0], before[0])


def test_the_proof_takes_steps_in_one_call(taken: list[bool]) -> None:
    """On the routes that it feeds."""
    engine = infuse.init_inference(BY_NAME["qwen2-moe"].make(), dtype=torch.float32, verify="all")
    assert taken.count(True) == 4 * len(mixtures(engine))


def test_router_logits_are_recorded_in_steps_too() -> None:
    given = inputs(BY_NAME["mixtral"], batch=2)
    results = []
    for model in (original("mixtral"), infuse.init_inference(BY_NAME["mixtral"].make(), dtype="fp32")):
        with torch.no_grad():
            cache = model(**given, use_cache=True).past_key_values
            step = dict(input_ids=given["input_ids"][:, :1], past_key_values=cache, use_cache=True)
            results.append(model(**step, output_router_logits=True).router_logits)
    assert len(results[0]) == len(results[1]) == 3
    for wanted, found in zip(*results, strict=True):
        assert_close(found, wanted)


def test_a_recorder_that_records_nothing_costs_nothing(taken: list[bool]) -> None:
    """transformers' hooks stay on routers after the first call that asks for their logits."""
    family = BY_NAME["mixtral"]
    engine = infuse.init_inference(family.make(), dtype="fp32")
    with torch.no_grad():
        engine(**inputs(family), output_router_logits=True)
    assert all(block.mlp.router._forward_hooks for block in mixtures(engine))  # type: ignore[union-attr]
    taken.clear()
    compare(engine, family, torch.float32)
    assert taken.count(True) == 9


def doubled(path: str) -> Callable[[MoE], None]:
    """Double what a user finds at this path."""

    def change(mixture: MoE) -> None:
        tensor = mixture.get_parameter(path)
        tensor.data = tensor.data * 2

    return change


def biased(mixture: MoE) -> None:
    mixture.router.bias = nn.Parameter(torch.tensor([0.0, 9.0, 0.0, 9.0, 0.0, 0.0]), requires_grad=False)


def corrected(mixture: MoE) -> None:
    mixture.router.correction = torch.tensor([0.0, 9.0, 0.0, 9.0, 0.0, 0.0])


class Louder(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def louder(mixture: MoE) -> None:
    mixture.shared_gate.__class__ = Louder


def gate_biased(mixture: MoE) -> None:
    mixture.shared_gate.bias = nn.Parameter(torch.ones(1))


CHANGES = {
    path: doubled(path) for path in ("experts.up.weight", "router.weight", "shared.up.weight", "shared_gate.weight")
}
CHANGES |= {"bias": biased, "correction": corrected, "another class": louder, "the gate's bias": gate_biased}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_user_changes_in_a_mixture_counts(name: str) -> None:
    family = BY_NAME["qwen2-moe"]
    engine = infuse.init_inference(family.make(), dtype=torch.float32)
    before = decoded(engine, family)
    CHANGES[name](mixtures(engine)[0].mlp)  # type: ignore[arg-type]
    compare(engine, family, torch.float32)
    assert not torch.allclose(decoded(engine, family)[0], before[0], atol=1e-3)


def test_tied_logits_and_all_experts(taken: list[bool]) -> None:
    """Every expert has a twin; then one expert, and all of them chosen."""
    family = BY_NAME["qwen3-moe"]
    for changes in (dict(), dict(num_experts_per_tok=6), dict(num_experts=1, num_experts_per_tok=1)):
        model, other = (family.make(**changes) for _ in range(2))
        for each in (model, other):
            for path, parameter in each.named_parameters():
                if path.endswith("gate.weight") and parameter.shape[0] == 6:
                    parameter.data = parameter[::2].repeat_interleave(2, dim=0)
        engine = infuse.init_inference(model, dtype=torch.float32, verify="strict")
        taken.clear()
        given = inputs(family, batch=1)
        for step in (other, engine):
            with torch.no_grad():
                step.generate(**given, max_new_tokens=2, min_new_tokens=2)
        found, wanted = (run.generate(**given, max_new_tokens=6, do_sample=False) for run in (engine, other))
        assert torch.equal(found, wanted) and any(taken)


def test_mapped_experts_run_part_by_part(taken: list[bool]) -> None:
    """Python reads their pages before they are used."""
    family = BY_NAME["mixtral"]
    engine = infuse.init_inference(family.make(), dtype=torch.float32)
    used: list[Tensor | None] = []
    mixtures(engine)[0].mlp.experts.up.first_use = used.append
    taken.clear()
    compare(engine, family, torch.float32)
    assert len(used) == 8 and taken.count(True) == 6


def test_what_is_not_finite_stays_in_its_row() -> None:
    family = BY_NAME["qwen2-moe"]
    engine = infuse.init_inference(family.make(), dtype=torch.float32)
    given, cache = inputs(family, batch=3), KVCache()
    with torch.no_grad():
        engine(**given, past_key_values=cache, use_cache=True)
        embedded = engine.module.get_input_embeddings()(given["input_ids"][:, :1])
        embedded[1] = float("nan")
        out = engine(inputs_embeds=embedded, past_key_values=cache, use_cache=True).logits
    assert torch.isnan(out[1]).all() and torch.isfinite(out[0]).all() and torch.isfinite(out[2]).all()


def test_what_shapes_and_rules_can_say_is_known_to_the_call() -> None:
    """A field that is added is told to C++, or a reason to go part by part, or is known to be neither."""
    told = {
        "router", "experts", "shared", "gated", "hidden", "count", "inner", "gate", "bias", "correction", "rule",
        "correction_is_parameter", "groups", "top_k", "normalise", "least", "scale", "has_bias", "width",
        "jitter", "cap", "up_bias", "down_bias", "combine", "call", "norm", "post", "latent", "factor",
        "weighs_inputs",
    }  # fmt: skip
    for shape in (MoEShape, RouterShape, NormedRouterShape, ExpertsShape):
        assert not {field.name for field in fields(shape)} - told, shape
    assert ExpertGate._fields == ("activation", "gated", "limit", "limit_after", "up_offset", "first")
    refused = {"cap", "jitter"}  # by ops.cpu.router.numbers
    assert set(Routing._fields) - refused == {
        "top_k", "logits", "score", "rounded_score", "weights", "normalise", "eps", "least", "scale", "cast",
        "in_order", "groups", "kept", "ranked_by", "fill",
    }  # fmt: skip
