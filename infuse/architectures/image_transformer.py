"""The transformer block of diffusers' UNets and of PixArt, and the transformer over an image that is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.feed_forward import FEED_FORWARD, bind_feed_forward
from infuse.architectures.image_attention import ATTENTION as ATTENTION_CLASS
from infuse.architectures.image_attention import bind_image_attention
from infuse.architectures.module import ModuleShape, ModuleSpec, class_path
from infuse.architectures.part import Matrix, Parameter, PartShape, named
from infuse.architectures.program import (
    ADD,
    ATTENTION,
    EMPTY,
    IMAGE,
    MASK,
    MLP,
    NORM,
    TEXT,
    TEXT_MASK,
    TIME,
    UNREAD,
    Program,
    Step,
)
from infuse.architectures.streams import (
    MODULATION,
    StreamsShape,
    bind_layer_norm,
    bind_modulated_norm,
    bind_table,
    gated,
    modulated,
)
from infuse.architectures.unet import ConvShape, GroupNormShape, bind_conv, bind_group_norm

_BLOCK = "diffusers.models.attention.BasicTransformerBlock"
BLOCKS = "transformer_blocks"  # the name of the list of blocks
_CALL = (
    ("attention_mask", MASK), ("encoder_hidden_states", TEXT), ("encoder_attention_mask", TEXT_MASK),
    ("timestep", TIME), ("cross_attention_kwargs", EMPTY), ("class_labels", UNREAD), ("added_cond_kwargs", UNREAD),
)  # fmt: skip
_ATTN1, _FF, _ADD = Step(ATTENTION, "attn1", on=IMAGE), Step(MLP, "ff", on=IMAGE), Step(ADD, on=IMAGE)
# Attention over the text, after norm2 or, where the time step modulates the others, without a norm.
_TEXT = (Step(NORM, "norm2", on=IMAGE), Step(ATTENTION, "attn2", on=IMAGE, over=TEXT), _ADD)
_BARE = (Step(NORM, on=IMAGE), *_TEXT[1:])


def _plain(text: Program) -> Program:
    return (Step(NORM, "norm1", on=IMAGE), _ATTN1, _ADD, *text, Step(NORM, "norm3", on=IMAGE), _FF, _ADD)


def _modulated(text: Program) -> Program:
    """As in PixArt: shift, scale and gate of attn1 and of the feed-forward come from the time step."""
    end = (modulated("norm2", IMAGE, 3), _FF, gated(IMAGE, 5))
    return (MODULATION, modulated("norm1", IMAGE, 0), _ATTN1, gated(IMAGE, 2), *text, *end)


@dataclass(frozen=True)
class TransformerBlock:
    """BasicTransformerBlock with norms of type "layer_norm" or "ada_norm_single"."""

    def bind(self, binder: Binder, name: str) -> StreamsShape:
        return _bind_block(binder, "")


def _bind_block(binder: Binder, path: str) -> StreamsShape:
    """Bind the transformer block at `path`; its tensors keep their place in the new module."""
    block = binder.module(path) if path else binder.layer
    at = partial(named, path)
    kind = getattr(block, "norm_type", None)
    if kind not in ("layer_norm", "ada_norm_single"):
        binder.differ(f"{at('norm_type')} is {kind!r}, not 'layer_norm' or 'ada_norm_single'")
    for part in ("pos_embed", "fuser"):
        if getattr(block, part, None) is not None:
            binder.differ(f"it has {at(part)}")
    if getattr(block, "only_cross_attention", False):
        binder.differ(f"{at('only_cross_attention')} is True")
    single, crosses = kind == "ada_norm_single", getattr(block, "attn2", None) is not None
    for part, wanted in (("attn1", ATTENTION_CLASS), ("attn2", ATTENTION_CLASS), ("ff", FEED_FORWARD.layer)):
        if (found := class_path(getattr(block, part, None))) != wanted and (part != "attn2" or crosses):
            binder.differ(f"{at(part)} is a {found.rpartition('.')[2]}, not diffusers' {wanted.rpartition('.')[2]}")
    if single:
        program = _modulated(_BARE if crosses else ())
    else:
        program = _plain(_TEXT if crosses else ())
    held: dict[str, PartShape] = {}
    for step in program:
        if step.part == "modulation":
            held[step.part] = bind_table(binder, at("scale_shift_table"), at(step.part), 6)
        elif step.does == NORM and step.part:
            held[step.part] = (bind_modulated_norm if single else bind_layer_norm)(binder, at(step.part))
        elif step.does == ATTENTION:
            held[step.part] = bind_image_attention(binder, at(step.part), at(step.part))
        elif step.does == MLP:
            held[step.part] = bind_feed_forward(binder, at(step.part), at(step.part))
    return StreamsShape("BasicTransformerBlock", program, tuple(held.items()), _CALL)


@dataclass(frozen=True)
class ImageTransformerShape(ModuleShape):
    """x + proj_out(blocks(proj_in(norm(x)))) over the pixels of an image: diffusers' Transformer2DModel.

    The projections are linears or convolutions of single pixels, which have the same names.
    """

    norm: GroupNormShape
    proj_in: Matrix | ConvShape
    blocks: tuple[StreamsShape, ...]
    proj_out: Matrix | ConvShape

    @property
    def parts(self) -> Mapping[str, PartShape]:
        found: dict[str, PartShape] = {"norm": self.norm}
        for number, block in enumerate(self.blocks):
            found |= {f"{BLOCKS}.{number}.{name}": part for name, part in block.parts.items()}
        return found | {name: one for name, one in self._projections.items() if isinstance(one, PartShape)}

    @property
    def _projections(self) -> dict[str, Matrix | ConvShape]:
        return {"proj_in": self.proj_in, "proj_out": self.proj_out}

    def with_parts(self, parts: Mapping[str, PartShape]) -> ImageTransformerShape:
        blocks = []
        for number, block in enumerate(self.blocks):
            start = f"{BLOCKS}.{number}."
            own = {name.removeprefix(start): part for name, part in parts.items() if name.startswith(start)}
            blocks.append(block.with_parts(own))
        return replace(self, blocks=tuple(blocks))

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (*super().matrices, *(one for one in self._projections.values() if isinstance(one, Matrix)))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        linears = [one for one in self._projections.values() if isinstance(one, Matrix)]
        return (*super().parameters, *(parameter for matrix in linears for parameter in matrix.parameters))

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.norm.ops, *(op for block in self.blocks for op in block.ops))))


@dataclass(frozen=True)
class ImageTransformer:
    """Transformer2DModel over the channels of an image, not over patches or codes, of blocks without modulation."""

    def bind(self, binder: Binder, name: str) -> ImageTransformerShape:
        model = binder.layer
        if not getattr(model, "is_input_continuous", False):
            binder.differ("its input is not an image of channels")
        if (tables := getattr(getattr(model, "config", None), "norm_type", "layer_norm")) != "layer_norm":
            binder.differ(f"norm_type is {tables!r}, not 'layer_norm'")
        blocks = [f"{BLOCKS}.{number}" for number in range(len(getattr(model, BLOCKS, ())))]
        for path in blocks:
            if (found := class_path(binder.module(path))) != _BLOCK:
                binder.differ(f"{path} is a {found.rpartition('.')[2]}, not diffusers' BasicTransformerBlock")
        return ImageTransformerShape(
            norm=bind_group_norm(binder, "norm", "norm"),
            proj_in=_projection(binder, "proj_in"),
            blocks=tuple(_bind_block(binder, path) for path in blocks),
            proj_out=_projection(binder, "proj_out"),
        )


def _projection(binder: Binder, path: str) -> Matrix | ConvShape:
    if type(binder.module(path)) is not nn.Linear:
        return bind_conv(binder, path, path, 1)
    found = binder.linear(path)
    binder.fill_linear(path, (path,), found.bias)
    return Matrix(path, found.rows, found.columns, found.bias)


MODULES = (
    ModuleSpec(_BLOCK, TransformerBlock()),
    ModuleSpec("diffusers.models.transformers.transformer_2d.Transformer2DModel", ImageTransformer()),
)
