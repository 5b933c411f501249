"""Decode steps that compute a model's parts without its own forward: embedding, all blocks, norm, head, in one call.

A user's own class or patch is called in each step. What a model computes between its parts is its own affair, so each
answer's first step is traced: every part must have got the very tensor that the part before it returned, but for
numbers by which values are multiplied, places that are added and caps (ends.py). The first such step of a model is also
computed again, and must give the same logits. Masks are the model's affair, too: they may hide padding, and tokens
before a window that the config names. Where another window may begin to hide some, the model is called, and then traced
again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from infuse.cache.kv_cache import KVCache
from infuse.generate.ends import Begin, Call, End, Ends, equal
from infuse.ground import interrupts
from infuse.ground.authors import LibraryCalls
from infuse.ground.cache_names import CACHE_NAMES, cache_in
from infuse.ground.questions import attribute, returned
from infuse.ground.temporary_hooks import TemporaryHooks
from infuse.layers.block import Block
from infuse.layers.calls.contract import named
from infuse.layers.linear import has_global_hooks, has_no_hooks
from infuse.layers.native.stack import BlockArguments, DecodeSession, StackCall
from infuse.layers.recurrent.convolved import Recurrent
from infuse.ops.cpu.program import CosSin

# Rotary positions that depend on their own index alone are computed for many tokens at once: the module's operations
# take up to 0.1 ms of a step, because weights have driven their code out of the caches.
_STATIC_ROPE = {"default", "linear", "llama3", "proportional", "yarn"}
_TABLE_TOKENS = 64
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
        at = first_block(calls, parts)
        if len(calls) < at + count + 1 or at == 0 or type(cache) is not KVCache:
            return None
        before, blocks, after = calls[:at], calls[at : at + count], calls[at + count :]
        x: Any = blocks[0].args[0] if blocks[0].args else blocks[0].kwargs.get("hidden_states")
        begun, turned = split_by_width(before, x)
        if not begun or not begun[0].is_of(parts.embedding, inputs["input_ids"]):
            return None
        embedded, model = begun[0], parts.above[0]
        begin = Begin.of(begun, x, parts.embedding, attribute(model, "config"), cache.layers[0].length - 1)
        turning = RotaryCall.all_of(turned, (embedded.output, x), inputs.get("position_ids"))
        if begin is None or turning is None:
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
        end = End.of(after, x, outputs.logits, model, parts.head)
        if end is None:
            return None
        ends = Ends(begin, end)
        arguments = BlockArguments.of(parts.blocks, passed, [_kind_in(passed, call) for call in blocks], windows)
        if arguments is None:
            return None
        stack = self.stack_of(parts, embedded.output, ends, arguments)
        answer = None if stack is None else stack.begin(embedded.output, cache, mask=mask)
        if stack is None or answer is None or stack.wide != end.narrowed:
            return None
        step = DirectStep(parts, stack, answer, turning, ends, cache, embedded.output)
        step.window_end, chunk = hiding.window_end, min(spans_in(config, "chunk"), default=math.inf)
        step.end_tokens = min(step.window_end, chunk, begin.places_count)
        return step

    def stack_of(self, parts: Parts, embedded: Tensor, ends: Ends, arguments: BlockArguments) -> StackCall | None:
        """The call of these modules for values like `embedded`, made again if one is another than it was proven for."""
        norm, in_program = ends.end.norm, ends.in_program
        used = (*parts.above, parts.embedding, *parts.blocks, *([] if norm is None else [norm]), parts.head)
        modules = [(each, type(each), type(each).forward) for each in used]
        stack = self.stack
        wanted = in_program, arguments, embedded.dtype
        alike = stack is not None and (stack.ends, stack.arguments, stack.dtype) == wanted
        if self.modules != modules or not alike:
            embedding = parts.embedding if ends.begin.is_looked_up else None
            self.stack = StackCall.of(embedding, parts.blocks, norm, parts.head, embedded, in_program, arguments)
            self.modules, self.proven = modules, False
        return self.stack

    def __getstate__(self) -> dict[str, Any]:
        return {"is_ours": self.is_ours, "stack": None, "modules": [], "proven": False, "are_librarys": LibraryCalls()}


class DirectStep:
    """Make the answer's next steps as the traced one was made: each is one token later than the step before it."""

    def __init__(
        self, parts: Parts, stack: StackCall, answer: DecodeSession, turning: Sequence[RotaryCall], ends: Ends,
        cache: KVCache, embedded: Tensor,
    ):  # fmt: skip
        self.cache = cache
        self._parts, self._stack, self._answer = parts, stack, answer
        self._turning, self._ends, self._embedded = turning, ends, embedded
        self._first = answer.length - 1  # index of the traced step's token
        self._table: tuple[int, CosSin] | None = None  # for many tokens, and how many come before them
        self._seconds = math.inf  # that a token took
        self._hooks = _hooks_ever()
        # Lengths of the cache: after one, another window hides tokens; before the other, steps are made so.
        self.window_end, self.end_tokens = math.inf, math.inf

    def __call__(self, ids_BT: Tensor) -> Tensor | None:
        """The logits [B, 1, vocabulary] for ids [B, 1]. None, with nothing changed, if the model has to be called."""
        if not self._goes_on() or self._ends.begin.is_padding(ids_BT):
            return None
        answer, end = self._answer, self._ends.end
        cos_sin, _ = self._cos_sin(ids_BT)
        x = ids_BT if answer.takes_ids else self._ends.begin.made(self._parts.embedding.forward(ids_BT), answer.length)
        y = answer.step(x, cos_sin)
        if y is None:
            return None
        return end.finished(y) if answer.gives_logits else end.after_head(self._parts.head.forward(end.head_input(y)))

    def tokens(self, ids_BT: Tensor, count: int, ends: Sequence[int]) -> Tensor | None:
        """The likeliest tokens [B, 1 to count] of the next steps; none follow a step that gives one of `ends`.

        As many as take about 30 ms, after which a signal is heard. None, with nothing changed, if steps give no
        logits, if these are capped, which makes some of the largest equal, or if the model has to be called.
        """
        if self._ends.end.cap or not self._answer.gives_tokens or not self._goes_on():
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


