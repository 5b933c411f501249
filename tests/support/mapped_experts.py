"""A tiny mixture whose experts are mapped from our shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn

import infuse
from infuse.ground.device import Device
from infuse.native import needs
from tests.models.families import GQA

SHAPE = dict(GQA, hidden_size=64, head_dim=16, intermediate_size=64, num_hidden_layers=2, num_local_experts=8)
MMAP = dict(experts="mmap", progress=False, verify="off")
with_kernels = pytest.mark.skipif(needs(Device.of("cpu"), torch.float32) is not None, reason="needs the C++ kernels")


def model(device: str = "cpu", **shape: Any) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return t.MixtralForCausalLM(t.MixtralConfig(**{**SHAPE, **shape})).eval()


@torch.no_grad()
def logits(engine: Any) -> torch.Tensor:
    return engine(torch.arange(3, 17).view(2, 7)).logits


def loaded(folder: Path, **keys: Any) -> infuse.InferenceEngine:
    return infuse.init_inference(model("meta"), checkpoint=str(folder), **{**MMAP, **keys})
