"""GroupNorm and convolutions over images, and the residual blocks and upsampling that are made of them.

Suffixes: B batch, C channels, H rows, W columns. Images lie in memory as the convolutions' weights do: channels last
if a component is converted to it, else contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infuse import ops
from infuse.diffusion.layers.buffers import MAPPED_BYTES, Buffers
from infuse.diffusion.layers.derived import Derived
from infuse.diffusion.shapes.unet import ConvShape, GroupNormShape, ResnetShape, UpsampleShape
from infuse.ground.errors import UnsupportedCall
from infuse.ground.modes import is_traced
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.contract import refuse_unknown
from infuse.layers.gradient import InferenceModule, Settled, is_recorded, unrecorded
from infuse.layers.linear import direct, has_no_hooks

# Results of convolutions of about this size stay in the caches: 128 channels of 512 x 512 in 64 MiB took 114 ms as a
# whole with the sum after it, 93 ms in strips of 8 MiB and 97 ms in strips of 4 MiB.
_STRIP_BYTES = 1 << 23
# Weights of 29 MiB over 8 x 8 pixels take 5.7 ms in oneDNN and 3.2 ms as a product, over 16 x 16 11.3 and 9.9 ms; of
# 59 MiB 46 and 22 ms, since the reordered weight is in new memory. Of 7 or 15 MiB over 32 x 32, oneDNN is faster.
_LEAST_WEIGHT_BYTES, _MOST_PIXELS, _MOST_PIXELS_LARGE = 1 << 22, 512, 1024


class GroupNorm(Settled):
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
        parameters = self._parameters
        arguments = (x, parameters["weight"], parameters["bias"], added, self._groups, self._eps, silu)
        return self._body(*arguments) if out is None or is_traced() else self._body(*arguments, out)


def silu_of(norm: Any, x: Tensor, added: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return silu(norm(x + added)), in one op unless the norm has hooks, which must see its own input and output."""
    if has_no_hooks(norm):
        return norm.forward(x, added, silu=True, out=out)  # type: ignore[no-any-return]
    return F.silu(norm(x if added is None else x + added[:, :, None, None]))


