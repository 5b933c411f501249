"""Specs are plain data that names real classes, are complete or refused, and split like transformers' tp plans."""

from __future__ import annotations

import importlib
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import infuse
from infuse.architectures import SPECS, Bound, bind_any
from infuse.architectures.families import conformer, towers
from infuse.architectures.families.deepseek import WITH_INDEXERS
from infuse.architectures.layer import LayerSpec
from infuse.architectures.part import COLUMN, ROW, Parameter
from infuse.architectures.ranks import RankShare, layer_part
from infuse.ground.errors import SpecMismatch
from infuse.parallel.mesh import Mesh
from tests.models.encoder_decoders import BY_NAME as ENCODER_DECODERS
from tests.models.families import BY_NAME as LISTED
from tests.models.families import FAMILIES, HYBRIDS, JAMBA, LATENT, MAMBA, READ_ALONE, inputs
from tests.support import formerly_written
from tests.support.formerly_written import specs_for

# In tests/models/test_encoder_decoders.py, whose models have no entry in a list of families.
WITH_TESTS_OF_THEIR_OWN = {
    "BertGenerationLayer", "BlipTextLayer", "CamembertLayer", "CanaryDecoderLayer", "CohereAsrDecoderLayer",
    "Data2VecTextLayer", "ErnieLayer", "LongT5Block", "MusicgenDecoderLayer", "MvpDecoderLayer", "PegasusXDecoderLayer",
    "Pix2StructTextBlock", "Pop2PianoBlock", "RoCBertLayer", "SpeechT5DecoderLayer",
}  # fmt: skip
BY_NAME = LISTED | {family.name: family for family in MAMBA}
PAIRS = {f"{name}, both halves": family for name, family in ENCODER_DECODERS.items()}
ALL = {**BY_NAME, **PAIRS}
NAMES = [name for name, family in ALL.items() if family not in READ_ALONE]


def on_meta(name: str) -> nn.Module:
    """The family's model without weights."""
    family = ALL[name]
    with torch.device("meta"):
        return family.model(family.config(**family.values))


def config_around(model: nn.Module, path: str) -> Any:
    """The config of the nearest model around the module at `path`."""
    while path:
        path = path.rpartition(".")[0]
        if hasattr(model.get_submodule(path), "config"):
            return model.get_submodule(path).config
    raise AssertionError("no config")


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Path, layer and config of every layer that has specs."""
    for path, module in list(model.named_modules()):
        if specs_for(module):
            yield path, module, config_around(model, path)


def bound(layer: nn.Module, config: Any) -> Bound:
    return bind_any(specs_for(layer), layer, config)


def differences(layer: nn.Module, config: Any) -> tuple[str, ...]:
    """What keeps the layer from being bound; empty if nothing does."""
    try:
        bound(layer, config)
    except SpecMismatch as mismatch:
        return mismatch.differences
    return ()


def sources(found: Bound, split: str | None = None) -> list[str]:
    """The source modules of the layer's linears: of those that ranks split so, or of all."""
    linears = (matrix for matrix in found.shape.matrices if matrix.op == "linear")
    targets = {matrix.weight for matrix in linears if split in (None, matrix.split)}
    made = [fill for fill in found.fills if fill.target in targets]
    return [source.rpartition(".")[0] for fill in made for source in fill.sources]


def owner_of(layer: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, leaf = path.rpartition(".")
    return layer.get_submodule(parent), leaf


# ---- data ----


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.layer.rpartition(".")[2])
def test_specs_are_data_of_real_classes(spec: LayerSpec) -> None:
    assert pickle.loads(pickle.dumps(spec)) == spec and isinstance(hash(spec), int)
    module, _, name = spec.layer.rpartition(".")
    assert issubclass(getattr(importlib.import_module(module), name), nn.Module)


def test_every_class_of_a_spec_has_a_family() -> None:
    used = {spec.layer for name in NAMES for _, layer, _ in layers_of(on_meta(name)) for spec in specs_for(layer)}
    # Which never bind; tests/layers/test_towers.py and test_conformer.py.
    elsewhere = {*WITH_INDEXERS, *towers.SPECS, *conformer.SPECS}
    found = {spec.layer for spec in (*SPECS, *formerly_written.SPECS) if spec not in elsewhere}
    assert used == {layer for layer in found if layer.rpartition(".")[2] not in WITH_TESTS_OF_THEIR_OWN}


@pytest.mark.parametrize("name", NAMES)
def test_bindings_are_data(name: str) -> None:
    """What meta models come to: picklable, equal when made again, different for layers of another shape."""
    found = [bound(layer, config) for _, layer, config in layers_of(on_meta(name))]
    again = [bound(layer, config) for _, layer, config in layers_of(on_meta(name))]
    assert found == again == pickle.loads(pickle.dumps(found)) and found
    for one in found:
        assert all(fill.target and fill.sources for fill in one.fills)
        assert len({fill.target for fill in one.fills}) == len(one.fills)


