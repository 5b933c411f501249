"""Memory for large images on CPUs, which the modules of one model reuse while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor

from infuse.ground.modes import is_traced

# glibc maps allocations of this size anew each time. Touching 64 MiB for the first time takes 20 ms, a fifth of the
# convolution that fills it; with large pages 146 ms, on a machine whose memory was in use.
MAPPED_BYTES = 1 << 25


class Buffers:
    """Lends memory for images. Returned memory is kept while any other is lent, so never after a call."""

    def __init__(self) -> None:
        self._idle: dict[int, Any] = {}  # each change is one step, so that several threads may run the model
        self._lent: dict[int, tuple[Any, weakref.ref]] = {}
        self._numbers = count()

    def image(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised image of `sizes` [B, C, H, W] with channels last."""
        size = prod(sizes) * dtype.itemsize
        if size < MAPPED_BYTES or is_traced():
            return torch.empty(sizes, dtype=dtype, device="cpu", memory_format=torch.channels_last)
        batch, channels, rows, columns = sizes
        flat = torch.from_numpy(self._take(size)).view(dtype)
        return flat.view(batch, rows, columns, channels).permute(0, 3, 1, 2)

    def like(self, x: Tensor) -> Tensor | None:
        """Return an uninitialised image like x if x is large and has channels last, else None."""
        if x.device.type != "cpu" or x.nbytes < MAPPED_BYTES or x.dim() != 4:
            return None
        return self.image(x.shape, x.dtype) if x.is_contiguous(memory_format=torch.channels_last) else None

    def _take(self, size: int) -> Any:
        # A tensor of an array holds the array, which thus ends with the last view of the tensor. The memory is
        # PyTorch's: NumPy asks for large pages.
        fitting = [
            (array.nbytes, number) for number, array in list(self._idle.items()) if size <= array.nbytes <= 2 * size
        ]
        buffer = self._idle.pop(min(fitting)[1], None) if fitting else None
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu").numpy()
        lent, number = buffer[:size], next(self._numbers)
        self._lent[number] = buffer, weakref.ref(lent, partial(self._back, number))
        return lent

    def _back(self, number: int, _: weakref.ref) -> None:
        buffer, _ = self._lent.pop(number)
        self._idle[number] = buffer
        if not self._lent:
            self._idle.clear()

    def __reduce__(self) -> tuple:  # copies and pickles of a module start empty
        return Buffers, ()
