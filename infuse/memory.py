"""Memory on pages of 2 MiB. Weights are read from end to end for each token: on pages of 4 KiB, translating addresses
costs a virtual machine a fifth of its read bandwidth (27 against 34 GB/s). Linux gives large pages where they are asked
for before first use.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

PAGE_BYTES = 1 << 21
LEAST_BYTES = 2 * PAGE_BYTES  # of a tensor for which it is worth asking
_TOUCHED_BYTES = 1 << 15  # of each page: as many as PyTorch gives to a thread of its own
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@cache
def given() -> bool:
    """Whether this system gives large pages to those who ask."""
    return hasattr(mmap, "MADV_HUGEPAGE") and _SETTING.exists() and "[never]" not in _SETTING.read_text()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised tensor, on large pages where the system has them to give; elsewhere torch.empty.

    The pages are taken here, each by one thread: whoever filled them in small parts would have all threads clear the
    same page.
    """
    made = torch.empty(shape, dtype=dtype, device=device)
    if _pays(made, dtype):
        first = -(-made.data_ptr() // PAGE_BYTES) * PAGE_BYTES
        last = (made.data_ptr() + made.nbytes) // PAGE_BYTES * PAGE_BYTES
        # A wish: where it is not granted, ordinary pages are as good as before.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_HUGEPAGE)
        asked = made.view(-1).view(torch.uint8)[first - made.data_ptr() : last - made.data_ptr()]
        asked.view(-1, PAGE_BYTES)[:, :_TOUCHED_BYTES].zero_()
    return made


def copied(source: Tensor, dtype: torch.dtype) -> Tensor:
    """`source` in `dtype` on large pages, contiguous; where there are none or it is too small, source.to(dtype)."""
    return empty(source.shape, dtype).copy_(source) if _pays(source, dtype) else source.to(dtype)


def _pays(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() * dtype.itemsize >= LEAST_BYTES and given()
