"""Moves of values, found by moving their numbers instead of the way that the moves are written."""

from __future__ import annotations

import torch
from torch import Tensor

# Operations that only move values, or read sizes.
MOVES = frozenset({
    "view", "reshape", "_unsafe_view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "slice", "select",
    "split", "split_with_sizes", "chunk", "unflatten", "flatten", "cat", "stack", "narrow", "repeat",
    "repeat_interleave", "getitem", "unbind", "movedim", "swapaxes", "expand_as", "view_as", "sym_size", "mT",
    "tensor_split", "append",
})  # fmt: skip
_TOLERANCE = 1e-9  # of the largest value, in float64; a factor of 1.001 is a million times as much


def is_close(value: Tensor, wanted: Tensor) -> bool:
    """Whether two values are equal up to rounding in float64."""
    if value.shape != wanted.shape:
        return False
    error, size = (value - wanted).abs(), wanted.abs()
    return bool((error <= _TOLERANCE * (1 + size)).all()) and not bool(torch.isnan(error).any())


def numbered(shape: tuple[int, ...]) -> Tensor:
    """The numbers from 1 on, in float64."""
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1, dtype=torch.float64).view(shape)


def rows_of(moved_BHTD: Tensor, shape: tuple[int, ...], factor: float) -> Tensor | None:
    """Which row of a product's output [..., R] each feature of each head is, [H, D], given where its numbers went.

    None if tokens changed places, or heads have other features in other tokens.
    """
    batch, heads, tokens, width = moved_BHTD.shape
    rows = shape[-1]
    numbers = (moved_BHTD / factor).round()
    if not is_close(numbers, moved_BHTD / factor):
        return None
    starts = torch.arange(batch * tokens, dtype=torch.float64).view(batch, 1, tokens, 1) * rows
    found = numbers - 1 - starts
    first = found[0, :, 0]
    fits = bool((found == first[None, :, None]).all()) and bool(((first >= 0) & (first < rows)).all())
    return first.long() if fits else None
