"""Decode steps that compute a model's parts without its own forward: embedding, all blocks, norm, head, in one call.

A user's own class or patch is called in each step. What a model computes between its parts is its own affair, so each
answer's first step is traced: every part must have got the very tensor that the part before it returned, but for a
number of the config by which the embedding or the logits are multiplied. The first such step of a model is also
computed again, and must give the same logits. A mask is the model's affair, too: from the
length on at which a window may hide tokens, the model is called.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from infuse import interrupts
from infuse.authors import LibraryCalls
from infuse.cache_names import CACHE_NAMES, cache_in
from infuse.layers.block import Block
from infuse.layers.cache import KVCache
from infuse.layers.contract import NEUTRAL
from infuse.layers.inputs import Inputs
from infuse.layers.linear import has_global_hooks, has_no_hooks
from infuse.layers.recurrent import Recurrent
from infuse.layers.stack import Answer, StackCall
from infuse.ops.cpu.program import CosSin
from infuse.temporary_hooks import TemporaryHooks

# Rotary positions that depend on their own index alone are computed for many tokens at once: the module's operations
# take up to 0.1 ms of a step, because weights have driven their code out of the caches.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_TABLE_TOKENS = 64
_FACTORS = ("multiplier", "scale", "scaling")  # in names of config keys
_CALL_SECONDS = 0.03  # of the steps in one call


@dataclass
class DirectSteps:
    """Trace decode steps of one model. A copy of the model traces its own."""

    is_ours: Callable[[Callable[..., Any]], bool]  # whether a pre-hook on the model may be left out
    stack: StackCall | None = None
    modules: list[tuple[nn.Module, type, Any]] = field(default_factory=list)  # which were `proven`, and their forwards
    proven: bool = False
    are_librarys: LibraryCalls = field(default_factory=LibraryCalls)

    def traced(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Any, DirectStep | None]:
        """Call the model for one new token of each row, and find how to make the next such steps without it."""
        parts = None if inputs.get("attention_mask") is not None else _Parts.of(model, self.is_ours)
        if parts is None or not self.are_librarys((model, *parts.modules)):
            return model(**inputs, return_dict=True), None
        calls: list[_Call] = []

        def note(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if not (args and output is args[0]):  # dropout returns its input
                calls.append(_Call(module, args, kwargs, output))

        cache = cache_in(inputs)
        if isinstance(cache, KVCache):
            cache.snapshot()
        with interrupts.held_back(), TemporaryHooks() as hooks:  # one step long, so that no hook is left behind
            for module in parts.listed:
                hooks.after(module, note, with_kwargs=True)
            outputs = model(**inputs, return_dict=True)
        step = self._step(parts, calls, inputs, outputs)
        if step is None or self.proven:
            return outputs, step
        before = step.cache.layers[0].length - 1
        step.cache.rewind(before)
        again = step(inputs["input_ids"])
        if again is not None and torch.equal(again, outputs.logits):
            self.proven = True
            return outputs, step
        step.cache.rewind(before)
        return model(**inputs, return_dict=True), None  # which writes its keys and values again

    def _step(self, parts: _Parts, calls: list[_Call], inputs: Mapping[str, Any], outputs: Any) -> DirectStep | None:
        count, cache, positions = len(parts.blocks), cache_in(inputs), inputs.get("position_ids")
        turning = len(calls) - count - 3  # calls between the embedding's and the blocks'
        if turning not in (0, 1) or type(cache) is not KVCache or (turning and not isinstance(positions, Tensor)):
            return None
        embedded, turned, blocks, (normed, headed) = (
            calls[0],
            calls[1] if turning else None,
            calls[1 + turning : -2],
            calls[-2:],
        )
        if not embedded.is_of(parts.embedding, inputs["input_ids"]) or not headed.is_of(parts.head, normed.output):
            return None
        x: Any = blocks[0].args[0] if blocks[0].args else blocks[0].kwargs.get("hidden_states")
        around = Around.of(embedded.output, x, headed.output, outputs.logits, parts.above[0].config)
        if around is None:
            return None
        begun = x
        for block, call in zip(parts.blocks, blocks, strict=True):
            if call.module is not block or not _follows(call, x, cache, None if turned is None else turned.output):
                return None
            x = call.output[0] if isinstance(call.output, tuple) else call.output
        if not normed.is_of(normed.module, x):
            return None
        turning_by = None
        if turned is not None and isinstance(positions, Tensor):
            turning_by = Turning.of(turned, (embedded.output, begun), positions)
        if turned is not None and turning_by is None:
            return None
        used = (*parts.above, parts.embedding, *parts.blocks, normed.module, parts.head)
        modules = [(each, type(each), type(each).forward) for each in used]
        alike = self.stack is not None and self.stack.around == around.steps
        if self.modules != modules or not alike or self.stack.dtype is not embedded.output.dtype:  # type: ignore[union-attr]
            self.stack = StackCall.of(
                parts.embedding, parts.blocks, normed.module, parts.head, embedded.output, around.steps
            )
            self.modules, self.proven = modules, False
        answer = None if self.stack is None else self.stack.begin(embedded.output, cache)
        if self.stack is None or answer is None:
            return None
        step = DirectStep(parts, self.stack, answer, normed.module, turning_by, around, cache, embedded.output)
        step.end_tokens = _least_window(parts.above[0].config)
        return step

    def __getstate__(self) -> dict[str, Any]:
        return {"is_ours": self.is_ours, "stack": None, "modules": [], "proven": False, "are_librarys": LibraryCalls()}


class DirectStep:
    """Make the answer's next steps as the traced one was made: each is one token later than the step before it."""

    def __init__(
        self, parts: _Parts, stack: StackCall, answer: Answer, norm: nn.Module, turning: Turning | None,
        around: Around, cache: KVCache, embedded: Tensor,
    ):  # fmt: skip
        self.cache = cache
        self._parts, self._stack, self._answer, self._norm = parts, stack, answer, norm
        self._turning, self._around, self._embedded = turning, around, embedded
        self._first = answer.length - 1  # index of the traced step's token
        self._table: tuple[int, CosSin] | None = None  # for many tokens, and how many come before them
        self._seconds = math.inf  # that a token took
        self._hooks = _hooks_ever()
        self.end_tokens: float = math.inf  # length of the cache before which the model passes no mask

    def __call__(self, ids_BT: Tensor) -> Tensor | None:
        """The logits [B, 1, vocabulary] for ids [B, 1]. None, with nothing changed, if the model has to be called."""
        if not self._goes_on():
            return None
        answer = self._answer
        cos_sin, _ = self._cos_sin(ids_BT)
        y = answer.step(
            ids_BT if answer.takes_ids else self._around.begun(self._parts.embedding.forward(ids_BT)), cos_sin
        )
        if y is None:
            return None
        if answer.gives_logits:
            return self._around.widened(y)
        return self._around.ended(self._parts.head.forward(self._norm.forward(y)))

    def tokens(self, ids_BT: Tensor, count: int, ends: Sequence[int]) -> Tensor | None:
        """The likeliest tokens [B, 1 to count] of the next steps; none follow a step that gives one of `ends`.

        As many as take about 30 ms, after which a signal is heard. None, with nothing changed, if steps give no
        logits, or if the model has to be called.
        """
        if not self._goes_on():
            return None
        cos_sin, turned = self._cos_sin(ids_BT)
        before_window = self.end_tokens - 1 - self._answer.length
        count = int(max(1, min(count, turned, before_window, _CALL_SECONDS / self._seconds)))
        begun = time.perf_counter()
        tokens = self._answer.tokens(ids_BT, cos_sin, count, ends)
        if tokens is not None:
            self._seconds = (time.perf_counter() - begun) / tokens.shape[1]
        return tokens

    def _goes_on(self) -> bool:
        """Whether another step may be made so."""
        if _hooks_ever() != self._hooks or not self._parts.are_in_place():
            return False
        return self._answer.length + 1 < self.end_tokens

    def _cos_sin(self, ids_BT: Tensor) -> tuple[CosSin, float]:
        """The rotary positions of this step's token and of those after it, and of how many tokens these are."""
        turning = self._turning
        if turning is None:
            return CosSin(), math.inf
        step = self._answer.length - self._first
        if not turning.by_index:
            return self._turned_at(self._parts.embedding.forward(ids_BT), turning.positions + step), 1
        index = step % _TABLE_TOKENS
        if self._table is None or self._table[0] != step - index:
            tokens = torch.arange(step - index, step - index + _TABLE_TOKENS, device=ids_BT.device)
            self._table = step - index, self._turned_at(self._embedded, turning.positions + tokens)
        table = self._table[1]
        return CosSin(table.cos, table.sin, index), _TABLE_TOKENS - index

    def _turned_at(self, x: Tensor, positions: Tensor) -> CosSin:
        """The rotary positions that the model's own module gives for x at `positions` [..., B or 1, T]."""
        assert self._turning is not None
        cos_sin = self._turning.at(x, positions)
        cos_sin = self._stack.cos_sin(Inputs(None, self.cache, cos_sin, positions, None, None, False, 0))
        return CosSin() if cos_sin is None else CosSin(*cos_sin)


