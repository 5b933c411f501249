"""DeepSpeed's own mixture layers, without DeepSpeed: what they compute, what is refused, ranks, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infuse
from tests.models.deepspeed_layers import Gated, MOELayer, ParallelMLP, mixture
from tests.models.families import BY_NAME, inputs
from tests.support.ranks import Ranks, same


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs(BY_NAME["gpt2"])).logits


CERTAIN = {"drop_tokens": False, "top2_2nd_expert_sampling": False}  # what no batch and no chance changes
PATHS = [f"transformer.h.{layer}.mlp.moe.deepspeed_moe" for layer in range(2)]


def replaced(plan: Any) -> list[str]:
    return [step.path for step in plan.steps if step.depth == "experts"]


def said(model: Any) -> list[tuple[Tensor, Tensor]]:
    """What each layer says beside its output: the gate's loss, and how many tokens each expert has."""
    layers: list[Any] = [model.get_submodule(path) for path in PATHS]
    return [(layer.l_aux, layer.exp_counts) for layer in layers]


@pytest.mark.parametrize(
    ("k", "expert", "residual"),
    [(1, ParallelMLP, False), (1, Gated, True), (2, ParallelMLP, True), (2, Gated, False), (3, ParallelMLP, False)],
)
def test_each_gate_and_kind_of_expert(k: int, expert: type, residual: bool) -> None:
    model = mixture(k=k, expert=expert, use_residual=residual, **CERTAIN)
    wanted, beside, state = logits(model), said(model), {name: p.clone() for name, p in model.state_dict().items()}
    engine = infuse.init_inference(model, dtype="fp32", progress=False)
    assert replaced(engine.plan) == PATHS
    assert (logits(engine) - wanted).abs().max() < 1e-5
    for (l_aux, counts), (our_l_aux, our_counts) in zip(beside, said(model), strict=True):
        assert torch.allclose(l_aux, our_l_aux, atol=1e-5) and torch.equal(counts, our_counts)
    now = model.state_dict()
    assert now.keys() == state.keys() and all(torch.equal(now[name], state[name]) for name in state)
    with pytest.raises(infuse.UnsupportedCall, match="used_token"):
        model.transformer.h[0].mlp.moe(torch.zeros(1, 2, 48), torch.ones(2))


@pytest.mark.parametrize(
    ("gate", "why"),
    [
        (
            {"k": 1},
            "drops tokens beyond a capacity (eval_capacity_factor=1.0), so that a token's result depends on its",
        ),
        ({"k": 2, "drop_tokens": False}, "it samples the second expert; moe.without_drops=True computes every token"),
        ({"k": 2}, "depends on its batch and samples the second expert; moe.without_drops=True computes every token"),
        ({"k": 1, "eval_capacity_factor": 6.0}, None),
    ],
)
def test_what_depends_on_the_batch_or_on_chance_is_left_unless_asked(gate: dict[str, Any], why: str | None) -> None:
    plan = infuse.plan(mixture(**gate), dtype="fp32")
    assert replaced(plan) == ([] if why else PATHS)
    assert why is None or [left.path for left in plan.left if why in left.why] == PATHS
    engine = infuse.init_inference(mixture(**gate), dtype="fp32", progress=False, moe={"without_drops": True})
    certain = mixture(**{**gate, **CERTAIN})
    assert replaced(engine.plan) == PATHS and (logits(engine) - logits(certain)).abs().max() < 1e-5


class Twice(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.down(self.up(x).relu())


def test_what_is_not_understood_stays() -> None:
    partly = mixture(**CERTAIN)
    layer = partly.get_submodule(PATHS[0])
    assert isinstance(layer, MOELayer)
    del layer.experts.deepspeed_experts[2:]
    texts = [str(infuse.plan(model, dtype="fp32")) for model in (partly, mixture(expert=Twice, **CERTAIN))]
    assert "it holds 2 of 4 experts; build it with ep_size=1" in texts[0]
    assert "an expert is none of ours: down(act(up(x)))" in texts[1]


def on_rank(tp: int, ep: int, keys: dict[str, Any]) -> tuple[Tensor, list[str], list[str]]:
    grain = {"tp_size": tp, "tp_grain_size": 8}
    engine = infuse.init_inference(
        mixture(**CERTAIN), dtype="fp32", progress=False, tensor_parallel=grain, moe={"ep_size": ep}, **keys
    )
    refused = [left.why for left in engine.plan.left if left.why.startswith("refused")]
    return logits(engine), replaced(engine.plan), refused


@pytest.mark.parametrize(
    ("size", "tp", "ep", "format"), [(2, 1, 2, None), (2, 2, 1, None), (3, 1, 3, "int4:8"), (4, 2, 2, None)]
)
def test_over_ranks(size: int, tp: int, ep: int, format: str | None, ranks: Ranks) -> None:
    results = ranks.run(size, on_rank, tp, ep, {"quant": format} if format else {})
    engine = infuse.init_inference(mixture(**CERTAIN), dtype="fp32", progress=False, quant=format)
    assert same([found for found, _, _ in results]) and results[0][1:] == (PATHS, [])
    assert (results[0][0] - logits(engine)).abs().max() < 1e-5


def save_as_deepspeed(model: Any, folder: Path, of_layers: bool) -> None:
    """Each expert in a file of its own, of one layer or of all layers; everything else in the rank's file."""
    state, files = dict(model.state_dict()), dict[str, dict[str, Tensor]]()
    for name in [name for name in state if ".deepspeed_experts." in name]:
        layer, _, rest = name.removeprefix("transformer.h.").partition(".")
        expert = rest.partition("deepspeed_experts.")[2].partition(".")[0]
        file = f"layer_{layer}_expert_{expert}" if of_layers else f"expert_{expert}"
        files.setdefault(file, {})[name] = state.pop(name)
    torch.save({"module": state}, folder / "mp_rank_00_model_states.pt")
    for file, held in files.items():
        torch.save(held, folder / f"{file}_mp_rank_00_model_states.pt")


@pytest.mark.parametrize("of_layers", [True, False], ids=["a file for each layer's expert", "a file for each expert"])
def test_checkpoints_with_experts_in_their_own_files(of_layers: bool, tmp_path: Path, ranks: Ranks) -> None:
    model = mixture(**CERTAIN)
    save_as_deepspeed(model, tmp_path, of_layers)
    with torch.device("meta"):
        empty = mixture(**CERTAIN)
    engine = infuse.init_inference(empty, checkpoint=str(tmp_path), dtype="fp32", progress=False)
    assert replaced(engine.plan) == PATHS
    assert (logits(engine) - logits(model)).abs().max() < 1e-5
    found = ranks.run(2, on_rank, 1, 2, {"checkpoint": str(tmp_path)})
    assert all((logits(model) - one).abs().max() < 1e-5 for one, _, _ in found)
    missing = next(tmp_path.glob("*expert_3_*"))
    missing.unlink()
    with pytest.raises(infuse.CheckpointError, match=r"deepspeed_experts\.3\."):
        infuse.init_inference(mixture(), checkpoint=str(tmp_path), dtype="fp32", progress=False)
