"""Memory on pages of 2 MiB. Weights are read from end to end for each token: on pages of 4 KiB, translating addresses costs a
virtual machine a fifth of its read bandwidth (27 against 34 GB/s). Linux gives large pages where they are asked for before first use.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE_BYTES = 1 << 21
LEAST_BYTES = 2 * PAGE_BYTES  # of a tensor for which it is worth asking


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised tensor, on large pages where the system has them to give; elsewhere torch.empty."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if made.device.type == "cpu" and made.nbytes >= LEAST_BYTES and sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE"):
        first = -(-made.data_ptr() // PAGE_BYTES) * PAGE_BYTES
        last = (made.data_ptr() + made.nbytes) // PAGE_BYTES * PAGE_BYTES
        # A wish: where it is not granted, ordinary pages are as good as before.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_HUGEPAGE)
    return made


def copied(source: Tensor, dtype: torch.dtype) -> Tensor:
    """`source` in `dtype` on large pages, contiguous; itself where it is too small for them and has the dtype."""
    if source.device.type != "cpu" or source.numel() * dtype.itemsize < LEAST_BYTES:
        return source.to(dtype)
    return empty(source.shape, dtype).copy_(source)
