"""Read a layer from the graphs of its calls: the program, parts and call that a written spec would give.

What no part has made is named with its line in the layer's source. The calls of one layer must give one reading.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from infuse.architectures.layer import SINGLE, TENSOR, TUPLE, Bound, CallSpec, LayerShape
from infuse.architectures.packing import Fill
from infuse.architectures.part import PartShape
from infuse.architectures.parts.attention import NO_ATTRIBUTE
from infuse.architectures.program import NORMS, Program
from infuse.ground.authors import package_of
from infuse.ground.errors import SpecMismatch, in_brief
from infuse.reading.attention import AttentionReader, cores
from infuse.reading.calls import NOT_REACHED, LayerCall
from infuse.reading.effects import outside_reads
from infuse.reading.finite import take_clamp
from infuse.reading.graph import PAST, LayerGraph, op_name
from infuse.reading.mlp import ReadMLP, read_mlp
from infuse.reading.stream import MLP_PART, Stream
from infuse.reading.trace import AttentionCall, Observed, traced
from infuse.reading.units import LinearUnit, NormUnit, linears, norms, scales

_PRODUCT = "product"
_MISSING = object()


def read(layer: nn.Module, calls: Sequence[LayerCall]) -> Bound:
    """Read `layer`, an outline, from its calls. SpecMismatch names what no part has, or how two calls differ."""
    name = type(layer).__name__
    if read_outside := list(outside_reads(layer)):
        raise SpecMismatch(name, [", ".join(read_outside)])
    if not calls:
        raise SpecMismatch(name, [NOT_REACHED])
    readers: list[Reader] = []
    if torch.float16 in {parameter.dtype for parameter in layer.parameters()}:
        # What layers do in float16 alone is not seen in the calls of a model that runs on meta in a wider dtype.
        calls = [call.in_dtype(torch.float16) for call in calls]
    for call in calls:
        reader = Reader(layer, call, *traced(layer, call), readers[0] if readers else None)
        if mismatch := reader.try_to_read():
            if readers:
                raise SpecMismatch(name, [f"has a branch: for {call.text}, it {mismatch.differences[0]}"])
            raise mismatch
        if not call.sizes_vary and (branch := _branch_far_away(layer, call, reader.graph)):
            raise SpecMismatch(name, [f"has a branch on a size: with far more texts or tokens, {branch}"])
        if reader.told.asks_finite:
            reader.clamp = _clamp_of(layer, call, reader)
        readers.append(reader)
    first = readers[0]
    for other in readers[1:]:
        if other.result != first.result:
            new = [line for line in other.lines() if line not in first.lines()]
            more = f", at {', '.join(new)}" if new else ""
            raise SpecMismatch(
                name, [f"has a branch: it computes {other.call.text}, otherwise than {first.call.text}{more}"]
            )
    appended = [index for reader in readers for index in reader.told.appended]
    if any(len(reader.told.appended) > 1 for reader in readers):
        raise SpecMismatch(name, ["appends to the cache more than once"])
    first.set_causal({reader.causal for reader in readers} - {None}, bool(appended))
    index = index_of(first.attention_module())
    if any(other != index for other in appended):
        raise SpecMismatch(name, [f"appends to layer {appended[0]} of the cache, and its index is {index}"])
    if differences := first.unclaimed():
        raise SpecMismatch(name, differences)
    arguments = list(inspect.signature(type(layer).forward).parameters.values())[2:]
    call_spec = CallSpec(
        arguments=tuple(argument.name for argument in arguments if argument.kind is argument.POSITIONAL_OR_KEYWORD),
        returns=first.returns,
    )
    shape = LayerShape(program=(*first.program, *first.clamp), held=first.held(), call=call_spec)
    return Bound(shape, tuple(first.fills), index, package_of(type(layer)))


def _branch_far_away(layer: nn.Module, call: LayerCall, near: LayerGraph) -> str | None:
    """How the layer differs in the same call of far more texts and tokens; None if it does not."""
    try:
        far, _ = traced(layer, call, is_far=True)
    except SpecMismatch as mismatch:
        return f"it {mismatch.differences[0]}"
    unlike = near.unlike(far)
    return unlike and f"it computes {unlike} otherwise"


def _clamp_of(layer: nn.Module, call: LayerCall, finite: Reader) -> Program:
    """What a layer does where its values are not finite: the same, and a clamp."""
    reader = Reader(layer, call, *traced(layer, call, finite=False), finite.first)
    if mismatch := reader.try_to_read():
        raise mismatch
    if not reader.clamp or finite.clamp or reader.result[:-1] != finite.result[:-1]:
        raise SpecMismatch(type(layer).__name__, ["does more than to clamp its result where values are not finite"])
    return reader.clamp


@dataclass
class Reader:
    """Reads one graph. `first`: the reader of the layer's first call, whose attention this one must have, too.

    `claimed`: the part that has each operation, as far as it was read.
    """

    layer: nn.Module
    call: LayerCall
    graph: LayerGraph
    told: Observed
    first: Reader | None
    parts: dict[str, PartShape] = field(default_factory=dict)
    fills: list[Fill] = field(default_factory=list)
    program: Program = ()
    clamp: Program = ()  # of the result, in float16
    returns: str = TENSOR
    causal: bool | None = None
    mixer: str = ""
    out: str = ""
    claimed: dict[Node, str] = field(default_factory=dict)

    def try_to_read(self) -> SpecMismatch | None:
        """Read the graph; return why it cannot be read, or None."""
        try:
            self.read()
        except SpecMismatch as mismatch:
            return mismatch
        except Exception as error:  # operations in a form that nobody has seen yet
            return SpecMismatch(self.graph.layer, [f"cannot be read: {in_brief(error)}"])
        return None

    def read(self) -> None:
        graph = self.graph
        self.clamp = take_clamp(graph, self.told.asks_finite)
        scaled = norms(graph)
        for unit in scaled:
            self._claim(f"norm {unit.weight or ''}".strip(), graph.before([unit.node], frozenset({unit.x})), {unit.x})
        products = linears(graph)
        self.claimed |= {unit.node: f"{_PRODUCT} {unit.weight}" for unit in products}
        attention, core = self._attention(products, scaled)
        self._claim(self.mixer, [*attention.region, attention.out.node])
        mlps = self._mlps(products, attention)
        inside = {unit.node for unit in attention.norms}
        of_stream = [unit for unit in scaled if unit.node not in inside]
        for unit in scales(graph, scaled):
            if unit.node not in self.claimed:
                of_stream.append(unit)
                self._claim(f"layer scale {unit.weight}", [unit.node])
        stream = Stream(graph, of_stream, attention.out, mlps)
        weights = core if op_name(core) != "scaled_dot_product_attention" else None
        self.returns = self._returned(weights)
        stream.follow(self._inputs(attention), self.mixer)
        self._claim("sums", (node for node in graph.operations() if node not in self.claimed))
        self.program = stream.program
        for name, unit in stream.named.items():
            self.parts[name] = unit.bound()
            self.fills += unit.fills(name)
        if "is_causal" not in self.call.arguments and attention.mask is None and graph.shape(graph.hidden)[1] > 1:
            self.causal = attention.core.causal

    def _claim(self, part: str, nodes: Iterable[Node], but: Collection[Node] = ()) -> None:
        for node in nodes:
            if node.op == "call_function" and node not in but:
                inner = self.claimed.get(node, "")
                self.claimed[node] = f"{part}: {inner}" if inner.startswith(_PRODUCT) else part

    @property
    def result(self) -> tuple[Any, ...]:
        return self.program, self.parts, self.returns, {*self.fills}, self.out, self.clamp

    def lines(self) -> list[str]:
        return self.graph.lines(self.graph.operations()).split(", ")

    # ---- parts

    def _attention(self, products: list[LinearUnit], scaled: list[NormUnit]) -> tuple[AttentionReader, Node]:
        graph, found = self.graph, cores(self.graph)
        if len(found) != 1:
            mixed = found or [node for node in graph.operations() if op_name(node) in ("matmul", "bmm", "einsum")]
            at = f": {graph.lines(mixed)}" if mixed else ""
            raise SpecMismatch(graph.layer, [f"has {len(found)} cores of attention; blocks that are read have one{at}"])
        (core,) = found
        made = frozenset(unit.node for unit in products)
        outs = [unit for unit in products if core in graph.before([unit.x], made)]
        if len(outs) != 1:
            raise graph.left(core, f"goes through {len(outs)} products; attention has one output")
        reader = AttentionReader(graph, core, outs[0], products, scaled)
        reader.check_cache(PAST in graph.arguments.values())
        given = {name for name, value in self.call.arguments.items() if isinstance(value, Tensor)}
        if "attention_mask" in given and reader.mask is None:
            raise graph.left(core, "ignores attention_mask")
        if self.first is None:
            self._read_attention(reader)
        else:
            self._compare_attention(reader, self.first)
        return reader, core

    def _read_attention(self, reader: AttentionReader) -> None:
        graph = self.graph
        calls = self.told.attention
        module = calls[0].module if calls else graph.module(reader.core.node)
        if not module:
            raise graph.left(reader.core.node, "is in no attention module of its own")
        self.mixer = module.partition(".")[0]
        core = reader.core
        self.heads = tuple(
            reader.heading(node, what) for node, what in ((core.q, "queries"), (core.k, "keys"), (core.v, "values"))
        )
        q, k, v = self.heads
        shape = replace(reader.shape_of(q, k, v, self.mixer, module), replaces=recorded_places(self.layer, module))
        fills = reader.fills(shape, q, k, v)
        shape = reader.compared(shape, q, k, v)
        self.shape = replace(shape, passes=self._passes(calls[0])) if calls else replace(shape, by_name=False)
        self.parts[self.mixer] = self.shape
        self.attention_fills, self.out = fills, reader.out.weight
        self.fills += fills

    def _compare_attention(self, reader: AttentionReader, first: Reader) -> None:
        if not reader.equals(first.shape, first.heads):
            raise reader.left(f"attends otherwise for {self.call.text}, than for {first.call.text}")
        self.mixer, self.shape, self.heads = first.mixer, first.shape, first.heads
        self.parts[self.mixer] = self.shape
        self.attention_fills, self.out = first.attention_fills, reader.out.weight
        self.fills += first.attention_fills

    def _passes(self, call: AttentionCall) -> tuple[tuple[str, str], ...]:
        """The keywords that the layer itself passes to attention functions, each with the attribute that it passes."""
        return tuple(
            (keyword, self._attribute(call.module, keyword, value))
            for keyword, value in call.keywords.items()
            if keyword not in ("dropout", "scaling") and not self._hands_on(keyword, value)
        )

    def _hands_on(self, keyword: str, value: Any) -> bool:
        """Whether a keyword is one of the call's own, with the value that the call has."""
        given = self.call.arguments.get(keyword, _MISSING)
        return given is not _MISSING and (isinstance(value, Tensor) or _equal(given, value))

    def _attribute(self, path: str, keyword: str, value: Any) -> str:
        """The attribute of the attention module or its config that has the value passed as `keyword`."""
        module: Any = self.layer.get_submodule(path)
        config = vars(module).get("config")
        places = (vars(module), vars(config) if config is not None else {})
        for attributes in places:
            if keyword in attributes and _equal(attributes[keyword], value):
                return keyword
        for attributes in places:
            alike = [name for name, other in attributes.items() if value is not None and _equal(other, value)]
            alike = [name for name in alike if name != "training" and not name.startswith("_")]
            if alike:
                return next((name for name in alike if name.startswith(keyword)), alike[0])
        if value is None:
            return NO_ATTRIBUTE
        raise SpecMismatch(self.graph.layer, [f"passes {keyword}={value!r}, which is no attribute, to its attention"])

    def _inputs(self, attention: AttentionReader) -> list[Node]:
        """The inputs of the products that attention reads."""
        return [unit.x for node, unit in attention.linears.items() if node in attention.region]

    def _mlps(self, products: list[LinearUnit], attention: AttentionReader) -> list[ReadMLP]:
        graph = self.graph
        rest = [unit for unit in products if unit.node not in attention.region and unit is not attention.out]
        nodes = frozenset(unit.node for unit in products)
        found: list[ReadMLP] = []
        taken: set[Node] = set()
        for down in rest:
            behind = graph.before([down.x], nodes)
            ups = [unit for unit in rest if unit.node in behind]
            if not ups or attention.out.node in behind:
                continue
            found.append(read_mlp(graph, MLP_PART, down, ups))
            self._claim(MLP_PART, graph.before([down.node], frozenset(unit.node for unit in ups)))
            taken |= {down.node, *(unit.node for unit in ups)}
        if left := [unit for unit in rest if unit.node not in taken]:
            raise graph.left(left[0].node, f"is in no part; it is read at {graph.read_at(left[0].node)}")
        if len(found) != 1:
            made = graph.lines(one.node for one in found)
            raise SpecMismatch(graph.layer, [f"has {len(found)} MLPs; blocks that are read have one: {made}"])
        self.parts[MLP_PART] = found[0].shape
        self.fills += found[0].fills
        return found

    # ---- results

    def _returned(self, weights: Node | None) -> str:
        graph = self.graph
        spec, outputs = graph.structure, graph.outputs
        if spec.num_nodes == 1:
            return TENSOR
        if spec.type is tuple and len(outputs) == 1:
            return SINGLE
        others = outputs[1:]
        if spec.type is tuple and len(outputs) == 2 and (others[0] is None or others[0] is weights):
            return TUPLE
        if outputs[1:] and isinstance(others[0], Node):
            raise graph.left(others[0], "is returned beside the hidden states")
        raise SpecMismatch(graph.layer, [f"returns {len(outputs)} values"])

    def attention_module(self) -> nn.Module:
        return self.layer.get_submodule(self.shape.replaces[0])

    def set_causal(self, seen: Collection[bool | None], appends: bool) -> None:
        """Say whether tokens see later ones, as calls without a mask or else its module tell."""
        if len(seen) > 1:
            raise SpecMismatch(self.graph.layer, ["is causal in some calls without a mask alone"])
        told = getattr(self.attention_module(), "is_causal", appends)
        causal = bool(next(iter(seen), told and appends))
        self.parts[self.mixer] = replace(self.shape, causal=causal)

    def held(self) -> tuple[tuple[str, PartShape], ...]:
        order = [name for name in (self.mixer, MLP_PART, *NORMS) if name in self.parts]
        return tuple((name, self.parts[name]) for name in order)

    def unclaimed(self) -> list[str]:
        """Parameters that no fill has, or more than one."""
        sources = [source for fill in self.fills for source in fill.sources]
        shapes = {name: tuple(parameter.shape) for name, parameter in self.layer.named_parameters()}
        twice = [f"parameter {name} is claimed twice" for name in dict.fromkeys(sources) if sources.count(name) > 1]
        left = sorted(shapes.keys() - set(sources))
        return twice + [f"parameter {name} {shapes[name]} is not claimed" for name in left]


