"""The products of ops/linear.py with quantized weights, and embedding lookups in them, in Triton.

Weights are converted once, to 32-bit words (words.py). One row of x streams them (kernels/stream.py). More rows
multiply tiles that are dequantized on the fly (kernels/product.py). Many rows use PyTorch's product with the whole
dequantized weight, which costs less than dequantizing it again for each tile of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ops.embedding import quantized_embedding
from infuse.ops.linear import FEW_ROWS, Fusion, quantized_linear
from infuse.ops.triton import DTYPES, kernels, needs
from infuse.ops.triton.configurations import DEQUANTIZED_WORDS, MOST_QUANTIZED_ROWS, quantized_row, quantized_tiles
from infuse.ops.triton.linear import ALONE, combine, constants, normed_before
from infuse.ops.triton.words import CODES, WORDS, segment_of, unpacked
from infuse.quant.parse import quant_format


@quantized_linear.implement("triton", needs, WORDS, fuses=True)
def _quantized_linear(
    x: Tensor, buffers: Sequence[Tensor], bias: Tensor | None, outputs: int, inputs: int, format: str, *fusion: Any
) -> Any:
    around, dtype, rows = Fusion(*fusion) if fusion else ALONE, x.dtype, x.numel() // inputs
    if dtype not in DTYPES:
        wide = [t.float() if isinstance(t, Tensor) else t for t in (bias, *around)]
        return _quantized_linear(x.float(), buffers, wide[0], outputs, inputs, format, *wide[1:]).to(dtype)
    x, around = normed_before(x, around)
    # With more rows, float32 tiles do not fit the shared memory.
    most = FEW_ROWS if dtype is torch.float32 else MOST_QUANTIZED_ROWS
    if not 0 < rows <= most or outputs == 0 or x.shape[-1] != inputs:
        weight = dequantized(None, buffers, x.new_empty(outputs, inputs), outputs, format)
        bias = None if bias is None else bias.to(dtype)
        return around.separately(lambda x: F.linear(x, weight, bias), x, "triton")
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    around = around if around.residual is None else around._replace(residual=around.residual.contiguous())
    data, scale, zero, groups = unpacked(buffers, inputs, format)
    name, wanted = quant_format(format).name, around.outputs(outputs)
    out = x.new_empty(*x.shape[:-1], wanted)
    segment = segment_of(inputs, groups)
    words, segments = segment // CODES[name], inputs // segment
    chosen = (
        quantized_row(outputs, segments, name, words)
        if rows == 1
        else quantized_tiles(rows, outputs, segments, name, words)
    )
    to = out if chosen.splits == 1 else x.new_empty(chosen.splits, rows, outputs, dtype=torch.float32)
    tile = max(around.outputs(chosen.outputs), 1 if rows == 1 else 16)
    weight_and_more = data, scale, zero, bias, around.norm_weight, around.norm_bias, around.residual, to
    sizes = inputs, outputs, data.stride(0), groups, segments // groups, around.eps, around.offset
    options = constants(around, chosen.rows, inputs) | {
        "FORMAT": name,
        "SEGMENT": segment,
        "OUTPUTS": tile,
        "SEGMENTS": chosen.depth,
        "SPLITS": chosen.splits,
        "num_warps": chosen.warps,
    }
    if rows == 1:
        kernels("stream").quantized_row[(-(-wanted // tile), chosen.splits)](
            x, *weight_and_more, *sizes, TINY=dtype is not torch.float32, STAGES=chosen.stages, **options
        )
    else:
        tiles = -(-rows // chosen.rows) * -(-wanted // tile)
        kernels("product").product_tiles[(tiles, chosen.splits)](
            x, *weight_and_more, rows, *sizes[:2], inputs, *sizes[2:],
            ROWS=chosen.rows, num_stages=chosen.stages, **options,
        )  # fmt: skip
    if chosen.splits > 1:
        combine(to, bias, out, around)
    return out


def dequantized(index: Tensor | None, buffers: Sequence[Tensor], out: Tensor, outputs: int, format: str) -> Tensor:
    """Fill `out` [rows, inputs] with the rows `index` of the weight (None: all rows) and return it."""
    if out.numel():
        rows, inputs = out.shape
        data, scale, zero, groups = unpacked(buffers, inputs, format)
        name = quant_format(format).name
        segment = segment_of(inputs, groups)
        tile = max(DEQUANTIZED_WORDS * CODES[name] // segment, 1)
        kernels("product").dequantize_rows[(rows, -(-inputs // (segment * tile)))](
            index, data, scale, zero, out, inputs, outputs, data.stride(0), groups, inputs // segment // groups,
            FORMAT=name, SEGMENT=segment, SEGMENTS=tile, num_warps=4,
        )  # fmt: skip
    return out


@quantized_embedding.implement("triton", needs, WORDS)
def _quantized_embedding(
    index: Tensor, buffers: Sequence[Tensor], rows: int, width: int, format: str, dtype: torch.dtype
) -> Any:
    """An index out of range gives NaN: to raise an error, the host would have to wait for the device."""
    out = torch.empty(index.numel(), width, dtype=dtype, device=buffers[0].device)
    return dequantized(index.reshape(-1), buffers, out, rows, format).view(*index.shape, width)
