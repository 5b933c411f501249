"""Read one GGUF file (version 2 or 3): key-values, the table of tensors, and the bytes of rows. Nothing is converted.

A header is read in whole and checked before any tensor: sizes, alignment, overlaps, and the file's length.

    magic "GGUF", version, number of tensors, number of key-values
    key-values: name, type, value            tensors: name, sizes (fastest first), type, offset
    padding to `general.alignment`, then the tensors' data, each aligned
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from infuse.ground import memory
from infuse.ground.errors import CheckpointError
from infuse.weights.lazy import Shape, Slices, Stored, of_all_axes

MAGIC, VERSIONS = b"GGUF", (2, 3)
PLAIN: Mapping[str, torch.dtype] = MappingProxyType({
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
})  # fmt: skip
# Types of tensors by their number in the file: name, values in a block, bytes of a block.
TYPES: Mapping[int, tuple[str, int, int]] = MappingProxyType({
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
})  # fmt: skip
# Types of values by their number: struct's letter. 8 is a string, 9 an array.
_VALUES: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
_STRING, _ARRAY = 8, 9
_MOST_AXES, _LARGEST_ALIGNMENT = 4, 1 << 20
_LEAST_KEY_BYTES, _LEAST_TENSOR_BYTES = 13, 24  # of one key-value and of one tensor's entry with an empty name
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """A tensor in the file: its shape (outputs first), the type of its blocks, and where its bytes are."""

    shape: Shape
    type: str
    block_values: int
    block_bytes: int
    start: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.block_values * self.block_bytes

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class GGUFFile:
    """One open file. `values`: its key-values; `entries`: all tensors; `stored`: those of plain numbers, for `read`.

    CheckpointError, with the path, for all that is malformed.
    """

    def __init__(self, path: Path):
        self.path, self.bytes_read = path, 0
        try:
            # Open as long as this object lives.
            self._file: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115
            self.values, self.entries = _Header(path, self._file).read()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        plain = {name: entry for name, entry in self.entries.items() if entry.type in PLAIN}
        self.stored = {name: Stored(entry.shape, PLAIN[entry.type]) for name, entry in plain.items()}

    def read(self, name: str, part: Slices = ()) -> Tensor:
        """Read a tensor of plain numbers, or `part` of it. What is outside of the part's first axis is not read."""
        stored, entry = self.stored[name], self.entries[name]
        first, *others = of_all_axes(part, len(stored.shape))
        start, stop, _ = first.indices(stored.shape[0])
        bytes_of_one = entry.nbytes // stored.shape[0]
        raw = self._bytes(name, entry.start + start * bytes_of_one, max(stop - start, 0) * bytes_of_one)
        values = raw.view(stored.dtype).view(max(stop - start, 0), *stored.shape[1:])
        inner = (slice(None), *others)
        return values[inner]

    def blocks(self, name: str, start: int, stop: int) -> Tensor:
        """Read the rows from `start` to `stop` of a tensor, with all outer axes flattened, as bytes [rows, bytes]."""
        entry = self.entries[name]
        raw = self._bytes(name, entry.start + start * entry.row_bytes, (stop - start) * entry.row_bytes)
        return raw.view(stop - start, entry.row_bytes)

    def _bytes(self, name: str, place: int, count: int) -> Tensor:
        tensor = memory.empty((count,), torch.uint8) if count > _CHUNK_BYTES else torch.empty(count, dtype=torch.uint8)
        view, done = memoryview(tensor.numpy()), 0  # type: ignore[arg-type]
        while done < count:  # one read returns at most 2 GiB
            got = os.preadv(self._file.fileno(), [view[done:]], place + done)
            if not got:
                raise CheckpointError(f"{self.path}: ended while {name} was read")
            done += got
        self.bytes_read += count
        return tensor


