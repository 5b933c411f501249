"""Saving and loading by PyTorch and transformers: a replaced model has the original's state dict, and what is saved loads without infuse."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_NAME, FAMILIES, Family, inputs
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import infuse

NAMES = [family.name for family in FAMILIES]
QUANTIZED = ["int8:16", "int4:16:asymmetric", "fp8:16", "fp6:16"]


def replaced(name: str, **keys: Any) -> infuse.InferenceEngine:
    return infuse.init_inference(BY_NAME[name].make(), **{"dtype": torch.float32, "verify": "off", "progress": False, **keys})


@torch.no_grad()
def outputs(model: nn.Module, family: Family) -> list[Tensor]:
    found = model(**inputs(family))
    return [value for value in found.values() if isinstance(value, Tensor)]


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerance: float = 2e-4) -> None:
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_dict_is_the_originals(name: str) -> None:
    """Names in their order, shapes and bits; tied tensors share their memory as they did; every tensor is contiguous."""
    wanted = BY_NAME[name].make().state_dict()
    found = replaced(name).module.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[key], wanted[key]) and found[key].is_contiguous() for key in wanted)

    def tied(state: dict[str, Tensor]) -> list[list[str]]:
        return [[b for b in state if state[a].data_ptr() == state[b].data_ptr()] for a in state]

    assert tied(dict(found)) == tied(dict(wanted))


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_loads_in_transformers(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    engine = replaced(name)
    engine.module.save_pretrained(tmp_path)
    again, info = family.model.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert_close(outputs(again.eval(), family), outputs(family.make(), family), 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_of_the_original_is_loaded(name: str) -> None:
    family = BY_NAME[name]
    other = family.make()
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.mul_(0.9)
    engine = replaced(name)
    result = engine.module.load_state_dict(other.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    assert_close(outputs(engine.module, family), outputs(other, family))
