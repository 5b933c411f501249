"""Ranks share experts, by whole ones, by their width, or by both, and give what one process gives."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as t
from families import GQA, Family
from ranks import Ranks, same
from torch import Tensor

import infuse

TOLERANCE = 5e-5  # of logits, over the root mean square of the original's
_MOE: dict[str, Any] = dict(GQA, num_experts_per_tok=2, moe_intermediate_size=48)
MIXTURES = {
    "mixtral": Family("mixtral", t.MixtralConfig, t.MixtralForCausalLM, values=dict(_MOE, num_local_experts=5)),
    "qwen2_moe": Family(
        "qwen2_moe", t.Qwen2MoeConfig, t.Qwen2MoeForCausalLM,
        values=dict(_MOE, num_experts=4, shared_expert_intermediate_size=32),
    ),
    "gpt_oss": Family(
        "gpt_oss", t.GptOssConfig, t.GptOssForCausalLM, values=dict(_MOE, head_dim=12, num_local_experts=4),
    ),
}  # fmt: skip


def given() -> Tensor:
    return torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(3))


def on_rank(name: str, tp: int, ep: int, keys: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, int], int, str]:
    model: Any = MIXTURES[name].make()
    engine = infuse.init_inference(
        model, dtype="fp32", progress=False, tensor_parallel={"tp_size": tp, "tp_grain_size": 8}, ep_size=ep, **keys
    )
    with torch.no_grad():
        logits = engine(given()).logits
    tokens = engine.generate(given(), max_new_tokens=6, do_sample=False)
    depths = Counter(step.depth for step in engine.plan.steps)
    experts = [
        tensor for module in model.modules() if type(module).__name__ == "Experts"
        for tensor in (*module.parameters(), *module.buffers())
    ]  # fmt: skip
    refused = "; ".join(f"{left.path}: {left.why}" for left in engine.plan.left if left.why.startswith("refused"))
    return logits, tokens, dict(depths), sum(tensor.nbytes for tensor in experts), refused


WAYS = {"experts": (2, 1, 2), "width": (2, 2, 1), "within": (2, 2, 2), "three": (3, 1, 3), "both": (4, 2, 2)}


@pytest.mark.parametrize(("name", "way"), [
    *((name, way) for name in MIXTURES for way in ("experts", "both")),
    ("mixtral", "width"), ("mixtral", "within"), ("mixtral", "three"), ("gpt_oss", "width"),
])  # fmt: skip
def test_ranks_give_what_one_process_gives(name: str, way: str, ranks: Ranks) -> None:
    size, tp, ep = WAYS[way]
    results = ranks.run(size, on_rank, name, tp, ep, {})
    model: Any = MIXTURES[name].make()
    with torch.no_grad():
        exact = model(given()).logits
    wanted = model.generate(given(), max_new_tokens=6, do_sample=False)
    whole = sum(p.nbytes for key, p in model.named_parameters() if ".experts." in key)
    assert not results[0][4], results[0][4]
    assert same([logits for logits, *_ in results])
    assert (results[0][0] - exact).abs().max() / exact.square().mean().sqrt() < TOLERANCE
    for _, tokens, depths, held, _ in results:
        assert torch.equal(tokens, wanted)
        assert depths.get("experts", depths.get("block")) == 3 and 0 < held < whole


def whole(name: str, **keys: Any) -> Tensor:
    engine = infuse.init_inference(MIXTURES[name].make(), dtype="fp32", progress=False, **keys)
    with torch.no_grad():
        return engine(given()).logits


@pytest.mark.parametrize(("name", "way", "format"), [
    ("mixtral", "experts", "int8:8"), ("gpt_oss", "both", "int4:8"), ("mixtral", "width", "int4:8:asymmetric"),
])  # fmt: skip
def test_quantized_parts_are_parts_of_the_quantized(name: str, way: str, format: str, ranks: Ranks) -> None:
    """Groups of 8 lie within each rank's part, so codes and scales are those of one process."""
    size, tp, ep = WAYS[way]
    logits, *_, refused = ranks.run(size, on_rank, name, tp, ep, {"quant": format})[0]
    exact = whole(name, quant=format)
    assert not refused and (logits - exact).abs().max() / exact.square().mean().sqrt() < TOLERANCE


def saves(folder: str, keys: dict[str, Any]) -> Any:
    try:
        return on_rank("mixtral", 1, 2, {"save_mp_checkpoint_path": folder, **keys})[0]
    except infuse.ConfigError as error:
        return str(error)


def loads(folder: str) -> Tensor:
    model: Any = MIXTURES["mixtral"].make(seed=1)
    engine = infuse.init_inference(model, checkpoint=folder, progress=False, moe={"ep_size": dist.get_world_size()})
    with torch.no_grad():
        return engine(given()).logits


def test_shards_of_whole_experts_are_read_by_as_many_ranks_or_by_one(ranks: Ranks, tmp_path: Path) -> None:
    wanted = ranks.run(2, saves, str(tmp_path), {"quant": "int8:8"})[0]
    assert all(torch.equal(found, wanted) for found in ranks.run(2, loads, str(tmp_path)))
    engine = infuse.init_inference(MIXTURES["mixtral"].make(seed=1), checkpoint=str(tmp_path), progress=False)
    with torch.no_grad():
        assert (engine(given()).logits - wanted).abs().max() < 1e-4


def dies() -> None:
    """Rank 1's process ends inside of the second layer's experts."""
    model: Any = MIXTURES["mixtral"].make()
    engine = infuse.init_inference(model, dtype="fp32", progress=False, moe={"ep_size": 2}, verify="off")
    if dist.get_rank() == 1:
        model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda *_: os._exit(3))
    with torch.no_grad():
        engine(given())


def test_a_rank_that_dies_in_its_experts_is_named(ranks: Ranks) -> None:
    error, _ = ranks.run_expecting_errors(2, dies)
    assert isinstance(error, infuse.RankError)
    assert "model.layers.1.mlp" in str(error) and "the process of rank 1 has ended" in str(error)
