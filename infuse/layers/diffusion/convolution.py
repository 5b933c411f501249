"""GroupNorm and convolutions over images, and the residual blocks and upsampling that are made of them.

Suffixes: B batch, C channels, H rows, W columns. Images lie in memory as the convolutions' weights do: channels last
if a component is converted to it, else contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from infuse import ops
from infuse.architectures.unet import ConvShape, GroupNormShape, ResnetShape, UpsampleShape
from infuse.errors import UnsupportedCall
from infuse.layers.contract import refuse_unknown
from infuse.layers.diffusion.derived import Derived
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.linear import direct, untouched
from infuse.layers.surroundings import Surroundings


class GroupNorm(nn.Module):
    """act(norm(x + added)) over groups of channels; `added` [B, C] and SiLU are optional."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, shape: GroupNormShape, bodies: Mapping[str, str]):
        super().__init__()
        self._body = ops.group_norm.bound(bodies.get("group_norm", ops.REFERENCE))
        self._groups, self._eps = shape.groups, shape.eps
        for name in ("weight", "bias"):
            empty = nn.Parameter(torch.empty(shape.channels), requires_grad=False) if shape.affine else None
            self.register_parameter(name, empty)

    def forward(
        self, x: Tensor, added: Tensor | None = None, *, silu: bool = False, out: Tensor | None = None
    ) -> Tensor:
        held = self._parameters
        given = (x, held["weight"], held["bias"], added, self._groups, self._eps, silu)
        return self._body(*given) if out is None or is_compiling() else self._body(*given, out)


def make_conv(shape: ConvShape) -> nn.Conv2d:
    conv = nn.Conv2d(shape.inputs, shape.outputs, shape.kernel, padding=shape.kernel // 2, bias=shape.bias)
    return conv.requires_grad_(False)


def laid_as(conv: nn.Module, x: Tensor) -> Tensor:
    """x in the layout of the convolution's weight: a copy after modules that return the other one."""
    weight: Any = conv._parameters.get("weight")
    last = torch.channels_last
    if weight is None or not weight.is_contiguous(memory_format=last) or weight.is_contiguous():
        return x
    return x.contiguous(memory_format=last)


class Resnet(InferenceModule):
    """forward(input_tensor [B, C, H, W], temb [B, E] or None) -> [B, C', H, W], as diffusers' ResnetBlock2D."""

    def __init__(self, shape: ResnetShape, surroundings: Surroundings):
        super().__init__()
        bodies, time = surroundings.bodies, shape.time
        self.norm1, self.norm2 = GroupNorm(shape.norm1, bodies), GroupNorm(shape.norm2, bodies)
        self.conv1, self.conv2 = make_conv(shape.conv1), make_conv(shape.conv2)
        self.add_module("conv_shortcut", None if shape.conv_shortcut is None else make_conv(shape.conv_shortcut))
        self.add_module("time_emb_proj", None if time is None else surroundings.linear(time))
        self._silu = ops.activation.bound(bodies.get("activation", ops.REFERENCE))
        self._bare, self._scale = shape.bare, shape.scale

    def forward(self, input_tensor: Tensor, temb: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:
            refuse_unknown("ResnetBlock2D", args, kwargs, ("temb",))
        if torch.is_grad_enabled() and is_recorded(self, input_tensor):
            return unrecorded(Resnet.forward, self, input_tensor, temb)
        parts: dict[str, Any] = self._modules
        conv1, conv2, shortcut = parts["conv1"], parts["conv2"], parts["conv_shortcut"]
        x = laid_as(conv1, input_tensor)
        added, time = None, parts["time_emb_proj"]
        if (temb is None) is not (time is None):
            how = "without temb, which it projects" if temb is None else "with temb, for which it has no projection"
            raise UnsupportedCall(f"ResnetBlock2D was called {how}")
        if temb is not None:
            added = direct(time, temb if self._bare else self._silu(temb, "silu"))
        y = conv1(parts["norm1"](x, silu=True))
        # The result of a convolution is written over unless a hook may have kept it: a fresh tensor of 64 MiB costs
        # four times the time of the norm, in page faults.
        y = parts["norm2"](y, added, silu=True, out=y if untouched(conv1) else None)
        y = conv2(y)
        if shortcut is not None:
            x = shortcut(x)
        y = y.add_(x) if untouched(conv2) else y + x
        return y if self._scale == 1.0 else y.div_(self._scale)


class Upsample(InferenceModule):
    """forward(hidden_states [B, C, H, W], output_size=None) -> [B, C', 2 H, 2 W], as diffusers' Upsample2D.

    On CPUs four convolutions with 2 x 2 weights make the four phases of the result from the small image: 4/9 of the
    operations, and the large image is never in memory.
    """

    def __init__(self, shape: UpsampleShape, surroundings: Surroundings):
        super().__init__()
        self.conv = make_conv(shape.conv)
        self._phases = Derived()

    def forward(self, hidden_states: Tensor, output_size: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:
            refuse_unknown("Upsample2D", args, kwargs, ("output_size",))
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            return unrecorded(Upsample.forward, self, hidden_states, output_size)
        conv: Any = self.conv
        x = laid_as(conv, hidden_states)
        _, _, rows, columns = x.shape
        doubled = output_size is None or tuple(output_size) == (2 * rows, 2 * columns)
        if not doubled or x.device.type != "cpu" or is_compiling() or not untouched(conv):
            return conv(F.interpolate(x, output_size or (2 * rows, 2 * columns), mode="nearest"))
        phases: list[Tensor] = self._phases.of((conv.weight,), lambda: phase_weights(conv.weight))
        layout = torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
        sizes = (x.shape[0], conv.out_channels, 2 * rows, 2 * columns)
        y = torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=layout)
        for number, weight in enumerate(phases):
            down, right = divmod(number, 2)
            made = F.conv2d(x, weight, conv.bias, padding=1)  # also of the neighbours outside, on the other side
            y[:, :, down::2, right::2] = made[:, :, down : down + rows, right : right + columns]
        return y


def phase_weights(weight: Tensor) -> list[Tensor]:
    """Weights [4][C', C, 2, 2] of the four phases (upper left, upper right, lower left, lower right) of an upsampling.

    Two of the three rows of `weight` [C', C, 3, 3] see the same row of the small image, and so do two of its columns.
    """
    wide = weight.detach().float()
    rows = (
        (wide[:, :, :1], wide[:, :, 1:].sum(2, keepdim=True)),
        (wide[:, :, :2].sum(2, keepdim=True), wide[:, :, 2:]),
    )
    found = []
    for pair in rows:
        of_rows = torch.cat(pair, 2)
        for both in (
            (of_rows[..., :1], of_rows[..., 1:].sum(3, keepdim=True)),
            (of_rows[..., :2].sum(3, keepdim=True), of_rows[..., 2:]),
        ):
            made = torch.cat(both, 3).to(weight.dtype)
            last = weight.is_contiguous(memory_format=torch.channels_last)
            found.append(made.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format))
    return found
