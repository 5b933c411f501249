"""Trace one call of a layer with torch.export: a LayerGraph of its operations, and what it told others on the way.

The attention interface and the cache are watched: which keywords the layer passes to the attention function, and what
it appends. Operations in place become plain ones where nothing else sees the difference.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from traceback import StackSummary
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.fx.proxy import TracerBase
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten
from transformers.cache_utils import Cache

from infuse.errors import SpecMismatch, in_brief
from infuse.reading.calls import CACHE, LayerCall
from infuse.reading.effects import attributes, changed, containers
from infuse.reading.finite import Answers
from infuse.reading.graph import ANGLES, APPEND, PAST, LayerGraph, is_in_layer

_LOGGERS = ("torch.__trace", "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
# Parts of PyTorch's errors, and what they say about a layer.
_UNTRACED = (
    ("Constraints violated", "has a branch on a size"),
    ("data-dependent", "has a branch on values"),
    ("assigned during export", "keeps state"),
    ("fake tensor in the exported program", "keeps state"),
    ("keeps state", "keeps state"),
)
_LAYER = "layer"  # the layer's name in the wrapper that is exported


@dataclass(frozen=True)
class AttentionCall:
    """A call of the attention function: the path of the module that called it, and the keywords that it passed."""

    module: str
    keywords: Mapping[str, Any]


@dataclass
class Told:
    """What a layer told others while it was traced: attention functions, and the cache, by its place there."""

    attention: list[AttentionCall] = field(default_factory=list)
    appended: list[int] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # attributes of its modules
    asks_finite: bool = False  # in float16, whether values are finite


def traced(layer: nn.Module, call: LayerCall, *, finite: bool = True) -> tuple[LayerGraph, Told]:
    """Trace one call of `layer`, all tensors of which are on meta. SpecMismatch says why it cannot be traced.

    `finite`: the answer to a layer that asks whether its values are finite.
    """
    told = Told()
    answers = Answers(finite)
    called = _Called(layer, call, told, answers)
    printed = io.StringIO()
    try:
        with (
            torch.no_grad(),
            _attention_watched(layer, told),
            _whole_stacks(),
            _without_entries(),
            _silent(),
            _without_finalizers(),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(io.StringIO()),  # where PyTorch prints the graph of what fails
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            program = export(called, called.inputs, dynamic_shapes=called.dynamic_shapes(), strict=False)
    except Exception as error:  # the user's module may raise anything
        raise SpecMismatch(_name(layer), [_why_untraced(error)]) from None
    if printed.getvalue():
        raise SpecMismatch(_name(layer), ["prints while it runs"])
    if told.changed:
        raise SpecMismatch(_name(layer), [f"keeps state: a call changes {', '.join(told.changed)}"])
    if not finite and not answers.are_clamped:
        raise SpecMismatch(_name(layer), ["asks whether other values are finite than those that it clamps"])
    told.asks_finite = bool(answers.asked)
    graph = LayerGraph(_name(layer), program, called.names, f"{_LAYER}.")
    if called.varying and (branches := _branches(program)):
        raise SpecMismatch(_name(layer), [f"has a branch on a size: {branches}"])
    return graph, told


def _why_untraced(error: Exception) -> str:
    text = str(error)
    for sign, why in _UNTRACED:
        if sign in text:
            return f"{why}: {in_brief(error)}"
    return f"cannot be traced: {in_brief(error)}"


def _name(layer: nn.Module) -> str:
    return type(layer).__name__


class _Called(nn.Module):
    """The call of a layer as a module whose inputs are all tensors of the call; a cache is made inside."""

    def __init__(self, layer: nn.Module, call: LayerCall, told: Told, answers: Answers):
        super().__init__()
        self.layer, self._answers = layer, answers
        leaves, self._structure = tree_flatten_with_path(dict(call.arguments))
        self._constants = [None if isinstance(leaf, Tensor) or leaf is CACHE else leaf for _, leaf in leaves]
        self._tensors = [i for i, (_, leaf) in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._caches = [i for i, (_, leaf) in enumerate(leaves) if leaf is CACHE]
        self.varying = call.sizes_vary
        self._told = told
        self.names = ["", *(_argument(leaves[i][0]) for i in self._tensors)]
        tensors = [leaves[i][1] for i in self._tensors]
        tokens = call.hidden.shape[1]
        masks = [tensor for tensor in tensors if tensor.dim() == 4]
        past = (masks[0].shape[-1] - tokens if masks else call.past) if call.past is not None else None
        if self._caches:
            self.names.append(PAST)
            tensors.append(call.hidden.new_empty(past if past is not None else call.past or 0))
        self._sizes = {call.hidden.shape[0], tokens}
        if past:
            self._sizes |= {past, past + tokens}
        self.inputs = (call.hidden, *tensors)
        of_angles = (tensor for name, tensor in zip(self.names, self.inputs, strict=True) if name.startswith(ANGLES))
        self._sizes |= {
            tensor.shape[-2] for tensor in of_angles if tensor.dim() > 1
        }  # fewer than tokens after a prefix
        self._sizes -= {1}  # a model that packs its pictures makes no other batch

    def dynamic_shapes(self) -> Any:
        if not self.varying:
            return None
        return (
            tuple(
                {axis: Dim.DYNAMIC for axis in _varying_axes(name, tensor) if tensor.shape[axis] in self._sizes}
                for name, tensor in zip(self.names, self.inputs, strict=True)
            ),
        )

    def forward(self, *inputs: Tensor) -> Any:
        hidden, *tensors = inputs
        leaves = list(self._constants)
        for i, tensor in zip(self._tensors, tensors, strict=False):
            leaves[i] = tensor
        for i in self._caches:
            leaves[i] = _Appends(tensors[-1], self._told)
        before = attributes(self.layer, *containers(self.layer).items())
        with _as_called(), self._answers:
            results = self.layer(hidden, **tree_unflatten(leaves, self._structure))
        self._told.changed = changed(before, attributes(self.layer, *containers(self.layer).items()))
        return results


@contextlib.contextmanager
def _without_finalizers() -> Iterator[None]:
    """Context in which nothing is collected as garbage, whose finalizers could run operations that would be traced."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Context in which PyTorch logs nothing about a trace: what is to be told is told as an error."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    kept = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, disabled in zip(loggers, kept, strict=True):
            logger.disabled = disabled


