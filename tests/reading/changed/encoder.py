"""Changed layers of the encoder. See tests/reading/layers.py for the legend."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reading.cases import EITHER, ENCODER, LEFT, READ, WORDS, Case
from tests.reading.layers import MLP, Config, EncoderAttention, EncoderLayer, Pieces, RMSNorm


class NormFirst(EncoderLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        x = hidden_states + self.attended(self.norm1(hidden_states), attention_mask, **kwargs)
        return x + self.transformed(self.norm2(x))


class NormOfBranches(EncoderLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        x = hidden_states + self.norm1(self.attended(hidden_states, attention_mask, **kwargs))
        return x + self.norm2(self.transformed(x))


class NormFirstThenLast(EncoderLayer):
    """Before attention, and after the MLP's sum."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        x = hidden_states + self.attended(self.norm1(hidden_states), attention_mask, **kwargs)
        return self.norm2(x + self.transformed(x))


class NoResidual(EncoderLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        x = self.norm1(self.attended(hidden_states, attention_mask, **kwargs))
        return self.norm2(x + self.transformed(x))


class ResidualOfInput(EncoderLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        x = self.norm1(hidden_states + self.attended(hidden_states, attention_mask, **kwargs))
        return self.norm2(hidden_states + self.transformed(x))


class OneNormForBoth(EncoderLayer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.norm2 = self.norm1


class InTuple(EncoderLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        return (super().forward(hidden_states, attention_mask, **kwargs),)


class MaskIgnored(EncoderLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(hidden_states, None, **kwargs)


class PaddingZeroed(EncoderLayer):
    """Where the mask hides a token, its hidden states become zeros."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        x = super().forward(hidden_states, attention_mask, **kwargs)
        return x if attention_mask is None else x * attention_mask[:, 0, -1, :, None].to(x.dtype)


class OtherwiseMasked(EncoderLayer):
    def transformed(self, x: Tensor) -> Tensor:
        return super().transformed(x)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        scale = 1.0 if attention_mask is None else 1.5
        x = self.norm1(hidden_states + scale * self.attended(hidden_states, attention_mask, **kwargs))
        return self.norm2(x + self.transformed(x))


class MeanAdded(EncoderLayer):
    def attended(self, x: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
        return super().attended(x, mask, **kwargs) + x.mean(1, keepdim=True)


class Centered(EncoderLayer):
    """Texts of a batch depend on each other."""

    def transformed(self, x: Tensor) -> Tensor:
        return super().transformed(x - x.mean(0, keepdim=True))


class ByFourier(EncoderLayer):
    def attended(self, x: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
        return super().attended(x, mask, **kwargs) + torch.fft.fft2(x).real / x.shape[1]


class Causal(EncoderAttention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = True


class CausalByKeyword(EncoderAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        return super().attend(q, k, v, mask, **{**kwargs, "is_causal": True})


class OtherScale(EncoderAttention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.scaling = 0.3


class ScaleByLength(EncoderAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        return super().attend(q * math.log2(q.shape[2] + 1), k, v, mask, **kwargs)


class KeysUnbiased(EncoderAttention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.key = nn.Linear(config.hidden_size, self.key.out_features, bias=False)


class Packed(EncoderAttention):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.projections = nn.Linear(config.hidden_size, 3 * self.query.out_features)
        del self.query, self.key, self.value

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.projections(x).chunk(3, dim=-1)
        return self.heads(q), self.heads(k), self.heads(v)


class OfOtherHeads(EncoderAttention):
    """Each head of queries meets its neighbour's keys."""

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x)
        return q, k.roll(1, 1), v


class ConvolvedQueries(EncoderAttention):
    """Queries of a token are made of its neighbours, too."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        width = self.query.out_features
        self.near = nn.Conv1d(width, width, 3, padding=1, groups=width, bias=False)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.near(self.query(x).transpose(1, 2)).transpose(1, 2)
        return self.heads(q), self.heads(self.key(x)), self.heads(self.value(x))


class Masked(EncoderAttention):
    """Each token sees seven neighbours."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
        places = torch.arange(q.shape[2], device=q.device)
        near = (places[:, None] - places).abs() < 4
        return super().attend(q, k, v, near[None, None] if mask is None else near & mask, **kwargs)


class GeluTanh(MLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class Elu(MLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.elu(x)


class OtherBeyond16Tokens(MLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x) if x.shape[-2] <= 16 else F.relu(x)


class NormedWithin(nn.LayerNorm):
    """Its bias counts twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


def _encoder(name: str, expected: str, **more: Any) -> Case:
    return Case(f"encoder: {name}", expected, of=ENCODER, **{"like": ENCODER, **more})


CASES = (
    _encoder("unchanged", READ, like=None),
    _encoder("norm first", READ, layer=NormFirst),
    _encoder("mask ignored", LEFT, layer=MaskIgnored, words=("mask",)),
    _encoder("otherwise if masked", LEFT, layer=OtherwiseMasked, words=("mask",)),
    _encoder("centered", LEFT, layer=Centered, words=("mean",)),
    _encoder("causal", EITHER, attention=Causal, words=("causal",)),
    _encoder("keys without a bias", READ, attention=KeysUnbiased, like=None),
    _encoder("gelu by tanh", READ, mlp=GeluTanh),
    _encoder("another activation beyond 16 tokens", LEFT, mlp=OtherBeyond16Tokens, words=WORDS["branch"]),
    _encoder("RMS norm", READ, norm=RMSNorm),
)
VARIANTS = (
    _encoder("norm of branches", READ, layer=NormOfBranches),
    _encoder("norm first, then last", EITHER, layer=NormFirstThenLast),
    _encoder("no residual", LEFT, layer=NoResidual),
    _encoder("residual of the input", LEFT, layer=ResidualOfInput),
    _encoder("one norm for both", EITHER, layer=OneNormForBoth, words=("held", "shared", "twice", "module"), like=None),
    _encoder("in a tuple", READ, layer=InTuple, like=None),
    _encoder("padding zeroed", LEFT, layer=PaddingZeroed, words=("mask",)),
    _encoder("mean added", LEFT, layer=MeanAdded, words=("mean",)),
    _encoder("Fourier transform", LEFT, layer=ByFourier, words=("fft",)),
    _encoder("causal by a keyword", EITHER, attention=CausalByKeyword, words=("causal",)),
    _encoder("another scale", READ, attention=OtherScale),
    _encoder("scaled by length", LEFT, attention=ScaleByLength, words=("log", "size")),
    _encoder("packed", READ, attention=Packed, like=None),
    _encoder("keys of other heads", LEFT, attention=OfOtherHeads, words=("roll",)),
    _encoder("queries of neighbours", LEFT, attention=ConvolvedQueries, words=("conv",)),
    _encoder("neighbours alone", LEFT, attention=Masked, words=("mask", "arange")),
    _encoder("elu", LEFT, mlp=Elu, words=("elu",)),
    _encoder("norm with its bias twice", LEFT, norm=NormedWithin, words=("bias",)),
    _encoder("RMS norm, norm first", READ, layer=NormFirst, norm=RMSNorm, like=replace(ENCODER, layer=NormFirst)),
)
