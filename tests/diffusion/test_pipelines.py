"""Pipelines of diffusers through init_inference: the same images by the same calls, whatever their size and options."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from typing import Any

import pytest
import torch
from diffusers import EulerDiscreteScheduler
from torch import nn
from transformers import pipeline

import infuse
from infuse.deepspeed import module_inject
from infuse.engine import PipelineEngine
from infuse.ground.errors import ConfigError, InfuseError, NotAvailable, ProofError
from tests.diffusion.side_by_side import CLOSE, distance, injected, original, pristine
from tests.diffusion.tiny_pipelines import NEGATIVE, PIPELINES, PROMPT, images, inputs, made, saved_and_loaded


@pytest.fixture(scope="module")
def engine() -> Any:
    """SD 1.5 in float32; tests leave it as it is."""
    return injected(made("sd15"))


@pytest.mark.parametrize("name", [*PIPELINES, "img2img"])
def test_images_are_equal_in_float32(name: str) -> None:
    """One row and three, three sizes in a row, and the first size again."""
    pipe = made(name)
    calls = [dict(size=32), dict(size=24, rows=3), dict(size=40), dict(size=32)]
    wanted = [original(name, **call) for call in calls]
    engine = injected(pipe)
    assert isinstance(engine, PipelineEngine) and engine.pipeline is pipe
    assert re.match(r"the pipeline's own first step \(.*1 step\): the image differs by", engine.plan.proof)
    found = [images(engine, name, **call) for call in calls]
    assert max(distance(a, b) for a, b in zip(found, wanted, strict=True)) <= CLOSE
    assert torch.equal(found[3], found[0])
    assert distance(images(pipe, name, **calls[0]), wanted[0]) <= CLOSE


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3", "flux", "pixart"])
def test_images_in_bfloat16_are_as_near_as_the_originals(name: str) -> None:
    exact = original(name, size=32)
    pipe = made(name, torch.bfloat16)
    own = float((images(pipe, name) - exact).square().mean().sqrt())
    engine = injected(pipe, dtype=torch.bfloat16)
    assert "the original's own by" in engine.plan.proof
    error = float((images(engine, name) - exact).square().mean().sqrt())
    assert error <= max(2 * own, 4e-3)


@pytest.mark.parametrize("options", [
    dict(guidance_scale=1.0), dict(guidance_scale=7.5, guidance_rescale=0.7), dict(negative_prompt=None),
    dict(output_type="latent"), dict(num_images_per_prompt=2), dict(eta=0.5),
])  # fmt: skip
def test_options_of_the_call(options: dict[str, Any], engine: Any) -> None:
    wanted = original("sd15", **options)
    assert distance(images(engine, "sd15", **options), wanted) <= CLOSE * max(1.0, float(wanted.abs().max()))


def test_callbacks_see_every_step_and_may_change_it(engine: Any) -> None:
    seen: list[int] = []

    def halved(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        seen.append(step)
        return {"latents": given["latents"] * 0.5}

    wanted = images(pristine("sd15"), "sd15", callback_on_step_end=halved)
    assert distance(images(engine, "sd15", callback_on_step_end=halved), wanted) <= CLOSE
    assert seen == [0, 1, 0, 1]


def test_prompts_and_embeddings_change_the_images(engine: Any) -> None:
    prompts = (PROMPT, "a large dog", PROMPT)
    wanted = [images(pristine("sd15"), "sd15", prompt=[prompt]) for prompt in prompts]
    found = [images(engine, "sd15", prompt=[prompt]) for prompt in prompts]
    assert max(distance(a, b) for a, b in zip(found, wanted, strict=True)) <= CLOSE
    assert distance(found[0], found[1]) > 10 * CLOSE and torch.equal(found[0], found[2])
    given = engine.encode_prompt(PROMPT, "cpu", 1, True, negative_prompt=NEGATIVE)
    embedded = dict(prompt=None, negative_prompt=None, prompt_embeds=given[0], negative_prompt_embeds=given[1])
    assert distance(images(engine, "sd15", **embedded), wanted[0]) <= CLOSE


def test_the_engine_is_the_pipeline(engine: Any) -> None:
    pipe = engine.pipeline
    assert engine.unet is pipe.unet and engine.module is pipe and engine.components.keys() == pipe.components.keys()
    before = engine.scheduler
    engine.scheduler = EulerDiscreteScheduler.from_config(before.config)
    assert type(pipe.scheduler) is EulerDiscreteScheduler
    engine.scheduler = before
    assert set(engine.plan) == set(engine.engines) == {"unet", "vae", "text_encoder"}
    text = str(engine.report())
    for name in engine.plan:
        assert f"StableDiffusionPipeline.{name}: plan for" in text
    assert f"proof: {engine.plan.proof}" in text and engine.plan.proof in str(engine.plan)
    assert "memory of all models" in text and "<table>" in engine.report()._repr_html_()
    with pytest.raises(AttributeError):
        engine.no_such_thing  # noqa: B018


def test_the_plan_alone_changes_nothing() -> None:
    pipe = made("sdxl")
    before = {name: [type(one) for one in model.modules()] for name, model in models(pipe).items()}
    planned = infuse.plan(pipe, dtype=torch.float32)
    assert before == {name: [type(one) for one in model.modules()] for name, model in models(pipe).items()}
    assert set(planned) == set(before) and planned.after_bytes > 0 and "sdxl" not in str(planned)
    engine = injected(pipe)
    assert {name: len(one.steps) for name, one in planned.items()} == {
        name: len(one.steps) for name, one in engine.plan.items()
    }


def models(pipe: Any) -> dict[str, nn.Module]:
    return {name: one for name, one in pipe.components.items() if isinstance(one, nn.Module)}


def test_a_failure_in_one_model_leaves_all_unchanged() -> None:
    pipe = made("sd15")
    wanted = original("sd15")
    blocks = [module for module in pipe.unet.modules() if type(module).__name__ == "GEGLU"]
    blocks[-1].gelu = torch.nn.functional.relu  # type: ignore[assignment]
    broken = images(pipe, "sd15")
    types = {name: [type(one) for one in model.modules()] for name, model in models(pipe).items()}
    with pytest.raises(ProofError):
        injected(pipe, verify="strict")
    assert types == {name: [type(one) for one in model.modules()] for name, model in models(pipe).items()}
    assert distance(images(pipe, "sd15"), broken) <= CLOSE
    del blocks[-1].gelu
    with pytest.raises(ConfigError, match="no_such_linear"):
        injected(pipe, quant={"weight": {"post_init_quant": {"no_such_linear": "int8"}}})
    assert distance(images(pipe, "sd15"), wanted) <= CLOSE


def test_formats_by_name_go_to_the_models_that_have_them() -> None:
    engine = injected(made("sd15"), quant={"weight": {"post_init_quant": {"mlp.fc1": "int8:32", "ff.net": "int8:32"}}})
    found = {name: [step for step in plan.steps if step.formats] for name, plan in engine.plan.items()}
    assert [step.depth for step in found["text_encoder"]] == ["block"] * 2
    assert [step.layer for step in found["unet"]] == ["Transformer2DModel"] * 4
    assert all({name.split(".")[2] for name in step.formats} == {"ff"} for step in found["unet"])
    assert not found["vae"]


@pytest.mark.parametrize("format, most", [("int8", 0.02), ("int8:a8", 0.03), ("fp8", 0.05), ("int4", 0.1)])
def test_formats_change_images_little(format: str, most: float) -> None:
    wanted = original("sd15")
    engine = injected(made("sd15"), quant=format)
    error = float((images(engine, "sd15") - wanted).square().mean().sqrt())
    assert 0 < error < most
    assert engine.plan.after_bytes < engine.plan.before_bytes


def test_saved_pipelines_are_diffusers_own(engine: Any) -> None:
    again = saved_and_loaded(engine.pipeline)
    again.set_progress_bar_config(disable=True)
    assert distance(images(again, "sd15"), original("sd15")) <= CLOSE


def test_copies_and_pickles_make_the_same_images(engine: Any) -> None:
    wanted = images(engine, "sd15")
    other = copy.deepcopy(engine.pipeline)
    assert torch.equal(images(other, "sd15"), wanted)
    other.unet = pickle.loads(pickle.dumps(engine.unet))
    assert torch.equal(images(other, "sd15"), wanted)
    whole = pickle.loads(pickle.dumps(engine))
    assert isinstance(whole, PipelineEngine) and type(whole).__name__ == "StableDiffusionPipeline"
    assert repr(whole).startswith("PipelineEngine(StableDiffusionPipeline")
    assert torch.equal(images(whole, "sd15"), wanted)


def test_a_pipeline_is_freed_and_destroyed() -> None:
    engine = injected(made("sd15"))
    images(engine, "sd15")
    held = weakref.ref(engine.unet)
    del engine
    gc.collect()
    assert held() is None
    engine = injected(made("sd15"), verify="off")
    engine.destroy()
    with pytest.raises(InfuseError, match="destroy"):
        images(engine, "sd15")


def test_another_pipeline_of_the_same_models() -> None:
    """diffusers' own way to go from one task to another; the models are already replaced."""
    import diffusers

    wanted = original("img2img")
    engine = injected(made("img2img"))
    other = diffusers.StableDiffusionPipeline(**engine.components, requires_safety_checker=False)
    back = diffusers.StableDiffusionImg2ImgPipeline(**other.components, requires_safety_checker=False)
    back.set_progress_bar_config(disable=True)
    assert distance(images(back, "img2img"), wanted) <= CLOSE
    named = diffusers.AutoPipelineForText2Image.from_pipe(engine)  # finds the task by the name of the class
    assert type(named) is diffusers.StableDiffusionPipeline and named.unet is engine.unet