def recorded_places(layer: nn.Module, path: str) -> tuple[str, ...]:
    """The place of an attention, and that of the module around it where transformers records its outputs instead."""
    recorded, outer = _recorded_classes(type(layer)), path.rpartition(".")[0]
    if not outer or type(layer.get_submodule(path)) in recorded or type(layer.get_submodule(outer)) not in recorded:
        return (path,)
    return path, outer


def _recorded_classes(layer: type) -> set[type]:
    """The classes whose outputs the models that are defined beside a layer, or its bases, record as attentions."""
    modules = [sys.modules[name] for name in {base.__module__ for base in layer.__mro__} if name in sys.modules]
    kinds = [kind for module in modules for kind in list(vars(module).values()) if isinstance(kind, type)]
    named = [vars(kind).get("_can_record_outputs") or {} for kind in kinds]
    entries = [entry for each in named for key, entry in each.items() if key.endswith("attentions")]
    several = [one for entry in entries for one in (entry if isinstance(entry, (list, tuple)) else (entry,))]
    return {getattr(one, "target_class", one) for one in several}


def index_of(attention: nn.Module) -> int | None:
    """The index of a layer in the cache, as its attention has it."""
    return getattr(attention, "layer_idx", getattr(attention, "layer_id", None))


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, (Tensor, nn.Module)) or isinstance(other, (Tensor, nn.Module)):
        return value is other
    return type(value) is type(other) and bool(value == other)
