"""Read-only inputs of all decisions: a model, a config and a device. Constant while a plan is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from infuse import ops
from infuse.architectures.foreign.deepspeed import routed_in
from infuse.architectures.foreign.read_weights import read_linears
from infuse.architectures.layer import Bound, LayerShape
from infuse.architectures.packing import Fill
from infuse.architectures.part import Matrix, named
from infuse.architectures.parts.experts import drops_tokens, router_paths
from infuse.config.inference import InferenceConfig
from infuse.ground.authors import package_of
from infuse.ground.device import Device
from infuse.ground.dtype_cast import kept_in_float32
from infuse.ground.errors import SpecMismatch
from infuse.parallel.mesh import ONE, Mesh
from infuse.parallel.slices import split
from infuse.plan.dequantized import refused_bodies
from infuse.plan.experts import share_text
from infuse.plan.formats import Formats
from infuse.plan.found import path_of, shared_weights
from infuse.plan.readings import Readings
from infuse.plan.stored import StoredFormats
from infuse.plan.unknown import Splits
from infuse.plan.users_own import UsersOwn


class Facts:
    """Facts about an unchanged model, for one rank of `mesh` on `device` in `dtype`, and what its checkpoint stores."""

    def __init__(
        self,
        model: nn.Module,
        config: InferenceConfig,
        device: Device,
        dtype: torch.dtype,
        mesh: Mesh,
        stored: StoredFormats,
    ):
        self.model, self.config, self.device, self.dtype, self.mesh = model, config, device, dtype, mesh
        self.tied = shared_weights(model)
        self.head, self.table = (path_of(model, name) for name in ("get_output_embeddings", "get_input_embeddings"))
        self.formats = Formats(config, self.head, stored.without_orders(self._tables()))
        self.grain = config.tensor_parallel.tp_grain_size
        self.routers = router_paths(model) | {f"{routed}.gate.wg" for routed in routed_in(model)}
        self.exact = kept_in_float32(model, dtype)
        self.read = read_linears(model)
        self.splits = Splits(model, config.injection_policy, mesh, self.grain)
        self.readings = Readings(model, dtype, self.exact)
        self.users_own = UsersOwn(model, self.readings.layers.values())
        self._choices: dict[str, ops.Choice] = {}

    def skips_padding(self, shape: LayerShape) -> bool:
        """Whether a block of this shape leaves padding out."""
        asked = self.config.skip_padding and self.device.kind == "cpu"
        return asked and not shape.whole_rows and not drops_tokens(self.model)

    def choice(self, op: str) -> ops.Choice:
        """Choose the body for `op`; the result also lists the bodies that declined."""
        if op not in self._choices:
            refused = self._refused
            if self.config.kv_cache and op == "rotary_append":
                refused = {**refused, "triton": f"a cache in {self.config.kv_cache} has no kernels there"}
            self._choices[op] = ops.registered()[op].choose(self.device, self.dtype, refused)
        return self._choices[op]

    def _tables(self) -> set[str]:
        """Names of the weights whose rows are looked up, which takes their codes as they are."""
        tables = [path for path, module in self.model.named_modules() if isinstance(module, nn.Embedding)]
        return {named(path, "weight") for table in tables for path in (table, *self.tied.get(table, ()))}

    @cached_property
    def _refused(self) -> dict[str, str]:
        return refused_bodies(self.model, self.device, self.dtype, self.mesh.tp)

    def ranks(self, has_experts: bool = False) -> tuple[Mesh, ...]:
        """List the mesh of each rank that holds its own part of a module."""
        return self.mesh.ranks() if has_experts or self.mesh.tp > 1 else (ONE,)

    def expert_share(self, experts: int) -> str:
        """Describe how ranks share this many experts."""
        counts = [stop - start for start, stop in split(experts, self.mesh.ep)]
        return share_text(counts, self.mesh.slices)

    def in_dtype(self, bound: Bound, path: str) -> Bound:
        """The layer at `path` as it is in the plan's dtype."""
        if self.dtype is not torch.float16 or not bound.shape.call.clamps:
            return bound
        wide = any(self.kept(path, fill) for fill in bound.fills)
        return replace(bound, shape=bound.shape.in_float16(wide))

    def left_wide(self, shape: Any, made: Sequence[tuple[Fill, Matrix]], path: str) -> list[str]:
        """Which matrices stay in float32 in a layer or module of 16 bits, and in none of ours."""
        wide = [f"{name}.down.weight" for name, part in getattr(shape, "held", ()) if getattr(part, "wide", False)]
        kept = [fill for fill, _ in made if self.kept(path, fill)]
        return [f"{fill.sources[0]} stays in float32" for fill in kept if fill.target not in wide]

    def kept(self, path: str, fill: Fill) -> list[str]:
        """List the sources of `fill`, for the module at `path`, that stay in float32 in a 16-bit model."""
        return [source for source in fill.sources if f"{path}.{source}" in self.exact]

    def reading_of(self, path: str) -> Bound:
        """Read the layer at `path` from its graph. SpecMismatch if it cannot be read, or runs methods of the user."""
        layer = self.model.get_submodule(path)
        if reasons := self.users_own.methods(layer, package_of(type(layer))):
            raise SpecMismatch(type(layer).__name__, reasons)
        return self.readings.of(path)

    def stays(self, name: str) -> str | None:
        """Return why the linear at `name` is never replaced, whatever the kernels; None if it may be."""
        self.formats.of(name)  # looked up for all, so that patterns match them
        read = self.read.get(name)
        if name in self.routers:
            return "chooses among experts or weighs them, so it keeps its precision"
        if f"{name}.weight" in self.exact:
            return "stays in float32, as transformers loads it"
        if read is not None and not read.dtype_only:
            return f"is no linear alone: {read}"
        return None if name else "the model itself is one linear, which has no place to be put in"
