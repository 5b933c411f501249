"""Sounds that a model takes: samples, or features of frames, by its arguments, its config and its first layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from infuse.inputs.component import MakeTensor
from infuse.inputs.known import known

_FRAMES = 12  # frames that are left of samples
_FEATURES = 64  # frames of features, where the config demands no other number, as convolutions before a table do
_MAIN = ("input_features", "input_values", "audio_mel", "padded_feature", "input_feature")
_WITH_CHANNELS = ("dac", "omniasr", "pe_audio", "xcodec")  # model types whose samples have an axis of one channel
_SPECIAL_BINS = ("feature_projection_input_dim", "input_feat_per_channel", "input_dim")
_GENERAL_BINS = ("num_mel_bins", "input_feat_size", "input_size", "feature_size", "n_mels")
_BINS = 128  # where neither says
_MASKS = ("input_features_mask", "audio_mel_mask")  # of frames; some models count the real ones


def takes_sounds(model: nn.Module, names: Collection[str]) -> bool:
    """Whether a forward takes sounds, and no text beside."""
    own = "input_ids" not in names or getattr(model, "main_input_name", "") in _MAIN
    return own and not set(_MAIN).isdisjoint(names)


def sounds(model: nn.Module, names: Collection[str], make: MakeTensor, batch: int) -> dict[str, Tensor]:
    """Arguments of a forward that takes sounds, all of one length."""
    config: Any = getattr(model, "config", None)
    first = _first(model)
    main = next(name for name in _MAIN if name in names)
    if main == "input_values" and hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return {main: make("values", (batch, config.max_length, config.num_mel_bins))}  # spectrograms
    if main == "input_values":
        length = _samples(model)
        channels = getattr(config, "audio_channels", None) or 1
        shape = (batch, channels, length) if _has_channels(config) else (batch, length)
        return {main: make("values", shape)}
    bins = _bins(config, first)
    frames_last = isinstance(first, nn.Conv1d) and not hasattr(config, "input_feat_per_channel")
    most = getattr(config, "max_source_positions", None) if frames_last else None  # Whisper takes exactly so many
    frames = 2 * (getattr(config, "n_window", None) or most or _FEATURES // 2)
    frames_first = not frames_last and not hasattr(config, "n_window")
    made = {main: make("values", (batch, frames, bins) if frames_first else (batch, bins, frames))}
    if "feature_lens" in names:  # of Qwen: all sounds in one row of frames
        made = {main: make("values", (bins, batch * frames)), "feature_lens": known(make, [frames] * batch)}
    for mask in _MASKS:
        if mask in names:
            made[mask] = known(make, [[True] * frames] * batch)
    return made


def _first(model: nn.Module) -> nn.Module | None:
    """The first layer with a matrix that is in no repeated layer: some models make these before their convolutions."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Linear)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    repeated = [
        layer for one in lists for layer in one if sum(isinstance(part, nn.Linear) for part in layer.modules()) > 1
    ]
    inside = {id(module) for layer in repeated for module in layer.modules()}
    return next((module for module in model.modules() if isinstance(module, kinds) and id(module) not in inside), None)


def _bins(config: Any, first: nn.Module | None) -> int:
    """Features of a frame: by the config's more special names, the first layer, or its more general names."""
    if bins := _number(config, _SPECIAL_BINS):
        return bins
    if isinstance(first, nn.Linear):
        return first.in_features
    if isinstance(first, nn.Conv1d):
        return first.in_channels
    return _number(config, _GENERAL_BINS) or _BINS


def _number(config: Any, names: Iterable[str]) -> int | None:
    """The first of these that a config, or one in it, has."""
    configs = (config, getattr(config, "encoder_config", None), getattr(config, "audio_config", None))
    values = (getattr(one, name, None) for one in configs for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _has_channels(config: Any) -> bool:
    """Whether samples have an axis of channels, as codecs take them."""
    kind = str(getattr(config, "model_type", ""))
    return hasattr(config, "audio_channels") or kind.startswith(_WITH_CHANNELS)


def _samples(model: nn.Module) -> int:
    """Samples of which the first convolutions leave _FRAMES frames."""
    steps: list[tuple[int, int]] = []
    channels = 1
    for module in model.modules():
        if isinstance(module, nn.Linear) and steps:
            break
        if isinstance(module, nn.Conv1d) and module.in_channels == channels:
            channels = module.out_channels
            steps.append((module.kernel_size[0] * module.dilation[0], module.stride[0]))
    length = _FRAMES
    for kernel, stride in reversed(steps):
        length = (length - 1) * stride + kernel
    return max(length, 400)
