"""The kinds of steps, by the shape of the new module: data for plans, proofs and shards.

apply.kinds says how each kind is built, proven and put in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from infuse.architectures.foreign.deepspeed import RoutedShape
from infuse.architectures.foreign.plain import EmbeddingShape, LinearShape
from infuse.architectures.foreign.split import SplitShape
from infuse.architectures.layer import LayerShape
from infuse.architectures.module import ModuleShape
from infuse.architectures.parts.experts import ExpertsShape

BLOCK, SPLIT, LINEAR, EMBEDDING, ATTENTION = "block", "split", "linear", "embedding", "attention"
EXPERTS, MODULE = "experts", "module"


@dataclass(frozen=True)
class Kind:
    """A kind of step.

    `depth`: how much is replaced, as named in the plan's text. `is_layer`: a layer or a whole module, whose inside can
    be replaced instead. `keeps_forward`: a layer without a spec, whose linears ranks share. `is_called`: a module of
    the user calls the new one, so the proof runs that module too. `is_packed`: its tensors differ from the original's
    even without a format, so shards store them as they are.
    """

    depth: str
    is_layer: bool = False
    keeps_forward: bool = False
    is_called: bool = False
    is_packed: bool = False


KINDS: Mapping[type, Kind] = MappingProxyType(
    {
        LayerShape: Kind(BLOCK, is_layer=True, is_packed=True),
        ModuleShape: Kind(MODULE, is_layer=True, is_packed=True),
        SplitShape: Kind(SPLIT, is_layer=True, keeps_forward=True),
        LinearShape: Kind(LINEAR, is_called=True),
        EmbeddingShape: Kind(EMBEDDING),
        ExpertsShape: Kind(EXPERTS, is_called=True, is_packed=True),
        RoutedShape: Kind(EXPERTS, is_packed=True),
        type(None): Kind(ATTENTION),  # the step for attention has no shape
    }
)


def shape_class(shape: object) -> type:
    """Return the key of `shape` in the tables of kinds: its class or the nearest base class."""
    return next(cls for cls in type(shape).__mro__ if cls in KINDS)
