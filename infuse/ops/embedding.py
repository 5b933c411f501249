"""Embedding lookup in a quantized table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ground.modes import transform
from infuse.ops.op import Case, op
from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format


@op("quantized_embedding(Tensor index, Tensor[] buffers, int rows, int width, str format, ScalarType dtype) -> Tensor")
def quantized_embedding(
    index: Tensor, buffers: Sequence[Tensor], rows: int, width: int, format: str, dtype: torch.dtype
) -> Tensor:
    """dequantize(buffers)[index]: [..., width] in `dtype`; `index` holds integers in [0, rows)."""
    flat, chosen = index.reshape(-1), quant_format(format)
    if transform() is not None:  # formats compute in place, which vmap refuses where the rows alone are batched
        return F.embedding(index, chosen.dequantize(QuantizedWeight.listed(buffers, (rows, width), chosen), dtype))
    # index_select refuses indices out of range, negative ones too, as nn.Embedding does.
    chosen_rows = (buffer.index_select(0, flat) for buffer in buffers)
    taken = QuantizedWeight.listed(chosen_rows, (flat.numel(), width), chosen)
    return chosen.dequantize(taken, dtype).view(*index.shape, width)


@quantized_embedding.fake
def _fake(index: Tensor, buffers: Sequence[Tensor], *arguments: Any) -> Tensor:
    (width, _, dtype) = arguments[-3:]
    return buffers[0].new_empty(*index.shape, width, dtype=dtype)


@quantized_embedding.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    texts = ("int8", "int4:32:asymmetric", "fp8", "fp6:32", "int8:f16", "int8:f32", "nvfp4", "int3:32", "int2")
    for text in (*texts, "int4:32:offset", "int2:32:offset"):
        table = quant_format(text).quantize(torch.randn(33, 64, device=device))
        for shape in ((), (1,), (2, 3), (0,)):
            index = torch.randint(33, shape, device=device)
            yield Case(f"{text} {shape}", (index, [*table.tensors.values()], 33, 64, text, dtype))
