"""Linear layers over plain and quantized weights, and their products fused with norm, activation and residual."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infuse import ops
from infuse.ground.errors import WAY_BACK, UnsupportedCall
from infuse.layers.calls import autocast
from infuse.layers.calls.recorders import has_active_hooks
from infuse.layers.dequantized_weight import Reading
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.native.part import NONE, NativePart, PartWriter, decline_if
from infuse.layers.norm import Norm
from infuse.ops.cpu.quantized_linear import code_of
from infuse.parallel.group import Combine
from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format


def direct(module: nn.Module, x: Tensor) -> Tensor:
    """Call module(x). Without hooks, skip nn.Module's dispatch, which takes 1.5 us in each of some hundred calls."""
    if module._forward_hooks or module._forward_pre_hooks:
        return module(x)
    return module.forward(x)


def has_no_hooks(module: nn.Module) -> bool:
    """Whether no hook hears the module and its forward is not patched, so that its work needs no call of it."""
    return not (module._forward_pre_hooks or "forward" in vars(module) or has_active_hooks(module))


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
    if norm is not None and not (isinstance(norm, Norm) and has_no_hooks(norm)):
        x, norm = direct(norm, x), None
    before = ops.NO_NORM if norm is None else norm.arguments
    if module._combine is None:
        return module._body(x, *module.arguments(), *before, activation, gated, residual)
    y = module._combine(module._body(x, *module.arguments(), *before, activation, gated, None))
    return y if residual is None else residual + y


def takes_around(module: nn.Module) -> TypeGuard[Linear | QuantizedLinear]:
    """Whether `product` may pass norm, activation and residual to the module's op: it is ours and has no hooks.

    An op takes inputs in the order of its columns, so it is not used directly in act-order.
    """
    return isinstance(module, (Linear, QuantizedLinear)) and not module.is_ordered and has_no_hooks(module)


def fuses(bodies: Mapping[str, str]) -> bool:
    """Whether products by these bodies fuse norms and sums, so that layers should leave both to `product`."""
    return any(op.bodies[bodies.get(op.name, ops.REFERENCE)].fuses for op in (ops.linear, ops.quantized_linear))


def has_global_hooks() -> bool:
    """Whether global module hooks are registered with PyTorch."""
    modules = torch.nn.modules.module
    return bool(modules._global_forward_hooks or modules._global_forward_pre_hooks)


def rounds_activations(module: nn.Module) -> bool:
    """Whether a product inside the module rounds x to 8 bits where there are more than a few rows."""
    return any(isinstance(each, Quantized) and ":a8" in str(each.format) for each in module.modules())


def linear_op(format: str | None) -> str:
    """Return the name of the op that multiplies by weights of `format` (None: plain)."""
    return "quantized_linear" if format else "linear"


def make_linear(
    inputs: int,
    outputs: int,
    bias: bool,
    format: str | None,
    bodies: Mapping[str, str],
    combine: Combine | None = None,
    *,
    ordered: bool = False,
    transposed: bool = False,
) -> Linear | TransposedLinear | QuantizedLinear:
    """Make an empty linear layer in the quantization format `format`; None keeps the compute dtype.

    `inputs` and `outputs` are this rank's sizes. `combine` turns the rank's result into that of the whole layer.
    `ordered`: the columns of its codes are in another order than the inputs. `transposed`: it replaces transformers'
    Conv1D, whose weight callers read as [in, out].
    """
    if format is None:
        plain = TransposedLinear if transposed else Linear
        return plain(inputs, outputs, bias, bodies, combine)
    return QuantizedLinear(inputs, outputs, bias, format, bodies, combine, ordered=ordered, transposed=transposed)


