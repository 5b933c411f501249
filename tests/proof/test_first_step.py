"""The proof of a whole pipeline: cases and images from its own first step, and a pipeline that is left as it was."""

from __future__ import annotations

import copy
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse.apply import images as images_of_pipelines
from infuse.apply.build import Builder
from infuse.ground.errors import ProofError
from infuse.plan.step import Step
from infuse.proof import components
from tests.diffusion.tiny_pipelines import images, made

CLOSE = 1e-4  # of the range of a pixel


def injected(pipe: Any, **settings: Any) -> Any:
    return infuse.init_inference(pipe, **{"dtype": torch.float32, **settings})


def spoiled(monkeypatch: pytest.MonkeyPatch, *paths: str) -> None:
    """Let the new modules at these paths be wrong. The proof of a kind runs the first module of it, which is not."""
    right = Builder.built

    def built(self: Builder, step: Step, dtype: Any, *more: Any) -> nn.Module:
        new = right(self, step, dtype, *more)
        if step.path in paths:
            for owner in new.modules():  # the original shares some of its parameters
                held = {name: one for name, one in owner._parameters.items() if one is not None}
                owner._parameters.update({name: nn.Parameter(1.5 * one, False) for name, one in held.items()})
        return new

    monkeypatch.setattr(Builder, "built", built)


def test_a_pipeline_is_as_before_its_proof() -> None:
    pipe = made("sd15")
    images(pipe, "sd15")  # so that scheduler and guidance have a state
    pipe.set_progress_bar_config(disable=True, desc="mine")
    held = dict(vars(pipe))
    scheduler, config = copy.deepcopy(vars(pipe.scheduler)), copy.deepcopy(dict(pipe.config))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    injected(pipe)
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(pipe).keys() == held.keys() and all(vars(pipe)[name] is value for name, value in held.items())
    assert dict(pipe.config) == config and pipe._progress_bar_config == dict(disable=True, desc="mine")
    for name, value in vars(pipe.scheduler).items():
        same = torch.equal(value, scheduler[name]) if isinstance(value, Tensor) else value == scheduler[name]
        assert same, name


@pytest.mark.parametrize(
    "model, path",
    [("unet", "up_blocks.1.attentions.1"), ("vae", "decoder.mid_block.resnets.1"), ("text_encoder", "layers.1")],
)
def test_what_only_images_show(model: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of a proven kind that is wrong: its model stays the original, and the others are replaced."""
    pipe = made("sd15")
    wanted = images(pipe, "sd15")
    path = next(one.path for one in infuse.plan(pipe, dtype=torch.float32)[model].steps if one.path.endswith(path))
    spoiled(monkeypatch, path)
    with pytest.raises(ProofError, match=rf"^{model}: .*differs"):
        injected(pipe, verify="strict")
    assert float((images(pipe, "sd15") - wanted).abs().max()) <= CLOSE
    with pytest.warns(UserWarning, match=f"{model}: .* were refused"):
        engine = injected(pipe)
    assert {name for name, plan in engine.plan.items() if plan.steps} == {"unet", "vae", "text_encoder"} - {model}
    assert any(left.path == path and "own first step" in left.why for left in engine.plan[model].left)
    assert float((images(engine, "sd15") - wanted).abs().max()) <= CLOSE


def test_a_module_that_fails_in_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, right = made("sd15"), Builder.built

    def built(self: Builder, step: Step, dtype: Any, *more: Any) -> nn.Module:
        if step.path == "up_blocks.1.attentions.1":
            raise RuntimeError("no kernel")
        return right(self, step, dtype, *more)

    monkeypatch.setattr(Builder, "built", built)
    with pytest.warns(UserWarning, match="unet: .* were refused"):
        engine = injected(pipe)
    assert not engine.plan["unet"].steps and engine.plan["vae"].steps
    assert "no kernel" in str(engine.plan["unet"])


def test_images_that_no_model_alone_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models stay, and so does a pipeline whose original has no image that could be compared."""
    monkeypatch.setattr(images_of_pipelines, "_IMAGE", dict.fromkeys(images_of_pipelines._IMAGE, 0.0))
    with pytest.warns(UserWarning, match="NOTHING IS ACCELERATED"):
        engine = injected(made("sd15"))
    assert not any(plan.steps for plan in engine.plan.values()) and "no model is replaced" in engine.plan.proof
    pipe = made("sd15")
    pipe.vae.decoder.conv_out.bias.data.fill_(torch.nan)
    engine = injected(pipe)
    assert "not finite" in engine.plan.proof and all(plan.steps for plan in engine.plan.values())


def test_formats_are_reported() -> None:
    engine = injected(made("sd15"), quant="int8")
    assert "not bounded, since weights are in int8" in engine.plan.proof
    assert all(plan.steps for plan in engine.plan.values())


def test_a_wrong_module_in_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled(monkeypatch, "encoder.layers.1", "layers.1", "text_model.encoder.layers.1")
    with pytest.raises(ProofError, match=r"^text_encoder: "):
        injected(made("sd15"), quant="int8", verify="strict")


def test_pipelines_that_cannot_be_run_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = made("sd15")
    wanted = images(pipe, "sd15")

    class Wants(type(pipe)):  # type: ignore[misc]
        def check_inputs(self, *args: Any, **kwargs: Any) -> None:
            raise ValueError("a picture of a cat is missing")

    pipe.__class__ = Wants
    seen: list[int] = []
    cases = components.component_cases
    monkeypatch.setattr(
        "infuse.apply.recording.component_cases", lambda *args: seen.append(len(args[2])) or cases(*args)
    )
    engine = injected(pipe, verify="strict")
    assert "inputs made from each model's config" in engine.plan.proof and "a picture of a cat" in engine.plan.proof
    assert seen and not any(seen)
    pipe.__class__ = Wants.__bases__[0]
    assert float((images(engine, "sd15") - wanted).abs().max()) <= CLOSE
    pipe = made("sd15")
    pipe._all_hooks = [object()]
    assert "hooks move its models" in injected(pipe).plan.proof
    assert injected(made("sd15"), verify="off").plan.proof == ""
    unet = diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    engine = injected(diffusers.DDPMPipeline(unet.eval(), diffusers.DDPMScheduler()), verify="strict")
    assert "takes no size" in engine.plan.proof and engine.plan["unet"].steps


def test_a_float32_pipeline_in_bfloat16() -> None:
    """The step in the dtype of the plan, though the models are in another one."""
    pipe = made("sd3")
    exact = images(pipe, "sd3")
    engine = injected(pipe, dtype=torch.bfloat16, verify="strict")
    assert "the original's own by" in engine.plan.proof
    assert float((images(engine, "sd3") - exact).square().mean().sqrt()) < 0.02
