"""Load: a checkpoint into a model, live or on meta. Everything that can be judged without values is judged first."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from infuse.apply import Progress, apply
from infuse.config import InferenceConfig
from infuse.device import Device
from infuse.plan import Plan, make_plan
from infuse.weights.checkpoint import Checkpoint
from infuse.weights.names import model_reader
from infuse.weights.placing import Placing
from infuse.weights.sources import find_files


def load(model: nn.Module, config: InferenceConfig, device: Device, progress: Progress | None = None) -> tuple[Plan, Plan]:
    """Plan, and carry the plan out on `config`'s checkpoint; the plan as decided and as carried out.

    CheckpointError, ConfigError or ProofError: `model` has every tensor and module that it had. A model on meta takes the
    memory of the result and of one layer; of a live model the old values stay until all new ones are there.
    """
    source, base_dir = config.checkpoint_files
    checkpoint = Checkpoint(find_files(source, base_dir))
    if any(parameter.is_meta for parameter in model.parameters()) and hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]  # `model.to("meta")` unties
    reader = model_reader(model, checkpoint)
    decided = make_plan(model, config, device)
    placing = Placing(model, reader, (step.path for step in decided.steps if step.shape is not None), decided.dtype, device.torch_device)
    with placing:
        model.eval()
        done = apply(decided, model, config, progress, placing)
    return decided, replace(done, notes=(*done.notes, *reader.notes))
