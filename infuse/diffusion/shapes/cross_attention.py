"""Blocks that attend to themselves, then to a text: diffusers' UNets and PixArt, LTX-Video, Wan, Hunyuan-DiT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.module import ModuleSpec, class_path
from infuse.architectures.part import PartShape, named
from infuse.architectures.program import (
    ADD,
    ATTENTION,
    COS_SIN,
    EMBED,
    EMPTY,
    IMAGE,
    LABEL,
    MASK,
    MLP,
    MODULATE,
    NORM,
    SKIP,
    TEXT,
    TEXT_MASK,
    TIME,
    UNREAD,
    Program,
    Step,
)
from infuse.diffusion.shapes.feed_forward import FEED_FORWARD, bind_feed_forward
from infuse.diffusion.shapes.image_attention import ATTENTION_CLASS, bind_image_attention
from infuse.diffusion.shapes.normed_attention import HUNYUAN_ATTENTION, LTX_ATTENTION, WAN_ATTENTION
from infuse.diffusion.shapes.streams import (
    MODULATION,
    SHIFT,
    ZERO,
    StreamsShape,
    bind_layer_norm,
    bind_modulated_norm,
    bind_modulation,
    bind_skip,
    bind_table,
    gated,
    modulated,
)

_TRANSFORMERS = "diffusers.models.transformers."
_ATTN1, _ATTN2 = Step(ATTENTION, "attn1", on=IMAGE), Step(ATTENTION, "attn2", on=IMAGE, over=TEXT)
_FF, _ADD, _BARE = Step(MLP, "ff", on=IMAGE), Step(ADD, on=IMAGE), Step(NORM, on=IMAGE)
_NORMS = tuple(Step(NORM, f"norm{number}", on=IMAGE) for number in range(4))
# The time step gives shift, scale and gate of attn1 and of the feed-forward.
_BEGIN = (MODULATION, modulated("norm1", IMAGE, 0), _ATTN1, gated(IMAGE, 2))

PLAIN: Program = (_NORMS[1], _ATTN1, _ADD, _NORMS[2], _ATTN2, _ADD, _NORMS[3], _FF, _ADD)
ADA_NORM_SINGLE: Program = (*_BEGIN, _BARE, _ATTN2, _ADD, modulated("norm2", IMAGE, 3), _FF, gated(IMAGE, 5))
ADA_NORM_ZERO: Program = (
    Step(EMBED, "norm1", on=IMAGE, over=LABEL),
    *_BEGIN,
    _NORMS[2],
    _ATTN2,
    _ADD,
    modulated("norm3", IMAGE, 3),
    _FF,
    gated(IMAGE, 5),
)
WAN: Program = (
    *_BEGIN,
    _NORMS[2],
    _ATTN2,
    _ADD,
    modulated("norm3", IMAGE, 3),
    _FF._replace(part="ffn"),
    gated(IMAGE, 5),
)
HUNYUAN: Program = (Step(SKIP, "skip", on=IMAGE), MODULATION, _NORMS[1]._replace(by=(0,)), *PLAIN[1:])

_TEXT_AND_TIME = (("encoder_hidden_states", TEXT), ("temb", TIME))
_BASIC_CALL = (
    ("attention_mask", MASK),
    ("encoder_hidden_states", TEXT),
    ("encoder_attention_mask", TEXT_MASK),
    ("timestep", TIME),
    ("cross_attention_kwargs", EMPTY),
    ("class_labels", UNREAD),
    ("added_cond_kwargs", UNREAD),
)


@dataclass(frozen=True)
class Attends:
    """The class of a block's attentions; `bind` binds one at a path to a name in the new module."""

    layer: str
    bind: Callable[[Binder, str, str], PartShape]


@dataclass(frozen=True)
class CrossAttentionBlock:
    """A block that runs `program`. Its parts keep the names that they have in the original."""

    layer: str
    program: Program
    attends: Attends
    call: tuple[tuple[str, str], ...]

    def bind(self, binder: Binder, name: str) -> StreamsShape:
        if getattr(binder.layer, "_chunk_size", None) is not None:
            binder.differ("its feed-forward runs in chunks")
        return self.bind_at(binder, "")

    def bind_at(self, binder: Binder, path: str) -> StreamsShape:
        """Bind the block at `path`; its tensors keep their place in the new module."""
        block, at, parts = binder.module(path) if path else binder.layer, partial(named, path), dict[str, PartShape]()
        program = _present(block, self.program)
        for does, part, *_, by, _ in program:
            if does == MODULATE and at("scale_shift_table") in binder.parameters:
                parts[part] = bind_table(binder, at("scale_shift_table"), at(part), 6)
            elif does == MODULATE:
                kind = ZERO if self.program == ADA_NORM_ZERO else SHIFT
                parts |= bind_modulation(binder, {"norm1": (IMAGE, kind)}, embeds=kind == ZERO)
            elif does == NORM and part and part not in parts:
                parts[part] = (bind_modulated_norm if by else bind_layer_norm)(binder, at(part))
            elif does == ATTENTION and _is_a(self.attends.layer, binder, at(part)):
                parts[part] = self.attends.bind(binder, at(part), at(part))
            elif does == MLP and _is_a(FEED_FORWARD.layer, binder, at(part)):
                parts[part] = bind_feed_forward(binder, at(part), at(part))
            elif does == SKIP:
                parts[part] = bind_skip(binder, part)
        return StreamsShape(program, tuple(parts.items()), self.layer.rpartition(".")[2], self.call)


