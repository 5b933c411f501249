"""A recorder in the place of CUDA graphs, on the CPU: it keeps what a graph keeps, and loses what a graph loses.

- A capture runs nothing: what it wrote to is as before, random numbers too, and its results are rubbish until the first
replay.
- A replay runs the recorded operations on the same memory; Python is not run again, so numbers of the host are frozen.
- What a capture on a device forbids raises here as well: reading a value on the host, shapes that depend on values,
data of the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infuse.ground.modes import Transparent

RUBBISH = 1 << 40  # of integers: no index, no token, no length
_FORBIDDEN = {
    "_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "unique_dim", "_unique",
    "_unique2", "unique_consecutive", "multinomial", "repeat_interleave",
}  # fmt: skip


@dataclass
class Operation:
    """One recorded call; `outputs` are the tensors that it made, which a replay makes again in the same place."""

    function: Any
    args: tuple
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    position: list[int]


class _Recorder(Transparent, TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.made: set[int] = set()  # storages that the capture made
        self.before: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # storages that it found and wrote to: as bytes, now and before

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.partition("::")[2]
        reads_mask = name in ("index", "index_put_", "index_put") and any(
            t.dtype == torch.bool for t in _tensors(args[1])
        )
        from_host = (
            name == "lift_fresh" and args[0].dim() > 0
        )  # torch.tensor([...]); numbers alone travel as arguments of kernels
        known = name == "repeat_interleave" and isinstance(args[1] if len(args) > 1 else None, int)
        if (name in _FORBIDDEN and not known) or reads_mask or from_host:
            raise RuntimeError(f"aten::{name} is not permitted when stream is capturing")
        for tensor in _written(function, args, kwargs):
            self._remember(tensor)
        given = {_place(tensor) for tensor in _tensors((args, kwargs))}
        result = function(*args, **kwargs)
        leaves = tree_leaves(result)
        position = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and _place(leaf) not in given]
        outputs = [leaves[i] for i in position]
        self.made |= {_place(tensor) for tensor in outputs}
        if outputs or _written(function, args, kwargs):  # else it is a view of what there is
            self.operations.append(Operation(function, args, kwargs, outputs, position))
        return result

    def _remember(self, tensor: Tensor) -> None:
        place = _place(tensor)
        if place not in self.made and place not in self.before:
            whole = _bytes(tensor)
            self.before[place] = (whole, whole.clone())


@dataclass
class FakeCaptured:
    operations: list[Operation]
    nbytes: int
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        for operation in self.operations:
            result = tree_leaves(operation.function(*operation.args, **operation.kwargs))
            for i, tensor in zip(operation.position, operation.outputs, strict=True):
                tensor.copy_(result[i])


@dataclass
class FakeBackend:
    """`captures`, `replays` (of all), `warmed`: what happened so far. `fail` makes each capture raise."""

    captures: list[FakeCaptured] = field(default_factory=list)
    warmed: int = 0
    cos_sin: int = 0
    fail: Exception | None = None
    _open: bool = False
    _lock: Any = field(default_factory=threading.RLock)

    def __deepcopy__(self, memo: dict) -> FakeBackend:
        return self  # a copied model's captures are counted here as well

    @property
    def replays(self) -> int:
        return sum(captured.replays for captured in self.captures)

    def warm(self, run: Callable[[], Any]) -> Any:
        self.warmed += 1
        return run()

    def capture(self, run: Callable[[], Any]) -> tuple[FakeCaptured, Any]:
        assert not self._open, "a capture inside a capture"
        random, recorder = torch.get_rng_state(), _Recorder()
        self._open = True
        try:
            if self.fail is not None:
                raise self.fail
            captured = patch("infuse.diffusion.layers.derived._is_captured", lambda tensor: True)
            with recorder, captured, patch("torch.cuda.is_current_stream_capturing", lambda: True):
                result = run()  # models ask for it, and then do not look at their masks
        finally:
            self._open = False
            torch.set_rng_state(random)
            for whole, before in recorder.before.values():
                whole.copy_(before)
        for operation in recorder.operations:
            for tensor in operation.outputs:
                spoil(tensor)
        captured = FakeCaptured(
            recorder.operations, sum(t.nbytes for operation in recorder.operations for t in operation.outputs)
        )
        self.captures.append(captured)
        return captured, result

    def capturing(self) -> bool:
        return self._open

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._lock:
            self.cos_sin += 1
            yield


def forbidding() -> TorchDispatchMode:
    """Context in which what a capture forbids raises RuntimeError."""
    return _Recorder()


@dataclass
class RunAgain:
    """Replay the whole captured call, for kernels that no recorder sees, such as Triton's under its interpreter."""

    run: Callable[[], Any]
    result: list[Tensor]
    nbytes: int = 0
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        for tensor, again in zip(self.result, _tensors(self.run()), strict=True):
            tensor.copy_(again)


class RunAgainBackend(FakeBackend):
    """Runs what it is to capture, at once and at each replay."""

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        result = run()
        self.captures.append(RunAgain(run, _tensors(result)))  # type: ignore[arg-type]
        return self.captures[-1], result


def spoil(tensor: Tensor) -> None:
    """Fill with what nothing sound computes with."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(min(RUBBISH, torch.iinfo(tensor.dtype).max))


def _written(function: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes to, by its schema."""
    found = []
    for i, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(kwargs.get(argument.name, args[i] if i < len(args) else None))
    return found


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(tensor.untyped_storage())
