"""Look up the quantization format of each matrix: as configured for its linears, or as a checkpoint stores them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from infuse import ops
from infuse.architectures.packing import Fill
from infuse.architectures.part import HasMatrices, Matrix, matrix_of, named
from infuse.config import keys as config_keys
from infuse.config.inference import InferenceConfig
from infuse.ground.device import Device
from infuse.layers.linear import linear_op
from infuse.layers.mixture.experts import experts_op
from infuse.native import keeps_activations
from infuse.plan.found import grouped
from infuse.plan.stored import NOTHING_STORED, StoredFormats
from infuse.quant.format import QuantFormat
from infuse.quant.parse import quant_format
from infuse.weights.lazy import stored_alike

_KEY = "quant.weight.post_init_quant"


class Formats:
    """Looks up the format of each linear of one model, and checks that every pattern matches a linear.

    As in DeepSpeed, a pattern matches every linear whose path contains it. `head` is the path of the output layer:
    there, a format below 8 bits becomes int8 if it is set for all matrices, but not if it is set by name. `stored` has
    the formats of the checkpoint, which are kept, also at the head, unless the config sets another one.
    """

    def __init__(self, config: InferenceConfig, head: str | None, stored: StoredFormats = NOTHING_STORED):
        self._everywhere, self._by_name, self._head = config.weight_format, config.module_formats, head
        self._stored = stored
        self._linears: dict[str, None] = {}  # in the order of the lookups

    def of(self, path: str, tensor: str = "") -> QuantFormat | None:
        """Format of the linear at `path`, whose weight is `tensor` in the model; None for the compute dtype."""
        self._linears[path] = None
        named_formats = self._named(path)
        if named_formats:
            return None if named_formats[0] is None else quant_format(named_formats[0])
        if self._everywhere is None:
            stored = self._stored.formats.get(tensor or named(path, "weight"))
            return None if stored is None else quant_format(stored)
        format = quant_format(self._everywhere)
        if path == self._head and format.bits < 8:
            return replace(quant_format("int8"), activation_bits=format.activation_bits)
        return format

    def kept(self, path: str) -> str | None:
        """Format in which the table at `path` is stored, unless the config sets formats for all matrices or by name."""
        if self._everywhere is not None or self._named(path):
            return None
        return self._stored.formats.get(named(path, "weight"))

    def idle(self, device: Device, dtype: torch.dtype) -> list[str]:
        """Notes on formats whose 8-bit activations have no effect on the device."""
        formats = filter(None, (self._everywhere, *self._by_name.values()))
        asked = [text for text in formats if quant_format(text).activation_bits == 8]
        reason = keeps_activations(device, dtype) if asked else None
        return [f"{asked[0]}: activations keep 16 bits here: {reason}"] if reason else []

    def left_alone(self, path: str) -> bool:
        """Whether a pattern exempts the linear at `path` from quantization."""
        return None in self._named(path)

    def of_sources(self, fill: Fill, path: str) -> list[QuantFormat | None]:
        """Formats of the linears below `path` whose weights `fill` reads."""
        tensors = [named(path, source) for source in fill.sources]
        return [self.of(linear, tensor) for linear, tensor in zip(linears_of(fill, path), tensors, strict=True)]

    def of_fill(self, fill: Fill, path: str) -> QuantFormat | None:
        """Format of the matrix that `fill` merges from linears below `path`; None if they differ: see `difference`."""
        stored = self._in_order(fill, path)
        return stored[0].format if len(set(stored)) == 1 else None

    def is_ordered(self, fill: Fill, path: str) -> bool:
        """Whether a source of `fill` is in act-order, and the config sets no format for it."""
        return any(one.order for one in self._in_order(fill, path))

    def _in_order(self, fill: Fill, path: str) -> list[_InOrder]:
        """Formats of the linears below `path` whose weights `fill` reads, each with the order that it is stored in."""
        asked = [self._everywhere is not None or bool(self._named(linear)) for linear in linears_of(fill, path)]
        orders = [self._stored.orders.get(named(path, source), "") for source in fill.sources]
        return [
            _InOrder(format, "" if is_asked else order)
            for format, is_asked, order in zip(self.of_sources(fill, path), asked, orders, strict=True)
        ]

    def groups(self, fill: Fill, path: str) -> tuple[tuple[int, ...], ...]:
        """Group the numbers of the sources of `fill` by format, by act-order, and by whether codes are kept, in order.

        Only neighbours form a group, whose rows then are neighbours, too; but if the fill orders `rows`, any sources.
        """
        groups: list[tuple[tuple[_InOrder, bool], list[int]]] = []
        for number, (source, chosen) in enumerate(zip(fill.sources, self._in_order(fill, path), strict=True)):
            key = (chosen, self._is_kept(named(path, source), chosen.format))
            near = [group for other, group in (groups if fill.rows else groups[-1:]) if other == key]
            if near:
                near[0].append(number)
            else:
                groups.append((key, [number]))
        return tuple(tuple(group) for _, group in groups)

    def is_as_stored(self, fill: Fill, path: str, format: QuantFormat) -> bool:
        """Whether the checkpoint stores all sources of `fill`, below `path`, in this format, none in act-order."""
        return all(self._is_kept(named(path, source), format) for source in fill.sources)

    def _is_kept(self, name: str, format: QuantFormat | None) -> bool:
        """Whether the checkpoint stores the tensor `name` in this format, and not in act-order."""
        stored = self._stored.formats.get(name)
        alike = stored is not None and format is not None and stored_alike(stored, str(format))
        return alike and name not in self._stored.orders

    def as_stored(self, fill: Fill, path: str, format: QuantFormat | None) -> Fill:
        """Return `fill` with this format."""
        if format is None:
            return replace(fill, format=None)
        return replace(fill, format=str(format), as_stored=self.is_as_stored(fill, path, format))

    def multiple(self, path: str, inputs: int, tensor: str = "") -> int:
        """Group size of the linear at `path`: a rank's part of its `inputs` must be a multiple of it."""
        format = self.of(path, tensor)
        return 1 if format is None else format.unit(inputs)

    def multiple_of(self, fill: Fill, path: str, inputs: int) -> int:
        """`multiple` for a matrix that `fill` makes from linears below `path`, whose formats need not be the same."""
        stored = {one.format for one in self._in_order(fill, path) if not one.order}  # in act-order they are not cut
        return math.lcm(*(format.unit(inputs) for format in stored if format is not None))

    def difference(self, fill: Fill, path: str) -> str | None:
        """Return why `fill` cannot merge its linears into one matrix (formats or orders differ); None if it can."""
        stored = self._in_order(fill, path)
        if len(set(stored)) == 1:
            return None
        numbers = {
            order: number for number, order in enumerate(dict.fromkeys(one.order for one in stored if one.order))
        }
        chosen = [one.text(numbers.get(one.order, 0)) for one in stored]
        names = [source.removeprefix(f"{path}.") for source in linears_of(fill, path)]
        told = ", ".join(f"{name} in {format}" for name, format in zip(names, chosen, strict=True))
        return f"{told} cannot be one matrix"

    def differs_by_name(self, fill: Fill, path: str) -> bool:
        """Whether the config sets different formats for the linears of `fill` by name."""
        return len({*map(tuple, map(self._named, linears_of(fill, path)))}) > 1

    def check(self, model: nn.Module, *, among_others: bool) -> list[str]:
        """Return notes on patterns that match only tables.

        ConfigError if a pattern matches nothing, unless `among_others`, or gives a linear a second format.
        """
        tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
        unmatched = [pattern for pattern in self._by_name if not any(pattern in path for path in self._linears)]
        if among_others:
            unmatched = []
        missing = [pattern for pattern in unmatched if not any(pattern in name for name in tables)]
        problems = [f"{_KEY}: {pattern!r} is in no linear's path" for pattern in missing]
        if problems:
            paths = ", ".join(path for (path,) in grouped([(path,) for path in self._linears], path_column=0))
            problems.append(f"the linears that there are: {paths or 'none'}")
        told: set[tuple[str, ...]] = set()
        for path in self._linears:
            patterns = tuple(pattern for pattern in self._by_name if pattern in path)
            if len(set(self._named(path))) > 1 and patterns not in told:
                told.add(patterns)
                problems.append(
                    f"{_KEY}: {' and '.join(map(repr, patterns))} give {path} different formats; one linear has one"
                )
        if problems:
            raise config_keys.failure(problems)
        return [f"{_KEY}: {pattern!r}: no effect: only tables match, which are not quantized" for pattern in unmatched]

    def _named(self, path: str) -> list[str | None]:
        return [format for pattern, format in self._by_name.items() if pattern in path]


