"""Selective scan (Mamba-1, Gu and Dao 2023, arXiv 2312.00752): each channel has a state of N values of its own, which
decays at rates that its tokens choose.

Suffixes: B batch, T tokens, C channels, N states of a channel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ops.op import Case, op
from infuse.ops.recurrence import refuse_other_shapes


@op(
    "selective_scan(Tensor x, Tensor dt, Tensor keys, Tensor queries, Tensor? gate, Tensor a_log, Tensor dt_bias,"
    " Tensor skip, Tensor? state) -> (Tensor, Tensor)"
)
def selective_scan(
    x_BTC: Tensor, dt_BTC: Tensor, keys_BTN: Tensor, queries_BTN: Tensor, gate_BTC: Tensor | None, a_log_CN: Tensor,
    dt_bias_C: Tensor, skip_C: Tensor, state_BCN: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S = exp(-exp(a_log) step) S + step x keys; y = (S queries + skip x) silu(gate); and the states after all tokens.

    step = softplus(dt + dt_bias); Mamba (arXiv 2312.00752, algorithm 2) calls keys B, queries C, skip D and the gate z.
    x, dt and gate are [B, T, C], keys and queries [B, T, N], all in x.dtype, and may be slices of wider rows; a_log is
    [C, N], dt_bias and skip [C], in x.dtype or float32. The state [B, C, N] is float32; None: zeros. Computed in
    float32; y [B, T, C] is in x.dtype. Other shapes raise ValueError.
    """
    _check_shapes(x_BTC, dt_BTC, keys_BTN, queries_BTN, gate_BTC, a_log_CN, dt_bias_C, skip_C, state_BCN)
    x, keys, queries = x_BTC.float(), keys_BTN.float(), queries_BTN.float()
    steps, rates = F.softplus(dt_BTC.float() + dt_bias_C.float()), -a_log_CN.float().exp()
    batch, _, channels = x.shape
    state = x.new_zeros(batch, channels, keys.shape[-1]) if state_BCN is None else state_BCN
    outs = []
    for t in range(x.shape[1]):
        step = steps[:, t, :, None]
        state = (rates * step).exp() * state + (step * x[:, t, :, None]) * keys[:, t, None]
        outs.append((state * queries[:, t, None]).sum(-1))
    y = (torch.stack(outs, dim=1) if outs else x) + skip_C.float() * x
    y = y if gate_BTC is None else y * F.silu(gate_BTC.float())
    return y.to(x_BTC.dtype).contiguous(), state.clone() if state is state_BCN else state.contiguous()


def _check_shapes(
    x: Tensor, dt: Tensor, keys: Tensor, queries: Tensor, gate: Tensor | None, a_log: Tensor, dt_bias: Tensor,
    skip: Tensor, state: Tensor | None,
) -> None:  # fmt: skip
    """Refuse what would be broadcast, or tokens beyond those of x, which would be ignored."""
    (batch, tokens, channels), states = x.shape, keys.shape[-1]
    narrow = (batch, tokens, states)
    refuse_other_shapes(
        "selective_scan", dt=(dt, x.shape), gate=(gate, x.shape), keys=(keys, narrow), queries=(queries, narrow),
        a_log=(a_log, (channels, states)), dt_bias=(dt_bias, (channels,)), skip=(skip, (channels,)),
        state=(state, (batch, channels, states)),
    )  # fmt: skip


def are_alike(
    x: Tensor, dt: Tensor, keys: Tensor, queries: Tensor, gate: Tensor | None, a_log: Tensor, dt_bias: Tensor,
    skip: Tensor, state: Tensor | None,
) -> bool:  # fmt: skip
    """Whether all shapes are those of the contract, what tokens have is in x.dtype, and the state in float32."""
    (batch, tokens, channels), states = x.shape, keys.shape[-1]
    wide, narrow = (x, dt) if gate is None else (x, dt, gate), (keys, queries)
    alike = all(each.dtype is x.dtype for each in (*wide, *narrow)) and all(each.shape == x.shape for each in wide)
    alike = alike and all(each.shape == (batch, tokens, states) for each in narrow)
    alike = alike and a_log.shape == (channels, states) and dt_bias.shape == skip.shape == (channels,)
    return alike and (state is None or (state.shape == (batch, channels, states) and state.dtype is torch.float32))


@selective_scan.implement("torch")
def _in_place(
    x: Tensor, dt: Tensor, keys: Tensor, queries: Tensor, gate: Tensor | None, a_log: Tensor, dt_bias: Tensor,
    skip: Tensor, state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Token by token in the memory of two states."""
    _check_shapes(x, dt, keys, queries, gate, a_log, dt_bias, skip, state)
    (batch, tokens, channels), states = x.shape, keys.shape[-1]
    steps, rates = F.softplus(dt.float() + dt_bias.float()), -a_log.float().exp()
    given, keys, queries = steps * x.float(), keys.float(), queries.float()
    now = x.new_zeros(batch, channels, states, dtype=torch.float32) if state is None else state.clone()
    decay, y = torch.empty_like(now), torch.empty_like(given)
    for t in range(tokens):
        torch.mul(steps[:, t, :, None], rates, out=decay)
        now.mul_(decay.exp_()).addcmul_(given[:, t, :, None], keys[:, t, None])
        y[:, t] = (now @ queries[:, t, :, None])[..., 0]
    y.addcmul_(x.float(), skip.float())
    return (y if gate is None else y.mul_(F.silu(gate.float()))).to(x.dtype), now


@selective_scan.fake
def _fake(x: Tensor, dt: Tensor, keys: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch, channels = x.shape[0], x.shape[2]
    return x.new_empty(x.shape), x.new_empty(batch, channels, keys.shape[-1], dtype=torch.float32)


# B, T, C, N
_SIZES = ((2, 7, 24, 16), (1, 1, 40, 16), (3, 2, 33, 5), (1, 70, 150, 16), (1, 3, 20, 33), (2, 0, 16, 4))


@selective_scan.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for batch, tokens, channels, states in _SIZES:
        wide = torch.randn(batch, tokens, 3 * channels + 2 * states + 3, dtype=dtype, device=device)[..., 3:]
        x, dt, gate, keys, queries = wide.split((channels,) * 3 + (states,) * 2, dim=-1)
        a_log = torch.arange(1, states + 1, dtype=torch.float32, device=device).log().expand(channels, -1).to(dtype)
        a_log, skip = a_log.contiguous(), torch.randn(channels, dtype=dtype, device=device)
        dt_bias = torch.randn(channels, dtype=dtype, device=device) - 2
        state = torch.randn(batch, channels, states, device=device)
        label = f"{batch}x{tokens}x{channels} by {states}"
        yield Case(label, (x, dt, keys, queries, None, a_log, dt_bias, skip, None))
        yield Case(f"{label} gated, on a state", (x, dt, keys, queries, gate, a_log, dt_bias, skip, state))
        exact = (a_log.float(), dt_bias.float(), skip.float())
        yield Case(f"{label} exact weights", (x, dt, keys, queries, gate, *exact, state))
