"""Inputs that a model accepts. The proof, the trace on meta and the search for callers run models on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from infuse.ground.cache_names import CACHE_NAMES
from infuse.inputs.component import GUIDED, MakeTensor, component_inputs, is_component
from infuse.inputs.pictures import pictures, takes_pictures
from infuse.inputs.sounds import sounds, takes_sounds

BATCH, TOKENS, SEED = 2, 12, 2026  # 12 tokens split evenly into the chunks of chunked feed-forward layers
STATES = 7  # of an encoder
_TOKEN_ARGUMENTS = ("input_ids", "inputs_embeds", "hidden_states")
_PICTURE_TOKENS = ("image_token_id", "image_token_index", "image_token", "img_token_id", "im_patch_id")
# Arguments that users give to a model; a model without them reads what another one has computed.
_OWN_INPUTS = frozenset(
    (
        *("input_ids", "decoder_input_ids", "pixel_values", "pixel_values_videos", "image", "grid_thw", "past_values"),
        "flattened_patches",
        *("input_features", "input_values", "audio_mel", "audio_codes", "audio_input_ids"),
    )
)
_Side = Callable[[Any, MakeTensor, tuple[int, int]], Tensor]
# Arguments beside tokens by name, of a shape that the tokens' shape and the config give.
_SIDES: Mapping[str, _Side] = MappingProxyType(
    {
        "bbox": lambda config, make, shape: make("mask", (*shape, 4)),
        "qformer_input_ids": lambda config, make, shape: make("ids", shape),
        "visual_feats": lambda config, make, shape: make("values", (*shape, config.visual_feat_dim)),
        "visual_pos": lambda config, make, shape: make("values", (*shape, config.visual_pos_dim)),
    }
)


def model_inputs(
    model: nn.Module, make: MakeTensor, batch: int = BATCH, tokens: int | None = None
) -> dict[str, Tensor]:
    """Arguments of the model's forward by name: pictures, sounds, token ids or embeddings, and decoder ids.

    `tokens` defaults to `first_tokens`. Arguments that forward does not accept are left out. If forward has none of the
    usual arguments, its first argument takes the tokens. Models of text and pictures get a picture only if no tokens
    of the text stand for it. Numbers that models branch on are real also where `make` makes tensors on meta.
    """
    if is_component(model):
        return component_inputs(model, make, replace(GUIDED, batch=batch))
    config: Any = getattr(model, "config", None)
    names, needed, anything = _argument_names(model)
    shape = (batch, first_tokens(config) if tokens is None else tokens)
    arguments: dict[str, Tensor] = {}
    if reads_images(model):
        arguments = pictures(model, names, make, batch)
    elif takes_sounds(model, names):
        arguments = sounds(model, names, make, batch)
    elif "past_values" in names and hasattr(config, "num_input_channels"):  # series of numbers
        arguments = {"past_values": make("values", (batch, config.context_length, config.num_input_channels))}
    else:
        arguments = _token_input(model, names, shape, make)
        beside = _has_no_picture_tokens(config) and set(CACHE_NAMES).isdisjoint(names)
        if "pixel_values" in names and (beside or "pixel_values" in needed):
            arguments |= pictures(model, [name for name in names if name not in _TOKEN_ARGUMENTS], make, batch)
        if "attention_mask" in names or anything:
            arguments["attention_mask"] = make("mask", shape)
    arguments |= {name: side(config, make, shape) for name, side in _SIDES.items() if name in names}
    if "encoder_hidden_states" in names and _attends_to_states(config):
        width = getattr(config, "encoder_hidden_size", None) or config.hidden_size
        arguments["encoder_hidden_states"] = make("values", (batch, STATES, width))
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        arguments["decoder_input_ids"] = make("ids", shape)
    return arguments


def first_tokens(config: Any) -> int:
    """TOKENS, or fewer if needed to leave one of the model's positions free."""
    return min(TOKENS, most_tokens(config))


def most_tokens(config: Any) -> int:
    """One less than the model's maximum number of positions; 2**30 if the config does not give it."""
    positions = getattr(config, "max_position_embeddings", None) or 0
    return positions - 1 if positions > 1 else 1 << 30


def reads_images(model: nn.Module) -> bool:
    """Whether the model's forward reads only images."""
    names, _, _ = _argument_names(model)
    return takes_pictures(model, names)


