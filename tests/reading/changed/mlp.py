"""Changed MLPs: activations, packing, linears, and what stands around them. See tests/reading/layers.py for the
legend.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reading.cases import DECODER, EITHER, LEFT, READ, WORDS, Case
from tests.reading.layers import MLP, Config, GatedMLP, RMSNorm

# ---- activations ----


class Relu(MLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.relu(x)


class SquaredRelu(MLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.relu(x).pow(2)


class CubedRelu(MLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.relu(x).pow(3)


class SquaredReluBySelf(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        x = torch.clamp(x, min=0)
        return x * x


class SiluWrittenOut(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class SiluOfOtherSlope(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.5 * x)


class QuickGeluWrittenOut(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class QuickGeluRounded(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.7 * x)


class GeluWrittenOut(MLP):
    def activation(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class GeluTanhWrittenOut(MLP):
    def activation(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class GeluTanhOfOtherConstant(MLP):
    def activation(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.05 * torch.pow(x, 3.0))))


class GeluTanh(MLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class ReluClamped(MLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.relu6(4 * x) / 4


class LeakyRelu(MLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, 0.01)


class Softplus(MLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.softplus(x)


class ActivationOfLayer(GatedMLP):
    """Layers of one class, with another function each."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.function = (F.silu, F.relu)[layer_idx]

    def activation(self, x: Tensor) -> Tensor:
        return self.function(x)


