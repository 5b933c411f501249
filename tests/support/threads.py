"""The same with several numbers of threads."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def thread_counts(*counts: int) -> Iterator[int]:
    """Set PyTorch's number of threads to each of `counts`, for the body of a loop; then to what it was."""
    before = torch.get_num_threads()
    try:
        for count in counts:
            torch.set_num_threads(count)
            yield count
    finally:
        torch.set_num_threads(before)
