"""Run all blocks of a decoder in one C++ call, for the steps of an answer: one new token a row.

What is before and after them is in the same call where the kernels compute it (DecoderEnds).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infuse.architectures.parts.norm import SCALE
from infuse.architectures.program import ADD, ADD_WIDE, NORM, NORM_OF_WIDE
from infuse.cache.kv_cache import KVCache
from infuse.cache.recurrence_slot import StateSlot
from infuse.ground.modes import has_address
from infuse.layers.attention.named_attention import names_ours
from infuse.layers.attention.position import LearnedBias, PassedCosSin, Positions
from infuse.layers.attention.self_attention import Attention
from infuse.layers.calls import autocast
from infuse.layers.calls.inputs import Inputs
from infuse.layers.embedding import QuantizedEmbedding
from infuse.layers.linear import Linear, Quantized, QuantizedLinear
from infuse.layers.native.one_call import OneCall, StepCall, states_last
from infuse.layers.native.part import FEW_TOKENS, NO_COLUMNS, NONE, Columns, NotNative, PartWriter, ProgramText
from infuse.layers.norm import Norm
from infuse.layers.recurrent.convolved import Recurrent
from infuse.native import DTYPES, kernels, limits
from infuse.ops.cpu.linear import always_streams, fits
from infuse.ops.cpu.norm import takes as takes_norm
from infuse.ops.cpu.program import CosSin, NativeProgram
from infuse.ops.cpu.quantized_linear import dtype_of_scales


@dataclass(frozen=True)
class Table:
    """A parameter or buffer of a module. Those of places have the row of a token at its index, plus `offset`."""

    module: nn.Module
    name: str
    offset: int = 0

    @property
    def tensor(self) -> Tensor:
        return getattr(self.module, self.name)


@dataclass(frozen=True)
class Factor:
    """A number by which values are multiplied, or divided if it `divides`."""

    number: float = 1.0
    divides: bool = False

    @property
    def value(self) -> float:
        """By what values are multiplied, but for rounding."""
        return 1.0 / self.number if self.divides else self.number

    def times(self, x: Tensor) -> Tensor:
        if self.number == 1.0:
            return x
        return x / self.number if self.divides else x * self.number


ONE = Factor()


@dataclass(frozen=True)
class DecoderEnds:
    """What a model does before its blocks and after them, besides its embedding, last norm and head.

    The embedding is multiplied by `begin`, and the row of `places` is added; the head's input is multiplied by
    `before_head`, and the logits by `end`, and `shift` [1, vocabulary] is added.
    """

    begin: Factor = ONE
    end: Factor = ONE
    places: Table | None = None
    before_head: Factor = ONE
    shift: Table | None = None


@dataclass(frozen=True)
class BlockArguments:
    """How a model calls its blocks in a step: with which of its kinds of rotary positions, and under which window.

    `kinds`: the number of each block's kind, or None if it turns nothing. The columns of all kinds' cos and sin, of
    these `widths`, are given side by side; kinds without blocks have none. `windows`: how many keys, up to the last
    one, the mask of each block shows; 0 for all.
    """

    kinds: tuple[int | None, ...]
    widths: tuple[int, ...]
    windows: tuple[int, ...]

    @classmethod
    def of(
        cls, blocks: Sequence[Any], passed: Sequence[Any], kinds: Sequence[int | None], windows: Sequence[int] = ()
    ) -> BlockArguments | None:
        """That of blocks to which the model passes such rotary positions, one for each kind.

        None if blocks take positions of one kind in different ways, if those of two kinds differ in more than width, or
        if a block cannot have its window.
        """
        windows = windows or [0] * len(blocks)
        attentions = [_attention_of(block) for block in blocks]
        if any(window and not _can_have_window(each) for each, window in zip(attentions, windows, strict=True)):
            return None
        kinds = [kind if _takes_cos_sin(each) else None for each, kind in zip(attentions, kinds, strict=True)]
        takers: dict[int, Any] = {}
        for attention, kind in zip(attentions, kinds, strict=True):
            if kind is not None and takers.setdefault(kind, attention).shape.position != attention.shape.position:
                return None
        made = {kind: _cos_sin(taker, passed[kind]) for kind, taker in takers.items()}
        if len({(each.shape[:-1], each.dtype) for both in made.values() for each in both}) > 1:
            return None
        widths = [made[kind][0].shape[-1] if kind in made else 0 for kind in range(len(passed))]
        return cls(tuple(kinds), tuple(widths), tuple(windows))

    def columns(self, block: int) -> Columns:
        """The columns of cos and sin for the block of this number."""
        kind = self.kinds[block]
        return NO_COLUMNS if kind is None else Columns(sum(self.widths[:kind]), self.widths[kind])


class StackCall(OneCall):
    """One call for a new token of all blocks of a decoder. Each takes what the one before returns."""

    @classmethod
    def of(
        cls, embedding: nn.Module | None, blocks: Sequence[Any], norm: nn.Module | None, head: nn.Module,
        x_BTC: Tensor, ends: DecoderEnds, arguments: BlockArguments,
    ) -> StackCall | None:  # fmt: skip
        """None if a block does not run in one call, or if positions do more than to rotate or to add a learned bias.

        Steps are like x, what the embedding returned. Without an `embedding`, they begin with the blocks' input.
        """
        calls = [block._one_call for block in blocks]
        if not blocks or x_BTC.dtype not in DTYPES or any(type(call) is not StepCall for call in calls):
            return None
        if any(not call.takes(block) for call, block in zip(calls, blocks, strict=True)):
            return None
        mixers = [_Placed(call.index, mixer) for call, block in zip(calls, blocks, strict=True)
                  for mixer in _mixers_of(block)]  # fmt: skip
        attentions = [each.mixer for each in mixers if not isinstance(each.mixer, Recurrent)]
        attns = [mixer.shape for mixer in attentions]
        sums = {step.does == ADD_WIDE for block in blocks for step in block._program if step.does in (ADD, ADD_WIDE)}
        wide = sums == {True} and x_BTC.dtype is not torch.float32
        if len(sums) > 1 and x_BTC.dtype is not torch.float32:
            return None
        learned = [isinstance(each._modules.get("positions"), LearnedBias) for each in attentions]
        if any(attn.growth is not None for attn in attns) or (attns and any(learned) != all(learned)):
            return None
        if any(attn.lends or attn.borrows is not None for attn in attns):
            return None
        positions = {type(each._modules.get("positions")) for each in attentions}
        if not positions <= {PassedCosSin, Positions, LearnedBias}:
            return None
        scale = None if embedding is None else _looked_up_times(embedding, x_BTC)
        before = [] if embedding is None or scale is None else [embedding]
        normalises = not wide if norm is None else _normalises(norm, x_BTC, wide)
        after = [norm, head] if normalises and _multiplies(head, x_BTC) else []
        if wide and (not after or ends.before_head != ONE):
            return None
        try:
            return cls(before, blocks, after, calls, mixers, x_BTC, ends, arguments, wide, scale)
        except NotNative:
            return None

    def __init__(
        self,
        before: list[nn.Module],
        blocks: Sequence[Any],
        after: list[nn.Module | None],
        calls: Sequence[StepCall],
        mixers: Sequence[_Placed],
        x_BTC: Tensor,
        ends: DecoderEnds,
        arguments: BlockArguments,
        wide: bool,
        scale: float | None,
    ):
        tables = [table.module for table in (ends.places if before else None, ends.shift if after else None) if table]
        self._roots = [*tables, *before, *blocks, *(each for each in after if each is not None)]
        super().__init__(_program(tables, before, blocks, after, x_BTC, ends, arguments, wide, scale))
        self.ends, self.arguments, self.wide = ends, arguments, wide
        self.takes_ids, self.gives_logits, self.dtype = bool(before), bool(after), x_BTC.dtype
        self._embedding, self._scale = before[0] if before else None, scale
        self._last_norm = None if not after or after[0] is None else _Written.of(after[0])
        self._blocks = blocks
        self._mixers = mixers
        self._attentions = [each.mixer for each in mixers if not isinstance(each.mixer, Recurrent)]
        self._takers = {kind: _attention_of(block) for block, kind in zip(blocks, arguments.kinds, strict=True)}
        self._most_rows = min(call.most_rows for call in calls)
        self.readers = [block._modules[call.reader] for block, call in zip(blocks, calls, strict=True) if call.reader]

    def begin(
        self, x_BTC: Tensor, cache: KVCache, states: ReadStates | None = None, mask: Tensor | None = None
    ) -> DecodeSession | None:
        """Begin an answer with x [B, 1, C], the first step's embedding; None if blocks have to be called.

        `states`: what the blocks read of an encoder's states. `mask` [B, 1, 1, L] tells which of the L tokens in the
        cache are seen; all later ones are.
        """
        if autocast.is_any_on() or not has_address(x_BTC):
            return None
        if self._embedding is not None and _looked_up_times(self._embedding, x_BTC) != self._scale:
            return None
        if len(self.readers) != (0 if states is None else len(self._blocks)):
            return None
        slots = [each.slot_in(cache) for each in self._mixers]
        tensors = self._tensors(self._roots)
        if tensors is None or len(x_BTC) > self._most_rows or not all(map(names_ours, self._attentions)):
            return None
        if self._last_norm is not None and self._last_norm != _Written.of(self._last_norm.module):
            return None
        if not all(each.mixer.can_write(slot) for each, slot in zip(self._mixers, slots, strict=True)):
            return None
        if len({slot.length for slot in slots}) != 1 or any(
            slot.place is not None or slot.row_lengths is not None or slot.keeps_each for slot in slots
        ):
            return None
        if mask is not None and (mask.shape[-1] != slots[0].length or not self._attentions):
            return None
        # Held as they are now: what is assigned to a parameter later does not count.
        return DecodeSession(self, [tensor.detach() for tensor in tensors], slots, x_BTC, states, mask)

    def with_room(
        self, tensors: list[Tensor], slots: list[Any], x_BTC: Tensor, states: ReadStates | None
    ) -> tuple[NativeProgram, float]:
        """Make room for a new token in each slot, and hold the program for these. Return for how many tokens, too."""
        room, storages = math.inf, []
        bias: Tensor | None = None
        for number, (slot, (_, mixer)) in enumerate(zip(slots, self._mixers, strict=True)):
            if isinstance(slot, StateSlot):
                slot.in_place(len(x_BTC), 1, mixer.filler)
            else:
                slot.reserve(len(x_BTC), 1, mixer.shape.cached_rows, x_BTC, mixer.filler)
                room = min(room, slot.storages[0].shape[2])
            storages += slot.storages
            positions: Any = mixer._modules.get("positions")
            if isinstance(positions, LearnedBias):
                if bias is None or positions.table is not None:  # the others take that of the layer before
                    length = slot.storages[0].shape[2]
                    bias = positions(x_BTC, length - 1, length).contiguous()
                storages.append(bias)
            if states is not None:
                storages += states.held()[number]
        return NativeProgram(self._text, self._program.reals, tensors, storages), room

    def cos_sin(self, passed: Sequence[Any]) -> CosSin:
        """cos and sin of all blocks, from the rotary positions of each kind."""
        made = [_cos_sin(self._takers[kind], value) for kind, value in enumerate(passed) if kind in self._takers]
        if len(made) < 2:
            return CosSin(*made[0]) if made else CosSin()
        cos, sin = (torch.cat(each, dim=-1) for each in zip(*made, strict=True))
        return CosSin(cos, sin)


@dataclass(frozen=True)
class ReadStates:
    """What blocks read of an encoder's states: `held()` are the stored keys and values of each, [R, H, L, D].

    `mask` [R or 1, 1 or H, 1, L] hides states.
    """

    held: Callable[[], list[list[Tensor]]]
    mask: Tensor | None


class DecodeSession:
    """The steps of one answer over all blocks. Modules and weights in blocks are those of its first step."""

    def __init__(
        self, stack: StackCall, tensors: list[Tensor], slots: list[Any], x_BTC: Tensor, states: ReadStates | None,
        mask: Tensor | None,
    ):  # fmt: skip
        self.takes_ids, self.gives_logits = stack.takes_ids, stack.gives_logits
        self.gives_tokens = self.takes_ids and self.gives_logits
        self._stack, self._tensors, self._slots, self._like = stack, tensors, slots, x_BTC
        self._read, self._states_mask = states, None if states is None else states.mask
        self._mask = mask
        self._make_room()

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._slots[0].length

    def step(self, x: Tensor, cos_sin: CosSin) -> Tensor | None:
        """The logits, or the last block's result, [B, 1, ...] for ids [B, 1], or their embedding [B, 1, C].

        None if the model has to be called.
        """
        none = None  # the program holds its storages, and there is neither a bias nor another value
        native = self._with_room()
        turns = cos_sin.cos, cos_sin.sin, cos_sin.index
        out = native.run(x, *turns, self._mask, none, none, none, self.length, none, none, none, self._states_mask)
        self._append(0 if out is None else 1)
        return out

    def tokens(self, ids_B1: Tensor, cos_sin: CosSin, count: int, finals: Sequence[int]) -> Tensor | None:
        """The likeliest tokens [B, 1 to count] of the next steps; none follow a step that gives one of `ends`.

        None if the model has to be called. Only where it `gives_tokens`.
        """
        native = self._with_room()
        # A step that finds no room has already overwritten the states before its first attention.
        count = int(min(count, self._room_tokens - self.length))
        tokens = native.tokens(ids_B1, cos_sin, self._mask, self.length, count, finals, self._states_mask)
        self._append(0 if tokens is None else tokens.shape[1])
        return tokens

    def _with_room(self) -> NativeProgram:
        """The program, with room for another token."""
        if self.length >= self._room_tokens or not all(map(is_, self._held, self._held_now())):
            self._make_room()
        return self._native

    def _make_room(self) -> None:
        self._native, self._room_tokens = self._stack.with_room(self._tensors, self._slots, self._like, self._read)
        self._held = self._held_now()
        if self._mask is not None:
            self._mask = F.pad(self._mask, (0, int(self._room_tokens) - self._mask.shape[-1]), value=True)

    def _held_now(self) -> list[Any]:
        """What others may have replaced: states of recurrences, storages of keys, and those of an encoder's states."""
        held = [slot.states if isinstance(slot, StateSlot) else slot.key_storage for slot in self._slots]
        return held if self._read is None else held + [keys for keys, _ in self._read.held()]

    def _append(self, tokens: int) -> None:
        for slot in self._slots:
            slot.length += tokens


