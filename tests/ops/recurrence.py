"""Linear attention for the tests of every body: its inputs as slices of rows, and damage that stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from infuse.ops import linear_attention
from tests.support.tolerance import assert_near


def rows_of(
    dtype: torch.dtype, tokens: int, *, by_channel: bool = False, device: torch.device | None = None
) -> tuple[Tensor, ...]:
    """q, k, v as slices of one row, decay and beta: 2 rows, 4 heads in 2 groups, 40 x 24."""
    rows = torch.randn(2, tokens, 3 + 2 * 2 * 40 + 4 * 24, dtype=dtype, device=device)[..., 3:]
    q, k, v = rows.split((80, 80, 96), dim=-1)
    decay = -torch.rand((2, tokens, 4, 40) if by_channel else (2, tokens, 4), device=device) * 2
    beta = torch.rand(2, tokens, 4, device=device)
    return q.unflatten(-1, (2, 40)), k.unflatten(-1, (2, 40)), v.unflatten(-1, (4, 24)), decay, beta


def assert_damage_stays_in_its_heads(
    body: Callable[..., Any], value: float, tokens: int, *, delta: bool, by_channel: bool,
    device: torch.device | None = None,
) -> None:  # fmt: skip
    """`value` in one place of q, k, v, decay, beta or the state changes nothing in other rows of the batch and other
    heads, and all that is not finite in the reference is not finite here.

    Earlier tokens of the same head may be damaged: bodies compute several tokens at once.
    """
    args = (
        *rows_of(torch.float32, tokens, by_channel=by_channel, device=device),
        torch.randn(2, 4, 40, 24, device=device),
    )
    undamaged, at = _results(body, args, delta), tokens // 2
    of_group, of_head = (1, at, 1, 3), (1, at, 2, 3)
    places = {
        "q": of_group, "k": of_group, "v": of_head, "decay": of_head if by_channel else of_head[:3],
        "beta": of_head[:3], "state": (1, 2, 3, 5),
    }  # fmt: skip
    for i, (name, place) in enumerate(places.items()):
        heads = slice(2, 4) if place is of_group else slice(2, 3)
        damaged = tuple(x.clone() for x in args)
        damaged[i][place] = value
        wanted, found = _results(linear_attention.reference, damaged, delta), _results(body, damaged, delta)
        others = torch.ones(2, 4, dtype=torch.bool, device=device)
        others[1, heads] = False
        forgets = name == "decay" and value == -float("inf")
        for a, b, before in zip(found, wanted, undamaged, strict=True):
            assert torch.equal(a[others], before[others]), f"{name}: other heads are changed"
            assert not a[~b.isfinite()].isfinite().any(), f"{name}: the damage is hidden"
            if forgets:  # a decay to zero is none
                assert_near(a, b, torch.float32, name)
        shown = ~wanted[0][1, heads].isfinite()
        assert bool(shown.any(2).any(1).all()) != forgets, name


def _results(body: Callable[..., Any], args: tuple[Tensor, ...], delta: bool) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, T, V] and states."""
    *rows, state = args
    out, after = body(*rows, None, state, 40**-0.5, delta, delta)
    return out.transpose(1, 2), after
