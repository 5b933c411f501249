"""Decode steps that compute a model's parts without its own forward: embedding, all blocks, norm, head, in one call.

A user's own class or patch is called in each step. What a model computes between its parts is its own affair, so each
answer's first step is traced: every part must have got the very tensor that the part before it returned, but for
numbers of the config by which the embedding, the head's input or the logits are multiplied, or by which these are
capped. The first such step of a model is also computed again, and must give the same logits. Masks are the model's
affair, too: they may hide padding, and tokens before a window that the config names. Where another window may begin to
hide some, the model is called, and then traced again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from infuse.cache.kv_cache import KVCache
from infuse.ground import interrupts
from infuse.ground.authors import LibraryCalls
from infuse.ground.cache_names import CACHE_NAMES, cache_in
from infuse.ground.questions import attribute, returned
from infuse.ground.temporary_hooks import TemporaryHooks
from infuse.layers.block import Block
from infuse.layers.linear import has_global_hooks, has_no_hooks
from infuse.layers.native.stack import ONE, BlockArguments, DecoderEnds, DecodeSession, Factor, StackCall
from infuse.layers.recurrent.convolved import Recurrent
from infuse.ops.cpu.program import CosSin

# Rotary positions that depend on their own index alone are computed for many tokens at once: the module's operations
# take up to 0.1 ms of a step, because weights have driven their code out of the caches.
_STATIC_ROPE = {"default", "linear", "llama3", "proportional", "yarn"}
_TABLE_TOKENS = 64
FACTORS, _CAP = ("multiplier", "scale", "scaling"), "softcap"  # in names of config keys
_CALL_SECONDS = 0.03  # of the steps in one call


@dataclass
class DirectSteps:
    """Trace decode steps of one model. A copy of the model traces its own."""

    ids: ClassVar[str] = "input_ids"
    is_ours: Callable[[Callable[..., Any]], bool]  # whether a pre-hook on the model may be left out
    stack: StackCall | None = None
    modules: list[tuple[nn.Module, type, Any]] = field(default_factory=list)  # which were `proven`, and their forwards
    proven: bool = False
    are_librarys: LibraryCalls = field(default_factory=LibraryCalls)

    def parts_of(self, model: Any, inputs: Mapping[str, Any]) -> Parts | None:
        """The parts of a model, if a step's mask is none or one of tokens, [B, L]."""
        mask = inputs.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            return None
        if (found := _down_to_blocks(model)) is None:
            return None
        embedding, head = returned(model, "get_input_embeddings"), returned(model, "get_output_embeddings")
        return Parts.of(found, embedding, head, self.is_ours)

    def traced(self, model: Any, inputs: Mapping[str, Any]) -> tuple[Any, DirectStep | None]:
        """Call the model for one new token of each row, and find how to make the next such steps without it."""
        parts = self.parts_of(model, inputs)
        if parts is None or not self.are_librarys((model, *parts.modules)):
            return model(**inputs, return_dict=True), None
        calls: list[Call] = []

        def note(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if not (args and output is args[0]):  # dropout returns its input
                calls.append(Call(module, args, kwargs, output))

        given = cache_in(inputs)
        cache = getattr(given, "self_attention_cache", given)
        if isinstance(cache, KVCache):
            cache.snapshot()
        with interrupts.held_back(), TemporaryHooks() as hooks:  # one step long, so that no hook is left behind
            for module in parts.listed:
                hooks.after(module, note, with_kwargs=True)
            outputs = model(**inputs, return_dict=True)
        step = self.step_of(parts, calls, inputs, outputs)
        if step is None or self.proven or step.ends:
            return outputs, step
        before = step.cache.layers[0].length - 1
        step.cache.rewind(before)
        again = step(inputs[self.ids])
        if again is not None and torch.equal(again, outputs.logits):
            self.proven = True
            return outputs, step
        step.cache.rewind(before)
        return model(**inputs, return_dict=True), None  # which writes its keys and values again

    def step_of(self, parts: Parts, calls: list[Call], inputs: Mapping[str, Any], outputs: Any) -> DirectStep | None:
        """How to make the steps that follow one of these calls; None if they do not tell."""
        count, cache = len(parts.blocks), cache_in(inputs)
        if len(calls) < count + 3 or type(cache) is not KVCache:
            return None
        embedded, *turned = calls[: -count - 2]
        blocks, (normed, headed) = calls[-count - 2 : -2], calls[-2:]
        if not embedded.is_of(parts.embedding, inputs["input_ids"]):
            return None
        x: Any = blocks[0].args[0] if blocks[0].args else blocks[0].kwargs.get("hidden_states")
        around = Plain.of(embedded.output, x, normed.output, headed, outputs.logits, parts)
        turning = RotaryCall.all_of(turned, (embedded.output, x), inputs.get("position_ids"))
        if around is None or turning is None:
            return None
        of_tokens, passed = inputs.get("attention_mask"), [call.output for call in turned]
        mask = None if of_tokens is None else of_tokens.bool()[:, None, None]
        # The decoder's own config, not a tower's.
        configs = [config for each in parts.above if hasattr(config := attribute(each, "config"), "model_type")]
        config = configs[-1] if configs else None
        hiding = Hiding(mask, cache.layers[0].length, spans_in(config, "window"))
        windows = []
        for block, call in zip(parts.blocks, blocks, strict=True):
            if call.module is not block or (window := _window_if_follows(call, x, cache, passed, hiding)) is None:
                return None
            windows.append(window)
            x = call.output[0] if isinstance(call.output, tuple) else call.output
        if not normed.is_of(normed.module, x):
            return None
        called = BlockArguments.of(parts.blocks, passed, [_kind_in(passed, call) for call in blocks], windows)
        if called is None:
            return None
        stack = self.stack_of(parts, parts.embedding, normed.module, embedded.output, around.steps, called)
        answer = None if stack is None else stack.begin(embedded.output, cache, mask=mask)
        if stack is None or answer is None or stack.wide != around.narrowed:
            return None
        step = DirectStep(parts, stack, answer, normed.module, turning, around, cache, embedded.output)
        step.window_end, chunk = hiding.window_end, min(spans_in(config, "chunk"), default=math.inf)
        step.end_tokens = min(step.window_end, chunk)
        return step

    def stack_of(
        self, parts: Parts, embedding: nn.Module | None, norm: nn.Module | None, embedded: Tensor, around: DecoderEnds,
        called: BlockArguments,
    ) -> StackCall | None:  # fmt: skip
        """The call of these modules for values like `embedded`, made again if one is another than it was proven for."""
        used = (*parts.above, parts.embedding, *parts.blocks, *([] if norm is None else [norm]), parts.head)
        modules = [(each, type(each), type(each).forward) for each in used]
        stack = self.stack
        alike = stack is not None and (stack.around, stack.called, stack.dtype) == (around, called, embedded.dtype)
        if self.modules != modules or not alike:
            self.stack = StackCall.of(embedding, parts.blocks, norm, parts.head, embedded, around, called)
            self.modules, self.proven = modules, False
        return self.stack

    def __getstate__(self) -> dict[str, Any]:
        return {"is_ours": self.is_ours, "stack": None, "modules": [], "proven": False, "are_librarys": LibraryCalls()}


class DirectStep:
    """Make the answer's next steps as the traced one was made: each is one token later than the step before it."""

    def __init__(
        self, parts: Parts, stack: StackCall, answer: DecodeSession, norm: nn.Module | None,
        turning: Sequence[RotaryCall], around: Any, cache: KVCache, embedded: Tensor,
    ):  # fmt: skip
        self.cache = cache
        self._parts, self._stack, self._answer, self._norm = parts, stack, answer, norm
        self._turning, self._around, self._embedded = turning, around, embedded
        self._first = answer.length - 1  # index of the traced step's token
        self._table: tuple[int, CosSin] | None = None  # for many tokens, and how many come before them
        self._seconds = math.inf  # that a token took
        self._hooks = _hooks_ever()
        # Lengths of the cache: after one, another window hides tokens; before the other, steps are made so.
        self.window_end, self.end_tokens = math.inf, math.inf

    def __call__(self, ids_BT: Tensor) -> Tensor | None:
        """The logits [B, 1, vocabulary] for ids [B, 1]. None, with nothing changed, if the model has to be called."""
        if not self._goes_on():
            return None
        answer = self._answer
        cos_sin, _ = self._cos_sin(ids_BT)
        x = ids_BT if answer.takes_ids else self._around.begun(self._parts.embedding.forward(ids_BT), answer.length)
        y = None if x is None else answer.step(x, cos_sin)
        if y is None:
            return None
        if answer.gives_logits:
            return self._around.finished(y)
        return self._around.ended(self._parts.head.forward(self._around.before_head(self._norm, y)))

    def tokens(self, ids_BT: Tensor, count: int, ends: Sequence[int]) -> Tensor | None:
        """The likeliest tokens [B, 1 to count] of the next steps; none follow a step that gives one of `ends`.

        As many as take about 30 ms, after which a signal is heard. None, with nothing changed, if steps give no
        logits, if these are capped, which makes some of the largest equal, or if the model has to be called.
        """
        if self._around.cap or not self._answer.gives_tokens or not self._goes_on():
            return None
        cos_sin, turned = self._cos_sin(ids_BT)
        before_window = self.end_tokens - 1 - self._answer.length
        count = int(max(1, min(count, turned, before_window, _CALL_SECONDS / self._seconds)))
        begun = time.perf_counter()
        tokens = self._answer.tokens(ids_BT, cos_sin, count, ends)
        if tokens is not None:
            self._seconds = (time.perf_counter() - begun) / tokens.shape[1]
        return tokens

    @property
    def ends(self) -> bool:
        """Whether no further step can be made because of its length."""
        return self._answer.length + 1 >= self.end_tokens

    @property
    def traced_after(self) -> float:
        """The length of the cache after which such steps may be traced again: masks then tell whose window it is."""
        return self.window_end if self.ends and self.window_end == self.end_tokens else math.inf

    def _goes_on(self) -> bool:
        """Whether another step may be made so."""
        if _hooks_ever() != self._hooks or not self._parts.are_in_place():
            return False
        return not self.ends

    def _cos_sin(self, ids_BT: Tensor) -> tuple[CosSin, float]:
        """The rotary positions of this step's token and of those after it, and of how many tokens these are."""
        if not self._turning:
            return CosSin(), math.inf
        step = self._answer.length - self._first
        if not all(each.by_index for each in self._turning):
            return self._turned_at(self._parts.embedding.forward(ids_BT), step), 1
        index = step % _TABLE_TOKENS
        if self._table is None or self._table[0] != step - index:
            tokens = torch.arange(step - index, step - index + _TABLE_TOKENS, device=ids_BT.device)
            self._table = step - index, self._turned_at(self._embedded, tokens)
        table = self._table[1]
        return CosSin(table.cos, table.sin, index), _TABLE_TOKENS - index

    def _turned_at(self, x: Tensor, steps: Tensor | int) -> CosSin:
        """The rotary positions that the model's own modules give for x, so many `steps` after the traced one."""
        return self._stack.cos_sin([each.at(x, each.positions + steps) for each in self._turning])


@dataclass(frozen=True)
class Plain:
    """What the model does before its blocks and around its head: the factors of the embedding, the head's input and the
    logits. `narrowed`: the head's input is rounded to another dtype; `widens`: logits become float32. `cap`: they are
    squashed to (-cap, cap) by tanh; 0: they are not.
    """

    begin: Factor
    before: Factor
    end: Factor
    narrowed: bool
    widens: bool
    cap: float

    @classmethod
    def of(cls, embedded: Any, x: Any, normed: Any, headed: Call, logits: Tensor, parts: Parts) -> Plain | None:
        """Find it from the values of one step, by the numbers in the config.

        None if it does something else, or if these values do not tell which number it is: those of a row of zeros.
        """
        if headed.module is not parts.head or len(headed.args) != 1 or headed.kwargs:
            return None
        (given,), made = headed.args, headed.output
        # Where other threads call the model meanwhile, these may be the results of any module.
        if not all(isinstance(value, Tensor) for value in (x, embedded, given, normed, made)):
            return None
        config = attribute(parts.above[0], "config")
        numbers = [number for number in dict.fromkeys(numbers_in(config, FACTORS)) if number != 1.0]
        products = [ONE, *map(Factor, numbers)]
        factors = [*products, *(Factor(number, divides=True) for number in numbers)]
        narrowed, widens = given.dtype is not normed.dtype, logits.dtype is not made.dtype
        begins = _factors_of(x, embedded, products)
        befores = _factors_of(given, normed.to(given.dtype), [ONE] if narrowed else factors)
        caps = [0.0, *dict.fromkeys(number for number in numbers_in(config, (_CAP,)) if number > 0)]
        plain = [(each, _widened(each.times(made), widens)) for each in factors]
        ends = [(each, cap) for each, value in plain for cap in caps if equal(logits, _capped(value, cap))]
        if logits is made:
            ends = [(ONE, 0.0)]
        if not len(begins) == len(befores) == len(ends) == 1:
            return None
        ((end, cap),) = ends
        return cls(begins[0], befores[0], end, narrowed, widens, cap)

    @property
    def steps(self) -> DecoderEnds:
        """What the stack does of it."""
        return DecoderEnds(self.begin, self.end, before_head=self.before)

    def begun(self, embedded: Tensor, length: int) -> Tensor:
        return self.begin.times(embedded)

    def before_head(self, norm: Any, y: Tensor) -> Tensor:
        return self.before.times(norm.forward(y))

    def ended(self, logits: Tensor) -> Tensor:
        return self.finished(self.end.times(logits))

    def finished(self, logits: Tensor) -> Tensor:
        """What the stack does not do."""
        return _capped(_widened(logits, self.widens), self.cap)


def _widened(logits: Tensor, widens: bool) -> Tensor:
    return logits.float() if widens else logits


def _capped(logits: Tensor, cap: float) -> Tensor:
    return torch.tanh(logits / cap) * cap if cap else logits


def _factors_of(found: Any, x: Tensor, factors: Sequence[Factor]) -> list[Factor]:
    """Those of some factors by which x can have become what was found."""
    return [ONE] if is_same(found, x) else [each for each in factors if equal(found, each.times(x))]


def equal(found: Any, wanted: Tensor) -> bool:
    return isinstance(found, Tensor) and found.dtype is wanted.dtype and torch.equal(found, wanted)


def numbers_in(config: Any, words: Sequence[str]) -> Iterator[float]:
    """The numbers that a config and those inside it have, or compute, under names with one of these words."""
    owned = {name for kind in type(config).__mro__ for name, own in vars(kind).items() if isinstance(own, property)}
    computed = {name: attribute(config, name) for name in sorted(owned) if _has_word(name, words)}
    for name, value in {**attribute(config, "__dict__", {}), **computed}.items():
        if hasattr(value, "model_type"):
            yield from numbers_in(value, words)
        elif _has_word(name, words) and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield float(value)


def _has_word(key: str, words: Sequence[str]) -> bool:
    return any(word in key for word in words)


@dataclass(frozen=True)
class RotaryCall:
    """The call of the module that makes rotary positions, and which of its arguments are the values of a step.

    `positions` [..., B or 1, 1] are the step's. `by_index`: those of many tokens can be made at once.
    """

    call: Call
    x: Tensor
    positions: Tensor

    @classmethod
    def all_of(cls, calls: Sequence[Call], values: Sequence[Tensor], positions: Any) -> list[RotaryCall] | None:
        """Each of the calls, for a step with these positions; None if one of them is of another kind."""
        if not isinstance(positions, Tensor):
            return None if calls else []
        found = [cls.of(call, values, positions) for call in calls]
        return [each for each in found if each is not None] if all(found) else None

    @classmethod
    def of(cls, call: Call, values: Sequence[Tensor], positions: Tensor) -> RotaryCall | None:
        """None unless the module was called with one of the values and the positions, and with no other tensor."""
        given = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]
        x = next((value for value in given if any(value is each for each in values)), None)
        others = [value for value in given if value is not x]
        if x is None or len(others) != 1:
            return None
        # Models of pictures take several rows of positions, [3, B, 1]: some of the step's own, or copies of it.
        told, own = others[0], positions if positions.dim() == 3 else positions[None]
        rows = told if told.dim() == 3 else ()
        alike = told is positions or (
            len(rows) > 0 and all(any(torch.equal(row, each) for each in own) for row in rows)
        )
        return cls(call, x, told) if alike else None

    @property
    def by_index(self) -> bool:
        rope_type = attribute(self.call.module, "rope_type")
        kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]  # a dict names layers' kinds
        return _STATIC_ROPE.issuperset(kinds)

    def at(self, x: Tensor, positions: Tensor) -> Any:
        return self.call.repeated({id(self.x): x, id(self.positions): positions})


