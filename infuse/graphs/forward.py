"""Forward: replaces a module's `forward` on devices with graphs. Replays graphs and explains out-of-memory errors."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import CodeType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from infuse.cache.kv_cache import pair_of
from infuse.graphs.capture import Backend
from infuse.graphs.graphed_cache import GraphedCache
from infuse.graphs.runner import GraphRunner, WeightAddresses
from infuse.graphs.signature import Unsupported, rebuilt, signature
from infuse.ground.authors import LIBRARIES, are_users, users_methods
from infuse.ground.cache_names import cache_in
from infuse.ground.device import device_of
from infuse.ground.errors import OutOfMemory
from infuse.ground.instance_method import InstanceMethod, unbound
from infuse.ground.modes import is_traced
from infuse.layers.gradient import refusing
from infuse.layers.linear import has_global_hooks
from infuse.parallel.group import Group


class Forward(InstanceMethod):
    """Looks like `module.forward`. Copied and pickled with the module, but without the graphs.

    `own` is the forward that was set on the instance before; None: the class's. Without `backend` nothing is
    captured. `run` is the forward without graphs.
    """

    __slots__ = ("_backend", "_hooks", "_is_users", "_judged", "_module", "_places", "graphs", "own")

    def __init__(self, module: nn.Module, forward: Callable | None, backend: Backend | None):
        super().__init__(type(module).forward, module, "forward")
        self._module, self.own, self._backend = module, forward, backend  # torch.compile reads no `__self__`
        self._places = WeightAddresses(module)
        self.graphs = None if backend is None else GraphRunner(self._run, backend, state=self._state)
        self._judged: Callable | None = None  # the class's forward that `_is_users` describes
        self._is_users = False
        self._hooks: list[dict[int, Callable]] | None = None  # of each module inside

    @property
    def run(self) -> Callable:
        """The forward without graphs: the class's as it is now."""
        return self.own or MethodType(type(self._module).forward, self._module)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward without graphs, as torch.compile can trace it."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)

    def _state(self) -> tuple[Any, ...]:
        return self._places(), type(self._module).forward

    def _calls(self) -> bool:
        """Whether every call must run the module: a user's forward or hook has to run, inside of it, too."""
        if self.graphs is None:
            return True
        forward = type(self._module).forward
        if forward is not self._judged:
            methods = users_methods(type(self._module), LIBRARIES - {"torch"})
            self._is_users, self._judged = any(name.endswith(".forward") for name in methods), forward
        if self._hooks is None:
            inside = [part for part in self._module.modules() if part is not self._module]
            self._hooks = [hooks for part in inside for hooks in (part._forward_pre_hooks, part._forward_hooks)]
        return self._is_users or has_global_hooks() or (any(self._hooks) and are_users(self._hooks))

    @property
    def replaced(self) -> Callable[..., Any]:
        return super().replaced if self.own is None else unbound(self.own)

    @property
    def __code__(self) -> CodeType:
        """The code object of this forward, which torch.export reads."""
        return type(self).__call__.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_traced():  # torch.compile makes its own graphs, and modes see no kernels in a replay
            return self._run(*args, **kwargs)
        try:
            cache = cache_in(kwargs)
            cache = cache if (pair := pair_of(cache)) is None else pair.self_attention_cache
            if isinstance(cache, GraphedCache) and (output := cache.replay(self.run, args, kwargs)) is not None:
                return output
            if self._calls():
                return self.run(*args, **kwargs)
            assert self.graphs is not None
            output = self.graphs(*args, **kwargs)
            return self._refusing(output) if torch.is_grad_enabled() else output
        except torch.OutOfMemoryError as error:
            raise explained(error, self._module, self.clear) from (None if isinstance(error, OutOfMemory) else error)

    def _refusing(self, output: Any) -> Any:
        """Make the backward pass of a graph's output raise if autograd would have recorded the module's own."""
        if all(not parameter.requires_grad for parameter in self._module.parameters()):
            return output
        tensors: list[Tensor] = []
        try:
            signature(output, tensors)
        except Unsupported:  # it contains a cache, so it is not from a graph
            return output
        name = type(self._module).__name__
        made = (
            refusing(tensor, tensor, name) if tensor.is_floating_point() and not tensor.requires_grad else tensor
            for tensor in tensors
        )
        return rebuilt(output, made)

    def clear(self) -> None:
        """Free the graphs' memory."""
        if self.graphs is not None:
            self.graphs.clear()

    def __reduce__(self) -> tuple:
        return type(self), (self._module, self.own, self._backend)

    def bound_to(self, instance: Any) -> Forward:
        return type(self)(instance, self.own, self._backend)


def explained(error: torch.OutOfMemoryError, module: nn.Module, *clear: Callable[[], None]) -> OutOfMemory:
    """Return the OutOfMemory to raise, after calling each `clear` and dropping the tensors in the traceback's frames.

    Abort the group, so that the collective in which other ranks wait raises RankError (see Group.abort).
    """
    for forget in clear:
        forget()
    if isinstance(error, OutOfMemory):  # raised by an inner module
        return error
    traceback.clear_frames(error.__traceback__)
    device = device_of(module)
    free_memory = ""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        free_memory = f" ({free_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB are free again)"
    weights_bytes = sum(p.nbytes for p in module.parameters())
    said = " ".join(str(error).split())[:120]
    group: Group = module._infuse.group  # type: ignore[assignment, union-attr]
    together = group.abort("no memory left on the device")
    usable = "The engine can be used on." if together else "The process group failed: start the ranks again."
    return OutOfMemory(
        f"{device} has no memory left for this call: {said}{free_memory}; the weights take "
        f"{weights_bytes / 1e9:.1f} GB. {usable} Give fewer rows or tokens at a time, lower max_out_tokens or "
        'max_new_tokens, or quantize the weights (quant="int8" or "int4")'
    )
