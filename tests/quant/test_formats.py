"""The number formats: what a round trip may lose, what it may not, what is refused, and how far from the best possible
grid a format is.
"""

import pickle

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from infuse.ground.errors import ConfigError
from infuse.quant.grouped import ERROR_LENGTHS
from infuse.quant.integer import pack_integers, unpack_integers
from infuse.quant.parse import quant_format
from tests.support.round_trips import normal, relative_error, round_trip, weights

INTEGERS = ("int8:{}", "int8:{}:asymmetric", "int4:{}", "int4:{}:asymmetric")
SHORT = ("int3:{}", "int3:{}:asymmetric", "int2:{}", "int2:{}:asymmetric")
FULL_RANGE = (*INTEGERS, *SHORT, "fp8:{}", "fp6:{}")
OFFSETS = ("int4:{}:offset", "int4:{}:offset:f32", "int3:{}:offset", "int2:{}:offset:f16")
KINDS = (*FULL_RANGE, "int8:{}:f16", "int4:{}:asymmetric:f16", *OFFSETS)
UNCUT = ("int8:{}", "int8:{}:asymmetric")
TEXTS = [kind.format(size) for kind in KINDS for size in (32, 64, 128, "row", "groups=2")]


# ---- texts ----


@pytest.mark.parametrize("text", TEXTS)
def test_text_reads_back(text: str) -> None:
    format = quant_format(text)
    assert quant_format(str(format)) == format
    assert pickle.loads(pickle.dumps(format)) == format and hash(quant_format(text)) == hash(format)


@pytest.mark.parametrize(("text", "canonical"), [
    ("int8", "int8"), ("int8:64", "int8"), ("INT8:symmetric", "int8"), ("int8:128", "int8:128"),
    ("int8:row", "int8:row"), ("int4", "int4:64"), ("int4:128:symmetric", "int4:128"),
    ("int4:asymmetric", "int4:64:asymmetric"), ("int8:groups=2", "int8:groups=2"), ("fp8", "fp8"), ("fp8:row", "fp8"),
    ("FP8:128", "fp8:128"), ("fp6", "fp6"), ("fp6:64:symmetric", "fp6"), ("fp6:row", "fp6:row"),
    ("fp6:groups=2", "fp6:groups=2"), ("int8:asymmetric", "int8:asymmetric"),
    (" int4:groups=8:asymmetric ", "int4:groups=8:asymmetric"), ("int3", "int3:64"), ("int2:row:f32", "int2:row:f32"),
])  # fmt: skip
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(quant_format(text)) == canonical


