"""Layers without a spec that ranks share, each in its own forward: find them and their possible cuts."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import nn

from infuse.architectures import specs_for
from infuse.architectures.foreign.deepspeed import routed_in
from infuse.architectures.ranks import RankShare
from infuse.config import keys as config_keys
from infuse.parallel.mesh import Mesh
from infuse.plan.formats import Formats
from infuse.plan.found import shared_weights
from infuse.plan.shared import refuse_shared
from infuse.unknown.cut import split_parts
from infuse.unknown.roles import ModelRoles, Policy, Roles, layer_paths, policy_names, policy_problems


class Splits:
    """The layers of a model without a spec, or named by a policy, and how the ranks of `mesh` share each."""

    def __init__(self, model: nn.Module, policy: Policy | None, mesh: Mesh, grain: int):
        self._model, self._policy, self._mesh, self._grain = model, policy, mesh, grain
        if problems := policy_problems(policy, model):
            raise config_keys.failure(problems)
        self._named: dict[str, nn.Module] = {}
        self.layers: dict[str, nn.Module] = {}
        if mesh.tp > 1:
            modules = model.named_modules() if policy else ()
            self._named = {path: module for path, module in modules if policy_names(policy, module) is not None}
            for path, layer in layer_paths(model).items():
                if not _inside_has_spec(layer) and not any(_nested(path, named) for named in self._named):
                    self.layers[path] = layer
            self.layers |= self._named
        self._roles = ModelRoles(model, self.layers, policy)

    def takes(self, path: str) -> bool:
        """Whether the module at `path` is split, which takes precedence over any other replacement.

        True for modules that a policy names and for layers without a spec.
        """
        return path in self.layers and (path in self._named or not specs_for(self.layers[path]))

    def names(self, path: str) -> bool:
        """Whether a policy of the user names the module at `path`."""
        return path in self._named

    def parts(self, path: str, config: Any, formats: Formats) -> tuple[Roles, list[tuple[RankShare, list[RankShare]]]]:
        """Return the roles of the layer's linears and, for each interpretation, the whole and every rank's part.

        SpecMismatch if the layer cannot be split.
        """
        refuse_shared(self._model, path, self._shared)
        roles, layer = self._roles.of(path), self._model.get_submodule(path)
        roles = roles.outside(tuple(f"{mixture}." for mixture in routed_in(layer)))

        def multiple(linear: str, inputs: int) -> int:
            return formats.multiple(f"{path}.{linear}", inputs)

        return roles, split_parts(layer, roles, config, self._mesh, grain=self._grain, multiple=multiple)

    @cached_property
    def _shared(self) -> dict[str, tuple[str, ...]]:
        return shared_weights(self._model)


def _inside_has_spec(layer: nn.Module) -> bool:
    """Whether a layer contains a layer with a spec, or a module that passes its weights to PyTorch's kernels."""
    inner = (module for module in layer.modules() if module is not layer)
    return any(specs_for(module) or isinstance(module, nn.MultiheadAttention) for module in inner)


def _nested(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")
