"""LazyTensor: a tensor with a known shape and dtype, whose values are read part by part; and its wrappers.

The source of a layer's tensors is a `Lookup`: name → LazyTensor. Files, modules in memory, joined pieces, transposed
matrices and tensors in a number format all implement the same protocol.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from infuse.ground.errors import ConfigError
from infuse.ops.quantize import values_of
from infuse.parallel.slices import Span, taken
from infuse.quant.format import Buffer, QuantFormat, QuantizedWeight
from infuse.quant.parse import quant_format

Slices = tuple[slice, ...]  # slices of the leading axes, step 1; () is the whole tensor
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """Shape and dtype of a tensor in a file."""

    shape: Shape
    dtype: torch.dtype


class LazyTensor(Protocol):
    """A tensor that is read on demand. `read` returns its values, or a slice of them, without reading the rest.

    `coded` is set if the tensor is stored in a number format; `read` dequantizes such a tensor.
    """

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def coded(self) -> Coded | None: ...
    def read(self, part: Slices = ()) -> Tensor: ...


Lookup = Callable[[str], LazyTensor]


@dataclass(frozen=True)
class Order:
    """The input, int32 [in], whose codes each column of a matrix in act-order has. Equal orders have equal digests."""

    digest: str
    inputs: Tensor = field(compare=False, repr=False)

    @classmethod
    def of(cls, inputs: Tensor) -> Order:
        """From the inputs on the CPU, in any integer dtype."""
        inputs = inputs.to(torch.int32)
        return cls(hashlib.sha256(inputs.numpy().tobytes()).hexdigest()[:16], inputs)

    def undone(self, values: Tensor) -> Tensor:
        """Return values [..., in] of the columns as those of the inputs."""
        return values.index_select(-1, self._columns.to(values.device))

    @cached_property
    def _columns(self) -> Tensor:
        """The column of each input."""
        return self.inputs.argsort()


@dataclass(frozen=True)
class Coded:
    """The `format` in which a tensor is stored, and the format's buffers by name.

    A buffer has the axes of its tensor; the format sets its width along the inputs. `order`: that of the inputs in the
    buffers, if it is not the tensor's (act-order).
    """

    format: str
    buffers: Mapping[str, LazyTensor]
    order: Order | None = None


class TensorFile(Protocol):
    """The open file at `path`: `stored` lists its tensors, `read` reads one."""

    path: Path

    @property
    def stored(self) -> Mapping[str, Stored]: ...
    def read(self, name: str, part: Slices = ()) -> Tensor: ...


@dataclass(frozen=True)
class FileTensor:
    """The tensor `name` in a file."""

    file: TensorFile
    name: str

    coded = None

    @property
    def shape(self) -> Shape:
        return self.file.stored[self.name].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.file.stored[self.name].dtype

    def read(self, part: Slices = ()) -> Tensor:
        return self.file.read(self.name, part)


@dataclass(frozen=True, eq=False)
class InMemory:
    """A tensor that is in memory; `read` returns it, or a view of it. `coded`: the codes of which it was made."""

    tensor: Tensor
    coded: Coded | None = None

    @property
    def shape(self) -> Shape:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, part: Slices = ()) -> Tensor:
        return self.tensor[part] if part else self.tensor


def live(module: nn.Module) -> Lookup:
    """Look up the parameters and buffers of a module in memory, without copying them."""
    return lambda name: InMemory(tensor_at(module, name))


class Composite(ABC):
    """A LazyTensor that is made of others."""

    @property
    @abstractmethod
    def made_of(self) -> Iterable[LazyTensor]:
        """The tensors that are read for its values."""


@dataclass(frozen=True)
class Rearranged(Composite):
    """What is made of `source`: without codes, and in its shape and dtype unless a subclass says otherwise."""

    source: LazyTensor

    @property
    def made_of(self) -> Iterable[LazyTensor]:
        return (self.source,)

    @property
    def shape(self) -> Shape:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def coded(self) -> Coded | None:
        return None


@dataclass(frozen=True)
class OnDevice(Rearranged):
    """`source`, moved to `device` as it is read."""

    device: torch.device

    @property
    def coded(self) -> Coded | None:
        return _with_buffers(self.source.coded, lambda buffer: OnDevice(buffer, self.device))

    def read(self, part: Slices = ()) -> Tensor:
        return self.source.read(part).to(self.device)


@dataclass(frozen=True)
class Transposed(Rearranged):
    """`source` with its last two axes swapped."""

    @property
    def shape(self) -> Shape:
        *outer, rows, columns = self.source.shape
        return (*outer, columns, rows)

    @property
    def coded(self) -> Coded | None:
        return _with_buffers(self.source.coded, Transposed)

    def read(self, part: Slices = ()) -> Tensor:
        *outer, rows, columns = of_all_axes(part, len(self.shape))
        return self.source.read((*outer, columns, rows) if part else ()).transpose(-1, -2)


@dataclass(frozen=True)
class Pointwise(Rearranged):
    """`source`, the weight of a convolution of one frame [out, in, 1], as a matrix [out, in]."""

    @property
    def shape(self) -> Shape:
        return self.source.shape[:2]

    def read(self, part: Slices = ()) -> Tensor:
        return self.source.read(part).squeeze(-1)


@dataclass(frozen=True)
class Flat(Rearranged):
    """`source`, which has one axis of more than one entry, as a vector."""

    @property
    def shape(self) -> Shape:
        return (math.prod(self.source.shape),)

    def read(self, part: Slices = ()) -> Tensor:
        return self.source.read().flatten()[part]


@dataclass(frozen=True)
class Joined(Composite):
    """Spans of `sources`, one after another along `axis` (of a matrix: 0 outputs, 1 inputs)."""

    sources: Mapping[int, LazyTensor]
    spans: tuple[Span, ...]
    axis: int
    shape: Shape
    dtype: torch.dtype

    @classmethod
    def of(cls, sources: Mapping[int, LazyTensor], spans: Iterable[Span] | None = None, axis: int = 0) -> Joined:
        """Join `spans` of the sources; None: each source whole. Shape and dtype are those of the first source used."""
        if spans is None:
            spans = (Span(number, 0, source.shape[axis]) for number, source in sources.items())
        spans = tuple(spans)
        like = sources[spans[0].source if spans else next(iter(sources))]
        length = sum(span.length for span in spans)
        return cls(sources, spans, axis, (*like.shape[:axis], length, *like.shape[axis + 1 :]), like.dtype)

    @property
    def made_of(self) -> Iterable[LazyTensor]:
        return self.sources.values()

    def read(self, part: Slices = ()) -> Tensor:
        pieces = self.pieces(part)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.axis)

    def pieces(self, part: Slices = ()) -> list[Tensor]:
        """Read `part` as one tensor for each source span in it, to be joined along the axis."""
        if len(self.spans) == 1 and self.spans[0].length == self.sources[self.spans[0].source].shape[self.axis]:
            return [self.sources[self.spans[0].source].read(part)]
        slices = list(of_all_axes(part, max(len(part), self.axis + 1)))
        start, stop, _ = slices[self.axis].indices(self.shape[self.axis])
        pieces = []
        any_source = self.spans[0].source if self.spans else next(iter(self.sources))
        for span in taken(self.spans, [(start, stop)]) or [Span(any_source, 0, 0)]:
            slices[self.axis] = slice(span.start, span.stop)
            pieces.append(self.sources[span.source].read(tuple(slices)))
        return pieces

    @property
    def coded(self) -> Coded | None:
        """The buffers of a matrix [out, in], joined; None if formats or orders differ, or one would be cut."""
        sources = {span.source: self.sources[span.source] for span in self.spans}
        stored = {number: coded for number, source in sources.items() if (coded := source.coded) is not None}
        formats, orders = {coded.format for coded in stored.values()}, {coded.order for coded in stored.values()}
        if len(stored) < len(sources) or len(formats) != 1 or len(orders) != 1:
            return None
        order = orders.pop()
        if order is not None and self.axis != 0:
            return None
        format, inputs = quant_format(formats.pop()), next(iter(sources.values())).shape[1]
        if any(source.shape[1] != inputs for source in sources.values()):
            return None
        buffers: dict[str, LazyTensor] = {}
        for buffer in format.buffers(inputs):
            spans = self.spans if self.axis == 0 else _columns(buffer, self.spans)
            if spans is None:
                return None
            pieces = {number: coded.buffers[buffer.name] for number, coded in stored.items()}
            buffers[buffer.name] = Joined.of(pieces, spans, self.axis)
        return Coded(str(format.of_part(inputs)), buffers, order)


def _columns(buffer: Buffer, spans: Sequence[Span]) -> list[Span] | None:
    """Columns of `buffer` for these spans of inputs; None if a span splits a group."""
    if buffer.inputs is None:  # a per-row entry applies to any of the row's inputs
        sources = {span.source for span in spans}
        return [Span(sources.pop(), 0, buffer.columns)] if len(sources) == 1 else None
    if any(span.start % buffer.inputs or span.stop % buffer.inputs for span in spans):
        return None
    columns = [(span.source, buffer.of_inputs(span.start, span.stop)) for span in spans]
    return [Span(source, part.start, part.stop) for source, part in columns]


@dataclass(frozen=True)
class Stacked(Composite):
    """Tensors of one shape and dtype, stacked along a new first axis."""

    sources: Sequence[LazyTensor]

    @property
    def made_of(self) -> Iterable[LazyTensor]:
        return self.sources

    @property
    def shape(self) -> Shape:
        return (len(self.sources), *self.sources[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.sources[0].dtype

    @property
    def coded(self) -> Coded | None:
        return coded_together(self.sources, Stacked)

    def read(self, part: Slices = ()) -> Tensor:
        outer, *inner = of_all_axes(part, len(self.shape))
        return torch.stack([source.read(tuple(inner)) for source in self.sources[outer]])


def coded_together(sources: Sequence[LazyTensor], join: Callable[[list[LazyTensor]], LazyTensor]) -> Coded | None:
    """The joined buffers of tensors that are all stored in one format; None if one is not, or has an order."""
    stored = [coded for source in sources if (coded := source.coded) is not None]
    if len(stored) < len(sources) or len({coded.format for coded in stored}) != 1:
        return None
    if any(coded.order is not None for coded in stored):
        return None
    buffers = {name: join([coded.buffers[name] for coded in stored]) for name in stored[0].buffers}
    return Coded(stored[0].format, buffers)


@dataclass(frozen=True)
class CodedTensor:
    """A tensor [..., out, in] that is stored in a number format; `read` dequantizes it to `dtype`.

    ValueError if the buffers, [..., out, width], are not those of the format; `coded_fault` checks in advance.
    """

    shape: Shape
    dtype: torch.dtype
    coded: Coded

    def __post_init__(self) -> None:
        if fault := coded_fault(self.shape, self.coded):
            raise ValueError(fault)

    def read(self, part: Slices = ()) -> Tensor:
        *outer, columns = of_all_axes(part, len(self.shape))
        order = self.coded.order
        if order is None:
            return self._columns(tuple(outer), columns)
        return order.undone(self._columns(tuple(outer), slice(None)))[..., columns]

    def _columns(self, outer: Slices, columns: slice) -> Tensor:
        """Read columns of the buffers' order."""
        format, buffers = self._format
        start, stop, _ = columns.indices(self.shape[-1])
        unit = math.lcm(*(buffer.inputs for buffer in buffers if buffer.inputs is not None))
        first, last = start // unit * unit, -(-stop // unit) * unit
        parts = {
            buffer.name: self.coded.buffers[buffer.name].read((*outer, buffer.of_inputs(first, last)))
            for buffer in buffers
        }
        sizes = next(iter(parts.values())).shape[:-1]
        matrices = {name: tensor.reshape(-1, tensor.shape[-1]) for name, tensor in parts.items()}
        weight = QuantizedWeight.of(matrices, (math.prod(sizes), last - first), format)
        values = values_of(weight, self.dtype)
        return values[:, start - first : stop - first].reshape(*sizes, stop - start)

    @property
    def _format(self) -> tuple[QuantFormat, tuple[Buffer, ...]]:
        format = quant_format(self.coded.format)
        return format.of_part(self.shape[-1]), format.buffers(self.shape[-1])


