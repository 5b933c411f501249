"""Mixtures whose experts take a limited number of tokens: Switch Transformers and NLLB-MoE."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeExperts, NllbMoeSparseMLP
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

import infuse
from infuse.architectures.bind import Binder
from infuse.architectures.parts.experts import bind_experts
from infuse.architectures.parts.moe import MoE as Declared
from infuse.architectures.parts.router import Top1Router, Top2Router
from infuse.architectures.program import CLAMP_INFINITE
from infuse.ground.errors import SpecMismatch
from infuse.layers.block import Block
from infuse.layers.build_context import BuildContext
from infuse.layers.mixture.moe import MoE
from infuse.layers.mixture.router import routes_in, with_routes
from infuse.parallel.group import LOCAL
from infuse.weights.fill import fill_module
from infuse.weights.lazy import live
from tests.models.encoder_decoders import BY_NAME, MIXTURES, both, encoded, made
from tests.support.ranks import Ranks

SWITCH = Declared(Top1Router("router"), experts="experts")
NLLB = Declared(Top2Router("router"), experts="experts", dropout="moe_token_dropout")
WIDTH, TOKENS, BATCH = 24, 9, 3


def mixture(declared: Declared, original: nn.Module, dtype: torch.dtype = torch.float32) -> MoE:
    """Ours with the weights of the original."""
    binder = Binder(original, None, None, False)
    shape: Any = declared.bind(binder, "mlp")
    assert not binder.differences and not binder.unclaimed() and pickle.loads(pickle.dumps(shape)) == shape
    holder = nn.Module()
    holder.mlp = MoE(shape, BuildContext("mlp", {}, {}, LOCAL))
    with torch.no_grad():
        fill_module(holder, tuple(binder.fills), live(original), dtype, {})
    return holder.mlp


def random(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module.eval()


def hidden(dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("computed_in", ["float32", "bfloat16"])
@pytest.mark.parametrize("capacity", [1, 2, 64])
def test_one_expert_of_a_row(capacity: int, computed_in: Any, dtype: torch.dtype) -> None:
    config = t.SwitchTransformersConfig(
        d_model=WIDTH, d_ff=16, num_experts=3, expert_capacity=capacity, router_bias=True, router_dtype=computed_in
    )
    original = random(SwitchTransformersSparseMLP(config)).to(dtype)
    new, x = mixture(SWITCH, original, dtype), hidden(dtype)
    with torch.no_grad():
        wanted, found = original.router(x), new.router(x)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
        dropped = found[0].sum(dim=-1) == 0
        assert bool(dropped.any()) == (capacity < 64) and not dropped[:, :capacity].any()
        result, exact = new(x), original(x)
    torch.testing.assert_close(
        result, exact, rtol=0.02 if dtype.itemsize == 2 else 0, atol=5e-5 * float(exact.abs().max())
    )
    assert not result[dropped].any()


def masks() -> dict[str, Tensor | None]:
    """Those of attention with padding, in the forms in which routers get them."""
    lowest = torch.finfo(torch.float32).min
    square = torch.zeros(BATCH, 1, TOKENS, TOKENS)
    square[0, :, :, :4] = lowest
    longer = torch.zeros(BATCH, 1, TOKENS, TOKENS + 5)
    longer[2, :, :, -3:] = lowest
    return {
        "none": None,
        "of numbers": square,
        "of a cache": longer,
        "of truth values": square[:1].expand(BATCH, -1, -1, -1) < 0,
    }


FLAGS = ("normalize_router_prob_before_dropping", "batch_prioritized_routing", "router_ignore_padding_tokens")


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize(("fraction", "capacity"), [(1.0, 64), (0.2, 64), (-1.0, 4), (-1.0, 64)])
@pytest.mark.parametrize("flags", list(product([False, True], repeat=3)), ids=str)
def test_two_experts_of_a_call(flags: tuple[bool, ...], fraction: float, capacity: int, mask: str) -> None:
    settings: dict[str, Any] = dict(zip(FLAGS, flags, strict=True))
    config = t.NllbMoeConfig(
        d_model=WIDTH, num_experts=5, moe_eval_capacity_token_fraction=fraction, expert_capacity=capacity, **settings
    )
    original = random(NllbMoeSparseMLP(config, 16))
    new, x, given = mixture(NLLB, original), hidden(), masks()[mask]
    with torch.no_grad():
        wanted, found = (each.router(x.flatten(0, 1), given) for each in (original, new))
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[2], wanted[2])
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=1e-7)
        assert 0 < int(wanted[0].sum()) < BATCH * TOKENS or (fraction != 0.2 and capacity != 4)
        result, exact = new(x, given), original(x, given)
    torch.testing.assert_close(result, exact, rtol=0, atol=5e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("declared", [SWITCH, NLLB], ids=["switch", "nllb"])
def test_routes_of_masks_and_back(declared: Declared) -> None:
    """A proof feeds the routes of one router to another."""
    sizes: dict[str, Any] = dict(d_model=WIDTH, num_experts=4)
    original: nn.Module = SwitchTransformersSparseMLP(t.SwitchTransformersConfig(d_ff=16, expert_capacity=2, **sizes))
    if declared is NLLB:
        original = NllbMoeSparseMLP(t.NllbMoeConfig(moe_eval_capacity_token_fraction=0.2, **sizes), 16)
    new, x, other = mixture(declared, random(original)), hidden(), hidden(seed=2)
    x_of, other_of = (x, other) if declared is SWITCH else (x.flatten(0, 1), other.flatten(0, 1))
    with torch.no_grad():
        wanted, returned = routes_in(new.router(x_of), 1), new.router(other_of)
        for told in (with_routes(returned, *wanted[1:]), _fed(new, wanted, other_of)):
            found = routes_in(told, 1)
            assert torch.equal(found[2], wanted[2]) and torch.equal(found[1], wanted[1])
            assert torch.equal(told[2], returned[2])
        assert bool((wanted[2] < 0).any()) and torch.equal(new.router(other_of)[0], returned[0])


def _fed(new: MoE, routes: tuple[Tensor, ...], x: Tensor) -> Any:
    new.router.feed(routes[2], routes[1])
    try:
        return new.router(x)
    finally:
        new.router.feed()


@pytest.mark.parametrize("family", MIXTURES, ids=lambda family: family.name)
@torch.no_grad()
def test_router_logits_and_the_tokens_that_are_dropped(family: Any) -> None:
    original, engine = made(family), infuse.init_inference(made(family), dtype="fp32", progress=False)
    seen: list[bool] = []

    def see(router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        real = output[0].sum(dim=-1).flatten() if "switch" in family.name else (output[1] != 0).sum(dim=-1) - 1
        seen.append(bool((real == 0).any()))

    routers = [module for module in original.modules() if type(module).__name__.endswith("Router")]
    for router in routers:
        router.register_forward_hook(see)
    for padding in (None, "right"):
        given = both(family, padding=padding)
        exact, found = (model(**given, output_router_logits=True) for model in (original, engine.module))
        for half in ("encoder_router_logits", "decoder_router_logits"):
            assert len(exact[half]) == len(found[half]) > 0
            for ours, theirs in zip(found[half], exact[half], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5 * float(theirs.abs().max()))
    assert any(seen[: len(routers)]) == family.name.endswith("dropping")


@pytest.mark.parametrize("name", ["switch-dropping", "nllb-moe-dropping"])
def test_hooks_on_routers(name: str) -> None:
    """They are given what the original's router returns, and what they return is taken."""
    engine = infuse.init_inference(made(BY_NAME[name]), dtype="fp32", progress=False)
    original, given = made(BY_NAME[name]), both(BY_NAME[name])

    def nobody(router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.zeros_like(output[0]), torch.zeros_like(output[1]), output[2]

    results = []
    for model in (original, engine.module):
        kind = next(type(each) for each in original.modules() if type(each).__name__.endswith("Router"))
        for module in model.modules():
            if isinstance(module, kind):
                module.register_forward_hook(nobody)
        with torch.no_grad():
            results.append(model(**given).logits)
    torch.testing.assert_close(*results, rtol=0, atol=5e-5 * float(results[0].abs().max()))


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("nllb-moe", dict(second_expert_policy="sampling"), "'sampling': its second experts are drawn by lot"),
        ("nllb-moe", dict(second_expert_policy="random"), "'random': its second experts are drawn by lot"),
        ("nllb-moe", "no capacity", "the first call's number of tokens would decide it"),
    ],
)
def test_what_stays_and_why(name: str, changes: Any, why: str) -> None:
    models = []
    for _ in range(2):
        if changes == "no capacity":
            model = made(BY_NAME[name], moe_eval_capacity_token_fraction=-1.0)
            for module in model.modules():
                if hasattr(module, "expert_capacity"):
                    module.expert_capacity = None
        else:
            model = made(BY_NAME[name], **changes)
        models.append(model)
    engine = infuse.init_inference(models[1], dtype="fp32", progress=False)
    assert {left.path for left in engine.plan.left if why in left.why} == {
        "model.encoder.layers.1",
        "model.decoder.layers.1",
    }
    assert sum(isinstance(module, Block) for module in engine.module.modules()) == 2
    results = []
    for model in (models[0], engine):
        torch.manual_seed(5)
        with torch.no_grad():
            results.append(model(**both(BY_NAME[name], padding="right")).logits)
    torch.testing.assert_close(*results, rtol=0, atol=5e-5 * float(results[0].abs().max()))