@contextlib.contextmanager
def _without_entries() -> Iterator[None]:
    """Context in which PyTorch keeps no results of operations on fake tensors.

    Few are found again where sizes are symbols, and keeping one costs more than the operation: of 14 s in which six
    families were read, 5 s.
    """
    from torch._dynamo import config  # imported when used: it takes seconds

    if not hasattr(config, "fake_tensor_cache_enabled"):
        yield
        return
    with config.patch(fake_tensor_cache_enabled=False):
        yield


def _of_layer(tracer: Any, frames: StackSummary) -> StackSummary:
    calls = [i for i, frame in enumerate(frames) if frame.filename == __file__ and frame.name == "forward"]
    inside = frames[calls[-1] + 1 :] if calls else []
    return StackSummary.from_list([frame for frame in inside if is_in_layer(frame.filename)])


@contextlib.contextmanager
def _whole_stacks() -> Iterator[None]:
    """Context in which nodes keep all lines that lead to them, not only those in a `forward`."""
    own = vars(TracerBase).get("_filter_traceback_frames")
    if own is None:
        yield
        return
    try:
        TracerBase._filter_traceback_frames = _of_layer  # type: ignore[method-assign]
        yield
    finally:
        TracerBase._filter_traceback_frames = own  # type: ignore[method-assign]


@contextlib.contextmanager
def _as_called() -> Iterator[None]:
    """Context in which a layer is not told that it is traced, so that it does what it does when it is called."""
    flags = ("_is_exporting_flag", "_is_compiling_flag")
    kept = {flag: getattr(torch.compiler, flag) for flag in flags if hasattr(torch.compiler, flag)}
    try:
        for flag in kept:
            setattr(torch.compiler, flag, False)
        yield
    finally:
        for flag, value in kept.items():
            setattr(torch.compiler, flag, value)


def _varying_axes(name: str, tensor: Tensor) -> range:
    """Axes that may be over texts or tokens: all but the width of hidden states and angles."""
    has_width = not name or name.startswith(ANGLES)
    return range(tensor.dim() - has_width)


class _Appends(Cache):
    """A cache with unknown rows, to which a layer can only append."""

    _past: Tensor
    _told: Told

    def __init__(self, past: Tensor, told: Told):
        vars(self).update(_past=past, _told=told)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"keeps state on the cache: sets `{name}`")

    @property
    def layers(self) -> Any:  # type: ignore[override]
        raise AttributeError("keeps a state: reads it from `layers` of the cache")

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._told.appended.append(layer_idx)
        return APPEND(key_states, self._past, False), APPEND(value_states, self._past, True)

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        return self._past.shape[0]


def _argument(path: Any) -> str:
    """The name of an argument: "attention_mask", "position_embeddings.0"."""
    return keystr(path).replace("['", "").replace("']", "").replace("[", ".").replace("]", "")


@contextlib.contextmanager
def _attention_watched(layer: nn.Module, told: Told) -> Iterator[None]:
    """Context in which calls of attention functions, looked up by name, are noted in `told`."""
    from transformers.modeling_utils import AttentionInterface  # imported when used: it takes seconds

    paths = {id(module): path for path, module in layer.named_modules()}
    own = vars(AttentionInterface).get("get_interface")

    def get_interface(functions: Any, name: str, default: Any) -> Any:
        function = own(functions, name, default)  # type: ignore[misc]

        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            told.attention.append(AttentionCall(paths.get(id(module), ""), kwargs))
            return function(module, *args, **kwargs)

        return attend

    if own is None:
        yield
        return
    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        AttentionInterface.get_interface = own  # type: ignore[method-assign]


def _branches(program: Any) -> str:
    """What a layer's branches assume of batch, tokens and keys; empty if all sizes from 2 on take the same way."""
    ranges = [
        f"from {bounds.lower} to {bounds.upper}"
        for symbol, bounds in program.range_constraints.items()
        if symbol.is_symbol and not (str(bounds.lower) in ("0", "1", "2") and _is_endless(bounds.upper))
    ]
    values = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder")
    sizes = (size for value in values if isinstance(value, Tensor) for size in value.shape if not isinstance(size, int))
    size: Any = next(sizes, None)
    places = [] if size is None else [_place(guard) for guard in size.node.shape_env.guards]
    return ", ".join(dict.fromkeys(filter(None, [*places, *ranges])))


def _place(guard: Any) -> str:
    """The line of the layer's source that asks about a size; empty for what operations of PyTorch ask."""
    frame = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    file = getattr(frame, "filename", "")
    return f"{Path(file).name}:{frame.lineno}" if file.endswith(".py") and is_in_layer(file) else ""  # type: ignore[union-attr]


def _is_endless(bound: Any) -> bool:
    return not str(bound).lstrip("-").isdigit() or int(bound) >= 1 << 62
