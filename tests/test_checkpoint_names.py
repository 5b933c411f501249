"""Checkpoints under the names that a family's parts had before transformers renamed them, as they lie on the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import BY_NAME
from safetensors.torch import load_file, save_file
from test_checkpoints import on_meta, outputs

import infuse

# family → a key as it is in old checkpoints
FORMER = {
    "gpt-neox": "embed_out.weight",
    "vit": "encoder.layer.0.attention.attention.query.weight",
    "clip-text": "text_model.encoder.layers.0.mlp.fc1.weight",
    "clip-vision": "vision_model.encoder.layers.0.mlp.fc1.weight",
}


@pytest.mark.parametrize("name", list(FORMER))
def test_former_names_are_read(name: str, tmp_path: Path) -> None:
    model = BY_NAME[name].make()
    model.save_pretrained(tmp_path)  # under the former names, but for prefixes
    path, prefix = tmp_path / "model.safetensors", f"{FORMER[name].partition('.')[0]}."
    state = load_file(path)
    if name.startswith("clip"):
        state = {f"{prefix}{key}": value for key, value in state.items()}
        save_file(state, path)
    assert any(key.endswith(FORMER[name]) for key in state), list(state)
    assert not any(key.endswith(FORMER[name]) for key in model.state_dict())
    engine = infuse.init_inference(on_meta(name), checkpoint=str(tmp_path), dtype="fp32", progress=False)
    assert torch.allclose(outputs(engine, name), outputs(model, name), atol=1e-5)
