"""Parts that C++ can run as steps of a block: each writes its numbers, tensors and inner parts by name.

The text is read by ops/cpu/src/record.h into the structs of ops/cpu/src/binding_layer.h; a name that one side lacks is
an error. layers/native/one_call.py watches the modules whose tensors a text names, and holds the program in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from infuse.architectures.parts.multipliers import Factors
from infuse.architectures.program import NORM, Step
from infuse.layers.calls.inputs import Inputs
from infuse.native import step_words

PARAMETERS, BUFFERS = "_parameters", "_buffers"
NONE = "none"
FEW_TOKENS, ENCODER = "steps", "encoder"  # what a program is for: the machines in C++


class NotNative(Exception):
    """Why C++ cannot run a part. `make_one_call` catches it."""


class NativePart:
    """A part with a struct in C++. `takes_value`: its step goes over another value of the call; `reads_states`: over
    those of an encoder, whose keys and values it gives to each call (`native_states`).

    `mixed`: instances get a class mixed with the original's, so that only their forward identifies what they compute.
    `fields`: those of other structs that take this one; None: all that there are.
    """

    struct: ClassVar[str]
    fields: ClassVar[frozenset[str] | None] = None
    mixed: ClassVar[bool] = False
    takes_value: ClassVar[bool] = False
    reads_states: ClassVar[bool] = False

    def native(self, to: PartWriter) -> None:
        """Write the fields of the struct. Raise NotNative if the kernels do not compute this part."""
        raise NotImplementedError


class NativeInputs(NamedTuple):
    """What a mixer passes to a call besides x: the arguments of NativeProgram.run, in order.

    Keys and values are the storages [B, K, S, D] to which the new tokens are appended at `start`; or states, which are
    overwritten, or made after each token: StateSlot.in_place, row_of_states. `value`: what a step goes over. Keys and
    values of an encoder's states [R, H, L, D] are read as they are, under their own mask.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    turn: int = -1
    mask: Tensor | None = None
    bias: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    start: int = 0
    value: Tensor | None = None
    state_keys: Tensor | None = None
    state_values: Tensor | None = None
    states_mask: Tensor | None = None


class NativeMixer(NativePart):
    """A mixer with a struct in C++."""

    def native_inputs(self, x_BTC: Tensor, inputs: Inputs) -> NativeInputs | None:
        """What a call needs besides x, with room for its tokens in the cache. None if it must run in Python."""
        raise NotImplementedError

    def can_write(self, slot: Any) -> bool:
        """Whether a call writes to this slot of a cache in its format."""
        return True

    def was_run(self, x_BTC: Tensor, inputs: Inputs) -> None:
        """Note that the new tokens' keys and values are in the storages of a decoder's cache now."""
        raise NotImplementedError


class Node(NamedTuple):
    """A module of a program, and what it must still be in a call: of the class `wanted`, or, if that is None, of one
    with this `computation`.
    """

    owner: int  # index of the owner among the roots and nodes; the roots come first
    name: str
    wanted: type | None
    computation: Any = None


class TensorRef(NamedTuple):
    """Where a tensor or an attribute is: its node, the dict that has it ("": the module's own), and its name."""

    node: int
    owner: str
    name: str


class Columns(NamedTuple):
    """Columns of a step's cos and sin: so many from the `first` on; none if `number` is 0, all if it is -1."""

    first: int
    number: int


ALL, NO_COLUMNS = Columns(0, -1), Columns(0, 0)


