"""Experts of mixtures, replaced alone: every class of transformers that has them, and whole models around them."""

from __future__ import annotations

import copy
import pickle
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers as t
from safetensors.torch import save_file
from torch import nn

import infuse
from infuse import ops
from infuse.architectures import SPECS
from infuse.architectures.families.deepseek import WITH_INDEXERS
from infuse.architectures.parts.experts import bind_experts, experts_in, is_experts
from infuse.architectures.parts.moe import MoE
from infuse.ground.device import Device
from infuse.ground.errors import CheckpointError, ConfigError, SpecMismatch, UnsupportedCall
from infuse.layers.mixture.experts import Experts
from infuse.ops import REFERENCE
from infuse.weights.fill import fill_module, source_tensors
from infuse.weights.lazy import live
from infuse.weights.safetensors_file import SafetensorsFile
from tests.models.every_architecture import architectures, first_output, tiny_model
from tests.models.experts import LEFT, classes, made
from tests.models.families import GQA, Family


@pytest.mark.parametrize("name", sorted(set(classes()) - {"Inkling2Experts"}))
def test_every_class_of_experts(name: str) -> None:
    """The same values as the original, and the original's tensors back from ours."""
    experts = made(name)
    assert is_experts(experts)
    if name in LEFT:
        with pytest.raises(SpecMismatch, match=LEFT[name]):
            bind_experts(experts, nn.Module())
        return
    bound = bind_experts(experts, nn.Module())
    new = Experts(bound.shape, {}, {})
    with torch.no_grad():
        fill_module(new, bound.fills, live(experts), torch.float32, {})
    x, index = torch.randn(9, 24), torch.rand(9, 5).argsort(dim=1)[:, :2]
    given = x, index, torch.rand(9, 2)
    with torch.no_grad():
        torch.testing.assert_close(new(*given), experts(*given), rtol=0, atol=5e-5)
    held = dict(experts.named_parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    targets = dict(new.named_parameters())
    back = {n: v for fill in bound.fills for n, v in source_tensors(fill, targets[fill.target], shapes).items()}
    assert back.keys() == held.keys() and all(torch.equal(back[one], held[one]) for one in held)


def test_all_classes_are_seen() -> None:
    assert len(classes()) >= 66 and LEFT.keys() <= classes().keys()


def test_the_documentation_tells_the_depth_of_each_mixture() -> None:
    """docs/experts.md: folders of transformers as blocks, as experts alone, or left, as specs and classes have it."""
    page = (Path(__file__).parents[2] / "docs" / "experts.md").read_text(encoding="utf-8")
    told: dict[str, list[str]] = {}
    for line in page.splitlines():
        depth, _, names = line.removeprefix("| ").partition(" | ")
        if line.startswith("| ") and depth in ("block", "experts", "left"):
            there = [name for name in re.findall(r"`(\w+)`", names) if find_spec(f"transformers.models.{name}")]
            told.setdefault(depth, []).extend(there)  # the page is of the newest transformers
    folder = {name: module.split(".")[2] for name, module in classes().items()}
    others = {"dbrx", "switch_transformers", "jetmoe", "longcat_flash", "nllb_moe"}
    parts = {spec: (spec.mlp, *dict(spec.more).values()) for spec in SPECS if spec not in WITH_INDEXERS}
    specs = (spec for spec, held in parts.items() if any(isinstance(getattr(part, "moe", part), MoE) for part in held))
    blocks = {spec.layer.split(".")[2] for spec in specs}
    left = {folder[name] for name in LEFT if name in folder} | {"jetmoe", "longcat_flash"}
    assert sorted(told["block"]) == sorted(blocks) and sorted(told["left"]) == sorted(left)
    assert sorted(told["experts"]) == sorted({*folder.values(), *others} - blocks - left)


# ---- whole models ----

MOE = dict(GQA, hidden_size=64, head_dim=16, intermediate_size=64, num_hidden_layers=2)
FAMILIES = {
    one.name: one
    for one in (
        Family("mixtral", t.MixtralConfig, t.MixtralForCausalLM, values=dict(MOE, num_local_experts=4)),
        Family(
            "gpt_oss",
            t.GptOssConfig,
            t.GptOssForCausalLM,
            values=dict(MOE, num_local_experts=4, num_experts_per_tok=2, rope_parameters={"rope_type": "default"}),
        ),
        Family(
            "qwen2_moe",
            t.Qwen2MoeConfig,
            t.Qwen2MoeForCausalLM,
            values=dict(
                MOE, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, shared_expert_intermediate_size=64
            ),
        ),
        Family(
            "deepseek_v3",
            t.DeepseekV3Config,
            t.DeepseekV3ForCausalLM,
            values=dict(
                {name: value for name, value in MOE.items() if name not in ("head_dim", "num_key_value_heads")},
                n_routed_experts=8,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                n_group=2,
                topk_group=1,
                q_lora_rank=32,
                kv_lora_rank=32,
                qk_rope_head_dim=16,
                qk_nope_head_dim=16,
                v_head_dim=16,
                first_k_dense_replace=1,
            ),
        ),
    )
}

ALONE = dict(replace_with_kernel_inject=False)  # no whole blocks, so that experts are replaced alone


@pytest.fixture(autouse=True)
def a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body for plain experts also where the kernels are not built."""
    if ops.experts.choose(Device.of("cpu"), torch.float32).body == REFERENCE:
        body = ops.Body("torch", ops.experts.reference, lambda device, dtype: None)
        monkeypatch.setitem(ops.experts.bodies, "torch", body)


@cache
def original(name: str) -> nn.Module:
    return FAMILIES[name].make()


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # left padding
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    given = tokens()
    return model(**given).logits[given["attention_mask"].bool()].float()


def replaced(engine: infuse.InferenceEngine) -> list[Experts]:
    return [module for module in engine.module.modules() if isinstance(module, Experts)]


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_experts_in_models(name: str) -> None:
    model = copy.deepcopy(original(name))
    held = {key: value.clone() for key, value in model.state_dict().items()}
    paths = list(experts_in(model))
    engine = infuse.init_inference(model, dtype="fp32")
    assert len(replaced(engine)) == len(paths) > 0
    torch.testing.assert_close(logits(engine.module), logits(original(name)), rtol=0, atol=5e-5)
    wanted = original(name).generate(**tokens(), max_new_tokens=5, do_sample=False)
    assert torch.equal(engine.generate(**tokens(), max_new_tokens=5, do_sample=False), wanted)
    state = engine.module.state_dict()
    assert state.keys() == held.keys() and all(torch.equal(state[key], held[key]) for key in held)


@pytest.mark.parametrize(("name", "dtype"), [("mixtral", "bf16"), ("gpt_oss", "bf16"), ("qwen2_moe", "fp16")])
def test_experts_in_16_bits(name: str, dtype: str) -> None:
    """By the rule of the proof; `verify` raises where it does not hold."""
    engine = infuse.init_inference(copy.deepcopy(original(name)), dtype=dtype, verify="strict")
    assert replaced(engine)
    assert bool(torch.isfinite(logits(engine.module)).all())


@pytest.mark.parametrize("format", ["int8", "int4:32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_quantized_experts(name: str, format: str) -> None:
    """The values of the original with the same weights, rounded to the format; routers keep theirs."""
    engine = infuse.init_inference(copy.deepcopy(original(name)), dtype="fp32", quant=format)
    assert replaced(engine) and all(experts.up.format.name == format.partition(":")[0] for experts in replaced(engine))
    with infuse.dequantized(engine.module):
        state = engine.module.state_dict()
    rounded, held = copy.deepcopy(original(name)), original(name).state_dict()
    rounded.load_state_dict(state)
    torch.testing.assert_close(logits(engine.module), logits(rounded), rtol=0, atol=1e-4)
    for key, value in state.items():
        if any(word in key for word in (".gate.", ".router.", "shared_expert_gate")):
            assert torch.equal(value, held[key]), key
        elif key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            assert not torch.equal(value, held[key]), key
    engine.module.load_state_dict(held)  # quantized again, from the original's layout
    torch.testing.assert_close(logits(engine.module), logits(rounded), rtol=0, atol=1e-4)


def test_heavy_tails_pass_the_proof() -> None:
    """Student-t(3) weights fill the groups of int4 worse than normal ones: three products, each up to 1.85 times."""
    model = copy.deepcopy(original("mixtral"))
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        for parameter in layer.mlp.experts.parameters():
            normal = torch.randn(4, *parameter.shape, generator=generator)
            parameter.data = normal[0] / normal[1:].square().mean(dim=0).sqrt() / 8
    engine = infuse.init_inference(model, dtype="bf16", quant="int4", **ALONE)
    assert len(replaced(engine)) == 2 and "refused" not in str(engine.plan)


def test_experts_pickle_compile_and_have_gradients() -> None:
    given = torch.randn(5, 64), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    for quant in (None, "int8"):
        keys = {"quant": quant} if quant else {}
        engine = infuse.init_inference(copy.deepcopy(original("mixtral")), dtype="fp32", **keys)
        assert torch.equal(logits(pickle.loads(pickle.dumps(engine.module))), logits(engine.module))
        experts = replaced(engine)[0]
        traced = torch.compile(experts, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(traced(*given), experts(*given), rtol=0, atol=5e-5)
        x = given[0].clone().requires_grad_()
        if quant:
            with pytest.raises(UnsupportedCall, match="computes no gradients"):
                experts(x, *given[1:]).sum().backward()
        else:
            experts(x, *given[1:]).sum().backward()
            assert x.grad is not None and bool(x.grad.abs().sum() > 0)


def test_a_format_that_does_not_fit_is_told_with_numbers() -> None:
    family = FAMILIES["mixtral"]
    engine = infuse.init_inference(family.make(intermediate_size=48), dtype="fp32", quant="int4:64", **ALONE)
    told = [left.why for left in engine.plan.left if left.path.endswith("experts")]
    assert told and all("groups of 64 do not divide 48 inputs" in why for why in told)
    assert replaced(engine) and all(experts.up.weight.dtype == torch.float32 for experts in replaced(engine))


def test_formats_by_name_reach_experts() -> None:
    quant = {"weight": {"post_init_quant": {"layers.0.mlp.experts": {"num_bits": 4}}}}
    engine = infuse.init_inference(copy.deepcopy(original("mixtral")), dtype="fp32", quant=quant, **ALONE)
    assert {step.path: step.formats != {} for step in engine.plan.steps if step.depth == "experts"} == {
        "model.layers.0.mlp.experts": True,
        "model.layers.1.mlp.experts": False,
    }
    quant["weight"]["post_init_quant"] = {"no.such.experts": {"num_bits": 4}}
    with pytest.raises(ConfigError, match="no.such.experts"):
        infuse.init_inference(copy.deepcopy(original("mixtral")), dtype="fp32", quant=quant)


def test_routers_keep_their_precision_whatever_is_asked() -> None:
    """The gate of a shared expert is a linear with one output; a pattern that names it is no mistake."""
    quant = {"weight": {"post_init_quant": {"shared_expert_gate": {"num_bits": 8}}}}
    engine = infuse.init_inference(copy.deepcopy(original("qwen2_moe")), dtype="fp32", quant=quant)
    why = {left.path: left.why for left in engine.plan.left}
    assert "keeps its precision" in why["model.layers.0.mlp.shared_expert_gate"]
    assert not any("shared_expert_gate" in step.path for step in engine.plan.steps)


def test_what_is_not_ours_is_left_with_a_reason() -> None:
    """An unknown gate, a forward on the instance, a caller that reads more of its experts than their result."""
    model = copy.deepcopy(original("mixtral"))
    first, second = (layer.mlp.experts for layer in model.model.layers)
    first._apply_gate = lambda h: h.chunk(2, dim=-1)[0].sin() * h.chunk(2, dim=-1)[1]
    second.forward = type(second).forward.__get__(second)
    wanted = logits(copy.deepcopy(model))
    engine = infuse.init_inference(model, dtype="fp32")
    why = {left.path: left.why for left in engine.plan.left}
    assert "its gate is none" in why["model.layers.0.mlp.experts"]
    assert "a forward set on the instance" in why["model.layers.1.mlp.experts"]
    assert replaced(engine) == []
    torch.testing.assert_close(logits(engine.module), wanted, rtol=0, atol=5e-5)


def test_experts_whose_caller_reads_their_weights_are_refused() -> None:
    class Reads(type(original("mixtral").model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) + self.experts.down_proj.sum()

    model = copy.deepcopy(original("mixtral"))
    model.model.layers[1].mlp.__class__ = Reads
    engine = infuse.init_inference(model, dtype="fp32", **ALONE)
    assert len(replaced(engine)) == 1
    assert any("around it fails with the new" in left.why for left in engine.plan.left)


def test_save_pretrained_gives_the_original_back(tmp_path: Path) -> None:
    engine = infuse.init_inference(copy.deepcopy(original("mixtral")), dtype="fp32")
    engine.module.save_pretrained(tmp_path)
    again = t.MixtralForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(again), logits(original("mixtral")), rtol=0, atol=0)


@pytest.mark.parametrize("quant", [None, "int4:32"])
def test_saved_shards_hold_experts(tmp_path: Path, quant: str | None) -> None:
    given = dict(dtype="fp32", **({"quant": quant} if quant else {}))
    engine = infuse.init_inference(
        copy.deepcopy(original("gpt_oss")), save_mp_checkpoint_path=str(tmp_path), verify="strict", **given
    )
    with torch.device("meta"):
        empty = t.GptOssForCausalLM(original("gpt_oss").config)
    again = infuse.init_inference(empty, checkpoint=str(tmp_path), dtype="fp32")
    assert len(replaced(again)) == 2
    assert torch.equal(logits(again.module), logits(engine.module))


@pytest.mark.slow
def test_every_mixture_as_a_whole_model() -> None:
    """Every tiny model with experts that transformers can make: plain within 5e-5, every fourth one in int8 too.

    Those that cannot be made are in architectures_not_tiny.txt, with the reasons.
    """
    faults, seen = [], 0
    folders = {module.split(".")[2] for module in classes().values()} - {"kimi_linear"}  # whose attention takes minutes
    for kind, (config, model_class) in architectures().items():
        if model_class.__module__.split(".")[2] not in folders:
            continue
        model = tiny_model(config, model_class)
        paths = list(experts_in(model))
        wanted = first_output(model)
        for format in ((None, "int8:row") if seen % 4 == 0 else (None,)) if paths else ():
            given = {"quant": format} if format else {}
            engine = infuse.init_inference(copy.deepcopy(model), dtype="fp32", **given)
            ours = len(replaced(engine)) == len(paths) or any(why in str(engine.plan) for why in LEFT.values())
            error = float((first_output(engine.module) - wanted).abs().max())
            if not ours or (format is None and error > 5e-5):
                faults.append(f"{kind} {format}: {len(replaced(engine))} of {len(paths)}, off by {error:.1e}")
        seen += bool(paths)
    assert faults == [] and seen >= 45


# ---- checkpoints, which keep each expert's matrices alone ----


def saved(name: str, folder: Path) -> nn.Module:
    """The family's model on meta; its checkpoint, as transformers writes it, is in `folder`."""
    original(name).save_pretrained(folder)
    stored = SafetensorsFile(folder / "model.safetensors").stored
    assert any(".experts.0." in key for key in stored) and not any("gate_up_proj" in key for key in stored)
    with torch.device("meta"):
        return type(original(name))(original(name).config)


@pytest.mark.parametrize("quant", [None, "int4:32"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_checkpoints_with_experts(tmp_path: Path, name: str, quant: str | None) -> None:
    given = dict(dtype="fp32", **({"quant": quant} if quant else {}))
    wanted = infuse.init_inference(copy.deepcopy(original(name)), **given)
    found = infuse.init_inference(saved(name, tmp_path), checkpoint=str(tmp_path), **given)
    assert len(replaced(found)) == len(replaced(wanted)) > 0
    torch.testing.assert_close(logits(found.module), logits(wanted.module), rtol=0, atol=5e-5)


def test_a_checkpoint_without_one_expert(tmp_path: Path) -> None:
    model = saved("mixtral", tmp_path)
    path = tmp_path / "model.safetensors"
    file = SafetensorsFile(path)
    kept = {key: file.read(key).clone() for key in file.stored if "layers.1.block_sparse_moe.experts.3.w2" not in key}
    save_file(kept, path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj: 3 parts of \(64, 64\), the model"):
        infuse.init_inference(model, checkpoint=str(tmp_path), dtype="fp32")


@pytest.mark.parametrize("format", [None, "int8:8", "int4:8"])
def test_routes_of_a_caller_that_fit_no_token_or_expert(format: str | None) -> None:
    """Numbers that are no expert's add nothing, as transformers' own; shapes that do not fit are refused."""
    engine = infuse.init_inference(
        copy.deepcopy(original("mixtral")), dtype="fp32", **({"quant": format} if format else {})
    )
    experts = replaced(engine)[0]
    x, index, weights = torch.randn(3, 64), torch.tensor([[0, 3], [2, 1], [1, 0]]), torch.rand(3, 2)
    with torch.no_grad():
        exact = experts(x, index, weights)
        for number in (4, -1, 1 << 40, -(1 << 62)):
            other = index.clone()
            other[1] = number
            found = experts(x, other, weights)
            torch.testing.assert_close(found[::2], exact[::2])
            assert not found[1].any()
        assert experts(x[:0], index[:0], weights[:0]).shape == (0, 64)
        assert not experts(x, index[:, :0], weights[:, :0]).any()
        torch.testing.assert_close(experts(x, index.int(), weights.double()), exact)
        for wrong in (
            (x, index[:2], weights[:2]),
            (x, index, weights[:, :1]),
            (x, index[:, :1], weights),
            (x[:, :32], index, weights),
            (x[:2], index, weights),
        ):
            with pytest.raises(ValueError, match=r"needed: \[T, 64\], index \[T, K\] and weights \[T, K\]"):
                experts(*wrong)
