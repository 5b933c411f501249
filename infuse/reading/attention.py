"""Read the attention of a layer: heads, norms, rotation, scores. What it computes is compared with ours in float64.

Suffixes: B batch, H query heads, K key/value heads, T new tokens, L keys, D head width, R outputs of a product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.functional import layer_norm, pad

from infuse.architectures.packing import BLOCKS, PACKINGS, SWAPPED, Fill, Heads, block_starts
from infuse.architectures.parts.attention import AttentionShape, NoPosition, Position, Rotary
from infuse.architectures.parts.norm import LAYER, NormShape
from infuse.ground.errors import SpecMismatch
from infuse.reading.graph import ANGLES, PAST, LayerGraph, Numbers, op_name, random_values
from infuse.reading.movement import MOVES, is_close, numbered, rows_of
from infuse.reading.units import LinearUnit, NormUnit

_CORES = frozenset({"scaled_dot_product_attention", "softmax", "_softmax"})
_PRODUCTS = frozenset({"matmul", "bmm"})
# Operations between the products of an attention that the comparison in float64 tells apart whatever their numbers.
_KNOWN = (
    MOVES
    | _CORES
    | _PRODUCTS
    | frozenset({"mul", "add", "sub", "neg", "div", "tanh", "view_as_complex", "view_as_real", "complex", "sigmoid"})
)
_ROTARIES = tuple(
    Rotary(interleaved=interleaved, in_halves=in_halves, once=once, sin_first=sin_first)
    for sin_first, once, in_halves, interleaved in product((False, True), repeat=4)
    if not (once and in_halves)
)


@dataclass(frozen=True)
class Heading:
    """Where the queries, keys or values of an attention come from: a product's rows [heads, D], times `factor`."""

    unit: LinearUnit
    rows: Tensor
    factor: float
    norm: NormUnit | None
    norm_after: bool


@dataclass(frozen=True)
class Core:
    """Scores and what becomes of them. `causal`: without a mask, each query sees the keys up to its own."""

    node: Node
    q: Node
    k: Node
    v: Node
    scale: float | None
    softcap: float
    causal: bool
    mask: Node | None


def cores(graph: LayerGraph) -> list[Node]:
    return [node for node in graph.operations() if op_name(node) in _CORES]


