"""Families are read from their graphs, as their written specs had them; what is written, no graph tells."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn

import infuse
from infuse.architectures import BY_CLASS, bind_any, specs_for
from infuse.architectures.bind import Binder
from infuse.config.inference import InferenceConfig
from infuse.plan.found import config_around
from infuse.plan.readings import Readings
from tests.models import families
from tests.models.every_architecture import tiny_config
from tests.support import formerly_written
from tests.support.relatives import less

MIXTURES = {family.name for family in families.MIXTURES}
FAMILIES = {family.name: family for family in families.FAMILIES if family.name not in MIXTURES}
_WITH_STATES = (*families.HYBRIDS, *families.CHANNEL_DELTA, *families.JAMBA, *families.SPACES_BESIDE)
HAVE_STATES = {family.name for family in _WITH_STATES}
# Why the layers of a class are not read as their spec has them.
WRITTEN: Mapping[str, str] = MappingProxyType(
    {
        "GraniteSWADecoderLayer": "logsumexp",
        "Ministral3DecoderLayer": "floor",
        "MiniCPM3DecoderLayer": "left: `",
        "YoutuDecoderLayer": "left: `",
        "StableLmDecoderLayer": "norms",
        "GPTNeoBlock": "size",
        "BloomBlock": "baddbmm",
        "MptBlock": "branch on a size",
        "T5Block": "`",
        "MT5Block": "`",
        "UMT5Block": "reaches",
        "MPNetLayer": "adds to the scores",
        "Gemma4TextDecoderLayer": "`mul`|keeps state|has experts",
        "BitNetDecoderLayer": "norm inside of attention",
        "Gemma4UnifiedTextDecoderLayer": "`mul`|keeps state",
        "EmbeddingGemma2EncoderLayer": "per_layer_input",
        "DebertaV2Layer": "masked_fill",
    }
)


def readings(model: nn.Module) -> Readings:
    return Readings(model, torch.float32, ())


def planned(model: nn.Module) -> Any:
    return infuse.plan(model, dtype=torch.float32, replace_with_kernel_inject=True)


def differences(found: Any, wanted: Any, place: str = "") -> Iterator[str]:
    """Where two shapes differ; numbers are equal up to the last digit, since configs and layers compute them."""
    if dataclasses.is_dataclass(found) and type(found) is type(wanted):
        for field in dataclasses.fields(found):
            name = field.name
            yield from differences(getattr(found, name), getattr(wanted, name), f"{place}.{name}")
    elif isinstance(found, tuple) and isinstance(wanted, tuple) and len(found) == len(wanted):
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            yield from differences(one, other, f"{place}[{i}]")
    elif isinstance(found, float) and isinstance(wanted, float):
        if not math.isclose(found, wanted, rel_tol=1e-15):
            yield f"{place}: {found!r}, not {wanted!r}"
    elif found != wanted:
        yield f"{place}: {found!r}, not {wanted!r}"


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_whole_and_read_as_it_was_written(name: str) -> None:
    model = FAMILIES[name].make()
    read = readings(model)
    steps = {step.path: step for step in planned(model).steps if step.depth == "block"}
    assert steps
    for path, step in steps.items():
        layer, config = model.get_submodule(path), config_around(model, path)
        written = formerly_written.specs_for(layer)
        if path not in read.layers:  # Falcon's linears are of a class of their own
            assert specs_for(layer), path
            continue
        if any(mixer.state_values for mixer in step.shape.mixers.values()):  # type: ignore[union-attr]
            with pytest.raises(infuse.SpecMismatch, match="keeps a state|reaches|has experts|asks for the device"):
                read.of(path)
            continue
        if name in HAVE_STATES:  # the other layers of such a class have its spec
            assert specs_for(layer) and step.why.startswith("spec of")
            continue
        why = WRITTEN.get(type(layer).__name__)
        if why is not None and getattr(config, "qk_layernorm", True):
            with pytest.raises(infuse.SpecMismatch, match=why):
                read.of(path)
            continue
        if not written:
            assert step.why.startswith("read from")
            continue
        wanted, found = bind_any(written, layer, config), read.of(path)
        assert not list(differences(found.shape, wanted.shape))
        assert {*found.fills} == {*wanted.fills} and found.index == wanted.index
        assert step.why.startswith("spec of" if specs_for(layer) else "read from")


# ---- classes that nobody has written down ----

# Names aside, these share the source of a known family's layer, attention, MLP and norm; config and model by name.
ALIKE: Mapping[str, str] = MappingProxyType(
    {
        "Arcee": "ForCausalLM",
        "AST": "Model",
        "Beit": "Model",
        "Camembert": "Model",
        "CLIPSegVision": "Model",
        "Cwm": "ForCausalLM",
        "Data2VecText": "Model",
        "DeiT": "Model",
        "Ernie": "Model",
        "Ernie4_5": "ForCausalLM",
        "Dinov2": "Model",
        "DINOv3ViT": "Model",
        "EuroBert": "Model",
        "Exaone4": "ForCausalLM",
        "Glm": "ForCausalLM",
        "Glm4": "ForCausalLM",
        "HunYuanDenseV1": "ForCausalLM",
        "IJepa": "Model",
        "InternVLVision": "Model",
        "Jais2": "ForCausalLM",
        "MegatronBert": "Model",
        "MetaClip2Text": "Model",
        "Ministral": "ForCausalLM",
        "Phi4Multimodal": "Model",
        "PixtralVision": "Model",
        "RoCBert": "Model",
        "SeedOss": "ForCausalLM",
        "ViTMAE": "Model",
        "ViTMSN": "Model",
        "Olmo": "ForCausalLM",
        "Olmo3": "ForCausalLM",
        "Helium": "ForCausalLM",
        "Cohere2": "ForCausalLM",
    }
)

# Of these, the ones whose layers have all parts of BERT, RoBERTa, Mistral, Llama, Qwen2, CLIP or ViT, in their places.
RELATIVES = (
    "Camembert", "Cwm", "Data2VecText", "DeiT", "Ernie", "IJepa", "MetaClip2Text", "Ministral", "RoCBert",
    "SeedOss", "ViTMAE", "ViTMSN",
)  # fmt: skip


def small(name: str) -> nn.Module:
    model, config = getattr(t, f"{name}{ALIKE[name]}"), getattr(t, f"{name}Config")
    torch.manual_seed(0)
    return model(tiny_config(config)).eval()


@pytest.mark.parametrize("name", less(RELATIVES, ALIKE))
def test_layers_of_a_known_kind_are_blocks_without_a_line_of_their_own(name: str) -> None:
    model = small(name)
    layers = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    assert layers
    blocks = {step.path for step in planned(model).steps if step.depth == "block" and step.why.startswith("read from")}
    layers = [path for path in layers if "audio" not in path]  # Phi 4's ears are conformers
    members = {f"{path}.{i}" for path in layers for i in range(len(model.get_submodule(path)))}  # type: ignore[arg-type]
    assert blocks == {path for path in members if path in readings(model).layers}


@pytest.mark.parametrize(("is_decoder", "is_causal"), [(False, False), (True, True)])
def test_attention_that_is_written_out_is_causal_where_a_mask_says_so(is_decoder: bool, is_causal: bool) -> None:
    """Megatron's BERT appends to a cache in any case; its encoder passes no mask, and all tokens see each other."""
    config = tiny_config(t.MegatronBertConfig)
    config.is_decoder = is_decoder
    model = t.MegatronBertForCausalLM(config).eval()
    shape = readings(model).of("bert.encoder.layer.0").shape
    assert [mixer.causal for mixer in shape.mixers.values()] == [is_causal]


