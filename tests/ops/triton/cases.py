"""The tests of the Triton bodies: on the CPU through Triton's interpreter (test_interpreter.py runs this file so), on a
GPU compiled (tests/gpu/test_ops.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

import tests.ops.triton.quick_interpreter  # noqa: F401
from infuse import ops
from infuse.ground.errors import ConfigError
from infuse.ops import Case, registered
from infuse.ops.cache_rows import quantize_rows
from infuse.ops.triton import configurations, experts, kernels, linear, quantized_linear
from infuse.ops.triton.configurations import Tiles
from infuse.ops.triton.words import CODES, WORDS
from infuse.quant.blocks import BLOCKS
from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format
from tests.ops.other_sizes import RECURRENT, assert_other_sizes_are_those_of_the_reference
from tests.ops.recurrence import assert_damage_stays_in_its_heads, rows_of
from tests.ops.strides import own, planted
from tests.support.op_cases import assert_unchanged, in_float32, results, widened, written
from tests.support.op_cases import cases as cases_on_cpu
from tests.support.prepared import run_body
from tests.support.relatives import less
from tests.support.tolerance import assert_near

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = sorted(name for name, op in registered().items() if "triton" in op.bodies)
PRODUCTS = ("linear", "quantized_linear", "experts", "quantized_experts")
# Kernels read and write float16 as they do bfloat16; the interpreter takes seconds for a case.
WAITS = (torch.float16,) if DEVICE.type == "cpu" else ()
by_dtype = pytest.mark.parametrize("dtype", less(WAITS, DTYPES), ids=str)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that PyTorch hands out is full of NaN or the largest integer, so that what a kernel does not write is
    seen.
    """
    if DEVICE.type == "cpu":  # on a GPU some functions refuse this mode
        torch.use_deterministic_algorithms(True)
        assert bool(torch.empty(9).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def few_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other: let one of a single row have more outputs, but in tests of
    several programs.
    """
    several = request.function in (test_quantized_products, test_products_with_shared_sums)
    rows = [(experts, "plain_row"), (experts, "quantized_row")]
    rows += [] if several else [(linear, "plain_row"), (quantized_linear, "quantized_row")]

    def wider(tiles: Callable[..., Tiles]) -> Callable[..., Tiles]:
        return lambda *shape, **more: replace(tiles(*shape, **more), outputs=64)

    if DEVICE.type == "cpu":
        for module, name in rows:
            monkeypatch.setattr(module, name, wider(getattr(configurations, name)))


def there(value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE), value)


def cases(name: str, dtype: torch.dtype) -> list[Case]:
    return [Case(case.label, tuple(there(arg) for arg in case.args)) for case in cases_on_cpu(name, dtype)]


def compare(name: str, args: tuple, dtype: torch.dtype, what: str) -> None:
    """The body's results and what it writes are the reference's; what it must not write to is as before."""
    mutated = written(name)
    given = own(args, mutated)
    # Triton's interpreter cuts float32 off to bfloat16 where GPUs round: of a product of two sums over such weights
    # twice as much is lost. Not so for few rows with a norm or a residual.
    cut_off = name == "quantized_linear" and "gated" in what
    if cut_off and {"rms", "layer", "residual"} & set(what.split()):
        cut_off = given[0].numel() > ops.FEW_ROWS * given[0].shape[-1]
    cut_off |= name == "quantized_experts"  # one product after the other
    cut_off |= name == "causal_conv" and dtype is torch.bfloat16  # up to three times, one after the other
    times = 2 if cut_off and DEVICE.type == "cpu" else 1
    # The kernels of products compute in float32: the reference rounds in between.
    exact = in_float32(given, dtype) if name in PRODUCTS else given
    wanted = results(registered()[name].reference, own(exact, []), mutated)
    function, given = registered()[name].prepared("triton", given)
    before = own(given, [])
    found = results(function, given, mutated)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == (b.dtype if exact is given else dtype) and a.device == b.device, what
        assert_near(a.cpu(), b.cpu(), dtype, f"{name}, {what}", times)
    for i, (old, new) in enumerate(zip(before, given, strict=True)):
        if i not in mutated:
            assert_unchanged(old, new, f"{what}: argument {i} was changed")


@by_dtype
@pytest.mark.parametrize("name", OPS)
def test_body_is_the_reference(name: str, dtype: torch.dtype) -> None:
    """Under the slow interpreter each type of 16 bits has a third of the cases, and of very many float32 too; of
    quantized experts some cases of each format.
    """
    chosen = [case for case in cases(name, dtype) if has_kernel(case.label)]
    if DEVICE.type == "cpu" and (dtype != torch.float32 or len(chosen) > 20):
        chosen = chosen[(DTYPES.index(dtype) - 1) % 3 :: 3]
    if DEVICE.type == "cpu" and name == "quantized_experts":
        chosen = chosen[::4]
    for case in chosen:
        compare(name, case.args, dtype, case.label)


def has_kernel(label: str) -> bool:
    """Whether Triton takes the format that begins the label of a case; others run by the reference."""
    try:
        return WORDS.declines(quant_format(label.split()[0]), 0) is None
    except ConfigError:  # no format
        return True


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("name", sorted(OPS))
def test_what_is_not_finite_passes_through_as_in_the_reference(name: str, part: int) -> None:
    """Each case with one of the three values, another one in each place: a third of the cases, about twelve with each
    under the slow interpreter. Each activation meets each value.
    """
    value = (float("nan"), float("inf"), -float("inf"))[part]
    chosen = [(place, case) for place, case in planted(name, value) if has_kernel(case.label)]
    most = 4 if "experts" in name else 12
    every = max(7, len(chosen) // most | 1) if DEVICE.type == "cpu" else 3
    if name not in ("activation", "gated_activation"):
        chosen = chosen[part::every]
    for _, case in chosen:
        args = tuple(there(arg) for arg in case.args)
        if "gelu" in case.label:  # as in test_ops.py: PyTorch's in float64 is right
            wanted = registered()[name].reference(*widened(args)).float()
            assert_near(run_body(name, "triton", *args).cpu(), wanted.cpu(), torch.float32, case.label)
            continue
        compare(name, args, torch.float32, case.label)


@by_dtype
def test_append_at_a_place_in_a_tensor(dtype: torch.dtype) -> None:
    for case in cases("rotary_append", dtype):
        wanted = results(ops.rotary_append.reference, own(case.args, [3, 4]), [3, 4])
        args = own(case.args, [3, 4])
        start = torch.tensor([case.args[5]], device=DEVICE)
        found = results(ops.rotary_append.body("triton"), (*args[:5], start, *args[6:]), [3, 4])
        for a, b in zip(found, wanted, strict=True):
            assert_near(a.cpu(), b.cpu(), dtype, case.label)


def test_nothing_is_written_beyond_the_capacity() -> None:
    qkv, keys, values = (torch.randn(shape, device=DEVICE) for shape in ((1, 3, 4, 16), (1, 1, 8, 16), (1, 1, 8, 16)))
    around = torch.full((3, 1, 1, 8, 16), 7.0, device=DEVICE)
    around[1] = keys
    ops.rotary_append.body("triton")(qkv, None, None, around[1], values, torch.tensor(6, device=DEVICE), 2, False)
    assert bool((around[::2] == 7).all()) and torch.equal(
        around[1, :, :, 6:].cpu(), qkv[:, :2, 2:3].transpose(1, 2).cpu()
    )
    with pytest.raises(IndexError, match="3 tokens at 6 do not fit a cache of 8"):
        ops.rotary_append.body("triton")(qkv, None, None, keys, values, 6, 2, False)


@by_dtype
def test_attention_over_the_first_keys_of_a_storage(dtype: torch.dtype) -> None:
    for case in cases("attention", dtype)[DTYPES.index(dtype) :: 3]:
        length, more = case.args[1].shape[2], 70
        unused = float("nan") if case.args[1].is_floating_point() else -1  # rows of -1 have NaN as their scale
        k, v = (F.pad(tensor, (0, 0, 0, more), value=unused) for tensor in case.args[1:3])
        mask, bias = (None if tensor is None else F.pad(tensor, (0, more), value=1) for tensor in case.args[3:5])
        args = (case.args[0], k, v, mask, bias, *case.args[5:])
        found = ops.attention.body("triton")(*args, length=torch.tensor([length], device=DEVICE))
        assert_near(found.cpu(), ops.attention.reference(*case.args).cpu(), dtype, case.label)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_split_over_the_cache(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many keys in several parts, some fully masked; different lengths per row by the mask; strided keys."""
    monkeypatch.setattr(configurations, "MULTIPROCESSORS", 8)  # four parts: more only take the interpreter's time
    q = torch.randn(2, 6, 2, 33, dtype=dtype, device=DEVICE)
    storage = torch.randn(2, 300, 2, 2, 33, dtype=dtype, device=DEVICE)
    k, v = storage[:, :, :, 0].transpose(1, 2), storage[:, :, :, 1].transpose(1, 2)
    lengths = torch.tensor([300, 70], device=DEVICE)
    mask = (torch.arange(300, device=DEVICE) < lengths[:, None])[:, None, None]
    nothing = mask.clone()
    nothing[1] = False
    bias = torch.randn(1, 6, 1, 300, device=DEVICE)
    for args in (
        (mask, None, 0.2, False, 0, 0.0),
        (nothing, None, 0.2, False, 0, 0.0),
        (None, bias, 0.2, True, 0, 0.0),
        (None, None, 0.2, True, 80, 0.0),
        (mask, bias, 0.2, True, 0, 3.0),
        (torch.randn(2, 1, 1, 1, device=DEVICE), None, 0.2, True, 0, 0.0),
        (nothing, bias, 0.2, False, 0, 0.0, 4 * torch.randn(6, dtype=dtype, device=DEVICE)),
    ):
        wanted = ops.attention.reference(q, k, v, *args)
        assert_near(ops.attention.body("triton")(q, k, v, *args).cpu(), wanted.cpu(), dtype)


def test_attention_reads_the_rows_of_an_int8_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several parts and without dequantizing them first, if their scales are at multiples of 4 bytes."""
    monkeypatch.setattr(configurations, "MULTIPROCESSORS", 8)
    q, args = torch.randn(1, 4, 1, 20, device=DEVICE).bfloat16(), (None, None, 0.2, True, 0, 0.0)
    k, v = (quantize_rows(torch.randn(1, 300, 2, 20, device=DEVICE)).transpose(1, 2) for _ in "kv")
    wanted = ops.attention.reference(q, k, v, *args)
    odd = [F.pad(rows, (1, 0))[..., 1:] for rows in (k, v)]
    assert_near(ops.attention.body("triton")(q, *odd, *args).cpu(), wanted.cpu(), torch.bfloat16)
    monkeypatch.setattr(sys.modules["infuse.ops.attention"], "values_of", None)
    assert_near(ops.attention.body("triton")(q, k, v, *args).cpu(), wanted.cpu(), torch.bfloat16)


@by_dtype
def test_attention_of_many_queries(dtype: torch.dtype) -> None:
    """Several tiles of rows, which begin and end inside a query's heads; the caps and biases that PyTorch's has not."""
    q = torch.randn(1, 3, 50, 16, dtype=dtype, device=DEVICE)
    k, v = (torch.randn(1, 1, 61, 16, dtype=dtype, device=DEVICE) for _ in range(2))
    bias = torch.randn(1, 3, 1, 61, dtype=dtype, device=DEVICE)
    sinks = torch.tensor([1.0, 200.0, -float("inf")], device=DEVICE)
    for args in (
        (None, None, 0.25, True, 0, 5.0),
        (None, bias, 0.25, True, 0, 0.0),
        (None, None, 0.25, True, 9, 0.0),
        (None, None, 0.25, True, 0, 0.0, sinks),
    ):
        wanted = ops.attention.reference(q, k, v, *args)
        assert_near(ops.attention.body("triton")(q, k, v, *args).cpu(), wanted.cpu(), dtype)


# ---- recurrent mixers ----


@by_dtype
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_linear_attention_in_parts_is_the_whole(delta: bool, by_channel: bool, dtype: torch.dtype) -> None:
    """Steps, few tokens and prompts, which have other launches, over slices; the parts' decay is strided, too."""
    args, fixed = rows_of(dtype, 23, by_channel=by_channel, device=DEVICE), (40**-0.5, delta, delta)
    skip = None if delta else torch.randn(4, device=DEVICE)
    whole, state = ops.linear_attention.reference(*args, skip, None, *fixed)
    outs, now = [], None
    for first, last in ((0, 1), (1, 6), (6, 8), (8, 23)):
        out, now = ops.linear_attention.body("triton")(*(x[:, first:last] for x in args), skip, now, *fixed)
        outs.append(out)
    assert_near(torch.cat(outs, dim=1).cpu(), whole.cpu(), dtype, "outputs")
    assert_near(now.cpu(), state.cpu(), dtype, "states")


def test_damage_stays_in_later_tokens_of_its_row_and_group() -> None:
    args = rows_of(torch.float32, 9, device=DEVICE)
    wanted, _ = ops.linear_attention.body("triton")(*args, None, None, 0.2, True, True)
    args[1][1, 5, 1, 3] = float("nan")  # the key of heads 2 and 3, in row 1
    found, state = ops.linear_attention.body("triton")(*args, None, None, 0.2, True, True)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1, :5], wanted[1, :5])
    assert torch.equal(found[1, :, :2], wanted[1, :, :2])
    assert found[1, 5:, 2:].isnan().all() and state[1, 2:].isnan().all() and not state[1, :2].isnan().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
