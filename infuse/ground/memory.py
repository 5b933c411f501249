"""Allocate tensors on 2 MiB pages; lay out convolutions for their kernels.

Every token reads all weights. With 4 KiB pages, address translation costs a virtual machine a fifth of its read
bandwidth (27 instead of 34 GB/s). Linux provides large pages if asked before the memory is first touched, and since 6.1
also afterwards, by a copy.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

PAGE_BYTES = 1 << 21
LEAST_BYTES = 2 * PAGE_BYTES  # smaller tensors are on ordinary pages, but those of `lasting`, until `collapse`
_LEAST_SMALL_BYTES = 1 << 18
_SLAB_BYTES = 1 << 26  # of address space: only pages with tensors take memory
_LINE_BYTES = 64
_MADV_COLLAPSE = 25  # of Linux 6.1
_TOUCHED_BYTES = 1 << 15  # of each page; PyTorch gives one thread this many
_SPARE = 4  # a buffer may be this many times as large as the tensor that takes it
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@cache
def given() -> bool:
    """Whether this system provides large pages on request."""
    return hasattr(mmap, "MADV_HUGEPAGE") and _SETTING.exists() and "[never]" not in _SETTING.read_text()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised tensor, on large pages if possible.

    One thread touches each page first; filling the tensor in small parts would make all threads clear the same page.
    """
    made = torch.empty(shape, dtype=dtype, device=device)
    if _pays(made, dtype):
        first = -(-made.data_ptr() // PAGE_BYTES) * PAGE_BYTES
        last = (made.data_ptr() + made.nbytes) // PAGE_BYTES * PAGE_BYTES
        # Only hints: if the kernel refuses them, the pages stay ordinary.
        advise, asked = ctypes.CDLL(None).madvise, (ctypes.c_void_p(first), ctypes.c_size_t(last - first))
        advise(*asked, mmap.MADV_HUGEPAGE)
        inside = made.view(-1).view(torch.uint8)[first - made.data_ptr() : last - made.data_ptr()]
        inside.view(-1, PAGE_BYTES)[:, :_TOUCHED_BYTES].zero_()
        advise(*asked, _MADV_COLLAPSE)  # memory that the process has used before was touched already
    return made


class _Slab:
    """Address space for tensors side by side, whose pages take memory once they are touched. Its tensors hold it."""

    present: ClassVar[_Slab | None] = None
    lock: ClassVar = threading.Lock()

    def __init__(self, room: mmap.mmap):
        self._room = weakref.ref(room)
        self._next = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % PAGE_BYTES  # the first free byte
        self._origin, self._stop = self._next, self._next + _SLAB_BYTES
        with suppress(OSError):  # only a hint, as above
            room.madvise(mmap.MADV_HUGEPAGE, self._origin, _SLAB_BYTES)

    @classmethod
    def taken(cls, count: int) -> Tensor:
        """The next `count` bytes: of a new slab where they do not fit the present one, or its last tensor is gone."""
        with cls.lock:
            room = None if cls.present is None else cls.present._room()
            if cls.present is None or room is None or cls.present._next + count > cls.present._stop:
                room = mmap.mmap(-1, _SLAB_BYTES + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                cls.present = cls(room)
            slab, first = cls.present, cls.present._next
            slab._next = first + -(-count // _LINE_BYTES) * _LINE_BYTES
        for page in range(first + -(first - slab._origin) % PAGE_BYTES, first + count, PAGE_BYTES):
            room[page] = 0  # the first touch of those that begin here
        # The tensor's storage is this part of the slab alone, so that it is saved alone.
        return torch.frombuffer(room, dtype=torch.uint8, count=count, offset=first)


def lasting(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """As `empty`, for a tensor that stays as long as its model: those of 0.25 to 4 MiB share large pages.

    The memory of one is free once all tensors of its slab, of 64 MiB, are gone.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or not _LEAST_SMALL_BYTES <= nbytes < LEAST_BYTES or not given():
        return empty(shape, dtype, device)
    return _Slab.taken(nbytes).view(dtype).view(tuple(shape))


class Scratch:
    """Memory for temporary tensors. It is taken again once no tensor uses it: new pages take longer than their values.

    `clear` gives unused memory back to the system.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._cleared = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """An uninitialised tensor; on devices other than the CPU as `torch.empty` makes it."""
        nbytes = math.prod(shape) * dtype.itemsize
        if torch.device(device).type != "cpu" or nbytes < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        fitting = [buffer for buffer in self._free if nbytes <= buffer.nbytes <= _SPARE * nbytes]
        buffer = min(fitting, key=lambda buffer: buffer.nbytes, default=None)
        if buffer is None:
            buffer = empty((nbytes,), torch.uint8)
        else:
            self._free = [other for other in self._free if other is not buffer]
        # The storage of the tensor and of all its views holds this array, which dies with the last of them.
        array = buffer.numpy()[:nbytes]
        weakref.finalize(array, self._take_back, buffer, self._cleared).atexit = False
        return torch.from_numpy(array).view(dtype).view(tuple(shape))

    def clear(self) -> None:
        """Keep no memory of the tensors made so far."""
        self._free.clear()
        self._cleared += 1

    def _take_back(self, buffer: Tensor, cleared: int) -> None:
        if cleared == self._cleared:
            self._free.append(buffer)


def copied(source: Tensor, dtype: torch.dtype) -> Tensor:
    """`source` in `dtype`: a contiguous copy on large pages if possible and large enough, else source.to(dtype)."""
    return empty(source.shape, dtype).copy_(source) if _pays(source, dtype) else source.to(dtype)


def collapse(tensors: Iterable[Tensor]) -> None:
    """Move tensors of 0.25 to 4 MiB from ordinary pages to large ones, which neighbours in memory share.

    Call it after all tensors are allocated. Those of `lasting` are there already: to move them took a tenth of loading.
    A product with 0.8 MB in int4 then takes 26 instead of 31 us.
    """
    if not given():
        return
    pages: set[int] = set()
    for tensor in tensors:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu
        if plain and _LEAST_SMALL_BYTES <= tensor.nbytes < LEAST_BYTES:
            first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes - 1
            pages.update(range(first // PAGE_BYTES, last // PAGE_BYTES + 1))
    advise, ordered = ctypes.CDLL(None).madvise, sorted(pages)
    # One call for each run of pages. The kernel skips pages that it cannot move or that are not the process's own.
    ends = [i for i, page in enumerate(ordered, 1) if page + 1 not in pages]
    for begin, end in zip([0, *ends], ends, strict=False):
        start = ctypes.c_void_p(ordered[begin] * PAGE_BYTES)
        advise(start, ctypes.c_size_t((end - begin) * PAGE_BYTES), _MADV_COLLAPSE)


def off_files(tensors: Iterable[Tensor]) -> None:
    """Copy tensors, in place, out of mapped files if they are less than half of the file, to free the file's pages.

    `from_pretrained` maps a checkpoint: one norm that stays in it would keep all of it in memory.
    """
    by_file: dict[range, list[Tensor]] = {}
    files = _mapped_files()
    for tensor in tensors:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
        if plain and (file := next((addresses for addresses in files if tensor.data_ptr() in addresses), None)):
            by_file.setdefault(file, []).append(tensor)
    for file, inside in by_file.items():
        if sum(tensor.nbytes for tensor in inside) > len(file) / 2:
            continue
        copies: dict[Any, Tensor] = {}  # tensors that shared memory still share it
        for tensor in inside:
            place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            tensor.data = copies.setdefault(place, tensor.detach().clone())


def _mapped_files() -> list[range]:
    """Addresses of the large files that are mapped for this process alone; none if the system does not list them.

    Memory that several processes share must stay where it is.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    named = [line.split() for line in lines if "/" in line]
    data = [places for places, rights, *_ in named if rights.endswith("p") and "x" not in rights]
    files = [range(*(int(end, 16) for end in places.split("-"))) for places in data]
    return [file for file in files if len(file) >= LEAST_BYTES]


def channels_last(model: nn.Module) -> None:
    """Lay out the weights of `model`'s 2-d convolutions in place with channels innermost; activations then follow.

    oneDNN and cuDNN multiply in this layout and convert others in each call: a quarter of the time of SD's VAE.
    """
    for parameter in model.parameters():
        if parameter.dim() == 4 and not parameter.is_contiguous(memory_format=torch.channels_last):
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def _pays(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() * dtype.itemsize >= LEAST_BYTES and given()
