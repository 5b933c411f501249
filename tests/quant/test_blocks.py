"""The block formats and nf4: fields and codes by hand, the error that is told, refusals, panels."""

from __future__ import annotations

import struct

import pytest
import torch

from infuse.ground.errors import ConfigError
from infuse.native import DTYPES, kernels
from infuse.ops.cpu.quantized_linear import PANELS, code_of
from infuse.ops.triton.words import WORDS
from infuse.quant.blocks import BLOCKS, SMALLEST, BlockFormat, pack_codes, unpack_codes
from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format
from infuse.quant.tables import ERRORS, TABLES

needs_kernels = pytest.mark.skipif(isinstance(kernels(), str), reason="needs the C++ kernels")


def random_weight(name: str, rows: int, blocks: int) -> QuantizedWeight:
    """Random codes and finite scales, as files may hold them."""
    format = quant_format(name)
    assert isinstance(format, BlockFormat)
    inputs = blocks * format.block.inputs
    codes = torch.randint(2**format.bits, (rows, inputs), dtype=torch.uint8)
    parts = []
    for field in format.block.fields:
        shape = rows, blocks, field.count
        if field.dtype is torch.int8:
            numbers = torch.randint(-128, 128, shape).to(torch.int8)
        elif field.dtype is torch.uint8:
            numbers = torch.randint(0, 64, shape).to(torch.uint8)
        else:
            numbers = (torch.randn(shape) * 0.1).to(field.dtype)
        parts.append(numbers.contiguous().view(torch.uint8))
    tensors = {"data": pack_codes(codes, format.bits), "scale": torch.cat(parts, dim=-1).flatten(1)}
    return QuantizedWeight.of(tensors, (rows, inputs), format)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_codes_are_packed_as_the_format_says(bits: int) -> None:
    codes = torch.randint(2**bits, (3, 96), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, 96 * bits // 8) and torch.equal(unpack_codes(packed, bits), codes)
    one = torch.zeros(1, 32, dtype=torch.uint8)
    one[0, 5] = 2**bits - 1
    told = {
        2: {1: 3 << 2},
        3: {1: 1 << 7, 2: 3},
        4: {2: 0xF0},
        5: {2: 0xF0, 16: 1 << 5},
        6: {3: 63 << 6 & 255, 4: 63 << 6 >> 8},
    }[bits]
    assert {i: int(byte) for i, byte in enumerate(pack_codes(one, bits)[0]) if byte} == told


def test_a_block_of_q4_k_by_hand() -> None:
    scales, mins = [1, 2, 3, 4, 5, 6, 7, 63], [0, 1, 2, 3, 4, 5, 6, 63]
    fields = struct.pack("<ee8B8B", 0.5, 0.25, *scales, *mins)
    codes = torch.arange(256) % 16
    tensors = {
        "data": pack_codes(codes.to(torch.uint8)[None], 4),
        "scale": torch.frombuffer(bytearray(fields), dtype=torch.uint8)[None],
    }
    format = quant_format("q4_k")
    values = format.dequantize(QuantizedWeight.of(tensors, (1, 256), format))[0]
    wanted = [0.5 * scales[i // 32] * (i % 16) - 0.25 * mins[i // 32] for i in range(256)]
    assert values.tolist() == wanted


@pytest.mark.parametrize("name", BLOCKS)
def test_the_error_of_normal_weights_is_as_told(name: str) -> None:
    format, weight = quant_format(name), torch.randn(512, 2048)
    error = (format.dequantize(format.quantize(weight)) - weight).norm() / weight.norm()
    assert float(error) == pytest.approx(format.expected_error, rel=0.01)
    zeros = format.dequantize(format.quantize(torch.zeros(2, 256)))
    assert zeros.abs().max() <= SMALLEST  # the tables of iq4 have no zero


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_four_bits(name: str) -> None:
    format, weight = quant_format(name), torch.randn(512, 2048)
    held = format.quantize(weight)
    values = format.dequantize(held)
    assert float((values - weight).norm() / weight.norm()) == pytest.approx(ERRORS[name], rel=0.01)
    peaks = held.tensors["scale"].view(torch.float32)
    assert torch.equal(peaks, weight.reshape(512, -1, 64).abs().amax(-1))
    steps = (weight.reshape(512, -1, 64) / peaks[..., None])[:8, ..., None]
    nearest = (steps - torch.tensor(TABLES[name])).abs().amin(-1)
    found = (values - weight).reshape(512, -1, 64)[:8].abs() / peaks[:8, :, None]
    assert torch.allclose(found, nearest, atol=1e-6)


def test_scales_in_float32_stay_when_a_model_is_cast() -> None:
    held = quant_format("int8:32:f32").quantize(torch.randn(3, 64))
    module = torch.nn.Module()
    module.register_buffer("scale", held.tensors["scale"])
    assert torch.equal(module.to(torch.bfloat16).scale, held.tensors["scale"])


@pytest.mark.parametrize("text", ["nvfp4", "iq4_nl", "iq4_xs", "nf4", "fp4:32"])
def test_kernels_that_do_not_know_a_format_leave_it_to_the_reference(text: str) -> None:
    assert "no kernel" in (WORDS.declines(quant_format(text), 256) or "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("q4_k:32", "'32' in the quantization format 'q4_k:32' is not known"),
        ("q9_k", "unknown quantization format 'q9_k'"),
        ("nf4:f16", "nf4 has no :f16"),
        ("fp6:f32", "fp6 has no :f32"),
        ("nf4:64:a8", "nf4 has no options but"),
    ],
)
def test_texts_that_are_no_formats(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        quant_format(text)


def test_widths_that_blocks_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="q6_k: blocks of 256 do not divide 320 inputs"):
        quant_format("q6_k").quantize(torch.randn(2, 320))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLOCKS)
def test_panels_hold_what_files_hold(name: str, dtype: torch.dtype) -> None:
    for rows, blocks in ((1, 1), (33, 2), (16, 5)):
        held = random_weight(name, rows, blocks)
        panels = PANELS.prepare(held)
        assert panels is not None
        again = PANELS.restore(panels)
        assert all(torch.equal(held.tensors[key], again.tensors[key]) for key in held.tensors)
        values = torch.full(held.shape, float("nan"), dtype=dtype)
        kernels().dequantize.default(list(panels.tensors.values()), code_of(name), values)
        assert torch.equal(values, held.format.dequantize(held, dtype))
        in_parts = [held, random_weight(name, 16, blocks)]
        if rows == 16:
            assert PANELS.gather is not None
            both = PANELS.gather(in_parts, (32, held.shape[1]))
            assert both is not None
            first = PANELS.restore(both).tensors["scale"][:16]
            assert torch.equal(first, held.tensors["scale"])
