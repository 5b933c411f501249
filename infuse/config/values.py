"""Single values of the configuration: the spellings of each, and its canonical form.

A parser returns the canonical value or raises ValueError("possible: ..."); pydantic calls it, config.keys words the
error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field

from infuse.ground.errors import ConfigError
from infuse.quant.parse import quant_format

_SPELLINGS: Mapping[torch.dtype, tuple[str, ...]] = MappingProxyType(
    {
        torch.float16: ("fp16", "float16", "half"),
        torch.bfloat16: ("bf16", "bfloat16", "bfloat"),
        torch.float32: ("fp32", "float32", "float"),
        torch.float64: ("fp64", "float64", "double"),
        torch.int8: ("int8",),
    }
)
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: dtype for dtype, names in _SPELLINGS.items() for name in names}
)
FORMAT_OF_BITS: Mapping[int, str] = MappingProxyType({8: "int8", 6: "fp6", 4: "int4"})
_MPU_METHODS = ("get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_world_size")


def parse_dtype(value: Any) -> torch.dtype:
    """The dtype of a torch.dtype or one of DeepSpeed's spellings ("fp16", "torch.half", …); ValueError lists them."""
    if isinstance(value, torch.dtype) and value in _SPELLINGS:
        return value
    name = value.lower().removeprefix("torch.") if isinstance(value, str) else ""
    if name in _DTYPES:
        return _DTYPES[name]
    hint = ""
    with suppress(ValueError):
        hint = f'; for {name} weights write quant="{parse_format(name)}"'
    spellings = ", ".join("|".join(names) for names in _SPELLINGS.values())
    raise ValueError(f"possible: a torch.dtype or its name, of {spellings}{hint}")


def parse_format(value: Any) -> str:
    """The text of a weight format without ":symmetric", in lower case: `name[:group_size | :row |
    :groups=n][:asymmetric][:a8]`.

    name is int8, int4, fp8 or fp6; group_size weights of a row share a scale, or the whole row. `groups=n` stands for
    DeepSpeed's q_groups: n groups in each row (DeepSpeed has n groups in a whole matrix, which is never finer). Without
    a grouping the format has its own default. a8: products of many tokens may round activations to 8 bits. Raises
    ValueError.
    """
    try:
        quant_format(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return value.strip().lower().replace(":symmetric", "")


def _device(value: Any) -> Any:
    try:
        return torch.device(value) if isinstance(value, str) else value
    except RuntimeError as error:
        raise ValueError(f"possible: a torch.device or its name; {str(error).splitlines()[0]}") from error


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("possible: an integer")
    return value


def _mpu(value: Any) -> Any:
    missing = [name for name in _MPU_METHODS if not callable(getattr(value, name, None))]
    if missing:
        raise ValueError(
            f"possible: an object with the methods {', '.join(_MPU_METHODS)}; missing: {', '.join(missing)}"
        )
    return value


def _group(value: Any) -> Any:
    if isinstance(value, (bool, str, bytes, float, list, tuple, dict)) or (isinstance(value, int) and value >= 0):
        raise ValueError("possible: a torch.distributed.ProcessGroup")
    return value


def _policy(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    wrong = [key for key in value if not isinstance(key, (type, str))]
    wrong += [names for names in value.values() if not _are_names(names)]
    if wrong:
        raise ValueError(f"possible: {{layer class or its name: name of a linear, or a tuple of names}}; not {wrong}")
    return {key: (names,) if isinstance(names, str) else tuple(names) for key, names in value.items()}


def _are_names(value: Any) -> bool:
    """Whether `value` is a name or a list of names."""
    names = [value] if isinstance(value, str) else value
    return isinstance(names, (tuple, list)) and len(names) > 0 and all(isinstance(name, str) and name for name in names)


def _checkpoint(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    listed = isinstance(value, (list, tuple)) and all(isinstance(path, (str, os.PathLike)) for path in value)
    described = isinstance(value, Mapping) and isinstance(value.get("checkpoints"), (str, list, tuple, dict))
    files = value["checkpoints"] if described else value if listed or isinstance(value, str) else None
    if not files:
        raise ValueError(
            'possible: the path of a checkpoint or its JSON description, a list of files, a dict with "checkpoints"'
        )
    return [os.fspath(path) for path in value] if listed else value


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


def _when_given(parse: Callable[[Any], Any]) -> BeforeValidator:
    return BeforeValidator(lambda value: None if value is None else parse(value))


Count = Annotated[int, Field(ge=1), BeforeValidator(_not_bool)]
Counts = Annotated[tuple[Count, ...], BeforeValidator(_listed)]
Symmetry = Literal["symmetric", "asymmetric"]
Dtype = Annotated[torch.dtype | None, _when_given(parse_dtype)]
Format = Annotated[str | None, _when_given(parse_format)]
DeviceName = Annotated[torch.device | None, _when_given(_device)]
Mpu = Annotated[Any, _when_given(_mpu)]
Group = Annotated[Any, _when_given(_group)]
Policy = Annotated[dict[Any, tuple[str, ...]] | None, _when_given(_policy)]
CheckpointSource = Annotated[str | list[str] | dict[str, Any] | None, _when_given(_checkpoint)]
