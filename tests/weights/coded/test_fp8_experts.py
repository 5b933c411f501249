"""Experts of one tensor in fp8, as transformers saves mixtures: `experts.gate_up_proj` with `..._scale_inv`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infuse
from infuse.ground.errors import CheckpointError
from infuse.weights.checkpoint import Checkpoint
from infuse.weights.sources import find_files
from tests.models.families import BY_NAME
from tests.support.checkpoints import on_meta
from tests.support.quantized_files import BY_CASE, write

IDS = torch.arange(5, 21)[None]
CHANGES: dict[str, Any] = dict(hidden_size=128, intermediate_size=160, moe_intermediate_size=160)


def published(folder: Path, name: str, changes: dict[str, Any] = CHANGES, lost: int = 0) -> dict[str, torch.Tensor]:
    """Write a mixture with its experts in this form, without the first `lost` rows of scales. Its values."""
    state, stored = BY_NAME["qwen3-moe"].make(**changes).state_dict(), {}
    for key, tensor in list(state.items()):
        if ".experts." not in key:
            stored[key] = tensor
            continue
        made = [BY_CASE[name].pack(one) for one in tensor]
        scales = torch.stack([leaves["weight_scale_inv"] for leaves, _ in made])
        stored[key] = torch.stack([leaves["weight"] for leaves, _ in made])
        state[key] = torch.stack([values for _, values in made])
        stored[f"{key}_scale_inv"] = scales[:, lost:]
    write(folder, stored, BY_CASE[name].config)
    return state


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-blocks-bf16", "fp8-blocks-e8m0"])
def test_experts_of_one_tensor_keep_their_codes(name: str, tmp_path: Path) -> None:
    """Tiles of 128 x 128 cross from gate to up, at row 160, and end in partial ones."""
    state = published(tmp_path, name)
    tensors = Checkpoint(find_files(str(tmp_path))).pieces
    for key, values in state.items():
        if ".experts." in key:
            read = tensors[key].first
            assert torch.equal(read.read(), values)
            part = (slice(2, 4), slice(100, 130), slice(3, 77))
            assert torch.equal(read.read(part), values[part])
            group = "32" if "down_proj" in key else "f32" if name == "fp8-blocks" else "fp8"  # 160 inputs, or one tile
            assert read.coded is not None and group in read.coded.format.split(":")
    exact = BY_NAME["qwen3-moe"].make(**CHANGES).eval()
    exact.load_state_dict(state)
    empty = on_meta("qwen3-moe", **CHANGES)
    engine = infuse.init_inference(
        empty, checkpoint=str(tmp_path), dtype="fp32", progress=False, replace_with_kernel_inject=True
    )
    with torch.no_grad():
        given, wanted = engine(IDS).logits, exact(IDS).logits
    assert (given - wanted).norm() < 1e-4 * wanted.norm()


def test_formats_are_taken(tmp_path: Path) -> None:
    whole = dict(hidden_size=256, intermediate_size=128, moe_intermediate_size=128)
    published(tmp_path, "fp8-blocks", whole)
    keys: dict[str, Any] = dict(checkpoint=str(tmp_path), dtype="fp32", replace_with_kernel_inject=True)
    plan = infuse.plan(on_meta("qwen3-moe", **whole), **keys)
    assert {format for step in plan.steps for format in step.formats.values()} == {"fp8:f32", "fp8:128:f32"}
    assert "taken as it is" in str(plan)


def test_scales_of_another_shape(tmp_path: Path) -> None:
    published(tmp_path, "fp8-blocks", lost=1)
    with pytest.raises(CheckpointError, match=r"experts.gate_up_proj_scale_inv is \(2, 1\) for a weight \(320, 128\)"):
        Checkpoint(find_files(str(tmp_path)))
