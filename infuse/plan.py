"""Plan: what will be replaced by what, from which weights, by which kernels, and why; and what is left, and why.

`make_plan` is pure: no tensors, no change to the model, live or meta. `str(plan)` is the table that users read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from infuse import ops
from infuse.config import InferenceConfig
from infuse.device import Device
from infuse.errors import SpecMismatch
from infuse.layers.block import Block, block_ops
from infuse.layers.linear import linear_op
from infuse.parallel.mesh import ONE, Mesh
from infuse.plan_formats import Formats, format_bytes, is_matrix, linears_of, matrix_shape
from infuse.plan_text import plan_lines
from infuse.spec import Bound, bind_any, specs_for
from infuse.spec.layer import LayerShape
from infuse.spec.packing import Fill
from infuse.spec.unknown import EmbeddingShape, LinearShape, embedding_shape, linear_shape, linears

BLOCK, LINEAR, EMBEDDING, ATTENTION = "block", "linear", "embedding", "attention"


@dataclass(frozen=True)
class Step:
    """One replacement. `path` names the module, `depth` is "block", "linear", "embedding" or "attention" (no shape); `bodies` op → body.

    `attn` is the path of the attention module inside a layer, `index` the layer's place in the cache; `shares` is the path of the
    head whose quantized weight an embedding looks its rows up in.
    """

    path: str
    depth: str
    layer: str
    shape: LayerShape | LinearShape | EmbeddingShape | None
    fills: tuple[Fill, ...]
    bodies: tuple[tuple[str, str], ...]
    why: str
    index: int | None = None
    attn: str = ""
    shares: str = ""

    @property
    def kind(self) -> tuple:
        """Steps of one kind differ in their weights and place only: one proof speaks for all."""
        return (self.depth, self.layer, self.shape, self.fills, self.bodies)

    @property
    def formats(self) -> dict[str, str]:
        """Target weight → quantization format."""
        return {fill.target: fill.format for fill in self.fills if fill.format}

    @property
    def matrices(self) -> tuple[tuple[str, str | None, int], ...]:
        """Each matrix: its target, its format, and where it has one its bytes, scales and zeros included."""
        sizes = format_bytes(self.fills, self.shape)
        return tuple((fill.target, fill.format, sizes.get(fill.target, 0)) for fill in self.fills if is_matrix(fill))


@dataclass(frozen=True)
class Left:
    """A module that stays as it is, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class Plan:
    """The decision for one model on one device. `before_bytes` and `after_bytes` are the parameters' bytes."""

    model: str
    device: str
    dtype: torch.dtype
    dtype_why: str
    steps: tuple[Step, ...]
    left: tuple[Left, ...]
    declined: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...]
    before_bytes: int
    after_bytes: int

    def digest(self) -> str:
        """A fingerprint of the decision: equal on every rank that decided alike."""
        return hashlib.sha256(repr((self.steps, self.left, str(self.dtype))).encode()).hexdigest()[:16]

    def with_left(self, left: Iterable[Left], steps: Iterable[Step], after_bytes: int) -> Plan:
        return replace(self, left=(*self.left, *left), steps=tuple(steps), after_bytes=after_bytes)

    def __str__(self) -> str:
        return "\n".join(plan_lines(self))


def make_plan(model: nn.Module, config: InferenceConfig, device: Device, mesh: Mesh = ONE) -> Plan:
    """Decide for every module of `model`; pure. Raises ConfigError for what the device or the model does not have:

    a dtype that is not computed in, patterns of `quant.weight.post_init_quant` that match no linear.
    """
    dtype = config.resolved_dtype(device)
    decision = _Decision(model, config, device, dtype)
    decision.visit(model, "", None)
    decision.hook(model)
    notes = decision.formats.check(model)
    why = "asked for" if config.dtype is not None else f"the default on {device.kind}, as nothing was asked for"
    before = parameter_bytes(model)
    steps = tuple(decision.steps)
    return Plan(
        model=type(model).__name__,
        device=f"{device.kind} {device.name}".strip(),
        dtype=dtype,
        dtype_why=why,
        steps=steps,
        left=tuple(decision.left),
        declined=decision.declines(),
        notes=(*config.notes(device), *notes),
        before_bytes=before,
        after_bytes=bytes_after(model, steps, dtype),
    )