def _present(block: nn.Module | None, program: Program) -> Program:
    """The steps whose parts the block has. The norm of an Identity becomes a NORM without a part."""
    steps = [step for step in program if step.does != SKIP or getattr(block, "skip_linear", None) is not None]
    if getattr(block, "attn2", None) is None:
        crossing = steps.index(_ATTN2)  # between its norm and its sum
        del steps[crossing - 1 : crossing + 2]
    return tuple(_BARE if isinstance(getattr(block, step.part, None), nn.Identity) else step for step in steps)


def _is_a(wanted: str, binder: Binder, path: str) -> bool:
    class_name = class_path(binder.module(path))
    if class_name != wanted:
        binder.differ(f"{path} is a {class_name.rpartition('.')[2]}, not diffusers' {wanted.rpartition('.')[2]}")
    return class_name == wanted


_BY_NORM_TYPE: Mapping[str | None, Program] = MappingProxyType(
    {"layer_norm": PLAIN, "ada_norm_single": ADA_NORM_SINGLE, "ada_norm_zero": ADA_NORM_ZERO}
)


@dataclass(frozen=True)
class BasicBlock:
    """diffusers' BasicTransformerBlock with a norm_type of _BY_NORM_TYPE."""

    layer: str = "diffusers.models.attention.BasicTransformerBlock"

    def bind(self, binder: Binder, name: str) -> StreamsShape:
        return self.bind_at(binder, "")

    def bind_at(self, binder: Binder, path: str) -> StreamsShape:
        block, at = binder.module(path) if path else binder.layer, partial(named, path)
        kind = getattr(block, "norm_type", None)
        if kind not in _BY_NORM_TYPE:
            binder.differ(f"{at('norm_type')} is {kind!r}, not one of {', '.join(map(repr, _BY_NORM_TYPE))}")
        for part in ("pos_embed", "fuser"):
            if getattr(block, part, None) is not None:
                binder.differ(f"it has {at(part)}")
        if getattr(block, "only_cross_attention", False):
            binder.differ(f"{at('only_cross_attention')} is True")
        program = _BY_NORM_TYPE.get(kind, PLAIN)
        call: tuple[tuple[str, str], ...] = _BASIC_CALL
        if program == ADA_NORM_ZERO:
            call = tuple((name, LABEL if name == "class_labels" else value) for name, value in call)
        attends = Attends(ATTENTION_CLASS, bind_image_attention)
        return CrossAttentionBlock(self.layer, program, attends, call).bind_at(binder, path)


BASIC_BLOCK = BasicBlock()
_LTX, _WAN = f"{_TRANSFORMERS}transformer_ltx.LTX", f"{_TRANSFORMERS}transformer_wan.Wan"
BLOCKS = (
    CrossAttentionBlock(
        f"{_LTX}VideoTransformerBlock", ADA_NORM_SINGLE, Attends(f"{_LTX}Attention", LTX_ATTENTION.bind_at),
        (*_TEXT_AND_TIME, ("image_rotary_emb", COS_SIN), ("encoder_attention_mask", TEXT_MASK)),
    ),
    CrossAttentionBlock(
        f"{_WAN}TransformerBlock", WAN, Attends(f"{_WAN}Attention", WAN_ATTENTION.bind_at),
        (*_TEXT_AND_TIME, ("rotary_emb", COS_SIN)),
    ),
    CrossAttentionBlock(  # never binds: linear self-attention, a convolution as feed-forward
        f"{_TRANSFORMERS}sana_transformer.SanaTransformerBlock", ADA_NORM_SINGLE,
        Attends(ATTENTION_CLASS, bind_image_attention), (*_BASIC_CALL[:4], ("height", UNREAD), ("width", UNREAD)),
    ),
    CrossAttentionBlock(
        f"{_TRANSFORMERS}hunyuan_transformer_2d.HunyuanDiTBlock", HUNYUAN,
        Attends(ATTENTION_CLASS, HUNYUAN_ATTENTION.bind_at),
        (*_TEXT_AND_TIME, ("image_rotary_emb", COS_SIN), ("skip", SKIP)),
    ),
)  # fmt: skip
MODULES = (ModuleSpec(BASIC_BLOCK.layer, BASIC_BLOCK), *(ModuleSpec(block.layer, block) for block in BLOCKS))
