"""Experts that are not called by routes, or that lie in another way: Llama 4, DBRX, Switch; and those that stay."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import infuse
from infuse.architectures.parts.experts import ExpertsShape, bind_experts, experts_in
from infuse.architectures.ranks import experts_part
from infuse.layers.mixture.called_experts import CALLED
from infuse.layers.mixture.experts import Experts
from infuse.parallel.mesh import Mesh
from infuse.weights.fill import fill_module
from infuse.weights.lazy import live
from tests.models.families import Family
from tests.models.mixtures import FOUR_EXPERTS, NOT_ROUTED, SEQ2SEQ
from tests.support.ranks import Ranks, same

ALONE: dict[str, Any] = dict(replace_with_kernel_inject=False)  # Llama 4 and Switch have specs
STAY = {
    "nllb": (
        Family(
            "nllb", t.NllbMoeConfig, t.NllbMoeForConditionalGeneration, "seq2seq",
            dict(
                SEQ2SEQ, d_model=48, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=40, decoder_ffn_dim=40,
                encoder_attention_heads=4, decoder_attention_heads=4, encoder_sparse_step=2, decoder_sparse_step=2,
                max_position_embeddings=64,
            ),
        ),
        "its router passes a mask in place of the numbers of experts",
    ),
    "jetmoe": (
        Family("jetmoe", t.JetMoeConfig, t.JetMoeForCausalLM, values=dict(FOUR_EXPERTS, kv_channels=12)),
        "it holds one of its experts' two products",
    ),
    "longcat": (
        Family(
            "longcat", t.LongcatFlashConfig, t.LongcatFlashForCausalLM,
            values=dict(
                hidden_size=48, ffn_hidden_size=80, expert_ffn_hidden_size=40, num_layers=2, num_attention_heads=4,
                n_routed_experts=4, zero_expert_num=2, moe_topk=2, vocab_size=96, q_lora_rank=16, kv_lora_rank=16,
                qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=12, head_dim=8, max_position_embeddings=128,
            ),
        ),
        "its last experts return their input",
    ),
}  # fmt: skip


@cache
def original(name: str) -> nn.Module:
    return NOT_ROUTED[name].make()


def given(family: Family) -> dict[str, Tensor]:
    ids = torch.randint(3, 96, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if family.kind == "decoder":
        mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def logits(model: Any, family: Family) -> Tensor:
    values = given(family)
    if family.kind != "decoder":
        return model(**values, decoder_input_ids=values["input_ids"][:, :5]).logits.float()
    return model(**values).logits[values["attention_mask"].bool()].float()


def assert_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-5)


def replaced(engine: infuse.InferenceEngine) -> list[Experts]:
    return [module for module in engine.module.modules() if isinstance(module, Experts)]


@pytest.mark.parametrize("name", NOT_ROUTED)
def test_logits_tokens_and_weights_are_the_originals(name: str) -> None:
    family, model = NOT_ROUTED[name], copy.deepcopy(original(name))
    held = {key: value.clone() for key, value in model.state_dict().items()}
    engine = infuse.init_inference(model, dtype="fp32", verify="strict", **ALONE)
    assert len(replaced(engine)) == 2
    assert not any(".experts." in step.path for step in engine.plan.steps)  # no linears of single experts
    assert_near(logits(engine.module, family), logits(original(name), family))
    for how in (dict(do_sample=False), dict(do_sample=False, num_beams=2)):
        wanted = original(name).generate(**given(family), max_new_tokens=5, **how)
        assert torch.equal(engine.generate(**given(family), max_new_tokens=5, **how), wanted)
    state = engine.module.state_dict()
    assert state.keys() == held.keys() and all(torch.equal(state[key], held[key]) for key in held)


@pytest.mark.parametrize("name", NOT_ROUTED)
def test_16_bits_by_the_rule_of_the_proof(name: str) -> None:
    engine = infuse.init_inference(copy.deepcopy(original(name)), dtype="bf16", verify="strict", **ALONE)
    assert len(replaced(engine)) == 2 and bool(torch.isfinite(logits(engine.module, NOT_ROUTED[name])).all())


@pytest.mark.parametrize("format", ["int8:8", "int4:8"])
@pytest.mark.parametrize("name", NOT_ROUTED)
def test_quantized(name: str, format: str) -> None:
    """The values of the original with the same weights, rounded to the format."""
    family = NOT_ROUTED[name]
    engine = infuse.init_inference(copy.deepcopy(original(name)), dtype="fp32", quant=format, **ALONE)
    assert [str(experts.up.format) for experts in replaced(engine)] == [format] * 2
    with infuse.dequantized(engine.module):
        state = engine.module.state_dict()
    rounded = copy.deepcopy(original(name))
    rounded.load_state_dict(state)
    torch.testing.assert_close(logits(engine.module, family), logits(rounded, family), rtol=0, atol=1e-4)
    engine.module.load_state_dict(original(name).state_dict())  # quantized again, from the original's layout
    torch.testing.assert_close(logits(engine.module, family), logits(rounded, family), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NOT_ROUTED)
def test_checkpoints_of_transformers_and_of_ours(name: str, tmp_path: Path) -> None:
    family = NOT_ROUTED[name]
    original(name).save_pretrained(tmp_path / "theirs")
    for folder, keys in (("theirs", dict(save_mp_checkpoint_path=str(tmp_path / "ours"))), ("ours", {})):
        with torch.device("meta"):
            empty = type(original(name))(original(name).config)
        engine = infuse.init_inference(empty, checkpoint=str(tmp_path / folder), dtype="fp32", **keys, **ALONE)
        assert len(replaced(engine)) == 2
        assert_near(logits(engine.module, family), logits(original(name), family))


@pytest.mark.parametrize("mesh", [Mesh(ep=2), Mesh(tp=3), Mesh(tp=2, ep=2)], ids=str)
@pytest.mark.parametrize("name", NOT_ROUTED)
def test_the_parts_of_ranks_add_up(name: str, mesh: Mesh) -> None:
    path = next(iter(experts_in(original(name))))
    experts = original(name).get_submodule(path)
    bound = bind_experts(experts, original(name).get_submodule(path.rpartition(".")[0]))
    x, index, weights = torch.randn(9, 48), torch.rand(9, 4).argsort(dim=1)[:, :2], torch.rand(9, 2)
    one_hot = nn.functional.one_hot(index[:, :1], 4).index_fill(0, torch.tensor([3]), 0)
    call = {
        "llama4": ((x * torch.rand(4, 9, 1) * torch.randint(0, 2, (4, 9, 1))).flatten(0, 1),),
        "dbrx": (x.view(3, 3, 48), index, weights),
        "switch": (x, one_hot, weights[:, :1]),
    }[name]
    with torch.no_grad():
        wanted = experts(*call)
        found = torch.zeros_like(wanted)
        for rank in mesh.ranks():
            part = experts_part(bound.shape, bound.fills, rank, grain=1, multiples={})
            assert isinstance(part.shape, ExpertsShape)
            new = CALLED[part.shape.call](part.shape, {}, {})
            new.num_experts = 4
            fill_module(new, part.fills, live(experts), torch.float32, {})
            found += new(*call)
    assert_near(found, wanted)


def on_rank(name: str) -> tuple[Tensor, list[str]]:
    engine = infuse.init_inference(NOT_ROUTED[name].make(), dtype="fp32", progress=False, ep_size=2, **ALONE)
    told = [step.why for step in engine.plan.steps if step.depth == "experts" and "2 of 4 experts" in step.why]
    return logits(engine.module, NOT_ROUTED[name]), told


@pytest.mark.parametrize("name", NOT_ROUTED)
def test_ranks_with_whole_experts(name: str, ranks: Ranks) -> None:
    results = ranks.run(2, on_rank, name)
    assert same([found for found, _ in results]) and len(results[0][1]) == 2
    assert_near(results[0][0], logits(original(name), NOT_ROUTED[name]))


@pytest.mark.parametrize("name", STAY)
def test_experts_that_stay_are_told(name: str) -> None:
    family, why = STAY[name]
    how = ALONE if name == "nllb" else {}  # which has a spec of the layer
    engine = infuse.init_inference(family.make(), dtype="fp32", **how)
    told = [left.why for left in engine.plan.left if left.why.startswith("its experts stay")]
    assert replaced(engine) == [] and told and all(why in text for text in told)
    assert_near(logits(engine.module, family), logits(family.make(), family))
    if name == "nllb":  # its experts are linears besides
        assert any(".experts.expert_" in step.path for step in engine.plan.steps)
