"""Changed residual streams: where branches begin, how they are added, what happens to the stream itself, and what the
layer returns. See tests/reading/layers.py for the legend.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reading.cases import DECODER, EITHER, LEFT, READ, WORDS, Case
from tests.reading.layers import Config, GatedMLP, Layer, Pieces

Given = dict[str, Any]

# ---- residuals ----


class ResidualOfNormed(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        y = self.input_layernorm(x)
        x = y + self.self_attn(hidden_states=y, **given)[0]
        y = self.post_attention_layernorm(x)
        return y + self.mlp(y)


class ResidualOfNormedOnce(Layer):
    """Only attention's residual is normed."""

    def both(self, x: Tensor, given: Given) -> Tensor:
        y = self.input_layernorm(x)
        x = y + self.self_attn(hidden_states=y, **given)[0]
        return x + self.transformed(x)


class ResidualOfFirst(Layer):
    """The MLP's branch is added to the layer's input, so attention reaches the output only through the MLP."""

    def both(self, x: Tensor, given: Given) -> Tensor:
        return x + self.transformed(x + self.attended(x, given))


class ResidualTwice(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        attended = x + self.attended(x, given)
        return x + attended + self.transformed(attended)


class NoResidual(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + self.attended(x, given)
        return self.transformed(x)


class BranchScaled(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + self.attended(x, given) * 1.001
        return x + self.transformed(x) * 1.001


class BranchesScaledApart(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + self.attended(x, given) * 0.5
        return x + 1.5 * self.transformed(x)


class BranchScaledByLayer(Layer):
    """Layers of one class, with another scale each."""

    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.scale = 1.0 + 0.25 * layer_idx

    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + self.attended(x, given) * self.scale
        return x + self.transformed(x) * self.scale


class BranchScaledByConfig(Layer):
    """Asks the config in every call."""

    def both(self, x: Tensor, given: Given) -> Tensor:
        scale = self.self_attn.config.branch_scale
        x = x + self.attended(x, given) * scale
        return x + self.transformed(x) * scale


class BranchSubtracted(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x - self.attended(x, given)
        return x + self.transformed(x)


class BranchScaledByParameter(Layer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))

    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + self.attended(x, given)
        return x + self.transformed(x) * self.scale


class BranchScaledByBuffer(Layer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.register_buffer("scale", torch.tensor(1.5))

    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + self.attended(x, given) * self.scale
        return x + self.transformed(x)


class LayerScale(Layer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.lambda_1 = nn.Parameter(torch.linspace(0.5, 1.5, config.hidden_size))
        self.lambda_2 = nn.Parameter(torch.linspace(1.5, 0.5, config.hidden_size))

    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + self.lambda_1 * self.attended(x, given)
        return self.transformed(x) * self.lambda_2 + x


class LayerScaleOfSum(LayerScale):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = self.lambda_1 * (x + self.attended(x, given))
        return self.transformed(x) * self.lambda_2 + x


class LayerScaleOfStream(LayerScale):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = self.lambda_1 * x + self.attended(x, given)
        return self.transformed(x) * self.lambda_2 + x


class LayerScaleTwice(LayerScale):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + self.lambda_2 * (self.lambda_1 * self.attended(x, given))
        return x + self.transformed(x)


class LayerScaleOfTokens(LayerScale):
    """Multiplies another axis than the last."""

    def both(self, x: Tensor, given: Given) -> Tensor:
        attended = self.attended(x, given)
        x = x + (attended.transpose(1, 2) * self.lambda_1[: x.shape[1]]).transpose(1, 2)
        return self.transformed(x) * self.lambda_2 + x


class StreamScaled(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x * 1.001 + self.attended(x, given)
        return x + self.transformed(x)


class StreamScaledAtTheEnd(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        return super().both(x, given) * 1.001


class Parallel(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        return x + self.attended(x, given) + self.transformed(x)


class ParallelOfOneNorm(Layer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        del self.post_attention_layernorm

    def both(self, x: Tensor, given: Given) -> Tensor:
        y = self.input_layernorm(x)
        return x + (self.self_attn(hidden_states=y, **given)[0] + self.mlp(y))


class MLPOfFirstNorm(ParallelOfOneNorm):
    """Two sums, and the MLP reads what attention read: the same as parallel branches."""

    def both(self, x: Tensor, given: Given) -> Tensor:
        y = self.input_layernorm(x)
        x = x + self.self_attn(hidden_states=y, **given)[0]
        return x + self.mlp(y)


class Sandwich(Layer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.after_attention = pieces.norm(config.hidden_size, config.norm_eps)
        self.after_mlp = pieces.norm(config.hidden_size, config.norm_eps)

    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + self.after_attention(self.attended(x, given))
        return x + self.after_mlp(self.transformed(x))


class SandwichOfScaled(Sandwich):
    """The scale stands before the norm, where it would only change eps."""

    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + self.after_attention(self.attended(x, given) * 0.01)
        return x + self.after_mlp(self.transformed(x))


class NormOfSum(Layer):
    """The second norm is over the stream, which goes on normed; the first one is not."""

    def both(self, x: Tensor, given: Given) -> Tensor:
        x = self.post_attention_layernorm(x + self.attended(x, given))
        return x + self.mlp(x)


class MLPOfStream(Layer):
    """The MLP reads the stream as it is; its norm is not there."""

    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        del self.post_attention_layernorm

    def transformed(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class NormUnused(Layer):
    """The MLP reads the stream as it is; its norm is there for nothing."""

    def transformed(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class NormsExchanged(Layer):
    def attended(self, x: Tensor, given: Given) -> Tensor:
        return self.self_attn(hidden_states=self.post_attention_layernorm(x), **given)[0]

    def transformed(self, x: Tensor) -> Tensor:
        return self.mlp(self.input_layernorm(x))


class OneNormForBoth(Layer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.post_attention_layernorm = self.input_layernorm


class MLPFirst(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + self.transformed(x)
        return x + self.attended(x, given)


class MLPTwice(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = super().both(x, given)
        return x + self.transformed(x)


class SecondMLP(Layer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.more = GatedMLP(config, layer_idx)

    def both(self, x: Tensor, given: Given) -> Tensor:
        x = super().both(x, given)
        return x + self.more(self.post_attention_layernorm(x))


class AttentionTwice(Layer):
    """Without a cache this is possible; with one it appends twice."""

    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + self.attended(x, {**given, "cache": None, "attention_mask": None})
        return super().both(x, given)


# ---- the stream ----


class Clamped(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        return super().both(x, given).clamp(-2.0, 2.0)


class ClampedFarAway(Layer):
    """As layers do that were trained in half precision: no test input reaches the limit."""

    def both(self, x: Tensor, given: Given) -> Tensor:
        return super().both(x, given).clamp(-60000.0, 60000.0)


class Chosen(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = super().both(x, given)
        return torch.where(x > 1.0, x, x * 0.9)


class NumbersOnly(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        return torch.nan_to_num(super().both(x, given))


class Absolute(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        return super().both(x.abs(), given)


class Summed(Layer):
    def transformed(self, x: Tensor) -> Tensor:
        return super().transformed(x.cumsum(1) / 4)


class Rolled(Layer):
    def transformed(self, x: Tensor) -> Tensor:
        return super().transformed(x.roll(1, 1))


class Shifted(Layer):
    """Half of each token's features are those of the token before."""

    def transformed(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        return super().transformed(torch.cat((before[..., :24], x[..., 24:]), dim=-1))


class TokensAveraged(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = super().both(x, given)
        return x + 0.1 * x.mean(1, keepdim=True)


class TextsAveraged(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = super().both(x, given)
        return x - 0.1 * x.mean(0, keepdim=True)


class FirstTokenApart(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = super().both(x, given)
        return torch.cat((x[:, :1] * 1.01, x[:, 1:]), dim=1)


class LastTokenApart(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = super().both(x, given)
        return torch.cat((x[:, :-1], x[:, -1:] * 1.01), dim=1)


class FeaturesReversed(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        return super().both(x, given).flip(-1)


class PassedBy(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + self.attended(x, given)
        return x if x.shape[1] == 1 else x + self.transformed(x)


class ScaledByPosition(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        return super().both(x, given) * (1 + 0.01 * given["position_ids"].unsqueeze(-1))


class InHalf(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        return super().both(x.to(torch.float16).to(x.dtype), given)


class InDouble(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + self.attended(x, given)
        return (x.double() + self.transformed(x).double()).to(x.dtype)


class BiasAdded(Layer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.shift = nn.Parameter(torch.zeros(config.hidden_size))

    def both(self, x: Tensor, given: Given) -> Tensor:
        return super().both(x, given) + self.shift


class BufferAdded(Layer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, config.hidden_size), persistent=False)

    def both(self, x: Tensor, given: Given) -> Tensor:
        return super().both(x, given) + self.shift


class ParameterUnused(Layer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.idle = nn.Parameter(torch.ones(3))


class Dropped(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + F.dropout(self.attended(x, given), p=0.5, training=self.training)
        return x + F.dropout(self.transformed(x), p=0.5, training=self.training)


class AddedInPlace(Layer):
    """Writes only into tensors of its own."""

    def both(self, x: Tensor, given: Given) -> Tensor:
        x = self.attended(x, given).add_(x)
        x += self.transformed(x)
        return x


# ---- what it returns ----


class InTuple(Layer):
    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        return (super().forward(hidden_states, *args, **given),)


class InnerByPositions(Layer):
    """An argument of the layer, between the products of its MLP."""

    def both(self, x: Tensor, given: Given) -> Tensor:
        x = x + self.attended(x, given)
        inner = self.mlp.inner(self.post_attention_layernorm(x)) * (1 + 0.1 * given["position_ids"][..., None])
        return x + self.mlp.down_proj(inner)


class InnerByStream(Layer):
    """The layer's input, between the products of its MLP."""

    def both(self, x: Tensor, given: Given) -> Tensor:
        first, x = x, x + self.attended(x, given)
        return x + self.mlp.down_proj(self.mlp.inner(self.post_attention_layernorm(x)) + 0.1 * first[..., :1])


class WithMore(Layer):
    """The model adds what comes second to the last hidden states."""

    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        x = super().forward(hidden_states, *args, **given)
        return x, 0.1 * self.transformed(x)


class ReadsKeyword(Layer):
    def both(self, x: Tensor, given: Given) -> Tensor:
        strength = given.pop("strength", 1.0)
        return super().both(x, given) * strength


CASES = (
    Case("unchanged", READ, like=None),
    Case("residual of the normed stream", EITHER, layer=ResidualOfNormed, words=("residual",)),
    Case("residual of the layer's input", LEFT, layer=ResidualOfFirst, words=("residual",)),
    Case("residual twice", LEFT, layer=ResidualTwice, words=("residual",)),
    Case("branches scaled", READ, layer=BranchScaled),
    Case("branches scaled by layer", READ, layer=BranchScaledByLayer),
    Case("the stream scaled", LEFT, layer=StreamScaled),
    Case("layer scale", READ, layer=LayerScale),
    Case("layer scale of a sum", LEFT, layer=LayerScaleOfSum, words=("`mul`",)),
    Case("layer scale of the stream", LEFT, layer=LayerScaleOfStream, words=("`mul`",)),
    Case("layer scale twice", EITHER, layer=LayerScaleTwice, words=("`mul`",)),
    Case("layer scale of tokens", LEFT, layer=LayerScaleOfTokens, words=WORDS["branch"]),
    Case("parallel", READ, layer=Parallel),
    Case("sandwich", READ, layer=Sandwich),
    Case("MLP of the stream", EITHER, layer=MLPOfStream, words=("norm",)),
    Case("a norm unused", LEFT, layer=NormUnused, words=("post_attention_layernorm", *WORDS["unused"])),
    Case("one norm for both", EITHER, layer=OneNormForBoth, words=("held", "shared", "twice", "module"), like=None),
    Case("MLP twice", EITHER, layer=MLPTwice, words=("twice",)),
    Case("a second MLP", EITHER, layer=SecondMLP, words=("more",)),
    Case("clamped far away", LEFT, layer=ClampedFarAway, words=("clamp",), like=None),
    Case("chosen by value", LEFT, layer=Chosen, words=("where",)),
    Case("numbers only", LEFT, layer=NumbersOnly, words=("nan_to_num",), like=None),
    Case("absolute values", LEFT, layer=Absolute, words=("abs",)),
    Case("tokens summed", LEFT, layer=Summed, words=("cumsum",)),
    Case("tokens rolled", LEFT, layer=Rolled, words=("roll",)),
    Case("texts averaged", LEFT, layer=TextsAveraged, words=("mean",)),
    Case("one token passes by the MLP", LEFT, layer=PassedBy, words=WORDS["branch"]),
    Case("the stream in half precision", LEFT, layer=InHalf, words=("float16", "half")),
    Case("a bias added", LEFT, layer=BiasAdded, words=("shift",)),
    Case("a buffer added", LEFT, layer=BufferAdded, words=("shift",)),
    Case("a parameter unused", LEFT, layer=ParameterUnused, words=("idle",), like=None),
    Case("dropout", READ, layer=Dropped, like=None),
    Case("added in place", READ, layer=AddedInPlace, like=None),
    Case("in a tuple", READ, layer=InTuple, like=None),
    Case("in a tuple with more", LEFT, layer=WithMore, words=("returns", "output")),
    Case("inner values by positions", LEFT, layer=InnerByPositions),
    Case("inner values by the stream", LEFT, layer=InnerByStream),
    Case("reads a keyword", READ, layer=ReadsKeyword, words=("strength",), calls={"strength": 1.5}, like=None),
    Case("tokens summed, in one layer", LEFT, layer=Summed, words=("cumsum",), only=(0,)),
)
VARIANTS = (
    Case("residual of the normed stream, once", EITHER, layer=ResidualOfNormedOnce, words=("residual",)),
    Case("no second residual", LEFT, layer=NoResidual, words=("residual",)),
    Case("branches scaled apart", READ, layer=BranchesScaledApart),
    Case("branches scaled by the config", EITHER, layer=BranchScaledByConfig, words=("config",)),
    Case("a branch subtracted", EITHER, layer=BranchSubtracted),
    Case("a branch scaled by a parameter", READ, layer=BranchScaledByParameter),
    Case("a branch scaled by a buffer", LEFT, layer=BranchScaledByBuffer, words=("scale",)),
    Case("the stream scaled at the end", LEFT, layer=StreamScaledAtTheEnd),
    Case("parallel, of one norm", READ, layer=ParallelOfOneNorm),
    Case("MLP of the first norm", EITHER, layer=MLPOfFirstNorm),
    Case("sandwich, scaled before a norm", LEFT, layer=SandwichOfScaled, like=replace(DECODER, layer=Sandwich)),
    Case("norm of the sum", EITHER, layer=NormOfSum, words=("post_attention_layernorm",)),
    Case("norms exchanged", READ, layer=NormsExchanged),
    Case("MLP first", EITHER, layer=MLPFirst, words=("mlp", "self_attn")),
    Case("attention twice", LEFT, layer=AttentionTwice, words=("twice", "attention")),
    Case("clamped", LEFT, layer=Clamped, words=("clamp",)),
    Case("tokens shifted", LEFT, layer=Shifted),
    Case("tokens averaged", LEFT, layer=TokensAveraged, words=("mean",)),
    Case("the first token apart", LEFT, layer=FirstTokenApart),
    Case("the last token apart", LEFT, layer=LastTokenApart),
    Case("features reversed", LEFT, layer=FeaturesReversed, words=("flip",)),
    Case("the stream scaled by position", LEFT, layer=ScaledByPosition, words=("position",)),
    Case("a sum in double precision", EITHER, layer=InDouble, words=("float64", "double"), like=None),
)
