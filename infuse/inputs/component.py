"""Inputs that components of diffusion pipelines accept, made from their config: latents, time steps, text, conditions.

diffusers' models share the names of their forward's arguments and of their config; each argument that a model has is
made by name. Sizes are small, and their height and width differ.
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

MakeTensor = Callable[[str, tuple[int, ...]], Tensor]  # kind ("ids", "mask" or "values") and shape → tensor


@dataclass(frozen=True)
class ComponentSize:
    """Rows of the batch, height and width of the latents, in patches or downsampled pixels, and tokens of the text.

    `more`: pixels beyond a multiple of that unit; UNets accept them.
    """

    label: str
    batch: int
    height: int
    width: int
    text: int
    more: int = 0


# Two rows, as classifier-free guidance makes them; and one row of an uneven size, which not every model takes.
GUIDED = ComponentSize("two rows", 2, 2, 3, 77)
UNEVEN = ComponentSize("one row", 1, 1, 3, 5, more=1)


def is_component(module: object) -> bool:
    """Whether the module's class is one of diffusers."""
    return any(cls.__module__.partition(".")[0] == "diffusers" for cls in type(module).__mro__)


def called_inside(model: Any) -> tuple[str, ...]:
    """Paths of the modules that a model of diffusers runs instead of its forward: a VAE's `encode` and `decode` do."""
    if not is_component(model) or not (hasattr(type(model), "encode") and hasattr(type(model), "decode")):
        return ()
    return tuple(name for name in ("encoder", "decoder") if isinstance(getattr(model, name, None), nn.Module))


def component_inputs(model: nn.Module, make: MakeTensor, size: ComponentSize) -> dict[str, Any]:
    """Arguments of the component's forward by name. LookupError if it needs one that is not known here."""
    inputs = _Inputs(model, make, size)
    arguments = {}
    for name, parameter in list(inspect.signature(type(model).forward).parameters.items())[1:]:
        value = _ARGUMENTS[name](inputs) if name in _ARGUMENTS else None
        if value is not None:
            arguments[name] = value
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            raise LookupError(f"{type(model).__name__} needs {name}, of which infuse cannot make an example")
    return arguments


