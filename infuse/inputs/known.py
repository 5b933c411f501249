"""Numbers that a model branches on, such as the rows of a picture: real ones, also among inputs on meta."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.inputs.component import MakeTensor


def known(make: MakeTensor, values: list[Any]) -> Tensor:
    """A tensor of integers or booleans on the device on which `make` makes tensors; on the CPU instead of meta."""
    device = make("mask", (1,)).device
    return torch.tensor(values, device="cpu" if device.type == "meta" else device)