class Quantized(InferenceModule):
    """A quantized weight `shape` = (rows, columns), in the layout of the body that `op` has in `bodies`.

    `dtype` is that of the original's weight in the model, and of `weight`.
    """

    dtype: torch.dtype = torch.float32
    _transposed = False  # whether the original's weight is [columns, rows]

    def __init__(self, op: ops.Op, bodies: Mapping[str, str], shape: tuple[int, int], format: str):
        super().__init__()
        self.format, self._sizes = quant_format(format), (*shape, format)  # in the order of the op's schema
        self._names = self.format.names
        for name in self._names:
            self.register_buffer(name, None)
        self._chosen, self._reference = op.bound(bodies.get(op.name, ops.REFERENCE)), op.bound(ops.REFERENCE)
        self._body, self.prepared = self._chosen, True
        self._reading = Reading()

    @property
    def part_rows(self) -> int | None:
        """Row granularity of the parts passed to `hold`; None: it takes only whole weights."""
        layout = self._chosen.layout
        return None if layout is None or layout.declines(self.format, self._sizes[1]) else layout.part_rows

    def hold(self, parts: Iterable[QuantizedWeight]) -> None:
        """Convert a quantized weight to the body's layout and store it. If the layout declines it, the reference runs.

        `parts` are its rows in order; several parts need `part_rows`.
        """
        layout, parts, shape = self._chosen.layout, iter(parts), self._sizes[:2]
        first = next(parts)
        if first.shape != shape:
            assert layout is not None and layout.gather is not None, (first.shape, shape)
            laid = layout.gather(chain([first], parts), shape)
            assert laid is not None, "weights with codes that the layout declines are not made in parts"
        else:
            laid = layout.prepare(first) if layout is not None else first
        self._take((first if laid is None else laid).tensors, prepared=laid is not None)

    def share(self, other: Quantized) -> None:
        """Share the weight of `other`, which has the same shape, format and layout."""
        assert (other._sizes[:2], other.format) == (self._sizes[:2], self.format)
        self._take(other.tensors, other.prepared)
        self._reading = other._reading

    def _take(self, tensors: Mapping[str, Tensor], prepared: bool) -> None:
        self._buffers.update(tensors)
        self._body, self.prepared = self._chosen if prepared else self._reference, prepared

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The format's buffers by name, in the layout that the body reads."""
        return {name: self.get_buffer(name) for name in self._names}

    def listed(self) -> Sequence[Tensor]:
        """The format's buffers, as ops take them."""
        held: Mapping[str, Any] = self._buffers  # get_buffer takes 1 us
        return [held[name] for name in self._names]

    def held(self) -> QuantizedWeight:
        """The quantized weight as its format defines it."""
        weight = QuantizedWeight(self.tensors, self._sizes[:2], self.format)
        return self._chosen.layout.restore(weight) if self._chosen.layout and self.prepared else weight

    def write_weight(self, to: PartWriter) -> None:
        """Write the fields of a matrix in C++ but its bias."""
        to.put(code=code_of(str(self.format)), outputs=self._sizes[0])
        to.must_stay_true("prepared")
        names = iter(self._names)
        for field in ("weight", "scale", "zero"):
            if name := next(names, ""):
                to.tensor(field, name, is_there=True)
            else:
                to.put(**{field: NONE})

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The values [rows, columns] that the codes stand for, in the order of the original's columns."""
        weight = self.held()
        return weight.format.dequantize(weight, dtype)

    def _turned(self, dtype: torch.dtype) -> Tensor:
        return self.dequantized(dtype).t().contiguous()

    @property
    def weight(self) -> Tensor:
        """The original's weight: its shape, dtype and values. Each use of it dequantizes, and writes to it raise."""
        codes: Any = self._buffers[self._names[0]]
        rows, columns = self._sizes[:2]
        if self._transposed:
            shape, values = (columns, rows), self._turned
        else:
            shape, values = (rows, columns), self.dequantized
        return self._reading.weight(shape, self.dtype, codes.device, values, self.format)

    @weight.setter
    def weight(self, value: Tensor) -> None:
        if value is not self.weight:  # PEFT's unload() assigns the present weight
            raise UnsupportedCall(
                f"a weight quantized in {self.format} cannot be replaced: load new values by load_state_dict, which "
                f"quantizes them, or do so on the original: {WAY_BACK}"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # nn.Module would register a parameter of this name
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


class _PlainProduct(InferenceModule):
    """x @ weight.T + bias, for a weight that is held as [out, in]."""

    followed = frozenset({"weight", "bias"})  # also where they are no parameters: pruned or parametrized
    is_ordered = False
    _body: Any
    _combine: Combine | None

    def arguments(self) -> tuple:
        """The op's arguments after x: weight and bias, before those of ops.linear.Fusion."""
        held = self._parameters  # nn.Module.__getattr__ takes longer than the view that a matrix product needs
        weight = held.get("weight")
        weight = self.weight if weight is None else weight  # None: parametrized or pruned
        return weight, held["bias"] if "bias" in held else self.bias  # noqa: SIM401  # `self.bias` takes longer

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and is_recorded(self, x):  # a head on a frozen model may be trained
            if self._combine is None:
                return F.linear(x, self.arguments()[0], self.bias)
            return unrecorded(_PlainProduct.forward, self, x)
        if autocast.is_any_on() and autocast.dtype_for(x) is not None:
            y = F.linear(x, self.arguments()[0], self.bias)
        else:
            y = self._body(x, *self.arguments())
        return y if self._combine is None else self._combine(y)


class Linear(_PlainProduct, NativePart, nn.Linear):
    """x @ weight.T + bias. A subclass of nn.Linear for code that searches for one."""

    struct = "linear"

    def __init__(
        self, inputs: int, outputs: int, bias: bool, bodies: Mapping[str, str], combine: Combine | None = None
    ):
        super().__init__(inputs, outputs, bias, device="meta")
        self.requires_grad_(False)
        self._body = ops.linear.bound(bodies.get("linear", ops.REFERENCE))
        self._combine = combine

    def native(self, to: PartWriter) -> None:
        decline_if({"ranks share a product": self._combine is not None})
        to.plain_matrix(self.out_features)


class TransposedLinear(_PlainProduct):
    """x @ weight + bias in the place of transformers' Conv1D, whose class it also gets. `weight` is [in, out].

    `weight` is a view: the parameter of that name is held as [out, in], as kernels read it.
    """

    def __init__(
        self, inputs: int, outputs: int, bias: bool, bodies: Mapping[str, str], combine: Combine | None = None
    ):
        super().__init__()
        self._parameters["weight"] = nn.Parameter(torch.empty(outputs, inputs, device="meta"), requires_grad=False)
        empty = torch.empty(outputs, device="meta")
        self.register_parameter("bias", nn.Parameter(empty, requires_grad=False) if bias else None)
        self._body = ops.linear.bound(bodies.get("linear", ops.REFERENCE))
        self._combine = combine

    @property
    def weight(self) -> Tensor:
        """The original's weight [in, out]; writes to it count."""
        if sys._getframe(1).f_code.co_name == "set_module_tensor_to_device":  # it goes on to set it as [out, in]
            raise UnsupportedCall(
                "accelerate cannot set the weight of a Conv1D that was replaced: call model.load_state_dict, or "
                "module.weight.copy_(values)"
            )
        held: Any = self._parameters["weight"]
        return held.t()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            turned = value.detach().t()  # a view: later writes to the value count, too
            self._parameters[name] = nn.Parameter(turned, requires_grad=value.requires_grad)
        else:
            super().__setattr__(name, value)


class QuantizedLinear(Quantized, NativePart):
    """x @ dequantize(buffers).T + bias; if `ordered`, x[..., order] @ dequantize(buffers).T + bias.

    `transposed`: it replaces transformers' Conv1D, so that `weight` is [in, out].
    """

    struct = "linear"
    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        format: str,
        bodies: Mapping[str, str],
        combine: Combine | None = None,
        *,
        ordered: bool = False,
        transposed: bool = False,
    ):
        super().__init__(ops.quantized_linear, bodies, (outputs, inputs), format)
        self._transposed = transposed
        self.in_features, self.out_features, self._combine, self.is_ordered = inputs, outputs, combine, ordered
        if ordered:
            self.register_buffer("order", None)
        empty = torch.empty(outputs, device="meta")
        self.register_parameter("bias", nn.Parameter(empty, requires_grad=False) if bias else None)

    def hold_order(self, order: Tensor) -> None:
        """Store the order of inputs, int32 [in]."""
        assert self.is_ordered and order.shape == (self.in_features,), order.shape
        self._buffers["order"] = order.to(self.listed()[0].device)

    def share(self, other: Quantized) -> None:
        super().share(other)
        if self.is_ordered:
            self._buffers["order"] = other._buffers["order"]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        values = super().dequantized(dtype)
        if not self.is_ordered:
            return values
        order: Any = self._buffers["order"]
        return values.index_select(1, order.argsort())

    def arguments(self) -> tuple:
        held, names = self._buffers, self._names
        # Most formats have two buffers. A comprehension takes 0.1 us more in each of some hundred calls of a step.
        buffers = (held[names[0]], held[names[1]]) if len(names) == 2 else [held[name] for name in names]
        parameters = self._parameters
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        return buffers, bias, *self._sizes

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and is_recorded(self, x):
            return unrecorded(QuantizedLinear.forward, self, x)
        if not x.dtype.is_floating_point:  # kernels read floating numbers alone
            raise UnsupportedCall(f"a product by a weight in {self.format} was given {x.dtype}; give floating numbers")
        dtype = autocast.dtype_for(x) if autocast.is_any_on() else None
        if dtype is not None and self.bias is not None:
            x = x.to(self.bias.dtype)
        if self.is_ordered:
            order: Any = self._buffers["order"]
            x = x.index_select(-1, order)
        y = self._body(x, *self.arguments())
        if dtype is not None and x.dtype is not torch.float64:
            y = y.to(dtype)
        return y if self._combine is None else self._combine(y)

    def native(self, to: PartWriter) -> None:
        decline_if({"ranks share a product": self._combine is not None, "inputs are in act-order": self.is_ordered})
        self.write_weight(to)
        to.tensor("bias")

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, format={self.format}{', in act-order' * self.is_ordered}"
