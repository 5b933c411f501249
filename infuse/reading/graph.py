"""LayerGraph: the operations of one call of a layer, with the names of its arguments and parameters; and Numbers.

Operations that change no value (casts between floating dtypes of at least the layer's own precision, copies, dropout)
are skipped. Numbers evaluates parts of a graph in float64, so that what a layer computes can be compared with what our
parts compute, however it is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map_only

from infuse.ground.errors import SpecMismatch

ANGLES = "position_embeddings."  # what the names of cos and sin begin with
PAST = "cache"  # the argument of a traced call that has as many elements as the cache has tokens
_SMALL = (2, 3, 4, 5, 6, 8, 9, 10, 11, 12)  # of sizes that vary, in an evaluation
aten = torch.ops.aten


@torch.library.custom_op("infuse_reading::append", mutates_args=())
def _append(new: Tensor, past: Tensor, as_values: bool) -> Tensor:
    """Keys (or values) on a cache with `new` after them: [B, K, T, D] → [B, K, P + T, D]. `past` has P elements."""
    return torch.cat((new.new_zeros(*new.shape[:2], past.shape[0], new.shape[3]), new), dim=2)


@_append.register_fake
def _(new: Tensor, past: Tensor, as_values: bool) -> Tensor:
    return new.new_empty(*new.shape[:2], past.shape[0] + new.shape[2], new.shape[3])


def _folders(package: str) -> list[str]:
    """Where a package lies, without importing it."""
    found = find_spec(package)
    return list(found.submodule_search_locations or ()) if found is not None else []


APPEND = torch.ops.infuse_reading.append.default

_NOT_LAYERS = (
    *(f"{folder}{os.sep}" for folder in (*torch.__path__, *_folders("sympy"), Path(__file__).parent)),
    "<frozen ",
)
_SHARED = re.compile(r"[/\\]transformers[/\\](?!models[/\\])")  # files around all models of transformers
_COPIES = frozenset({"contiguous", "clone", "alias", "detach", "lift_fresh_copy", "lift_fresh", "positive", "detach_"})
_CASTS = frozenset({"to", "_to_copy", "type_as"})


@dataclass(frozen=True)
class Size:
    """A size among the arguments of an operation: an expression of sizes that vary."""

    expression: Any

    def __repr__(self) -> str:  # equal for equal ones
        return str(self.expression)


@dataclass(frozen=True)
class Trace:
    """What was recorded of one call of a layer. By the name of each: arguments ("" is the hidden states), parameters,
    buffers. `results`: the nodes of what the call returns, None for what is no tensor; `structure`: how they lie.
    """

    graph: Graph
    arguments: dict[Node, str]
    parameters: dict[Node, str]
    buffers: dict[Node, str]
    results: list[Node | None]
    structure: TreeSpec


class LayerGraph:
    """The operations of one call of a layer.

    `arguments`: input node → name ("" for the hidden states, "position_embeddings.0"). `parameters`: input node → name
    of a parameter or buffer of the layer. `outputs`: what the call returns, in order; None for what is no tensor.
    """

    def __init__(self, layer: str, trace: Trace):
        self.layer, self._graph = layer, trace.graph
        self.arguments = trace.arguments
        self.parameters = {**trace.parameters, **trace.buffers}
        self._of_parameters = trace.parameters.keys()
        self.hidden = next(iter(self.arguments))
        self.dtype: torch.dtype = self.hidden.meta["val"].dtype
        self._place = {node: place for place, node in enumerate(self._graph.nodes)}
        self._out_of_place()
        self._merge_equal()
        (results,) = next(node for node in self._graph.nodes if node.op == "output").args
        self.outputs = [self.follow(node) if isinstance(node, Node) else None for node in results]
        self.structure = trace.structure

    def is_parameter(self, node: Any) -> bool:
        """Whether a node is a parameter of the layer, which a state dict has, and no buffer."""
        return node in self._of_parameters

    def place(self, node: Node) -> int:
        return self._place[node]

    def operations(self) -> list[Node]:
        """The operations that results depend on, in order."""
        return [node for node in self.before(self.outputs) if node.op == "call_function"]

    def before(self, nodes: Iterable[Any], stop: Mapping[Node, Any] | frozenset[Node] = frozenset()) -> list[Node]:
        """`nodes` and all nodes that they are made from, in order; what those in `stop` are made from is left out."""
        found: set[Node] = set()
        waiting = [self.follow(node) for node in nodes if isinstance(node, Node)]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += () if node in stop else self.inputs(node)
        return sorted(found, key=self.place)

    def inputs(self, node: Node) -> list[Node]:
        """The nodes whose values, and not only sizes, a node is made from."""
        is_number = node.op == "call_function" and not isinstance(node.meta.get("val"), (Tensor, tuple, list))
        return [] if is_number else [self.follow(node) for node in node.all_input_nodes]

    def name(self, node: Node) -> str:
        """The name of an argument, a parameter or a buffer."""
        return self.parameters.get(node) or self.arguments.get(node) or "the hidden states"

    def zeros(self) -> dict[Node, Any]:
        """Zeros for every argument, so that an evaluation can read their sizes."""
        return {node: torch.zeros(self.shape(node), dtype=torch.float64) for node in self.arguments}

    def follow(self, node: Any) -> Any:
        """The node whose value this one passes on; a number is itself."""
        while isinstance(node, Node) and self._passes(node):
            node = node.args[0]  # type: ignore[assignment]
        return node

    def _passes(self, node: Node) -> bool:
        name = op_name(node)
        if name in _COPIES:
            return True
        if name == "dropout":
            return not node.args[2]
        if name not in _CASTS:
            return False
        source = node.args[0]
        if not isinstance(source, Node) or not isinstance(source.meta.get("val"), Tensor):
            return False
        before, after = source.meta["val"].dtype, node.meta["val"].dtype
        if not before.is_floating_point:
            return before == after
        return after in (self.dtype, torch.float32, torch.float64)

    def _out_of_place(self) -> None:
        """Turn operations in place into plain ones. SpecMismatch if anything else would see what they write."""
        for node in list(self._graph.nodes):
            schema = getattr(node.target, "_schema", None)
            if node.op != "call_function" or schema is None or not schema.is_mutable or op_name(node) == "detach_":
                continue
            base = node.args[0] if node.args else None
            plain = getattr(aten, op_name(node).removesuffix("_"), None)
            overload = getattr(plain, node.target._overloadname, None)
            if not isinstance(base, Node) or overload is None or _written(node) != [base]:
                raise self.left(node, "writes into a tensor that it is given")
            same = [other for other in self._graph.nodes if _storage(other) == _storage(base) and other is not node]
            if any(other.op == "placeholder" for other in same):
                raise self.left(node, "writes into its input")
            if any(_layout(other) != _layout(base) for other in same):
                raise self.left(node, "writes into a view")
            node.target = overload
            for one in same:
                for user in list(one.users):
                    if user not in (node, *same) and self._place[user] > self._place[node]:
                        user.replace_input_with(one, node)

    def _merge_equal(self) -> None:
        """Let what is computed twice be one node."""
        seen: dict[Any, Node] = {}
        for node in list(self._graph.nodes):
            schema = getattr(node.target, "_schema", None)
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if node.op != "call_function" or schema is None or not schema.returns or random or schema.is_mutable:
                continue
            key = repr((node.target, map_arg(node.args, self.follow), map_arg(node.kwargs, self.follow)))
            first = seen.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                self._graph.erase_node(node)

    def unlike(self, other: LayerGraph) -> str | None:
        """Where the graph of the same call of other sizes has another operation, or another number; None if nowhere."""
        ours, theirs = ([node for node in graph._graph.nodes if node.op != "output"] for graph in (self, other))
        for node, one in zip(ours, theirs, strict=False):
            if (node.op, op_name(node), _but_sizes(node)) != (one.op, op_name(one), _but_sizes(one)):
                return f"`{op_name(one)}`{other.where(one)}"
        return None if len(ours) == len(theirs) else "the number of operations"

    def left(self, node: Node, why: str = "") -> SpecMismatch:
        """The error for a node that no part has."""
        text = why or "is in no part"
        return SpecMismatch(self.layer, [f"left: `{op_name(node)}`{self.where(node)} {text}"])

    def lines(self, nodes: Iterable[Node]) -> str:
        """The lines that nodes come from, the innermost of each first: "modeling_x.py:120, modeling_x.py:124"."""
        return ", ".join(dict.fromkeys(place for node in nodes for place in self._places(node)))

    def read_at(self, node: Node) -> str:
        """The lines at which a node is read."""
        users = [user for user in node.users if user.op == "call_function"]
        return self.lines(user for one in (node, *users) for user in one.users if user.op == "call_function")

    def where(self, node: Node) -> str:
        """ " at modeling_x.py:120": the line of the layer's source that a node comes from, and those that called it."""
        places = self._places(node)
        if not places:
            return ""
        return f" at {places[0]}" + (f" (from {', '.join(places[1:])})" if places[1:] else "")

    def _places(self, node: Node) -> list[str]:
        frames = node.meta.get("lines", [])
        models = [(file, line) for file, line in frames if not _SHARED.search(file)]
        return list(dict.fromkeys(f"{Path(file).name}:{line}" for file, line in reversed(models or frames)))

    def module(self, node: Node) -> str:
        """Path of the innermost module of the layer that a node was made in."""
        return node.meta.get("module", "")

    def shape(self, node: Node) -> tuple[int, ...]:
        """The sizes of a node's value in an evaluation."""
        return tuple(self._size(size) for size in node.meta["val"].shape)

    def _size(self, size: Any) -> int:
        return size if isinstance(size, int) else self.number(Size(size.node.expr))

    def number(self, size: Size) -> int:
        """A size in an evaluation."""
        try:
            return int(size.expression.subs(self._sizes))
        except (ZeroDivisionError, TypeError):  # windows and grids divide by sizes
            raise SpecMismatch(self.layer, [f"has no size {size.expression} for few tokens"]) from None

    @cached_property
    def _sizes(self) -> dict[Any, int]:
        """Symbol → its value in an evaluation."""
        sizes = [size for node in self.arguments for size in node.meta["val"].shape if not isinstance(size, int)]
        symbols = {size.node.expr: size.node.hint for size in sizes if size.node.expr.is_symbol}
        small = dict(zip(dict.fromkeys(symbols.values()), _SMALL, strict=False))
        small |= self._after_prefix(small)
        return {symbol: small[hint] for symbol, hint in symbols.items()}

    def _after_prefix(self, hints: dict[int, int]) -> dict[int, int]:
        """Tokens for an evaluation where angles have no rows for the first ones: as many more as in the call."""
        tokens = self.hidden.meta["val"].shape[1]
        for node, name in self.arguments.items():
            if name.startswith(ANGLES) and node.meta["val"].dim() > 1:
                rows = node.meta["val"].shape[-2]
                sizes = [size.node.hint for size in (rows, tokens) if not isinstance(size, int)]
                if len(sizes) == 2 and sizes[0] < sizes[1]:
                    return {sizes[1]: hints[sizes[0]] + sizes[1] - sizes[0]}
        return {}


