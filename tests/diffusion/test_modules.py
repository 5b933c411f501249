"""Whole modules of diffusers: what replaces them computes the same, is saved under the original's names, and refuses
what it does not know.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import nn

import infuse
from infuse.ground.errors import SpecMismatch, UnsupportedCall
from infuse.inputs.component import UNEVEN
from infuse.plan.kinds import MODULE
from tests.diffusion.side_by_side import run
from tests.diffusion.tiny_pipelines import flux, made, unet

ACTIVATIONS = ("geglu", "gelu", "gelu-approximate", "geglu-approximate", "swiglu", "linear-silu")


class Own(AttnProcessor2_0):
    """A user's processor: blocks with it stay, and only their feed-forward modules are replaced."""


def feed_forwards() -> Any:
    """A UNet in which nothing around the feed-forward modules is replaced as a whole."""
    model = unet()
    model.set_attn_processor(Own())
    return model


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward_with_each_activation(activation: str) -> None:
    torch.manual_seed(0)
    model = feed_forwards()
    blocks = [module for module in model.modules() if type(module) is FeedForward]
    for block in blocks:
        width = block.net[2].out_features
        block.net = FeedForward(width, activation_fn=activation).net
    before, uneven = run(model), run(model, UNEVEN)
    engine = infuse.init_inference(model, dtype=torch.float32, verify="strict")
    assert sum(step.layer == "FeedForward" and step.depth == MODULE for step in engine.plan.steps) == len(blocks)
    torch.testing.assert_close(run(model), before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run(model, UNEVEN), uneven, rtol=1e-4, atol=1e-5)


def test_state_dict_keeps_the_originals_names_and_values() -> None:
    torch.manual_seed(0)
    model = unet()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    infuse.init_inference(model, dtype=torch.float32)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    wanted = run(model)
    model.load_state_dict({name: tensor + 0.01 for name, tensor in before.items()})
    assert not torch.allclose(run(model), wanted, atol=1e-3)
    model.load_state_dict(before)
    assert torch.equal(run(model), wanted)


@pytest.mark.parametrize("format", ["int8", "int4", "int8:a8", "fp8"])
def test_formats_of_modules(format: str) -> None:
    torch.manual_seed(0)
    model = unet(block_out_channels=(64, 64), cross_attention_dim=64)
    wanted = run(model)
    engine = infuse.init_inference(model, dtype=torch.float32, quant=format)
    matrices = {"Transformer2DModel": 7, "ResnetBlock2D": 1}
    inside = [step for step in engine.plan.steps if step.layer in matrices]
    assert inside and all(len(step.formats) == matrices[step.layer] for step in inside)
    error = (run(model) - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert 0 < error < (0.2 if format == "int4" else 0.05)
    with pytest.raises(UnsupportedCall, match="quantized"):
        model.state_dict()
    with infuse.dequantized(model):
        assert len(model.state_dict()) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = made("pixart").transformer
    wanted = run(model)
    own = (run(model.to(dtype)) - wanted).square().mean().sqrt()
    engine = infuse.init_inference(model, dtype=dtype, verify="strict")
    assert any(step.depth == MODULE for step in engine.plan.steps)
    assert (run(model) - wanted).square().mean().sqrt() <= 2 * own


class Doubled(FeedForward):
    """A user's class that computes something else."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * super().forward(hidden_states)


def test_a_users_subclass_with_its_own_forward_stays() -> None:
    model = feed_forwards()
    block = next(module for module in model.modules() if type(module) is FeedForward)
    block.__class__ = Doubled
    wanted = run(model)
    infuse.init_inference(model, dtype=torch.float32)
    assert any(type(module) is Doubled for module in model.modules())
    torch.testing.assert_close(run(model), wanted, rtol=1e-4, atol=1e-5)


def test_what_is_not_known_stays_with_the_reason() -> None:
    model = feed_forwards()
    first, second, *_ = (module for module in model.modules() if type(module) is FeedForward)
    first.net[0].gelu = torch.nn.functional.silu  # the proof sees what no attribute tells
    second.net.append(nn.Identity())
    plan = infuse.plan(model, dtype=torch.float32)
    reasons = [left.why for left in plan.left if "Own" not in left.why and "not as a whole module" in left.why]
    assert len(reasons) == 1 and "Identity" in reasons[0]
    wanted = run(model)
    engine = infuse.init_inference(model, dtype=torch.float32, verify="all")
    refused = [left.path for left in engine.plan.left if left.why.startswith("refused")]
    assert len(refused) == 1 and refused[0].endswith(".ff")
    linears = [step.path for step in engine.plan.steps if step.path.startswith(refused[0])]
    assert linears == [f"{refused[0]}.net.0.proj", f"{refused[0]}.net.2"]
    torch.testing.assert_close(run(model), wanted, rtol=1e-4, atol=1e-5)


def test_kernel_injection_off_leaves_modules() -> None:
    model = flux().transformer
    engine = infuse.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=False)
    assert engine.plan.steps and all(step.depth != MODULE for step in engine.plan.steps)


def test_unknown_arguments_are_refused_by_name() -> None:
    model = feed_forwards()
    infuse.init_inference(model, dtype=torch.float32)
    block: Any = next(module for name, module in model.named_modules() if name.endswith(".ff"))
    x = torch.randn(1, 3, block.up.in_features)
    with pytest.raises(UnsupportedCall, match="temperature"):
        block(x, temperature=2)
    with pytest.raises(UnsupportedCall, match="positional"):
        block(x, 2.0)
    assert block(x, scale=None).shape == x.shape


def test_a_feed_forward_of_another_width_differs() -> None:
    from infuse.diffusion.shapes.feed_forward import FEED_FORWARD

    with pytest.raises(SpecMismatch, match="makes 24 rows"):
        FEED_FORWARD.bind(FeedForward(16, 24))
