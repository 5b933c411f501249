"""Attention with norms of queries and keys and rotation: LTX-Video, Wan, Hunyuan-DiT, Sana."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import Attention, HunyuanAttnProcessor2_0
from diffusers.models.transformers.sana_transformer import SanaAttnProcessor2_0
from diffusers.models.transformers.transformer_ltx import LTXAttention
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import nn

import infuse
from infuse.diffusion.modules import module_spec
from infuse.ground.errors import SpecMismatch, UnsupportedCall
from infuse.inputs.component import GUIDED, UNEVEN
from infuse.plan.kinds import MODULE
from tests.diffusion.side_by_side import counted, masks, replaced, run, same
from tests.diffusion.tiny_models import MODELS, cos_sin


def ltx(**settings: Any) -> Any:
    return weighted(LTXAttention(query_dim=32, heads=2, kv_heads=2, dim_head=12, **settings))


def wan(**settings: Any) -> Any:
    return weighted(WanAttention(dim=24, heads=2, dim_head=12, processor=WanAttnProcessor(), **settings))


def hunyuan(**settings: Any) -> Any:
    processor = HunyuanAttnProcessor2_0()
    return weighted(Attention(query_dim=24, heads=2, dim_head=12, processor=processor, **settings))


def weighted(module: nn.Module) -> nn.Module:
    """The module with norms whose weights matter."""
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter)
    return module


def test_over_itself() -> None:
    """With the rotation of each model, and without."""
    same(ltx(), torch.randn(2, 7, 32), image_rotary_emb=cos_sin(2, 7, 24))
    same(ltx(bias=False, out_bias=False), torch.randn(2, 7, 32), None, None, cos_sin(1, 7, 24))
    same(wan(), torch.randn(2, 7, 24), None, None, cos_sin(1, 7, 1, 12))
    same(hunyuan(qk_norm="layer_norm", bias=True), torch.randn(2, 7, 24), image_rotary_emb=cos_sin(7, 12))
    for make, width in ((ltx, 32), (wan, 24), (hunyuan, 24)):
        same(make(), torch.randn(2, 7, width))
        same(make(), torch.randn(1, 1, width))


@pytest.mark.parametrize("name", list(masks(1, 3, 1)))
def test_over_a_text(name: str) -> None:
    x, text, mask = torch.randn(2, 9, 32), torch.randn(2, 7, 20), masks(2, 7, 2)[name]
    same(ltx(cross_attention_dim=20), x, text)
    same(wan(cross_attention_dim_head=12), x[..., :24], torch.randn(2, 7, 24), None, None)
    crossing = hunyuan(cross_attention_dim=20, qk_norm="layer_norm")
    same(crossing, x[..., :24], text, image_rotary_emb=cos_sin(9, 12))
    sana = Attention(query_dim=32, heads=2, dim_head=12, cross_attention_dim=20, processor=SanaAttnProcessor2_0())
    for module, inputs in ((ltx(cross_attention_dim=20), x), (crossing, x[..., :24]), (sana, x)):
        same(module, inputs, text, attention_mask=mask)


def test_a_text_is_projected_once() -> None:
    module = ltx(cross_attention_dim=20).eval()
    new: Any = replaced(module)
    calls, x, text = counted(new), torch.randn(2, 9, 32), torch.randn(2, 7, 20)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(new(x, text), module(x, text), rtol=1e-4, atol=1e-5)
        assert len(calls) == 1
        before = new(x, text)
        new.k_norm.weight.mul_(3)
        assert not torch.allclose(new(x, text), before, atol=1e-3) and len(calls) == 2


def test_what_would_be_dropped_is_refused() -> None:
    new = replaced(ltx(cross_attention_dim=20))
    with pytest.raises(UnsupportedCall, match="speed"):
        new(torch.randn(1, 3, 32), torch.randn(1, 2, 20), speed=2)
    with pytest.raises(UnsupportedCall, match="image_rotary_emb"):
        new(torch.randn(1, 3, 32), torch.randn(1, 2, 20), None, cos_sin(1, 3, 24))
    with pytest.raises(UnsupportedCall, match="attention_mask"):
        replaced(wan())(torch.randn(1, 3, 24), None, torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: wan(added_kv_proj_dim=8), "it has add_k_proj"),
        (lambda: fused(wan()), "fused_projections is True"),
        (lambda: hunyuan(qk_norm="l2"), "norm_q is LpNorm"),
        (lambda: hunyuan(residual_connection=True), "residual_connection is True"),
        (lambda: sana(residual_connection=True), "residual_connection, which SanaAttnProcessor2_0 leaves out"),
    ],
)
def test_unknown_attention_stays(module: Callable[[], nn.Module], reason: str) -> None:
    spec = module_spec(module())
    assert spec is not None
    with pytest.raises(SpecMismatch, match=reason):
        spec.bind(module())


def fused(module: Any) -> Any:
    module.fuse_projections()
    return module


def sana(**settings: Any) -> Any:
    return Attention(query_dim=24, heads=2, dim_head=12, processor=SanaAttnProcessor2_0(), **settings)


@pytest.mark.parametrize("name", list(MODELS))
def test_models(name: str) -> None:
    torch.manual_seed(0)
    make, expected = MODELS[name]
    model = make().eval()
    wanted = [run(model, size) for size in (GUIDED, UNEVEN)]
    names = list(model.state_dict())
    engine = infuse.init_inference(model, dtype=torch.float32, verify="strict")
    layers = [step.layer for step in engine.plan.steps if step.depth == MODULE]
    assert {layer: layers.count(layer) for layer in layers} == expected
    for size, before in zip((GUIDED, UNEVEN), wanted, strict=True):
        torch.testing.assert_close(run(model, size), before, rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == names


def test_what_diffusers_keeps_in_float32_stays_so(tmp_path: Path) -> None:
    """Wan's time embedding, tables, norms and rotations, which `from_pretrained` loads in float32 beside bfloat16."""
    torch.manual_seed(0)
    make, _ = MODELS["Wan"]
    model = make().eval()
    exact = run(model, UNEVEN)
    model.save_pretrained(tmp_path)
    loaded = diffusers.WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    original = run(loaded, UNEVEN)
    engine = infuse.init_inference(loaded, dtype=torch.bfloat16)
    assert any(step.depth == MODULE for step in engine.plan.steps)
    wide = {
        name for name, value in [*loaded.named_parameters(), *loaded.named_buffers()] if value.dtype == torch.float32
    }
    assert {"rope.freqs_cos", "condition_embedder.time_embedder.linear_1.weight", "scale_shift_table"} <= wide
    assert "blocks.0.norm2.weight" in wide and "patch_embedding.weight" not in wide
    error = (run(loaded, UNEVEN) - exact).norm()
    assert error <= 1.5 * (original - exact).norm() + 1e-3 * exact.norm()
