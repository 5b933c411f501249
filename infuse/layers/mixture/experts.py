"""The experts of a mixture, computed in one op. The caller passes the experts of each token and their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from infuse import ops
from infuse.architectures.part import Matrix
from infuse.architectures.parts.experts import ExpertsShape
from infuse.ground.device import Device
from infuse.ground.dtype_cast import CastsOnUse
from infuse.ground.errors import CheckpointError
from infuse.ground.modes import are_empty, is_any_on, is_traced
from infuse.layers.calls import autocast
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.linear import Quantized
from infuse.layers.mixture.named_experts import NamedExperts
from infuse.layers.native.part import NativePart, PartWriter
from infuse.ops.cpu.activation import ACTIVATION_NUMBERS
from infuse.parallel.group import Combine
from infuse.quant.format import QuantizedWeight

FirstUse = Callable[[Tensor | None], None]  # called with expert indices before the experts are used; None: all


def experts_op(format: str | None) -> str:
    """Return the name of the op that computes experts in `format` (None: plain)."""
    return "quantized_experts" if format else "experts"


class ExpertMatrix(InferenceModule, NativePart):
    """One matrix of all `experts`, [rows of all experts, inputs], and its bias. `Experts` computes with it.

    `first_use` is set if the weight is memory-mapped. The kernel's `layout` is None: it reads plain rows.
    """

    struct = "linear"
    weight: nn.Parameter
    bias: nn.Parameter | None
    layout: str | None = None
    first_use: FirstUse | None = None

    def __init__(self, matrix: Matrix, experts: int):
        super().__init__()
        self.experts = experts
        self.out_features, self.in_features = matrix.shape
        self.weight = nn.Parameter(torch.empty(matrix.shape, device="meta"), requires_grad=False)
        self.register_parameter("bias", _bias(matrix))

    def arguments(self) -> tuple:
        """The op's arguments for this matrix."""
        parameters = self._parameters
        return parameters["weight"], parameters["bias"]

    def native(self, to: PartWriter) -> None:
        to.must_stay_none("first_use")  # Python checks the pages of mapped experts
        to.plain_matrix(self.out_features)

    def hold_stored(
        self, tensors: Mapping[str, Tensor], layout: str | None, device: torch.device, first_use: FirstUse | None
    ) -> None:
        """Take the stored weight."""
        assert layout is None, layout
        self.weight, self.first_use = nn.Parameter(tensors["weight"], requires_grad=False), first_use


class QuantizedExpertMatrix(Quantized, NativePart):
    """Like ExpertMatrix, with a quantized weight."""

    struct = "linear"
    bias: nn.Parameter | None
    first_use: FirstUse | None = None

    def __init__(self, matrix: Matrix, experts: int, format: str, bodies: Mapping[str, str]):
        super().__init__(ops.quantized_experts, bodies, matrix.shape, format)
        self.experts = experts
        self.out_features, self.in_features = matrix.shape
        self.register_parameter("bias", _bias(matrix))

    def arguments(self) -> tuple:
        """The op's arguments for this matrix."""
        return self.listed(), self._parameters["bias"]

    def in_rows(self) -> tuple:
        """The same, with the weight as the reference reads it."""
        with _disable_current_modes():  # which know no kernels of ours
            return [*self.held().tensors.values()], self._parameters["bias"]

    def native(self, to: PartWriter) -> None:
        to.must_stay_none("first_use")
        self.write_weight(to)
        to.tensor("bias")

    def unprepare(self) -> None:
        """Convert the weight from the layout of the chosen body to that of its format."""
        self._take(self.held().tensors, prepared=False)
        self.first_use = None

    def share(self, other: Quantized) -> None:
        super().share(other)
        assert isinstance(other, QuantizedExpertMatrix)
        self.first_use = other.first_use

    @property
    def layout(self) -> str | None:
        """Name of the kernel's layout; None if it reads rows or does not take this format and width."""
        layout = self._chosen.layout
        if layout is None or not self.prepared or layout.declines(self.format, self.in_features):
            return None
        return layout.name

    def held(self) -> QuantizedWeight:
        if self.first_use is not None:
            self.first_use(None)
        return super().held()

    def laid(self) -> QuantizedWeight | None:
        """Return the weight in the kernel's layout, viewed with one row per output; None if that is not possible."""
        layout, rows = self._chosen.layout, self.out_features
        if layout is None or layout.part_rows is None or self.layout is None or rows % layout.part_rows:
            return None
        if self.first_use is not None:
            self.first_use(None)
        tensors = {name: tensor.view(rows, -1) for name, tensor in self.tensors.items()}
        return QuantizedWeight(tensors, (rows, self.in_features), self.format)

    def hold_stored(
        self, tensors: Mapping[str, Tensor], layout: str | None, device: torch.device, first_use: FirstUse | None
    ) -> None:
        """Take a weight stored in `layout`, without a copy if the kernel reads this layout."""
        sizes = self.out_features, self.in_features
        weight = QuantizedWeight.of(tensors, sizes, self.format)
        kernel_layout = self._chosen.layout
        if layout == self.layout:
            shaped = weight
            if kernel_layout is not None and kernel_layout.shaped is not None and layout is not None:
                shaped = kernel_layout.shaped(weight)
            self._take(shaped.tensors, prepared=layout is not None or kernel_layout is None)
            self.first_use = first_use
        else:
            assert layout is not None
            rows = _in_rows(weight, layout)
            moved = {name: tensor.to(device) for name, tensor in rows.tensors.items()}
            self.hold([QuantizedWeight(moved, sizes, self.format)])

    def extra_repr(self) -> str:
        return f"{self.out_features}, {self.in_features}, bias={self.bias is not None}, format={self.format}"


