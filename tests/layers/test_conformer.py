"""Conformers (layers/attention/conformer.py): frames, padding, formats, records, state dicts, ranks, refusals."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as t
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

import infuse
from infuse.architectures import specs_for
from infuse.architectures.families.conformer import DistanceVectors
from infuse.architectures.layer import LayerSpec
from infuse.architectures.program import ADD
from infuse.layers.attention import conformer
from infuse.layers.block import Block
from tests.support.ranks import Ranks, same

BINS, TOLERANCE = 16, 2e-5  # of the largest value: float32, two layers
_SIZES: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, num_mel_bins=BINS
)
_ENCODER = dict(
    **_SIZES, num_key_value_heads=4, subsampling_conv_channels=8, conv_kernel_size=5, max_position_embeddings=64
)
_BERT = dict(
    **_SIZES, vocab_size=20, feature_projection_input_dim=BINS, output_hidden_size=32, conv_depthwise_kernel_size=5,
    left_max_position_embeddings=6, right_max_position_embeddings=3,
)  # fmt: skip


def parakeet(**changes: Any) -> nn.Module:
    config = t.ParakeetCTCConfig(vocab_size=20, encoder_config={**_ENCODER, **changes}, pad_token_id=0)
    return enlarged(t.ParakeetForCTC(config))


def lasr(**changes: Any) -> nn.Module:
    return enlarged(t.LasrForCTC(t.LasrCTCConfig(vocab_size=20, encoder_config={**_ENCODER, **changes})))


def bert(**changes: Any) -> nn.Module:
    return enlarged(t.Wav2Vec2BertForCTC(t.Wav2Vec2BertConfig(**{**_BERT, **changes})))


def enlarged(model: Any) -> nn.Module:
    """The model, evaluating, with weights and statistics that all count, and frames that differ."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        if "subsampl" in name:
            parameter.data = values * (0.4 if parameter.dim() > 1 else 0.0)
        else:
            parameter.data = values * (0.2 if parameter.dim() > 1 and "bias" not in name else 0.3) + is_norm
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
        elif name.endswith("running_var"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
        elif name.endswith("num_batches_tracked"):
            buffer.fill_(7)
    return model.eval()


MODELS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "parakeet": parakeet,
        "parakeet, grouped": lambda **changes: parakeet(num_key_value_heads=2, attention_bias=False, **changes),
        "lasr": lasr,
        "wav2vec2-bert": bert,
        "wav2vec2-bert, relative": lambda **changes: bert(position_embeddings_type="relative", **changes),
        "wav2vec2-bert, no positions": lambda **changes: bert(position_embeddings_type=None, **changes),
    }
)
MAIN = ("parakeet", "wav2vec2-bert")


