"""Several ranks give what one gives: every dense family, two to four ranks, outputs, caches and generated tokens.

The original is transformers' own model, whole, in this process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import BY_NAME, FAMILIES, Family, inputs
from ranks import Ranks, same
from torch import Tensor

import infuse
from infuse.layers.block import Block

TOLERANCE = 5e-5  # of logits, over the root mean square of the original's
NEW_TOKENS = 8
SIZES = (2, 3, 4)


def outputs(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """All tensors of an output but the cache."""
    with torch.no_grad():
        found = model(**given)
    return [value for name, value in found.items() if isinstance(value, Tensor) and name != "past_key_values"]


def on_rank(name: str, padding: str | None) -> tuple[list[Tensor], Tensor | None, int, int]:
    """Outputs, generated tokens, how many blocks were put in, and the bytes of the parameters."""
    family = BY_NAME[name]
    model = family.make()
    engine = infuse.init_inference(model, dtype="fp32", tensor_parallel={"tp_size": torch.distributed.get_world_size()})
    given = inputs(family, padding=padding)
    found = outputs(engine, given)
    tokens = engine.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False) if family.kind == "decoder" else None
    blocks = sum(isinstance(module, Block) for module in model.modules())
    return found, tokens, blocks, sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_ranks_give_what_the_original_gives(name: str, size: int, ranks: Ranks) -> None:
    family: Family = BY_NAME[name]
    padding = {"decoder": "left", "encoder": "right"}.get(family.kind)
    results = ranks.run(size, on_rank, name, padding)
    model = family.make()
    given = inputs(family, padding=padding)
    mask = given.get("attention_mask")
    assert all(result[2] > 0 for result in results)
    for i, exact in enumerate(outputs(model, given)):
        found = [result[0][i] for result in results]
        assert same(found)
        if mask is not None and exact.shape[:2] == mask.shape:
            exact, found[0] = exact[mask.bool()], found[0][mask.bool()]
        error = (found[0] - exact).abs().max() / exact.square().mean().sqrt()
        assert error < TOLERANCE, f"output {i}: {error:.1e}"
    if family.kind == "decoder":
        with torch.no_grad():
            wanted = model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert all(torch.equal(result[1], wanted) for result in results)
