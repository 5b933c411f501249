"""Decide which modules to replace, from which weights and with which kernels, and which to leave alone and why.

`make_plan` is pure: it does not change the model, which may be live or on meta. It makes tensors only to try code out:
gates of experts on a few numbers, and layers without a spec on meta. `str(plan)` is the table that users read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from infuse import ops
from infuse.architectures import Bound, bind_any, specs_for
from infuse.architectures.foreign.adapters import adapted, adapter_notes, adapter_parts, is_adapter
from infuse.architectures.foreign.deepspeed import bind_routed, is_routed, routed_in
from infuse.architectures.foreign.plain import LinearShape, changed_linears, embedding_shape, linear_shape, linears
from infuse.architectures.foreign.quantized_elsewhere import quantized_by
from infuse.architectures.module import BoundModule, ModuleSpec
from infuse.architectures.packing import Fill
from infuse.architectures.parts.experts import BoundExperts, ExpertsShape, bind_experts, experts_in, is_experts
from infuse.architectures.ranks import RankShare, Shape, experts_part, layer_part, plain_part
from infuse.config.inference import InferenceConfig
from infuse.diffusion.modules import module_spec
from infuse.ground.device import Device
from infuse.ground.errors import ConfigError, SpecMismatch
from infuse.inputs.component import is_component
from infuse.layers.attention.hook import hookable
from infuse.layers.block import Block
from infuse.layers.mixture.experts import Experts
from infuse.layers.mixture.named_experts import NamedExperts
from infuse.parallel.mesh import ONE, Mesh
from infuse.plan.apart import differences as undivided
from infuse.plan.apart import kept_apart
from infuse.plan.bytes import bytes_after, parameter_bytes, state_bytes, token_bytes
from infuse.plan.candidates import Candidate, Site, Table
from infuse.plan.chosen_format import with_format
from infuse.plan.dequantized import without_kernels
from infuse.plan.effects import without_effect
from infuse.plan.experts import check_counts, formats_of_experts, idle_ranks
from infuse.plan.facts import Facts
from infuse.plan.formats import matrices_made, matrix_made, matrix_name, matrix_ops
from infuse.plan.found import is_table_or_norm
from infuse.plan.kinds import BLOCK, SPLIT
from infuse.plan.plan import Plan
from infuse.plan.readings import binds_alike
from infuse.plan.shared import Sharing, same_indices
from infuse.plan.step import OUTSIDE, Left, Step
from infuse.plan.stored import NOTHING_STORED, StoredFormats
from infuse.quant.format import QuantFormat
from infuse.quant.parse import quant_format

ALREADY_REPLACED = "already replaced"  # by an earlier init_inference
_NO_BLOCK = "not as a whole block"


def make_plan(
    model: nn.Module,
    config: InferenceConfig,
    device: Device,
    mesh: Mesh = ONE,
    *,
    in_pipeline: bool = False,
    stored: StoredFormats = NOTHING_STORED,
) -> Plan:
    """Decide what replaces each module of `model`. The model is not changed.

    `stored`: formats of the checkpoint, in which matrices stay unless the config sets others.

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
    facts = Facts(model, config, device, dtype, mesh, stored)
    walk = _Walk(facts)
    notes: list[str] = []
    if library := quantized_by(model):
        walk.leave("", f"already quantized by {library}: nothing is replaced, quantized or cast")
    else:
        walk.visit(model, "", None)
        walk.hook(model)
        notes = facts.formats.check(model, among_others=in_pipeline)
    candidate = walk.candidate()
    steps = candidate.steps
    kv_cache = config.kv_cache if any(step.decodes for step in steps) else None
    why = "asked for" if config.dtype is not None else f"the default on {device.kind}, as nothing was asked for"
    sharing = Sharing(model, steps)
    return Plan(
        model=type(model).__name__,
        device=f"{device.kind} {device.name}".strip(),
        dtype=dtype,
        dtype_why=why,
        steps=steps,
        left=candidate.left,
        declined=candidate.declined,
        notes=(*_notes(facts, candidate, notes), *sharing.notes()),
        before_bytes=parameter_bytes(model),
        after_bytes=bytes_after(model, steps, dtype, sharing),
        mesh=mesh,
        kv_cache=kv_cache,
        token_bytes=token_bytes(steps, dtype, kv_cache),
        state_bytes=state_bytes(steps),
        places=candidate.places,
        stored=stored,
    )


