"""What can be said of layers without a spec: which of their modules are plain linears or embeddings.

Those need no spec: their meaning is their own. Subclasses are left alone, since they may do something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from infuse.architectures.adapters import adapter_parts
from infuse.architectures.packing import Fill
from infuse.architectures.part import COLUMN, VOCAB, Extent, Matrix, PartShape, Share

_CONV1D = "transformers.pytorch_utils.Conv1D"


@dataclass(frozen=True)
class LinearShape(PartShape):
    """Numbers of one linear; `transposed` weights are stored [inputs, outputs].

    Where ranks share its outputs, `outputs` are one rank's, and `widths` those of all ranks.
    """

    inputs: int
    outputs: int
    bias: bool
    transposed: bool = False
    widths: tuple[int, ...] = ()

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (Matrix("", self.outputs, self.inputs, self.bias, COLUMN, (Extent(VOCAB, self.outputs),)),)

    def of_rank(self, share: Share) -> LinearShape:
        return replace(self, outputs=share.count(VOCAB), widths=share.counts(VOCAB))

    @property
    def fills(self) -> tuple[Fill, ...]:
        weight = Fill("weight", ("weight",), self.transposed)
        return (weight, Fill("bias", ("bias",))) if self.bias else (weight,)


@dataclass(frozen=True)
class EmbeddingShape(PartShape):
    """Numbers of one embedding table. Where ranks share it, this one has `rows` from `first_row` on, of `all_rows`."""

    rows: int
    width: int
    first_row: int = 0
    all_rows: int = 0

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (Matrix("", self.rows, self.width, False, COLUMN, (Extent(VOCAB, self.rows),), op="embedding"),)

    def of_rank(self, share: Share) -> EmbeddingShape:
        return replace(self, rows=share.count(VOCAB), first_row=share.own[VOCAB][0], all_rows=self.rows)

    @property
    def fills(self) -> tuple[Fill, ...]:
        return (Fill("weight", ("weight",)),)


def embedding_shape(module: nn.Module) -> EmbeddingShape | None:
    """The shape of a plain nn.Embedding, None for any other module."""
    if type(module) is not nn.Embedding or module.max_norm is not None or patched(module):
        return None
    return EmbeddingShape(module.num_embeddings, module.embedding_dim)


def patched(module: nn.Module) -> bool:
    """Whether somebody gave the module a forward of its own, as users do and accelerate's hooks: it must go on being
    called.
    """
    return "forward" in vars(module)


def linear_shape(module: nn.Module) -> LinearShape | None:
    """The shape of a plain linear (nn.Linear or transformers' Conv1D), None for any other module."""
    cls = type(module)
    transposed = f"{cls.__module__}.{cls.__qualname__}" == _CONV1D
    if (cls is not nn.Linear and not transposed) or patched(module):
        return None
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    if weight is None or weight.dim() != 2:
        return None
    outputs, inputs = reversed(weight.shape) if transposed else weight.shape
    return LinearShape(inputs, outputs, bias is not None, transposed)


def linears(module: nn.Module, path: str = "") -> Iterator[tuple[str, LinearShape]]:
    """All plain linears in `module` that are no adapter's, by their paths from the root of which `path` is the module's
    own.
    """
    adapters: tuple[str, ...] = ()
    for name, child in module.named_modules():
        if f"{name}.".startswith(adapters):
            continue
        adapters += tuple(f"{name}.{part}.".removeprefix(".") for part in adapter_parts(child))
        shape = linear_shape(child)
        if shape is not None:
            yield ".".join(part for part in (path, name) if part), shape
