"""The feed-forward module of diffusers: its declaration, alone or inside a block, and its shape.

`net` is [activation with the first linear, dropout, second linear, maybe dropout]. Gated ones have [up | gate] in the
rows of their first linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.module import ModuleShape, ModuleSpec, class_path
from infuse.architectures.packing import SWAPPED, Heads
from infuse.architectures.part import PartShape, named
from infuse.architectures.parts.mlp import MLPShape

_ACTIVATIONS = "diffusers.models.activations."
_GATED: Mapping[str, str] = MappingProxyType({f"{_ACTIVATIONS}GEGLU": "gelu", f"{_ACTIVATIONS}SwiGLU": "silu"})
_MODULES: Mapping[type[nn.Module], str] = MappingProxyType({nn.SiLU: "silu", nn.ReLU: "relu"})


@dataclass(frozen=True)
class FeedForwardShape(ModuleShape):
    """A feed-forward module. Its matrices are those of `mlp`."""

    mlp: MLPShape

    @property
    def parts(self) -> Mapping[str, PartShape]:
        return {"mlp": self.mlp}

    def child(self, field: str) -> str:
        return ""


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward module itself."""

    def bind(self, binder: Binder, name: str) -> FeedForwardShape:
        return FeedForwardShape(bind_feed_forward(binder, "", name))


def bind_feed_forward(binder: Binder, path: str, name: str) -> MLPShape:
    """Bind the feed-forward module at `path`; its tensors go to `name` in the new module."""
    net = [type(layer) for layer in getattr(binder.module(named(path, "net")), "children", list)()]
    if net[1:] not in ([nn.Dropout, nn.Linear], [nn.Dropout, nn.Linear, nn.Dropout]):
        classes = ", ".join(cls.__name__ for cls in net)
        binder.differ(f"{named(path, 'net')} is [{classes}], not [activation, Dropout, Linear]")
    activation, gated = _activation(binder, named(path, "net.0"))
    up_path, down_path = named(path, "net.0.proj"), named(path, "net.2")
    up, down = binder.linear(up_path), binder.linear(down_path)
    if up.rows != down.columns * (2 if gated else 1):
        binder.differ(f"{up_path} makes {up.rows} rows; {down_path} takes {down.columns} columns")
    order = dict(packing=SWAPPED, heads=Heads(2, 0, down.columns)) if gated else {}
    binder.fill_linear(named(name, "up"), (up_path,), up.bias, **order)  # type: ignore[arg-type]
    binder.fill_linear(named(name, "down"), (down_path,), down.bias)
    if down.rows != up.columns:
        binder.differ(f"{down_path} makes {down.rows} rows; {up_path} takes {up.columns} columns")
    return MLPShape(up.columns, down.columns, gated, activation, up.bias, down.bias)


def _activation(binder: Binder, path: str) -> tuple[str, bool]:
    """Our name of the activation at `path`, and whether it gates."""
    module = binder.module(path)
    class_name = class_path(module)
    if class_name in _GATED:
        return _GATED[class_name], True
    if class_name == f"{_ACTIVATIONS}ApproximateGELU":
        return "quick_gelu", False
    approximate = {"none": "gelu", "tanh": "gelu_tanh"}
    function = getattr(module, "activation", None) if class_name == f"{_ACTIVATIONS}LinearActivation" else module
    if class_name == f"{_ACTIVATIONS}GELU" or isinstance(function, nn.GELU):
        if (name := approximate.get(getattr(function, "approximate", ""))) is not None:
            return name, False
    elif (known := _MODULES.get(type(function))) is not None:  # type: ignore[arg-type]
        return known, False
    binder.differ(f"{path} is a {class_name.rpartition('.')[2]}, whose activation is not known")
    return "gelu", False


FEED_FORWARD = ModuleSpec("diffusers.models.attention.FeedForward", FeedForward())