def test_damage_in_linear_attention_stays_in_its_row_and_head(by_channel: bool, delta: bool, value: float) -> None:
    function = ops.linear_attention.body("triton")
    assert_damage_stays_in_its_heads(function, value, 9, delta=delta, by_channel=by_channel, device=DEVICE)


@pytest.mark.parametrize("name", [name for name in RECURRENT if name in OPS])
def test_arguments_of_another_size_are_refused_or_taken_as_in_the_reference(name: str) -> None:
    chosen = cases(name, torch.float32)[:: 3 if DEVICE.type == "cpu" else 1]
    assert_other_sizes_are_those_of_the_reference(name, registered()[name].body("triton"), chosen)


@by_dtype
@pytest.mark.parametrize("taps", [3, 7])
def test_convolution_in_parts_is_the_whole(taps: int, dtype: torch.dtype) -> None:
    """Parts shorter than the state and longer than a tile, of slices; the interpreter cuts off three times."""
    rows = torch.randn(2, 60, 3 * 37 + 2, dtype=dtype, device=DEVICE)
    given = [rows[..., i * 37 : (i + 1) * 37] for i in range(3)]
    weight, bias = (torch.randn(*shape, dtype=dtype, device=DEVICE) for shape in ((37, taps), (37,)))
    whole, state = ops.causal_conv.reference(given[0], weight, bias, None, *given[1:], True)
    outs, now = [], None
    for first, last in ((0, 1), (1, 3), (3, 11), (11, 12), (12, 60)):
        x, gate, out_gate = (each[:, first:last] for each in given)
        out, now = ops.causal_conv.body("triton")(x, weight, bias, now, gate, out_gate, True)
        outs.append(out)
    assert_near(torch.cat(outs, dim=1).cpu(), whole.cpu(), dtype, "outputs", 2 if DEVICE.type == "cpu" else 1)
    assert_near(now.cpu(), state.cpu(), dtype, "states")


