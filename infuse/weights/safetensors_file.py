"""One safetensors file: an eight-byte length, a JSON header with the place of each tensor, then their bytes.

Read with plain reads into the tensor's own memory: no more bytes than were asked for, and no mapped pages that count as ours.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from infuse import pages
from infuse.errors import CheckpointError
from infuse.weights.reader import Part, Stored

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
})
_THREAD_BYTES = 1 << 22  # that a thread is worth starting for
LONGEST_HEADER_BYTES = 100_000_000  # the format's own limit


class SafetensorsFile:
    """`stored` tells what is inside, `read` gets it. CheckpointError, with the path, for whatever is not such a file."""

    def __init__(self, path: Path):
        self.path, self.bytes_read = path, 0
        try:
            self._file: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115  # for as long as this object lives
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        header_bytes = int.from_bytes(self._file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, LONGEST_HEADER_BYTES):
            raise CheckpointError(f"{path}: not a whole safetensors file: its header would have {header_bytes} bytes, the file has {size}")
        try:
            header: dict[str, Any] = json.loads(self._file.read(header_bytes))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.stored = {name: Stored(tuple(entry["shape"]), DTYPES[entry["dtype"]]) for name, entry in header.items()}
            places = {name: tuple(entry["data_offsets"]) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: its safetensors header is corrupt: {type(error).__name__}: {error}") from error
        for name, (start, stop) in places.items():
            stored = self.stored[name]
            if stop - start != math.prod(stored.shape) * stored.dtype.itemsize or start < 0:
                raise CheckpointError(f"{path}: its safetensors header is corrupt: {name} {stored.shape} in {stop - start} bytes")
            if 8 + header_bytes + stop > size:
                raise CheckpointError(f"{path}: truncated: {name} ends at byte {8 + header_bytes + stop}, the file has {size}")
        self._starts = {name: 8 + header_bytes + start for name, (start, _) in places.items()}

    def read(self, name: str, part: Part = ()) -> Tensor:
        """The tensor or that part of it, in memory of its own; rows that are not wanted are not read, nor are columns.

        What is asked for whole is there to stay, and lies on large pages.
        """
        stored, start = self.stored[name], self._starts[name]
        bounds = [(part[axis] if axis < len(part) else slice(None)).indices(size)[:2] for axis, size in enumerate(stored.shape)]
        tensor = (torch.empty if part else pages.empty)([stop - first for first, stop in bounds], dtype=stored.dtype)
        if tensor.numel() == 0:
            return tensor
        # Runs of neighbouring bytes: over the last axis that is cut, once for each index of the axes before it.
        cut = max((axis for axis, bound in enumerate(bounds) if bound != (0, stored.shape[axis])), default=0)
        inner = math.prod(stored.shape[cut + 1 :]) * stored.dtype.itemsize
        strides = [math.prod(stored.shape[axis + 1 : cut + 1]) * inner for axis in range(cut)]
        first, stop = bounds[cut] if bounds else (0, 1)
        memory = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        length = (stop - first) * inner
        for run, index in enumerate(itertools.product(*(range(*bound) for bound in bounds[:cut]))):
            place = start + first * inner + sum(i * stride for i, stride in zip(index, strides, strict=True))
            self._fill(memory[run * length : (run + 1) * length], place, name)
        return tensor

    def _fill(self, memory: memoryview, place: int, name: str) -> None:
        """Read what lies at `place`, by all threads where it is much: one alone has half of a memory's bandwidth."""
        threads = min(torch.get_num_threads(), len(memory) // _THREAD_BYTES)
        if threads < 2:
            self._read(memory, place, name)
        else:
            step = -(-len(memory) // threads)
            with ThreadPoolExecutor(threads) as pool:  # which waits for all of them, whatever one raises
                parts = [pool.submit(self._read, memory[at : at + step], place + at, name) for at in range(0, len(memory), step)]
            for part in parts:
                part.result()
        self.bytes_read += len(memory)

    def _read(self, memory: memoryview, place: int, name: str) -> None:
        done = 0
        while done < len(memory):  # one read gives at most 2 GiB
            got = os.preadv(self._file.fileno(), [memory[done:]], place + done)
            if not got:
                raise CheckpointError(f"{self.path}: ended while {name} was read")
            done += got