def spans_in(config: Any, kind: str) -> set[int]:
    """The windows, or the chunks that tokens attend to, in a config and those inside it, by the word for their kind."""
    held = attribute(config, "__dict__", {})
    inside = [spans_in(value, kind) for value in held.values() if hasattr(value, "model_type")]
    # Qwen's max_window_layers and Cohere's sliding_window_pattern count layers; state spaces compute prompts by chunks.
    of_tokens = {
        name: value
        for name, value in held.items()
        if not name.endswith(("layers", "pattern")) and name not in ("mamba_chunk_size", "chunk_size")
    }
    named = [value for name, value in of_tokens.items() if kind in name]
    sizes = {value for value in named if isinstance(value, int) and value > 0 and not isinstance(value, bool)}
    return sizes.union(*inside)


@dataclass(frozen=True)
class Hiding:
    """Which of `length` keys the masks of a step may hide: `padding` [B, 1, 1, length] and tokens before a window."""

    padding: Tensor | None
    length: int
    windows: set[int]

    @property
    def window_end(self) -> float:
        """The length after which another window hides tokens that padding does not hide."""
        seen = [0] if self.padding is None else self.padding.flatten(0, -2).any(0).nonzero().flatten().tolist()
        first = min(seen, default=0)
        return min([window + first for window in self.windows if window + first >= self.length], default=math.inf)

    def window_of(self, mask: Any) -> int | None:
        """The window of a block's mask, 0 if it has none; None if the mask hides other keys."""
        if mask is self.padding or (self.padding is not None and equal(mask, self.padding)):
            return 0
        mask = _shown(mask)
        if mask is None or mask.dim() != 4:
            return None
        shown = torch.ones_like(mask[:1, :1, :1]) if self.padding is None else self.padding
        if mask.shape[1:] != (1, 1, self.length) or len(shown) not in (1, len(mask)):
            return None
        if equal(mask, shown.expand_as(mask)):
            return 0
        places = torch.arange(self.length, device=mask.device)
        known = [each for each in self.windows if each <= self.length]
        found = [each for each in known if equal(mask, (shown & (places >= self.length - each)).expand_as(mask))]
        return found[0] if len(found) == 1 else None


