"""Hooks, forwards and attributes on modules inside of replaced ones of diffusers: they act as on the original's, or
raise UnsupportedCall.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import Tensor, nn

import infuse
from infuse.ground.errors import UnsupportedCall
from tests.diffusion.side_by_side import run
from tests.diffusion.tiny_pipelines import made

MODELS = ("sd15.unet", "sdxl.unet", "sd15.vae", "pixart.transformer", "sd3.transformer", "sd35.transformer",
          "flux.transformer")  # fmt: skip


def model_of(name: str) -> Any:
    pipe, _, part = name.partition(".")
    return getattr(made(pipe), part)


def doubled(value: Any) -> Any:
    return 2 * value if isinstance(value, Tensor) and value.is_floating_point() else None


def double_after(module: nn.Module) -> None:
    module.register_forward_hook(lambda m, args, out: doubled(out))  # tuples stay


def double_before(module: nn.Module) -> None:
    def hook(m: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        if args:
            return (doubled(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": doubled(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def patch(module: Any) -> None:
    forward = module.forward

    def other(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        return doubled(out) if isinstance(out, Tensor) else tuple(map(doubled, out))

    module.forward = other


CHANGES = (double_after, double_before, patch)


def places(model: nn.Module, original: nn.Module) -> list[str]:
    """Paths of modules inside of replaced ones that the original has, too: one for each of their last two names."""
    inside = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if "replaces" in vars(module)
        for name, _ in module.named_modules()
        if name
    ]
    there = dict(original.named_modules())
    found = {tuple(path.split(".")[-2:]): path for path in inside if path in there}
    return [path for path in found.values() if not isinstance(there[path], nn.ModuleList)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("sd15.unet", marks=pytest.mark.slow),
        pytest.param("sdxl.unet", marks=pytest.mark.variants),
        *(name for name in MODELS if name not in ("sd15.unet", "sdxl.unet")),
    ],
)
def test_on_replaced_modules(name: str) -> None:
    original = model_of(name)
    model = copy.deepcopy(original)
    infuse.init_inference(model, dtype=torch.float32, verify="off", progress=False)
    usual, acted = run(original), 0
    for path in places(model, original):
        for change in CHANGES:
            theirs, ours = copy.deepcopy(original), copy.deepcopy(model)
            change(theirs.get_submodule(path))
            wanted = run(theirs)
            try:
                change(ours.get_submodule(path))
            except UnsupportedCall as error:
                assert "call init_inference then" in str(error)
                continue
            torch.testing.assert_close(run(ours), wanted, rtol=1e-3, atol=1e-4, msg=f"{change.__name__} at {path}")
            acted += not torch.allclose(wanted, usual, atol=1e-3)
    assert acted > 2


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("pixart.transformer", change) for change in CHANGES),
        *(
            # Each kind of change in one of these models or two; the UNet of SDXL has the blocks of SD 1.5's.
            pytest.param(name, CHANGES[i % 3], marks=pytest.mark.variants if name == "sdxl.unet" else pytest.mark.slow)
            for i, name in enumerate(name for name in MODELS if name != "pixart.transformer")
        ),
    ],
)
def test_before_init_inference(name: str, change: Callable[[nn.Module], None]) -> None:
    original = model_of(name)
    probe = copy.deepcopy(original)
    infuse.init_inference(probe, dtype=torch.float32, verify="off", progress=False)
    replaced = [path for path, module in probe.named_modules() if "replaces" in vars(module)]
    for path in {".".join(path.split(".")[-2:]): path for path in replaced}.values():
        inner = [each for each, module in original.get_submodule(path).named_modules() if module is not original]
        for each in {name.split(".")[-1]: name for name in inner}.values():
            model = copy.deepcopy(original)
            change(model.get_submodule(".".join(filter(None, (path, each)))))
            wanted = run(model)
            infuse.init_inference(model, dtype=torch.float32, verify="off", progress=False)
            torch.testing.assert_close(run(model), wanted, rtol=1e-3, atol=1e-4, msg=f"{path}.{each}")


@pytest.mark.parametrize("name", ("sd15.unet", "sd15.vae", "pixart.transformer"))
def test_settings_of_replaced_modules_are_refused(name: str) -> None:
    model = model_of(name)
    originals = dict(copy.deepcopy(model).named_modules())
    infuse.init_inference(model, dtype=torch.float32, verify="off", progress=False)
    refused = set()
    for path in places(model, model_of(name)):
        module, settings = model.get_submodule(path), vars(originals[path])
        numbers = [key for key, value in settings.items() if type(value) in (int, float) and key[0] != "_"]
        numbers = [key for key in numbers if key != "dropout"]
        for key in [*numbers, *(["processor"] if "processor" in settings else [])]:
            if isinstance(module, nn.Conv2d | nn.Dropout):  # convolutions follow theirs
                continue
            with pytest.raises(UnsupportedCall, match=f"{key} = "):
                setattr(module, key, AttnProcessor2_0() if key == "processor" else settings[key] + 1)
            refused.add(key)
    assert {"processor", "scale", "eps"} <= refused or name == "sd15.vae"


def test_a_processor_for_one_module() -> None:
    model = model_of("sd15.unet")
    infuse.init_inference(model, dtype=torch.float32, verify="off", progress=False)
    attention: Any = model.get_submodule("mid_block.attentions.0.transformer_blocks.0.attn1")
    attention.processor = attention.processor
    with pytest.raises(UnsupportedCall, match="set it there"):
        attention.set_processor(AttnProcessor2_0())


def test_a_patched_processor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = AttnProcessor2_0.__call__
    monkeypatch.setattr(AttnProcessor2_0, "__call__", lambda *args, **kwargs: 2 * own(*args, **kwargs))
    model = model_of("sd15.unet")
    wanted = run(model)
    infuse.init_inference(model, dtype=torch.float32, verify="off", progress=False)
    torch.testing.assert_close(run(model), wanted, rtol=1e-4, atol=1e-5)
