"""int8 and int4 with scales in float16 (:f16), in which GPTQ and AWQ publish theirs: text, range, kernels, models."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse import ops
from infuse.ground.errors import ConfigError
from infuse.layers.linear import QuantizedLinear
from infuse.native import kernels
from infuse.quant.format import QuantizedWeight
from infuse.quant.integer import LARGEST_WITH_FLOAT16
from infuse.quant.parse import quant_format
from tests.models.families import BY_NAME
from tests.support.prepared import runner
from tests.support.tolerance import assert_near, assert_same_buffers

KERNELS = pytest.mark.skipif(isinstance(kernels(), str), reason=f"there are no kernels: {kernels()}")
TEXTS = (
    "int8:f16",
    "int8:32:asymmetric:f16",
    "int4:128:f16",
    "int4:32:asymmetric:f16",
    "int4:row:f16",
    "int4:32:offset:f16",
    "int2:32:offset:f16",
)
IDS = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(1))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def published(text: str, outputs: int, inputs: int) -> QuantizedWeight:
    """Codes, zeros and scales as a file of others has them: scales with all the bits of float16."""
    format = quant_format(text)
    weight = format.quantize(torch.randn(outputs, inputs) / inputs**0.5)
    scale = weight.tensors["scale"]
    scale = scale * (1 + torch.rand(scale.shape) / 16).to(torch.float16)
    assert bool((scale.bfloat16().float() != scale.float()).any())
    return QuantizedWeight.of({**weight.tensors, "scale": scale}, weight.shape, format)


@pytest.mark.parametrize("text", TEXTS)
def test_text_buffers_and_bytes(text: str) -> None:
    format, plain = quant_format(text), quant_format(text.removesuffix(":f16"))
    assert str(format) == text and pickle.loads(pickle.dumps(format)) == format != plain
    dtypes = {buffer.name: buffer.dtype for buffer in format.buffers(256)}
    assert dtypes["scale"] is torch.float16 and format.nbytes(64, 256) == plain.nbytes(64, 256)
    assert format.proof_tolerance == plain.proof_tolerance
    assert ":offset" in text or str(quant_format(f"{text}:a8")) == f"{text}:a8"


@pytest.mark.parametrize("text", ("fp8:f16", "fp6:32:f16", "mxfp4:f16", "int8:f16:asymmetric", "int4:f16:64"))
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="f16"):
        infuse.plan(nn.Linear(64, 64), quant=text)


@pytest.mark.parametrize("text", TEXTS)
def test_the_range_of_float16(text: str) -> None:
    """Groups from the smallest to the largest scales: steps below float16's normal numbers are coarser, none is zero,
    and larger weights are refused.
    """
    format, weight = quant_format(text), torch.randn(64, 256)
    weight *= torch.logspace(-8, 3, 64)[:, None]
    stored = format.quantize(weight)
    scale, values = stored.tensors["scale"].float(), format.dequantize(stored)
    assert bool((scale != 0).all() & scale.isfinite().all())
    largest = weight.abs().amax(1)
    usual = largest > 127 * torch.finfo(torch.float16).smallest_normal
    errors = (values - weight).norm(dim=1) / weight.norm(dim=1)
    assert float(errors[usual].max()) < format.proof_tolerance and int(usual.sum()) > 20
    assert float((values - weight).abs()[~usual].max()) < 127 * torch.finfo(torch.float16).smallest_normal
    format.quantize(torch.full((1, 256), LARGEST_WITH_FLOAT16))
    with pytest.raises(ConfigError, match=r"above 3.3e\+04 cannot be quantized"):
        format.quantize(torch.full((1, 256), 1.01 * LARGEST_WITH_FLOAT16))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("body", ["dequantized_float32", pytest.param("cpu", marks=KERNELS)])
def test_published_weights_come_back_from_a_layout_bit_by_bit(text: str, body: str) -> None:
    layout = ops.quantized_linear.bodies[body].layout
    assert layout is not None
    for outputs in (1, 16, 33):
        weight = published(text, outputs, 256)
        laid = layout.prepare(weight)
        assert laid is not None
        assert_same_buffers(layout.restore(laid), weight)


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", TEXTS)
def test_kernels_compute_with_published_scales(text: str, dtype: torch.dtype) -> None:
    """Few and many rows, outputs that fill no panel, an activation, single rows of a table."""
    product, look_up = runner("quantized_linear", "cpu"), runner("quantized_embedding", "cpu")
    for outputs in (1, 17, 100, 515):
        weight = published(text, outputs, 256)
        buffers = [*weight.tensors.values()]
        for rows in (1, 3, 8, 12, 40, 130):
            x = torch.randn(rows, 256).to(dtype)
            args = (buffers, None, outputs, 256, text)
            wanted = ops.quantized_linear.reference(x.float(), *args)
            assert_near(product(x, *args), wanted, dtype, f"{rows}x256->{outputs}")
        index = torch.randint(outputs, (5,))
        wanted = weight.format.dequantize(weight, dtype)[index]
        assert torch.equal(look_up(index, buffers, outputs, 256, text, dtype), wanted)


@KERNELS
def test_scales_that_are_not_finite_pass_through() -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        for text in TEXTS:
            weight = published(text, 5, 256)
            weight.tensors["scale"][4, -1] = value
            args = (torch.randn(3, 256), [*weight.tensors.values()], None, 5, 256, text)
            assert_near(runner("quantized_linear", "cpu")(*args), ops.quantized_linear.reference(*args), torch.float32)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS)[0]


@pytest.mark.parametrize("text", ("int8:16:f16", "int4:16:asymmetric:f16"))
def test_a_model_is_proven_and_its_shards_are_read_back(text: str, tmp_path: Path) -> None:
    original = BY_NAME["llama"].make()
    keys = dict(dtype="fp32", quant=text, verify="strict", progress=False)
    engine = infuse.init_inference(copy.deepcopy(original), **keys, save_mp_checkpoint_path=str(tmp_path))
    assert text in str(engine.plan) and "refused" not in str(engine.plan)
    scales = [part.scale for part in engine.module.modules() if isinstance(part, QuantizedLinear)]
    assert scales and {scale.dtype for scale in scales if scale.shape[-1] > 1} >= {torch.float16}
    matrices = [quant_format(one) for step in engine.plan.steps for one in step.formats.values()]
    error = (logits(engine) - logits(original)).norm() / logits(original).norm()
    assert float(error) < sum(one.proof_tolerance**2 for one in matrices) ** 0.5
    read = infuse.init_inference(BY_NAME["llama"].make().to("meta"), checkpoint=str(tmp_path), progress=False)
    assert torch.equal(logits(read), logits(engine))
    with infuse.dequantized(engine.module):
        rounded = copy.deepcopy(engine.module.state_dict())
    original.load_state_dict(rounded)
    settings = dict(max_new_tokens=8, do_sample=False)
    assert torch.equal(engine.generate(IDS, **settings), original.generate(IDS, **settings))
