"""A causal convolution over time, of each channel by itself, that keeps the last rows of what it has seen.

Suffixes: B batch, T tokens, C channels, K taps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ops.op import Case, op


@op(
    "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor? state, Tensor? gate, Tensor? out_gate, bool silu)"
    " -> (Tensor, Tensor)"
)
def causal_conv(
    x_BTC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, state_BKC: Tensor | None, gate_BTC: Tensor | None,
    out_gate_BTC: Tensor | None, silu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y[t] = out_gate[t] * act(bias + sum over j of weight[:, j] * seen[t - K + 1 + j]), with seen = x * gate, and the
    last K rows of `seen` after these tokens.

    x and the gates are [B, T, C] and may be slices of wider rows; weight is [C, K], bias [C], and `state` the K rows
    before these tokens, [B, K, C]; None: zeros. `silu`: act is SiLU, else the identity. All are in x.dtype, but weight
    and bias may be in float32. `seen` is rounded to x.dtype, and so is the convolution before `out_gate`; all else is
    computed in float32. Sizes that do not fit raise RuntimeError, but for those that PyTorch broadcasts.

    It is the short convolution of Mamba (Gu and Dao 2023, arXiv 2312.00752); with gates, that of LFM2.
    """
    tokens, taps = x_BTC.shape[1], weight_CK.shape[1]
    seen_BTC = x_BTC if gate_BTC is None else x_BTC * gate_BTC
    before = seen_BTC.new_zeros(x_BTC.shape[0], taps, x_BTC.shape[2]) if state_BKC is None else state_BKC
    all_BLC = torch.cat((before, seen_BTC), dim=1)
    wide = torch.zeros_like(seen_BTC, dtype=torch.float32) if bias_C is None else bias_C.float()
    for j in range(taps):
        wide = wide + weight_CK[:, j].float() * all_BLC[:, j + 1 : j + 1 + tokens]
    y = (F.silu(wide) if silu else wide).to(x_BTC.dtype).contiguous()
    return (y if out_gate_BTC is None else y * out_gate_BTC), all_BLC[:, tokens:].clone()


@causal_conv.fake
def _fake(x: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], weight.shape[1], x.shape[2])


_SIZES = ((2, 7, 24, 4), (1, 1, 40, 4), (3, 2, 33, 3), (1, 9, 5, 7), (2, 0, 16, 4), (1, 70, 64, 2))  # B, T, C, K


@causal_conv.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for batch, tokens, channels, taps in _SIZES:
        wide = torch.randn(batch, tokens, 3 * channels + 5, dtype=dtype, device=device)
        x, gate, out_gate = (wide[..., i * channels : (i + 1) * channels] for i in range(3))
        weight, bias = torch.randn(channels, taps, dtype=dtype, device=device), torch.randn_like(x[0, :1].sum(0))
        state = torch.randn(batch, taps, channels, dtype=dtype, device=device)
        label = f"{batch}x{tokens}x{channels} by {taps}"
        yield Case(label, (x, weight, None, None, None, None, True))
        yield Case(f"{label} on a state", (x, weight, bias, state, None, None, True))
        yield Case(f"{label} gated", (x, weight, None, state, gate, out_gate, False))
        yield Case(f"{label} exact weights", (x, weight.float(), bias.float(), state, None, None, True))
