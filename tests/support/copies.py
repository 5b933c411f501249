"""Copies of objects by way of bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
