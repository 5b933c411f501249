"""What a test may leave behind for those after it: how it is read, and how it is put back."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

# Libraries set these when they are first imported or used, and mean them to stay.
OF_LIBRARIES = (b"PYTEST_", b"KMP_", b"TORCHINDUCTOR_", b"_TORCHINDUCTOR_", b"TOKENIZERS_PARALLELISM")


@dataclass(frozen=True)
class Shared:
    """One thing that all tests of a process share. `put_back` sets it to what `read` gave."""

    name: str
    read: Callable[[], Any]
    put_back: Callable[[Any], object]


def _set_device(before: torch.device) -> None:
    torch.set_default_device(None if before == torch.device("cpu") else before)  # a mode around every call otherwise


def _registry(text: str, module: str, name: str) -> Shared:
    """A list or dict of a module. What is empty, or not imported yet, reads as None."""

    def table() -> Any:
        return getattr(sys.modules.get(module), name, None)

    def put_back(before: Any) -> None:
        now = table()
        now.clear()
        (now.extend if isinstance(now, list) else now.update)(before or ())

    return Shared(text, lambda: table().copy() if table() else None, put_back)


SHARED = (
    Shared("the grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Shared("inference mode", torch.is_inference_mode_enabled, lambda before: None),  # nothing ends what another began
    Shared("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Shared("the default device", torch.get_default_device, _set_device),
    Shared("the number of threads", torch.get_num_threads, torch.set_num_threads),
    Shared("the precision of float32 products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Shared(
        "the use of deterministic algorithms",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    Shared("autocast on CPUs", partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    Shared("the working directory", os.getcwd, os.chdir),
    Shared("the handler of Ctrl-C", partial(signal.getsignal, signal.SIGINT), partial(signal.signal, signal.SIGINT)),
    _registry("the registered specs", "infuse.architectures", "_registered"),
    _registry("the registered parts", "infuse.layers.parts", "_registered"),
    _registry("the registered layouts of checkpoints", "infuse.weights.foreign", "_registered"),
)


def _environment() -> dict[bytes, bytes]:
    """The variables that tests may not change, undecoded: decoding takes 20 us."""
    found: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    return {name: value for name, value in found.items() if not name.startswith(OF_LIBRARIES)}


def _set_environment(before: dict[bytes, bytes]) -> None:
    for name in _environment().keys() - before.keys():
        del os.environb[name]
    os.environb.update(before)


@contextmanager
def found_and_put_back() -> Iterator[list[str]]:
    """Put back what changes in the block, and tell it: the list has one line for each change when the block is left."""
    before, variables = [shared.read() for shared in SHARED], _environment()
    changes: list[str] = []
    yield changes
    for shared, old in zip(SHARED, before, strict=True):
        if (new := shared.read()) != old:
            changes.append(f"{shared.name}: was {old}, is {new}")
            shared.put_back(old)
    if (now := _environment()) != variables:
        changed = {name for name in now.keys() | variables.keys() if now.get(name) != variables.get(name)}
        changes += [f"the environment variable {name.decode()}" for name in sorted(changed)]
        _set_environment(variables)
