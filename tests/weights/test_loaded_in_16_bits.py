"""Models as `from_pretrained` loads them in bfloat16: whole blocks, with the dtypes that it left. Some of their classes
make parameters in float32, whatever is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infuse
from tests.models.families import BY_NAME, CHANNEL_DELTA, HYBRIDS, JAMBA, SPACES_BESIDE, Family

WIDE = ("hunyuan-moe", "deepseek-v3", "flint", "ernie4_5-moe", "afmoe")  # routers, sinks, biases of experts
FAMILIES = (*HYBRIDS, *CHANNEL_DELTA, *JAMBA, *SPACES_BESIDE, *(BY_NAME[name] for name in WIDE))


def dtypes(model: Any) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in model.state_dict().items()}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_is_loaded_in_bfloat16(family: Family, tmp_path: Path) -> None:
    family.make().save_pretrained(tmp_path)
    loaded = family.model.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    left = dtypes(loaded)
    engine = infuse.init_inference(loaded, dtype="bf16", progress=False)
    layers = [step for step in engine.plan.steps if step.depth == "block"]
    assert len(layers) == loaded.config.num_hidden_layers, engine.plan.left
    assert dtypes(engine.module) == left
