"""Inputs that a model accepts. The proof, the trace on meta and the search for callers run models on them."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from infuse.inputs.component import GUIDED, MakeTensor, component_inputs, is_component

BATCH, TOKENS, SEED = 2, 12, 2026  # 12 tokens split evenly into the chunks of chunked feed-forward layers
_TOKEN_ARGUMENTS = ("input_ids", "inputs_embeds", "hidden_states")


def model_inputs(
    model: nn.Module, make: MakeTensor, batch: int = BATCH, tokens: int | None = None
) -> dict[str, Tensor]:
    """Arguments of the model's forward by name: images, audio, token ids or embeddings, and decoder ids.

    `tokens` defaults to `first_tokens`. Arguments that forward does not accept are left out. If forward has none of the
    usual token arguments, its first argument takes the tokens.
    """
    if is_component(model):
        return component_inputs(model, make, replace(GUIDED, batch=batch))
    config: Any = getattr(model, "config", None)
    names, anything = _argument_names(model)
    shape = (batch, first_tokens(config) if tokens is None else tokens)
    if reads_images(model):
        return {"pixel_values": make("values", _image_shape(config, batch))}
    arguments: dict[str, Tensor] = {}
    if "input_features" in names and hasattr(config, "num_mel_bins"):
        arguments["input_features"] = make("values", (batch, config.num_mel_bins, 2 * config.max_source_positions))
    else:
        arguments |= _token_input(model, names, shape, make)
        vision = getattr(config, "vision_config", None)
        compares_images = hasattr(config, "logit_scale_init_value") and hasattr(vision, "num_channels")
        if compares_images and hasattr(vision, "image_size") and "pixel_values" in names:
            arguments["pixel_values"] = make("values", _image_shape(vision, batch))
        if "attention_mask" in names or anything:
            arguments["attention_mask"] = make("mask", shape)
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
    names, _ = _argument_names(model)
    only = "pixel_values" in names and "input_ids" not in names
    return only or getattr(model, "main_input_name", "") == "pixel_values"


def _argument_names(model: nn.Module) -> tuple[list[str], bool]:
    """Names of forward's arguments, and whether it accepts arbitrary keywords."""
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return [parameter.name for parameter in parameters if parameter.kind not in starred], anything


def _token_input(model: nn.Module, names: list[str], shape: tuple[int, int], make: MakeTensor) -> dict[str, Tensor]:
    """Token ids if the model looks them up in a table, else embeddings."""
    main = next((name for name in _TOKEN_ARGUMENTS if name in names), names[0] if names else "input_ids")
    if main != "hidden_states" and isinstance(_table(model), nn.Embedding):
        return {main: make("ids", shape)}
    if main == "input_ids" and "inputs_embeds" in names:
        main = "inputs_embeds"
    return {main: make("values", (*shape, _width(model)))}


def _table(model: Any) -> nn.Module | None:
    """The model's token embedding; None without one."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError) as error:
        if isinstance(error, AttributeError) and hasattr(model, "get_input_embeddings"):
            return None  # the user deleted the table, to pass embeddings only
        return next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)


def _width(model: nn.Module) -> int:
    """Width of the embeddings that the model's forward takes."""
    config: Any = getattr(model, "config", None)
    first = next(filter(None, map(_inputs_of, model.modules())), 1)
    return getattr(_table(model), "embedding_dim", None) or getattr(config, "hidden_size", None) or first


def _inputs_of(module: Any) -> int | None:
    """Width of a linear's inputs; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.in_features
    return module.nx if type(module).__name__ == "Conv1D" else None  # transformers'


def _image_shape(config: Any, batch: int) -> tuple[int, ...]:
    size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size, config.image_size)
    return (batch, config.num_channels, *size)


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
