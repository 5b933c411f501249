"""Which files a checkpoint is: a folder in one of the usual forms, a list, a glob, or DeepSpeed's JSON description.

Nothing is read here but indexes and descriptions. CheckpointError names what was looked for and all that is missing.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infuse.errors import CheckpointError

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")
SAVED = "infuse.json"  # the index of our own shards
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Files:
    """`groups`: each is one file, or the files of several ranks, in their order, that hold the pieces of the same tensors.

    `version` is that of a Megatron checkpoint, by which its packed q, k, v lie.
    """

    form: str
    groups: tuple[tuple[Path, ...], ...]
    version: float | None = None

    def __iter__(self) -> Iterator[Path]:
        return (path for group in self.groups for path in group)


def find_files(source: Any, base_dir: str = "") -> Files:
    """The files of `source`: a path (folder, file, glob, description), a list of paths, or a description as a dict.

    Relative paths begin at `base_dir`; those inside a description at its own "base_dir" or, without one, beside it.
    """
    base = Path(base_dir or ".")
    if isinstance(source, Mapping):
        return _present(_described(source, base, "the description"))
    if not isinstance(source, (str, os.PathLike)):
        return _present(_listed([base / path for path in source], "a list"))
    path = base / source
    if glob.has_magic(str(path)) and not path.exists():
        found = sorted(Path(name) for name in glob.glob(str(path)))
        if not found:
            raise CheckpointError(f"{path}: no file matches")
        return _present(_listed(found, "a glob"))
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist; possible: a folder, a file, a glob, or a JSON description")
    if path.is_dir():
        return _present(_folder(path))
    if path.suffix == ".json":
        return _present(_described(read_json(path), Path(base_dir) if base_dir else path.parent, str(path)))
    return Files("a file", ((path,),))


def read_json(path: Path) -> Any:
    """What a JSON file holds; CheckpointError with its path."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: truncated or corrupt: not valid JSON: {error}") from error


def _present(files: Files) -> Files:
    missing = [str(path) for path in dict.fromkeys(files) if not path.is_file()]
    if missing:
        raise CheckpointError(f"{files.form}: {len(missing)} files are missing: {', '.join(missing)}")
    return files


def _folder(path: Path) -> Files:
    for name in INDEXES:
        if (path / name).is_file():
            index = read_json(path / name)
            if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
                raise CheckpointError(f'{path / name}: has no "weight_map"')
            return Files(f"the shards of {path / name}", tuple((path / file,) for file in sorted(set(index["weight_map"].values()))))
    for name in SINGLE:
        if (path / name).is_file():
            return Files("a folder", ((path / name,),))
    if (path / "latest").is_file():
        tag = (path / "latest").read_text(encoding="utf-8").strip()
        if not (path / tag).is_dir():
            raise CheckpointError(f"{path / 'latest'}: names {tag!r}, and {path / tag} is no folder")
        path = path / tag
    ranks = sorted(path.glob("mp_rank_*_model_states.pt")) or sorted(path.glob("mp_rank_*/model*.pt"))
    if ranks:
        return Files(f"the training checkpoint {path}", (tuple(ranks),))
    found = sorted(file for suffix in _SUFFIXES[:2] for file in path.glob(f"*{suffix}"))
    if found:
        return _listed(found, f"the folder {path}")
    looked = ", ".join((*INDEXES, *SINGLE, "latest", "mp_rank_*_model_states.pt", "*.safetensors", "*.bin", SAVED))
    raise CheckpointError(f"{path}: no checkpoint; looked for {looked}")


def _listed(paths: Sequence[Path], form: str) -> Files:
    wrong = [str(path) for path in paths if path.suffix not in _SUFFIXES]
    if wrong or not paths:
        raise CheckpointError(f"{form}: found {', '.join(wrong) or 'nothing'}; possible: files of {', '.join(_SUFFIXES)}")
    return Files(form, tuple((path,) for path in paths))


def _described(description: Any, base: Path, name: str) -> Files:
    """DeepSpeed's JSON. A list holds whole tensors or, of type Megatron or with parallelization "tp", one file for each rank."""
    files = description.get("checkpoints") if isinstance(description, Mapping) else None
    if not files or not isinstance(files, (list, tuple, dict, str)):
        raise CheckpointError(f'{name}: has no "checkpoints": a list of files, or a dict of lists')
    base = base / str(description.get("base_dir") or "")
    kind, version = str(description.get("type", "")), description.get("version")
    if isinstance(files, str):
        return find_files(str(base / files))
    ranked = kind.lower() == "megatron" or description.get("parallelization") == "tp"
    parts: Mapping[str, Any] = files if isinstance(files, dict) else {"tp" if ranked else "non_tp": files}
    groups: list[tuple[Path, ...]] = []
    for key, listed in parts.items():
        paths = [base / file for file in ([listed] if isinstance(listed, str) else listed)]
        size = int(description.get("tp_size") or description.get("mp_size") or len(paths)) if key == "tp" else 1
        if len(paths) % size:
            raise CheckpointError(f"{name}: {len(paths)} files under {key!r} for tp_size {size}; possible: a multiple of it")
        groups += [tuple(paths[i : i + size]) for i in range(0, len(paths), size)]
    return Files(name, tuple(dict.fromkeys(groups)), float(version) if kind.lower() == "megatron" and version is not None else None)