# ---- completeness ----


@pytest.mark.parametrize("name", NAMES)
def test_an_extra_parameter_is_a_difference(name: str) -> None:
    for _, layer, config in layers_of(on_meta(name)):
        mixers = bound(layer, config).shape.mixers.values()
        attention = layer.get_submodule(next((mixer.replaces[-1] for mixer in mixers), "mixer"))  # Nemotron-H's MLPs
        layer.register_parameter("gain", nn.Parameter(torch.empty(3, device="meta")))
        attention.register_parameter("sink", nn.Parameter(torch.empty(2, 5, device="meta")))
        inside = next(path for path, module in layer.named_modules() if module is attention)
        expected = ["parameter gain (3,) is not claimed", f"parameter {inside}.sink (2, 5) is not claimed"]
        assert sorted(differences(layer, config)) == sorted(expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_renamed_module_is_missing_and_unclaimed(name: str) -> None:
    """As when a release of transformers renames a projection or a norm."""
    _, layer, config = next(layers_of(on_meta(name)))
    found = bound(layer, config)
    norms = [
        fill.sources[0].removesuffix(".weight")
        for fill in found.fills
        if fill.target in ("norm1.weight", "norm2.weight")
    ]
    for path in (*sources(found), *norms):
        parent, leaf = owner_of(layer, path)
        parent._modules["renamed"] = parent._modules.pop(leaf)
        told = "; ".join(differences(layer, config))
        renamed = ".".join(part for part in (path.rpartition(".")[0], "renamed.weight") if part)
        assert f"parameter {renamed} " in told and f" {path}" in told
        parent._modules[leaf] = parent._modules.pop("renamed")
    assert not differences(layer, config)


@pytest.mark.parametrize(
    ("name", "key", "value", "told"),
    [
        ("llama", "hidden_act", "softmax2", "activation 'softmax2' is not one of"),
        ("gpt2", "activation_function", "softmax2", "activation 'softmax2' is not one of"),
        ("llama", "num_key_value_heads", 4, "q, k, v have 48, 24, 24 rows; 4 and 4 heads want (48, 48, 48)"),
        ("llama", "num_attention_heads", 0, "config.num_attention_heads is 0, not a positive number"),
        ("phi3", "num_key_value_heads", 3, "self_attn.qkv_proj has 96 rows; 4 + 2 x 3 heads do not divide them"),
        ("granite", "residual_multiplier", ..., "config has no residual_multiplier"),
        ("smollm3", "no_rope_layers", [], "config.no_rope_layers has no entry for layer 0"),
        ("gpt-neo", "window_size", None, "config.window_size is None, not a positive number"),
        ("bloom", "apply_residual_connection_post_layernorm", True, "is True; only False is understood"),
        ("bloom", "slow_but_exact", True, "config.slow_but_exact is True; only False is understood"),
        ("gpt-neox", "use_parallel_residual", "sometimes", "config.use_parallel_residual is 'sometimes', not True"),
        ("granite", "residual_multiplier", None, "config.residual_multiplier is None, not a number"),
        ("falcon-40b", "alibi", True, "config.alibi is True, not False"),
        ("stablelm", "use_parallel_residual", None, "config.use_parallel_residual is None, not False"),
    ],
)
def test_config_values_are_read_strictly(name: str, key: str, value: Any, told: str) -> None:
    wrong = []
    for _, layer, config in layers_of(on_meta(name)):
        if value is ...:
            config = type("Config", (), {k: v for k, v in vars(config).items() if k != key})()
        else:
            config.__dict__[key] = value  # past the config's own checks
        wrong.append("; ".join(differences(layer, config)))
    assert any(told in text for text in wrong), wrong


def test_all_differences_are_told_at_once() -> None:
    _, layer, config = next(layers_of(on_meta("llama")))
    layer.mlp.register_parameter("gain", nn.Parameter(torch.empty(3, device="meta")))
    layer.self_attn.register_module("o", layer.self_attn._modules.pop("o_proj"))
    del layer.input_layernorm
    layer.self_attn.q_proj.bias = nn.Parameter(torch.empty(48, device="meta"))
    config.hidden_act = "softmax2"
    with pytest.raises(SpecMismatch) as raised:
        bound(layer, config)
    told = "\n".join(raised.value.differences)
    assert str(raised.value).startswith("LlamaDecoderLayer: ")
    assert all(one in str(raised.value) for one in raised.value.differences)
    for part in (
        "parameter mlp.gain (3,) is not claimed",
        "parameter self_attn.o.weight (48, 48) is not claimed",
        "there is no parameter self_attn.o_proj.weight",
        "there is no module input_layernorm",
        "activation 'softmax2'",
    ):
        assert part in told
    again = pickle.loads(pickle.dumps(raised.value))
    assert again.differences == raised.value.differences and str(again) == str(raised.value)


# ---- completeness, through the plan: what does not fit is left, and computes what it did ----


class Gained(LlamaDecoderLayer):
    """A user's subclass, with a parameter that the spec of its parent does not know."""

    def __init__(self, config: Any, layer_idx: int):
        super().__init__(config, layer_idx)
        self.gain = nn.Parameter(torch.tensor([1.7]))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) * self.gain


