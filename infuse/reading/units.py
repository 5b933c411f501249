"""Units of a layer's graph: products with a weight, and norms. Everything else lies between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from infuse.architectures.packing import Fill
from infuse.architectures.parts.norm import LAYER, RMS, SCALE, NormShape
from infuse.reading.graph import LayerGraph, op_name

_RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as"})


@dataclass(frozen=True)
class LinearUnit:
    """node = x · weight + bias. `weight` and `bias` are names of parameters; `transposed`: the weight is [in, out]."""

    node: Node
    x: Node
    weight: str
    bias: str | None
    rows: int
    columns: int
    transposed: bool


@dataclass(frozen=True)
class NormUnit:
    """node = norm(x) over its last axis. `weight` and `bias` are names of parameters, with `shape` as their shape."""

    node: Node
    x: Node
    kind: str
    eps: float
    width: int
    weight: str | None = None
    shape: tuple[int, ...] | None = None
    bias: str | None = None
    offset: float = 0.0

    def bound(self) -> NormShape:
        return NormShape(self.kind, self.width, self.eps, self.offset, self.shape, self.bias is not None)

    def fills(self, target: str) -> list[Fill]:
        tensors = (("weight", self.weight), ("bias", self.bias))
        return [Fill(f"{target}.{leaf}", (name,)) for leaf, name in tensors if name is not None]


def linears(graph: LayerGraph) -> list[LinearUnit]:
    return [unit for node in graph.operations() if (unit := _linear(graph, node)) is not None]


def _linear(graph: LayerGraph, node: Node) -> LinearUnit | None:
    name, args = op_name(node), [*node.args]
    bias: Any = None
    if name == "linear":
        x, weight, bias = (*args, None)[:3]
        transposed = False
    elif name == "addmm" and not node.kwargs:
        bias, x, weight = args
        transposed = True
    elif name in ("matmul", "mm"):
        x, weight = args
        transposed = True
    else:
        return None
    weight, bias, x = (graph.follow(part) if isinstance(part, Node) else None for part in (weight, bias, x))
    if weight is not None and op_name(weight) in ("t", "transpose"):
        weight, transposed = graph.follow(weight.args[0]), not transposed
    if name == "linear" and not graph.is_parameter(weight):
        raise graph.left(node, "multiplies by a weight that is no parameter, as parametrizations compute it")
    if not graph.is_parameter(weight) or x is None or (bias is not None and not graph.is_parameter(bias)):
        return None
    sizes = tuple(weight.meta["val"].shape)
    if len(sizes) != 2:
        return None
    columns, rows = sizes if transposed else reversed(sizes)
    of_bias = None if bias is None else graph.parameters[bias]
    return LinearUnit(node, x, graph.parameters[weight], of_bias, rows, columns, transposed)


def norms(graph: LayerGraph) -> list[NormUnit]:
    """The norms of a graph. What several norms of one value share is part of each."""
    found: list[NormUnit] = []
    for node in graph.operations():
        if (given := _given_norm(graph, node)) is not None:
            found.append(given)
        elif (written := _written_norm(graph, node)) is not None:
            found += _affine(graph, written)
    return found


def scales(graph: LayerGraph, norms: list[NormUnit]) -> list[NormUnit]:
    """Products of a value and a parameter with a number for each column, outside of norms: layer scales."""
    inside = {node for unit in norms for node in graph.before([unit.node], frozenset({unit.x}))}
    found: list[NormUnit] = []
    for node in graph.operations():
        if op_name(node) != "mul" or len(node.args) != 2 or node.kwargs or node in inside:
            continue
        parts = [graph.follow(part) for part in node.args if isinstance(part, Node)]
        weights = [part for part in parts if graph.is_parameter(part)]
        if len(parts) != 2 or len(weights) != 1:
            continue
        (weight,), (x,) = weights, [part for part in parts if part is not weights[0]]
        shape = tuple(weight.meta["val"].shape)
        if shape == (x.meta["val"].shape[-1],):
            found.append(NormUnit(node, x, SCALE, 0.0, shape[0], graph.parameters[weight], shape))
    return found


def _given_norm(graph: LayerGraph, node: Node) -> NormUnit | None:
    """A norm that is one operation of PyTorch."""
    name, args = op_name(node), [*node.args]
    if name == "layer_norm":
        x, sizes, weight, bias, eps = (*args, *(None, None, 1e-5)[len(args) - 2 :])[:5]
        kind = LAYER
    elif name == "rms_norm":
        x, sizes, weight, eps = (*args, None, None)[:4]
        kind, bias = RMS, None
    else:
        return None
    if len(sizes) != 1 or not isinstance(eps, float):
        return None
    unit = NormUnit(node, graph.follow(x), kind, eps, sizes[0])
    return _with_tensors(graph, unit, weight, bias)


def _with_tensors(graph: LayerGraph, unit: NormUnit, weight: Any, bias: Any) -> NormUnit | None:
    name, shape, offset, of_bias = None, None, 0.0, None
    if weight is not None:
        if (told := _weight(graph, weight)) is None:
            return None
        name, shape, offset = told
        if len(shape) > 2 or shape[-1] != unit.width:
            return None
    if bias is not None:
        bias = graph.follow(bias)
        if not graph.is_parameter(bias) or tuple(bias.meta["val"].shape) != shape:
            return None
        of_bias = graph.parameters[bias]
    return NormUnit(unit.node, unit.x, unit.kind, unit.eps, unit.width, name, shape, of_bias, offset)


def _weight(graph: LayerGraph, node: Node) -> tuple[str, tuple[int, ...], float] | None:
    """The parameter of a norm, its shape, and what is added to it; None for any other value."""
    node, offset = graph.follow(node), 0.0
    if op_name(node) == "add" and len(node.args) == 2 and isinstance(node.args[1], (int, float)) and not node.kwargs:
        offset, node = float(node.args[1]), graph.follow(node.args[0])  # type: ignore[arg-type]
    if not graph.is_parameter(node):
        return None
    return graph.parameters[node], tuple(node.meta["val"].shape), offset


def _written_norm(graph: LayerGraph, node: Node) -> NormUnit | None:
    """A norm written out: u / sqrt(mean(u²) + eps), where u is x, or x less its mean."""
    name = op_name(node)
    root = name == "sqrt" or (name == "pow" and node.args[1] == 0.5)
    if not (root or name == "rsqrt" or (name == "pow" and node.args[1] == -0.5)):
        return None
    added = graph.follow(node.args[0])  # type: ignore[arg-type]
    if op_name(added) != "add" or len(added.args) != 2 or not isinstance(added.args[1], float) or added.kwargs:
        return None
    eps, mean = added.args[1], graph.follow(added.args[0])  # type: ignore[arg-type]
    if (u := _squared(graph, mean)) is None:
        return None
    x, kind = (u, RMS) if (x := _centred(graph, u)) is None else (x, LAYER)
    if op_name(mean) == "var" and kind == RMS:  # of x itself, which is centred for the numerator alone
        kind, u = LAYER, next((user for user in _users(graph, x) if _centred(graph, user) is x), None)
    if u is None:
        return None
    scaled = [user for user in _users(graph, node) if u in graph.inputs(user) and _is_scaling(graph, user, node, root)]
    width = x.meta["val"].shape[-1]
    if len(scaled) != 1 or not isinstance(width, int) or len(_users(graph, node)) != 1:
        return None
    return NormUnit(scaled[0], x, kind, eps, width)


def _squared(graph: LayerGraph, mean: Node) -> Node | None:
    """u, of which `mean` is the mean square over its last axis, kept as one column; None for another value."""
    name, args = op_name(mean), mean.args
    rank = mean.meta["val"].dim() if isinstance(mean.meta.get("val"), Tensor) else 0
    if name == "var":
        biased = mean.kwargs.get("correction") == 0 or (len(args) > 2 and args[2] is False)
        kept = mean.kwargs.get("keepdim") or args[-1] is True
        return graph.follow(args[0]) if biased and kept and args[1] in ([-1], [rank - 1]) else None  # type: ignore[arg-type]
    if name != "mean" or len(args) < 3 or args[1] not in ([-1], [rank - 1]) or args[2] is not True:
        return None
    square = graph.follow(args[0])  # type: ignore[arg-type]
    inputs = graph.inputs(square)
    power = op_name(square) == "pow" and square.args[1] == 2
    product = op_name(square) == "mul" and len(square.args) == 2 and len({*map(graph.follow, square.args)}) == 1  # type: ignore[arg-type]
    return inputs[0] if power or product or op_name(square) == "square" else None


def _centred(graph: LayerGraph, u: Node) -> Node | None:
    """x if u is x less its mean over the last axis."""
    if op_name(u) != "sub" or len(u.args) != 2 or u.kwargs or not all(isinstance(part, Node) for part in u.args):
        return None
    x, mean = map(graph.follow, u.args)  # type: ignore[arg-type]
    rank = x.meta["val"].dim()
    fits = op_name(mean) == "mean" and len(mean.args) == 3 and mean.args[1] in ([-1], [rank - 1]) and mean.args[2]
    return x if fits and graph.follow(mean.args[0]) is x else None  # type: ignore[arg-type]


def _is_scaling(graph: LayerGraph, user: Node, by: Node, root: bool) -> bool:
    if root:
        return op_name(user) == "div" and len(user.args) == 2 and graph.follow(user.args[1]) is by  # type: ignore[arg-type]
    return op_name(user) == "mul"


def _affine(graph: LayerGraph, unit: NormUnit) -> list[NormUnit]:
    """The norm with each weight, and each bias, that its result alone goes through; itself if it is read without."""
    found: list[NormUnit] = []
    for user in _users(graph, unit.node):
        weight = _other(graph, user, "mul", unit.node)
        if weight is None or _weight(graph, weight) is None:
            return [unit]
        after, bias, node = _users(graph, user), None, user
        added = _other(graph, after[0], "add", user) if unit.kind == LAYER and len(after) == 1 else None
        if added is not None and graph.is_parameter(added):
            node, bias = after[0], added
        whole = NormUnit(node, unit.x, unit.kind, unit.eps, unit.width)
        if (with_tensors := _with_tensors(graph, whole, weight, bias)) is None:
            return [unit]
        found.append(with_tensors)
    return found or [unit]


def _other(graph: LayerGraph, user: Node, name: str, node: Node) -> Node | None:
    """What `user` multiplies `node` by, or adds to it; None if it does not, or if that is no node."""
    if op_name(user) != name or len(user.args) != 2 or user.kwargs:
        return None
    others = [part for part in map(graph.follow, user.args) if part is not node]
    return others[0] if len(others) == 1 and isinstance(others[0], Node) else None


def _users(graph: LayerGraph, node: Node) -> list[Node]:
    """The operations that read a node's value, also through nodes that pass it on."""
    found: dict[Node, None] = {}
    for user in node.users:
        if user.op == "output":
            continue
        if graph.follow(user) is node:
            found |= dict.fromkeys(_users(graph, user))
        elif op_name(user) not in ("_assert_tensor_metadata", "sym_size"):
            found[user] = None
    return list(found)


