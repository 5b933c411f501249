"""The modules of diffusers that are replaced as a whole. `module_spec` looks one up, without importing diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from infuse.architectures.module import ModuleSpec
from infuse.diffusion.shapes.cross_attention import MODULES as CROSSING
from infuse.diffusion.shapes.dit import MODULES as BLOCKS
from infuse.diffusion.shapes.feed_forward import FEED_FORWARD
from infuse.diffusion.shapes.image_attention import MODULES as ATTENTIONS
from infuse.diffusion.shapes.image_transformer import IMAGE_TRANSFORMER
from infuse.diffusion.shapes.normed_attention import MODULES as NORMED
from infuse.diffusion.shapes.unet import MODULES as CONVOLUTIONS

MODULES: tuple[ModuleSpec, ...] = (
    FEED_FORWARD,
    *ATTENTIONS,
    *NORMED,
    *CONVOLUTIONS,
    IMAGE_TRANSFORMER,
    *CROSSING,
    *BLOCKS,
)

_BY_CLASS: Mapping[str, ModuleSpec] = MappingProxyType({spec.layer: spec for spec in MODULES})


def module_spec(module: nn.Module) -> ModuleSpec | None:
    """The spec of the module's class or, for a user's subclass with the same forward, of that base class."""
    for cls in type(module).__mro__:
        spec = _BY_CLASS.get(f"{cls.__module__}.{cls.__qualname__}")
        if spec is not None:
            return spec if type(module).forward is cls.forward else None  # type: ignore[attr-defined]
    return None
