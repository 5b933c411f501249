"""Blocks of diffusion transformers: SD3's joint block, Flux's double and single blocks.

Suffixes: B batch, T tokens, N heads of queries, keys and values together, D head width, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from infuse import ops
from infuse.architectures.dit import HeadsShape, JointShape, ModulationShape, SingleShape
from infuse.errors import UnsupportedCall
from infuse.layers.contract import named, refuse_unknown
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.linear import direct, product, takes_around
from infuse.layers.mlp import MLP
from infuse.layers.surroundings import Surroundings

_LARGEST = 65504  # of float16; Flux clips to it
_PART_BYTES = 1 << 24


class Modulation(nn.Module):
    """All shifts, scales and gates of a block from its time embedding [B, C], each [B, C]."""

    def __init__(self, shape: ModulationShape, surroundings: Surroundings):
        super().__init__()
        (matrix,) = shape.matrices
        self.linear, self._hidden = surroundings.linear(matrix), shape.hidden

    def forward(self, temb_BC: Tensor) -> tuple[Tensor, ...]:
        return direct(self.linear, F.silu(temb_BC)).split(self._hidden, dim=-1)


class Heads(nn.Module):
    """The projections of one sequence in an attention."""

    def __init__(self, shape: HeadsShape, surroundings: Surroundings):
        super().__init__()
        self.shape = shape
        matrices = {matrix.target: matrix for matrix in shape.matrices}
        for name in ("qkv", "up", "out"):
            self.add_module(name, surroundings.linear(matrices[name]) if name in matrices else None)
        for name in ("q_norm", "k_norm"):
            there = getattr(shape, name)
            empty = nn.Parameter(torch.empty(shape.head_width), requires_grad=False) if there else None
            self.register_parameter(name, empty)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Queries, keys and values [B, T, N, D]."""
        held: dict[str, Any] = self._modules
        return direct(held["qkv"], x_BTC).unflatten(-1, (3 * self.shape.heads, self.shape.head_width))

    @property
    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        return self._parameters["q_norm"], self._parameters["k_norm"]


