"""Blocks of diffusion transformers: SD3, SD3.5, Flux."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from torch import nn

import infuse
from infuse.diffusion.layers import heads
from infuse.diffusion.layers.block import StreamsBlock
from infuse.diffusion.modules import module_spec
from infuse.ground.errors import SpecMismatch, UnsupportedCall
from infuse.inputs.component import GUIDED, UNEVEN, component_inputs
from infuse.inputs.model import RandomTensors
from infuse.plan.kinds import MODULE
from tests.diffusion.tiny_pipelines import flux, made, sd3, sd35

BLOCKS = ("JointTransformerBlock", "FluxTransformerBlock", "FluxSingleTransformerBlock")
NAMES = ("sd3", "sd35", "flux")


def transformer(name: str) -> Any:
    """The tiny transformer with weights and biases of a size at which modulations, gates and norms matter."""
    torch.manual_seed(0)
    model = made(name).transformer
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif "norm" in path:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model


def run(model: nn.Module, size: Any = GUIDED) -> torch.Tensor:
    with torch.no_grad():
        return model(**component_inputs(model, RandomTensors(model), size)).sample.float()


def blocks(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if type(module).__name__ in BLOCKS]


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


@pytest.mark.parametrize("name", NAMES)
def test_every_block_is_replaced_and_computes_the_same(name: str) -> None:
    model = transformer(name)
    paths, wanted, uneven = blocks(model), run(model), run(model, UNEVEN)
    engine = infuse.init_inference(model, dtype=torch.float32, verify="strict")
    assert sorted(step.path for step in engine.plan.steps if step.depth == MODULE) == sorted(paths) and len(paths) > 1
    assert all(isinstance(model.get_submodule(path), StreamsBlock) for path in paths)
    assert error(run(model), wanted) < 5e-6 and error(run(model, UNEVEN), uneven) < 5e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_sixteen_bits_round_as_well_as_the_original(name: str, dtype: torch.dtype) -> None:
    model = transformer(name)
    wanted = run(model)
    own = error(run(model.to(dtype)), wanted)
    engine = infuse.init_inference(model, dtype=dtype, verify="strict")
    assert any(step.depth == MODULE for step in engine.plan.steps)
    assert error(run(model), wanted) <= 2 * own


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_keeps_the_originals_names_and_values(name: str) -> None:
    model = transformer(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    wanted = run(model)
    infuse.init_inference(model, dtype=torch.float32)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    model.load_state_dict({key: tensor + 0.01 for key, tensor in before.items()})
    assert error(run(model), wanted) > 1e-3
    model.load_state_dict(before)
    assert error(run(model), wanted) < 5e-6


@pytest.mark.parametrize("format", ["int8", "int8:a8"])
@pytest.mark.parametrize("name", NAMES)
def test_formats_of_all_matrices(name: str, format: str) -> None:
    model = transformer(name)
    wanted = run(model)
    engine = infuse.init_inference(model, dtype=torch.float32, quant=f"{format.replace('int8', 'int8:16')}")
    inside = [step for step in engine.plan.steps if step.depth == MODULE]
    assert inside and all(len(step.formats) == len(step.shape.matrices) for step in inside)
    assert 0 < error(run(model), wanted) < 0.06


def test_a_single_block_by_parts_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than one, unequal ones, and one for each row."""
    model = transformer("flux")
    infuse.init_inference(model, dtype=torch.float32)
    block, width = model.single_transformer_blocks[0], 32
    x, text, temb = torch.randn(2, 5, width), torch.randn(2, 3, width), torch.randn(2, width)
    with torch.no_grad():
        wanted = block(x, text, temb)
        for rows in (1, 3, 7):
            monkeypatch.setattr(heads, "_PART_BYTES", rows * block.image.out.in_features * 4)
            assert all(error(one, other) < 1e-6 for one, other in zip(block(x, text, temb), wanted, strict=True))
        empty = block(x[:, :0], text[:, :0], temb)
    assert [one.shape for one in empty] == [(2, 0, width)] * 2


