"""Build each target tensor of a Fill: read, merge, cast, quantize and pack in parts. All weights take this path.

Besides in-memory sources and the result, only one part is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from infuse import memory, ops
from infuse.architectures.packing import STACK, Fill, StackedExperts, spans
from infuse.architectures.part import named
from infuse.errors import ConfigError
from infuse.parallel.slices import Cut, Span, taken
from infuse.quant.format import QuantFormat, QuantizedWeight
from infuse.quant.microscaling import BLOCK
from infuse.quant.parse import quant_format
from infuse.weights.mapped import StoredMatrix
from infuse.weights.reader import Coded, Reader, place_of, tensor_at
from infuse.weights.stacked_experts import sliced, stacked_reader

# Source values read per step: few enough to stay in a core's cache and let the allocator reuse the memory.
PART_VALUES = 1 << 20


def moves(fill: Fill) -> bool:
    """True if the parameter can be reused as is, which keeps weights tied."""
    alone = len(fill.sources) == 1 and fill.merge != STACK and fill.cut is None
    alone = alone and fill.stacked in (None, StackedExperts())
    return alone and not fill.transposed and fill.packing is None and fill.format is None


def is_there(fill: Fill, source: nn.Module) -> bool:
    """True if the fill's first source is not on meta: a table that the module computes, or a weight tied elsewhere."""
    return not tensor_at(source, fill.sources[0]).is_meta


def filled(fill: Fill, reader: Reader, dtype: torch.dtype | None) -> Tensor:
    """Build the target tensor of `fill` in `dtype` (None keeps it). A lone source without any change is not copied."""
    reader = stacked_reader(fill, reader)
    if fill.merge == STACK:
        tensor = torch.stack([reader.read(fill.sources[span.source]) for span in _spans(fill, reader)])
    elif moves(fill):
        tensor = reader.read(fill.sources[0])
    else:
        return _copied(fill, reader, dtype)
    if dtype is None or dtype == tensor.dtype:
        return tensor
    return memory.copied(tensor, dtype)


def _copied(fill: Fill, reader: Reader, dtype: torch.dtype | None) -> Tensor:
    """Build the target in new memory, assembling and casting it part by part."""
    whole: Tensor | None = None
    for limits, pieces in _parts(fill, reader):
        if whole is None:
            whole = memory.empty(_shape(fill, reader), dtype or pieces[0].dtype, pieces[0].device)
        places = whole[limits].split([piece.shape[_axis(fill)] for piece in pieces], dim=_axis(fill))
        for place, piece in zip(places, pieces, strict=True):
            place.copy_(piece)
    assert whole is not None, fill
    return whole


def quantized(fill: Fill, reader: Reader, quantize: Callable, rows: int | None) -> Iterator[QuantizedWeight]:
    """Quantize the target with a body of ops.quantize, in parts of a multiple of `rows` rows (None: in one part)."""
    assert fill.format is not None, fill
    format = quant_format(fill.format)
    coded = reader.coded(fill.sources[0]) if len(fill.sources) == 1 else None
    if coded is not None and coded.format == fill.format:
        yield from _as_stored(fill, coded, format, rows)
        return
    for limits, pieces in _parts(fill, stacked_reader(fill, reader), rows):
        part = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=_axis(fill))
        try:
            tensors = quantize(part, fill.format)
        except ConfigError as error:
            raise ConfigError(f"{' + '.join(fill.sources)}, from row {limits.start} on: {error}") from error
        yield QuantizedWeight.listed(tensors, (len(part), part.shape[1]), format)