@lru_cache(maxsize=1024)
def is_in_layer(file: str) -> bool:
    """Whether a file may be a layer's, and is neither PyTorch's nor ours."""
    return not file.startswith(_NOT_LAYERS)


def op_name(node: Any) -> str:
    """The name of a node's operation: "linear"; empty for a number."""
    if not isinstance(node, Node):
        return ""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2]
    return node.name if node.op != "call_function" else getattr(target, "__name__", str(target))


def _but_sizes(node: Node) -> list[Any]:
    """The arguments of an operation that are neither tensors nor sizes."""
    taken = node.args, node.kwargs
    others = [leaf for leaf in tree_leaves(taken) if type(leaf) is not int and not isinstance(leaf, Node)]
    return others if op_name(node) == "arange" else [*others, *values_in(node)]


def values_in(node: Node) -> list[Any]:
    """The numbers that an operation computes with, and not those that say sizes, axes or places in them."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    types = {argument.name: str(argument.real_type) for argument in schema.arguments}
    given = {**dict(zip(types, node.args, strict=False)), **node.kwargs}
    numbers = [leaf for name, value in given.items() if "int" not in types[name] for leaf in tree_leaves(value)]
    return [leaf for leaf in numbers if not isinstance(leaf, Node)]


def _written(node: Node) -> list[Any]:
    """What an operation writes into, by its signature."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {**dict(zip((one.name for one in arguments), node.args, strict=False)), **node.kwargs}
    return [given[one.name] for one in arguments if one.name in given and one.alias_info and one.alias_info.is_write]


