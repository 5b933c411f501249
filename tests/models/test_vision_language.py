"""Models of pictures and text as a whole: towers and text are blocks, and `generate` gives the original's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import infuse
from infuse.layers.block import Block
from tests.models.vision_language import MODELS, given, made
from tests.support.ranks import Ranks

WAYS: dict[str, dict[str, Any]] = {
    "greedy": dict(do_sample=False),
    "beams": dict(do_sample=False, num_beams=3),
    "a static cache": dict(do_sample=False, cache_implementation="static"),
}


def answer(model: Any, way: str) -> Tensor:
    return model.generate(**given(getattr(model, "module", model)), max_new_tokens=8, **WAYS[way])


@pytest.mark.parametrize("name", MODELS)
def test_pictures_and_text_are_answered_by_blocks_alone(name: str) -> None:
    original, engine = made(name), infuse.init_inference(made(name), dtype="fp32", replace_with_kernel_inject=True)
    layers = [*engine.module.model.visual.blocks, *engine.module.model.language_model.layers]
    assert len(layers) == 4 and all(isinstance(layer, Block) for layer in layers)
    for way in WAYS:
        wanted = answer(original, way)
        assert torch.equal(answer(engine, way), wanted), way
    without = original.generate(**given(original) | {"pixel_values": torch.zeros(80, 96)}, max_new_tokens=8)
    assert not torch.equal(without, answer(original, "greedy")), "the pictures do not count"


@pytest.mark.parametrize("name", MODELS)
def test_candidates_from_the_text_beside_pictures(name: str) -> None:
    """Positions are [3, B, T]; rejected candidates are cut off along the tokens."""
    engine = infuse.init_inference(made(name), dtype="fp32", progress=False)
    both = given(engine.module)
    grid = both["image_grid_thw"][:2]  # of the first text
    pictures = {"image_grid_thw": grid, "pixel_values": both["pixel_values"][: int(grid.prod(-1).sum())]}
    one = {name: value[:1] for name, value in both.items()} | pictures
    settings: dict[str, Any] = dict(max_new_tokens=8, do_sample=False)
    wanted = made(name).generate(**one, **settings)
    assert torch.equal(
        engine.generate(**one, **settings, prompt_lookup_num_tokens=3, max_matching_ngram_size=1), wanted
    )


def on_rank(name: str) -> tuple[Tensor, int]:
    size = {"tp_size": torch.distributed.get_world_size()}
    engine = infuse.init_inference(made(name), dtype="fp32", tensor_parallel=size, progress=False)
    return answer(engine, "greedy"), sum(isinstance(module, Block) for module in engine.module.modules())


@pytest.mark.parametrize(("name", "size"), [("Qwen2_5_VL", 2), ("Qwen3VL", 2), ("Qwen3_5", 2), ("Qwen3_5Moe", 2)])
def test_ranks_share_the_heads_of_towers_and_text(name: str, size: int, ranks: Ranks) -> None:
    wanted = answer(made(name), "greedy")
    for found, blocks in ranks.run(size, on_rank, name):
        assert torch.equal(found, wanted) and blocks == 4


@pytest.mark.parametrize("name", MODELS)
def test_in_16_bits_towers_are_as_exact_as_the_originals(name: str) -> None:
    exact, rounded = made(name), made(name).to(torch.bfloat16)
    engine = infuse.init_inference(made(name), dtype=torch.bfloat16, replace_with_kernel_inject=True)
    inputs = given(exact)

    def pictures(model: Any, dtype: torch.dtype) -> Tensor:
        tower = model.model.visual
        with torch.no_grad():
            found = tower(inputs["pixel_values"].to(dtype), grid_thw=inputs["image_grid_thw"])
        return getattr(found, "pooler_output", found[0]).float()

    wanted = pictures(exact, torch.float32)
    errors = [float((pictures(one, torch.bfloat16) - wanted).norm()) for one in (engine.module, rounded)]
    assert errors[0] <= 1.5 * errors[1]
