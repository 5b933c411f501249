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

    d = beta (v - S' k), with S after the decay, if `delta` (gated delta rule, arXiv 2412.06464), else d = beta v (state
    space duality, arXiv 2405.21060). q and k are [B, T, G, D], v is [B, T, H, V], H is a multiple of G, and each H / G
    heads share q and k. `decay` is a logarithm, at most 0: [B, T, H], or [B, T, H, D] for each channel of the keys.
    beta is [B, T, H], skip [H] and the state [B, H, D, V]; no `state`: zeros. `normalise`: q and k become
    x / sqrt(|x|^2 + 1e-6). q is then multiplied by `scale`.

    q, k and v have one dtype and may be slices of wider rows; decay, beta, skip and the states are float32. Computed in
    float32; out [B, T, H, V] is in v.dtype. Other shapes raise ValueError.
    """
    _check_shapes(q_BTGD, k_BTGD, v_BTHV, decay, beta_BTH, skip_H, state_BHDV)
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


def refuse_other_shapes(op: str, **expected: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError that names all tensors whose shape is not the expected one beside them; None fits."""
    wrong = [
        f"{name} has shape {[*tensor.shape]} instead of {[*shape]}"
        for name, (tensor, shape) in expected.items()
        if tensor is not None and tensor.shape != shape
    ]
    if wrong:
        raise ValueError(f"{op}: {'; '.join(wrong)}")


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, skip: Tensor | None, state: Tensor | None
) -> None:
    """Refuse what would be broadcast, or tokens beyond those of v, which would be ignored."""
    (batch, tokens, heads, columns), (groups, width) = v.shape, k.shape[2:]
    if not groups or heads % groups:
        raise ValueError(f"linear_attention: {heads} heads of v cannot share {groups} heads of k")
    of_keys, of_tokens = (batch, tokens, groups, width), (batch, tokens, heads)
    refuse_other_shapes(
        "linear_attention", q=(q, of_keys), k=(k, of_keys), beta=(beta, of_tokens), skip=(skip, (heads,)),
        decay=(decay, (*of_tokens, width) if decay.dim() == 4 else of_tokens),
        state=(state, (batch, heads, width, columns)),
    )  # fmt: skip


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


_CHUNK, _CHUNK_BY_CHANNEL = 64, 16  # tokens; by channel, decays between them are chunk^2 D values for each head


@linear_attention.implement("torch")
def _by_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, skip: Tensor | None, state: Tensor | None,
    scale: float, normalise: bool, delta: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Products over chunks of tokens, between which the state is carried (arXiv 2412.06464, section 3.3)."""
    _check_shapes(q, k, v, decay, beta, skip, state)
    by_channel = decay.dim() == 4
    chunk = _CHUNK_BY_CHANNEL if by_channel else _CHUNK
    (batch, tokens, heads, width), out = v.shape, v.new_empty(v.shape)
    if state is None:
        state = v.new_zeros(batch, heads, k.shape[3], width, dtype=torch.float32)
    for first in range(0, tokens, chunk):
        of_chunk = slice(first, first + chunk)
        q_BHTD, k_BHTD = (_of_heads(x[:, of_chunk], heads, normalise) for x in (q, k))
        q_BHTD, v_BHTV = q_BHTD * scale, v[:, of_chunk].transpose(1, 2).float()
        g_BHTD = (decay if by_channel else decay[..., None])[:, of_chunk].transpose(1, 2)
        beta_BHT1 = beta[:, of_chunk].transpose(1, 2)[..., None]
        grown, apart = g_BHTD.cumsum(2).exp(), _decays_between(g_BHTD)
        d = v_BHTV * beta_BHT1
        if delta:
            d = d - (k_BHTD * grown) @ state * beta_BHT1
            met = _products(k_BHTD, k_BHTD, apart) * beta_BHT1
            d = torch.linalg.solve_triangular(met, d, upper=False, unitriangular=True)
        y = (q_BHTD * grown) @ state + _products(q_BHTD, k_BHTD, apart) @ d
        if skip is not None:
            y = y + skip[:, None, None] * v_BHTV
        out[:, of_chunk] = y.transpose(1, 2)
        state = state * grown[:, :, -1, :, None] + (k_BHTD * apart[:, :, -1]).transpose(2, 3) @ d
    return out, state.contiguous()


def _of_heads(x_BTGD: Tensor, heads: int, normalise: bool) -> Tensor:
    """Queries or keys of each head, [B, H, T, D], in float32."""
    x = x_BTGD.float()
    if normalise:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
    return x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2)


def _decays_between(g_BHTD: Tensor) -> Tensor:
    """exp of the sum of g over the tokens after s up to t, [B, H, t, s, D]; zero where s is later than t.

    Each sum is added up by itself: a difference of two longer sums would lose small decays beside large ones, and is
    NaN after a decay to zero (-inf).
    """
    tokens = g_BHTD.shape[2]
    after = torch.ones(tokens, tokens, dtype=torch.bool, device=g_BHTD.device).tril(-1)[..., None]
    sums = torch.where(after, g_BHTD[:, :, :, None], 0.0).cumsum(2)
    return sums.masked_fill_(after.transpose(0, 1), float("-inf")).exp_()


def _products(x_BHTD: Tensor, k_BHTD: Tensor, apart_BHTSD: Tensor) -> Tensor:
    """Rows x times the decayed keys up to their own token, [B, H, T, T]."""
    if apart_BHTSD.shape[-1] == 1:
        return (x_BHTD @ k_BHTD.transpose(2, 3)) * apart_BHTSD[..., 0]
    return (x_BHTD[:, :, :, None] * (k_BHTD[:, :, None] * apart_BHTSD)).sum(-1)


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
