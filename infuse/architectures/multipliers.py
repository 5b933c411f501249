"""Multipliers: numbers by which a part multiplies its input, sections of its first product, and its output.

Models whose hyperparameters were found on smaller ones have them (μP, arXiv 2203.03466).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infuse.architectures.bind import Binder


@dataclass(frozen=True)
class Multipliers:
    """Multipliers as declared: paths of attributes of the layer, "" for 1.

    `sections`: of the rows of the first product, in the order of the original. `listed`: the config key of a list of
    these instead, which the original holds as the buffer `held`, rounded to the dtype of its activations.
    """

    before: str = ""
    sections: tuple[str, ...] = ()
    after: str = ""
    listed: str = ""
    held: str = ""

    def bind(self, binder: Binder, sections: int) -> Factors | None:
        """Read the numbers, those of so many `sections`; None if all are 1."""
        found = Factors(
            _number(binder, self.before),
            tuple(_number(binder, path) for path in self.sections),
            _number(binder, self.after),
        )
        if self.listed:
            found = Factors(found.before, _held(binder, self.listed, self.held), found.after, rounded=True)
        if len(found.sections) not in (0, sections):
            binder.differ(f"there are {len(found.sections)} multipliers of {sections} sections")
        return found if {found.before, *found.sections, found.after} != {1.0} else None


def _number(binder: Binder, path: str) -> float:
    return binder.own_factor(path) if path else 1.0


def _held(binder: Binder, key: str, path: str) -> tuple[float, ...]:
    """The numbers of the config as the buffer has them now. A cast of the model does not bring back their digits."""
    numbers, buffer = binder.value(key), dict(binder.layer.named_buffers()).get(path)
    if buffer is None:
        binder.differ(f"there is no buffer {path}")
    elif isinstance(numbers, (list, tuple)) and all(isinstance(number, (int, float)) for number in numbers):
        return tuple(torch.tensor(numbers, dtype=buffer.dtype, device="cpu").tolist())
    else:
        binder.differ(f"config.{key} is {numbers!r}, not a list of numbers")
    return ()


@dataclass(frozen=True)
class Factors:
    """Multipliers as bound, not all of which are 1. `rounded`: those of sections, to the dtype of the activations."""

    before: float
    sections: tuple[float, ...]
    after: float
    rounded: bool = False
