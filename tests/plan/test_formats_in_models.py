"""Number formats in whole models: each is proven, computes the model with rounded weights, and names choose a matrix's
format.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse.ground.errors import ConfigError
from infuse.layers.linear import QuantizedLinear
from infuse.plan.formats import linears_of
from infuse.plan.kinds import BLOCK
from infuse.quant.parse import quant_format
from tests.models.families import BY_NAME, inputs

FAMILIES = ("llama", "gpt2", "bloom", "falcon-7b", "falcon-40b", "bert")
FORMATS = ("int8", "int8:row", "int4:32", "int4:32:asymmetric", "fp8", "fp8:32", "fp6", "fp6:row")
# One family in every format, the others in three each, so that every format is in one that is not Llama's at least.
FAMILIES_AND_FORMATS = [("llama", text) for text in FORMATS]
FAMILIES_AND_FORMATS += [(name, FORMATS[(3 * i + j) % 8]) for i, name in enumerate(FAMILIES[1:]) for j in range(3)]
LLAMA = [
    f"model.layers.{i}.{part}"
    for i in range(3)
    for part in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
]


def make(name: str) -> nn.Module:
    """The family's tiny model, 64 wide: groups of 32 and 64 divide it."""
    return BY_NAME[name].make(**(dict(n_embd=64) if name == "gpt2" else dict(hidden_size=64, intermediate_size=128)))


def engine_of(name: str, quant: Any, **keys: Any) -> infuse.InferenceEngine:
    return infuse.init_inference(make(name), **{"dtype": "fp32", "quant": quant, **keys})


def logits(model: Any, name: str) -> Tensor:
    """Of the real tokens [N, V]: an encoder's block has nothing at the padding."""
    given = inputs(BY_NAME[name], padding="left")
    with torch.no_grad():
        return model(**given)[0][given["attention_mask"].bool()]


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def formats_of(engine: infuse.InferenceEngine) -> dict[str, str]:
    """Path of each linear of the original → the format of the matrix that holds it now."""
    return {
        linear: fill.format
        for step in engine.plan.steps
        for fill in step.fills
        if fill.format
        for linear in linears_of(fill, step.path)
    }


def rounded(name: str, engine: infuse.InferenceEngine) -> nn.Module:
    """The original with each weight that the plan quantizes rounded to its format: rows stay rows, however they are
    merged.
    """
    model = make(name)
    for step in engine.plan.steps:
        for fill in (fill for fill in step.fills if fill.format):
            for source in fill.sources:
                weight = model.get_submodule(step.path).get_parameter(source).data
                matrix, format = weight.t() if fill.transposed else weight, quant_format(fill.format)
                matrix.copy_(format.dequantize(format.quantize(matrix)))
    return model


@pytest.mark.parametrize(("name", "text"), FAMILIES_AND_FORMATS)
def test_a_quantized_model_is_the_model_with_rounded_weights(name: str, text: str) -> None:
    engine = engine_of(name, text, verify="strict")
    blocks = [step for step in engine.plan.steps if step.depth == BLOCK]
    assert len(blocks) == 3 and all(list(step.formats.values()) == [str(quant_format(text))] * 4 for step in blocks)
    exact, found = logits(make(name), name), logits(engine, name)
    assert distance(found, logits(rounded(name, engine), name)) < 1e-4
    # Independent errors of the matrices add up in squares, as in a proof; each is accepted up to its proof_tolerance.
    matrices = [format for step in engine.plan.steps for format in step.formats.values()]
    bound = sum(quant_format(format).proof_tolerance ** 2 for format in matrices) ** 0.5
    assert bound / 50 < distance(found, exact) < bound
    assert engine.plan.after_bytes < engine.plan.before_bytes


