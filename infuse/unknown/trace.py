"""Trace: what flows between the linears of a layer, from one run of the model on meta, where nothing is computed.

Each operation inside a layer is noted with the storages that it reads and writes: views share theirs, so that a value
is followed through splits, transpositions, attention and caches alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infuse.architectures.plain import linear_shape

BATCH, TOKENS = 2, 12
_SHAPE_ONLY = ("_like", "new_")  # operations that take a tensor's shape, not its values


@dataclass(frozen=True)
class Event:
    """One operation, or one call of the linear at `linear`: the numbers of the storages that it reads and writes."""

    linear: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass
class Trace:
    """One call of a layer: its operations in order, and the storage of the hidden state that it returns."""

    events: list[Event] = field(default_factory=list)
    returns: tuple[int, ...] = ()

    @property
    def linears(self) -> tuple[str, ...]:
        """The linears in the order of their first calls."""
        return tuple(dict.fromkeys(event.linear for event in self.events if event.linear))


def model_inputs(model: nn.Module, make: Callable[[str, tuple[int, ...]], Tensor]) -> dict[str, Tensor]:
    """Arguments of the model's forward: token ids, or embeddings, or pixels, or sound, and for a decoder behind an
    encoder its own.

    `make("ids" | "mask" | "values", shape)` makes each tensor. An argument that forward does not name is not given; the
    first one takes the tokens where none has a name that transformers uses.
    """
    config: Any = getattr(model, "config", None)
    parameters = inspect.signature(type(model).forward).parameters
    names = list(parameters)[1:]
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if getattr(model, "main_input_name", "") == "pixel_values" or (
        "pixel_values" in names and "input_ids" not in names
    ):
        return {"pixel_values": make("values", _images(config))}
    if "input_features" in names and hasattr(config, "num_mel_bins"):
        given = {"input_features": make("values", (BATCH, config.num_mel_bins, 2 * config.max_source_positions))}
        return given | ({"decoder_input_ids": make("ids", (BATCH, TOKENS))} if "decoder_input_ids" in names else {})
    most = getattr(config, "max_position_embeddings", None) or 0
    tokens = min(TOKENS, most - 1) if most > 1 else TOKENS
    table = any(isinstance(module, nn.Embedding) for module in model.modules())
    main = next((name for name in ("input_ids", "inputs_embeds", "hidden_states") if name in names), names[0])
    width: Any = getattr(config, "hidden_size", None) or _first_inputs(model)
    values = (
        make("ids", (BATCH, tokens)) if table and main != "hidden_states" else make("values", (BATCH, tokens, width))
    )
    if main == "input_ids" and not table:
        main = "inputs_embeds" if "inputs_embeds" in names else main
    given = {main: values}
    vision = getattr(config, "vision_config", None)
    both = (
        hasattr(config, "logit_scale_init_value") and hasattr(vision, "image_size") and hasattr(vision, "num_channels")
    )
    if both and "pixel_values" in names:  # it compares texts with images, and needs both
        given["pixel_values"] = make("values", _images(vision))
    if "attention_mask" in names or anything:
        given["attention_mask"] = make("mask", (BATCH, tokens))
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        given["decoder_input_ids"] = make("ids", (BATCH, tokens))
    return given


def _images(config: Any) -> tuple[int, ...]:
    """The shape of a batch of images."""
    size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size, config.image_size)
    return (BATCH, config.num_channels, *size)


def _first_inputs(model: nn.Module) -> int:
    """The width that the first linear takes."""
    return next((shape.inputs for module in model.modules() if (shape := linear_shape(module)) is not None), 1)


def traced(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, Trace]:
    """The first call of each layer, by its path; those that the model does not reach on meta are not in it. The model
    is unchanged.
    """
    tracer = _Tracer(layers)
    tensors = {name: torch.empty_like(value, device="meta") for name, value in _all_tensors(model)}
    before = {module: module.training for module in model.modules()}
    try:
        model.eval()
        inputs = model_inputs(model, _on_meta)
        inputs.pop("attention_mask", None)  # whose values models ask for
        with torch.no_grad(), tracer:
            torch.func.functional_call(model, tensors, (), inputs, tie_weights=False)
    except Exception:  # noqa: S110  what needs values cannot be run on meta: what was reached is known
        pass
    finally:
        tracer.remove()
        for module, training in before.items():
            module.training = training
    return tracer.done


def _all_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for (
        path,
        module,
    ) in model.named_modules():  # a module in several places once: else functional_call gives it back what is on meta
        for leaf, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                yield f"{path}.{leaf}" if path else leaf, value


def _on_meta(kind: str, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32 if kind == "values" else torch.long, device="meta")


class _Tracer(TorchDispatchMode):
    """Notes what happens inside the layers while it is entered."""

    def __init__(self, layers: Mapping[str, nn.Module]):
        super().__init__()
        self.done: dict[str, Trace] = {}
        self._now: Trace | None = None
        self._path = ""
        self._inside_linear = False
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # storages: an address must not be given to another while we look
        self._handles: list[Any] = []
        for path, layer in layers.items():
            self._listen(layer, self._enter(path), self._leave(path))
            for name, module in layer.named_modules():
                if name and linear_shape(module) is not None:
                    self._listen(module, self._before_linear, self._after_linear(name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return (
                1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
            )  # any value: only where it flows matters
        out = func(*args, **(kwargs or {}))
        if self._now is not None and not self._inside_linear:
            shape_only = any(word in func.__name__ for word in _SHAPE_ONLY)
            reads = () if shape_only else self._storages((args, kwargs))
            self._now.events.append(Event("", reads, self._storages(out)))
        return out

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _listen(self, module: nn.Module, before: Callable, after: Callable) -> None:
        self._handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _enter(self, path: str) -> Callable:
        def hook(module: nn.Module, args: tuple) -> None:
            if self._now is None and path not in self.done:
                self._now, self._path = Trace(), path

        return hook

    def _leave(self, path: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            if self._now is not None and self._path == path:
                self._now.returns = self._storages(output)[
                    :1
                ]  # beside the hidden state: weights and biases of the attention's heads
                self.done[path], self._now = self._now, None

        return hook

    def _before_linear(self, module: nn.Module, args: tuple) -> None:
        self._inside_linear = self._now is not None

    def _after_linear(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            self._inside_linear = False
            if self._now is not None:
                self._now.events.append(Event(name, self._storages(args), self._storages(output)))

        return hook

    def _storages(self, value: Any) -> tuple[int, ...]:
        found = []
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._numbers:
                    self._numbers[storage._cdata] = len(self._numbers)
                    self._alive.append(storage)
                found.append(self._numbers[storage._cdata])
        return tuple(dict.fromkeys(found))
