"""The only parser of formats: from the text in a configuration to a QuantFormat. `register` adds a format."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

import torch

from infuse.ground.errors import ConfigError
from infuse.quant.blocks import BLOCKS, BlockFormat
from infuse.quant.floating import DEFAULT_GROUP as FLOATING
from infuse.quant.floating import FloatFormat
from infuse.quant.format import QuantFormat
from infuse.quant.grouped import GroupedFormat
from infuse.quant.integer import DEFAULT_GROUP as INTEGER
from infuse.quant.integer import IntegerFormat
from infuse.quant.microscaling import DEFAULT_GROUP as MICROSCALING
from infuse.quant.microscaling import MicroscalingFormat
from infuse.quant.offset import OffsetFormat
from infuse.quant.tables import DEFAULT_GROUP as TABLES
from infuse.quant.tables import TableFormat

_POSSIBLE = (
    "int8, int8:GROUP, int8:row, int8:groups=N; int4, int3, int2, fp8, fp6, nf4, fp4 likewise; those of integers also "
    "with :symmetric or :asymmetric behind, with :f16, which keeps scales in float16, and with :f32; int8 and int4 "
    "with :a8, which lets products of many tokens round activations to 8 bits; fp8 with :f32; int4, int3, int2 with "
    f":offset in the place of :asymmetric; mxfp4; those of files: {', '.join(BLOCKS)}"
)
_GROUPED = {**INTEGER, **FLOATING, **MICROSCALING, **TABLES}
_OWN = {*_GROUPED, *BLOCKS}
_INTEGERS = ", ".join(INTEGER)

# The options behind the name → the format. ConfigError for options that the format does not have.
Parse = Callable[[Sequence[str]], QuantFormat]
_registered: dict[str, Parse] = {}


def register(name: str, parse: Parse) -> Callable[[], None]:
    """Let `quant="name:option:…"` mean parse([option, …]), wherever a format is accepted. The result undoes it."""
    if name in _OWN or name in _registered or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"a quantization format cannot be called {name!r}: possible: lower case, and not yet there")
    _registered[name] = parse
    _parsed.cache_clear()

    def take_back() -> None:
        del _registered[name]
        _parsed.cache_clear()

    return take_back


def is_extended() -> bool:
    """Whether a format is registered from outside."""
    return bool(_registered)


def quant_format(text: str) -> QuantFormat:
    """Parse a format: "int8", "int4:128", "int4:64:asymmetric", "int4:128:f16", "fp6:row", "mxfp4", "int8:groups=2",
    "int8:a8".

    ConfigError for an unknown text, listing the possible ones, or for numbers that the format cannot have.
    """
    if not isinstance(text, str):
        raise ConfigError(f"a quantization format is a text, not {text!r}; possible: {_possible()}")
    return _parsed(text)


@cache
def _parsed(text: str) -> QuantFormat:
    name, *options = text.strip().lower().split(":")
    if name in _registered:
        return _registered[name](options)
    if name not in _OWN:
        raise ConfigError(f"unknown quantization format {text!r}; possible: {_possible()}")
    if name in BLOCKS:
        if options:
            raise ConfigError(f"{options[0]!r} in the quantization format {text!r} is not known; possible: {name}")
        return BlockFormat(name, BLOCKS[name].bits)
    return _grouped(text, name, options)


def _grouped(text: str, name: str, options: list[str]) -> GroupedFormat:
    activation_bits = 8 if _popped(options, "a8") else 16
    of_scales = _scale_dtype(options)
    has_offset = _popped(options, "offset")
    symmetric = not (has_offset or _popped(options, "asymmetric"))
    if symmetric:
        _popped(options, "symmetric")
    size = _GROUPED[name]
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
        raise ConfigError(f"{options[-1]!r} in the quantization format {text!r} is not known; possible: {_possible()}")
    bits = int(name[-1])
    if of_scales is torch.float16 and name not in INTEGER:
        raise ConfigError(f"{name} has no :f16; possible: {name}, or {_INTEGERS} with :f16")
    if of_scales is torch.float32 and name not in {*INTEGER, "fp8"}:
        raise ConfigError(f"{name} has no :f32; possible: {name}, or {_INTEGERS}, fp8 with :f32")
    scales = {} if of_scales is None else {"scale_dtype": of_scales}
    if name in TABLES:
        scales = {"scale_dtype": torch.float32}
    families = ((INTEGER, IntegerFormat), (FLOATING, FloatFormat), (MICROSCALING, MicroscalingFormat))
    family = next((family for names, family in families if name in names), TableFormat)
    if has_offset and family is not IntegerFormat:
        raise ConfigError(f"{name} has no :offset; possible: {name}, or int4, int3, int2 with :offset")
    family = OffsetFormat if has_offset else family
    return family(name, bits, size, symmetric, groups, activation_bits=activation_bits, **scales)


def _scale_dtype(options: list[str]) -> torch.dtype | None:
    """The dtype that the last of `options` gives the scales, which is then removed; None if it gives none."""
    if _popped(options, "f16"):
        return torch.float16
    return torch.float32 if _popped(options, "f32") else None


def _popped(options: list[str], last: str) -> bool:
    """Whether the last of `options` is `last`, which is then removed."""
    is_last = bool(options) and options[-1] == last
    if is_last:
        options.pop()
    return is_last


def _possible() -> str:
    return ", ".join((_POSSIBLE, *_registered))
