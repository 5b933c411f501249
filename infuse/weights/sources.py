"""Find the files of a checkpoint: a folder in a usual layout, a list, a glob, or DeepSpeed's JSON description.

Only indexes and descriptions are read here. CheckpointError lists the names tried and all missing files. An index may
only name files inside its folder; paths in a description come from the user and may point anywhere.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from infuse.ground.errors import CheckpointError
from infuse.weights.gguf.parts import SUFFIX, all_parts, in_folder

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")
SAVED = "infuse.json"  # the index of our own shards
# DeepSpeed's file of one expert, of one layer or, in older checkpoints, of all layers.
_EXPERT_FILE = re.compile(r"((?:layer_\d+_)?expert_\d+)_mp_rank_\d+_model_states\.pt")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Files:
    """A checkpoint's files. Each of `groups` is one file, or one per rank, in order, with pieces of the same tensors.

    `version` is that of a Megatron checkpoint and determines how its q, k, v are packed. `where`: tensor → the file
    that an index names.
    """

    form: str
    groups: tuple[tuple[Path, ...], ...]
    version: float | None = None
    where: Mapping[str, Path] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Path]:
        return (path for group in self.groups for path in group)


class _Description(BaseModel):
    """The keys that we read from DeepSpeed's JSON."""

    checkpoints: Path | tuple[Path, ...] | dict[str, Path | tuple[Path, ...]]
    type: str | None = None
    version: float | None = None
    base_dir: Path | None = None
    parallelization: str | None = None
    tp_size: Annotated[int, Field(ge=1)] | None = None
    mp_size: Annotated[int, Field(ge=1)] | None = None


def find_files(source: Any, base_dir: str = "") -> Files:
    """Find the files of `source`: a path (folder, file, glob, description), a list of paths, or a dict (description).

    Relative paths are resolved against `base_dir`. Those inside a description are resolved against its own "base_dir",
    or else its folder.
    """
    try:
        files = _found(source, base_dir)
        missing = [str(path) for path in dict.fromkeys(files) if not os.path.isfile(path)]
    except (OSError, ValueError) as error:  # names that the OS rejects: too long, or with a zero byte
        raise CheckpointError(f"{source!s:.200}: cannot be looked up: {error}") from error
    if missing:
        raise CheckpointError(f"{files.form}: {len(missing)} files are missing: {', '.join(missing)}")
    return files


def _found(source: Any, base_dir: str) -> Files:
    base = Path(base_dir or ".")
    if isinstance(source, Mapping):
        return _described(source, base, "the description")
    if not isinstance(source, (str, os.PathLike)):
        return _listed([base / path for path in source], "a list")
    path = base / source
    if glob.has_magic(str(path)) and not path.exists():
        paths = sorted(Path(name) for name in glob.glob(str(path)))
        if not paths:
            raise CheckpointError(f"{path}: no file matches")
        return _listed(paths, "a glob")
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist; possible: a folder, a file, a glob, or a JSON description")
    if path.is_dir():
        return _folder(path)
    if path.suffix == ".json":
        return _described(read_json(path), Path(base_dir) if base_dir else path.parent, str(path))
    if path.suffix == SUFFIX:
        return _one_model(all_parts(path), str(path))
    return Files("a file", ((path,),))


def _one_model(paths: Sequence[Path], form: str) -> Files:
    """The parts of one model in GGUF."""
    return Files(form, tuple((path,) for path in paths))


