"""Layers that take several texts in one row, with their ends: each token sees its own text."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

import infuse
from infuse.architectures.families import towers
from infuse.architectures.layer import LayerSpec
from infuse.architectures.parts.attention import AttentionShape
from infuse.layers.block import Block
from tests.models.every_architecture import tiny_config
from tests.support.tolerance import assert_near

SPECS = {spec.layer.rpartition(".")[2]: spec for spec in towers.SPECS}
TOKENS = 24
ENDS = {
    "one text": (0, 24),
    "alike": (0, 8, 16, 24),
    "each its own": (0, 3, 13, 24),
    "some alike": (0, 5, 10, 11, 15, 19, 24),
}


class Tower(nn.Module):
    """As the layers' own models call them."""

    def __init__(self, layers: list[nn.Module], config: Any):
        super().__init__()
        self.layers, self.config = nn.ModuleList(layers), config

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        for layer in self.layers:
            out = layer(x, **given)
            x = out[0] if isinstance(out, tuple) else out
        return x


def config_of(spec: LayerSpec) -> Any:
    """A tiny config of the tower that a layer is of, found beside its class."""
    module, _, name = spec.layer.rpartition(".")
    kinds = ("Audio", "Encoder") if "Audio" in name else ("Vision",)
    beside = importlib.import_module(module.replace("modeling_", "configuration_"))
    found = [
        cls
        for cls in vars(beside).values()
        if inspect.isclass(cls) and issubclass(cls, PreTrainedConfig) and any(kind in cls.__name__ for kind in kinds)
    ]
    config = tiny_config(found[0])
    config._attn_implementation = "sdpa"
    return config


def made(spec: LayerSpec, dtype: torch.dtype) -> Tower:
    torch.manual_seed(0)
    module, _, name = spec.layer.rpartition(".")
    config = config_of(spec)
    layers = [getattr(importlib.import_module(module), name)(config) for _ in range(2)]
    tower = Tower(layers, config).eval()
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.normal_(std=0.1)
    return tower.to(dtype)


def given(spec: LayerSpec, shape: AttentionShape, ends: tuple[int, ...], dtype: torch.dtype) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, shape.hidden, generator=generator).to(dtype)
    more: dict[str, Any] = {"cu_seqlens": torch.tensor(ends, dtype=torch.int32)}
    if "Audio" not in spec.layer:
        angles = torch.randn(TOKENS, shape.head_width // 2, generator=generator).repeat(1, 2)
        more["position_embeddings"] = (angles.cos(), angles.sin())
    return SimpleNamespace(x=x, more=more)


def blocks_of(spec: LayerSpec, dtype: torch.dtype) -> tuple[Tower, nn.Module, AttentionShape]:
    original, tower = made(spec, dtype), made(spec, dtype)
    module = infuse.init_inference(tower, dtype=dtype, replace_with_kernel_inject=True, verify="off").module
    assert all(isinstance(layer, Block) for layer in module.layers)  # type: ignore[union-attr]
    (shape,) = module.layers[0].shape.mixers.values()  # type: ignore[union-attr, index]
    return original, module, shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_each_token_sees_its_own_text(name: str, dtype: torch.dtype) -> None:
    original, module, shape = blocks_of(SPECS[name], dtype)
    results = []
    for ends in ENDS.values():
        call = given(SPECS[name], shape, ends, dtype)
        found, wanted = module(call.x, **call.more), original(call.x, **call.more)
        assert_near(found, wanted, dtype, f"{ends}")
        results.append(found.float())
    assert float((results[0] - results[1]).abs().max()) > 1e-2, "all tokens see each other in both"
    none = given(SPECS[name], shape, (0,), dtype)
    turns = {key: tuple(table[:0] for table in value) for key, value in none.more.items() if key != "cu_seqlens"}
    assert module(none.x[:0], **(none.more | turns)).shape == (0, shape.hidden)


@torch.no_grad()
def test_ends_that_do_not_fit_are_refused() -> None:
    _, module, shape = blocks_of(towers.QWEN3_VL, torch.float32)
    for ends in ((0, 12), (0, 12, 30), (0, 20, 12, 24)):
        call = given(towers.QWEN3_VL, shape, ends, torch.float32)
        with pytest.raises(infuse.UnsupportedCall, match="24 tokens"):
            module(call.x, **call.more)
    call = given(towers.QWEN3_VL, shape, ENDS["alike"], torch.float32)
    with pytest.raises(infuse.UnsupportedCall, match="tokens, width"):
        module(call.x[None], **call.more)
    with pytest.raises(infuse.UnsupportedCall, match="was called with attention_mask"):
        module(call.x, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool), **call.more)
    with pytest.raises(infuse.UnsupportedCall, match="cu_seqlens"):
        module(call.x, position_embeddings=call.more["position_embeddings"])


@torch.no_grad()
def test_results_are_clamped_in_float16() -> None:
    spec = towers.QWEN3_OMNI_SOUND
    original, module, shape = blocks_of(spec, torch.float16)
    call = given(spec, shape, ENDS["alike"], torch.float16)
    call.x[:, 0], call.x[:, 1] = 65504, -65504
    found, wanted = module(call.x, **call.more), original(call.x, **call.more)
    assert float(wanted.abs().max()) == 64512
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
