"""On an NVIDIA GPU: every family in every dtype against the original in float32, and tokens equal to transformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import infuse
from tests.models.families import DECODERS, FAMILIES, Family, inputs
from tests.support.decoding import ON_HOST, SAMPLING
from tests.support.on_gpu import CUDA, assert_close, error_of, first_tensor, moved, needs_gpu, routes

pytestmark = needs_gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def exact_products() -> Any:
    """float32 products in float32: the originals are the reference."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def runs(call: Callable[..., Any], **given: Any) -> Any:
    """What the original says; a test of what it cannot do in this version of transformers is skipped."""
    try:
        return call(**given)
    except (RuntimeError, TypeError) as error:
        pytest.skip(f"the original fails in transformers {transformers.__version__}: {error}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_forward(family: Family, dtype: torch.dtype) -> None:
    original, own = family.make().to(CUDA), family.make().to(CUDA, dtype)
    engine = infuse.init_inference(family.make().to(CUDA), dtype=dtype, enable_cuda_graph=True)
    said = {}
    with torch.no_grad():
        for step in range(4):  # as it is, captured, replayed
            for padding in (None, "left" if family.kind == "decoder" else "right"):
                given = inputs(family, padding=padding, seed=step)
                results = [first_tensor(runs(original, **moved(given)))]
                results += [first_tensor(model(**moved(given, dtype))) for model in (own, engine.module)]
                shown = given.get("attention_mask")
                if shown is not None and results[0].shape[:2] == shown.shape:  # what padding sees is nobody's affair
                    results = [result[shown.bool()] for result in results]
                said[f"call {step}, padding {padding}"] = results
    # Rounded otherwise, the same numbers may end up far away: how far, one call does not tell.
    rounding = max(float(error_of(rounded, exact).max()) for exact, rounded, _ in said.values())
    for call, (exact, _, found) in said.items():
        assert_close(found, exact, dtype, call, rounding, routes(original))


@pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.name)
def test_tokens(family: Family) -> None:
    original, engine = family.make().to(CUDA), infuse.init_inference(family.make().to(CUDA), dtype="fp32")
    for padding in ("left", None):
        given = moved(inputs(family, batch=3, tokens=9, padding=padding, seed=11))
        for _ in range(2):
            exact = runs(original.generate, **given, max_new_tokens=30)
            assert torch.equal(engine.generate(**given, max_new_tokens=30), exact)


@pytest.mark.parametrize("mode", [*SAMPLING, *(name for name in ON_HOST if "own" not in name)])
def test_ways_to_choose(mode: str) -> None:
    """Random numbers are drawn as transformers draws them, inside a graph, too."""
    family = next(family for family in DECODERS if family.name == "llama")
    original = family.make(tie_word_embeddings=False).to(CUDA)
    engine = infuse.init_inference(family.make(tie_word_embeddings=False).to(CUDA), dtype="fp32")
    asked = SAMPLING[mode] if mode in SAMPLING else ON_HOST[mode]()
    given = moved(inputs(family, batch=3, tokens=9, padding="left", seed=11))
    for seed in (5, 6):
        found = []
        for model in (original, engine):
            torch.manual_seed(seed)
            found.append(model.generate(**given, **{"max_new_tokens": 25, **asked}))
        assert torch.equal(*found)


@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "fp6"])
def test_quantized(format: str) -> None:
    """The device and the CPU, whose kernels have other tests, agree on what a quantized model says."""
    family = next(family for family in DECODERS if family.name == "llama")
    on_cpu = infuse.init_inference(family.make(hidden_size=128, intermediate_size=256), dtype="fp32", quant=format)
    on_gpu = infuse.init_inference(
        family.make(hidden_size=128, intermediate_size=256).to(CUDA), dtype="bf16", quant=format
    )
    given = inputs(family)
    with torch.no_grad():
        assert_close(on_gpu(**moved(given)).logits, on_cpu(**given).logits, torch.bfloat16, format)
