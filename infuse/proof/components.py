"""Cases for modules of diffusers: what they are called with in a step of their pipeline, and while their component runs
on inputs of small sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn

from infuse.errors import CheckpointError, RankError
from infuse.inputs.component import GUIDED, UNEVEN, component_inputs
from infuse.inputs.model import RandomTensors
from infuse.proof.cases import Call, Case, record_run
from infuse.proof.first_step import FIRST_STEP


def component_cases(
    model: nn.Module, modules: Mapping[str, nn.Module], own: Mapping[str, Call]
) -> dict[str, list[Case]]:
    """For each path in `modules` (modules of `model`), its call in a step of the pipeline, `own`, and further cases.

    Runs of the component produce them: two rows for modules that `own` has no two rows of, and an uneven size for all.
    """
    cases = {path: [Case(FIRST_STEP, (own[path],), (None,), whole=True)] if path in own else [] for path in modules}
    alone = {path: one for path, one in modules.items() if path not in own or len(own[path].hidden) < 2}
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
            if size is GUIDED and not own:
                raise
            continue  # not every model takes uneven sizes, and not of every model infuse can make inputs
        for path, calls in seen.items():
            if calls:
                cases[path].append(Case(size.label, tuple(calls), (None,), whole=True))
    return cases
