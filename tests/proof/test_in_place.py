"""A linear is proven inside the module that calls it: what that one reads of it besides its output is seen before the
swap.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as t
from torch import Tensor, nn

import infuse
import infuse.apply.mismatch as proof_of_called
from infuse.layers.linear import QuantizedLinear
from infuse.plan.plan import Plan
from infuse.proof.in_place import find_callers
from tests.models.families import BY_NAME

WIDTH = 32


class ReadsTheWeight(nn.Module):
    """Multiplies with the weight itself, and never calls the linear. Plans do not see how these classes read it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def part(self) -> nn.Module:
        return self.up

    def forward(self, x: Tensor) -> Tensor:
        up = self.part()
        return F.linear(x, up.weight, up.bias)


class CastsToTheWeight(ReadsTheWeight):
    """Brings x to the dtype of the weight, as many models do."""

    def forward(self, x: Tensor) -> Tensor:
        up = self.part()
        return up(x.to(up.weight.dtype))


class AddsTheWeight(ReadsTheWeight):
    """Calls the linear, and adds a column of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        up = self.part()
        return up(x) + up.weight.to(x.dtype)[:, 0]


class Calls(ReadsTheWeight):
    """Calls the linear and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


class Model(nn.Module):
    def __init__(self, layer: type[nn.Module], layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = torch.tanh(layer(hidden_states))
        return self.head(hidden_states)


def made(layer: type[nn.Module], **keys: Any) -> tuple[Tensor, Tensor, Plan, nn.Module]:
    """What a model gives before and after, its plan and itself."""
    torch.manual_seed(0)
    model, x = Model(layer).eval(), torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        before = model(x)
        engine = infuse.init_inference(model, dtype="fp32", **keys)
        return before, engine(x), engine.plan, model


@pytest.mark.parametrize("layer", [ReadsTheWeight, AddsTheWeight])
def test_a_caller_that_reads_the_weight_keeps_its_linear(layer: type[nn.Module]) -> None:
    before, after, plan, model = made(layer, quant="int8:16")
    refused = {left.path: left.why for left in plan.left if left.why.startswith("refused")}
    assert set(refused) == {f"layers.{i}.up" for i in range(3)}
    assert all(f"{layer.__name__} around it" in why for why in refused.values())
    assert isinstance(model.head, QuantizedLinear)
    assert float((after - before).norm() / before.norm()) < 0.02
    with pytest.raises(infuse.ProofError, match=f"layers.0.up: {layer.__name__} around it"):
        made(layer, quant="int8:16", verify="strict")


@pytest.mark.parametrize("layer", [ReadsTheWeight, CastsToTheWeight, AddsTheWeight])
def test_a_plain_linear_may_be_read(layer: type[nn.Module]) -> None:
    before, after, plan, _ = made(layer)
    assert not [left for left in plan.left if left.why.startswith("refused")]
    assert torch.allclose(before, after, atol=1e-5)


@pytest.mark.parametrize("layer", [Calls, CastsToTheWeight])
def test_a_caller_that_only_calls(layer: type[nn.Module]) -> None:
    """Or casts to the weight's dtype, which a quantized one has, too."""
    before, after, plan, model = made(layer, quant="int8:16")
    assert [step.path for step in plan.steps] == ["layers.0.up", "layers.1.up", "layers.2.up", "head"]
    assert float((after - before).norm() / before.norm()) < 0.02
    assert not [note for note in plan.notes if "proven alone" in note]


def test_one_caller_does_not_speak_for_another() -> None:
    """Linears of one shape in modules of two classes: each is proven in its own."""
    model = Model(Calls).eval()
    model.layers[1] = AddsTheWeight()
    engine = infuse.init_inference(model, dtype="fp32", quant="int8:16")
    kinds = [type(layer.up) is QuantizedLinear for layer in engine.module.layers]
    assert kinds == [True, False, True]


class CallsThree(nn.Module):
    """Calls three linears of three sizes, and may read the weight of the second. Notes when it runs."""

    runs: list[int] = []
    reads = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(WIDTH, 48), nn.Linear(48, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(1)
        part = self.part()
        y = part(self.first(x))
        return self.third(y + part.weight.to(y.dtype)[:, 0] if self.reads else y)

    def part(self) -> nn.Module:
        return self.second


def test_a_caller_runs_once_for_all_of_its_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    # With one that is refused, or with linears too large for one run, each is tried alone.
    for reads, most, runs in ((False, 1 << 20, 2), (True, 1 << 20, 2 + 3 * 2), (False, 1000, 3 * 2)):
        monkeypatch.setattr(CallsThree, "reads", reads)
        monkeypatch.setattr(proof_of_called, "_MOST_BYTES_AT_ONCE", most)
        monkeypatch.setattr(CallsThree, "runs", [])
        noted: list[int] = []
        found = proof_of_called.in_place_mismatch

        def counting(*given: Any, found: Any = found, noted: list[int] = noted) -> Any:
            before = len(CallsThree.runs)
            result = found(*given)
            noted.append(len(CallsThree.runs) - before)
            return result

        monkeypatch.setattr(proof_of_called, "in_place_mismatch", counting)
        _, _, plan, model = made(CallsThree, quant="int8:16")
        assert sum(noted) - 2 == runs  # 2 for the head's caller
        kinds = [type(linear) is QuantizedLinear for linear in model.layers[0].children()]
        assert kinds == [True, not reads, True]
        monkeypatch.undo()


class CallsByMode(nn.Module):
    """Calls one linear, or in its second mode another, whose weight it reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 48)
        self.third = nn.Linear(48, WIDTH)

    def forward(self, x: Tensor, second: bool = False) -> Tensor:
        part = self.part()
        return self.third(part(x) + part.weight.to(x.dtype)[:, 0]) if second else self.first(x)

    def part(self) -> nn.Module:
        return self.second


class CallsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = CallsByMode(), nn.Linear(WIDTH, 7)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(hidden_states), second=True))


def test_a_call_does_not_speak_for_another_of_the_same_caller() -> None:
    model = CallsTwice().eval()
    with torch.no_grad():
        model.inner.second.weight += 0.1
    engine = infuse.init_inference(model, dtype="fp32", quant="int8:16")
    kinds = [type(linear) is QuantizedLinear for linear in engine.module.inner.children()]
    assert kinds == [True, False, True]


def test_a_model_that_cannot_be_run_is_proven_alone_and_says_so() -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return self.up(first @ second)

    plan = infuse.init_inference(Strange(), dtype="fp32", quant="int8:16").plan
    assert [step.path for step in plan.steps] == ["up"]
    assert any(
        note.startswith("proven alone, not inside the module that calls it: up (TypeError: ") for note in plan.notes
    )


SEQ2SEQ: dict[str, Any] = dict(d_model=32, vocab_size=96, decoder_start_token_id=0, pad_token_id=0)
T5 = t.T5Config(d_kv=8, d_ff=48, num_layers=3, num_heads=4, **SEQ2SEQ)
WHISPER = t.WhisperConfig(
    encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
    decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20, max_target_positions=20, bos_token_id=1,
    eos_token_id=2, **SEQ2SEQ,
)  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: BY_NAME[name].make for name in ("llama", "gpt2", "bert", "vit")},
    "t5": lambda: t.T5ForConditionalGeneration(T5).eval(),
    "whisper": lambda: t.WhisperForConditionalGeneration(WHISPER).eval(),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_caller_of_every_linear_is_found(name: str) -> None:
    """By one run of the model, with one layer of each kind; nothing of it stays on the model."""
    model = MODELS[name]()
    before = traces(model)
    paths = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    with torch.no_grad():
        found, reasons = find_callers(model, paths, nullcontext)
    assert set(found) == set(paths) and not reasons
    assert traces(model) == before


def test_what_transformers_installs_at_its_first_run_stays() -> None:
    """It looks for layers by their class, once, to record hidden states: those that the proof skips must be found as
    well.
    """
    model = BY_NAME["llama"].make(output_hidden_states=True, attn_implementation="eager")
    engine = infuse.init_inference(model, dtype="fp32")
    assert len(engine(input_ids=torch.tensor([[5, 6, 7]])).hidden_states) == 4


def test_layers_that_are_one_module() -> None:
    model = Model(Calls).eval()
    model.layers = nn.ModuleList([model.layers[0]] * 3)
    plan = infuse.init_inference(model, dtype="fp32", verify="strict").plan
    assert not [note for note in plan.notes if "proven alone" in note]


def traces(model: nn.Module) -> list[tuple]:
    return [
        (path, id(module), len(module._forward_hooks), len(module._forward_pre_hooks))
        for path, module in model.named_modules()
    ]
