"""How evenly ranks share experts: a token uses few of them, and waits for the rank that has most of these."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def gain(counts: Sequence[int], routes: int) -> float:
    """How much faster ranks with `counts` whole experts read those of one token than one rank alone, on average.

    `routes` different experts, all equally likely: routes / E[the most that one rank has of them].
    """
    everything = comb(sum(counts), routes)
    most = sum(1 - _ways(counts, routes, limit) / everything for limit in range(routes))
    return routes / most


def balance(counts: Sequence[int], slices: int, routes: int | None) -> str:
    """What ranks with `counts` whole experts, each in `slices`, can gain at batch 1; `routes` None: unknown."""
    each = str(counts[0]) if len(set(counts)) == 1 else " or ".join(str(count) for count in sorted(set(counts)))
    text = f"{each} of {sum(counts)} experts on a rank" if len(counts) > 1 else "each expert"
    text += f" in {slices} slices" if slices > 1 else ""
    if routes is None or not 0 < routes <= sum(counts):
        return text
    found, ranks = gain(counts, routes) * slices, len(counts) * slices
    also = f" (slices alone: {ranks})" if len(counts) > 1 else ""
    return f"{text}: one token's {routes} are read {found:.3g} times as fast as by one rank{also}"


def _ways(counts: Sequence[int], routes: int, limit: int) -> int:
    """How many sets of `routes` experts have at most `limit` on each rank."""
    ways = [1] + [0] * routes  # by the number of experts chosen so far
    for count in counts:
        choices = [comb(count, chosen) for chosen in range(min(limit, count) + 1)]
        ways = [
            sum(ways[total - chosen] * choices[chosen] for chosen in range(min(total, len(choices) - 1) + 1))
            for total in range(routes + 1)
        ]
    return ways[routes]
