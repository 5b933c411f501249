"""Run a whole block in one C++ call, for decode steps of a few new tokens and for encoders.

All of its ops must be C++ bodies, and no module inside may have hooks. Otherwise the block runs part by part, with the
same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from infuse.architectures.attention import NoPosition
from infuse.architectures.layer import LayerShape
from infuse.architectures.mlp import MLPShape
from infuse.architectures.norm import RMS
from infuse.layers.attention import Attention
from infuse.layers.cache import KVCache
from infuse.layers.inputs import Inputs
from infuse.layers.linear import Linear, QuantizedLinear, all_are_heard, untouched
from infuse.layers.mlp import MLP
from infuse.layers.norm import Norm
from infuse.layers.program import ATTENTION, Program
from infuse.native import limits
from infuse.ops.cpu.activation import ACTIVATION_NUMBERS
from infuse.ops.cpu.layer import STEPS, encoder_layer, layer_step
from infuse.ops.cpu.linear import takes_tiles
from infuse.ops.cpu.quantized_linear import code_of


class OneCall:
    """The program encoded for C++, and where to find the tensors of a call.

    Integers and reals are in the order in which `program_of` (ops/cpu/src/binding_layer.h) reads them: each step,
    followed by the numbers of its part. Weights are indices into the call's tensors (-1: none). A part is identified by
    its owner (0: the block; 1, 2: its attention and MLP in the order of the program) and its name there.
    """

    def __init__(self, block: Any, program: Program):
        self._shape: LayerShape = block.shape
        self._branches: list[tuple[str, Any]] = []  # (name, its class's forward)
        self._parts: list[tuple[int, str, Any]] = []
        self._places: list[tuple[int, str, str]] = []  # of each tensor: index of its part, dict that holds it, name
        self._absent: list[tuple[int, str]] = []  # (index of the part, name) of parameters that are None
        integers: list[int] = []
        reals: list[float] = []
        for step in program:
            integers.append(STEPS.index(step.does))
            name = self._shape.attn.name if step.does == ATTENTION else step.part
            part = getattr(block, name) if name else None
            if isinstance(part, Norm):
                integers += self._norm(0, name, part, reals)
            elif part is not None:
                self._branches.append((name, type(part).forward))
                integers += self._attention(part, reals) if isinstance(part, Attention) else self._mlp(part)
        # Tensors, because passing these lists would take 5 us in each call.
        self._numbers = torch.tensor(integers, device="cpu"), torch.tensor(reals, dtype=torch.float64, device="cpu")

    def __call__(self, block: nn.Module, attention: Any, x_BTC: Tensor, inputs: Inputs) -> Tensor | None:
        """Return the block's result; None if it has to run part by part."""
        raise NotImplementedError

    def _attention(self, part: Attention, reals: list[float]) -> list[int]:
        shape, owner = part.shape, len(self._branches)
        reals += [shape.scale, shape.softcap]
        integers = [shape.heads, shape.kv_heads, shape.head_width, int(part.positions.interleaved)]
        integers += [*self._linear(owner, "qkv", part.qkv), *self._linear(owner, "out", part.out)]
        for name in ("q_norm", "k_norm"):
            norm: Any = getattr(part, name)
            if norm is None:
                self._parts.append((owner, name, NoneType))
                integers.append(0)
            else:
                integers += [1, *self._norm(owner, name, norm, reals)]
        return integers

    def _mlp(self, part: Any) -> list[int]:
        shape, owner = self._shape.mlp, len(self._branches)
        assert isinstance(shape, MLPShape)
        integers = [ACTIVATION_NUMBERS[shape.activation], int(shape.gated)]
        return [*integers, *self._linear(owner, "up", part.up), *self._linear(owner, "down", part.down)]

    def _norm(self, owner: int, name: str, norm: Norm, reals: list[float]) -> list[int]:
        self._parts.append((owner, name, Norm))
        reals += [norm.shape.eps, norm.shape.offset]
        return [int(norm.shape.kind != RMS), self._parameter(norm, "weight"), self._parameter(norm, "bias")]

    def _linear(self, owner: int, name: str, linear: Linear | QuantizedLinear) -> list[int]:
        self._parts.append((owner, name, type(linear)))
        if isinstance(linear, QuantizedLinear):
            code, held = code_of(str(linear.format)), ("data", "scale", "zero")[: 2 if linear.format.symmetric else 3]
            places = [*(self._place("_buffers", name) for name in held), -1][:3]
        else:
            code, places = -1, [self._place("_parameters", "weight"), -1, -1]
        return [code, linear.out_features, *places, self._parameter(linear, "bias")]

    def _parameter(self, part: nn.Module, name: str) -> int:
        """Return the index of a parameter of the last part; -1 if it is None."""
        if part._parameters[name] is not None:
            return self._place("_parameters", name)
        self._absent.append((len(self._parts) - 1, name))
        return -1

    def _place(self, held: str, name: str) -> int:
        self._places.append((len(self._parts) - 1, held, name))
        return len(self._places) - 1

    def _tensors(self, block: nn.Module) -> list[Tensor] | None:
        """Collect the tensors of the call; None if a part has been exchanged or has hooks."""
        owners: list[dict[str, Any]] = [block._modules]
        for name, forward in self._branches:
            branch = owners[0][name]
            if type(branch).forward is not forward or not untouched(branch):
                return None
            owners.append(branch._modules)
        if all_are_heard():
            return None
        parts: list[Any] = []
        for owner, name, wanted in self._parts:
            part = owners[owner][name]
            if type(part) is not wanted:
                return None
            parts.append(part)
            if part is None:
                continue
            own = part.__dict__  # `untouched` inlined: the call would cost more, eight times in each layer's step
            if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
                return None
            if wanted is QuantizedLinear and not part.prepared:
                return None
        for i, name in self._absent:
            if parts[i]._parameters[name] is not None:
                return None
        tensors = []
        for i, held, name in self._places:
            tensor = parts[i].__dict__[held][name]
            if tensor is None:
                return None
            tensors.append(tensor)
        return tensors