@dataclass(frozen=True)
class _InOrder:
    """The format of one linear, and the digest of the order of its inputs if it is stored in act-order."""

    format: QuantFormat | None
    order: str = ""

    def text(self, number: int) -> str:
        """`number` counts the orders of one matrix."""
        text = str(self.format or "the compute dtype")
        return f"{text} in act-order {number + 1}" if self.order else text


def linears_of(fill: Fill, path: str) -> list[str]:
    """Paths of the linears in the module at `path` whose weights `fill` reads."""
    owners = [source.rpartition(".")[0] for source in fill.sources]
    return [".".join(part for part in (path, owner) if part) for owner in owners]


def matrix_name(fill: Fill) -> str:
    """Name of the matrix that `fill` builds; of a part of one, with the linears that it has."""
    if fill.part is None:
        return fill.target.removesuffix(".weight")
    linears = [source.removesuffix(".weight").rpartition(".")[2] for source in fill.sources]
    return f"{fill.part.matrix} ({', '.join(linears)})"


def matrix_made(fill: Fill, shape: HasMatrices) -> Matrix | None:
    """The matrix of `shape`, or the part of one, whose weight `fill` builds; None for any other parameter."""
    if fill.part is None:
        return matrix_of(shape, fill.target)
    whole = matrix_of(shape, named(fill.part.matrix, "weight"))
    if whole is None or fill.target != named(fill.part.path, "weight"):
        return None
    return replace(whole, target=fill.part.path, outputs=fill.part.outputs, extents=())


