"""Models are given inputs of their own, on which towers of pictures, videos and sounds run and call their layers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from infuse.ground.temporary_hooks import watched
from infuse.inputs.model import RandomTensors, model_inputs, random_inputs
from infuse.plan.found import models_around
from infuse.plan.readings import Readings
from infuse.reading.calls import BATCH, TOKENS, recorded_calls
from infuse.reading.outline import outline
from tests.models.every_architecture import model_types, tiny_model
from tests.models.models_page import records

# Model type → the class of the layers of a tower in it.
TOWERS: Mapping[str, str] = MappingProxyType(
    {
        "clip": "CLIPEncoderLayer",  # pictures beside texts
        "siglip2": "Siglip2EncoderLayer",  # padded patches
        "dinov2": "Dinov2Layer",  # whole pictures, whose encoder is a model too
        "dinov3_vit": "DINOv3ViTLayer",
        "qwen2_vl": "Qwen2VLVisionBlock",  # patches in grids
        "qwen2_5_vl": "Qwen2_5_VLVisionBlock",
        "qwen3_vl": "Qwen3VLVisionBlock",
        "kimi_k25_vision": "Kimi_K25VisionEncoderLayer",
        "paddleocr_vl": "PaddleOCRVisionEncoderLayer",
        "gemma4_vision": "Gemma4VisionEncoderLayer",  # patches with their places
        "idefics2": "Idefics2PerceiverLayer",  # states of a tower
        "instructblip": "InstructBlipQFormerLayer",
        "videomae": "VideoMAELayer",  # frames
        "vivit": "VivitLayer",
        "timesformer": "TimesformerLayer",
        "parakeet_ctc": "ParakeetEncoderBlock",  # sounds
        "audioflamingo3": "AudioFlamingo3EncoderLayer",
        "qwen2_audio": "Qwen2AudioEncoderLayer",
    }
)


# Model types that can be made small, but do not run: their sizes do not fit together when they are tiny, or they need
# inputs that are not made, such as a picture in place of tokens of the text, or the states of another model.
NOT_FED = """
    bailing_hybrid blip-2 bros clvp decision_transformer ernie4_5_vl_moe fun_asr_nano_encoder
    gemma4_unified_assistant glm_image_vqmodel granite_docling_vision granite_speech5_ctc granite_speech5_encoder
    idefics instructblip instructblipvideo jamba kosmos-2 layoutlmv3 lilt mistral4 muse_glimmer_assistant
    muse_glimmer_vision muse_spark_vision nemotron_h pi0 pp_ocrv6_small_det qwen2_5_omni_thinker rf_detr sam sam3
    sam3_lite_text sam3_tracker sam_hq seggpt timesfm timesfm2_5 vision-encoder-decoder voxtral_realtime xlstm xmod
    zamba2
"""


def tiny(kind: str) -> nn.Module:
    config, model = (getattr(transformers, name) for name in model_types()[kind])
    return tiny_model(config, model).float()


def answer(connection: Connection, kind: str) -> None:
    """Send whether the model of a type runs on inputs of its own."""
    torch.set_num_threads(1)
    try:
        model = tiny(kind)
    except Exception:
        connection.send("not made")
        return
    try:
        with torch.no_grad():
            model(**random_inputs(model))
    except Exception:
        connection.send("not fed")
    else:
        connection.send("fed")


def first_call(model: nn.Module, layer: nn.Module) -> tuple[Tensor, dict[str, Any]] | None:
    """The hidden states and the other arguments of a layer in a run of `model` on random inputs; None without one."""
    calls: list[tuple[Tensor, dict[str, Any]]] = []

    def enter(path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        names = list(inspect.signature(type(layer).forward).parameters)[1:]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        calls.append((named.pop(names[0]), named))

    try:
        with torch.no_grad(), watched({"": layer}, enter, lambda *_: None):
            model(**model_inputs(model, RandomTensors(model), BATCH, TOKENS))
    except Exception:  # after the layer, or a model that reads what another one has computed
        pass
    return calls[0] if calls else None


@pytest.mark.parametrize("kind", TOWERS)
def test_calls_recorded_on_meta_are_those_of_a_real_run(kind: str) -> None:
    model = tiny(kind)
    readings = Readings(model, torch.float32, ())
    path = next(path for path, layer in readings.layers.items() if type(layer).__name__ == TOWERS[kind])
    calls = readings.calls_of(path)
    assert calls, "no run on meta reaches the layer"
    models = (model.get_submodule(around) for around in models_around(model, path))
    runs = (first_call(inside, readings.layers[path]) for inside in models)
    hidden, arguments = next(run for run in runs if run is not None)
    assert calls[0].hidden.shape == hidden.shape
    assert calls[0].hidden.is_meta
    for name, value in arguments.items():
        told = calls[0].arguments[name]
        if isinstance(value, Tensor):
            assert (told.shape, told.dtype, told.is_meta) == (value.shape, value.dtype, True), name
        elif isinstance(value, (bool, int, float, str)):
            assert told == value, name


class WritesUnknown(nn.Module):
    """Counts by a number that only values tell, and calls its layer as often."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        counts = torch.zeros(4, dtype=torch.long, device=grid_thw.device)
        counts[pixel_values[0].argmax() % 4] = int(grid_thw[0, 1])
        for _ in range(int(counts[0])):
            pixel_values = self.layer(pixel_values)
        return pixel_values


class Known(WritesUnknown):
    """Calls its layer if the grid says so."""

    def forward(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        is_wide = grid_thw[:, 2] > grid_thw[:, 1]
        return self.layer(pixel_values[: int(is_wide.sum())])


def test_no_call_is_recorded_after_known_numbers_become_unknown() -> None:
    model = outline(WritesUnknown(), torch.float32)
    assert recorded_calls(model, {"layer": model.layer}, torch.float32)[0] == {}


def test_sounds_are_as_long_as_the_model_needs() -> None:
    """Wav2Vec2-BERT's config counts 5,000 positions that it does not need; Whisper takes no other number of frames."""
    sizes: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config = transformers.Wav2Vec2BertConfig(**sizes, feature_projection_input_dim=16)
    assert config.max_source_positions == 5000
    assert random_inputs(transformers.Wav2Vec2BertModel(config))["input_features"].shape[1] <= 128
    whisper = transformers.WhisperConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=96, max_source_positions=75, pad_token_id=0,
        decoder_start_token_id=1, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    assert random_inputs(transformers.WhisperModel(whisper))["input_features"].shape[2] == 150


def test_known_numbers_are_computed_with() -> None:
    model = outline(Known(), torch.float32)
    (call, *_) = recorded_calls(model, {"layer": model.layer}, torch.float32)[0]["layer"]
    assert call.hidden.shape == (BATCH, 8)


@pytest.mark.variants
def test_how_many_models_are_not_fed() -> None:
    """On inputs of their own run all models that can be made small, but for those named here."""
    not_fed = {kind for kind, reason in records(model_types(), 2, target=answer).items() if reason == "not fed"}
    assert not_fed == set(NOT_FED.split())
