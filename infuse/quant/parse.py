"""The only parser of formats: from the text in a configuration to a QuantFormat."""

from __future__ import annotations

import re
from functools import cache

from infuse.errors import ConfigError
from infuse.quant import floating, integer, microscaling
from infuse.quant.format import POSSIBLE, QuantFormat


def quant_format(text: str) -> QuantFormat:
    """Parse a format: "int8", "int4:128", "int4:64:asymmetric", "fp8", "fp6:row", "mxfp4", "int8:groups=2", "int8:a8".

    ConfigError for an unknown text, listing the possible ones, or for numbers that the format cannot have.
    """
    if not isinstance(text, str):
        raise ConfigError(f"a quantization format is a text, not {text!r}; possible: {POSSIBLE}")
    return _parsed(text)


@cache
def _parsed(text: str) -> QuantFormat:
    name, *options = text.strip().lower().split(":")
    family: type[QuantFormat]
    size: int | None
    if name in integer.DEFAULT_GROUP:
        family, size = integer.IntegerFormat, integer.DEFAULT_GROUP[name]
    elif name in floating.DEFAULT_GROUP:
        family, size = floating.FloatFormat, floating.DEFAULT_GROUP[name]
    elif name in microscaling.DEFAULT_GROUP:
        family, size = microscaling.MicroscalingFormat, microscaling.DEFAULT_GROUP[name]
    else:
        raise ConfigError(f"unknown quantization format {text!r}; possible: {POSSIBLE}")
    activation_bits = 16
    if options and options[-1] == "a8":
        activation_bits = int(options.pop()[1:])
    symmetric = True
    if options and options[-1] in ("symmetric", "asymmetric"):
        symmetric = options.pop() == "symmetric"
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
        raise ConfigError(f"{options[-1]!r} in the quantization format {text!r} is not known; possible: {POSSIBLE}")
    return family(name, int(name.lstrip("mxintfp")), size, symmetric, groups, activation_bits)
