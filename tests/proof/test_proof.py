"""The proof at work: specs, weights and kernels broken on purpose are refused, the reason is in the plan, the model is
unharmed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from infuse import native
from infuse.apply.apply import apply
from infuse.architectures.layer import LayerSpec
from infuse.architectures.packing import BLOCKS, PER_HEAD
from infuse.architectures.parts.attention import NoPosition, Packed, Rotary, Separate
from infuse.architectures.parts.mlp import GatedMLP
from infuse.architectures.parts.norm import LAYER, Norm
from infuse.architectures.program import PARALLEL, PRE, SANDWICH
from infuse.config.inference import InferenceConfig
from infuse.ground.activations import Act
from infuse.ground.device import Device
from infuse.ground.errors import ProofError
from infuse.layers.attention.self_attention import Attention
from infuse.layers.block import Block
from infuse.ops import Body, registered
from infuse.plan.decide import make_plan
from infuse.plan.plan import Plan
from tests.models.families import BY_NAME, inputs
from tests.support.formerly_written import specs_for
from tests.support.tolerance import assert_near


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without C++ bodies a refused block has nothing to gain at the next depth: the model stays exactly what it was."""
    monkeypatch.setattr(native, "kernels", lambda: "not built here")


# The modules: `infuse.plan` as an attribute is the function.
APPLY, PLAN, COMPARE = (
    importlib.import_module(f"infuse.{name}") for name in ("apply.build", "plan.decide", "proof.compare")
)
RMS_1, RMS_2 = Norm("post_attention_layernorm", "rms"), Norm("input_layernorm", "rms")
_Q, _K, _V = (f"self_attn.{name}_proj" for name in "qkv")


def broken(**changes: Any) -> Callable[[LayerSpec], LayerSpec]:
    return lambda spec: spec.but(**changes)


# What is wrong: the family, and what is done to its spec. Shapes still fit, so that only the numbers can tell.
BROKEN: dict[str, tuple[str, Callable[[LayerSpec], LayerSpec]]] = {
    "rotary pairing": ("llama", broken(attn=dict(position=Rotary(interleaved=True)))),
    "rotary pairing, interleaved": ("cohere", broken(attn=dict(position=Rotary()))),
    "no rotary": ("llama", broken(attn=dict(position=NoPosition()))),
    "residual: parallel": ("llama", broken(residual=PARALLEL)),
    "residual: sandwich": ("llama", lambda spec: spec.but(residual=SANDWICH, norm2=None, post1=None, post2=spec.norm2)),
    "residual: pre": ("bert", broken(residual=PRE)),
    "residual: post to pre": ("opt-350m", broken(residual=PRE)),
    "residual: serial": ("gpt-neox", broken(residual=PRE)),
    "residual scale": ("granite", broken(residual_scale=None)),
    "norms swapped": ("llama", broken(norm1=RMS_1, norm2=RMS_2)),
    "norms of the sandwich swapped": ("gemma2", lambda spec: spec.but(post1=spec.post2, post2=spec.post1)),
    "norm: centred": ("llama", broken(norm1=Norm("input_layernorm", LAYER))),
    "norm: no offset": ("gemma", broken(norm1=Norm("input_layernorm", "rms"))),
    "packing: blocks for heads": ("gpt-neox", broken(attn=dict(qkv=Packed("attention.query_key_value", BLOCKS)))),
    "packing: blocks for groups": (
        "falcon-40b",
        broken(attn=dict(qkv=Packed("self_attention.query_key_value", BLOCKS))),
    ),
    "packing: heads for blocks": ("gpt2", broken(attn=dict(qkv=Packed("attn.c_attn", PER_HEAD)))),
    "packing: heads for groups": (
        "falcon-40b",
        broken(attn=dict(qkv=Packed("self_attention.query_key_value", PER_HEAD))),
    ),
    "keys for queries": (
        "opt",
        lambda spec: spec.but(attn=dict(qkv=Separate(spec.attn.qkv.k, spec.attn.qkv.q, spec.attn.qkv.v))),
    ),
    "values for keys": ("llama", broken(attn=dict(qkv=Separate(_Q, _V, _K)))),
    "gate and up swapped": (
        "llama",
        broken(mlp=GatedMLP(gate="mlp.up_proj", up="mlp.gate_proj", down="mlp.down_proj")),
    ),
    "activation": ("llama", broken(mlp=dict(activation=Act("gelu")))),
    "activation: tanh form": ("mpt", broken(mlp=dict(activation=Act("gelu_tanh")))),
    "scale": ("llama", broken(attn=dict(scale=0.5))),
    "scale: default": ("gpt-neo", broken(attn=dict(scale=None))),
    "no soft cap": ("gemma2", broken(attn=dict(softcap=None))),
    "qk-norms swapped": (
        "qwen3",
        broken(attn=dict(q_norm=Norm("self_attn.k_norm", "rms"), k_norm=Norm("self_attn.q_norm", "rms"))),
    ),
    "qk-norm: centred": ("qwen3", broken(attn=dict(q_norm=Norm("self_attn.q_norm", LAYER)))),
    "no ALiBi": ("bloom", broken(attn=dict(position=NoPosition()))),
    "mask upside down": ("mpt", broken(attn=dict(inverted_mask=False))),
    "no rotary table": ("gptj", broken(attn=dict(position=NoPosition()))),
}
CPU = Device("cpu", None, "a CPU", (), 2**33, (torch.float32, torch.bfloat16, torch.float16))