class _Inputs:
    """Makes one model's arguments; None for those that its config rules out."""

    def __init__(self, model: nn.Module, make: MakeTensor, size: ComponentSize):
        self.config: Any = getattr(model, "config", None)
        self.names = inspect.signature(type(model).forward).parameters
        self.make, self.size, self.batch = make, size, size.batch
        patch = self.of("patch_size", 1)
        self.patch = patch if isinstance(patch, (tuple, list)) else (patch,)
        halvings = len(self.of("block_out_channels", (0,))) - 1
        self.unit = 2**halvings if halvings else self.patch[-1]
        is_unet = halvings > 0 and "timestep" in self.names
        # Few pixels for models that halve them often, enough tokens for others.
        scale, more = (1, size.more) if is_unet else (3, 0)
        self.height, self.width = (each * scale * self.unit + more for each in (size.height, size.width))
        if self.names.keys().isdisjoint(("sample", "encoder_hidden_states", "height")):  # DiT takes only square images
            self.width = self.height

    def of(self, name: str, default: Any = None) -> Any:
        setting = getattr(self.config, name, None)
        return default if setting is None else setting

    def values(self, *shape: int) -> Tensor:
        return self.make("values", (self.batch, *shape))

    def like(self, name: str) -> Tensor | None:
        """Random values of the width that the config has under `name`."""
        width = self.of(name)
        return None if width is None else self.values(width)

    @property
    def tokens(self) -> int:
        return self.height * self.width

    def sample(self) -> Tensor:
        return self.values(self.of("in_channels"), self.height, self.width)

    def hidden_states(self) -> Tensor:
        channels = self.of("in_channels")
        if "img_ids" in self.names or "num_frames" in self.names:  # tokens instead of pixels
            return self.values(self.tokens, channels)
        if len(self.patch) == 3:  # a video of one frame
            return self.values(channels, self.patch[0], self.height, self.width)
        return self.sample()

    def timestep(self) -> Tensor:
        first = 0.5 if "img_ids" in self.names else 501.0  # flux: of 1
        made = self.make("values", (self.batch,))
        return (made if self.is_hunyuan else made.float()).mul(0).add(first)

    @property
    def is_hunyuan(self) -> bool:
        """Hunyuan-DiT: two texts of fixed lengths, sizes, a style, and positions that its pipeline makes."""
        return "text_embedding_mask_t5" in self.names

    def text_of_t5(self) -> Tensor | None:
        return self.values(self.of("text_len_t5"), self.of("cross_attention_dim_t5")) if self.is_hunyuan else None

    def mask_of(self, length: str) -> Tensor | None:
        mask = self.make("mask", (self.batch, self.of(length, 1)))
        mask[0, -1:] = 0
        return mask if self.is_hunyuan else None

    def cos_sin(self) -> tuple[Tensor, Tensor] | None:
        if not self.is_hunyuan:
            return None
        tokens = (self.height // self.patch[0]) * (self.width // self.patch[0])
        angles = self.make("values", (tokens, self.of("attention_head_dim") // 2)).float().repeat_interleave(2, dim=1)
        return angles.cos(), angles.sin()

    def text(self) -> Tensor | None:
        for name in ("joint_attention_dim", "caption_channels", "text_dim", "encoder_hid_dim", "cross_attention_dim"):
            if (width := self.of(name)) is not None:
                length = self.of("text_len") if self.is_hunyuan else self.size.text
                return self.values(length, width if isinstance(width, int) else width[0])
        return None

    def text_mask(self) -> Tensor | None:
        if "sample" in self.names:  # pipelines of UNets pass none
            return None
        mask = self.make("mask", (self.batch, self.size.text))
        mask[0, -2:] = 0
        return mask

    def guidance(self) -> Tensor | None:
        return self.timestep() * 3.5 if self.of("guidance_embeds", False) else None

    def image_ids(self) -> Tensor:
        """Number of the image, row and column of each token [N, 3]."""
        rows, columns = torch.meshgrid(torch.arange(self.height), torch.arange(self.width), indexing="ij")
        ids = torch.stack((torch.zeros_like(rows), rows, columns), dim=-1).reshape(self.tokens, 3)
        return ids.to(self.make("values", (1,)))

    def text_ids(self) -> Tensor:
        return self.make("values", (self.size.text, 3)) * 0

    def added(self) -> dict[str, Tensor | None] | None:
        kind = self.of("addition_embed_type")
        if kind == "text_time":  # SDXL: sizes and crops, beside the pooled text
            each = self.of("addition_time_embed_dim")
            pooled = self.of("projection_class_embeddings_input_dim") - 6 * each
            return {"text_embeds": self.values(pooled), "time_ids": self.values(6).abs() * 100}
        if kind is not None:
            raise LookupError(f"added_cond_kwargs of addition_embed_type {kind!r} are not known to infuse")
        if "sample" in self.names:
            return None
        if not self.of("use_additional_conditions", False):
            return {"resolution": None, "aspect_ratio": None}
        return {"resolution": self.values(2).abs() * 100, "aspect_ratio": self.values(1).abs()}

    def condition(self) -> Tensor:
        """The condition of a ControlNet: an image or, for transformers, latents."""
        if "sample" not in self.names:
            extra = self.of("extra_conditioning_channels", 0)
            tokens = self.hidden_states()
            return tokens if tokens.dim() == 3 else self.values(self.of("in_channels") + extra, self.height, self.width)
        finer = 2 ** (len(self.of("conditioning_embedding_out_channels", (0,))) - 1)
        return self.values(self.of("conditioning_channels", 3), finer * self.height, finer * self.width)

    def labels(self) -> Tensor | None:
        kind, count = self.of("class_embed_type"), self.of("num_class_embeds", self.of("num_embeds_ada_norm"))
        if kind in ("projection", "simple_projection"):
            return self.like("projection_class_embeddings_input_dim")
        if kind == "timestep":
            return self.timestep()
        return None if count is None else self.make("mask", (self.batch,)) * (math.ceil(count / 2) - 1)


_ARGUMENTS: Mapping[str, Callable[[_Inputs], Any]] = MappingProxyType(
    {
        "sample": _Inputs.sample,
        "hidden_states": _Inputs.hidden_states,
        "timestep": _Inputs.timestep,
        "timesteps": _Inputs.timestep,
        "encoder_hidden_states": _Inputs.text,
        "encoder_attention_mask": _Inputs.text_mask,
        "pooled_projections": lambda inputs: inputs.like("pooled_projection_dim"),
        "guidance": _Inputs.guidance,
        "img_ids": _Inputs.image_ids,
        "txt_ids": _Inputs.text_ids,
        "added_cond_kwargs": _Inputs.added,
        "controlnet_cond": _Inputs.condition,
        "class_labels": _Inputs.labels,
        "timestep_cond": lambda inputs: inputs.like("time_cond_proj_dim"),
        "text_embedding_mask": lambda inputs: inputs.mask_of("text_len"),
        "encoder_hidden_states_t5": _Inputs.text_of_t5,
        "text_embedding_mask_t5": lambda inputs: inputs.mask_of("text_len_t5"),
        "image_meta_size": lambda inputs: inputs.values(6).abs() * 100 if inputs.is_hunyuan else None,
        "style": lambda inputs: inputs.make("mask", (inputs.batch,)) * 0 if inputs.is_hunyuan else None,
        "image_rotary_emb": _Inputs.cos_sin,
        "num_frames": lambda inputs: 1,
        "height": lambda inputs: inputs.height,
        "width": lambda inputs: inputs.width,
    }
)
