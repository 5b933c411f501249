"""The modules of diffusers' UNets and VAEs: what replaces them computes the same, or stays and says why."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers import Transformer2DModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention, AttnProcessor, FusedAttnProcessor2_0
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

import infuse
from infuse.diffusion.layers import buffers, convolution
from infuse.diffusion.layers.block import StreamsBlock
from infuse.diffusion.layers.convolution import Conv
from infuse.diffusion.layers.image_attention import ImageAttention, ImageAttentionModule
from infuse.diffusion.modules import module_spec
from infuse.diffusion.shapes.unet import ConvShape
from infuse.ground.errors import SpecMismatch, UnsupportedCall
from infuse.inputs.component import GUIDED, UNEVEN
from infuse.ops import registered
from infuse.plan.kinds import MODULE
from tests.diffusion.side_by_side import CPU, counted, masks, replaced, run, same
from tests.diffusion.tiny_pipelines import controlnet, made, sdxl, unet, vae

LAST = torch.channels_last
LAYOUTS = (torch.contiguous_format, LAST)


def image(channels: int, rows: int = 6, columns: int = 5, batch: int = 2, layout: Any = LAST) -> Tensor:
    return torch.randn(batch, channels, rows, columns).contiguous(memory_format=layout)


# ---- convolutions ----


@pytest.mark.parametrize("layout", LAYOUTS, ids=("contiguous", "last"))
@pytest.mark.parametrize("weights", LAYOUTS, ids=("weights contiguous", "weights last"))
@pytest.mark.parametrize(
    ("settings", "embedded"),
    [
        (dict(in_channels=32, temb_channels=16, groups=8), 16),
        (dict(in_channels=32, out_channels=48, temb_channels=16, groups=8, eps=1e-5), 16),
        (dict(in_channels=32, out_channels=16, temb_channels=None, groups=8, groups_out=4), None),
        (dict(in_channels=32, temb_channels=16, groups=8, output_scale_factor=1.5, skip_time_act=True), 16),
        (dict(in_channels=32, out_channels=48, temb_channels=None, groups=8, conv_shortcut_bias=False), None),
    ],
)
def test_residual_block(settings: dict[str, Any], embedded: int | None, weights: Any, layout: Any) -> None:
    torch.manual_seed(0)
    block = ResnetBlock2D(**settings).to(memory_format=weights)
    for norm in (block.norm1, block.norm2):
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    time = None if embedded is None else torch.randn(2, embedded)
    same(block, image(32, layout=layout), time)
    same(block, image(32, 1, 1, layout=layout), temb=time)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(up=True), "it has upsample inside"),
        (dict(down=True), "it has downsample inside"),
        (dict(time_embedding_norm="scale_shift"), "time_embedding_norm is 'scale_shift'"),
        (dict(non_linearity="gelu"), "nonlinearity is GELU"),
    ],
)
def test_other_residual_blocks_stay(settings: dict[str, Any], reason: str) -> None:
    block = ResnetBlock2D(in_channels=32, temb_channels=16, groups=8, **settings)
    spec = module_spec(block)
    assert spec is not None
    with pytest.raises(SpecMismatch, match=reason):
        spec.bind(block)


def test_residual_block_refuses_what_it_would_drop() -> None:
    new = replaced(ResnetBlock2D(in_channels=32, temb_channels=16, groups=8))
    with pytest.raises(UnsupportedCall, match="without temb"):
        new(image(32))
    with pytest.raises(UnsupportedCall, match="speed"):
        new(image(32), torch.randn(2, 16), speed=2)
    new = replaced(ResnetBlock2D(in_channels=32, temb_channels=None, groups=8))
    with pytest.raises(UnsupportedCall, match="has no projection"):
        new(image(32), torch.randn(2, 16))


def test_what_a_hook_has_seen_is_not_written_over() -> None:
    torch.manual_seed(0)
    block = ResnetBlock2D(in_channels=32, temb_channels=None, groups=8).eval()
    new, seen = replaced(block), {}
    for name in ("conv1", "conv2"):
        new.get_submodule(name).register_forward_hook(
            lambda m, a, out, name=name: seen.update({name: (out, out.clone())})
        )
    with torch.no_grad():
        torch.testing.assert_close(new(image(32), None).shape, block(image(32), None).shape)
    assert all(torch.equal(*pair) for pair in seen.values())


@pytest.mark.parametrize("layout", LAYOUTS, ids=("contiguous", "last"))
def test_upsampling(layout: Any) -> None:
    torch.manual_seed(0)
    module = Upsample2D(8, use_conv=True, out_channels=6).to(memory_format=layout)
    for rows, columns in ((6, 5), (1, 1), (1, 3)):
        same(module, image(8, rows, columns, layout=layout))
        same(module, image(8, rows, columns, layout=layout), output_size=(2 * rows, 2 * columns))
    same(module, image(8), (11, 9))
    same(module, image(8), output_size=torch.Size((13, 10)))


def test_upsampling_follows_its_weights() -> None:
    module = Upsample2D(8, use_conv=True).eval()
    new, x = replaced(module), image(8)
    with torch.no_grad():
        before = new(x)
        module.conv.weight.mul_(2), module.conv.bias.mul_(2)  # the new one has the same
        torch.testing.assert_close(new(x), 2 * before, rtol=1e-4, atol=1e-5)
        module.conv.weight.data += module.conv.weight  # as scripts merge adapters: counts no version
        torch.testing.assert_close(new(x), module(x), rtol=1e-4, atol=1e-5)


def tiles(conv: nn.Conv2d) -> None:
    conv.padding_mode, conv._reversed_padding_repeated_twice = "circular", [conv.padding[0]] * 4


def dilates(conv: nn.Conv2d) -> None:
    conv.dilation = conv.padding = (2, 2)


def patches(conv: nn.Conv2d) -> None:
    conv._conv_forward = lambda x, weight, bias: nn.functional.conv2d(x, weight, bias, padding=1) * 2


@pytest.mark.parametrize("change", [tiles, dilates, patches])
def test_convolutions_that_are_set_otherwise(change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts for images that tile, or of other sizes, set attributes of each nn.Conv2d in a model."""
    monkeypatch.setattr(convolution, "MAPPED_BYTES", 1)
    for module in (Upsample2D(32, use_conv=True), ResnetBlock2D(in_channels=32, temb_channels=None, groups=8)):
        module, given = module.to(memory_format=LAST), (image(32, layout=LAST), None)
        new = replaced(module)
        for conv in (*new.modules(), *module.modules()):
            if isinstance(conv, nn.Conv2d) and conv.kernel_size == (3, 3):
                change(conv)
        with torch.no_grad():
            torch.testing.assert_close(new(*given), module(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["_in_strips", "_as_product"])
def test_convolutions_of_small_and_large_images(way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of two rows, a rest, one row; poisoned memory; sums written over a given tensor or over the residual."""
    monkeypatch.setattr(convolution, "_STRIP_BYTES", 2 * 7 * 6 * dtype.itemsize)
    monkeypatch.setattr(convolution, "_LEAST_WEIGHT_BYTES", 1)
    monkeypatch.setattr(convolution, "MAPPED_BYTES", 1 if way == "_in_strips" else 1 << 40)
    torch.manual_seed(0)
    for kernel, rows in itertools.product((1, 3), (1, 2, 5, 8)):
        conv = Conv(ConvShape(5, 6, kernel, True)).to(dtype).to(memory_format=LAST)
        x, residual = image(5, rows, 7).to(dtype), image(6, rows, 7).to(dtype)
        wanted = nn.functional.conv2d(x.double(), conv.weight.double(), conv.bias.double(), padding=kernel // 2)
        room = torch.full_like(residual, torch.nan)
        if way == "_in_strips" or (kernel == 3 and dtype == torch.bfloat16):
            assert conv._way(x).__name__ == way
        near = dict(rtol=2e-2, atol=2e-2) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-5)
        for found, exact in (
            (conv(x), wanted),
            (conv.plus(x, residual, room), wanted + residual),
            (conv.plus(x, sum_ := residual.clone(), sum_), wanted + residual),
        ):
            assert found.is_contiguous(memory_format=LAST)
            torch.testing.assert_close(found.double(), exact, **near)


@pytest.mark.parametrize("shortcut", [False, True])
def test_blocks_of_large_images(shortcut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory is lent by one owner, and a result is not written over by the next call."""
    for module in (convolution, buffers):
        monkeypatch.setattr(module, "MAPPED_BYTES", 1)
    monkeypatch.setattr(convolution, "_STRIP_BYTES", 500)
    torch.manual_seed(0)
    block = ResnetBlock2D(in_channels=32, out_channels=16 if shortcut else 32, temb_channels=None, groups=8).eval()
    larger = Upsample2D(block.out_channels, use_conv=True).eval()
    model = nn.Sequential(*(replaced(one.to(memory_format=LAST)) for one in (block, larger)))
    convolution.share_memory(model)
    images = [image(32), image(32)]
    with torch.no_grad():
        wanted = [larger(block(one, None)) for one in images]
        found = [model[1](model[0](one, None)) for one in images]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)
    held = model[1].conv.memory
    assert held is model[0].conv1.memory and len(held._lent) == 2 and held._idle
    del found, one
    assert not held._lent and not held._idle


def test_buffers_are_lent_again_only_after_the_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "MAPPED_BYTES", 1)
    held = buffers.Buffers()
    first, other = (held.image((1, 8, 4, 4), torch.float32) for _ in range(2))
    assert first.is_contiguous(memory_format=LAST) and first.data_ptr() % 64 == 0 != first.data_ptr() - other.data_ptr()
    view, place = first[:, 2:, 1], first.data_ptr()
    del first
    third = held.like(other)
    assert third is not None and third.data_ptr() != place and held.like(torch.ones(3)) is None
    del view
    assert held.image((1, 8, 3, 4), torch.float32).data_ptr() == place
    assert held.image((1, 1, 1, 2), torch.float32).data_ptr() != place  # too large for it
    assert pickle.loads(pickle.dumps(held))._idle == {}


