"""The C++ bodies of attention, rotary and activations: shapes, strides, masks, threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from infuse import ops
from infuse.native import isa, kernels
from infuse.ops.cache_rows import SCALE_BYTES, dequantize_rows, quantize_rows
from tests.support.attention import (
    attended,
    cached,
    check,
    check_many_queries,
    check_not_finite_tiles,
    check_tiles_with_masks,
    masks,
)
from tests.support.levels import TILED
from tests.support.threads import thread_counts
from tests.support.tolerance import assert_near

REASON = kernels() if isinstance(kernels(), str) else ""
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    yield from thread_counts(request.param)


# ---- attention ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 24, 33, 64, 80, 128, 256])
def test_attention_of_awkward_shapes(width: int, dtype: torch.dtype, threads: int) -> None:
    for batch, heads, kv_heads, tokens in ((1, 4, 1, 1), (3, 6, 2, 1), (1, 3, 3, 1), (2, 10, 2, 3), (1, 4, 2, 16)):
        for length in (1, 17, 65, 1000):
            q = torch.randn(batch, heads, tokens, width, dtype=dtype)
            k, v = (cached(batch, kv_heads, length, width, dtype) for _ in range(2))
            if length >= tokens:
                check(dtype, q, k, v, None, None, width**-0.5, True, 0, 0.0)
                sinks = torch.linspace(-1, 4, heads).to(dtype)
                found, seen = attended(q, k, v, None, None, width**-0.5, True, 0, 0.0, sinks), length - tokens
                mask = torch.ones(tokens, length, dtype=torch.bool).tril(seen)
                assert_near(found, exact(q, k, v, mask, width**-0.5, sinks), dtype, f"sinks, {tuple(q.shape)}")
            check(dtype, q, k, v, None, None, width**-0.5, False, 5, 2.0)


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """In float64: over thousands of keys the reference's float32 is less exact than the kernel."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = (q.double() @ keys.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ values).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_split_over_the_cache(dtype: torch.dtype) -> None:
    """More threads than key heads: parts begin and end inside heads, some of them in the middle of several."""
    for threads in thread_counts(2, 3, 5, 7):
        for batch, kv_heads in ((1, 1), (3, 1), (1, 2), (2, 2)):
            q = torch.randn(batch, 4 * kv_heads, 1, 64, dtype=dtype)
            k, v = (cached(batch, kv_heads, 6000, 64, dtype) for _ in range(2))
            v += 1  # means around zero lose digits however they are computed
            mask = torch.rand(batch, 1, 1, 6000) < 0.8
            mask[0, :, :, :4000] = False  # whole parts without an allowed key
            found = attended(q, k, v, mask, None, 0.125, True, 0, 0.0)
            assert_near(found, exact(q, k, v, mask, 0.125), dtype, f"{threads=} {batch}x{kv_heads} masked")
            found = attended(q, k, v, None, None, 0.25, True, 3000, 0.0)
            in_window = torch.arange(6000) >= 3000
            sinks = 9 + torch.linspace(0, 1, 4 * kv_heads)  # as large as all other weights together
            few = attended(q, k, v, mask, None, 0.125, True, 0, 0.0, sinks)
            wanted = exact(q, k, v, mask, 0.125, sinks)
            assert_near(few, wanted, dtype, f"{threads=} {batch}x{kv_heads} sinks")
            assert float((wanted / exact(q, k, v, mask, 0.125)).min()) < 0.8
            assert_near(found, exact(q, k, v, in_window, 0.25), dtype, f"{threads=} {batch}x{kv_heads} window")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_with_masks(dtype: torch.dtype, threads: int) -> None:
    batch, heads, kv_heads, width = 3, 4, 2, 32
    for tokens, length in ((1, 1), (1, 130), (4, 130), (2, 1000)):
        q = torch.randn(batch, heads, tokens, width, dtype=dtype)
        k, v = (cached(batch, kv_heads, length, width, dtype) for _ in range(2))
        bias = torch.randn(1, heads, 1, length, dtype=dtype)
        for mask in masks(batch, heads, tokens, length):
            check(dtype, q, k, v, mask, None, 0.2, False, 0, 0.0)
            check(dtype, q, k, v, mask, bias, 0.2, True, 7, 3.0)
            for kind in DTYPES:
                seen = mask.clone()
                if (
                    kind == torch.float16
                ):  # its least value is small enough for hidden scores to differ by their rounding alone
                    seen[..., 0] = True
                added = torch.zeros(mask.shape, dtype=kind).masked_fill(~seen, torch.finfo(kind).min)
                check(dtype, q, k, v, added, None, 0.2, tokens == 1, 0, 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 32, 33, 64, 80, 128])
