"""How much memory a call leaves behind: bytes that malloc has given out, and objects of Python."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class _Malloc(ctypes.Structure):
    """glibc's `struct mallinfo2`: the sums over all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


class Left(NamedTuple):
    """By one call, on average: bytes, and objects that the garbage collector tracks.

    Python's own allocator has the objects of up to 512 bytes; its lists of free ones fill over hundreds of calls, so
    what lies there is not counted in bytes.
    """

    bytes: float
    objects: float


def counts_bytes() -> bool:
    """Whether the C library tells how many bytes are in use: glibc 2.33 or later."""
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallinfo2")


def _in_use() -> tuple[int, int]:
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Malloc
    found = mallinfo2()
    return found.uordblks + found.hblkhd, len(gc.get_objects())


def left_by(call: Callable[[], Any], calls: int, windows: int = 6) -> Left:
    """What each call leaves, in that window of so many `calls` which leaves least.

    A leak shows in each window to the byte; a cache that fills or a table that grows, in some. So the first window that
    leaves nothing is the last one.
    """
    for _ in range(calls):  # fills what is kept once
        call()
    least = Left(math.inf, math.inf)
    for _ in range(windows):
        bytes_before, objects_before = _in_use()
        for _ in range(calls):
            call()
        bytes_after, objects_after = _in_use()
        of_one = Left((bytes_after - bytes_before) / calls, (objects_after - objects_before) / calls)
        least = Left(min(least.bytes, of_one.bytes), min(least.objects, of_one.objects))
        if least.bytes <= 0 and least.objects <= 0:
            break
    return least