class _Attention:
    """Attention over one or two sequences, in order."""

    def __init__(self, shape: HeadsShape, bodies: Mapping[str, str]):
        self._heads, self._eps, self._scale = shape.heads, shape.eps, shape.head_width**-0.5
        self._join = ops.joined_heads.bound(bodies.get("joined_heads", ops.REFERENCE))
        self._attend = ops.attention.bound(bodies.get("attention", ops.REFERENCE))

    def __call__(
        self, first: tuple[Heads, Tensor], second: tuple[Heads, Tensor] | None, turns: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """The heads' results [B, T1 + T2, H D], before the output projections."""
        cos, sin = turns if turns is not None else (None, None)
        of_first, of_second = first[0](first[1]), None if second is None else second[0](second[1])
        norms = (*first[0].norms, *((None, None) if second is None else second[0].norms))
        qkv_BTND = self._join(of_first, of_second, *norms, cos, sin, self._eps)
        q, k, v = qkv_BTND.transpose(1, 2).split(self._heads, dim=1)
        return self._attend(q, k, v, None, None, self._scale, False, 0, 0.0).flatten(2)


class JointBlock(InferenceModule):
    """forward(hidden_states [B, T, C], encoder_hidden_states [B, L, C], temb [B, C], ...) -> (text or None, image)."""

    def __init__(self, shape: JointShape, surroundings: Surroundings):
        super().__init__()
        self.shape, bodies = shape, surroundings.bodies
        self._arguments = ("hidden_states", "encoder_hidden_states", "temb", *_more(turns=shape.turns))
        parts = shape.parts
        for name in ("modulation", "image", "text", "second", "image_mlp", "text_mlp"):
            there = parts.get(name)
            self.add_module(name, None if there is None else _made(there, surroundings.of(name)))
        self._joint = _Attention(shape.image, bodies)
        self._alone = None if shape.second is None else _Attention(shape.second, bodies)
        self._norm = ops.modulated_norm.bound(bodies.get("modulated_norm", ops.REFERENCE))
        self._add = ops.gated_add.bound(bodies.get("gated_add", ops.REFERENCE))
        self._add_norm = ops.gated_add_norm.bound(bodies.get("gated_add_norm", ops.REFERENCE))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor | None, Tensor]:
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            return unrecorded(JointBlock.forward, self, hidden_states, *args, **kwargs)
        text, temb, turns = _given(type(self).__name__, self._arguments, args, kwargs)
        shape, eps, image = self.shape, self.shape.eps, hidden_states
        parts: dict[str, Any] = self._modules
        of_image, of_text = self._modulations(parts["modulation"](temb))
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = of_image[:6]
        y_image = self._norm(image, scale, shift, eps)
        text_shift, text_scale = of_text[:2] if shape.text_mlp is not None else of_text[1::-1]
        y_text = self._norm(text, text_scale, text_shift, eps)
        sequences = [(parts["image"], y_image), (parts["text"], y_text)]
        if shape.text_first:
            sequences.reverse()
        attended = self._joint(sequences[0], sequences[1], turns)
        first, second = attended.split([y.shape[1] for _, y in sequences], dim=1)
        made_text, made_image = (first, second) if shape.text_first else (second, first)
        made_image = direct(parts["image"].out, made_image.contiguous())
        if self._alone is not None:
            shift2, scale2, gate2 = of_image[6:]
            y2 = self._norm(image, scale2, shift2, eps)
            image = self._add(made_image, gate, image)
            gate, made_image = gate2, direct(parts["second"].out, self._alone((parts["second"], y2), None, None))
        image, y_image = self._add_norm(made_image, gate, image, mlp_scale, mlp_shift, eps)
        image = self._add(direct(parts["image_mlp"], y_image), mlp_gate, image)
        if shape.text_mlp is None:
            return None, image
        made_text = direct(parts["text"].out, made_text.contiguous())
        text, y_text = self._add_norm(made_text, of_text[2], text, of_text[4], of_text[3], eps)
        text = self._add(direct(parts["text_mlp"], y_text), of_text[5], text)
        if shape.clips and text.dtype == torch.float16:
            text = text.clip(-_LARGEST, _LARGEST)
        return text, image

    def _modulations(self, vectors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Those of the image and those of the text."""
        count = 6 if self._alone is None else 9
        return vectors[:count], vectors[count:]


class SingleBlock(InferenceModule):
    """forward(hidden_states [B, T, C], encoder_hidden_states [B, L, C], temb [B, C], ...) -> (text, image)."""

    def __init__(self, shape: SingleShape, surroundings: Surroundings):
        super().__init__()
        self.shape, bodies = shape, surroundings.bodies
        self._arguments = ("hidden_states", "encoder_hidden_states", "temb", *_more(turns=True))
        for name, part in shape.parts.items():
            self.add_module(name, _made(part, surroundings.of(name)))
        self._attention = _Attention(shape.image, bodies)
        self._norm = ops.modulated_norm.bound(bodies.get("modulated_norm", ops.REFERENCE))
        self._add = ops.gated_add.bound(bodies.get("gated_add", ops.REFERENCE))
        self._act = ops.activation.bound(bodies.get("activation", ops.REFERENCE))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            return unrecorded(SingleBlock.forward, self, hidden_states, *args, **kwargs)
        text, temb, turns = _given(type(self).__name__, self._arguments, args, kwargs)
        parts: dict[str, Any] = self._modules
        x = torch.cat((text, hidden_states), dim=1)
        shift, scale, gate = parts["modulation"](temb)
        made = self._branches(parts["image"], self._norm(x, scale, shift, self.shape.eps), turns)
        x = self._add(made, gate, x)
        if x.dtype == torch.float16:
            x = x.clip(-_LARGEST, _LARGEST)
        return x[:, : text.shape[1]], x[:, text.shape[1] :]

    def _branches(self, heads: Heads, y_BTC: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        """The output projection of attention and MLP side by side.

        On CPUs by some rows at a time, so that both stay in the caches: 1536 x 15360 values are 45 MiB of new memory.
        """
        parts: dict[str, Any] = heads._modules
        up, out, act = parts["up"], parts["out"], self.shape.activation
        fused = takes_around(up)

        def inner(y: Tensor) -> Tensor:
            return product(up, y, None, None, act) if fused else self._act(direct(up, y), act)

        attended = self._attention((heads, y_BTC), None, turns)
        in_parts = y_BTC.device.type == "cpu" and fused and takes_around(out) and out._combine is None
        if not in_parts or is_compiling():
            return direct(out, torch.cat((attended, inner(y_BTC)), dim=2))
        most = max(_PART_BYTES // (self.shape.image.matrices[-1].inputs * y_BTC.element_size()), 1)
        rows = y_BTC.flatten(0, 1)
        each = -(-len(rows) // -(-max(len(rows), 1) // most))  # as equal as possible
        pairs = zip(attended.flatten(0, 1).split(max(each, 1)), rows.split(max(each, 1)), strict=True)
        return torch.cat([direct(out, torch.cat((one, inner(y)), dim=1)) for one, y in pairs]).view_as(y_BTC)


def _made(part: Any, surroundings: Surroundings) -> nn.Module:
    if isinstance(part, ModulationShape):
        return Modulation(part, surroundings)
    return Heads(part, surroundings) if isinstance(part, HeadsShape) else MLP(part, surroundings)


def _more(*, turns: bool) -> tuple[str, ...]:
    """Arguments of a block after the time embedding."""
    return ("image_rotary_emb", "joint_attention_kwargs") if turns else ("joint_attention_kwargs",)


def _given(
    block: str, arguments: tuple[str, ...], args: tuple, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """The text, the time embedding and (cos, sin) [T, D] in float32 of a call. UnsupportedCall for anything else."""
    given = named(arguments[1:], args, kwargs, block)
    for name in ("encoder_hidden_states", "temb"):
        if given.get(name) is None:
            raise UnsupportedCall(f"{block} was called without {name}; pass what the transformer passes")
    refuse_unknown(block, (), {name: value for name, value in given.items() if name not in arguments}, arguments[1:])
    refuse_unknown(f"the attention of {block}", (), given.get("joint_attention_kwargs") or {})
    turns = given.get("image_rotary_emb")
    if turns is not None:
        turns = tuple(one.float().contiguous() for one in turns)
    return given["encoder_hidden_states"], given["temb"], turns
