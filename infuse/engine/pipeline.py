"""PipelineEngine: a pipeline of diffusers with the layers of its models replaced, each model by a plan of its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from torch import nn

from infuse.apply.apply import Progress
from infuse.apply.images import with_equal_images
from infuse.apply.restore import Modes
from infuse.architectures.foreign.plain import linear_shape
from infuse.config.inference import InferenceConfig
from infuse.engine.model import InferenceEngine, Prepared, check_weights, placed, planned, prepared, tell
from infuse.engine.module_method import like_modules
from infuse.engine.named import NamedAsHeld
from infuse.ground import interrupts, neighbours
from infuse.ground.device import Device, device_of
from infuse.ground.errors import ConfigError, NotAvailable
from infuse.ground.logs import progress_bars
from infuse.inputs.component import is_component
from infuse.parallel.group import Group
from infuse.parallel.join import join
from infuse.parallel.mesh import Mesh
from infuse.plan.plan import Plan, Report
from infuse.proof.first_step import FIRST_STEP, FirstStep, Outcome, first_outcome

_PER_MODEL = "these belong to single models: give them to init_inference(pipe.{name}, ...)"


def is_pipeline(value: Any) -> bool:
    """Whether the value is a pipeline of diffusers."""
    return not isinstance(value, nn.Module) and is_component(value) and isinstance(_held(value), dict)


@dataclass(frozen=True, repr=False)
class PipelinePlan(Mapping[str, Plan]):
    """The plan of each model of a pipeline, by the name of its component.

    `proof`: the outcome of a step of the pipeline; empty before it.
    """

    pipeline: str
    plans: Mapping[str, Plan]
    proof: str = ""

    def __getitem__(self, name: str) -> Plan:
        return self.plans[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def before_bytes(self) -> int:
        return sum(plan.before_bytes for plan in self.values())

    @property
    def after_bytes(self) -> int:
        return sum(plan.after_bytes for plan in self.values())

    def __str__(self) -> str:
        proof = [f"{self.pipeline}: proof: {self.proof}"] if self.proof else []
        return "\n".join([*proof, *(f"{self.pipeline}.{name}: {plan}" for name, plan in self.items())])

    def __repr__(self) -> str:
        return f"<plan for {self.pipeline}: {', '.join(f'{name}: {plan!r}' for name, plan in self.items())}>"

    def _repr_html_(self) -> str:
        proof = f"<p>{escape(self.proof)}</p>" if self.proof else ""
        return proof + "".join(f"<h4>{self.pipeline}.{name}</h4>{plan._repr_html_()}" for name, plan in self.items())


def models_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the models of a pipeline by component name. Several ControlNets are one component, but each is a model.

    Components that are None, schedulers, tokenizers and the like are left out; a model in two places counts once.
    """
    models: dict[str, nn.Module] = {}
    for name, value in _held(pipe).items():
        if not isinstance(value, nn.Module):
            continue
        nets = getattr(value, "nets", None)
        several = {f"{name}.nets.{i}": net for i, net in enumerate(nets)} if isinstance(nets, nn.ModuleList) else {}
        for path, model in (several or {name: value}).items():
            if all(model is not other for other in models.values()):
                models[path] = model
    return models


def pipeline_plan(pipe: Any, settings: InferenceConfig) -> PipelinePlan:
    """Plan each model of `pipe` without changing it."""
    models = models_of(pipe)
    _check(pipe, models, settings)
    plans = {name: planned(model, settings, in_pipeline=True) for name, model in models.items()}
    for plan in plans.values():
        plan.close()
    return PipelinePlan(type(pipe).__name__, plans)


