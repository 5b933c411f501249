"""Binder: reads a layer and its config for the parts of a spec, and collects every difference.

This is the only reader of Hugging Face config attributes. It is strict: every parameter of the layer must be claimed
exactly once, every claimed path must exist, and every config value must be supported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from typing import Any

from torch import nn

from infuse.architectures.packing import Fill, Heads
from infuse.ground.activations import ACTIVATIONS, Act
from infuse.parallel.slices import Span

_MISSING = object()


@dataclass(frozen=True)
class FoundLinear:
    rows: int
    columns: int
    bias: bool


@dataclass
class Binder:
    """One pass over a layer, collecting claims, fills and differences. `index` is the layer's index in the cache.

    If a value is missing or wrong, readers record a difference and return a harmless default.
    """

    layer: nn.Module
    config: Any
    index: int | None
    transposed: bool
    claimed: set[str] = field(default_factory=set)
    differences: list[str] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parameters = dict(self.layer.named_parameters())

    def differ(self, how: str) -> None:
        self.differences.append(how)

    def value(self, key: str) -> Any:
        setting = getattr(self.config, key, _MISSING)
        if setting is _MISSING:
            self.differ(f"config has no {key}")
            return None
        return setting

    def count(self, key: str) -> int:
        """A positive number of the config, or this layer's entry in a list of them."""
        number = self.value(key)
        number = self.of_this_layer(key) if isinstance(number, (list, tuple)) else number
        if isinstance(number, int) and number > 0:
            return number
        if hasattr(self.config, key):
            self.differ(f"config.{key} is {number!r}, not a positive number")
        return 1

    def factor(self, key: str) -> float:
        number = self.value(key)
        if isinstance(number, (int, float)):
            return float(number)
        if hasattr(self.config, key):
            self.differ(f"config.{key} is {number!r}, not a number")
        return 1.0

    def own_factor(self, name: str) -> float:
        """A number that is an attribute of the layer."""
        number = self.attribute("", name)
        if isinstance(number, (int, float)):
            return float(number)
        self.differ(f"the layer's {name} is {number!r}, not a number")
        return 1.0

    def module(self, path: str, optional: bool = False) -> nn.Module | None:
        try:
            return self.layer.get_submodule(path)
        except AttributeError:
            if not optional:
                self.differ(f"there is no module {path}")
            return None

    def attribute(self, path: str, name: str) -> Any:
        """The attribute of this name, or at this path (config.top_k), of the module at `path`."""
        try:
            return attrgetter(name)(self.module(path, optional=True))
        except AttributeError:
            self.differ(f"{path} has no {name}")
            return None

    def own_count(self, path: str, name: str) -> int:
        """A positive number that is an attribute of the module at `path`."""
        number = self.attribute(path, name)
        if isinstance(number, int) and number > 0:
            return number
        self.differ(f"{path}.{name} is {number!r}, not a positive number")
        return 1

    def claim(self, name: str) -> Any:
        if name in self.claimed:
            self.differ(f"parameter {name} is claimed twice")
        self.claimed.add(name)
        return self.parameters[name]

    def linear(self, path: str) -> FoundLinear:
        """Claim the linear at `path` and return its size."""
        weight = f"{path}.weight"
        if weight not in self.parameters:
            self.differ(f"there is no parameter {weight}")
            return FoundLinear(1, 1, False)
        shape = tuple(self.claim(weight).shape)
        if len(shape) != 2:
            self.differ(f"{weight} has shape {shape}, not a matrix")
            return FoundLinear(1, 1, False)
        rows, columns = reversed(shape) if self.transposed else shape
        return FoundLinear(rows, columns, self._has_bias(path))

    def pointwise(self, path: str) -> FoundLinear:
        """Claim the convolution of one frame at `path`, a product over channels, and return its size."""
        conv = self.module(path)
        if not isinstance(conv, nn.Conv1d):
            self.differ(f"{path} is a {type(conv).__name__}, not a Conv1d")
            return FoundLinear(1, 1, False)
        found = (conv.kernel_size, conv.stride, conv.padding, conv.groups)
        if found != ((1,), (1,), (0,), 1):
            self.differ(f"{path} has (kernel, stride, padding, groups) {found}, and does not make one frame of each")
        self.claim(f"{path}.weight")
        return FoundLinear(conv.out_channels, conv.in_channels, self._has_bias(path))

    def _has_bias(self, path: str) -> bool:
        """Claim the bias at `path`, if there is one."""
        bias = f"{path}.bias" in self.parameters
        if bias:
            self.claim(f"{path}.bias")
        return bias

    def fill_linear(
        self,
        target: str,
        paths: tuple[str, ...],
        bias: bool,
        packing: str | None = None,
        heads: Heads | None = None,
        *,
        pointwise: bool = False,
        rows: tuple[Span, ...] = (),
    ) -> None:
        """Add the fills that make `target` from the linears, or the `pointwise` convolution, at `paths`.

        `rows`: the spans of their outputs of which it is made.
        """
        weights, turned = tuple(f"{path}.weight" for path in paths), self.transposed and not pointwise
        self.fills.append(Fill(f"{target}.weight", weights, turned, packing, heads, pointwise=pointwise, rows=rows))
        if bias:
            biases = tuple(f"{path}.bias" for path in paths)
            self.fills.append(Fill(f"{target}.bias", biases, False, packing, heads, rows=rows))

    def fill_heads(self, target: str, paths: tuple[str, ...], linears: list[FoundLinear], heads: Heads) -> bool:
        """Add the fills that merge q, k and v; return whether there is a bias, of zeros where one of them has none."""
        absent = tuple(number for number, linear in enumerate(linears) if not linear.bias)
        self.fill_linear(target, paths, not absent)
        if absent and len(absent) < len(linears):
            biases = tuple(f"{path}.bias" for path, linear in zip(paths, linears, strict=True) if linear.bias)
            self.fills.append(Fill(f"{target}.bias", biases, heads=heads, absent=absent))
        return len(absent) < len(linears)

    def fill_parameter(self, target: str, path: str, shape: tuple[int, ...]) -> None:
        """Claim the parameter at `path`, which must have this shape, and add the fill that makes `target` from it."""
        if path not in self.parameters:
            self.differ(f"there is no parameter {path}")
            return
        if (found := tuple(self.claim(path).shape)) != shape:
            self.differ(f"{path} has shape {found}, not {shape}")
        self.fills.append(Fill(target, (path,)))

    def fill_vector(self, target: str, path: str, length: int) -> None:
        """Like `fill_parameter` for a vector, which may have further axes of one entry."""
        if path not in self.parameters:
            self.differ(f"there is no parameter {path}")
            return
        found = tuple(self.claim(path).shape)
        if max(found, default=0) != length or prod(found) != length:
            self.differ(f"{path} has shape {found}, not {(length,)}")
        self.fills.append(Fill(target, (path,), flat=len(found) != 1))

    def all_or_no_bias(self, paths: tuple[str, ...], linears: list[FoundLinear]) -> bool:
        with_bias = [path for path, linear in zip(paths, linears, strict=True) if linear.bias]
        if with_bias and len(with_bias) < len(paths):
            self.differ(f"only {', '.join(with_bias)} of {', '.join(paths)} have a bias")
        return bool(with_bias)

    def activation(self, declared: str | Act) -> str:
        name = declared.name if isinstance(declared, Act) else self.value(declared)
        if name not in ACTIVATIONS:
            self.differ(f"activation {name!r} is not one of {', '.join(sorted(ACTIVATIONS))}")
            return "silu"
        return ACTIVATIONS[name]

    def of_this_layer(self, key: str) -> Any:
        """This layer's entry in a list of the config."""
        values, index = self.value(key), self.index
        if index is None or not isinstance(values, (list, tuple)) or index >= len(values):
            self.differ(f"config.{key} has no entry for layer {index}")
            return None
        return values[index]

    def unclaimed(self) -> list[str]:
        names = sorted(set(self.parameters) - self.claimed)
        return [f"parameter {name} {tuple(self.parameters[name].shape)} is not claimed" for name in names]