def test_tables_without_rows_for_several_tokens_before_the_patches() -> None:
    config = tiny_config(t.DINOv3ViTConfig)
    config.num_register_tokens = 4
    model = t.DINOv3ViTModel(config).eval()
    assert {step.path for step in planned(model).steps if step.depth == "block"} == {"model.layer.0", "model.layer.1"}


@pytest.mark.slow
def test_arguments_that_a_layer_looks_at_are_not_left_out() -> None:
    """BEiT's model passes two to each layer, which reads them for a bias by position alone."""
    config = tiny_config(t.BeitConfig)
    config.use_relative_position_bias = True
    model = t.BeitModel(config).eval()
    assert not [step for step in planned(model).steps if step.depth == "block"]
    engine = infuse.init_inference(small("Beit"), dtype=torch.float32, replace_with_kernel_inject=True)
    layer = engine.module.layers[0]
    x = torch.randn(2, 5, layer.shape.parts["mlp"].hidden)
    assert layer(x, interpolate_pos_encoding=True, resolution=(3, 4)) is not None
    assert torch.equal(layer(x, relative_bias=x), layer(x))  # which nothing reads
    with pytest.raises(infuse.UnsupportedCall, match="position_bias"):  # which attention functions read
        layer(x, position_bias=x)


@pytest.mark.parametrize("value", [None, True])
def test_an_argument_that_is_compared_by_identity_is_looked_at(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = t.models.beit.modeling_beit.BeitLayer
    own = cls.forward

    def forward(self: Any, x: torch.Tensor, interpolate_pos_encoding: Any = False, **kwargs: Any) -> torch.Tensor:
        out = own(self, x, interpolate_pos_encoding=interpolate_pos_encoding, **kwargs)
        return out * 2 if interpolate_pos_encoding is value else out

    monkeypatch.setattr(cls, "forward", forward)
    with pytest.raises(infuse.SpecMismatch, match="is called with interpolate_pos_encoding"):
        readings(small("Beit")).of("layers.0")


def test_a_layer_whose_model_puts_other_modules_into_it_stays() -> None:
    """BigBird attends to all tokens of short texts, and by blocks in long ones, by another module."""
    model = t.BigBirdModel(tiny_config(t.BigBirdConfig)).eval()
    plan = planned(model)
    assert not [step for step in plan.steps if step.depth == "block"]
    assert any("its model changes attention" in left.why for left in plan.left)


# ---- whose layer it is ----


class OfAUser(t.models.arcee.modeling_arcee.ArceeDecoderLayer):
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states, *args, **kwargs) * 1.0