def planned(model: nn.Module, **keys: Any) -> tuple[Plan, InferenceConfig]:
    config = InferenceConfig(**{"dtype": "fp32", **keys})
    return make_plan(model, config, CPU), config


def applied(model: nn.Module, **keys: Any) -> Plan:
    plan, config = planned(model, **keys)
    return apply(plan, model, config)


def outputs(name: str, model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**inputs(BY_NAME[name]))[0]


def traces(model: nn.Module) -> tuple:
    hooks = [(path, len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for path, m in model.named_modules()]
    tensors = [
        (path, p.dtype, p.data_ptr(), p._version) for path, p in (*model.named_parameters(), *model.named_buffers())
    ]
    return hooks, tensors


def blocks(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Block)]


def break_specs(monkeypatch: pytest.MonkeyPatch, change: Callable[[LayerSpec], LayerSpec]) -> None:
    monkeypatch.setattr(PLAN, "specs_for", lambda layer: tuple(change(spec) for spec in specs_for(layer)))


# ---- broken specs ----


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.usefixtures("unread")
def test_a_broken_spec_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = BROKEN[what]
    model = BY_NAME[name].make()
    wanted = outputs(name, model)
    break_specs(monkeypatch, change)
    plan, config = planned(model)
    assert len(plan.steps) >= 3, str(plan)
    done = apply(plan, model, config)
    assert done.steps == () and blocks(model) == []
    refused = {left.path: left.why for left in done.left if left.why.startswith("refused: ")}
    assert set(refused) == {step.path for step in plan.steps}
    assert all("differs from the original by" in why or "not proven" in why for why in refused.values())
    assert "refused: " in str(done) and done.after_bytes == plan.before_bytes
    assert torch.equal(outputs(name, model), wanted)


