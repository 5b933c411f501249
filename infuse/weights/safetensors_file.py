"""Read one safetensors file: an 8-byte header length, a JSON header with each tensor's offsets, then the data.

The safetensors library validates the header. Tensors are read with plain reads into their own memory. Only the
requested bytes are read. Only `mapped` maps the file; its pages count as memory of the process once they are used.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infuse.ground import memory
from infuse.ground.checksum import crc32
from infuse.ground.errors import CheckpointError
from infuse.weights.lazy import Slices, Stored

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
})  # fmt: skip
BLOCK_BYTES = 1 << 22  # unit that one thread reads and checks; large enough to be worth a thread
Checksums = Mapping[str, tuple[int, ...]]  # tensor → the CRC-32 of each BLOCK_BYTES of it
_T = TypeVar("_T")
# MAP_NORESERVE: without it, Linux refuses writable maps of files larger than memory. Python 3.13 has the constant.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0


def bytes_of(tensor: Tensor) -> memoryview:
    """View the bytes of a contiguous CPU tensor without copying."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def block_checksums(memory: memoryview) -> tuple[int, ...]:
    """Compute the CRC-32 of each BLOCK_BYTES of `memory`."""
    return tuple(_by_blocks(lambda at, stop: crc32(memory[at:stop]), len(memory)))


def _by_blocks(work: Callable[[int, int], _T], size: int) -> list[_T]:
    """Call work(first, last) for each block of `size` bytes, on all threads: one gets half of the memory bandwidth."""
    limits = [(at, min(at + BLOCK_BYTES, size)) for at in range(0, size, BLOCK_BYTES)]
    threads = min(torch.get_num_threads(), len(limits))
    if threads < 2:
        return [work(*limit) for limit in limits]
    with ThreadPoolExecutor(threads) as pool:  # waits for all threads even if one raises
        return list(pool.map(lambda limit: work(*limit), limits))