@pytest.mark.parametrize("text", [
    "int5", "fp", "fp5", "", "int8:", "int8:big", "int8:64:64", "int8:64:lopsided", "int8:asymmetric:64", "int8:-4",
    "int4:groups=", 8, None,
])  # fmt: skip
def test_unknown_text_lists_what_is_possible(text: object) -> None:
    with pytest.raises(ConfigError, match="possible: .*int8:GROUP.*int4"):
        quant_format(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("int8:0", "group size is 0"),
        ("int8:groups=0", "number of groups is 0"),
        ("int4:5", "even, not 5"),
        ("int3:12", "a multiple of 8, not 12"),
        ("int2:6", "a multiple of 4, not 6"),
        ("int3:a8", "int3 has no :a8"),
        ("int8:64:offset", "possible: int4, int3, int2 with :offset"),
        ("fp8:64:offset", "possible: fp8, or int4, int3, int2 with :offset"),
    ],
)
def test_impossible_numbers(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        quant_format(text)


# ---- refusals ----


@pytest.mark.parametrize(
    ("text", "columns", "reason"),
    [
        ("int8:128", 4544, r"groups of 128 do not divide 4544 inputs \(64 or 32 would\)"),
        ("int4", 70, r"groups of 64 do not divide 70 inputs \(row would\)"),
        ("int8:groups=3", 64, "64 inputs do not divide into 3 groups"),
        ("int4:row", 33, "33 inputs are not even"),
        ("int4:groups=2", 6, "6 inputs in 2 groups are 3 for each, not even"),
        ("int3:row", 20, "eight values share three bytes, and 20 inputs are not a multiple of 8"),
        ("int2:row", 6, "four values share a byte, and 6 inputs are not a multiple of 4"),
        ("fp8:128", 320, r"groups of 128 do not divide 320 inputs \(64 or 32 would\)"),
        ("fp6:row", 66, "66 inputs are not a multiple of 4"),
        ("fp6:groups=2", 12, "12 inputs in 2 groups are 6 for each"),
    ],
)
def test_widths_that_do_not_fit(text: str, columns: int, reason: str) -> None:
    format = quant_format(text)
    with pytest.raises(ConfigError, match=reason):
        format.quantize(normal(2, columns))
    with pytest.raises(ConfigError, match=reason):
        format.nbytes(2, columns)
    assert str(format) in (format.fits(columns) or "")
    assert format.fits(128 * 12) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
@pytest.mark.parametrize("kind", KINDS)
def test_values_without_a_code(kind: str, value: float) -> None:
    weight = normal(3000, 64)  # more than one block
    weight[2900, 7] = value
    with pytest.raises(ConfigError, match=r"\[3000, 64\] holds .* at \[2900, 7\]"):
        quant_format(kind.format(64)).quantize(weight)


@pytest.mark.parametrize("weight", [torch.zeros(64), torch.zeros(2, 2, 64), torch.zeros(2, 64, dtype=torch.int8)])
def test_only_floating_matrices(weight: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="floating matrices"):
        quant_format("int8").quantize(weight)


# ---- what a round trip keeps ----


@pytest.mark.parametrize("kind", UNCUT)
@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_uncut_formats_are_off_by_half_a_step_at_most(kind: str, data: st.DataObject) -> None:
    weight = data.draw(weights(8))
    quantized = quant_format(kind.format(8)).quantize(weight)
    half_step = quantized.tensors["scale"].float().repeat_interleave(8, dim=1) / 2
    off = (weight - quantized.format.dequantize(quantized)).abs()
    assert (off <= half_step * (1 + 1e-4)).all()  # 1e-4: 255 steps in float32 are themselves rounded


@pytest.mark.parametrize("kind", FULL_RANGE)
@given(data=st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_second_quantization_changes_nothing(kind: str, data: st.DataObject) -> None:
    format = quant_format(kind.format(8))
    once = round_trip(data.draw(weights(8)), format)
    assume(once.abs().max() < 8e37)
    assert torch.equal(round_trip(once, format), once)


@pytest.mark.parametrize("kind", INTEGERS)
def test_values_on_the_grid_are_exact(kind: str) -> None:
    """Multiples of a bfloat16 step are exact where they fill the grid, and zeros always."""
    half = 128 if "int8" in kind else 8
    whole = torch.arange(-half, half).float().clamp_min(-127 if kind == "int8:{}" else -half).repeat(3, 1) * 0.25
    for weight in (whole, torch.zeros(2, 16)):
        assert torch.equal(round_trip(weight, quant_format(kind.format("row"))), weight)


def test_symmetric_int8_has_no_minus_128() -> None:
    assert quant_format("int8:16").quantize(-normal(4096, 16).abs()).tensors["data"].min() == -127


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_of_rows_or_groups_is_the_shard_of_the_codes(kind: str) -> None:
    weight, format = normal(300, 1024), quant_format(kind.format(64))
    whole, rows, groups = format.quantize(weight), format.quantize(weight[100:200]), format.quantize(weight[:, 512:])
    data, scale = whole.tensors["data"], whole.tensors["scale"]
    assert torch.equal(data[100:200], rows.tensors["data"]) and torch.equal(scale[100:200], rows.tensors["scale"])
    assert torch.equal(data[:, data.shape[1] // 2 :], groups.tensors["data"]) and torch.equal(
        scale[:, 8:], groups.tensors["scale"]
    )


# ---- layout ----


def test_every_pair_of_nibbles_packs_exactly() -> None:
    codes = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8)
    packed = pack_integers(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (256, 1) and packed.unique().numel() == 256
    assert torch.equal(unpack_integers(packed), codes) and unpack_integers(packed).dtype == torch.int8
    assert pack_integers(torch.tensor([[-8, 7, 0, -1]], dtype=torch.int8)).tolist() == [[0xF0, 0x78]]


def test_the_formula_of_the_layout() -> None:
    """weight = scale * (code - zero * unit), computed here element by element."""
    units = {"int8": 1.0, "int4": 1 / 16, "int3": 1 / 32, "int2": 1 / 64}
    for name, unit in units.items():
        for text in (f"{name}:8:asymmetric", f"{name}:8"):
            _check_formula(text, unit)


def _check_formula(text: str, unit: float) -> None:
    quantized = quant_format(text).quantize(normal(2, 16) + 0.7)
    values, bits = quantized.format.dequantize(quantized), quantized.format.bits
    data, scale, *zeros = quantized.tensors.values()
    for row in range(2):
        stream = int.from_bytes(bytes(data.view(torch.uint8)[row].tolist()), "little")
        for column in range(16):
            code = stream >> bits * column & (1 << bits) - 1
            code = data[row, column].item() if bits == 8 else code - (1 << bits - 1)
            zero = zeros[0][row, column // 8].item() * unit if zeros else 0
            assert values[row, column].item() == scale[row, column // 8].item() * (code - zero)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("rows", "columns"), [(0, 256), (4, 0), (1, 256), (7, 384), (700, 256)])
def test_bytes_shapes_and_meta(text: str, rows: int, columns: int) -> None:
    format, weight = quant_format(text), normal(rows, columns)
    quantized, planned = format.quantize(weight), format.quantize(weight.to("meta"))
    assert quantized.nbytes == planned.nbytes == format.nbytes(rows, columns)
    assert quantized.shape == (rows, columns) and quantized.format is format
    assert [*quantized.tensors] == [*planned.tensors] == [buffer.name for buffer in format.buffers(columns)]
    for buffer, real, meta in zip(
        format.buffers(columns), quantized.tensors.values(), planned.tensors.values(), strict=True
    ):
        assert meta.is_meta and real.shape == meta.shape == (rows, buffer.width(columns))
        assert real.dtype == meta.dtype == buffer.dtype
    assert format.dequantize(planned, torch.bfloat16).is_meta
    assert format.dequantize(quantized, torch.bfloat16).shape == (rows, columns)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_strides(kind: str, dtype: torch.dtype) -> None:
    format = quant_format(kind.format(64))
    weight = normal(128, 5).to(dtype).t()
    assert not weight.is_contiguous()
    result = round_trip(weight.requires_grad_(), format, dtype)
    assert result.dtype == dtype and not result.requires_grad
    assert torch.equal(result, round_trip(weight.detach().float().contiguous(), format).to(dtype))
    assert relative_error(weight, result) < format.proof_tolerance


# ---- how good ----


def best_possible_error(weight: torch.Tensor, text: str) -> float:
    """By brute force: each row has the best of all uniform grids, with any step and any zero point that the format can
    store.
    """
    levels, unit = (256, 1) if text.startswith("int8") else (16, 1 / 16)
    largest, middle = (
        weight.abs().amax(-1, keepdim=True),
        (weight.amax(-1, keepdim=True) + weight.amin(-1, keepdim=True)) / 2,
    )
    half_span = weight.amax(-1, keepdim=True) - middle
    if text.endswith("asymmetric"):
        shifts = torch.linspace(-2, 2, 33).tolist() if levels == 16 else [-1, 0, 1]
        steps = [
            half_span * shrink / (levels / 2)
            for shrink in torch.linspace(0.45, 1.15, 60 if levels == 16 else 300).tolist()
        ]
        grids = [(step, ((shift - 0.5 - middle / step) / unit).round() * unit) for step in steps for shift in shifts]
    else:
        zero = torch.zeros_like(largest)
        grids = [
            (sign * shrink * largest / (levels / 2), zero)
            for shrink in torch.linspace(0.45, 1.15, 300).tolist()
            for sign in (1, -1)
        ]
    best = torch.full_like(largest, torch.inf)
    for step, zero in grids:
        position = weight / step + zero
        off = (position - position.round().clamp_(-levels // 2, levels // 2 - 1)).square_().sum(
            -1, keepdim=True
        ) * step.square()
        best = torch.minimum(best, off)
    return (best.sum().sqrt() / weight.norm()).item()


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("length", [32, 64, 128, 4096])
def test_normal_weights_lose_at_most_5_percent_more_than_on_the_best_grid(kind: str, length: int) -> None:
    weight = normal(2**15 // length, length, seed=length)
    format = quant_format(kind.format(length))
    assert relative_error(weight, round_trip(weight, format)) <= 1.05 * best_possible_error(weight, str(format))


@pytest.mark.parametrize("kind", KINDS)
def test_expected_error_is_what_is_measured(kind: str) -> None:
    for length in (*ERROR_LENGTHS, 96, 512):
        weight, format = normal(2**19 // length, length, seed=1), quant_format(kind.format(length))
        assert relative_error(weight, round_trip(weight, format)) == pytest.approx(format.expected_error, rel=0.04)
    assert (
        quant_format(kind.format("row")).expected_error == quant_format(kind.format(ERROR_LENGTHS[-1])).expected_error
    )


@pytest.mark.parametrize("text", TEXTS)
def test_heavy_tails_stay_within_the_proof_tolerance(text: str) -> None:
    # Laplace.
    weight = normal(64, 512) * torch.rand(64, 512, generator=torch.Generator().manual_seed(1)).log().neg().sqrt()
    format = quant_format(text)
    assert relative_error(weight, round_trip(weight, format)) < format.proof_tolerance
