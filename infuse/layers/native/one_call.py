"""Run a whole block in one C++ call, for decode steps of a few new tokens and for encoders (all blocks: stack.py).

All of its ops must be C++ bodies, and no module inside may have hooks. Otherwise the block runs part by part, with the
same result. What a part is in C++, its own layer says (part.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter, getitem, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from infuse.architectures.program import ATTENTION, Program
from infuse.cache.kv_cache import KVCache
from infuse.ground.modes import PLAIN
from infuse.layers.calls.inputs import Inputs
from infuse.layers.linear import has_global_hooks, has_no_hooks, rounds_activations
from infuse.layers.native.part import ENCODER, FEW_TOKENS, NativeInputs, NotNative, ProgramText, computation
from infuse.native import limits
from infuse.ops.cpu.linear import takes_tiles
from infuse.ops.cpu.program import NativeProgram


class OneCall:
    """A program for C++, and where to find the modules and the tensors that it names.

    Whether hooks hear the modules around the blocks is not checked here.
    """

    def __init__(self, program: ProgramText):
        self._program, self._text = program, program.text()
        self._modules: WatchedModules | None = None
        self._native: NativeProgram | None = None

    def takes(self, *roots: nn.Module) -> bool:
        """Whether the modules of these roots are still those that the call was made for, and nothing listens."""
        return self._tensors(roots) is not None

    def held_program(self, *roots: nn.Module) -> NativeProgram | None:
        """The program with the tensors of these roots; None if a module has been exchanged or has hooks."""
        tensors, native = self._tensors(roots), self._native
        if tensors is None:
            return None
        if native is None or not all(map(is_, tensors, native.tensors)):
            native = self._native = NativeProgram(self._text, self._program.reals, tensors)
        return native

    def _tensors(self, roots: Sequence[nn.Module]) -> list[Tensor] | None:
        """Collect the tensors of the call; None if a module has been exchanged or has hooks."""
        modules = self._modules
        if modules is None or not modules.are_in_place():
            self._modules = modules = self._find(roots)
        if modules is None or not modules.are_unmodified() or has_global_hooks():
            return None
        tensors = [*map(getitem, *modules.tensors)]
        return None if [1 for tensor in tensors if type(tensor) not in PLAIN] else tensors

    def _find(self, roots: Sequence[nn.Module]) -> WatchedModules | None:
        """Find the modules of the call; None if one has been exchanged for another kind."""
        program, modules = self._program, [*roots]  # and all nodes
        for owner, name, wanted, computes in program.nodes:
            part: Any = modules[owner]._modules.get(name)
            kind: Any = type(part)
            if kind is not wanted and (wanted is not None or computation(kind) != computes):
                return None
            modules.append(part)
        named = modules[program.roots :]
        owners: list[dict[str, Any]] = [modules[node.owner]._modules for node in program.nodes]
        parts = [part for part in named if part is not None]

        def dicts(places: Sequence[tuple[int, str, str]]) -> tuple[list[dict[str, Any]], list[str]]:
            attributes = [modules[node].__dict__ for node, _, _ in places]
            owners = [own[owner] if owner else own for own, (_, owner, _) in zip(attributes, places, strict=True)]
            return owners, [name for _, _, name in places]

        return WatchedModules(
            places=(owners, [node.name for node in program.nodes]),
            modules=named,
            kinds=[*map(type, named)],
            parts=parts,
            attributes=[part.__dict__ for part in parts],
            hooks=[hooks for part in parts for hooks in (part._forward_pre_hooks, part._forward_hooks)],
            tensors=dicts(program.tensors),
            absent=[*zip(*dicts(program.absent), strict=True)],
            flags=[*zip(*dicts(program.flags), strict=True)],
            conditions=[(modules[node], condition) for node, condition in program.conditions],
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_modules": None, "_native": None}  # a copy of the block has its own modules


class WatchedModules(NamedTuple):
    """The modules of a call as dicts, so that a step can check within 2 us a block that they are still the same."""

    places: tuple[list[dict[str, Any]], list[str]]  # of each module: its owner's modules, its name there
    modules: list[nn.Module]
    kinds: list[type]
    parts: list[nn.Module]  # each module that is there
    attributes: list[dict[str, Any]]  # of each of these
    hooks: list[Mapping[int, Callable[..., Any]]]  # of each of these: those before its forward, those after it
    tensors: tuple[list[dict[str, Any]], list[str]]  # of each tensor: dict that holds it, name
    absent: list[tuple[dict[str, Any], str]]  # the same of what must be None
    flags: list[tuple[dict[str, Any], str]]  # the same of what must be true
    conditions: list[tuple[nn.Module, Callable[[Any], bool]]]

    def are_in_place(self) -> bool:
        """Whether no module has been exchanged and none has become of another class."""
        # Lists are compared by identity first.
        return [*map(dict.get, *self.places)] == self.modules and [*map(type, self.modules)] == self.kinds

    def are_unmodified(self) -> bool:
        """Whether the kernels compute what the modules would: no hooks, and weights in the kernels' layouts."""
        if any(self.hooks) and not all(map(has_no_hooks, self.parts)):
            return False
        if [1 for own in self.attributes if "forward" in own]:
            return False
        if [1 for owner, name in self.absent if owner.get(name) is not None]:
            return False
        if [1 for owner, name in self.flags if not owner[name]]:
            return False
        return not [1 for module, holds in self.conditions if not holds(module)]


