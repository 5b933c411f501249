"""Trace one call of a layer on meta: a LayerGraph of its operations, and what it told others on the way.

Operations are recorded whole, as PyTorch dispatches them in inference mode. The attention interface and the cache are
watched: which keywords the layer passes to the attention function, and what it appends.
"""

from __future__ import annotations

import contextlib
import gc
import io
import operator
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten
from transformers.cache_utils import Cache

from infuse.ground.errors import SpecMismatch, in_brief
from infuse.reading.attention import cores
from infuse.reading.calls import CACHE, LayerCall, Untouched
from infuse.reading.effects import attributes, changed, containers
from infuse.reading.finite import Answers
from infuse.reading.graph import ANGLES, APPEND, PAST, LayerGraph, Size, Trace, is_in_layer
from infuse.reading.resized import resized
from infuse.reading.results import RESULTS, Results

if TYPE_CHECKING:
    from infuse.reading.sizes import Variables

aten = torch.ops.aten
_OF_VALUES = (aten.is_nonzero, aten.item, aten._local_scalar_dense, aten.equal)
_OF_NUMBERS = (aten.lift_fresh, aten.detach_)  # how torch.tensor hands out what it made
# Sizes of far calls, which no layer should notice: beyond what it may compare with, and multiples of much.
_FAR_BATCH, _FAR_TOKENS, _FAR_PAST = 240, 40320, 55440
NO_LAYER = "has no attention and returns other sizes than it takes: it is no layer"  # as mergers of patches
_CALL = nn.Module._call_impl.__code__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class AttentionCall:
    """A call of the attention function: the path of the module that called it, and the keywords that it passed."""

    module: str
    keywords: Mapping[str, Any]


@dataclass
class Observed:
    """What a layer told others while it was traced: attention functions, and the cache, by its place there."""

    attention: list[AttentionCall] = field(default_factory=list)
    appended: list[int] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # attributes of its modules
    refused: list[str] = field(default_factory=list)  # what it asked of the cache, and got no answer
    asks_finite: bool = False  # in float16, whether values are finite


