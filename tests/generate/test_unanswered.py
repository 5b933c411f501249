"""Models that cannot tell what our steps and loops ask of them: their answers stay as they are."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from transformers.models.speecht5 import SpeechT5Config, SpeechT5ForSpeechToText

import infuse
from infuse.generate.loop import rotates_by_length
from infuse.ground.questions import attribute, parameters, returned
from tests.models.encoder_decoders import BY_NAME as PAIRS
from tests.models.encoder_decoders import encoded, made
from tests.models.families import BY_NAME

ERRORS = [NotImplementedError, AttributeError, RuntimeError]
# Methods and properties of a model, and those of its config, that infuse/generate asks for, or infuse/graphs.
OF_MODEL = [
    "get_input_embeddings", "get_output_embeddings", "get_encoder", "get_decoder", "base_model", "device", "dtype",
    "_supports_default_dynamic_cache", "_is_stateful", "_can_compile_fullgraph", "generation_config",
]  # fmt: skip
OF_CONFIG = ["original_max_position_embeddings", "embedding_multiplier", "get_text_config"]
pytestmark = pytest.mark.filterwarnings("ignore:infuse")
SPEECH = SpeechT5Config(
    hidden_size=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=40, vocab_size=64, conv_dim=(32, 32), conv_stride=(4, 4), conv_kernel=(8, 8),
    num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, pad_token_id=0,
    speech_decoder_prenet_units=16, max_text_positions=40, decoder_start_token_id=2,
)  # fmt: skip


def _raising(error: type[Exception]) -> property:
    def cannot(self: Any) -> NoReturn:
        raise error("this model does not say")

    return property(cannot)


def _answer(model: Any, **given: Any) -> Any:
    """The model's answer, or the kind of error that it gives."""
    try:
        return model.generate(**given)
    except Exception as error:
        return type(error)


def _same_answers(original: Any, given: dict[str, Any]) -> None:
    """Assert that a replaced copy of the model answers as the model does, greedily and with beams."""
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32", progress=False)
    assert engine.plan.steps
    for more in ({}, {"num_beams": 2}):
        wanted, found = (_answer(model, **given, **more, max_new_tokens=5) for model in (original, engine))
        assert found is wanted if isinstance(wanted, type) else torch.equal(found, wanted)


def _broken(model: Any, name: str, error: type[Exception]) -> Any:
    """The model, as one of a class in its file for which reading `name` raises."""
    kind: Any = type(model)
    model.__class__ = type(kind.__name__, (kind,), {name: _raising(error), "__module__": kind.__module__})
    return model


@pytest.mark.parametrize("name", OF_MODEL)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_model_that_cannot_say_answers_as_before(family: str, name: str) -> None:
    error = ERRORS[OF_MODEL.index(name) % len(ERRORS)]
    if family == "llama":
        original, given = BY_NAME["llama"].make(0).eval(), {"input_ids": torch.arange(3, 12)[None]}
    else:
        original, given = made(PAIRS["t5"]), encoded(PAIRS["t5"])
    if name == "generation_config":  # which is set on the model
        del original.generation_config
    _same_answers(_broken(original, name, error), given)


@pytest.mark.parametrize("name", OF_CONFIG)
def test_a_config_that_cannot_say_changes_no_answer(name: str) -> None:
    original = BY_NAME["phi3"].make(0).eval()
    vars(original.config).pop(name, None)
    _broken(original.config, name, NotImplementedError)
    _same_answers(original, {"input_ids": torch.arange(3, 12)[None]})


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("owner", ["model", "decoder"])
def test_embeddings_that_raise_leave_no_direct_steps(owner: str, error: type[Exception]) -> None:
    original = made(PAIRS["t5"])
    _broken(original if owner == "model" else original.decoder, "get_input_embeddings", error)
    _same_answers(original, encoded(PAIRS["t5"]))


def test_a_decoder_without_embeddings_answers() -> None:
    """SpeechT5's decoder raises NotImplementedError when it is asked for its embeddings."""
    torch.manual_seed(0)
    original = SpeechT5ForSpeechToText(SPEECH).eval()
    with pytest.raises(NotImplementedError):
        original.get_decoder().wrapped_decoder.get_input_embeddings()
    _same_answers(original, {"input_values": torch.randn(2, 900)})


def test_a_rotation_that_does_not_tell_its_length_may_depend_on_any() -> None:
    rotary: Any = nn.Module()
    rotary.rope_type = "longrope"
    assert rotates_by_length(nn.ModuleList([rotary]), 3, 5)
    rotary.rope_type = "default"
    assert not rotates_by_length(nn.ModuleList([rotary]), 3, 5)


@pytest.mark.parametrize("error", ERRORS)
def test_questions_have_an_answer_in_any_case(error: type[Exception]) -> None:
    class Mute:
        told = 3
        silent = _raising(error)

        def refuses(self) -> NoReturn:
            raise error("no")

    mute = Mute()
    assert attribute(mute, "told") == 3 and attribute(mute, "told.real") == 3
    assert [attribute(mute, name) for name in ("silent", "silent.inside", "missing", "told.missing")] == [None] * 4
    assert attribute(mute, "silent", 7) == 7
    assert [returned(mute, name) for name in ("silent", "refuses", "missing", "told")] == [None] * 4
    assert parameters(mute, "silent") == parameters(mute, "told") == set()
    assert parameters(nn.Linear(1, 1), "forward") == {"input"}