@pytest.mark.parametrize(
    ("name", "text"),
    [("llama", "fp8"), ("llama", "fp6"), ("gpt2", "fp6"), ("bloom", "fp8"), ("falcon-7b", "fp6"), ("bert", "fp8")],
)
def test_floating_formats_in_bfloat16(name: str, text: str) -> None:
    engine = engine_of(name, text, dtype="bf16", verify="strict")
    assert any(
        isinstance(module, QuantizedLinear) and module.data.dtype == torch.uint8 for module in engine.module.modules()
    )
    bound = quant_format(text).proof_tolerance * len(formats_of(engine)) ** 0.5
    assert distance(logits(engine, name).float(), logits(make(name), name)) < bound + 0.02  # bfloat16 over three layers


@pytest.mark.parametrize("text", ["int8", "int4:32", "fp8", "fp6"])
def test_casting_a_model_leaves_the_codes_alone(text: str) -> None:
    engine = engine_of("llama", text)
    before = logits(engine, "llama")
    engine.module.double().float()
    assert torch.equal(logits(engine, "llama"), before)


# ---- by name ----


def test_names_choose_and_leave_alone() -> None:
    """In DeepSpeed's form: only matching linears are quantized; with a general format, names override and exclude."""
    names = {"mlp.down_proj": {"num_bits": 4, "group_size": 32, "group_dim": 1, "symmetric": False}, "o_proj": "fp6"}
    engine = engine_of("llama", {"enabled": True, "weight": {"post_init_quant": names}}, verify="strict")
    wanted = {path: "int4:32:asymmetric" for path in LLAMA if "down" in path} | {
        path: "fp6" for path in LLAMA if "o_proj" in path
    }
    assert formats_of(engine) == wanted and [step.depth for step in engine.plan.steps[:3]] == [BLOCK] * 3
    assert distance(logits(engine, "llama"), logits(rounded("llama", engine), "llama")) < 1e-4

    names["lm_head"] = {"num_bits": 16}
    engine = engine_of("llama", {"format": "int8:32", "weight": {"post_init_quant": names}}, verify="strict")
    assert formats_of(engine) == dict.fromkeys(LLAMA, "int8:32") | wanted
    assert "left  lm_head: weight: in torch.float32: quant.weight.post_init_quant leaves it alone" in str(engine.plan)
    assert not isinstance(engine.module.lm_head, QuantizedLinear)


def test_the_head_keeps_8_bits_unless_it_is_named() -> None:
    assert formats_of(engine_of("llama", "int4"))["lm_head"] == "int8"
    assert formats_of(engine_of("llama", "int4:32:a8"))["lm_head"] == "int8:a8"
    named = engine_of("llama", {"format": "int4", "weight": {"post_init_quant": {"lm_head": "int4:32"}}})
    assert formats_of(named)["lm_head"] == "int4:32"


def test_one_layer_alone() -> None:
    engine = engine_of("llama", {"weight": {"post_init_quant": {"layers.1.": {"num_bits": 8}}}})
    assert formats_of(engine) == {path: "int8" for path in LLAMA if ".1." in path}


def test_matrices_that_blocks_merge_and_names_tell_apart_stay_apart() -> None:
    """A block merges q, k and v: if their formats differ, it keeps those apart that differ."""
    names = {"0.self_attn.k_proj": "int4:32", "0.self_attn.v_proj": None, "1.mlp.up_proj": "fp8"}
    quant = {"format": "int8", "weight": {"post_init_quant": names}}
    engine = engine_of("llama", quant, verify="strict")
    depths = {step.path: step.depth for step in engine.plan.steps if step.path.startswith("model.layers")}
    assert depths == {f"model.layers.{n}": BLOCK for n in range(3)}
    formats = formats_of(engine)
    assert formats["model.layers.0.self_attn.k_proj"] == "int4:32"
    assert formats["model.layers.0.self_attn.q_proj"] == "int8"
    assert "model.layers.0.self_attn.v_proj" not in formats
    assert formats["model.layers.1.mlp.gate_proj"] == "int8" and formats["model.layers.1.mlp.up_proj"] == "fp8"
    told = "self_attn.qkv (v_proj): in torch.float32: quant.weight.post_init_quant leaves it alone"
    assert told in str(engine.plan) and "int4:32 for self_attn.qkv (k_proj) " in str(engine.plan)
    assert distance(logits(engine, "llama"), logits(rounded("llama", engine), "llama")) < 1e-4
    with infuse.dequantized(engine.module):
        state = engine.module.state_dict()
    assert state.keys() == make("llama").state_dict().keys()


