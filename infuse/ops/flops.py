"""Formulas of the operations in our ops' products, for torch.utils.flop_counter.

That module imports Triton, so formulas wait until somebody imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COUNTER = "torch.utils.flop_counter"


class _UntilImported(MetaPathFinder):
    """Finds nothing of its own. Once the counter is imported, registers the formulas and is gone."""

    def __init__(self) -> None:
        self.formulas: dict[Any, Callable[..., int]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            for op, formula in self.formulas.items():
                module.register_flop_formula(op)(formula)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_waiting = _UntilImported()


def register_flops(op: Any, formula: Callable[..., int]) -> None:
    """Register a formula of shapes with the counter, now or when it is imported."""
    if counter := sys.modules.get(_COUNTER):
        counter.register_flop_formula(op)(formula)
    else:
        _waiting.formulas[op] = formula
        if _waiting not in sys.meta_path:
            sys.meta_path.insert(0, _waiting)