def matrices_made(fills: Iterable[Fill], shape: HasMatrices | None) -> list[tuple[Fill, Matrix]]:
    """List the fills that build a matrix of `shape`, each with that matrix, or with the part that it builds."""
    if shape is None:
        return []
    listed = _Listed(shape.matrices)
    return [(fill, matrix) for fill in fills if (matrix := matrix_made(fill, listed)) is not None]


@dataclass(frozen=True)
class _Listed:
    """The matrices of a shape, which computes them anew each time."""

    matrices: tuple[Matrix, ...]


def matrix_ops(fills: Iterable[Fill], shape: HasMatrices) -> tuple[str, ...]:
    """List the ops that multiply by the matrices of `fills`, look up their rows or quantize them."""
    made = matrices_made(fills, shape)
    multiplied = [linear_op(fill.format) for fill, matrix in made if matrix.op == "linear"]
    chosen = [experts_op(fill.format) for fill, matrix in made if matrix.op == "experts"]
    looked_up = ["quantized_embedding" for fill, matrix in made if matrix.op == "embedding" and fill.format]
    quantized = ["quantize"] if any(fill.format and not fill.as_stored for fill, _ in made) else []
    return tuple(dict.fromkeys((*multiplied, *chosen, *looked_up, *quantized)))


def quantized_bytes(
    fills: Iterable[Fill], shape: HasMatrices | None, bodies: Iterable[tuple[str, str]] = ()
) -> dict[str, int]:
    """Target → bytes of its quantized matrix: codes, scales and zeros, and the order of inputs.

    If the chosen body keeps dequantized values, they count instead of the codes.
    """
    chosen, sizes = dict(bodies), dict[str, int]()
    dtype = ops.HELD.get(chosen.get("quantized_linear", chosen.get("quantized_embedding", "")))
    for fill, matrix in matrices_made(fills, shape):
        if fill.format:
            format, values = quant_format(fill.format), matrix.outputs * matrix.inputs
            more = 0
            if dtype is not None and format.has_nearest:
                codes = format.buffers(matrix.inputs)[0]
                more = values * dtype.itemsize - matrix.outputs * codes.width(matrix.inputs) * codes.dtype.itemsize
            more += matrix.inputs * torch.int32.itemsize if fill.ordered else 0
            sizes[fill.target] = format.nbytes(matrix.outputs, matrix.inputs) + more
    return sizes
