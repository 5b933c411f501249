"""Arguments of a small call of a diffusion pipeline, made by name from the signature of its call: one step, one image.

diffusers' pipelines share the names of their arguments. Arguments that are not listed here keep their defaults.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from infuse.inputs.model import like

SEED = 2026
_PROMPT = "a photo of a cat"
_TEXT_TOKENS = 32  # T5 pads each prompt to this length; the default is up to 512
_MULTIPLE = 16  # pipelines refuse other sizes than multiples of 8 or 16
_FRAMES = 9  # video VAEs require one more than a multiple of 4 or of 8


def pipeline_inputs(pipe: Any, models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Arguments of `pipe`'s call. LookupError, with the reason, if it cannot be run in one small step."""
    names = inspect.signature(type(pipe).__call__).parameters
    if reason := _why_not(pipe, models, names):
        raise LookupError(reason)
    made = _Inputs(pipe, models)
    arguments: dict[str, Any] = {}
    for name, parameter in names.items():
        if name.endswith("num_inference_steps"):
            arguments[name] = 1
        elif name in _ARGUMENTS:
            arguments[name] = _ARGUMENTS[name](made, parameter.default)
    return arguments


def _why_not(pipe: Any, models: Mapping[str, nn.Module], names: Mapping[str, Any]) -> str:
    if "num_inference_steps" not in names:
        return "its call takes no number of steps"
    if not ({"height", "width"} <= set(names) or "image" in names):
        return "its call takes no size"  # its default size may take minutes
    if any(isinstance(getattr(component, "components", None), dict) for component in vars(pipe).values()):
        return "it runs other pipelines"
    if getattr(pipe, "_all_hooks", None) or any(hasattr(model, "_hf_hook") for model in models.values()):
        return "hooks move its models between devices"
    for model in models.values():
        half = like(model).dtype == torch.float16
        if half and getattr(getattr(model, "config", None), "force_upcast", False):
            return "it converts its VAE to float32 while it runs"
    return ""


@dataclass(frozen=True)
class _Inputs:
    pipe: Any
    models: Mapping[str, nn.Module]

    @property
    def pixels(self) -> tuple[int, int]:
        """Height and width of the smallest image, not a square one, that the denoiser takes."""
        denoiser = next((model for model in self.models.values() if _has_time_step(model)), None)
        config = getattr(denoiser, "config", None)
        halvings = len(getattr(config, "block_out_channels", None) or (0,)) - 1
        patch = getattr(config, "patch_size", None) or 1
        patch = patch[-1] if isinstance(patch, (tuple, list)) else patch
        # 24 tokens for transformers. Some pipelines pack 2 x 2 latents into a token, which their config does not say.
        rows, columns, unit = (1, 2, 2**halvings) if halvings else (4, 6, max(patch, 2))
        names = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio")
        scale = next((int(factor) for name in names if (factor := getattr(self.pipe, name, None))), 8)
        multiple = math.lcm(unit * scale, _MULTIPLE)
        height, width = (-(-count * unit * scale // multiple) * multiple for count in (rows, columns))
        return height, width

    def image(self, default: Any = None) -> Tensor | list[Tensor]:
        """Random pixels from 0 to 1; for several ControlNets, one image each."""
        generator = torch.Generator().manual_seed(SEED)
        made = torch.rand((1, 3, *self.pixels), generator=generator)
        nets = getattr(getattr(self.pipe, "controlnet", None), "nets", None)
        return made if nets is None else [made] * len(nets)

    def mask(self, default: Any = None) -> Tensor:
        """The left half of the image."""
        height, width = self.pixels
        return (torch.arange(width) < width // 2).float().expand(1, 1, height, width)


def _has_time_step(model: nn.Module) -> bool:
    names = inspect.signature(type(model).forward).parameters
    return "timestep" in names or "timesteps" in names


_ARGUMENTS: Mapping[str, Callable[[_Inputs, Any], Any]] = MappingProxyType(
    {
        "prompt": lambda inputs, default: _PROMPT,
        "image": _Inputs.image,
        "control_image": _Inputs.image,
        "mask_image": _Inputs.mask,
        "height": lambda inputs, default: inputs.pixels[0],
        "width": lambda inputs, default: inputs.pixels[1],
        "strength": lambda inputs, default: 1.0,  # otherwise the only step would be skipped
        "num_frames": lambda inputs, default: _FRAMES,
        "max_sequence_length": lambda inputs, default: min(default or _TEXT_TOKENS, _TEXT_TOKENS),
        "use_resolution_binning": lambda inputs, default: False,  # it would enlarge small images
        "clean_caption": lambda inputs, default: False,
        "generator": lambda inputs, default: torch.Generator().manual_seed(SEED),
        "output_type": lambda inputs, default: "pt",
        "return_dict": lambda inputs, default: False,
    }
)
