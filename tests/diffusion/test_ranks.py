"""Pipelines of diffusers over several ranks: each has its heads and widths, and all have the images of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import infuse
from infuse.plan.kinds import MODULE
from tests.diffusion.tiny_pipelines import images, made
from tests.support.ranks import Ranks

DENOISERS = {
    "sd15": ("unet", "Transformer2DModel"),
    "sd3": ("transformer", "JointTransformerBlock"),
    "flux": ("transformer", "FluxSingleTransformerBlock"),
}


def on_rank(name: str) -> tuple[torch.Tensor, int, int]:
    """The images, the bytes of this rank's denoiser, and how many of its modules are shared by ranks."""
    pipe = made(name)
    engine = infuse.init_inference(pipe, dtype=torch.float32, verify="strict", tensor_parallel={"tp_size": 2})
    found = images(engine, name, num_inference_steps=1)
    part, layer = DENOISERS[name]
    steps = [one for one in engine.plan[part].steps if one.layer == layer and one.depth == MODULE]
    held = sum(parameter.nbytes for parameter in getattr(pipe, part).parameters())
    return found, held, sum(one.whole is not None for one in steps)


@pytest.mark.parametrize("name", list(DENOISERS))
def test_ranks_make_the_images_of_one(name: str, ranks: Ranks) -> None:
    pipe: Any = made(name)
    wanted = images(pipe, name, num_inference_steps=1)
    whole = sum(parameter.nbytes for parameter in getattr(pipe, DENOISERS[name][0]).parameters())
    for found, held, shared in ranks.run(2, on_rank, name):
        assert float((found - wanted).abs().max()) <= 1e-4
        assert shared and held < 0.95 * whole
