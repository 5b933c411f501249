"""The one tolerance table: how far two ways of computing the same thing may be apart, by the dtype that they compute in."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

# Of the largest value of a result, element by element. float64, float32: sums of some hundred terms in another order.
# 16 bits: two roundings inside and one at the end, in units of 2**-8 (bfloat16) or 2**-11 (float16).
OF_LARGEST: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3 / 2**8, torch.float16: 3 / 2**11}
)


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype, what: str = "") -> None:
    """`found` is `wanted` within the tolerance of `dtype`; NaN and infinity stand at the same places, zero-size is equal."""
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    found, wanted = found.double(), wanted.double()
    finite = torch.isfinite(wanted)
    assert torch.equal(torch.isfinite(found), finite), f"{what}: finite values at other places"
    assert torch.equal(found[~finite].nan_to_num(), wanted[~finite].nan_to_num()), f"{what}: NaN and infinity at other places"
    if not bool(finite.any()):
        return
    allowed = OF_LARGEST[dtype] * max(float(wanted[finite].abs().max()), 1e-30)
    error = float((found[finite] - wanted[finite]).abs().max())
    assert error <= allowed, f"{what}: off by {error:.2e}, {allowed:.2e} is allowed"
