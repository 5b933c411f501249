"""What a decoder computes before its first block and after its last one, found from the values of one step.

Embeddings and the head's input are multiplied by numbers of the config or of the width, rows of a table are added by
index, norms stand before or after these, and logits are shifted, widened or capped.
If a model computes anything else, nothing is found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infuse.ground.questions import attribute
from infuse.layers.native.stack import ONE, DecoderEnds, Factor, Table

FACTORS, _CAP = ("multiplier", "scale", "scaling"), "softcap"  # in names of config keys


@dataclass(frozen=True)
class Call:
    """A call of a module that a model makes in a step."""

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    output: Any

    def is_of(self, module: nn.Module, x: Any) -> bool:
        """Whether `module` was called with `x` alone, or with a view of all of it."""
        if self.module is not module or len(self.args) != 1 or self.kwargs:
            return False
        (given,) = self.args
        return is_same(given, x)

    def repeated(self, instead: Mapping[int, Tensor]) -> Any:
        """Call the module again with other tensors, by the id of those that they replace."""
        args = [instead.get(id(value), value) for value in self.args]
        return self.module.forward(
            *args, **{name: instead.get(id(value), value) for name, value in self.kwargs.items()}
        )


@dataclass(frozen=True)
class Begin:
    """The first block's input: rows of the embedding times `factor`, plus the row of the token's index in `places`.

    `norm` normalises the sum, or, `norm_first`, what the row is added to. `padding`: the id of a
    token whose place is not its index.
    """

    factor: Factor = ONE
    places: Table | None = None
    padding: int | None = None
    norm: nn.Module | None = None
    norm_first: bool = False

    @classmethod
    def of(cls, calls: Sequence[Call], x: Any, embedding: nn.Module, config: Any, index: int) -> Begin | None:
        """Find it from the calls of a step before its first block, whose input is x [B, 1, C].

        `index`: of the step's token. None if the model computes something else.
        """
        embedded, *more = calls
        norm = next((call for call in more if isinstance(call.module, nn.LayerNorm)), None)
        placed = next((call for call in more if call is not norm), None)
        if len(more) != (norm is not None) + (placed is not None) or embedded.module is not embedding:
            return None
        # Where other threads call the model meanwhile, these may be the results of any module.
        if not isinstance(x, Tensor) or not isinstance(embedded.output, Tensor):
            return None
        places = None if placed is None else _places(placed, index)
        if placed is not None and places is None:
            return None
        row = None if places is None else places.tensor[index + places.offset]
        norm_first = norm is not None and not is_same(x, norm.output)
        wanted: Any = x
        if norm is not None:
            if len(norm.args) != 1 or norm.kwargs:
                return None
            wanted = norm.args[0]
        if norm is not None and norm_first and not equal(x, _plus(norm.output, row)):
            return None
        added = None if norm_first else row
        factor = _factor_of(wanted, embedded.output, _products(config, embedded.output), added)
        if factor is None:
            return None
        padding = None if placed is None else _padding_of(placed, embedded)
        return cls(factor, places, padding, None if norm is None else norm.module, norm_first)

    @property
    def is_looked_up(self) -> bool:
        """Whether rows, a factor and places are all: the program of all blocks can compute it."""
        return self.norm is None and (self.places is None or self.padding is None)

    @property
    def places_count(self) -> float:
        """The length of the cache from which there is no place for another token."""
        return math.inf if self.places is None else self.places.tensor.shape[0] - self.places.offset + 1

    def is_padding(self, ids_BT: Tensor) -> bool:
        return self.padding is not None and bool((ids_BT == self.padding).any())

    def made(self, embedded: Tensor, index: int) -> Tensor:
        """The first block's input for the token of this index."""
        row = None if self.places is None else self.places.tensor[index + self.places.offset]
        x = self.factor.times(embedded)
        if self.norm is None:
            return _plus(x, row)
        return _plus(self.norm.forward(x), row) if self.norm_first else self.norm.forward(_plus(x, row))


