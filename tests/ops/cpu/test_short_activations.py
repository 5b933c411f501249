"""Products of many rows of x rounded to 8 bits with integer weights (":a8", ops/cpu/src/integer_tile.h), against the
same in PyTorch.

Run as a program, it prints the instruction set and runs the cases, for tests that force a lower one.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse import ops
from infuse.ground.errors import ConfigError
from infuse.native import DTYPES, isa, kernels, limits
from infuse.quant.parse import quant_format
from tests.models.families import BY_NAME
from tests.models.families import inputs as model_inputs
from tests.support.prepared import runner
from tests.support.threads import thread_counts
from tests.support.tolerance import OF_LARGEST, assert_near

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))


def rounds(dtype: torch.dtype) -> bool:
    """Whether this machine rounds: where it multiplies bytes, and bfloat16 not as fast by AMX."""
    return str(isa()).startswith("avx512") and not (dtype == torch.bfloat16 and kernels().has_amx())


FORMATS = (
    "int8:a8", "int8:32:asymmetric:a8", "int8:row:a8", "int8:20:a8", "int4:a8", "int4:32:asymmetric:a8", "int4:24:a8",
    "int4:row:a8", "int8:32:asymmetric:f16:a8", "int4:f16:a8",
)  # fmt: skip
NOT_HERE = "this processor multiplies no bytes, or bfloat16 as fast"

product = runner("quantized_linear", "cpu")


def activated(*args: Any) -> Tensor:
    """The product, then the last two arguments: the name of the activation, and whether it is gated."""
    *given, name, gated = args
    return product(*given, *ops.NO_NORM, name, gated, None)


def rounded(x: Tensor, groups: int) -> Tensor:
    """x [R, I] with each group of inputs as whole multiples of 1/127 of its largest value, in the arithmetic of the
    kernel; float64.
    """
    grouped = x.float().view(len(x), groups, -1)
    peak = grouped.abs().amax(dim=-1, keepdim=True)
    lift = torch.where(peak < 2.0**-64, 2.0**64, 1.0)
    steps = torch.where(
        peak > 0, torch.div(torch.tensor(127.0), peak * lift), 0
    )  # 127 / t would be 127 times the reciprocal
    return ((grouped * lift * steps).round().double() * (peak / 127).double()).view(len(x), -1)


def quantized(text: str, inputs: int, outputs: int) -> tuple[list[Tensor], Tensor]:
    held = quant_format(text).quantize(torch.randn(outputs, inputs))
    return [*held.tensors.values()], quant_format(text).dequantize(held).double()


def assert_product(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, what: str) -> None:
    """Each row in its own units: of its largest result or, where products cancel, of what they add up to at random."""
    wanted = rounded(x, groups) @ weight.T
    size = (x.double() ** 2 @ weight.T**2).sqrt().amax(dim=1, keepdim=True)
    wanted = wanted if bias is None else wanted + bias.double()
    assert found.dtype == x.dtype and found.shape == wanted.shape, what
    allowed = OF_LARGEST[x.dtype] * torch.maximum(size, wanted.abs().amax(dim=1, keepdim=True))
    if x.dtype == torch.float16:
        allowed = allowed + 2.0**-24  # half the distance of its smallest numbers
    excess = ((found.double() - wanted).abs() / allowed.clamp(min=1e-300)).max()
    assert float(excess) <= 1, f"{what}: {float(excess):.2f} of what is allowed"


def check(dtype: torch.dtype, text: str, inputs: int, outputs: int) -> None:
    buffers, weight = quantized(text, inputs, outputs)
    groups, bias = buffers[1].shape[1], torch.randn(outputs).to(dtype)
    for rows in (limits().code_rows_integer + 1, 12, 13, 29, 50):
        x = torch.randn(rows, inputs).to(dtype)
        x[1] *= 100
        x[2, : inputs // groups] = 0
        x[3] *= 1e-30 if dtype != torch.float16 else 1e-3
        for b in (None, bias):
            torch.full(
                (rows, outputs), float("nan"), dtype=dtype
            )  # in the memory that the next tensor of this size is likely to get
            found = product(x, buffers, b, outputs, inputs, text)
            assert_product(found, x, weight, b, groups, f"{text} {rows}x{inputs}->{outputs} {dtype}")
        assert not torch.equal(found, product(x, buffers, bias, outputs, inputs, text.removesuffix(":a8")))


def check_activated(dtype: torch.dtype, text: str, outputs: int) -> None:
    buffers, weight = quantized(text, 96, outputs)
    x, bias = (torch.randn(21, 96) / 10).to(dtype), torch.randn(outputs).to(dtype)
    wanted = rounded(x, buffers[1].shape[1]) @ weight.T + bias.double()
    for name, gated in (("gelu", False), ("silu", True), ("relu2", False)):
        act = ops.gated_activation if gated else ops.activation
        found = activated(x, buffers, bias, outputs, 96, text, name, gated)
        assert_near(found, act(wanted, name), dtype, f"{text} {name} -> {outputs} {dtype}")


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_the_product_of_rounded_activations(dtype: torch.dtype, text: str) -> None:
    if not rounds(dtype):
        pytest.skip(NOT_HERE)
    for inputs in (96, 480, 2880):
        if quant_format(text).fits(inputs) is None:
            for outputs in (1, 17, 32, 100):
                check(dtype, text, inputs, outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activates_what_it_makes(dtype: torch.dtype) -> None:
    if not rounds(dtype):
        pytest.skip(NOT_HERE)
    for text in ("int8:32:a8", "int4:24:a8"):
        for outputs in (2, 32, 34, 96):  # halves of whole panels, which one pass takes, and others
            check_activated(dtype, text, outputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_chunks_of_rows_and_threads(dtype: torch.dtype) -> None:
    """More rows than the cores' caches hold, on one thread and on two."""
    if not rounds(dtype):
        pytest.skip(NOT_HERE)
    buffers, weight = quantized("int8:a8", 2048, 40)
    x = torch.randn(1300, 2048).to(dtype)
    for threads in thread_counts(1, 2):
        assert_product(product(x, buffers, None, 40, 2048, "int8:a8"), x, weight, None, 32, f"{threads} threads")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_rows_stay_as_they_are(dtype: torch.dtype) -> None:
    buffers, _ = quantized("int8", 128, 50)
    for rows in (0, 1, limits().code_rows_integer):
        x = torch.randn(rows, 128).to(dtype)
        short, long = (product(x, buffers, None, 50, 128, text) for text in ("int8:a8", "int8"))
        assert torch.equal(short, long)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_passes_through(dtype: torch.dtype, value: float) -> None:
    """As without :a8: the whole product is made again with x as it is."""
    for name in ("int8", "int4"):
        buffers, _ = quantized(name, 64, 33)
        x = torch.randn(40, 64).to(dtype)
        x[17, 5] = value
        assert_near(
            product(x, buffers, None, 33, 64, f"{name}:a8"), product(x, buffers, None, 33, 64, name).double(), dtype
        )


