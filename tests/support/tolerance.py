"""The one tolerance table: how far two ways of computing the same thing may be apart, by the dtype that they compute
in.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format

# Of the largest value of a result, element by element. float64, float32: sums of some hundred terms in another order.
# 16 bits: two roundings inside and one at the end, in units of 2**-8 (bfloat16) or 2**-11 (float16).
OF_LARGEST: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3 / 2**8, torch.float16: 3 / 2**11}
)


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype, what: str = "", times: float = 1) -> None:
    """`found` is `wanted` within `times` the tolerance of `dtype`; NaN and infinity stand at the same places, zero-size
    is equal.
    """
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    found, wanted = found.double(), wanted.double()
    finite = torch.isfinite(wanted)
    assert torch.equal(torch.isfinite(found), finite), f"{what}: finite values at other places"
    assert torch.equal(found[~finite].nan_to_num(), wanted[~finite].nan_to_num()), (
        f"{what}: NaN and infinity at other places"
    )
    if not bool(finite.any()):
        return
    allowed = times * OF_LARGEST[dtype] * max(float(wanted[finite].abs().max()), 1e-30)
    error = float((found[finite] - wanted[finite]).abs().max())
    assert error <= allowed, f"{what}: off by {error:.2e}, {allowed:.2e} is allowed"


def assert_same_buffers(found: QuantizedWeight, wanted: QuantizedWeight) -> None:
    """All tensors of both are the same bits, of the same dtypes."""
    assert found.shape == wanted.shape and found.format == wanted.format and [*found.tensors] == [*wanted.tensors]
    for name, tensor in found.tensors.items():
        other = wanted.tensors[name]
        assert tensor.dtype == other.dtype and torch.equal(tensor, other), name


# Of a group's error: two candidates so near each other may change places where squares are added up in another order.
# Measured on normal values, 325,200 groups of 6 to 64 in each dtype: 2 groups in bfloat16, none in float32 and float16.
SAME_ERROR, ONE_GROUP_IN = 1e-5, 2000


def assert_same_quantization(
    found: list[Tensor],
    wanted: list[Tensor],
    weight: Tensor,
    text: str,
    what: str = "",
    one_group_in: int = ONE_GROUP_IN,
) -> None:
    """The buffers of ops.quantize: the same bits, but for a few groups with as small an error; `text` is the format."""
    pairs = [*zip(found, wanted, strict=True)]
    for a, b in pairs:
        assert a.shape == b.shape and a.dtype == b.dtype, (
            f"{what}: {a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
        )
    if all(torch.equal(a, b) for a, b in pairs):
        return
    shape, format, groups = (weight.size(0), weight.size(1)), quant_format(text), wanted[1].numel()
    by_group = [buffer.reshape(groups, -1) for pair in pairs for buffer in pair]
    differs = torch.stack([(a != b).any(dim=1) for a, b in zip(by_group[::2], by_group[1::2], strict=True)]).any(dim=0)
    assert int(differs.sum()) <= 1 + groups // one_group_in, f"{what}: {int(differs.sum())} of {groups} groups differ"
    exact = weight.double().reshape(groups, -1)
    values = [format.dequantize(QuantizedWeight.listed(each, shape, format)).double() for each in (found, wanted)]
    errors = [(v.reshape(groups, -1) - exact).norm(dim=1) for v in values]
    allowed = SAME_ERROR * errors[1] + 1e-6 * exact.norm(dim=1)  # 1e-6: what float32 loses where a group is on its grid
    assert bool(((errors[0] - errors[1]).abs() <= allowed)[differs].all()), (
        f"{what}: groups differ, and their errors too"
    )
