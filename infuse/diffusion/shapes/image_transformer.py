"""The transformer over an image in diffusers' UNets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from infuse.architectures.bind import Binder
from infuse.architectures.module import ModuleShape, ModuleSpec, class_path
from infuse.architectures.part import Matrix, Parameter, PartShape
from infuse.diffusion.shapes.cross_attention import BASIC_BLOCK
from infuse.diffusion.shapes.streams import StreamsShape
from infuse.diffusion.shapes.unet import ConvShape, GroupNormShape, bind_conv, bind_group_norm

BLOCKS = "transformer_blocks"  # the name of the list of blocks


@dataclass(frozen=True)
class ImageTransformerShape(ModuleShape):
    """x + proj_out(blocks(proj_in(norm(x)))) over the pixels of an image: diffusers' Transformer2DModel.

    The projections are linears or convolutions of single pixels, which have the same names.
    """

    norm: GroupNormShape
    proj_in: Matrix | ConvShape
    blocks: tuple[StreamsShape, ...]
    proj_out: Matrix | ConvShape

    @property
    def parts(self) -> Mapping[str, PartShape]:
        parts: dict[str, PartShape] = {"norm": self.norm}
        for number, block in enumerate(self.blocks):
            parts |= {f"{BLOCKS}.{number}.{name}": part for name, part in block.parts.items()}
        convolutions = {name: part for name, part in self._projections.items() if isinstance(part, PartShape)}
        return parts | convolutions

    @property
    def _projections(self) -> dict[str, Matrix | ConvShape]:
        return {"proj_in": self.proj_in, "proj_out": self.proj_out}

    def with_parts(self, parts: Mapping[str, PartShape]) -> ImageTransformerShape:
        blocks = []
        for number, block in enumerate(self.blocks):
            start = f"{BLOCKS}.{number}."
            of_block = {name.removeprefix(start): part for name, part in parts.items() if name.startswith(start)}
            blocks.append(block.with_parts(of_block))
        return replace(self, blocks=tuple(blocks))

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        linears = [projection for projection in self._projections.values() if isinstance(projection, Matrix)]
        return (*super().matrices, *linears)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        linears = [projection for projection in self._projections.values() if isinstance(projection, Matrix)]
        return (*super().parameters, *(parameter for matrix in linears for parameter in matrix.parameters))

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.norm.ops, *(op for block in self.blocks for op in block.ops))))


@dataclass(frozen=True)
class ImageTransformer:
    """Transformer2DModel over image channels (not over patches or codes), with blocks without modulation."""

    def bind(self, binder: Binder, name: str) -> ImageTransformerShape:
        model = binder.layer
        if not getattr(model, "is_input_continuous", False):
            binder.differ("its input is not an image of channels")
        if (tables := getattr(getattr(model, "config", None), "norm_type", "layer_norm")) != "layer_norm":
            binder.differ(f"norm_type is {tables!r}, not 'layer_norm'")
        blocks = [f"{BLOCKS}.{number}" for number in range(len(getattr(model, BLOCKS, ())))]
        for path in blocks:
            if (class_name := class_path(binder.module(path))) != BASIC_BLOCK.layer:
                binder.differ(f"{path} is a {class_name.rpartition('.')[2]}, not diffusers' BasicTransformerBlock")
        return ImageTransformerShape(
            norm=bind_group_norm(binder, "norm", "norm"),
            proj_in=_projection(binder, "proj_in"),
            blocks=tuple(BASIC_BLOCK.bind_at(binder, path) for path in blocks),
            proj_out=_projection(binder, "proj_out"),
        )


def _projection(binder: Binder, path: str) -> Matrix | ConvShape:
    if type(binder.module(path)) is not nn.Linear:
        return bind_conv(binder, path, path, 1)
    linear = binder.linear(path)
    binder.fill_linear(path, (path,), linear.bias)
    return Matrix(path, linear.rows, linear.columns, linear.bias)


IMAGE_TRANSFORMER = ModuleSpec("diffusers.models.transformers.transformer_2d.Transformer2DModel", ImageTransformer())
