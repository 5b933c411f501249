"""Build each target tensor of a Fill: read, merge, cast, quantize and pack in parts. All weights take this path.

Besides in-memory sources and the result, only one part is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.packing import STACK, Fill, StackedExperts, spans
from infuse.architectures.part import named
from infuse.ground import memory
from infuse.ground.errors import ConfigError
from infuse.parallel.slices import Cut, Span
from infuse.quant.format import Buffer, QuantFormat, QuantizedWeight
from infuse.quant.integer import IntegerFormat
from infuse.quant.parse import quant_format
from infuse.weights.lazy import (
    Flat,
    InMemory,
    Joined,
    LazyTensor,
    Lookup,
    Pointwise,
    Transposed,
    place_of,
    stored_alike,
    tensor_at,
)
from infuse.weights.mapped import StoredMatrix
from infuse.weights.stacked_experts import TallMatrix, shared_experts

# Values read per step: few enough to stay in a core's cache and let the allocator reuse the memory.
PART_VALUES = 1 << 20
SAVED_BYTES = 1 << 24  # of a matrix that was saved in its format, read at a time


def moves(fill: Fill) -> bool:
    """True if the parameter can be reused as is, which keeps weights tied."""
    alone = len(fill.sources) == 1 and fill.merge != STACK and fill.cut is None
    alone = alone and fill.stacked in (None, StackedExperts())
    plain = not fill.transposed and fill.packing is None and not fill.rows and fill.format is None
    return alone and plain and not fill.absent


def is_there(fill: Fill, source: nn.Module) -> bool:
    """True if the fill's first source has its values: a table that the module computes, or a weight tied elsewhere.

    A buffer of the state dict has none, also where it is not on meta: they are in the checkpoint.
    """
    owner, leaf = place_of(source, fill.sources[0])
    return not tensor_at(source, fill.sources[0]).is_meta and not _is_saved_buffer(owner, leaf)


def _is_saved_buffer(owner: nn.Module, leaf: str) -> bool:
    return leaf in owner._buffers and leaf not in owner._non_persistent_buffers_set


def filled(fill: Fill, source: Lookup, dtype: torch.dtype | None) -> Tensor:
    """Build the target tensor of `fill` in `dtype` (None keeps it). A lone source without any change is not copied."""
    if fill.merge == STACK:
        rows = spans(fill)
        numbers = range(len(fill.sources)) if rows is None else [span.source for span in rows]
        tensor = torch.stack([source(fill.sources[number]).read() for number in numbers])
    elif moves(fill):
        tensor = _as_matrix(fill, source(fill.sources[0])).read()
    else:
        return _copied(fill, target_of(fill, source), dtype)
    if dtype is None or dtype == tensor.dtype:
        return tensor
    return memory.copied(tensor, dtype)


def target_of(fill: Fill, source: Lookup) -> Joined:
    """Assemble the target of `fill` lazily; it is neither cast nor quantized."""
    sources = [_as_matrix(fill, source(name)) for name in fill.sources]
    if fill.absent and fill.heads is not None:
        first = sources[0].read((slice(0, 1),))
        sources.append(InMemory(first.new_zeros(max(fill.heads.of_parts), *first.shape[1:])))
    if fill.transposed:
        sources = [Transposed(matrix) for matrix in sources]
    if fill.cut is None or fill.cut.axis == 0:
        return Joined.of(dict(enumerate(sources)), spans(fill))
    whole: LazyTensor = sources[0] if len(sources) == 1 else Joined.of(dict(enumerate(sources)))
    if fill.cut.rows is not None:
        whole = Joined.of({0: whole}, [Span(0, *fill.cut.rows)])
    return Joined.of({0: whole}, spans(fill), axis=1)


def _as_matrix(fill: Fill, source: LazyTensor) -> LazyTensor:
    if fill.pointwise:
        return Pointwise(source)
    if fill.flat:
        return Flat(source)
    return source if fill.stacked is None else TallMatrix(fill.stacked, source)


def _copied(fill: Fill, target: Joined, dtype: torch.dtype | None) -> Tensor:
    """Copy the target into new memory, assembling and casting it part by part."""
    whole: Tensor | None = None
    for rows in _row_parts(fill, target, 1):
        pieces = target.pieces((rows,))
        if whole is None:
            whole = memory.empty(target.shape, dtype or pieces[0].dtype, pieces[0].device)
        places = whole[rows].split([piece.shape[target.axis] for piece in pieces], dim=target.axis)
        for place, piece in zip(places, pieces, strict=True):
            place.copy_(piece)
    assert whole is not None, fill
    return whole


def order_of(fill: Fill, source: Lookup) -> Tensor:
    """The order of inputs, int32 [in], in which all sources of an `ordered` fill are stored."""
    coded = target_of(fill, source).coded
    assert coded is not None and coded.order is not None, fill
    return coded.order.inputs


def quantized(
    fill: Fill,
    source: Lookup,
    quantize: Callable,
    rows: int | None,
    *,
    only_copies: bool = False,
    order: Tensor | None = None,
) -> Iterator[QuantizedWeight]:
    """Quantize the target with a body of ops.quantize, in parts of a multiple of `rows` rows (None: in one part).

    Sources already stored in the target's format are not requantized: their codes are copied. `only_copies`: assert
    that no source is requantized.
    `order`: the inputs of an `ordered` fill, whose sources are values.
    """
    assert fill.format is not None, fill
    format, target = quant_format(fill.format), target_of(fill, source)
    coded, inputs = target.coded, target.shape[1]
    is_alike = coded is not None and stored_alike(coded.format, fill.format)
    is_alike = is_alike and coded is not None and (coded.order is not None) == fill.ordered
    assert is_alike or not only_copies, (fill, coded and coded.format)
    if coded is not None and is_alike:
        for part in _row_parts(fill, target, rows):
            tensors = {name: buffer.read((part,)).contiguous() for name, buffer in coded.buffers.items()}
            yield QuantizedWeight.of(tensors, (part.stop - part.start, inputs), format)
        return
    for part in _row_parts(fill, target, rows):
        values = target.read((part,)) if order is None else target.read((part,)).index_select(1, order)
        try:
            tensors = quantize(values, fill.format)
        except ConfigError as error:
            raise ConfigError(f"{' + '.join(fill.sources)}, from row {part.start} on: {error}") from error
        yield QuantizedWeight.listed(tensors, (len(values), inputs), format)


def _row_parts(fill: Fill, target: LazyTensor, rows: int | None) -> Iterator[slice]:
    """Cut the target's rows, in order, into multiples of `rows` (None: all at once) of about PART_VALUES values.

    Transposed sources are read all at once, because reading their columns would read single values.
    """
    count, *columns = target.shape
    step = max(count, 1)
    if rows is not None and not fill.transposed:
        step = max(PART_VALUES // max(math.prod(columns), 1) // rows, 1) * rows
    return (slice(first, min(first + step, count)) for first in range(0, max(count, 1), step))


def source_tensors(fill: Fill, target: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Recover the tensors of `shapes`, by name, from a complete `target`: the inverse of `filled`.

    They are views of the target where it has their values in their order. Of a source that several targets share, only
    the rows of this one are set.
    """
    tensors: dict[str, Tensor] = {}
    for number, name in enumerate(fill.sources):
        source = source_view(fill, number, target, shapes)
        if source is None:
            source = target.new_empty(shapes[name])
            for ours, theirs in shared_values(fill, number, source, target, shapes):
                ours.copy_(theirs)
        tensors[name] = source
    return tensors


