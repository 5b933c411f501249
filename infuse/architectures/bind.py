"""bind: a spec, a layer and its config come to a LayerShape and its fills, or to a list of all differences.

The only reader of Hugging Face config attributes. Strict: every parameter of the layer is claimed exactly once, every
claimed path exists, every config value is one that is understood.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from infuse.architectures.activations import ACTIVATIONS
from infuse.architectures.layer import (
    MLP,
    Act,
    Attention,
    AttentionShape,
    GatedMLP,
    LayerShape,
    LayerSpec,
    MLPShape,
    NoPosition,
    Norm,
    NormShape,
    PackedGatedMLP,
    Rotary,
    RotaryTable,
    Separate,
)
from infuse.architectures.packing import BLOCKS, STACK, Fill, Heads
from infuse.errors import SpecMismatch

_MISSING = object()


@dataclass(frozen=True)
class Bound:
    """A layer as its spec sees it. `index` is its place in the cache, None where it has none; `attn` the attention's
    path.
    """

    shape: LayerShape
    fills: tuple[Fill, ...]
    index: int | None
    attn: str


def bind(spec: LayerSpec, layer: nn.Module, config: Any) -> Bound:
    """Read what is found in `layer` (live or meta) and `config`; SpecMismatch lists every difference from the spec."""
    reading = _Reading(spec, layer, config)
    bound = reading.bound()
    unclaimed = sorted(set(reading.parameters) - reading.claimed)
    reading.differences += [
        f"parameter {name} {tuple(reading.parameters[name].shape)} is not claimed" for name in unclaimed
    ]
    if reading.differences or bound is None:
        raise SpecMismatch(spec.layer.rpartition(".")[2], reading.differences)
    return bound


@dataclass(frozen=True)
class _Linear:
    rows: int
    columns: int
    bias: bool


@dataclass
class _Reading:
    """One pass over a layer, collecting claims and differences."""

    spec: LayerSpec
    layer: nn.Module
    config: Any
    claimed: set[str] = field(default_factory=set)
    differences: list[str] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parameters = dict(self.layer.named_parameters())

    # -- small readers: each notes a difference and returns something harmless when it does not find what it should

    def value(self, key: str) -> Any:
        found = getattr(self.config, key, _MISSING)
        if found is _MISSING:
            self.differences.append(f"config has no {key}")
            return None
        return found

    def count(self, key: str) -> int:
        found = self.value(key)
        if isinstance(found, int) and found > 0:
            return found
        if hasattr(self.config, key):
            self.differences.append(f"config.{key} is {found!r}, not a positive number")
        return 1

    def factor(self, key: str) -> float:
        found = self.value(key)
        if isinstance(found, (int, float)):
            return float(found)
        if hasattr(self.config, key):
            self.differences.append(f"config.{key} is {found!r}, not a number")
        return 1.0

    def module(self, path: str, optional: bool = False) -> nn.Module | None:
        try:
            return self.layer.get_submodule(path)
        except AttributeError:
            if not optional:
                self.differences.append(f"there is no module {path}")
            return None

    def attribute(self, path: str, name: str) -> Any:
        owner = self.module(path, optional=True)
        found = getattr(owner, name, _MISSING)
        if found is _MISSING:
            self.differences.append(f"{path} has no {name}")
            return None
        return found

    def claim(self, name: str) -> Any:
        if name in self.claimed:
            self.differences.append(f"parameter {name} is claimed twice")
        self.claimed.add(name)
        return self.parameters[name]

    def linear(self, path: str) -> _Linear:
        weight = f"{path}.weight"
        if weight not in self.parameters:
            self.differences.append(f"there is no parameter {weight}")
            return _Linear(1, 1, False)
        shape = tuple(self.claim(weight).shape)
        if len(shape) != 2:
            self.differences.append(f"{weight} has shape {shape}, not a matrix")
            return _Linear(1, 1, False)
        bias = f"{path}.bias" in self.parameters
        if bias:
            self.claim(f"{path}.bias")
        rows, columns = reversed(shape) if self.spec.transposed else shape
        return _Linear(rows, columns, bias)

    def fill_linear(
        self, target: str, paths: tuple[str, ...], bias: bool, packing: str | None = None, heads: Heads | None = None
    ) -> None:
        transposed = self.spec.transposed
        self.fills.append(Fill(f"{target}.weight", tuple(f"{p}.weight" for p in paths), transposed, packing, heads))
        if bias:
            self.fills.append(Fill(f"{target}.bias", tuple(f"{p}.bias" for p in paths), False, packing, heads))

    def all_or_no_bias(self, paths: tuple[str, ...], linears: list[_Linear]) -> bool:
        with_bias = [path for path, linear in zip(paths, linears, strict=True) if linear.bias]
        if with_bias and len(with_bias) < len(paths):
            self.differences.append(f"only {', '.join(with_bias)} of {', '.join(paths)} have a bias")
        return bool(with_bias)

    def activation(self, declared: str | Act) -> str:
        name = declared.name if isinstance(declared, Act) else self.value(declared)
        if name not in ACTIVATIONS:
            self.differences.append(f"activation {name!r} is not one of {', '.join(sorted(ACTIVATIONS))}")
            return "silu"
        return ACTIVATIONS[name]

    # -- the parts

    def norm(self, declared: Norm | None, target: str, optional: bool = False) -> NormShape | None:
        if declared is None:
            return None
        path, star, below = declared.path.partition(".*")
        module = self.module(path, optional)
        if module is None or isinstance(module, nn.Identity):
            return None
        members = [f"{path}.{i}" for i in range(len(list(module.children())))] if star else [path]
        first = self.module(members[0])
        eps = getattr(first, "variance_epsilon", getattr(first, "eps", None))
        if not isinstance(eps, float):
            self.differences.append(f"{members[0]} has no eps")
            return None
        shapes: dict[str, tuple[int, ...]] = {}
        for kind in ("weight", "bias"):
            names = tuple(f"{member}.{kind}" for member in members)
            if names[0] not in self.parameters:
                continue
            shapes[kind] = tuple(self.claim(names[0]).shape)
            for name in names[1:]:
                self.claim(name)
            self.fills.append(Fill(f"{target}.{kind}", names, merge=STACK if star else "cat"))
            if star:
                shapes[kind] = (len(members), *shapes[kind])
        weight = shapes.get("weight")
        width = weight[-1] if weight else getattr(first, "normalized_shape", (0,))[-1]
        return NormShape(declared.kind, width, eps, declared.offset, weight, "bias" in shapes)

    def attention(self, declared: Attention) -> AttentionShape:
        name = declared.module.partition(".")[0]
        heads = self.count(declared.heads)
        kv = declared.kv_heads
        kv_heads = heads if kv is None else kv if isinstance(kv, int) else self.count(kv)
        if isinstance(declared.qkv, Separate):
            paths = (declared.qkv.q, declared.qkv.k, declared.qkv.v)
            q, k, v = linears = [self.linear(path) for path in paths]
            width = q.rows // heads
            expected = (heads * width, kv_heads * width, kv_heads * width)
            if (q.rows, k.rows, v.rows) != expected:
                self.differences.append(
                    f"q, k, v have {q.rows}, {k.rows}, {v.rows} rows; {heads} and {kv_heads} heads want {expected}"
                )
            bias = self.all_or_no_bias(paths, linears)
            self.fill_linear(f"{name}.qkv", paths, bias)
            hidden = q.columns
        else:
            packed = self.linear(declared.qkv.path)
            width = packed.rows // (heads + 2 * kv_heads)
            if packed.rows != (heads + 2 * kv_heads) * width:
                self.differences.append(
                    f"{declared.qkv.path} has {packed.rows} rows; {heads} + 2 x {kv_heads} heads do not divide them"
                )
            bias, hidden = packed.bias, packed.columns
            packing = (
                None if declared.qkv.packing == BLOCKS else declared.qkv.packing
            )  # [q | k | v] already: moved as it is
            self.fill_linear(f"{name}.qkv", (declared.qkv.path,), bias, packing, Heads(heads, kv_heads, width))
        out = self.linear(declared.out)
        self.fill_linear(f"{name}.out", (declared.out,), out.bias)
        if out.columns != heads * width:
            self.differences.append(
                f"{declared.out} takes {out.columns} columns; {heads} heads of {width} make {heads * width}"
            )
        return AttentionShape(
            name=name,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_width=width,
            qkv_bias=bias,
            out_bias=out.bias,
            position=self.position(declared),
            scale=self.scale(declared, width),
            softcap=self.softcap(declared),
            clip=self.found_number(declared, declared.clip),
            window=self.window(declared),
            causal=bool(getattr(self.module(declared.module), "is_causal", declared.causal)),
            inverted_mask=declared.inverted_mask,
            q_norm=self.norm(declared.q_norm, f"{name}.q_norm", optional=True),
            k_norm=self.norm(declared.k_norm, f"{name}.k_norm", optional=True),
            passes=declared.passes,
        )

    def scale(self, declared: Attention, width: int) -> float:
        if isinstance(declared.scale, str):
            found = getattr(self.module(declared.module, optional=True), declared.scale, None)
            if isinstance(found, (int, float)):
                return float(found)
            self.differences.append(f"{declared.module}.{declared.scale} is {found!r}, not a number")
            return 1.0
        return 1 / math.sqrt(max(width, 1)) if declared.scale is None else declared.scale

    def found_number(self, declared: Attention, name: str | None) -> float:
        return float(self.attribute(declared.module, name) or 0.0) if name else 0.0

    def softcap(self, declared: Attention) -> float:
        # transformers' sdpa function leaves soft caps out; newer releases do not let models with a cap run on it.
        ignored = getattr(self.config, "_attn_implementation", None) == "sdpa"
        return 0.0 if ignored else self.found_number(declared, declared.softcap)

    def position(self, declared: Attention) -> Any:
        position = declared.position
        if isinstance(position, Rotary) and position.switch:
            rotates = self.of_this_layer(position.switch)
            return Rotary(position.interleaved) if rotates else NoPosition()
        if isinstance(position, RotaryTable):
            if not any(name == position.buffer for name, _ in self.layer.named_buffers()):
                self.differences.append(f"there is no buffer {position.buffer}")
            self.fills.append(Fill(f"{declared.module.partition('.')[0]}.positions.table", (position.buffer,)))
        return position

    def window(self, declared: Attention) -> int:
        if declared.window is None or self.of_this_layer(declared.window.types) != declared.window.value:
            return 0
        return self.count(declared.window.size)

    def of_this_layer(self, key: str) -> Any:
        values, index = self.value(key), self.index()
        if index is None or not isinstance(values, (list, tuple)) or index >= len(values):
            self.differences.append(f"config.{key} has no entry for layer {index}")
            return None
        return values[index]

    def index(self) -> int | None:
        module = self.module(self.spec.attn.module, optional=True)
        return getattr(module, "layer_idx", getattr(module, "layer_id", None))

    def mlp(self, declared: MLP | GatedMLP | PackedGatedMLP) -> MLPShape:
        down = self.linear(declared.down)
        if isinstance(declared, GatedMLP):
            paths: tuple[str, ...] = (declared.gate, declared.up)
        else:
            paths = (declared.gate_up if isinstance(declared, PackedGatedMLP) else declared.up,)
        linears = [self.linear(path) for path in paths]
        gated = not isinstance(declared, MLP)
        rows = sum(linear.rows for linear in linears)
        if rows != down.columns * (2 if gated else 1):
            self.differences.append(
                f"{' and '.join(paths)} make {rows} rows; {declared.down} takes {down.columns} columns"
            )
        bias = self.all_or_no_bias(paths, linears)
        self.fill_linear("mlp.up", paths, bias)
        self.fill_linear("mlp.down", (declared.down,), down.bias)
        return MLPShape(linears[0].columns, down.columns, gated, self.activation(declared.activation), bias, down.bias)

    def bound(self) -> Bound:
        spec = self.spec
        for key, expected in spec.expect:
            found = getattr(self.config, key, expected)
            if found != expected:
                self.differences.append(f"config.{key} is {found!r}; only {expected!r} is understood")
        attn = self.attention(spec.attn)
        mlp = self.mlp(spec.mlp)
        norms = {name: self.norm(getattr(spec, name), name) for name in ("norm1", "norm2", "post1", "post2")}
        scale = self.factor(spec.residual_scale) if spec.residual_scale else 1.0
        forward = inspect.signature(type(self.layer).forward)
        arguments = tuple(p.name for p in list(forward.parameters.values())[2:] if p.kind is p.POSITIONAL_OR_KEYWORD)
        shape = LayerShape(
            attn=attn, mlp=mlp, residual=spec.residual, residual_scale=scale, returns=spec.returns, arguments=arguments,
            repeated=spec.repeated, **norms,
        )  # fmt: skip
        return Bound(shape, tuple(self.fills), self.index(), spec.attn.module)