def test_gated_norms_of_short_and_long_rows() -> None:
    """Several rows for a program, with an end; one long row; gates at another distance between rows of the batch."""
    for parts, width in ((7, 24), (1, 1500)):
        x, wide = torch.randn(3, 5, parts * width, device=DEVICE), torch.randn(3, 9, parts * width + 4, device=DEVICE)
        for weight in (torch.randn(width, device=DEVICE), torch.randn(parts * width, device=DEVICE)):
            args = x, wide[:, 2:7, 4:], weight, width, 1e-6, True, False
            wanted = ops.gated_norm.reference(*args)
            assert_near(ops.gated_norm.body("triton")(*args).cpu(), wanted.cpu(), torch.float32, f"{parts}x{width}")


# ---- matrix products ----

FORMATS = (
    "int8", "int8:row", "int8:groups=3", "int8:32:asymmetric", "int4", "int4:8", "int4:32:asymmetric", "int4:row",
    "fp8", "fp8:32", "fp6", "fp6:16", "fp6:row", "mxfp4", "fp8:64:f32", "int4:32:offset", "int3:32",
    "int3:16:asymmetric", "int2:16:f16", "int2:row:offset", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
)  # fmt: skip


def quantized(text: str, inputs: int, outputs: int) -> QuantizedWeight:
    return quant_format(text).quantize(torch.randn(outputs, inputs, device=DEVICE) / inputs**0.5)


