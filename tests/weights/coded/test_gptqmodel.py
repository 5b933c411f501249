"""Live models of gptqmodel: linears that hold the tensors of files, until their first forward packs them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import infuse
from infuse.quant.parse import quant_format
from infuse.weights.in_model import CodesInModel, codes_in
from tests.support.libraries import stand_in
from tests.support.quantized_files import BY_CASE, awq, gptq, llama, publish
from tests.support.quantized_models import logits

KEYS: dict[str, Any] = dict(progress=False, replace_with_kernel_inject=True)
AT = "model.layers.0.mlp.up_proj"
QLINEAR = "gptqmodel.nn_modules.qlinear"
# Class, packer, bits, version of zeros, symmetric, the format.
KINDS: dict[str, tuple[str, Any, int, int, bool, str]] = {
    "sym": ("torch.TorchLinear", partial(gptq, version=2), 4, 2, True, "int4:32:f16"),
    "asym": ("torch.TorchLinear", partial(gptq, version=2, sym=False), 4, 2, False, "int4:32:asymmetric:f16"),
    "asym-v1": ("tritonv2.TritonV2Linear", partial(gptq, sym=False), 4, 1, False, "int4:32:asymmetric:f16"),
    "eight": ("torch.TorchLinear", partial(gptq, bits=8, version=2), 8, 2, True, "int8:32:f16"),
    "order": (
        "torch_cpu_avx512.TorchCpuAvx512Linear",
        partial(gptq, version=2, order=True, sym=False),
        4,
        2,
        False,
        "int4:32:asymmetric:f16",
    ),
    "awq": ("torch_cpu_avx512_awq.TorchCpuAvx512AwqLinear", awq, 4, 0, False, "int4:32:asymmetric:f16"),
}


def far(given: Tensor, exact: Tensor) -> float:
    return float((given.float() - exact.float()).norm() / exact.float().norm())


def held(kind: str) -> tuple[Any, Any]:
    """A model whose linears but the head are stand-ins for gptqmodel's, with biases in q, and one with their values."""
    cls, pack, bits, version, sym, _ = KINDS[kind]
    model, exact = llama(attention_bias=True).eval(), llama(attention_bias=True).eval()
    for path, linear in list(model.named_modules()):
        if type(linear) is not nn.Linear or path == "lm_head":
            continue
        made: Any = stand_in(f"{QLINEAR}.{cls}", nn.Module)()
        leaves, values = pack(linear.weight.detach())
        for name, one in leaves.items():
            made.register_buffer(name, one)
        made.register_buffer("wf_unsqueeze_zero", torch.zeros(1), persistent=False)
        made.register_buffer("bias", None if linear.bias is None else linear.bias.detach().half())
        made.in_features, made.out_features, made.bits, made.group_size = (
            linear.in_features,
            linear.out_features,
            bits,
            32,
        )
        made.sym, made.desc_act, made.linear_mode, made.adapter = False, True, None, None  # whatever the file says
        made.qzero_format = lambda version=version: version
        model.set_submodule(path, made)
        exact.get_submodule(path).weight.data.copy_(values)
        if linear.bias is not None:
            exact.get_submodule(path).bias.data.copy_(linear.bias.half())
    model.is_quantized = True
    method = "awq" if kind == "awq" else "gptq"
    # The version in the config is the file's, which zeros no longer have.
    model.config.quantization_config = dict(
        quant_method=method, bits=bits, group_size=32, sym=sym, checkpoint_format="gptq"
    )
    return model, exact


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_taken_as_they_are(kind: str) -> None:
    model, exact = held(kind)
    found = codes_in(model)
    assert isinstance(found, CodesInModel), found
    assert torch.equal(found.tensors[f"{AT}.weight"].read(), exact.get_submodule(AT).weight)
    engine = infuse.init_inference(model, dtype="fp32", **KEYS)
    assert far(logits(engine), logits(exact)) < 1e-5
    assert sum(step.depth == "block" for step in engine.plan.steps) == 3
    assert {each for step in engine.plan.steps for each in step.formats.values()} == {KINDS[kind][5]}
    assert "taken as it is" in str(engine.plan)
    assert "21 linears of gptqmodel are taken in their codes" in str(engine.plan)
    assert engine.generate(torch.arange(5, 21)[None], max_new_tokens=3, do_sample=False).shape == (1, 19)