def test_many_queries_go_by_tiles(width: int, dtype: torch.dtype, threads: int) -> None:
    check_many_queries(width, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_with_masks(dtype: torch.dtype, threads: int) -> None:
    check_tiles_with_masks(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_in_causal_order(dtype: torch.dtype, threads: int) -> None:
    """It is the same as no mask and causal order; a mask that differs in one place is not."""
    for batch, tokens, length in ((1, 9, 9), (2, 70, 200), (2, 129, 129)):
        q = torch.randn(batch, 4, tokens, 32).to(dtype)
        k, v = (cached(batch, 2, length, 32, dtype) for _ in range(2))
        room = torch.ones(batch, 1, tokens, length + 3, dtype=torch.bool)  # whose rows are farther apart than `length`
        mask = room[..., :length].tril_(length - tokens)
        order = attended(q, k, v, None, None, 0.2, True, 0, 0.0)
        assert torch.equal(attended(q, k, v, mask, None, 0.2, False, 0, 0.0), order)
        check(dtype, q, k, v, mask, None, 0.2, False, 0, 0.0)
        for t in (0, tokens // 2, tokens - 1):
            for key in {0, length - tokens + t, min(length - tokens + t + 1, length - 1), length - 1}:
                other = mask.clone()
                other[-1, 0, t, key] ^= True
                check(dtype, q, k, v, other, None, 0.2, False, 0, 0.0)
                assert not torch.equal(attended(q, k, v, other, None, 0.2, False, 0, 0.0), order)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_passes_through_tiles(value: float, dtype: torch.dtype) -> None:
    check_not_finite_tiles(value, dtype)


@pytest.mark.parametrize("tokens", [1, 20])
def test_sinks_of_all_sizes(tokens: int) -> None:
    """Also beside scores of -infinity only, or none: a sink that is not -infinity itself takes the weight."""
    heads, length = 5, 70
    q, k, v = torch.randn(2, heads, tokens, 16), torch.randn(2, 1, length, 16), torch.randn(2, 1, length, 16)
    sinks = torch.tensor([0.0, 300.0, -300.0, -float("inf"), 2.5])
    nothing = torch.zeros(2, 1, tokens, length)
    nothing[1] = -float("inf")
    for dtype in DTYPES:
        given = [tensor.to(dtype) for tensor in (q, k, v)]
        for mask in (None, nothing, nothing == 0):
            finite = sinks.clamp(min=-300) if mask is nothing else sinks  # scores of -infinity alone are NaN in softmax
            check(dtype, *given, mask, None, 0.25, False, 0, 0.0, finite.to(dtype))
            check(dtype, *given, mask, None, 0.25, False, 0, 0.0, finite.repeat_interleave(2)[::2])


def test_a_row_without_an_allowed_key_is_zeros() -> None:
    q, k, v = torch.randn(2, 2, 1, 16), cached(2, 1, 70, 16, torch.float32), cached(2, 1, 70, 16, torch.float32)
    mask = torch.ones(2, 1, 1, 70, dtype=torch.bool)
    mask[1] = False
    added = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    for hidden in (mask, added):
        out = attended(q, k, v, hidden, None, 0.25, True, 0, 0.0)
        assert out[1].eq(0).all() and out[0].ne(0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_is_where_the_reference_has_it(value: float) -> None:
    for dtype in DTYPES:
        for which in range(3):
            for place in (0, 70, 199):
                q = torch.randn(2, 4, 2, 32, dtype=dtype)
                args = [q, *(torch.randn(2, 2, 200, 32, dtype=dtype) for _ in range(2))]
                args[which][1, 1, min(place, args[which].shape[2] - 1), 3] = value
                mask = torch.rand(2, 1, 2, 200) < 0.9
                for hidden in (None, mask):
                    check(dtype, *args, hidden, None, 0.2, False, 0, 0.0)


def test_attention_declines_what_it_does_not_take() -> None:
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 9, 16)
    attend = kernels().attention.default
    rest = (None, None, 0.25, True, 0, 0.0)
    assert attend(q, k, k, *rest) is not None
    wide = torch.randn(1, 2, 9, 520)
    assert attend(wide, wide, wide, *rest) is None
    assert attend(q.double(), k.double(), k.double(), *rest) is None
    assert attend(q, k.bfloat16(), k.bfloat16(), *rest) is None
    assert attend(q, k.transpose(2, 3).contiguous().transpose(2, 3), k, *rest) is None
    assert attend(q, k, k, torch.ones(1, 1, 1, 8, dtype=torch.bool), *rest[1:]) is None
    assert attend(q, k[:, :, :0], k[:, :, :0], *rest) is None
    assert attend(q, k, k, *rest, torch.randn(3)) is None
    assert attend(q, k, k, *rest, torch.randn(2).double()) is None
    assert_near(
        ops.attention.body("cpu")(wide, wide, wide, *rest),
        ops.attention.reference(wide, wide, wide, *rest),
        torch.float32,
    )


# ---- int8 caches ----


def rows_of(batch: int, kv_heads: int, length: int, width: int) -> Tensor:
    """A view of rows in a longer storage, whose codes and scales beyond it must not be used."""
    storage = torch.full((batch, kv_heads, length + 3, width + SCALE_BYTES), -1, dtype=torch.int8)  # scales are NaN
    storage[:, :, :length] = quantize_rows(torch.randn(batch, kv_heads, length, width))
    return storage[:, :, :length]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 24, 33, 64, 80, 256, 600])
def test_attention_over_an_int8_cache(width: int, dtype: torch.dtype, threads: int) -> None:
    for batch, heads, kv_heads, tokens in ((1, 4, 1, 1), (3, 6, 2, 1), (1, 3, 3, 1), (2, 10, 2, 3), (1, 2, 1, 8)):
        for length in (1, 17, 65, 500):
            q = torch.randn(batch, heads, tokens, width, dtype=dtype)
            k, v = (rows_of(batch, kv_heads, length, width) for _ in range(2))
            mask = torch.rand(batch, 1, tokens, length) < 0.7
            if length >= tokens:
                check(dtype, q, k, v, None, None, width**-0.5, True, 0, 0.0, torch.linspace(-1, 4, heads).to(dtype))
            check(dtype, q, k, v, None, None, width**-0.5, False, 5, 2.0)
            check(dtype, q, k, v, mask, torch.randn(1, heads, 1, length), width**-0.5, False, 0, 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 64, 80])
