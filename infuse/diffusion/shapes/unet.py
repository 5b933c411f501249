"""The convolutional modules of diffusers' UNets and VAEs: residual blocks and upsampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.module import ModuleShape, ModuleSpec
from infuse.architectures.packing import Fill
from infuse.architectures.part import Matrix, Parameter, PartShape, named


@dataclass(frozen=True)
class GroupNormShape(PartShape):
    """A GroupNorm with weight and bias, or with neither."""

    groups: int
    channels: int
    eps: float
    affine: bool

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("weight"), Parameter("bias")) if self.affine else ()

    @property
    def ops(self) -> tuple[str, ...]:
        return ("group_norm",)


@dataclass(frozen=True)
class ConvShape(PartShape):
    """A convolution with a square kernel and stride 1, padded with zeros so that it keeps sizes."""

    inputs: int
    outputs: int
    kernel: int
    bias: bool

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("weight"), Parameter("bias")) if self.bias else (Parameter("weight"),)


def bind_group_norm(binder: Binder, path: str, name: str) -> GroupNormShape:
    """Bind the GroupNorm at `path`; its tensors go to `name` in the new module."""
    norm = binder.module(path)
    if type(norm) is not nn.GroupNorm:
        binder.differ(f"{path} is a {type(norm).__name__}, not a GroupNorm")
        return GroupNormShape(1, 1, 0.0, False)
    _move(binder, path, name, ("weight", "bias") if norm.affine else ())
    return GroupNormShape(norm.num_groups, norm.num_channels, norm.eps, norm.affine)


def bind_conv(binder: Binder, path: str, name: str, kernel: int) -> ConvShape:
    """Bind the convolution at `path`; its tensors go to `name` in the new module."""
    conv = binder.module(path)
    if type(conv) is not nn.Conv2d:
        binder.differ(f"{path} is a {type(conv).__name__}, not a Conv2d")
        return ConvShape(1, 1, kernel, False)
    wanted = {
        "kernel_size": (kernel, kernel),
        "stride": (1, 1),
        "padding": (kernel // 2, kernel // 2),
        "dilation": (1, 1),
        "groups": 1,
        "padding_mode": "zeros",
    }
    for setting, value in wanted.items():
        if getattr(conv, setting) != value:
            binder.differ(f"{path}.{setting} is {getattr(conv, setting)}, not {value}")
    _move(binder, path, name, ("weight",) if conv.bias is None else ("weight", "bias"))
    return ConvShape(conv.in_channels, conv.out_channels, kernel, conv.bias is not None)


def _move(binder: Binder, path: str, name: str, leaves: tuple[str, ...]) -> None:
    for leaf in leaves:
        binder.claim(named(path, leaf))
        binder.fills.append(Fill(named(name, leaf), (named(path, leaf),)))


@dataclass(frozen=True)
class ResnetShape(ModuleShape):
    """(shortcut(x) + conv2(silu(norm2(conv1(silu(norm1(x))) + time(silu(temb)))))) / scale: diffusers' ResnetBlock2D.

    `time` projects the embedding of the time step, without SiLU before it if it is `bare`.
    """

    norm1: GroupNormShape
    conv1: ConvShape
    time: Matrix | None
    bare: bool
    norm2: GroupNormShape
    conv2: ConvShape
    conv_shortcut: ConvShape | None
    scale: float

    @property
    def parts(self) -> Mapping[str, PartShape]:
        names = ("norm1", "conv1", "norm2", "conv2", "conv_shortcut")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return () if self.time is None else (self.time,)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*super().parameters, *(parameter for matrix in self.matrices for parameter in matrix.parameters))

    @property
    def ops(self) -> tuple[str, ...]:
        return ("group_norm",) if self.time is None or self.bare else ("group_norm", "activation")


@dataclass(frozen=True)
class Resnet:
    """ResnetBlock2D without up- or downsampling in it, with SiLU, and with time steps added."""

    def bind(self, binder: Binder, name: str) -> ResnetShape:
        block = binder.layer
        for setting in ("upsample", "downsample"):
            if getattr(block, setting, None) is not None:
                binder.differ(f"it has {setting} inside")
        norm, timed = getattr(block, "time_embedding_norm", None), getattr(block, "time_emb_proj", None) is not None
        if norm != "default" and (timed or norm != "group"):  # VAEs have "group", and no time steps
            binder.differ(f"time_embedding_norm is {norm!r}, not 'default'")
        if type(getattr(block, "nonlinearity", None)) is not nn.SiLU:
            binder.differ(f"nonlinearity is {block.nonlinearity}, not SiLU")
        scale = getattr(block, "output_scale_factor", None)
        if not isinstance(scale, (int, float)):
            binder.differ(f"output_scale_factor is {scale!r}, not a number")
            scale = 1.0
        time = None
        if timed:
            linear = binder.linear("time_emb_proj")
            binder.fill_linear("time_emb_proj", ("time_emb_proj",), linear.bias)
            time = Matrix("time_emb_proj", linear.rows, linear.columns, linear.bias)
        shortcut = None
        if getattr(block, "conv_shortcut", None) is not None:
            shortcut = bind_conv(binder, "conv_shortcut", "conv_shortcut", 1)
        return ResnetShape(
            norm1=bind_group_norm(binder, "norm1", "norm1"),
            conv1=bind_conv(binder, "conv1", "conv1", 3),
            time=time,
            bare=bool(getattr(block, "skip_time_act", False)),
            norm2=bind_group_norm(binder, "norm2", "norm2"),
            conv2=bind_conv(binder, "conv2", "conv2", 3),
            conv_shortcut=shortcut,
            scale=float(scale),
        )


@dataclass(frozen=True)
class UpsampleShape(ModuleShape):
    """A convolution of the image with each pixel repeated in a square of four, as diffusers' Upsample2D."""

    conv: ConvShape

    @property
    def needs_no_kernels(self) -> bool:
        return True

    @property
    def parts(self) -> Mapping[str, PartShape]:
        return {"conv": self.conv}


@dataclass(frozen=True)
class Upsample:
    """Upsample2D with nearest interpolation by two and a convolution."""

    def bind(self, binder: Binder, name: str) -> UpsampleShape:
        wanted = {"norm": None, "use_conv_transpose": False, "interpolate": True, "use_conv": True, "name": "conv"}
        for setting, value in wanted.items():
            if (actual := getattr(binder.layer, setting, None)) != value:
                binder.differ(f"{setting} is {actual!r}, not {value!r}")
        return UpsampleShape(bind_conv(binder, "conv", "conv", 3))


RESNET = ModuleSpec("diffusers.models.resnet.ResnetBlock2D", Resnet())
UPSAMPLE = ModuleSpec("diffusers.models.upsampling.Upsample2D", Upsample())
MODULES = (RESNET, UPSAMPLE)