# ---- attention ----


@pytest.mark.parametrize("processor", [None, AttnProcessor])
@pytest.mark.parametrize(
    "settings",
    [
        dict(query_dim=32, heads=4, dim_head=8),
        dict(query_dim=32, heads=4, dim_head=8, bias=True, out_bias=False),
        dict(query_dim=32, heads=2, dim_head=24, rescale_output_factor=2.0),
        dict(query_dim=32, heads=4, dim_head=8, scale_qk=False),
        dict(query_dim=32, heads=1, dim_head=32, norm_num_groups=8, residual_connection=True, bias=True, eps=1e-6,
             upcast_softmax=True, _from_deprecated_attn_block=True),
    ],
)  # fmt: skip
def test_attention_over_itself(settings: dict[str, Any], processor: Any) -> None:
    torch.manual_seed(0)
    module = Attention(**settings)
    if processor is not None:
        module.set_processor(processor())
    if not module.residual_connection or processor is not None:
        same(module, torch.randn(2, 9, 32))
        same(module, torch.randn(2, 9, 32), encoder_hidden_states=torch.randn(2, 5, 32))
    if module.residual_connection:
        for layout in LAYOUTS:
            same(module, image(32, layout=layout))


@pytest.mark.parametrize("name", list(masks(1, 3, 1)))
def test_attention_over_a_text_with_masks(name: str) -> None:
    torch.manual_seed(0)
    module = Attention(query_dim=32, cross_attention_dim=20, heads=4, dim_head=8)
    x, text = torch.randn(2, 9, 32), torch.randn(2, 7, 20)
    same(module, x, encoder_hidden_states=text)
    same(module, x, encoder_hidden_states=text, attention_mask=masks(2, 7, 4)[name])


