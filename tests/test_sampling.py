"""The reference of the draw against transformers' own processors of scores, and against counting."""

from __future__ import annotations

import pytest
import torch
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from infuse import ops

DRAWS = 4000


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (7, 1.0), (0, 0.8), (12, 0.6), (3, 0.01), (500, 0.95)])
def test_every_index_is_drawn_as_often_as_it_is_likely(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(1, 40) * 2
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(min(top_k, 40))(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    wanted = torch.softmax(scores, dim=-1)[0]
    uniform = (torch.arange(DRAWS) + 0.5) / DRAWS  # each index is met by its share of these, up to the two at its ends
    drawn = ops.sample(logits.expand(DRAWS, -1), uniform, temperature, top_k, top_p)
    found = torch.bincount(drawn, minlength=40) / DRAWS
    assert bool((found[wanted == 0] == 0).all())
    torch.testing.assert_close(found, wanted, atol=2 / DRAWS, rtol=0)


def test_argmax_is_the_first_of_equal_scores() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 1.0], [0.0, float("nan"), 9.0]])
    assert ops.argmax(scores).tolist() == [1, 0, 1]