def _shown(mask: Any) -> Tensor | None:
    """Which keys a mask shows: one of bools, or, as eager attention takes it, of 0 and its dtype's lowest number.

    None for others, and for one that hides a step's own key: where it hides all, numbers mean something else.
    """
    if isinstance(mask, Tensor) and mask.is_floating_point():
        shown = mask == 0
        known = shown | (mask <= torch.finfo(mask.dtype).min)
        return shown if bool(known.all()) and bool(shown[..., -1].all()) else None
    return mask if isinstance(mask, Tensor) and mask.dtype is torch.bool else None


def _hooks_ever() -> int:
    """How many hooks were ever put on modules: looking at those of each would take 0.05 ms in a step."""
    return RemovableHandle.next_id


@dataclass(frozen=True)
class Parts:
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
    def of(
        cls, path: list[nn.Module], embedding: nn.Module | None, head: nn.Module | None,
        is_ours: Callable[[Callable[..., Any]], bool],
    ) -> Parts | None:  # fmt: skip
        """The parts of the first of `path`, which leads to its list of blocks. None if a hook may hear a module."""
        if embedding is None or head is None:
            return None
        *above, layers = path
        model: Any = above[0]
        blocks = list(layers.children())
        children = [child for child in above[-1].children() if child is not layers]
        if head not in (found := [child for each in above for child in each.children()]) or embedding not in found:
            return None
        listed = [*children, *([] if head in children else [head]), *blocks]
        modules = [*above[1:], layers, *listed]
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
class Call:
    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    output: Any

    def is_of(self, module: nn.Module, x: Any) -> bool:
        """Whether `module` was called with `x` alone, or with a view of all of it."""
        if self.module is not module or len(self.args) != 1 or self.kwargs:
            return False
        (given,) = self.args
        return is_same(given, x)

    def repeated(self, instead: Mapping[int, Tensor]) -> Any:
        """Call the module again with other tensors, by the id of those that they replace."""
        args = [instead.get(id(value), value) for value in self.args]
        return self.module.forward(
            *args, **{name: instead.get(id(value), value) for name, value in self.kwargs.items()}
        )