def test_initialization_is_a_format_for_all() -> None:
    written = {
        "weight": {"quantized_initialization": {"num_bits": 8, "group_size": 32, "group_dim": 1, "symmetric": False}}
    }
    assert set(formats_of(engine_of("gpt2", written)).values()) == {"int8:32:asymmetric"}


def test_names_that_match_nothing_are_told_with_the_linears_that_there_are() -> None:
    names = {"down_proj": "int8", "fc1": "int8", "attention.dense": "int4"}
    model = make("llama")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ConfigError) as caught:
        infuse.init_inference(model, quant={"weight": {"post_init_quant": names}})
    text = str(caught.value)
    assert "'fc1' is in no linear's path" in text
    assert "'attention.dense' is in no linear's path" in text
    assert "'down_proj'" not in text
    assert "model.layers.{0-2}.self_attn.q_proj" in text
    assert "model.layers.{0-2}.mlp.down_proj" in text
    assert "lm_head" in text
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_names_that_contradict_each_other() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'mlp' and 'down_proj' give model.layers.0.mlp.down_proj different formats; one linear has one",
    ):
        engine_of("llama", {"weight": {"post_init_quant": {"mlp": "int8", "down_proj": "int4"}}})
    same = {"mlp": {"num_bits": 8}, "down_proj": "int8"}
    assert set(formats_of(engine_of("llama", {"weight": {"post_init_quant": same}}))) == {
        path for path in LLAMA if "mlp" in path
    }


def test_tables_are_not_quantized_and_it_is_said() -> None:
    """DeepSpeed's examples name embeddings too."""
    with pytest.warns(UserWarning, match="only tables match"):
        engine = engine_of(
            "llama", {"weight": {"post_init_quant": {"embed_tokens": {"num_bits": 8, "group_dim": 0}, "mlp": "int8"}}}
        )
    assert any(re.search("'embed_tokens': no effect: only tables match", note) for note in engine.plan.notes)
    assert any("groups lie along the inputs" in note for note in engine.plan.notes)


# ---- the plan ----


def test_the_plan_tells_formats_and_their_bytes() -> None:
    engine = engine_of("llama", {"format": "int8", "weight": {"post_init_quant": {"down": "int4:32", "o_proj": None}}})
    text = str(engine.plan)
    rows, hidden, inner = (4 + 2 * 2) * 16, 64, 128
    int8, int4 = (rows + 2 * inner) * (hidden + 2), hidden * (inner // 2 + inner // 32 * 2)
    assert (
        f"int4:32 for mlp.down {int4 / 1e3:.1f} kB, int8 for self_attn.qkv and mlp.up {int8 / 1e3:.1f} kB, spec of"
        in text
    )
    step = engine.plan.steps[0]
    module = engine.module.get_submodule(step.path)
    for target, format, size in step.matrices:
        linear = module.get_submodule(target.removesuffix(".weight"))
        assert isinstance(linear, QuantizedLinear) == bool(format) and size == (linear.held().nbytes if format else 0)


@pytest.mark.parametrize("depth", ["block", "linear"])
@pytest.mark.parametrize("text", ["fp8", "fp6:row"])
def test_the_plan_knows_the_memory(text: str, depth: str) -> None:
    keys: dict[str, Any] = dict(dtype="fp32", quant=text, replace_with_kernel_inject=depth == "block")
    engine = infuse.init_inference(make("gpt2"), **keys)
    tensors = (*engine.module.parameters(), *engine.module.buffers())
    held = sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())
    assert engine.plan.after_bytes == infuse.plan(make("gpt2"), **keys).after_bytes == held
