"""Fills of merged matrices that are split by their sources: the parts hold what the merged matrix does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from infuse.architectures.packing import Fill, apart, rejoined
from infuse.parallel.slices import Cut, Span
from infuse.weights.fill import filled, source_tensors
from infuse.weights.lazy import InMemory

SIZES = (8, 4, 4)
NAMES = ("q.weight", "k.weight", "v.weight")
TENSORS = {name: torch.randn(size, 3) for name, size in zip(NAMES, SIZES, strict=True)}
GATED = (Span(0, 0, 2), Span(0, 4, 6), Span(1, 0, 4), Span(2, 0, 4), Span(0, 2, 4), Span(0, 6, 8))
CUT = Cut(0, ((0, 4), (8, 10), (12, 14)), SIZES)
GATED_CUT = Cut(0, ((2, 4), (6, 8), (10, 12), (14, 16)), (16,))


@pytest.mark.parametrize("groups", [((0, 1), (2,)), ((0, 2), (1,)), ((0,), (1,), (2,)), ((1, 2), (0,))])
@pytest.mark.parametrize(
    ("rows", "cut"), [((), None), ((), CUT), (GATED, None), (GATED, GATED_CUT)], ids=["whole", "cut", "gated", "both"]
)
def test_parts_are_the_rows_of_the_whole(
    groups: Sequence[Sequence[int]], rows: tuple[Span, ...], cut: Cut | None
) -> None:
    fill = Fill("qkv.weight", NAMES, rows=rows, cut=cut)
    whole = filled(fill, lambda name: InMemory(TENSORS[name]), None)
    parts = apart(fill, "qkv", groups, SIZES)
    assert [part.target for part in parts] == [f"qkv.{number}.weight" for number in range(len(groups))]
    covered = torch.zeros(len(whole))
    for part in parts:
        assert part.part is not None
        held = filled(part, lambda name: InMemory(TENSORS[name]), None)
        assert torch.equal(held, torch.cat([whole[start:stop] for start, stop in part.part.rows]))
        assert len(held) == part.part.outputs
        for start, stop in part.part.rows:
            covered[start:stop] += 1
        if cut is None:
            shapes = {name: tuple(TENSORS[name].shape) for name in part.sources}
            assert all(torch.equal(TENSORS[n], t) for n, t in source_tensors(part, held, shapes).items())
    assert bool((covered == 1).all())


@pytest.mark.parametrize("groups", [((0, 1), (2,)), ((0,), (1,), (2,)), ((1, 2), (0,)), ((2,), (0,), (1,))])
def test_parts_in_one_run_each_are_rejoined(groups: Sequence[Sequence[int]]) -> None:
    other = Fill("out.weight", ("o.weight",))
    fills = [Fill(f"qkv.{leaf}", tuple(f"{name}.{leaf}" for name in "qkv")) for leaf in ("weight", "bias")]
    parts = [part for fill in fills for part in apart(fill, "qkv", groups, SIZES)]
    assert rejoined([parts[0], other, *parts[1:]]) == [fills[0], other, fills[1]]


@pytest.mark.parametrize(
    ("groups", "rows", "cut"),
    [(((0, 2), (1,)), (), None), (((0, 1), (2,)), GATED, None), (((0, 1), (2,)), (), CUT)],
    ids=["two runs", "rows", "a cut"],
)
def test_parts_whose_order_is_lost_stay_apart(
    groups: Sequence[Sequence[int]], rows: tuple[Span, ...], cut: Cut | None
) -> None:
    parts = apart(Fill("qkv.weight", NAMES, rows=rows, cut=cut), "qkv", groups, SIZES)
    assert rejoined(parts) == parts