class Experts(InferenceModule, NativePart, CastsOnUse):
    """All experts of one layer. `formats` has the formats of `up.weight` and `down.weight`: both or none.

    forward(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K]) → [T, H] in the dtype of the hidden states:
    for each token the weighted sum of its experts; see ops.experts. ValueError for other shapes. `combine` sums the
    ranks' partial results; None: the caller does. `named` calls the function that the config names; None: it cannot
    name one.
    """

    struct, mixed = "experts", True
    up: ExpertMatrix | QuantizedExpertMatrix
    down: ExpertMatrix | QuantizedExpertMatrix
    named: NamedExperts | None = None

    def __init__(
        self, shape: ExpertsShape, formats: Mapping[str, str], bodies: Mapping[str, str], combine: Combine | None = None
    ):
        super().__init__()
        self.shape, self.num_experts, self._combine = shape, shape.count, combine
        for matrix in shape.matrices:
            format = formats.get(matrix.weight)
            count = shape.count
            made = QuantizedExpertMatrix(matrix, count, format, bodies) if format else ExpertMatrix(matrix, count)
            self.add_module(matrix.target, made)
        op = ops.quantized_experts if formats else ops.experts
        self._bound = op.bound(bodies.get(op.name, ops.REFERENCE))
        quantization = (shape.inner, formats["up.weight"], formats["down.weight"]) if formats else ()
        self._after = (*quantization, *shape.gate)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, up, down, compute = hidden_states, self.up, self.down, self._bound
        (tokens, hidden), routed = x.shape, top_k_index.shape
        if hidden != self.shape.hidden or routed != top_k_weights.shape or routed[0] != tokens:
            self._refuse_shapes(x, top_k_index, top_k_weights)  # kernels would read beyond them
        if autocast.is_any_on() and autocast.is_left_out(self, x):
            return autocast.without(Experts.forward, self, x, top_k_index, top_k_weights)
        if self.named is not None and not self.named.is_ours:
            return self._by_name(self.named, hidden_states, top_k_index, top_k_weights)
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            if isinstance(up, QuantizedExpertMatrix) or self._combine is not None:
                return unrecorded(Experts.forward, self, hidden_states, top_k_index, top_k_weights)
            compute = ops.experts.bound(ops.REFERENCE)  # has gradients, like plain linears
        if (up.first_use is not None or down.first_use is not None) and not is_traced():
            self._first_use(top_k_index)
        if isinstance(up, ExpertMatrix):
            x = x.to(self.running_dtype or up.weight.dtype)  # some blocks compute in float32 around experts in 16 bits
        elif isinstance(down, QuantizedExpertMatrix) and not (up.prepared and down.prepared):
            self._use_reference(up, down)
        matrices = up.arguments(), down.arguments()
        if isinstance(up, QuantizedExpertMatrix) and is_any_on() and not are_empty([x]):
            compute, matrices = ops.quantized_experts.bound(ops.REFERENCE), (up.in_rows(), down.in_rows())
        y = compute(x, top_k_index, top_k_weights, *matrices[0], *matrices[1], *self._after)
        y = y if self._combine is None else self._combine(y)
        return y.to(hidden_states.dtype)

    def native(self, to: PartWriter) -> None:
        gate = self.shape.gate
        to.must_hold(_computes_itself)
        to.put(inner=self.shape.inner, act=ACTIVATION_NUMBERS[gate.activation], gated=gate.gated, first=gate.first)
        to.put(limit_after=gate.limit_after)
        to.put_reals(limit=gate.limit, up_offset=gate.up_offset)
        to.part("up")
        to.part("down")

    def _refuse_shapes(self, *tensors: Tensor) -> NoReturn:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(f"experts: found {shapes}; needed: [T, {self.shape.hidden}], index [T, K] and weights [T, K]")

    def _by_name(self, named: NamedExperts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        up, down = self.up, self.down
        if isinstance(up, QuantizedExpertMatrix) or isinstance(down, QuantizedExpertMatrix):
            named.refuse("quantized ones")
        for matrix in (up, down):
            if matrix.first_use is not None:
                matrix.first_use(None)
        dtype = self.running_dtype or up.weight.dtype
        parameters = {"up": up.weight, "down": down.weight, "up_bias": up.bias, "down_bias": down.bias}
        cast = {name: None if tensor is None else tensor.to(dtype) for name, tensor in parameters.items()}
        return named(cast, x.to(dtype), index, weights).to(x.dtype)

    def _first_use(self, index: Tensor) -> None:
        for matrix in (self.up, self.down):
            if matrix.first_use is not None:
                matrix.first_use(index - self.shape.gate.first)

    def _use_reference(self, *matrices: QuantizedExpertMatrix) -> None:
        """Fall back to the reference for both matrices, because the body's layout declined one."""
        for matrix in matrices:
            if matrix.prepared:
                matrix.unprepare()
        self._bound = ops.quantized_experts.bound(ops.REFERENCE)


def _computes_itself(experts: Experts) -> bool:
    named = experts.named
    return named is None or named.is_ours


def mapped_bytes(model: nn.Module) -> int:
    """Bytes of memory-mapped experts in `model`."""
    matrices = (module for module in model.modules() if isinstance(module, (ExpertMatrix, QuantizedExpertMatrix)))
    mapped = [matrix for matrix in matrices if matrix.first_use is not None]
    tensors = ((matrix, tensor) for matrix in mapped for tensor in (*matrix.parameters(), *matrix.buffers()))
    return sum(tensor.nbytes for matrix, tensor in tensors if tensor is not matrix.bias)


def _in_rows(weight: QuantizedWeight, layout: str) -> QuantizedWeight:
    """Convert a weight stored in `layout` to its format's rows. CheckpointError if the kernels cannot run here."""
    body = stored_body(layout)
    assert body.layout is not None and body.layout.shaped is not None
    if why := body.needs(Device.of("cpu"), torch.float32):
        raise CheckpointError(
            f"the experts were saved for mapping, in {layout}, and the kernels that read these cannot run here: {why}; "
            'run `infuse build`, or save the shards again without experts="mmap"'
        )
    return body.layout.restore(body.layout.shaped(weight))


def stored_body(layout: str) -> ops.Body:
    """Return the body that reads experts in the stored `layout`. CheckpointError if there is none."""
    for body in ops.quantized_experts.bodies.values():
        if body.layout is not None and body.layout.shaped is not None and body.layout.name == layout:
            return body
    raise CheckpointError(f"the experts were saved in {layout!r}, which this version does not know; save them again")


def _bias(matrix: Matrix) -> nn.Parameter | None:
    if not matrix.bias:
        return None
    return nn.Parameter(torch.empty(matrix.outputs, device="meta"), requires_grad=False)
