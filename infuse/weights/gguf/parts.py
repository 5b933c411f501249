"""The GGUF files of one model: a file, its split parts, or the only model of a folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from infuse.ground.errors import CheckpointError
from infuse.weights.gguf.blocks import FORMATS
from infuse.weights.gguf.file import PLAIN, GGUFFile

SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_PICTURES = "mmproj"  # what files of vision towers, beside those of the text model, begin with


def all_parts(path: Path) -> tuple[Path, ...]:
    """The parts of the model that `path` is one part of, whether they exist or not; other files are alone."""
    matched = _PART.fullmatch(path.name)
    if not matched:
        return (path,)
    count = int(matched[3])
    return tuple(path.with_name(f"{matched[1]}-{number:05}-of-{matched[3]}.gguf") for number in range(1, count + 1))


def in_folder(folder: Path) -> tuple[Path, ...]:
    """The files of the only model in a folder, () if there is none; CheckpointError if there are several."""
    models = {all_parts(path): path for path in sorted(folder.glob(f"*{SUFFIX}")) if _PICTURES not in path.name.lower()}
    if len(models) > 1:
        names = ", ".join(path.name for path in models.values())
        raise CheckpointError(f"{folder}: holds {len(models)} models: {names}; give the path of one of these files")
    return next(iter(models), ())


def open_parts(paths: Sequence[Path]) -> tuple[GGUFFile, ...]:
    """Open the files of one model, its first part first.

    CheckpointError if a part is missing, there twice or of another model, or if a type of tensors cannot be read.
    """
    files = sorted((GGUFFile(path) for path in paths), key=lambda file: _number(file, "split.no", 0))
    first = files[0]
    count = _number(first, "split.count", 1)
    found = [_number(file, "split.no", 0) for file in files]
    if max(count, 1) != len(files) or found != list(range(len(files))):
        told = ", ".join(f"{file.path.name} is number {number + 1}" for file, number in zip(files, found, strict=True))
        raise CheckpointError(f"{first.path}: is split in {count} files, and there are: {told}; give all, each once")
    wrong = [file.path.name for file in files if _number(file, "split.count", 1) != count]
    tensors = Counter(name for file in files for name in file.entries)
    wrong += sorted(name for name, times in tensors.items() if times > 1)
    whole = _number(first, "split.tensors.count", tensors.total())
    if wrong or whole != tensors.total():
        what = f"; in doubt: {', '.join(wrong)}" if wrong else ""
        told = f"hold {tensors.total()} tensors, the first file says {whole}"
        raise CheckpointError(f"{first.path}: its {len(files)} files are not one model's: they {told}{what}")
    _refuse_types(files)
    return tuple(files)


def _refuse_types(files: Iterable[GGUFFile]) -> None:
    """Raise CheckpointError for tensors of types that have no format, and for coded tensors without rows."""
    others: dict[str, list[str]] = {}
    for file in files:
        for name, entry in file.entries.items():
            if entry.type not in PLAIN and (entry.type not in FORMATS or len(entry.shape) < 2):
                kind = entry.type if entry.type not in FORMATS else f"{entry.type} with one axis"
                others.setdefault(kind, []).append(f"{name} in {file.path}")
    if others:
        told = "; ".join(f"{len(names)} tensors of {kind}, e.g. {names[0]}" for kind, names in others.items())
        raise CheckpointError(f"GGUF: {told}; possible: {', '.join((*PLAIN, *FORMATS))}")


def _number(file: GGUFFile, key: str, default: int) -> int:
    value: Any = file.values.get(key, default)
    if not isinstance(value, int):
        raise CheckpointError(f"{file.path}: {key} is {value!r:.40}, not a number")
    return value