def read_json(path: Path) -> Any:
    """Parse a JSON file; CheckpointError, with the path, if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: truncated or corrupt: not valid JSON: {error}") from error


def inside(folder: Path, name: str, index: Path) -> Path:
    """Resolve a file name from an index; CheckpointError if the name (not a symbolic link) leads out of the folder."""
    named = PurePath(name)
    if not named.parts or named.is_absolute() or ".." in named.parts:
        raise CheckpointError(f"{index}: names {name!r}; possible: files inside of {folder}")
    try:
        (folder / named).is_file()
    except (OSError, ValueError) as error:  # a name that the OS rejects
        raise CheckpointError(f"{index}: names {name!r:.60}, which cannot be looked up: {error!s:.60}") from error
    return folder / named


def _folder(path: Path) -> Files:
    for name in INDEXES:
        if (path / name).is_file():
            where = _weight_map(path / name)
            groups = tuple((file,) for file in sorted(set(where.values())))
            return Files(f"the shards of {path / name}", groups, where=where)
    for name in SINGLE:
        if (path / name).is_file():
            return Files("a folder", ((path / name,),))
    if (path / "latest").is_file():
        tag = (path / "latest").read_text(encoding="utf-8").strip()
        step = inside(path, tag, path / "latest")
        if not step.is_dir():
            raise CheckpointError(f"{path / 'latest'}: names {tag!r}, and {step} is no folder")
        path = step
    ranks = sorted(path.glob("mp_rank_*_model_states.pt")) or sorted(path.glob("mp_rank_*/model*.pt"))
    if ranks:
        return Files(f"the training checkpoint {path}", (tuple(ranks), *_expert_files(path)))
    files = sorted(file for suffix in _SUFFIXES[:2] for file in path.glob(f"*{suffix}"))
    if files:
        return _listed(files, f"the folder {path}")
    if parts := in_folder(path):
        return _one_model(parts, f"the folder {path}")
    patterns = ("latest", "mp_rank_*_model_states.pt", "*.safetensors", "*.bin", f"*{SUFFIX}")
    looked = ", ".join((*INDEXES, *SINGLE, *patterns, SAVED))
    raise CheckpointError(f"{path}: no checkpoint; looked for {looked}")


def _expert_files(folder: Path) -> Iterator[tuple[Path, ...]]:
    """Yield DeepSpeed's expert files, saved beside the ranks' files: for each expert, one file per rank in order."""
    by_expert: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*expert_*_mp_rank_*_model_states.pt")):
        if matched := _EXPERT_FILE.fullmatch(path.name):
            by_expert.setdefault(matched[1], []).append(path)
    return (tuple(paths) for paths in by_expert.values())


def _weight_map(path: Path) -> dict[str, Path]:
    """Read the weight map of a folder's index: tensor → file."""
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f'{path}: has no "weight_map"')
    wrong = [f"{name}: {file!r:.100}" for name, file in weight_map.items() if not isinstance(file, str)]
    if wrong:
        raise CheckpointError(f'{path}: "weight_map" names no files for {", ".join(wrong)}')
    return {name: inside(path.parent, file, path) for name, file in weight_map.items()}


def _listed(paths: Sequence[Path], form: str) -> Files:
    if paths and all(path.suffix == SUFFIX for path in paths):
        return _one_model(paths, form)
    wrong = [str(path) for path in paths if path.suffix not in _SUFFIXES]
    if wrong or not paths:
        names = ", ".join(wrong) or "nothing"
        raise CheckpointError(f"{form}: found {names}; possible: files of {', '.join(_SUFFIXES)}, or all of {SUFFIX}")
    return Files(form, tuple((path,) for path in paths))


def _described(content: Any, base: Path, name: str) -> Files:
    """Read DeepSpeed's JSON. A list holds whole tensors; type Megatron or parallelization "tp": one file per rank."""
    if not isinstance(content, Mapping) or not content.get("checkpoints"):
        raise CheckpointError(f'{name}: has no "checkpoints": a list of files, or a dict of lists')
    try:
        description = _Description.model_validate(dict(content))
    except ValidationError as error:
        lines = dict.fromkeys(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())
        raise CheckpointError(f"{name}: is no description of a checkpoint: {'; '.join(lines)}") from error
    files, kind = description.checkpoints, (description.type or "").lower()
    base = base / (description.base_dir or "")
    if isinstance(files, Path):
        if files.suffix == ".json":
            raise CheckpointError(f"{name}: names another description, {files}; give that one")
        return _found(str(base / files), "")
    ranked = kind == "megatron" or description.parallelization == "tp"
    parts = files if isinstance(files, dict) else {"tp" if ranked else "non_tp": files}
    groups: list[tuple[Path, ...]] = []
    for key, listed in parts.items():
        paths = [base / file for file in ([listed] if isinstance(listed, Path) else listed)]
        size = (description.tp_size or description.mp_size or len(paths) or 1) if key == "tp" else 1
        if len(paths) % size:
            what = f"{len(paths)} files under {key!r} for tp_size {size}"
            raise CheckpointError(f"{name}: {what}; possible: a multiple of it")
        groups += [tuple(paths[i : i + size]) for i in range(0, len(paths), size)]
    return Files(name, tuple(dict.fromkeys(groups)), description.version if kind == "megatron" else None)
