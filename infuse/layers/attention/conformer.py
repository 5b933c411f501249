"""What conformers have beside feed-forwards: attention with scores by distance, and a convolution over time.

Suffixes: B batch, H heads, K key/value heads, T frames, N distances, D head width, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.families.conformer import (
    BatchNormShape,
    ConvolutionShape,
    DistanceShape,
    FactorShape,
    RelativeAttentionShape,
)
from infuse.ground.errors import UnsupportedCall
from infuse.ground.modes import is_traced
from infuse.layers.attention.disentangled import placed_by_distance
from infuse.layers.attention.named_attention import named_attention
from infuse.layers.attention.position import additive, missing
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.called_part import CalledPart
from infuse.layers.calls.inputs import Inputs
from infuse.layers.gradient import InferenceModule
from infuse.layers.linear import direct
from infuse.layers.mixer import Mixer
from infuse.layers.norm import Norm


class RelativeAttention(Mixer[RelativeAttentionShape]):
    """`mix` returns (output [B, T, C], weights [B, H, T, T] or None)."""

    calls_named = True

    def __init__(self, shape: RelativeAttentionShape, context: BuildContext):
        super().__init__(shape, context)
        for matrix in shape.matrices:
            self.add_module(matrix.target, context.linear(matrix))
        sizes: dict[str, tuple[int, int]] = {}
        if shape.by_vector:
            sizes = dict.fromkeys(("content_bias", "distance_bias"), (shape.heads, shape.head_width))
        elif shape.distances is not None:
            sizes = {"table": (shape.distances.left + shape.distances.right + 1, shape.head_width)}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size), requires_grad=False))
        self._attend = ops.attention.bound(context.bodies.get("attention", ops.REFERENCE))

    def mix(self, x_BTC: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        shape = self.shape
        parts: dict[str, Any] = self._modules
        if inputs.cache is not None or inputs.causal:
            raise UnsupportedCall(f"{shape.name} sees all frames at once: it takes no cache and no causal order")
        qkv_BNTD = direct(parts["qkv"], x_BTC).unflatten(-1, (-1, shape.head_width)).transpose(1, 2)
        q, k, v = qkv_BNTD.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        scores = self._scores(q, inputs)
        if shape.by_vector:
            q = q + self.content_bias[:, None]  # type: ignore[index, operator]
        if inputs.more is not None:
            out, weights = self._by_name(q, k, v, scores, inputs)
            return direct(parts["out"], out), weights
        mask = self._masked(scores, inputs.mask, q.dtype, q.shape[2])
        out = self.attend(q, k, v, mask, None, shape.scale, False, 0, 0.0, None).flatten(2)
        weights = None
        if inputs.want_weights:
            weights = ops.attention_weights(q, k, mask, None, shape.scale, False, 0, 0.0).to(q.dtype)
            if shape.head_counts:
                weights = self._group.all_gather(weights, shape.head_counts, 1, f"weights of {shape.name}")
        return direct(parts["out"], out), weights

    def _scores(self, q_BHTD: Tensor, inputs: Inputs) -> Tensor | None:
        """Scores of the queries with distances, [B, H, T, T]."""
        distances, tokens = self.shape.distances, q_BHTD.shape[2]
        if distances is None:
            return None
        if self.shape.by_vector:
            keys_BHDN = self._keys(distances, inputs, tokens)
            products = torch.matmul(q_BHTD + self.distance_bias[:, None], keys_BHDN)  # type: ignore[index, operator]
        else:
            table: Any = self.table
            line = torch.arange(1 - tokens, tokens, device=table.device).clamp(-distances.left, distances.right)
            products = torch.matmul(q_BHTD, table.t()).index_select(-1, line + distances.left)
        return placed_by_distance(products) * self.shape.scale

    def _keys(self, distances: DistanceShape, inputs: Inputs, tokens: int) -> Tensor:
        """Keys of the distances T - 1, ..., 1 - T: [B or 1, H, D, N]."""
        vectors: Any = inputs.values[distances.argument]
        if vectors is None:
            raise missing(distances.argument)
        wanted = [2 * tokens - 1, self.shape.hidden]
        if not isinstance(vectors, Tensor) or [*vectors.shape[1:]] != wanted:
            found = [*vectors.shape] if isinstance(vectors, Tensor) else type(vectors).__name__
            raise UnsupportedCall(f"{distances.argument} is {found}, not [batch or 1, {wanted[0]}, {wanted[1]}]")
        is_read = vectors.device.type == "cpu" and not is_traced()  # elsewhere the host would wait
        if is_read and len(vectors) > 1 and torch.equal(vectors[1:], vectors[:1].expand_as(vectors[1:])):
            vectors = vectors[:1]
        made = direct(self._modules["distances"], vectors)  # type: ignore[arg-type]
        return made.unflatten(-1, (-1, self.shape.head_width)).permute(0, 2, 3, 1)

    def _masked(self, scores: Tensor | None, mask: Tensor | None, dtype: torch.dtype, tokens: int) -> Tensor | None:
        """Scores and mask as one mask. A query that sees nothing sees all alike, as in the original."""
        if mask is None:
            return scores
        if mask.shape[-1] != tokens or mask.shape[-2] not in (1, tokens):
            raise UnsupportedCall(f"attention_mask has shape {[*mask.shape]}, and this call has {tokens} frames")
        shape = self.shape
        if shape.head_counts and mask.shape[1] > 1:
            mask = mask[:, shape.first_head : shape.first_head + shape.heads]
        if scores is None or mask.dtype != torch.bool:
            mask = additive(mask, dtype)
            return mask if scores is None else scores + mask
        return scores.masked_fill(~mask, torch.finfo(dtype).min)

    def _by_name(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Tensor | None, inputs: Inputs
    ) -> tuple[Tensor, Tensor | None]:
        """Attend by the function that the config names, called as the original does: (heads [B, T, H D], weights)."""
        self.check_named(None, over_ranks=bool(self.shape.head_counts))
        mask, more = inputs.mask, dict(inputs.more or {})
        if self.shape.passes_bias:
            more["position_bias"] = scores
        else:
            mask = self._masked(scores, mask, q.dtype, q.shape[2])
        out, weights = named_attention(self)(self, q, k, v, mask, dropout=0.0, scaling=self.shape.scale, **more)
        return out.flatten(2).contiguous(), weights


class BatchNorm(InferenceModule):
    """Batch norm by the running statistics, in float32."""

    num_batches_tracked: Tensor
    followed = frozenset({"eps"})

    def __init__(self, shape: BatchNormShape):
        super().__init__()
        for name in shape.tensors:
            self.register_parameter(name, nn.Parameter(torch.empty(shape.width), requires_grad=False))
        self.register_buffer("num_batches_tracked", torch.empty((), dtype=torch.long))  # only for state dicts
        self.eps = shape.eps

    def forward(self, x_BCT: Tensor) -> Tensor:
        held = self._parameters
        mean, var, weight, bias = (
            held[name].float()  # type: ignore[union-attr]
            for name in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x_BCT.float(), mean, var, weight, bias, False, 0.0, self.eps).to(x_BCT.dtype)


class Convolution(CalledPart):
    """Compute down(act(norm(depthwise(glu(up(x)))))), with zeros in the place of padding."""

    def __init__(self, shape: ConvolutionShape, context: BuildContext):
        super().__init__()
        self.shape = shape
        self.up, self.down = (context.linear(matrix) for matrix in shape.matrices)
        self.depthwise = nn.Conv1d(
            shape.channels,
            shape.channels,
            shape.kernel,
            groups=shape.channels,
            bias=shape.depthwise_bias,
            padding=shape.left if shape.left == shape.right else 0,
        ).requires_grad_(False)
        of_batches = isinstance(shape.norm, BatchNormShape)
        self.norm = BatchNorm(shape.norm) if of_batches else Norm(shape.norm, context.bodies)  # type: ignore[arg-type]
        self._act = ops.activation.bound(context.bodies.get("activation", ops.REFERENCE))

    def mix(self, x_BTC: Tensor, inputs: Inputs, mask_BT: Tensor | None = None) -> tuple[Tensor, None]:
        """Return the branch [B, T, C], and no attention weights. `mask_BT`: nonzero for frames, zero for padding."""
        shape = self.shape
        parts: dict[str, Any] = self._modules
        if shape.masks_input and mask_BT is not None:
            x_BTC = x_BTC.masked_fill(~mask_BT.bool().unsqueeze(-1), 0.0)
        y = F.glu(direct(parts["up"], x_BTC), dim=-1)
        if not shape.masks_input and inputs.mask is not None:
            y = y.masked_fill(_seen_by_none(inputs.mask, shape.reads_numbers), 0.0)
        y_BCT = y.transpose(1, 2)
        if shape.left != shape.right:
            y_BCT = F.pad(y_BCT, (shape.left, shape.right))
        y_BCT = direct(parts["depthwise"], y_BCT)
        if isinstance(shape.norm, BatchNormShape):
            y = direct(parts["norm"], y_BCT).transpose(1, 2).contiguous()
        else:
            y = direct(parts["norm"], y_BCT.transpose(1, 2).contiguous())
        y = self._act(y, shape.activation)
        return direct(parts["down"], y), None


def _seen_by_none(mask: Any, reads_numbers: bool) -> Tensor:
    """The frames that no query sees, [B, T, 1], of a mask [B, 1, T or 1, T]. Of numbers, zero means seen."""
    if reads_numbers and isinstance(mask, Tensor) and mask.is_floating_point():
        mask = mask == 0
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape[1] != 1:
        found = f"{mask.dtype} {[*mask.shape]}" if isinstance(mask, Tensor) else type(mask).__name__
        raise UnsupportedCall(
            f"attention_mask is {found}; the convolution reads padding from a boolean [batch, 1, frames or 1, frames]"
        )
    return ~mask.any(dim=2).transpose(1, 2)


class Factor(InferenceModule):
    """Compute x times a number."""

    def __init__(self, shape: FactorShape, context: BuildContext):
        super().__init__()
        self._number = shape.number

    def forward(self, x: Tensor) -> Tensor:
        return x * self._number
