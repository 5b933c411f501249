"""The experts of a mixture in one op: the caller chooses the experts of each token and their weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.experts import ExpertsShape
from infuse.architectures.part import Matrix
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.linear import Quantized
from infuse.parallel.group import Combine


def experts_op(format: str | None) -> str:
    """Return the name of the op that computes experts in `format` (None: plain)."""
    return "quantized_experts" if format else "experts"


class ExpertMatrix(InferenceModule):
    """One matrix of all experts, [rows of all experts, inputs], and its bias. `Experts` computes with it."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, matrix: Matrix):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(matrix.shape, device="meta"), requires_grad=False)
        self.register_parameter("bias", _bias(matrix))

    def arguments(self) -> tuple:
        """The op's arguments for this matrix."""
        held = self._parameters
        return held["weight"], held["bias"]


class QuantizedExpertMatrix(Quantized):
    """Like ExpertMatrix, with a quantized weight."""

    bias: nn.Parameter | None

    def __init__(self, matrix: Matrix, format: str, bodies: Mapping[str, str]):
        super().__init__(ops.quantized_experts, bodies, matrix.shape, format)
        self.out_features, self.in_features = matrix.shape
        self.register_parameter("bias", _bias(matrix))

    def arguments(self) -> tuple:
        """The op's arguments for this matrix."""
        held = self._buffers
        return held["data"], held["scale"], held["zero"], self._parameters["bias"]

    def unprepare(self) -> None:
        """Hold the weight as its format defines it, not in the layout of the chosen body."""
        self._take(self.held(), prepared=False)

    def extra_repr(self) -> str:
        return f"{self.out_features}, {self.in_features}, bias={self.bias is not None}, format={self.format}"


class Experts(InferenceModule):
    """All experts of one layer. `formats` has the formats of `up.weight` and `down.weight`: both or none.

    forward(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K]) → [T, H] in the dtype of the hidden states:
    for each token the weighted sum of its experts; see ops.experts. `combine` adds up what ranks get of their experts;
    None: the caller does.
    """

    up: ExpertMatrix | QuantizedExpertMatrix
    down: ExpertMatrix | QuantizedExpertMatrix

    def __init__(
        self,
        shape: ExpertsShape,
        formats: Mapping[str, str],
        bodies: Mapping[str, str],
        combine: Combine | None = None,
    ):
        super().__init__()
        self.shape, self.num_experts, self._combine = shape, shape.count, combine
        for matrix in shape.matrices:
            format = formats.get(matrix.weight)
            made = QuantizedExpertMatrix(matrix, format, bodies) if format else ExpertMatrix(matrix)
            self.add_module(matrix.target, made)
        op = ops.quantized_experts if formats else ops.experts
        self._bound = op.bound(bodies.get(op.name, ops.REFERENCE))
        given = (shape.inner, formats["up.weight"], formats["down.weight"]) if formats else ()
        self._after = (*given, *shape.gate)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, up, down, compute = hidden_states, self.up, self.down, self._bound
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            if isinstance(up, QuantizedExpertMatrix) or self._combine is not None:
                return unrecorded(Experts.forward, self, hidden_states, top_k_index, top_k_weights)
            compute = ops.experts.bound(ops.REFERENCE)  # which has gradients, as lone linears do
        if isinstance(up, ExpertMatrix):
            x = x.to(up.weight.dtype)  # some blocks compute in float32 around experts in 16 bits
        elif isinstance(down, QuantizedExpertMatrix) and not (up.prepared and down.prepared):
            self._use_reference(up, down)
        y = compute(x, top_k_index, top_k_weights, *up.arguments(), *down.arguments(), *self._after)
        y = y if self._combine is None else self._combine(y)
        return y.to(hidden_states.dtype)

    def _use_reference(self, *matrices: QuantizedExpertMatrix) -> None:
        """The layout of the body declined the codes of one matrix: the reference computes with both."""
        for matrix in matrices:
            if matrix.prepared:
                matrix.unprepare()
        self._bound = ops.quantized_experts.bound(ops.REFERENCE)


def _bias(matrix: Matrix) -> nn.Parameter | None:
    if not matrix.bias:
        return None
    return nn.Parameter(torch.empty(matrix.outputs, device="meta"), requires_grad=False)
