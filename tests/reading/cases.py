"""A case: a model whose layers differ from those of tests/reading/layers.py in one thing, and what is expected of it.

Only data and how the model is made; the changed layers are in tests/reading/changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from tests.models.families import enlarge
from tests.reading import layers
from tests.reading.layers import CausalLM, Config, Encoder, Pieces

_CHANGED = "tests.reading.changed."
# READ: our parts can express it, so it becomes a block. LEFT: they cannot, so the layer stays and the plan says why.
# EITHER: they can, but it is no loss if the layer stays; the reason then has to name the change.
READ, LEFT, EITHER = "read", "left", "either"

LAYERS = 2
DECODER = Pieces(layers.Layer, layers.Attention, layers.GatedMLP, layers.RMSNorm)
ENCODER = Pieces(layers.EncoderLayer, layers.EncoderAttention, layers.MLP, nn.LayerNorm)


def no_change(model: Any) -> None:
    """Leave the model as it was built."""


@dataclass(frozen=True)
class Case:
    """`layer`, `attention`, `mlp`, `norm`: the changed classes; None is the unchanged one.

    `words`: a reason for leaving the layer contains one of them, or a line of a changed class. `config`: changed sizes.
    `changes`: a change to the model after it was built. `of`: the pieces that are unchanged. `around`: the model of
    layers that do not decode on a cache. `only`: the layers that are changed; the others are read. `calls`: keywords of
    one further call. `like`: the nearest layer without the change, from whose results the case's must differ, so that
    the comparison would notice if one were taken for the other; None if they compute the same, or if their weights have
    other shapes.
    """

    name: str
    expected: str
    layer: type | None = None
    attention: type | None = None
    mlp: type | None = None
    norm: type | None = None
    words: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    changes: Callable[[Any], None] = no_change
    of: Pieces = DECODER
    around: type = Encoder
    only: tuple[int, ...] = (0, 1)
    calls: dict[str, Any] = field(default_factory=dict)
    like: Pieces | None = DECODER

    @property
    def pieces(self) -> Pieces:
        given = {name: getattr(self, name) for name in ("layer", "attention", "mlp", "norm")}
        return replace(self.of, **{name: piece for name, piece in given.items() if piece is not None})

    @property
    def decodes(self) -> bool:
        return self.of is DECODER

    def make(self) -> Any:
        """The changed model, evaluating, with weights from a fixed seed."""
        model = self._built(self._of_layer)
        self.changes(model)
        return model

    def make_like(self) -> Any:
        """The model without the change, with the changed one's weights."""
        assert self.like is not None
        model = self._built((self.like,) * LAYERS)
        model.load_state_dict(self._built(self._of_layer).state_dict(), strict=False)
        return model

    @property
    def _of_layer(self) -> tuple[Pieces, ...]:
        return tuple(self.pieces if i in self.only else self.of for i in range(LAYERS))

    def _built(self, of_layer: tuple[Pieces, ...]) -> Any:
        torch.manual_seed(0)
        model = (CausalLM if self.decodes else self.around)(Config(**self.config), of_layer).eval()
        enlarge(model)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    module.weight.mul_(50)  # to about 1: the size of what layers add
        if self.decodes:
            model.generation_config.eos_token_id = None
        return model

    def lines(self) -> set[str]:
        """Every line of the changed classes, as "file.py:number"."""
        changed = [cls for cls in vars(self.pieces).values() if cls not in vars(self.of).values()]
        classes = {base for cls in changed for base in cls.__mro__ if base.__module__.startswith(_CHANGED)}
        found = set()
        for cls in classes:
            source, first = inspect.getsourcelines(cls)
            found |= {f"{Path(inspect.getfile(cls)).name}:{first + i}" for i in range(len(source))}
        return found


# Words of reasons that several cases share.
WORDS = MappingProxyType(
    {
        "branch": ("branch", "depends on the size", "on a size"),
        "values": ("branch", "on values", "data-dependent", "value of a tensor"),
        "state": ("state", "keeps", "writes"),
        "unused": ("unused", "never used", "not used", "no part uses"),
    }
)
