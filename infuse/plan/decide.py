"""Decide which modules are replaced, from which weights and with which kernels, which are left alone, and why.

`make_plan` is pure: it creates no tensors and does not change the model, which may be live or on meta.
`str(plan)` is the table that users read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from infuse import ops
from infuse.architectures import Bound, bind_any, specs_for
from infuse.architectures.adapters import adapted, adapter_notes, adapter_parts, is_adapter
from infuse.architectures.deepspeed import bind_routed, is_routed, routed_in
from infuse.architectures.diffusion import module_spec
from infuse.architectures.experts import (
    BoundExperts,
    ExpertsShape,
    bind_experts,
    experts_in,
    is_experts,
    router_paths,
    routes_of,
)
from infuse.architectures.module import BoundModule, ModuleSpec
from infuse.architectures.packing import Fill
from infuse.architectures.part import matrix_of
from infuse.architectures.plain import changed_linears, embedding_shape, linear_shape, linears
from infuse.architectures.quantized_elsewhere import quantized_by
from infuse.architectures.ranks import RankShare, Shape, experts_part, layer_part, plain_part
from infuse.architectures.read_weights import read_linears
from infuse.config.inference import InferenceConfig
from infuse.device import Device
from infuse.dtype_cast import kept_in_float32
from infuse.errors import ConfigError, SpecMismatch
from infuse.inputs.component import is_component
from infuse.layers.block import Block
from infuse.layers.experts import Experts
from infuse.layers.hook import hookable
from infuse.layers.named_experts import NamedExperts
from infuse.parallel.mesh import ONE, Mesh
from infuse.parallel.slices import split
from infuse.plan.bytes import bytes_after, parameter_bytes, state_bytes, token_bytes
from infuse.plan.experts import balance, check_counts, idle_ranks
from infuse.plan.formats import Formats, linears_of, matrices_made, matrix_ops
from infuse.plan.found import config_around, path_of, shared_weights
from infuse.plan.held import refused_bodies, without_kernels
from infuse.plan.plan import Plan
from infuse.plan.shared import Sharing
from infuse.plan.step import BLOCK, MODULE, SPLIT, Left, Step
from infuse.plan.unknown import Splits
from infuse.plan.users_own import UsersOwn
from infuse.quant.format import QuantFormat
from infuse.quant.parse import quant_format

ALREADY_REPLACED = "already replaced"  # by an earlier init_inference


def make_plan(
    model: nn.Module, config: InferenceConfig, device: Device, mesh: Mesh = ONE, *, in_pipeline: bool = False
) -> Plan:
    """Decide what replaces each module of `model`. The model is not changed.

    ConfigError if the device cannot compute in the dtype or map experts, or if a pattern of
    `quant.weight.post_init_quant` matches no linear, unless the model is `in_pipeline` beside others, or if
    `moe.moe_experts` are not the model's.
    """
    dtype = config.resolved_dtype(device)
    if config.experts == "mmap" and device.kind != "cpu":
        raise ConfigError(
            f'experts: found "mmap" on {device.kind} {device.name}; experts are mapped into the memory of a CPU: give '
            'device="cpu", or leave experts out'
        )
    check_counts(model, config)
    decision = _Decision(model, config, device, dtype, mesh)
    notes: list[str] = []
    if library := quantized_by(model):
        decision.left.append(Left("", f"already quantized by {library}: nothing is replaced, quantized or cast"))
    else:
        decision.visit(model, "", None)
        decision.hook(model)
        decision.leave_torchs_own()
        notes = decision.formats.check(model, among_others=in_pipeline)
    if config.skip_padding and device.kind == "cpu" and not any(step.skips_padding for step in decision.steps):
        notes = [*notes, "skip_padding: no effect here: no encoder layer is replaced as a block"]
    kv_cache = config.kv_cache
    if kv_cache and not any(step.decodes for step in decision.steps):
        why = "no decoder layer is replaced as a block"
        if any(isinstance(module, Block) for module in model.modules()):
            why = "layers that are replaced already keep the format of the cache that they were replaced with"
        notes, kv_cache = [*notes, f"kv_cache: no effect here: {why}"], None
    why = "asked for" if config.dtype is not None else f"the default on {device.kind}, as nothing was asked for"
    sharing = Sharing(model, steps := tuple(decision.steps))
    return Plan(
        model=type(model).__name__,
        device=f"{device.kind} {device.name}".strip(),
        dtype=dtype,
        dtype_why=why,
        steps=steps,
        left=tuple(decision.left),
        declined=decision.declines(),
        notes=(
            *config.notes(device),
            *idle_ranks(mesh, steps),
            *notes,
            *sharing.notes(),
            *decision.formats.idle(device, dtype),
            *adapter_notes(model),
            *without_kernels(decision.choices, steps, device),
        ),
        before_bytes=parameter_bytes(model),
        after_bytes=bytes_after(model, steps, dtype, sharing),
        mesh=mesh,
        kv_cache=kv_cache,
        token_bytes=token_bytes(steps, dtype, kv_cache),
        state_bytes=state_bytes(steps),
    )


class _Decision:
    """Walk over a model: a block for each layer that fits a spec, otherwise linears if a kernel or format helps."""

    def __init__(self, model: nn.Module, config: InferenceConfig, device: Device, dtype: torch.dtype, mesh: Mesh):
        self.model, self.config, self.device, self.dtype, self.mesh = model, config, device, dtype, mesh
        self.steps: list[Step] = []
        self.left: list[Left] = []
        self.choices: dict[str, ops.Choice] = {}
        # (op, body, reason) for formats that a body leaves to the reference
        self.unfit: dict[tuple[str, str, str], None] = {}
        self.shared = shared_weights(model)
        self.head, self.table = (path_of(model, name) for name in ("get_output_embeddings", "get_input_embeddings"))
        self.formats = Formats(config, self.head)
        self.grain = config.tensor_parallel.tp_grain_size
        self.refused = refused_bodies(model, device, dtype, mesh.tp)
        self.torchs_own: dict[str, list[str]] = {}  # class → paths, of the leaves of a component that stay
        self.routers = router_paths(model) | {f"{routed}.gate.wg" for routed in routed_in(model)}
        self.exact = kept_in_float32(model, dtype)
        self.read = read_linears(model)
        self.splits = Splits(model, config.injection_policy, mesh, self.grain)
        self.users_own = UsersOwn(model)
        self.decided: set[int] = set()  # ids of modules: one that is held in several places has one step

    def leave(self, path: str, why: str) -> None:
        self.left.append(Left(path, why))

    def leave_torchs_own(self) -> None:
        """Tell the leaves of a component that stay, each class once."""
        for name, paths in self.torchs_own.items():
            more = f", and so do {len(paths) - 1} more" if len(paths) > 1 else ""
            self.leave(paths[0], f"{name} stays PyTorch's{more}")

    def visit(self, module: nn.Module, path: str, config: Any) -> None:
        """Decide for `module` and everything in it; `config` is that of the nearest enclosing model."""
        if id(module) in self.decided:
            return
        self.decided.add(id(module))
        specs = specs_for(module)
        if isinstance(module, (Block, Experts)):
            self.leave(path, ALREADY_REPLACED)
        elif is_experts(module) or is_routed(module):
            self.linears(module, path)
        elif specs and (adapters := adapted(module)):
            self.leave(path, f"not as a whole block: has adapters (peft) at {', '.join(adapters)}")
            self.linears(module, path)
        elif (spec := module_spec(module)) is not None and path:
            self.whole_module(module, path, spec, config)
        elif self.splits.takes(path) and not adapted(module):
            self.split(module, path, config)
        elif specs and not self.config.replace_with_kernel_inject:
            self.leave(path, "not as a whole block: replace_with_kernel_inject is False")
            self.linears(module, path)
        elif specs:
            try:
                self.steps.append(self.block(module, path, bind_any(specs, module, config)))
            except SpecMismatch as mismatch:
                self.leave(path, f"not as a whole block: {mismatch}")
                self.split(module, path, config)
        elif linear_shape(module) is not None:
            self.linears(module, path)
        elif isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
            self.leave(path, f"{type(module).__name__} hands the weights of its linears to PyTorch's kernels itself")
        elif next(module.children(), None) is None:
            if self.mesh.tp > 1 and path == self.table and embedding_shape(module) is not None:
                self.steps += [] if any(step.path == path for step in self.steps) else [self.embedding(path)]
            elif module._parameters and is_component(self.model) and path:
                self.torchs_own.setdefault(type(module).__name__, []).append(path)
            elif module._parameters:
                self.leave(path, f"{type(module).__name__} is in no layer that has a spec")
        else:
            if module._parameters:
                own = ", ".join(module._parameters)
                self.leave(path, f"{type(module).__name__} has parameters of its own: {own}")
            self.inside(module, path, config)

    def inside(self, module: nn.Module, path: str, config: Any) -> None:
        """Decide for the children of `module`."""
        config = getattr(module, "config", config)
        for name, child in module.named_children():
            if name not in adapter_parts(module):
                self.visit(child, f"{path}.{name}" if path else name, config)

    def whole_module(self, module: nn.Module, path: str, spec: ModuleSpec, config: Any) -> None:
        """Replace a module that has a spec or, if it differs from it or nothing is gained, decide for its children."""
        why = ""
        if adapters := adapted(module):
            why = f"has adapters (peft) at {', '.join(adapters)}"
        elif not self.config.replace_with_kernel_inject:
            why = "replace_with_kernel_inject is False"
        else:
            try:
                bound = spec.bind(module)
                step = self.module(module, path, spec, bound)
            except SpecMismatch as mismatch:
                why = str(mismatch)
            else:
                ours = any(body != ops.REFERENCE for _, body in step.bodies)
                if ours or bound.shape.needs_no_kernels or step.formats or step.whole is not None:
                    self.steps.append(step)
                    return
                why = "nothing to gain: no kernels run here"
        self.leave(path, f"not as a whole module: {why}")
        self.inside(module, path, config)

    def module(self, module: nn.Module, path: str, spec: ModuleSpec, bound: BoundModule) -> Step:
        parts = self.layer_parts(module, path, bound, moved=(), library=spec.library)
        shape, fills, whole = self.chosen(parts, bound.shape, path)
        bodies = self.bodies((*bound.shape.ops, *matrix_ops(fills, shape)))
        return Step(path, type(module).__name__, shape, fills, bodies, f"spec of {type(module).__name__}", whole=whole)

    def layer_parts(
        self, module: nn.Module, path: str, bound: Bound | BoundModule, moved: tuple[str, ...], library: str
    ) -> list[RankShare]:
        """Every rank's part of a layer or module. SpecMismatch if formats or the user's own changes forbid it.

        `moved`: paths of the modules whose hooks move to the new one. `library`: the package of the spec's class.
        """
        made = matrices_made(bound.fills, bound.shape)
        differences = [text for fill, _ in made if (text := self.formats.difference(fill, path))]
        differences += [f"{fill.sources[0]} stays in float32" for fill, _ in made if self.kept(path, fill)]
        if differences := differences + self.users_own.inside(module, moved, library):
            raise SpecMismatch(type(module).__name__, differences)
        inputs = [(matrix, linears_of(fill, path)[0]) for fill, matrix in made]
        multiples = {matrix.weight: self.formats.multiple(linear, matrix.inputs) for matrix, linear in inputs}
        ranks = self.sharing(bound.shape.expert_count > 0)
        return [layer_part(bound.shape, bound.fills, rank, grain=self.grain, multiples=multiples) for rank in ranks]

    def block(self, module: nn.Module, path: str, bound: Bound) -> Step:
        name = type(module).__name__
        moved = (*(mixer.replaces[-1] for mixer in bound.shape.mixers.values()), *bound.shape.recorded.values())
        parts = self.layer_parts(module, path, bound, moved, bound.library)
        shape, fills, whole = self.chosen(parts, bound.shape, path)
        bodies = self.bodies((*bound.shape.ops, *matrix_ops(fills, shape)))
        mixture = next((name for name, part in bound.shape.held if part.expert_count), "")
        inside = f"{mixture}.experts."
        quantized = {fill.target.removeprefix(inside): fill for fill in fills if fill.format and inside in fill.target}
        if formats := {weight: quant_format(str(fill.format)) for weight, fill in quantized.items()}:
            bodies = self.fitting(bodies, [part.shape.parts[mixture].experts for part in parts], formats)  # type: ignore[union-attr]
        skips = self.config.skip_padding and self.device.kind == "cpu" and not bound.shape.causal
        for router in sorted(self.routers):
            if router.startswith(f"{path}."):
                self.keep(router)
        why = f"spec of {name}"
        if len(parts) > 1 and bound.shape.expert_count:
            why += f"; {self.balance(bound.shape.expert_count, config_around(self.model, path))}"
        return Step(path, name, shape, fills, bodies, why, bound.index, whole=whole, skips_padding=skips)

    def kept(self, path: str, fill: Fill) -> list[str]:
        """The sources of `fill`, of the module at `path`, that stay in float32 in a model of 16 bits."""
        return [source for source in fill.sources if f"{path}.{source}" in self.exact]

    def keep(self, router: str) -> None:
        """Say that a router stays as it is if a format was asked for it."""
        if self.formats.of(router) is not None:
            self.leave(router, "chooses among experts or weighs them, so it keeps its precision")

    def sharing(self, has_experts: bool = False) -> tuple[Mesh, ...]:
        """The mesh of each rank that has a part of its own of a module."""
        return self.mesh.ranks() if has_experts or self.mesh.tp > 1 else (ONE,)

    def split(self, module: nn.Module, path: str, config: Any) -> None:
        """Add a step that keeps the layer's forward and shares its linears among ranks.

        If the layer cannot be split, add steps for single linears.
        """
        try:
            if self.mesh.tp > 1:
                roles, interpretations = self.splits.parts(path, config, self.formats)
                steps: list[Step] = []
                left: list[Left] = []
                for whole, parts in interpretations:
                    shape, fills, all_of_it = self.chosen(parts, whole.shape, path)
                    bodies = self.bodies(matrix_ops(fills, shape))
                    why = f"linears shared by ranks, as {roles.why} tells"
                    steps.append(Step(path, type(module).__name__, shape, fills, bodies, why, whole=all_of_it))
                    left = left or list(self.left)  # report the first interpretation only
                self.steps.append(replace(steps[0], others=tuple(steps[1:])))
                why = "not tensor-parallel: neither column- nor row-parallel"
                self.left = [*left, *(Left(f"{path}: {name}", why) for name in roles.left)]
                for name in (*experts_in(module, path), *routed_in(module, path)):
                    self.experts(name)
                return
        except SpecMismatch as mismatch:
            self.leave(path, f"whole on each rank: {mismatch}")
        self.linears(module, path)

    def chosen(self, parts: list[RankShare], whole: Shape, path: str) -> tuple[Any, tuple[Fill, ...], Shape | None]:
        """This rank's shape, its fills with formats, and the whole shape if ranks share the module."""
        own = parts[self.mesh.rank if len(parts) > 1 else 0]
        shapes = [part.shape for part in parts]
        formatted = [self.with_format(fill, whole, shapes, path) for fill in own.fills]
        fills = tuple(replace(fill, exact=bool(self.kept(path, fill))) for fill in formatted)
        return own.shape, fills, whole if len(parts) > 1 else None

    def stays(self, name: str) -> str | None:
        """Why the linear at `name` is left as it is, whatever kernels there are; None if nothing forbids another."""
        format, read = self.formats.of(name), self.read.get(name)  # asked for all, so that a pattern may name each
        if name in self.routers:
            return "chooses among experts or weighs them, so it keeps its precision"
        if f"{name}.weight" in self.exact:
            return "stays in float32, as transformers loads it"
        if read is not None and not (read.dtype_only and format is None):
            return f"is no linear alone: {read}"
        return None if name else "the model itself is one linear, which has no place to be put in"

    def linears(self, module: nn.Module, path: str) -> None:
        """Add steps for the experts and the plain linears in `module` that gain from a replacement."""
        for name in (*experts_in(module, path), *routed_in(module, path)):
            if self.is_first(name, path):
                self.experts(name)
        replaced = tuple(f"{step.path}." for step in self.steps if isinstance(step.shape, ExpertsShape))
        for name, why in changed_linears(module, path):
            self.leave(name, why)
        for name, shape in linears(module, path):
            if name.startswith(replaced) or not self.is_first(name, path):
                continue
            if reason := self.stays(name):
                self.leave(name, reason)
                continue
            ranks = self.sharing() if name == self.head else (ONE,)
            split = len(ranks) > 1
            tied = self.shared.get(name, ()) if split or self.formats.of(name) is not None else ()
            linear = self.model.get_submodule(name)
            others = [other for other in tied if self.model.get_submodule(other) is not linear]
            unlike = [other for other in others if embedding_shape(self.model.get_submodule(other)) is None]
            if unlike and self.formats.of(name) is not None:
                why = f"shares its weight with {unlike[0]}, which is no plain embedding, so it is not quantized"
                self.leave(name, why)
                if not split:
                    continue
            parts = [plain_part(shape, rank, self.grain) for rank in ranks]
            own, fills, whole = self.chosen(parts, shape, name)
            if unlike:  # the embedding stays whole, and the head copies its rows
                fills, others = tuple(replace(fill, format=None) for fill in fills), []
            bodies = self.bodies(matrix_ops(fills, own))
            caller = self.model.get_submodule(name.rpartition(".")[0])
            if shape.transposed and not fills[0].format and is_adapter(caller):
                self.leave(name, "its adapter (peft) merges into a transposed weight")
            elif split or any(body != ops.REFERENCE for _, body in bodies) or any(fill.format for fill in fills):
                self.steps.append(Step(name, "Linear", own, fills, bodies, "a linear outside of blocks", whole=whole))
                if split or fills[0].format:
                    # Not in one line: `embedding` drops earlier steps of these modules from `self.steps`.
                    embeddings = [self.embedding(other, name, fills[0].format) for other in others]
                    self.steps += embeddings
            elif all(left.path.partition(": ")[0] != name for left in self.left):
                self.leave(name, "nothing to gain: PyTorch's own linear is the best body here")

    def is_first(self, name: str, path: str) -> bool:
        """Whether the module `name`, found in the one at `path`, was not met in another place before."""
        if name == path:
            return True
        there, seen = id(self.model.get_submodule(name)), len(self.decided)
        self.decided.add(there)
        return len(self.decided) > seen

    def experts(self, path: str) -> None:
        """Add a step for the experts at `path`, if they gain from one. Both matrices are quantized, or none."""
        module, where = self.model.get_submodule(path), path.rpartition(".")[0]
        try:
            if is_routed(module):
                bound = bind_routed(module, without_drops=self.config.moe.without_drops)
            else:
                bound = bind_experts(module, self.model.get_submodule(where))
                if not (named := NamedExperts.of(module)).is_ours:
                    why = f'its experts stay: the config names the implementation "{named.implementation}", not ours'
                    self.leave(path, why)
                    return
        except SpecMismatch as mismatch:
            self.leave(path, f"its experts stay: {mismatch}")
            return
        made = matrices_made(bound.fills, bound.shape)
        if exact := [source for fill in bound.fills for source in self.kept(path, fill)]:
            self.leave(path, f"its experts stay: {exact[0]} stays in float32, as transformers loads it")
            return
        given = {matrix.target: self.formats.of_fill(fill, path) for fill, matrix in made}
        format = given["up"]
        if format != given["down"]:
            self.leave(path, f"in {self.dtype}: up in {format} and down in {given['down']} need one format")
            format = None
        if format is None and self.formats.left_alone(linears_of(bound.fills[0], path)[0]):
            self.leave(path, f"in {self.dtype}: quant.weight.post_init_quant leaves it alone")
        try:
            parts = self.expert_parts(bound, path)
        except SpecMismatch as mismatch:
            self.leave(path, f"whole on each rank: {mismatch}")
            parts = [RankShare(bound.shape, bound.fills)]
        shapes: list[Any] = [part.shape for part in parts]
        formats: dict[str, QuantFormat] = {}
        if format is not None:
            shared = len(parts) > 1
            formats = {one.weight: format.of_part(one.inputs) if shared else format for one in bound.shape.matrices}
            matrices = [matrix for shape in shapes for matrix in shape.matrices]
            tried = [(one.target, formats[one.weight].fits(one.inputs)) for one in matrices]
            misfits = dict.fromkeys(f"{target}: {reason}" for target, reason in tried if reason)
            if misfits:
                self.leave(path, f"in {self.dtype}: {'; '.join(misfits)}")
                formats = {}
        own = parts[self.mesh.rank if len(parts) > 1 else 0]
        texts = {weight: str(one) for weight, one in formats.items()}
        fills = tuple(replace(fill, format=texts.get(fill.target)) for fill in own.fills)
        bodies = self.bodies(matrix_ops(fills, bound.shape))
        if formats:
            bodies = self.fitting(bodies, shapes, formats)
        elif len(parts) == 1 and all(body == ops.REFERENCE for _, body in bodies):
            if all(left.path != path for left in self.left):
                self.leave(path, "nothing to gain: transformers' own experts are the best body here")
            return
        why, whole = "experts of a mixture; the model routes to them", bound.shape if len(parts) > 1 else None
        if whole is not None:
            why += f"; {self.balance(bound.shape.expert_count, config_around(self.model, path))}"
        self.steps.append(Step(path, type(module).__name__, own.shape, fills, bodies, why, whole=whole))

    def expert_parts(self, bound: BoundExperts, path: str) -> list[RankShare]:
        """Every rank's part of the experts at `path`. SpecMismatch if there are too few."""
        multiples = {matrix.weight: self.formats.multiple(path, matrix.inputs) for matrix in bound.shape.matrices}
        return [
            experts_part(bound.shape, bound.fills, rank, grain=self.grain, multiples=multiples)
            for rank in self.sharing(has_experts=True)
        ]

    def balance(self, experts: int, config: Any) -> str:
        """How ranks share that many experts, in words."""
        counts = [stop - start for start, stop in split(experts, self.mesh.ep)]
        return balance(counts, self.mesh.slices, routes_of(config))

    def fitting(
        self, bodies: tuple[tuple[str, str], ...], shapes: list[ExpertsShape], formats: Mapping[str, QuantFormat]
    ) -> tuple[tuple[str, str], ...]:
        """`bodies`, with the reference for experts whose matrices the chosen layout does not take."""
        chosen = dict(bodies)
        layout = ops.quantized_experts.bodies[chosen["quantized_experts"]].layout
        if layout is None:
            return bodies
        reasons = [layout.declines(formats[one.weight], one.inputs) for shape in shapes for one in shape.matrices]
        part = layout.part_rows or 1
        uneven = [rows for shape in shapes for rows in (shape.rows, shape.hidden) if rows % part]
        reasons += [f"{rows} rows of an expert are no multiple of {part}" for rows in uneven]
        if found := next(filter(None, reasons), None):
            self.unfit["quantized_experts", chosen["quantized_experts"], found] = None
            chosen["quantized_experts"] = ops.REFERENCE
        return tuple(chosen.items())

    def embedding(self, path: str, head: str = "", format: str | None = None) -> Step:
        """Return the step for an embedding that ranks share, or that is tied to a quantized or shared `head`."""
        self.left = [left for left in self.left if left.path != path]
        self.steps = [step for step in self.steps if step.path != path]
        whole = embedding_shape(self.model.get_submodule(path))
        assert whole is not None, path
        part = plain_part(whole, self.mesh, self.grain)
        fills = tuple(replace(fill, format=format) for fill in part.fills)
        what = "quantized weight" if format else "rows"
        why = f"looks its rows up in the {what} of {head}" if head else "each rank has some of its rows"
        bodies = self.bodies(matrix_ops(fills, part.shape))
        shared = whole if self.mesh.tp > 1 else None
        return Step(path, "Embedding", part.shape, fills, bodies, why, shares=head, whole=shared)

    def hook(self, model: nn.Module) -> None:
        """Add a step for the attention of layers that stay, of each model inside that allows another one, if our kernel
        helps.
        """
        replaced = [name for name, module in model.named_modules() if isinstance(module, Block)]
        blocks = [*replaced, *(step.path for step in self.steps if step.depth == BLOCK)]
        stay = hookable(model, blocks)
        bodies = self.bodies(("attention",)) if stay else ()
        if stay and any(step.depth == SPLIT for step in self.steps):
            self.leave("", "attention of layers that stay: it is PyTorch's where ranks share layers without a spec")
        elif stay and self.config.replace_with_kernel_inject and bodies[0][1] not in ("torch", ops.REFERENCE):
            for path, kept in stay.items():
                if kept:
                    self.leave(path, f"attention of layers that stay: it is PyTorch's: {kept}")
                    continue
                why = "attention of layers that stay, by transformers' attention interface"
                name = type(model.get_submodule(path)).__name__
                self.steps.append(Step(path, name, None, (), bodies, why))

    def with_format(self, fill: Fill, whole: Shape, shapes: list[Shape], path: str) -> Fill:
        """Add the quantization format to `fill`, if it makes a matrix that the format fits on every rank."""
        matrix = matrix_of(whole, fill.target)
        if matrix is None:
            return fill
        format = self.formats.of_fill(fill, path)
        if format is None:
            if self.formats.left_alone(linears_of(fill, path)[0]):
                self.leave(f"{path}: {fill.target}", f"in {self.dtype}: quant.weight.post_init_quant leaves it alone")
            return fill
        format = format.of_part(matrix.inputs) if fill.cut is not None and fill.cut.axis == 1 else format
        # Experts take a format in both of their matrices or in none.
        of_experts = [one.weight for one in whole.matrices if one.op == "experts"]
        targets = of_experts if matrix.op == "experts" else [fill.target]
        widths = [own.inputs for shape in shapes for one in targets if (own := matrix_of(shape, one)) is not None]
        if reason := next((reason for width in widths if (reason := format.fits(width))), None):
            self.leave(f"{path}: {fill.target}", f"in {self.dtype}: {reason}")
            return fill
        for name, body in self.bodies((f"quantized_{matrix.op}",) if matrix.op == "experts" else ("quantized_linear",)):
            layout = ops.registered()[name].bodies[body].layout
            self.unfit |= {
                (name, body, reason): None for width in widths if layout and (reason := layout.declines(format, width))
            }
        return replace(fill, format=str(format))

    def bodies(self, names: Iterable[str]) -> tuple[tuple[str, str], ...]:
        for name in names:
            if name not in self.choices:
                refused = self.refused
                if self.config.kv_cache and name == "rotary_append":
                    refused = {**refused, "triton": f"a cache in {self.config.kv_cache} has no kernels there"}
                self.choices[name] = ops.registered()[name].choose(self.device, self.dtype, refused)
        return tuple((name, self.choices[name].body) for name in dict.fromkeys(names))

    def declines(self) -> tuple[tuple[str, str, str], ...]:
        choices = [choice for _, choice in sorted(self.choices.items())]
        return (*((choice.op, *declined) for choice in choices for declined in choice.declined), *self.unfit)


def fallback(
    steps: Iterable[Step], model: nn.Module, config: InferenceConfig, *, device: Device, mesh: Mesh
) -> list[Step]:
    """Return the next steps to try for refused ones: a layer's linears, or the children of a whole module."""
    decision = _Decision(model, config, device, config.resolved_dtype(device), mesh)
    for step in steps:
        module = model.get_submodule(step.path)
        if step.depth == BLOCK:
            decision.split(module, step.path, config_around(model, step.path))
        elif step.depth == MODULE:
            decision.inside(module, step.path, config_around(model, step.path))
        else:
            decision.linears(module, step.path)
    return decision.steps
