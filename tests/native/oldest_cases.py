"""What a user does first, under the oldest versions that pyproject.toml declares: test_lower_bounds.py runs these in a
process of its own.
"""

from __future__ import annotations

import json
import types
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers

import infuse
from infuse.config.inference import InferenceConfig
from infuse.ground.logs import progress_bars
from infuse.weights.safetensors_file import DTYPES, SafetensorsFile
from tests.models.families import BY_NAME, GQA, Family, inputs
from tests.support.commands import run
from tests.support.oldest import PYTHON_PACKAGES, lower_bounds, same_version
from tests.support.tolerance import assert_near

TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny_llama"
INT4 = ("--quant", "int4")
MIXTRAL = Family("mixtral", transformers.MixtralConfig, transformers.MixtralForCausalLM, values=GQA)


def test_these_are_the_oldest() -> None:
    bounds = lower_bounds()
    assert [name for name in PYTHON_PACKAGES if not same_version(version(name), bounds[name])] == []


@pytest.mark.parametrize("family", [BY_NAME["llama"], BY_NAME["gpt2"], BY_NAME["bert"], MIXTRAL], ids=lambda f: f.name)
def test_a_model_computes_the_same(family: Family) -> None:
    original, given = family.make(), inputs(family)
    engine = infuse.init_inference(family.make(), dtype=torch.float32)
    int8 = infuse.init_inference(family.make(), dtype=torch.float32, quant="int8")
    assert any(step.kind.depth == "block" for step in engine.plan.steps), engine.plan
    with torch.no_grad():
        wanted = original(**given).logits
        assert_near(engine(**given).logits, wanted, torch.float32, times=4)
        assert (int8(**given).logits - wanted).norm() < 0.05 * wanted.norm()
    if family.kind == "decoder":
        answers = [model.generate(**given, max_new_tokens=9, do_sample=False) for model in (engine, original)]
        assert torch.equal(*answers)


def test_commands_and_shards(tmp_path: Path) -> None:
    assert "Make a Hugging Face model run" in run("--help")[0]
    assert "mxfp4" in run("plan", TINY_LLAMA, "--quant", "mxfp4")[0]
    assert "Missing argument" in run("plan", code=2)[1]
    assert "int9" in run("plan", TINY_LLAMA, "--dtype", "int9", code=2)[1]  # pydantic's error in our words
    run("shard", TINY_LLAMA, tmp_path / "shards", *INT4)
    asked = ("--prompt", "def add(", "--max-new-tokens", 8)
    from_shards, alive = run("generate", tmp_path / "shards", *asked), run("generate", TINY_LLAMA, *asked, *INT4)
    assert from_shards[0] == alive[0]


def test_keys_with_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python 3.10, which is stood in for here, dict[str, int] passes for a class; pydantic 2.0 has no answer then
    whether it is one of ours, and each key that takes a dict raised TypeError.
    """
    monkeypatch.setattr("inspect.isclass", lambda value: isinstance(value, (type, types.GenericAlias)))
    assert InferenceConfig(zero={"stage": 0}).zero == {"stage": 0}


def test_every_dtype_of_safetensors_is_read(tmp_path: Path) -> None:
    """An older library calls the header corrupt that names a dtype which it does not know."""
    for name, dtype in DTYPES.items():
        header = json.dumps({"x": {"dtype": name, "shape": [8], "data_offsets": [0, 8 * dtype.itemsize]}}).encode()
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8 * dtype.itemsize))
        assert torch.equal(SafetensorsFile(path).read("x").view(torch.uint8), torch.zeros(8 * dtype.itemsize).byte())


def test_progress_bars(capsys: pytest.CaptureFixture) -> None:
    with progress_bars(True) as progress:
        progress(2, 2, "layers")
    assert "layers" in capsys.readouterr().err
