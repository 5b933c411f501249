"""Random valid blocks of GGUF's types, and their values as the gguf package computes them."""

from __future__ import annotations

import numpy
import pytest
import torch

from infuse.weights.gguf.file import TYPES

# Bytes at which float16 fields begin. Other bytes of a block may be anything.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "MXFP4": (), "NVFP4": (),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,),
}  # fmt: skip


def random_blocks(type: str, rows: int, inputs: int, seed: int = 0, std: float | None = None) -> torch.Tensor:
    """Rows of blocks as bytes, uint8 [rows, bytes]. With `std`, scales are such that values have about this spread."""
    draw = torch.Generator().manual_seed(seed)
    values, size = next((values, size) for name, values, size in TYPES.values() if name == type)
    raw = torch.randint(256, (rows, inputs // values, size), generator=draw, dtype=torch.uint8)
    shape = (rows, inputs // values, len(HALVES[type]))
    halves = torch.randn(shape, generator=draw)
    if std is not None:
        halves = halves.abs() * std * _STEP.get(type, 1 / 8)
        if type in ("MXFP4",):
            raw[..., 0] = 122 + raw[..., 0] % 3
        if type == "NVFP4":
            raw[..., :4] = 16 + raw[..., :4] % 16
    elif type == "MXFP4":
        raw[..., 0] %= 255
    elif type == "NVFP4":
        raw[..., :4] %= 128  # e4m3 without a sign
    for number, start in enumerate(HALVES[type]):
        field = halves[..., number : number + 1].to(torch.float16).contiguous().view(torch.uint8)
        raw[..., start : start + 2] = field
    return raw.view(rows, -1)


_STEP = {
    "Q8_0": 1 / 64, "IQ4_NL": 1 / 64, "Q2_K": 1 / 32, "Q3_K": 1 / 64, "Q4_K": 1 / 512, "Q5_K": 1 / 1024,
    "Q6_K": 1 / 1024, "IQ4_XS": 1 / 1024,
}  # fmt: skip


def values_of(raw: torch.Tensor, type: str) -> torch.Tensor:
    """The values of rows of blocks, float32, by the gguf package."""
    gguf = pytest.importorskip("gguf")
    return torch.from_numpy(
        numpy.ascontiguousarray(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[type]).astype(numpy.float32))
    )