def _notes(facts: Facts, candidate: Candidate, on_patterns: list[str]) -> tuple[str, ...]:
    model, config, device, steps = facts.model, facts.config, facts.device, candidate.steps
    return (
        *config.notes(device),
        *idle_ranks(facts.mesh, steps),
        *on_patterns,
        *without_effect(model, config, device, steps),
        *facts.formats.idle(device, facts.dtype),
        *adapter_notes(model),
        *same_indices(model, steps),
        *without_kernels(candidate.choices, steps, device),
    )


@dataclass(frozen=True)
class _Way:
    """A way to replace the module at a place. `decide` adds it to a walk, or returns why it does not fit ("": it is an
    earlier one again).

    `without`: the text in the plan if it does not fit.
    """

    decide: Callable[[_Walk], str | None]
    without: str = ""


class _Walk:
    """Builds one candidate for the whole model or a place in it: steps and left modules, in order."""

    def __init__(self, facts: Facts):
        self.facts = facts
        self.entries: list[Step | Left | Table] = []
        self.choices: dict[str, ops.Choice] = {}
        # (op, body, reason) for formats that a body leaves to the reference
        self.unfit: dict[tuple[str, str, str], None] = {}
        self.places: list[Site] = []
        self.torchs_own: dict[str, list[str]] = {}  # class → paths of the leaves of a component that stay
        self.decided: set[int] = set()  # ids of modules: a module in several places gets one step

    @property
    def steps(self) -> list[Step]:
        return [entry for entry in self.entries if isinstance(entry, Step)]

    def candidate(self) -> Candidate:
        """Return the candidate collected so far."""
        self.leave_torchs_own()
        shared = {step.path for step in self.steps if step.shares}
        steps: list[Step] = []
        left: list[Left] = []
        for entry in self.entries:
            if isinstance(entry, Table):
                if entry.path in shared:  # its step comes after the head's
                    continue
                entry = self.of_table(entry)
            if isinstance(entry, Step):
                steps.append(entry)
            else:
                left.append(entry)
        return Candidate(tuple(steps), tuple(left), self.choices, tuple(self.unfit), tuple(self.places))

    def of_table(self, table: Table) -> Step | Left:
        """Decide for an embedding whose weight no head shares. Of others than the input's, models read the weight."""
        stored = self.facts.formats.kept(table.path)
        if table.path == self.facts.table and (stored is not None or self.facts.mesh.tp > 1):
            return self.embedding(table.path, stored=stored)
        return Left(table.path, table.why_left)

    def take(self, path: str, ways: tuple[_Way, ...]) -> tuple[_Way, ...]:
        """Take the first of `ways` that fits, and return those after it."""
        for number, way in enumerate(ways):
            reason = way.decide(self)
            if reason is None:
                return ways[number + 1 :]
            if reason:
                self.leave(path, f"{way.without}: {reason}")
        return ()

    def place(self, path: str, *ways: _Way) -> None:
        """Take the first of `ways` that fits; the rest become further candidates for the place."""
        if rest := self.take(path, ways):
            self.places.append(Site(path, _further(self.facts, path, rest)))

    def leave(self, path: str, why: str) -> None:
        self.entries.append(Left(path, why))

    def leave_torchs_own(self) -> None:
        """List the leaves of a component that stay, one entry per class."""
        for name, paths in self.torchs_own.items():
            more = f", and so do {len(paths) - 1} more" if len(paths) > 1 else ""
            self.leave(paths[0], f"{name} stays PyTorch's{more}")
        self.torchs_own.clear()

    def visit(self, module: nn.Module, path: str, config: Any) -> None:
        """Decide for `module` and everything in it; `config` is that of the nearest enclosing model."""
        if id(module) in self.decided:
            return
        self.decided.add(id(module))
        specs = specs_for(module)
        is_layer = bool(specs) or path in self.facts.readings.layers
        if isinstance(module, (Block, Experts)):
            self.leave(path, ALREADY_REPLACED)
        elif is_experts(module) or is_routed(module):
            self.linears(module, path)
        elif isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
            self.leave(path, f"{type(module).__name__} hands the weights of its linears to PyTorch's kernels itself")
        elif is_layer and (adapters := adapted(module)):
            self.leave(path, f"{_NO_BLOCK}: has adapters (peft) at {', '.join(adapters)}")
            self.parts_of_layer(module, path, config, is_written=bool(specs))
        elif (spec := module_spec(module)) is not None and path:
            whole = _Way(partial(_Walk.module, module=module, path=path, spec=spec), "not as a whole module")
            self.place(path, whole, _Way(partial(_Walk.inside, module=module, path=path, config=config)))
        elif self.facts.splits.takes(path) and not adapted(module) and not self.facts.readings.is_group(path):
            self.place(path, *self.reading(module, path), *self.without_block(module, path, config))
        elif is_layer and not self.facts.config.replace_with_kernel_inject:
            self.leave(path, f"{_NO_BLOCK}: replace_with_kernel_inject is False")
            self.parts_of_layer(module, path, config, is_written=bool(specs))
        elif not specs and (reading := self.reading(module, path)):
            self.place(path, *reading, _Way(partial(_Walk.inside, module=module, path=path, config=config)))
        elif specs:
            bind = partial(bind_any, specs, module, config)
            why = f"spec of {type(module).__name__}"
            block = _Way(partial(_Walk.block, module=module, path=path, bind=bind, why=why), _NO_BLOCK)
            reading = self.reading(module, path, bind)
            self.place(path, block, *reading, *self.without_block(module, path, config))
        elif linear_shape(module) is not None:
            self.linears(module, path)
        elif next(module.children(), None) is None:
            self.leaf(module, path)
        else:
            if module._parameters:
                names = ", ".join(module._parameters)
                self.leave(path, f"{type(module).__name__} has parameters of its own: {names}")
            self.inside(module, path, config)

    def parts_of_layer(self, module: nn.Module, path: str, config: Any, *, is_written: bool) -> None:
        """Decide for the inside of a layer that stays; with a spec, it is known to have linears and experts alone."""
        if is_written:
            self.linears(module, path)
        else:
            self.inside(module, path, config)

    def reading(self, module: nn.Module, path: str, spec: Callable[[], Bound] | None = None) -> tuple[_Way, ...]:
        """The way to replace a layer by a block that is read from its graph; () if none is wanted.

        `spec` binds the layer to its spec, if it has one: a reading that is equal is no other way.
        """
        facts = self.facts
        wanted = facts.config.replace_with_kernel_inject and not adapted(module) and not facts.splits.names(path)
        if path not in facts.readings.layers or not wanted:
            return ()
        why = f"read from the graph of {type(module).__name__}"
        bind = partial(facts.reading_of, path)
        return (_Way(partial(_Walk.block, module=module, path=path, bind=bind, why=why, other=spec), _NO_BLOCK),)

    def without_block(self, module: nn.Module, path: str, config: Any) -> tuple[_Way, ...]:
        """Ways to replace the inside of a layer that keeps its forward."""
        linears = _Way(partial(_Walk.linears, module=module, path=path))
        if self.facts.mesh.tp == 1:
            return (linears,)
        return _Way(partial(_Walk.split, module=module, path=path, config=config), "whole on each rank"), linears

    def leaf(self, module: nn.Module, path: str) -> None:
        """Leave a module without children, except an embedding that ranks share or that may share a head's weight."""
        if not module._parameters:
            return
        why = OUTSIDE if is_table_or_norm(module) else f"{type(module).__name__} is in no layer that has a spec"
        in_component, is_table = is_component(self.facts.model), self.facts.mesh.tp > 1 and path == self.facts.table
        shares = (path in self.facts.tied or self.facts.formats.kept(path) is not None) and not in_component
        if (is_table or shares) and embedding_shape(module) is not None:
            self.entries.append(Table(path, why))
        elif in_component and path:
            self.torchs_own.setdefault(type(module).__name__, []).append(path)
        else:
            self.leave(path, why)

    def inside(self, module: nn.Module, path: str, config: Any) -> None:
        """Decide for the children of `module`."""
        config = getattr(module, "config", config)
        for name, child in module.named_children():
            if name not in adapter_parts(module):
                self.visit(child, f"{path}.{name}" if path else name, config)

    def module(self, module: nn.Module, path: str, spec: ModuleSpec) -> str | None:
        """Replace a module that has a spec, unless it differs from the spec or nothing is gained."""
        if adapters := adapted(module):
            return f"has adapters (peft) at {', '.join(adapters)}"
        if not self.facts.config.replace_with_kernel_inject:
            return "replace_with_kernel_inject is False"
        name = type(module).__name__
        try:
            bound = spec.bind(module)
            parts = self.layer_parts(module, path, bound, moved=(), library=spec.library)
        except SpecMismatch as mismatch:
            return str(mismatch)
        shape, fills, whole = self.chosen(parts, bound.shape, path)
        bodies = self.bodies((*bound.shape.ops, *matrix_ops(fills, shape)))
        step = Step(path, name, shape, fills, bodies, f"spec of {name}", whole=whole)
        ours = any(body != ops.REFERENCE for _, body in bodies)
        if not (ours or bound.shape.needs_no_kernels or step.formats or whole is not None):
            return "nothing to gain: no kernels run here"
        self.entries.append(step)
        return None

    def layer_parts(
        self, module: nn.Module, path: str, bound: Bound | BoundModule, moved: Sequence[str], library: str
    ) -> list[RankShare]:
        """Return each rank's part of a layer or module. SpecMismatch if formats or the user's changes forbid it.

        `moved`: paths of the modules whose hooks move to the new one. `library`: the package of the spec's class.
        """
        made, formats = matrices_made(bound.fills, bound.shape), self.facts.formats
        differences = undivided(bound.fills, bound.shape, formats, path) + self.facts.left_wide(bound.shape, made, path)
        if differences := differences + self.facts.users_own.inside(module, moved, library):
            raise SpecMismatch(type(module).__name__, differences)
        multiples = {matrix.weight: formats.multiple_of(fill, path, matrix.inputs) for fill, matrix in made}
        ranks, grain = self.facts.ranks(bound.shape.expert_count > 0), self.facts.grain
        return [layer_part(bound.shape, bound.fills, rank, grain=grain, multiples=multiples) for rank in ranks]

    def block(
        self,
        module: nn.Module,
        path: str,
        bind: Callable[[], Bound],
        why: str,
        other: Callable[[], Bound] | None = None,
    ) -> str | None:
        """Replace a layer by a block, unless `bind` or the layer says why not, or `other` binds it alike."""
        name = type(module).__name__
        try:
            bound = bind()
            if other is not None and binds_alike(other, bound):
                return ""
            bound = self.facts.in_dtype(bound, path)
            moved = self.facts.users_own.moved(module, bound.shape)
            parts = self.layer_parts(module, path, bound, moved, bound.library)
        except SpecMismatch as mismatch:
            return str(mismatch)
        shape, fills, whole = self.chosen(parts, bound.shape, path)
        bodies = self.bodies((*bound.shape.ops, *matrix_ops(fills, shape)))
        mixture = next((name for name, part in bound.shape.held if part.expert_count), "")
        inside = f"{mixture}.experts."
        quantized = {fill.target.removeprefix(inside): fill for fill in fills if fill.format and inside in fill.target}
        if formats := {weight: quant_format(str(fill.format)) for weight, fill in quantized.items()}:
            bodies = self.fitting(bodies, [part.shape.parts[mixture].experts for part in parts], formats)  # type: ignore[union-attr]
        skips = self.facts.skips_padding(bound.shape)
        for router in sorted(self.facts.routers):
            if router.startswith(f"{path}."):
                self.keep(router)
        if len(parts) > 1 and bound.shape.expert_count:
            why += f"; {self.facts.expert_share(bound.shape.expert_count)}"
        step = Step(path, name, shape, fills, bodies, why, bound.index, whole=whole, skips_padding=skips)
        self.entries.append(step)
        return None

    def keep(self, router: str) -> None:
        """Add a note that a router is left alone if a format was set for it."""
        if self.facts.formats.of(router) is not None:
            self.leave(router, "chooses among experts or weighs them, so it keeps its precision")

    def split(self, module: nn.Module, path: str, config: Any) -> str | None:
        """Share the layer's linears among ranks and keep its forward, unless the layer cannot be split."""
        try:
            roles, interpretations = self.facts.splits.parts(path, config, self.facts.formats)
        except SpecMismatch as mismatch:
            return str(mismatch)
        steps: list[Step] = []
        for whole, parts in interpretations:
            walk = _Walk(self.facts) if steps else self  # report left modules for the first interpretation only
            shape, fills, all_of_it = walk.chosen(parts, whole.shape, path)
            bodies = walk.bodies(matrix_ops(fills, shape))
            why = f"linears shared by ranks, as {roles.why} tells"
            steps.append(Step(path, type(module).__name__, shape, fills, bodies, why, whole=all_of_it))
            self.choices, self.unfit = self.choices | walk.choices, self.unfit | walk.unfit
        self.entries.append(replace(steps[0], others=tuple(steps[1:])))
        for name in roles.left:
            self.leave(f"{path}: {name}", "not tensor-parallel: neither column- nor row-parallel")
        for name in (*experts_in(module, path), *routed_in(module, path)):
            self.experts(name)
        return None

    def chosen(self, parts: list[RankShare], whole: Shape, path: str) -> tuple[Any, tuple[Fill, ...], Shape | None]:
        """Return this rank's shape, its fills with formats, and the whole shape if ranks share the module."""
        part = parts[self.facts.mesh.rank if len(parts) > 1 else 0]
        shapes = [part.shape for part in parts]
        divided = kept_apart(part.fills, whole, self.facts.formats, self.facts.model, path)
        marked = tuple(replace(fill, exact=bool(self.facts.kept(path, fill))) for fill in divided)
        fills = tuple(self.with_format(fill, marked, whole, shapes, path) for fill in marked)
        return part.shape, fills, whole if len(parts) > 1 else None

    def linears(self, module: nn.Module, path: str) -> None:
        """Add steps for the experts and the plain linears in `module` that gain from a replacement."""
        mixtures = (*experts_in(module, path), *routed_in(module, path))
        for name in mixtures:
            if self.is_first(name, path):
                self.experts(name)
        steps = self.steps if mixtures else ()
        replaced = tuple(f"{step.path}." for step in steps if isinstance(step.shape, ExpertsShape))
        for name, why in changed_linears(module, path):
            self.leave(name, why)
        for name, shape in linears(module, path):
            if name.startswith(replaced) or not self.is_first(name, path):
                continue
            if reason := self.facts.stays(name):
                self.leave(name, reason)
            else:
                self.linear(name, shape)

    def linear(self, name: str, shape: LinearShape) -> None:
        """Add a step for the linear at `name`, if it gains from one, and for the embeddings that share its weight."""
        facts = self.facts
        ranks = facts.ranks() if name == facts.head else (ONE,)
        split, told = len(ranks) > 1, len(self.entries)
        tied = facts.tied.get(name, ()) if split or facts.formats.of(name) is not None else ()
        linear = facts.model.get_submodule(name)
        others = [other for other in tied if facts.model.get_submodule(other) is not linear]
        unlike = [other for other in others if embedding_shape(facts.model.get_submodule(other)) is None]
        read, why = facts.read.get(name), ""  # of its dtype alone, else it stays
        if facts.formats.of(name) is not None and (read is not None or unlike):
            why = f"{read}" if read else f"shares its weight with {unlike[0]}, which is no plain embedding"
            self.leave(name, f"{why}, so it is not quantized")
        parts = [plain_part(shape, rank, facts.grain) for rank in ranks]
        part, fills, whole = self.chosen(parts, shape, name)
        if unlike or why:  # the embedding stays whole; of several ranks' heads each copies its rows
            fills, others = tuple(replace(fill, format=None) for fill in fills), []
        bodies = self.bodies(matrix_ops(fills, part))
        caller = facts.model.get_submodule(name.rpartition(".")[0])
        if shape.transposed and not fills[0].format and is_adapter(caller):
            self.leave(name, "its adapter (peft) merges into a transposed weight")
        elif split or any(body != ops.REFERENCE for _, body in bodies) or any(fill.format for fill in fills):
            step = Step(name, "Linear", part, fills, bodies, "a linear outside of blocks", whole=whole)
            self.entries.append(step)
            if split or fills[0].format:
                self.entries += [self.embedding(other, name, fills[0]) for other in others]
        elif len(self.entries) == told:
            self.leave(name, "nothing to gain: PyTorch's own linear is the best body here")

    def is_first(self, name: str, path: str) -> bool:
        """Whether the module `name`, inside the one at `path`, is visited for the first time."""
        if name == path:
            return True
        there, seen = id(self.facts.model.get_submodule(name)), len(self.decided)
        self.decided.add(there)
        return len(self.decided) > seen

    def experts(self, path: str) -> None:
        """Add a step for the experts at `path`, if they gain from one. Both matrices are quantized or neither."""
        module, where, told = self.facts.model.get_submodule(path), path.rpartition(".")[0], len(self.entries)
        try:
            if is_routed(module):
                bound = bind_routed(module, without_drops=self.facts.config.moe.without_drops)
            else:
                bound = bind_experts(module, self.facts.model.get_submodule(where))
                if not (named := NamedExperts.of(module)).is_ours:
                    why = f'its experts stay: the config names the implementation "{named.implementation}", not ours'
                    self.leave(path, why)
                    return
        except SpecMismatch as mismatch:
            self.leave(path, f"its experts stay: {mismatch}")
            return
        if exact := [source for fill in bound.fills for source in self.facts.kept(path, fill)]:
            self.leave(path, f"its experts stay: {exact[0]} stays in float32, as transformers loads it")
            return
        asked, why = formats_of_experts(bound, self.facts.formats, path)
        if why:
            self.leave(path, f"in {self.facts.dtype}: {why}")
        try:
            parts = self.expert_parts(bound, path)
        except SpecMismatch as mismatch:
            self.leave(path, f"whole on each rank: {mismatch}")
            parts = [RankShare(bound.shape, bound.fills)]
        shapes: list[Any] = [part.shape for part in parts]
        formats: dict[str, QuantFormat] = {}
        if asked:
            shared, matrices = len(parts) > 1, bound.shape.matrices
            formats = {m.weight: asked[m.weight].of_part(m.inputs) if shared else asked[m.weight] for m in matrices}
            parts_of = [matrix for shape in shapes for matrix in shape.matrices]
            tried = [(matrix.target, formats[matrix.weight].fits(matrix.inputs)) for matrix in parts_of]
            misfits = dict.fromkeys(f"{target}: {reason}" for target, reason in tried if reason)
            if misfits:
                self.leave(path, f"in {self.facts.dtype}: {'; '.join(misfits)}")
                formats = {}
        part = parts[self.facts.mesh.rank if len(parts) > 1 else 0]
        fills = tuple(self.facts.formats.as_stored(fill, path, formats.get(fill.target)) for fill in part.fills)
        bodies = self.bodies(matrix_ops(fills, bound.shape))
        if formats:
            bodies = self.fitting(bodies, shapes, formats)
        elif len(parts) == 1 and all(body == ops.REFERENCE for _, body in bodies):
            if len(self.entries) == told:
                self.leave(path, "nothing to gain: transformers' own experts are the best body here")
            return
        why, whole = "experts of a mixture; the model routes to them", bound.shape if len(parts) > 1 else None
        if whole is not None:
            why += f"; {self.facts.expert_share(bound.shape.expert_count)}"
        self.entries.append(Step(path, type(module).__name__, part.shape, fills, bodies, why, whole=whole))

    def expert_parts(self, bound: BoundExperts, path: str) -> list[RankShare]:
        """Return each rank's part of the experts at `path`. SpecMismatch if there are too few."""
        made, multiple = matrices_made(bound.fills, bound.shape), self.facts.formats.multiple_of
        multiples = {matrix.weight: multiple(fill, path, matrix.inputs) for fill, matrix in made}
        return [
            experts_part(bound.shape, bound.fills, rank, grain=self.facts.grain, multiples=multiples)
            for rank in self.facts.ranks(has_experts=True)
        ]

    def fitting(
        self, bodies: tuple[tuple[str, str], ...], shapes: list[ExpertsShape], formats: Mapping[str, QuantFormat]
    ) -> tuple[tuple[str, str], ...]:
        """Return `bodies`, with the reference for experts whose matrices do not fit the chosen layout."""
        chosen = dict(bodies)
        layout = ops.quantized_experts.bodies[chosen["quantized_experts"]].layout
        if layout is None:
            return bodies
        matrices = [matrix for shape in shapes for matrix in shape.matrices]
        reasons = [layout.declines(formats[matrix.weight], matrix.inputs) for matrix in matrices]
        part = layout.part_rows or 1
        uneven = [rows for shape in shapes for rows in (shape.rows, shape.hidden) if rows % part]
        reasons += [f"{rows} rows of an expert are no multiple of {part}" for rows in uneven]
        if reason := next(filter(None, reasons), None):
            self.unfit["quantized_experts", chosen["quantized_experts"], reason] = None
            chosen["quantized_experts"] = ops.REFERENCE
        return tuple(chosen.items())

    def embedding(self, path: str, head: str = "", of_head: Fill | None = None, stored: str | None = None) -> Step:
        """Return the step for an embedding that ranks share, that a quantized or shared `head` shares, or in codes."""
        whole = embedding_shape(self.facts.model.get_submodule(path))
        assert whole is not None, path
        part = plain_part(whole, self.facts.mesh, self.facts.grain)
        format, as_stored = (of_head.format, of_head.as_stored) if of_head else (stored, stored is not None)
        fills = tuple(replace(fill, format=format, as_stored=as_stored) for fill in part.fills)
        what = "quantized weight" if format else "rows"
        own = "each rank has some of its rows" if self.facts.mesh.tp > 1 else "looks its rows up in the stored codes"
        why = f"looks its rows up in the {what} of {head}" if head else own
        bodies = self.bodies(matrix_ops(fills, part.shape))
        shared = whole if self.facts.mesh.tp > 1 else None
        return Step(path, "Embedding", part.shape, fills, bodies, why, shares=head, whole=shared)

    def hook(self, model: nn.Module) -> None:
        """Add a step for the attention of layers that stay, for each inner model that can use our kernel."""
        replaced = [name for name, module in model.named_modules() if isinstance(module, Block)]
        blocks = [*replaced, *(step.path for step in self.steps if step.depth == BLOCK)]
        stay = hookable(model, blocks)
        bodies = self.bodies(("attention",)) if stay else ()
        if stay and any(step.depth == SPLIT for step in self.steps):
            self.leave("", "attention of layers that stay: it is PyTorch's where ranks share layers without a spec")
        elif stay and self.facts.config.replace_with_kernel_inject and bodies[0][1] not in ("torch", ops.REFERENCE):
            for path, kept in stay.items():
                if kept:
                    self.leave(path, f"attention of layers that stay: it is PyTorch's: {kept}")
                    continue
                why = "attention of layers that stay, by transformers' attention interface"
                name = type(model.get_submodule(path)).__name__
                self.entries.append(Step(path, name, None, (), bodies, why))

    def with_format(self, fill: Fill, fills: tuple[Fill, ...], whole: Shape, shapes: list[Shape], path: str) -> Fill:
        """Add the quantization format to `fill`, if it makes a matrix that the format fits on every rank."""
        fill, why = with_format(fill, fills, whole, shapes, self.facts.formats, path)
        if why:
            target = matrix_name(fill) if fill.part else fill.target
            self.leave(f"{path}: {target}", f"in {self.facts.dtype}: {why}")
        if fill.format is None:
            return fill
        matrix, format = matrix_made(fill, whole), quant_format(fill.format)
        assert matrix is not None, fill
        widths = [part.inputs for shape in shapes if (part := matrix_made(fill, shape)) is not None]
        for name, body in self.bodies((f"quantized_{matrix.op}",) if matrix.op == "experts" else ("quantized_linear",)):
            layout = ops.registered()[name].bodies[body].layout
            self.unfit |= {
                (name, body, reason): None for width in widths if layout and (reason := layout.declines(format, width))
            }
        return fill

    def bodies(self, names: Iterable[str]) -> tuple[tuple[str, str], ...]:
        for name in names:
            self.choices[name] = self.facts.choice(name)
        return tuple((name, self.choices[name].body) for name in dict.fromkeys(names))


def _further(facts: Facts, path: str, ways: tuple[_Way, ...]) -> Iterator[Candidate]:
    """Decide the candidates for a place lazily, each independently of the others."""
    while ways:
        walk = _Walk(facts)
        ways = walk.take(path, ways)
        yield walk.candidate()
