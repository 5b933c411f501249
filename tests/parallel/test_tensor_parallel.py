"""Several ranks give what one gives: each way in which a family is cut, over two to four ranks; outputs and tokens.

What ranks have of every family, as numbers: test_spec.py.

The original is transformers' own model, whole, in this process.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as t
from torch import Tensor

import infuse
from infuse.parallel import join
from infuse.parallel.group import make_group
from infuse.plan.kinds import BLOCK, SPLIT
from tests.models.families import BY_NAME, Family, inputs
from tests.support.ranks import Ranks, same
from tests.support.relatives import less
from tests.support.side_by_side import original

TOLERANCE = 5e-5  # of logits, over the root mean square of the original's
NEW_TOKENS = 8
GLOO, SHARED_MEMORY = "gloo", "shared memory"
# Each way in which matrices are cut over three ranks, which divide neither heads nor features; eight over other numbers
# of ranks or by the other way to add up.
CUTS = (
    "llama", "llama-bias", "qwen3", "phi3", "gemma2", "gemma3", "granite", "olmo2", "stablelm-parallel", "starcoder2",
    "cohere-qk", "nemotron", "phi-qk", "gpt2", "bigcode", "bigcode-heads", "gpt-neo", "gptj", "codegen", "gpt-neox",
    "opt", "opt-350m", "bloom", "falcon-7b", "falcon-40b", "falcon-rw", "mpt", "bert", "distilbert", "albert",
    "modernbert", "clip", "vit", "mixtral", "qwen2-moe", "glm4-moe", "minimax-m2",
    "afmoe", "laguna", "cohere2-moe", "internvl-vision", "dinov3", "gemma4", "gemma4-dense", "gemma4-experts", "llama4",
    "bitnet", "olmoe-clip",
    "mpnet", "deberta-v3", "deberta-v2",
    "lfm2-bias", "qwen3_next", "olmo_hybrid", "granitemoehybrid", "granitemoehybrid-dense", "mamba2", "kimi_linear",
    "jamba",
)  # fmt: skip
# Cut as others are: gemma2 and qwen3, llama, llama-bias and nemotron, gpt-neo, bert.
RELATIVES = ("gemma3", "granite", "starcoder2", "gptj", "distilbert")
WAYS = ((2, SHARED_MEMORY), (3, GLOO), (4, SHARED_MEMORY))
OTHER_WAYS = [(name, *WAYS[i % 3]) for i, name in enumerate(("gemma2", "gpt2", "bloom", "falcon-7b", "bert", "clip"))]
OTHER_WAYS += [(name, 2, GLOO) for name in ("qwen3_5", "granitemoehybrid-dense", "nemotron_h")]
OTHER_WAYS += [(name, 2, SHARED_MEMORY) for name in ("deberta-v3", "gemma4", "falcon_h1", "falcon_h1-gated-norm")]
OTHER_WAYS += [(name, *way) for name in ("llama", "falcon-40b") for way in WAYS]


def outputs(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """All tensors of an output but the cache."""
    with torch.no_grad():
        found = model(**given)
    return [value for name, value in found.items() if isinstance(value, Tensor) and name != "past_key_values"]


@dataclass(frozen=True)
class Found:
    """What one rank gives and holds; `depths` counts what was put in, `refused` is what was not proven."""

    outputs: list[Tensor]
    tokens: Tensor | None
    depths: dict[str, int]
    refused: list[str]
    parameter_bytes: int


def on_rank(name: str, padding: str | None, way: str) -> Found:
    family = BY_NAME[name]
    model = family.make()
    with mock.patch.object(join, "make_group", partial(make_group, shared_memory=way == SHARED_MEMORY)):
        engine = infuse.init_inference(
            model, dtype="fp32", tensor_parallel={"tp_size": torch.distributed.get_world_size()}
        )
    assert engine.group.describe() == (way if engine.group.why_not_shared == "" else GLOO)
    given = inputs(family, padding=padding)
    found = outputs(engine, given)
    tokens = engine.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False) if family.kind == "decoder" else None
    depths = dict(Counter(step.depth for step in engine.plan.steps))
    refused = [f"{left.path}: {left.why}" for left in engine.plan.left if left.why.startswith("refused")]
    return Found(found, tokens, depths, refused, sum(p.nbytes for p in model.parameters()))


@pytest.mark.parametrize(
    ("name", "size", "way"), less(RELATIVES, [*((name, 3, SHARED_MEMORY) for name in CUTS), *OTHER_WAYS])
)
def test_ranks_give_what_the_original_gives(name: str, size: int, way: str, ranks: Ranks) -> None:
    family: Family = BY_NAME[name]
    padding = {"decoder": "left", "encoder": "right"}.get(family.kind)
    results = ranks.run(size, on_rank, name, padding, way)
    given = inputs(family, padding=padding)
    mask = given.get("attention_mask")
    assert all(BLOCK in result.depths and SPLIT not in result.depths and not result.refused for result in results), (
        results[0].refused
    )
    for i, exact in enumerate(outputs(original(name), given)):
        found = [result.outputs[i] for result in results]
        assert same(found)
        if mask is not None and exact.shape[:2] == mask.shape:
            exact, found[0] = exact[mask.bool()], found[0][mask.bool()]
        error = (found[0] - exact).abs().max() / exact.square().mean().sqrt()
        assert error < TOLERANCE, f"output {i}: {error:.1e}"
    if family.kind == "decoder":
        wanted = original(name).generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert all(torch.equal(result.tokens, wanted) for result in results)


FORMATS = ("int8:8", "int8:8:a8", "int4:8:asymmetric", "fp8:8", "int8:groups=2")
# One family in every format, the others in one each.
QUANTIZED = [("llama", format) for format in FORMATS]
QUANTIZED += zip(("gpt2", "bloom", "falcon-40b", "bert"), FORMATS, strict=False)


def logits(name: str, **settings: Any) -> tuple[Tensor, set[str]]:
    """The first output of the injected model, and the formats of its matrices."""
    family = BY_NAME[name]
    engine = infuse.init_inference(family.make(), dtype="fp32", **settings)
    formats = {text for step in engine.plan.steps for text in step.formats.values()}
    return outputs(engine, inputs(family))[0], formats


def logits_on_rank(name: str, format: str) -> tuple[Tensor, set[str]]:
    return logits(name, quant=format, tensor_parallel={"tp_size": torch.distributed.get_world_size()})


@pytest.mark.parametrize(("name", "format"), QUANTIZED)
def test_shards_that_are_quantized_are_shards_of_the_quantized(name: str, format: str, ranks: Ranks) -> None:
    """Groups of 8 lie within each rank's part: the same codes and scales on one rank and on two, so the same result."""
    results = ranks.run(2, logits_on_rank, name, format)
    exact, _ = logits(name, quant=format)
    found, formats = results[0]
    assert formats and same([result[0] for result in results])
    allowed = TOLERANCE * exact.square().mean().sqrt()
    if format.endswith(":a8"):  # sums in another order move some values over the edge between two of 8 bits
        allowed = 0.5 * (logits(name, quant=format.removesuffix(":a8"))[0] - exact).abs().max()
    assert (found - exact).abs().max() < allowed


