"""Follow the residual stream of a layer: which sums and norms feed its parts, as the steps of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

from infuse.architectures.parts.norm import SCALE
from infuse.architectures.program import ADD, ATTENTION, MLP, NORM, NORM_BRANCH, NORM_STREAM, REDUCE, Program, Step
from infuse.ground.errors import SpecMismatch
from infuse.reading.graph import LayerGraph
from infuse.reading.mlp import ReadMLP
from infuse.reading.units import LinearUnit, NormUnit, same_rows, terms

MLP_PART = "mlp"  # the name of the MLP in a block


class Stream:
    """Follows the residual stream: which sums and norms feed each part. `named`: norms by their names in a block."""

    def __init__(self, graph: LayerGraph, scaled: list[NormUnit], out: LinearUnit, mlps: list[ReadMLP]):
        self.graph, self.named = graph, dict[str, NormUnit]()
        self.program: Program = ()
        self._norms, self._out, (self._mlp,) = scaled, out, mlps
        self._stops = frozenset({out.node, self._mlp.node, *(unit.node for unit in scaled)})
        self._x: dict[Node, float] = {graph.hidden: 1.0}
        self._y = self._x
        self._branch: dict[Node, float] = {}
        self._branch_of: list[str] = []
        self._steps: list[Step] = []

    def follow(self, of_attention: Sequence[Node], mixer: str) -> None:
        graph = self.graph
        inputs = {self._out.node: of_attention, self._mlp.node: self._mlp.x}
        inputs |= {unit.node: (unit.x,) for unit in self._norms}
        norms_of = {unit.node: unit for unit in self._norms}
        for x in (*(x for xs in inputs.values() for x in xs), graph.outputs[0]):
            for term in terms(graph, x, self._stops):  # type: ignore[arg-type]
                if term not in self._stops and term.op == "call_function":
                    raise graph.left(term)
        for node in self._in_order(inputs):
            values = [terms(graph, x, self._stops) for x in inputs[node]]
            if any(value != values[0] for value in values):
                raise graph.left(node, "and the products beside it read different values")
            if node in norms_of:
                self._norm(norms_of[node], values[0], inputs, mixer)
            else:
                self._part(node, inputs[node][0], values[0], mixer if node is self._out.node else MLP_PART)
        final = terms(graph, self.graph.outputs[0], self._stops)  # type: ignore[arg-type]
        if final != self._x:
            self._add(final, self.graph.outputs[0])
        if len(graph.outputs[0].meta["val"].shape) != 3:  # type: ignore[union-attr]
            raise graph.left(graph.outputs[0], "is not [batch, tokens, width]")  # type: ignore[arg-type]
        self.program = tuple(self._steps)

    def _in_order(self, inputs: Mapping[Node, Sequence[Node]]) -> list[Node]:
        """Norms and parts in the order of a block: attention before the MLP, and norms just before what reads them."""
        graph, order = self.graph, list[Node]()

        def add(node: Node) -> None:
            if node not in order:
                for x in inputs[node]:
                    for term in terms(graph, x, self._stops):
                        if term in inputs:
                            add(term)
                order.append(node)

        for node in (self._out.node, self._mlp.node):
            add(node)
        final = terms(graph, graph.outputs[0], self._stops)  # type: ignore[arg-type]
        for node in sorted(inputs, key=graph.place):
            if node in final:
                add(node)
        return order

    def _norm(
        self, unit: NormUnit, value: dict[Node, float], inputs: Mapping[Node, Sequence[Node]], mixer: str
    ) -> None:
        if self._branch and value == self._branch:
            name = "post1" if self._branch_of[-1] == mixer else "post2"
            self._name(name, unit)
            self._steps.append(Step(NORM_BRANCH, name))
            self._branch = {unit.node: 1.0}
            return
        if unit.kind == SCALE:
            raise self.graph.left(unit.node, "scales another value than what attention or the MLP returns")
        if value != self._x:
            self._add(value, unit.x)
        if self._is_read_again(unit, inputs):
            name = "norm2" if self._reader_of(unit, inputs) == self._mlp.node else "norm1"
            self._name(name, unit)
            self._steps.append(Step(NORM, name))
            self._y = {unit.node: 1.0}
            return
        name = "norm2" if self._branch_of and self._branch_of[-1] == MLP_PART else "norm1"
        self._name(name, unit)
        self._steps.append(Step(NORM_STREAM, name))
        self._x = self._y = {unit.node: 1.0}

    def _name(self, name: str, unit: NormUnit) -> None:
        if unit.shape is not None and len(unit.shape) != 1:
            raise self.graph.left(unit.node, f"has a weight of shape {unit.shape}")
        if name in self.named:
            raise self.graph.left(unit.node, f"is another norm in the place of {name}")
        self.named[name] = unit

    def _is_read_again(self, unit: NormUnit, inputs: Mapping[Node, Sequence[Node]]) -> bool:
        """Whether anything else reads the stream that `unit` normalises."""
        graph = self.graph
        values = [terms(graph, x, self._stops) for node, xs in inputs.items() if node is not unit.node for x in xs]
        values.append(terms(graph, graph.outputs[0], self._stops))  # type: ignore[arg-type]
        return any(self._x.items() <= value.items() for value in values)

    def _reader_of(self, unit: NormUnit, inputs: Mapping[Node, Sequence[Node]]) -> Node | None:
        """The part that reads a norm: attention, if it does."""
        readers = [node for node, xs in inputs.items() if any(same_rows(self.graph, x) is unit.node for x in xs)]
        return self._out.node if self._out.node in readers else next(iter(readers), None)

    def _part(self, node: Node, x: Node, value: dict[Node, float], name: str) -> None:
        if value != self._y and self._branch:
            self._add(value, x)
        if value != self._y:
            raise self._left(x, "reads another value than the last norm or the residual stream")
        self._steps.append(Step(ATTENTION if name != MLP_PART else MLP, name))
        self._branch = {**self._branch, node: 1.0}
        self._branch_of.append(name)

    def _left(self, at: Node, why: str) -> SpecMismatch:
        """The error for a sum, with all lines that it is made at."""
        sums = [node for node in self.graph.before([at], self._stops) if node not in self._stops]
        return self.graph.left(at, f"{why}; it is made at {self.graph.lines(sums)}")

    def _add(self, value: dict[Node, float], at: Node) -> None:
        """Add the branch to the stream, so that it becomes `value`."""
        factors = {value.get(term) for term in self._branch}
        kept = {term: factor for term, factor in value.items() if term not in self._branch}
        if not self._branch or len(factors) != 1 or None in factors or kept != self._x:
            raise self._left(at, "is no sum of the residual stream and its branches")
        if len(self._branch) > 1:
            self._steps.append(Step(REDUCE))
        (scale,) = factors
        self._steps.append(Step(ADD, scale=float(scale)))  # type: ignore[arg-type]
        self._x = self._y = value
        self._branch = {}