def traced(
    layer: nn.Module, call: LayerCall, *, finite: bool = True, is_far: bool = False
) -> tuple[LayerGraph, Observed]:
    """Trace one call of `layer`, all tensors of which are on meta. SpecMismatch says why it cannot be traced.

    `finite`: the answer to a layer that asks whether its values are finite. `is_far`: the same call of far more texts
    and tokens, where these are more than one.
    """
    from infuse.reading.sizes import TooManyBranches, as_values

    told = Observed()
    answers = Answers(finite)
    called = _Called(layer, call, told, answers, is_far)
    printed = io.StringIO()
    try:
        with (
            torch.inference_mode(),
            _attention_watched(layer, told),
            _without_finalizers(),
            contextlib.redirect_stdout(printed),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            trace = called.trace()
    except TooManyBranches as error:
        raise SpecMismatch(_name(layer), [f"has a branch on a size: {error}"]) from None
    except _NeedsValues as error:
        raise SpecMismatch(_name(layer), [f"has a branch on values: {error}"]) from None
    except Exception as error:  # the user's module may raise anything
        raise SpecMismatch(_name(layer), [_why_untraced(error)]) from None
    if printed.getvalue():
        raise SpecMismatch(_name(layer), ["prints while it runs"])
    if told.changed:
        raise SpecMismatch(_name(layer), [f"keeps state: a call changes {', '.join(told.changed)}"])
    if not finite and not answers.are_clamped:
        raise SpecMismatch(_name(layer), ["asks whether other values are finite than those that it clamps"])
    told.asks_finite = bool(answers.asked)
    graph = LayerGraph(_name(layer), trace)
    result = graph.outputs[0] if graph.outputs else None
    if result is not None and graph.shape(result) != graph.shape(graph.hidden) and not cores(graph):
        raise SpecMismatch(_name(layer), [NO_LAYER])
    if branches := called.branches():
        raise SpecMismatch(_name(layer), [f"has a branch on a size: {branches}"])
    if used := as_values(graph):
        raise SpecMismatch(_name(layer), [used])
    return graph, told


def _why_untraced(error: Exception) -> str:
    text = in_brief(error)
    _, keeps, what = text.partition("keeps state")
    return keeps + what or f"cannot be traced: {text}"


def _name(layer: nn.Module) -> str:
    return type(layer).__name__


class _NeedsValues(Exception):
    """An operation whose result depends on values, which tensors on meta do not have."""


class _Called:
    """The call of a layer as a function of all tensors of the call; a cache is made inside."""

    def __init__(self, layer: nn.Module, call: LayerCall, told: Observed, answers: Answers, is_far: bool):
        self.layer, self._answers = layer, answers
        leaves, self._structure = tree_flatten_with_path(dict(call.arguments))
        self._constants = [None if isinstance(leaf, Tensor) or leaf is CACHE else leaf for _, leaf in leaves]
        self._tensors = [i for i, (_, leaf) in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._caches = [i for i, (_, leaf) in enumerate(leaves) if leaf is CACHE]
        self._told = told
        names = ["", *(_argument(leaves[i][0]) for i in self._tensors)]
        tensors = [leaves[i][1] for i in self._tensors]
        tokens = call.hidden.shape[1]
        masks = [tensor for tensor in tensors if tensor.dim() == 4]
        past = (masks[0].shape[-1] - tokens if masks else call.past) if call.past is not None else None
        if past is not None and past < 0:
            raise SpecMismatch(_name(layer), ["gets a mask of fewer tokens than there are"])
        if self._caches:
            names.append(PAST)
            tensors.append(call.hidden.new_empty(past if past is not None else call.past or 0))
        self._inputs = list(zip(names, (call.hidden, *tensors), strict=True))
        self._variables: Variables | None = None
        if is_far:
            self._go_far(call.hidden.shape[0], tokens, past)
        elif call.sizes_vary:
            self._variables = self._varying(call.hidden.shape[0], tokens, past)

    def _rows(self) -> set[int]:
        """Rows of angles: as many as tokens, or fewer after a prefix."""
        angles = (tensor for name, tensor in self._inputs if name.startswith(ANGLES))
        return {tensor.shape[-2] for tensor in angles if tensor.dim() > 1}

    def _go_far(self, batch: int, tokens: int, past: int | None) -> None:
        """Give all tensors, and numbers that are sizes, those of a call with far more texts and tokens."""
        far_tokens = _FAR_TOKENS if tokens > 1 else 1
        sizes = {rows: rows - tokens + far_tokens for rows in self._rows()} | {tokens: far_tokens}
        sizes |= {past: _FAR_PAST, past + tokens: _FAR_PAST + far_tokens} if past else {}
        sizes.pop(1, None)
        of_first = {**sizes, batch: _FAR_BATCH if batch > 1 else 1}

        def far(name: str, tensor: Tensor) -> Tensor:
            by_axis = {
                axis: of_first if axis == 0 and tensor.dim() > 1 else sizes for axis in _varying_axes(name, tensor)
            }
            return resized(tensor, by_axis)

        self._inputs = [(name, far(name, tensor)) for name, tensor in self._inputs]
        self._constants = [sizes.get(one, one) if type(one) is int else one for one in self._constants]

    def _varying(self, batch: int, tokens: int, past: int | None) -> Variables:
        from infuse.reading.sizes import Variables

        rows = self._rows()
        numbers = {batch, tokens, *rows} | ({past, past + tokens} if past else set())
        numbers -= {1}  # a model that packs its pictures makes no other batch
        return Variables(numbers, [(past, tokens)] if past else [])

    def branches(self) -> str:
        """What the layer's branches assume of sizes."""
        return self._variables.branches() if self._variables is not None else ""

    def trace(self) -> Trace:
        """Run the call and record it."""
        inputs = self._inputs
        if self._variables is not None:
            inputs = [(name, self._variables.tensor(one, _varying_axes(name, one))) for name, one in inputs]
        recorder = _Recorder(self.layer, inputs, RESULTS if self._variables is None else Results())
        by_python = enable_python_dispatcher() if self._variables is not None else contextlib.nullcontext()
        before = attributes(self.layer, *containers(self.layer).items())
        with by_python, recorder, self._answers:
            results = self._call(*(tensor for _, tensor in inputs))
        self._told.changed += changed(before, attributes(self.layer, *containers(self.layer).items()))
        if self._told.refused:  # and the layer went on without an answer
            raise AttributeError(self._told.refused[0])
        return recorder.trace(results)

    def _call(self, hidden: Tensor, *tensors: Tensor) -> Any:
        leaves = list(self._constants)
        for i, tensor in zip(self._tensors, tensors, strict=False):
            leaves[i] = tensor
        for i in self._caches:
            leaves[i] = _Appends(tensors[-1], self._told)
        arguments = tree_unflatten(leaves, self._structure)
        before = list(_held(arguments))
        results = self.layer(hidden, **arguments)
        after = list(_held(arguments))
        if len(before) != len(after) or not all(map(operator.is_, before, after)):
            self._told.changed.append("its arguments")
        return results


class _Recorder(TorchDispatchMode):
    """Context in which operations are recorded as nodes of a graph, with their lines and the module they are in."""

    def __init__(self, layer: nn.Module, inputs: list[tuple[str, Tensor]], results: Results):
        super().__init__()
        self._results = results
        self._graph = Graph()
        self._nodes: dict[int, Node] = {}  # by the id of a tensor
        self._kept: list[Tensor] = []  # so that no other tensor gets the id of one
        self._unanswered: Exception | None = None
        self._paths = {id(module): path for path, module in layer.named_modules()}
        self._parameters = {self._placed(name, tensor): name for name, tensor in layer.named_parameters()}
        self._buffers = {self._placed(name, tensor): name for name, tensor in layer.named_buffers()}
        self._arguments = {self._placed(name or "hidden", tensor): name for name, tensor in inputs}

    def trace(self, results: Any) -> Trace:
        """What was recorded, with the results of the call. Nothing is left that these do not need."""
        if self._unanswered is not None:  # and the layer went on without an answer
            raise self._unanswered
        leaves, structure = tree_flatten(results)
        if others := {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (Tensor, int, float, type(None)))}:
            raise TypeError(f"returns {', '.join(sorted(others))}")
        nodes = [self._node(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        self._graph.output(tuple(nodes))
        self._graph.eliminate_dead_code()
        return Trace(self._graph, self._arguments, self._parameters, self._buffers, nodes, structure)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _OF_NUMBERS and id(args[0]) not in self._nodes:
            self._placed("constant", args[0])
        args_of, kwargs_of = tree_map(self._argument, (args, kwargs))
        if _reads_values(func, args, kwargs):
            raise self._needs_values(func)
        if _keeps_statistics(func, args):
            self._unanswered = AttributeError("keeps state: a norm of batches writes into its buffers")
        try:
            made = self._results.of(func, args, kwargs)
        except (RuntimeError, NotImplementedError):
            if torch.Tag.dynamic_output_shape not in func.tags:
                raise
            raise self._needs_values(func) from None
        node = self._graph.call_function(func, tuple(args_of), kwargs_of)
        node.meta.update(val=made, **self._where())
        if isinstance(made, Tensor):
            self._keep(made, node)
        elif isinstance(made, (tuple, list)):
            for i, one in enumerate(made):
                if isinstance(one, Tensor):
                    item = self._graph.call_function(operator.getitem, (node, i))
                    item.meta.update({**node.meta, "val": one})
                    self._keep(one, item)
        return made

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return Size(value.node.expr)
        return bool(value) if isinstance(value, torch.SymBool) else value

    def _node(self, tensor: Tensor) -> Node:
        """The node that made a tensor."""
        if id(tensor) not in self._nodes and tensor.is_meta:
            self._unanswered = AttributeError("keeps state: reads a tensor that is no argument, parameter or buffer")
            raise self._unanswered
        return self._nodes.get(id(tensor)) or self._placed("constant", tensor)

    def _placed(self, name: str, tensor: Tensor) -> Node:
        node = self._graph.placeholder(name.replace(".", "_"))
        node.meta["val"] = tensor
        self._keep(tensor, node)
        return node

    def _keep(self, tensor: Tensor, node: Node) -> None:
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)

    def _needs_values(self, func: Any) -> _NeedsValues:
        places = "".join(f" at {Path(file).name}:{line}" for file, line in self._where()["lines"][-1:])
        self._unanswered = error = _NeedsValues(f"`{func._schema.name.rpartition('::')[2]}`{places}")
        return error

    def _where(self) -> dict[str, Any]:
        """The lines that lead to an operation, outermost first, and the path of the innermost module that it is in."""
        lines: list[tuple[str, int]] = []
        module: str | None = None
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not _Called._call.__code__:
            if frame.f_code is _CALL and module is None:
                module = self._paths.get(id(frame.f_locals["self"]))
            elif is_in_layer(frame.f_code.co_filename):
                lines.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return {"lines": lines[::-1], "module": module or ""}


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


def _reads_values(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation reads values of a tensor on meta: as a number, or to copy them from there."""
    if not args or not isinstance(args[0], Tensor) or not args[0].is_meta:
        return False
    devices = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.device)]
    return func.overloadpacket in _OF_VALUES or any(device.type != "meta" for device in devices)


def _keeps_statistics(func: Any, args: tuple) -> bool:
    """Whether an operation writes into a norm's running statistics, which its signature does not tell."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False))
    is_running = isinstance(given.get("running_mean"), Tensor)
    return is_running and any(given.get(name) is True for name in ("training", "train", "use_input_stats"))


def _held(value: Any) -> Iterator[Any]:
    """What arguments hold, and what that holds: containers of every class, and attributes of objects."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from _held(inner)
    elif isinstance(value, (list, tuple, set)):
        for inner in value:
            yield from _held(inner)
    else:
        yield value
        if not isinstance(value, (Tensor, Untouched, type)) and hasattr(value, "__dict__"):
            yield from vars(value).values()


def _varying_axes(name: str, tensor: Tensor) -> range:
    """Axes that may be over texts or tokens: all but the width of hidden states and angles."""
    has_width = not name or name.startswith(ANGLES)
    return range(tensor.dim() - has_width)


class _Appends(Cache):
    """A cache with unknown rows, to which a layer can only append."""

    _past: Tensor
    _told: Observed

    def __init__(self, past: Tensor, told: Observed):
        vars(self).update(_past=past, _told=told)

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._refusal(f"keeps state on the cache: sets `{name}`")

    def _refusal(self, why: str) -> AttributeError:
        self._told.refused.append(why)
        return AttributeError(why)

    @property
    def layers(self) -> Any:  # type: ignore[override]
        raise self._refusal("keeps a state: reads it from `layers` of the cache")

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._told.appended.append(layer_idx)
        return APPEND(key_states, self._past, False), APPEND(value_states, self._past, True)

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        return self._past.shape[0]


def _argument(path: Any) -> str:
    """The name of an argument: "attention_mask", "position_embeddings.0"."""
    return keystr(path).replace("['", "").replace("']", "").replace("[", ".").replace("]", "")


@contextlib.contextmanager
def _attention_watched(layer: nn.Module, told: Observed) -> Iterator[None]:
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
