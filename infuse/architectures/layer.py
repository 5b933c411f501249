"""LayerSpec: a layer as declared, named as in the checkpoint. LayerShape: the dimensions of one bound layer.

A spec declares the meaning (which norm, which residual shape, which packing). `LayerSpec.bind` reads the rest from the
layer and its config (biases, widths, qk-norms, eps) and makes a `LayerShape`. Data only: no tensors, picklable.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from infuse.architectures.attention import Attention, AttentionShape
from infuse.architectures.bind import Binder
from infuse.architectures.norm import Norm, NormShape
from infuse.architectures.packing import Fill
from infuse.architectures.part import PartShape, ShapeOfParts
from infuse.errors import SpecMismatch

# Residual shapes, drawn in architectures/program.py.
PRE, POST, PARALLEL, SANDWICH = "pre", "post", "parallel", "sandwich"

TENSOR, TUPLE, BIASED = "tensor", "tuple", "biased"  # return type of the layer's forward; BIASED: T5's, with its bias

_NORMS = ("norm1", "norm2", "post1", "post2")


class FeedForward(Protocol):
    """Interface of a spec's `mlp`: `bind` reads the part from a layer; `name` is its name in the new module."""

    def bind(self, binder: Binder, name: str) -> PartShape: ...


@dataclass(frozen=True)
class LayerSpec:
    """A transformer layer.

    `when`: config values that select among the specs of one class. `expect`: config values that must hold. `norm1` and
    `norm2` come before (PRE, PARALLEL) or after (POST) attention and MLP. SANDWICH adds `post1` and `post2` on their
    outputs. PARALLEL without `norm2` feeds both from `norm1`. `repeated`: arguments that only repeat the mask.
    """

    layer: str
    attn: Attention
    mlp: FeedForward
    norm1: Norm | None = None
    norm2: Norm | None = None
    post1: Norm | None = None
    post2: Norm | None = None
    residual: str = PRE
    residual_scale: str | None = None
    transposed: bool = False
    returns: str = TENSOR
    when: tuple[tuple[str, Any], ...] = ()
    expect: tuple[tuple[str, Any], ...] = ()
    repeated: tuple[str, ...] = ()

    def but(self, **changes: Any) -> LayerSpec:
        """Return a variant of the spec. A dict for `attn` or `mlp` changes fields of that part."""
        for name in ("attn", "mlp"):
            if isinstance(changes.get(name), dict):
                changes[name] = replace(getattr(self, name), **changes[name])
        return replace(self, **changes)

    def bind(self, layer: nn.Module, config: Any) -> Bound:
        """Bind the spec to `layer` (live or meta) and `config`. SpecMismatch lists every difference."""
        attention = Binder(layer, config, None, self.transposed).module(self.attn.module, optional=True)
        index = getattr(attention, "layer_idx", getattr(attention, "layer_id", None))
        binder = Binder(layer, config, index, self.transposed)
        for key, expected in self.expect:
            found = getattr(config, key, expected)
            if found != expected:
                binder.differences.append(f"config.{key} is {found!r}; only {expected!r} is understood")
        if binder.differences:  # the layer is of another kind, so that its parameters would all differ
            raise SpecMismatch(self.layer.rpartition(".")[2], binder.differences)
        attn = self.attn.bind(binder, self.attn.module.partition(".")[0])
        mlp = self.mlp.bind(binder, "mlp")
        declared = {name: getattr(self, name) for name in _NORMS}
        norms = {name: None if norm is None else norm.bind(binder, name) for name, norm in declared.items()}
        after_hidden = list(inspect.signature(type(layer).forward).parameters.values())[2:]
        shape = LayerShape(
            attn=attn,
            mlp=mlp,
            residual=self.residual,
            residual_scale=binder.factor(self.residual_scale) if self.residual_scale else 1.0,
            returns=self.returns,
            arguments=tuple(p.name for p in after_hidden if p.kind is p.POSITIONAL_OR_KEYWORD),
            repeated=self.repeated,
            **norms,
        )
        if differences := [*binder.differences, *binder.unclaimed()]:
            raise SpecMismatch(self.layer.rpartition(".")[2], differences)
        return Bound(shape, tuple(binder.fills), index, self.attn.module, self.layer.partition(".")[0])


@dataclass(frozen=True)
class LayerShape(ShapeOfParts):
    """Everything that a block is built from.

    `arguments` are the layer's positional arguments after the hidden states. `repeated` are
    those that only repeat the mask.
    """

    attn: AttentionShape
    mlp: PartShape
    norm1: NormShape | None
    norm2: NormShape | None
    post1: NormShape | None
    post2: NormShape | None
    residual: str
    residual_scale: float
    returns: str
    arguments: tuple[str, ...]
    repeated: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, PartShape]:
        held = {name: getattr(self, name) for name in ("attn", "mlp", *_NORMS)}
        return {name: part for name, part in held.items() if part is not None}

    def child(self, field: str) -> str:
        return self.attn.name if field == "attn" else field


@dataclass(frozen=True)
class Bound:
    """A layer bound to its spec. `index`: its index in the cache, or None. `attn`: path of its attention module.

    `library`: the package of the spec's class.
    """

    shape: LayerShape
    fills: tuple[Fill, ...]
    index: int | None
    attn: str
    library: str