class PipelineEngine(NamedAsHeld):
    """The pipeline with its models replaced. A call is the pipeline's own, and so are all other attributes.

    `pipeline` is the user's, `engines` has the engine of each model, `plan` what was done to them, `settings` the
    configuration, `group` the ranks that share all models. Attributes that are set, such as a scheduler, are set on the
    pipeline. If something cannot be decided or proven for one model, no model is changed.
    """

    _OWN = frozenset({"pipeline", "engines", "plan", "settings", "group"})

    def __init__(self, pipe: Any, config: Any = None, **kwargs: Any):
        settings = InferenceConfig.make(config, **kwargs)
        models = models_of(pipe)
        _check(pipe, models, settings)
        for model in models.values():
            check_weights(model, from_checkpoint=False)
        modes = {name: Modes.of(model) for name, model in models.items()}
        device = Device.of(settings.device or device_of(*models.values())).torch_device
        mesh, group = join(settings.ranks, device, settings.tensor_parallel.timeout_s)
        bars, busy = progress_bars(settings.progress), neighbours.noticed(group.size)
        with busy, bars as progress, interrupts.held_back():
            with group.on_all_or_none("init_inference"):
                # a wrong key shows before any proof
                plans = {name: planned(model, settings, mesh, in_pipeline=True) for name, model in models.items()}
                ready, proof = _proven(pipe, models, plans, settings, group, mesh, progress)
                engines = {
                    name: InferenceEngine.of_component(component, progress, modes[name])
                    for name, component in ready.items()
                }
        self.pipeline, self.settings, self.engines, self.group = pipe, settings, engines, group
        self.plan = PipelinePlan(type(pipe).__name__, {name: engine.plan for name, engine in engines.items()}, proof)
        self._name_as(pipe)
        tell({name: (component.decided, engines[name].plan) for name, component in ready.items()})

    @like_modules
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The pipeline's own call."""
        return self.pipeline(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__":  # `inspect.signature` asks an object for it that is called
            return inspect.signature(self.__call__)
        if name.startswith("__") or "pipeline" not in vars(self):
            raise AttributeError(name)
        return getattr(self.pipeline, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.pipeline, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({self.pipeline!r})"

    @property
    def module(self) -> Any:
        """The pipeline, under the name that an engine has for its model."""
        return self.pipeline

    def report(self) -> Report:
        """What was replaced in each model, the memory before and after, and the profiles so far."""
        reports = {f"{self.plan.pipeline}.{name}": engine.report() for name, engine in self.engines.items()}
        sizes = f"{self.plan.before_bytes / 1e6:,.1f} MB before, {self.plan.after_bytes / 1e6:,.1f} MB now"
        proof = f"proof: {self.plan.proof}\n" if self.plan.proof else ""
        return Report.of_several(reports, f"{proof}memory of all models: {sizes}")

    def restore(self) -> Any:
        """Put the original modules back into all models, as `infuse.restore`, and return the pipeline."""
        for engine in self.engines.values():
            engine.restore()
        return self.pipeline

    def destroy(self) -> None:
        """Free the memory of all models; calls of the pipeline raise InfuseError."""
        for engine in self.engines.values():
            engine.destroy()


def _proven(
    pipe: Any,
    models: Mapping[str, nn.Module],
    plans: Mapping[str, Plan],
    settings: InferenceConfig,
    group: Group,
    mesh: Mesh,
    progress: Progress | None,
) -> tuple[dict[str, Prepared], str]:
    """Prove all models' plans on calls that the pipeline makes, compare its images, and describe the outcome.

    If the pipeline cannot run by itself, the inputs are made from each model's config.
    """
    for model in models.values():
        placed(model, settings)
    step, outcome = FirstStep(pipe, models), None
    reason: str | None = ""
    if settings.verify != "off" and any(plan.steps for plan in plans.values()):
        outcome = first_outcome(
            step, {name: [replacement.path for replacement in plan.steps] for name, plan in plans.items()}
        )
        reason = group.any_fault(outcome if isinstance(outcome, str) else None, FIRST_STEP)
    calls = outcome.calls if isinstance(outcome, Outcome) and reason is None else {}
    ready = {
        name: prepared(model, settings, group, mesh, progress, plans[name], calls.get(name))
        for name, model in models.items()
    }
    if reason is not None or not isinstance(outcome, Outcome):
        text = f"on inputs made from each model's config, since the pipeline could not be run by itself: {reason}"
        return ready, text if reason else ""
    proven = {name: component.proven for name, component in ready.items()}
    proven, text = with_equal_images(step, outcome, proven, group, strict=settings.verify == "strict")
    return {name: replace(component, proven=proven[name]) for name, component in ready.items()}, text


def _held(pipe: Any) -> Any:
    return getattr(pipe, "components", None)


def _check(pipe: Any, models: Mapping[str, nn.Module], settings: InferenceConfig) -> None:
    """Raise ConfigError or NotAvailable for keys that do not apply to a whole pipeline.

    A pattern of `quant.weight.post_init_quant` has to match a linear in some of the models.
    """
    where = next(iter(models), "unet")
    source, _, save = settings.checkpoint_files
    per_model = {"checkpoint": source, "save_mp_checkpoint_path": save, "injection_policy": settings.injection_policy}
    if wrong := [key for key, value in per_model.items() if value]:
        raise ConfigError(f"{', '.join(wrong)}: given for a {type(pipe).__name__}; {_PER_MODEL.format(name=where)}")
    if settings.ep_size > 1:
        raise NotAvailable(f"moe.ep_size for a {type(pipe).__name__}: its models have no experts; give tp_size")
    if not models:
        raise ConfigError(f"a {type(pipe).__name__} was given that holds no model: load its components first")
    paths = [path for model in models.values() for path, module in model.named_modules() if _has_pattern(module)]
    if lost := [pattern for pattern in settings.module_formats if all(pattern not in path for path in paths)]:
        raise ConfigError(
            f"quant.weight.post_init_quant: {', '.join(map(repr, lost))} is in no linear's path in any model of the "
            f"pipeline: {', '.join(models)}"
        )


def _has_pattern(module: nn.Module) -> bool:
    return linear_shape(module) is not None or isinstance(module, nn.Embedding)
