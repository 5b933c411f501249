"""Linears whose weight another module reads, found in the source of classes."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import infuse
from infuse.architectures.foreign.plain import linears
from infuse.architectures.foreign.read_weights import read_linears
from infuse.layers.linear import QuantizedLinear
from tests.models.every_architecture import tiny_config


def _tiny(name: str) -> nn.Module:
    """A model by the beginning of its class's name, on meta."""
    model = next(
        getattr(t, name + end)
        for end in ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "Model")
        if hasattr(t, name + end)
    )
    with torch.device("meta"):
        return model(tiny_config(model.config_class))


def _found(model: nn.Module) -> set[str]:
    return {re.sub(r"\d+", "N", path) for path in read_linears(model)}


# What each of them reads in a call, as its source says.
READERS = {
    "Mamba": {"backbone.layers.N.mixer.dt_proj", "lm_head"},
    "FalconMamba": {"backbone.layers.N.mixer.dt_proj", "lm_head"},
    "Rwkv": {"rwkv.blocks.N.attention.output", "rwkv.blocks.N.feed_forward.value"},
    "Deberta": {"encoder.layer.N.attention.self.in_proj"},
}
# Tied heads, weights that are asked for their dtype or device, kernels that train, and sums that are slow and exact.
NO_READERS = ("Llama", "GPT2", "T5", "SwitchTransformers", "OPT", "Qwen3Next", "FalconH1", "Bloom", "Moshi")


@pytest.mark.parametrize("name", READERS)
def test_models_that_read_weights(name: str) -> None:
    assert _found(_tiny(name)) == READERS[name]


@pytest.mark.parametrize("name", NO_READERS)
def test_models_that_do_not(name: str) -> None:
    model = _tiny(name)
    assert next(linears(model), None) is not None
    assert read_linears(model) == {}


def test_attention_that_gives_its_weights_to_pytorch() -> None:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        wavlm = t.WavLMModel(t.WavLMConfig(num_hidden_layers=2))
    assert _found(layer) == {"linearN"}
    projections = {f"encoder.layers.N.attention.{name}_proj" for name in ("q", "k", "v", "out")}
    assert _found(wavlm) == projections


def test_a_head_of_two_weights() -> None:
    with torch.device("meta"):
        model = t.MobileBertForMaskedLM(t.MobileBertConfig(num_hidden_layers=1))
    read = read_linears(model)["cls.predictions.decoder"]
    assert str(read) == "MobileBertLMPredictionHead.forward reads decoder.weight"


def test_bloom_reads_its_weights_where_it_is_slow_and_exact() -> None:
    with torch.device("meta"):
        model = t.BloomModel(t.BloomConfig(hidden_size=32, n_head=4, n_layer=2, slow_but_exact=True, pretraining_tp=2))
    assert _found(model) == {"h.N.self_attention.dense", "h.N.mlp.dense_Nh_to_h"}


class Holds(nn.Module):
    """Has linears of all names that are read below."""

    flag, off = True, False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.many = nn.ModuleList(nn.ModuleDict({"x": nn.Linear(2, 2), "y": nn.Linear(2, 2)}) for _ in range(2))
        self.a.weight.data.zero_()


def scaled(holder: Any, x: Tensor) -> Tensor:
    return x @ holder.a.weight


class ByAnotherName(Holds):
    def forward(self, x: Tensor) -> Tensor:
        first = self.a
        return x @ first.weight.data.t()


class InALoop(Holds):
    def forward(self, x: Tensor) -> Tensor:
        for _, part in enumerate(self.many):
            part.x.weight.div_(2)
        for part in self.many:
            x = x @ part.y.weight
        return x


class OneOfSeveral(Holds):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.many[1].x.weight


class InAFunction(Holds):
    def forward(self, x: Tensor) -> Tensor:
        return scaled(self, x)


class InAProperty(Holds):
    @property
    def matrix(self) -> Tensor:
        return self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


class Inherits(ByAnotherName):
    pass


class WhereItHolds(Holds):
    def forward(self, x: Tensor) -> Tensor:
        if self.flag and x.sum() > 0:
            x = x @ self.a.weight
        return x @ self.b.weight if self.off else x


