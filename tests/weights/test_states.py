"""Weights of mixers with states: number formats, our own shards, checkpoints, state dicts and adapters.

Products are quantized; the convolution, the decay's parameters and the norms stay as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor

import infuse
from infuse.layers.recurrent.convolved import Recurrent
from tests.support.ranks import Ranks
from tests.support.states import ALL_NAMES, ONE_OF_EACH, close, family_of, ids_of

FORMATS = ("int8:8", "int4:8:asymmetric", "fp8:8")
WIDE = ("qwen3_5", "granitemoehybrid-dense", "lfm2")  # each kind of mixer that ranks share


def made(name: str, **more: Any) -> Any:
    return family_of(name).make(**more)


def on_meta(name: str) -> Any:
    family = family_of(name)
    with torch.device("meta"):
        return family.model(family.config(**family.values)).eval()


def infer(model: Any, **keys: Any) -> infuse.InferenceEngine:
    return infuse.init_inference(model, **{"dtype": "fp32", "progress": False, **keys})


@torch.no_grad()
def logits(model: Any, name: str) -> Tensor:
    return model(input_ids=ids_of(name), use_cache=False).logits


def mixers(engine: infuse.InferenceEngine) -> list[tuple[str, Recurrent]]:
    return [(path, part) for path, part in engine.module.named_modules() if isinstance(part, Recurrent)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "granitemoehybrid", "kimi_linear-low-rank", "jamba"])
def test_products_are_quantized_and_the_rest_is_exact(name: str, format: str) -> None:
    """The numbers are those of the original with rounded weights."""
    engine, original = infer(made(name), quant=format, verify="off"), made(name)
    exact = {key: value.clone() for key, value in original.state_dict().items()}
    with infuse.dequantized(engine):
        rounded = engine.module.state_dict()
    steps = {step.path: step for step in engine.plan.steps if step.depth == "block"}
    for path, mixer in mixers(engine):
        formats = next(step.formats for at, step in steps.items() if path.startswith(f"{at}."))
        leaf = path.rpartition(".")[2]
        assert {f"{leaf}.in.weight", f"{leaf}.out.weight"} <= formats.keys()
        for small in ("conv", "A_log", "dt_bias", "D", "norm"):
            parameter = mixer._parameters.get(small)
            assert parameter is None or parameter.dtype is torch.float32
    small = [key for key in exact if any(part in key for part in ("conv", "A_log", "dt_bias", ".D", "norm"))]
    kept = [key for key in small if not key.endswith("_proj.weight")]
    assert kept and all(torch.equal(rounded[key], exact[key]) for key in kept)
    assert any(not torch.equal(rounded[key], exact[key]) for key in exact)
    original.load_state_dict(rounded)
    close(logits(engine, name), logits(original, name))


@pytest.mark.parametrize("name", ALL_NAMES)
def test_state_dicts_and_files_are_the_originals(name: str, tmp_path: Path) -> None:
    original, engine = made(name), infer(made(name))
    exact, found = original.state_dict(), engine.module.state_dict()
    assert list(found) == list(exact) and all(torch.equal(found[key], exact[key]) for key in exact)
    engine.module.save_pretrained(tmp_path)
    again = family_of(name).model.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, name), logits(original, name))
    read = infer(on_meta(name), checkpoint=str(tmp_path))
    assert torch.equal(logits(read, name), logits(engine, name))


@pytest.mark.parametrize("quant", [None, "int8:8"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_shards_are_read_back_bit_for_bit(name: str, quant: str | None, tmp_path: Path) -> None:
    saved = infer(made(name), quant=quant, save_mp_checkpoint_path=str(tmp_path))
    read = infer(on_meta(name), quant=quant, checkpoint=str(tmp_path))
    assert torch.equal(logits(read, name), logits(saved, name))


def on_rank(name: str, quant: str | None, saves: str | None, reads: str | None) -> Tensor:
    tp = {"tp_size": dist.get_world_size()}
    model = on_meta(name) if reads else made(name)
    engine = infer(model, quant=quant, tensor_parallel=tp, save_mp_checkpoint_path=saves, checkpoint=reads)
    assert mixers(engine)
    return logits(engine, name)


@pytest.mark.parametrize("name", WIDE)
def test_shards_of_ranks_are_read_on_as_many_and_on_fewer(name: str, ranks: Ranks, tmp_path: Path) -> None:
    exact = logits(made(name), name)
    whole, quantized = str(tmp_path / "whole"), str(tmp_path / "quantized")
    for found in (*ranks.run(3, on_rank, name, None, whole, None), *ranks.run(2, on_rank, name, None, None, whole)):
        close(found, exact)
    close(logits(infer(on_meta(name), checkpoint=whole), name), exact)
    saved, read = (ranks.run(2, on_rank, name, "int8:8", *paths) for paths in ((quantized, None), (None, quantized)))
    assert all(torch.equal(one, other) for one, other in zip(saved, read, strict=True))


@pytest.mark.parametrize("where", [["in_proj", "out_proj", "in_proj_qkv", "in_proj_a"], "all-linear"], ids=str)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "granitemoehybrid", "jamba"])
def test_adapters(name: str, where: Any) -> None:
    """Layers with adapters are no blocks, and the rest is."""

    def adapted() -> Any:
        model = get_peft_model(made(name), LoraConfig(r=4, lora_alpha=8, target_modules=where))
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
        return model.eval()

    original, adapter = adapted(), adapted()
    engine = infer(adapter)
    close(logits(adapter, name), logits(original, name))
    given = dict(input_ids=ids_of(name), max_new_tokens=6, do_sample=False)
    assert torch.equal(engine.generate(**given), original.generate(**given))