def same_rows(graph: LayerGraph, node: Node) -> Node:
    """The node whose rows these are, in another arrangement: [B, T, C] and [B T, C]."""
    node = graph.follow(node)
    while op_name(node) in _RESHAPES:
        source = graph.follow(node.args[0])  # type: ignore[arg-type]
        if source.meta["val"].shape[-1] != node.meta["val"].shape[-1]:
            break
        node = source
    return node


def terms(graph: LayerGraph, node: Node, stop: frozenset[Node]) -> dict[Node, float]:
    """A value as a sum of nodes times factors; nodes that are no sums are terms of their own."""
    node = same_rows(graph, node)
    name, args = op_name(node), node.args
    if node in stop or node.op != "call_function":
        return {node: 1.0}
    if name in ("add", "sub") and all(isinstance(part, Node) for part in args[:2]):
        alpha = float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
        first, second = (terms(graph, part, stop) for part in args[:2])  # type: ignore[arg-type]
        return _added(first, second, -alpha if name == "sub" else alpha)
    if name in ("mul", "div") and len(args) == 2 and isinstance(args[1], (int, float)) and not node.kwargs:
        factor = args[1] if name == "mul" else 1 / args[1]
        return {term: value * factor for term, value in terms(graph, args[0], stop).items()}  # type: ignore[arg-type]
    return {node: 1.0}


def _added(first: dict[Node, float], second: dict[Node, float], factor: float) -> dict[Node, float]:
    return {term: first.get(term, 0.0) + factor * second.get(term, 0.0) for term in (*first, *second)}