class _Decision:
    """One walk over a model: blocks where a spec fits, else linears where a kernel or a format gains something."""

    def __init__(self, model: nn.Module, config: InferenceConfig, device: Device, dtype: torch.dtype):
        self.model, self.config, self.device, self.dtype = model, config, device, dtype
        self.steps: list[Step] = []
        self.left: list[Left] = []
        self.choices: dict[str, ops.Choice] = {}
        self.shared = _shared_weights(model)
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
        self.formats = Formats(config, next((name for name, module in model.named_modules() if module is head), None))

    def visit(self, module: nn.Module, path: str, config: Any) -> None:
        """Decide for `module` and what is below; `config` is that of the nearest model around it."""
        specs = specs_for(module)
        if isinstance(module, Block):
            self.left.append(Left(path, "already replaced"))
        elif specs and not self.config.replace_with_kernel_inject:
            self.left.append(Left(path, "not as a whole block: replace_with_kernel_inject is False"))
            self.linears(module, path)
        elif specs:
            try:
                self.steps.append(self.block(module, path, bind_any(specs, module, config)))
            except SpecMismatch as mismatch:
                self.left.append(Left(path, f"not as a whole block: {mismatch}"))
                self.linears(module, path)
        elif linear_shape(module) is not None:
            self.linears(module, path)
        elif isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
            self.left.append(Left(path, f"{type(module).__name__} hands the weights of its linears to PyTorch's kernels itself"))
        elif next(module.children(), None) is None:
            if module._parameters:
                self.left.append(Left(path, f"{type(module).__name__} is in no layer that has a spec"))
        else:
            if module._parameters:
                self.left.append(Left(path, f"{type(module).__name__} has parameters of its own: {', '.join(module._parameters)}"))
            config = getattr(module, "config", config)
            for name, child in module.named_children():
                self.visit(child, f"{path}.{name}" if path else name, config)

    def block(self, module: nn.Module, path: str, bound: Bound) -> Step:
        name = type(module).__name__
        if differences := [text for fill in bound.fills if is_matrix(fill) and (text := self.formats.difference(fill, path))]:
            raise SpecMismatch(name, differences)
        fills = tuple(self.with_format(fill, bound.shape, path) for fill in bound.fills)
        bodies = self.bodies((*block_ops(bound.shape), *linear_ops(fills)))
        return Step(path, BLOCK, name, bound.shape, fills, bodies, f"spec of {name}", bound.index, bound.attn)

    def linears(self, module: nn.Module, path: str) -> None:
        """Steps for the plain linears in `module`, where they gain something."""
        for name, shape in linears(module, path):
            if not name:
                self.left.append(Left("", "the model itself is one linear, which has no place to be put in"))
                continue
            others = self.shared.get(name, ()) if self.formats.of(name) is not None else ()
            if unlike := [other for other in others if embedding_shape(self.model.get_submodule(other)) is None]:
                self.left.append(Left(name, f"shares its weight with {unlike[0]}, which is no plain embedding, so it is not quantized"))
                continue
            fills = tuple(self.with_format(fill, shape, name) for fill in shape.fills)
            bodies = self.bodies(linear_ops(fills))
            if any(body != ops.REFERENCE for _, body in bodies) or any(fill.format for fill in fills):
                self.steps.append(Step(name, LINEAR, "Linear", shape, fills, bodies, "a linear outside of blocks"))
                if fills[0].format:
                    self.steps += [self.embedding(other, name, fills[0]) for other in others]
            elif all(left.path.partition(": ")[0] != name for left in self.left):
                self.left.append(Left(name, "nothing to gain: PyTorch's own linear is the best body here"))

    def embedding(self, path: str, head: str, fill: Fill) -> Step:
        """The step for an embedding that is tied to a head which is quantized."""
        self.left = [left for left in self.left if left.path != path]
        why = f"looks its rows up in the quantized weight of {head}"
        shape = embedding_shape(self.model.get_submodule(path))
        return Step(path, EMBEDDING, "Embedding", shape, (fill,), self.bodies(("quantized_embedding", "quantize")), why, shares=head)

    def hook(self, model: nn.Module) -> None:
        """A step for the attention of layers that stay, where the model lets one choose it and a kernel of ours gains something."""
        if not getattr(model, "_supports_attention_backend", False) or getattr(model.config, "_attn_implementation", "") != "sdpa":
            return
        blocks = tuple(f"{step.path}." for step in self.steps if step.depth == BLOCK)
        stays = any(hasattr(module, "is_causal") and not f"{name}.".startswith(blocks) for name, module in model.named_modules())
        bodies = self.bodies(("attention",))
        if stays and self.config.replace_with_kernel_inject and bodies[0][1] not in ("torch", ops.REFERENCE):
            why = "attention of layers that stay, by transformers' attention interface"
            self.steps.append(Step("", ATTENTION, type(model).__name__, None, (), bodies, why))

    def with_format(self, fill: Fill, shape: LayerShape | LinearShape, path: str) -> Fill:
        """The fill with its quantization format, where it is a matrix that the format fits."""
        matrix = matrix_shape(fill, shape)
        if matrix is None:
            return fill
        format = self.formats.of_fill(fill, path)
        if format is None:
            if self.formats.left_alone(linears_of(fill, path)[0]):
                self.left.append(Left(f"{path}: {fill.target}", f"in {self.dtype}: quant.weight.post_init_quant leaves it alone"))
            return fill
        if reason := format.fits(matrix[1]):
            self.left.append(Left(f"{path}: {fill.target}", f"in {self.dtype}: {reason}"))
            return fill
        return replace(fill, format=str(format))

    def bodies(self, names: Iterable[str]) -> tuple[tuple[str, str], ...]:
        for name in names:
            if name not in self.choices:
                self.choices[name] = ops.registered()[name].choose(self.device, self.dtype)
        return tuple((name, self.choices[name].body) for name in names)

    def declines(self) -> tuple[tuple[str, str, str], ...]:
        return tuple((name, body, reason) for name, choice in sorted(self.choices.items()) for body, reason in choice.declined)


