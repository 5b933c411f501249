"""Decode steps of a model with an encoder, without its decoder's own forward (direct.py says when).

Its decoder adds a row of a table of places to what it looks up, and may normalise both; the head's input may be scaled,
and the logits shifted. All of it is found from the values of one step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from infuse.architectures.families.encoder_decoder import STATES, STATES_MASK
from infuse.cache.encoded_slot import StatesCache
from infuse.cache.kv_cache import KVCache, pair_of
from infuse.generate.direct import (
    FACTORS,
    Call,
    DirectStep,
    DirectSteps,
    Parts,
    RotaryCall,
    equal,
    is_same,
    numbers_in,
    path_to,
    spans_in,
)
from infuse.ground.cache_names import CACHE_NAMES, cache_in
from infuse.ground.questions import attribute, returned
from infuse.layers.attention.named_attention import names_ours
from infuse.layers.attention.position import LearnedBias
from infuse.layers.block import Block
from infuse.layers.calls.contract import named
from infuse.layers.native.stack import BlockArguments, DecoderEnds, Factor, ReadStates, Table


class PairSteps(DirectSteps):
    """Trace decode steps of a model with an encoder."""

    ids: ClassVar[str] = "decoder_input_ids"

    def parts_of(self, model: Any, inputs: Mapping[str, Any]) -> Parts | None:
        # The mask is the encoder's; positions of tokens go on by one.
        known = {self.ids, "attention_mask", "decoder_position_ids", *CACHE_NAMES}
        if any(isinstance(value, Tensor) for name, value in inputs.items() if name not in known):
            return None  # as a mask of the decoder's tokens does, it may mean something else in a later step
        if (layers := _reading_blocks(model)) is None:
            return None
        path = path_to(model, layers)
        embedding = returned(path[-2], "get_input_embeddings")  # of the decoder
        return Parts.of(path, embedding, returned(model, "get_output_embeddings"), self.is_ours)

    def step_of(self, parts: Parts, calls: list[Call], inputs: Mapping[str, Any], outputs: Any) -> DirectStep | None:
        pair = pair_of(cache_in(inputs))
        at = next((number for number, call in enumerate(calls) if call.module is parts.blocks[0]), 0)
        count = len(parts.blocks)
        turned = [call for call in calls[:at] if isinstance(call.output, tuple)]
        before = [call for call in calls[:at] if not isinstance(call.output, tuple)]
        blocks, after = calls[at : at + count], calls[at + count :]
        if pair is None or type(pair.self_attention_cache) is not KVCache or not before or len(blocks) != count:
            return None
        cache = pair.self_attention_cache
        x: Any = blocks[0].args[0] if blocks[0].args else blocks[0].kwargs.get("hidden_states")
        begin = _Begin.of(before, x, parts, inputs[self.ids], cache.layers[0].length - 1)
        read = _read(blocks, parts, pair, x, turned[0].output if turned else None)
        turning = _turning(turned[0], (before[0].output, x)) if len(turned) == 1 else None
        if begin is None or read is None or (turned and turning is None):
            return None
        called = BlockArguments.of(parts.blocks, [call.output for call in turned], [0 if turned else None] * count)
        end = _End.of(after, blocks[-1].output, outputs.logits, parts)
        if end is None or called is None:
            return None
        plain = begin.norm is None and (begin.places is None or begin.padding is None)
        places = begin.places if plain else None
        around = DecoderEnds(Factor(begin.factor), places=places, before_head=Factor(end.factor), shift=end.shift)
        stack = self.stack_of(parts, parts.embedding if plain else None, end.norm, before[0].output, around, called)
        answer = None if stack is None else stack.begin(before[0].output, cache, read)
        if stack is None or answer is None:
            return None
        turnings = [] if turning is None else [turning]
        step = PairStep(parts, stack, answer, end.norm, turnings, _Both(begin, end), cache, before[0].output)
        spans = [span for kind in ("window", "chunk") for span in spans_in(attribute(parts.above[0], "config"), kind)]
        step.end_tokens = min([begin.places_count, *spans])
        return step


class PairStep(DirectStep):
    """Make the next steps of an answer over an encoder's states."""

    def __call__(self, ids_BT: Tensor) -> Tensor | None:
        if self._around.begin.is_padding(ids_BT):
            return None
        return super().__call__(ids_BT)