def test_experts_that_read_the_mask_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of transformers in which each expert computes the tokens that chose it."""
    mlp = NllbMoeSparseMLP(t.NllbMoeConfig(d_model=WIDTH, num_experts=4), 16)

    def each_its_own(self: Any, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
        made = [expert(hidden_states) for name, expert in self.items() if name.startswith("expert_")]
        return (torch.stack(made, dim=1) * (router_mask * router_probs)[..., None]).sum(dim=1)

    bind_experts(mlp.experts, mlp, by_mask=True)
    monkeypatch.setattr(NllbMoeExperts, "forward", each_its_own)
    with pytest.raises(SpecMismatch, match="they read the router's mask in a way that ours do not"):
        bind_experts(mlp.experts, mlp, by_mask=True)


_LAST = ("SelfAttention.o", "layer.out", "ffn.fc2", "mlp.down")  # of Switch's attention, of NLLB-MoE's MLP


@pytest.mark.parametrize("name", ["switch", "switch-dropping", "nllb-moe", "nllb-moe-dropping"])
def test_float16(name: str) -> None:
    """As far from float32 as the original is, and clamped as it is where a result does not fit."""
    exact, half = made(BY_NAME[name]), made(BY_NAME[name]).half()
    engine = infuse.init_inference(made(BY_NAME[name]).half(), dtype=torch.float16, progress=False)
    blocks = [module for module in engine.module.modules() if isinstance(module, Block)]
    assert len(blocks) == 4 and {block.shape.program[-1].does for block in blocks} == {CLAMP_INFINITE}
    given = both(BY_NAME[name], padding="right")
    with torch.no_grad():
        wanted, own, found = (model(**given).logits.float() for model in (exact, half, engine))
    assert (found - wanted).norm() <= 3 * (own - wanted).norm()
    x, results = torch.randn(2, 5, 48).half(), []
    x[..., :2] = torch.tensor([65504.0, -65504.0])
    for model in (half, engine.module):
        encoder = model.get_encoder()
        layer = encoder.block[0] if hasattr(encoder, "block") else encoder.layers[0]
        last: Any = next(part for path, part in layer.named_modules() if path.endswith(_LAST))
        with torch.no_grad():
            if last.bias is None:
                last.weight[:2] = 3e2  # of either sign: one of the two sums does not fit
            else:
                last.bias[:2] = torch.tensor([1e3, -1e3])
            result = layer(x, attention_mask=None)
        results.append(result[0] if isinstance(result, tuple) else result)
    assert torch.isfinite(results[0]).all() and float(results[0].abs().max()) >= 64512
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("format", ["int8:16", "int4:8"])
@pytest.mark.parametrize("name", ["switch-dropping", "nllb-moe-dropping"])
def test_formats_of_experts(name: str, format: str) -> None:
    """The values of the original with the same weights, rounded to the format; the router has none."""
    wide = dict(d_model=48, d_ff=48) if "switch" in name else dict(encoder_ffn_dim=80, decoder_ffn_dim=80)
    engine = infuse.init_inference(made(BY_NAME[name], **wide), dtype="fp32", quant=format, progress=False)
    steps = [step for step in engine.plan.steps if step.depth == "block" and step.shape.expert_count]
    assert steps and all(
        step.formats.get(f"mlp.experts.{target}.weight") for step in steps for target in ("up", "down")
    )
    rounded = made(BY_NAME[name], **wide)
    with infuse.dequantized(engine.module):
        rounded.load_state_dict(engine.module.state_dict())
    given = both(BY_NAME[name], padding="right")
    with torch.no_grad():
        exact, found = rounded(**given).logits, engine(**given).logits
    assert float((found - exact).norm() / exact.norm()) < 1e-3


@pytest.mark.parametrize("name", ["switch", "switch-dropping", "nllb-moe-dropping"])
def test_padding_counts_and_is_not_skipped(name: str) -> None:
    """Padding before a text may fill an expert, also where it comes out of a layer without a mixture."""
    with pytest.warns(UserWarning, match="skip_padding: no effect here: padding counts in mixtures that drop tokens"):
        engine = infuse.init_inference(made(BY_NAME[name]), dtype="fp32", progress=False, skip_padding=True)
    assert not any(step.skips_padding for step in engine.plan.steps)
    given = encoded(BY_NAME[name])
    given["attention_mask"][0, :5] = given["attention_mask"][1, 6:] = 0
    answers = [model.generate(**given, max_new_tokens=8) for model in (made(BY_NAME[name]), engine)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", ["switch-dropping", "nllb-moe-dropping"])
def test_shards_and_copies(name: str, tmp_path: Path) -> None:
    family, given = BY_NAME[name], both(BY_NAME[name], padding="left")
    saved = infuse.init_inference(
        made(family), dtype="fp32", quant="int8:8", save_mp_checkpoint_path=str(tmp_path), progress=False
    )
    with torch.device("meta"):
        empty = family.model(family.config(**family.values)).eval()
    opened = infuse.init_inference(empty, checkpoint=str(tmp_path), dtype="fp32", progress=False)
    copies = [copy.deepcopy(saved.module), pickle.loads(pickle.dumps(saved.module)), opened]
    with torch.no_grad():
        assert all(torch.equal(each(**given).logits, saved(**given).logits) for each in copies)


def test_a_module_that_a_user_put_among_experts() -> None:
    """The layer stays as it is."""
    model: Any = made(BY_NAME["switch"])
    model.encoder.block[1].layer[1].mlp.experts["mine"] = nn.Linear(4, 4)
    engine = infuse.init_inference(model, dtype="fp32", progress=False)
    reasons = [left.why for left in engine.plan.left if left.path == "encoder.block.1"]
    assert any("layer.1.mlp.experts: its experts have different parameters" in why for why in reasons)
    assert sum(isinstance(module, Block) for module in engine.module.modules()) == 3


def of_rank(name: str) -> tuple[Tensor, Tensor, list[str]]:
    engine = infuse.init_inference(made(BY_NAME[name]), dtype="fp32", progress=False, ep_size=2)
    given = encoded(BY_NAME[name], padding="right")
    with torch.no_grad():
        logits = engine(**both(BY_NAME[name], padding="right")).logits
    told = [step.why for step in engine.plan.steps if "2 of 4 experts" in step.why]
    return logits, engine.generate(**given, max_new_tokens=6), told


@pytest.mark.parametrize("name", ["switch-dropping", "nllb-moe-dropping"])
def test_ranks_with_whole_experts(name: str, ranks: Ranks) -> None:
    original = made(BY_NAME[name])
    with torch.no_grad():
        exact = original(**both(BY_NAME[name], padding="right")).logits
    answer = original.generate(**encoded(BY_NAME[name], padding="right"), max_new_tokens=6)
    for logits, tokens, told in ranks.run(2, of_rank, name):
        assert told and torch.equal(tokens, answer)
        torch.testing.assert_close(logits, exact, rtol=0, atol=5e-5 * float(exact.abs().max()))