def is_same(view: Any, x: Any) -> bool:
    """Whether a value is x, or a view of all of it."""
    if view is x or not (isinstance(view, Tensor) and isinstance(x, Tensor)):
        return view is x
    alike = view.shape == x.shape and view.stride() == x.stride() and view.dtype == x.dtype
    return alike and view.data_ptr() == x.data_ptr()


def _window_if_follows(call: Call, x: Any, cache: KVCache, passed: Sequence[Any], hiding: Hiding) -> int | None:
    """The window of a block's mask, or 0; None unless it was called with x, the cache, rotary positions that were
    `passed` and such a mask, and with nothing else that matters.
    """
    given = dict(call.kwargs)
    if len(call.args) + ("hidden_states" in given) != 1:
        return None
    hidden = given.pop("hidden_states") if not call.args else call.args[0]
    caches = [given.pop(name) for name in CACHE_NAMES if name in given]
    if hidden is not x or len(caches) != 1 or caches[0] is not cache:
        return None
    turns, mask = given.pop("position_embeddings", None), given.pop("attention_mask", None)
    attends = _attends(call.module)
    if (attends and turns is not None and _kind_in(passed, call) is None) or given.pop("output_attentions", None):
        return None
    given.pop("position_ids", None)  # which these blocks do not use
    block: Any = call.module
    if not all(block.ignores(name, value) for name, value in given.items()):
        return None
    if attends:
        return hiding.window_of(mask)
    return 0 if mask is None else None


