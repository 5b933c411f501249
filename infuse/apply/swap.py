"""Put the new modules of accepted steps into the model in place of the old ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from infuse.apply.adopt import adopt, remember
from infuse.apply.build import Builder, Made
from infuse.architectures.foreign.adapters import merging_refused
from infuse.architectures.foreign.split import SplitShape
from infuse.layers.attention.hook import install_hook
from infuse.plan.shared import Sharing
from infuse.plan.step import Step
from infuse.unknown.install import places_of, put_part
from infuse.weights.fill import moves
from infuse.weights.skeleton import Tensors
from infuse.weights.state import keep_names


class Swaps:
    """Swaps the modules of `steps` in the source's model. With `sharing`, layers that share weights also share the
    tensors made from them.

    `rehearsed`: modules by path that were already built without values and are filled now. `before`: the tensors of
    the model before its first replacement; None in a rehearsal.
    """

    def __init__(
        self,
        builder: Builder,
        steps: Sequence[Step],
        sharing: Sharing,
        proven: Iterable[tuple[Step, nn.Module]] = (),
        rehearsed: Mapping[str, nn.Module] = MappingProxyType({}),
        before: Tensors | None = None,
    ):
        self.made: dict[str, nn.Module] = {}  # whole modules and layers, by path
        self._rehearsed, self._before = rehearsed, before
        self._builder, self._source, self._model = builder, builder.source, builder.source.model
        self._made = Made(sharing, proven)
        replaced = [self._model.get_submodule(step.path) for step in steps if step.shape is not None]
        self._places = places_of(replaced, self._model)  # some models use one layer in several places

    def hook(self, step: Step) -> None:
        """Install our attention in the layers that stay, of the model at the step's path."""
        install_hook(self._model.get_submodule(step.path), dict(step.bodies)["attention"], self._source.put)

    def split(self, step: Step) -> None:
        """Put this rank's part of a layer into the layer, which keeps its forward."""
        layer, shape = self._model.get_submodule(step.path), step.shape
        assert isinstance(shape, SplitShape), step
        part = self._builder.built(step, self._builder.dtype, self._made)
        self._keep_names(step, layer, layer)
        for matrix in shape.matrices:
            adopt(part.get_submodule(matrix.target), layer.get_submodule(matrix.target))
        put_part(layer, shape, part, self._source.put, self._builder.group.dense, step.path)

    def replace(self, step: Step) -> None:
        """Replace the old module of `step` everywhere."""
        old = self._model.get_submodule(step.path)
        if self._before is not None and self._source.is_live:
            self._cast_moved(step, old, self._before)
        if step.shares:
            new = self._builder.sharing(step, self._model.get_submodule(step.shares))  # it has been swapped in
        else:
            new = self._builder.built(step, self._builder.dtype, self._made, self._rehearsed.get(step.path))
            if step.is_layer:
                self.made[step.path] = new
        self._keep_names(step, new, old)
        remember(new, old, step.path, step.fills, is_layer=step.is_layer)
        for owner, name in self._places.get(id(old), ()):
            if owner._modules[name] is old:
                self._source.put(owner._modules, name, new)
                for method, refusal in merging_refused(owner, step.formats).items():
                    self._source.put(vars(owner), method, refusal)

    def _cast_moved(self, step: Step, old: nn.Module, before: Tensors) -> None:
        """Cast the parameters that the new module takes over, in all modules that share them."""
        parameters = dict(old.named_parameters())
        for fill in step.fills:
            if moves(fill) and fill.sources[0] in parameters:
                before.cast(parameters[fill.sources[0]], torch.float32 if fill.exact else self._builder.dtype)

    def _keep_names(self, step: Step, new: nn.Module, old: nn.Module) -> None:
        dtype, bodies, put = self._builder.dtype, dict(step.bodies), self._source.put
        before = None if new is old else self._before
        keep_names(new, old, step.path, step.fills, dtype=dtype, bodies=bodies, put=put, before=before)