@dataclass(frozen=True)
class _Begin:
    """How the first block's input is made: rows of the embedding times `factor`, plus the row of the token's place.

    `norm` normalises the sum, or, `norm_first`, what the row is added to. `padding`: a token that has another place.
    """

    factor: float
    places: Table | None
    padding: int | None
    norm: nn.Module | None
    norm_first: bool

    @classmethod
    def of(cls, calls: Sequence[Call], x: Any, parts: Parts, ids: Tensor, length: int) -> _Begin | None:
        """Find it from the calls before the first block; `length`: tokens before this one. None if it is another."""
        embedded, *more = calls
        norm = next((call for call in more if isinstance(call.module, nn.LayerNorm)), None)
        placed = next((call for call in more if call is not norm), None)
        if len(more) != (norm is not None) + (placed is not None) or not embedded.is_of(parts.embedding, ids):
            return None
        places = None if placed is None else _places(placed, length)
        if (placed is not None and places is None) or (norm is not None and (len(norm.args) != 1 or norm.kwargs)):
            return None
        row = None if places is None else places.tensor[length + places.offset]
        wanted = x if norm is None else norm.args[0]
        norm_first = norm is not None and not is_same(x, norm.output)
        if norm is not None and norm_first and not equal(x, _placed(norm.output, row)):
            return None
        under = None if norm_first else row
        candidates = _factors(parts, embedded.output)
        found = [each for each in candidates if equal(wanted, _placed(_times(embedded.output, each), under))]
        if len(found) != 1:
            return None
        counts_ids = placed is not None and not isinstance(placed.module, nn.Embedding)
        padding = attribute(placed.module, "padding_idx") if placed is not None and counts_ids else None
        return cls(found[0], places, padding, None if norm is None else norm.module, norm_first)

    @property
    def places_count(self) -> float:
        """The length of the cache from which there is no place for another token."""
        return math.inf if self.places is None else self.places.tensor.shape[0] - self.places.offset + 1

    def is_padding(self, ids_BT: Tensor) -> bool:
        return self.padding is not None and bool((ids_BT == self.padding).any())

    def made(self, embedded: Tensor, length: int) -> Tensor:
        row = None if self.places is None else self.places.tensor[length + self.places.offset]
        x = _times(embedded, self.factor)
        if self.norm is None:
            return _placed(x, row)
        return _placed(self.norm.forward(x), row) if self.norm_first else self.norm.forward(_placed(x, row))


@dataclass(frozen=True)
class _End:
    """How logits are made of the last block's result: `norm`, times `factor`, the head, plus `shift`."""

    norm: nn.Module | None
    factor: float
    shift: Table | None
    widens: bool

    @classmethod
    def of(cls, calls: Sequence[Call], result: Any, logits: Tensor, parts: Parts) -> _End | None:
        """Find it from the calls after the last block. None if it is another."""
        y, *normed, headed = (result[0] if isinstance(result, tuple) else result), *calls
        if headed.module is not parts.head or len(normed) > 1 or len(headed.args) != 1 or headed.kwargs:
            return None
        if normed:
            if not normed[0].is_of(normed[0].module, y):
                return None
            y = normed[0].output
        found = [each for each in _factors(parts, y) if equal(headed.args[0], _times(y, each))]
        shifts: list[Table | None] = [None, *_rows_of(parts.above[0], logits.shape[-1])]
        widens, made = logits.dtype is not headed.output.dtype, headed.output
        ends = [each for each in shifts if equal(logits, _shifted(made, each, widens))]
        if len(found) != 1 or not ends:
            return None
        return cls(normed[0].module if normed else None, found[0], ends[0], widens)

    def head_input(self, y: Tensor) -> Tensor:
        return _times(y if self.norm is None else self.norm.forward(y), self.factor)


@dataclass(frozen=True)
class _Both:
    """What direct.py asks of what is around the blocks."""

    cap: ClassVar[float] = 0.0
    begin: _Begin
    end: _End

    def begun(self, embedded: Tensor, length: int) -> Tensor:
        return self.begin.made(embedded, length)

    def before_head(self, norm: Any, y: Tensor) -> Tensor:
        return self.end.head_input(y)

    def ended(self, made: Tensor) -> Tensor:
        return _shifted(made, self.end.shift, self.end.widens)

    def finished(self, logits: Tensor) -> Tensor:
        return logits.float() if self.end.widens else logits


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def _placed(x: Tensor, row: Tensor | None) -> Tensor:
    return x if row is None else x + row


def _shifted(made: Tensor, shift: Table | None, widens: bool) -> Tensor:
    logits = made if shift is None else made + shift.tensor
    return logits.float() if widens else logits


def _factors(parts: Parts, x: Tensor) -> list[float]:
    """Numbers by which a model multiplies values of this width: those of its config, the root of the width, or its
    inverse.
    """
    width, config = x.shape[-1], attribute(parts.above[0], "config")
    return list(dict.fromkeys((1.0, math.sqrt(width), width**-0.5, *numbers_in(config, FACTORS))))