def _kind_in(passed: Sequence[Any], call: Call) -> int | None:
    """Which of the rotary positions that were passed a block was called with."""
    turns = call.kwargs.get("position_embeddings")
    return next((kind for kind, each in enumerate(passed) if each is turns), None)


def _attends(block: Any) -> bool:
    """Whether a mixer of the block looks at keys, and at rotary positions."""
    return not all(isinstance(block._modules[name], Recurrent) for name in block.shape.mixers)


def _down_to_blocks(model: nn.Module) -> list[nn.Module] | None:
    """The path of modules from the model to its one list of a decoder's blocks: towers of pictures have others."""
    layers = list({id(each): each for each in model.modules() if isinstance(each, nn.ModuleList)}.values())
    found = [each for each in layers if len(each) and all(map(_decodes, each))]
    if len(found) != 1 or sum(map(_decodes, model.modules())) != len(found[0]):
        return None
    return path_to(model, found[0])


def _decodes(module: nn.Module) -> bool:
    return isinstance(module, Block) and bool(module.shape.decodes)


def path_to(model: nn.Module, inside: nn.Module) -> list[nn.Module]:
    """The modules from the model to one inside it."""
    name = next(name for name, module in model.named_modules() if module is inside)
    path, at = [model], model
    for part in name.split("."):
        at = at._modules[part]  # type: ignore[assignment]
        path.append(at)
    return path
