"""LayerSpec: a layer as declared, named as in the checkpoint. LayerShape: the dimensions of one bound layer.

A spec declares the meaning (which norm, which residual shape, which packing). `LayerSpec.bind` reads the rest from the
layer and its config (biases, widths, qk-norms, eps) and makes a `LayerShape`. Data only: no tensors, picklable.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.packing import Fill
from infuse.architectures.part import MixerShape, PartShape
from infuse.architectures.parts.mlp import MLPShape
from infuse.architectures.parts.norm import Norm
from infuse.architectures.program import (
    ADD,
    CLAMP,
    CLAMP_INFINITE,
    MASK,
    NORM,
    NORM_OF_WIDE,
    NORMS,
    PRE,
    Program,
    ProgramShape,
    Step,
    program_of,
)
from infuse.ground.errors import SpecMismatch

# Return types of a layer's forward. TUPLE: with attention weights; SINGLE: a tuple of one, and of
# two if the layer has an argument that asks for the weights; READING: of one, and of three with the weights of both
# attentions; BIASED: T5's, with a bias; LISTED: with a bias, and the weights of each attention.
TENSOR, TUPLE, SINGLE, READING, BIASED, LISTED = "tensor", "tuple", "single", "reading", "biased", "listed"

SUMS = "sums"  # what is clamped in float16
LIMIT = 65504.0 - 1000.0  # the largest number of float16, less what all models of transformers subtract


class Part(Protocol):
    """A part of a layer as declared: `bind` reads it from a layer; `name` is its name in the new module.

    None: this layer has no such part.
    """

    def bind(self, binder: Binder, name: str) -> PartShape | None: ...


class Mixer(Protocol):
    """Attention or a recurrence as declared. `module` is its path in the layer; it may depend on the layer's kind."""

    def of_layer(self, layer: nn.Module, config: Any) -> Mixer | None:
        """The mixer of this layer, for models whose layers differ. None: it has none."""

    @property
    def module(self) -> str: ...

    def bind(self, binder: Binder, name: str) -> MixerShape: ...


@dataclass(frozen=True)
class LayerSpec:
    """A transformer layer.

    `when`: config values, and `takes`: arguments of its forward, which select among the specs of one class. `has`: the
    path of a module without which a layer of the class has no spec. `expect`:
    config values that must hold. `norm1` and `norm2` come before (PRE, PARALLEL) or after (POST) attention and MLP.
    `residual_scale`: config key, and `residual_attribute`: the layer's attribute, of a factor of both branches.
    SANDWICH adds `post1` and `post2` on their outputs. PARALLEL without `norm2` feeds both from `norm1`. `repeated`:
    arguments that only repeat the mask. `mlp`: None for a layer of a mixer alone. A layer of another shape names its
    further parts in `more` and its steps in `program`; `values` are the arguments of its forward that these steps read.
    `ends`, `unread`, `clamps`, `cuts_mask`: as in CallSpec.
    """

    layer: str
    attn: Mixer
    mlp: Part | None
    norm1: Norm | None = None
    norm2: Norm | None = None
    post1: Norm | None = None
    post2: Norm | None = None
    residual: str = PRE
    residual_scale: str | None = None
    residual_attribute: str | None = None
    transposed: bool = False
    returns: str = TENSOR
    when: tuple[tuple[str, Any], ...] = ()
    expect: tuple[tuple[str, Any], ...] = ()
    repeated: tuple[str, ...] = ()
    more: tuple[tuple[str, Part], ...] = ()
    program: Program = ()
    values: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    has: str = ""
    ends: str = ""
    unread: tuple[str, ...] = ()
    clamps: str = ""
    cuts_mask: bool = False

    def but(self, **changes: Any) -> LayerSpec:
        """Return a variant of the spec. A dict for `attn` or `mlp` changes fields of that part."""
        for name in ("attn", "mlp"):
            if isinstance(changes.get(name), dict):
                changes[name] = replace(getattr(self, name), **changes[name])
        return replace(self, **changes)

    def bind(self, layer: nn.Module, config: Any) -> Bound:
        """Bind the spec to `layer` (live or meta) and `config`. SpecMismatch lists every difference."""
        mixer = self.attn.of_layer(layer, config)
        module = self.attn.module if mixer is None else mixer.module
        inner = getattr(mixer, "inner", "")
        settings = f"{module}.{inner}" if inner else module
        attention = Binder(layer, config, None, self.transposed).module(settings, optional=True)
        if mixer is None:
            attention = layer
        index = getattr(attention, "layer_idx", getattr(attention, "layer_id", None))
        binder = Binder(layer, config, index, self.transposed)
        for key, expected in self.expect:
            setting = getattr(config, key, expected)
            if setting != expected:
                binder.differences.append(f"config.{key} is {setting!r}; only {expected!r} is understood")
        if binder.differences:  # another kind of layer: all its parameters would differ, too
            raise SpecMismatch(self.layer.rpartition(".")[2], binder.differences)
        name = module.partition(".")[0]
        declared: dict[str, Part | None] = {name: mixer, "mlp": self.mlp}
        declared |= {norm: getattr(self, norm) for norm in NORMS} | dict(self.more)
        bound = {name: None if part is None else part.bind(binder, name) for name, part in declared.items()}
        absent = {part for part, shape in bound.items() if shape is None}
        scale = binder.factor(self.residual_scale) if self.residual_scale else 1.0
        scale *= binder.own_factor(self.residual_attribute) if self.residual_attribute else 1.0
        steps = tuple(step for step in self.program if step.part not in absent)
        after_hidden = list(inspect.signature(type(layer).forward).parameters.values())[2:]
        shape = LayerShape(
            program=steps or program_of(self.residual, name, absent, scale),
            held=tuple((name, part) for name, part in bound.items() if part is not None),
            call=CallSpec(
                arguments=tuple(p.name for p in after_hidden if p.kind is p.POSITIONAL_OR_KEYWORD),
                repeated=self.repeated,
                values=self.values,
                returns=self.returns,
                ends=self.ends,
                unread=self.unread,
                clamps=self.clamps,
                cuts_mask=self.cuts_mask,
            ),
        )
        if differences := [*binder.differences, *binder.unclaimed()]:
            raise SpecMismatch(self.layer.rpartition(".")[2], differences)
        return Bound(shape, tuple(binder.fills), index, self.layer.partition(".")[0])