def given(batch: int = 2, frames: int = 75, *, padded: bool = False) -> dict[str, Tensor]:
    features = torch.randn(batch, frames, BINS, generator=torch.Generator().manual_seed(frames))
    if not padded:
        return {"input_features": features}
    mask = torch.ones(batch, frames, dtype=torch.long)
    mask[0, frames - frames // 3 :] = 0
    return {"input_features": features, "attention_mask": mask}


def layers(model: Any) -> nn.ModuleList:
    return (model.encoder if hasattr(model, "encoder") else model.wav2vec2_bert.encoder).layers


def replaced(original: Any, **keys: Any) -> infuse.InferenceEngine:
    """An engine of a copy of the model whose layers are all blocks, else it would be compared with itself."""
    engine = infuse.init_inference(copy.deepcopy(original), **{"dtype": "fp32", **keys})
    assert all(isinstance(layer, Block) for layer in layers(engine.module)), str(engine.plan)
    return engine


@torch.no_grad()
def logits(model: Any, arguments: Mapping[str, Tensor]) -> Tensor:
    return model(**arguments).logits


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_all_numbers_of_frames_with_and_without_padding(name: str) -> None:
    original = MODELS[name]()
    engine = replaced(original)
    for batch, frames in ((1, 75), (2, 121), (2, 20)):
        for padded in (False, True):
            arguments = given(batch, frames, padded=padded)
            assert error(logits(engine, arguments), logits(original, arguments)) < TOLERANCE, (batch, frames, padded)


@pytest.mark.parametrize("name", MAIN)
def test_one_frame(name: str) -> None:
    original = MODELS[name]()
    engine = replaced(original)
    for frames in (1, 2):
        assert error(logits(engine, given(2, frames)), logits(original, given(2, frames))) < TOLERANCE


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("keys", [{"dtype": "bf16"}, {"quant": "int8:16"}, {"quant": "int4:16"}], ids=str)
def test_in_formats(name: str, keys: dict[str, Any]) -> None:
    original = MODELS[name]()
    engine = replaced(original, **keys)
    step = next(step for step in engine.plan.steps if step.depth == "block")
    in_format = {weight for weight in step.formats if weight.startswith("conv")}
    assert len(in_format) == (2 if "quant" in keys else 0)  # the products over channels
    arguments = {name: value.to(next(engine.module.parameters()).dtype) for name, value in given().items()}
    found, wanted = logits(engine, arguments).float(), logits(original, given())
    assert float((found - wanted).norm() / wanted.norm()) < (0.3 if "int4:16" in keys.values() else 0.03)


@pytest.mark.parametrize("name", MODELS)
def test_records_are_the_originals(name: str) -> None:
    original: Any = MODELS[name]()
    original.set_attn_implementation("eager")
    engine = replaced(original)
    arguments = given(padded=name != "lasr")  # which adds its mask of booleans to the scores
    with torch.no_grad():
        wanted, found = (
            model(**arguments, output_attentions=True, output_hidden_states=True) for model in (original, engine)
        )
    assert len(found.attentions) == len(wanted.attentions) == 2
    assert len(found.hidden_states) == len(wanted.hidden_states) == 3
    for kind in ("attentions", "hidden_states"):
        for a, b in zip(found[kind], wanted[kind], strict=True):
            assert error(a, b) < TOLERANCE


@pytest.mark.parametrize("name", [*MAIN, "wav2vec2-bert, relative"])
def test_attention_by_a_function_of_the_users(name: str) -> None:
    calls: list[type] = []

    def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(module))
        return AttentionInterface()["sdpa"](module, *args, **kwargs)

    original: Any = MODELS[name]()
    engine: Any = replaced(original)
    AttentionInterface.register("counted_here", attend)
    engine.module.set_attn_implementation("counted_here")
    assert error(logits(engine, given()), logits(original, given())) < TOLERANCE
    assert len(calls) == 2


@pytest.mark.parametrize("name", MAIN)
def test_state_dicts_are_the_originals(name: str, tmp_path: Path) -> None:
    original: Any = MODELS[name]()
    engine: Any = replaced(original)
    wanted, found = original.state_dict(), engine.module.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    engine.module.save_pretrained(tmp_path)
    again = type(original).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, given()), logits(original, given()))
    for value in wanted.values():
        value.copy_(value * 2)  # the original's own tensors
    engine.module.load_state_dict(wanted)
    assert error(logits(engine, given()), logits(original, given())) < TOLERANCE