@dataclass(frozen=True)
class End:
    """The logits of the last block's result: `norm`, times `before_head`, the head, plus `shift`, times `factor`.

    `narrowed`: the head's input is rounded to another dtype; `widens`: logits become float32. `cap`: they are squashed
    to (-cap, cap) by tanh; 0: they are not.
    """

    norm: nn.Module | None = None
    before_head: Factor = ONE
    factor: Factor = ONE
    shift: Table | None = None
    narrowed: bool = False
    widens: bool = False
    cap: float = 0.0

    @classmethod
    def of(cls, calls: Sequence[Call], y: Any, logits: Tensor, model: Any, head: nn.Module) -> End | None:
        """Find it from the calls of a step after its last block, which returned y [B, 1, C].

        None if the model computes something else, or if these values do not tell by which number: those of a row of
        zeros.
        """
        *normed, headed = calls
        if headed.module is not head or len(normed) > 1 or len(headed.args) != 1 or headed.kwargs:
            return None
        if normed:
            if not normed[0].is_of(normed[0].module, y):
                return None
            y = normed[0].output
        (given,), made, config = headed.args, headed.output, attribute(model, "config")
        if not all(isinstance(value, Tensor) for value in (y, given, made)):
            return None
        narrowed, widens = given.dtype is not y.dtype, logits.dtype is not made.dtype
        befores = [[ONE]] if narrowed else _products(config, y, divides=True)
        before = _factor_of(given, y.to(given.dtype), befores)
        found = _after_head(logits, made, config, [None, *_rows_of(model, logits.shape[-1])], widens)
        if before is None or found is None:
            return None
        shift, factor, cap = found
        return cls(normed[0].module if normed else None, before, factor, shift, narrowed, widens, cap)

    def head_input(self, y: Tensor) -> Tensor:
        return self.before_head.times(y if self.norm is None else self.norm.forward(y))

    def after_head(self, made: Tensor) -> Tensor:
        """The logits of what the head returned."""
        return self.finished(self.factor.times(_plus(made, None if self.shift is None else self.shift.tensor)))

    def finished(self, logits: Tensor) -> Tensor:
        """What the program of all blocks leaves to do."""
        return _capped(logits.float() if self.widens else logits, self.cap)


@dataclass(frozen=True)
class Ends:
    """Both ends of a decoder."""

    begin: Begin
    end: End

    @property
    def in_program(self) -> DecoderEnds:
        """What the program of all blocks computes of it."""
        places = self.begin.places if self.begin.is_looked_up else None
        return DecoderEnds(self.begin.factor, self.end.factor, places, self.end.before_head, self.end.shift)


def _after_head(
    logits: Tensor, made: Tensor, config: Any, shifts: Sequence[Table | None], widens: bool
) -> tuple[Table | None, Factor, float] | None:
    """What is added to a head's result, its factor, and the cap. None if values fit none or several of the numbers."""
    if logits is made:
        return None, ONE, 0.0
    factors = _named(config, divides=True)
    caps = [0.0, *dict.fromkeys(number for number in numbers_in(config, (_CAP,)) if number > 0)]
    for shift in shifts:
        shifted = _plus(made, None if shift is None else shift.tensor)
        plain = [(each, each.times(shifted)) for each in factors]
        wide = [(each, value.float() if widens else value) for each, value in plain]
        found = [(each, cap) for each, value in wide for cap in caps if equal(logits, _capped(value, cap))]
        if found:
            return (shift, *found[0]) if len(found) == 1 else None
    return None