class StepCall(OneCall):
    """One call for a few new tokens of a decoder."""

    def __init__(self, block: nn.Module, program: Program, index: int):
        super().__init__(block, program)
        self._index, self._most_rows = index, limits().plain_rows

    def __call__(self, block: nn.Module, attention: Any, x_BTC: Tensor, inputs: Inputs) -> Tensor | None:
        batch, tokens, _ = x_BTC.shape
        cache = inputs.cache
        if batch * tokens > self._most_rows or not isinstance(cache, KVCache):
            return None
        if inputs.want_weights or inputs.causal is False:
            return None
        slot, tensors = cache.slot(self._index), self._tensors(block)
        if tensors is None or slot.place is not None or slot.row_lengths is not None:
            return None
        shape = self._shape.attn
        start = slot.reserve(batch, tokens, shape.kv_heads, shape.head_width, x_BTC)
        assert slot.key_storage is not None and slot.value_storage is not None
        positions, mask = attention._modules["positions"], inputs.mask
        turns, bias = positions.turns(inputs), positions.bias(inputs, batch, start + tokens)
        if mask is not None:
            mask = attention.allowed(mask, start + tokens)
        out = layer_step(
            x_BTC, tensors, turns, mask, bias, (slot.key_storage, slot.value_storage), start,
            mask is None or shape.window > 0, shape.window, self._numbers,
        )  # fmt: skip
        if out is not None:
            slot.advance(tokens)
        return out


class EncoderCall(OneCall):
    """One call for many tokens of an encoder, without causal order."""

    def __call__(self, block: nn.Module, attention: Any, x_BTC: Tensor, inputs: Inputs) -> Tensor | None:
        if x_BTC.dtype is not torch.bfloat16 or inputs.cache is not None or inputs.want_weights or inputs.causal:
            return None
        tensors = self._tensors(block)
        if tensors is None:
            return None
        mask = None if inputs.mask is None else attention.allowed(inputs.mask, x_BTC.shape[1])
        return encoder_layer(x_BTC, tensors, mask, self._numbers)


def make_one_call(block: Any, program: Program, bodies: Mapping[str, str], index: int | None) -> OneCall | None:
    """Make the one call of a block; None for blocks that run part by part.

    That is if one of `bodies` is not the C++ one, a part has no kernel, ranks share the block, or PyTorch's products
    are faster.
    """
    shape: LayerShape = block.shape
    attn = shape.attn
    norms = [norm for norm in (shape.norm1, shape.norm2, shape.post1, shape.post2, attn.q_norm, attn.k_norm) if norm]
    if any(norm.whole or (norm.weight is not None and len(norm.weight) != 1) for norm in norms):
        return None
    if (
        attn.clip
        or attn.norm_after
        or attn.gate is not None
        or attn.head_counts
        or shape.residual_scale != 1.0
        or set(bodies.values()) != {"cpu"}
    ):
        return None
    if type(block.mlp) is not MLP:
        return None
    if attn.causal:
        return None if index is None else StepCall(block, program, index)
    plain = not attn.window and isinstance(attn.position, NoPosition)
    return EncoderCall(block, program) if plain and takes_tiles() else None