def test_a_spec_that_overlooks_what_some_layers_do_is_refused_for_those(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its window the spec takes all layers of GPT-Neo for alike: the first is proven, and must not speak for
    the second.
    """
    name = "gpt-neo"
    model = BY_NAME[name].make()
    wanted = outputs(name, model)
    break_specs(monkeypatch, broken(attn=dict(window=None)))
    done = applied(model)
    assert [step.path for step in done.steps] == ["transformer.h.0", "transformer.h.2"] == blocks(model)
    assert [left.path for left in done.left if left.why.startswith("refused")] == ["transformer.h.1", "transformer.h.3"]
    assert_near(outputs(name, model), wanted, torch.float32)


@pytest.mark.usefixtures("unread")
def test_what_a_spec_does_not_claim_is_told_before_any_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    break_specs(monkeypatch, broken(attn=dict(q_norm=None)))
    model = BY_NAME["qwen3"].make()
    wanted = outputs("qwen3", model)
    done = applied(model)
    assert done.steps == () and "parameter self_attn.q_norm.weight (16,) is not claimed" in str(done)
    assert torch.equal(outputs("qwen3", model), wanted)


@pytest.mark.parametrize(
    "keys", [dict(dtype="bf16"), dict(dtype="fp32", quant="int8:16"), dict(dtype="bf16", quant="int4:16")], ids=str
)
def test_coarse_numbers_hide_nothing(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounding would cover is found: the structure is compared in float32. What is right passes in the same
    formats.
    """
    right, wrong = BY_NAME["llama"].make(), BY_NAME["llama"].make()
    applied(right, **keys)
    break_specs(monkeypatch, broken(mlp=dict(activation=Act("quick_gelu"))))
    done = applied(wrong, **keys)
    assert len(blocks(right)) == 3 and blocks(wrong) == [] and "in float32" in str(done)


# ---- the four ways to verify ----


def corrupt(monkeypatch: pytest.MonkeyPatch, layer: nn.Module) -> None:
    """Weights of what replaces `layer` go wrong on their way."""
    fill = APPLY.fill_module

    gate = layer.get_parameter("mlp.gate_proj.weight")

    def wrong(module: nn.Module, fills: Any, source: Any, *how: Any) -> None:
        fill(module, fills, source, *how)
        merges = any("mlp.gate_proj.weight" in target.sources for target in fills)
        if merges and source("mlp.gate_proj.weight").read() is gate:
            with torch.no_grad():  # the merged matrix is new; the original's own must stay as they are
                module.get_parameter("mlp.up.weight").mul_(1.01)

    monkeypatch.setattr(APPLY, "fill_module", wrong)


def test_all_proves_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["llama"].make()
    wanted = outputs("llama", model)
    corrupt(monkeypatch, model.model.layers[1])
    done = applied(model, verify="all")
    assert blocks(model) == ["model.layers.0", "model.layers.2"]
    assert [left.path for left in done.left if left.why.startswith("refused")] == ["model.layers.1"]
    assert_near(outputs("llama", model), wanted, torch.float32)


def test_sample_proves_one_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["llama"].make()
    wanted = outputs("llama", model)
    corrupt(monkeypatch, model.model.layers[1])
    applied(model, verify="sample")
    assert len(blocks(model)) == 3, "the first layer speaks for all: that is what a sample is"
    assert float((outputs("llama", model) - wanted).abs().max()) > 1e-3


@pytest.mark.parametrize(("verify", "times"), [("sample", 1), ("all", 3)])
def test_layers_that_differ_only_in_formats_are_compared_in_float32_once(
    verify: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind is still compared with the original as it will run."""
    structure, result = Mock(wraps=COMPARE.structure_mismatch), Mock(wraps=COMPARE.result_mismatch)
    monkeypatch.setattr(COMPARE, "structure_mismatch", structure)
    monkeypatch.setattr(COMPARE, "result_mismatch", result)
    model = BY_NAME["llama"].make()
    names = {"0.self_attn.v_proj": "int4:32", "1.mlp.up_proj": None}
    quant = {"format": "int8", "weight": {"post_init_quant": names}}
    applied(model, verify=verify, quant=quant)
    assert len(blocks(model)) == 3 and structure.call_count == times
    steps = [call.args[1].path for call in result.call_args_list]
    assert [path for path in steps if ".layers." in path] == [f"model.layers.{n}" for n in range(3)]


@pytest.mark.parametrize("keys", [dict(dtype="fp32"), dict(dtype="bf16")], ids=str)
@pytest.mark.parametrize("what", ["rotary pairing", "packing: heads for groups"])
def test_strict_raises_and_leaves_the_model_as_it_was(
    what: str, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change = BROKEN[what]
    model = BY_NAME[name].make()
    wanted = outputs(name, model)
    before = [(path, id(m), type(m)) for path, m in model.named_modules()], traces(model)
    break_specs(monkeypatch, change)
    with pytest.raises(ProofError, match=r"layers\.0|h\.0"):
        applied(model, verify="strict", **keys)
    assert before == ([(path, id(m), type(m)) for path, m in model.named_modules()], traces(model))
    assert torch.equal(outputs(name, model), wanted)


def test_off_swaps_without_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["llama"].make()
    wanted = outputs("llama", model)
    break_specs(monkeypatch, BROKEN["rotary pairing"][1])
    monkeypatch.setattr(model.model, "forward", None)  # not even run
    assert len(applied(model, verify="off").steps) == len(blocks(model)) == 3
    monkeypatch.undo()
    assert float((outputs("llama", model) - wanted).abs().max()) > 1e-2


# ---- models that cannot be run ----


def test_a_model_that_raises_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["llama"].make()
    wanted, forward = outputs("llama", model), Mock(side_effect=RuntimeError("not today"))
    monkeypatch.setattr(model.model, "forward", forward)
    done = applied(model)
    assert done.steps == () and blocks(model) == []
    assert "not proven: the model could not be run up to it (RuntimeError: not today)" in str(done)
    with pytest.raises(ProofError, match="not today"):
        applied(model, verify="strict")
    monkeypatch.undo()
    assert torch.equal(outputs("llama", model), wanted)


def test_a_layer_that_raises_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["gpt2"].make()
    monkeypatch.setattr(model.transformer.h[1].mlp, "act", None)
    done = applied(model, verify="all")
    assert "transformer.h.1" not in {step.path for step in done.steps}
    assert "'NoneType' object is not callable" in str(done)


def test_handing_on_to_continuous_batching_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys that are swapped on their way to the attention function are found."""
    attend = Attention._by_name

    def swapped(self: Attention, qkv: Tensor, *rest: Any) -> Any:
        return attend(self, qkv.flip(2), *rest)

    model = BY_NAME["llama"].make()
    monkeypatch.setattr(Attention, "_by_name", swapped)
    done = applied(model)
    assert blocks(model) == [] and "a continuous batch, prefill" in str(done)


def test_a_call_that_the_model_itself_refuses_is_no_part_of_the_proof() -> None:
    """Bloom unpacks its mask as [B, T], so that nobody can give it another one."""
    model = BY_NAME["bloom"].make()
    with pytest.raises(ValueError, match="too many values to unpack"):
        model(torch.ones(1, 4, dtype=torch.long), attention_mask=torch.zeros(1, 1, 4, 4))
    assert len(applied(model, verify="strict").steps) == 3


# ---- no traces ----


@pytest.mark.parametrize("name", ["llama", "llama-dynamic", "bert", "vit"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_proof_leaves_no_traces(name: str, dtype: str) -> None:
    """Hooks, dtypes, storages, versions, training flags and the global random state are what they were."""
    model = BY_NAME[name].make()
    list(model.modules())[-1].train()  # a linear: it does not mind, and its flag must stay
    plan, config = planned(model, dtype=dtype, verify="all")
    before, state, proven = traces(model), torch.get_rng_state(), []

    def look(done: int, total: int, what: str) -> None:
        if what == "proving":
            proven.append(done)
            assert torch.equal(torch.get_rng_state(), state) and traces(model) == before

    done = apply(plan, model, config, look)
    assert len(proven) == len(plan.steps) == len(done.steps)


def test_progress_is_told() -> None:
    model, told = BY_NAME["llama"].make(), []
    plan, config = planned(model, verify="all")
    apply(plan, model, config, lambda done, total, what: told.append((what, done, total)))
    assert told == [("proving", i, 3) for i in (1, 2, 3)] + [("replacing", i, 3) for i in (1, 2, 3)]


# ---- broken bodies ----


def nearly(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """An RMS norm that adds 1 % to the last channel and is else right."""
    out = registered()["rms_norm"].reference(x, weight, *rest)
    out[..., -1] *= 1.01
    return out


def raises(*args: Any) -> Tensor:
    raise RuntimeError("no such instruction")


def overwrites(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    out = registered()["rms_norm"].reference(x, weight, *rest)
    x.zero_()
    return out


def poisoned(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return registered()["rms_norm"].reference(x, weight, *rest).index_fill(-1, torch.tensor([0]), float("nan"))


def wrong_for_many(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Wrong where kernels for many rows begin."""
    out = registered()["rms_norm"].reference(x, weight, *rest)
    return out * 1.01 if x.numel() // x.shape[-1] > 28 else out


BODIES = [
    (nearly, "differs"),
    (wrong_for_many, "differs"),
    (raises, "no such instruction"),
    (overwrites, "written to"),
    (poisoned, "differs from the original by inf"),
]


@pytest.mark.parametrize(("body", "why"), BODIES)
def test_a_broken_body_is_refused(body: Callable, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["llama"].make()
    wanted = outputs("llama", model)
    monkeypatch.setitem(registered()["rms_norm"].bodies, "cpu", Body("cpu", body, lambda device, dtype: None))
    plan, config = planned(model)
    assert ("rms_norm", "cpu") in plan.steps[0].bodies
    done = apply(plan, model, config)
    assert done.steps == () and blocks(model) == [] and why in str(done)
    assert torch.equal(outputs("llama", model), wanted)


# Calls that users make and a first prompt with one step of decoding is not: the family, and how such a call is told
# apart.
CALLS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor | None], bool]]] = {
    "several tokens": ("llama", lambda q, k, mask: q.shape[2] == 2),
    "a static cache, prefill": ("llama", lambda q, k, mask: q.shape[2] == 5 and k.shape[2] == 12),
    "a static cache, decode": ("llama", lambda q, k, mask: q.shape[2] == 1 and k.shape[2] == 12),
    "two texts in a row": ("llama", lambda q, k, mask: mask is not None and mask.is_floating_point()),
    "two texts in a row, prefill": ("bert", lambda q, k, mask: mask is not None and mask.is_floating_point()),
    "a full window, decode": ("starcoder2", lambda q, k, mask: q.shape[2] == 1 and k.shape[2] == 5),
    "a full window, our cache": (
        "starcoder2",
        lambda q, k, mask: q.shape[0] == 2 and not bool(mask[1, 0, -1, 0]) and k.shape[2] == 15,
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_body_that_is_wrong_in_one_kind_of_call_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, is_meant = CALLS[what]
    reference = registered()["attention"].reference

    def body(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
        out = reference(q, k, v, mask, *rest)
        return out * 1.5 if (mask is not None or q.shape[2] == 2) and is_meant(q, k, mask) else out

    model = BY_NAME[name].make()
    if name == "starcoder2":
        model.config.sliding_window = 64  # longer than what the proof reads, as those of real models are
    monkeypatch.setitem(registered()["attention"].bodies, "cpu", Body("cpu", body, lambda device, dtype: None))
    done = applied(model)
    assert blocks(model) == [] and what.partition(",")[0] in str(done), str(done)
    assert name != "starcoder2" or model.config.sliding_window == 64


@pytest.mark.parametrize("right_up_to", [None, 0, 28], ids=["right", "wrong", "wrong for many rows"])
def test_a_body_for_linears_is_proven_on_linears(right_up_to: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = right_up_to is not None

    def body(x: Tensor, weight: Tensor, bias: Tensor | None, *around: Any) -> Tensor:
        out = registered()["linear"].reference(x, weight, bias, *around)
        return out.roll(1, -1) if right_up_to is not None and x.numel() // x.shape[-1] > right_up_to else out

    model = BY_NAME["llama"].make()
    wanted = outputs("llama", model)
    monkeypatch.setitem(registered()["linear"].bodies, "cpu", Body("cpu", body, lambda device, dtype: None))
    done = applied(model)
    assert [step.path for step in done.steps] == (
        [] if wrong else ["model.layers.0", "model.layers.1", "model.layers.2", "lm_head"]
    )
    refused = {left.path for left in done.left if left.why.startswith("refused")}
    linears = {
        name for name, module in model.named_modules() if type(module) is nn.Linear
    }  # all that is left to try then
    assert refused == ({f"model.layers.{i}" for i in range(3)} | linears if wrong else set())
    assert len(linears) == (22 if wrong else 0)
    assert_near(outputs("llama", model), wanted, torch.float32)
