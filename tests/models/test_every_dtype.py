"""A dtype is whole: parameters and buffers alike, in every architecture; rotary frequencies stay exact."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import infuse
from tests.models.every_architecture import PARTS, architectures, first_output, parts, tiny_model
from tests.models.families import BY_NAME

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# How far a model may be from itself in float32 where its own rounding is less: 8 and 11 bits, over two layers.
FLOOR = {"bf16": 2e-2, "fp16": 4e-3}
SINUSOIDAL = {
    "m2m_100": (t.M2M100Config, t.M2M100ForConditionalGeneration),
    "nllb-moe": (t.NllbMoeConfig, t.NllbMoeForConditionalGeneration),
    "speech_to_text": (t.Speech2TextConfig, t.Speech2TextForConditionalGeneration),
}


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm().clamp(min=1e-9))


def fault(model: nn.Module, dtype: str, exact: Tensor, verify: str = "sample") -> str | None:
    """What is wrong with the model in `dtype`, None where it does what `model.to(dtype)` does, errors included."""
    try:
        engine = infuse.init_inference(copy.deepcopy(model), dtype=dtype, verify=verify)
        found = error(first_output(engine.module), exact)
    except infuse.UnsupportedCall as refusal:
        # A model that passes to its layers what blocks do not serve: the proof keeps such layers.
        if verify == "off":
            return fault(model, dtype, exact)
        ours = str(refusal)
    except Exception as problem:
        ours = f"{type(problem).__name__}: {problem}"
    else:
        ours = f"off by {found:.1e}"
        if found <= FLOOR[dtype]:
            return None
    try:
        own = error(first_output(copy.deepcopy(model).to(DTYPES[dtype])), exact)
    except Exception:  # the model itself does not run in this dtype
        return None
    return None if "off by" in ours and found <= 2 * own else f"{ours}; the original is off by {own:.1e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SINUSOIDAL)
def test_models_whose_positions_are_a_buffer(name: str, dtype: str) -> None:
    model = tiny_model(*SINUSOIDAL[name])
    assert any(buffer.is_floating_point() and buffer.dim() == 2 for buffer in model.buffers())
    assert fault(model, dtype, first_output(model)) is None


@pytest.mark.slow
@pytest.mark.parametrize("part", parts(always=1))
def test_every_architecture_runs_in_16_bits(part: int) -> None:
    """Those of transformers that can be made tiny by the names of their numbers, each in one of the two dtypes."""
    found, faults = architectures(), []
    for number, kind in enumerate(sorted(found)[part::PARTS]):
        dtype = tuple(DTYPES)[number % 2]
        try:
            model = tiny_model(*found[kind])
            if text := fault(model, dtype, first_output(model), verify="off"):
                faults.append(f"{kind} in {dtype}: {text}")
        except Exception as problem:  # another version of transformers: to be noted in architectures_not_tiny.txt
            faults.append(f"{kind}: {type(problem).__name__}: {problem}")
    assert faults == []
    assert len(found) >= 200


def test_rotary_frequencies_are_not_rounded() -> None:
    model = BY_NAME["llama"].make()
    exact = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert any(name.endswith("inv_freq") for name in exact)
    infuse.init_inference(model, dtype="bf16")
    for name, buffer in model.named_buffers():
        assert not name.endswith("inv_freq") or torch.equal(buffer, exact[name])


class Keeps(t.PreTrainedModel):
    """Names one of its modules as exact, in fp16 or in both types of 16 bits."""

    config_class = t.LlamaConfig

    def __init__(self, config: t.LlamaConfig, strict: bool):
        super().__init__(config)
        self._keep_in_fp32_modules, self._keep_in_fp32_modules_strict = (
            (None, ["exact"]) if strict else (["exact"], None)
        )
        self.linear = nn.Linear(4, 4)
        self.exact, self.inexact = nn.Module(), nn.Module()
        for module in (self.exact, self.inexact):
            module.register_buffer("table", torch.ones(3) / 3)
        self.register_buffer("count", torch.arange(3))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_that_a_model_keeps_exact(strict: bool, dtype: str) -> None:
    model = Keeps(t.LlamaConfig(), strict)
    model.second = nn.Module()
    model.second.register_buffer("table", model.inexact.table)
    infuse.init_inference(model, dtype=dtype)
    kept = strict or dtype == "fp16"
    assert model.exact.table.dtype == (torch.float32 if kept else DTYPES[dtype])
    assert model.count.dtype == torch.int64 and model.linear.weight.dtype == DTYPES[dtype]
    assert model.second.table is model.inexact.table and model.second.table.dtype == DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_frequencies_that_their_module_does_not_cast(dtype: str) -> None:
    """CLVP gives its rotary angles to linears as they are: what stayed in float32 raised in every call."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=80, projection_dim=64, num_hidden_layers=2,
                 num_attention_heads=2, max_text_tokens=64, use_rotary_embedding=True)  # fmt: skip
    model = t.ClvpEncoder(t.ClvpEncoderConfig(**sizes)).eval()
    ids = torch.randint(3, 96, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = copy.deepcopy(model)(input_ids=ids)[0]
        engine = infuse.init_inference(model, dtype=dtype)
        found = engine(input_ids=ids)[0]
    assert found.dtype == DTYPES[dtype] and error(found, exact) <= FLOOR[dtype]


def test_frequencies_that_their_module_casts_stay_exact() -> None:
    model = BY_NAME["llama"].make()
    exact = model.model.rotary_emb.inv_freq.clone()
    engine = infuse.init_inference(model, dtype="bf16")
    assert torch.equal(engine.module.model.rotary_emb.inv_freq, exact)