def test_a_mask_of_another_length_is_refused() -> None:
    new = replaced(Attention(query_dim=32, cross_attention_dim=20, heads=4, dim_head=8))
    with pytest.raises(UnsupportedCall, match=r"\[2, 1, 5\].*\[2, 7\]"):
        new(torch.randn(2, 9, 32), torch.randn(2, 7, 20), torch.zeros(2, 1, 5))
    with pytest.raises(UnsupportedCall, match="ip_adapter_masks"):
        new(torch.randn(2, 9, 32), torch.randn(2, 7, 20), ip_adapter_masks=torch.ones(1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.set_processor(FusedAttnProcessor2_0()), "FusedAttnProcessor2_0, which is not known"),
        (lambda m: m.set_processor(lambda *args, **kwargs: args[1]), "function, which is not known"),
        (lambda m: setattr(m, "norm_q", nn.LayerNorm(8)), "it has norm_q"),
        (lambda m: m.to_out.append(nn.GELU()), "to_out is not"),
    ],
)
def test_unknown_attention_stays(change: Callable[[Any], Any], reason: str) -> None:
    module = Attention(query_dim=32, heads=4, dim_head=8)
    change(module)
    spec = module_spec(module)
    assert spec is not None
    with pytest.raises(SpecMismatch, match=reason):
        spec.bind(module)


