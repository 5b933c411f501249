"""An op: one contract, one reference in plain PyTorch, a fake for tracing, cases, and any number of bodies.

A plan chooses the bodies, which are then called directly. While torch.compile or torch.export traces, the same call
becomes one graph node, `torch.ops.infuse.<op>(..., body=name)`, which runs that body. No op calls a registered op.
Under somebody's modes and transforms (infuse/ground/modes.py), PyTorch's own operations compute instead of our kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes

from infuse.ground import modes
from infuse.ground.device import Device
from infuse.ground.errors import UnsupportedCall
from infuse.ground.modes import LINEAR, PLAIN, dispatch_modes, function_modes, transform
from infuse.ops.flops import register_flops
from infuse.quant.format import QuantFormat, QuantizedWeight
from infuse.quant.parse import quant_format

REFERENCE = "reference"
# Choose the first body that does not decline: our kernels, then PyTorch's fused functions, then the reference.
DEQUANTIZED = ("dequantized_float32", "dequantized_bfloat16", "dequantized_float16")
PREFERENCE = ("triton", "cpu", "torch", *DEQUANTIZED, REFERENCE)

_ENDS_TRACE = "as a constant"  # an error of torch.jit's tracer, after which it tells nobody that it was tracing
_LIBRARY = torch.library.Library("infuse", "DEF")
_OPS: dict[str, Op] = {}

Needs = Callable[[Device, torch.dtype], str | None]


@dataclass(frozen=True)
class Layout:
    """The layout in which a body reads quantized weights.

    `prepare` converts a weight once (None: the body leaves this weight to the reference); `restore` converts it back.
    `gather(parts, shape)` converts a weight that comes in parts, each a multiple of `part_rows` rows; if it is None,
    only whole weights can be converted. `declines(format, inputs)` says why the body leaves weights of that format and
    width to the reference.

    A layout with a `name` can be stored: its buffers hold as many values as the format's own rows if these are a
    multiple of `part_rows`. `shaped` gives stored buffers, which have the shapes of rows, the layout's shapes again.
    """

    prepare: Callable[[QuantizedWeight], QuantizedWeight | None]
    restore: Callable[[QuantizedWeight], QuantizedWeight]
    declines: Callable[[QuantFormat, int], str | None] = lambda format, inputs: None
    part_rows: int | None = None
    gather: Callable[[Iterable[QuantizedWeight], tuple[int, int]], QuantizedWeight | None] | None = None
    name: str = ""
    shaped: Callable[[QuantizedWeight], QuantizedWeight] | None = None


@dataclass(frozen=True)
class Body:
    """One implementation. `needs(device, dtype)` returns None if it can run, else why not ("": not worth reporting).

    `fuses`: this body of a product runs the norm before it and the addition after it in its own kernel. Other bodies
    run them as separate calls, so layers do better with one kernel for addition and norm.
    """

    name: str
    function: Callable
    needs: Needs
    layout: Layout | None = None
    fuses: bool = False


@dataclass(frozen=True)
class Choice:
    """The body chosen for an op, and the preferred bodies that declined, with their reasons."""

    op: str
    body: str
    declined: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Case:
    """One row for tests, benchmarks and the support table: a label and the arguments of the op."""

    label: str
    args: tuple


CaseMaker = Callable[[torch.dtype, torch.device], Iterator[Case]]


class Bound:
    """An op with its chosen body, as layers call it. Pickled by name.

    Calls the body directly, the registered op while a graph is traced, and PyTorch's operations where somebody's mode,
    transform or class of tensors is to see them.
    """

    __slots__ = ("_op", "_body", "_function")

    def __init__(self, op: str, body: str):
        self._op, self._body, self._function = op, body, _OPS[op].body(body)

    @property
    def body(self) -> str:
        return self._body

    @property
    def layout(self) -> Layout | None:
        return _OPS[self._op].bodies[self._body].layout

    def __call__(self, *args: Any) -> Any:
        if is_compiling():
            return self._registered(args)
        maybe_seen = dispatch_modes() or function_modes() or transform() is not None or F.linear is not LINEAR
        if (maybe_seen and modes.is_any_on()) or type(args[0]) not in PLAIN:
            return self._seen(args)
        try:
            return self._function(*args)
        except (RuntimeError, TypeError) as error:
            if torch._C._get_tracing_state() is None and _ENDS_TRACE not in str(error):
                if not all(map(modes.is_plain, _tensors_in(args))):
                    return self._seen(args)
                if mixed := _mixed_dtypes(error, args):
                    raise UnsupportedCall(f"{self._op}: {mixed}") from error
                raise
            raise _not_recorded(f"torch.jit.trace cannot record the op {self._op}, {self._body}") from error

    def _registered(self, args: tuple) -> Any:
        return getattr(torch.ops.infuse, self._op).default(*args, body=self._body)

    def _seen(self, args: tuple) -> Any:
        """Compute by operations that modes, transforms and classes of tensors know."""
        op = _OPS[self._op]
        if (op.reads_values or self.layout is not None) and modes.are_empty(_tensors_in(args)):
            return self._registered(args)
        return op.in_operations(*op.restored(self._body, args))

    def __reduce__(self) -> tuple:
        return _bound, (self._op, self._body)


def _not_recorded(what: str) -> UnsupportedCall:
    return UnsupportedCall(
        f"{what}, which only infuse computes: export the model before init_inference, or put the original modules back "
        "with infuse.restore(model); torch.export.export makes programs that run where infuse is"
    )


def _tensors_in(args: Iterable[Any]) -> list[Tensor]:
    each = (value for arg in args for value in (arg if isinstance(arg, (list, tuple)) else (arg,)))
    return [value for value in each if isinstance(value, Tensor)]


def _mixed_dtypes(error: Exception, args: Sequence[Any]) -> str:
    """Explain an error that comes from an input in another dtype than the weights; empty for other errors."""
    dtypes = [arg.dtype for arg in args if isinstance(arg, Tensor) and arg.dim() > 1 and arg.is_floating_point()]
    others = [dtype for dtype in dtypes if dtype is not dtypes[0]]
    if not others or "dtype" not in str(error):
        return ""
    return (
        f"its input is in {dtypes[0]} and its weights are in {others[0]}; give inputs_embeds and other inputs in the "
        "dtype of the model"
    )


def _bound(op: str, body: str) -> Bound:
    """Unpickle a Bound. Raises UnsupportedCall if its body cannot run in this process."""
    _runnable(op, body)
    return Bound(op, body)


class Op:
    """An op declared by `@op(schema)`. Calling it runs the reference, which `reads_values` of tensors or does not.

    `body(name)` returns the function of a body, `bound(name)` the callable that layers hold.
    """

    def __init__(self, schema: str, reference: Callable, *, reads_values: bool = False):
        self.schema, self.reads_values = schema, reads_values
        self.name = schema.partition("(")[0]
        self.reference = reference
        self.bodies: dict[str, Body] = {REFERENCE: Body(REFERENCE, reference, lambda device, dtype: None)}
        self.fake_function: Callable | None = None
        self.case_maker: CaseMaker | None = None
        self.__doc__ = reference.__doc__

    def __call__(self, *args: Any) -> Any:
        return self.reference(*args)

    def body(self, name: str) -> Callable:
        return self.bodies[name].function

    def bound(self, name: str) -> Bound:
        """The body for layers; graphs can be traced through it."""
        return Bound(self.name, name)

    def run(self, *args: Any, body: str) -> Any:
        """Run a body as the registered op. Results are contiguous and never views of an argument."""
        results = self.bodies[body].function(*args)
        tensors = _tensors_in(args)
        if isinstance(results, (tuple, list)):
            return type(results)(_own(result, tensors) for result in results)
        return _own(results, tensors)

    @property
    def in_operations(self) -> Callable:
        """The body of PyTorch's operations: its fused function, or the reference."""
        return self.bodies.get("torch", self.bodies[REFERENCE]).function

    def restored(self, name: str, args: tuple) -> tuple:
        """Arguments for the reference, with the quantized weight converted back from the body's layout.

        Only for ops of one weight.
        """
        layout = self.bodies[name].layout
        if layout is None:
            return args
        names = [argument.name for argument in getattr(torch.ops.infuse, self.name).default._schema.arguments]
        at, text = names.index("buffers"), names.index("format")
        shape, format = args[text - 2 : text], quant_format(args[text])
        with _disable_current_modes():  # which know no kernels of ours
            restored = layout.restore(QuantizedWeight.listed(args[at], shape, format))
        return (*args[:at], [*restored.tensors.values()], *args[at + 1 :])

    def prepared(self, name: str, args: tuple) -> tuple[Callable, tuple]:
        """The function of a body and its arguments, with the quantized weight converted to the body's layout.

        If the layout declines the weight: the reference and the unchanged arguments, as layers do.
        """
        chosen = self.bodies[name]
        if chosen.layout is None:
            return chosen.function, args
        schema = getattr(torch.ops.infuse, self.name).default._schema.arguments
        names, into = [argument.name for argument in schema], list(args)
        for at in (at for at, argument in enumerate(schema) if str(argument.type) == "List[Tensor]"):
            text, shape = self._described(names, at, args)
            laid = chosen.layout.prepare(QuantizedWeight.listed(args[at], shape, quant_format(text)))
            if laid is None:
                return self.reference, args
            into[at] = list(laid.tensors.values())
        return chosen.function, tuple(into)

    def _described(self, names: list[str], at: int, args: tuple) -> tuple[str, tuple[int, int]]:
        """The format and the shape of the quantized weight whose buffers are the argument at `at`.

        Ops with one weight take both its sizes before `format`; experts take the inner width alone.
        """
        if names[at] == "buffers":
            text = names.index("format")
            return args[text], args[text - 2 : text]
        inputs = args[0].shape[1] if names[at] == "up" else args[names.index("inner")]
        return args[names.index(f"{names[at]}_format")], (args[at][0].shape[0], inputs)

    def fake(self, function: Callable) -> Callable:
        """Declare the shape and dtype of the result for tracing. It must be contiguous, like the result of `run`."""
        self.fake_function = function

        def fake(*args: Any, body: str) -> Any:
            if torch.onnx.is_in_onnx_export():
                raise _not_recorded(f"torch.onnx.export cannot convert the op {self.name}")
            return function(*args)

        torch.library.register_fake(f"infuse::{self.name}", fake, lib=_LIBRARY)
        return function

    def flops(self, function: Callable[..., int]) -> Callable[..., int]:
        """Declare the number of operations of the products, given the arguments with shapes in place of tensors.

        For counters over traced graphs. Over models, counters see PyTorch's own operations.
        """
        register_flops(getattr(torch.ops.infuse, self.name), lambda *args, **_: function(*args))
        return function

    def cases(self, maker: CaseMaker) -> CaseMaker:
        """Declare the cases: a generator over (dtype, device)."""
        self.case_maker = maker
        return maker

    def implement(
        self, name: str, needs: Needs | None = None, layout: Layout | None = None, *, fuses: bool = False
    ) -> Callable[[Callable], Callable]:
        """Declare a body. `needs(device, dtype)` returns why it declines, or None; `layout` and `fuses` as in Body."""
        assert name in PREFERENCE, f"{name} is not in the order of preference {PREFERENCE}"

        def declare(function: Callable) -> Callable:
            self.bodies[name] = Body(name, function, needs or (lambda device, dtype: None), layout, fuses)
            return function

        return declare

    def choose(self, device: Device, dtype: torch.dtype, refused: Mapping[str, str] = MappingProxyType({})) -> Choice:
        """Choose the body for activations of `dtype` on `device`, and list the bodies that declined, with reasons.

        `refused` maps the names of bodies to exclude here to the reasons.
        """
        declined: list[tuple[str, str]] = []
        for name in PREFERENCE:
            if name not in self.bodies:
                continue
            reason = self.bodies[name].needs(device, dtype)
            reason = refused.get(name) if reason is None else reason
            if reason is None:
                return Choice(self.name, name, tuple(declined))
            if reason:
                declined.append((name, reason))
        raise AssertionError("the reference never declines")