class _Header:
    """Reads a header from its first byte to its last one. No length in it is believed before it is checked."""

    def __init__(self, path: Path, file: BinaryIO):
        self._path, self._file = path, file
        self._size = os.fstat(file.fileno()).st_size
        self._chunk, self._at, self._next = b"", 0, 0  # bytes read ahead, the place in them, the next byte of the file
        self._what = "its first bytes"  # what is being read, for errors

    def read(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        """Return the key-values and the tensors."""
        tensors, keys = self._counts()
        values: dict[str, Any] = {}
        for number in range(keys):
            key = self._new_name(f"key {number}", values)
            self._what = f"the value of {key}"
            values[key] = self._value(self._number("I"))
        alignment = values.get("general.alignment", 32)
        if not _is_alignment(alignment):
            raise self._fault(f"general.alignment is {alignment!r:.40}; possible: a power of two")
        table = self._table(tensors)
        data = -(-self._position // alignment) * alignment
        return values, self._placed(table, data, alignment)

    def _counts(self) -> tuple[int, int]:
        magic = bytes(self._take(4))
        if magic != MAGIC:
            raise self._fault(f"begins with {magic!r}, not {MAGIC!r}; it is no GGUF file")
        version = self._number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS
            what = "is written for big-endian machines" if swapped else f"has version {version}"
            raise self._fault(f"{what}; possible: versions {', '.join(map(str, VERSIONS))}, little-endian")
        tensors, keys = self._number("Q"), self._number("Q")
        least = tensors * _LEAST_TENSOR_BYTES + keys * _LEAST_KEY_BYTES
        if least > self._size - self._position:
            raise self._fault(f"claims {tensors} tensors and {keys} keys, more than its {self._size} bytes can hold")
        return tensors, keys

    def _table(self, count: int) -> dict[str, tuple[list[int], int, int]]:
        """Read the entries of tensors: sizes, fastest first, type and offset by name."""
        table: dict[str, tuple[list[int], int, int]] = {}
        for number in range(count):
            name = self._new_name(f"the entry of tensor {number}", table)
            self._what = f"the entry of {name}"
            axes = self._number("I")
            if axes > _MOST_AXES:
                raise self._fault(f"{name} has {axes} axes; possible: up to {_MOST_AXES}")
            sizes = [self._number("Q") for _ in range(axes)]
            table[name] = sizes, self._number("I"), self._number("Q")
        return table

    def _placed(self, table: Mapping[str, tuple[list[int], int, int]], data: int, alignment: int) -> dict[str, Entry]:
        """Check types, sizes and offsets of all tensors; all that are wrong are in one error."""
        entries: dict[str, Entry] = {}
        faults: list[str] = []
        for name, (sizes, number, offset) in table.items():
            if number not in TYPES:
                faults.append(f"{name} is of the unknown type {number}")
                continue
            type, values, size = TYPES[number]
            inner, rows = (sizes or [1])[0], math.prod(sizes[1:])
            nbytes = inner // values * size * rows
            if 0 in sizes:
                faults.append(f"{name} has no values: {sizes}")
            elif inner % values:
                faults.append(f"{name} has rows of {inner} values, and {type} blocks of {values}")
            elif offset % alignment:
                faults.append(f"{name} begins at {offset}, which is not aligned to {alignment}")
            elif data + offset + nbytes > self._size:
                end = data + offset + nbytes
                faults.append(f"{name} ends at byte {end}, and the file has {self._size}")
            else:
                entries[name] = Entry(tuple(reversed(sizes)) or (1,), type, values, size, data + offset)
        faults += _overlaps(entries)
        if faults:
            shown = "; ".join(faults[:20]) + (f"; and {len(faults) - 20} more" if len(faults) > 20 else "")
            raise CheckpointError(f"{self._path}: truncated or corrupt: {shown}")
        return entries

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(self._letter(kind))
        of, count = self._number("I"), self._number("Q")
        if of == _STRING:
            return self._strings(count)
        letter = self._letter(of)
        raw = self._take(count * struct.calcsize(f"<{letter}"))
        return list(struct.unpack(f"<{count}{letter}", raw))

    def _letter(self, kind: int) -> str:
        if kind not in _VALUES:
            raise self._fault(f"{self._what} is of the unknown type {kind}; possible: 0 to 12, no arrays of arrays")
        return _VALUES[kind]

    def _name(self) -> str:
        """Read the name of a key or a tensor."""
        raw = self._take(self._number("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._fault(f"{self._what}: its name is not UTF-8: {raw[:40]!r}") from error

    def _new_name(self, what: str, known: Container[str]) -> str:
        """Read the name of `what`, which must not be among those `known`."""
        self._what = what
        name = self._name()
        if name in known:
            raise self._fault(f"{name} appears twice")
        return name

    def _string(self) -> str:
        """Read a value. A token may hold bytes that are no text by themselves."""
        return self._take(self._number("Q")).decode(errors="replace")

    def _strings(self, count: int) -> list[str]:
        """Read an array; a vocabulary has hundreds of thousands, so those that are in memory are taken at once."""
        self._room(count * 8)
        values: list[str] = []
        for _ in range(count):
            start = self._at + 8
            stop = start + int.from_bytes(self._chunk[self._at : start], "little")
            if start <= stop <= len(self._chunk):
                self._at = stop
                values.append(self._chunk[start:stop].decode(errors="replace"))
            else:
                values.append(self._string())
        return values

    def _number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]

    @property
    def _position(self) -> int:
        return self._next - len(self._chunk) + self._at

    def _room(self, count: int) -> None:
        if count > self._size - self._position:
            what = f"{count} bytes from byte {self._position} on, and the file has {self._size}"
            raise self._fault(f"{self._what} claims {what}")

    def _take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        stop = self._at + count
        if stop > len(self._chunk):
            self._room(count)
            pieces = [self._chunk[self._at :]]
            missing = count - len(pieces[0])
            while missing > 0:
                piece = os.pread(self._file.fileno(), max(missing, _CHUNK_BYTES), self._next)
                if not piece:
                    raise self._fault(f"ended while {self._what} was read")
                pieces.append(piece)
                self._next += len(piece)
                missing -= len(piece)
            self._chunk, self._at, stop = b"".join(pieces), 0, count
        taken = self._chunk[self._at : stop]
        self._at = stop
        return taken

    def _fault(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: truncated, corrupt, or not a GGUF file that can be read: {what}")


def _is_alignment(value: Any) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number and 0 < value <= _LARGEST_ALIGNMENT and value & (value - 1) == 0


def _overlaps(entries: Mapping[str, Entry]) -> list[str]:
    """Name the tensors whose bytes overlap."""
    placed = sorted((entry.start, entry.start + entry.nbytes, name) for name, entry in entries.items())
    pairs = zip(placed, placed[1:], strict=False)
    return [f"{after} overlaps {before}" for (_, stop, before), (start, _, after) in pairs if start < stop]
