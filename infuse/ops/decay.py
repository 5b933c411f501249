"""How much the state of each head decays at a token, and how much of the token it takes up.

Suffixes: B batch, T tokens, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ops.op import Case, op
from infuse.ops.recurrence import refuse_other_shapes


@op(
    "decay(Tensor step, Tensor? beta, Tensor a_log, Tensor dt_bias, float least, float most, float factor)"
    " -> (Tensor, Tensor)"
)
def decay(
    step_BTH: Tensor, beta_BTH: Tensor | None, a_log_H: Tensor, dt_bias_H: Tensor, least: float, most: float,
    factor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-exp(a_log) * dt with dt = softplus(step + dt_bias) clamped to [least, most]; and factor * sigmoid(beta), or dt.

    These are `decay` and `beta` of linear_attention, for the gated delta rule (arXiv 2412.06464) and, without `beta`,
    for state spaces (arXiv 2405.21060). step and beta are [B, T, H], of one dtype, and may be slices of wider rows;
    a_log and dt_bias are [H]. All is computed in float32, in which both results are, [B, T, H]. Other shapes raise
    ValueError.
    """
    _check_shapes(step_BTH, beta_BTH, a_log_H, dt_bias_H)
    dt = F.softplus(step_BTH.float() + dt_bias_H.float())
    if (least, most) != (0.0, math.inf):
        dt = dt.clamp(least, most)
    taken = dt.clone() if beta_BTH is None else beta_BTH.float().sigmoid() * factor
    return (-a_log_H.float().exp() * dt).contiguous(), taken.contiguous()


def _check_shapes(step: Tensor, beta: Tensor | None, a_log: Tensor, dt_bias: Tensor) -> None:
    heads = step.shape[-1:]
    refuse_other_shapes("decay", beta=(beta, step.shape), a_log=(a_log, heads), dt_bias=(dt_bias, heads))


@decay.fake
def _fake(step: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return step.new_empty(step.shape, dtype=torch.float32), step.new_empty(step.shape, dtype=torch.float32)


@decay.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for batch, tokens, heads in ((2, 5, 3), (1, 1, 32), (3, 2, 48), (2, 0, 4), (1, 70, 1)):
        wide = 4 * torch.randn(batch, tokens, 2 * heads + 3, dtype=dtype, device=device)
        step, beta = wide[..., 1 : heads + 1], wide[..., heads + 2 : 2 * heads + 2]
        for exact in (True, False):
            of_weights = torch.float32 if exact else dtype
            a_log, dt_bias = (torch.randn(heads, dtype=of_weights, device=device) for _ in range(2))
            label = f"{batch}x{tokens}x{heads}{', exact weights' if exact else ''}"
            yield Case(f"{label}, delta rule", (step, beta, a_log, dt_bias, 0.0, math.inf, 1.0))
            yield Case(f"{label}, delta rule up to 2", (step, beta, a_log, dt_bias, 0.0, math.inf, 2.0))
            yield Case(f"{label}, state space", (step, None, a_log, dt_bias, 0.0, math.inf, 1.0))
            yield Case(f"{label}, state space with limits", (step, None, a_log, dt_bias, 0.3, 2.0, 1.0))
