"""A decode step without the outer modules of transformers, where all that they do is to hand one module's output to the
next.

    ids -------> embedding --> block --> block --> ... --> norm --> head --> logits
    positions -> rotary ---------^---------^

Two ordinary steps are recorded. Where both take the same course, and nothing in it comes from anywhere else (a mask, a
scale, learned positions that the outer module adds), the next steps call the modules of the course alone; as modules,
so that their hooks are heard. As soon as someone listens to an outer module, or changes it, steps are ordinary ones
again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from infuse import interrupts
from infuse.generate.course import Course, Record
from infuse.layers.cache import KVCache
from infuse.layers.linear import all_are_heard

_STEP = ("input_ids", "position_ids", "past_key_values")  # a course starts from these
_WINDOWS = ("sliding_window", "attention_chunk_size")  # of keys: from so many on transformers makes a mask for a step
_CALL = nn.Module.__call__


class Straight:
    """The logits of decode steps of `model`, whose inputs differ from step to step in ids and positions alone; there is
    no mask.

    `watched` tells whether a caller's hooks are on a module.
    """

    def __init__(self, model: nn.Module, watched: Callable[[nn.Module], bool]):
        self._model = model
        self._outer: list[nn.Module] = []
        self._inner: list[nn.Module] = []  # the outermost of those that are called in any case
        self._divide(model)
        self._faces = [_face(module) for module in self._outer]
        self._course: Course | None = None
        self._follows_course = False
        self._may = bool(self._outer) and not any(map(_is_compiled, self._inner))
        self._may = self._may and all(_hands_on(module) and not watched(module) for module in self._outer)
        configs = [module.config for module in self._outer if isinstance(module, PreTrainedModel)]
        windows = [getattr(config, name, None) for config in configs for name in _WINDOWS]
        self._window: int = min((window for window in windows if window), default=1 << 62)

    def _divide(self, module: nn.Module) -> None:
        if not isinstance(module, (PreTrainedModel, nn.ModuleList)):
            self._inner.append(module)
            return
        self._outer.append(module)
        for child in module.children():
            self._divide(child)

    def logits(self, inputs: dict[str, Any]) -> Tensor:
        """[B, T, vocabulary]. `inputs` are the model's arguments."""
        self._may = self._may and self._is_unchanged(inputs)
        if not self._may:
            return self._model(**inputs, return_dict=True).logits
        if self._course is not None and self._follows_course:
            return self._course.run(*[inputs[name] for name in _STEP])
        return self._recorded(inputs)

    def _is_unchanged(self, inputs: dict[str, Any]) -> bool:
        """Whether the outer modules would do what they did: they are as they were, nobody listens, and the cache asks
        for no mask.
        """
        cache = inputs.get("past_key_values")
        if (
            type(cache) is not KVCache
            or not cache.layers
            or cache.layers[0].place is not None
            or inputs.get("position_ids") is None
        ):
            return False
        if cache.layers[0].length + inputs["input_ids"].shape[1] >= self._window:
            return False
        return not all_are_heard() and [_face(module) for module in self._outer] == self._faces

    @interrupts.held_back()
    def _recorded(self, inputs: dict[str, Any]) -> Tensor:
        """The logits of an ordinary step, whose course is noted."""
        record, handles = Record(*[inputs[name] for name in _STEP]), []
        try:
            for module in self._inner:
                handles.append(module.register_forward_pre_hook(record.before, prepend=True, with_kwargs=True))
                handles.append(module.register_forward_hook(record.after))
            logits = self._model(**inputs, return_dict=True).logits
        finally:
            record.close()  # first: nothing is left to note, should one of the hooks stay
            for handle in handles:
                handle.remove()
        before, self._course = self._course, record.course(logits)
        self._follows_course = self._course is not None and self._course == before
        self._may = self._course is not None and before in (
            None,
            self._course,
        )  # two that differ: it is not only ids and positions
        return logits


def _face(module: nn.Module) -> tuple:
    """What shows that a module is as it was: its parts and how many of them it uses, its hooks, what is called."""
    own, kind = vars(module), type(module)
    called = kind.forward, kind.__call__, own.get("forward"), own.get("_compiled_call_impl")
    layers = vars(own["config"]).get("num_hidden_layers") if "config" in own else None
    return (
        *own["_modules"].values(),
        tuple(own["_forward_pre_hooks"]),
        tuple(own["_forward_hooks"]),
        *called,
        own["training"],
        layers,
    )


def _hands_on(module: nn.Module) -> bool:
    """Whether a module's forward is transformers' own, with all that is wrapped around it."""
    if isinstance(module, nn.ModuleList):
        return True
    forward: Any = type(module).forward
    if type(module).__call__ is not _CALL or "forward" in vars(module) or _is_compiled(module):
        return False
    while forward is not None:  # by where it was made, since a wrapper repeats the name of what it wraps
        if not str(getattr(forward, "__globals__", {}).get("__name__")).startswith("transformers."):
            return False
        forward = getattr(forward, "__wrapped__", None)
    return True


def _is_compiled(module: nn.Module) -> bool:
    """Whether hooks would make it be compiled again, or cannot be put on it."""
    return (
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or isinstance(module, torch.jit.ScriptModule)
    )
