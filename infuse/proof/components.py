"""Cases for modules of diffusers: calls in a step of their pipeline, and in runs of their component on small inputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn

from infuse.ground.errors import CheckpointError, RankError
from infuse.inputs.component import GUIDED, UNEVEN, component_inputs
from infuse.inputs.model import RandomTensors
from infuse.proof.cases import Call, Case, record_run
from infuse.proof.first_step import FIRST_STEP


def component_cases(
    model: nn.Module, modules: Mapping[str, nn.Module], recorded: Mapping[str, Call]
) -> dict[str, list[Case]]:
    """Return the cases of each path in `modules` (modules of `model`): its `recorded` pipeline call and further ones.

    Runs of the component add two rows for modules recorded with fewer, and an uneven size for all.
    """
    cases: dict[str, list[Case]] = {path: [] for path in modules}
    for path in modules.keys() & recorded.keys():
        cases[path].append(Case(FIRST_STEP, (recorded[path],), (None,), whole=True))
    alone = {path: module for path, module in modules.items() if path not in recorded or len(recorded[path].hidden) < 2}
    for size, watched in ((GUIDED, alone), (UNEVEN, modules)):
        if not watched:
            continue
        seen: dict[str, list[Call]] = {path: [] for path in watched}
        try:
            inputs = component_inputs(model, RandomTensors(model), size)
            record_run(partial(model, **inputs), watched, None, seen)
        except (CheckpointError, RankError):
            raise
        except Exception:
            if size is GUIDED and not recorded:
                raise
            continue  # some models refuse uneven sizes, and infuse cannot make inputs for every model
        for path, calls in seen.items():
            if calls:
                cases[path].append(Case(size.label, tuple(calls), (None,), whole=True))
    return cases