@pytest.mark.parametrize("keys", [{}, {"quant": "int8:16"}], ids=str)
@pytest.mark.parametrize("name", MAIN)
def test_saved_shards(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """Statistics of batch norms are buffers of the original."""
    original: Any = MODELS[name]()
    saved = replaced(original, save_mp_checkpoint_path=str(tmp_path), **keys)
    with torch.device("meta"):
        empty = type(original)(original.config).eval()
    loaded = infuse.init_inference(empty, dtype="fp32", checkpoint=str(tmp_path), **keys)
    assert torch.equal(logits(loaded, given()), logits(saved, given()))
    buffers = {name: buffer for name, buffer in loaded.module.named_buffers() if name.endswith("tracked")}
    assert all(int(buffer) == 7 for buffer in buffers.values())


@pytest.mark.parametrize("name", ["lasr", "wav2vec2-bert"])
def test_padding_is_not_skipped(name: str) -> None:
    """Convolutions read it: what the original makes of it, if a call does not mask it there."""
    original: Any = MODELS[name]()
    engine = replaced(original, skip_padding=True)
    assert "skip_padding: no effect here" in str(engine.plan) and "are skipped" not in str(engine.plan)
    for arguments in (given(padded=True), given()):
        assert error(logits(engine, arguments), logits(original, arguments)) < TOLERANCE
    x, mask = torch.randn(2, 9, 32), torch.ones(2, 1, 9, 9, dtype=torch.bool)
    mask[0, ..., :6] = False
    if name == "wav2vec2-bert":
        with torch.no_grad():
            found, exact = (layers(each)[0](x, attention_mask=mask) for each in (engine.module, original))
        assert error(found[0], exact[0]) < TOLERANCE


def test_eager_attention_gets_a_mask_of_numbers() -> None:
    original: Any = lasr()
    original.set_attn_implementation("eager")
    engine = replaced(original)
    for arguments in (given(padded=True), given()):
        assert error(logits(engine, arguments), logits(original, arguments)) < TOLERANCE


@pytest.mark.parametrize("name", ["ParakeetForTDT", "ParakeetForRNNT"])
def test_transducers_generate_the_originals_tokens(name: str) -> None:
    kind = getattr(t, name)
    original: Any = enlarged(kind(kind.config_class(encoder_config=_ENCODER, decoder_hidden_size=24)))
    original.generation_config.decoder_start_token_id = 1
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32")
    assert all(isinstance(layer, Block) for layer in layers(engine.module))
    arguments = given(padded=True)
    found, wanted = (model.generate(**arguments, max_new_tokens=12) for model in (engine.module, original))
    assert torch.equal(getattr(found, "sequences", found), getattr(wanted, "sequences", wanted))


def test_settings_of_generate_say_nothing_to_layers() -> None:
    """Models of connectionist temporal classification pass them to every layer."""
    original: Any = parakeet()
    engine = replaced(original)
    found, wanted = (model.generate(**given(padded=True), max_new_tokens=5, do_sample=False, num_beams=1)
                     for model in (engine.module, original))  # fmt: skip
    assert torch.equal(found, wanted)


def test_a_layer_names_what_it_does_not_take() -> None:
    layer, x = layers(replaced(parakeet()).module)[0], torch.randn(1, 5, 32)
    vectors, mask = torch.randn(1, 9, 32), torch.ones(1, 1, 5, 5, dtype=torch.bool)
    layer(x, mask, vectors)
    for changes, told in (
        (dict(position_embeddings=None), "without position_embeddings"),
        (dict(position_embeddings=vectors[:, 1:]), r"not \[batch or 1, 9, 32\]"),
        (dict(attention_mask=mask.float()), "boolean"),
        (dict(attention_mask=mask[..., :4]), "5 frames"),
        (dict(is_causal=True), "no causal order"),
    ):
        with pytest.raises(infuse.UnsupportedCall, match=told):
            layer(x, **{"attention_mask": mask, "position_embeddings": vectors, **changes})


def test_rotations_of_hidden_states_stay_as_they_are() -> None:
    engine = infuse.init_inference(bert(position_embeddings_type="rotary"), dtype="fp32")
    assert not any(isinstance(layer, Block) for layer in layers(engine.module))
    assert "config.position_embeddings_type is 'rotary'" in str(engine.plan)


def test_other_factors_of_the_stream_stay_as_they_are() -> None:
    engine = infuse.init_inference(lasr(feed_forward_residual_weights=(1.25, 0.5)), dtype="fp32")
    assert "feed_forward_residual_weights is (1.25, 0.5)" in str(engine.plan)


def on_rank(name: str) -> tuple[Tensor, int]:
    engine = infuse.init_inference(MODELS[name](), dtype="fp32", mp_size=torch.distributed.get_world_size())
    return logits(engine, given(padded=True)), sum(isinstance(layer, Block) for layer in layers(engine.module))


@pytest.mark.parametrize("name", [*MAIN, "wav2vec2-bert, relative"])
def test_ranks_give_what_the_original_gives(name: str, ranks: Ranks) -> None:
    found = ranks.run(3, on_rank, name)
    assert same([each for each, _ in found]) and all(count == 2 for _, count in found)
    assert error(found[0][0], logits(MODELS[name](), given(padded=True))) < 5e-5


# ---- what the proof refuses ----


def whole(spec: LayerSpec) -> LayerSpec:
    return spec.but(program=tuple(step._replace(scale=1.0) if step.does == ADD else step for step in spec.program))


def without_mask(spec: LayerSpec) -> LayerSpec:
    return spec.but(program=tuple(step._replace(over="") for step in spec.program))


def biases_swapped(spec: LayerSpec) -> LayerSpec:
    attention: Any = spec.attn
    distances = attention.distances
    if not isinstance(distances, DistanceVectors):
        return spec
    swapped = replace(distances, content=distances.distance, distance=distances.content)
    return spec.but(attn=dict(distances=swapped))


def of_the_batch(self: Any, x_BCT: Tensor) -> Tensor:
    return F.batch_norm(x_BCT, None, None, self.weight, self.bias, True, 0.0, self.eps)


def reversed_in_place(products: Tensor) -> Tensor:
    return conformer_placed(products.flip(-1))


conformer_placed = conformer.placed_by_distance
SPECS: Mapping[str, tuple[str, Callable[[LayerSpec], LayerSpec]]] = MappingProxyType(
    {
        "a whole feed-forward": ("parakeet", whole),
        "a whole feed-forward, layer norm": ("wav2vec2-bert", whole),
        "biases of queries swapped": ("parakeet", biases_swapped),
        "padding is not masked": ("wav2vec2-bert", without_mask),
    }
)
LAYERS: Mapping[str, tuple[str, Any, str, Any]] = MappingProxyType(
    {
        "distances the other way": ("parakeet", conformer, "placed_by_distance", reversed_in_place),
        "distances the other way, in a table": (
            "wav2vec2-bert", conformer, "placed_by_distance", reversed_in_place,
        ),
        "statistics of the batch": ("parakeet", conformer.BatchNorm, "forward", of_the_batch),
        "padding is not masked": (
            "parakeet", conformer, "_seen_by_none", lambda mask, _: torch.zeros((), dtype=torch.bool),
        ),
    }
)  # fmt: skip


def assert_refused(model: Any) -> None:
    wanted = logits(model, given())
    engine = infuse.init_inference(model, dtype="fp32")
    refused = [left.why for left in engine.plan.left if left.why.startswith("refused")]
    assert refused and not any(isinstance(layer, Block) for layer in layers(engine.module))
    assert any("differs from the original" in why for why in refused)
    assert error(logits(engine, given()), wanted) < TOLERANCE


@pytest.mark.parametrize("what", SPECS)
def test_a_broken_spec_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = SPECS[what]
    changed = importlib.import_module("infuse.plan.decide")  # `infuse.plan` as an attribute is the function
    monkeypatch.setattr(changed, "specs_for", lambda layer: tuple(map(change, specs_for(layer))))
    assert_refused(MODELS[name]())


@pytest.mark.parametrize("what", LAYERS)
def test_a_broken_layer_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, owner, attribute, broken = LAYERS[what]
    monkeypatch.setattr(owner, attribute, broken)
    assert_refused(MODELS[name]())
