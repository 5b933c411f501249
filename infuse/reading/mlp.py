"""Read the MLP of a layer: which activation stands between its products, and whether one gates the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from infuse.architectures.packing import SWAPPED, Fill, Heads
from infuse.architectures.parts.mlp import MLPShape
from infuse.ground.activations import FUNCTIONS
from infuse.reading.graph import LayerGraph, Numbers, op_name, random_values
from infuse.reading.movement import MOVES, is_close
from infuse.reading.units import LinearUnit

# Functions of single numbers that an activation may be written with. None has steps or limits but relu's.
_ELEMENTWISE = MOVES | frozenset(
    {"silu", "gelu", "relu", "sigmoid", "tanh", "mul", "add", "sub", "pow", "square", "erf", "neg", "div", "sqrt"}
)
_SPREAD = 4.0  # of the numbers on which activations are compared


@dataclass(frozen=True)
class ReadMLP:
    """An MLP in a graph: `x` is its input, `node` its output."""

    x: tuple[Node, ...]
    node: Node
    shape: MLPShape
    fills: tuple[Fill, ...]
    units: tuple[LinearUnit, ...]


def read_mlp(graph: LayerGraph, name: str, down: LinearUnit, ups: list[LinearUnit]) -> ReadMLP:
    """Read down(act(up(x))) or down(act(gate(x)) * up(x)). SpecMismatch names the operation that is in neither."""
    stop = frozenset(unit.node for unit in ups)
    between = [node for node in graph.before([down.x], stop) if node not in stop and node.op == "call_function"]
    for node in between:
        if op_name(node) not in _ELEMENTWISE and isinstance(node.meta.get("val"), Tensor):
            raise graph.left(node)
    values = {
        unit.node: value * _SPREAD
        for unit, value in zip(ups, random_values(graph.shape(unit.node) for unit in ups), strict=True)
    }
    known: dict[Node, Tensor] = {**graph.zeros(), **values}
    if outside := [node for node in graph.before([down.x], stop) if node.op != "call_function"]:
        user = next(node for node in between if outside[0] in graph.inputs(node))
        raise graph.left(user, f"reads {graph.name(outside[0])}, which no MLP takes")
    inner = Numbers(graph, known)(down.x)
    found = _found(inner, ups, values)
    if found is None:
        last = next((node for node in reversed(between) if op_name(node) not in MOVES), graph.follow(down.x))
        raise graph.left(last, f"ends an activation that is none of ours; it is made at {graph.lines(between)}")
    activation, order = found
    weights, biases = tuple(unit.weight for unit in order), [unit.bias for unit in order if unit.bias]
    if biases and len(biases) < len(order):
        raise graph.left(order[0].node, "has a bias, and the other product has none")
    gated = len(order) == 2 or order[0].rows == 2 * down.columns
    is_swapped = _is_swapped(inner, order, values, activation, gated)
    packing, heads = (SWAPPED, Heads(2, 0, down.columns)) if is_swapped else (None, None)
    transposed = {unit.transposed for unit in order}
    if len(transposed) > 1:
        raise graph.left(order[0].node, "is stored the other way round than the product beside it")
    fills = [Fill(f"{name}.up.weight", weights, order[0].transposed, packing, heads)]
    fills += [Fill(f"{name}.up.bias", tuple(biases), False, packing, heads)] if biases else []
    fills += [Fill(f"{name}.down.weight", (down.weight,), down.transposed)]
    fills += [Fill(f"{name}.down.bias", (down.bias,))] if down.bias else []
    shape = MLPShape(order[0].columns, down.columns, gated, activation, bool(biases), down.bias is not None)
    return ReadMLP(tuple(unit.x for unit in order), down.node, shape, tuple(fills), (*order, down))


def _found(
    inner: Tensor, ups: list[LinearUnit], values: Mapping[Node, Tensor]
) -> tuple[str, tuple[LinearUnit, ...]] | None:
    """The activation, and the products in the order [gate,] up; None if the inner values are made in no such way."""
    for name, function in FUNCTIONS.items():
        if len(ups) == 1:
            value = values[ups[0].node]
            forms = [function(value)]
            if value.shape[-1] % 2 == 0:
                first, second = value.chunk(2, dim=-1)
                forms += [function(first) * second, function(second) * first]
            if any(is_close(inner, form) for form in forms):
                return name, tuple(ups)
        elif len(ups) == 2:
            for gate, up in (ups, ups[::-1]):
                if is_close(inner, function(values[gate.node]) * values[up.node]):
                    return name, (gate, up)
    return None


def _is_swapped(
    inner: Tensor, order: tuple[LinearUnit, ...], values: Mapping[Node, Tensor], activation: str, gated: bool
) -> bool:
    """Whether one matrix has [up | gate]."""
    if len(order) > 1 or not gated:
        return False
    up, gate = values[order[0].node].chunk(2, dim=-1)
    return is_close(inner, FUNCTIONS[activation](gate) * up)
