"""Stands in for the module around the one that a part replaces, such as BERT's `attention` around its `self`.

The part is called as the inner module was. Nothing calls the outer one, so what would listen to it is refused.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, NoReturn

from torch import nn

from infuse.ground.errors import UnsupportedCall
from infuse.layers.replaced import KEEPS_LAYERS


def shown_outside(part: nn.Module, outer: str, inner: str, kind: type[nn.Module]) -> nn.Module:
    """A module `outer` of the class `kind`, whose attribute `inner` is the part, with the part's attributes."""
    shown = object.__new__(_class_of(type(part), kind))  # type: ignore[arg-type]
    object.__setattr__(shown, "__dict__", vars(part))
    object.__setattr__(shown, "_places", (outer, inner))
    return shown


OUTER_CONFIG = "_outer_config"  # the config of the outer module, where the inner one has none


class _Outside(nn.Module):
    """Shares the `__dict__` of a part."""

    _places: tuple[str, str]

    def __getattr__(self, name: str) -> Any:
        if name == "config" and OUTER_CONFIG in vars(self):
            return vars(self)[OUTER_CONFIG]
        return super().__getattr__(name)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        outer, inner = self._places
        raise UnsupportedCall(
            f"infuse computes {outer} together with what follows it, so nothing can listen to it or take its place; "
            f"hooks on {outer}.{inner} run; {KEEPS_LAYERS}"
        )

    register_forward_hook = register_forward_pre_hook = _refuse
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse
    forward = _refuse

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("forward", self._places[1]):
            self._refuse()
        super().__setattr__(name, value)

    def _part(self) -> Any:
        return vars(self)[self._places[1]]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return shown_outside(copy.deepcopy(self._part(), memo), *self._places, type(self).__bases__[-1])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return shown_outside, (self._part(), *self._places, type(self).__bases__[-1])


@cache
def _class_of(part: type, kind: type) -> Any:
    return type(kind.__name__, (_Outside, part, kind), {"__module__": kind.__module__})