def _program(
    tables: Sequence[nn.Module], before: Sequence[Any], blocks: Sequence[Any], after: Sequence[Any], x_BTC: Tensor,
    ends: DecoderEnds, arguments: BlockArguments, wide: bool, scale: float | None,
) -> ProgramText:  # fmt: skip
    """Write the program of all blocks, with the table `before` them, and the norm and the head `after` them.

    `tables`: the modules of rows that are added, the first roots. `wide`: the blocks' sums are in float32. `scale`: by
    which the embedding itself multiplies its rows.
    """
    finals = [each for each in after if each is not None]
    first = len(tables)
    text = ProgramText(FEW_TOKENS, first + len(before) + len(blocks) + len(finals), whole=True)
    for node, table in enumerate(before, first):
        with text.step_of("embed"), text.inside("part", "table"):
            _write_table(PartWriter(text, table, node), table, x_BTC)
        for factor in (Factor(1.0 if scale is None else scale), ends.begin):
            _write_factor(text, factor)
        if (places := ends.places) is not None:
            with text.step_of("place"), text.inside("part", "place"):
                text.word("offset", places.offset)
                PartWriter(text, places.module, 0).tensor("table", places.name)
    for number, block in enumerate(blocks):
        text.turns, text.window = arguments.columns(number), arguments.windows[number]
        for step in states_last(block, block._program):
            text.step(step, first + len(before) + number, block)
    if after:
        _write_end(text, first - 1, after[0], after[1], ends, wide)
    return text