@dataclass(frozen=True)
class CallSpec:
    """How a layer is called, and what it returns.

    `arguments` are its positional arguments after the hidden states, `repeated` those that only repeat the mask,
    `values` those that steps of its program read by name. `ends`: for a layer that takes the tokens of several texts
    in one row, [tokens, width], the argument with their ends, [0, end of the first, ...]. Each token sees its own text.
    `unread`: arguments that are passed and not looked at. `clamps`: what the layer keeps within the range of float16:
    CLAMP or CLAMP_INFINITE, its result; SUMS, each sum of its stream, where some value is not finite. `cuts_mask`: a
    mask with more columns than keys is cut, instead of an error.
    """

    arguments: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    returns: str = TENSOR
    ends: str = ""
    unread: tuple[str, ...] = ()
    clamps: str = ""
    cuts_mask: bool = False


@dataclass(frozen=True)
class Unread:
    """The keywords that a layer takes, by name or because it `takes_any`, and never reads: all but those in `read`.

    `read_by_plain`: those of them that it reads while the config names eager attention or sdpa; the others are read by
    attention functions of other names. `to_cache`: its cache gets them, too.
    """

    names: frozenset[str] = frozenset()
    takes_any: bool = False
    read: frozenset[str] = frozenset()
    read_by_plain: frozenset[str] = frozenset()
    to_cache: bool = False

    def __contains__(self, name: object) -> bool:
        return (self.takes_any or name in self.names) and name not in self.read

    def by_plain(self, name: str) -> bool:
        """Whether the keyword is not read while the config names eager attention or sdpa."""
        return (self.takes_any or name in self.names) and name not in self.read_by_plain


NOTHING_UNREAD = Unread()


@dataclass(frozen=True)
class LayerShape(ProgramShape):
    """Everything that a block of one stream is built from: its steps and parts, and its call."""

    call: CallSpec = CallSpec()

    def in_float16(self, wide: bool) -> LayerShape:
        """The layer in float16. `wide`: its MLP's last matrix is in float32, and so is its stream from there on."""
        steps: list[Step] = []
        for step in self.program:
            steps.append(step._replace(does=NORM_OF_WIDE) if wide and step.does == NORM else step)
            if self.call.clamps == SUMS and step.does == ADD:
                steps.append(Step(CLAMP_INFINITE, scale=LIMIT))
        if self.call.clamps in (CLAMP, CLAMP_INFINITE):
            steps.append(Step(self.call.clamps, scale=LIMIT))
        held = [(name, replace(part, wide=wide) if isinstance(part, MLPShape) else part) for name, part in self.held]
        return replace(self, program=tuple(steps), held=tuple(held))

    @property
    def mixers(self) -> dict[str, MixerShape]:
        """Attentions and recurrences by name, in the order of `held`."""
        return {name: part for name, part in self.held if isinstance(part, MixerShape)}

    @property
    def states(self) -> tuple[tuple[str, int], ...]:
        """Arguments that attention goes over, states of an encoder, and their widths, 0 for that of the layer."""
        over = [(step.over, self.mixers[step.part]) for step in self.program if step.over and step.part in self.mixers]
        merged = [(mixer.merges, mixer) for mixer in self.mixers.values() if mixer.merges]
        return tuple((name, getattr(mixer, "states_width", 0)) for name, mixer in (*over, *merged))

    @property
    def pairs(self) -> bool:
        """Whether its cache is one of tokens and one of an encoder's states."""
        return any(mixer.reads_states for mixer in self.mixers.values())

    @property
    def decodes(self) -> bool:
        """Whether it may run on a cache. Some layers that read states leave the order of tokens to the model's mask."""
        return self.causal or self.pairs

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return all(mixer.causal for mixer in self.mixers.values())

    @property
    def convolves(self) -> bool:  # type: ignore[override]
        """Whether a part reads the frames around each."""
        return any(part.convolves for _, part in self.held)

    @property
    def whole_rows(self) -> bool:  # type: ignore[override]
        """Whether padding has to be computed as other tokens are."""
        return self.decodes or self.convolves or any(part.whole_rows for _, part in self.held)

    @property
    def reads_mask(self) -> bool:
        """Whether a part besides attention looks at the mask, of which the length may then decide results, too."""
        return any(step.over == MASK for step in self.program)

    def but_unread(self, names: Iterable[str]) -> LayerShape:
        """The shape of a layer that takes these arguments, too, and looks at none."""
        return replace(self, call=replace(self.call, unread=tuple(names)))


@dataclass(frozen=True)
class Bound:
    """A layer bound to its spec. `index`: in the cache, or None. `library`: the package of the spec's class."""

    shape: LayerShape
    fills: tuple[Fill, ...]
    index: int | None
    library: str