def test_many_queries_over_an_int8_cache(width: int, dtype: torch.dtype, threads: int) -> None:
    for batch, heads, kv_heads, tokens, length in ((2, 4, 2, 9, 9), (1, 8, 2, 70, 130), (1, 3, 3, 40, 301)):
        q = torch.randn(batch, tokens, heads, width).to(dtype).transpose(1, 2)
        k, v = (rows_of(batch, kv_heads, length, width) for _ in range(2))
        for causal, window in ((True, 0), (False, 0), (True, 7)):
            rest = (None, None, width**-0.5, causal, window, 0.0)
            rounds = dtype == torch.bfloat16 and isa() in TILED  # to what the tiles multiply
            values = (dequantize_rows(rows, dtype if rounds else torch.float32).float() for rows in (k, v))
            wanted = ops.attention.reference(q.float(), *values, *rest)
            assert_near(attended(q, k, v, *rest), wanted, dtype, f"{width} {causal} {window}")


def test_an_int8_cache_split_over_threads() -> None:
    for _ in thread_counts(2, 5):
        q = torch.randn(1, 8, 1, 64).bfloat16()
        k, v = (rows_of(1, 2, 6000, 64) for _ in range(2))
        found = attended(q, k, v, None, None, 0.125, True, 0, 0.0)
        wanted = exact(q, dequantize_rows(k), dequantize_rows(v), torch.ones(6000, dtype=torch.bool), 0.125)
        assert_near(found, wanted, torch.bfloat16)


