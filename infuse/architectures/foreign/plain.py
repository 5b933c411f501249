"""Plain linears and embeddings in layers without a spec.

They need no spec, since their class defines what they compute. Subclasses are left alone: they may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from infuse.architectures.foreign.adapters import adapter_parts
from infuse.architectures.packing import Fill
from infuse.architectures.part import COLUMN, VOCAB, Extent, Matrix, PartShape, Share
from infuse.ground.authors import is_librarys

_CONV1D = "transformers.pytorch_utils.Conv1D"
_SCALED = "TextScaledWordEmbedding"  # the end of the names of Gemma's tables, whose rows are multiplied by a number


@dataclass(frozen=True)
class LinearShape(PartShape):
    """Dimensions of one linear. `transposed` weights are stored [inputs, outputs].

    If ranks share the outputs, `outputs` are one rank's and `widths` has those of every rank.
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
    """Dimensions of one embedding table. A rank's share is `rows` rows of `all_rows`, starting at `first_row`.

    `scale`, rounded to the dtype of the rows, multiplies them.
    """

    rows: int
    width: int
    first_row: int = 0
    all_rows: int = 0
    scale: float = 1.0

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (Matrix("", self.rows, self.width, False, COLUMN, (Extent(VOCAB, self.rows),), op="embedding"),)

    def of_rank(self, share: Share) -> EmbeddingShape:
        return replace(self, rows=share.count(VOCAB), first_row=share.own[VOCAB][0], all_rows=self.rows)

    @property
    def fills(self) -> tuple[Fill, ...]:
        return (Fill("weight", ("weight",)),)


def embedding_shape(module: nn.Module) -> EmbeddingShape | None:
    """Shape of a plain nn.Embedding without max_norm, or of Gemma's scaled one; None for any other module."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or patched(module):
        return None
    scale = 1.0 if type(module) is nn.Embedding else _scale_of(module)
    if scale is None or (type(module) is nn.Embedding and changed(module)):
        return None
    return EmbeddingShape(module.num_embeddings, module.embedding_dim, scale=scale)


def _scale_of(module: nn.Embedding) -> float | None:
    """The number by which transformers' class of Gemma's tables multiplies rows; None for another class."""
    scale = getattr(module, "scalar_embed_scale", None)
    named = type(module).__name__.endswith(_SCALED) and is_librarys(type(module).forward)
    held = module._parameters.keys() == {"weight"} and module._buffers.keys() == {"embed_scale"} and not module._modules
    return float(scale) if named and held and isinstance(scale, (int, float)) else None


def patched(module: nn.Module) -> bool:
    """Whether the instance has a forward of its own, set by a user or by accelerate, which must still be called."""
    return "forward" in vars(module)


def linear_shape(module: nn.Module) -> LinearShape | None:
    """Shape of a plain linear (nn.Linear or transformers' Conv1D); None for any other module."""
    if not _is_linear(module) or patched(module) or changed(module):
        return None
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    if weight is None or weight.dim() != 2:
        return None
    transposed = type(module) is not nn.Linear
    outputs, inputs = reversed(weight.shape) if transposed else weight.shape
    return LinearShape(inputs, outputs, bias is not None, transposed)


def changed(module: nn.Module) -> str | None:
    """Why a linear or embedding differs from its class: extra or missing tensors, or a patched forward; None if it does
    not.
    weight_norm, spectral_norm and pruning compute the weight from parameters of other names before each call.
    """
    parameters, made = module._parameters.keys(), {"weight"} if isinstance(module, nn.Embedding) else {"weight", "bias"}
    if more := sorted({*parameters, *module._buffers, *module._modules} - made):
        return f"{type(module).__name__} has {', '.join(more)}, which its class does not make"
    if missing := sorted({"weight"} - parameters):
        return f"{type(module).__name__} has no parameter {', '.join(missing)}"
    return None if is_librarys(type(module).forward) else f"{type(module).__name__}.forward was patched"


def changed_linears(module: nn.Module, path: str = "") -> Iterator[tuple[str, str]]:
    """Linears in `module` that are left alone because they were changed: path from the root, and why."""
    for name, child in module.named_modules():
        is_one = _is_linear(child) or (isinstance(child, nn.Linear) and "parametrizations" in child._modules)
        if is_one and (why := changed(child)) is not None:
            yield ".".join(part for part in (path, name) if part), why


def _is_linear(module: nn.Module) -> bool:
    cls = type(module)
    return cls is nn.Linear or f"{cls.__module__}.{cls.__qualname__}" == _CONV1D


def linears(module: nn.Module, path: str = "") -> Iterator[tuple[str, LinearShape]]:
    """Plain linears in `module`, except those of adapters, by path from the root; `path` is the module's own."""
    adapters: tuple[str, ...] = ()
    for name, child in module.named_modules():
        if f"{name}.".startswith(adapters):
            continue
        adapters += tuple(f"{name}.{part}.".removeprefix(".") for part in adapter_parts(child))
        shape = linear_shape(child)
        if shape is not None:
            yield ".".join(part for part in (path, name) if part), shape
