"""Models loaded from quantized files: their logits are those of the model with the values that the files stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import infuse
from infuse.ground.errors import CheckpointError
from infuse.layers.linear import QuantizedLinear
from infuse.plan.kinds import BLOCK
from infuse.weights.checkpoint import Checkpoint
from infuse.weights.sources import find_files
from tests.models.families import BY_NAME
from tests.support.checkpoints import on_meta
from tests.support.quantized_files import BY_CASE, CASES, ROOM, Case, llama, publish, write
from tests.support.quantized_models import loaded, logits, with_values
from tests.support.ranks import Ranks


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_are_those_of_the_values(case: Case, tmp_path: Path) -> None:
    exact = logits(with_values(llama(), publish(tmp_path, case, llama())))
    engine = loaded(tmp_path)
    limit = 0.05 if case.format.endswith(":a8") else 1e-4  # activations may be rounded where the file says so
    assert (logits(engine) - exact).norm() < limit * exact.norm()
    assert_kept(engine)


def assert_kept(engine: infuse.InferenceEngine) -> None:
    """Every layer is a block with the codes of the file. A refused one would have their values, and the same logits."""
    text = str(engine.plan)
    assert sum(step.depth == BLOCK for step in engine.plan.steps) == 3, text
    assert "taken as it is" in text and " become" not in text and "refused" not in text, text


RAGGED = dict(hidden_size=96, intermediate_size=160, num_attention_heads=4, num_key_value_heads=4)


@pytest.mark.parametrize(("name", "formats"), [
    ("fp8-blocks", {"fp8:f32", "fp8:32:f32"}), ("compressed-fp8-block", {"fp8", "fp8:32"}),
    ("gptq-4-asym-v1", {"int4:32:asymmetric:f16"}), ("nf4", {"nf4:32"}),
])  # fmt: skip
def test_rows_that_end_in_a_partial_group_keep_their_codes(name: str, formats: set[str], tmp_path: Path) -> None:
    """Tiles of 128 x 128 and blocks of 64, of 96 and 160 inputs: the last one of a row has fewer."""
    exact = logits(with_values(llama(**RAGGED), publish(tmp_path, BY_CASE[name], llama(**RAGGED))))
    engine = loaded(tmp_path, changes=RAGGED)
    assert (logits(engine) - exact).norm() < 1e-4 * exact.norm()
    assert_kept(engine)
    assert {format for step in engine.plan.steps for format in step.formats.values()} == formats
    assert "plain values" not in str(engine.plan)


def test_the_plan_says_what_becomes_plain_values(tmp_path: Path) -> None:
    """Blocks of nvfp4 are 64 inputs, of which 96 and 160 have one and a half and two and a half."""
    state = publish(tmp_path, BY_CASE["compressed-nvfp4"], llama(**RAGGED))
    plan = str(infuse.plan(on_meta("llama", **RAGGED), checkpoint=str(tmp_path), dtype="bf16"))
    values = sum(2 * one.numel() for name, one in state.items() if name.endswith("down_proj.weight")) / 1e3
    told = "codes become plain values (nvfp4: blocks of 64 do not divide 160 inputs)"
    assert f"e.g. model.layers.0.mlp.down_proj.weight: {told}: {values:,.1f} kB in 16 bits" in plan


def test_fp8_without_scales_is_said(tmp_path: Path) -> None:
    state = llama().state_dict()
    narrow = {name: one.to(torch.float8_e4m3fn) if "down_proj" in name else one for name, one in state.items()}
    write(tmp_path, narrow, None)
    engine = loaded(tmp_path)
    size = sum(one.nbytes for name, one in narrow.items() if "down_proj" in name) / 1e3
    told = f"stored in float8_e4m3fn without a scale): {2 * size:,.1f} kB in 16 bits, {size:,.1f} kB in codes"
    assert told in str(engine.plan)
    exact = logits(with_values(llama(), {name: one.float() for name, one in narrow.items()}))
    assert (logits(engine) - exact).norm() < 1e-4 * exact.norm()


def test_experts_in_several_formats_are_said(tmp_path: Path) -> None:
    """A mixture's files have a matrix for each expert: one in 8 bits keeps its whole tensor from being codes."""
    changes = dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=128)
    stored: dict[str, Tensor] = {}
    BY_NAME["qwen3-moe"].make(**changes).save_pretrained(tmp_path / "plain")
    state = load_file(tmp_path / "plain" / "model.safetensors")
    for name, tensor in state.items():
        if ".experts." not in name:
            stored[name] = tensor
            continue
        leaves, _ = BY_CASE["compressed-w4a16" if ".0.down" not in name else "compressed-w8a16"].pack(tensor)
        stored |= {f"{name.removesuffix('weight')}{leaf}": one for leaf, one in leaves.items()}
    config = json.loads(json.dumps(BY_CASE["compressed-w4a16"].config))
    wide = json.loads(json.dumps(BY_CASE["compressed-w8a16"].config))["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = {**wide, "targets": [r"re:.*experts\.0\.down_proj"]}
    write(tmp_path / "coded", stored, config)
    empty = on_meta("qwen3-moe", **changes)
    plan = str(infuse.plan(empty, checkpoint=str(tmp_path / "coded"), dtype="bf16", replace_with_kernel_inject=True))
    assert "e.g. model.layers.0.mlp.experts.down_proj: codes become plain values" in plan
    assert "(made of parts in int8:row, int4:32): " in plan


@pytest.mark.parametrize(
    ("name", "title"), [("gptq-4-asym-v1", "GPTQ"), ("awq", "AWQ"), ("nf4", "bitsandbytes"), ("fp8-blocks", "fp8")]
)
def test_the_plan_names_the_form_and_keeps_its_codes(name: str, title: str, tmp_path: Path) -> None:
    publish(tmp_path, BY_CASE[name], llama())
    engine = loaded(tmp_path)
    assert any(note.endswith(f"of the checkpoint are quantized: {title}") for note in engine.plan.notes)
    assert ", taken as it is, " in str(engine.plan)
    held = [module.format for module in engine.module.modules() if isinstance(module, QuantizedLinear)]
    whole_rows = "fp8:f32"  # of fp8 tiles as wide as the matrix
    assert len(held) > 4 and {str(format) for format in held} <= {BY_CASE[name].format, whole_rows}


@pytest.mark.parametrize("name", ["gptq-4-asym-v1", "awq", "compressed-w4a16", "compressed-w8a8", "fp8-blocks"])
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_experts_under_names_of_their_own(family: str, name: str, tmp_path: Path) -> None:
    """A mixture's files have a matrix for each expert, which the model stacks."""
    changes = dict(hidden_size=128, intermediate_size=128)
    if family == "qwen3-moe":
        changes["moe_intermediate_size"] = 128
    model = BY_NAME[family].make(**changes)
    model.save_pretrained(tmp_path / "plain")
    case, stored = BY_CASE[name], {}
    values = load_file(tmp_path / "plain" / "model.safetensors")
    for key, tensor in list(values.items()):
        path = key.removesuffix(".weight")
        if path.endswith(("_proj", ".w1", ".w2", ".w3")):
            leaves, values[key] = case.pack(tensor)
            stored |= {f"{path}.{leaf}": one for leaf, one in leaves.items()}
        else:
            stored[key] = tensor
    write(tmp_path / "coded", stored, case.config)
    write(tmp_path / "exact", values, None)
    exact = logits(loaded(tmp_path / "exact", family, changes=changes))
    engine = loaded(tmp_path / "coded", family, changes=changes)
    assert (logits(engine) - exact).norm() < (0.05 if case.format.endswith(":a8") else 1e-4) * exact.norm()
    assert_kept(engine)


@pytest.mark.parametrize("name", ["gptq-4-asym-v1", "nf4", "compressed-w8a16"])
def test_linears_whose_inputs_come_first(name: str, tmp_path: Path) -> None:
    """The weights of GPT-2 are [in, out]; quantized forms store all as [out, in]."""
    case, changes = BY_CASE[name], dict(n_embd=128, n_layer=2)
    stored, state = {}, BY_NAME["gpt2"].make(**changes).state_dict()
    del state["lm_head.weight"]
    for key, tensor in state.items():
        if key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            leaves, values = case.pack(tensor.t().contiguous())
            state[key] = values.t().contiguous()
            stored |= {f"{key.removesuffix('weight')}{leaf}": one for leaf, one in leaves.items()}
        else:
            stored[key] = tensor
    write(tmp_path / "coded", stored, case.config)
    write(tmp_path / "exact", state, None)
    exact = logits(loaded(tmp_path / "exact", "gpt2", changes=changes))
    assert (logits(loaded(tmp_path / "coded", "gpt2", changes=changes)) - exact).norm() < 1e-4 * exact.norm()


def test_a_live_model_takes_them_too(tmp_path: Path) -> None:
    state = publish(tmp_path, BY_CASE["gptq-4-sym-v1"], llama())
    engine = infuse.init_inference(
        llama(), checkpoint=str(tmp_path), dtype="fp32", progress=False, replace_with_kernel_inject=True
    )
    exact = logits(with_values(llama(), state))
    assert (logits(engine) - exact).norm() < 1e-4 * exact.norm()


def test_the_models_config_tells_the_form(tmp_path: Path) -> None:
    case = BY_CASE["awq"]
    state = publish(tmp_path, case, llama())
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no config says how"):
        loaded(tmp_path)
    model = on_meta("llama", **ROOM)
    model.config.quantization_config = dict(case.config)
    engine = infuse.init_inference(
        model, checkpoint=str(tmp_path), dtype="fp32", progress=False, replace_with_kernel_inject=True
    )
    exact = logits(with_values(llama(), state))
    assert (logits(engine) - exact).norm() < 1e-4 * exact.norm()


@pytest.mark.parametrize(
    ("file", "case", "content"),
    [
        ("quantize_config.json", "gptq-4-sym-v1", dict(bits=4, group_size=32, sym=True, desc_act=False)),
        ("quant_config.json", "awq", dict(zero_point=True, q_group_size=32, w_bit=4, version="GEMM")),
        ("hf_quant_config.json", "modelopt-nvfp4", dict(quantization=dict(quant_algo="NVFP4", group_size=16))),
        ("config.json", "awq", dict(text_config=dict(quantization_config=BY_CASE["awq"].config))),
    ],
)
def test_other_files_tell_the_form(file: str, case: str, content: dict[str, Any], tmp_path: Path) -> None:
    state = publish(tmp_path, BY_CASE[case], llama())
    (tmp_path / "config.json").unlink()
    (tmp_path / file).write_text(json.dumps(content))
    exact = logits(with_values(llama(), state))
    assert (logits(loaded(tmp_path)) - exact).norm() < 1e-4 * exact.norm()


def test_what_is_not_used_is_said(tmp_path: Path) -> None:
    """Scales of cached keys and values, and biases of zeros that old files of GPTQ have."""
    case = BY_CASE["compressed-fp8"]
    state = publish(tmp_path, case, llama())
    stored = load_file(tmp_path / "model.safetensors")
    at = "model.layers.0.self_attn"
    extra = {f"{at}.k_scale": torch.ones(1), f"{at}.v_scale": torch.ones(1), f"{at}.q_proj.input_scale": torch.ones(1)}
    extra |= {f"{at}.q_proj.bias": torch.zeros(128)}
    write(tmp_path, stored | extra, case.config)
    engine = loaded(tmp_path)
    assert "scales of cached keys and values are not used" in str(engine.plan)
    assert "scales of activations are not used" in str(engine.plan)
    exact = logits(with_values(llama(), state))
    assert (logits(engine) - exact).norm() < 1e-4 * exact.norm()


def mixed(folder: Path, cases: dict[str, Case], config: dict[str, Any]) -> dict[str, Tensor]:
    """Write a Llama whose matrices are in the form of the first of `cases` whose key is in their name."""
    state, stored = llama().state_dict(), {}
    for key, tensor in state.items():
        case = next((case for part, case in cases.items() if part in key), None)
        if case is None:
            stored[key] = tensor
            continue
        leaves, state[key] = case.pack(tensor)
        stored |= {f"{key.removesuffix('weight')}{leaf}": one for leaf, one in leaves.items()}
    write(folder, stored, config)
    return state


def formats(folder: Path) -> set[str]:
    pieces = Checkpoint(find_files(str(folder))).pieces.values()
    return {one.first.coded.format for one in pieces if one.first.coded is not None}


def test_groups_of_compressed_tensors_differ(tmp_path: Path) -> None:
    """W4A16 for the MLP by patterns, W8A8 for attention by its class, and fp8 for one matrix by its name."""
    cases = {
        "layers.1.mlp.up_proj": BY_CASE["compressed-fp8"],
        "mlp.": BY_CASE["compressed-w4a16-asym"],
        "self_attn.": BY_CASE["compressed-w8a8"],
    }
    groups = [dict(case.config["config_groups"]["group_0"]) for case in cases.values()]
    groups[0] |= {"targets": ["model.layers.1.mlp.up_proj"], "format": "float-quantized"}
    groups[1] |= {"targets": ["re:.*mlp\\..*"], "format": "pack-quantized"}
    groups[2] |= {"targets": ["Linear"], "format": "int-quantized"}
    config = dict(BY_CASE["compressed-w4a16"].config, format="mixed-precision")
    config["config_groups"] = {f"group_{number}": group for number, group in enumerate(groups)}
    state = mixed(tmp_path, cases, config)
    assert formats(tmp_path) == {"fp8", "int4:32:asymmetric", "int8:row:a8"}
    exact = logits(with_values(llama(), state))
    engine = loaded(tmp_path)
    assert (logits(engine) - exact).norm() < 0.05 * exact.norm()
    assert_kept(engine)


@pytest.mark.parametrize(("activations", "format"), [
    (dict(type="int", num_bits=8), "int4:32:a8"), (dict(type="int", num_bits=4), "int4:32"),
    (dict(type="float", num_bits=8), "int4:32"), (None, "int4:32"),
])  # fmt: skip
def test_activations_that_are_rounded(activations: dict[str, Any] | None, format: str, tmp_path: Path) -> None:
    """To 8-bit integers alone; others keep 16 bits."""
    case = BY_CASE["compressed-w4a16"]
    group = case.config["config_groups"]["group_0"] | {"input_activations": activations}
    leaves, _ = case.pack(torch.randn(32, 64))
    config = dict(case.config, config_groups={"group_0": group})
    write(tmp_path, {f"a.b.{leaf}": one for leaf, one in leaves.items()}, config)
    assert formats(tmp_path) == {format}


def test_bits_of_gptq_differ(tmp_path: Path) -> None:
    """`dynamic` gives some modules other bits, groups, and zeros."""
    cases = {"down_proj": BY_CASE["gptq-8-sym-v1"], "self_attn.": BY_CASE["gptq-2-asym-v1"]}
    cases["mlp."] = BY_CASE["gptq-4-sym-v1"]
    config = dict(cases["mlp."].config, dynamic={"+:.*down_proj": {"bits": 8}, "+:.*self_attn.*": {"bits": 2}})
    state = mixed(tmp_path, cases, config)
    assert formats(tmp_path) == {"int8:32:f16", "int2:32:asymmetric:f16", "int4:32:f16"}
    exact = logits(with_values(llama(), state))
    engine = loaded(tmp_path)
    assert (logits(engine) - exact).norm() < 1e-4 * exact.norm()
    assert_kept(engine)


TAKEN_BY_RANKS = (
    "gptq-4-asym-v1",
    "gptq-3-asym-v1",
    "gptq-3-sym-v1-order",
    "awq",
    "compressed-w4a16",
    "fp8-blocks",
    "nf4",
    "gptq-8-sym-v1-order",
)


def of_rank(folder: str) -> list[tuple[Tensor, str]]:
    """Logits and plan of each form on two ranks."""
    keys: dict[str, Any] = {"tensor_parallel": {"tp_size": 2}}
    engines = (loaded(f"{folder}/{name}", **keys) for name in TAKEN_BY_RANKS)
    return [(logits(engine), str(engine.plan)) for engine in engines]


@pytest.mark.slow
def test_two_ranks_take_their_parts(tmp_path: Path, ranks: Ranks) -> None:
    exact = [logits(with_values(llama(), publish(tmp_path / name, BY_CASE[name], llama()))) for name in TAKEN_BY_RANKS]
    for of_all in ranks.run(2, of_rank, str(tmp_path)):
        for name, (given, plan), wanted in zip(TAKEN_BY_RANKS, of_all, exact, strict=True):
            assert (given - wanted).norm() < 1e-4 * wanted.norm(), name
            assert "taken as it is" in plan and "refused" not in plan, plan
            assert (" become" in plan) == name.endswith("-order"), plan  # which ranks that share inputs cannot cut


def test_files_in_several_parts(tmp_path: Path) -> None:
    """The tensors of one matrix may be in several files, which an index names."""
    state = publish(tmp_path, BY_CASE["gptq-4-asym-v1"], llama())
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    where = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(stored)}
    for file in set(where.values()):
        save_file({name: one for name, one in stored.items() if where[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    exact = logits(with_values(llama(), state))
    engine = loaded(tmp_path)
    assert (logits(engine) - exact).norm() < 1e-4 * exact.norm()
    assert_kept(engine)
