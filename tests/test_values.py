"""What a replaced layer keeps of values follows them: weights that are written or moved, mapped files, caches."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.upsampling import Upsample2D
from diffusion_pipelines import images, made
from fake_graph import FakeBackend
from test_diffusion_pipelines import distance, original
from test_mapped_experts import MMAP, loaded, logits, model, with_kernels
from test_unet_modules import replaced

import infuse
from infuse.errors import CheckpointError
from infuse.graphs.pool import BucketPool


def one_value_less(weight: torch.Tensor) -> None:
    """Change a single value in a way that counts no version."""
    weight.data.view(-1)[weight.numel() // 3] += 5


@pytest.mark.parametrize("after", ["a value", "float32"])
def test_keys_of_a_text_follow_their_weights(after: str) -> None:
    torch.manual_seed(0)
    module = Attention(query_dim=64, cross_attention_dim=80, heads=4, dim_head=16).eval()
    x, text = torch.randn(2, 9, 64), torch.randn(2, 7, 80)
    dtype = torch.float32 if after == "a value" else torch.bfloat16
    new: Any = replaced(module.to(dtype), dtype)
    with torch.no_grad():
        new(x.to(dtype), text.to(dtype))
        if after == "float32":
            wanted = module.to(torch.float32)(x, text)
            new.to(torch.float32)
        else:
            one_value_less(module.to_k.weight)
            new.kv.weight.data[: len(module.to_k.weight)] = module.to_k.weight
            wanted = module(x, text)
        torch.testing.assert_close(new(x, text), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("after", ["a value", "float32", "bfloat16"])
def test_weights_of_an_upsampling_follow_the_convolution(after: str) -> None:
    torch.manual_seed(0)
    module = Upsample2D(64, use_conv=True).eval()
    new: Any = replaced(module)
    x = torch.randn(1, 64, 6, 5)
    if after == "float32":
        new.to(torch.bfloat16)
        module.to(torch.bfloat16)
    with torch.no_grad():
        new(x.to(new.conv.weight.dtype))
        if after == "a value":
            one_value_less(new.conv.weight)
            module.conv.weight.data.copy_(new.conv.weight)
            wanted = module(x)
        else:
            dtype = getattr(torch, after)
            x = x.to(dtype)
            wanted = module.to(dtype)(x)
            new.to(dtype)
        close = dict(rtol=2e-2, atol=2e-2) if after == "bfloat16" else dict(rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(new(x), wanted, **close)


def test_a_preview_in_bfloat16_before_a_picture_in_float32() -> None:
    pipe = made("sdxl", torch.bfloat16)
    engine = infuse.init_inference(pipe, verify="off", progress=False)
    wanted = original("sdxl", num_inference_steps=1)
    images(engine, "sdxl", num_inference_steps=1)
    for part in engine.pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.to(torch.float32)
    assert distance(images(engine, "sdxl", num_inference_steps=1), wanted) < 0.05


@with_kernels
def test_a_mapped_file_that_got_its_old_mtime_back(tmp_path: Path) -> None:
    """Renaming it changes its ctime alone, and nothing that is read."""
    engine = infuse.init_inference(model(), save_mp_checkpoint_path=str(tmp_path), **MMAP, dtype="fp32", quant="int8")
    (file,) = tmp_path.glob("*.safetensors")
    mapped, before = loaded(tmp_path), file.stat()
    wanted = logits(mapped)
    file.chmod(0o600)
    assert torch.equal(logits(mapped), wanted)
    held, data = file.read_bytes(), engine.module.model.layers[1].mlp.experts.down.data
    at = held.index(bytes(data.flatten()[:64].view(torch.uint8).tolist()))
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes([held[at] ^ 64]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match="down.data is not what was saved"):
        logits(mapped)


def test_a_copied_pool_of_graphs_keeps_the_format_of_its_caches() -> None:
    pool = BucketPool(FakeBackend(), 1 << 20, format="int8")
    assert copy.deepcopy(pool).take(1, 5).cache.format == "int8"
    pool.backend = None  # type: ignore[assignment]
    assert pickle.loads(pickle.dumps(pool)).format == "int8"
