"""Short convolution (LFM2): a gated causal convolution in place of attention. Its declaration, binding and shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.part import COLUMN, INNER, ROW, Extent, Matrix, MixerShape, Parameter, Share, named


@dataclass(frozen=True)
class CausalConv:
    """A convolution over time of each channel by itself, by a Conv1d that sees no later token."""

    path: str

    def bind(self, binder: Binder, name: str, channels: int) -> ConvShape:
        conv = binder.module(self.path)
        if not isinstance(conv, nn.Conv1d):
            binder.differ(f"{self.path} is a {type(conv).__name__}, not a Conv1d")
            return ConvShape(1, False)
        (taps,) = conv.kernel_size
        found = (conv.in_channels, conv.out_channels, conv.groups, conv.stride, conv.dilation, conv.padding_mode)
        if found != (channels, channels, channels, (1,), (1,), "zeros"):
            binder.differ(f"{self.path} does not convolve each of {channels} channels by itself")
        binder.fill_parameter(named(name, "conv"), f"{self.path}.weight", (channels, 1, taps))
        bias = f"{self.path}.bias" in binder.parameters
        if bias:
            binder.fill_parameter(named(name, "conv_bias"), f"{self.path}.bias", (channels,))
        return ConvShape(taps, bias)


@dataclass(frozen=True)
class ConvShape:
    """A bound CausalConv: the tokens that it sees, this one included, and whether it has a bias."""

    taps: int
    bias: bool

    def parameters(self, extents: tuple[Extent, ...]) -> tuple[Parameter, ...]:
        """Its weight "conv", [channels, 1, taps], and its bias "conv_bias"."""
        return (Parameter("conv", extents), *((Parameter("conv_bias", extents),) if self.bias else ()))


def check_silu(binder: Binder, module: str) -> None:
    """Convolutions of the mixer at the path `module` end with its activation: only SiLU is understood."""
    activation = binder.attribute(module, "activation")
    if activation not in ("silu", "swish"):
        binder.differ(f"{module}.activation is {activation!r}; only SiLU is understood")


class RecurrentShape(MixerShape):
    """A mixer with states, which has a ConvShape `conv` over `channels`. Its masks are over tokens."""

    causal = True
    inverted_mask = False
    takes_scores_mask: ClassVar[bool] = False


@dataclass(frozen=True)
class ShortConv:
    """y = out(c * conv(b * x)), with [b | c | x] = in(hidden), of the module at the path `module`."""

    module: str = "conv"

    def of_layer(self, layer: nn.Module, config: Any) -> ShortConv:
        return self

    def bind(self, binder: Binder, name: str) -> ShortConvShape:
        into, out = binder.linear(f"{self.module}.in_proj"), binder.linear(f"{self.module}.out_proj")
        channels = out.columns
        if (into.rows, out.rows) != (3 * channels, into.columns):
            binder.differ(
                f"{self.module}.in_proj makes {into.rows} of {into.columns}; out_proj {out.rows} of {channels}"
            )
        binder.fill_linear(f"{name}.in", (f"{self.module}.in_proj",), into.bias)
        binder.fill_linear(f"{name}.out", (f"{self.module}.out_proj",), out.bias)
        return ShortConvShape(
            hidden=into.columns,
            channels=channels,
            conv=CausalConv(f"{self.module}.conv").bind(binder, name, channels),
            in_bias=into.bias,
            out_bias=out.bias,
            replaces=(self.module,),
        )


@dataclass(frozen=True)
class ShortConvShape(RecurrentShape):
    """Dimensions of one short convolution. If ranks share it, the values are one rank's."""

    hidden: int
    channels: int
    conv: ConvShape
    in_bias: bool
    out_bias: bool
    replaces: tuple[str, ...] = ()

    @property
    def state_values(self) -> int:
        return self.channels * self.conv.taps

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        own = Extent(INNER, self.channels)
        return (
            Matrix("in", 3 * self.channels, self.hidden, self.in_bias, COLUMN, (own,) * 3),
            Matrix("out", self.hidden, self.channels, self.out_bias, ROW, (own,)),
        )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return *super().parameters, *self.conv.parameters((Extent(INNER, self.channels),))

    @property
    def ops(self) -> tuple[str, ...]:
        return ("causal_conv",)

    def of_rank(self, share: Share) -> ShortConvShape:
        return replace(self, channels=share.count(INNER), out_bias=self.out_bias and share.is_first)
