"""RMSNorm with a gate before or after it, of parts of each row. Suffixes: B batch, T tokens, N columns."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ops.op import Case, op


@op("gated_norm(Tensor x, Tensor gate, Tensor? weight, int width, float eps, bool gate_first, bool sigmoid) -> Tensor")
def gated_norm(
    x_BTN: Tensor, gate_BTN: Tensor, weight: Tensor | None, width: int, eps: float, gate_first: bool, sigmoid: bool
) -> Tensor:
    """norm(x) * act(gate), or norm(x * act(gate)) if `gate_first`; computed in float32, rounded once to x.dtype.

    norm(y) = y / sqrt(mean(y^2) + eps) * weight over each `width` columns (RMSNormGated of Mamba-2, Dao and Gu 2024,
    arXiv 2405.21060). x and gate are [B, T, N]; the weight is [width], for all parts of a row, or [N]. No weight: no
    norm, and `width` and `eps` do not matter. `sigmoid`: act is the sigmoid, else SiLU. All are in x.dtype; gate may be
    a slice of wider rows. A `width` that does not divide N, and other sizes that do not fit, raise RuntimeError, but
    for those that PyTorch broadcasts.
    """
    x, gate = x_BTN.float(), gate_BTN.float()
    factor = gate.sigmoid() if sigmoid else F.silu(gate)
    if weight is None:
        return (x * factor).to(x_BTN.dtype)
    parts = (x * factor if gate_first else x).unflatten(-1, (-1, width))
    normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps) * weight.float().view(-1, width)
    made = normed.reshape(x.shape)  # refuses a weight of more columns, which would make more of them
    return (made if gate_first else made * factor).to(x_BTN.dtype)


@gated_norm.fake
def _fake(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


@gated_norm.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for batch, tokens, parts, width in ((2, 5, 3, 16), (1, 1, 1, 33), (3, 2, 2, 40), (2, 0, 2, 8)):
        columns = parts * width
        x = torch.randn(batch, tokens, columns, dtype=dtype, device=device)
        gate = torch.randn(batch, tokens, columns + 3, dtype=dtype, device=device)[..., 1 : columns + 1]
        for rows in {1, parts}:
            weight = torch.randn(rows * width, dtype=dtype, device=device)
            label = f"{batch}x{tokens} {parts}x{width}, {rows} of the weight"
            yield Case(label, (x, gate, weight, width, 1e-6, False, False))
            yield Case(f"{label} gate first", (x, gate, weight, width, 1e-5, True, False))
            yield Case(f"{label} sigmoid", (x, gate, weight, width, 1e-5, False, True))
        yield Case(f"{batch}x{tokens} {parts}x{width}, no norm", (x, gate, None, width, 0.0, True, False))