# ---- keys and values of a text ----


def test_a_text_is_projected_once() -> None:
    torch.manual_seed(0)
    module = Attention(query_dim=32, cross_attention_dim=20, heads=4, dim_head=8).eval()
    new: Any = replaced(module)
    calls = counted(new)
    x, text = torch.randn(2, 9, 32), torch.randn(2, 7, 20)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(new(x, text), module(x, text), rtol=1e-4, atol=1e-5)
        assert len(calls) == 1
        text.mul_(2)  # another version
        torch.testing.assert_close(new(x, text), module(x, text), rtol=1e-4, atol=1e-5)
        assert len(calls) == 2
        text.data.mul_(2)  # the same version
        torch.testing.assert_close(new(x, text), module(x, text), rtol=1e-4, atol=1e-5)
        assert len(calls) == 3
        other = text.clone()
        new(x, other)
        assert len(calls) == 4
        new.kv.weight.mul_(0.5)  # other weights
        halved = new(x, other)
        assert len(calls) == 5 and not torch.allclose(halved, module(x, other), atol=1e-3)


def test_the_keys_of_a_text_are_freed_with_it() -> None:
    new: Any = replaced(Attention(query_dim=32, cross_attention_dim=20, heads=4, dim_head=8))
    text = torch.randn(2, 7, 20)
    with torch.no_grad():
        new(torch.randn(2, 9, 32), text)
    kept = weakref.ref(new._of_text._held[0])
    seen = weakref.ref(text)
    del text
    gc.collect()
    assert seen() is None and kept() is None and new._of_text._held is None


def test_texts_made_in_inference_mode_are_projected_each_time() -> None:
    new: Any = replaced(Attention(query_dim=32, cross_attention_dim=20, heads=4, dim_head=8))
    calls = counted(new)
    with torch.inference_mode():
        x, text = torch.randn(2, 9, 32), torch.randn(2, 7, 20)
        before = new(x, text)
        text.mul_(2)
        assert not torch.allclose(new(x, text), before) and len(calls) == 2


def test_copies_and_pickles_start_without_keys() -> None:
    new: Any = replaced(Attention(query_dim=32, cross_attention_dim=20, heads=4, dim_head=8))
    x, text = torch.randn(2, 9, 32), torch.randn(2, 7, 20)
    with torch.no_grad():
        wanted = new(x, text)
        for other in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
            assert other._of_text._held is None
            assert torch.equal(other(x, text), wanted)


# ---- transformer blocks ----