def fallback(step: Step, model: nn.Module, config: InferenceConfig) -> list[Step]:
    """The next depth for a block that was refused: its linears, where they gain something."""
    device = Device.of(next(model.parameters()).device)
    decision = _Decision(model, config, device, config.resolved_dtype(device))
    decision.linears(model.get_submodule(step.path), step.path)
    return decision.steps


def linear_ops(fills: Iterable[Fill]) -> tuple[str, ...]:
    """The ops of the matrices among `fills`: what multiplies with them, and what quantizes them."""
    matrices = [fill for fill in fills if is_matrix(fill)]
    quantized = ("quantize",) if any(fill.format for fill in matrices) else ()
    fused = ("linear_activation",) if any(fill.target == "mlp.up.weight" and not fill.format for fill in matrices) else ()
    return (*dict.fromkeys(linear_op(fill.format) for fill in matrices), *fused, *quantized)


def _shared_weights(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Module path → the other modules that hold the same weight (tied embeddings)."""
    by_weight: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        if leaf == "weight":
            by_weight.setdefault(id(parameter), []).append(owner)
    tied = (paths for paths in by_weight.values() if len(paths) > 1)
    return {path: tuple(other for other in paths if other != path) for paths in tied for path in paths}


# --- memory -------------------------------------------------------------------------------------------------------


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, tied ones once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def bytes_after(model: nn.Module, steps: Iterable[Step], dtype: torch.dtype) -> int:
    """What `parameter_bytes` will be once `steps` are done and the rest is cast to `dtype`."""
    total, seen = 0, set()
    for step in steps:
        if step.shape is None:
            continue
        module = model.get_submodule(step.path)
        if id(module) in seen:
            continue
        seen.add(id(module))
        quantized = format_bytes(step.fills, step.shape)
        total += 0 if step.shares else sum(quantized.values())
        for fill in step.fills:
            sources = [_tensor(module, name) for name in fill.sources]
            seen.update(id(source) for source in sources)
            if fill.target not in quantized:
                numel = sum(source.numel() for source in sources)
                total += numel * (dtype.itemsize if isinstance(sources[0], nn.Parameter) else sources[0].element_size())
        seen.update(id(tensor) for tensor in (*module.parameters(), *module.buffers()))
    for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
        if id(tensor) not in seen:
            cast = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            total += tensor.numel() * (dtype.itemsize if cast else tensor.element_size())
    return total


def _tensor(module: nn.Module, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(owner), leaf)
