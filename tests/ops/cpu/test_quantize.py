"""The search for grids in C++ against the reference, bit by bit: every dtype, awkward lengths, every instruction set of
this machine.

Run as a program, it prints the instruction set and runs the same cases: so the tests force lower sets in processes of
their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from infuse import ops
from infuse.ground.errors import ConfigError
from infuse.native import DTYPES, isa, kernels
from infuse.ops.cpu.quantize import COPIED_VALUES
from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format
from tests.support.threads import thread_counts
from tests.support.tolerance import ONE_GROUP_IN, assert_same_quantization

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))

KINDS = ("int8:{}", "int8:{}:asymmetric", "int4:{}", "int4:{}:asymmetric", "fp8:{}", "fp6:{}")
LENGTHS = (1, 2, 4, 7, 15, 16, 18, 20, 33, 63, 64, 65, 68, 96, 130)  # around the registers' widths of 4, 8 and 16
PACK = {"int8": 1, "int4": 2, "fp8": 1, "fp6": 4}  # neighbours that share bytes
ROWS = (0, 1, 3, 5, 17)
LARGEST = 2.0**126

quantize = ops.quantize.body("cpu")


def values(length: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Rows of two groups, by what is awkward about them; all of them can be stored."""
    normal = torch.randn(37, 2 * length)
    whole = torch.randint(-8, 8, (37, 2 * length)).float()
    one = torch.zeros(37, 2 * length)
    one[torch.arange(37), torch.arange(37) % (2 * length)] = torch.randn(37)
    outliers = normal.clone()
    outliers[::3, 0] = 300.0
    large = 1.0 if dtype == torch.float16 else 2e37
    yield from (
        ("normal", normal), ("negative", -normal.abs() - 0.5), ("positive", normal.abs()), ("offset", normal + 100),
        ("zeros", one * 0), ("one value", one), ("whole", whole), ("signs", normal.sign()),
        ("constant", torch.full_like(normal, -0.37)), ("outliers", outliers), ("tiny", normal * 1e-5),
        ("subnormal", normal * 1e-39), ("huge", normal.clamp(-4, 4) * large),
    )  # fmt: skip
    yield "sparse", normal * (torch.rand_like(normal) < 0.1)
    if dtype != torch.float16:
        yield "largest", normal.sign() * LARGEST


# Values of few bits make more ties: 100 + normal in float16 are multiples of 1/16, all of which int4 stores as two or
# three codes.
ONE_PICKED_GROUP_IN = 20


def check(weight: Tensor, text: str, what: str, one_group_in: int = ONE_GROUP_IN) -> None:
    found, wanted = quantize(weight, text), ops.quantize.reference(weight, text)
    assert_same_quantization(found, wanted, weight, text, what, one_group_in)
    format, shape = quant_format(text), (weight.size(0), weight.size(1))
    once = format.dequantize(QuantizedWeight.listed(found, shape, format))
    if once.numel() and float(once.abs().max()) <= LARGEST:
        again = format.dequantize(QuantizedWeight.listed(quantize(once, text), shape, format))
        assert torch.equal(again, once), f"{what}: a second quantization changes it"


def check_values(kind: str, length: int, dtype: torch.dtype) -> None:
    for name, weight in values(length, dtype):
        ties = ONE_GROUP_IN if name == "normal" else ONE_PICKED_GROUP_IN
        check(weight.to(dtype), kind.format(length), f"{kind.format(length)} {dtype} {name}", ties)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_as_the_reference(kind: str, dtype: torch.dtype) -> None:
    for length in LENGTHS:
        if length % PACK[kind.partition(":")[0]] == 0:
            check_values(kind, length, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_rows(kind: str) -> None:
    for rows in ROWS:
        for text, columns in (
            (kind.format("row"), 132),
            (kind.format("row"), 4164),
            (kind.format("groups=3"), 192),
            (kind.format(64), 64),
        ):
            check(torch.randn(rows, columns), text, f"{text} {rows}x{columns}")


@pytest.mark.parametrize("columns", [3, 77, 4161])
def test_odd_rows_as_one_group(columns: int) -> None:
    for text in ("int8:row", "int8:row:asymmetric", "fp8"):
        check(torch.randn(3, columns).bfloat16(), text, f"{text} {columns}")


@pytest.mark.parametrize("kind", KINDS)
def test_no_inputs(kind: str) -> None:
    weight, text = torch.randn(4, 0), kind.format(64)
    for found, wanted in zip(quantize(weight, text), ops.quantize.reference(weight, text), strict=True):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_that_are_left_out_would_not_have_won(kind: str) -> None:
    """Many groups of 32 to 1024, normal and with heavy tails: cutting is foretold to cost too much at other places in
    each.
    """
    for length in (32, 128, 1024):
        weight = torch.randn(2**18 // 1024, 1024)
        check(weight, kind.format(length), "normal")
        check(weight / torch.rand_like(weight).sqrt(), kind.format(length), "heavy tails")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, -1e38])