class Conv(nn.Conv2d):
    """A convolution that keeps the size of its image. On CPUs it computes small and large images in other ways.

    A large weight over a small image is one product with the nine neighbours of each pixel side by side, since oneDNN
    reorders the weight in each call. Large results are made in strips, whose memory stays in the caches.
    """

    def __init__(self, shape: ConvShape):
        super().__init__(shape.inputs, shape.outputs, shape.kernel, padding=shape.kernel // 2, bias=shape.bias)
        self._made_with = self._settings()
        self.requires_grad_(False)
        self.memory = Buffers()  # `share_memory` gives all convolutions of a model the same

    def _settings(self) -> tuple:
        return self.stride, self.padding, self.dilation, self.groups, self.padding_mode, vars(self).get("_conv_forward")

    @property
    def is_as_made(self) -> bool:
        """Whether no script has changed how it convolves, for images that tile or larger ones, as nn.Conv2d allows."""
        return type(self) is Conv and self._settings() == self._made_with

    def forward(self, x: Tensor) -> Tensor:
        return self.plus(x, None)

    def plus(self, x: Tensor, residual: Tensor | None, room: Tensor | None = None) -> Tensor:
        """Return residual + conv(x), possibly in `room`, which may be `residual`. Both are like the result."""
        how = None if x.device.type != "cpu" or is_traced() else self._way(x)
        if how is not None:
            return how(x, residual, room)
        y = super().forward(x)
        return y if residual is None else y.add_(residual)

    def _way(self, x: Tensor) -> Callable[[Tensor, Tensor | None, Tensor | None], Tensor] | None:
        """Return the method for an image of this size; None: PyTorch's convolution of the whole image."""
        weight = self._parameters["weight"]
        assert weight is not None
        if not self.is_as_made:
            return None
        last = torch.channels_last
        if not (x.dim() == 4 and x.is_contiguous(memory_format=last) and weight.is_contiguous(memory_format=last)):
            return None
        batch, _, rows, columns = x.shape
        pixels = batch * rows * columns
        if pixels * self.out_channels * x.element_size() >= MAPPED_BYTES:
            return self._in_strips
        if weight.dtype is not torch.bfloat16 or x.dtype is not weight.dtype or weight.shape[-1] != 3:
            return None
        most = _MOST_PIXELS_LARGE if weight.nbytes >= MAPPED_BYTES else _MOST_PIXELS
        return self._as_product if weight.nbytes >= _LEAST_WEIGHT_BYTES and 0 < pixels <= most else None

    def _as_product(self, x: Tensor, residual: Tensor | None, room: Tensor | None) -> Tensor:
        parameters = self._parameters
        weight: Any = parameters["weight"]
        batch, channels, rows, columns = x.shape
        padded = x.new_zeros(batch, rows + 2, columns + 2, channels)
        padded[:, 1:-1, 1:-1] = x.permute(0, 2, 3, 1)
        line = (columns + 2) * channels
        strides = ((rows + 2) * line, line, channels, line, 1)
        near = padded.as_strided((batch, rows, columns, 3, 3 * channels), strides).reshape(-1, 9 * channels)
        y = F.linear(near, weight.permute(0, 2, 3, 1).reshape(self.out_channels, -1), parameters["bias"])
        y = y.view(batch, rows, columns, -1).permute(0, 3, 1, 2)
        return y if residual is None else y.add_(residual)

    def _in_strips(self, x: Tensor, residual: Tensor | None, room: Tensor | None) -> Tensor:
        parameters, pad = self._parameters, self.kernel_size[0] // 2
        batch, _, rows, columns = x.shape
        sizes = (batch, self.out_channels, rows, columns)
        if room is None or room.shape != sizes or not room.is_contiguous(memory_format=torch.channels_last):
            room = self.memory.image(sizes, x.dtype)
        weight: Any = parameters["weight"]
        for strip in strips(rows, columns * self.out_channels * x.element_size()):
            low, high = max(strip.start - pad, 0), min(strip.stop + pad, rows)
            for sample in (slice(number, number + 1) for number in range(batch)):
                # pad only at the image's edges: the rows of neighbouring strips are there
                inner = pad if low == strip.start or high == strip.stop else 0
                y = F.conv2d(x[sample, :, low:high], weight, parameters["bias"], padding=(inner, pad))
                first = strip.start - low - pad + inner
                y, to = y[:, :, first : first + strip.stop - strip.start], room[sample, :, strip]
                to.copy_(y) if residual is None else torch.add(y, residual[sample, :, strip], out=to)
        return room


def share_memory(model: nn.Module) -> None:
    """Let all convolutions of `model` reuse each other's memory."""
    shared = Buffers()
    for module in model.modules():
        if isinstance(module, Conv):
            module.memory = shared


def strips(rows: int, row_bytes: int) -> Iterator[slice]:
    """Yield slices of an image's rows of about _STRIP_BYTES each."""
    each = max(_STRIP_BYTES // row_bytes, 1)
    for first in range(0, rows, each):
        yield slice(first, min(first + each, rows))


def laid_as(conv: nn.Module, x: Tensor) -> Tensor:
    """Return x in the layout of the convolution's weight, copied if an earlier module returned the other layout."""
    weight: Any = conv._parameters.get("weight")
    last = torch.channels_last
    if weight is None or not weight.is_contiguous(memory_format=last) or weight.is_contiguous():
        return x
    return x.contiguous(memory_format=last)


class Resnet(InferenceModule):
    """forward(input_tensor [B, C, H, W], temb [B, E] or None) -> [B, C', H, W], as diffusers' ResnetBlock2D."""

    def __init__(self, shape: ResnetShape, context: BuildContext):
        super().__init__()
        bodies, time = context.bodies, shape.time
        self.norm1, self.norm2 = GroupNorm(shape.norm1, bodies), GroupNorm(shape.norm2, bodies)
        self.conv1, self.conv2 = Conv(shape.conv1), Conv(shape.conv2)
        self.add_module("conv_shortcut", None if shape.conv_shortcut is None else Conv(shape.conv_shortcut))
        self.add_module("time_emb_proj", None if time is None else context.linear(time))
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
        normed = silu_of(parts["norm1"], x, out=conv1.memory.like(x))
        y = conv1(normed)
        # The result of a convolution is written over unless a hook may have kept it: a fresh tensor of 64 MiB costs
        # four times the time of the norm, in page faults.
        y = silu_of(parts["norm2"], y, added, y if has_no_hooks(conv1) else None)
        # The sum is written over the first of these that has its shape and that nothing else sees.
        room = normed if has_no_hooks(conv1) and has_no_hooks(parts["norm1"]) else None
        if shortcut is not None:
            x = shortcut(x)
            room = x if has_no_hooks(shortcut) else None
        y = conv2.plus(y, x, room) if has_no_hooks(conv2) else conv2(y) + x
        return y if self._scale == 1.0 else y.div_(self._scale)


class Upsample(InferenceModule):
    """forward(hidden_states [B, C, H, W], output_size=None) -> [B, C', 2 H, 2 W], as diffusers' Upsample2D.

    On CPUs four convolutions with 2 x 2 weights make the four phases of the result from the small image: 4/9 of the
    operations, and the large image is never in memory.
    """

    def __init__(self, shape: UpsampleShape, context: BuildContext):
        super().__init__()
        self.conv = Conv(shape.conv)
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
        if not doubled or x.device.type != "cpu" or is_traced() or not (has_no_hooks(conv) and conv.is_as_made):
            return conv(F.interpolate(x, output_size or (2 * rows, 2 * columns), mode="nearest"))
        phases: list[Tensor] = self._phases.of((conv.weight,), lambda: phase_weights(conv.weight))
        sizes = (x.shape[0], conv.out_channels, 2 * rows, 2 * columns)
        last = x.is_contiguous(memory_format=torch.channels_last)
        y = conv.memory.image(sizes, x.dtype) if last else x.new_empty(sizes)
        for strip in strips(rows, x.shape[0] * columns * conv.out_channels * x.element_size()):
            low, high = max(strip.start - 1, 0), min(strip.stop + 1, rows)
            for number, weight in enumerate(phases):
                down, right = divmod(number, 2)
                # padding adds outputs on the other side too, which are cut off below
                made = F.conv2d(x[:, :, low:high], weight, conv.bias, padding=1)
                here = slice(strip.start - low + down, strip.stop - low + down)
                to = y[:, :, 2 * strip.start + down : 2 * strip.stop : 2, right::2]
                to.copy_(made[:, :, here, right : right + columns])
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
    phases = []
    for pair in rows:
        of_rows = torch.cat(pair, 2)
        for both in (
            (of_rows[..., :1], of_rows[..., 1:].sum(3, keepdim=True)),
            (of_rows[..., :2].sum(3, keepdim=True), of_rows[..., 2:]),
        ):
            made = torch.cat(both, 3).to(weight.dtype)
            last = weight.is_contiguous(memory_format=torch.channels_last)
            phases.append(made.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format))
    return phases