def _tables(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _places(call: Call, length: int) -> Table | None:
    """The table whose row of one index, the same for all rows of the batch, a module returned for a token."""
    made = call.output
    tables = [(name, each) for name, each in _tables(call.module) if each.dim() == 2]
    if not isinstance(made, Tensor) or made.dim() not in (2, 3) or len(tables) != 1:
        return None
    name, table = tables[0]
    rows = made.reshape(-1, made.shape[-1])
    if rows.shape[1] != table.shape[1] or made.dtype is not table.dtype:
        return None
    found = (table == rows[:1]).all(-1).nonzero()
    if len(found) != 1 or not torch.equal(rows, rows[:1].expand_as(rows)):
        return None
    return Table(call.module, name, int(found) - length)


def _rows_of(module: nn.Module, width: int) -> list[Table]:
    """The buffers [1, width] of a module."""
    return [Table(module, name) for name, each in module.named_buffers(recurse=False) if each.shape == (1, width)]


def _reading_blocks(model: nn.Module) -> nn.Module | None:
    """The one list of blocks that read an encoder's states."""
    found = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each)]
    found = list({id(each): each for each in found if all(map(_reads, each.children()))}.values())
    return found[0] if len(found) == 1 else None


def _reads(block: Any) -> bool:
    mixers = block.shape.mixers.values() if isinstance(block, Block) else ()
    return any(mixer.reads_states and not mixer.merges for mixer in mixers)


def _turning(call: Call, values: Sequence[Tensor]) -> RotaryCall | None:
    """The call that makes rotary positions, of one of the values and of the tokens' indices."""
    told = [each for each in (*call.args, *call.kwargs.values()) if isinstance(each, Tensor)]
    indices = [each for each in told if not any(each is value for value in values)]
    return RotaryCall.of(call, values, indices[0]) if len(indices) == 1 else None


def _read(calls: Sequence[Call], parts: Parts, pair: Any, x: Any, cos_sin: Any) -> ReadStates | None:
    """What all blocks read of an encoder's states. None if they were called with anything else that matters."""
    masks: list[Any] = []
    bias = None
    for block, call in zip(parts.blocks, calls, strict=True):
        if call.module is not block:
            return None
        given = _given(call, x, pair, bias)
        if given is None or given.pop("position_embeddings", None) is not cos_sin:
            return None
        masks.append(given.get(STATES_MASK))
        x, bias = (call.output[0], call.output[1]) if _hands_on(block) else (call.output, None)
        x = x[0] if isinstance(x, tuple) else x
    if any(mask is not masks[0] for mask in masks):
        return None
    return _states_in(pair, parts, masks[0], x)


def _hands_on(block: Any) -> bool:
    """Whether a block hands a learned bias on to the next one."""
    return block._bias_argument is not None


def _given(call: Call, x: Any, pair: Any, bias: Any) -> dict[str, Any] | None:
    """The arguments of a block by name, if it was called with x, the pair, all tokens and the bias handed on."""
    block: Any = call.module
    args = call.args
    given = dict(call.kwargs)
    if not args:
        args = (given.pop("hidden_states", None),)
    given = named(block.shape.call.arguments, args[1:], given, "a block")
    caches = [given.pop(name) for name in CACHE_NAMES if name in given]
    mask, states = given.pop("attention_mask", None), given.pop(STATES, None)
    if (
        args[0] is not x
        or len(caches) != 1
        or caches[0] is not pair
        or states is None
        or given.get("output_attentions")
    ):
        return None
    if mask is not None and not _hides_nothing(mask):
        return None
    if _hands_on(block):
        handed = given.pop(block._bias_argument, None)
        if handed is not bias or (_positions(block).table is not None and handed is not None):
            return None
    unread = block.shape.call.unread
    elsewhere = {*unread, STATES_MASK, "position_embeddings"}
    read = {name: value for name, value in given.items() if name not in elsewhere}
    read.pop("position_ids", None)
    return given if all(block.ignores(name, value) for name, value in read.items()) else None


def _mixer(block: Any, *, reads_states: bool) -> Any:
    return next(
        block._modules[name] for name, shape in block.shape.mixers.items() if shape.reads_states is reads_states
    )


def _positions(block: Any) -> LearnedBias:
    return _mixer(block, reads_states=False)._modules["positions"]


def _hides_nothing(mask: Any) -> bool:
    if not isinstance(mask, Tensor):
        return False
    return bool(mask.all()) if mask.dtype is torch.bool else not bool(mask.any())


def _states_in(pair: Any, parts: Parts, mask: Tensor | None, x: Tensor) -> ReadStates | None:
    """The storages of our cache of states, if they can be read as they are under this mask."""
    cache = pair.cross_attention_cache
    if not isinstance(cache, StatesCache):
        return None
    readers = [_mixer(block, reads_states=True) for block in parts.blocks]
    if not all(pair.is_updated.get(reader.index) and names_ours(reader) for reader in readers):
        return None
    slots = [cache.slot(reader.index) for reader in readers]
    found = [
        reader.native_of(*slot.storages, mask, len(x), x.dtype) for reader, slot in zip(readers, slots, strict=True)
    ]
    if any(each is None or slot.rows != len(x) for each, slot in zip(found, slots, strict=True)):
        return None
    if len({len(slot.storages[0]) for slot in slots}) != 1:
        return None
    return ReadStates(lambda: [slot.storages for slot in slots], found[0][2])