class HalfOfEach(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((F.silu(first), F.gelu(second)), dim=-1)


class NoActivation(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        return x


class OtherBeyond16Tokens(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.silu(x) if x.shape[1] <= 16 else F.gelu(x)


class OtherForOneToken(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x) if x.shape[1] == 1 else F.silu(x)


class OtherForOneText(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x) if x.shape[0] == 1 else F.silu(x)


class OtherForSevenTokens(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x) if x.shape[1] == 7 else F.silu(x)


class OtherForMultiplesOf8(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x) if x.shape[1] % 8 == 0 else F.silu(x)


class OtherForMoreThanTwoTexts(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x) if x.shape[0] > 2 else F.silu(x)


class OtherForLargeValues(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        return F.silu(x) if x.abs().max() < 4 else F.gelu(x)


class OtherForLargeElements(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        return torch.where(x > 2, x, F.silu(x))


# ---- gates, packing, linears ----


class UpActivated(GatedMLP):
    def inner(self, x: Tensor) -> Tensor:
        return self.gate_proj(x) * self.activation(self.up_proj(x))


class BothActivated(GatedMLP):
    def inner(self, x: Tensor) -> Tensor:
        return self.activation(self.gate_proj(x)) * self.activation(self.up_proj(x))


class GateAdded(GatedMLP):
    def inner(self, x: Tensor) -> Tensor:
        return self.activation(self.gate_proj(x)) + self.up_proj(x)


class UpScaled(GatedMLP):
    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) * 1.01


class UpOffset(GatedMLP):
    def inner(self, x: Tensor) -> Tensor:
        return self.activation(self.gate_proj(x)) * (self.up_proj(x) + 1)


class UpClamped(GatedMLP):
    def inner(self, x: Tensor) -> Tensor:
        return self.activation(self.gate_proj(x)) * self.up_proj(x).clamp(-1, 1)


class InnerNormed(GatedMLP):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.norm = RMSNorm(config.intermediate_size)

    def inner(self, x: Tensor) -> Tensor:
        return self.norm(super().inner(x))


class PackedGate(GatedMLP):
    """[gate | up] in one linear."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        del self.gate_proj, self.up_proj

    def inner(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.activation(gate) * up


class PackedUpFirst(PackedGate):
    def inner(self, x: Tensor) -> Tensor:
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.activation(gate) * up


class PackedInTurns(PackedGate):
    def inner(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        return self.activation(both[..., ::2]) * both[..., 1::2]


class PackedOverlapping(PackedGate):
    """Gate and up share rows of the linear."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.gate_up_proj = nn.Linear(config.hidden_size, config.intermediate_size + 40, bias=False)

    def inner(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        return self.activation(both[..., :80]) * both[..., 40:]


class InSequence(nn.Sequential):
    def __init__(self, config: Config, layer_idx: int):
        up, down = (
            nn.Linear(config.hidden_size, config.intermediate_size),
            nn.Linear(config.intermediate_size, config.hidden_size),
        )
        super().__init__(up, nn.GELU(), nn.Dropout(0.1), down)


class OwnLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs).normal_())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class OfOwnLinears(GatedMLP):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.up_proj = OwnLinear(config.hidden_size, config.intermediate_size)


class TransposedLinear(OwnLinear):
    """Its weight is [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class OfTransposedLinears(GatedMLP):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.up_proj = TransposedLinear(config.hidden_size, config.intermediate_size)
        self.gate_proj = TransposedLinear(config.hidden_size, config.intermediate_size)


class WeightScaled(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(x), self.down_proj.weight * 1.01)


class WeightRolled(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(x), self.down_proj.weight.roll(1, 0))


class WeightOfOther(GatedMLP):
    """The gate's linear computes with the weight of up, too."""

    def inner(self, x: Tensor) -> Tensor:
        return self.activation(self.gate_proj(x)) * F.linear(x, self.gate_proj.weight + self.up_proj.weight)


class BiasOfDown(GatedMLP):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)


class BiasOfGate(GatedMLP):
    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)


class BiasApart(GatedMLP):
    """A bias that no linear has."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.shift = nn.Parameter(torch.zeros(config.intermediate_size))

    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) + self.shift


# ---- around the MLP ----


class ResidualInside(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Nested(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class DownScaled(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.01


class DownActivated(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.activation(super().forward(x))


class TwoInOne(GatedMLP):
    """The sum of two."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.other = GatedMLP(config, layer_idx)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.other(x)


class WeighedByToken(GatedMLP):
    """A weight for each token, as shared experts have it."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.token_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(self.token_gate(x))


class InChunks(GatedMLP):
    """The same function, by a loop over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([GatedMLP.forward(self, part) for part in x.split(8, dim=1)], dim=1)


class TokenByToken(GatedMLP):
    """The same function, by a loop over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([GatedMLP.forward(self, x[:, token]) for token in range(x.shape[1])], dim=1)


class Experts(GatedMLP):
    """Two, both for each token."""

    def __init__(self, config: Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.other, self.router = GatedMLP(config, layer_idx), nn.Linear(config.hidden_size, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.softmax(self.router(x), dim=-1).split(1, dim=-1)
        return first * super().forward(x) + second * self.other(x)


class Called(GatedMLP):
    """Its forward is not all of a call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 1.01


class InnerOfLayer(GatedMLP):
    """Each layer has another inner width."""

    def __init__(self, config: Config, layer_idx: int):
        own = copy.copy(config)
        own.intermediate_size = (80, 56)[layer_idx]
        super().__init__(own, layer_idx)


class Pooled(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=1, keepdim=True))


def _like(mlp: type) -> dict[str, Any]:
    return {"like": replace(DECODER, mlp=mlp)}


