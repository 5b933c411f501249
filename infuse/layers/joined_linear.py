"""JoinedLinear: one product by a merged matrix whose parts are stored in different formats, such as [q | k] and v."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from infuse.layers.dequantized_weight import DequantizedWeight
from infuse.layers.gradient import InferenceModule
from infuse.layers.linear import Linear, QuantizedLinear, direct
from infuse.layers.native.part import NativePart, PartWriter, decline_if
from infuse.parallel.slices import Range


class JoinedLinear(InferenceModule, NativePart):
    """x @ [part 0 | part 1 | ...].T + bias: each part is a linear of its own, with its own format and bias.

    `rows` are those of each part in the merged matrix. x [..., in] → [..., out], outputs in the merged order.
    """

    struct, fields = "joined", frozenset({"qkv", "up", "into"})

    def __init__(self, parts: Sequence[Linear | QuantizedLinear], rows: Sequence[Sequence[Range]]):
        super().__init__()
        assert [part.out_features for part in parts] == [sum(stop - at for at, stop in of) for of in rows]
        for number, part in enumerate(parts):
            self.add_module(str(number), part)
        self.in_features, self.out_features = parts[0].in_features, sum(part.out_features for part in parts)
        self.rows = tuple(tuple(of_part) for of_part in rows)
        places = sorted((start, number) for number, of_part in enumerate(self.rows) for start, _ in of_part)
        self._order = None if [number for _, number in places] == [*range(len(parts))] else [n for _, n in places]

    def forward(self, x: Tensor) -> Tensor:
        parts: Any = self._modules.values()
        made = [direct(part, x) for part in parts]
        if self._order is None:
            return torch.cat(made, dim=-1)
        pieces = [iter(y.split([stop - at for at, stop in of], dim=-1)) for y, of in zip(made, self.rows, strict=True)]
        return torch.cat([next(pieces[number]) for number in self._order], dim=-1)

    def native(self, to: PartWriter) -> None:
        decline_if(
            {
                "an encoder's products in several formats run part by part": to.of_encoder,
                "the outputs of a product's formats alternate": self._order is not None,
            }
        )
        to.put(outputs=self.out_features)
        with to.program.inside("parts", "list"):
            for name in self._modules:
                to.part(name)

    @property
    def weight(self) -> Tensor:
        """The merged matrix. Each use of it joins its parts, and writes to it raise."""
        parts: Any = self._modules.values()
        first, shape = next(iter(parts)).weight, (self.out_features, self.in_features)
        return DequantizedWeight.of(shape, first.dtype, first.device, self._joined, "a weight in several formats")

    def _joined(self) -> Tensor:
        parts: Any = self._modules.values()
        made = [part.weight.clone() for part in parts]
        pieces = [(start, w[at]) for w, of in zip(made, self.rows, strict=True) for start, at in _places(of)]
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda place: place[0])])

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _places(rows: Sequence[Range]) -> Iterator[tuple[int, slice]]:
    """For each range of rows in the merged matrix: its start, and the rows of the part that hold it."""
    first = 0
    for start, stop in rows:
        yield start, slice(first, first + stop - start)
        first += stop - start
