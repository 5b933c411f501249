"""Execute a plan: prove its steps, then, for each accepted one, build on meta → fill → swap → drop the old.

Peak memory is the model plus the merged matrices of one layer. A step that fails its proof is not swapped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from infuse.apply.build import Builder
from infuse.apply.prove import Proofs
from infuse.apply.swap import Swaps
from infuse.architectures.quantized_elsewhere import quantized_by
from infuse.config.inference import InferenceConfig
from infuse.dtype_cast import cast_buffers, cast_parameters
from infuse.parallel.group import LOCAL, Group
from infuse.plan.bytes import parameter_bytes
from infuse.plan.plan import Plan
from infuse.weights.alike import agree_on_weights, live_sums
from infuse.weights.loader import LayerSource

Progress = Callable[[int, int, str], None]  # done, total, description


def apply(
    plan: Plan, model: nn.Module, config: InferenceConfig, progress: Progress | None = None, group: Group = LOCAL
) -> Plan:
    """Execute `plan` on a live `model` in place; return the plan as executed, with refused steps among `left`.

    `group` holds the ranks of the plan's mesh; all of them take part, also in every proof. Raises ProofError under
    verify="strict" if a step fails its proof; nothing has been swapped then. Raises RankError if another rank decided
    otherwise or is gone.
    """
    group.check_same({"the plan": plan.digest()}, "the plan")
    if group.size > 1:
        agree_on_weights(group, model, live_sums(model))
    return carry_out(plan, LayerSource(model), config, progress, group)


def carry_out(
    plan: Plan, source: LayerSource, config: InferenceConfig, progress: Progress | None, group: Group
) -> Plan:
    """Like `apply`, but with the values of `source`; the ranks have already agreed on the plan and the values."""
    model, builder = source.model, Builder(source, plan.dtype, group)
    with torch.no_grad():
        source.begin(progress)
        proofs = Proofs(plan, config, builder)
        proofs.run(progress)
        accepted, left = proofs.accepted()
        swaps = Swaps(builder, accepted)
        for done, step in enumerate(accepted):
            source.step()
            swaps.swap(step)
            if progress:
                progress(done + 1, len(accepted), "replacing")
        source.finish()
        if quantized_by(model) is None:
            cast_parameters(model, plan.dtype)
            cast_buffers(model, plan.dtype, source.put)
    return plan.with_left(left, accepted, parameter_bytes(model), proofs.notes)