class BlockCall(OneCall):
    """One call of one block."""

    def __call__(self, block: nn.Module, mixer: Any, x_BTC: Tensor, inputs: Inputs) -> Tensor | None:
        """Return the block's result; None if it has to run part by part. `mixer` tells what it gives the call."""
        raise NotImplementedError


class StepCall(BlockCall):
    """One call for a few new tokens of a decoder."""

    def __init__(self, block: nn.Module, program: Program, index: int):
        super().__init__(program_text(FEW_TOKENS, block, program))
        few = limits()
        self.index, self.most_rows, self.most_tokens = index, few.plain_rows, few.few_tokens
        self.causal: bool = block.shape.causal  # type: ignore[union-attr,assignment]
        mixers = block.shape.mixers.items()  # type: ignore[union-attr,operator]
        self.reader = next((name for name, mixer in mixers if mixer.reads_states), "")
        self.beside = next((name for name, mixer in mixers if mixer.beside), "")
        if rounds_activations(block):
            self.most_rows = min(few.plain_rows, few.code_rows_integer)

    def __call__(self, block: nn.Module, mixer: Any, x_BTC: Tensor, inputs: Inputs) -> Tensor | None:
        batch, tokens, _ = x_BTC.shape
        cache = inputs.cache
        if batch * tokens > self.most_rows or tokens > self.most_tokens or not isinstance(cache, KVCache):
            return None
        if inputs.want_weights or inputs.causal is False:
            return None
        if tokens > 1 and inputs.mask is None and not self.causal:
            return None
        if self._program.without and inputs.values[self._program.without] is not None:
            return None
        native = self.held_program(block)
        if native is None:
            return None
        native_inputs = NativeInputs() if mixer is None else mixer.native_inputs(x_BTC, inputs)
        if native_inputs is None:
            return None
        if self.reader:
            reader: Any = block._modules[self.reader]
            of_states = reader.native_states(x_BTC, inputs)
            if of_states is None:
                return None
            keys, values, states_mask = of_states
            native_inputs = native_inputs._replace(state_keys=keys, state_values=values, states_mask=states_mask)
        other: Any = block._modules[self.beside] if self.beside else None
        if other is not None:
            its_own = other.native_inputs(x_BTC, inputs)
            if its_own is None:
                return None
            native_inputs = native_inputs._replace(state_keys=its_own.keys, state_values=its_own.values)
        if over := self._program.over:
            value = inputs.values[over]
            if not isinstance(value, Tensor):
                return None
            native_inputs = native_inputs._replace(value=value.contiguous())
        out = native.run(x_BTC, *native_inputs)
        if out is not None and mixer is not None:
            mixer.was_run(x_BTC, inputs)
        if out is not None and other is not None:
            other.was_run(x_BTC, inputs)
        return out


class EncoderCall(BlockCall):
    """One call for many tokens of an encoder, without causal order."""

    def __init__(self, block: nn.Module, program: Program):
        super().__init__(program_text(ENCODER, block, program))

    def __call__(self, block: nn.Module, mixer: Any, x_BTC: Tensor, inputs: Inputs) -> Tensor | None:
        if x_BTC.dtype is torch.float16 or inputs.cache is not None or inputs.want_weights or inputs.causal:
            return None
        if torch.jit.is_tracing():  # which fails at results that may be None; the parts say what to do instead
            return None
        native = self.held_program(block)
        return None if native is None else native.run(x_BTC, *mixer.native_inputs(x_BTC, inputs))


def program_text(machine: str, block: nn.Module, program: Program) -> ProgramText:
    """Write the program of a block. NotNative if C++ cannot run it."""
    text = ProgramText(machine, 1)
    for step in states_last(block, program):
        if machine == ENCODER and step.scale != 1.0:
            raise NotNative("an encoder's branches are scaled")
        text.step(step, 0, block)
    return text


def states_last(block: nn.Module, program: Program) -> Program:
    """The program with attention before the states beside it: what C++ cannot do, it finds before it changes these."""
    steps, shape = [*program], block.shape
    for at, (first, then) in enumerate(pairwise(program)):
        if first.does == then.does == ATTENTION and shape.mixers[first.part].beside:  # type: ignore[union-attr,index]
            steps[at : at + 2] = then, first
    return tuple(steps)


def make_one_call(
    block: Any, program: Program, bodies: Mapping[str, str], index: int | None
) -> tuple[BlockCall | None, str]:
    """Make the one call of a block; or None, and why it runs part by part."""
    if set(bodies.values()) != {"cpu"}:
        return None, "not all of its ops have C++ bodies"
    mixers = [*block.shape.mixers.values()]
    beside, readers = (sum(map(attrgetter(kind), mixers)) for kind in ("beside", "reads_states"))
    if len(mixers) - beside - readers > 1 or (beside and (beside > 1 or readers)):
        return None, "tokens are mixed more than once"
    try:
        if block.shape.decodes:
            return (None, "its layer has no index") if index is None else (StepCall(block, program, index), "")
        if not any(map(takes_tiles, (torch.bfloat16, torch.float32))):
            return None, "PyTorch multiplies many tokens faster"
        return EncoderCall(block, program), ""
    except NotNative as reason:
        return None, str(reason)
