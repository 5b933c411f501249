"""Blocks of every type that is kept: our values are those of the gguf package, bit by bit."""

from __future__ import annotations

import pytest
import torch

from infuse.ground.errors import ConfigError
from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format
from infuse.weights.gguf import blocks
from infuse.weights.gguf.blocks import FORMATS, split_blocks
from tests.support.gguf_blocks import random_blocks, values_of

ROWS, INPUTS = 6, 1024


@pytest.mark.parametrize("body", ("compiled", "reference"))
@pytest.mark.parametrize("type", FORMATS)
def test_values_are_those_of_the_gguf_package(type, body, monkeypatch):
    if body == "reference":
        monkeypatch.setattr(blocks, "kernels", lambda: "not built here")
    raw = random_blocks(type, ROWS, INPUTS)
    format = quant_format(FORMATS[type])
    data, scale = split_blocks(raw, type)
    weight = QuantizedWeight.of({"data": data, "scale": scale}, (ROWS, INPUTS), format)
    values, wanted = format.dequantize(weight), values_of(raw, type)
    assert torch.equal(values, wanted)
    same_bits = torch.equal(values.view(torch.int32), wanted.view(torch.int32))
    assert same_bits or type in ("MXFP4", "NVFP4")  # e2m1 has a negative zero, ggml's table has not
    for buffer in format.buffers(INPUTS):
        tensor = weight.tensors[buffer.name]
        assert tensor.dtype == buffer.dtype and tensor.shape == (ROWS, buffer.width(INPUTS))
        assert tensor.is_contiguous()


@pytest.mark.parametrize("type", FORMATS)
def test_rows_are_split_one_by_one_alike(type):
    """The conversion is one of rows: any part gives the part of the result. Input bytes are left alone."""
    raw = random_blocks(type, ROWS, INPUTS)
    before = raw.clone()
    whole = split_blocks(raw, type)
    parts = [split_blocks(raw[row : row + 1], type) for row in range(ROWS)]
    for place in range(2):
        joined = torch.cat([part[place] for part in parts])
        assert torch.equal(joined.view(torch.uint8), whole[place].view(torch.uint8))
    empty = split_blocks(raw[:0], type)
    assert [tensor.shape[0] for tensor in empty] == [0, 0] and torch.equal(raw, before)


def test_the_smallest_and_the_largest_exponent_of_mxfp4():
    raw = random_blocks("MXFP4", 255, 32)
    raw[:, 0] = torch.arange(255)
    _, scale = split_blocks(raw, "MXFP4")
    assert scale.double().flatten().tolist() == [2.0**exponent for exponent in range(-127, 128)]
    raw[7, 0] = 255
    with pytest.raises(ConfigError, match="255"):
        split_blocks(raw, "MXFP4")


def test_our_sizes_of_blocks_are_those_of_the_package():
    gguf = pytest.importorskip("gguf")
    from infuse.weights.gguf.file import TYPES

    sizes = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert dict(TYPES) == sizes


@pytest.mark.parametrize("type", FORMATS)
def test_memory_is_about_that_of_the_file(type):
    stored = random_blocks(type, ROWS, INPUTS).numel()
    assert quant_format(FORMATS[type]).nbytes(ROWS, INPUTS) <= 1.15 * stored
