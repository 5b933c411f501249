"""mxfp4: its codes one by one against transformers' reader of gpt-oss, rounding, scales, refusals, panels and back."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import FP4_VALUES

from infuse.ground.errors import ConfigError
from infuse.native import DTYPES, kernels
from infuse.ops import quantized_linear
from infuse.ops.cpu.quantized_linear import PANELS
from infuse.quant.microscaling import BLOCK, ERROR, from_blocks
from infuse.quant.parse import quant_format

MXFP4 = quant_format("mxfp4")


def published(rows: int, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random blocks and exponents as files hold them, and their values."""
    blocks = torch.randint(256, (rows, groups, BLOCK // 2), dtype=torch.uint8)
    exponents = torch.randint(110, 140, (rows, groups), dtype=torch.uint8)
    table = torch.tensor(FP4_VALUES)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    values = table[codes.long()] * 2.0 ** (exponents.float() - 127)[..., None]
    return blocks, exponents, values.flatten(1)


def test_published_weights_keep_their_values() -> None:
    blocks, exponents, values = published(40, 3)
    held = from_blocks(blocks, exponents)
    assert torch.equal(MXFP4.dequantize(held), values)
    again = MXFP4.quantize(values)
    assert torch.equal(MXFP4.dequantize(again), values)
    extremes = from_blocks(blocks[:1, :2], torch.tensor([[0, 254]], dtype=torch.uint8))
    assert extremes.tensors["scale"].double().tolist() == [[2.0**-127, 2.0**127]]
    exponents[1, 1] = 255
    with pytest.raises(ConfigError, match="255"):
        from_blocks(blocks, exponents)


def test_rounds_to_nearest_with_ties_to_even_and_saturates() -> None:
    row = torch.zeros(1, BLOCK)
    row[0, :10] = torch.tensor([6, 0.25, 0.26, 0.75, 0.74, 1.75, -2.5, -3.5, -0.2, 5])
    wanted = [6, 0, 0.5, 1, 0.5, 2, -2, -4, 0, 4]
    assert MXFP4.dequantize(MXFP4.quantize(row))[0, :10].tolist() == wanted
    assert not bool((MXFP4.quantize(torch.full((1, BLOCK), -1e-9)).tensors["data"] == 0x88).any())  # never -0


def test_no_power_of_two_is_better_and_the_error_is_as_told() -> None:
    weight, grid = torch.randn(256, 1 << 12), torch.tensor(FP4_VALUES)
    held = MXFP4.quantize(weight)
    error = (MXFP4.dequantize(held) - weight).norm() / weight.norm()
    assert float(error) == pytest.approx(ERROR, rel=0.005) and MXFP4.expected_error == ERROR
    some = weight[:8].reshape(-1, BLOCK)
    errors = [(some / 2.0**k - grid[:, None, None]).abs().amin(0).norm(dim=1) * 2.0**k for k in range(-6, 4)]
    best = torch.stack(errors).amin(0)
    found = (MXFP4.dequantize(held)[:8] - weight[:8]).reshape(-1, BLOCK).norm(dim=1)
    assert torch.allclose(found, best, rtol=1e-5)


@pytest.mark.parametrize("text", ["mxfp4:64", "mxfp4:row", "mxfp4:asymmetric", "mxfp4:a8", "mxfp4:groups=2"])
def test_has_no_options(text: str) -> None:
    with pytest.raises(ConfigError, match=r"mxfp4 has blocks of 32 and no options; possible: mxfp4|multiple|even"):
        quant_format(text)


@pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
def test_panels_hold_all_codes() -> None:
    blocks, exponents, _ = published(35, 2)
    held = from_blocks(blocks, torch.full_like(exponents, 127))
    panels = PANELS.prepare(held)
    assert panels is not None and torch.equal(PANELS.restore(panels).tensors["data"], held.tensors["data"])
    for dtype in DTYPES:
        for rows in (3, 8, 64):  # of the identity: the product is the weight
            x = torch.eye(64, dtype=dtype)[:rows]
            found = quantized_linear.body("cpu")(x, [*panels.tensors.values()], None, 35, 64, "mxfp4")
            assert torch.equal(found.float(), MXFP4.dequantize(held).T[:rows])
