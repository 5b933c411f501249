"""Codes of 8 or 4 bits with scales beside them, which several forms share: checked, and added as a format.

Scales are for a tensor, a row, groups of inputs or tiles of rows and inputs: their shape tells which. Tiles at the end
may be partial, so their size comes from the config.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infuse.weights.coded.buffers import Rows, Tiled, mapped, powers_of_two, scale_buffer, without_nan
from infuse.weights.coded.form import Found, Members, ceil_div, is_single
from infuse.weights.coded.values import Values, of_e2m1, of_fp8, of_int8, regular_groups
from infuse.weights.lazy import FileTensor, LazyTensor, Shape

E8M0 = (torch.uint8, torch.float8_e8m0fnu)


def spread(scale: LazyTensor, shape: Shape, tile: Sequence[int] | None) -> tuple[LazyTensor, int] | None:
    """Scales [out, groups] and the inputs of a group, of scales for a tensor, a row, groups or tiles; None if neither.

    `tile`: [rows, inputs] of one scale, from the config; None: as the shape tells. The last group may be partial.
    """
    out, inputs = shape
    if tile is not None:
        rows, groups = (ceil_div(size, of_one) for size, of_one in zip(shape, tile, strict=True))
        is_single_one = rows == groups == 1 and is_single(scale.shape)
        fits = is_single_one or scale.shape == (rows, groups) or (groups == 1 and scale.shape == (rows,))
        return (Tiled(scale, tile[0], out), min(tile[1], inputs)) if fits else None
    if is_single(scale.shape):
        return Tiled(scale, out, out), inputs
    if scale.shape in ((out,), (out, 1)):
        return Tiled(scale, 1, out), inputs
    if len(scale.shape) == 2 and scale.shape[0] == out and inputs % scale.shape[1] == 0:
        return scale, inputs // scale.shape[1]
    return None


def scale_shapes(shape: Shape, tile: Sequence[int] | None) -> str:
    """The possible shapes of scales, for an error message."""
    out, inputs = shape
    if tile is not None:
        tall, wide = (min(size, of_one) for size, of_one in zip(shape, tile, strict=True))
        return f"{(ceil_div(out, tall), ceil_div(inputs, wide))}, one for each {tall} x {wide}"
    return f"(1,), {(out,)}, {(out, 1)} or ({out}, groups of inputs)"


def group_text(size: int, inputs: int) -> str:
    """A group as formats write it."""
    return "row" if size >= inputs else str(size)


def add_fp8(found: Found, members: Members, weight: FileTensor, scale: FileTensor, tile: Sequence[int] | None) -> None:
    """Add e4m3 codes [out, in], multiplied by their scales: floats, or powers of two as bytes."""
    shape, name = weight.shape, weight.name
    spread_out = spread(scale, shape, tile)
    if spread_out is None:
        leaf = scale.name.rpartition(".")[2]
        members.fault(leaf, f"is {scale.shape} for a weight {shape}; possible: {scale_shapes(shape, tile)}")
        return
    rows, size = spread_out
    if scale.dtype in E8M0:
        rows = powers_of_two(rows, scale)
    data = without_nan(weight, weight)
    option, buffer = scale_buffer(rows, has_float16=False)

    def values() -> LazyTensor:
        return Values(shape, data, of_fp8, rows, regular_groups(shape[1], size))

    format = f"fp8:{group_text(size, shape[1])}{option}"
    found.add(name, shape, format, {"data": data, "scale": buffer}, values)


def add_int8(
    found: Found,
    members: Members,
    weight: FileTensor,
    scale: FileTensor,
    zero: FileTensor | None,
    tile: Sequence[int] | None,
    options: str,
) -> None:
    """Add int8 codes [out, in] with scales, and zeros of the same shape, for a tensor, rows, groups or tiles."""
    shape, name = weight.shape, weight.name
    spread_out = spread(scale, shape, tile)
    if spread_out is None:
        leaf = scale.name.rpartition(".")[2]
        members.fault(leaf, f"is {scale.shape} for a weight {shape}; possible: {scale_shapes(shape, tile)}")
        return
    rows, size = spread_out
    zeros = None if zero is None else spread(zero, shape, tile)
    option, buffer = scale_buffer(rows, has_float16=True)
    buffers: dict[str, LazyTensor] = {"data": weight, "scale": buffer}
    if zeros is not None:
        buffers["zero"] = zeros[0]

    def values() -> LazyTensor:
        return Values(shape, weight, of_int8, rows, regular_groups(shape[1], size), None if zeros is None else zeros[0])

    kind = "" if zeros is None else ":asymmetric"
    found.add(name, shape, f"int8:{group_text(size, shape[1])}{kind}{option}{options}", buffers, values)


def add_nvfp4(found: Found, name: str, data: FileTensor, scale: FileTensor, of_all: FileTensor, inverse: bool) -> None:
    """Add e2m1 codes with e4m3 scales for 16 inputs, times one float32 number or, if `inverse`, divided by it."""
    out, inputs = data.shape[0], data.shape[1] * 2
    number = of_all.read().float().reshape(())
    factor = number.reciprocal() if inverse else number
    checked = without_nan(scale, scale)

    def blocks(read: torch.Tensor) -> torch.Tensor:
        """Each block's fields: the factor's bytes, and four e4m3 scales."""
        four = read.reshape(len(read), inputs // 64, 4)
        return torch.cat((factor.reshape(1).view(torch.uint8).expand_as(four), four), dim=-1).flatten(1)

    def values() -> LazyTensor:
        scales = mapped(checked, torch.float32, lambda read: read.view(torch.float8_e4m3fn).float() * factor)
        return Values((out, inputs), data, of_e2m1, scales, regular_groups(inputs, 16))

    buffers: dict[str, LazyTensor] = {"data": data, "scale": Rows(checked, inputs // 64 * 8, torch.uint8, blocks)}
    found.add(name, (out, inputs), "nvfp4", buffers, values)


def add_mxfp4(found: Found, name: str, data: FileTensor, exponents: FileTensor) -> None:
    """Add e2m1 codes with a power of two for each 32 inputs."""
    out, inputs = data.shape[0], data.shape[1] * 2
    scale = powers_of_two(exponents, exponents)

    def values() -> LazyTensor:
        return Values((out, inputs), data, of_e2m1, scale, regular_groups(inputs, 32))

    found.add(name, (out, inputs), "mxfp4", {"data": data, "scale": scale}, values)
