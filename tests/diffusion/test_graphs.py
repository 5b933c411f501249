"""Denoisers and VAEs as graphs on a recorder: one for each shape of inputs, whatever prompt and time step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import infuse
from infuse.generate.install import GraphUse, install, uninstall
from infuse.graphs.forward import Forward
from infuse.inputs.component import called_inside
from tests.diffusion.tiny_pipelines import images, made
from tests.support.fake_graph import FakeBackend


def graphed(model: Any, backend: FakeBackend) -> Any:
    """`model` injected, with its forward, or its parts', recorded by `backend`, as the engine does on a GPU."""
    engine = infuse.init_inference(model, dtype=torch.float32)
    uninstall(model)
    graphs = GraphUse(backend, steps=False, forward=True, inside=called_inside(model))
    install(model, limit_tokens=None, min_new_tokens=1, caches=False, graphs=graphs)
    return engine


@pytest.mark.parametrize("name", ["sd15", "sd3", "flux"])
def test_denoisers(name: str) -> None:
    """The prompt and the time step change from call to call; the third call of a size is captured."""
    prompts = ["a red cat", "a large dog", "a house", "a red cat"]
    calls = [dict(size=32 + 16 * (i % 2), prompt=[prompt]) for i, prompt in enumerate(prompts)]
    pipe = made(name)
    wanted = [images(pipe, name, **call) for call in calls]
    part = "unet" if name == "sd15" else "transformer"
    backend = FakeBackend()
    graphed(getattr(pipe, part), backend)
    found = [images(pipe, name, **call) for call in calls]
    assert max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) <= 1e-4
    assert len(backend.captures) == 2 and backend.replays >= 4


def test_time_steps_that_are_numbers() -> None:
    """In a user's own loop: by position and by name, whole and not, in one graph for each dtype."""
    unet, backend = made("sd15").unet, FakeBackend()
    x, text = torch.randn(2, 4, 16, 24), torch.randn(2, 5, 32)
    steps = [999, 501, 10, 3, 10.5, 9.5, 8.5]
    with torch.no_grad():
        wanted = [unet(x, step, text).sample for step in steps]
    graphed(unet, backend)
    with torch.no_grad():
        found = [unet(x, step, text).sample for step in steps]
        named = unet(x, timestep=10, encoder_hidden_states=text).sample
    for one, other in zip([*found, named], [*wanted, wanted[2]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert len(backend.captures) == 2 and backend.replays == 3


def test_encoder_and_decoder_of_a_vae() -> None:
    vae, backend = made("sd15").vae, FakeBackend()
    samples = [torch.randn(1, 3, 32, 40) for _ in range(4)]
    with torch.no_grad():
        latents = [vae.encode(sample).latent_dist.mode() for sample in samples]
        wanted = [vae.decode(latent).sample for latent in latents]
    graphed(vae, backend)
    assert isinstance(vae.decoder.forward, Forward) and "forward" not in vars(vae)
    with torch.no_grad():
        for sample, latent, picture in zip(samples, latents, wanted, strict=True):
            torch.testing.assert_close(vae.encode(sample).latent_dist.mode(), latent, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(vae.decode(latent).sample, picture, rtol=1e-3, atol=1e-4)
    assert len(backend.captures) == 2 and backend.replays == 4
    uninstall(vae)
    assert "forward" not in vars(vae.decoder) and not hasattr(vae.decoder, "_infuse")
