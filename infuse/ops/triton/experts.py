"""The experts of ops/experts.py in Triton (kernels/experts.py), with plain and with quantized weights.

Few routes stream their experts' rows in two kernels. Many are sorted by expert on the device and multiply tiles of the
weights. The host never waits for the device, so CUDA graphs can capture both. The sum over a token's routes has a fixed
order.

Suffixes: R routes of all tokens, E experts, N tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infuse.ground.activations import ExpertGate
from infuse.ops.experts import experts, quantized_experts
from infuse.ops.linear import FEW_ROWS
from infuse.ops.triton import DTYPES, kernels, needs
from infuse.ops.triton.configurations import (
    COMBINED_BLOCK,
    FEW_TOKENS,
    Tiles,
    expert_tiles,
    plain_row,
    quantized_row,
    quantized_tiles,
)
from infuse.ops.triton.words import CODES, WORDS, segment_of, unpacked
from infuse.quant.parse import quant_format

_Held = tuple[Tensor, Tensor | None, Tensor | None, int, Tensor | None]  # data, scale, zero, groups, bias


@dataclass(frozen=True)
class _Matrix:
    """One matrix of all experts; `outputs` rows belong to each."""

    data: Tensor
    scale: Tensor | None
    zero: Tensor | None
    groups: int
    bias: Tensor | None
    inputs: int
    outputs: int
    format: str  # "plain" or the name of a format

    @property
    def _segment(self) -> int:
        return segment_of(self.inputs, self.groups)

    @property
    def arguments(self) -> tuple:
        """The kernels' arguments for this matrix."""
        bias = None if self.bias is None else self.bias.contiguous()
        of_group = 1 if self.scale is None else self.inputs // self._segment // self.groups
        tensors = self.data, self.scale, self.zero, bias
        return *tensors, self.inputs, self.outputs, self.data.stride(0), self.groups, of_group

    def constants(self, chosen: Tiles) -> dict[str, Any]:
        """The compile-time constants of a kernel that takes the tiles `chosen`."""
        plain = self.scale is None
        return {
            "FORMAT": self.format,
            "OUTPUTS": chosen.outputs,
            "num_warps": chosen.warps,
            "SEGMENT": chosen.depth if plain else self._segment,
            "SEGMENTS": 1 if plain else chosen.depth,
        }

    def row(self, element_bytes: int) -> Tiles:
        """The launch for single routes."""
        if self.scale is None:
            return plain_row(self.outputs, self.inputs, element_bytes, gated=True)  # eight outputs at once
        segments, words = self.inputs // self._segment, self._segment // CODES[self.format]
        return quantized_row(self.outputs, segments, self.format, words)

    def tiles(self, rows: int, element_bytes: int) -> Tiles:
        """The launch for `rows` tokens of an average expert."""
        if self.scale is None:
            return expert_tiles(rows, element_bytes)
        # With more rows, float32 tiles do not fit the shared memory.
        rows = min(rows, FEW_ROWS) if element_bytes == 4 else rows
        segments, words = self.inputs // self._segment, self._segment // CODES[self.format]
        return quantized_tiles(rows, self.outputs, segments, self.format, words)


class SortedRoutes(NamedTuple):
    """The routes of all tokens by expert, in tiles of one expert each."""

    order_R: Tensor  # routes, those to experts out of range last
    expert_N: Tensor  # expert of each tile; the number of experts: an unused tile
    start_N: Tensor  # the first place of each tile in the order
    stop_N: Tensor  # the place behind the last route of the tile's expert


def sort_routes(index: Tensor, first: int, count: int, rows: int) -> SortedRoutes:
    """Sort the routes `index` (numbers of experts) and cut them into tiles of at most `rows` of one expert each.

    The experts `first` to `first + count` are in range. The number of tiles follows from the shape alone.
    """
    expert_R = index.flatten() - first
    expert_R = torch.where((expert_R >= 0) & (expert_R < count), expert_R, count)
    sorted_R, order_R = expert_R.sort(stable=True)
    places = torch.searchsorted(sorted_R, torch.arange(count + 1, device=index.device))
    tiles_E = (places.diff() + rows - 1) // rows
    end_E = tiles_E.cumsum(0)
    routes = index.numel()
    most = (routes + min(count, routes) * (rows - 1)) // rows
    tile_N = torch.arange(most, device=index.device)
    expert_N = torch.searchsorted(end_E, tile_N, right=True)
    known_N = expert_N.clamp(max=count - 1)
    start_N = places[known_N] + (tile_N - (end_E - tiles_E)[known_N]) * rows
    return SortedRoutes(order_R, expert_N, start_N, places[known_N + 1])