class SafetensorsFile:
    """One open file: `stored` lists its tensors, `read` reads them. CheckpointError, with the path, if invalid.

    With `checksums`, the file must hold exactly those tensors; each block is checked when it is first read.
    """

    def __init__(self, path: Path, checksums: Checksums | None = None):
        self.path, self.bytes_read = path, 0
        self._checksums, self._checked = checksums or {}, set[tuple[str, int]]()
        self._map: mmap.mmap | None = None
        entries, data = self._header()
        self.metadata: dict[str, str] = entries.pop("__metadata__", None) or {}
        unknown = sorted({entry["dtype"] for entry in entries.values()} - DTYPES.keys())
        if unknown:
            raise CheckpointError(f"{path}: holds tensors of {', '.join(unknown)}; possible: {', '.join(DTYPES)}")
        self.stored = {name: Stored(tuple(entry["shape"]), DTYPES[entry["dtype"]]) for name, entry in entries.items()}
        self._starts = {name: data + entry["data_offsets"][0] for name, entry in entries.items()}
        if checksums is not None:
            self._compare_names(checksums)

    def _header(self) -> tuple[dict[str, Any], int]:
        """Return the header's entries, validated by the library, and the offset of the data."""
        try:
            with safe_open(self.path, "pt"):  # checks that offsets tile the data, and shapes, dtypes and sizes agree
                pass
            # Open as long as this object lives.
            self._file: BinaryIO = open(self.path, "rb", buffering=0)  # noqa: SIM115
            status = os.fstat(self._file.fileno())
            self._opened, self._ctime = (status.st_size, status.st_mtime_ns), status.st_ctime_ns
            header_bytes = int.from_bytes(self._file.read(8), "little")
            return json.loads(self._file.read(header_bytes), object_pairs_hook=_unique), 8 + header_bytes
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"{self.path}: truncated, corrupt, or not a safetensors file: {error}") from error

    def _compare_names(self, checksums: Checksums) -> None:
        counts = {name: -(-self._nbytes(name) // BLOCK_BYTES) for name in self.stored}
        saved = {name: len(blocks) for name, blocks in checksums.items()}
        if counts != saved:
            differ = sorted({name for name, _ in counts.items() ^ saved.items()})
            raise CheckpointError(f"{self.path}: is not the file that was saved: it differs in {', '.join(differ)}")

    def _nbytes(self, name: str) -> int:
        return math.prod(self.stored[name].shape) * self.stored[name].dtype.itemsize

    def read(self, name: str, part: Slices = ()) -> Tensor:
        """Read the tensor, or `part` of it, into its own memory; other rows and columns are not read.

        A whole tensor is usually kept, so it is allocated on huge pages.
        """
        stored = self.stored[name]
        slices = (*part, *(slice(None) for _ in range(len(stored.shape) - len(part))))
        bounds = [along.indices(size)[:2] for along, size in zip(slices, stored.shape, strict=True)]
        tensor = (torch.empty if part else memory.empty)([stop - first for first, stop in bounds], dtype=stored.dtype)
        if tensor.numel() == 0:
            return tensor
        buffer = bytes_of(tensor)
        if len(buffer) == self._nbytes(name):
            _by_blocks(lambda at, stop: self._fill_block(buffer[at:stop], name, at), len(buffer))
        else:
            self._read_part(buffer, name, bounds)
        self.bytes_read += len(buffer)
        return tensor

    def mapped(self, name: str) -> Tensor | None:
        """Memory-map the tensor without checking it; its pages are read on first use.

        Writes stay private to this process (copy-on-write). None if the tensor is not aligned to its dtype in the file.
        """
        self.check_unchanged()
        stored, flags = self.stored[name], mmap.MAP_PRIVATE | _NORESERVE
        if self._starts[name] % stored.dtype.itemsize:
            return None
        if self._map is None:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            self._map = mmap.mmap(self._file.fileno(), self._opened[0], flags=flags, prot=protection)
        count = self._nbytes(name)
        tensor = torch.frombuffer(self._map, dtype=torch.uint8, count=count, offset=self._starts[name])
        return tensor.view(stored.dtype).view(stored.shape)

    def check_unchanged(self) -> int:
        """Raise CheckpointError if the file was written to since it was opened. A deleted file stays readable.

        Return its ctime. If the ctime changed, all bytes must be checked again: the file may have been renamed or
        deleted, or written with its old mtime restored.
        """
        status = os.fstat(self._file.fileno())
        if status.st_ctime_ns != self._ctime:
            self._ctime = status.st_ctime_ns
            self._checked.clear()
        if (status.st_size, status.st_mtime_ns) != self._opened:
            raise CheckpointError(
                f"{self.path}: was changed while its tensors were mapped, which no longer are what was saved; "
                "load the model again, from shards that nothing writes to"
            )
        return status.st_ctime_ns

    def _read_part(self, memory: memoryview, name: str, bounds: Sequence[tuple[int, int]]) -> None:
        """Read contiguous runs of bytes along the last cut axis, one for each index of the axes before it."""
        shape, itemsize = self.stored[name].shape, self.stored[name].dtype.itemsize
        cut = max(axis for axis, bound in enumerate(bounds) if bound != (0, shape[axis]))
        inner = math.prod(shape[cut + 1 :]) * itemsize
        strides = [math.prod(shape[axis + 1 : cut + 1]) * inner for axis in range(cut)]
        first, stop = bounds[cut]
        length = (stop - first) * inner
        places = [
            first * inner + sum(i * stride for i, stride in zip(index, strides, strict=True))
            for index in itertools.product(*(range(*bound) for bound in bounds[:cut]))
        ]
        if len(places) > 1:
            self.check(name, places[0], places[-1] + length)
        for run, place in enumerate(places):
            self._fill_run(memory[run * length : (run + 1) * length], name, place)

    def _fill_run(self, memory: memoryview, name: str, at: int) -> None:
        """Fill `memory` with the bytes of a tensor from `at` on. Blocks that are read whole are read once."""
        offset, nbytes = at % BLOCK_BYTES, self._nbytes(name)

        def fill(first: int, stop: int) -> None:
            part, start = memory[max(first - offset, 0) : stop - offset], at + max(first - offset, 0)
            if start % BLOCK_BYTES == 0 and len(part) == min(BLOCK_BYTES, nbytes - start):
                return self._fill_block(part, name, start)
            self.check(name, start, start + len(part))
            return self._fill(part, name, start)

        _by_blocks(fill, offset + len(memory))

    def check(self, name: str, start: int, stop: int) -> None:
        """Check the blocks that contain these bytes of a tensor, unless they were already checked."""
        if name not in self._checksums:
            return
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if (name, block) not in self._checked:
                at = block * BLOCK_BYTES
                memory = memoryview(bytearray(min(BLOCK_BYTES, self._nbytes(name) - at)))
                self._fill_block(memory, name, at)

    def _fill_block(self, memory: memoryview, name: str, at: int) -> None:
        """Fill `memory` with the block of a tensor that starts at byte `at`, and compare any expected checksum."""
        self._fill(memory, name, at)
        if name not in self._checksums:
            return
        block = at // BLOCK_BYTES
        if crc32(memory) != self._checksums[name][block]:
            raise CheckpointError(
                f"{self.path}: {name} is not what was saved: the checksum of its bytes from {at} on differs; "
                "copy the file again, or shard the model again"
            )
        self._checked.add((name, block))

    def _fill(self, memory: memoryview, name: str, at: int) -> None:
        done, place = 0, self._starts[name] + at
        while done < len(memory):  # one read returns at most 2 GiB
            got = os.preadv(self._file.fileno(), [memory[done:]], place + done)
            if not got:
                raise CheckpointError(f"{self.path}: ended while {name} was read")
            done += got


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"the header names {', '.join(twice)} more than once")
    return entries
