"""The router in C++ (ops/cpu/router.py) against its reference: equal logits give the same experts in the same order,
ties included, and the same bits of weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from infuse import ops
from infuse.ground.routing import (
    ACTIVATIONS,
    FLOAT32,
    LOGITS,
    MAX,
    PICKED,
    SIGMOID,
    SIGMOID_OF_SCORES,
    SOFTMAX_OF_SCORES,
    SPARSE_MIXER,
    SQRT_SOFTPLUS,
    WIDENED,
    Routing,
)
from infuse.native import kernels, limits
from infuse.ops import REFERENCE
from infuse.ops.cpu.router import numbers
from tests.support.tolerance import assert_near

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
WIDTH = 40
RULES = {
    "mixtral": Routing(2, normalise=True),
    "qwen": Routing(8, normalise=True, cast=LOGITS),
    "jamba": Routing(2, cast=ACTIVATIONS),
    "deepseek v3": Routing(4, FLOAT32, SIGMOID, normalise=True, eps=1e-20, scale=2.5, in_order=False, groups=4, kept=2),
    "mistral4": Routing(
        2, rounded_score=True, normalise=True, eps=1e-20, scale=1.3, in_order=False, groups=4, kept=2, fill=0.0
    ),
    "deepseek v2": Routing(
        3, FLOAT32, weights=PICKED, scale=16.0, in_order=False, groups=4, kept=1, ranked_by=MAX, fill=0.0
    ),
    "gpt-oss": Routing(4, score=None, rounded_score=True, weights=SOFTMAX_OF_SCORES),
    "granite": Routing(2, WIDENED, score=None, weights=SOFTMAX_OF_SCORES, cast=ACTIVATIONS),
    "ernie": Routing(3, FLOAT32, normalise=True, least=0.6, cast=ACTIVATIONS),
    "minimax": Routing(2, score=SIGMOID, normalise=True, in_order=False),
    "lfm2": Routing(2, score=SIGMOID, rounded_score=True, normalise=True, eps=1e-6, scale=1.7),
    "cohere2": Routing(2, score=None, rounded_score=True, weights=SIGMOID_OF_SCORES, normalise=True),
}


def whole(*sizes: int) -> Tensor:
    """Small whole numbers: their products are exact, whatever the order of the sum, and many are equal."""
    return torch.randint(-1, 2, sizes).float()


def given(rule: Routing, experts: int, tokens: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> Iterator[tuple]:
    """Arguments of the op: with and without bias and correction, in dtypes that routers hold them in."""
    for biased, correction_dtype in product((False, True), (None, F32, dtype)):
        bias = whole(experts).to(weight_dtype) if biased else None
        correction = None if correction_dtype is None else (whole(1, experts) / 8).to(correction_dtype)
        yield whole(tokens, WIDTH).to(dtype), whole(experts, WIDTH).to(weight_dtype), bias, correction, *rule


@pytest.mark.parametrize(("dtype", "weight_dtype"), [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32)], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_equal_logits_choose_and_weigh_alike(name: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    for experts, tokens in product((8, 32, 512), (1, 3, limits().plain_rows)):
        for args in given(RULES[name], experts, tokens, dtype, weight_dtype):
            rule_numbers = numbers(RULES[name], experts)  # type: ignore[misc]
            found = kernels().router.default(*args[:4], *rule_numbers)
            for a, b in zip(found, ops.router.reference(*args), strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape
                assert torch.equal(a, b), f"{experts} experts, {tokens} tokens"


@pytest.mark.parametrize("in_order", [True, False])
def test_ties_are_broken_as_by_topk(in_order: bool) -> None:
    """Of few and of many experts, one and all of them chosen: torch.topk sorts them in different ways."""
    for experts in (1, 2, 3, 8, 17, 60, 64, 65, 128, 129, 512):
        for top_k in {1, 2, 4, 8, experts // 2, experts} & set(range(1, experts + 1)):
            rule = Routing(top_k, score=None, rounded_score=True, in_order=in_order)
            rule_numbers = numbers(rule, experts)  # type: ignore[misc]
            for kinds in (1, 2, 5, 1000):  # kinds of logits
                weight = torch.randint(kinds, (experts, 1)).float()
                found = kernels().router.default(torch.ones(1, 1), weight, None, None, *rule_numbers)
                wanted = torch.topk(weight.t(), top_k, sorted=in_order)
                assert torch.equal(found[1], wanted.values) and torch.equal(found[2], wanted.indices), experts


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_logits_that_are_not_finite_choose_alike(name: str, value: float) -> None:
    for at in ((0, 0), (7, 3), (slice(None), 1)):
        for args in given(RULES[name], 8, 3, F32, F32):
            args[1][at] = value
            rule_numbers = numbers(RULES[name], 8)  # type: ignore[misc]
            found, wanted = kernels().router.default(*args[:4], *rule_numbers), ops.router.reference(*args)
            assert torch.equal(found[2], wanted[2])
            assert torch.equal(found[1].nan_to_num(), wanted[1].nan_to_num())


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_logits_are_the_products(dtype: torch.dtype) -> None:
    """Of widths that no register divides, of weights that threads share, with whole registers of NaN around."""
    for width, experts, logits in product((1, 15, 100, 1027), (1, 7, 256), (None, WIDENED, FLOAT32)):
        rule = Routing(1, score=None, **({"logits": logits} if logits else {}))
        weight = torch.full((experts + 2, width), float("nan"), dtype=dtype)
        weight[1:-1] = torch.randn(experts, width).to(dtype)
        x, bias = torch.randn(5, width).to(dtype), torch.randn(experts).to(dtype)
        args = (x, weight[1:-1], bias, None, *rule)
        found, wanted = (ops.router.body(body)(*args)[0] for body in ("cpu", REFERENCE))
        assert found.dtype == wanted.dtype
        assert_near(found, wanted, dtype)
        one_by_one = torch.cat([ops.router.body("cpu")(x[i : i + 1], *args[1:])[0] for i in range(5)])
        assert torch.equal(found, one_by_one), "other tokens decide nothing"


def test_the_kernel_leaves_rules_that_it_does_not_know() -> None:
    assert numbers(Routing(2, score=SPARSE_MIXER, jitter=0.1), 8) is None
    assert numbers(Routing(2, score=SQRT_SOFTPLUS), 8) is None
    assert numbers(Routing(2, cap=1.5), 8) is None
    assert numbers(Routing(9), 8) is None
    assert numbers(Routing(2, groups=3, kept=1), 8) is None
    assert numbers(Routing(2, groups=8, kept=1), 8) is None, "groups of one have no two best"
    assert numbers(Routing(2, groups=8, kept=1, ranked_by=MAX), 8) is not None