class AttentionReader:
    """Reads the attention around `core`, whose output goes through the product `out`."""

    def __init__(
        self, graph: LayerGraph, core: Node, out: LinearUnit, linears: Sequence[LinearUnit], norms: Sequence[NormUnit]
    ):
        self.graph, self.out = graph, out
        self.linears = {unit.node: unit for unit in linears}
        self.region = graph.before([out.x], frozenset(self.linears))
        self.norms = [unit for unit in norms if unit.node in self.region]
        self.core = self._core(core)
        self.parameters = [node for node in self.region if node in graph.parameters]
        self.arguments = [node for node in self.region if node in graph.arguments]
        self.mask = self._mask()
        self.angles = [node for node in self.arguments if graph.arguments[node].startswith(ANGLES)]
        self.sin_first = False
        self._check()

    def _dim(self, node: Node) -> int:
        return node.meta["val"].dim()

    # ---- structure

    def _core(self, node: Node) -> Core:
        graph = self.graph
        if op_name(node) == "scaled_dot_product_attention":
            args = (*node.args, *(None, 0.0, False)[len(node.args) - 3 :])
            q, k, v, mask, _, causal = args[:6]
            scale = node.kwargs.get("scale")
            q, k, v = map(graph.follow, (q, k, v))
            return Core(node, q, k, v, scale, 0.0, bool(causal), mask)  # type: ignore[arg-type]
        if node.args[1] not in (-1, self._dim(node) - 1):
            raise graph.left(node, "is not over the keys")
        scores, scale, softcap, mask = self._scores(node)
        mixed = next(
            (
                other
                for other in self.region
                if op_name(other) in _PRODUCTS and self._is_made_from(graph.follow(other.args[0]), node)  # type: ignore[arg-type]
            ),
            None,
        )
        if mixed is None:
            raise graph.left(node, "weighs no values")
        q, k = map(graph.follow, scores.args[:2])  # type: ignore[arg-type]
        return Core(node, q, k, graph.follow(mixed.args[1]), scale, softcap, False, mask)  # type: ignore[arg-type]

    def _scores(self, softmax: Node) -> tuple[Node, float, float, Node | None]:
        """The product of queries and keys before a softmax, its scale, its soft cap, and the mask that is added."""
        graph, mask = self.graph, None
        factors: list[float] = []  # before tanh, if there is one
        caps: list[float] = []
        node, is_capped = graph.follow(softmax.args[0]), False  # type: ignore[arg-type]
        while op_name(node) not in _PRODUCTS:
            name, args = op_name(node), node.args
            if name in ("mul", "div") and isinstance(args[1], (int, float)):
                node = graph.follow(args[0])  # type: ignore[arg-type]
                factor = float(args[1]) if name == "mul" else 1 / float(args[1])
                (caps if op_name(node) == "tanh" else factors).append(factor)
            elif name == "tanh":
                is_capped, node = True, graph.follow(args[0])  # type: ignore[arg-type]
            elif name == "add" and all(isinstance(part, Node) for part in args[:2]):
                parts = [graph.follow(part) for part in args[:2]]  # type: ignore[arg-type]
                of_heads = [part for part in parts if self._is_of_heads(part)]
                if len(of_heads) != 1 or mask is not None:
                    raise graph.left(node, "adds to the scores")
                mask, node = next(part for part in parts if part is not of_heads[0]), of_heads[0]
            elif name in MOVES and name not in ("cat", "stack"):
                node = graph.follow(args[0])  # type: ignore[arg-type]
            else:
                raise graph.left(node)
        cap = math.prod(caps) if is_capped else 0.0
        if cap and 1 / cap in factors:
            factors.remove(1 / cap)
        elif cap:
            factors.append(cap)
        return node, math.prod(factors), cap, mask

    def _is_of_heads(self, node: Node) -> bool:
        return any(other in self.linears for other in self.graph.before([node], frozenset(self.linears)))

    def _is_made_from(self, node: Node, source: Node) -> bool:
        return source in self.graph.before([node])

    def _mask(self) -> Node | None:
        """The argument that says which keys a token may attend to."""
        if self.core.mask is None:
            return None
        made_from = [node for node in self.graph.before([self.core.mask]) if node in self.graph.arguments]
        masks = [node for node in made_from if self._dim(node) == 4]
        return masks[0] if len(masks) == 1 else None

    def _check(self) -> None:
        """SpecMismatch for an operation of the region that no comparison tells from others."""
        graph = self.graph
        in_norms = {node for unit in self.norms for node in graph.before([unit.node], frozenset({unit.x}))}
        for node in self.region:
            is_value = node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
            if is_value and node not in self.linears and node not in in_norms and op_name(node) not in _KNOWN:
                raise graph.left(node)
        if graph.hidden in self.region:
            user = next(node for node in self.region if graph.hidden in graph.inputs(node))
            raise graph.left(user, "brings the hidden states into attention without a product")
        in_weights = {node for unit in self.norms for node in graph.before([unit.node]) if node in graph.parameters}
        for node in self.parameters:
            if node not in in_weights:
                user = next(other for other in self.region if node in graph.inputs(other))
                raise graph.left(user, f"reads {graph.parameters[node]}, which is in no part")
        for node in self.arguments:
            is_angle = graph.arguments[node].startswith(ANGLES)
            if node is not self.mask and graph.arguments[node] != PAST and not is_angle:
                user = next(other for other in self.region if node in graph.inputs(other))
                raise graph.left(user, f"reads the argument {graph.arguments[node]}, which no part takes")
        if len(self.angles) not in (0, 2):
            raise graph.left(self.core.node, f"is turned by {len(self.angles)} arguments; cos and sin are two")

    # ---- where heads come from

    def heading(self, node: Node, what: str) -> Heading:
        """Where the queries, keys or values at `node` come from. SpecMismatch if not from rows of one product."""
        graph = self.graph
        behind = graph.before([node], frozenset(self.linears))
        units = [self.linears[other] for other in behind if other in self.linears]
        norms = [unit for unit in self.norms if unit.node in behind]
        if len(units) != 1 or len(norms) > 1:
            raise self.left(f"takes {what} of {len(units)} products and {len(norms)} norms")
        (unit,) = units
        shape = graph.shape(unit.node)
        factor = self._factor(node, unit, what)
        if factor is None and self.angles:  # what was taken for cos may be sin
            self.sin_first = not self.sin_first
            factor = self._factor(node, unit, what)
        if factor is None:
            raise self.left(f"takes {what} that are not the rows of a product alone")
        moved = self._moved(node, unit, numbered(shape), what)[:, :, -self._tokens() :]
        rows = rows_of(moved, shape, factor)
        if rows is None:
            raise self.left(f"takes {what} in which tokens changed places")
        norm = norms[0] if norms else None
        turned = norm is not None and any(angle in graph.before([norm.x]) for angle in self.angles)
        return Heading(unit, rows, factor, norm, turned)

    def _factor(self, node: Node, unit: LinearUnit, what: str) -> float | None:
        """What all queries, keys or values at `node` are multiplied by; None if there is no such number."""
        ones = torch.ones(self.graph.shape(unit.node), dtype=torch.float64)
        new = self._moved(node, unit, ones, what)[:, :, -self._tokens() :]
        factor = float(new.flatten()[0])
        return factor if factor and is_close(new, torch.full_like(new, factor)) else None

    def _tokens(self) -> int:
        return self.graph.shape(self.graph.hidden)[1]

    def _moved(self, node: Node, unit: LinearUnit, value: Tensor, what: str) -> Tensor:
        """[B, H, T, D] at `node` for these outputs of `unit`, with norms passed over and nothing turned."""
        known: dict[Node, Any] = {**self.graph.zeros(), unit.node: value}
        for number, angle in enumerate(self.angles[::-1] if self.sin_first else self.angles):
            known[angle] = torch.full(self.graph.shape(angle), 1.0 - number, dtype=torch.float64)
        numbers = Numbers(self.graph, known)
        behind = self.graph.before([node])
        for norm in self.norms:
            if norm.node in behind and unit.node in self.graph.before([norm.x]):
                known[norm.node] = numbers(norm.x)
                numbers = Numbers(self.graph, known)
        moved = numbers(node)
        if moved.dim() == 3:
            moved = moved.unflatten(0, (self.graph.shape(self.graph.hidden)[0], -1))
        if what == "keys" and op_name(self.core.node) != "scaled_dot_product_attention":
            moved = moved.transpose(-1, -2)
        if moved.dim() != 4:
            raise self.graph.left(self.core.node, f"takes {what} of {moved.dim()} axes")
        return moved

    # ---- the comparison

    def shape_of(self, q: Heading, k: Heading, v: Heading, name: str, module: str) -> AttentionShape:
        """The shape that the structure tells, with its rotation still open."""
        graph = self.graph
        if others := [unit for unit in self.norms if unit not in (q.norm, k.norm, v.norm)]:
            raise graph.left(others[0].node, "ends a norm inside of attention that is of neither queries nor keys")
        heads, width = q.rows.shape
        keys, values = (self._key_rows(heading, heads, what) for heading, what in ((k, "keys"), (v, "values")))
        if keys.shape != values.shape or keys.shape[1] != width:
            raise self.left("has keys and values of different heads")
        if v.factor != 1.0 or (v.norm is not None and (v.norm.weight is not None or v.norm.width != width)):
            raise self.left("takes values that are scaled, or normalised with weights or over all heads")
        if self.out.columns != heads * width:
            raise graph.left(self.out.node, f"takes {self.out.columns} columns of {heads} heads of {width}")
        if q.norm is not None and k.norm is not None and q.norm_after != k.norm_after:
            raise self.left("normalises queries and keys on different sides of the rotation")
        scale = 1 / math.sqrt(width) if self.core.scale is None else self.core.scale
        return AttentionShape(
            name=name,
            hidden=q.unit.columns,
            heads=heads,
            kv_heads=keys.shape[0],
            head_width=width,
            qkv_bias=any(heading.unit.bias is not None for heading in (q, k, v)),
            out_bias=self.out.bias is not None,
            position=NoPosition(),
            scale=scale * q.factor * k.factor,
            softcap=self.core.softcap,
            clip=0.0,
            window=0,
            causal=self.core.causal,
            inverted_mask=False,
            q_norm=self._norm(q.norm),
            k_norm=self._norm(k.norm),
            v_norm=self._norm(v.norm),
            norm_after=any(heading.norm_after for heading in (q, k)),
            replaces=(module,),
        )

    def _norm(self, unit: NormUnit | None) -> NormShape | None:
        return None if unit is None else unit.bound()

    def _key_rows(self, heading: Heading, heads: int, what: str) -> Tensor:
        """Rows [K, D] of key heads, each of which serves as many query heads in order."""
        rows = heading.rows
        distinct = list(dict.fromkeys(tuple(row.tolist()) for row in rows))
        found = torch.tensor(distinct)
        if rows.shape[0] == heads and heads % len(distinct) == 0:
            if torch.equal(found.repeat_interleave(heads // len(distinct), dim=0), rows):
                return found
        elif rows.shape[0] == len(distinct) and heads % len(distinct) == 0:
            return found
        raise self.graph.left(self.core.node, f"takes {what} whose heads are in another order")

    def fills(self, shape: AttentionShape, q: Heading, k: Heading, v: Heading) -> list[Fill]:
        """How the merged [q | k | v] is made. SpecMismatch for rows in an order without a name."""
        graph, name = self.graph, shape.name
        heads = Heads(shape.heads, shape.kv_heads, shape.head_width)
        rows = [q.rows, *(self._key_rows(heading, shape.heads, "heads") for heading in (k, v))]
        units = [heading.unit for heading in (q, k, v)]
        packing: dict[str, Any] = {}
        if len({unit.node for unit in units}) == 1:
            order = torch.cat([part.flatten() for part in rows])
            named = [packing for packing in PACKINGS if packing != SWAPPED and _is_packing(packing, heads, order)]
            if not named:
                raise graph.left(units[0].node, "packs queries, keys and values in an order without a name")
            packing = {} if named[0] == BLOCKS else dict(packing=named[0])
            packing["heads"] = heads
            units = units[:1]
        elif len({unit.node for unit in units}) == 2:
            raise graph.left(units[1].node, "packs two of queries, keys and values")
        elif any(not torch.equal(part.flatten(), torch.arange(part.numel())) for part in rows):
            raise graph.left(units[0].node, "makes heads in an order without a name")
        weights, biases = tuple(unit.weight for unit in units), tuple(unit.bias for unit in units if unit.bias)
        fills = [Fill(f"{name}.qkv.weight", weights, units[0].transposed, **packing)]
        absent = tuple(number for number, unit in enumerate(units) if unit.bias is None)
        if biases and absent:
            packing = dict(heads=heads, absent=absent)
        fills += [Fill(f"{name}.qkv.bias", biases, **packing)] if biases else []
        fills += [Fill(f"{name}.out.weight", (self.out.weight,), self.out.transposed)]
        fills += [Fill(f"{name}.out.bias", (self.out.bias,))] if self.out.bias else []
        for target, heading in (("q_norm", q), ("k_norm", k)):
            fills += heading.norm.fills(f"{name}.{target}") if heading.norm is not None else []
        return fills

    def compared(self, shape: AttentionShape, q: Heading, k: Heading, v: Heading) -> AttentionShape:
        """The shape with the rotation for which ours equals what the graph computes. SpecMismatch if there is none."""
        for position in self._positions(shape):
            tried = replace(shape, position=position)
            if self.equals(tried, (q, k, v)):
                return tried
        raise self.left("ends an attention that is none of ours")

    def left(self, why: str) -> SpecMismatch:
        """The error for the attention as a whole, with all lines that it is made at."""
        made = self.graph.lines(node for node in self.region if node.op == "call_function")
        return self.graph.left(self.core.node, f"{why}; it is made at {made}")

    def _positions(self, shape: AttentionShape) -> Iterator[Position]:
        if not self.angles:
            yield NoPosition()
            return
        *texts, rows, columns = self.graph.shape(self.angles[0])
        for rotary in _ROTARIES:
            turned = 2 * columns if rotary.once else columns
            if turned <= shape.head_width and turned % 2 == 0 and rotary.sin_first == self.sin_first:
                yield replace(rotary, flat=not texts, prefix=rows != self._tokens())

    def check_cache(self, has_cache: bool) -> None:
        """SpecMismatch unless the keys and values attended to are what is appended to the cache, if there is one."""
        stop = frozenset(node for node in self.region if op_name(node) == "append")
        for node, what in ((self.core.k, "keys"), (self.core.v, "values")):
            behind = self.graph.before([node], stop)
            appended = [other.args[2] for other in behind if other in stop]
            aside = has_cache and any(other in self.linears for other in behind)
            if aside or appended != ([what == "values"] if has_cache else []):
                raise self.left(f"attends to other {what} than the cache has")

    def equals(self, shape: AttentionShape, qkv: tuple[Heading, ...]) -> bool:
        """Whether the output of the graph's attention, before `out`, equals ours on random numbers."""
        graph = self.graph
        units = [unit for node, unit in self.linears.items() if node in self.region]
        tensors = [*self.parameters, *self.angles, *(unit.node for unit in units)]
        known: dict[Node, Any] = {
            **self.graph.zeros(),
            **dict(zip(tensors, random_values(map(graph.shape, tensors)), strict=True)),
        }
        if self.mask is not None:
            (values,) = random_values([graph.shape(self.mask)], seed=1)
            if self.mask.meta["val"].dtype == torch.bool:
                values = (values > 0) | torch.ones(values.shape[-2:], dtype=torch.bool).triu()[None, None]
            known[self.mask] = values
        numbers = Numbers(graph, known)
        for number, node in enumerate(node for node in self.region if op_name(node) == "append"):
            new = numbers(node.args[0])
            (past,) = random_values(
                [(*new.shape[:2], graph.shape(node)[2] - new.shape[2], new.shape[3])], seed=2 + number
            )
            known[node] = torch.cat((past, new), dim=2)
        wanted = Numbers(graph, known)(self.out.x)
        ours = self._ours(shape, qkv, known)
        return ours is not None and is_close(wanted.reshape(ours.shape), ours)

    def _ours(self, shape: AttentionShape, qkv: Sequence[Heading], known: dict[Node, Any]) -> Tensor | None:
        """Our attention in float64 on the same numbers, [B, T, H D]."""
        graph = self.graph
        batch, tokens = graph.shape(graph.hidden)[:2]
        by_weight = {unit.weight: known[unit.node] for node, unit in self.linears.items() if node in self.region}
        cos_sin = self._cos_sin(shape.position, known)
        parts = []
        for heading, heads in zip(qkv, (shape.heads, shape.kv_heads, shape.kv_heads), strict=True):
            value = by_weight[heading.unit.weight].reshape(batch, tokens, -1)
            rows = heading.rows if heads == shape.heads else self._key_rows(heading, shape.heads, "heads")
            x = value[..., rows]  # [B, T, heads, D]
            is_value = heading is qkv[2]
            if heading.norm is not None and (is_value or not shape.norm_after):
                x = _normalised(x, heading.norm, self._tensors(known))
            if cos_sin is not None and not is_value and isinstance(shape.position, Rotary):
                x = _turned(x, *cos_sin, shape.position.interleaved)
            if heading.norm is not None and shape.norm_after and not is_value:
                x = _normalised(x, heading.norm, self._tensors(known))
            parts.append(x.transpose(1, 2))
        q, k, v = parts
        appended = [node for node in self.region if op_name(node) == "append"]
        if appended:
            if len(appended) != 2:
                return None
            k, v = self._on_cache(k, v, appended, known)
        scores = (q @ k.repeat_interleave(shape.heads // shape.kv_heads, dim=1).transpose(-1, -2)) * shape.scale
        if shape.softcap:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        if self.mask is not None:
            mask = known[self.mask]
            mask = mask[..., : k.shape[2]]
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        elif self.core.causal:  # the last query is the last key's, and PyTorch's first query the first key's
            order = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
            scores = scores.masked_fill(~order, -torch.inf)
        mixed = scores.softmax(dim=-1) @ v.repeat_interleave(shape.heads // shape.kv_heads, dim=1)
        return mixed.transpose(1, 2).reshape(batch, tokens, -1)

    def _on_cache(self, k: Tensor, v: Tensor, appended: list[Node], known: dict[Node, Any]) -> tuple[Tensor, Tensor]:
        """Our keys and values after those of the past that the graph was given: keys were appended first."""
        tokens = k.shape[2]
        of_keys = [node for node in appended if self._is_made_from(self.core.k, node)]
        first = of_keys[0] if of_keys else appended[0]
        second = next(node for node in appended if node is not first)
        past_k, past_v = (known[node][:, :, :-tokens] for node in (first, second))
        return torch.cat((past_k, k), dim=2), torch.cat((past_v, v), dim=2)

    def _tensors(self, known: dict[Node, Any]) -> dict[str, Tensor]:
        return {self.graph.parameters[node]: known[node] for node in self.parameters}

    def _cos_sin(self, position: Position, known: dict[Node, Any]) -> tuple[Tensor, Tensor] | None:
        if not isinstance(position, Rotary):
            return None
        cos, sin = (known[angle] for angle in (self.angles[::-1] if position.sin_first else self.angles))
        unturned = self._tokens() - cos.shape[-2]
        cos, sin = pad(cos, (0, 0, unturned, 0), value=1.0), pad(sin, (0, 0, unturned, 0))
        if position.flat:
            cos, sin = cos[None], sin[None]
        if position.in_halves:
            cos, sin = cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
        if position.in_halves or position.once:
            if position.interleaved:
                return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
            return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        return cos, sin


def _is_packing(packing: str, heads: Heads, order: Tensor) -> bool:
    if packing == "four parts" and heads.query % 4:
        return False
    starts = torch.tensor(block_starts(packing, heads))
    wanted = (starts[:, None] + torch.arange(heads.width)).flatten()
    return wanted.shape == order.shape and torch.equal(wanted, order)


def _normalised(x_BTHD: Tensor, norm: NormUnit, tensors: dict[str, Tensor]) -> Tensor:
    """Our norm over each head, or over all of them, in float64."""
    shape = x_BTHD.shape
    x = x_BTHD.flatten(2) if norm.width == shape[2] * shape[3] and norm.width != shape[3] else x_BTHD
    if norm.kind == LAYER:
        x = layer_norm(x, (norm.width,), None, None, norm.eps)
    else:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    if norm.weight is not None:
        x = x * (tensors[norm.weight] + norm.offset)
    if norm.bias is not None:
        x = x + tensors[norm.bias]
    return x.view(shape)


def _turned(x_BTHD: Tensor, cos_BTE: Tensor, sin_BTE: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first E of D, as ops.rotary does."""
    width = cos_BTE.shape[-1]
    cos, sin, x = cos_BTE.unsqueeze(-2), sin_BTE.unsqueeze(-2), x_BTHD[..., :width]
    if interleaved:
        half = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        half = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1)
    return torch.cat((x * cos + half * sin, x_BTHD[..., width:]), dim=-1)