def generated_on_rank(name: str, mode: dict[str, Any]) -> Tensor:
    family = BY_NAME[name]
    size = torch.distributed.get_world_size()
    engine = infuse.init_inference(family.make(), dtype="fp32", mp_size=size)
    torch.manual_seed(100 + torch.distributed.get_rank())  # rank 0's counts
    return engine.generate(**inputs(family, padding="left"), max_new_tokens=NEW_TOKENS, **mode)


@pytest.mark.parametrize(
    "mode",
    [
        dict(do_sample=True, temperature=0.9, top_k=20),
        dict(do_sample=False, num_beams=3),
        dict(do_sample=True, num_beams=2),
        dict(do_sample=False, repetition_penalty=1.4),
        dict(do_sample=False, prompt_lookup_num_tokens=2),
    ],
    ids=["sampling", "beams", "beam sampling", "penalty", "prompt lookup"],
)
def test_ranks_generate_the_same_and_what_one_generates(mode: dict[str, Any], ranks: Ranks) -> None:
    given = inputs(BY_NAME["llama"], padding="left")
    if "prompt_lookup_num_tokens" in mode:
        results = ranks.run(2, generated_alone, mode)
        given = {name: value[1:] for name, value in given.items()}
    else:
        results = ranks.run(2, generated_on_rank, "llama", mode)
    model = BY_NAME["llama"].make()
    torch.manual_seed(100)
    with torch.no_grad():
        wanted = model.generate(**given, max_new_tokens=NEW_TOKENS, **mode)
    assert all(torch.equal(result, wanted) for result in results)


