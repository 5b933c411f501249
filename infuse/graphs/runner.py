"""GraphRunner: CUDA graphs of any callable, one for each signature of its arguments, captured at its third call.

    call 1, 2      run eagerly, so that libraries finish their set-up on first use
    call 3         arguments → static inputs → warm run, capture → replay → copies of the results
    call 4, ...    arguments → static inputs →                     replay → copies of the results

Results are copied, so later replays do not overwrite a caller's tensors. Gradients are not supported. The runner knows
nothing of models.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from infuse.graphs.capture import Backend, Captured, backend_for, without_autocast_cache
from infuse.graphs.masked import MaskedAssignments
from infuse.graphs.signature import Unsupported, blank, rebuilt, signature
from infuse.ground import interrupts, logs
from infuse.ground.device import device_of
from infuse.ground.errors import RankError

_EAGER_CALLS = 2
_OF_MODES = ("__torch_function__", "__torch_dispatch__")  # which pass on every call
_KNOWN_CALLS = 256  # most signatures to remember: calls with ever new lengths would add them without end


@dataclass
class _Entry:
    """The state of one signature: the number of calls and, once captured, the graph with its inputs and results."""

    calls: int = 0
    captured: Captured | None = None
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    result: Any = None
    eager: bool = False

    @property
    def nbytes(self) -> int:
        tensor_bytes = sum(tensor.nbytes for tensor in (*self.inputs, *self.outputs))
        return tensor_bytes + (self.captured.nbytes if self.captured is not None else 0)


class FirstError:
    """Callable that warns of the first error that it gets, and ignores all others."""

    def __init__(self, what: str):
        self._what, self._warned = what, False

    def __call__(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logs.warn(f"infuse: {self._what}: {where(error)}", stacklevel=8)


class GraphRunner:
    """Call `function` with one graph for each signature of its arguments. Calls from several threads are serialized.

    The key is everything about a call except its tensors' values: shapes, dtypes, devices, strides if not contiguous,
    other arguments, structure. `state` returns what the function depends on besides (addresses of its weights): if it
    changes, all graphs are dropped. Beyond `limit_bytes` or `limit_graphs` the least recently used graphs are dropped.

    Calls run eagerly if a key cannot describe their arguments or results (caches), if they change their arguments in
    place, or if capture fails; `warn` gets the error in the last two cases. `undone` is the context of the run before a
    capture, which a replay follows: it takes back what running twice would do twice.
    """

    def __init__(
        self,
        function: Callable,
        backend: Backend,
        *,
        limit_bytes: int = 1 << 30,
        limit_graphs: int = 64,
        state: Callable[[], Hashable] | None = None,
        warn: FirstError | None = None,
        undone: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.function, self.backend = function, backend
        self.limit_bytes, self.limit_graphs = limit_bytes, limit_graphs
        self._state_of = state or (lambda: None)
        self._state: Hashable = None
        self._undone = undone
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._warn = warn or FirstError("no CUDA graph could be captured, so calls run without")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's result, with a graph or without."""
        tensors: list[Tensor] = []
        key = None if self.backend.capturing() else _key_of(args, kwargs, tensors)
        if key is None:  # inside a larger capture, or arguments without a signature
            return self.function(*args, **kwargs)
        with self.backend.turn():
            entry = self._entry(key)
            if self._can_replay(entry, tensors, args, kwargs):
                return self._replayed(entry, tensors)
            result = self.function(*args, **kwargs)
            entry.eager = entry.eager or _key_of((result,), {}, []) is None
            return result

    def replay(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Replay the graph for these arguments, which the third call captures; None if there is none."""
        tensors: list[Tensor] = []
        key = _key_of(args, kwargs, tensors)
        if key is None:
            return None
        with self.backend.turn():
            entry = self._entry(key)
            return self._replayed(entry, tensors) if self._can_replay(entry, tensors, args, kwargs) else None

    def captured(self) -> int:
        """Number of captured graphs."""
        return sum(entry.captured is not None for entry in self._entries.values())

    def nbytes(self) -> int:
        """Device memory of the graphs, their inputs and results in bytes."""
        return sum(entry.nbytes for entry in self._entries.values())

    def clear(self) -> None:
        """Drop all graphs and free their memory."""
        with self.backend.turn():
            self._entries.clear()

    def standing(self) -> list[tuple]:
        """State that the next call depends on besides its arguments, as far as ranks can compare it."""
        with self.backend.turn():
            self._look()
        return [(min(e.calls, _EAGER_CALLS), e.captured is not None, e.eager) for e in self._entries.values()]

    def fitting(self) -> int:
        """Number of the most recent signatures that may be kept, which is all."""
        return len(self._entries)

    def keep(self, latest: int) -> None:
        """Drop all signatures but the `latest` most recent."""
        with self.backend.turn():
            while len(self._entries) > latest:
                self._entries.popitem(last=False)

    def _look(self) -> None:
        state = self._state_of()
        if state != self._state:
            self._entries.clear()
            self._state = state

    def _entry(self, key: Hashable) -> _Entry:
        self._look()
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        if len(self._entries) > _KNOWN_CALLS:
            self._entries.popitem(last=False)
        return entry

    def _can_replay(self, entry: _Entry, tensors: list[Tensor], args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Whether there is a graph. Captures it if the signature has been called often enough."""
        if entry.captured is not None:
            return True
        if entry.eager:
            return False
        entry.calls += 1
        return entry.calls > _EAGER_CALLS and self._capture(entry, tensors, args, kwargs)

    @interrupts.held_back()  # an entry has a graph, inputs and results, or none of these
    def _capture(self, entry: _Entry, tensors: list[Tensor], args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Capture and return whether it worked. A failed capture is no error: calls then run eagerly."""
        with torch.inference_mode(False), torch.no_grad():
            entry.inputs = [blank(tensor) for tensor in tensors]
            own_args, own_kwargs = rebuilt((args, kwargs), iter(entry.inputs))
            self._fill(entry, tensors)
            versions = [tensor._version for tensor in entry.inputs]
            run = partial(_run, self.function, own_args, own_kwargs)
            try:
                with self._undone():
                    self.backend.warm(run)
                if versions != [tensor._version for tensor in entry.inputs]:
                    raise RuntimeError("it changes its arguments in place")
                entry.captured, entry.result = self._captured_run(run)
                signature(entry.result, entry.outputs)
            except (RankError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # models can fail to be captured in any way
                entry.captured, entry.inputs, entry.outputs, entry.result, entry.eager = None, [], [], None, True
                if not isinstance(error, Unsupported):
                    self._warn(error)
                return False
        self._evict(entry)
        return True

    def _captured_run(self, run: Callable[[], Any]) -> tuple[Captured, Any]:
        """Capture `run`. Out of memory counts as a failed capture, because the eager run had enough."""
        try:
            with without_autocast_cache():
                return self.backend.capture(run)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(str(error)) from error

    def _replayed(self, entry: _Entry, tensors: list[Tensor]) -> Any:
        assert entry.captured is not None
        with torch.no_grad():
            self._fill(entry, tensors)
            entry.captured.replay()
            return rebuilt(entry.result, iter([tensor.clone() for tensor in entry.outputs]))

    def _fill(self, entry: _Entry, tensors: list[Tensor]) -> None:
        for static, tensor in zip(entry.inputs, tensors, strict=True):
            static.copy_(tensor, non_blocking=True)

    def _evict(self, newest: _Entry) -> None:
        graphs = [(key, entry) for key, entry in self._entries.items() if entry.captured is not None]
        total_bytes = sum(entry.nbytes for _, entry in graphs)
        for key, entry in graphs:
            if entry is newest or (total_bytes <= self.limit_bytes and len(graphs) <= self.limit_graphs):
                break
            del self._entries[key]
            graphs, total_bytes = graphs[1:], total_bytes - entry.nbytes


class LocalGraph(nn.Module):
    """Wrap one hot module of a model that cannot be captured as a whole, and replay its graphs.

    Arguments and results are those of `module`. GraphRunner describes which calls are captured and when.
    """

    def __init__(self, module: nn.Module, backend: Backend | None = None, *, limit_bytes: int = 1 << 30):
        super().__init__()
        self.module = module
        self._backend, self._limit_bytes = backend, limit_bytes
        self._graphs: GraphRunner | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call `module`, by a graph if possible. On devices without graphs it runs eagerly."""
        if self._graphs is None:
            device = device_of(self.module)
            backend = self._backend or backend_for(device)
            if backend is None:
                return self.module(*args, **kwargs)
            self._graphs = GraphRunner(
                self.module, backend, limit_bytes=self._limit_bytes, state=WeightAddresses(self.module)
            )
        return self._graphs(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:  # a copy captures its own graphs
        return {**vars(self), "_graphs": None}


class WeightAddresses:
    """Address, dtype and device of a module's first and last weight, and its training flag.

    `.to()`, `.half()` and the like change them.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        # Looked up once: visiting all weights at each call would take longer than the call.
        self._ends: tuple | None = None

    def __call__(self) -> Hashable:
        if self._ends is None:
            parameters = [(owner, name, p) for owner in self._module.modules() for name, p in owner._parameters.items()]
            owners = [(owner, name) for owner, name, p in parameters if p is not None]
            self._ends = (owners[0], owners[-1]) if owners else ()
        ends = [owner._parameters[name] for owner, name in self._ends]
        return (self._module.training, *((p.data_ptr(), p.dtype, p.device) for p in ends if p is not None))


def where(error: BaseException) -> str:
    """Describe the error in one line, with the innermost line of code that raised it, outside PyTorch and its modes."""
    stack = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in stack if "/torch/" not in frame.filename.replace("\\", "/")]
    frames = [frame for frame in theirs if frame.name not in _OF_MODES]
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    if not frames:
        return text
    last = frames[-1]
    return f"{text} (at {last.filename.rpartition('/')[2]}:{last.lineno} in {last.name}: {last.line})"


def _run(function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
    with MaskedAssignments():
        return function(*args, **kwargs)


def _key_of(args: tuple, kwargs: Mapping[str, Any], tensors: list[Tensor]) -> Hashable | None:
    """Return the key of a call and append its tensors to `tensors`; None if it has no signature."""
    try:
        return signature((args, kwargs), tensors), modes()
    except Unsupported:
        return None


def modes() -> Hashable:
    """The modes that change which kernels a call runs: autocast's dtype."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
