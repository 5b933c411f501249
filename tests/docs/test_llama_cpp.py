"""docs/from-llama.cpp.md: its commands and its Python run on a small GGUF file; its lists are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from infuse.apply.load import planned
from infuse.config.inference import InferenceConfig
from infuse.ground.device import Device
from infuse.parallel.mesh import Mesh
from infuse.quant.parse import quant_format
from infuse.weights.gguf.blocks import FORMATS
from infuse.weights.gguf.families import FAMILIES
from infuse.weights.gguf.file import PLAIN, TYPES
from tests.support.commands import run
from tests.support.gguf_files import llama_tensors, llama_values, vocabulary_of, write

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "from-llama.cpp.md").read_text(encoding="utf-8")
FOLDER = ROOT / "examples" / "tiny_llama"


def of_q4_k_m(name: str, tensor: Tensor) -> str:
    """The types that llama.cpp's Q4_K_M gives the matrices of a model of six layers."""
    if tensor.dim() < 2:
        return "F32"
    has_more = re.fullmatch(r"blk\.[25]\.(attn_v|ffn_down)\.weight", name) or name.startswith("token_embd")
    return "Q6_K" if has_more else "Q4_K"


@pytest.fixture
def in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`model.gguf` in the current folder: the bundled model's sizes and tokenizer, with random blocks."""
    pytest.importorskip("gguf")
    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path / "model.gguf", "llama", llama_values(model.config), llama_tensors(model), of_q4_k_m,
        vocabulary_of(FOLDER),
    )  # fmt: skip


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def test_the_commands_and_the_example_run(in_its_folder: None, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [shlex.split(line)[1:] for line in re.findall(r"^    (infuse .+)$", TEXT, re.MULTILINE)]
    assert [command[0] for command in commands] == ["plan", "generate"]
    plan, text = (run(*command, "--device", "cpu")[0] for command in commands)
    told = [in_one_line(line) for line in re.findall(r"^    ((?:block|linear|embedding) .+?)…?$", TEXT, re.MULTILINE)]
    assert len(told) == 4 and all(line in in_one_line(plan) for line in told), plan

    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = {}
    capsys.readouterr()
    exec(compile(example, "docs/from-llama.cpp.md", "exec"), names)
    prompt = shlex.split(next(line for line in TEXT.splitlines() if "--prompt" in line))[4]
    assert capsys.readouterr().out.strip() == prompt + text.strip()
    assert "taken as it is" in str(names["engine"].plan)


def test_what_ranks_keep(in_its_folder: None) -> None:
    """The line of docs/checkpoints.md about the same file on two ranks."""
    (told,) = re.findall(r"^left .+$", (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8"), re.MULTILINE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(".", gguf_file="model.gguf"))
    config = InferenceConfig(checkpoint="model.gguf", dtype="bf16")
    assert told in str(planned(model, config, Device.of(torch.device("cpu")), Mesh(tp=2)))


def test_the_architectures_and_types_are_those_that_are_read() -> None:
    (named,) = re.findall(r"^`general.architecture` may be (.+?)\. Any other", TEXT, re.MULTILINE | re.DOTALL)
    assert re.findall(r"`([\w-]+)`", named) == list(FAMILIES)
    bits = {name: 8 * size / values for name, values, size in TYPES.values()}
    rows = re.findall(r"^\| ([\w]+) \| `([\w:]+)` \| ([\d.]+) \| ([\d.]+) \|$", TEXT, re.MULTILINE)
    assert {type: text for type, text, *_ in rows} == FORMATS
    for type, text, stored, held in rows:
        assert float(stored) == bits[type]
        assert float(held) == quant_format(text).nbytes(4096, 4096) * 8 / 4096**2
    (refused,) = re.findall(r"take 8\.\s(.+?) are refused", TEXT, re.DOTALL)
    starts = re.findall(r"[A-Z]\w+", refused)
    others = bits.keys() - FORMATS.keys() - PLAIN.keys()
    assert others == {name for name in bits.keys() - FORMATS.keys() if name.startswith(tuple(starts))}