@dataclass
class ProgramText:
    """A program being written: its text, the modules and tensors that it names, and what must hold in each call.

    `machine`: FEW_TOKENS or ENCODER. `whole`: it runs all blocks of a model, and holds their storages. `over`: what a
    step goes over. `without`: the value that a norm would add, which must be None. `turns` and `window`: which columns
    of cos and sin turn what is written next, and the window that the model's mask puts on it, or 0.
    """

    machine: str
    roots: int
    whole: bool = False
    over: str = ""
    without: str = ""
    turns: Columns = ALL
    window: int = 0
    nodes: list[Node] = field(default_factory=list)
    tensors: list[TensorRef] = field(default_factory=list)
    absent: list[TensorRef] = field(default_factory=list)  # what must stay None
    flags: list[TensorRef] = field(default_factory=list)  # attributes that must stay true
    conditions: list[tuple[int, Callable[[Any], bool]]] = field(default_factory=list)  # of nodes
    reals: list[float] = field(default_factory=list)
    storages: int = 0
    words: list[str] = field(default_factory=list)

    def text(self) -> str:
        head = f"machine={self.machine} whole={_word(self.whole)} steps=list{{"
        return " ".join([head, *self.words, "}"])

    def step(self, step: Step, owner: int, block: nn.Module) -> None:
        """Write a step of a block, the root of index `owner`."""
        if step.over and step.does == NORM and not (self.whole or self.machine == ENCODER or self.without):
            self.without = step.over
        elif step.over and getattr(block._modules[step.part], "reads_states", False):
            if self.machine == ENCODER:
                raise NotNative(f"{step.part} reads an encoder's states")
        elif step.over:
            takes_value = getattr(block._modules[step.part], "takes_value", False)
            if not takes_value or self.whole or self.machine == ENCODER or self.over:
                raise NotNative(f"{step.part} goes over {step.over}")
            self.over = step.over
        with self.step_of(step.does, step.scale):
            if step.part:
                PartWriter(self, block, owner).part(step.part, as_field="part")
            else:
                self.word("part", NONE)

    @contextmanager
    def step_of(self, does: str, scale: float = 1.0) -> Iterator[None]:
        """Write a step; its part is written inside of the `with`."""
        if does not in step_words():
            raise NotNative(f"{does!r} is no step of C++")
        with self.inside("step", "step"):
            self.word("does", does)
            self.real("scale", scale)
            yield

    @contextmanager
    def inside(self, name: str, kind: str) -> Iterator[None]:
        self.words.append(f"{name}={kind}{{")
        yield
        self.words.append("}")

    def word(self, name: str, value: Any) -> None:
        self.words.append(f"{name}={_word(value)}")

    def real(self, name: str, value: float) -> None:
        self.words.append(f"{name}=r{len(self.reals)}")
        self.reals.append(float(value))

    def node(self, owner: int, name: str, part: Any) -> int:
        """Add the module `name` of another node, or its absence."""
        if isinstance(part, NativePart) and part.mixed:
            self.nodes.append(Node(owner, name, None, computation(type(part))))
        else:
            self.nodes.append(Node(owner, name, type(part)))
        return self.roots + len(self.nodes) - 1


