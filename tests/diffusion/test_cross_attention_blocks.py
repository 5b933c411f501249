"""Whole blocks of LTX-Video, Wan and Hunyuan-DiT: programs of self attention, attention over a text, feed-forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.transformers.hunyuan_transformer_2d import HunyuanDiTBlock
from diffusers.models.transformers.sana_transformer import SanaTransformerBlock
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import nn

import infuse
from infuse.diffusion.layers.block import StreamsBlock
from infuse.diffusion.modules import module_spec
from infuse.ground.errors import SpecMismatch, UnsupportedCall
from infuse.plan.kinds import MODULE
from tests.diffusion.side_by_side import masks, replaced, run, same
from tests.diffusion.tiny_models import MODELS, cos_sin
from tests.support.ranks import Ranks

NAMES = ("LTX-Video", "Wan", "Hunyuan-DiT")
C, T, L = 24, 9, 7  # width, tokens of the image and of the text


def weighted(module: Any) -> Any:
    """The block with norms whose weights matter."""
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        if "norm" in name and parameter.dim() == 1:
            nn.init.normal_(parameter)
    return module.eval()


def ltx(**settings: Any) -> Any:
    return weighted(LTXVideoTransformerBlock(C, 2, C // 2, cross_attention_dim=20, **settings))


def wan(**settings: Any) -> Any:
    return weighted(WanTransformerBlock(C, 32, 2, **settings))


def hunyuan(**settings: Any) -> Any:
    return weighted(HunyuanDiTBlock(C, 2, cross_attention_dim=20, **settings))


@pytest.mark.parametrize("steps", [1, T], ids=("one time", "a time for each token"))
def test_ltx(steps: int) -> None:
    x, text, time = torch.randn(2, T, C), torch.randn(2, L, 20), torch.randn(2, steps, 6 * C)
    same(ltx(), x, text, time, cos_sin(2, T, C))
    same(ltx(qk_norm="rms_norm_across_heads", attention_bias=False), x, text, time)
    mask = masks(2, L, 2)["[B, 1, L]"]
    same(ltx(), x, text, temb=time, image_rotary_emb=cos_sin(1, T, C), encoder_attention_mask=mask)
    same(ltx(), x[:1, :1], text[:1], time[:1, :1])


@pytest.mark.parametrize("shape", [(2, 6, C), (2, T, 6, C)], ids=("one time", "a time for each token"))
def test_wan(shape: tuple[int, ...]) -> None:
    x, text, time = torch.randn(2, T, C), torch.randn(2, L, C), torch.randn(shape)
    for settings in (dict(cross_attn_norm=True), {}):
        same(wan(**settings), x, text, time, cos_sin(1, T, 1, C // 2))


def test_hunyuan() -> None:
    x, text, time = torch.randn(2, T, C), torch.randn(2, L, 20), torch.randn(2, C)
    same(hunyuan(), x, text, time, cos_sin(T, C // 2))
    same(hunyuan(qk_norm=False, activation_fn="gelu-approximate"), x, text, time)
    same(hunyuan(skip=True), x, encoder_hidden_states=text, temb=time, skip=torch.randn(2, T, C))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_sixteen_bits(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    wanted = run(model)
    own = (run(model.to(dtype)) - wanted).square().mean().sqrt()
    engine = infuse.init_inference(model, dtype=dtype, verify="strict")
    assert any(step.depth == MODULE for step in engine.plan.steps)
    assert any(isinstance(module, StreamsBlock) for module in model.modules())
    assert (run(model) - wanted).square().mean().sqrt() <= 1.5 * own


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_and_formats(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    before, wanted = {key: tensor.clone() for key, tensor in model.state_dict().items()}, run(model)
    infuse.init_inference(model, dtype=torch.float32)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    other = MODELS[name][0]().eval()
    other.load_state_dict(before)
    engine = infuse.init_inference(other, dtype=torch.float32, quant="int8:8")
    inside = [step for step in engine.plan.steps if step.depth == MODULE]
    assert inside and all(step.formats for step in inside)
    found = run(other)
    assert 0 < float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()) < 0.06


def on_rank(name: str) -> tuple[torch.Tensor, bool]:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    engine = infuse.init_inference(model, dtype=torch.float32, verify="strict", tensor_parallel={"tp_size": 2})
    steps = [step for step in engine.plan.steps if step.depth == MODULE]
    return run(model), bool(steps) and all(step.whole is not None for step in steps)


def test_ranks_share_the_feed_forwards(ranks: Ranks) -> None:
    torch.manual_seed(0)
    wanted = run(MODELS["Wan"][0]().eval())
    for found, shared in ranks.run(2, on_rank, "Wan"):
        assert shared and float((found - wanted).abs().max()) <= 1e-4


def test_what_would_be_dropped_is_refused() -> None:
    block: Any = replaced(wan())
    x, text = torch.randn(1, T, C), torch.randn(1, L, C)
    with pytest.raises(UnsupportedCall, match="without temb"):
        block(x, text)
    with pytest.raises(UnsupportedCall, match="encoder_attention_mask"):
        block(x, text, torch.randn(1, 6, C), encoder_attention_mask=torch.ones(1, L))
    with pytest.raises(UnsupportedCall, match="without skip"):
        replaced(hunyuan(skip=True))(x, torch.randn(1, L, 20), torch.randn(1, C))


def in_chunks(block: Any) -> Any:
    block.set_chunk_feed_forward(1)
    return block


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (lambda: wan(added_kv_proj_dim=8), "it has attn2.add_k_proj"),
        (lambda: ltx(elementwise_affine=True), "norm1 is RMSNorm"),
        (lambda: in_chunks(hunyuan()), "in chunks"),
        (lambda: SanaTransformerBlock(C, 2, 12, 0.0, 2, 12, 20), "SanaLinearAttnProcessor2_0(.|\\n)*ff is a GLUMBConv"),
    ],
)
def test_what_differs_stays(block: Any, reason: str) -> None:
    made = block()
    spec = module_spec(made)
    assert spec is not None
    with pytest.raises(SpecMismatch, match=reason):
        spec.bind(made)