def _storage(node: Node) -> int | None:
    """What tells the memory of a node's value from that of others; None if the value is no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _layout(node: Node) -> tuple:
    """How a node's value lies in its memory."""
    value = node.meta["val"]
    return value.dtype, tuple(value.shape), value.stride(), value.storage_offset()


class Numbers:
    """Values of nodes in float64 for given values of others; `known` has those given."""

    def __init__(self, graph: LayerGraph, known: Mapping[Node, Any]):
        self._graph, self._known = graph, dict(known)

    def __call__(self, node: Any) -> Any:
        """The value of a node."""
        node = self._graph.follow(node)
        if node not in self._known:
            assert node.op == "call_function", node
            args, kwargs = (map_arg(part, self) for part in (node.args, node.kwargs))
            args, kwargs = (tree_map_only(torch.dtype, _widened, part) for part in (args, kwargs))
            args, kwargs = (tree_map_only(torch.device, _on_cpu, part) for part in (args, kwargs))
            args, kwargs = (tree_map_only(Size, self._graph.number, part) for part in (args, kwargs))
            run = torch.reshape if op_name(node) in ("view", "_unsafe_view") else node.target  # copies are skipped
            self._known[node] = _wide(run(*args, **kwargs))  # type: ignore[operator]
        return self._known[node]


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _on_cpu(device: torch.device) -> torch.device:
    return torch.device("cpu")


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def random_values(shapes: Iterable[tuple[int, ...]], seed: int = 0) -> Iterator[Tensor]:
    """Normally distributed values of these shapes in float64."""
    generator = torch.Generator().manual_seed(seed)
    for shape in shapes:
        yield torch.randn(shape, generator=generator, dtype=torch.float64)