@dataclass(frozen=True)
class Around:
    """What the model does before its blocks and after its head: `begin` multiplies the embedding, `end` the logits, or
    divides them; `widens`: logits become float32.
    """

    begin: float = 1.0
    end: float = 1.0
    divides: bool = False
    widens: bool = False

    @classmethod
    def of(cls, embedded: Tensor, x: Any, made: Tensor, logits: Tensor, config: Any) -> Around | None:
        """Find it from the values of one step, by the factors in the config.

        None if it does something else, or if these values do not tell which factor it is: those of a row of zeros.
        """
        factors = [factor for factor in dict.fromkeys(_factors(config)) if factor != 1.0]
        begins = [1.0] if x is embedded else [factor for factor in factors if _equal(x, embedded * factor)]
        if x is not embedded and _equal(x, embedded):
            begins.append(1.0)
        ends = [cls(), *(cls(end=factor, divides=divides) for divides in (False, True) for factor in factors)]
        if logits is made:
            ends = ends[:1]
        else:
            widens = logits.dtype is not made.dtype
            ends = [end for each in ends if _equal(logits, (end := replace(each, widens=widens)).ended(made))]
        return replace(ends[0], begin=begins[0]) if len(begins) == len(ends) == 1 else None

    @property
    def steps(self) -> tuple[float, float, bool]:
        """What the stack does of it."""
        return self.begin, self.end, self.divides

    def begun(self, embedded: Tensor) -> Tensor:
        return embedded if self.begin == 1.0 else embedded * self.begin

    def ended(self, logits: Tensor) -> Tensor:
        if self.end != 1.0:
            logits = logits / self.end if self.divides else logits * self.end
        return self.widened(logits)

    def widened(self, logits: Tensor) -> Tensor:
        return logits.float() if self.widens else logits


