"""Settings of the modules of a replaced layer stay readable on the part that stands at their path."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import infuse
from tests.models.families import BY_NAME, FAMILIES, RELATIVES
from tests.support.relatives import less
from tests.support.side_by_side import original, replaced, unproven

OF_MODULES = vars(nn.Module()).keys()


def at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def settings(module: nn.Module) -> dict[str, Any]:
    """What a module holds besides its modules, tensors and hooks."""
    held = {name: value for name, value in vars(module).items() if name not in OF_MODULES}
    return {name: value for name, value in held.items() if not isinstance(value, (Tensor, nn.Module))}


def in_both(wanted: nn.Module, engine: infuse.InferenceEngine, model: Any) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The modules of each layer of the original, with the part at the same path."""
    for path in (step.path for step in engine.plan.steps if step.depth == "block"):
        for place, module in wanted.get_submodule(path).named_modules(prefix=path, remove_duplicate=False):
            if isinstance(part := at(model, place), nn.Module):
                yield module, part


@pytest.mark.parametrize("name", less(RELATIVES, [family.name for family in FAMILIES]))
def test_settings_are_those_of_the_original(name: str) -> None:
    engine, seen = unproven(name), 0
    for module, part in in_both(original(name), engine, engine.module):
        for setting, value in settings(module).items():
            found, seen = getattr(part, setting), seen + 1
            assert type(found) is type(value), (type(module).__name__, setting)
            if isinstance(value, (int, float, str, tuple, list, torch.dtype)):
                assert found == value, (type(module).__name__, setting)
            if hasattr(value, "to_dict"):
                assert found.to_dict().keys() == value.to_dict().keys()
    assert seen or not any(step.depth == "block" for step in engine.plan.steps)


@pytest.mark.parametrize("quant", [None, "int8:16"])
@pytest.mark.parametrize("name", ["llama", "bert", "mixtral", "bloom"])
def test_copies_have_them(name: str, quant: str | None) -> None:
    engine = unproven(name, quant=quant)
    for model in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
        for module, part in in_both(original(name), engine, model):
            assert all(hasattr(part, setting) for setting in settings(module))


@pytest.mark.parametrize(
    ("name", "path", "setting"),
    [
        ("llama", "model.layers.0.mlp", "hidden_size"),
        ("llama", "model.layers.0.self_attn", "head_dim"),
        ("bert", "bert.encoder.layer.0.attention", "is_cross_attention"),
        ("bloom", "transformer.h.0.mlp", "slow_but_exact"),
        ("mixtral", "model.layers.0.mlp", "top_k"),
        ("mixtral", "model.layers.0.mlp.experts", "num_experts"),
        ("gemma4-experts", "model.layers.0.experts", "num_experts"),
    ],
)
def test_another_value_is_refused(name: str, path: str, setting: str) -> None:
    part: Any = replaced(name).get_submodule(path)
    value = getattr(part, setting)
    setattr(part, setting, value)
    with pytest.raises(infuse.UnsupportedCall, match=f"was replaced while {setting} was {value}"):
        setattr(part, setting, not value if isinstance(value, bool) else value + 1)
    assert getattr(part, setting) == value


def test_nothing_keeps_the_modules_that_were_replaced() -> None:
    model: Any = BY_NAME["llama"].make()
    gone = [ref(module) for module in model.model.layers[0].modules()]
    model.model.layers[0].mlp.function = torch.nn.functional.silu
    infuse.init_inference(model, dtype=torch.float32, verify="off", progress=False)
    gc.collect()
    assert not any(each() for each in gone)
    assert model.model.layers[0].mlp.function is torch.nn.functional.silu


def test_a_batch_norms_eps_counts() -> None:
    """Running statistics are normed by one operation, which takes the number as it is now."""
    config = t.ParakeetEncoderConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, subsampling_conv_channels=16,
        num_mel_bins=16,
    )  # fmt: skip
    wanted: Any = t.ParakeetEncoder(config).eval()
    model = copy.deepcopy(wanted)
    engine = infuse.init_inference(model, dtype=torch.float32, progress=False)
    assert any(step.depth == "block" for step in engine.plan.steps)
    for each in (wanted, model):
        for layer in each.layers:
            layer.conv.norm.eps = 1.0
    sounds = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(sounds)[0], wanted(sounds)[0], atol=1e-4, rtol=1e-4)
