"""Run all blocks of a decoder in one C++ call, for the steps of an answer: one new token a row, without a mask.

The embedding before them, and the norm and the head after them, are in the same call where they are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from infuse.architectures.norm import SCALE
from infuse.layers import autocast
from infuse.layers.cache import KVCache
from infuse.layers.embedding import QuantizedEmbedding
from infuse.layers.inputs import Inputs
from infuse.layers.linear import Linear, Quantized, QuantizedLinear
from infuse.layers.named_attention import names_ours
from infuse.layers.native_part import FEW_TOKENS, NONE, NotNative, PartWriter, ProgramText
from infuse.layers.norm import Norm
from infuse.layers.one_call import OneCall, StepCall
from infuse.layers.position import PassedCosSin, Positions
from infuse.layers.recurrent import Recurrent
from infuse.layers.slot import KVSlot, StateSlot
from infuse.native import DTYPES, kernels, limits
from infuse.ops.cpu.linear import always_streams, fits
from infuse.ops.cpu.norm import takes as takes_norm
from infuse.ops.cpu.program import CosSin, NativeProgram
from infuse.ops.cpu.quantized_linear import dtype_of_scales


class StackCall(OneCall):
    """One call for a new token of all blocks of a decoder, without a mask. Each takes what the one before returns."""

    @classmethod
    def of(
        cls, embedding: nn.Module, blocks: Sequence[Any], norm: nn.Module, head: nn.Module, x_BTC: Tensor,
        around: tuple[float, float, bool] = (1.0, 1.0, False),
    ) -> StackCall | None:  # fmt: skip
        """None if a block does not run in one call, or if positions differ between blocks or do more than to rotate.

        Steps are like x, what the embedding returned. `around`: a factor of the embedding, and one of the logits, by
        which they are multiplied or, if true, divided.
        """
        calls = [block._one_call for block in blocks]
        if not blocks or any(type(call) is not StepCall for call in calls):
            return None
        if any(not call.takes(block) for call, block in zip(calls, blocks, strict=True)):
            return None
        mixers = [next((block._modules[name] for name in block.shape.mixers), None) for block in blocks]
        attentions: list[Any] = [each for each in mixers if each is not None and not isinstance(each, Recurrent)]
        attns = [mixer.shape for mixer in attentions]
        if any(each.shape.beside for each in mixers if each is not None):
            return None
        if any(attn.position != attns[0].position or attn.growth is not None for attn in attns):
            return None
        if any(attn.lends or attn.borrows is not None for attn in attns):
            return None
        positions = {type(each._modules.get("positions")) for each in attentions}
        if not positions <= {PassedCosSin, Positions}:
            return None
        before = [embedding] if _looks_up(embedding, x_BTC) else []
        after = [norm, head] if _normalises(norm, x_BTC) and _multiplies(head, x_BTC) else []
        try:
            return cls(before, blocks, after, calls, mixers, x_BTC, around)
        except NotNative:
            return None

    def __init__(
        self,
        before: list[nn.Module],
        blocks: Sequence[Any],
        after: list[nn.Module],
        calls: Sequence[StepCall],
        mixers: Sequence[Any],
        x_BTC: Tensor,
        around: tuple[float, float, bool],
    ):
        self._roots = [*before, *blocks, *after]
        super().__init__(_program(before, blocks, after, x_BTC, around))
        self.around = around
        self.takes_ids, self.gives_logits, self.dtype = bool(before), bool(after), x_BTC.dtype
        self._last_norm = _Written.of(after[0]) if after else None
        self._blocks = blocks
        there = [(call.index, mixer) for call, mixer in zip(calls, mixers, strict=True) if mixer is not None]
        self._indices, self._mixers = [index for index, _ in there], [mixer for _, mixer in there]
        self._attentions = [mixer for mixer in self._mixers if not isinstance(mixer, Recurrent)]
        self._most_rows = min(call.most_rows for call in calls)

    def begin(self, x_BTC: Tensor, cache: KVCache) -> Answer | None:
        """Begin an answer with x [B, 1, C], the first step's embedding; None if blocks have to be called."""
        if autocast.is_any_on() or (self.takes_ids and not _looks_up(self._roots[0], x_BTC)):
            return None
        slots: list[Any] = [
            cache.slot(index, StateSlot if isinstance(mixer, Recurrent) else KVSlot)
            for index, mixer in zip(self._indices, self._mixers, strict=True)
        ]
        tensors = self._tensors(self._roots)
        if tensors is None or len(x_BTC) > self._most_rows or not all(map(names_ours, self._attentions)):
            return None
        if self._last_norm is not None and self._last_norm != _Written.of(self._last_norm.module):
            return None
        if len({slot.length for slot in slots}) != 1 or any(
            slot.place is not None or slot.row_lengths is not None or slot.keeps_each for slot in slots
        ):
            return None
        # Held as they are now: what is assigned to a parameter later does not count.
        return Answer(self, [tensor.detach() for tensor in tensors], slots, x_BTC)

    def with_room(self, tensors: list[Tensor], slots: list[Any], x_BTC: Tensor) -> tuple[NativeProgram, float]:
        """Make room for a new token in each slot, and hold the program for these. Return for how many tokens, too."""
        room = math.inf
        for slot, mixer in zip(slots, self._mixers, strict=True):
            if isinstance(slot, StateSlot):
                slot.in_place(len(x_BTC), 1, mixer.filler)
            else:
                slot.reserve(len(x_BTC), 1, mixer.shape.cached_rows, x_BTC, mixer.filler)
                room = min(room, slot.storages[0].shape[2])
        storages = [storage for slot in slots for storage in slot.storages]
        return NativeProgram(self._text, self._program.reals, tensors, storages), room

    def cos_sin(self, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
        """cos and sin of all blocks."""
        if not self._attentions:
            return None
        return self._attentions[0]._modules["positions"].cos_sin(inputs)  # type: ignore[union-attr,operator]


class Answer:
    """The steps of one answer over all blocks. Modules and weights in blocks are those of its first step."""

    def __init__(self, stack: StackCall, tensors: list[Tensor], slots: list[Any], x_BTC: Tensor):
        self.takes_ids, self.gives_logits = stack.takes_ids, stack.gives_logits
        self._stack, self._tensors, self._slots, self._like = stack, tensors, slots, x_BTC
        self._native, self._room_tokens = stack.with_room(tensors, slots, x_BTC)
        self._states = self._held_states()

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._slots[0].length

    def step(self, x: Tensor, cos_sin: CosSin) -> Tensor | None:
        """The logits, or the last block's result, [B, 1, ...] for ids [B, 1], or their embedding [B, 1, C].

        None if the model has to be called.
        """
        none = None  # the program holds its storages, and there is neither a mask, nor a bias, nor another value
        native = self._with_room()
        turns = cos_sin.cos, cos_sin.sin, cos_sin.index
        out = native.run(x, *turns, none, none, none, none, self.length, none, none, none, none)
        self._append(0 if out is None else 1)
        return out

    def tokens(self, ids_B1: Tensor, cos_sin: CosSin, count: int, ends: Sequence[int]) -> Tensor | None:
        """The likeliest tokens [B, 1 to count] of the next steps; none follow a step that gives one of `ends`.

        None if a step gives no logits, or if the model has to be called.
        """
        if not (self.takes_ids and self.gives_logits):
            return None
        native = self._with_room()
        # A step that finds no room has already overwritten the states before its first attention.
        count = int(min(count, self._room_tokens - self.length))
        tokens = native.tokens(ids_B1, cos_sin, self.length, count, ends)
        self._append(0 if tokens is None else tokens.shape[1])
        return tokens

    def _with_room(self) -> NativeProgram:
        """The program, with room for another token."""
        if self.length >= self._room_tokens or not all(map(is_, self._states, self._held_states())):
            self._native, self._room_tokens = self._stack.with_room(self._tensors, self._slots, self._like)
            self._states = self._held_states()
        return self._native

    def _held_states(self) -> list[Any]:
        """The states of recurrences, which others may have replaced."""
        return [slot.states for slot in self._slots if isinstance(slot, StateSlot)]

    def _append(self, tokens: int) -> None:
        for slot in self._slots:
            slot.length += tokens


def _program(
    before: Sequence[Any], blocks: Sequence[Any], after: Sequence[Any], x_BTC: Tensor, around: tuple[float, float, bool]
) -> ProgramText:
    """Write the program of all blocks, with the table `before` them, and the norm and the head `after` them."""
    begin, end, divides = around
    text = ProgramText(FEW_TOKENS, len(before) + len(blocks) + len(after), whole=True)
    for node, table in enumerate(before):
        with text.step_of("embed"), text.inside("part", "table"):
            _write_table(PartWriter(text, table, node), table, x_BTC)
        if begin != 1.0:
            _write_number(text, "scale", begin)
    for node, block in enumerate(blocks, len(before)):
        for step in block._program:
            text.step(step, node, block)
    if after:
        norm, head = after
        with text.step_of("norm"), text.inside("part", "norm"):
            _write_norm(PartWriter(text, norm, text.roots - 2), norm)
        with text.step_of("head"), text.inside("part", "head"), text.inside("product", "linear"):
            head.native(PartWriter(text, head, text.roots - 1))
        if divides and math.frexp(end)[0] == 0.5:  # a power of two: the product has the same bits
            divides, end = False, 1 / end
        if end != 1.0:
            _write_number(text, "divide" if divides else "scale", end)
    return text


def _write_number(text: ProgramText, does: str, number: float) -> None:
    with text.step_of(does, number):
        text.word("part", NONE)


def _write_table(to: PartWriter, table: Any, x_BTC: Tensor) -> None:
    to.put(width=x_BTC.shape[-1], type=str(x_BTC.dtype).removeprefix("torch."))
    with to.program.inside("rows", "linear"):
        if isinstance(table, QuantizedEmbedding):
            table.native(to)
        else:
            to.plain_matrix(table.num_embeddings)


def _write_norm(to: PartWriter, norm: Any) -> None:
    if isinstance(norm, Norm):
        norm.native(to)
    else:  # transformers' RMSNorm
        found = _torch_norm(norm)
        assert found is not None  # else `_normalises` says no
        eps, offset, rounds = found
        to.put(kind="rounded_rms" if rounds else "torch_rms", bias=NONE)
        to.put_reals(eps=eps, offset=offset)
        to.tensor("weight")


def _looks_up(embedding: nn.Module, x_BTC: Tensor) -> bool:
    """Whether the kernels compute this embedding."""
    if type(embedding) is QuantizedEmbedding:
        plain = embedding._combine is None and embedding.shape.scale == 1.0
        return plain and embedding.dtype is x_BTC.dtype and _streams(embedding)
    plain = type(embedding) is nn.Embedding and embedding.max_norm is None
    return plain and embedding.weight.dtype is x_BTC.dtype and embedding.weight.is_contiguous()


def _normalises(norm: nn.Module, x_BTC: Tensor) -> bool:
    """Whether the kernels compute this norm: ours, or to the same bits transformers' RMSNorm, which few rows prove."""
    if type(norm) is Norm and norm.shape.kind != SCALE:
        return norm._alone.body == "cpu" and takes_norm(x_BTC, norm.weight, norm.bias)
    weight, eps = norm._parameters.get("weight"), _eps_of(norm)
    if len(norm._parameters) != 1 or norm._buffers or norm._modules or weight is None or eps is None:
        return False
    if x_BTC.dtype not in DTYPES or weight.shape != x_BTC.shape[2:] or not takes_norm(x_BTC, weight):
        return False
    return _torch_norm(norm) is not None


def _eps_of(norm: nn.Module) -> float | None:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return eps if isinstance(eps, float) else None


def _torch_norm(norm: Any) -> tuple[float, float, bool] | None:
    """eps, what is added to the weight, and whether x / rms is rounded before; None for another function."""
    eps, weight = _eps_of(norm) or 0.0, norm.weight
    generator = torch.Generator().manual_seed(0)
    rows = [
        (torch.randn(count, 1, len(weight), generator=generator) * scale).to(weight.dtype)
        for count in (1, 2, limits().plain_rows)
        for scale in (1e-4, 1.0, 300.0)
    ]
    for offset, rounds in ((0.0, True), (0.0, False), (1.0, False)):
        made = partial(kernels().rounded_norm.default, weight=weight, eps=eps, offset=offset, rounds=rounds)
        if all(torch.equal(norm.forward(x), made(x)) for x in rows):
            return eps, offset, rounds
    return None


@dataclass(frozen=True)
class _Written:
    """What a norm computes that is not ours: its class may get another forward."""

    module: nn.Module
    forward: Any
    eps: Any

    @classmethod
    def of(cls, norm: nn.Module) -> _Written:
        return cls(norm, type(norm).forward, _eps_of(norm))


def _multiplies(head: nn.Module, x_BTC: Tensor) -> bool:
    """Whether the kernels compute this head, however many rows there are in a batch."""
    if type(head) is Linear:
        ours = head._combine is None and head._body.body == "cpu"
        return ours and always_streams(x_BTC, head.weight, head.bias)
    if type(head) is not QuantizedLinear or head._combine is not None or head.is_ordered:
        return False
    return _streams(head) and fits(head.bias, x_BTC.dtype)


def _streams(quantized: Quantized) -> bool:
    streams = quantized.prepared and quantized._chosen.body == "cpu"
    return streams and quantized.scale.dtype is dtype_of_scales(str(quantized.format))
