"""Several texts in one row: positions that start anew, and the keywords by which other attention functions tell them.

transformers' DataCollatorWithFlattening makes such batches, which sdpa masks by the positions alone.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening

import infuse
from infuse.ground.errors import UnsupportedCall
from tests.models.families import FAMILIES, Family
from tests.support.side_by_side import ids
from tests.support.tolerance import assert_near

# Plain, several windows, no rotary positions, interleaved weights, experts, latents, states, layers of several kinds.
USUAL = {"llama", "gemma3", "gpt2", "bloom", "gpt-neox", "mixtral", "deepseek-v3", "qwen3_next", "jamba", "nemotron_h"}
DECODERS = [family for family in FAMILIES if family.is_there and family.kind == "decoder"]
PACKED = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt")
KEYWORDS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def batch(model: nn.Module, *more: str) -> dict[str, Any]:
    made = PACKED([{"input_ids": ids(1, tokens, seed)[0].tolist()} for tokens, seed in ((4, 1), (6, 2), (3, 3))])
    takes: Any = inspect.signature(model.forward).parameters
    names = [name for name in (*KEYWORDS, *more) if name != "position_ids" or name in takes]
    return {"input_ids": made["input_ids"], "use_cache": False, **{name: made[name] for name in names}}


def answered(model: nn.Module, *more: str) -> Any:
    with torch.no_grad():
        return model(**batch(model, *more))[0]


@pytest.mark.parametrize("quant", [None, "int8:16"])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.name, marks=() if family.name in USUAL else pytest.mark.slow)
        for family in DECODERS
    ],
)
@pytest.mark.filterwarnings("ignore:infuse")
def test_packed_batches(family: Family, quant: str | None) -> None:
    """What the original ignores is ignored; what it refuses without other packages is refused by name."""
    keys = {"quant": quant} if quant else {}
    original, model = family.make(), infuse.init_inference(family.make(), dtype="fp32", verify="off", **keys).module
    for more in ((), ("seq_idx",)):
        try:
            wanted = answered(original, *more)
        except ValueError:
            with pytest.raises((UnsupportedCall, ValueError), match="cu_seq_lens_q|seq_idx|packed"):
                answered(model, *more)
            continue
        if family.name.startswith("jamba") and more:
            with pytest.raises(UnsupportedCall, match="seq_idx"):
                answered(model, *more)
            continue
        if quant is None:
            assert_near(answered(model, *more), wanted, torch.float32, family.name, times=40)
        else:
            assert answered(model, *more).isfinite().all()
