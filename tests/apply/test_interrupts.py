"""Ctrl-C at any moment: `init_inference` leaves the original model or the complete one, `generate` leaves nothing
behind.

A real SIGINT is raised before a chosen line of what runs, at points spread evenly over all of it.
"""

from __future__ import annotations

import copy
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infuse
from tests.models.families import BY_NAME, inputs
from tests.support.checkpoints import on_meta
from tests.support.graphed import graphed

# Lines of these files count: ours, and those of others that put hooks on and take them off for us.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
TRACED = (str(Path(infuse.__file__).parent), "contextlib.py", "torch/utils/hooks.py", "torch/nn/modules/module.py")
GIVEN = inputs(BY_NAME["llama"])
POINTS, MANY = 16, 40  # in each test; in each slow one


class Interrupted:
    """`with Interrupted(number):` raises SIGINT before the line of that number; `lines` is how many there were."""

    def __init__(self, number: int | None = None):
        self.number, self.lines = number, 0

    def __enter__(self) -> Interrupted:
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception: Any) -> None:
        sys.settrace(None)

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        return self._line if any(part in frame.f_code.co_filename for part in TRACED) else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        self.lines += 1
        if self.lines == self.number:
            signal.raise_signal(signal.SIGINT)
        return self._line


def points(work: Callable[[], Any], count: int) -> list[int]:
    """The numbers of `count` lines of `work`, spread over all of them."""
    with Interrupted() as run:
        work()
    step = max(run.lines // count, 1)
    return list(range(1 + step // 2, run.lines, step))


def face(model: nn.Module) -> list[tuple]:
    """What each module is made of: its class, its attributes, how many hooks it has, its tensors' dtypes."""
    return [
        (
            path,
            type(module).__name__,
            sorted(vars(module)),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            [
                (name, None if p is None else p.dtype)
                for name, p in (*module._parameters.items(), *module._buffers.items())
            ],
        )
        for path, module in model.named_modules()
    ]


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        if isinstance(model, nn.Sequential):
            return model(torch.linspace(-1, 1, 5 * 48).view(5, 48))
        return model(**GIVEN)[0]


def llama() -> nn.Module:
    return BY_NAME["llama"].make(num_hidden_layers=2)


def starts_are_whole(original: nn.Module, count: int, **keys: Any) -> None:
    """Interrupt `init_inference` at `count` points: each leaves the original or the complete model, and a later start
    works.
    """
    keys = {"dtype": "fp32", "progress": False, **keys}
    complete = copy.deepcopy(original)
    infuse.init_inference(complete, **keys)
    faces = {"original": face(original), "complete": face(complete)}
    seen = {"original": 0, "complete": 0}
    wanted = {
        "original": None if next(original.parameters()).is_meta else outputs(original),
        "complete": outputs(complete),
    }
    handler = signal.getsignal(signal.SIGINT)
    another = copy.deepcopy(original)
    for number in points(lambda: infuse.init_inference(another, **keys), count):
        model = copy.deepcopy(original)
        with pytest.raises(KeyboardInterrupt), Interrupted(number):
            infuse.init_inference(model, **keys)
        found = [state for state, its in faces.items() if its == face(model)]
        assert found, f"interrupted at line {number}: neither the original nor complete"
        seen[found[0]] += 1
        assert signal.getsignal(signal.SIGINT) is handler
        if wanted[found[0]] is not None:
            assert torch.equal(outputs(model), wanted[found[0]])
        if found == ["original"] and not seen["original"] % 10:
            infuse.init_inference(model, **keys)
            assert torch.equal(outputs(model), wanted["complete"])
    assert count < MANY or all(seen.values())


def test_a_start_without_a_proof_that_is_interrupted() -> None:
    starts_are_whole(llama(), POINTS, verify="off", dtype="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"quant": "int8:4"}], ids=str)
def test_a_start_that_is_interrupted_anywhere(keys: dict) -> None:
    starts_are_whole(llama(), MANY, **keys)


@pytest.mark.parametrize("kind", ["meta", "live"])
def test_a_load_that_is_interrupted_leaves_the_original_or_the_complete_model(kind: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    original = (
        on_meta("llama", num_hidden_layers=2) if kind == "meta" else BY_NAME["llama"].make(seed=1, num_hidden_layers=2)
    )
    starts_are_whole(original, POINTS, checkpoint=str(tmp_path), quant="int8:4")


def test_a_start_without_a_spec_that_is_interrupted() -> None:
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 48)).eval()
    starts_are_whole(original, POINTS, quant="int8:4")


# ---- generate ----


def answers_leave_nothing(model: Any, count: int, **asked: Any) -> None:
    """Interrupt `generate` at `count` points: each leaves the model as it was, and the next answer is correct."""
    asked = {
        **GIVEN,
        "attention_mask": torch.ones_like(GIVEN["input_ids"]),
        "max_new_tokens": 6,
        "do_sample": False,
        **asked,
    }
    wanted = model.generate(**asked)
    before, handler = face(model), signal.getsignal(signal.SIGINT)
    for number in points(lambda: model.generate(**asked), count):
        with (
            suppress(KeyboardInterrupt),
            Interrupted(number),
        ):  # Python itself swallows one that meets the end of a generator
            model.generate(**asked)
        assert face(model) == before and signal.getsignal(signal.SIGINT) is handler, f"interrupted at line {number}"
        assert torch.equal(model.generate(**asked), wanted), f"interrupted at line {number}"


@pytest.mark.slow
def test_an_answer_that_is_interrupted_anywhere() -> None:
    answers_leave_nothing(infuse.init_inference(llama(), dtype="fp32").module, MANY)


@pytest.mark.parametrize("beams", [1, 2])
def test_an_answer_by_graphs_that_is_interrupted_leaves_nothing_behind(beams: int) -> None:
    engine, backend = graphed(llama())
    answers_leave_nothing(engine.module, POINTS, num_beams=beams)


def test_a_generator_is_interrupted_while_it_computes() -> None:
    """What is held back is short: an interrupt in the middle of a long answer ends it soon."""
    engine = infuse.init_inference(llama(), dtype="fp32")

    class Presses:
        tokens = 0

        def put(self, value: torch.Tensor) -> None:
            self.tokens += 1
            if self.tokens == 5:
                signal.raise_signal(signal.SIGINT)

        def end(self) -> None:
            pass

    streamer = Presses()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(GIVEN["input_ids"], max_new_tokens=100, do_sample=False, streamer=streamer)
    assert streamer.tokens <= 6