def llama_with_a_gain() -> nn.Module:
    model = BY_NAME["llama"].make()
    layer = Gained(model.config, 1).eval()
    layer.load_state_dict(model.model.layers[1].state_dict(), strict=False)
    model.model.layers[1] = layer
    return model


def bloom_after_norms() -> nn.Module:
    return BY_NAME["bloom"].make(apply_residual_connection_post_layernorm=True)


def falcon_between_the_forms() -> nn.Module:
    return BY_NAME["falcon-7b"].make(multi_query=False)


def llama_with_another_activation() -> nn.Module:
    return BY_NAME["llama"].make(hidden_act="leaky_relu")


@pytest.mark.parametrize(
    ("make", "left", "reason"),
    [
        (llama_with_a_gain, 1, "parameter gain (1,) is not claimed"),
        (bloom_after_norms, 3, "config.apply_residual_connection_post_layernorm is True; only False is understood"),
        (falcon_between_the_forms, 3, "config.multi_query is False, not True"),
        (llama_with_another_activation, 3, "activation 'leaky_relu' is not one of"),
    ],
)
@pytest.mark.usefixtures("unread")
def test_what_does_not_fit_is_left(make: Callable[[], nn.Module], left: int, reason: str) -> None:
    """With the proof off: the completeness of the claims is what protects the output here."""
    original, model = make(), make()
    layers = [path for path, _, _ in layers_of(original)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is accelerated is meant here
        engine = infuse.init_inference(model, dtype="fp32", replace_with_kernel_inject=True, verify="off")
    refused = {entry.path: entry.why for entry in reversed(engine.plan.left) if entry.path in layers}
    assert len(refused) == left
    assert all(why.startswith("not as a whole block: ") and reason in why for why in refused.values())
    assert [step.path for step in engine.plan.steps if step.depth == "block"] == [
        path for path in layers if path not in refused
    ]
    assert reason in str(engine.plan)
    given = inputs(BY_NAME["llama"], padding="left")
    with torch.no_grad():
        exact, found = (
            original(**given).logits[given["attention_mask"].bool()],
            engine(**given).logits[given["attention_mask"].bool()],
        )
    assert (found - exact).abs().max() <= 2e-5 * exact.square().mean().sqrt()


# ---- the free oracle ----

# What each value of transformers' tensor-parallel plans does with a weight: splits its outputs, its inputs, or nothing.
TP_VALUES = {
    "colwise": COLUMN, "colwise_gather_output": COLUMN, "colwise_rep": COLUMN, "local_colwise": COLUMN,
    "rowwise": ROW, "rowwise_split_input": ROW, "rowwise_rep": ROW, "local_rowwise": ROW,
    "packed_colwise": COLUMN, "packed_rowwise": ROW, "moe_tp_experts": None, "replicated_with_grad_allreduce": None,
    "local": None, "gather": None, "local_params": None, "mla_kv_a_proj": None,
}  # fmt: skip


def tp_plan(model: nn.Module, path: str) -> dict[str, str]:
    """The plan's values for the modules of the layer at `path`, by their paths inside it."""
    plan = config_around(model, path).base_model_tp_plan or {}
    return {key.partition(".*.")[2]: value for key, value in plan.items() if ".*." in key}


# gpt-oss has a plan for its embedding alone since transformers 5.24, and Jamba one for its experts.
WITH_PLAN = [
    family
    for family in FAMILIES
    if family not in JAMBA and any(".*." in key for key in family.config.base_model_tp_plan or {})
]


def test_the_oracle_is_wide() -> None:
    assert len({family.config for family in WITH_PLAN}) >= 8


@pytest.mark.parametrize("name", [family.name for family in WITH_PLAN])
def test_columns_and_rows_are_those_of_the_tp_plan(name: str) -> None:
    model = on_meta(name)
    *_, (path, layer, config) = layers_of(model)  # of a mixture, the first may be dense
    found = bound(layer, config)
    ours = {source: split for split in (COLUMN, ROW) for source in sources(found, split)}
    by_target = {matrix.weight: matrix.split for matrix in found.shape.matrices if matrix.op == "experts"}
    ours |= {fill.sources[0]: by_target[fill.target] for fill in found.fills if fill.target in by_target}
    cut = {parameter.target for parameter in found.shape.parameters if parameter.extents and parameter.axis == 0}
    ours |= {fill.sources[0]: COLUMN for fill in found.fills if fill.target.endswith(".sinks") and fill.target in cut}
    there = {name for name, _ in layer.named_modules()} | {name for name, _ in layer.named_parameters()}
    theirs = {inside: TP_VALUES[value] for inside, value in tp_plan(model, path).items() if inside in there}
    turned = {fill.sources[0] for fill in found.fills if fill.stacked is not None and fill.stacked.transposed}
    theirs |= {inside: {COLUMN: ROW, ROW: COLUMN}[theirs[inside]] for inside in turned & theirs.keys()}
    # The plans cut recurrences otherwise, or not at all: ranks have heads of states here.
    states = tuple(f"{mixer.replaces[-1]}." for mixer in found.shape.mixers.values() if mixer.state_values)
    ours, theirs = (
        {inside: role for inside, role in roles.items() if not inside.startswith(states)} for roles in (ours, theirs)
    )
    # Plans leave out the attention or the shared expert of some families.
    if by_target or BY_NAME[name] in (*LATENT, *HYBRIDS):
        ours = {inside: role for inside, role in ours.items() if inside in theirs}
        assert len(ours) >= 2 or not theirs
    assert ours == {inside: role for inside, role in theirs.items() if role is not None}


# ---- what parts say of themselves, against what is built and cut


@pytest.mark.parametrize("name", NAMES)
def test_parts_describe_every_parameter_that_a_layer_is_filled_with(name: str) -> None:
    for _, layer, config in layers_of(on_meta(name)):
        found = bound(layer, config)
        described = {parameter.target for parameter in found.shape.parameters}
        buffers = {name for name, _ in layer.named_buffers()}
        computed = {fill.target for fill in found.fills if fill.sources[0] in buffers}
        computed -= {"scalar.scalar"}  # Gemma 4's, which is read from files like a parameter
        assert described == {fill.target for fill in found.fills} - computed
        sizes = {matrix.weight: matrix.shape for matrix in found.shape.matrices}
        for fill in (fill for fill in found.fills if fill.target in sizes):
            shapes = [tuple(layer.get_parameter(source).shape) for source in fill.sources]
            if fill.stacked is not None:
                shapes = [(shape[0], *shape[:0:-1]) if fill.stacked.transposed else shape for shape in shapes]
                shapes = [(experts * rows, columns) for experts, rows, columns in shapes]
            shapes = [shape[::-1] if fill.transposed else shape for shape in shapes]
            taken = sum(span.length for span in fill.rows) or sum(rows for rows, _ in shapes)
            assert sizes[fill.target] == (taken, shapes[0][1])


NOT_SHARED = ("is a LayerNorm over the heads of all ranks", "columns, which ranks would share")


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_together_have_all_of_every_parameter(name: str, size: int) -> None:
    for _, layer, config in layers_of(on_meta(name)):
        found = bound(layer, config)
        if any(size > getattr(mixer, "heads", size) for mixer in found.shape.mixers.values()):
            continue
        try:
            parts = [
                layer_part(found.shape, found.fills, rank, grain=16, multiples={}) for rank in Mesh(tp=size).ranks()
            ]
        except SpecMismatch as mismatch:
            assert all(any(why in text for why in NOT_SHARED) for text in mismatch.differences)
            continue
        for parameter in found.shape.parameters:
            assert_covered(parameter, parts)


def assert_covered(parameter: Parameter, parts: list[RankShare]) -> None:
    """One rank or more has each position of the parameter; shapes and cuts of a rank agree."""
    holders = [(part, fill) for part in parts for fill in part.fills if fill.target == parameter.target]
    held = [fill for _, fill in holders]
    cuts = [fill.cut for fill in held if fill.cut is not None]
    if not cuts:  # whole on every rank, or added once
        assert len(held) in (1, len(parts))
        return
    assert len(cuts) == len(held) == (1 if parameter.added_once else len(parts))
    assert len({(cut.axis, cut.sizes) for cut in cuts}) == 1
    positions = {place for cut in cuts for start, stop in cut.ranges for place in range(start, stop)}
    assert positions == set(range(cuts[0].whole_length))
    for cut, (part, _) in zip(cuts, holders, strict=True):
        shapes = [matrix.shape for matrix in part.shape.matrices if matrix.weight == parameter.target]
        assert all(shape[cut.axis] == cut.length > 0 for shape in shapes)