def test_a_text_that_ends_in_the_last_block() -> None:
    model = transformer("sd3")
    infuse.init_inference(model, dtype=torch.float32)
    last = model.transformer_blocks[-1]
    x = torch.randn(1, 4, 32)
    text, image = last(x, torch.randn(1, 3, 32), torch.randn(1, 32))
    assert text is None and image.shape == x.shape and last.context_pre_only is True


def test_each_norm_has_its_own_eps() -> None:
    model = transformer("sd3")
    for at, norm in enumerate(one for one in model.transformer_blocks.modules() if isinstance(one, nn.LayerNorm)):
        norm.eps = 0.1 * (at + 1)
    wanted = run(model)
    infuse.init_inference(model, dtype=torch.float32, verify="strict")
    assert isinstance(model.transformer_blocks[0], StreamsBlock) and error(run(model), wanted) < 5e-6


def test_rotation_is_left_out_as_in_the_original() -> None:
    """With positions as keyword, by position, and without any."""
    original, model = transformer("flux"), transformer("flux")
    infuse.init_inference(model, dtype=torch.float32)
    width = original.config.num_attention_heads * original.config.attention_head_dim
    generator = torch.Generator().manual_seed(1)
    x, text, temb = (torch.randn(*shape, width, generator=generator) for shape in ((2, 5), (2, 3), (2,)))
    angles = torch.randn(8, original.config.attention_head_dim // 2, generator=generator).repeat_interleave(2, dim=1)
    with torch.no_grad():
        for kind in ("transformer_blocks", "single_transformer_blocks"):
            results = []
            for given in ({}, {"image_rotary_emb": (angles.cos(), angles.sin())}):
                pair = [getattr(one, kind)[0](x, text, temb, **given) for one in (original, model)]
                results.append(pair[0])
                for wanted, found in zip(*pair, strict=True):
                    assert error(found, wanted) < 5e-6
            assert error(results[1][1], results[0][1]) > 1e-3


def test_unknown_arguments_are_refused_by_name() -> None:
    model = flux().transformer
    infuse.init_inference(model, dtype=torch.float32)
    width = model.config.num_attention_heads * model.config.attention_head_dim
    x, temb = torch.randn(1, 3, width), torch.randn(1, width)
    for block in (model.transformer_blocks[0], model.single_transformer_blocks[0]):
        with pytest.raises(UnsupportedCall, match="ip_hidden_states"):
            block(x, x, temb, joint_attention_kwargs={"ip_hidden_states": [x]})
        with pytest.raises(UnsupportedCall, match="attention_mask"):
            block(x, x, temb, attention_mask=torch.ones(1, 6))
        with pytest.raises(UnsupportedCall, match="temb"):
            block(x, x)
        block(x, x, temb, joint_attention_kwargs={})


def changed_norm(block: Any) -> None:
    block.norm2 = nn.LayerNorm(32)


def another_processor(block: Any) -> None:
    block.attn.set_processor(FluxIPAdapterAttnProcessor(32, 32))


def fused(block: Any) -> None:
    block.attn.fuse_projections()


def in_chunks(block: Any) -> None:
    block.set_chunk_feed_forward(1)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("flux", changed_norm, "norm2 is LayerNorm"),
        ("flux", another_processor, "FluxIPAdapterAttnProcessor"),
        ("flux", fused, "unfuse_qkv_projections"),
        ("sd3", in_chunks, "in chunks"),
    ],
)
def test_what_differs_stays_with_the_reason_and_its_feed_forward_is_replaced(
    name: str, change: Any, reason: str
) -> None:
    model = {"flux": flux, "sd3": sd3, "sd35": sd35}[name]().transformer
    block = model.transformer_blocks[0]
    change(block)
    spec = module_spec(block)
    assert spec is not None
    with pytest.raises(SpecMismatch, match=reason):
        spec.bind(block)
    plan = infuse.plan(model, dtype=torch.float32, quant="int8:16")
    left = {left.path: left.why for left in plan.left}
    assert reason in left["transformer_blocks.0"]
    assert "transformer_blocks.0.ff" in {step.path for step in plan.steps}
