"""The kernels behind shared memory in one process, where the sanitizers see them: ranks are threads that share a
tensor.

Run as a program, it prints the instruction set and runs the sums: so the tests force lower sets in processes of their
own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from infuse.native import DTYPES, isa, kernels

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))

BUFFER_BYTES = 40_960  # above what is summed together in one turn, and not a power of two
DONE, WAITING, DIFFERS = 0, 1, 2  # enum class Outcome in src/region.h
# Around the registers' widths, a share's 64 elements, the 16 KiB that are summed together, one buffer and several.
LENGTHS = (0, 1, 3, 15, 17, 63, 64, 65, 4096, 4097, 8192, 8193, 10240, 10241, 16385, 20480, 20481, 61_441)


def region_for(size: int) -> Tensor:
    """A region that ends, but for its alignment, where its memory does: the address sanitizer sees what goes beyond."""
    size_bytes = kernels().shared_bytes(size, BUFFER_BYTES)
    memory = torch.zeros(size_bytes + 127, dtype=torch.uint8)
    first = -memory.data_ptr() % 128
    region = memory[first : first + size_bytes]
    kernels().shared_begin(region, size, BUFFER_BYTES, 5)
    return region


def on_ranks(size: int, run: Callable[[int], Any]) -> list[Any]:
    """What `run(rank)` returns in a thread for each rank."""
    found: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            found[rank] = run(rank)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    for value in found:
        if isinstance(value, BaseException):
            raise value
    return found


def finish(operation: Callable[..., int], *args: Any) -> None:
    """Call an operation until it is done, with short slices, so that it goes on in the middle."""
    until = time.monotonic() + 30
    while (outcome := operation(*args, 200)) == WAITING:
        assert time.monotonic() < until, "an operation does not end"
    assert outcome == DONE


def brought(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + length)
    return (torch.randn(length, generator=generator) * 2.0**rank).to(dtype)


def check_sums(size: int, dtype: torch.dtype) -> None:
    region = region_for(size)
    given = [[brought(rank, length, dtype) for length in LENGTHS] for rank in range(size)]
    sums = [[x.clone() for x in mine] for mine in given]

    def run(rank: int) -> None:
        for x in sums[rank]:
            finish(kernels().shared_all_reduce, region, rank, x, 7)

    on_ranks(size, run)
    for i, length in enumerate(LENGTHS):
        wide = given[0][i].float()
        for rank in range(1, size):
            wide = wide + given[rank][i].float()
        for rank in range(size):
            assert torch.equal(sums[rank][i], wide.to(dtype)), f"{size} ranks, {dtype}, {length} elements, rank {rank}"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_in_rank_order_rounded_once(dtype: torch.dtype, size: int) -> None:
    check_sums(size, dtype)


def test_infinities_and_nan() -> None:
    infinity, nan = float("inf"), float("nan")
    given = torch.tensor([[infinity, infinity, nan, 3e38, 0.0, -0.0], [1.0, -infinity, 1.0, 3e38, -0.0, -0.0]])
    for dtype in DTYPES:
        region, sums = region_for(2), given.to(dtype)
        on_ranks(2, lambda rank: finish(kernels().shared_all_reduce, region, rank, sums[rank], 0))  # noqa: B023  it ends here
        wanted = (given[0].to(dtype).float() + given[1].to(dtype).float()).to(dtype)
        for rank in range(2):
            assert torch.equal(sums[rank].isnan(), wanted.isnan())
            assert torch.equal(sums[rank].nan_to_num(nan=7), wanted.nan_to_num(nan=7))


@pytest.mark.parametrize("rows", [0, 1, 3, 50])
def test_gathers_of_uneven_columns(rows: int) -> None:
    for columns in ([3, 0, 5], [0, 0, 0], [1, 1, 1], [4096, 1, 700], [0, 50_001, 1]):
        region = region_for(3)
        pieces = [torch.randint(0, 255, (rows, count), dtype=torch.uint8) for count in columns]
        wholes = [torch.full((rows, sum(columns)), 77, dtype=torch.uint8) for _ in columns]

        def run(rank: int) -> None:
            finish(kernels().shared_all_gather, region, rank, pieces[rank], wholes[rank], columns, rows, 1)  # noqa: B023

        on_ranks(3, run)
        for whole in wholes:
            assert torch.equal(whole, torch.cat(pieces, dim=1))


def test_broadcasts() -> None:
    region = region_for(3)
    given = [[brought(rank, length, torch.float32) for length in LENGTHS] for rank in range(3)]
    wanted = [x.clone() for x in given[0]]

    def run(rank: int) -> None:
        for x in given[rank]:
            finish(kernels().shared_broadcast, region, rank, x, 3)

    on_ranks(3, run)
    for mine in given:
        assert all(torch.equal(x, y) for x, y in zip(mine, wanted, strict=True))


def test_many_operations_of_all_kinds_with_delays() -> None:
    region, count = region_for(3), 300

    def run(rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        for i in range(count):
            if float(torch.rand(1, generator=generator)) < 0.05:
                time.sleep(0.001)
            x = torch.full((1 + 37 * i,), float(rank + i))
            finish(kernels().shared_all_reduce, region, rank, x, i)
            assert bool((x == 3 * i + 3).all()), (rank, i)
            finish(kernels().shared_broadcast, region, rank, x.fill_(rank + 5.0), i)
            assert bool((x == 5).all()), (rank, i)

    on_ranks(3, run)


def test_a_slice_ends_and_the_operation_goes_on() -> None:
    region = region_for(2)
    x, y = torch.ones(20_000), torch.full((20_000,), 2.0)
    assert kernels().shared_all_reduce(region, 0, x, 0, 1000) == WAITING
    assert kernels().shared_states(region, 0) == [0, 1]
    assert kernels().shared_all_reduce(region, 0, x, 0, 0) == WAITING
    on_ranks(2, lambda rank: finish(kernels().shared_all_reduce, region, rank, (x, y)[rank], 0))
    assert bool((x == 3).all()) and bool((y == 3).all())


def test_a_waiting_rank_leaves_the_interpreter_to_others() -> None:
    """If it did not, this thread could not come before the wait of a minute is over."""
    region, outcome = region_for(2), []
    thread = threading.Thread(
        target=lambda: outcome.append(kernels().shared_all_reduce(region, 0, torch.ones(3), 0, 60_000_000))
    )
    thread.start()
    finish(kernels().shared_all_reduce, region, 1, torch.ones(3), 0)
    thread.join()
    assert outcome == [DONE]


def test_operations_that_differ() -> None:
    x = torch.ones(2, 3)
    for other in (torch.ones(3, 2), torch.ones(6), torch.ones(2, 3).half(), torch.ones(2, 4), torch.ones(30_000)):
        region = region_for(2)
        found = on_ranks(2, lambda rank: kernels().shared_all_reduce(region, rank, (x, other)[rank], 0, 10_000_000))  # noqa: B023
        assert found == [DIFFERS, DIFFERS]
        assert kernels().shared_states(region, 0) == [0, 2] and kernels().shared_states(region, 1) == [2, 0]
    region = region_for(2)
    found = on_ranks(2, lambda rank: kernels().shared_all_reduce(region, rank, x.clone(), rank, 10_000_000))
    assert found == [DIFFERS, DIFFERS], "another place"


def test_last_words_are_the_first_ones() -> None:
    region = region_for(2)
    words = b"no memory, \xc3\xa4 " * 100
    assert kernels().shared_last_words(region, 1) == []
    kernels().shared_leave(region, 1, list(words))
    kernels().shared_leave(region, 1, list(b"something else"))
    assert kernels().shared_last_words(region, 1) == list(words[:512])
    assert kernels().shared_last_words(region, 0) == []


def test_what_is_no_region_is_refused() -> None:
    region, x = region_for(2), torch.ones(3)
    for wrong, rank in (
        (region, 2),
        (region, -1),
        (region[:1000], 0),
        (torch.zeros(10_000, dtype=torch.uint8), 0),
        (region[1:], 0),
    ):
        with pytest.raises(RuntimeError, match="not a region"):
            kernels().shared_all_reduce(wrong, rank, x, 0, 0)
    with pytest.raises(RuntimeError, match="can share a region"):
        kernels().shared_bytes(33, BUFFER_BYTES)
    with pytest.raises(RuntimeError, match="columns do not fit"):
        kernels().shared_all_gather(region, 0, x, torch.empty(4), [12, 8], 1, 0, 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(isa())
    for dtype in DTYPES:
        check_sums(3, dtype)