def _as_stored(fill: Fill, coded: Coded, format: QuantFormat, rows: int | None) -> Iterator[QuantizedWeight]:
    """The target's codes and scales as its source has them, in parts as those of `quantized`."""
    assert fill.packing is None and fill.stacked is not None, fill
    parts = [
        _parts(_narrowed(fill, per), stacked_reader(fill, reader), rows, PART_VALUES // per)
        for reader, per in ((coded.data, 8 // format.bits), (coded.scale, BLOCK))
    ]
    for both in zip(*parts, strict=True):
        data, scale = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, _axis(fill)) for _, pieces in both)
        tensors = [data.contiguous(), scale.contiguous()]
        yield QuantizedWeight.listed(tensors, (len(data), scale.shape[1] * BLOCK), format)


def _narrowed(fill: Fill, per: int) -> Fill:
    """The fill of a matrix that has one input for `per` inputs of the target."""
    cut = fill.cut
    if cut is None or cut.axis == 0:
        return fill
    assert all(number % per == 0 for numbers in (*cut.ranges, cut.sizes) for number in numbers), (fill, per)
    ranges = tuple((start // per, stop // per) for start, stop in cut.ranges)
    return replace(fill, cut=replace(cut, ranges=ranges, sizes=tuple(size // per for size in cut.sizes)))


def _parts(
    fill: Fill, reader: Reader, rows: int | None = 1, values: int | None = None
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield the target's rows in order with their source pieces, in multiples of `rows` (None: all at once), of about
    `values` values each (None: PART_VALUES).

    Reads no more of a file than needed. Transposed sources are also read all at once, because reading their columns
    would read single values.
    """
    whole, shape, axis = _spans(fill, reader), _shape(fill, reader), _axis(fill)
    step = max(shape[0], 1)
    if rows is not None and not fill.transposed:
        values = PART_VALUES if values is None else values
        step = max(values // max(math.prod(shape[1:]), 1) // rows, 1) * rows
    for first in range(0, shape[0], step):
        limits = slice(first, min(first + step, shape[0]))
        pieces = []
        for span in taken(whole, [(limits.start, limits.stop)]) if axis == 0 else whole:
            along = slice(span.start, span.stop)
            above = fill.cut.rows[0] if fill.cut and fill.cut.rows else 0
            here = slice(limits.start + above, limits.stop + above)
            outputs, inputs = (along, slice(None)) if axis == 0 else (here, along)
            part = (inputs, outputs) if fill.transposed else (outputs, inputs)[: len(shape)]
            if axis == 1 and len(fill.sources) > 1:
                pieces.append(_below(fill.sources, reader, here, along))
                continue
            piece = reader.read(fill.sources[span.source], part)
            pieces.append(piece.t() if fill.transposed else piece)
        yield limits, pieces


def _below(sources: tuple[str, ...], reader: Reader, rows: slice, columns: slice) -> Tensor:
    """Rows and columns of sources that lie one below the other."""
    heights = [Span(number, 0, reader.shape(name)[0]) for number, name in enumerate(sources)]
    found = taken(heights, [(rows.start, rows.stop)])
    return torch.cat([reader.read(sources[one.source], (slice(one.start, one.stop), columns)) for one in found])


def source_tensors(fill: Fill, target: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Recover the tensors of `shapes`, by name, from a complete `target`: the inverse of `filled`.

    Returns views of the target for sources that are contiguous in it and not transposed.
    """
    assert fill.cut is None, fill
    if fill.stacked is not None:
        return {fill.sources[0]: sliced(fill.stacked, target, shapes[fill.sources[0]])}
    if fill.merge == STACK:
        return dict(zip(fill.sources, target.unbind(0), strict=True))
    if moves(fill):
        return {fill.sources[0]: target}
    along = 1 if fill.transposed else 0
    whole = spans(fill) or [Span(source, 0, shapes[name][along]) for source, name in enumerate(fill.sources)]
    pieces = list(zip(whole, target.split([span.length for span in whole]), strict=True))
    found: dict[str, Tensor] = {}
    for number, name in enumerate(fill.sources):
        own = sorted(((span.start, piece) for span, piece in pieces if span.source == number), key=lambda pair: pair[0])
        source = own[0][1] if len(own) == 1 else torch.cat([piece for _, piece in own])
        found[name] = source.t().contiguous() if fill.transposed else source
    return found


def _axis(fill: Fill) -> int:
    """Axis along which the target is assembled: 0 outputs, 1 inputs."""
    return fill.cut.axis if fill.cut else 0


def _spans(fill: Fill, reader: Reader) -> list[Span]:
    """Spans of the sources that make up the target."""
    along = 1 - _axis(fill) if fill.transposed else _axis(fill)
    found = spans(fill)
    if found is None:
        found = [Span(source, 0, reader.shape(name)[along]) for source, name in enumerate(fill.sources)]
    return found


def _shape(fill: Fill, reader: Reader) -> list[int]:
    """Shape of the target."""
    shape = list(reader.shape(fill.sources[0]))
    shape = shape[::-1] if fill.transposed else shape
    shape[_axis(fill)] = sum(span.length for span in _spans(fill, reader))
    if _axis(fill) == 1 and len(fill.sources) > 1:
        shape[0] = sum(reader.shape(name)[0] for name in fill.sources)
    if fill.cut and fill.cut.rows:
        shape[0] = fill.cut.rows[1] - fill.cut.rows[0]
    return shape


def fill_module(
    module: nn.Module, fills: Iterable[Fill], reader: Reader, dtype: torch.dtype, bodies: Mapping[str, str]
) -> None:
    """Fill the parameters and buffers of `module`, which was built on meta or empty. `bodies`: op → body."""
    quantize = ops.quantize.body(bodies.get("quantize", ops.REFERENCE))
    for fill in fills:
        place, leaf = place_of(module, fill.target)
        if fill.format is not None:
            place.hold(quantized(fill, reader, quantize, place.part_rows))
            continue
        into = torch.float32 if fill.exact else dtype
        value = filled(fill, reader, None if leaf in place._buffers else into)
        if leaf in place._parameters:
            alike = isinstance(value, nn.Parameter)
            place._parameters[leaf] = value if alike else nn.Parameter(value.detach(), requires_grad=False)
        else:
            assert leaf in place._buffers, f"{fill.target} has no place in {type(module).__name__}"
            place._buffers[leaf] = value


class SavedSource(Protocol):
    """Where `fill_saved` reads: one tensor, or a rank's part of it; or a matrix of experts in the form it is stored."""

    def stored(self, name: str, cut: Cut | None) -> Tensor: ...

    def stored_experts(self, matrix: Any, path: str, tensors: Mapping[str, Wanted]) -> StoredMatrix | None:
        """The matrix that the module `matrix` at `path` will hold; None if it has to be built from its tensors."""


def fill_saved(module: nn.Module, path: str, fills: Iterable[Fill], source: SavedSource, dtype: torch.dtype) -> None:
    """Like fill_module, but read the finished targets saved under `path`."""
    for fill in fills:
        place, leaf = place_of(module, fill.target)
        if fill.stacked is not None and leaf == "weight":
            wanted = saved_tensors(module, path, [fill], dtype)
            matrix = source.stored_experts(place, named(path, fill.target).rpartition(".")[0], wanted)
            if matrix is not None:
                place.hold_stored(matrix.tensors, matrix.layout, matrix.device, matrix.first_use)
                continue
        read = source.stored
        values = {name.rpartition(".")[2]: read(name, fill.cut) for name in saved_tensors(module, path, [fill])}
        if fill.format is not None:
            shape = (place.out_features, place.in_features)
            format = quant_format(fill.format)
            place.hold([QuantizedWeight.of(values, shape, format)])
        elif values:
            value = values[leaf].to(torch.float32 if fill.exact else dtype)
            place._parameters[leaf] = nn.Parameter(value, requires_grad=False)


@dataclass(frozen=True)
class Wanted:
    """A tensor that `fill_saved` reads. `dtype` None accepts any floating dtype, which is then cast."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    cut: Cut | None


def saved_tensors(
    module: nn.Module, path: str, fills: Iterable[Fill], plain: torch.dtype | None = None
) -> dict[str, Wanted]:
    """List by name the tensors that `fill_saved` reads for `module`; `plain` is the dtype of those without a format."""
    wanted: dict[str, Wanted] = {}
    for fill in fills:
        place, leaf = place_of(module, fill.target)
        at = named(path, fill.target).rpartition(".")[0]
        if fill.format is not None:
            for buffer in quant_format(fill.format).buffers(place.in_features):
                shape = place.out_features, buffer.width(place.in_features)
                wanted[named(at, buffer.name)] = Wanted(shape, buffer.dtype, fill.cut)
        elif leaf in place._parameters:
            wanted[named(at, leaf)] = Wanted(tuple(place.get_parameter(leaf).shape), plain, fill.cut)
    return wanted
