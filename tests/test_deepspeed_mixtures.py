"""DeepSpeed's own mixture layers: their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_layers import mixture
from families import BY_NAME, inputs
from torch import Tensor

import infuse


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs(BY_NAME["gpt2"])).logits


def save_as_deepspeed(model: Any, folder: Path, of_layers: bool) -> None:
    """Each expert in a file of its own, of one layer or of all layers; everything else in the rank's file."""
    state, files = dict(model.state_dict()), dict[str, dict[str, Tensor]]()
    for name in [name for name in state if ".deepspeed_experts." in name]:
        layer, _, rest = name.removeprefix("transformer.h.").partition(".")
        expert = rest.partition("deepspeed_experts.")[2].partition(".")[0]
        file = f"layer_{layer}_expert_{expert}" if of_layers else f"expert_{expert}"
        files.setdefault(file, {})[name] = state.pop(name)
    torch.save({"module": state}, folder / "mp_rank_00_model_states.pt")
    for file, held in files.items():
        torch.save(held, folder / f"{file}_mp_rank_00_model_states.pt")


@pytest.mark.parametrize("of_layers", [True, False], ids=["a file for each layer's expert", "a file for each expert"])
def test_checkpoints_with_experts_in_their_own_files(of_layers: bool, tmp_path: Path) -> None:
    model = mixture(drop_tokens=False, top2_2nd_expert_sampling=False)
    save_as_deepspeed(model, tmp_path, of_layers)
    with torch.device("meta"):
        empty = mixture(drop_tokens=False, top2_2nd_expert_sampling=False)
    engine = infuse.init_inference(empty, checkpoint=str(tmp_path), dtype="fp32", progress=False)
    assert (logits(engine) - logits(model)).abs().max() < 1e-5
    missing = next(tmp_path.glob("*expert_3_*"))
    missing.unlink()
    with pytest.raises(infuse.CheckpointError, match=r"deepspeed_experts\.3\."):
        infuse.init_inference(mixture(), checkpoint=str(tmp_path), dtype="fp32", progress=False)