@dataclass(frozen=True)
class PartWriter:
    """Write the fields of one part, the `module` of a node."""

    program: ProgramText
    module: nn.Module
    node: int

    @property
    def of_encoder(self) -> bool:
        """Whether the program is for many tokens of an encoder, else for few of a decoder."""
        return self.program.machine == ENCODER

    def put(self, **values: int | bool | str) -> None:
        """Write whole numbers, truth values and words."""
        for name, value in values.items():
            self.program.word(name, value)

    def put_reals(self, **values: float) -> None:
        for name, value in values.items():
            self.program.real(name, value)

    def tensor(self, name: str, attribute: str = "", is_there: bool = False) -> None:
        """Write a parameter or buffer of the module, by default the one of this name.

        One that is None must stay None. `is_there`: it is None only until its weights are filled in.
        """
        attribute = attribute or name
        owner = BUFFERS if attribute in self.module._buffers else PARAMETERS
        place = TensorRef(self.node, owner, attribute)
        if is_there or getattr(self.module, owner).get(attribute) is not None:
            self.program.word(name, f"t{len(self.program.tensors)}")
            self.program.tensors.append(place)
        else:
            self.program.word(name, NONE)
            self.program.absent.append(place)

    def attribute(self, name: str) -> None:
        """Write a tensor that is an attribute of the module, neither parameter nor buffer."""
        self.program.word(name, f"t{len(self.program.tensors)}")
        self.program.tensors.append(TensorRef(self.node, "", name))

    def storage(self, *names: str) -> None:
        """Write the storages that the program holds, if it does; else each step gives them."""
        for name in names:
            if self.program.whole:
                self.program.word(name, f"s{self.program.storages}")
                self.program.storages += 1
            else:
                self.program.word(name, NONE)

    def turns(self) -> None:
        """Write which columns of cos and sin turn the part."""
        self.put(turns_at=self.program.turns.first, turns=self.program.turns.number)

    def window(self, own: int) -> None:
        """Write the window of the part: its own one, or that of the model's mask."""
        assert not own or not self.program.window, (own, self.program.window)
        self.put(window=own or self.program.window)

    def part(self, name: str, as_field: str = "") -> None:
        """Write a part inside of this one, or that there is none. NotNative if it has no struct."""
        part = self.module._modules.get(name)
        node = self.program.node(self.node, name, part)
        if part is None:
            self.program.word(as_field or name, NONE)
            return
        if not isinstance(part, NativePart):
            raise NotNative(f"{name} is a {type(part).__name__}, which has no struct in C++")
        if overrides_forward(part):
            raise NotNative(f"{name} is a {type(part).__name__} with a forward of its own")
        if part.fields is not None and (as_field or name) not in part.fields:
            raise NotNative(f"{name} is a {type(part).__name__}, which C++ does not take there")
        with self.program.inside(as_field or name, part.struct):
            part.native(PartWriter(self.program, part, node))

    def weight(self, name: str, kind: type[nn.Module]) -> None:
        """Write the weight of one of PyTorch's modules without a bias inside of this one, or that there is none."""
        module = self.module._modules.get(name)
        assert module is None or type(module) is kind
        node = self.program.node(self.node, name, module)
        if module is None:
            self.program.word(name, NONE)
            return
        self.program.absent.append(TensorRef(node, PARAMETERS, "bias"))
        PartWriter(self.program, module, node).tensor(name, "weight")

    def plain_matrix(self, outputs: int) -> None:
        """Write the fields of a weight that is not quantized, [outputs, inputs], and of its bias."""
        self.put(code=-1, outputs=outputs, scale=NONE, zero=NONE)
        self.tensor("weight")
        self.tensor("bias")

    def factors(self, factors: Factors | None, widths: Sequence[int]) -> None:
        """Write the multipliers of the part, whose first product has sections of these widths."""
        if factors is None:
            self.program.word("factors", NONE)
            return
        if self.of_encoder:
            raise NotNative("an encoder's part has multipliers")
        with self.program.inside("factors", "factors"):
            self.put(rounded=factors.rounded)
            self.put_reals(before=factors.before, after=factors.after)
            with self.program.inside("sections", "list"):
                for width, factor in zip(widths, factors.sections, strict=bool(factors.sections)):
                    with self.program.inside("section", "section"):
                        self.put(columns=width)
                        self.put_reals(factor=factor)

    def must_stay_none(self, attribute: str) -> None:
        self.program.absent.append(TensorRef(self.node, "", attribute))

    def must_stay_true(self, attribute: str) -> None:
        self.program.flags.append(TensorRef(self.node, "", attribute))

    def must_hold(self, condition: Callable[[Any], bool]) -> None:
        """Ask condition(module) in each call. It is a function of a module, so that the block can be pickled."""
        self.program.conditions.append((self.node, condition))


def decline_if(reasons: Mapping[str, Any]) -> None:
    """Raise NotNative with the first reason that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise NotNative(reason)


def overrides_forward(part: Any) -> bool:
    """Whether the class of a part overrides the forward of the class that wrote how C++ runs it."""
    writer: Any = next(kind for kind in type(part).__mro__ if "native" in vars(kind))
    return computation(type(part)) != computation(writer)


def computation(kind: Any) -> tuple[Any, Any]:
    """What instances of a class compute with: their forward and, of a CalledPart, its `mix`."""
    return getattr(kind, "forward", None), getattr(kind, "mix", None)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
