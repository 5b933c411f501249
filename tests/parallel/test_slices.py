"""Which part each rank has: nothing lost, nothing twice, as even as grains, groups and heads allow."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infuse.parallel.slices import split, split_heads

SIZES = st.integers(1, 9)
ANY_PACE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other processes may compute


@ANY_PACE
@given(st.integers(1, 5000), SIZES, st.sampled_from([1, 2, 16, 64, 100]), st.sampled_from([1, 32, 64, 96, 128]))
def test_a_split_covers_everything_once(total: int, size: int, grain: int, multiple: int) -> None:
    parts = split(total, size, grain=grain, multiple=multiple)
    assert len(parts) == size and parts[0][0] == 0 and parts[-1][1] == total
    assert all(a[1] == b[0] for a, b in zip(parts, parts[1:], strict=False))
    lengths = [stop - start for start, stop in parts]
    assert total < size or min(lengths) > 0
    if total % multiple == 0 and total // multiple >= size:
        assert all(length % multiple == 0 for length in lengths)
    if total % (grain * multiple) == 0 and total // (grain * multiple) >= size:
        assert all(length % grain == 0 for length in lengths)


@pytest.mark.parametrize(
    ("total", "size", "grain", "multiple", "lengths"),
    [
        (8192, 2, 64, 1, [4096, 4096]),
        (128256, 2, 64, 1, [64128, 64128]),
        (50257, 2, 64, 1, [25129, 25128]),  # a prime number of rows: nothing divides
        (80, 2, 64, 1, [48, 32]),  # 64 would leave one rank 16
        (11008, 3, 64, 1, [3712, 3648, 3648]),
        (384, 2, 64, 128, [256, 128]),  # whole groups of 128
        (96, 4, 64, 32, [32, 32, 16, 16]),  # three groups of 32 are too few for four ranks
    ],
)
def test_splits_by_hand(total: int, size: int, grain: int, multiple: int, lengths: list[int]) -> None:
    assert [stop - start for start, stop in split(total, size, grain=grain, multiple=multiple)] == lengths


@ANY_PACE
@given(st.integers(1, 6), st.integers(1, 12), SIZES)
def test_each_head_is_on_one_rank_with_the_keys_it_looks_at(group: int, kv_heads: int, size: int) -> None:
    heads = group * kv_heads
    shares = split_heads(heads, kv_heads, size)
    if size > heads:
        assert shares is None
        return
    assert shares is not None and len(shares) == size
    assert [head for share in shares for head in range(*share.heads)] == list(range(heads))
    for share in shares:
        mine, keys = range(*share.heads), range(*share.kv_heads)
        assert len(mine) % len(keys) == 0  # a block's own grouping: query head i looks at key i // (heads / keys)
        local = len(mine) // len(keys)
        assert [keys[i // local] for i in range(len(mine))] == [head // group for head in mine]


def test_heads_by_hand() -> None:
    llama = split_heads(32, 8, 2)
    assert llama is not None and [(s.heads, s.kv_heads) for s in llama] == [((0, 16), (0, 4)), ((16, 32), (4, 8))]
    replicated = split_heads(4, 2, 4)
    assert replicated is not None and [(s.heads, s.kv_heads) for s in replicated] == [
        ((0, 1), (0, 1)),
        ((1, 2), (0, 1)),
        ((2, 3), (1, 2)),
        ((3, 4), (1, 2)),
    ]
