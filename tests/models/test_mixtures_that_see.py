"""Mixtures inside models that also see or hear: their text layers are blocks, the rest is left to the model.

Their text layers alone are among the families; here the whole model runs, with text and with an image.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import infuse
from infuse.layers.block import Block
from tests.models.families import inputs
from tests.models.mixtures import SEEING
from tests.support.side_by_side import assert_close


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