def test_modules_with_other_bits() -> None:
    model, exact = held("sym")
    linear: Any = model.get_submodule(AT)
    leaves, values = gptq(llama(attention_bias=True).get_submodule(AT).weight.detach(), bits=8, version=2, size=64)
    for name, one in leaves.items():
        setattr(linear, name, one)
    linear.bits, linear.group_size = 8, 64
    exact.get_submodule(AT).weight.data.copy_(values)
    found = codes_in(model)
    assert isinstance(found, CodesInModel), found
    assert torch.equal(found.tensors[f"{AT}.weight"].read(), values)
    other = "model.layers.1.mlp.up_proj"
    assert torch.equal(found.tensors[f"{other}.weight"].read(), exact.get_submodule(other).weight)


def _run(linear: Any) -> None:
    linear.linear_mode = "inference"


def _packed(linear: Any) -> None:
    linear.qweight = linear.qweight.view(torch.uint8)


def _rotated(linear: Any) -> None:
    linear.register_buffer("had_K", torch.ones(2))


def _adapted(linear: Any) -> None:
    linear.adapter = SimpleNamespace()


def _of_marlin(linear: Any) -> None:
    linear.__class__ = stand_in(f"{QLINEAR}.marlin.MarlinLinear", nn.Module)


def _of_another_version(linear: Any) -> None:
    linear.qzero_format = lambda: 1


def _broken(linear: Any) -> None:
    linear.scales = linear.scales[1:]


@pytest.mark.parametrize(("change", "told"), [
    (_run, f"{AT} was packed by a forward: call init_inference before the first one"),
    (_packed, f"{AT} was packed by a forward: call init_inference before the first one"),
    (_rotated, f"{AT} has had_K, which is not read"),
    (_adapted, f"{AT} has an adapter"),
    (_of_marlin, f"{AT} is a MarlinLinear of gptqmodel, which packs codes for one kernel"),
    (_of_another_version, "linears of GPTQ have zeros of both versions"),
    (_broken, f"{AT}.qweight is (16, 256), scales (3, 256)"),
])  # fmt: skip
def test_models_that_are_left_alone(change: Any, told: str) -> None:
    model, _ = held("sym")
    change(model.get_submodule(AT))
    plan = infuse.plan(model, dtype="fp32")
    assert not plan.steps and "already quantized by GPTQ" in str(plan) and told in str(plan)


LIBRARY = ["gptq-4-sym-v1", "gptq-4-asym-v1", "gptq-8-sym-v1", "awq"]


@pytest.mark.parametrize("name", LIBRARY)
def test_a_model_of_the_library(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    exact = llama().eval()
    exact.load_state_dict(publish(tmp_path, BY_CASE[name], llama()))
    told = dict(BY_CASE[name].config)
    config = dict(exact.config.to_dict(), architectures=["LlamaForCausalLM"], quantization_config=told)
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked: Any = t.AwqConfig(backend="torch_awq") if name == "awq" else t.GPTQConfig(bits=told["bits"], backend="torch")
    model = t.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=asked, dtype=torch.float32).eval()
    found = codes_in(model)
    assert isinstance(found, CodesInModel), found
    for path in (AT, "model.layers.2.self_attn.o_proj"):
        assert torch.equal(found.tensors[f"{path}.weight"].read(), exact.get_submodule(path).weight)
    engine = infuse.init_inference(model, dtype="fp32", **KEYS)
    assert far(logits(engine), logits(exact)) < 1e-5
    assert {each for step in engine.plan.steps for each in step.formats.values()} == {
        str(quant_format(BY_CASE[name].format))
    }
