"""Mixture of experts: run each token through the experts that a router chose, and sum their weighted outputs.

There are two ops, for plain and for quantized weights. All experts of a layer are one tall matrix each: `up` is
[E * U, H], where an expert's U rows are [gate | up] if gated, and `down` is [E * H, I]. Whole experts are runs of rows.
Suffixes: T tokens, K routes of a token, E experts, H hidden width, I inner width, U = 2 I if gated else I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from infuse.ground.activations import ExpertGate
from infuse.ground.modes import transform
from infuse.ops.op import Case, op
from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format

_GATE = "str activation, bool gated=True, float limit=0.0, bool limit_after=False, float up_offset=0.0, int first=0"


@op(
    "experts(Tensor x, Tensor index, Tensor weights, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias,"
    f" {_GATE}) -> Tensor",
    reads_values=True,
)
def experts(
    x_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *gate: Any,
) -> Tensor:
    """For each token t, the sum over k of weights[t, k] * down_e(gate(up_e(x[t]))), where e = index[t, k] - first.

    Routes to experts outside [0, E) add nothing. `index` is int64, `weights` float32 or x.dtype, biases are flat.
    Matrices and biases are cast to x.dtype, only those of experts in use. Products and gate are rounded to x.dtype;
    weights and sum are computed in the promoted dtype of weights and x.
    """
    width = x_TH.shape[1]

    def product(matrix: Tensor, bias: Tensor | None, rows: slice, x: Tensor) -> Tensor:
        return F.linear(x, matrix[rows].to(x.dtype), None if bias is None else bias[rows].to(x.dtype))

    return _summed(
        (x_TH, index_TK, weights_TK),
        (up.shape[0], down.shape[0] // width),
        (partial(product, up, up_bias), partial(product, down, down_bias)),
        ExpertGate(*gate),
    )


@op(
    "quantized_experts(Tensor x, Tensor index, Tensor weights, Tensor[] up, Tensor? up_bias, Tensor[] down,"
    f" Tensor? down_bias, int inner, str up_format, str down_format, {_GATE}) -> Tensor",
    reads_values=True,
)
def quantized_experts(
    x_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    up: Sequence[Tensor],
    up_bias: Tensor | None,
    down: Sequence[Tensor],
    down_bias: Tensor | None,
    inner: int,
    up_format: str,
    down_format: str,
    *gate: Any,
) -> Tensor:
    """`experts` with dequantized weights, from the buffers of two QuantizedWeights, in their order."""

    width = x_TH.shape[1]

    def product(buffers: Sequence[Tensor], text: str, bias: Tensor | None, rows: slice, x: Tensor) -> Tensor:
        chosen, shape = quant_format(text), (rows.stop - rows.start, x.shape[1])
        weight = QuantizedWeight.listed((buffer[rows] for buffer in buffers), shape, chosen)
        return F.linear(x, chosen.dequantize(weight, x.dtype), None if bias is None else bias[rows])

    products = partial(product, up, up_format, up_bias), partial(product, down, down_format, down_bias)
    rows = up[0].shape[0], down[0].shape[0] // width
    return _summed((x_TH, index_TK, weights_TK), rows, products, ExpertGate(*gate))


Product = Callable[[slice, Tensor], Tensor]  # (an expert's rows of the tall matrix, its tokens) → their product


def _summed(
    routed: tuple[Tensor, Tensor, Tensor], rows: tuple[int, int], products: tuple[Product, Product], gate: ExpertGate
) -> Tensor:
    """Run each expert on its tokens and sum the outputs. `rows`: of all of `up`, and the number of experts."""
    (x_TH, index_TK, weights_TK), (up, down), (up_rows, count) = routed, products, rows
    width, expert_TK = x_TH.shape[1], index_TK - gate.first
    here_TK = (expert_TK >= 0) & (expert_TK < count)

    def computed(expert: int, x: Tensor) -> Tensor:
        of_up, of_down = (slice(expert * step, (expert + 1) * step) for step in (up_rows // count, width))
        return down(of_down, gate.inner(up(of_up, x)))

    y_TKH = x_TH.new_zeros(*index_TK.shape, width)
    if transform() is None:
        for expert in expert_TK[here_TK].unique().tolist():
            token, route = torch.where(expert_TK == expert)
            y_TKH[token, route] = computed(expert, x_TH[token])
    else:  # which cannot tell the tokens of an expert: each expert computes all
        for expert in range(count):
            y_TKH = torch.where((expert_TK == expert)[..., None], computed(expert, x_TH)[:, None], y_TKH)
    weighed_TKH = y_TKH * weights_TK.masked_fill(~here_TK, 0).unsqueeze(-1)
    return weighed_TKH.sum(dim=1).to(x_TH.dtype)


@experts.flops
def _flops(x: Sequence[int], index: Sequence[int], *more: Any) -> int:
    return _flops_of_routes(x[1], index, more[3][1], more[5:])


@quantized_experts.flops
def _quantized_flops(x: Sequence[int], index: Sequence[int], *more: Any) -> int:
    return _flops_of_routes(x[1], index, more[5], more[8:])


def _flops_of_routes(width: int, index: Sequence[int], inner: int, gate: Sequence[Any]) -> int:
    """Each route is one row through both matrices of an expert."""
    return 2 * prod(index) * width * inner * (3 if ExpertGate(*gate).gated else 2)


@experts.fake
def _fake(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(x.shape)


@quantized_experts.fake
def _quantized_fake(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(x.shape)


_OSS = ExpertGate("quick_gelu", limit=7.0, up_offset=1.0)  # gpt-oss
# Tokens, routes, experts, hidden, inner; biases, weights in float32, the gate. Widths that no tile divides are last.
_CASES = (
    (1, 2, 4, 64, 64, False, True, ExpertGate("silu")),
    (5, 2, 3, 64, 128, False, False, ExpertGate("silu")),
    (0, 2, 4, 64, 64, False, True, ExpertGate("silu")),
    (1, 4, 4, 64, 192, True, False, _OSS),
    (19, 3, 8, 128, 64, True, True, _OSS),
    (3, 1, 5, 64, 64, False, True, ExpertGate("silu", limit=0.5)),
    (9, 2, 4, 64, 64, False, True, ExpertGate("silu", limit=0.5, limit_after=True)),
    (7, 2, 4, 128, 64, True, True, ExpertGate("relu2", gated=False)),
    (2, 1, 1, 64, 64, False, False, ExpertGate("gelu", gated=False)),
    (6, 4, 4, 64, 64, False, True, ExpertGate("gelu_tanh", first=4)),
    (70, 2, 2, 64, 64, False, False, ExpertGate("silu")),
    (1, 8, 16, 128, 96, False, True, ExpertGate("silu", first=3)),
    (45, 3, 8, 64, 128, False, True, ExpertGate("silu")),
    (150, 2, 9, 128, 64, True, True, _OSS),
    (4, 2, 3, 34, 9, True, True, ExpertGate("silu")),
    (1, 3, 4, 33, 17, False, False, ExpertGate("gelu", gated=False)),
)


def _routed(dtype: torch.dtype, device: torch.device, sizes: tuple) -> Iterator[tuple[str, tuple, tuple, ExpertGate]]:
    """Yield a label, (x, index, weights), the biases and the gate; a seventh of the routes is out of range."""
    tokens, routes, count, width, inner, biased, wide, gate = sizes

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    index = torch.rand(tokens, count + 2, device=device).argsort(dim=1)[:, :routes].sub(1).add(gate.first)
    weights = torch.rand(tokens, routes, dtype=torch.float32 if wide else dtype, device=device)
    up_rows = inner * (2 if gate.gated else 1)
    biases = (made(count * up_rows), made(count * width)) if biased else (None, None)
    words = (
        gate.activation,
        "gated" if gate.gated else "",
        gate.limit and f"limit {gate.limit}",
        gate.limit_after and "after",
        gate.up_offset and "offset",
        gate.first and f"first {gate.first}",
        biased and "bias",
        wide and "float32 weights",
    )
    label = " ".join((f"{tokens} tokens, {routes} of {count}, {width}x{inner}", *(word for word in words if word)))
    yield label, (made(tokens, width), index, weights), biases, gate
    if tokens > 1:  # all tokens to one expert, the others without any
        alone = torch.full_like(index, gate.first + count - 1)
        yield f"{label}, one expert", (made(tokens, width), alone, weights), biases, gate


def _matrices(sizes: tuple, device: torch.device) -> tuple[Tensor, Tensor]:
    _, _, count, width, inner, *_, gate = sizes
    up = torch.randn(count * inner * (2 if gate.gated else 1), width, device=device) / width**0.5
    return up, torch.randn(count * width, inner, device=device) / inner**0.5


@experts.cases
def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for sizes in _CASES:
        up, down = (matrix.to(dtype) for matrix in _matrices(sizes, device))
        for label, routed, (up_bias, down_bias), gate in _routed(dtype, device, sizes):
            yield Case(label, (*routed, up, up_bias, down, down_bias, *gate))


@quantized_experts.cases
def _quantized_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    texts = (
        "int8",
        "int8:32:asymmetric",
        "int4",
        "int4:32:asymmetric",
        "fp8",
        "fp8:32",
        "fp6",
        "fp6:row",
        "mxfp4",
        "nf4:32",
        "q5_1",
        "int4:32:offset",
        "int3:32",
        "int2:16:asymmetric",
        "int2:16:offset",
    )
    for i, text in enumerate(texts):
        fitting = [sizes for sizes in _CASES if not any(quant_format(text).fits(inputs) for inputs in sizes[3:5])]
        for sizes in fitting[i % 2 :: 2]:
            up, down = (quant_format(text).quantize(matrix) for matrix in _matrices(sizes, device))
            for label, routed, (up_bias, down_bias), gate in _routed(dtype, device, sizes):
                matrices = ([*up.tensors.values()], up_bias, [*down.tensors.values()], down_bias)
                yield Case(f"{text} {label}", (*routed, *matrices, sizes[4], text, text, *gate))
