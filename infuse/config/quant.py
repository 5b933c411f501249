"""`quant` as sections of the configuration: infuse's short form, and DeepSpeed's keys by which whole models or modules
are quantized.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, model_validator

from infuse.config import values
from infuse.config.keys import Section
from infuse.config.values import parse_format


class ModuleQuant(Section):
    """The format of one matrix: a text of the short form stands for {"format": text}, None for {"num_bits": 16}, which
    leaves it alone.

    `group_dim` is accepted without effect: groups lie along the inputs.
    """

    forms = 'a dict with num_bits, or a format such as "int4:128"'
    format: values.Format = None
    num_bits: Literal[4, 6, 8, 16] | None = None
    group_size: values.Count | None = None
    group_dim: Literal[0, 1] | None = None
    symmetric: bool | None = None

    @classmethod
    def expand(cls, value: Any) -> Any:
        if value is None:
            return {}
        return {"format": value} if isinstance(value, str) else super().expand(value)

    @model_validator(mode="before")
    @classmethod
    def _written(cls, value: Any) -> Any:
        value = {"num_bits": 16} if value is None else {"format": value} if isinstance(value, str) else value
        unknown = [name for name in value if name not in cls.model_fields] if isinstance(value, Mapping) else []
        if unknown:
            nearest = [difflib.get_close_matches(str(name), cls.model_fields, n=1, cutoff=0.0)[0] for name in unknown]
            told = (
                f"{name!r} is no key, the nearest one is {near}" for name, near in zip(unknown, nearest, strict=True)
            )
            raise ValueError("; ".join(told))
        return value

    @model_validator(mode="after")
    def _is_a_format(self) -> ModuleQuant:
        others = [name for name in ("num_bits", "group_size", "symmetric") if getattr(self, name) is not None]
        if self.format and others:
            raise ValueError(f"possible: format alone, or {', '.join(others)} without it")
        if others and self.num_bits is None:
            raise ValueError("num_bits is missing; possible: 4, 6, 8, or 16 to leave the module alone")
        if self.num_bits == 6 and self.symmetric is False:
            raise ValueError("possible: 6 bits with symmetric=True; only 8 and 4 bits have an asymmetric form")
        self.text  # noqa: B018  # a group size that the format cannot have raises
        return self

    @property
    def given(self) -> bool:
        return self.format is not None or self.num_bits is not None

    @property
    def text(self) -> str | None:
        """The canonical text, or None where nothing is quantized."""
        if self.format or self.num_bits in (None, 16):
            return self.format
        grouping = f":{self.group_size}" if self.group_size else ""
        return parse_format(
            f"{values.FORMAT_OF_BITS[self.num_bits]}{grouping}:{'asymmetric' if self.symmetric is False else 'symmetric'}"
        )


def _says_something(value: ModuleQuant) -> ModuleQuant:
    if not value.given:
        raise ValueError(
            'possible: {"num_bits": 4, 6, 8 or 16, "group_size": …, "symmetric": …}, or a format such as "int4:128"'
        )
    return value


class WeightQuant(Section):
    """`quant.weight`: None stands for DeepSpeed's default: 8 bits, symmetric. Any key given asks for quantization.

    `quantized_initialization` is the format of all matrices; `post_init_quant` {part of a module's path: its own}.
    """

    enabled: bool | None = None
    num_bits: Literal[4, 6, 8] | None = None
    q_type: values.Symmetry | None = None
    q_groups: values.Count | None = None
    quantized_initialization: ModuleQuant = ModuleQuant()
    post_init_quant: dict[str, Annotated[ModuleQuant, AfterValidator(_says_something)]] = {}

    @model_validator(mode="after")
    def _has_a_format(self) -> WeightQuant:
        if self.num_bits == 6 and self.q_type == "asymmetric":
            raise ValueError("possible: 6 bits with q_type symmetric; only 8 and 4 bits have an asymmetric form")
        self.by_bits  # noqa: B018  # a number of groups that the format cannot have raises
        return self

    @property
    def by_bits(self) -> str | None:
        """What num_bits, q_type and q_groups say. `q_groups` counts the groups of a row, see parse_format."""
        if not (self.num_bits or self.q_type or self.q_groups):
            return None
        grouping = f":groups={self.q_groups}" if self.q_groups else ""
        return parse_format(f"{values.FORMAT_OF_BITS[self.num_bits or 8]}{grouping}:{self.q_type or 'symmetric'}")

    @property
    def format(self) -> str | None:
        """The canonical text for all matrices, or None where nothing asks for it: modules chosen by name are not all."""
        if self.enabled is False:
            return None
        if self.enabled and not self.quantized_initialization.given and not self.post_init_quant:
            return self.by_bits or "int8"
        return self.by_bits or self.quantized_initialization.text


class ActivationQuant(Section):
    """`quant.activation`: accepted without effect; activations keep the compute dtype."""

    enabled: bool = True
    num_bits: Literal[4, 6, 8] = 8
    q_type: values.Symmetry = "symmetric"
    q_groups: values.Count = 1


class QkvQuant(Section):
    """`quant.qkv`: accepted without effect; q, k and v are quantized as the other matrices are."""

    enabled: bool = True


class Quant(Section):
    """`quant`: a text stands for {"format": text}, see parse_format; the other keys are DeepSpeed's. enabled=None: as
    they ask.
    """

    forms = 'a dict, or a format such as "int8", "int4:128", "fp8", "fp6"'
    enabled: bool | None = None
    format: values.Format = None
    weight: WeightQuant = WeightQuant()
    activation: ActivationQuant = ActivationQuant()
    qkv: QkvQuant = QkvQuant()

    @classmethod
    def expand(cls, value: Any) -> Any:
        if value is None:
            return {}
        return {"format": value} if isinstance(value, str) else super().expand(value)

    @property
    def everywhere(self) -> str | None:
        """The format of all matrices that no name is given for, or None."""
        if self.enabled is False:
            return None
        return self.format or self.weight.format or ("int8" if self.enabled and not self._by_name_or_init else None)

    @property
    def by_name(self) -> dict[str, str | None]:
        """Part of a module's path → the format of the matrices whose path holds it; None leaves them alone."""
        if self.enabled is False or self.weight.enabled is False:
            return {}
        return {pattern: chosen.text for pattern, chosen in self.weight.post_init_quant.items()}

    @property
    def _by_name_or_init(self) -> bool:
        return bool(self.weight.post_init_quant) or self.weight.quantized_initialization.given

    def contradictions(self) -> list[str]:
        """The keys that are right each and wrong together."""
        weight, initial = self.weight, self.weight.quantized_initialization
        lines = []
        if weight.by_bits and initial.given and weight.by_bits != initial.text:
            lines.append(
                f"quant.weight.quantized_initialization: found {initial.text!r} beside num_bits, q_type and q_groups, "
                f"which say {weight.by_bits!r}; give one of them"
            )
        if self.format and weight.format and self.format != weight.format:
            lines.append(
                f"quant.format: found {self.format!r} beside quant.weight, which says {weight.format!r}; give one of them"
            )
        return lines