def source_view(fill: Fill, number: int, target: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Tensor | None:
    """Return source `number` of `fill` as a contiguous view of `target`; None if it is not one."""
    source = torch.empty(shapes[fill.sources[number]], device="meta")
    if moves(fill) and target.shape == source.shape:
        return target
    [(part, held), *more] = shared_values(fill, number, source, target, shapes)
    is_whole = not more and part.is_contiguous() and part.numel() == source.numel()
    return held.view(source.shape) if is_whole and held.is_contiguous() else None


def shared_values(
    fill: Fill, number: int, source: Tensor, target: Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of views with the same values: of a contiguous `source`, the fill's `number`th, and of `target`."""
    assert fill.cut is None, fill
    if fill.stacked is not None:
        yield shared_experts(fill.stacked, source, target)
    elif fill.pointwise or fill.flat:
        yield source.view(target.shape), target
    elif fill.merge == STACK:
        yield source, target[number]
    else:
        along = 1 if fill.transposed else 0
        turned, at = source.t() if fill.transposed else source, 0
        whole = spans(fill) or [Span(place, 0, shapes[name][along]) for place, name in enumerate(fill.sources)]
        for span in whole:
            if span.source == number:
                yield turned[span.start : span.stop], target[at : at + span.length]
            at += span.length


def fill_module(
    module: nn.Module, fills: Iterable[Fill], source: Lookup, dtype: torch.dtype, bodies: Mapping[str, str]
) -> None:
    """Fill the parameters and buffers of `module`, which was built on meta or empty. `bodies`: op → body."""
    quantize = ops.quantize.body(bodies.get("quantize", ops.REFERENCE))
    for fill in fills:
        place, leaf = place_of(module, fill.target)
        if fill.format is not None:
            place.hold(quantized(fill, source, quantize, place.part_rows, only_copies=fill.as_stored))
            if fill.ordered:
                place.hold_order(order_of(fill, source))
            continue
        into = torch.float32 if fill.exact else dtype
        value = filled(fill, source, None if leaf in place._buffers else into)
        if leaf in place._parameters:
            alike = isinstance(value, nn.Parameter)
            place._parameters[leaf] = value if alike else nn.Parameter(value.detach(), requires_grad=False)
        else:
            assert leaf in place._buffers, f"{fill.target} has no place in {type(module).__name__}"
            place._buffers[leaf] = value


ORDER = "order"  # the buffer of a linear in act-order: the input that each column of its codes multiplies
VALUES = Buffer("weight", torch.float32, 1)  # of a tensor that is not coded: one column per input


@dataclass(frozen=True)
class Wanted:
    """A tensor that `fill_saved` reads: this rank's part, `cut` from the saved tensor.

    `dtype` None accepts any floating dtype, which is then cast. `buffer`: how the inputs of the whole matrix map to the
    columns of the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    cut: Cut | None
    buffer: Buffer = VALUES


class SavedSource(Protocol):
    """Source of `fill_saved`: finished tensors by name, or an expert matrix as stored."""

    def saved(self, name: str, wanted: Wanted) -> LazyTensor: ...

    def stored_experts(self, matrix: Any, path: str, tensors: Mapping[str, Wanted]) -> StoredMatrix | None:
        """Return the matrix for the module `matrix` at `path`; None if it must be built from its tensors."""


def fill_saved(module: nn.Module, path: str, fills: Iterable[Fill], source: SavedSource, dtype: torch.dtype) -> None:
    """Like fill_module, but read the finished targets saved under `path`."""
    for fill in fills:
        place, leaf = place_of(module, fill.target)
        if fill.stacked is not None and leaf == "weight":
            experts = saved_tensors(module, path, [fill], dtype)
            matrix = source.stored_experts(place, named(path, fill.target).rpartition(".")[0], experts)
            if matrix is not None:
                place.hold_stored(matrix.tensors, matrix.layout, matrix.device, matrix.first_use)
                continue
        wanted = saved_tensors(module, path, [fill])
        stored = {name.rpartition(".")[2]: source.saved(name, part) for name, part in wanted.items()}
        if fill.format is not None:
            order = stored.pop(ORDER, None)
            place.hold(_saved_weight(place, quant_format(fill.format), stored))
            if order is not None:
                place.hold_order(order.read())
            continue
        tensors = {name: tensor.read() for name, tensor in stored.items()}
        if leaf in tensors and leaf in place._buffers:
            place._buffers[leaf] = tensors[leaf]
        elif tensors:
            value = tensors[leaf].to(torch.float32 if fill.exact else dtype)
            place._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def _saved_weight(place: Any, format: QuantFormat, stored: Mapping[str, LazyTensor]) -> Iterator[QuantizedWeight]:
    """Read a saved matrix in parts of its rows, if it is laid out anew: it needs no new pages then."""
    outputs, inputs = place.out_features, place.in_features
    parts = place.part_rows if isinstance(format, IntegerFormat) else None  # others may have codes that are declined
    step = outputs
    if parts is not None:
        step = max(parts, SAVED_BYTES // max(format.nbytes(1, inputs), 1) // parts * parts)
    for first in range(0, max(outputs, 1), max(step, 1)):
        rows = slice(first, min(first + step, outputs))
        whole = rows == slice(0, outputs)
        tensors = {name: tensor.read(() if whole else (rows,)) for name, tensor in stored.items()}
        yield QuantizedWeight.of(tensors, (rows.stop - rows.start, inputs), format)


def saved_tensors(
    module: nn.Module, path: str, fills: Iterable[Fill], plain: torch.dtype | None = None
) -> dict[str, Wanted]:
    """List by name the tensors that `fill_saved` reads for `module`; `plain` is the dtype of those without a format."""
    wanted: dict[str, Wanted] = {}
    for fill in fills:
        place, leaf = place_of(module, fill.target)
        at = named(path, fill.target).rpartition(".")[0]
        if fill.format is not None:
            format, rows, inputs = quant_format(fill.format), place.out_features, place.in_features
            cuts_inputs = fill.cut is not None and fill.cut.axis == 1
            whole = format.buffers(fill.cut.whole_length if fill.cut and cuts_inputs else inputs)
            for buffer, of_whole in zip(format.buffers(inputs), whole, strict=True):
                shape = (rows, buffer.width(inputs))
                wanted[named(at, buffer.name)] = Wanted(shape, buffer.dtype, fill.cut, of_whole)
            if fill.ordered:
                wanted[named(at, ORDER)] = Wanted((inputs,), torch.int32, None)
        elif leaf in place._parameters:
            wanted[named(at, leaf)] = Wanted(tuple(place._parameters[leaf].shape), plain, fill.cut)
        elif _is_saved_buffer(place, leaf):
            buffer = place.get_buffer(leaf)
            kind = None if buffer.is_floating_point() else buffer.dtype
            wanted[named(at, leaf)] = Wanted(tuple(buffer.shape), kind, fill.cut)
    return wanted
