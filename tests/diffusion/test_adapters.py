"""What diffusers puts onto layers of a pipeline: LoRA, processors and caches, before and after init_inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from peft import LoraConfig, get_peft_model_state_dict

from infuse.ground.errors import UnsupportedCall
from infuse.plan.kinds import MODULE
from tests.diffusion.side_by_side import CLOSE, distance, injected, original
from tests.diffusion.tiny_pipelines import images, made

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]


def lora(folder: Path, name: str = "sd15", targets: Any = ATTENTION, seed: int = 5) -> Path:
    """Files of an adapter for the denoiser of the pipeline `name`."""
    pipe = made(name)
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    denoiser = getattr(pipe, part)
    torch.manual_seed(seed)
    denoiser.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=list(targets), init_lora_weights="gaussian"))
    for key, parameter in denoiser.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.3)
    layers = {f"{part}_lora_layers": get_peft_model_state_dict(denoiser)}
    pipe.save_lora_weights(folder, **layers)
    return folder


@pytest.mark.parametrize(
    "name, targets", [("sd15", ATTENTION), ("sd15", [*ATTENTION, "ff.net.0.proj"]), ("sd3", ATTENTION)]
)
def test_lora_before(name: str, targets: list[str], tmp_path: Path) -> None:
    """Scales, fusing and unloading work on the replaced linears."""
    files = lora(tmp_path, name, targets)
    plain, pipe = original(name), made(name)
    pipe.load_lora_weights(files, adapter_name="one")
    wanted = images(pipe, name)
    assert distance(wanted, plain) > 10 * CLOSE
    pipe.set_adapters(["one"], adapter_weights=[0.5])
    half = images(pipe, name)
    pipe.set_adapters(["one"], adapter_weights=[1.0])
    engine = injected(pipe)
    assert distance(images(engine, name), wanted) <= CLOSE
    engine.set_adapters(["one"], adapter_weights=[0.5])
    assert distance(images(engine, name), half) <= CLOSE
    engine.set_adapters(["one"], adapter_weights=[1.0])
    engine.fuse_lora()
    assert distance(images(engine, name), wanted) <= 3 * CLOSE
    engine.unfuse_lora()
    engine.unload_lora_weights()
    assert distance(images(engine, name), plain) <= 3 * CLOSE


def test_fused_lora_leaves_plain_modules(tmp_path: Path) -> None:
    pipe = made("sd15")
    pipe.load_lora_weights(lora(tmp_path))
    wanted = images(pipe, "sd15")
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    engine = injected(pipe)
    assert sum(step.depth == MODULE for step in engine.plan["unet"].steps) >= 4
    assert distance(images(engine, "sd15"), wanted) <= 3 * CLOSE


def test_lora_after(tmp_path: Path) -> None:
    """Whole modules refuse it before anything changes; linears alone take it."""
    files, plain = lora(tmp_path), original("sd15")
    engine = injected(made("sd15"))
    with pytest.raises(UnsupportedCall, match="load_lora_adapter: .* do so before init_inference"):
        engine.load_lora_weights(files)
    assert distance(images(engine, "sd15"), plain) <= CLOSE
    other = made("sd15")
    other.load_lora_weights(files)
    wanted = images(other, "sd15")
    engine = injected(made("sd15"), replace_with_kernel_inject=False)
    engine.load_lora_weights(files)
    assert distance(images(engine, "sd15"), wanted) <= CLOSE
    engine.unload_lora_weights()
    assert distance(images(engine, "sd15"), plain) <= CLOSE


class Doubling:
    """A user's processor, of which infuse knows nothing."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * AttnProcessor2_0()(attn, hidden_states, *args, **kwargs)


def test_unknown_processors_are_left_with_the_reason() -> None:
    pipe, usual = made("sd15"), original("sd15")
    pipe.unet.set_attn_processor(Doubling())
    wanted = images(pipe, "sd15")
    assert distance(wanted, usual) > 10 * CLOSE
    engine = injected(pipe)
    assert distance(images(engine, "sd15"), wanted) <= CLOSE
    attention = [module for module in engine.unet.modules() if type(module).__name__ == "Attention"]
    assert attention and all(isinstance(module.processor, Doubling) for module in attention)
    assert any(step.layer == "FeedForward" for step in engine.plan["unet"].steps)


def test_processors_set_afterwards_are_refused() -> None:
    engine = injected(made("sd15"), verify="off")
    for change in (lambda: engine.unet.set_attn_processor(AttnProcessor()), engine.unet.fuse_qkv_projections):
        with pytest.raises(UnsupportedCall, match="attention modules"):
            change()


def first_block() -> Any:
    return FirstBlockCacheConfig(threshold=10.0)


def magnitudes() -> Any:
    return MagCacheConfig(threshold=10.0, retention_ratio=0.3, num_inference_steps=3, mag_ratios=[1.0, 0.9, 0.9])


@pytest.mark.parametrize("config", [first_block, magnitudes])
@pytest.mark.parametrize("when", ["before", "after"])
def test_caches_over_steps(when: str, config: Any) -> None:
    """With a large threshold the later blocks, or all of them, run in some steps alone, as in the original."""
    name = "flux"
    pipe = made(name)
    whole = original(name, num_inference_steps=3)
    pipe.transformer.enable_cache(config())
    wanted = images(pipe, name, num_inference_steps=3)
    assert distance(wanted, whole) > CLOSE
    if when == "after":
        pipe.transformer.disable_cache()
    engine = injected(pipe)
    if when == "after":
        engine.transformer.enable_cache(config())
    assert distance(images(engine, name, num_inference_steps=3), wanted) <= CLOSE
    engine.transformer.disable_cache()
    assert distance(images(engine, name, num_inference_steps=3), whole) <= CLOSE


def test_caches_inside_of_replaced_blocks_are_refused_by_name() -> None:
    engine = injected(made("flux"), verify="off")
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: engine.current_timestep
    )
    replaced = {step.layer for step in engine.plan["transformer"].steps if step.depth == MODULE} - {"FeedForward"}
    if replaced:
        with pytest.raises(UnsupportedCall, match="PyramidAttentionBroadcastConfig"):
            engine.transformer.enable_cache(config)
    else:
        engine.transformer.enable_cache(config)
        assert engine.transformer.is_cache_enabled