def test_several_controlnets_and_tiles() -> None:
    import diffusers

    pipe = made("controlnet")
    nets = diffusers.MultiControlNetModel([pipe.controlnet, copy.deepcopy(pipe.controlnet)])
    pipe = diffusers.StableDiffusionControlNetPipeline(
        **{**pipe.components, "controlnet": nets}, requires_safety_checker=False
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 32, 16
    image = inputs("controlnet", 48)["image"]
    call = dict(size=48, image=[image, image], controlnet_conditioning_scale=[1.0, 0.5])
    wanted = images(pipe, "controlnet", **call)
    engine = injected(pipe)
    assert {"controlnet.nets.0", "controlnet.nets.1"} <= set(engine.plan)
    assert distance(images(engine, "controlnet", **call), wanted) <= CLOSE


def test_free_u_and_slices(engine: Any) -> None:
    found = []
    for pipe in (pristine("sd15"), engine):
        pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
        pipe.vae.enable_slicing()
        found.append(images(pipe, "sd15", rows=2))
        pipe.disable_freeu()
        pipe.vae.disable_slicing()
    assert distance(*found) <= CLOSE < distance(found[0], original("sd15", rows=2))


def test_what_is_no_pipeline_of_diffusers() -> None:
    class Other:
        components = {"unet": nn.Linear(2, 2)}

    with pytest.raises(ConfigError, match="a pipeline that is not diffusers' own"):
        infuse.init_inference(Other())
    with pytest.raises(ConfigError, match="give its model"):
        infuse.init_inference(pipeline("text-generation", model=tiny_gpt(), tokenizer=made("flux").tokenizer_2))
    pipe = made("sd15")
    for wrong in (dict(checkpoint="somewhere"), dict(save_mp_checkpoint_path="somewhere")):
        with pytest.raises(ConfigError, match="these belong to single models"):
            infuse.init_inference(pipe, **wrong)
    with pytest.raises(NotAvailable, match="no experts"):
        infuse.init_inference(pipe, moe={"ep_size": 2})


def tiny_gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))


def test_deepspeeds_ways() -> None:
    import infuse.deepspeed as deepspeed

    pipe, wanted = made("sd15"), original("sd15")
    settings = dict(replace_method="auto", replace_with_kernel_inject=True)
    engine = deepspeed.init_inference(pipe, dtype=torch.float32, **settings)
    assert distance(images(engine, "sd15"), wanted) <= CLOSE
    pipe = made("sd15")
    assert module_inject.generic_injection(pipe, dtype=torch.float32) is None
    assert any(type(module).__module__.startswith("infuse.") for module in pipe.unet.modules())
    assert distance(images(pipe, "sd15"), wanted) <= CLOSE
