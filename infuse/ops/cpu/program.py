"""Programs of blocks that are held in C++ between calls (src/binding_layer.cpp): one way to run them.

A program has the text that layers/native/part.py writes. It runs on few new tokens of a decoder, with the kernels that
its parts call one by one, or on the many tokens of an encoder (src/binding_encoder.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from infuse.native import kernels


@dataclass(frozen=True)
class CosSin:
    """cos and sin of tokens in a row, [1 or B, tokens, D] each, or none; a step's token is at `index`."""

    cos: Tensor | None = None
    sin: Tensor | None = None
    index: int = 0


class NativeProgram:
    """A program with its tensors, and the storages [B, K, S, D] of all its layers if it holds them.

    Passing 240 tensors would take 0.1 ms in each step. What is stored in the tensors later counts; what takes their
    place in a module does not.
    """

    def __init__(self, text: str, reals: Sequence[float], tensors: Sequence[Tensor], storages: Sequence[Tensor] = ()):
        operators = kernels()
        written = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)  # operators take no strings
        held = operators.hold.default(written, tensors, storages, reals)
        finalize(self, operators.drop.default, held)
        self.tensors = tensors
        self._held, self._run, self._tokens = held, operators.run.default, operators.run_tokens.default

    def run(self, x: Tensor, *inputs: Any) -> Tensor | None:
        """The result [B, T, C] for x [B, T, C], or None if a kernel does not support the arguments.

        If the program begins with a table, x are token ids [B, T]; if it ends with a head, the result are logits.
        `inputs`: cos, sin, turn, mask, bias, keys, values, start, value, state_keys, state_values, states_mask. The new
        tokens' keys and values are appended at `start` to keys and values, or to the storages that the program holds;
        nothing before `start` changes, even if the result is None. States of recurrences are overwritten; raises
        RuntimeError if a kernel refuses a step afterwards. cos and sin are as in ops.rotary; if `turn` is not negative,
        they are a table with the step's only token at this index. Mask and bias are as in ops.attention, which is
        causal without a mask; one for the program's own storages may have columns for later tokens, too. `value`
        [B, T, P] is what a step goes over. Keys and values of an encoder's states, [R, H, L, D] with a row for B / R
        rows each, are attended to under `states_mask` [R or 1, 1 or H, 1, L] alone.
        """
        return self._run(self._held, x, *inputs)

    def tokens(
        self, ids_B1: Tensor, cos_sin: CosSin, mask: Tensor | None, start: int, count: int, ends: Sequence[int],
        states_mask: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """The likeliest tokens [B, steps] of up to `count` steps, each but the last one the input of the next step.

        A step that gives one of `ends` is the last one. None, with nothing done, if the program does not begin with a
        table and end with a head, or if a kernel does not support the arguments. Raises RuntimeError as `run` does: the
        storages need room for `count` tokens, and a mask [B, 1, 1, tokens] has columns for all of them.
        """
        turns = cos_sin.cos, cos_sin.sin, cos_sin.index
        return self._tokens(self._held, ids_B1, *turns, mask, start, count, ends, states_mask)