def _write_end(text: ProgramText, shift_node: int, norm: Any, head: Any, ends: DecoderEnds, wide: bool) -> None:
    """Write the norm, the head, and what is around it."""
    scales = ends.before_head != ONE
    if norm is not None:
        with text.step_of(NORM_OF_WIDE if wide else "norm_stream" if scales else NORM), text.inside("part", "norm"):
            _write_norm(PartWriter(text, norm, text.roots - 2), norm, wide)
    _write_factor(text, ends.before_head)
    with text.step_of("head"), text.inside("part", "head"):
        with text.inside("product", "linear"):
            head.native(PartWriter(text, head, text.roots - 1))
        if ends.shift is None:
            text.word("shift", NONE)
        else:
            PartWriter(text, ends.shift.module, shift_node).tensor("shift", ends.shift.name)
    _write_factor(text, ends.end)


class _Placed(NamedTuple):
    """What mixes tokens, and the number of its layer in a cache."""

    layer: int
    mixer: Any

    def slot_in(self, cache: KVCache) -> Any:
        if isinstance(self.mixer, Recurrent):
            return self.mixer.states_in(cache, self.layer)
        return cache.slot(self.layer)


def _mixers_of(block: Any) -> list[Any]:
    """What mixes a block's tokens, but for those that read an encoder's states, in the order of its program."""
    own = block.shape.mixers
    steps = states_last(block, block._program)
    return [block._modules[step.part] for step in steps if step.part in own and not own[step.part].reads_states]