@experts.implement("triton", needs)
def _experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *gate: Any,
) -> Any:
    alike = x.dtype in DTYPES and up.dtype is x.dtype and down.dtype is x.dtype
    if not alike or up.stride(1) != 1 or down.stride(1) != 1:
        return experts.reference(x, index, weights, up, up_bias, down, down_bias, *gate)
    matrices = (up, None, None, 1, up_bias), (down, None, None, 1, down_bias)
    return _summed((x, index, weights), matrices, (down.shape[1], "plain", "plain"), ExpertGate(*gate))


@quantized_experts.implement("triton", needs, WORDS)
def _quantized_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Sequence[Tensor],
    up_bias: Tensor | None,
    down: Sequence[Tensor],
    down_bias: Tensor | None,
    inner: int,
    up_format: str,
    down_format: str,
    *gate: Any,
) -> Any:
    of_up, of_down = unpacked(up, x.shape[1], up_format), unpacked(down, inner, down_format)
    matrices = (*of_up, up_bias), (*of_down, down_bias)
    kind = inner, quant_format(up_format).name, quant_format(down_format).name
    inputs = x if x.dtype in DTYPES else x.float(), index, weights
    return _summed(inputs, matrices, kind, ExpertGate(*gate)).to(x.dtype)


def _summed(
    inputs: tuple[Tensor, Tensor, Tensor], matrices: tuple[_Held, _Held], kind: tuple[int, str, str], gate: ExpertGate
) -> Tensor:
    """Choose between the two ways. `inputs`: x, index, weights; `kind`: the inner width, the formats of up and down."""
    x, index, weights = (tensor.contiguous() for tensor in inputs)
    (tokens, width), routes, (inner, up_format, down_format) = x.shape, index.shape[1], kind
    count = matrices[1][0].shape[0] // width
    if not (x.numel() and routes and count):
        return torch.zeros_like(x)
    up = _Matrix(*matrices[0], width, matrices[0][0].shape[0] // count, up_format)
    down = _Matrix(*matrices[1], inner, width, down_format)
    few = tokens <= FEW_TOKENS or 4 * tokens * routes <= count
    return (_few if few else _many)((x, index, weights), up, down, count, gate)


def _constants(gate: ExpertGate) -> dict[str, Any]:
    return {
        "NAME": gate.activation,
        "GATED": gate.gated,
        "LIMIT": float(gate.limit),
        "AFTER": gate.limit_after,
        "OFFSET": float(gate.up_offset),
    }


def _few(inputs: tuple[Tensor, Tensor, Tensor], up: _Matrix, down: _Matrix, count: int, gate: ExpertGate) -> Tensor:
    (x, index, weights), element_bytes = inputs, inputs[0].element_size()
    (tokens, routes), tiny = index.shape, x.dtype is not torch.float32
    inner, out = x.new_empty(tokens * routes, down.inputs), torch.empty_like(x)
    routed = routes, count, gate.first
    chosen = up.row(element_bytes)
    kernels("experts").up_rows[(-(-down.inputs // chosen.outputs), tokens * routes)](
        x, index, inner, *up.arguments, *routed, TINY=tiny, **up.constants(chosen), **_constants(gate)
    )
    chosen = down.row(element_bytes)
    kernels("experts").down_rows[(-(-down.outputs // chosen.outputs), tokens)](
        inner, index, weights, out, *down.arguments, *routed, TINY=tiny, **down.constants(chosen)
    )
    return out


def _many(inputs: tuple[Tensor, Tensor, Tensor], up: _Matrix, down: _Matrix, count: int, gate: ExpertGate) -> Tensor:
    (x, index, weights), element_bytes = inputs, inputs[0].element_size()
    tokens, routes = index.shape
    rows = -(-tokens * routes // count)
    for_up, for_down = up.tiles(rows, element_bytes), down.tiles(rows, element_bytes)
    assert for_up.rows == for_down.rows, (for_up, for_down)
    by_expert = sort_routes(index, gate.first, count, for_up.rows)
    tiles = by_expert.expert_N.numel()
    inner, out = x.new_empty(tokens * routes, down.inputs), torch.empty_like(x)
    parts = x.new_empty(tokens * routes, down.outputs, dtype=torch.promote_types(x.dtype, weights.dtype))
    kernels("experts").up_tiles[(tiles * -(-down.inputs // for_up.outputs),)](
        x, *by_expert, inner, *up.arguments, tiles, routes, count,
        ROWS=for_up.rows, num_stages=for_up.stages, **up.constants(for_up), **_constants(gate),
    )  # fmt: skip
    kernels("experts").down_tiles[(tiles * -(-down.outputs // for_down.outputs),)](
        inner, weights, *by_expert, parts, *down.arguments, tiles, count,
        ROWS=for_down.rows, num_stages=for_down.stages, **down.constants(for_down),
    )  # fmt: skip
    kernels("experts").sum_routes[(tokens, -(-down.outputs // COMBINED_BLOCK))](
        parts, index, out, down.outputs, routes, count, gate.first, BLOCK=COMBINED_BLOCK, num_warps=4
    )
    return out