@pytest.mark.parametrize("text", ["int8:asymmetric:a8", "int4:asymmetric:a8"])
def test_large_numbers_whose_parts_are_larger_still(text: str) -> None:
    """Code and zero point cancel: neither alone may overflow."""
    buffers, weight = quantized(text, 64, 32)
    x = (1e37 * (torch.rand(20, 64) + 0.5)).bfloat16()
    found, wanted = product(x, buffers, None, 32, 64, text).double(), x.double() @ weight.T
    assert torch.isfinite(found).all()
    assert float((found - wanted).norm() / wanted.norm()) < 0.02


def test_double_precision_is_not_taken_for_single() -> None:
    buffers, weight = quantized("int8", 64, 32)
    x = torch.randn(20, 64, dtype=torch.float64)
    found = activated(x, buffers, None, 32, 64, "int8:a8", "relu2", False)
    wanted = ops.activation(x @ weight.T, "relu2")
    assert found.dtype == torch.float64 and float((found - wanted).norm() / wanted.norm()) < 0.03


def all_cases() -> None:
    """A few of the cases above, for a process whose instruction set is forced: those that do not multiply bytes round
    nothing.
    """
    for dtype in DTYPES:
        for text in FORMATS[:5]:
            inputs = 96 if quant_format(text).fits(96) is None else 480 if quant_format(text).fits(480) is None else 128
            if rounds(dtype):
                check(dtype, text, inputs, 35)
                continue
            buffers, _ = quantized(text, inputs, 35)
            x = torch.randn(30, inputs).to(dtype)
            as_it_is = product(x, buffers, None, 35, inputs, text.removesuffix(":a8"))
            assert torch.equal(product(x, buffers, None, 35, inputs, text), as_it_is)


# ---- the option


def test_the_text_says_what_may_be_rounded() -> None:
    for text in ("int8:a8", "int4:64:a8", "int8:row:asymmetric:a8", "int4:groups=2:a8"):
        chosen = quant_format(text)
        plain = quant_format(text.removesuffix(":a8"))
        assert str(chosen) == text and chosen.activation_bits == 8 and plain.activation_bits == 16
        assert chosen.nbytes(64, 128) == plain.nbytes(64, 128) and chosen.expected_error == plain.expected_error
        assert plain.proof_tolerance < chosen.proof_tolerance < plain.proof_tolerance + 0.05
        weight = torch.randn(8, 128)
        both = (each.quantize(weight).tensors.values() for each in (chosen, plain))
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    for wrong in ("fp8:a8", "fp6:32:a8", "int8:a4", "int8:a8:row"):
        with pytest.raises(ConfigError):
            quant_format(wrong)
        with pytest.raises(ConfigError):
            infuse.plan(nn.Linear(64, 64), quant=wrong)


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_models_with_short_activations(name: str) -> None:
    """Proven with them: a plan, a prompt near the original's, and steps of few tokens that are those without."""
    family = BY_NAME[name]
    original = family.make()
    short, long = (
        infuse.init_inference(copy.deepcopy(original), dtype=torch.float32, quant=text)
        for text in ("int8:16:a8", "int8:16")
    )
    assert "int8:16:a8" in str(short.plan) and not any("refused" in left.why for left in short.plan.left)
    given = model_inputs(family)
    with torch.inference_mode():
        wanted, exact, rounded_too = (model(**given)[0] for model in (original, long, short))
    error, more = ((found - wanted).norm() / wanted.norm() for found in (exact, rounded_too))
    assert more < max(3 * error, 0.1)
    assert torch.equal(rounded_too, exact) != rounds(torch.float32)
    few = {key: value[:, :4] for key, value in given.items()}  # 8 tokens in all
    with torch.inference_mode():
        assert torch.equal(short(**few)[0], long(**few)[0])


def test_plans_tell_where_nothing_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    told = "int8:a8: activations keep 16 bits here: "
    assert (told in str(infuse.plan(model, quant="int8:a8", dtype="fp32"))) != rounds(torch.float32)
    monkeypatch.setattr(infuse.native, "isa", lambda: "avx2")
    assert f"{told}avx2 has no products of bytes" in str(infuse.plan(model, quant="int8:a8", dtype="fp32"))
    assert told not in str(infuse.plan(model, quant="int8", dtype="fp32"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(isa())
    all_cases()