def fitting(text: str, *sizes: int) -> list[int]:
    """Numbers of inputs, in whole blocks of the format."""
    block = BLOCKS[text].inputs if text in BLOCKS else 1
    return [-(-inputs // block) * block for inputs in sizes]


def test_kernels_know_the_fields_and_codes_of_formats() -> None:
    """What the kernels repeat, since the compiler reads no tables of other modules."""
    known = kernels("words")
    for name, codes in CODES.items():
        assert known.codes_in_word(name) == codes and known.in_blocks(name) == (name in BLOCKS)
        assert (known.high_bits(name) > 0) == (name in configurations.HIGH_PARTS)
        if (block := BLOCKS.get(name)) is None:
            continue
        places, place = {}, 0
        for field in block.fields:
            places |= dict.fromkeys(field.name.split("_"), place)
            place += field.nbytes
        assert known.of_block(name, "groups") == block.inputs // block.group
        assert known.of_block(name, "bytes") == block.nbytes and places["d"] == 0 and places.get("dmin", 2) == 2
        assert known.of_block(name, "sc") == places.get("sc", 0)
        assert known.of_block(name, "mn") == places.get("mn", places.get("m", 0))
        assert known.low_bits(name) + known.high_bits(name) == block.bits
        assert known.offset(name) == -block.values[0]


@pytest.mark.parametrize("text", FORMATS)
def test_words_hold_the_codes(text: str) -> None:
    """Into words and back is the same weight; rows of the words are the format's own values; a row that is not there is
    NaN.
    """
    layout = ops.quantized_linear.bodies["triton"].layout
    assert layout is not None
    for inputs, outputs in zip(fitting(text, 384, 960), (5, 1), strict=True):
        held = quantized(text, inputs, outputs)
        words = layout.prepare(held)
        back = layout.restore(words)
        assert (
            words.tensors["data"].nbytes == held.tensors["data"].nbytes
            and torch.equal(back.tensors["data"], held.tensors["data"])
            and back.tensors["data"].dtype == held.tensors["data"].dtype
        )
        index = torch.tensor([0, outputs - 1, outputs, -1], device=DEVICE)
        for dtype in DTYPES:
            args = (index, [*words.tensors.values()], outputs, inputs, text, dtype)
            found = ops.quantized_embedding.body("triton")(*args)
            wanted = held.format.dequantize(held, dtype)[[0, -1]]
            assert_near(found[:2].cpu(), wanted.cpu(), dtype, text)
            if dtype != torch.bfloat16 or DEVICE.type == "cuda":  # the interpreter cuts bfloat16 off, it does not round
                assert torch.equal(found[:2], wanted), dtype
            assert bool(found[2:].isnan().all())


def test_groups_that_cut_words_are_left_to_the_reference() -> None:
    layout = ops.quantized_linear.bodies["triton"].layout
    assert layout is not None
    for text, inputs, smallest in (
        ("int8:7", 42, 4), ("int4:6", 42, 8), ("fp6:8", 64, 16), ("int4:row", 42, 8), ("int2:8", 64, 16),
        ("int3:24", 48, 16),
    ):  # fmt: skip
        assert layout.prepare(quantized(text, inputs, 3)) is None, text
        assert f"are not multiples of {smallest}" in str(layout.declines(quant_format(text), inputs))
    assert layout.prepare(quantized("int3:16", 48, 3)) is None
    assert str(layout.declines(quant_format("int3:16"), 48)).endswith("48 inputs are not a multiple of 32")


@pytest.mark.parametrize("text", FORMATS)
def test_quantized_products(text: str) -> None:
    """One row, a tile with an end, rows enough for two tiles; x strided; without a bias; more words than a program
    takes at once.
    """
    outputs, (inputs,) = 67, fitting(text, 2304 if text in ("int4", "int8:32:asymmetric") else 384)
    held = quantized(text, inputs, outputs)
    for rows, dtype in ((1, torch.float32), (1, torch.float16), (3, torch.bfloat16), (70, torch.float16)):
        x = torch.randn(rows, 2 * inputs, device=DEVICE).to(dtype)[:, ::2]
        compare(
            "quantized_linear",
            (x, [*held.tensors.values()], None, outputs, inputs, text),
            dtype,
            f"{text} {rows} {dtype}",
        )


@by_dtype
def test_products_with_shared_sums(dtype: torch.dtype) -> None:
    """Few outputs of many inputs: several programs for each, added up in one order."""
    for rows in (1, 3):
        x, weight = (
            torch.randn(rows, 5003, device=DEVICE).to(dtype),
            (torch.randn(6, 5003, device=DEVICE) / 70).to(dtype),
        )
        bias = torch.randn(6, device=DEVICE).to(dtype)
        compare("linear", (x, weight, bias), dtype, f"{rows}")
        compare("linear", (x, weight, bias, *ops.NO_NORM, "gelu_tanh", True), dtype, f"gated {rows}")
        held = quantized("int4:40:asymmetric", 5040, 6)
        x = torch.randn(rows, 5040, device=DEVICE).to(dtype)
        weight = (x, [*held.tensors.values()], bias, 6, 5040, "int4:40:asymmetric")
        compare("quantized_linear", weight, dtype, f"{rows}")
        norm = ("layer", *(torch.randn(5040, device=DEVICE).to(dtype) for _ in range(2)), 1e-5, 0.0)
        residual = torch.randn(6, rows, device=DEVICE).to(dtype).t()
        compare("quantized_linear", (*weight, *norm, None, False, residual), dtype, f"norm and residual, {rows}")
        compare("quantized_linear", (*weight, *norm, "silu", True, residual[:, :3]), dtype, f"gated silu, {rows}")
        x, weight = x[:, :5003], (torch.randn(6, 5003, device=DEVICE) / 70).to(dtype)
        norm = ("rms", norm[1][:5003], None, 1e-5, 1.0)
        compare("linear", (x, weight, bias, *norm, None, False, residual), dtype, f"norm and residual, {rows}")


def test_norms_of_rows_in_several_blocks_and_beside_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows longer than what is read at once for their norm; more rows than a product normalises; a mean far from zero;
    a strided x.
    """
    monkeypatch.setattr(configurations, "NORMED_VALUES", 1024)
    normed = registered()["layer_norm"].bodies["triton"]
    alone: list[int] = []
    monkeypatch.setitem(
        registered()["layer_norm"].bodies,
        "triton",
        replace(normed, function=lambda *args: alone.append(1) or normed.function(*args)),
    )
    for rows, dtype, expected in (
        (1, torch.float32, 0),
        (1, torch.float16, 0),
        (8, torch.float16, 0),
        (9, torch.float16, 1),
    ):
        x = (torch.randn(rows, 2 * 2100, device=DEVICE) + 30).to(dtype)[:, ::2]
        weight, bias = (torch.randn(2100, device=DEVICE).to(dtype) for _ in range(2))
        matrix, residual = (
            (torch.randn(20, 2100, device=DEVICE) / 46).to(dtype),
            torch.randn(rows, 20, device=DEVICE).to(dtype),
        )
        alone.clear()
        compare(
            "linear",
            (x, matrix, None, "layer", weight, bias, 1e-5, 0.0, None, False, residual),
            dtype,
            f"{rows} {dtype}",
        )
        assert len(alone) == expected, rows


@by_dtype
def test_strides_of_plain_products(dtype: torch.dtype) -> None:
    wide, bias = torch.randn(40, 128, device=DEVICE).to(dtype), torch.randn(80, device=DEVICE).to(dtype)[::2]
    for x in (torch.randn(3, 128, device=DEVICE).to(dtype)[:, ::2], torch.randn(64, 1, device=DEVICE).to(dtype).t()):
        compare("linear", (x, wide[:, 64:], bias), dtype, "a slice of the weight")
        compare("linear", (x, torch.randn(64, 40, device=DEVICE).to(dtype).t(), bias), dtype, "a transposed weight")


@pytest.mark.parametrize("text", ["int8", "int4", "fp8", "fp6", "int4:32:asymmetric", "mxfp4"])
@pytest.mark.parametrize("size", [2.0**-20, 2.0**40])
def test_large_and_small_values_of_one_row(text: str, size: float) -> None:
    """The fast decoding of 16-bit rows multiplies tiny numbers by x: neither end may be lost."""
    held = quantized(text, 256, 9)
    x = (torch.randn(1, 256, device=DEVICE) * size).bfloat16()
    compare("quantized_linear", (x, [*held.tensors.values()], None, 9, 256, text), torch.bfloat16, text)


def test_not_a_number_in_a_row_of_16_bits() -> None:
    for text in ("int8", "int4", "fp8", "fp6", "int4:32:asymmetric"):
        held = quantized(text, 128, 5)
        x = torch.randn(1, 128, device=DEVICE).bfloat16()
        x[0, 77] = float("nan")
        compare("quantized_linear", (x, [*held.tensors.values()], None, 5, 128, text), torch.bfloat16, text)


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_numbers_beyond_all_experts_add_nothing(tokens: int) -> None:
    """Also those that 32 bits would make the number of an expert."""
    x, up, down = torch.randn(tokens, 64), torch.randn(2 * 64, 64), torch.randn(2 * 64, 32)
    given = [there(one) for one in (x, torch.zeros(tokens, 2, dtype=torch.int64), torch.rand(tokens, 2))]
    for number in (2, -1, (1 << 32) + 1, -(1 << 32)):
        given[1][:, 1] = number
        alone = given[0], given[1][:, :1], given[2][:, :1]
        results = [
            ops.experts.body("triton")(*one, there(up), None, there(down), None, "silu") for one in (given, alone)
        ]
        assert_near(results[0].cpu(), results[1].cpu(), torch.float32, str(number))
