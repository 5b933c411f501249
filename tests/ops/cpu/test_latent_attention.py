"""The C++ body of attention over latents: shapes, strides, masks, threads. All else is in tests/ops/test_ops.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from infuse import ops
from infuse.native import kernels
from infuse.ops.cpu.latent_attention import MOST_ROWS
from tests.support.threads import thread_counts
from tests.support.tolerance import assert_near

REASON = kernels() if isinstance(kernels(), str) else ""
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPARE = 5  # tokens of room after the last one, all NaN


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    yield from thread_counts(request.param)


def given(
    batch: int, heads: int, tokens: int, length: int, plain: int, turned: int, rank: int, value: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Fresh arguments with the strides that layers give: parts of a product, and of a cache with room of NaN."""
    q, r = torch.randn(batch, tokens, heads, plain + turned).to(dtype).split((plain, turned), dim=-1)
    stored = [torch.full((batch, 1, length + SPARE, width), float("nan"), dtype=dtype) for width in (rank, turned)]
    for each in stored:
        each[:, :, :length].normal_()
    latents, keys = (each.narrow(2, 0, length)[:, 0] for each in stored)
    expand = torch.randn(heads * (plain + value), rank).div(rank**0.5).to(dtype)
    return q, r, latents, keys, expand


def check(args: tuple[Tensor, ...], mask: Tensor | None, causal: bool, what: str) -> None:
    """Against the reference, after a call that leaves NaN in the memory that the next one takes."""
    scale = (args[0].shape[-1] + args[1].shape[-1]) ** -0.5
    body = ops.latent_attention.body("cpu")
    poisoned = body(*(torch.full_like(each, float("nan")) for each in args), mask, scale, causal)
    assert bool(poisoned.isnan().any())
    del poisoned
    wanted = ops.latent_attention.reference(*args, mask, scale, causal)
    dtype = args[0].dtype
    # Queries and sums of latents are rounded between the products, too.
    assert_near(body(*args, mask, scale, causal), wanted, dtype, what, times=2 if dtype != torch.float32 else 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "widths", [(8, 4, 24, 12), (33, 6, 40, 17), (128, 64, 512, 128), (65, 2, 130, 1), (1, 2, 3, 70)], ids=str
)
def test_awkward_shapes(widths: tuple[int, int, int, int], dtype: torch.dtype, threads: int) -> None:
    for batch, heads, tokens in ((1, 1, 1), (1, 16, 1), (2, 1, 1), (3, 3, 1), (1, 5, 2), (2, 2, 7)):
        for length in (1, 17, 64, 65, 700):
            if length < tokens:
                continue
            args = given(batch, heads, tokens, length, *widths, dtype)
            what = f"{batch}x{heads}x{tokens}/{length}"
            check(args, None, True, f"{what} causal")
            check(args, None, False, f"{what} of all")
            padded = torch.ones(batch, 1, tokens, length, dtype=torch.bool).tril(length - tokens)
            padded[0, :, :, : length // 3] = False
            check(args, padded, False, f"{what} padded")
            added = torch.zeros(padded.shape, dtype=dtype).masked_fill(~padded, torch.finfo(dtype).min)
            check(args, added, True, f"{what} added")


@pytest.mark.parametrize("causal", [False, True])
def test_more_rows_than_the_kernel_takes(causal: bool) -> None:
    heads, tokens, length = 100, 13, 40
    assert heads * tokens > 2 * MOST_ROWS
    args = given(2, heads, tokens, length, 8, 4, 24, 12, torch.float32)
    check(args, None, causal, "no mask")
    padded = torch.ones(2, 1, tokens, length, dtype=torch.bool).tril(length - tokens)
    padded[1, :, :, :9] = False
    check(args, padded, causal, "a mask")
    check(args, padded[:, :, -1:], causal, "a mask for all queries")


def test_a_query_that_may_look_nowhere_is_zeros() -> None:
    q, r, latents, keys, expand = given(2, 3, 2, 9, 8, 4, 24, 12, torch.float32)
    mask = torch.ones(2, 1, 2, 9, dtype=torch.bool)
    mask[1, :, 0] = False
    out = ops.latent_attention.body("cpu")(q, r, latents, keys, expand, mask, 1.0, False)
    assert not bool(out[1, 0].any()) and bool(out[1, 1].any()) and bool(torch.isfinite(out).all())