def _factor_of(
    found: Any, x: Tensor, candidates: Sequence[Sequence[Factor]], added: Tensor | None = None
) -> Factor | None:
    """By which x was multiplied before something was `added`, of the first of several lists in which a number fits.

    None if no number fits, several of that list, or another number of a later list: a row of zeros fits them all.
    """
    if added is None and is_same(found, x):
        return ONE
    fitting = [[each for each in factors if equal(found, _plus(each.times(x), added))] for factors in candidates]
    first, *later = [each for each in fitting if each] or [[]]
    if len(first) != 1:
        return None
    others = [each for factors in later for each in factors]
    alike = all(math.isclose(each.value, first[0].value, rel_tol=1e-6) for each in others)
    return first[0] if alike else None


def _products(config: Any, x: Tensor, *, divides: bool = False) -> list[list[Factor]]:
    """By what a model multiplies values like x: numbers of its config, or else those of the width."""
    width = x.shape[-1]
    return [_named(config, divides=divides), [Factor(math.sqrt(width)), Factor(width**-0.5)]]


def _named(config: Any, *, divides: bool = False) -> list[Factor]:
    """1, and the numbers of a config under names of factors; `divides`: values may be divided by these, too."""
    numbers = [number for number in dict.fromkeys(numbers_in(config, FACTORS)) if number != 1.0]
    divisors = [Factor(number, divides=True) for number in numbers] if divides else []
    return [ONE, *map(Factor, numbers), *divisors]


def numbers_in(config: Any, words: Sequence[str]) -> Iterator[float]:
    """The numbers that a config and those inside it have, or compute, under names with one of these words."""
    owned = {name for kind in type(config).__mro__ for name, own in vars(kind).items() if isinstance(own, property)}
    computed = {name: attribute(config, name) for name in sorted(owned) if _has_word(name, words)}
    for name, value in {**attribute(config, "__dict__", {}), **computed}.items():
        if hasattr(value, "model_type"):
            yield from numbers_in(value, words)
        elif _has_word(name, words) and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield float(value)


def _has_word(key: str, words: Sequence[str]) -> bool:
    return any(word in key for word in words)


def _places(call: Call, index: int) -> Table | None:
    """The table whose row of one index a module returned for the first row of the batch."""
    made = call.output
    tables = [(name, each) for name, each in _tables(call.module) if each.dim() == 2]
    if not isinstance(made, Tensor) or made.dim() not in (2, 3) or len(tables) != 1:
        return None
    name, table = tables[0]
    rows = made.reshape(-1, made.shape[-1])
    if rows.shape[1] != table.shape[1] or made.dtype is not table.dtype:
        return None
    found = (table == rows[:1]).all(-1).nonzero()
    if len(found) != 1:
        return None
    return Table(call.module, name, int(found) - index)


def _padding_of(placed: Call, embedded: Call) -> int | None:
    """The id that a module of places counts otherwise, if it may: it is no plain table, or was given the ids."""
    ids = [value.data_ptr() for value in embedded.args if isinstance(value, Tensor)]
    given = [value.data_ptr() for value in (*placed.args, *placed.kwargs.values()) if isinstance(value, Tensor)]
    if isinstance(placed.module, nn.Embedding) and not any(each in ids for each in given):
        return None
    return attribute(placed.module, "padding_idx")


def _tables(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _rows_of(module: nn.Module, width: int) -> list[Table]:
    """The buffers [1, width] of a module."""
    return [Table(module, name) for name, each in module.named_buffers(recurse=False) if each.shape == (1, width)]


def _plus(x: Tensor, row: Tensor | None) -> Tensor:
    return x if row is None else x + row


def _capped(logits: Tensor, cap: float) -> Tensor:
    return torch.tanh(logits / cap) * cap if cap else logits


def equal(found: Any, wanted: Tensor) -> bool:
    return isinstance(found, Tensor) and found.dtype is wanted.dtype and torch.equal(found, wanted)


def is_same(view: Any, x: Any) -> bool:
    """Whether a value is x, or a view of all of it."""
    if view is x or not (isinstance(view, Tensor) and isinstance(x, Tensor)):
        return view is x
    alike = view.shape == x.shape and view.stride() == x.stride() and view.dtype == x.dtype
    return alike and view.data_ptr() == x.data_ptr()
