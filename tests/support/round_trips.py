"""Weights for the number formats, and what a round trip makes of them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from infuse.quant.format import QuantFormat


def normal(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def round_trip(weight: torch.Tensor, format: QuantFormat, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return format.dequantize(format.quantize(weight), dtype)


def relative_error(weight: torch.Tensor, result: torch.Tensor) -> float:
    return ((weight.float() - result.float()).norm() / weight.float().norm()).item()


@st.composite
def weights(draw: st.DrawFn, length: int) -> torch.Tensor:
    """A few rows of two groups: normal values, hand-picked ones (zeros, ties, outliers, one sign, tiny, huge) between
    them.
    """
    rows = draw(st.integers(1, 3))
    weight = normal(rows, 2 * length, draw(st.integers(0, 2**31)))
    if draw(st.booleans()):
        weight = weight.abs() + draw(st.sampled_from([0.0, 0.5, 100.0]))
    picked = st.one_of(st.floats(-1e4, 1e4, width=32), st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e-30, -1e-42, 1e30]))
    for index, value in draw(st.dictionaries(st.integers(0, weight.numel() - 1), picked, max_size=4)).items():
        weight.view(-1)[index] = value
    return weight * draw(st.sampled_from([1.0, -1.0, 0.02, 1e-20, 1e-39]))
