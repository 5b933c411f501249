"""Mixtures inside models that also see or hear: their text layers are blocks, the rest is left to the model.

Their text layers alone are among the families; here the whole model runs, with text and with an image.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t

import infuse
from infuse.layers.block import Block
from tests.models.families import DEEPSEEK_OCR2_TEXT, GLM4V_TEXT, QWEN3_OMNI_TEXT, QWEN3_VL_TEXT, Family, inputs
from tests.support.side_by_side import assert_close

_QWEN_VISION = dict(
    depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=48, num_position_embeddings=16,
    deepstack_visual_indexes=[0], patch_size=8,
)  # fmt: skip
_IDS = dict(vision_start_token_id=90, vision_end_token_id=91, image_token_id=92, video_token_id=93)
SEEING = {
    one.name: one
    for one in (
        Family(
            "qwen3-vl-moe", t.Qwen3VLMoeConfig, t.Qwen3VLMoeForConditionalGeneration,
            values=dict(text_config=QWEN3_VL_TEXT, vision_config=_QWEN_VISION, **_IDS),
        ),
        Family(
            "qwen3-omni-thinker", t.Qwen3OmniMoeThinkerConfig, t.Qwen3OmniMoeThinkerForConditionalGeneration,
            values=dict(
                text_config=QWEN3_OMNI_TEXT, vision_config=_QWEN_VISION,
                audio_config=dict(
                    d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32, num_mel_bins=8,
                    output_dim=48, downsample_hidden_size=8,
                ),
                audio_token_id=94, **_IDS,
            ),
        ),
        Family(
            "glm4v-moe", t.Glm4vMoeConfig, t.Glm4vMoeForConditionalGeneration,
            values=dict(
                text_config=GLM4V_TEXT,
                vision_config=dict(
                    depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=48, image_size=16,
                    patch_size=4,
                ),
            ),
        ),
        Family(
            "deepseek-ocr2", t.DeepseekOcr2Config, t.DeepseekOcr2ForConditionalGeneration,
            values=dict(
                text_config=DEEPSEEK_OCR2_TEXT, image_token_id=92,
                vision_config=dict(
                    sam_config=dict(
                        hidden_size=32, output_channels=8, num_hidden_layers=1, num_attention_heads=2, image_size=32,
                        patch_size=8, mlp_dim=32, downsample_channels=[8, 32], global_attn_indexes=[0], window_size=2,
                    ),
                    encoder_config=dict(
                        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                        num_key_value_heads=2, vocab_size=8,
                    ),
                ),
            ),
        ),
    )
}  # fmt: skip


@pytest.mark.parametrize("name", SEEING)
def test_text_layers_are_blocks_and_generate_the_originals_tokens(name: str) -> None:
    family = SEEING[name]
    original: Any = family.make()
    engine = infuse.init_inference(family.make(), dtype="fp32", verify="strict")
    found = [step.path for step in engine.plan.steps if step.depth == "block" and "language_model" in step.path]
    assert len(found) == 3 and all(isinstance(engine.module.get_submodule(path), Block) for path in found)
    for padding in (None, "left"):
        given = inputs(family, padding=padding)
        with torch.no_grad():
            exact, ours = original(**given).logits, engine(**given).logits
        mask = given["attention_mask"].bool()
        assert_close(ours[mask], exact[mask])
        how = dict(max_new_tokens=6, do_sample=False, num_beams=1 if padding else 2)
        assert torch.equal(engine.generate(**given, **how), original.generate(**given, **how))


def test_an_image_among_the_tokens() -> None:
    """Positions of three axes and features added to the first layers' outputs pass through the blocks."""
    family = SEEING["qwen3-vl-moe"]
    original: Any = family.make()
    engine = infuse.init_inference(family.make(), dtype="fp32")
    ids = torch.tensor([[5, 90, *[92] * 4, 91, 7, 8, 9]])
    given = dict(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == 92).int(),
        pixel_values=torch.randn(16, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(0)),
        image_grid_thw=torch.tensor([[1, 4, 4]]),
    )
    with torch.no_grad():
        assert_close(engine(**given).logits, original(**given).logits)
    how = dict(max_new_tokens=5, do_sample=False)
    assert torch.equal(engine.generate(**given, **how), original.generate(**given, **how))
