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
    these instead, which the original holds as the buffer `held`, rounded to the dtype of its activations. `widths`:
    paths of attributes with the width of each section in that buffer.
    """

    before: str = ""
    sections: tuple[str, ...] = ()
    after: str = ""
    listed: str = ""
    held: str = ""
    widths: tuple[str, ...] = ()

    def bind(self, binder: Binder, sections: int) -> Factors | None:
        """Read the numbers, those of so many `sections`; None if all are 1."""
        found = Factors(
            _number(binder, self.before),
            tuple(_number(binder, path) for path in self.sections),
            _number(binder, self.after),
        )
        if self.listed:
            found = Factors(found.before, self._held(binder), found.after, rounded=True)
        if len(found.sections) not in (0, sections):
            binder.differ(f"there are {len(found.sections)} multipliers of {sections} sections")
        return found if {found.before, *found.sections, found.after} != {1.0} else None

    def _held(self, binder: Binder) -> tuple[float, ...]:
        """The numbers of the config as the buffer has them: rounded by any cast of the model since it was made."""
        numbers, buffer = binder.value(self.listed), dict(binder.layer.named_buffers()).get(self.held)
        widths = [binder.own_count(*_module_and_name(path)) for path in self.widths]
        if buffer is None:
            binder.differ(f"there is no buffer {self.held}")
            return ()
        if not (isinstance(numbers, (list, tuple)) and all(isinstance(number, (int, float)) for number in numbers)):
            binder.differ(f"config.{self.listed} is {numbers!r}, not a list of numbers")
            return ()
        if len(numbers) != len(widths):
            binder.differ(f"config.{self.listed} has {len(numbers)} numbers for {len(widths)} sections")
            return ()
        for dtype in (buffer.dtype, torch.bfloat16, torch.float16):  # a cast to more bits brings back no digits
            rounded = torch.tensor(numbers, dtype=dtype, device="cpu").to(buffer.dtype)
            if buffer.is_meta or torch.equal(rounded.repeat_interleave(torch.tensor(widths)), buffer.cpu().flatten()):
                return tuple(rounded.tolist())
        binder.differ(f"the buffer {self.held} does not have the numbers of config.{self.listed}, {numbers}")
        return ()


def _number(binder: Binder, path: str) -> float:
    return binder.own_factor(path) if path else 1.0


def _module_and_name(path: str) -> tuple[str, str]:
    module, _, name = path.rpartition(".")
    return module, name


@dataclass(frozen=True)
class Factors:
    """Multipliers as bound, not all of which are 1. `rounded`: those of sections, to the dtype of the activations."""

    before: float
    sections: tuple[float, ...]
    after: float
    rounded: bool = False