@pytest.mark.parametrize(
    "settings",
    [
        dict(cross_attention_dim=20),
        dict(),
        dict(double_self_attention=True),
        dict(cross_attention_dim=20, attention_bias=True, activation_fn="gelu-approximate", norm_eps=1e-6),
        dict(cross_attention_dim=20, norm_elementwise_affine=False, final_dropout=True, upcast_attention=True),
        dict(
            cross_attention_dim=20, norm_type="ada_norm_single", norm_elementwise_affine=False, num_embeds_ada_norm=10
        ),
        dict(norm_type="ada_norm_single", norm_elementwise_affine=False),
        dict(norm_type="ada_norm_zero", norm_elementwise_affine=False, num_embeds_ada_norm=10),
        dict(cross_attention_dim=20, norm_type="ada_norm_zero", norm_elementwise_affine=False, num_embeds_ada_norm=10),
    ],
)
def test_transformer_block(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    block = BasicTransformerBlock(32, 4, 8, **settings)
    for norm in (one for one in block.modules() if isinstance(one, nn.LayerNorm) and one.elementwise_affine):
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    x, given = torch.randn(2, 9, 32), {}
    if "cross_attention_dim" in settings:
        given["encoder_hidden_states"] = torch.randn(2, 7, 20)
    if settings.get("norm_type") == "ada_norm_single":
        given["timestep"] = torch.randn(2, 6 * 32)
    if settings.get("norm_type") == "ada_norm_zero":
        given |= {"timestep": torch.tensor([3, 801]), "class_labels": torch.tensor([9, 0])}
    same(block, x, **given)
    if "cross_attention_dim" in settings:
        same(block, x, **given, encoder_attention_mask=masks(2, 7, 4)["[B, 1, L]"])
    same(block, x, attention_mask=masks(2, 9, 4)["[B, 1, L]"], **given)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(norm_type="ada_norm", num_embeds_ada_norm=10), "norm_type is 'ada_norm'"),
        (dict(norm_type="ada_norm_zero", num_embeds_ada_norm=10), "norm3 is .* without weights"),
        (dict(only_cross_attention=True, cross_attention_dim=20), "only_cross_attention"),
        (dict(attention_type="gated", cross_attention_dim=20), "it has fuser"),
        (dict(positional_embeddings="sinusoidal", num_positional_embeddings=9), "it has pos_embed"),
    ],
)
def test_other_transformer_blocks_stay(settings: dict[str, Any], reason: str) -> None:
    block = BasicTransformerBlock(32, 4, 8, **settings)
    spec = module_spec(block)
    assert spec is not None
    with pytest.raises(SpecMismatch, match=reason):
        spec.bind(block)


def test_transformer_block_refuses_what_it_would_drop() -> None:
    new = replaced(BasicTransformerBlock(32, 4, 8))
    with pytest.raises(UnsupportedCall, match="gligen"):
        new(torch.randn(2, 9, 32), cross_attention_kwargs={"gligen": {"objs": torch.randn(2, 3, 32)}})


# ---- whole models ----


MODELS: dict[str, Callable[[], Any]] = {
    "unet": unet,
    "linear projections": lambda: unet(use_linear_projection=True, attention_head_dim=(2, 4)),
    "SDXL": lambda: sdxl().unet,
    "VAE": vae,
    "ControlNet": lambda: controlnet().controlnet,
    "PixArt": lambda: made("pixart").transformer,
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=("contiguous", "last"))
@pytest.mark.parametrize("name", list(MODELS))
def test_models(name: str, layout: Any) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(memory_format=layout)
    wanted = [run(model, size) for size in (GUIDED, UNEVEN)]
    names = list(model.state_dict())
    engine = infuse.init_inference(model, dtype=torch.float32, verify="strict")
    layers = {step.layer for step in engine.plan.steps if step.depth == MODULE}
    expected = {"VAE": {"ResnetBlock2D", "Upsample2D", "Attention"}, "PixArt": {"BasicTransformerBlock"}}
    assert layers >= expected.get(name, {"ResnetBlock2D", "Transformer2DModel"}), layers
    for size, before in zip((GUIDED, UNEVEN), wanted, strict=True):
        torch.testing.assert_close(run(model, size), before, rtol=1e-4, atol=1e-4)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(MODELS))
def test_sixteen_bits(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    wanted = run(model)
    own = (run(model.to(dtype)) - wanted).square().mean().sqrt()
    infuse.init_inference(model, dtype=dtype, verify="strict")
    assert (run(model) - wanted).square().mean().sqrt() <= 1.5 * own


def test_blocks_that_embed_the_time_step_and_a_class() -> None:
    """DiT, in its own pipeline: the model asks its first block for the embedding, too."""
    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=4,
        num_embeds_ada_norm=1000,
    ).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    pipe = diffusers.DiTPipeline(model, vae(), diffusers.DDIMScheduler(), id2label={0: "cat", 3: "dog"})
    pipe.set_progress_bar_config(disable=True)
    names, given = list(model.state_dict()), dict(class_labels=[3, 0], num_inference_steps=2, output_type="np")
    wanted = pipe(**given, generator=torch.Generator().manual_seed(1)).images
    engine = infuse.init_inference(pipe, dtype=torch.float32)
    layers = [step.layer for step in engine.plan["transformer"].steps]
    assert layers.count("BasicTransformerBlock") == 2 and "Linear" in layers  # proven
    found = engine(**given, generator=torch.Generator().manual_seed(1)).images
    assert abs(found - wanted).max() <= 1e-4 and wanted.std() > 0.01
    assert list(model.state_dict()) == names