def _attention_of(block: Any) -> Any:
    """What attends to the tokens before, if the block has it."""
    return next((each for each in _mixers_of(block) if not isinstance(each, Recurrent)), None)


def _can_have_window(attention: Any) -> bool:
    return isinstance(attention, Attention) and not attention.shape.window


def _takes_cos_sin(attention: Any) -> bool:
    return attention is not None and isinstance(attention._modules.get("positions"), PassedCosSin)


def _cos_sin(attention: Any, passed: Any) -> tuple[Tensor, Tensor]:
    """cos and sin as an attention takes them from what the model passes."""
    return attention._modules["positions"].cos_sin(Inputs(None, None, passed, None, None, None, False, 0))


def _write_factor(text: ProgramText, factor: Factor) -> None:
    number, divides = factor.number, factor.divides
    if number == 1.0:
        return
    if divides and math.frexp(number)[0] == 0.5:  # a power of two: the product has the same bits
        divides, number = False, 1 / number
    with text.step_of("divide" if divides else "scale", number):
        text.word("part", NONE)


def _write_table(to: PartWriter, table: Any, x_BTC: Tensor) -> None:
    to.put(width=x_BTC.shape[-1], type=str(x_BTC.dtype).removeprefix("torch."))
    with to.program.inside("rows", "linear"):
        if isinstance(table, QuantizedEmbedding):
            table.native(to)
        else:
            to.plain_matrix(table.num_embeddings)


