"""What a number format is: QuantFormat, the interface; QuantizedWeight, its result; `quant_format`, which reads a configuration's text.

The arithmetic of each family is in its own file (integer.py). Nothing here knows modules, kernels or models.
Legend: weights are [out_features, in_features]; a group is a run of neighbouring inputs of one row that shares one scale.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from infuse.errors import ConfigError, NotAvailable

POSSIBLE = ("int8", "int8:GROUP", "int8:row", "int8:groups=N", "int4", "int4:GROUP", "int4:row", "int4:groups=N",
            "and each of these with :symmetric or :asymmetric")
NOT_YET = ("fp8", "fp6")

# How much larger than on normal weights the error may be before a proof calls it a bug: weights with heavier tails fill their groups worse.
# Measured in groups of 64, against normal weights: Laplace 1.24 to 1.32 times, Student-t(3) 1.46 to 1.85 times the relative error.
TAIL_FACTOR = 2.0


@dataclass(frozen=True)
class QuantFormat(ABC):
    """How the numbers of a weight matrix are stored; pure data, so that a plan can hold, compare, print and pickle it.

    `group_size` inputs share a scale; None means the whole row, or, where `groups` is given, one `groups`-th of it.
    `str(format)` is the canonical text, and `quant_format(str(format)) == format`.
    """

    name: str
    bits: int
    group_size: int | None
    symmetric: bool = True
    groups: int | None = None

    @abstractmethod
    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        """The weight [out, in] (floating, any device; on meta only the shapes) in this format.

        Refused with ConfigError: NaN, infinite or huge (above 8.5e37) values, another rank or dtype, a width that `fits` declines.
        """

    @abstractmethod
    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values [out, in] that the codes stand for: exact in float32, rounded once for a narrower dtype."""

    @abstractmethod
    def nbytes(self, out_features: int, in_features: int) -> int:
        """The bytes of such a weight in this format, scales and zeros included; ConfigError where `fits` declines."""

    @property
    @abstractmethod
    def expected_error(self) -> float:
        """The relative RMS error of a round trip, rms(w - w') / rms(w), on normal weights."""

    @property
    def proof_tolerance(self) -> float:
        """The relative RMS error up to which a quantized layer is accepted as correct: expected_error * TAIL_FACTOR."""
        return self.expected_error * TAIL_FACTOR

    def fits(self, in_features: int) -> str | None:
        """None where rows of `in_features` can be stored in this format, else the reason with its numbers."""
        if self.group_size is not None and in_features % self.group_size:
            divisors = [str(size) for size in (128, 64, 32) if in_features % size == 0 and size != self.group_size]
            would = " or ".join(divisors) if divisors else "row"
            return f"{self}: groups of {self.group_size} do not divide {in_features} inputs ({would} would)"
        if self.groups is not None and in_features % self.groups:
            return f"{self}: {in_features} inputs do not divide into {self.groups} groups"
        return None

    def group_count(self, in_features: int) -> int:
        """How many groups, and so scales, a row of `in_features` has; ConfigError where `fits` declines."""
        if reason := self.fits(in_features):
            raise ConfigError(reason)
        if in_features == 0:
            return 0
        if self.groups is not None:
            return self.groups
        return 1 if self.group_size is None else in_features // self.group_size


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """The buffers of one quantized matrix; `format` says what they mean. A plain holder: it never computes."""

    data: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    shape: tuple[int, int]
    format: QuantFormat = field(repr=False)

    @property
    def nbytes(self) -> int:
        """The bytes that the buffers hold."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.data, self.scale, self.zero) if tensor is not None)


def quant_format(text: str) -> QuantFormat:
    """The format that a text of the configuration names: "int8", "int4:128", "int4:64:asymmetric", "int8:row", "int8:groups=2".

    Refused: an unknown text (ConfigError, with what is possible); a known format that this version lacks (NotAvailable).
    """
    if not isinstance(text, str):
        raise ConfigError(f"a quantization format is a text, not {text!r}; possible: {', '.join(POSSIBLE)}")
    name, *options = text.strip().lower().split(":")
    if name in NOT_YET:
        raise NotAvailable(f"the format {text!r} is not in this version; possible: {', '.join(POSSIBLE)}")

    from infuse.quant.integer import DEFAULT_GROUP, IntegerFormat  # here: integer.py builds on this file

    if name not in DEFAULT_GROUP:
        raise ConfigError(f"unknown quantization format {text!r}; possible: {', '.join(POSSIBLE)}")
    symmetric = True
    if options and options[-1] in ("symmetric", "asymmetric"):
        symmetric = options.pop() == "symmetric"
    size: int | None = DEFAULT_GROUP[name]
    groups: int | None = None
    if options:
        option = options.pop(0)
        if option == "row":
            size = None
        elif match := re.fullmatch(r"(groups=)?([0-9]{1,9})", option):
            number = int(match[2])
            size, groups = (None, number) if match[1] else (number, None)
        else:
            options.append(option)
    if options:
        raise ConfigError(f"{options[-1]!r} in the quantization format {text!r} is not known; possible: {', '.join(POSSIBLE)}")
    return IntegerFormat(name, int(name.removeprefix("int")), size, symmetric, groups)
