"""Whoever asks a replaced layer for a module or tensor that it had is told where its values are and what keeps it."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.families import BY_NAME
from tests.support.side_by_side import replaced

OF_LAYERS = {
    "llama": "model.layers.0.",
    "gpt2": "transformer.h.0.",
    "bert": "bert.encoder.layer.0.",
    "gpt-neox": "gpt_neox.layers.0.",
    "qwen2-moe": "model.layers.0.",
    "mixtral": "model.layers.0.",
    "t5": "encoder.block.0.",
}


def resolved(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = getattr(model, name)
    return model


def gone_in(model: Any, path: str) -> str:
    """The path up to the first attribute that is not there; "" if all are."""
    for count, name in enumerate(path.split("."), start=1):
        if not hasattr(model, name):
            return ".".join(path.split(".")[:count])
        model = getattr(model, name)
    return ""


def names_in(model: nn.Module, layer: str) -> list[str]:
    """Paths of the layer's modules and tensors in the original."""
    named = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
    return [name for name, _ in named if name.startswith(layer)]


@pytest.mark.parametrize("quant", [None, "int8:16"])
@pytest.mark.parametrize("name", OF_LAYERS)
def test_each_module_that_is_gone_says_where_it_went(name: str, quant: str | None) -> None:
    original, model = BY_NAME[name].make(), replaced(name, quant=quant)
    keys, gone = original.state_dict().keys(), 0
    for each in (model, pickle.loads(pickle.dumps(model))):
        for path in sorted({gone_in(each, path) for path in names_in(original, OF_LAYERS[name])} - {""}):
            owner, _, leaf = path.rpartition(".")
            place = resolved(each, owner)
            assert not hasattr(place, leaf) and getattr(place, leaf, None) is None
            with pytest.raises(AttributeError) as caught:
                getattr(place, leaf)
            told, gone = str(caught.value), gone + 1
            assert f"infuse replaced {OF_LAYERS[name][:-1]} (" in told and f" {path} included" in told
            assert "replace_with_kernel_inject=False" in told
            if beneath := [key for key in keys if key == path or key.startswith(f"{path}.")]:
                assert any(repr(key) in told for key in beneath), told
    assert gone >= 6


@pytest.mark.parametrize(
    ("name", "path", "key"),
    [
        ("llama", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj.weight"),
        ("llama", "model.layers.2.mlp.gate_proj", "model.layers.2.mlp.gate_proj.weight"),
        ("llama", "model.layers.1.input_layernorm", "model.layers.1.input_layernorm.weight"),
        ("gpt2", "transformer.h.1.attn.c_attn", "transformer.h.1.attn.c_attn.weight"),
        ("bert", "bert.encoder.layer.0.attention.self.query", "bert.encoder.layer.0.attention.self.query.weight"),
        ("bert", "bert.encoder.layer.0.output.dense", "bert.encoder.layer.0.output.dense.weight"),
        ("qwen2-moe", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate.weight"),
    ],
)
def test_get_submodule_says_the_same(name: str, path: str, key: str) -> None:
    model = replaced(name)
    for each in (model, pickle.loads(pickle.dumps(model))):
        with pytest.raises(AttributeError, match=f"has no attribute .*{re.escape(repr(key))}"):
            each.get_submodule(path)
        assert torch.equal(each.get_parameter(key), each.state_dict()[key]) and each.get_submodule("") is each


def test_other_names_are_none_of_ours() -> None:
    model = replaced("llama")
    layer: Any = model.model.layers[0]
    for place in (layer, layer.self_attn, layer.mlp, model.lm_head):
        with pytest.raises(AttributeError, match=r"^'\w+' object has no attribute 'nonsense'$"):
            place.nonsense  # noqa: B018
        assert getattr(place, "nonsense", 3) == 3 and getattr(place, "q_proj", None) is None
    with pytest.raises(AttributeError, match="LlamaModel has no attribute `nonsense`"):
        model.get_submodule("model.nonsense.more")
    with pytest.raises(TypeError, match="^'LlamaDecoderLayer' object is not subscriptable$"):
        layer[0]


def test_a_list_that_is_none_any_more_says_so() -> None:
    model = replaced("t5")
    with pytest.raises(TypeError, match=r"infuse replaced encoder.block.1 \(T5Block\) as a whole"):
        model.encoder.block[1].layer[0]


def test_experts_replaced_alone_say_so() -> None:
    model = replaced("qwen2-moe", replace_with_kernel_inject=False, quant="int8:16")
    key = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(AttributeError, match=f"infuse replaced model.layers.0.mlp.experts .*{key}.* before init_inf"):
        resolved(model, key)
