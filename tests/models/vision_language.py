"""Tiny models that read pictures of several sizes beside text."""

from __future__ import annotations

import inspect
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import torch
import transformers as t
from torch import Tensor, nn

from tests.models.families import enlarge

PICTURE, BEGIN, END = 90, 92, 93
_IDS = dict(image_token_id=PICTURE, video_token_id=91, vision_start_token_id=BEGIN, vision_end_token_id=END)
_TEXT = dict(
    vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 2, 2]),
)  # fmt: skip
# In its layers of attention, half of each head rotates.
_HYBRID = _TEXT | dict(
    layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4, linear_num_key_heads=2,
    linear_key_head_dim=12, linear_value_head_dim=10, rms_norm_eps=1e-2,
    rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1], mrope_interleaved=True,
        partial_rotary_factor=0.5,
    ),
)  # fmt: skip
_HYBRID_MOE = _HYBRID | dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=16
)
_TOWER = dict(depth=2, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)
_OUT = dict(_TOWER, hidden_size=32, out_hidden_size=64, intermediate_size=48)
# Windows of one picture's patches; layers that hand their results on.
MODELS = MappingProxyType(
    {
        "Qwen2VL": dict(_TOWER, embed_dim=32, hidden_size=64, mlp_ratio=2),
        "Qwen2_5_VL": dict(_OUT, window_size=16, fullatt_block_indexes=[1]),
        "Qwen3VL": dict(_OUT, num_position_embeddings=64, deepstack_visual_indexes=[0]),
        "Qwen3_5": dict(_OUT, num_position_embeddings=64),
        "Qwen3_5Moe": dict(_OUT, num_position_embeddings=64),
    }
)
_TEXTS = MappingProxyType({"Qwen3_5": _HYBRID, "Qwen3_5Moe": _HYBRID_MOE})  # the others have _TEXT
# Frames, rows and columns of patches. Two of the pictures are in the first text.
GRID = ((1, 4, 8), (1, 8, 4), (1, 4, 4))


def made(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(t, f"{name}Config")(
        text_config=deepcopy(_TEXTS.get(name, _TEXT)), vision_config=MODELS[name], **_IDS
    )
    model: nn.Module = getattr(t, f"{name}ForConditionalGeneration")(config).eval()
    enlarge(model)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0  # type: ignore[union-attr]
    return model


def given(model: Any) -> dict[str, Tensor]:
    """Two texts, padded on the left, with their pictures."""
    generator = torch.Generator().manual_seed(1)
    grid = torch.tensor(GRID)
    first, second, third = ([BEGIN, *[PICTURE] * (int(count) // 4), END] for count in grid.prod(-1))
    rows = ([5, 6, *first, 7, *second, 8], [5, *third, 9, 10])
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    inputs = {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "pixel_values": torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": grid,
    }
    if "mm_token_type_ids" in inspect.signature(type(model).forward).parameters:
        inputs["mm_token_type_ids"] = (ids == PICTURE).long()
    return inputs