def reads_states(model: nn.Module) -> bool:
    """Whether the model's forward reads only what a model around it has computed."""
    names, _, _ = _argument_names(model)
    return _OWN_INPUTS.isdisjoint(names)


def _argument_names(model: nn.Module) -> tuple[list[str], list[str], bool]:
    """Names of forward's arguments, of those without a default, and whether it accepts arbitrary keywords."""
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    named = [parameter for parameter in parameters if parameter.kind not in starred]
    needed = [parameter.name for parameter in named if parameter.default is parameter.empty]
    return [parameter.name for parameter in named], needed, anything


def _has_no_picture_tokens(config: Any) -> bool:
    """Whether a model of text and pictures reads them side by side, as CLIP does."""
    reads_both = any(hasattr(config, name) for name in ("vision_config", "image_config", "patch_size", "image_size"))
    return reads_both and all(getattr(config, name, None) is None for name in _PICTURE_TOKENS)


def _attends_to_states(config: Any) -> bool:
    """Whether the layers of a model without an encoder attend to one's states, as in Q-Formers."""
    return bool(getattr(config, "add_cross_attention", False)) or hasattr(config, "cross_attention_frequency")


def _token_input(model: nn.Module, names: list[str], shape: tuple[int, int], make: MakeTensor) -> dict[str, Tensor]:
    """Token ids if the model looks them up in a table, else embeddings."""
    main = next((name for name in _TOKEN_ARGUMENTS if name in names), names[0] if names else "input_ids")
    if main != "hidden_states" and isinstance(_table(model), nn.Embedding):
        return {main: make("ids", shape)}
    if main == "input_ids" and "inputs_embeds" in names:
        main = "inputs_embeds"
    return {main: make("values", (*shape, _width(model, main)))}


def _table(model: Any) -> nn.Module | None:
    """The model's token embedding; None without one."""
    try:
        return model.get_input_embeddings()
    except Exception as error:  # a class without this method, or one that cannot say
        if isinstance(error, AttributeError) and hasattr(model, "get_input_embeddings"):
            return None  # the user deleted the table, to pass embeddings only
        return next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)


def _width(model: nn.Module, main: str) -> int:
    """Width of the embeddings, or hidden states, that the model's forward takes as `main`."""
    config: Any = getattr(model, "config", None)
    first = next(filter(None, map(_inputs_of, model.modules())), 1)
    if main == "hidden_states":
        return getattr(config, "input_dim", None) or getattr(config, "hidden_size", None) or first
    return getattr(_table(model), "embedding_dim", None) or getattr(config, "hidden_size", None) or first


def _inputs_of(module: Any) -> int | None:
    """Width of a linear's inputs; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.in_features
    return module.nx if type(module).__name__ == "Conv1D" else None  # transformers'


class RandomTensors:
    """Makes random tensors that `model` accepts, from a fixed seed; masks are all ones."""

    def __init__(self, model: nn.Module):
        self._generator = torch.Generator().manual_seed(SEED)
        self._like = like(model)
        self._rows = getattr(_table(model), "num_embeddings", 4)
        padding = getattr(getattr(model, "config", None), "pad_token_id", None)
        self._padding = padding if isinstance(padding, int) else None

    def __call__(self, kind: str, shape: tuple[int, ...]) -> Tensor:
        if kind == "values":
            return torch.randn(shape, generator=self._generator).to(self._like)
        if kind == "mask":
            return torch.ones(shape, dtype=torch.long, device=self._like.device)
        lowest = min(3, self._rows - 1)
        ids = torch.randint(lowest, self._rows, shape, generator=self._generator)
        if self._padding is not None:  # some models count positions over non-padding tokens
            ids[ids == self._padding] = min(lowest + (self._padding == lowest), self._rows - 1)
        return ids.to(self._like.device)


def random_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Random arguments of the model's forward, by name."""
    return model_inputs(model, RandomTensors(model))


def like(model: nn.Module) -> Tensor:
    """A parameter with the model's device and dtype. It avoids parameters on meta, which occur while a checkpoint is
    read, and those that stay in float32 beside 16 bits.
    """
    return min(model.parameters(), key=lambda p: (p.is_meta, not p.is_floating_point(), max(p.dtype.itemsize, 2)))
