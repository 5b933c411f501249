"""A weight's way from file to kernel crosses at most 8 files of the package, which docs/map.md names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import Tensor

import infuse
import infuse.apply.build
from infuse.quant.format import QuantizedWeight
from tests.models.families import BY_NAME
from tests.support.checkpoints import on_meta

HOUSE = Path(infuse.__file__).parent
MOST = 8
LEAST_VALUES = 200  # of a matrix of the tiny model; norms and biases have fewer
# They see a tensor and not its values: one allocates it, the other looks at the name of an attribute that is set.
NO_VALUES = {"ground/memory.py", "layers/gradient.py"}


def has_values(value: Any) -> bool:
    """Whether a value is a weight, or holds one."""
    if isinstance(value, Tensor):
        return value.numel() > LEAST_VALUES and not value.is_meta
    if isinstance(value, QuantizedWeight):
        return any(has_values(tensor) for tensor in value.tensors.values())
    if isinstance(value, memoryview):
        return len(value) > LEAST_VALUES
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, (list, tuple, dict)) and any(has_values(item) for item in items)


def files_crossed(load: Callable[[], Any]) -> set[str]:
    """The files with functions that get or return a weight while modules are filled."""
    files: set[str] = set()

    def look(frame: FrameType, event: str, result: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(HOUSE):
            return
        count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
        arguments = [frame.f_locals.get(name) for name in frame.f_code.co_varnames[:count]]
        if has_values(arguments if event == "call" else result):
            files.add(path.relative_to(HOUSE).as_posix())

    def traced(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            sys.setprofile(look)
            try:
                return function(*args)
            finally:
                sys.setprofile(None)

        return run

    with pytest.MonkeyPatch.context() as monkey:
        for name in ("fill_module", "fill_saved"):
            monkey.setattr(infuse.apply.build, name, traced(getattr(infuse.apply.build, name)))
        load()
    return files - NO_VALUES


def test_a_weight_crosses_few_files(tmp_path: Path) -> None:
    BY_NAME["llama"].make().save_pretrained(tmp_path / "original")

    def load(folder: str, **keys: Any) -> None:
        infuse.init_inference(on_meta("llama"), checkpoint=str(tmp_path / folder), progress=False, **keys)

    keys: dict[str, Any] = {"dtype": "bf16", "quant": "int8:16", "save_mp_checkpoint_path": str(tmp_path / "shards")}
    original = files_crossed(lambda: load("original", **keys))
    shards = files_crossed(lambda: load("shards"))
    assert {"weights/safetensors_file.py", "weights/fill.py", "layers/linear.py"} <= original & shards
    assert len(original) <= MOST and len(shards) <= MOST, (original, shards)
    told = " ".join((HOUSE.parent / "docs" / "map.md").read_text(encoding="utf-8").split())
    way = told[told.index("A weight's way") :].partition(". ")[0]
    assert not [file for file in original | shards if f"`{file.removesuffix('.py')}`" not in way]