def test_a_block_with_an_unknown_processor_keeps_its_feed_forward_replaced() -> None:
    model = unet()
    block = next(module for module in model.modules() if type(module) is BasicTransformerBlock)
    block.attn1.set_processor(FusedAttnProcessor2_0())
    block.attn1.fuse_projections()
    plan = infuse.plan(model, dtype=torch.float32)
    path = next(name for name, module in model.named_modules() if module is block)
    inside = {step.path.removeprefix(f"{path}."): step.layer for step in plan.steps if step.path.startswith(f"{path}.")}
    assert inside["ff"] == "FeedForward" and inside["attn2"] == "Attention"
    assert any("FusedAttnProcessor2_0" in left.why for left in plan.left)


def test_tiled_decoding() -> None:
    torch.manual_seed(0)
    model = vae()
    model.enable_tiling(), model.enable_slicing()
    latents = torch.randn(2, 4, 24, 40)
    with torch.no_grad():
        wanted = model.decode(latents).sample
        infuse.init_inference(model, dtype=torch.float32)
        torch.testing.assert_close(model.decode(latents).sample, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=("contiguous", "last"))
def test_transformer_over_an_image(layout: Any, linear: bool) -> None:
    torch.manual_seed(0)
    given = dict(num_layers=2, cross_attention_dim=20, norm_num_groups=8, use_linear_projection=linear)
    model = Transformer2DModel(4, 8, in_channels=32, **given).eval().to(memory_format=layout)
    new = replaced(model)
    x, text, mask = image(32, layout=layout), torch.randn(2, 7, 20), torch.ones(2, 7)
    mask[:, 5:] = 0
    with torch.no_grad():
        for more in ({}, dict(encoder_attention_mask=mask), dict(timestep=torch.tensor(3), return_dict=False)):
            wanted, found = model(x, text, **more), new(x, text, **more)
            assert isinstance(wanted, type(found))
            torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedCall, match="gligen"):
        new(x, text, cross_attention_kwargs={"gligen": 1})


def test_layers_are_ours() -> None:
    model = unet()
    infuse.init_inference(model, dtype=torch.float32)
    kinds = {type(module) for module in model.modules()}
    assert StreamsBlock in kinds and ImageAttention in kinds and ImageAttentionModule not in kinds


class Halved(Attention):
    """A user's class that computes something else."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) / 2


def test_a_block_with_a_users_own_attention_stays() -> None:
    block = BasicTransformerBlock(32, 4, 8)
    block.attn1.__class__ = Halved
    spec = module_spec(block)
    assert spec is not None and module_spec(block.attn1) is None
    with pytest.raises(SpecMismatch, match="attn1 is a Halved"):
        spec.bind(block)


# ---- the op ----


@pytest.mark.parametrize("layout", LAYOUTS, ids=("contiguous", "last"))
@pytest.mark.parametrize("body", [name for name in registered()["group_norm"].bodies if name != "triton"])
def test_group_norm_in_place_and_on_any_number_of_threads(body: str, layout: Any) -> None:
    op = registered()["group_norm"]
    if reason := op.bodies[body].needs(CPU, torch.float32):
        pytest.skip(reason)
    run_body, threads = op.body(body), torch.get_num_threads()
    mean = 0 if body == "torch" else 100  # PyTorch's loses all digits to a large mean where channels are last
    x, weight = image(96, 40, 33, layout=layout) + mean, torch.randn(96)
    given = (weight, weight, None, 32, 1e-6, True)
    wanted = op.reference(x.double(), weight.double(), weight.double(), *given[2:]).float()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            own = x.clone(memory_format=torch.preserve_format)
            assert run_body(own, *given, own) is not None
            assert own.stride() == x.stride()
            found.append(own)
    finally:
        torch.set_num_threads(threads)
    assert body != "cpu" or all(torch.equal(found[0], other) for other in found)
    torch.testing.assert_close(found[0], wanted, rtol=1e-3, atol=1e-3)