def _equal(found: Any, wanted: Tensor) -> bool:
    return isinstance(found, Tensor) and found.dtype is wanted.dtype and torch.equal(found, wanted)


def _factors(config: Any) -> Iterator[float]:
    """The factors that a config and those inside it name."""
    for name, value in vars(config).items():
        if hasattr(value, "model_type"):
            yield from _factors(value)
        elif any(word in name for word in _FACTORS) and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield float(value)


@dataclass(frozen=True)
class Turning:
    """The call of the module that makes rotary positions, and which of its arguments are the values of a step.

    `positions` [..., B or 1, 1] are the step's. `by_index`: those of many tokens can be made at once.
    """

    call: _Call
    x: Tensor
    positions: Tensor

    @classmethod
    def of(cls, call: _Call, values: Sequence[Tensor], positions: Tensor) -> Turning | None:
        """None unless the module was called with one of the values and the positions, and with no other tensor."""
        given = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]
        x = next((value for value in given if any(value is each for each in values)), None)
        others = [value for value in given if value is not x]
        if x is None or len(others) != 1:
            return None
        # Qwen 3.5 has three rows of positions, which are alike for text.
        told = others[0]
        alike = told is positions or (told.dim() > positions.dim() and bool((told == positions).all()))
        return cls(call, x, told) if alike else None

    @property
    def by_index(self) -> bool:
        return getattr(self.call.module, "rope_type", None) in _STATIC_ROPE

    def at(self, x: Tensor, positions: Tensor) -> Any:
        return self.call.repeated({id(self.x): x, id(self.positions): positions})


def _least_window(config: Any) -> float:
    """The smallest window, or chunk that tokens attend to, in a config and those inside it."""
    inside = [_least_window(value) for value in vars(config).values() if hasattr(value, "model_type")]
    # Qwen's max_window_layers and Cohere's sliding_window_pattern count layers; state spaces compute prompts by chunks.
    of_tokens = {
        name: value
        for name, value in vars(config).items()
        if not name.endswith(("layers", "pattern")) and name not in ("mamba_chunk_size", "chunk_size")
    }
    named = [value for name, value in of_tokens.items() if "window" in name or "chunk" in name]
    sizes = [value for value in named if isinstance(value, int) and value > 0 and not isinstance(value, bool)]
    return min([math.inf, *inside, *sizes])


def _hooks_ever() -> int:
    """How many hooks were ever put on modules: looking at those of each would take 0.05 ms in a step."""
    return RemovableHandle.next_id