class PrefersItsOwn(t.LogitsProcessor):
    """As a rank whose rounding says otherwise: each would take a token of its own always."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, torch.full_like(input_ids[:, :1], 40 + torch.distributed.get_rank()), 1e4)


def generated_against_rank_0() -> Tensor:
    engine = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32", mp_size=2)
    own = t.LogitsProcessorList([PrefersItsOwn()])
    return engine.generate(**inputs(BY_NAME["llama"]), max_new_tokens=NEW_TOKENS, do_sample=False, logits_processor=own)


def test_the_tokens_are_rank_0s(ranks: Ranks) -> None:
    given = inputs(BY_NAME["llama"])["input_ids"]
    for found in ranks.run(2, generated_against_rank_0):
        assert torch.equal(found[:, : given.shape[1]], given) and (found[:, given.shape[1] :] == 40).all()


def generated_alone(mode: dict[str, Any]) -> Tensor:
    """One row: modes that draft tokens take no more."""
    family = BY_NAME["llama"]
    engine = infuse.init_inference(family.make(), dtype="fp32", mp_size=2)
    given = {name: value[1:] for name, value in inputs(family).items()}
    return engine.generate(**given, max_new_tokens=NEW_TOKENS, **mode)


def recorded_on_rank(name: str) -> tuple[list[Tensor], list[Tensor]]:
    family = BY_NAME[name]
    model = family.make(attn_implementation="eager")
    engine = infuse.init_inference(model, dtype="fp32", mp_size=torch.distributed.get_world_size())
    with torch.no_grad():
        found = engine(**inputs(family), output_attentions=True, output_hidden_states=True)
    return list(found.attentions), list(found.hidden_states)


@pytest.mark.parametrize(("name", "size"), [("llama", 3), ("bert", 2)])
def test_attentions_and_hidden_states_are_those_of_all_heads(name: str, size: int, ranks: Ranks) -> None:
    attentions, states = ranks.run(size, recorded_on_rank, name)[size - 1]
    family = BY_NAME[name]
    with torch.no_grad():
        exact = family.make(attn_implementation="eager")(
            **inputs(family), output_attentions=True, output_hidden_states=True
        )
    torch.testing.assert_close(attentions, list(exact.attentions), rtol=0, atol=1e-5)
    torch.testing.assert_close(states, list(exact.hidden_states), rtol=1e-4, atol=1e-4)


def test_each_rank_holds_its_part(ranks: Ranks) -> None:
    """Matrices are shared, norms are not: two ranks hold little more than one, though 80 inner features and 96 tokens
    give one more.
    """
    model = BY_NAME["llama"].make()
    whole, norms = (sum(p.nbytes for p in model.parameters() if p.dim() >= least) for least in (0, 2))
    held = [result.parameter_bytes for result in ranks.run(2, on_rank, "llama", None, SHARED_MEMORY)]
    assert sum(held) == whole + (whole - norms) and max(held) < 0.65 * whole


@pytest.mark.slow
def test_more_ranks_than_heads_leave_the_blocks_whole(ranks: Ranks) -> None:
    notes = ranks.run(3, left_with_two_heads)
    assert all("2 heads are too few for 3 ranks" in text for text, _ in notes)
    exact = BY_NAME["gpt2"].make(n_head=2)
    for _, found in notes:
        torch.testing.assert_close(found, outputs(exact, inputs(BY_NAME["gpt2"]))[0], rtol=1e-4, atol=1e-4)


def left_with_two_heads() -> tuple[str, Tensor]:
    engine = infuse.init_inference(BY_NAME["gpt2"].make(n_head=2), dtype="fp32", mp_size=3)
    return str(engine.plan), outputs(engine, inputs(BY_NAME["gpt2"]))[0]
