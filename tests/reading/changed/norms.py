"""Changed norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reading.cases import DECODER, EITHER, LEFT, READ, Case
from tests.reading.layers import Config, Layer, Pieces, RMSNorm


class Offset(RMSNorm):
    """Its weight is around 0, as Gemma's."""

    def __init__(self, width: int, eps: float):
        super().__init__(width, eps)
        nn.init.zeros_(self.weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (x * (1.0 + self.weight.float())).to(hidden_states.dtype)


class OffsetByLess(Offset):
    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (x * (0.9 + self.weight.float())).to(hidden_states.dtype)


class OtherEps(RMSNorm):
    def __init__(self, width: int, eps: float):
        super().__init__(width, 0.1)


class EpsOfLayer(Layer):
    """Layers of one class, with another eps each."""

    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.post_attention_layernorm.variance_epsilon = (1e-5, 0.1)[layer_idx]


class NoWeight(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class OfFunction(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)


class MeanSubtracted(RMSNorm):
    """A layer norm without a bias."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class LayerNormWrittenOut(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias


class LayerNormUnbiased(LayerNormWrittenOut):
    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias


class LayerNormEpsOutside(LayerNormWrittenOut):
    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False).sqrt()
        return (x - mean) / (deviation + 100 * self.eps) * self.weight + self.bias


class EpsOutside(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 0.01)


class EpsAsFloor(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(min=1.0))


class OfAbsolutes(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.variance_epsilon)


class OfSum(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.variance_epsilon)


class OfPart(RMSNorm):
    """The size is that of the first quarter of the features."""

    def forward(self, x: Tensor) -> Tensor:
        size = x[..., :12].pow(2).mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(size + self.variance_epsilon)


class InGroups(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, (4, -1))
        return self.weight * F.rms_norm(grouped, grouped.shape[-1:], eps=self.variance_epsilon).flatten(-2)


class OverTokens(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.variance_epsilon)


class OverAll(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean() + self.variance_epsilon)


class WeightSquared(RMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * self.weight


class WeightOfExponent(RMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.rms_norm(hidden_states, hidden_states.shape[-1:], torch.exp(self.weight), self.variance_epsilon)


class NotCentred(RMSNorm):
    """Divides by the deviation from the mean, and leaves the mean in."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.var(-1, correction=0, keepdim=True) + self.variance_epsilon)


class OneWeight(RMSNorm):
    def __init__(self, width: int, eps: float):
        super().__init__(width, eps)
        self.weight = nn.Parameter(torch.full((1,), 1.3))


class WeightInBuffer(RMSNorm):
    """A state dict lacks its weight."""

    def __init__(self, width: int, eps: float):
        super().__init__(width, eps)
        del self.weight
        self.register_buffer("weight", torch.linspace(0.5, 1.5, width), persistent=False)


class Biased(RMSNorm):
    def __init__(self, width: int, eps: float):
        super().__init__(width, eps)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + self.bias


class Scaled(RMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 1.01


class Twice(RMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(super().forward(hidden_states))


class TanhInstead(RMSNorm):
    """DyT: no norm at all."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.tanh(x * 0.5)


class InHalf(RMSNorm):
    """The product with the weight is in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.half() * y.half()).to(x.dtype)


def _like(norm: type) -> dict[str, Any]:
    return {"like": replace(DECODER, norm=norm)}


CASES = (
    Case("norm with an offset", READ, norm=Offset),
    Case("norm with another eps", READ, norm=OtherEps),
    Case("another eps in each layer", READ, layer=EpsOfLayer),
    Case("norm without a weight", READ, norm=NoWeight),
    Case("layer norm", READ, norm=nn.LayerNorm),
    Case("mean subtracted", READ, norm=MeanSubtracted),
    Case("norm with eps outside", LEFT, norm=EpsOutside),
    Case("norm over tokens", LEFT, norm=OverTokens),
    Case("norm of the variance alone", LEFT, norm=NotCentred),
    Case("norm with one weight", LEFT, norm=OneWeight, words=("`mul`",), like=None),
    Case("norm with its weight in a buffer", LEFT, norm=WeightInBuffer, words=("`mul`",), like=None),
)
VARIANTS = (
    Case("norm with another offset", READ, norm=OffsetByLess, **_like(Offset)),
    Case("norm by PyTorch's function", READ, norm=OfFunction, like=None),
    Case("PyTorch's norm", READ, norm=nn.RMSNorm, like=None),
    Case("layer norm written out", READ, norm=LayerNormWrittenOut),
    Case("layer norm of the unbiased variance", LEFT, norm=LayerNormUnbiased, **_like(nn.LayerNorm)),
    Case("layer norm with eps outside", LEFT, norm=LayerNormEpsOutside, **_like(nn.LayerNorm)),
    Case("norm with eps as a floor", LEFT, norm=EpsAsFloor, words=("clamp",)),
    Case("norm of absolute values", LEFT, norm=OfAbsolutes, words=("abs",)),
    Case("norm by the sum of squares", LEFT, norm=OfSum, words=("sum",)),
    Case("norm of a part", LEFT, norm=OfPart),
    Case("norm in groups", LEFT, norm=InGroups),
    Case("norm over all tokens and texts", LEFT, norm=OverAll),
    Case("norm with its weight squared", LEFT, norm=WeightSquared),
    Case("norm with its weight as an exponent", LEFT, norm=WeightOfExponent, words=("exp",)),
    Case("norm with a bias", EITHER, norm=Biased, words=("bias",)),
    Case("norm scaled", LEFT, norm=Scaled),
    Case("norm twice", LEFT, norm=Twice, words=("norm",)),
    Case("tanh for a norm", LEFT, norm=TanhInstead, words=("tanh",)),
    Case("norm in half precision", LEFT, norm=InHalf),
)
