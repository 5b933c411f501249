"""fp8 and fp6: their codes one by one, how values are rounded to them, what a value may lose, how far from the best
scale they are.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infuse.quant.floating import ERRORS, FloatFormat, pack_fp6, unpack_fp6
from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format
from tests.support.round_trips import normal, relative_error, round_trip, weights

NAMES = ("fp8", "fp6")
# exponent bits, mantissa bits, bias, largest value, as the formats' definitions have them (fp8: OCP FP8 E4M3; fp6: OCP
# MX FP6 E3M2)
DEFINITIONS = {"fp8": (4, 3, 7, 448.0), "fp6": (3, 2, 3, 28.0)}


def value_of(code: int, name: str) -> float:
    """The value of a code by the definition of its format; nan where it is none."""
    exponent_bits, mantissa_bits, bias, largest = DEFINITIONS[name]
    sign, exponent = code >> (exponent_bits + mantissa_bits), code >> mantissa_bits & (2**exponent_bits - 1)
    part = (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
    value = 2.0 ** (1 - bias) * part if exponent == 0 else 2.0 ** (exponent - bias) * (1 + part)
    return float("nan") if value > largest else -value if sign else value


def grid(name: str) -> torch.Tensor:
    """All values of the format, in order; zero once."""
    values = {value_of(code, name) for code in range(2 ** int(name[2:]))}
    return torch.tensor(sorted(value for value in values if value == value))


def held(codes: torch.Tensor, name: str, scale: float = 1.0) -> QuantizedWeight:
    """One row of codes with one scale, laid out by hand."""
    data = codes[None] if name == "fp8" else pack_fp6(codes[None])
    scales = torch.full((1, 1), scale).bfloat16()
    return QuantizedWeight.listed([data, scales], (1, len(codes)), quant_format(f"{name}:row"))


def code_at(quantized: QuantizedWeight, row: int, column: int) -> int:
    """The code of one weight, read from the bytes as the layout says."""
    data = quantized.tensors["data"][row].tolist()
    if quantized.format.name == "fp8":
        return data[column]
    word = int.from_bytes(bytes(data[column // 4 * 3 : column // 4 * 3 + 3]), "little")
    return word >> 6 * (column % 4) & 63


@pytest.mark.parametrize("name", NAMES)
def test_every_code_has_the_value_of_its_definition(name: str) -> None:
    codes = torch.arange(2 ** int(name[2:])).to(torch.uint8)
    values = torch.tensor([value_of(int(code), name) for code in codes])
    for scale in (1.0, 0.375, 2.0**-126):
        found = quant_format(f"{name}:row").dequantize(held(codes, name, scale))[0]
        assert torch.equal(found.nan_to_num(nan=-1.0), (values * scale).nan_to_num(nan=-1.0))
    assert int(values.isnan().sum()) == (2 if name == "fp8" else 0)


@pytest.mark.parametrize("name", NAMES)
def test_values_on_the_grid_are_exact_and_their_codes_are_those_of_the_definition(name: str) -> None:
    values = grid(name)
    values = torch.nn.functional.pad(values, (0, -len(values) % 4))
    for step in (1.0, 0.0078125, 3.0):
        quantized = quant_format(f"{name}:row").quantize(values[None] * step)
        assert torch.equal(quantized.format.dequantize(quantized), values[None] * step)
        for column, value in enumerate(values.tolist()):
            assert value_of(code_at(quantized, 0, column), name) * float(quantized.tensors["scale"]) == value * step
    assert code_at(quantized, 0, len(values) - 1) == 0  # zero is never -0
    assert not quant_format(f"{name}:row").quantize(torch.full((1, 4), -0.0)).tensors["data"].any()


@pytest.mark.parametrize("name", NAMES)
def test_rounding_is_to_the_nearest_value_and_of_two_to_the_even_code(name: str) -> None:
    """Every midpoint of the grid and its neighbours, subnormal ones too, at a scale of 1."""
    values = grid(name)[len(grid(name)) // 2 :]  # from zero on
    middles = (values[1:] + values[:-1]) / 2
    even = torch.where(
        torch.arange(len(middles)) % 2 == 0, values[:-1], values[1:]
    )  # codes count the values from zero on
    for sign in (1.0, -1.0):
        for steps, wanted in ((middles * (1 - 1e-6), values[:-1]), (middles * (1 + 1e-6), values[1:]), (middles, even)):
            assert torch.equal(rounded(steps * sign, name), wanted * sign)


def rounded(steps: torch.Tensor, name: str) -> torch.Tensor:
    """`steps` on the grid of scale 1, through the format: many exact values beside them let no other scale be the best
    one.
    """
    anchors = grid(name).repeat(64)
    row = torch.cat((steps, anchors))
    row = torch.nn.functional.pad(row, (0, -len(row) % 4))
    quantized = quant_format(f"{name}:row").quantize(row[None])
    assert float(quantized.tensors["scale"]) == 1.0
    return quantized.format.dequantize(quantized)[0, : len(steps)]


def test_every_byte_packs_exactly() -> None:
    codes = torch.cartesian_prod(torch.arange(64), torch.arange(64)).to(torch.uint8)
    for order in ((0, 1, 0, 1), (1, 0, 1, 0), (0, 0, 1, 1), (1, 1, 0, 0)):
        four = codes[:, list(order)]
        packed = pack_fp6(four)
        assert packed.dtype == torch.uint8 and packed.shape == (4096, 3)
        assert torch.equal(unpack_fp6(packed), four)
    assert pack_fp6(torch.tensor([[0b111111, 0b000001, 0b100000, 0b000011]]).to(torch.uint8)).tolist() == [
        [0x7F, 0x00, 0x0E]
    ]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_value_comes_back_within_its_bound(name: str, data: st.DataObject) -> None:
    """Within a part of itself, or within half the smallest step."""
    weight = data.draw(weights(8))
    quantized = quant_format(f"{name}:8").quantize(weight)
    _, mantissa, bias, _ = DEFINITIONS[name]
    half_smallest = quantized.tensors["scale"].float().repeat_interleave(8, dim=1) * 2.0 ** (1 - bias - mantissa) / 2
    off = (weight - quantized.format.dequantize(quantized)).abs()
    assert (off <= torch.maximum(weight.abs() / 2 ** (mantissa + 1), half_smallest) * (1 + 1e-6)).all()


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_layout_and_rounding_agree_with_the_definition(data: st.DataObject) -> None:
    """Each value's code is that of the nearest value of the whole grid, searched here among all of them."""
    name = data.draw(st.sampled_from(NAMES))
    weight = data.draw(weights(4))
    quantized = quant_format(f"{name}:4").quantize(weight)
    values = grid(name).double()
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            scale = float(quantized.tensors["scale"][row, column // 4])
            found = value_of(code_at(quantized, row, column), name)
            off = (values - float(weight[row, column]) / scale).abs()
            assert abs(found - float(weight[row, column]) / scale) <= float(off.min()) * (1 + 1e-6) + 1e-9


def best_possible_error(weight: torch.Tensor, name: str) -> float:
    """By brute force: each row has the best of 600 scales, over more than an octave on both sides, each value its
    nearest one.
    """
    values, largest = grid(name), weight.abs().amax(-1, keepdim=True)
    middles = (values[1:] + values[:-1]) / 2
    best = torch.full_like(largest, torch.inf)
    for part in torch.linspace(-1.2, 1.2, 600).tolist():
        scale = largest / float(values[-1]) * 2.0**part
        nearest = values[torch.bucketize(weight / scale, middles)] * scale
        best = torch.minimum(best, (weight - nearest).square().sum(-1, keepdim=True))
    return (best.sum().sqrt() / weight.norm()).item()


@pytest.mark.parametrize("length", [32, 64, 128, 256, 512, 4096])
@pytest.mark.parametrize("name", NAMES)
def test_normal_weights_lose_at_most_5_percent_more_than_at_the_best_scale(name: str, length: int) -> None:
    weight = normal(2**15 // length, length, seed=length)
    error = relative_error(weight, round_trip(weight, quant_format(f"{name}:{length}")))
    assert error <= 1.05 * best_possible_error(weight, name)


@pytest.mark.parametrize("name", NAMES)
def test_the_defaults(name: str) -> None:
    format = quant_format(name)
    assert isinstance(format, FloatFormat) and format.group_size == (None if name == "fp8" else 64)
    assert format.nbytes(10, 256) == 10 * (256 + 2 if name == "fp8" else 192 + 4 * 2)
    assert list(ERRORS[name]) == sorted(ERRORS[name])
