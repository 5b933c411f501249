"""Checkpoints of mixtures whose tensors transformers converts while loading: dealt out, interleaved, transposed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import infuse
from infuse.ground.errors import CheckpointError
from infuse.layers.mixture.experts import Experts
from tests.models.every_architecture import tiny_model
from tests.models.mixtures import CONVERTED, SEEING
from tests.support.side_by_side import assert_close


def made(name: str) -> nn.Module:
    if name == "inkling2":  # gate and up by turns
        return tiny_model(t.Inkling2TextConfig, t.Inkling2ForCausalLM)
    return CONVERTED[name].make()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=torch.arange(3, 25).view(2, 11) * 3).logits


def saved(name: str, folder: Path) -> tuple[nn.Module, nn.Module]:
    """The original, and its model on meta; its checkpoint, as transformers writes it, is in `folder`."""
    model: Any = made(name)
    model.save_pretrained(folder)
    assert not any("experts.gate_up_proj" in key for key in load_file(folder / "model.safetensors"))
    with torch.device("meta"):
        return model, type(model)(model.config)


@pytest.mark.parametrize(("name", "replaced"), [("ernie4_5_vl_moe", 2), ("step3p7", 1), ("inkling2", 0)])
def test_a_checkpoint_that_transformers_converts(name: str, replaced: int, tmp_path: Path) -> None:
    model, empty = saved(name, tmp_path)
    engine = infuse.init_inference(empty, checkpoint=str(tmp_path), dtype="fp32")
    assert sum(isinstance(module, Experts) for module in engine.module.modules()) == replaced
    assert_close(logits(engine.module), logits(model))


def test_quantized_while_reading(tmp_path: Path) -> None:
    model, empty = saved("ernie4_5_vl_moe", tmp_path)
    found, wanted = (
        infuse.init_inference(one, dtype="fp32", quant="int8:8", **keys)
        for one, keys in ((empty, {"checkpoint": str(tmp_path)}), (model, {}))
    )
    assert_close(logits(found.module), logits(wanted.module))


def test_transposed_tensors_of_the_same_name(tmp_path: Path) -> None:
    """As Qwen3-VL-MoE's first checkpoints have them: told by their shapes alone."""
    model: Any = SEEING["qwen3-vl-moe"].make()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    held = load_file(path)
    experts = [key for key in held if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    for key in experts:
        turned = (
            held[key].shape[2 if "gate_up" in key else 1] == 48
        )  # [experts, outputs, inputs], as the model has them
        held[key] = held[key].transpose(1, 2).contiguous() if turned else held[key]
        assert tuple(held[key].shape) == ((6, 48, 80) if "gate_up" in key else (6, 40, 48))
    save_file(held, path)
    with torch.device("meta"):
        empty = type(model)(model.config)
    engine = infuse.init_inference(empty, checkpoint=str(tmp_path), dtype="fp32")
    assert experts
    assert_close(logits(engine.module), logits(model))


def test_what_cannot_be_converted_is_told(tmp_path: Path) -> None:
    _, empty = saved("ernie4_5_vl_moe", tmp_path)
    path = tmp_path / "model.safetensors"
    held = load_file(path)
    save_file({key: value for key, value in held.items() if ".experts.3.up_proj" not in key}, path)
    with pytest.raises(CheckpointError, match=r"text_moe\.experts\.gate_up_proj: transformers cannot make it from"):
        infuse.init_inference(empty, checkpoint=str(tmp_path), dtype="fp32")
    wide = {
        key: torch.cat([value] * 2) if "gate_proj" in key and ".experts." in key else value
        for key, value in held.items()
    }
    save_file(wide, path)
    with pytest.raises(CheckpointError, match=r"gate_up_proj: converted to \(4, 72, 48\), the model has \(4, 48, 48\)"):
        infuse.init_inference(empty, checkpoint=str(tmp_path), dtype="fp32")
