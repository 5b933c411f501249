"""Explain the reading of a layer: its graph in units, one line each, with the part that has each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import nn

from infuse.ground.errors import SpecMismatch
from infuse.reading.calls import NOT_REACHED, LayerCall
from infuse.reading.graph import op_name
from infuse.reading.read import Reader, read
from infuse.reading.trace import traced

_NOTHING = "in no part"


def explained(layer: nn.Module, calls: Sequence[LayerCall]) -> str:
    """The operations of the layer's first call in units, each with its part and its lines, and whether it is read."""
    return "\n".join(_lines(layer, calls))


def _lines(layer: nn.Module, calls: Sequence[LayerCall]) -> Iterator[str]:
    name = type(layer).__name__
    if not calls:
        yield f"{name}: {NOT_REACHED}"
        return
    yield f"{name}, {calls[0].text}:"
    try:
        reader = Reader(layer, calls[0], *traced(layer, calls[0]), None)
    except SpecMismatch as mismatch:
        yield f"  {mismatch.differences[0]}"
        return
    reader.try_to_read()  # what is claimed until it fails is told, and the whole reading below says why
    graph = reader.graph
    rows = [(reader.claimed.get(node, _NOTHING), node) for node in graph.operations() if op_name(node) != "sym_size"]
    for part, group in groupby(rows, key=lambda row: row[0]):
        nodes = [node for _, node in group]
        operations = ", ".join(dict.fromkeys(map(op_name, nodes)))
        yield f"  {part:<44} {operations}{graph.where(nodes[-1])}"
    try:
        bound = read(layer, calls)
    except SpecMismatch as mismatch:
        yield f"not read: {'; '.join(mismatch.differences)}"
    else:
        steps = ", ".join(f"{step.does} {step.part}".strip() for step in bound.shape.program)
        yield f"read in {len(calls)} calls: {steps}"
        for part, shape in bound.shape.held:
            yield f"  {part:<12} {shape}"