class AsksOnly(Holds):
    def _init_weights(self, module: nn.Module) -> None:
        self.a.weight.data.normal_()

    def tie_weights(self) -> None:
        self.a.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.a.weight, Tensor) and hasattr(self.b.weight, "SCB") and self.b.weight is not None:
            x = x.to(self.b.weight.data.device)[: self.a.weight.shape[0], : self.b.weight.size(0)]
        if self.a.weight.dtype != torch.int8:
            x = x.to(self.a.weight.dtype)
        if self.training:
            x = x @ self.a.weight
        return self.a(x)


class AsksForTheDtype(Holds):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.to(self.a.weight.data.dtype))


class Beside(Holds):
    """Its inner module has another `a`, which is not the one that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Holds()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a.weight


@pytest.mark.parametrize(
    ("kind", "wanted"),
    {
        ByAnotherName: {"a"},
        InALoop: {"many.N.x", "many.N.y"},
        OneOfSeveral: {"many.N.x"},
        InAFunction: {"a"},
        InAProperty: {"b"},
        Inherits: {"a"},
        WhereItHolds: {"a"},
        AsksOnly: set(),
        AsksForTheDtype: {"a"},
        Beside: {"a"},
    }.items(),
)
def test_ways_of_reading(kind: type[Holds], wanted: set[str]) -> None:
    assert _found(kind()) == wanted
    assert _found(nn.Sequential(kind())) == {f"N.{path}" for path in wanted}


def test_code_without_a_source() -> None:
    """Each linear that such code names beside a weight counts, as the code cannot be read."""
    space = {"Holds": Holds}
    exec("class Typed(Holds):\n  def forward(self, x):\n    return x @ self.b.weight", space)  # noqa: S102
    assert set(read_linears(space["Typed"]())) == {"b"}


@torch.no_grad()
@pytest.mark.parametrize("verify", ["off", "sample"])
@pytest.mark.parametrize("name", [*READERS, "WavLM"])
def test_they_stay_where_others_are_quantized(name: str, verify: str) -> None:
    """RWKV divides them in its first call, before which nothing has read them."""
    cls = next(getattr(t, name + end) for end in ("ForCausalLM", "Model") if hasattr(t, name + end))
    torch.manual_seed(0)
    original = cls(tiny_config(cls.config_class)).eval()
    given = {"input_ids": torch.arange(3, 11)[None]}
    if name == "WavLM":
        given = {"input_values": torch.randn(1, 1000)}
    engine = infuse.init_inference(
        copy.deepcopy(original), dtype="fp32", quant="int8:4", verify=verify, progress=False,
        replace_with_kernel_inject=not name.endswith("Mamba"),  # whose layers have a spec
    )  # fmt: skip
    assert any(isinstance(module, QuantizedLinear) for module in engine.module.modules())
    for path, why in read_linears(original).items():
        found, wanted = engine.module.get_submodule(path), original.get_submodule(path)
        assert isinstance(found, nn.Linear) and torch.equal(found.weight, wanted.weight)  # type: ignore[arg-type]
        assert why.dtype_only or type(found) is type(wanted)  # of the dtype alone: ours may stand there, unquantized
        assert any(path in left.path and str(why) in left.why for left in engine.plan.left)
    for _ in range(2):
        found, wanted = engine(**given)[0], original(**given)[0]
        assert (found - wanted).norm() < 0.05 * wanted.norm()


def test_a_dtype_that_is_read_forbids_a_quantized_weight_alone() -> None:
    model = AsksForTheDtype()
    x = torch.randn(3, 2)
    for quant, is_quantized in ((None, False), ("int8", True)):
        plan = infuse.plan(copy.deepcopy(model), dtype="fp32", quant=quant)
        reasons = [left.why for left in plan.left if left.path == "a"]
        told = "AsksForTheDtype.forward reads a.weight.dtype, so it is not quantized"
        assert reasons == ([told] if is_quantized else [])
    engine = infuse.init_inference(copy.deepcopy(model), dtype="fp32", quant="int8", verify="off", progress=False)
    torch.testing.assert_close(engine(x), model(x))


def test_whole_numbers_are_no_input_of_a_quantized_weight() -> None:
    engine = infuse.init_inference(nn.Sequential(nn.Linear(64, 64)), dtype="fp32", quant="int8", progress=False)
    with pytest.raises(infuse.UnsupportedCall, match="was given torch.int8; give floating numbers"):
        engine(torch.ones(2, 64, dtype=torch.int8))
