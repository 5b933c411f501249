"""`quant`: infuse's short form, and DeepSpeed's keys for whole models or single modules."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, model_validator

from infuse.config import values
from infuse.config.keys import Section
from infuse.config.values import parse_format


class ModuleQuant(Section):
    """The format of one matrix. A text stands for {"format": text}, None for {"num_bits": 16}, which leaves it alone.

    `group_dim` has no effect: groups lie along the inputs.
    """

    shorthand = (str, "format")
    forms = 'a dict with num_bits, or a format such as "int4:128"'
    format: values.Format = None
    num_bits: Literal[4, 6, 8, 16] | None = None
    group_size: values.Count | None = None
    group_dim: Literal[0, 1] | None = None
    symmetric: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _written(cls, value: Any) -> Any:
        """The entries of post_init_quant, which are dict values: `expand` and the check of names do not see them."""
        value = {"num_bits": 16} if value is None else cls.expand(value)
        problems = []
        for name in value if isinstance(value, Mapping) else ():
            if name not in cls.model_fields:
                nearest = difflib.get_close_matches(str(name), cls.model_fields, n=1, cutoff=0.0)[0]
                problems.append(f"{name!r} is no key, the nearest one is {nearest}")
        if problems:
            raise ValueError("; ".join(problems))
        return value

    @model_validator(mode="after")
    def _checked(self) -> ModuleQuant:
        others = [name for name in ("num_bits", "group_size", "symmetric") if getattr(self, name) is not None]
        if self.format and others:
            raise ValueError(f"possible: format alone, or {', '.join(others)} without it")
        if others and self.num_bits is None:
            raise ValueError("num_bits is missing; possible: 4, 6, 8, or 16 to leave the module alone")
        if self.num_bits == 6 and self.symmetric is False:
            raise ValueError("possible: 6 bits with symmetric=True; only 8 and 4 bits have an asymmetric form")
        self.text  # noqa: B018  # raises if the format cannot have the group size
        return self

    @property
    def given(self) -> bool:
        return self.format is not None or self.num_bits is not None

    @property
    def text(self) -> str | None:
        """The canonical text, or None without quantization."""
        if self.format or self.num_bits in (None, 16):
            return self.format
        grouping = f":{self.group_size}" if self.group_size else ""
        symmetry = ":asymmetric" if self.symmetric is False else ""
        return parse_format(f"{values.FORMAT_OF_BITS[self.num_bits]}{grouping}{symmetry}")


def _says_something(value: ModuleQuant) -> ModuleQuant:
    if not value.given:
        raise ValueError(
            'possible: {"num_bits": 4, 6, 8 or 16, "group_size": …, "symmetric": …}, or a format such as "int4:128"'
        )
    return value


class WeightQuant(Section):
    """`quant.weight`: None means DeepSpeed's default, symmetric 8 bits. Any given key asks for quantization.

    `quantized_initialization` is the format of all matrices, `post_init_quant` {part of a module's path: format}.
    """

    enabled: bool | None = None
    num_bits: Literal[4, 6, 8] | None = None
    q_type: values.Symmetry | None = None
    q_groups: values.Count | None = None
    quantized_initialization: ModuleQuant = ModuleQuant()
    post_init_quant: dict[str, Annotated[ModuleQuant, AfterValidator(_says_something)]] = {}

    @model_validator(mode="after")
    def _checked(self) -> WeightQuant:
        if self.num_bits == 6 and self.q_type == "asymmetric":
            raise ValueError("possible: 6 bits with q_type symmetric; only 8 and 4 bits have an asymmetric form")
        self.by_bits  # noqa: B018  # raises if the format cannot have the number of groups
        return self

    @property
    def by_bits(self) -> str | None:
        """The format of num_bits, q_type and q_groups, which counts the groups of a row: see parse_format."""
        if not (self.num_bits or self.q_type or self.q_groups):
            return None
        grouping = f":groups={self.q_groups}" if self.q_groups else ""
        return parse_format(f"{values.FORMAT_OF_BITS[self.num_bits or 8]}{grouping}:{self.q_type or 'symmetric'}")

    @property
    def format(self) -> str | None:
        """The canonical text for all matrices, or None if only named modules are quantized, or none."""
        if self.enabled is False:
            return None
        if self.enabled and not self.quantized_initialization.given and not self.post_init_quant:
            return self.by_bits or "int8"
        return self.by_bits or self.quantized_initialization.text


class ActivationQuant(Section):
    """`quant.activation`: without effect."""

    enabled: bool = True
    num_bits: Literal[4, 6, 8] = 8
    q_type: values.Symmetry = "symmetric"
    q_groups: values.Count = 1


class QkvQuant(Section):
    """`quant.qkv`: without effect."""

    enabled: bool = True


class Quant(Section):
    """`quant`: a text stands for {"format": text}, see parse_format; the other keys are DeepSpeed's. enabled=None:
    quantize if they ask for it.
    """

    shorthand = (str, "format")
    forms = 'a dict, or a format such as "int8", "int4:128", "fp8", "fp6"'
    enabled: bool | None = None
    format: values.Format = None
    weight: WeightQuant = WeightQuant()
    activation: ActivationQuant = ActivationQuant()
    qkv: QkvQuant = QkvQuant()

    @property
    def everywhere(self) -> str | None:
        """The format of all matrices without a format by name, or None."""
        if self.enabled is False:
            return None
        return self.format or self.weight.format or ("int8" if self.enabled and not self._by_name_or_init else None)

    @property
    def by_name(self) -> dict[str, str | None]:
        """Part of a module's path → the format of its matrices; None leaves them alone."""
        if self.enabled is False or self.weight.enabled is False:
            return {}
        return {pattern: chosen.text for pattern, chosen in self.weight.post_init_quant.items()}

    @property
    def _by_name_or_init(self) -> bool:
        return bool(self.weight.post_init_quant) or self.weight.quantized_initialization.given

    def contradictions(self) -> list[str]:
        """Keys that contradict each other."""
        weight, initial = self.weight, self.weight.quantized_initialization
        lines = []
        if weight.by_bits and initial.given and weight.by_bits != initial.text:
            lines.append(
                f"quant.weight.quantized_initialization: found {initial.text!r} beside num_bits, q_type and q_groups, "
                f"which say {weight.by_bits!r}; give one of them"
            )
        if self.format and weight.format and self.format != weight.format:
            lines.append(
                f"quant.format: found {self.format!r} beside quant.weight, which says {weight.format!r}; give one"
            )
        return lines
