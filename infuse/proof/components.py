"""Cases for modules of diffusers: what they are called with while their component runs on inputs of small sizes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn

from infuse.architectures.component_inputs import GUIDED, UNEVEN, component_inputs
from infuse.architectures.model_inputs import RandomTensors
from infuse.errors import CheckpointError, RankError
from infuse.proof.cases import Call, Case, record_run


def component_cases(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, list[Case]]:
    """For each path in `modules` (modules of `model`), the cases that runs of the component produce."""
    cases: dict[str, list[Case]] = {path: [] for path in modules}
    for size in (GUIDED, UNEVEN):
        seen: dict[str, list[Call]] = {path: [] for path in modules}
        try:
            inputs = component_inputs(model, RandomTensors(model), size)
            record_run(partial(model, **inputs), modules, None, seen)
        except (CheckpointError, RankError):
            raise
        except Exception:
            if size is GUIDED:
                raise
            continue  # not every model takes uneven sizes
        for path, calls in seen.items():
            if calls:
                cases[path].append(Case(size.label, tuple(calls), (None,), whole=True))
    return cases
