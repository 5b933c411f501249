"""Keep sources of a merged matrix apart if their formats differ: q and k in one matrix of a block, v in another."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from infuse.architectures.layer import LayerShape
from infuse.architectures.packing import CAT, Fill, apart
from infuse.architectures.part import HasMatrices, Matrix, named
from infuse.plan.formats import Formats, matrices_made
from infuse.weights.lazy import tensor_at


def differences(fills: Iterable[Fill], shape: HasMatrices, formats: Formats, path: str) -> list[str]:
    """Why matrices of `shape` cannot be merged from linears in the module at `path`, nor be kept apart.

    Experts whose formats differ only as they are stored can: they are dequantized.
    """
    fills, found = tuple(fills), []
    for fill, matrix in matrices_made(fills, shape):
        told = formats.difference(fill, path)
        if told is None or can_be_apart(fill, matrix, fills, shape):
            continue
        if matrix.op != "experts" or formats.differs_by_name(fill, path):
            found.append(told)
    return found


def can_be_apart(fill: Fill, matrix: Matrix, fills: Iterable[Fill], shape: HasMatrices) -> bool:
    """Whether the sources of a matrix of a block may be several matrices: not if one linear has them packed."""
    biases = [other for other in fills if other.target == named(matrix.target, "bias")]
    merges = all(each.packing is None and not each.absent and each.merge == CAT for each in (fill, *biases))
    rows_only = fill.cut is None or fill.cut.axis == 0
    return isinstance(shape, LayerShape) and matrix.op == "linear" and merges and rows_only


def kept_apart(
    fills: tuple[Fill, ...], shape: HasMatrices, formats: Formats, model: nn.Module, path: str
) -> tuple[Fill, ...]:
    """Return `fills`, of the module at `path` of `model`, with one for each format of a matrix and of its bias."""
    split: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {}
    for fill, matrix in matrices_made(fills, shape):
        groups = formats.groups(fill, path)
        if len(groups) > 1 and can_be_apart(fill, matrix, fills, shape):
            split |= {named(matrix.target, leaf): (matrix.target, groups) for leaf in ("weight", "bias")}
    if not split:
        return fills
    module, made = model.get_submodule(path), list[Fill]()
    for fill in fills:
        if fill.target not in split:
            made.append(fill)
            continue
        along = 1 if fill.transposed else 0
        sizes = [tensor_at(module, source).shape[along] for source in fill.sources]
        made += apart(fill, *split[fill.target], sizes)
    return tuple(made)
