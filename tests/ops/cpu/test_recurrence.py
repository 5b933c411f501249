"""The ops of recurrent mixers in C++: slices of wider rows, prompts in parts, long prompts, damage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infuse import ops
from infuse.native import kernels
from tests.support.tolerance import assert_near

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def given(dtype: torch.dtype, tokens: int, *, by_channel: bool = False) -> tuple[Tensor, ...]:
    """q, k, v as slices of one row, decay and beta: 2 rows, 4 heads in 2 groups, 40 x 24."""
    rows = torch.randn(2, tokens, 3 + 2 * 2 * 40 + 4 * 24, dtype=dtype)[..., 3:]
    q, k, v = rows.split((80, 80, 96), dim=-1)
    decay = -torch.rand((2, tokens, 4, 40) if by_channel else (2, tokens, 4)) * 2
    return q.unflatten(-1, (2, 40)), k.unflatten(-1, (2, 40)), v.unflatten(-1, (4, 24)), decay, torch.rand(2, tokens, 4)


def scan(args: tuple[Tensor, ...], state: Tensor | None, delta: bool, body: str = "cpu") -> tuple[Tensor, Tensor]:
    return ops.linear_attention.body(body)(*args, None, state, 40**-0.5, delta, delta)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_of_rows_in_parts_are_the_whole(dtype: torch.dtype, delta: bool, by_channel: bool) -> None:
    args = given(dtype, 23, by_channel=by_channel)
    whole, state = scan(tuple(x.contiguous() for x in args), None, delta, ops.REFERENCE)
    outs, now = [], None
    for first, last in ((0, 1), (1, 6), (6, 8), (8, 23)):
        part = (*(x[:, first:last] for x in args[:3]), *(x[:, first:last].contiguous() for x in args[3:]))
        out, now = scan(part, now, delta)
        outs.append(out)
    assert_near(torch.cat(outs, dim=1), whole, dtype, "outputs")
    assert_near(now, state, dtype, "states")


@pytest.mark.parametrize("delta", [False, True])
def test_long_prompts_by_chunks_and_by_tokens_agree(delta: bool) -> None:
    args = given(torch.float32, 1030)
    wanted, found = scan(args, None, delta, "torch"), scan(args, None, delta)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("delta", [False, True])
def test_damage_stays_in_later_tokens_of_its_row_and_group(delta: bool) -> None:
    args = given(torch.float32, 9)
    wanted, _ = scan(args, None, delta)
    args[1][1, 5, 1, 3] = float("nan")  # the key of heads 2 and 3, in row 1
    found, state = scan(args, None, delta)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1, :5], wanted[1, :5])
    assert torch.equal(found[1, :, :2], wanted[1, :, :2])
    assert found[1, 5:, 2:].isnan().all() and state[1, 2:].isnan().any() and not state[1, :2].isnan().any()


@pytest.mark.parametrize("taps", [3, 4, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolution_of_slices_in_parts_is_the_whole(dtype: torch.dtype, taps: int) -> None:
    rows = torch.randn(2, 19, 3 * 37 + 2, dtype=dtype)
    x, gate, out_gate = (rows[..., i * 37 : (i + 1) * 37] for i in range(3))
    weight, bias = torch.randn(37, taps, dtype=dtype), torch.randn(37, dtype=dtype)
    whole, state = ops.causal_conv(x.contiguous(), weight, bias, None, gate, out_gate, True)
    outs, now = [], None
    for first, last in ((0, 1), (1, 3), (3, 11), (11, 12), (12, 19)):
        of_part = (each[:, first:last] for each in (x, gate, out_gate))
        part, gate_part, out_part = of_part
        out, now = ops.causal_conv.body("cpu")(part, weight, bias, now, gate_part, out_part, True)
        outs.append(out)
    assert_near(torch.cat(outs, dim=1), whole, dtype, "outputs")
    assert torch.equal(now, state), "the state is what was seen, bit by bit"


def test_gates_of_each_row_of_a_batch_are_found() -> None:
    """Tokens of a gate that lie at another distance between rows than inside of them."""
    x, wide = torch.randn(3, 5, 32), torch.randn(3, 9, 40)
    gate, weight = wide[:, 2:7, 4:36], torch.randn(32)
    assert_near(
        ops.gated_norm.body("cpu")(x, gate, weight, 32, 1e-6, True, False),
        ops.gated_norm(x, gate.contiguous(), weight, 32, 1e-6, True, False), torch.float32, "gated",
    )  # fmt: skip