def first_block(calls: Sequence[Call], parts: Parts) -> int:
    """The number of the first block's call; 0 if it was not called."""
    return next((number for number, call in enumerate(calls) if call.module is parts.blocks[0]), 0)


def split_by_width(calls: Sequence[Call], x: Any) -> tuple[list[Call], list[Call]]:
    """Calls whose results are as wide as x, of which it may be made, and the others: of rotary positions."""
    if not isinstance(x, Tensor):  # where other threads call the model meanwhile, it may be anything
        return [], list(calls)
    wide: list[Call] = []
    others: list[Call] = []
    for call in calls:
        alike = isinstance(call.output, Tensor) and call.output.shape[-1:] == x.shape[-1:]
        (wide if alike else others).append(call)
    return wide, others


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


def _window_if_follows(call: Call, x: Any, cache: KVCache, passed: Sequence[Any], hiding: Hiding) -> int | None:
    """The window of a block's mask, or 0; None unless it was called with x, the cache, rotary positions that were
    `passed` and such a mask, and with nothing else that matters.
    """
    block: Any = call.module
    given = dict(call.kwargs)
    hidden, *others = call.args or (given.pop("hidden_states", None),)
    given = named(block.shape.call.arguments, tuple(others), given, "a block")
    caches = [given.pop(name) for name in CACHE_NAMES if name in given]
    if hidden is not x or len(caches) != 1 or caches[0] is not cache:
        return None
    turns, mask = given.pop("position_embeddings", None), given.pop("attention_mask", None)
    attends = _attends(call.module)
    if (attends and turns is not None and _kind_in(passed, call) is None) or given.pop("output_attentions", None):
        return None
    given.pop("position_ids", None)  # which these blocks do not use
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
