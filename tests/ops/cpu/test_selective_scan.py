"""The selective scan in C++: slices of wider rows, prompts in parts, long prompts, wide states, damage."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from infuse import ops
from infuse.native import kernels
from infuse.ops.cpu.selective_scan import MOST_STATES
from tests.ops.cpu.called import by_kernel
from tests.support.tolerance import assert_near

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Rows = tuple[Tensor, ...]  # x, dt, keys, queries, gate
Scanned = tuple[Tensor, Tensor]


def given(dtype: torch.dtype, tokens: int, channels: int = 150, states: int = 16) -> tuple[Rows, Rows]:
    """Rows of 2 texts as slices of wider ones, and the weights of the channels."""
    wide = torch.randn(2, tokens, 3 * channels + 2 * states + 5, dtype=dtype)[..., 5:]
    x, dt, gate, keys, queries = wide.split((channels,) * 3 + (states,) * 2, dim=-1)
    rates = torch.rand(channels, states, dtype=dtype) * 3
    weights = rates, torch.randn(channels, dtype=dtype) - 2, torch.randn(channels, dtype=dtype)
    return (x, dt, keys, queries, gate), weights


def scan(rows: Rows, weights: Rows, state: Tensor | None = None, body: str = "cpu") -> Scanned:
    if body == "cpu" and weights[0].shape[1] <= MOST_STATES:
        return by_kernel("selective_scan", *rows, *weights, state)
    return ops.selective_scan.body(body)(*rows, *weights, state)


def scan_in_float64(rows: Rows, weights: Rows) -> Scanned:
    x, dt, keys, queries, gate = (each.double() for each in rows)
    a_log, dt_bias, skip = (each.double() for each in weights)
    steps, state, outs = F.softplus(dt + dt_bias), torch.zeros(len(x), *a_log.shape, dtype=torch.float64), []
    for t in range(x.shape[1]):
        step = steps[:, t, :, None]
        state = state * (-a_log.exp() * step).exp() + step * x[:, t, :, None] * keys[:, t, None]
        outs.append((state @ queries[:, t, :, None])[..., 0] + skip * x[:, t])
    return torch.stack(outs, dim=1) * F.silu(gate), state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_of_rows_in_parts_are_the_whole(dtype: torch.dtype) -> None:
    rows, weights = given(dtype, 23)
    whole, state = scan(tuple(x.contiguous() for x in rows), weights, body=ops.REFERENCE)
    outs, now = [], None
    for first, last in ((0, 1), (1, 6), (6, 8), (8, 23)):
        before = None if now is None else now.clone()
        out, after = scan(tuple(x[:, first:last] for x in rows), weights, now)
        assert before is None or torch.equal(now, before), "the state before is left alone"
        outs.append(out)
        now = after
    assert_near(torch.cat(outs, dim=1), whole, dtype, "outputs")
    assert_near(now, state, dtype, "states")


@pytest.mark.parametrize("body", [ops.REFERENCE, "torch", "cpu"])
def test_long_prompts_do_not_drift(body: str) -> None:
    rows, weights = given(torch.float32, 1030, 20)
    for a, b in zip(scan(rows, weights, body=body), scan_in_float64(rows, weights), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("states", [1, 3, 15, 17, 64, 200, 256, 257])
@pytest.mark.parametrize("channels", [1, 9, 128, 300])
def test_any_number_of_states_and_channels(channels: int, states: int) -> None:
    rows, weights = given(torch.float32, 3, channels, states)
    before = torch.randn(2, channels, states)
    for a, b in zip(scan(rows, weights, before), scan(rows, weights, before, ops.REFERENCE), strict=True):
        assert_near(a, b, torch.float32, f"{channels} x {states}")


def test_steps_are_softplus_of_any_number() -> None:
    """With a state of one value that starts at zero, one token of x = 1 makes the step itself."""
    dt = torch.cat((torch.linspace(-100, 100, 4001), torch.tensor([float("inf"), -float("inf"), 1e-30])))[None, None]
    one, channels = torch.ones(1, 1, 1), dt.shape[-1]
    zeros = torch.zeros(channels)
    weights = zeros[:, None], zeros, zeros
    out, _ = by_kernel("selective_scan", torch.ones_like(dt), dt, one, one, None, *weights, None)
    torch.testing.assert_close(out.double(), F.softplus(dt.double(), threshold=200), rtol=5e-7, atol=1e-37)


def test_damage_stays_in_later_tokens_of_its_channel() -> None:
    rows, weights = given(torch.float32, 9)
    wanted, _ = scan(rows, weights)
    rows[0][1, 5, 7] = float("nan")
    found, state = scan(rows, weights)
    damaged = found.isnan()
    assert damaged[1, 5:, 7].all() and damaged.sum() == 4 and state[1, 7].isnan().all() and state.isnan().sum() == 16
    assert torch.equal(found[~damaged], wanted[~damaged])
