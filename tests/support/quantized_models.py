"""Models loaded from quantized files, and their logits for fixed inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import infuse
from tests.support.checkpoints import on_meta
from tests.support.quantized_files import ROOM

IDS = torch.arange(5, 21)[None]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def with_values(model: Any, state: dict[str, Tensor]) -> Any:
    model.load_state_dict(state)
    return model.eval()


def loaded(folder: Path | str, name: str = "llama", **keys: Any) -> infuse.InferenceEngine:
    changes = keys.pop("changes", ROOM)
    keys = {"dtype": "fp32", "progress": False, "replace_with_kernel_inject": True, **keys}
    return infuse.init_inference(on_meta(name, **changes), checkpoint=str(folder), **keys)
