"""Heads and tables of a checkpoint are proven with few of their rows in memory at a time, and still on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import infuse
from infuse import native
from infuse.apply import build
from infuse.architectures.part import Matrix
from infuse.ground.errors import ProofError
from infuse.ground.modes import Transparent
from infuse.ops.cpu.quantized_linear import PANEL_ROWS
from infuse.proof import compare
from infuse.proof.cases import matrix_cases
from infuse.weights import loader
from tests.support.gguf_files import llama_tensors, llama_values, matrices_in, write

ROWS, INPUTS, PART_ROWS = 1003, 256, 96  # the last part is short
TABLE_BYTES = 4 * ROWS * INPUTS


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose head and table are large beside `PART_VALUES`."""
    if isinstance(native.kernels(), str):
        pytest.skip("without kernels the weights are dequantized for good")
    monkeypatch.setattr(loader, "PART_VALUES", PART_ROWS * INPUTS)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config())
    write(tmp_path / "model.gguf", "llama", llama_values(model.config), llama_tensors(model), matrices_in("Q8_0"))
    return tmp_path / "model.gguf"


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=ROWS,
        hidden_size=INPUTS,
        intermediate_size=INPUTS,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )


def load(path: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    with torch.device("meta"):
        model = LlamaForCausalLM(config()).eval()
    return infuse.init_inference(
        model, checkpoint=str(path), dtype=dtype, replace_with_kernel_inject=True, verify="strict", progress=False
    )


class Largest(Transparent, TorchDispatchMode):
    """The bytes of the largest floating tensor with values that an operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:  # of a model whose buffers are computed again
            return made
        floating = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        self.nbytes = max([self.nbytes, *(leaf.nbytes for leaf in floating if not leaf.is_meta)])
        return made


def without_row(row: int, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a row of new modules be zeros: of those with as many as the vocabulary by their attribute `rows`."""
    fill_module, (panel, lane) = build.fill_module, divmod(row, PANEL_ROWS)

    def filled(module: Any, *args: Any) -> None:
        fill_module(module, *args)
        if getattr(module, rows, 0) == ROWS:
            module.scale[panel, :, lane] = 0

    monkeypatch.setattr(build, "fill_module", filled)


def test_neither_head_nor_table_is_ever_whole(path: Path) -> None:
    with Largest() as largest:
        engine = load(path)
    depths = {step.path: step.depth for step in engine.plan.steps}
    assert depths["lm_head"] == "linear" and depths["model.embed_tokens"] == "embedding", depths
    assert 0 < largest.nbytes <= 0.8 * TABLE_BYTES


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("row", (0, PART_ROWS, ROWS - 1))
def test_one_wrong_row_is_found(path: Path, row: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    without_row(row, "out_features", monkeypatch)
    with pytest.raises(ProofError, match="lm_head: differs from the original"):
        load(path, dtype)


def test_a_wrong_row_of_a_table_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_row(ROWS - 1, "num_embeddings", monkeypatch)
    with pytest.raises(ProofError, match=r"embed_tokens: differs from the original"):
        load(path)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("bias", (False, True))
def test_parts_give_the_results_of_the_whole(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 50, bias)
    cases = matrix_cases(Matrix("weight", 50, 64, bias), torch.device("cpu"))

    def parts() -> Iterator[nn.Linear]:
        for rows in torch.arange(50).split(16):
            part = nn.Linear(64, len(rows), bias)
            part.load_state_dict({name: value[rows] for name, value in linear.state_dict().items()})
            yield part

    with torch.no_grad():
        whole, joined = compare.expected(linear, cases, dtype), compare.expected_of_parts(parts(), cases, dtype)
    for a, b in zip(whole.exact, joined.exact, strict=True):
        assert a.kinds == b.kinds
        torch.testing.assert_close([*b], [*a])
    linear.to(dtype)
    with torch.no_grad():
        rounded = [compare.outputs(linear, case, dtype, None) for case in cases]
    errors = [[compare.distance(a, b)] for (a,), (b,) in zip(rounded, whole.exact, strict=True)]
    torch.testing.assert_close(torch.tensor(joined.own_error), torch.tensor(errors), rtol=0.05, atol=1e-6)
