"""Choose the number format of one matrix of a module, or say why it keeps the compute dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from infuse.architectures.packing import Fill
from infuse.architectures.part import HasMatrices, Matrix
from infuse.plan.formats import Formats, linears_of, matrices_made, matrix_made
from infuse.plan.stored import in_words
from infuse.quant.format import QuantFormat


def with_format(
    fill: Fill, fills: Sequence[Fill], whole: HasMatrices, shapes: Sequence[HasMatrices], formats: Formats, path: str
) -> tuple[Fill, str]:
    """Return `fill`, one of the `fills` of the module at `path`, with the format of its matrix; or unchanged, and why.

    `shapes` are those of the module's part on each rank: a matrix takes a format only if it fits on all of them.
    """
    matrix = matrix_made(fill, whole)
    if matrix is None:
        return fill, ""
    format = formats.of_fill(fill, path)
    if format is None:
        alone = formats.left_alone(linears_of(fill, path)[0])
        left_alone = "quant.weight.post_init_quant leaves it alone" if alone else ""
        return fill, formats.difference(fill, path) or left_alone
    ordered = formats.is_ordered(fill, path)
    is_stored = ordered or formats.is_as_stored(fill, path, format)
    kept = "stays in float32, as transformers loads it" if fill.exact else ""
    why = matrix.unquantized or kept or (_out_of_order(fill, matrix) if ordered else "")
    why = why or next(_misfits(fill, matrix, format, fills, whole, shapes, formats, path), "")
    if why:
        return fill, f"though stored in {in_words(str(format), ordered=ordered)}: {why}" if is_stored else why
    return replace(fill, format=str(_of_part(fill, matrix, format)), as_stored=is_stored, ordered=ordered), ""


def _out_of_order(fill: Fill, matrix: Matrix) -> str:
    """Why the matrix cannot have its inputs in act-order; "" if it can."""
    if matrix.op != "linear":
        return f"{matrix.op} take no inputs in another order"
    return "ranks share its inputs" if fill.cut is not None and fill.cut.axis == 1 else ""


def _misfits(
    fill: Fill,
    matrix: Matrix,
    format: QuantFormat,
    fills: Sequence[Fill],
    whole: HasMatrices,
    shapes: Sequence[HasMatrices],
    formats: Formats,
    path: str,
) -> Iterator[str]:
    """Why the matrix cannot have this format. Experts take formats in both of their matrices or in none."""
    made = [(fill, matrix, format)]
    if matrix.op == "experts":
        made, listed = [], [pair for pair in matrices_made(fills, whole) if pair[1].op == "experts"]
        for each, other in listed:
            if (own := formats.of_fill(each, path)) is None:
                yield f"{other.target} has no format, and experts take formats in both matrices or in none"
            else:
                made.append((each, other, own))
    for each, other, own in made:
        parts = [matrix_made(each, shape) for shape in shapes]
        own = _of_part(each, other, own)
        yield from (reason for part in parts if part is not None and (reason := own.fits(part.inputs)))


def _of_part(fill: Fill, matrix: Matrix, format: QuantFormat) -> QuantFormat:
    return format.of_part(matrix.inputs) if fill.cut is not None and fill.cut.axis == 1 else format
