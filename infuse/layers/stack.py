"""Run all blocks of a decoder in one C++ call, for the steps of an answer: one new token a row, without a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from infuse.layers.cache import KVCache, KVSlot
from infuse.layers.inputs import Inputs
from infuse.layers.linear import untouched
from infuse.layers.named_attention import names_ours
from infuse.layers.one_call import OneCall, StepCall
from infuse.layers.position import PassedTurns, Positions
from infuse.ops.cpu.layer import layers_step


class StackCall(OneCall):
    """One call for a new token of all blocks of a decoder, without a mask. Each takes what the one before returns."""

    @classmethod
    def of(cls, blocks: Sequence[Any]) -> StackCall | None:
        """None if a block does not run in one call, or positions differ between blocks or are in a bias."""
        calls = [block._one_call for block in blocks]
        attns = [block.shape.attn for block in blocks]
        if not blocks or any(type(call) is not StepCall for call in calls):
            return None
        if any(not call.takes(block) for call, block in zip(calls, blocks, strict=True)):
            return None
        if any(attn.position != attns[0].position for attn in attns):
            return None
        attentions = [block._modules[attn.name] for block, attn in zip(blocks, attns, strict=True)]
        positions = {type(each._modules.get("positions")) for each in attentions}
        return cls(blocks, calls, attentions) if positions <= {PassedTurns, Positions} else None

    def __init__(self, blocks: Sequence[Any], calls: Sequence[StepCall], attentions: Sequence[nn.Module]):
        super().__init__(blocks, [block._program for block in blocks])
        self._blocks, self._attentions = blocks, attentions
        self._indices = [call.index for call in calls]
        self._most_rows = calls[0].most_rows

    def begin(self, x_BTC: Tensor, cache: KVCache) -> Answer | None:
        """Begin an answer with x [B, 1, C], the input of its first step; None if blocks have to be called."""
        tensors, slots = self._tensors(self._blocks), [cache.slot(index) for index in self._indices]
        if tensors is None or len(x_BTC) > self._most_rows or not all(map(names_ours, self._attentions)):
            return None
        assert self._found is not None
        if not all(map(untouched, self._found.routers)):
            return None
        if len({slot.length for slot in slots}) != 1 or any(
            slot.place is not None or slot.row_lengths is not None for slot in slots
        ):
            return None
        # Held as they are now: what is assigned to a parameter later does not count.
        return Answer(self, [tensor.detach() for tensor in tensors], slots, x_BTC)

    def storage(self, slots: list[KVSlot], x_BTC: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Make room for a new token in each slot. Return the keys and values of all."""
        for slot, block in zip(slots, self._blocks, strict=True):
            attn = block.shape.attn
            slot.reserve(len(x_BTC), 1, attn.kv_heads, attn.head_width, x_BTC)
        return [slot.key_storage for slot in slots], [slot.value_storage for slot in slots]  # type: ignore[misc]

    def run(
        self, x_BTC: Tensor, tensors: list[Tensor], turns: tuple[Tensor, Tensor] | None,
        storage: tuple[list[Tensor], list[Tensor]], start: int,
    ) -> Tensor | None:  # fmt: skip
        return layers_step(x_BTC, tensors, turns, None, None, storage, start, self._numbers)

    def turns(self, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
        """cos and sin of all blocks."""
        return self._attentions[0]._modules["positions"].turns(inputs)  # type: ignore[union-attr,operator]


class Answer:
    """The steps of one answer over all blocks. Modules and weights in blocks are those of its first step."""

    def __init__(self, stack: StackCall, tensors: list[Tensor], slots: list[KVSlot], x_BTC: Tensor):
        self._stack, self._tensors, self._slots = stack, tensors, slots
        self._rows = len(x_BTC)
        self._make_room(x_BTC)

    def _make_room(self, x_BTC: Tensor) -> None:
        self._storage = self._stack.storage(self._slots, x_BTC)
        self._room_tokens = min(keys.shape[2] for keys in self._storage[0])

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._slots[0].length

    def step(self, x_BTC: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor | None:
        """The last block's result for x [B, 1, C]; None if blocks have to be called."""
        slots, start = self._slots, self.length
        if len(x_BTC) != self._rows:
            return None
        if start >= self._room_tokens:
            self._make_room(x_BTC)
        out = self._stack.run(x_BTC, self._tensors, turns, self._storage, start)
        if out is not None:
            for slot in slots:
                slot.length = start + 1
        return out
