"""Expert matrices of our shards: memory-mapped, or read in their stored layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from infuse.weights.safetensors_file import SafetensorsFile


@dataclass(frozen=True)
class StoredMatrix:
    """CPU tensors of one matrix by leaf name, for a module on `device`.

    `layout`: the kernel's; None for plain rows. `first_use`: called before experts are used, if they are mapped.
    """

    tensors: Mapping[str, Tensor]
    layout: str | None
    device: torch.device = torch.device("cpu")
    first_use: FirstUse | None = None


@dataclass
class FirstUse:
    """Check mapped tensors, `names` in `file`, against their checksums, expert by expert before each is first used.

    Copying or pickling it checks all experts and gives None, because the tensors are copied into memory with it.
    """

    file: SafetensorsFile
    names: tuple[str, ...]
    count: int
    _unused: set[int] = field(default_factory=set)
    _ctime: int | None = None  # of the file when experts were last checked

    def __call__(self, chosen: Tensor | None = None) -> None:
        """Check the experts in `chosen`, int64 of any shape; None checks all.

        CheckpointError if bytes are not what was saved, or if the file was changed since it was opened.
        """
        ctime = self.file.check_unchanged()
        if ctime != self._ctime:
            self._unused, self._ctime = set(range(self.count)), ctime
        if self._unused:
            used = self._unused if chosen is None else self._unused.intersection(torch.unique(chosen).tolist())
            for expert in sorted(used):
                self._check(expert)

    def _check(self, expert: int) -> None:
        for name in self.names:
            stored = self.file.stored[name]
            step = stored.shape[0] // self.count * (stored.shape[1] * stored.dtype.itemsize)
            self.file.check(name, expert * step, (expert + 1) * step)
        self._unused.discard(expert)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        self()
        return type(None), ()
