"""Decode steps of a model with an encoder, without its decoder's own forward (direct.py says when).

All its blocks read the states of the encoder, which are in our cache, and its own tokens are those that follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from infuse.architectures.families.encoder_decoder import STATES, STATES_MASK
from infuse.cache.encoded_slot import StatesCache
from infuse.cache.kv_cache import KVCache, pair_of
from infuse.generate.direct import (
    DirectStep,
    DirectSteps,
    Parts,
    RotaryCall,
    first_block,
    path_to,
    spans_in,
    split_by_width,
)
from infuse.generate.ends import Begin, Call, End, Ends
from infuse.ground.cache_names import CACHE_NAMES, cache_in
from infuse.ground.questions import attribute, returned
from infuse.layers.attention.named_attention import names_ours
from infuse.layers.attention.position import LearnedBias
from infuse.layers.block import Block
from infuse.layers.calls.contract import named
from infuse.layers.native.stack import BlockArguments, ReadStates


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
        at, count = first_block(calls, parts), len(parts.blocks)
        blocks, after = calls[at : at + count], calls[at + count :]
        if (
            pair is None
            or type(pair.self_attention_cache) is not KVCache
            or at == 0
            or len(blocks) != count
            or not after
        ):
            return None
        cache = pair.self_attention_cache
        x: Any = blocks[0].args[0] if blocks[0].args else blocks[0].kwargs.get("hidden_states")
        before, turned = split_by_width(calls[:at], x)
        if not before or not before[0].is_of(parts.embedding, inputs[self.ids]):
            return None
        embedded, model = before[0].output, parts.above[0]
        config = attribute(model, "config")
        begin = Begin.of(before, x, parts.embedding, config, cache.layers[0].length - 1)
        read = _read(blocks, parts, pair, x, turned[0].output if turned else None)
        turning = _turning(turned[0], (embedded, x)) if len(turned) == 1 else None
        if begin is None or read is None or (turned and turning is None):
            return None
        arguments = BlockArguments.of(parts.blocks, [call.output for call in turned], [0 if turned else None] * count)
        result = blocks[-1].output
        end = End.of(after, result[0] if isinstance(result, tuple) else result, outputs.logits, model, parts.head)
        if end is None or end.narrowed or arguments is None:
            return None
        ends = Ends(begin, end)
        stack = self.stack_of(parts, embedded, ends, arguments)
        answer = None if stack is None else stack.begin(embedded, cache, read)
        if stack is None or answer is None:
            return None
        step = DirectStep(parts, stack, answer, [] if turning is None else [turning], ends, cache, embedded)
        spans = [span for kind in ("window", "chunk") for span in spans_in(config, kind)]
        step.end_tokens = min([begin.places_count, *spans])
        return step


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