def _write_norm(to: PartWriter, norm: Any, wide: bool) -> None:
    if isinstance(norm, Norm):
        norm.native(to)
    else:  # transformers' RMSNorm
        found = _torch_norm(norm, wide)
        assert found is not None  # else `_normalises` says no
        eps, offset, rounds = found
        to.put(kind="rounded_rms" if rounds else "torch_rms", bias=NONE)
        to.put_reals(eps=eps, offset=offset)
        to.tensor("weight")


def _looked_up_times(embedding: nn.Module, x_BTC: Tensor) -> float | None:
    """The number by which an embedding multiplies its rows, 1 if it does not; None if the kernels do not compute it."""
    if type(embedding) is QuantizedEmbedding:
        if embedding._combine is not None or embedding.dtype is not x_BTC.dtype or not _streams(embedding):
            return None
        return float(torch.tensor(embedding.shape.scale, dtype=x_BTC.dtype))
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        return None
    if embedding.weight.dtype is not x_BTC.dtype or not embedding.weight.is_contiguous():
        return None
    return 1.0 if type(embedding) is nn.Embedding else _scale_of(embedding)


def _scale_of(embedding: nn.Embedding) -> float | None:
    """The number, among those that it holds, by which a table of another class multiplies rows; a few rows prove it."""
    table = embedding.weight
    if len(embedding._parameters) != 1 or embedding._modules:
        return None
    ids = torch.arange(0, len(table), max(1, len(table) // 8))[:, None]
    rows, made = F.embedding(ids, table), embedding.forward(ids)
    if made.dtype is not rows.dtype:
        return None
    own = [*vars(embedding).values(), *(each for each in embedding._buffers.values() if each is not None)]
    held = [float(each) for each in own if isinstance(each, float) or (isinstance(each, Tensor) and each.numel() == 1)]
    rounded = [float(torch.tensor(each, dtype=dtype)) for each in held for dtype in (torch.float32, table.dtype)]
    found = [each for each in dict.fromkeys([1.0, *rounded]) if torch.equal(Factor(each).times(rows), made)]
    return found[0] if len(found) == 1 else None


def _normalises(norm: nn.Module, x_BTC: Tensor, wide: bool) -> bool:
    """Whether the kernels compute this norm: ours, or to the same bits transformers' RMSNorm, which few rows prove.

    `wide`: of sums in float32, rounded to the dtype of x.
    """
    if type(norm) is Norm and norm.shape.kind != SCALE and not wide:
        return norm._alone.body == "cpu" and takes_norm(x_BTC, norm.weight, norm.bias)
    weight, eps = norm._parameters.get("weight"), _eps_of(norm)
    if len(norm._parameters) != 1 or norm._buffers or norm._modules or weight is None or eps is None:
        return False
    if x_BTC.dtype not in DTYPES or weight.shape != x_BTC.shape[2:] or not takes_norm(x_BTC, weight):
        return False
    return _torch_norm(norm, wide) is not None


def _eps_of(norm: nn.Module) -> float | None:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return eps if isinstance(eps, float) else None


def _torch_norm(norm: Any, wide: bool) -> tuple[float, float, bool] | None:
    """eps, what is added to the weight, and whether x / rms is rounded before; None for another function."""
    eps, weight = _eps_of(norm) or 0.0, norm.weight
    own = weight.float() if wide else weight
    generator = torch.Generator().manual_seed(0)
    rows = [
        (torch.randn(count, 1, len(weight), generator=generator) * scale).to(own.dtype)
        for count in (1, 2, limits().plain_rows)
        for scale in (1e-4, 1.0, 300.0)
    ]
    for offset, rounds in ((0.0, True), (0.0, False), (1.0, False)):
        made = partial(kernels().rounded_norm.default, weight=own, eps=eps, offset=offset, rounds=rounds)
        if all(torch.equal(norm.forward(x).to(weight.dtype), made(x).to(weight.dtype)) for x in rows):
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