@pytest.mark.parametrize("kind", KINDS)
def test_values_without_a_code(kind: str, value: float) -> None:
    for dtype in DTYPES:
        for row, column in ((0, 0), (17, 65), (36, 131)):
            weight = torch.randn(37, 132).to(dtype)
            weight[row, column] = value
            with pytest.raises(ConfigError) as wanted:
                ops.quantize.reference(weight, kind.format(44))
            with pytest.raises(ConfigError) as found:
                quantize(weight, kind.format(44))
            assert str(found.value) == str(wanted.value) and f"[{row}, {column}]" in str(found.value)


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (torch.zeros(64), "int8"),
        (torch.zeros(2, 2, 64), "int8"),
        (torch.zeros(2, 64, dtype=torch.int8), "int4"),
        (torch.zeros(2, 65), "int8"),
        (torch.zeros(2, 64), "int5"),
    ],
)
def test_what_the_reference_refuses(weight: Tensor, text: str) -> None:
    with pytest.raises(ConfigError) as wanted:
        ops.quantize.reference(weight, text)
    with pytest.raises(ConfigError) as found:
        quantize(weight, text)
    assert str(found.value) == str(wanted.value)


def test_the_kernel_runs_and_not_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.quantize, "reference", lambda *args: pytest.fail("the reference was called"))
    for dtype in DTYPES:
        for kind in KINDS:
            quantize(torch.randn(5, 132).to(dtype), kind.format(44))


def test_other_dtypes_and_meta_are_left_to_the_reference() -> None:
    weight = torch.randn(5, 128, dtype=torch.float64)
    for text in (kind.format(64) for kind in KINDS):
        assert_same_quantization(quantize(weight, text), ops.quantize.reference(weight, text), weight, text)
        assert quantize(weight.float().to("meta"), text)[0].is_meta


@pytest.mark.parametrize("kind", KINDS)
def test_strides(kind: str) -> None:
    """Transposed weights are copied in parts, here several with a smaller last one; parameters are used as they are."""
    rows = 2 * COPIED_VALUES // 1024 + 5
    weight = torch.randn(1024, rows).bfloat16()
    for found, wanted in zip(
        quantize(weight.t(), kind.format(64)), quantize(weight.t().contiguous(), kind.format(64)), strict=True
    ):
        assert (found is None and wanted is None) or torch.equal(found, wanted)
    wide = torch.nn.Parameter(torch.randn(6, 256))
    for view in (wide[:, ::2], wide[1::2, 64:], wide):
        check(view, kind.format(64), "view")
        assert not any(buffer.requires_grad for buffer in quantize(view, kind.format(64)) if buffer is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_compute_what_one_does(kind: str) -> None:
    weight = torch.randn(515, 1024)
    found = [quantize(weight, kind.format(64)) for _ in thread_counts(1, 2)]
    assert all((one is None and two is None) or torch.equal(one, two) for one, two in zip(*found, strict=True))
    weight[514, 1023] = float("nan")  # in the second thread's part
    with pytest.raises(ConfigError, match=r"nan at \[514, 1023\]"):
        quantize(weight, kind.format(64))


def all_cases() -> None:
    """Some of the cases above for each dtype and kind, for a process whose instruction set is forced."""
    for kind in KINDS:
        for dtype in DTYPES:
            for length in (18, 20, 63, 130):
                if length % PACK[kind.partition(":")[0]] == 0:
                    check_values(kind, length, dtype)
        test_numbers_of_rows(kind)
        test_values_without_a_code(kind, float("nan"))
        test_values_without_a_code(kind, -1e38)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(isa())
    all_cases()