class Renamed(t.models.arcee.modeling_arcee.ArceeDecoderLayer):
    """Changes no method."""


@pytest.mark.parametrize(("cls", "is_read"), [(OfAUser, False), (Renamed, True)])
def test_a_users_subclass_of_a_librarys_layer_stays_if_it_changes_a_method(cls: type, is_read: bool) -> None:
    model = small("Arcee")
    layer = model.model.layers[0]  # type: ignore[union-attr, index]
    layer.__class__ = cls
    plan = planned(model)
    blocks = [step.path for step in plan.steps if step.depth == "block"]
    assert ("model.layers.0" in blocks) == is_read and "model.layers.1" in blocks
    why = next((left.why for left in plan.left if left.path == "model.layers.0"), "OfAUser.forward")
    assert is_read or "method of your own, OfAUser.forward" in why


def test_remote_code_is_read_even_where_it_changes_a_librarys_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfAUser, "__module__", "transformers_modules.somebody.modeling_arcee")
    monkeypatch.setitem(globals(), "__name__", "transformers_modules.somebody.modeling_arcee")
    model = small("Arcee")
    model.model.layers[0].__class__ = OfAUser  # type: ignore[union-attr, index]
    assert "model.layers.0" in {step.path for step in planned(model).steps if step.depth == "block"}


def test_a_class_is_read_anew_once_its_code_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = t.models.arcee.modeling_arcee.ArceeMLP
    own = cls.forward
    assert len([step for step in planned(small("Arcee")).steps if step.depth == "block"]) == 2
    monkeypatch.setattr(cls, "forward", lambda self, x: own(self, x).cumsum(1))
    model = small("Arcee")
    with pytest.raises(infuse.SpecMismatch, match="cumsum"):
        readings(model).of("model.layers.0")


def test_nothing_is_read_where_specs_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Readings, "of", lambda self, path: pytest.fail(f"{path} was read"))
    assert any(step.depth == "block" for step in planned(families.BY_NAME["llama"].make()).steps)


def test_a_layer_that_its_spec_does_not_fit_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a release of transformers that renames what a spec names."""
    monkeypatch.setattr(Binder, "module", lambda self, path, optional=False: self.differ("drift"))
    plan = planned(families.BY_NAME["llama"].make())
    assert {step.why for step in plan.steps if step.depth == "block"} == {"read from the graph of LlamaDecoderLayer"}
    assert any("drift" in left.why for left in plan.left)


# ---- explanations ----


def test_an_explanation_has_a_line_for_each_unit_and_names_what_no_part_has() -> None:
    told = infuse.explain(small("Arcee"), "model.layers.1", dtype=torch.float32)
    for words in ("norm input_layernorm.weight", "self_attn: product self_attn.q_proj.weight", "modeling_arcee.py:"):
        assert words in told
    assert "in no part" not in told and "read in 5 calls: norm norm1, attention self_attn, add" in told
    left = infuse.explain(families.BY_NAME["bloom"].make(), "transformer.h.0", dtype=torch.float32)
    assert "in no part" in left and "not read: left: `baddbmm` at modeling_bloom.py:" in left


def test_an_explanation_of_what_is_no_layer_lists_the_layers() -> None:
    with pytest.raises(infuse.ConfigError, match=r"its layers: model\.layers\.0, model\.layers\.1"):
        infuse.explain(small("Arcee"), "lm_head")


def test_what_is_read_is_not_written_too() -> None:
    """But Llama's, with which mixtures begin, and the forms that two classes had before transformers 5.24."""
    now = {layer for layer, specs in BY_CLASS.items() if not all(spec.has for spec in specs)}
    twice = {spec.layer.rpartition(".")[2] for spec in formerly_written.SPECS if spec.layer in now}
    assert twice | {"LlamaDecoderLayer"} == {"LlamaDecoderLayer", "GPTJBlock", "CodeGenBlock"}


def test_the_dtype_of_a_plan_is_the_one_that_is_read() -> None:
    config = InferenceConfig.make(dtype=torch.bfloat16)
    assert infuse.plan(small("Arcee"), config).dtype is torch.bfloat16