@pytest.mark.parametrize("window", [0, 37, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_queries_round_as_each_alone(dtype: torch.dtype, window: int, threads: int) -> None:
    """Bit for bit, wherever blocks of keys begin and end; speculation counts on it."""
    for heads, width, length in ((8, 64, 701), (2, 80, 130), (6, 33, 66)):
        q, scale, tokens = torch.randn(1, heads, 7, width, dtype=dtype), width**-0.5, 7
        for make in (cached, rows_of):
            k, v = (make(1, 2, length, width, *([dtype] if make is cached else [])) for _ in "kv")
            several = attended(q, k, v, None, None, scale, True, window, 0.0)
            for t in range(tokens):
                end = length - tokens + t + 1
                alone = q[:, :, t : t + 1], k[:, :, :end], v[:, :, :end]
                one = attended(*alone, None, None, scale, True, window, 0.0)
                assert torch.equal(one, several[:, t : t + 1]), (make, heads, t)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_passes_through_an_int8_cache(dtype: torch.dtype, value: float) -> None:
    for tokens in (1, 20):
        for which in range(3):
            args = [torch.randn(2, heads, count, 32) for heads, count in ((4, tokens), (2, 200), (2, 200))]
            args[which][1, 1, -1, 3] = value
            q, k, v = args[0].to(dtype), *map(quantize_rows, args[1:])
            check(dtype, q, k, v, None, None, 0.2, False, 0, 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_to_an_int8_cache(dtype: torch.dtype, threads: int) -> None:
    """Bit for bit like the reference, and nothing else is written."""
    for batch, tokens, width in ((1, 1, 64), (3, 2, 80), (2, 300, 33), (1, 3, 6)):
        qkv = torch.randn(batch, tokens, 4 + 2 * 2, width, dtype=dtype)
        qkv[0, 0, 4] = 0
        qkv[0, -1, 5, -1] = 1e4
        qkv[0, 0, 6] = 1e-42
        found = [torch.full((batch, 310, 2, width + SCALE_BYTES), 77, dtype=torch.int8).transpose(1, 2) for _ in "kv"]
        wanted = [one.clone() for one in found]
        q = kernels().rotary_append.default(qkv, None, None, *found, 5, 4, False)
        assert torch.equal(q, ops.rotary_append.reference(qkv, None, None, *wanted, 5, 4, False))
        assert all(map(torch.equal, found, wanted))
        rotated = [torch.empty_like(one) for one in wanted]
        cos_sin = torch.rand(1, tokens, width // 2 * 2, dtype=dtype)
        kernels().rotary_append.default(qkv, cos_sin, cos_sin, *rotated, 5, 4, False)
        ops.rotary_append.reference(qkv, cos_sin, cos_sin, *wanted, 5, 4, False)
        a, b = (dequantize_rows(one[0][:, :, 5 : 5 + tokens]) for one in (rotated, wanted))
        assert_near(a, b, torch.bfloat16)  # a value that rounds to another neighbour moves its code by one


def test_an_int8_cache_of_what_is_not_finite() -> None:
    qkv = torch.randn(1, 3, 4, 16)
    for token, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        qkv[0, token, 2, 5] = value
    keys, values = (torch.zeros(1, 1, 3, 20, dtype=torch.int8) for _ in "kv")
    kernels().rotary_append.default(qkv, None, None, keys, values, 0, 2, False)
    assert dequantize_rows(keys).isnan().all() and torch.equal(values, quantize_rows(qkv[:, :, 3:].transpose(1, 2)))


def test_rows_of_another_width_are_declined() -> None:
    q, k = torch.randn(1, 2, 1, 16), rows_of(1, 2, 9, 16)
    rest = (None, None, 0.25, True, 0, 0.0)
    assert kernels().attention.default(q, k, rows_of(1, 2, 9, 15), *rest) is None
    assert kernels().attention.default(q, k, torch.randn(1, 2, 9, 16), *rest) is None
    qkv = torch.randn(1, 1, 6, 16)
    assert kernels().rotary_append.default(qkv, None, None, k, rows_of(1, 2, 9, 15), 0, 2, False) is None
    assert kernels().rotary_append.default(qkv, None, None, k, torch.zeros(1, 2, 9, 16), 0, 2, False) is None


# ---- rotary ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_to_a_strided_cache(dtype: torch.dtype, threads: int) -> None:
    heads, kv_heads, start = 4, 2, 5
    for batch, tokens, width, turned in ((1, 1, 64, 64), (3, 2, 80, 20), (2, 600, 33, 32), (1, 1, 6, 2)):
        for interleaved in (False, True):
            for kind in (dtype, torch.float32):
                qkv = torch.randn(batch, tokens, heads + 2 * kv_heads, width, dtype=dtype)
                angles = torch.rand(1, tokens + 1, turned)[:, 1:] * 6
                cos, sin = angles.cos().to(kind), angles.sin().to(kind)
                # [B, S, K, D] in memory, as some caches have it
                found = [torch.zeros(batch, 620, kv_heads, width, dtype=dtype).transpose(1, 2) for _ in range(2)]
                wanted = [torch.zeros(batch, kv_heads, 620, width) for _ in range(2)]
                q = kernels().rotary_append.default(qkv, cos, sin, *found, start, heads, interleaved)
                expected = ops.rotary_append.reference(
                    qkv.float(), cos.float(), sin.float(), *wanted, start, heads, interleaved
                )
                for a, b in zip((q, *found), (expected, *wanted), strict=True):
                    assert_near(a, b, dtype, f"{width} {turned} {interleaved}")


def test_append_declines_a_full_cache_and_strange_turns() -> None:
    append = kernels().rotary_append.default
    qkv, cos_sin = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 8)
    keys, values = torch.zeros(1, 1, 6, 8), torch.zeros(1, 1, 6, 8)
    assert append(qkv, cos_sin, cos_sin, keys, values, 4, 2, False) is not None
    assert append(qkv, cos_sin, cos_sin, keys, values, 5, 2, False) is None
    assert append(qkv, cos_sin.double(), cos_sin.double(), keys, values, 0, 2, False) is None
    assert append(qkv, cos_sin[..., :3], cos_sin[..., :3], keys, values, 0, 2, False) is None
    assert append(qkv, cos_sin, cos_sin, keys.bfloat16(), values.bfloat16(), 0, 2, False) is None


# ---- activations ----


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh"])
def test_activation_over_all_magnitudes(name: str, threads: int) -> None:
    special = torch.tensor([0.0, -0.0, 1e-39, 1e30, -1e30, float("nan"), -float("inf")])
    x = torch.cat([torch.linspace(-20, 20, 40001), torch.randn(1000) * 1e-3, torch.randn(1000) * 100, special])
    found, wanted = (ops.activation.body(body)(x, name).double() for body in ("cpu", "reference"))
    assert torch.equal(found.isnan(), wanted.isnan())
    # PyTorch's own gelu loses digits where 1 + erf cancels: there only the absolute error counts.
    error = (found - wanted).nan_to_num().abs() / (
        wanted.nan_to_num().abs() + x.nan_to_num().abs().double().clamp(1e-6, 1)
    )
    assert float(error.max()) <= 1e-6
    if name not in ("quick_gelu", "tanh"):
        assert ops.activation.body("cpu")(torch.tensor([float("inf")]), name).item() == float("inf")


def test_gelu_of_every_bfloat16(threads: int) -> None:
    """In units in the last place of the exact value; without kernels that of PyTorch loses all digits below -5."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    wanted = x.double() * 0.5 * torch.special.erfc(-x.double() / 2**0.5)
    unit = torch.exp2(wanted.abs().clamp(min=2**-126).log2().floor() - 7)
    error = (ops.activation.body("cpu")(x, "gelu").double() - wanted).abs() / unit
    assert float(error.max()) <= 0.52


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_activation_of_odd_widths(dtype: torch.dtype, threads: int) -> None:
    for shape in ((1, 1, 2), (3, 66), (5, 7, 2 * 1001), (14,)):
        x = torch.randn(shape, dtype=dtype)
        assert_near(
            ops.gated_activation.body("cpu")(x, "silu"), ops.gated_activation.reference(x.float(), "silu"), dtype
        )
