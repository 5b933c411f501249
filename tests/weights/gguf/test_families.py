"""A tiny model of each family: its config and its tensors, back from a file, give the original's logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import infuse
from infuse.plan.kinds import BLOCK
from infuse.quant.parse import quant_format
from infuse.weights.gguf.blocks import FORMATS
from infuse.weights.gguf.config import config_values
from infuse.weights.gguf.families import FAMILIES
from infuse.weights.gguf.parts import open_parts
from tests.support.gguf_files import QUANTIZED_BY_THE_PACKAGE, matrices_in, write
from tests.weights.gguf.cases import CASES
from tests.weights.gguf.cases.case import SIZES, Case
from tests.weights.gguf.cases.written import keys_of, model_of, tensors_of, value_of

IDS = torch.arange(1, 24).unsqueeze(0)


def test_every_family_has_a_case():
    assert {case.architecture for case in CASES.values()} | {"mistral"} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_config_and_logits(tmp_path, name):
    case, path = CASES[name], tmp_path / "model.gguf"
    model = model_of(case)
    write(path, case.architecture, keys_of(case, model.config), tensors_of(case, model))
    config, further = made_config(path), case.keys.get("nextn_predict_layers", 0)
    for key in {**SIZES, **case.changes}:
        same = value_of(config, key) == value_of(model.config, key)
        assert same or key == "rope_parameters", key
    assert config.architectures == [type_name(model)]
    engine = loaded(path)
    notes = [note for note in engine.plan.notes if "GGUF file" in note]
    assert len(notes) == further and all("predict further tokens are not used" in note for note in notes)
    assert_blocks(engine, case, set())
    with torch.no_grad():
        torch.testing.assert_close(engine(IDS).logits, model(IDS).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_codes_are_taken_as_they_are(tmp_path, name):
    """The logits are those of the values that the codes stand for, and near the original's."""
    case, coded, plain = CASES[name], tmp_path / "coded.gguf", tmp_path / "plain.gguf"
    model = model_of(case)
    keys = keys_of(case, model.config)
    stored = write(coded, case.architecture, keys, tensors_of(case, model), matrices_in(case.codes))
    write(plain, case.architecture, keys, stored)
    engine = loaded(coded)
    assert_blocks(engine, case, {str(quant_format(FORMATS[case.codes]))})
    with torch.no_grad():
        logits, wanted = engine(IDS).logits, model(IDS).logits
    torch.testing.assert_close(logits, loaded(plain)(IDS).logits, rtol=1e-3, atol=1e-3)
    assert case.codes not in QUANTIZED_BY_THE_PACKAGE or (logits - wanted).norm() < 0.2 * wanted.norm()


def loaded(path) -> Any:
    config = made_config(path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    return infuse.init_inference(
        empty.eval(), checkpoint=str(path), dtype=torch.float32, replace_with_kernel_inject=True
    )


def assert_blocks(engine: Any, case: Case, formats: set[str]) -> None:
    """All layers are blocks, which keep matrices in `formats`: refused ones would have the same logits, too."""
    steps = [step for step in engine.plan.steps if step.depth == BLOCK]
    assert len(steps) == engine.module.config.num_hidden_layers, str(engine.plan)
    becoming = [note for note in engine.plan.notes if " become" in note]
    assert "refused" not in str(engine.plan), str(engine.plan)
    assert all(case.dequantized and case.dequantized in note for note in becoming), str(engine.plan)
    for step in steps:
        assert {*step.formats.values()} == formats, str(engine.plan)


def made_config(path) -> Any:
    values = config_values(open_parts([path]))
    return AutoConfig.for_model(values.pop("model_type"), **values)


def type_name(model: Any) -> str:
    return type(model).__name__