CASES = (
    Case("squared relu", READ, mlp=SquaredRelu, **_like(Relu)),
    Case("silu written out", READ, mlp=SiluWrittenOut, like=None),
    Case("silu of another slope", LEFT, mlp=SiluOfOtherSlope, **_like(QuickGeluWrittenOut)),
    Case("relu clamped", LEFT, mlp=ReluClamped, **_like(Relu)),
    Case("leaky relu", LEFT, mlp=LeakyRelu, words=("leaky",), **_like(Relu)),
    Case("another activation in each layer", READ, mlp=ActivationOfLayer),
    Case("another activation beyond 16 tokens", LEFT, mlp=OtherBeyond16Tokens, words=WORDS["branch"]),
    Case("another activation for one token", LEFT, mlp=OtherForOneToken, words=WORDS["branch"]),
    Case("another activation for one text", LEFT, mlp=OtherForOneText, words=WORDS["branch"]),
    Case("another activation for large values", LEFT, mlp=OtherForLargeValues, words=WORDS["values"]),
    Case("another activation beyond 16 tokens, in one layer", LEFT, mlp=OtherBeyond16Tokens, only=(1,)),
    Case("gate and up packed", READ, mlp=PackedGate, like=None),
    Case("up and gate packed", READ, mlp=PackedUpFirst, **_like(PackedGate)),
    Case("a sequence", READ, mlp=InSequence, like=None),
    Case("transposed linears", EITHER, mlp=OfTransposedLinears, words=("matmul", "mm"), like=None),
    Case("a weight scaled", LEFT, mlp=WeightScaled),
    Case("a residual inside", LEFT, mlp=ResidualInside),
    Case("two MLPs", EITHER, mlp=TwoInOne, words=("other",)),
)
VARIANTS = (
    Case("relu", READ, mlp=Relu, **_like(MLP)),
    Case("cubed relu", LEFT, mlp=CubedRelu, words=("pow",), **_like(SquaredRelu)),
    Case("squared relu of a gate", EITHER, mlp=SquaredReluBySelf),
    Case("quick gelu written out", READ, mlp=QuickGeluWrittenOut),
    Case("quick gelu, rounded", LEFT, mlp=QuickGeluRounded, **_like(QuickGeluWrittenOut)),
    Case("gelu written out", READ, mlp=GeluWrittenOut, like=None),
    Case("gelu by tanh", READ, mlp=GeluTanh, **_like(MLP)),
    Case("gelu by tanh written out", READ, mlp=GeluTanhWrittenOut, **_like(MLP)),
    Case("gelu by tanh of another constant", LEFT, mlp=GeluTanhOfOtherConstant, **_like(GeluTanh)),
    Case("softplus", LEFT, mlp=Softplus, words=("softplus",), **_like(MLP)),
    Case("two activations in one", LEFT, mlp=HalfOfEach),
    Case("no activation", LEFT, mlp=NoActivation, words=("activation",)),
    Case("another activation for seven tokens", LEFT, mlp=OtherForSevenTokens, words=WORDS["branch"]),
    Case("another activation for multiples of 8", LEFT, mlp=OtherForMultiplesOf8, words=WORDS["branch"]),
    Case("another activation for three texts", LEFT, mlp=OtherForMoreThanTwoTexts, words=WORDS["branch"]),
    Case("another activation for large elements", LEFT, mlp=OtherForLargeElements, words=("where",)),
    Case("up activated", READ, mlp=UpActivated),
    Case("both activated", LEFT, mlp=BothActivated),
    Case("gate added", LEFT, mlp=GateAdded),
    Case("up scaled", EITHER, mlp=UpScaled),
    Case("up offset", LEFT, mlp=UpOffset),
    Case("up clamped", LEFT, mlp=UpClamped, words=("clamp",)),
    Case("normed before down", LEFT, mlp=InnerNormed, words=("norm",)),
    Case("gate and up packed in turns", LEFT, mlp=PackedInTurns, **_like(PackedGate)),
    Case("gate and up overlapping", LEFT, mlp=PackedOverlapping, like=None),
    Case("a linear of its own", READ, mlp=OfOwnLinears, like=None),
    Case("a weight rolled", LEFT, mlp=WeightRolled),
    Case("a sum of weights", LEFT, mlp=WeightOfOther),
    Case("a bias of down alone", READ, mlp=BiasOfDown),
    Case("a bias of gate alone", EITHER, mlp=BiasOfGate, words=("bias",)),
    Case("a bias apart", LEFT, mlp=BiasApart),
    Case("nested", LEFT, mlp=Nested, words=("gate_proj", "twice")),
    Case("down scaled", EITHER, mlp=DownScaled),
    Case("down activated", LEFT, mlp=DownActivated),
    Case("weighed for each token", LEFT, mlp=WeighedByToken),
    Case("in chunks of tokens", EITHER, mlp=InChunks, words=("split", *WORDS["branch"]), like=None),
    Case("token by token", EITHER, mlp=TokenByToken, words=("select", "stack", *WORDS["branch"]), like=None),
    Case("two experts", LEFT, mlp=Experts, words=("other", "router", "softmax")),
    Case("an MLP that is called otherwise", EITHER, mlp=Called, words=("__call__",)),
    Case("another inner width in each layer", READ, mlp=InnerOfLayer, like=None),
    Case("without the mean of the tokens", LEFT, mlp=Pooled, words=("mean",)),
)
