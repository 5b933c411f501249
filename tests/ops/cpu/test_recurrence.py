"""The ops of recurrent mixers in C++: slices of wider rows, prompts in parts, long prompts, damage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infuse import ops
from infuse.native import kernels
from tests.ops.cpu.called import by_kernel, calls_kernel
from tests.ops.recurrence import rows_of
from tests.support.op_cases import cases
from tests.support.tolerance import assert_near

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scan(args: tuple[Tensor, ...], state: Tensor | None, delta: bool, body: str = "cpu") -> tuple[Tensor, Tensor]:
    given = (*args, None, state, 40**-0.5, delta, delta)
    return by_kernel("linear_attention", *given) if body == "cpu" else ops.linear_attention.body(body)(*given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["causal_conv", "linear_attention", "gated_norm", "selective_scan"])
def test_every_case_with_tokens_is_computed_by_its_kernel(name: str, dtype: torch.dtype) -> None:
    for case in cases(name, dtype):
        _, called = calls_kernel(name, *case.args)
        assert called == (case.args[0].numel() > 0), case.label


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_of_rows_in_parts_are_the_whole(dtype: torch.dtype, delta: bool, by_channel: bool) -> None:
    args = rows_of(dtype, 23, by_channel=by_channel)
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
    args = rows_of(torch.float32, 1030)
    wanted, found = scan(args, None, delta, "torch"), scan(args, None, delta)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("delta", [False, True])
def test_damage_stays_in_later_tokens_of_its_row_and_group(delta: bool) -> None:
    args = rows_of(torch.float32, 9)
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
        out, now = by_kernel("causal_conv", part, weight, bias, now, gate_part, out_part, True)
        outs.append(out)
    assert_near(torch.cat(outs, dim=1), whole, dtype, "outputs")
    assert torch.equal(now, state), "the state is what was seen, bit by bit"


def test_gates_of_each_row_of_a_batch_are_found() -> None:
    """Tokens of a gate that lie at another distance between rows than inside of them: not by the kernel."""
    x, wide = torch.randn(3, 5, 32), torch.randn(3, 9, 40)
    gate, weight = wide[:, 2:7, 4:36], torch.randn(32)
    found, called = calls_kernel("gated_norm", x, gate, weight, 32, 1e-6, True, False)
    wanted = ops.gated_norm(x, gate.contiguous(), weight, 32, 1e-6, True, False)
    assert_near(found, wanted, torch.float32, "gated")
    assert not called
    assert calls_kernel("gated_norm", x[:1], gate[:1], weight, 32, 1e-6, True, False)[1]
