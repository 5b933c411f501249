"""Input and output of the coded forms: raw tensors of files, and the matrices that they store.

A form takes the tensors of one way of quantizing (`X.qweight`, `X.scales`, …) and gives lazy matrices `X.weight` whose
codes are kept. It checks names, shapes, dtypes and the config, and collects all faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from infuse.ground.errors import ConfigError
from infuse.quant.format import QuantFormat
from infuse.quant.parse import quant_format
from infuse.weights.coded.buffers import Reordered
from infuse.weights.coded.ragged import in_shorter_groups, of_shorter_groups
from infuse.weights.coded.settings import Settings
from infuse.weights.lazy import Coded, CodedTensor, FileTensor, LazyTensor, Order, Shape

_CACHE = ("k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point", "q_zero_point")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # possible dtypes of scales


@dataclass(frozen=True)
class Raw:
    """Tensors of files that no earlier form has used. `settings`: what the config says, if anything."""

    tensors: Mapping[str, FileTensor]
    settings: Settings | None = None

    @cached_property
    def by_path(self) -> Mapping[str, Sequence[str]]:
        """The last parts of the names of each module's tensors."""
        found: dict[str, list[str]] = {}
        for name in self.tensors:
            path, _, leaf = name.rpartition(".")
            found.setdefault(path, []).append(leaf)
        return found

    @property
    def form(self) -> str | None:
        """The form that reads what the config's quant_method names."""
        return None if self.settings is None else self.settings.form

    def paths(self, sure: Collection[str], others: Collection[str] = ()) -> list[str]:
        """List, in order, the modules that have a tensor called one of `sure`, or two of all these names."""
        paths = []
        for path, leaves in self.by_path.items():
            found = [leaf for leaf in leaves if leaf in sure or leaf in others]
            if len(found) > 1 or any(leaf in sure for leaf in found):
                paths.append(path)
        return paths

    def __contains__(self, name: str) -> bool:
        return name in self.tensors


@dataclass
class Found:
    """What a form called `title` makes: `tensors` by checkpoint name, from the raw tensors `used`.

    `faults` say why tensors cannot be read; `notes` say what is not as in the file, each with the names concerned.
    `dequantized`: why matrices become plain values, each with their names in `tensors`.
    """

    title: str
    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)
    dequantized: dict[str, list[str]] = field(default_factory=dict)

    def note(self, what: str, name: str) -> None:
        self.notes.setdefault(what, []).append(name)

    def leave(self, raw: Raw, names: Iterable[str], what: str) -> None:
        """Mark those of `names` that exist as used without reading them, and add a note."""
        for name in names:
            if name in raw and name not in self.used:
                self.used.add(name)
                self.note(f"{what} are not used", name)

    def leave_cache(self, raw: Raw) -> None:
        """Leave the scales of a quantized KV cache."""
        names = (name for name in raw.tensors if name.rpartition(".")[2] in _CACHE)
        self.leave(raw, names, "scales of cached keys and values")

    def add(
        self,
        name: str,
        shape: Shape,
        format: str,
        buffers: Mapping[str, LazyTensor],
        values: Callable[[], LazyTensor],
        order: Tensor | None = None,
    ) -> None:
        """Add the matrix `name`, in its codes; or, where the format cannot have this width, by its `values`.

        If the last group of a row is partial, the codes are kept in shorter groups that divide the row.
        `order`: the inputs, group after group, if groups are not neighbours in the buffer "data" (act-order).
        """
        inputs = shape[-1]
        try:
            coder: QuantFormat = quant_format(format)
        except ConfigError as error:
            self.dequantize(name, str(error), values())
            return
        reason = coder.fits(inputs)
        if reason is not None and order is None and (shorter := in_shorter_groups(coder, inputs)) is not None:
            buffers = of_shorter_groups(buffers, coder, shorter, inputs)
            coder, reason = shorter, None
        if reason is not None:
            self.dequantize(name, reason, values())
            return
        if order is not None:
            buffers = {**buffers, "data": Reordered(buffers["data"], order)}
        coded = Coded(str(coder), buffers, None if order is None else Order.of(order))
        self.tensors[name] = CodedTensor(shape, torch.float32, coded)

    def dequantize(self, name: str, why: str, values: LazyTensor) -> None:
        """Add the matrix `name` by its values, of which no format keeps the codes."""
        self.dequantized.setdefault(why, []).append(name)
        self.tensors[name] = values


class Members:
    """The tensors PATH.leaf of one coded matrix. `take` checks each; what is wrong becomes a fault of `found`."""

    def __init__(self, raw: Raw, path: str, found: Found):
        self._raw, self.path, self._found = raw, path, found
        self._before = len(found.faults)

    @property
    def are_sound(self) -> bool:
        """True if no fault was found."""
        return len(self._found.faults) == self._before

    def has(self, leaf: str) -> bool:
        return f"{self.path}.{leaf}" in self._raw

    def dtype(self, leaf: str) -> torch.dtype | None:
        """The dtype of a tensor; None if it is absent."""
        tensor = self._raw.tensors.get(f"{self.path}.{leaf}")
        return None if tensor is None else tensor.dtype

    def shape(self, leaf: str) -> Shape | None:
        """The shape of a tensor; None if it is absent."""
        tensor = self._raw.tensors.get(f"{self.path}.{leaf}")
        return None if tensor is None else tensor.shape

    def take(self, leaf: str, dtypes: Collection[torch.dtype], *shapes: Shape) -> FileTensor | None:
        """Use a tensor of one of `dtypes` and one of `shapes` (-1: any but 0; none: not empty); None after a fault."""
        name = f"{self.path}.{leaf}"
        tensor = self._raw.tensors.get(name)
        if tensor is None:
            self.fault(leaf, "is missing", like=self.any())
            return None
        self._found.used.add(name)
        fits = any(_fits(tensor.shape, shape) for shape in shapes) if shapes else math.prod(tensor.shape) > 0
        if tensor.dtype in dtypes and fits:
            return tensor
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        sizes = " or ".join(_in_words(shape) for shape in shapes) or "with values"
        self.fault(leaf, f"is {str(tensor.dtype).removeprefix('torch.')} {tensor.shape}, not {kinds} {sizes}".rstrip())
        return None

    def fault(self, leaf: str, what: str, like: FileTensor | None = None) -> None:
        """Report what is wrong with PATH.leaf, in its file or in that of the tensor `like`."""
        tensor = self._raw.tensors.get(f"{self.path}.{leaf}") or like
        at = f"{tensor.file.path}: " if tensor is not None else ""
        self._found.faults.append(f"{at}{self.path}.{leaf} {what}")
        self._found.used |= {f"{self.path}.{one}" for one in self._raw.by_path.get(self.path, ())}

    def any(self) -> FileTensor | None:
        """One of the tensors, which tells the file; None if there is none."""
        leaves = self._raw.by_path.get(self.path)
        return None if leaves is None else self._raw.tensors[f"{self.path}.{leaves[0]}"]


def _fits(shape: Shape, wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(a == b or (b == -1 and a) for a, b in zip(shape, wanted, strict=True))


def _in_words(shape: Shape) -> str:
    sizes = ", ".join("any" if size == -1 else str(size) for size in shape)
    return f"({sizes},)" if len(shape) == 1 else f"({sizes})"


def ceil_div(number: int, unit: int) -> int:
    """Divide, rounding up."""
    return -(-number // unit)


def is_single(shape: Shape | None) -> bool:
    """True for the shape of one number."""
    return shape is not None and math.prod(shape) == 1


Form = Callable[[Raw], Found]
