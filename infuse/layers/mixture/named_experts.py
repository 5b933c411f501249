"""Call the experts implementation that a model's config names, if it differs from our op.

That is a function that the user registered with transformers' ALL_EXPERTS_FUNCTIONS, or a kernel of a library. The
original's own forward looks it up and calls it, on views of the weights that the replacement holds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from infuse.ground.errors import UnsupportedCall
from infuse.layers.attention.named_attention import is_transformers_own

# Names of implementations equal to our op up to summation order, if they are transformers' own. None: not set.
_SERVED_NAMES = frozenset((None, "eager", "batched_mm", "grouped_mm"))
_read = object.__getattribute__  # a config's own attribute access takes 1 us


@dataclass(frozen=True)
class NamedExperts:
    """The original experts: their class, attributes and submodules, and the shapes of their parameters.

    `config` names the implementation; None if the class has no config, so that it calls none by name.
    """

    kind: type[nn.Module]
    attributes: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    config: Any

    @property
    def is_ours(self) -> bool:
        """Whether our op computes the implementation that the config names. Runs in every layer and step."""
        config = self.config
        if config is None:
            return True
        name = _read(config, "__dict__").get("_experts_implementation_internal")
        return name in _SERVED_NAMES and (name is None or is_transformers_own(_functions(), name))

    @property
    def implementation(self) -> str:
        """The name that the config gives."""
        return self.config._experts_implementation

    @staticmethod
    def of(original: nn.Module) -> NamedExperts:
        """Keep `original`, live or on meta, without its parameters."""
        attributes = {name: value for name, value in vars(original).items() if name != "_parameters"}
        shapes = {name: tuple(parameter.shape) for name, parameter in original.named_parameters()}
        return NamedExperts(type(original), attributes, shapes, attributes.get("config"))

    def __call__(self, weights: Mapping[str, Tensor | None], *inputs: Tensor) -> Tensor:
        """Compute by the named function, for hidden states [T, H], index and weights [T, K].

        `weights`: our tall tensors "up" and "down", and their biases. UnsupportedCall if the original's are no views of
        them.
        """
        attributes = self.attributes
        if attributes.get("has_gate", True) and not attributes.get("is_concatenated", True):
            self.refuse("the rows of gate and up apart, which the original has in turns")
        views = {name: self._view(name, weights) for name in self.shapes}
        module: Any = object.__new__(self.kind)
        vars(module).update(attributes, _parameters=views)
        return module.forward(*inputs)

    def refuse(self, content: str) -> NoReturn:
        """Raise UnsupportedCall, because the replacement holds the `content`, not the original's weights."""
        raise UnsupportedCall(
            f'{self.kind.__name__}: the config names the experts implementation "{self.implementation}", '
            f"which needs the original's weights; the replacement holds {content}. "
            'Call model.set_experts_implementation("grouped_mm"), which infuse computes itself'
        )

    def _view(self, name: str, weights: Mapping[str, Tensor | None]) -> Tensor:
        """Return the original's parameter `name` as a view of our tensor."""
        shape = self.shapes[name]
        tall = weights[("down" if name.startswith("down_proj") else "up") + ("_bias" if name.endswith("_bias") else "")]
        turned = len(shape) == 3 and self.attributes.get("is_transposed", False)
        if tall is None or tall.numel() != torch.Size(shape).numel():
            self.refuse("one rank's part of them")
        view = tall.view(shape[0], -1, *tall.shape[1:])
        return view.transpose(1, 2) if turned else view


def _functions() -> Any:
    """Return transformers' experts functions, which are imported if a config names one."""
    return sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS
