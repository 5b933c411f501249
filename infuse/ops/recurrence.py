"""Linear attention: a state [D, V] for each head instead of keys and values, which each token decays and changes.

Gated delta rule (Yang et al. 2024, arXiv 2412.06464), the same with a decay for each channel (Kimi Linear), and state
space duality (Dao and Gu 2024, Mamba-2: k is B, q is C, v is x, beta is dt). Suffixes: B batch, T tokens, H heads,
G heads of queries and keys, D and V widths of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from infuse.ops.op import Case, op

_NORM_EPS = 1e-6


@op(
    "linear_attention(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor? skip, Tensor? state,"
    " float scale, bool normalise, bool delta) -> (Tensor, Tensor)"
)
def linear_attention(
    q_BTGD: Tensor, k_BTGD: Tensor, v_BTHV: Tensor, decay: Tensor, beta_BTH: Tensor, skip_H: Tensor | None,
    state_BHDV: Tensor | None, scale: float, normalise: bool, delta: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S = exp(decay) S + k d', out = S' q + skip v, for each head and token; and the states S after all tokens.

    d = beta (v - S' k), with S after the decay, if `delta`, else beta v. `decay` [B, T, H], or [B, T, H, D] for each
    channel of the keys, beta, skip and the states are float32; no `state`: zeros. Groups of heads share q and k.
    `normalise`: q and k become x / sqrt(|x|^2 + 1e-6). q is then multiplied by `scale`. Computed in float32, out
    [B, T, H, V] is in v.dtype. q, k and v may be slices of wider rows.
    """
    q, k, v, decay, state = _in_float(q_BTGD, k_BTGD, v_BTHV, decay, state_BHDV, scale, normalise)
    outs = []
    for t in range(v.shape[1]):
        state = state * decay[:, t, :, :, None].exp()
        read = v[:, t] - torch.einsum("bhdv,bhd->bhv", state, k[:, t]) if delta else v[:, t]
        state = state + k[:, t, :, :, None] * (read * beta_BTH[:, t, :, None])[:, :, None]
        outs.append(torch.einsum("bhdv,bhd->bhv", state, q[:, t]))
    out = torch.stack(outs, dim=1) if outs else v
    if skip_H is not None:
        out = out + skip_H[:, None] * v
    return out.to(v_BTHV.dtype).contiguous(), state.contiguous()


def _in_float(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor | None, scale: float, normalise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q and k of each head, v, decay for each channel, and the state, in float32."""
    batch, _, heads, width = v.shape
    each = heads // k.shape[2]
    q, k = (x.float().repeat_interleave(each, dim=2) for x in (q, k))
    if normalise:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS) for x in (q, k))
    decay = decay if decay.dim() == 4 else decay[..., None].expand(k.shape)
    if state is None:
        state = v.new_zeros(batch, heads, k.shape[-1], width, dtype=torch.float32)
    return q * scale, k, v.float(), decay, state


_CHUNK, _CHUNK_BY_CHANNEL = 64, 16  # tokens


@linear_attention.implement("torch")
def _by_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, skip: Tensor | None, state: Tensor | None,
    scale: float, normalise: bool, delta: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Products over chunks of tokens, between which the state is carried (arXiv 2412.06464, section 3.3)."""
    chunk, dtype = (_CHUNK_BY_CHANNEL if decay.dim() == 4 else _CHUNK), v.dtype
    by_channel = decay.dim() == 4
    q, k, v, decay, state = _in_float(q, k, v, decay, state, scale, normalise)
    outs = [v[:, :0]]
    for first in range(0, v.shape[1], chunk):
        of_chunk = slice(first, first + chunk)
        q_BHTD, k_BHTD, v_BHTV, g_BHTD = (x[:, of_chunk].transpose(1, 2) for x in (q, k, v, decay))
        beta_BHT1 = beta[:, of_chunk].transpose(1, 2)[..., None]
        sums = g_BHTD.cumsum(2)
        met, seen = _between(q_BHTD, k_BHTD, sums, by_channel)
        grown = sums.exp()
        d = v_BHTV * beta_BHT1
        if delta:
            d = d - (k_BHTD * grown) @ state * beta_BHT1
            d = torch.linalg.solve_triangular(met * beta_BHT1, d, upper=False, unitriangular=True)
        outs.append(((q_BHTD * grown) @ state + seen @ d).transpose(1, 2))
        last = sums[:, :, -1:]
        state = state * last.exp().transpose(2, 3) + (k_BHTD * (last - sums).exp()).transpose(2, 3) @ d
    out = torch.cat(outs, dim=1)
    if skip is not None:
        out = out + skip[:, None] * v
    return out.to(dtype).contiguous(), state.contiguous()


def _between(q: Tensor, k: Tensor, sums: Tensor, by_channel: bool) -> tuple[Tensor, Tensor]:
    """Keys times earlier keys, and queries times keys up to their own, [B, H, T, T], with the decay between them."""
    tokens = sums.shape[2]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=sums.device).triu(1)
    if not by_channel:
        apart = (sums[..., :1] - sums[..., 0][:, :, None]).masked_fill(later, float("-inf")).exp()
        k_BHDT = k.transpose(2, 3)
        return (k @ k_BHDT) * apart, (q @ k_BHDT) * apart
    apart = sums[:, :, :, None] - sums[:, :, None]
    keys = k[:, :, None] * apart.masked_fill(later[..., None], float("-inf")).exp()
    return (k[:, :, :, None] * keys).sum(-1), (q[:, :, :, None] * keys).sum(-1)


@linear_attention.fake
def _fake(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch, heads, width = v.shape[0], *v.shape[2:]
    return v.new_empty(v.shape), decay.new_empty(batch, heads, k.shape[3], width)


# B, T, G, H, D, V
_SIZES = ((2, 7, 2, 4, 16, 24), (1, 1, 4, 4, 32, 16), (1, 70, 1, 3, 12, 20), (3, 2, 1, 2, 40, 33), (1, 0, 1, 1, 8, 8))


@linear_attention.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for batch, tokens, groups, heads, width, columns in _SIZES:
        rows = torch.randn(batch, tokens, 2 * groups * width + heads * columns, dtype=dtype, device=device)
        q, k, v = rows.split((groups * width, groups * width, heads * columns), dim=-1)
        q, k, v = (x.unflatten(-1, (count, -1)) if count else x for x, count in ((q, groups), (k, groups), (v, heads)))
        decay = -torch.rand(batch, tokens, heads, device=device) * 3
        by_channel = -torch.rand(batch, tokens, heads, width, device=device) * 3
        beta, skip = torch.rand(batch, tokens, heads, device=device), torch.randn(heads, device=device)
        state = torch.randn(batch, heads, width, columns, device=device)
        label, scale = f"{batch}x{tokens}x{heads}/{groups} {width}x{columns}", width**-0.5
        yield Case(f"{label} delta rule", (q, k, v, decay, beta, None, None, scale, True, True))
        yield Case(f"{label} delta rule on a state", (q, k, v, decay, beta, None, state, scale, True, True))
        yield Case(f"{label} by channel", (q, k, v, by_channel, beta, None, state, scale, True, True))
        yield Case(f"{label} state space", (q, k, v, decay, beta, skip, state, scale, False, False))
