"""PyTorch's modes and transforms, under which an operation may be seen by others and a tensor may have no memory.

Under a TorchDispatchMode (counters of operations, FakeTensorMode), a TorchFunctionMode or a transform of torch.func,
kernels must not read tensors by address, and no code may look at their values. Nor may kernels compute where a library
counts the calls of torch.nn.functional.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Asked in each call of an op: 40 ns each.
dispatch_modes = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack
transform = torch._C._functorch.peek_interpreter_stack

LINEAR = F.linear  # counters of other libraries put a function of their own in its place
PLAIN = frozenset({Tensor, nn.Parameter})  # other classes may compute in their own way


class Transparent:
    """Base class of our own modes, under which kernels run as ever."""


class Operations(TorchFunctionMode):
    """Context in which PyTorch's operations compute, for tensors that kernels cannot read."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def is_any_on() -> bool:
    """Whether somebody's mode, transform or counter is active, apart from those of a graph that is traced."""
    if is_compiling():  # which cannot ask the rest
        return False
    if transform() is not None or F.linear is not LINEAR:
        return True
    modes: list[Any] = _get_current_dispatch_mode_stack() if dispatch_modes() else []
    modes += _get_current_function_mode_stack() if function_modes() else []
    return any(not isinstance(mode, (Transparent, DeviceContext)) for mode in modes)


def is_dispatched() -> bool:
    """Whether somebody's TorchDispatchMode may count operations; without any, it takes 100 ns."""
    return not is_compiling() and dispatch_modes() > 0 and is_any_on()


def is_traced() -> bool:
    """Whether the values of tensors must not be looked at."""
    return is_compiling() or is_any_on()


def is_plain(x: Tensor) -> bool:
    """Whether x is an ordinary tensor with memory."""
    return type(x) in PLAIN and not x.is_meta


def has_address(x: Tensor) -> bool:
    """Whether kernels may read x by its address."""
    return not is_traced() and is_plain(x)


def are_empty(tensors: Iterable[Tensor]) -> bool:
    """Whether a tensor is fake or on meta, or all that is made now is. Transforms hide which tensors they hold."""
    if transform() is not None:
        return False
    faked = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return faked or any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)


def kept(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keep the tensor that `make` gives for arguments. Under a mode, which may make it a fake one, it is not kept."""

    @cache
    @torch.inference_mode(False)
    def made(*args: Any) -> Tensor:
        return make(*args)

    @wraps(make)
    def tensor(*args: Any) -> Tensor:
        if dispatch_modes() or function_modes() or transform() is not None:
            return make(*args)
        return made(*args)

    return tensor
