"""Models that another library quantized or offloaded are left alone, with one line that says so.

The libraries are not installed here: stand-ins have their modules' and classes' names, and the forms in which they hold
weights.
Checked by hand against torchao 0.18, bitsandbytes 0.50 (8 bits) and accelerate 1.15.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse.architectures.foreign.quantized_elsewhere import offloaded, quantized_by
from tests.models.families import BY_NAME, inputs
from tests.support.libraries import stand_in

LLAMA = BY_NAME["llama"]


class Int8Linear(nn.Module):
    """Weights as 8-bit integers and a scale for each row, as bitsandbytes, GPTQ and others hold them."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale.detach())

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale.to(x.dtype)).T


def with_modules(name: str) -> nn.Module:
    model, cls = LLAMA.make(), stand_in(name, Int8Linear)
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and path != "lm_head":
            model.set_submodule(path, cls(module))
    return model


def with_parameters(name: str) -> nn.Module:
    """Plain linears whose weights are of a tensor class, as torchao leaves them."""
    model, cls = LLAMA.make(), stand_in(name, Tensor)
    for path, module in model.named_modules():
        if type(module) is nn.Linear and path != "lm_head":
            module.weight = nn.Parameter(module.weight.detach().as_subclass(cls), requires_grad=False)
    return model


def with_a_mark(method: str) -> nn.Module:
    """Plain linears with another forward, known by what transformers notes on the model (compressed-tensors,
    finegrained FP8).
    """
    model = LLAMA.make()
    model.is_quantized, model.config.quantization_config = True, {"quant_method": method}
    return model


MADE = {
    "torchao": lambda: with_parameters("torchao.quantization.Int8Tensor"),
    "bitsandbytes, 8 bits": lambda: with_modules("bitsandbytes.nn.modules.Linear8bitLt"),
    "bitsandbytes, 4 bits": lambda: with_modules("bitsandbytes.nn.modules.Linear4bit"),
    "GPTQ": lambda: with_modules("gptqmodel.nn_modules.qlinear.torch.TorchQuantLinear"),
    "AWQ": lambda: with_modules("awq.modules.linear.gemm.WQLinear_GEMM"),
    "HQQ": lambda: with_modules("hqq.core.quantize.HQQLinear"),
    "compressed-tensors": lambda: with_a_mark("compressed-tensors"),
}


@pytest.mark.parametrize("keys", [dict(dtype="fp32"), dict(dtype="bf16", quant="int8:16")], ids=str)
@pytest.mark.parametrize("library", MADE)
def test_a_quantized_model_is_left_alone_with_one_line(library: str, keys: dict[str, Any]) -> None:
    model = MADE[library]()
    before = [
        (name, type(tensor), tensor.dtype, tensor.data_ptr())
        for name, tensor in model.state_dict(keep_vars=True).items()
    ]
    with torch.no_grad():
        wanted = model(**inputs(LLAMA)).logits
        engine = infuse.init_inference(model, **keys)
        assert torch.equal(engine(**inputs(LLAMA)).logits, wanted)
    assert engine.plan.steps == ()
    assert [left.why for left in engine.plan.left] == [
        f"already quantized by {library}: nothing is replaced, quantized or cast"
    ]
    assert f"  left  already quantized by {library}: " in str(engine.plan)
    assert before == [
        (name, type(tensor), tensor.dtype, tensor.data_ptr())
        for name, tensor in model.state_dict(keep_vars=True).items()
    ]
    assert engine.generate(**inputs(LLAMA), max_new_tokens=2).shape[1] == inputs(LLAMA)["input_ids"].shape[1] + 2


def test_a_checkpoint_is_not_read_into_a_quantized_model(tmp_path: Any) -> None:
    with pytest.raises(infuse.ConfigError, match="already quantized by torchao: leave it out"):
        infuse.init_inference(MADE["torchao"](), checkpoint=str(tmp_path))


def test_a_quantized_model_that_must_not_be_moved() -> None:
    """bitsandbytes raises for any `to`: a model that is where it should be is not moved."""
    model = MADE["bitsandbytes, 8 bits"]()
    model.to = None
    assert infuse.init_inference(model).plan.steps == ()


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_models_that_nobody_quantized(name: str) -> None:
    model = BY_NAME[name].make()
    assert quantized_by(model) is None and not offloaded(model)
    model.config.quantization_config = {"quant_method": "gptq"}  # of a config alone: the weights are plain
    assert quantized_by(model) is None
    infuse.init_inference(model, dtype="fp32", quant="int8:16")
    assert quantized_by(model) is None


@pytest.mark.parametrize("in_sequence", [False, True])
def test_an_offloaded_model_says_that_it_is(in_sequence: bool) -> None:
    hook = stand_in("accelerate.hooks.AlignDevicesHook", object)()
    hook.offload = True
    if in_sequence:
        outer = stand_in("accelerate.hooks.SequentialHook", object)()
        outer.hooks = (hook,)
        hook = outer
    model = LLAMA.make()
    model.model.layers[1].to("meta")
    model.model.layers[1]._hf_hook = hook
    with pytest.raises(infuse.ConfigError, match="accelerate has offloaded 9 parameters"):
        infuse.init_inference(model)


def test_a_model_that_transformers_dequantized_is_replaced() -> None:
    """As it loads GGUF files: dense weights, and the word of its quantizer on the model."""
    model: Any = BY_NAME["llama"].make()
    model.is_quantized, model.quantization_method = True, "gguf"
    model.config.quantization_config = {"quant_method": "gguf"}
    engine = infuse.init_inference(model, dtype="fp32")
    assert sum(step.depth == "block" for step in engine.plan.steps) == 3


def test_the_word_of_an_unknown_quantizer_counts_where_weights_are_not_dense() -> None:
    model: Any = BY_NAME["llama"].make()
    model.is_quantized, model.quantization_method = True, "someones"
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(80, 48, dtype=torch.int8), requires_grad=False)
    assert "already quantized by someones" in str(infuse.plan(model, dtype="fp32"))
