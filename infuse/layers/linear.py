"""Linear layers over plain and quantized weights, and their products fused with norm, activation and residual."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infuse import ops
from infuse.errors import UnsupportedCall
from infuse.layers.combine import Combine
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.norm import Norm
from infuse.layers.pickling import Pickled
from infuse.ops.op import Body
from infuse.quant.format import QuantFormat, QuantizedWeight
from infuse.quant.parse import quant_format


def direct(module: nn.Module, x: Tensor) -> Tensor:
    """Call module(x). Without hooks, skip nn.Module's dispatch, which takes 1.5 us in each of some hundred calls."""
    if module._forward_hooks or module._forward_pre_hooks:
        return module(x)
    return module.forward(x)


def untouched(module: nn.Module) -> bool:
    """Whether the module has no hooks and no patched forward, so that its work can be done without calling it."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def product(
    module: nn.Module,
    x: Tensor,
    norm: nn.Module | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> Tensor:
    """Compute residual + act(module(norm(x))), in one op if neither norm nor module has hooks.

    Pass an `activation` only if `takes_around(module)`.
    """
    if norm is None and residual is None and activation is None:
        return direct(module, x)
    if not takes_around(module):
        y = direct(module, x if norm is None else direct(norm, x))
        return y if residual is None else residual + y
    if norm is not None and not (isinstance(norm, Norm) and untouched(norm)):
        x, norm = direct(norm, x), None
    before = ops.NO_NORM if norm is None else norm.arguments
    if module._combine is None:
        return module.with_around(x, *before, activation, gated, residual)
    y = module._combine(module.with_around(x, *before, activation, gated, None))
    return y if residual is None else residual + y


def takes_around(module: nn.Module) -> TypeGuard[Linear | QuantizedLinear]:
    """Whether `product` may pass norm, activation and residual to the module's op: it is ours and has no hooks."""
    return isinstance(module, (Linear, QuantizedLinear)) and untouched(module)


def fuses(bodies: Mapping[str, str]) -> bool:
    """Whether products by these bodies fuse norms and sums, so that layers should leave both to `product`."""
    return any(op.bodies[bodies.get(op.name, ops.REFERENCE)].fuses for op in (ops.linear, ops.quantized_linear))


def all_are_heard() -> bool:
    """Whether global module hooks are registered with PyTorch."""
    modules = torch.nn.modules.module
    return bool(modules._global_forward_hooks or modules._global_forward_pre_hooks)


def linear_op(format: str | None) -> str:
    """Return the name of the op that multiplies by weights of `format` (None: plain)."""
    return "quantized_linear" if format else "linear"


def make_linear(
    inputs: int, outputs: int, bias: bool, format: str | None, bodies: Mapping[str, str], combine: Combine | None = None
) -> Linear | QuantizedLinear:
    """Make an empty linear layer in the quantization format `format`; None keeps the compute dtype.

    `inputs` and `outputs` are this rank's sizes. `combine` turns the rank's result into that of the whole layer.
    """
    if format is None:
        return Linear(inputs, outputs, bias, bodies, combine)
    return QuantizedLinear(inputs, outputs, bias, format, bodies, combine)


def part_rows(body: Body, format: QuantFormat, inputs: int) -> int | None:
    """Row granularity of the parts of a weight; None: `body` takes only whole weights."""
    layout = body.layout
    return None if layout is None or layout.declines(format, inputs) else layout.part_rows


def laid(body: Body, parts: Iterable[QuantizedWeight], shape: tuple[int, int]) -> tuple[QuantizedWeight, bool]:
    """Convert the weight in `parts` to the layout of `body`. Return it as is, and False, if the layout declines it."""
    layout, parts = body.layout, iter(parts)
    first = next(parts)
    if first.shape != shape:
        assert layout is not None and layout.gather is not None, (first.shape, shape)
        gathered = layout.gather(chain([first], parts), shape)
        assert gathered is not None, "weights with codes that the layout declines are not made in parts"
        return gathered, True
    prepared = layout.prepare(first) if layout is not None else first
    return (first, False) if prepared is None else (prepared, True)