def coded_fault(shape: Shape, coded: Coded) -> str | None:
    """Return why the buffers do not store a tensor [..., out, in] of this shape in their format; None if they do."""
    try:
        buffers = quant_format(coded.format).buffers(shape[-1])
    except ConfigError as error:
        return str(error)
    wanted = {buffer.name: (buffer.dtype, (*shape[:-1], buffer.width(shape[-1]))) for buffer in buffers}
    stored = {name: (tensor.dtype, tensor.shape) for name, tensor in coded.buffers.items()}
    lines = [
        f"{name} is {_in_words(stored.get(name))}, not {_in_words(wanted.get(name))}"
        for name in dict.fromkeys(chain(wanted, stored))
        if stored.get(name) != wanted.get(name)
    ]
    if coded.order is not None and coded.order.inputs.shape != shape[-1:]:
        lines.append(f"its order has {tuple(coded.order.inputs.shape)} inputs, not {shape[-1:]}")
    return f"{coded.format}: {'; '.join(lines)}" if lines else None


def _in_words(tensor: tuple[torch.dtype, Shape] | None) -> str:
    return "absent" if tensor is None else f"{tensor[0]} {tensor[1]}"


def stored_alike(format: str, other: str) -> bool:
    """True if both formats store weights in the same way: they may round activations differently."""
    return replace(quant_format(format), activation_bits=16) == replace(quant_format(other), activation_bits=16)


def _with_buffers(coded: Coded | None, wrap: Callable[[LazyTensor], LazyTensor]) -> Coded | None:
    if coded is None:
        return None
    return replace(coded, buffers={name: wrap(buffer) for name, buffer in coded.buffers.items()})


def of_all_axes(part: Slices, axes: int) -> Slices:
    """Pad `part` with full slices to `axes` axes."""
    return (*part, *(slice(None),) * (axes - len(part)))


def place_of(module: nn.Module, name: str) -> tuple[Any, str]:
    """Return the module that holds the tensor with this dotted name, and its name there."""
    owner, _, leaf = name.rpartition(".")
    return module.get_submodule(owner), leaf


def tensor_at(module: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer with this dotted name."""
    tensor = getattr(*place_of(module, name))
    assert isinstance(tensor, Tensor), name
    return tensor
