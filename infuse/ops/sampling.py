"""The next token from its scores: the largest, or drawn after temperature, top-k and top-p.

Suffixes: R rows (sequences), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from infuse.ops.op import Case, op


@op("argmax(Tensor logits) -> Tensor")
def argmax(logits_RV: Tensor) -> Tensor:
    """The index of the largest score of each row, int64 [R]: the first of equal ones; NaN counts as the largest."""
    return logits_RV.argmax(dim=-1)


@op("sample(Tensor logits, Tensor uniform, float temperature, int top_k, float top_p) -> Tensor")
def sample(logits_RV: Tensor, uniform_R: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """An index of each row, int64 [R], drawn by `uniform` (float32 in [0, 1)) from softmax(logits / temperature),
    float32 inside.

    `top_k` > 0 keeps the k largest, `top_p` < 1 then the fewest largest with that share of the probability, one at
    least; whoever equals the smallest one kept is kept too. Drawn is the first index, in the order of the vocabulary,
    at which the sum of what is kept exceeds
    `uniform` of it. `temperature` must be positive; the scores must not be NaN.
    """
    scores = logits_RV.float() / temperature
    if 0 < top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(top_k, dim=-1).values[:, -1:], float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    if top_p < 1:
        sorted_weights = weights.sort(dim=-1, descending=True).values
        behind = (sorted_weights.cumsum(-1) < top_p).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
        weights = weights.masked_fill(weights < sorted_weights.gather(-1, behind), 0.0)
    sums = weights.cumsum(-1)
    found = (sums <= uniform_R[:, None] * sums[:, -1:]).sum(-1)
    places = torch.arange(scores.shape[-1], device=scores.device)
    return torch.minimum(
        found, torch.where(weights > 0, places, 0).amax(-1)
    )  # rounding may leave nothing above the target


@argmax.fake
def _argmax_fake(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


@sample.fake
def _sample_fake(logits: Tensor, uniform: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


_SHAPES = ((2, 300), (3, 33), (2, 1), (0, 40))
_SETTINGS = ((0.9, 20, 0.5), (1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (1.0, 1, 0.0))  # temperature, top_k, top_p


@argmax.cases
def _argmax_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for shape in _SHAPES:
        yield Case(f"{shape}", (torch.randn(shape, dtype=dtype, device=device),))
    yield Case("equal ones", (torch.randint(3, (4, 500), device=device).to(dtype),))


@sample.cases
def _sample_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for shape in _SHAPES:
        logits, uniform = torch.randn(shape, dtype=dtype, device=device) * 3, torch.rand(shape[0], device=device)
        for temperature, top_k, top_p in _SETTINGS[: 5 if shape[0] == 2 else 1]:
            yield Case(f"{shape} {temperature=} {top_k=} {top_p=}", (logits, uniform, temperature, top_k, top_p))
