"""The matrix products in C++ against float64: every dtype, few and many rows, odd sizes, every instruction set of this
machine.

Run as a program, it prints the instruction set and runs the same cases: so the tests force lower sets in processes of
their own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infuse import ops
from infuse.native import CODES, DTYPES, isa, kernels, limits
from infuse.ops.cpu import linear as cpu_linear
from infuse.quant.floating import pack_fp6
from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format
from tests.support.levels import TILED
from tests.support.prepared import runner
from tests.support.products import (
    activated,
    assert_product,
    check_activated,
    check_plain,
    check_quantized,
    check_sizes,
    check_tiled,
    exact,
    plain,
    poison,
    quantized,
    quantized_args,
)
from tests.support.threads import thread_counts
from tests.support.tolerance import assert_near, assert_same_buffers

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))

INPUTS, OUTPUTS = (1, 7, 33, 64, 96, 2048, 2079), (1, 3, 17, 100)
FORMATS = (
    "int8", "int8:32:asymmetric", "int8:96", "int8:row:asymmetric", "int4", "int4:32:asymmetric", "int4:96:asymmetric",
    "int4:row", "fp8", "fp8:32", "fp8:96", "fp6:32", "fp6", "fp6:96", "fp6:row", "int8:32:f16",
    "int4:32:asymmetric:f16", "int3:32", "int3:96:asymmetric:f16", "int3:row:f32", "int2:16:asymmetric", "int2:96:f16",
    "int4:32:offset", "int3:32:offset:f32", "int2:16:offset", "int2:96:offset:f16",
)  # fmt: skip
QUANTIZED_INPUTS = (32, 64, 96, 480, 2048)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_is_the_exact_product(dtype: torch.dtype) -> None:
    for inputs in INPUTS:
        for outputs in OUTPUTS:
            check_plain(dtype, inputs, outputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 9, 13, 50, 129])
@pytest.mark.parametrize("inputs", [2, 66, 130, 384, 814])  # those of one piece of a tile, and of several
def test_tiled_is_the_exact_product_and_activates_it(dtype: torch.dtype, rows: int, inputs: int) -> None:
    check_tiled(dtype, rows, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_in_chunks(dtype: torch.dtype) -> None:
    """So many that each of two threads takes chunks of them; neither the chunks nor the blocks in them are alike."""
    rows, inputs, outputs = 1301, 832, 96
    x, bias = (torch.randn(rows, inputs) / inputs**0.5).to(dtype), torch.randn(outputs).to(dtype)
    buffers, values = quantized_args("int8", inputs, outputs)
    for threads in thread_counts(1, 2):
        poison(rows, outputs, dtype=dtype)
        found = quantized(x, buffers, bias, outputs, inputs, "int8")
        assert_product(found, x, values.to(dtype), bias, f"{threads} threads")
        poison(rows, outputs // 2, dtype=dtype)
        found = activated(x, buffers, bias, outputs, inputs, "int8", "silu", True)
        wanted = ops.gated_activation(exact(x, values.to(dtype), bias), "silu")
        assert_near(found, wanted, dtype, f"{threads} threads")
        weight = values.to(dtype)
        poison(rows, outputs, dtype=dtype)
        if (plain_found := kernels().tiled_linear(x, weight, bias, -1, False)) is not None:  # None: PyTorch's is better
            assert_product(plain_found, x, weight, bias, f"plain, {threads} threads")
            poison(rows, outputs // 2, dtype=dtype)
            found = kernels().tiled_linear(x, weight, bias, 0, True)
            assert_near(found, wanted, dtype, f"plain, {threads} threads")


@pytest.mark.skipif(isa() not in TILED, reason="tiles need bf16 instructions")
@pytest.mark.parametrize(("outputs", "inputs", "tiled"), [(192, 96, True), (160, 96, False), (96, 48, True)])
def test_more_values_than_threads_share(
    outputs: int, inputs: int, tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles multiply and activate many outputs per input; F.linear fewer, or from too many inputs, or without."""
    few = limits()._replace(tiled_values=1)
    monkeypatch.setattr(cpu_linear, "limits", lambda: few)
    taken: list[bool] = []
    run = cpu_linear._tiled
    monkeypatch.setattr(cpu_linear, "_tiled", lambda *args: (y := run(*args), taken.append(y is not None))[0])
    x, weight = torch.randn(50, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    wanted = ops.activation(exact(x, weight, None), "silu")
    for most, act in ((inputs, "silu"), (inputs - 1, "silu"), (inputs, None)):
        monkeypatch.setattr(cpu_linear, "MOST_INPUTS", most)
        found = plain(x, weight, None, *ops.NO_NORM, act, False, None)
        assert_near(found, exact(x, weight, None) if act is None else wanted, torch.bfloat16)
    assert sum(taken) == (tiled and cpu_linear.takes_tiles(torch.bfloat16))


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized_is_the_exact_product(dtype: torch.dtype, text: str) -> None:
    for inputs in QUANTIZED_INPUTS:
        if quant_format(text).fits(inputs) is None:
            for outputs in (1, 17, 100):
                check_quantized(dtype, text, inputs, outputs)


@pytest.mark.parametrize("text", ("int8", "int8:row:asymmetric", "int4:32:asymmetric", "fp8", "fp6"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_of_all_sizes(dtype: torch.dtype, text: str) -> None:
    check_sizes(dtype, text)


def test_integers_are_as_exact_as_the_weights_allow() -> None:
    """Where x goes as integers of 16 bits, what that costs is far below what rounding the result to x's dtype does."""
    x, (buffers, weight) = torch.randn(4, 512).half(), quantized_args("int8", 512, 300)
    wanted = exact(x, weight, None)
    found = quantized(x, buffers, None, 300, 512, "int8").double()
    nearest = wanted.half().double()
    assert float((found - wanted).square().mean().sqrt()) <= 1.05 * float((nearest - wanted).square().mean().sqrt())


def test_an_outlier_coarsens_its_chunk_alone() -> None:
    """One x of 1000 whose weights are zero, among 4096 that share a scale."""
    x, weight = torch.randn(1, 4096).half(), torch.randn(200, 4096)
    x[0, 77], weight[:, 77] = 1000, 0
    held = quant_format("int8:row").quantize(weight)
    found = quantized(x, [*held.tensors.values()], None, 200, 4096, "int8:row").double()
    wanted = exact(x, quant_format("int8:row").dequantize(held), None)
    assert float((found - wanted).norm() / wanted.norm()) < 0.004


@pytest.mark.parametrize("text", FORMATS)
def test_quantized_is_activated(text: str) -> None:
    for outputs in (2, 32, 34, 96):  # halves of whole panels, which one pass takes, and others
        check_activated(text, 480 if "96" in text else 64, outputs)


@pytest.mark.parametrize(
    "text",
    ("int8:48", "int8:7", "int4:16", "int4:6:asymmetric", "fp8:7", "fp8:6", "fp6:12", "fp6:28", "int3:16", "int2:8"),
)
def test_groups_that_the_kernels_decline(text: str) -> None:
    check_quantized(torch.float32, text, 336, 5)


@pytest.mark.parametrize("text", FORMATS)
def test_panels_hold_the_codes_and_the_values(text: str) -> None:
    """Into panels and back is the same weight; whole and by rows, panels give the format's own values."""
    format, layout = quant_format(text), ops.quantized_linear.bodies["cpu"].layout
    assert layout is not None
    for outputs in (1, 7, 16, 33):
        held = format.quantize(torch.randn(outputs, 480 if "96" in text else 448))
        panels = layout.prepare(held)
        back = layout.restore(panels)
        assert_same_buffers(back, held)
        index = torch.randint(outputs, (5,))
        for dtype in DTYPES:
            wanted = format.dequantize(held, dtype)
            whole, rows = torch.full_like(wanted, float("nan")), torch.full_like(wanted[index], float("nan"))
            kernels().dequantize([*panels.tensors.values()], CODES.index(format.name), whole)
            kernels().gather_rows([*panels.tensors.values()], CODES.index(format.name), index, rows)
            assert torch.equal(whole, wanted) and torch.equal(rows, wanted[index])


@pytest.mark.parametrize("text", ["int8", "int4:32:asymmetric:f16", "fp8", "q4_k", "int2:16:offset"])
def test_rows_that_fill_the_last_panel_are_zeros(text: str) -> None:
    """Not what the memory held before: kernels compute all rows of a panel, and look whether results are finite."""
    format, layout = quant_format(text), ops.quantized_linear.bodies["cpu"].layout
    assert layout is not None and layout.gather is not None
    held = format.quantize(torch.randn(18, 512))
    torch.use_deterministic_algorithms(True)  # new memory is full of NaN, or of the largest integer
    try:
        made = [layout.prepare(held), layout.gather([held], (18, 512))]
    finally:
        torch.use_deterministic_algorithms(False)
    for panels in made:
        rows = [panels.tensors["data"][-1].unflatten(-1, (16, 4)).transpose(0, 1)]
        if text != "q4_k":  # whose scales lie by fields
            rows += [each[-1].transpose(0, 1) for name, each in panels.tensors.items() if name != "data"]
        assert all(not each[2:].any() and bool(each[:2].any()) for each in rows)


@pytest.mark.parametrize("name", ("fp8", "fp6"))
def test_every_code_of_a_float_has_its_exact_value(name: str) -> None:
    """Subnormals and both zeros too, at every place of a word and in every lane, whatever the processor does with small
    numbers.
    """
    bits, inputs = int(name[2:]), 1024
    codes = torch.arange(inputs) % 2**bits
    if name == "fp8":
        codes[codes % 128 == 127] = 0  # NaN
    rows = torch.stack([codes.roll(37 * row) for row in range(33)]).to(torch.uint8)
    format = quant_format(f"{name}:row")
    scale = torch.full((33, 1), 0.75, dtype=torch.bfloat16)
    held = QuantizedWeight.listed([pack_fp6(rows) if name == "fp6" else rows, scale], (33, inputs), format)
    layout = ops.quantized_linear.bodies["cpu"].layout
    assert layout is not None
    panels = layout.prepare(held)
    assert panels is not None and torch.equal(layout.restore(panels).tensors["data"], held.tensors["data"])
    wanted = format.dequantize(held)
    for dtype in DTYPES:
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            try:
                found = torch.full_like(wanted, float("nan"), dtype=dtype)
                kernels().dequantize([*panels.tensors.values()], CODES.index(name), found)
                few, many = (
                    quantized(x.to(dtype), [held.tensors["data"], scale], None, 33, inputs, f"{name}:row")
                    for x in one_hot(inputs)
                )
            finally:
                torch.set_flush_denormal(False)
            assert torch.equal(found, wanted.to(dtype))
            assert torch.equal(found.signbit(), wanted.signbit())
            assert torch.equal(few, wanted.T[:8].to(dtype)) and torch.equal(many, wanted.T[:300].to(dtype))


def one_hot(inputs: int) -> tuple[Tensor, Tensor]:
    """Rows that pick single inputs, few and many."""
    return torch.eye(inputs)[:8], torch.eye(inputs)[:300]


@pytest.mark.parametrize("text", ("fp8", "fp8:32"))
def test_fp8_with_nan_is_left_to_the_reference(text: str) -> None:
    buffers, _ = quantized_args(text, 64, 17)
    buffers[0][3, 5] = 0xFF
    layout = ops.quantized_linear.bodies["cpu"].layout
    assert layout is not None
    assert layout.prepare(QuantizedWeight.listed(buffers, (17, 64), quant_format(text))) is None
    args = (torch.randn(2, 64), buffers, None, 17, 64, text)
    found = quantized(*args)
    assert found[:, 3].isnan().all() and int(found.isnan().sum()) == 2
    assert_near(found, ops.quantized_linear.reference(*args), torch.float32)


@pytest.mark.parametrize("text", FORMATS)
def test_the_kernel_runs_and_not_the_reference(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = 480 if quant_format(text).fits(480) is None else 448
    buffers, _ = quantized_args(text, inputs, 17)
    index = torch.tensor([3, 0])
    for op in (ops.quantized_linear, ops.quantized_embedding):
        monkeypatch.setattr(op, "reference", lambda *args: pytest.fail("the reference was called"))
    for dtype in DTYPES:
        quantized(torch.randn(2, inputs).to(dtype), buffers, None, 17, inputs, text)
        runner("quantized_embedding", "cpu")(index, buffers, 17, inputs, text, dtype)


@pytest.mark.parametrize("shape", [(2, 3, 64), (64,), (1, 1, 64), (0, 64), (2, 0, 64)])
def test_leading_axes_are_kept(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(5, 64)
    for product in (plain, kernels().linear):
        assert_near(product(x, weight, None), exact(x, weight, None), torch.float32)
    buffers, values = quantized_args("int8", 64, 5)
    assert_near(quantized(x, buffers, None, 5, 64, "int8"), exact(x, values, None), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(dtype: torch.dtype) -> None:
    """x, the weight and the bias as views that are not contiguous: copied or declined, never misread."""
    wide, weight, bias = torch.randn(3, 128).to(dtype), torch.randn(64, 10).to(dtype), torch.randn(20).to(dtype)
    for x in (wide[:, ::2], wide[:, 64:], torch.randn(64, 3).to(dtype).t()):
        found = plain(x, weight.t(), bias[::2])
        assert_near(found, exact(x, weight.t(), bias[::2]), dtype)
        buffers, values = quantized_args("int4", 64, 10)
        assert_near(quantized(x, buffers, bias[::2], 10, 64, "int4"), exact(x, values, bias[::2]), dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_passes_through(dtype: torch.dtype, value: float) -> None:
    x, weight = torch.randn(3, 96).to(dtype), torch.randn(5, 96).to(dtype)
    x[1, 95] = value
    for _ in range(2):
        for product in (plain, kernels().linear):
            assert_near(product(x, weight, None), ops.linear.reference(x, weight, None), dtype)
        weight[2, 33] = value
    for text in ("int8:32", "int4:96", "int8:96:asymmetric", "int4:32:asymmetric", "fp8", "fp6:32"):
        buffers, _ = quantized_args(text, 96, 5)
        buffers[1][4, -1] = value
        args = (x, buffers, None, 5, 96, text)
        assert_near(quantized(*args), ops.quantized_linear.reference(*args), dtype, text)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_threads_compute_what_one_does(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(3, 1024).to(dtype), torch.randn(515, 1024).to(dtype), torch.randn(515).to(dtype)
    buffers, _ = quantized_args("int4:32:asymmetric", 1024, 515)
    found = [
        (plain(x, weight, bias), quantized(x, buffers, bias, 515, 1024, "int4:32:asymmetric"))
        for _ in thread_counts(1, 2)
    ]
    # Which weight rows go together depends on the pieces, so not to the last bit.
    for one, two in zip(*found, strict=True):
        assert_near(two, one.double(), dtype)


def all_cases() -> None:
    """A few of the cases above for each dtype and format, for a process whose instruction set is forced."""
    for dtype in DTYPES:
        for inputs, outputs in ((1, 3), (33, 17), (96, 100), (2079, 13)):
            check_plain(dtype, inputs, outputs)
        for text in FORMATS:
            check_quantized(dtype, text, 480 if quant_format(text).fits(480) is None else 448, 13)
            if quant_format(text).fits(96) is None:
                check_quantized(dtype, text, 96, 5)
        for text in ("int8", "int4"):
            check_sizes(dtype, text)
    for text in ("int8", "int4:32:asymmetric"):
        check_activated(text, 64, 96)
    for name in ("fp8", "fp6"):
        test_every_code_of_a_float_has_its_exact_value(name)


def test_bfloat16_products_are_added_in_float32() -> None:
    """The sum of 4096 products is as near as one rounding at the end allows."""
    x, weight = torch.rand(1, 4096).bfloat16(), torch.rand(8, 4096).bfloat16()
    error = (plain(x, weight, None).double() / exact(x, weight, None) - 1).abs().max()
    assert float(error) <= 2**-8 * 1.001  # half a unit in the last place


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(isa())
    all_cases()
