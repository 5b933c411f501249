"""Find what a checkpoint's config says of its quantization, and read it strictly.

Which matrices are coded is read from the tensors. The config tells what tensors cannot (versions, sizes of blocks), and
must not contradict them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from infuse.ground.errors import CheckpointError
from infuse.weights.sources import read_json

_KEYS = ("quantization_config", "compression_config")  # older files of compressed-tensors have the second
# Files of older folders: name → the method that their values belong to if they name none.
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "quantization_config.json": "auto-round"}
_MODELOPT = "hf_quant_config.json"
_QUANTO = "quanto_qmap.json"
# quant_method, in lower case with dashes → the form that reads its files. AutoRound's files name their packing besides.
_FORMS = {
    "gptq": "gptq",
    "awq": "awq",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm-fp8": "fp8",
    "modelopt": "modelopt",
    "modelopt-fp4": "modelopt",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "quanto": "quanto",
}
_AUTO_ROUND = "auto-round"
_PACKINGS = {"auto-awq": "awq", "awq": "awq", "llm-compressor": "compressed-tensors"}  # others are GPTQ's
METHODS = (*_FORMS, _AUTO_ROUND)  # that are read
MOST = 1 << 31  # more than any size of a matrix; PyTorch's integers hold sums and products of it
Size = Annotated[int, Field(le=MOST)]  # of groups, blocks or matrices
_T = TypeVar("_T", bound=BaseModel)


@dataclass(frozen=True)
class Settings:
    """The quantization that a config describes: where it stands, the method's name with dashes, its keys."""

    origin: str
    method: str
    values: Mapping[str, Any]

    @property
    def form(self) -> str | None:
        """The form that reads the files of this method, and of AutoRound's packing; None if none does."""
        if not self.is_of_auto_round:
            return _FORMS.get(self.method)
        packing = str(self.values.get("packing_format") or self.values.get("format") or "")
        parts = _plain(packing).split(":")
        return next((_PACKINGS[part] for part in parts if part in _PACKINGS), "gptq")

    @property
    def is_of_auto_round(self) -> bool:
        return self.method == _AUTO_ROUND

    def read(self, schema: type[_T]) -> _T:
        """Validate the keys; CheckpointError lists all that are missing or wrong."""
        try:
            return schema.model_validate(dict(self.values))
        except ValidationError as error:
            lines = dict.fromkeys(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise CheckpointError(f"{self.origin}: of {self.method}: {'; '.join(lines)}") from error


def find_settings(paths: Iterable[Path], of_model: Any = None) -> Settings | None:
    """Read the settings from the first folder of the files `paths` that has some, else from `of_model`, the config's.

    None if nothing is quantized. CheckpointError if a config is not valid JSON or describes no quantization.
    """
    for folder in dict.fromkeys(path.parent for path in paths):
        if (settings := _in_folder(folder)) is not None:
            return settings
    values = of_model.to_dict() if hasattr(of_model, "to_dict") else of_model
    return None if values is None else _settings("the model's config: quantization_config", values)


def _in_folder(folder: Path) -> Settings | None:
    path = folder / "config.json"
    if path.is_file():
        config = read_json(path)
        inner = config.get("text_config") if isinstance(config, dict) else None
        for part, at in ((config, ""), (inner, "text_config.")):
            for key in _KEYS:
                if isinstance(part, dict) and part.get(key) is not None:
                    return _settings(f"{path}: {at}{key}", part[key])
    for name, method in _OWN_FILES.items():
        if (folder / name).is_file():
            return _settings(str(folder / name), read_json(folder / name), method)
    if (folder / _QUANTO).is_file():
        return _settings(str(folder / _QUANTO), {"modules": read_json(folder / _QUANTO)}, "quanto")
    if (folder / _MODELOPT).is_file():
        content = read_json(folder / _MODELOPT)
        values = content.get("quantization") if isinstance(content, dict) else None
        return _settings(f"{folder / _MODELOPT}: quantization", values, "modelopt")
    return None


def _settings(origin: str, values: Any, method: str | None = None) -> Settings:
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{origin}: is {values!r:.60}; possible: an object that describes the quantization")
    named = values.get("quant_method", method)
    if named is None and any(values.get(key) for key in ("load_in_4bit", "load_in_8bit")):
        named = "bitsandbytes"
    if named is None and "config_groups" in values:
        named = "compressed-tensors"
    if not isinstance(named, str):
        raise CheckpointError(f'{origin}: has no "quant_method", which names the form of the files')
    return Settings(origin, _plain(named).removeprefix("intel/"), values)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