class Product(InferenceModule, Pickled):
    """A linear layer that calls the chosen body of its op, then `combine` on the rank's result."""

    _body: Callable[..., Tensor]
    _combine: Combine | None

    def arguments(self) -> tuple:
        """The op's arguments after x: weight and bias, before those of ops.linear.Around."""
        raise NotImplementedError

    def with_around(self, x: Tensor, *around: Any) -> Tensor:
        """Compute the product with norm, activation and residual (ops.linear.Around), not yet combined over ranks."""
        return self._body(x, *self.arguments(), *around)


class Linear(Product, nn.Linear):
    """x @ weight.T + bias. A subclass of nn.Linear for code that searches for one."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, bodies: Mapping[str, str], combine: Combine | None = None
    ):
        super().__init__(inputs, outputs, bias, device="meta")
        self.requires_grad_(False)
        self._body = ops.linear.bound(bodies.get("linear", ops.REFERENCE))
        self._combine = combine

    def arguments(self) -> tuple:
        held = self._parameters  # nn.Module.__getattr__ takes longer than the view that a matrix product needs
        return held["weight"], held["bias"]

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and is_recorded(self, x):  # a head on a frozen model may be trained
            return F.linear(x, self.weight, self.bias) if self._combine is None else unrecorded(Linear.forward, self, x)
        held = self._parameters
        y = self._body(x, held["weight"], held["bias"])
        return y if self._combine is None else self._combine(y)


class QuantizedLinear(Product):
    """x @ dequantize(data, scale, zero).T + bias. `weight` is the quantized data, for code that asks for its device."""

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        format: str,
        bodies: Mapping[str, str],
        combine: Combine | None = None,
    ):
        super().__init__()
        self._combine = combine
        self.in_features, self.out_features, self.format = inputs, outputs, quant_format(format)
        self._sizes = outputs, inputs, format  # in the order of the op's schema
        for name in ("data", "scale", "zero"):
            self.register_buffer(name, None)
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(outputs, device="meta"), requires_grad=False) if bias else None
        )
        self._chosen = ops.quantized_linear.bodies[bodies.get("quantized_linear", ops.REFERENCE)]
        self._body = ops.quantized_linear.bound(self._chosen.name)
        self.prepared = True

    @property
    def part_rows(self) -> int | None:
        """Row granularity of the parts passed to `hold`; None: it takes only whole weights."""
        return part_rows(self._chosen, self.format, self.in_features)

    def hold(self, parts: Iterable[QuantizedWeight]) -> None:
        """Convert a quantized weight [out_features, in_features] to the body's layout and store it.

        If the layout declines it, the reference runs. `parts` are its rows in order; several parts need `part_rows`.
        """
        held, prepared = laid(self._chosen, parts, (self.out_features, self.in_features))
        self.prepared = prepared
        self._body = ops.quantized_linear.bound(self._chosen.name if prepared else ops.REFERENCE)
        self.data, self.scale, self.zero = held.data, held.scale, held.zero

    def share(self, other: QuantizedLinear) -> None:
        """Share the weight of `other`, which has the same shape, format and body."""
        assert (other.out_features, other.in_features, other.format) == (
            self.out_features,
            self.in_features,
            self.format,
        )
        self.data, self.scale, self.zero = other.data, other.scale, other.zero
        self.prepared, self._body = other.prepared, other._body

    def held(self) -> QuantizedWeight:
        """The quantized weight as its format defines it."""
        shape = (self.out_features, self.in_features)
        weight = QuantizedWeight(self.data, self.scale, self.zero, shape, self.format)
        return self._chosen.layout.restore(weight) if self._chosen.layout and self.prepared else weight

    @property
    def weight(self) -> Tensor:
        return self.data.view(torch.int8)  # T5 casts its input to this dtype unless it is int8

    @weight.setter
    def weight(self, value: Tensor) -> None:
        if value.data_ptr() != self.data.data_ptr():  # PEFT's unload() assigns the present weight
            raise UnsupportedCall(
                f"the weight of a quantized linear ({self.format}) cannot be replaced: do so before init_inference"
            )

    def arguments(self) -> tuple:
        held = self._buffers
        return held["data"], held["scale"], held["zero"], self._parameters["bias"], *self._sizes

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and is_recorded(self, x):
            return unrecorded(QuantizedLinear.forward, self, x)
        y = self._body(x, *self.arguments())
        return y if self._combine is None else self._combine(y)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={self.format}"
        )