@dataclass(frozen=True)
class _Parts:
    """The modules that a model calls, from its own children down to its blocks, and where they are."""

    embedding: nn.Module
    head: nn.Module
    blocks: list[Any]
    listed: list[nn.Module]  # called by the model: `blocks`, and the modules beside their list
    above: list[nn.Module]  # the model, and all modules down to the one that owns that list
    owners: list[dict[str, Any]]  # of all modules but the model: their owner's modules,
    names: list[str]  # their names there,
    modules: list[nn.Module]  # themselves,
    attributes: list[dict[str, Any]]  # and theirs

    @classmethod
    def of(cls, model: Any, is_ours: Callable[[Callable[..., Any]], bool]) -> _Parts | None:
        """None if the model has no stack of blocks, or if a hook may hear a module."""
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        above = _down_to_blocks(model)
        if above is None or embedding is None or head is None:
            return None
        *above, layers = above
        blocks = list(layers.children())
        children = [child for child in above[-1].children() if child is not layers]
        if head not in (found := [*children, *above[0].children()]) or embedding not in found:
            return None
        listed = [*children, *([] if head in children else [head]), *blocks]
        path = [*above[1:], layers]
        modules = [*path, *listed]
        owned = {
            id(child): (owner._modules, name) for owner in (*above, layers) for name, child in owner._modules.items()
        }
        if model._forward_hooks or not all(map(is_ours, model._forward_pre_hooks.values())) or has_global_hooks():
            return None
        if not all(map(has_no_hooks, modules)) or any(each.training for each in (model, *modules)):
            return None
        places = [owned[id(module)] for module in modules]
        parts = cls(
            embedding, head, blocks, listed, above, [owner for owner, _ in places], [name for _, name in places],
            modules, [module.__dict__ for module in modules],
        )  # fmt: skip
        return parts if parts.are_in_place() else None

    def are_in_place(self) -> bool:
        """Whether no module has been exchanged, and none got a forward of its own."""
        if "forward" in vars(self.above[0]) or self.above[0]._compiled_call_impl is not None:
            return False
        if [*map(dict.get, self.owners, self.names)] != self.modules:
            return False
        return not [1 for own in self.attributes if "forward" in own]


@dataclass(frozen=True)
class _Call:
    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    output: Any

    def is_of(self, module: nn.Module, x: Any) -> bool:
        """Whether `module` was called with `x` alone, or with a view of all of it."""
        if self.module is not module or len(self.args) != 1 or self.kwargs:
            return False
        (given,) = self.args
        return given is x or (isinstance(x, Tensor) and isinstance(given, Tensor) and _is_all_of(given, x))

    def repeated(self, instead: Mapping[int, Tensor]) -> Any:
        """Call the module again with other tensors, by the id of those that they replace."""
        args = [instead.get(id(value), value) for value in self.args]
        return self.module.forward(
            *args, **{name: instead.get(id(value), value) for name, value in self.kwargs.items()}
        )


def _is_all_of(view: Tensor, x: Tensor) -> bool:
    alike = view.shape == x.shape and view.stride() == x.stride() and view.dtype == x.dtype
    return alike and view.data_ptr() == x.data_ptr()


def _follows(call: _Call, x: Any, cache: KVCache, cos_sin: Any) -> bool:
    """Whether a block was called with x, the cache and the rotary positions, and with nothing else that matters."""
    given = dict(call.kwargs)
    if len(call.args) + ("hidden_states" in given) != 1:
        return False
    hidden = given.pop("hidden_states") if not call.args else call.args[0]
    caches = [given.pop(name) for name in CACHE_NAMES if name in given]
    if hidden is not x or len(caches) != 1 or caches[0] is not cache:
        return False
    turns = given.pop("position_embeddings", None)
    if (turns is not cos_sin and _rotates(call.module)) or given.get("output_attentions"):
        return False
    given.pop("position_ids", None)  # which these blocks do not use
    return all(value is None or name in NEUTRAL or name.startswith("output_") for name, value in given.items())


def _rotates(block: Any) -> bool:
    """Whether a mixer of the block looks at rotary positions."""
    return not all(isinstance(block._modules[name], Recurrent) for name in block.shape.mixers)


def _down_to_blocks(model: nn.Module) -> list[nn.Module] | None:
    """The path of modules from the model to its one list of blocks."""
    layers = list({id(each): each for each in model.modules() if isinstance(each, nn.ModuleList)}.values())
    found = [each for each in layers if len(each) and all(isinstance(child, Block) for child in each)]
    if len(found) != 1 or sum(isinstance(each, Block) for each in model.modules()) != len(found[0]):
        return None
    name = next(name for name, module in model.named_modules() if module is found[0])
    path, at = [model], model
    for part in name.split("."):
        at = at._modules[part]  # type: ignore[assignment]
        path.append(at)
    return path
