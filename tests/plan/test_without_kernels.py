"""Quantized models on a CPU without kernels: held dequantized where memory allows, loudly slow where it does not, and
always said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse import native
from infuse.ground.device import Device
from infuse.layers.linear import QuantizedLinear
from infuse.ops import HELD, registered
from infuse.plan.bytes import parameter_bytes
from infuse.quant.parse import quant_format
from tests.models.families import BY_NAME
from tests.support.tolerance import assert_same_buffers

FORMATS = ("int8", "int8:row", "int8:64:asymmetric", "int4", "int4:row:asymmetric", "fp8", "fp8:32", "fp6", "fp6:row")
IDS = torch.arange(3, 12)[None]


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernels", lambda: "not built here")


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Device.of("cpu")
    monkeypatch.setattr(Device, "of", lambda device: replace(found, memory_bytes=1000))


def linears(model: nn.Module) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


def logits(model: Callable) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


@pytest.mark.parametrize("body", HELD)
@pytest.mark.parametrize("text", FORMATS)
def test_codes_come_back_from_their_values(text: str, body: str) -> None:
    """Also of weights whose groups are of very different sizes, among them zeros."""
    weight = torch.randn(48, 192) * torch.logspace(-3, 3, 48)[:, None]
    weight[5], weight[:, 7] = 0, 0
    layout = registered()["quantized_linear"].bodies[body].layout
    quantized = quant_format(text).quantize(weight)
    held = layout.prepare(quantized)
    assert torch.equal(held.tensors["data"], quantized.format.dequantize(quantized, HELD[body]))
    back = layout.restore(held)
    assert_same_buffers(back, quantized)


def test_a_weight_whose_codes_would_be_lost_is_left_to_the_reference() -> None:
    quantized = quant_format("int8").quantize(torch.randn(2, 64) * 1e-9)  # float16 has no such small numbers
    assert registered()["quantized_linear"].bodies["dequantized_float16"].layout.prepare(quantized) is None
    layer = QuantizedLinear(64, 2, False, "int8", {"quantized_linear": "dequantized_float16"})
    layer.hold([quantized])
    assert not layer.prepared and layer.data.dtype == torch.int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_held_in_the_dtype_of_the_plan(name: str, dtype: torch.dtype, no_kernels: None) -> None:
    """The same result as by the reference; the plan says so and knows the memory."""
    keys = dict(dtype=dtype, quant="int8:16")
    with pytest.warns(
        UserWarning, match="rounded to the format and held in .*not smaller. No kernels: not built here.*infuse build"
    ):
        engine = infuse.init_inference(BY_NAME[name].make(), **keys)
    assert f"dequantized_{dtype}".replace("torch.", "") in str(engine.plan) and "dequantized once" in str(engine.plan)
    assert engine.plan.after_bytes == parameter_bytes(engine.module)
    assert linears(engine.module) and all(layer.data.dtype == dtype for layer in linears(engine.module))
    found = logits(engine)
    slow = infuse.init_inference(BY_NAME[name].make(), **keys)
    for layer in linears(slow.module):
        held = layer.held()
        assert held.tensors["data"].dtype == torch.int8
        layer._buffers.update(held.tensors)
        layer._body = registered()["quantized_linear"].reference
        layer.prepared = False
    assert torch.allclose(found, logits(slow), rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=2e-2)


def test_too_little_memory_is_a_loud_warning(no_kernels: None, little_memory: None) -> None:
    with pytest.warns(
        UserWarning, match=r"SLOW: int8:16: .* 45 times slower .* more than half of the .* GB of memory.*infuse build"
    ):
        engine = infuse.init_inference(BY_NAME["llama"].make(), dtype=torch.float32, quant="int8:16")
    assert all(layer.data.dtype == torch.int8 for layer in linears(engine.module))
    assert engine.plan.after_bytes == parameter_bytes(engine.module)
    assert logits(engine).isfinite().all()


def test_with_kernels_nothing_is_said(recwarn: pytest.WarningsRecorder) -> None:
    if isinstance(native.kernels(), str):
        pytest.skip(native.kernels())
    infuse.init_inference(BY_NAME["llama"].make(), dtype=torch.bfloat16, quant="int8:16")
    assert not [str(one.message) for one in recwarn if "kernels" in str(one.message)]


def test_shards_of_held_weights_hold_codes(no_kernels: None, tmp_path: Path) -> None:
    keys = dict(dtype=torch.bfloat16, quant="int8:16")
    saved = infuse.init_inference(BY_NAME["llama"].make(), save_mp_checkpoint_path=str(tmp_path), **keys)
    with torch.device("meta"):
        empty = type(saved.module)(saved.module.config).eval()
    size_bytes = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size_bytes < 0.8 * parameter_bytes(saved.module)
    opened = infuse.init_inference(empty, checkpoint=str(tmp_path))
    assert torch.equal(logits(opened), logits(saved))