def op(schema: str, *, reads_values: bool = False) -> Callable[[Callable], Op]:
    """Declare an op by its torch.library schema; the decorated function is its reference.

    `reads_values`: the reference cannot run on tensors without values, so that a traced graph has to hold the op.
    """

    def declare(reference: Callable) -> Op:
        made = Op(schema, reference, reads_values=reads_values)
        assert made.name not in _OPS, f"{made.name} is declared twice"
        arguments, _, results = schema.rpartition(") -> ")
        _LIBRARY.define(f"{arguments}, *, str body) -> {results}")
        _LIBRARY.impl(made.name, made.run, "CompositeExplicitAutograd")
        _OPS[made.name] = made
        return made

    return declare


@cache
def _runnable(op: str, name: str) -> Body:
    body = _OPS[op].bodies.get(name) if op in _OPS else None
    device = Device.of("cuda" if name == "triton" and torch.cuda.is_available() else "cpu")
    reason = "this version of infuse has no such kernel" if body is None else body.needs(device, torch.float32)
    if body is None or reason is not None:
        raise UnsupportedCall(
            f"this model was pickled with the {name!r} kernels of {op}, which do not run here: {reason}. "
            "Load it where they run; or pickle the original model, or save our shards "
            "(save_mp_checkpoint_path=FOLDER), and call init_inference here"
        )
    return body


def _own(result: Tensor | None, arguments: Iterable[Any]) -> Tensor | None:
    """Return `result` contiguous, in storage that it shares with none of the `arguments`."""
    if result is None:
        return None
    storage = result.untyped_storage().data_ptr()
    if any(isinstance(arg, Tensor) and arg.untyped_storage().data_ptr() == storage for arg in arguments):
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()


def registered() -> dict[str, Op]:
    """All ops by name. Import `infuse.ops` first, which registers them."""
    return dict(_OPS)
