"""Modules without parameters: nothing of them is replaced, the plan says so, and they run as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse.ground.device import device_of


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"doubled": x * 2, "others": [x + 1]}


class Table(nn.Module):
    """Over a buffer alone, which is wide."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x.to(self.weight.dtype) @ self.weight)


class Masked(nn.Module):
    """Over a buffer without a fraction, which no dtype changes."""

    keep: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keep", torch.arange(8) % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(~self.keep, 0.0)


class Shifted(nn.Module):
    """Its only parameter is of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.arange(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


MODULES: dict[str, Callable[[], nn.Module]] = {
    "an activation": nn.GELU,
    "a norm without weights": lambda: nn.LayerNorm(8, elementwise_affine=False),
    "a dropout": lambda: nn.Dropout(0.5),
    "a wrapper": lambda: nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh())),
    "nothing": nn.Sequential,
    "results in a dict": Doubles,
    "a buffer": Table,
    "a buffer of booleans": Masked,
    "a parameter of integers": Shifted,
}
ASKED: tuple[dict[str, Any], ...] = (
    {},
    dict(dtype="fp32", replace_with_kernel_inject=True),
    dict(dtype="int8", replace_with_kernel_inject=True),
    dict(dtype="fp32", enable_cuda_graph=True, verify="all"),
    dict(dtype="fp32", quant=dict(weight=dict(num_bits=4))),
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:infuse. NOTHING IS ACCELERATED", "ignore:infuse. enable_cuda_graph", "ignore:deprecated"
)


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_it_runs_as_it_is(name: str, asked: dict[str, Any]) -> None:
    module = MODULES[name]()
    wide = asked.get("dtype") == "fp32"
    original = copy.deepcopy(module).eval().to(torch.float32 if wide else torch.bfloat16)
    engine = infuse.init_inference(module, **asked)
    assert engine.module is module and not engine.training
    assert not engine.plan.steps and "nothing is replaced" in str(engine.plan)
    assert str(infuse.plan(MODULES[name](), **asked)) == str(engine.plan)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(engine(x), original(x), rtol=0, atol=0)
    with engine.profile():
        engine(x)
    assert str(engine.report())


def test_one_inside_a_model_is_none() -> None:
    """A model around it has parameters, and is replaced."""
    model = nn.Sequential(Table(), nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    original = copy.deepcopy(model)
    engine = infuse.init_inference(model, dtype="fp32", replace_with_kernel_inject=True)
    x = torch.randn(3, 8)
    torch.testing.assert_close(engine(x), original(x), rtol=1e-4, atol=1e-5)


def test_what_is_on_meta_is_named(tmp_path: Path) -> None:
    with pytest.raises(infuse.ConfigError, match=r"1 buffers are on the meta device \(weight, ...\)"):
        infuse.init_inference(Table().to("meta"), dtype="fp32")
    assert infuse.plan(Table().to("meta"), dtype="fp32").steps == ()


def test_the_device_is_that_of_buffers_where_there_are_no_parameters() -> None:
    assert device_of(nn.GELU(), nn.Sequential()) == torch.device("cpu")
    assert device_of(nn.GELU(), Table().to("meta")) == torch.device("meta")
    assert device_of(Table(), nn.Linear(2, 2, device="meta")) == torch.device("meta"), "parameters come first"
