"""InferenceEngine: the user's model with its layers replaced. Everything is installed on `module`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infuse.apply.apply import Progress, Proven, prove
from infuse.apply.load import load, load_values, not_taken, take_codes
from infuse.apply.load import planned as planned_load
from infuse.apply.restore import BEFORE, Modes, remember, restore
from infuse.architectures.foreign.quantized_elsewhere import offloaded, quantized_by
from infuse.config.inference import InferenceConfig
from infuse.engine.component import install_changes
from infuse.engine.module_method import like_modules
from infuse.engine.named import NamedAsHeld
from infuse.graphs.capture import backend_for
from infuse.ground import interrupts, neighbours
from infuse.ground.device import Device, device_of
from infuse.ground.dtype_cast import kept_in_float32
from infuse.ground.errors import WAY_BACK, ConfigError, InfuseError
from infuse.ground.logs import log, progress_bars, warn
from infuse.ground.memory import channels_last
from infuse.inputs.component import called_inside, is_component
from infuse.layers.block import Block
from infuse.layers.gradient import InferenceModule
from infuse.parallel.group import Group
from infuse.parallel.join import join
from infuse.parallel.mesh import Mesh
from infuse.plan.bytes import parameter_bytes
from infuse.plan.decide import ALREADY_REPLACED, make_plan
from infuse.plan.kinds import BLOCK, EXPERTS, LINEAR, MODULE
from infuse.plan.plan import Plan, Report, memory, title
from infuse.plan.readings import Readings
from infuse.plan.step import OUTSIDE
from infuse.profile.profiler import ForwardTimes, Profile
from infuse.proof.cases import Call
from infuse.shards.save import check_folder, save
from infuse.weights.in_model import CodesInModel, codes_in

if TYPE_CHECKING:
    from infuse.generate.install import GraphUse

# Part of a GPU's memory that may hold caches for the next call: 9 GB of an H200; an 8B model's take 1 to 2 GB.
_KEPT_CACHES = 16


@dataclass(frozen=True)
class Prepared:
    """A live model whose replacements are decided and proven, but not made yet."""

    settings: InferenceConfig
    device: Device
    group: Group
    decided: Plan
    proven: Proven


def planned(
    model: nn.Module, settings: InferenceConfig, mesh: Mesh | None = None, *, in_pipeline: bool = False
) -> Plan:
    """Plan for `model` on a rank of `mesh` (None: rank 0), without changing the model.

    With a checkpoint in the settings, its headers are read, so that the plan tells which matrices keep their codes.
    """
    device = Device.of(settings.device or device_of(model))
    return planned_load(model, settings, device, mesh or settings.ranks.mesh(), in_pipeline=in_pipeline)


def readings_of(model: nn.Module, settings: InferenceConfig) -> Readings:
    """The readings of the model's layers, in the dtype that it would get."""
    dtype = settings.resolved_dtype(Device.of(settings.device or device_of(model)))
    return Readings(model, dtype, kept_in_float32(model, dtype))


def prepared(
    model: nn.Module,
    settings: InferenceConfig,
    group: Group,
    mesh: Mesh,
    progress: Progress | None,
    decided: Plan | None = None,
    calls: Mapping[str, Call] | None = None,
) -> Prepared:
    """Decide, unless `decided` is given, and prove the replacements in a live `model`, and place it.

    `calls`: calls of its modules, by path, recorded in a step of its pipeline.
    """
    device = Device.of(settings.device or device_of(model))
    decided = decided or make_plan(model, settings, device, mesh)
    check_replaced(model, decided.dtype)
    placed(model, settings)
    return Prepared(settings, device, group, decided, prove(decided, model, settings, progress, group, calls))


def placed(model: nn.Module, settings: InferenceConfig) -> None:
    """Move `model` to its device and set it to evaluation mode."""
    _move(model, Device.of(settings.device or device_of(model)).torch_device)
    model.eval()
    if is_component(model):
        channels_last(model)  # before the proofs, which then see the tensors that calls will have


class InferenceEngine(NamedAsHeld, nn.Module):
    """The model with its layers replaced. Attributes that the engine does not define are read and set on `module`.

    `module` is the user's model, `plan` what was done to it, `settings` the configuration, `group` the ranks that share
    it.
    """

    plan: Plan

    def __init__(self, model: nn.Module, config: Any = None, **kwargs: Any):
        super().__init__()
        self.settings = settings = InferenceConfig.make(config, **kwargs)
        model = model.module if isinstance(model, InferenceEngine) else model
        check_model(model)
        source, _, save_path = settings.checkpoint_files
        check_weights(model, from_checkpoint=source is not None)
        modes = Modes.of(model)
        device = Device.of(settings.device or device_of(model))
        timeout_s = settings.tensor_parallel.timeout_s
        mesh, self.group = join(settings.ranks, device.torch_device, timeout_s)
        if save_path:
            with self.group.on_all_or_none("init_inference"):
                check_folder(save_path)
        with neighbours.noticed(self.group.size), progress_bars(settings.progress) as progress:
            with interrupts.held_back():  # until the model is complete
                codes = codes_in(model) if source is None else None
                if isinstance(codes, CodesInModel):
                    loaded = take_codes(model, codes, settings, device, mesh, self.group, progress)
                    decided, self.plan = loaded.decided, loaded.done
                elif source is None:
                    with self.group.on_all_or_none("init_inference"):
                        ready = prepared(model, settings, self.group, mesh, progress)
                        self.plan = ready.proven.carry_out(progress)
                    decided = ready.decided
                    if codes is not None:
                        self.plan = replace(self.plan, notes=(*self.plan.notes, not_taken(codes)))
                else:
                    loaded = load(model, settings, device, mesh, self.group, progress)
                    decided, self.plan, settings = loaded.decided, loaded.done, loaded.config
                self._hold(model, settings, device)
                remember(model, modes, codes.library if isinstance(codes, CodesInModel) else "")
            if save_path:
                save(model, self.plan, settings, save_path, self.group, progress)
        tell({"": (decided, self.plan)})

    @classmethod
    def of_component(cls, ready: Prepared, progress: Progress | None, modes: Modes) -> InferenceEngine:
        """Carry out what was prepared for a pipeline's component. The pipeline logs the plans of all components."""
        engine = cls.__new__(cls)
        nn.Module.__init__(engine)
        engine.settings, engine.group = ready.settings, ready.group
        engine.plan = ready.proven.carry_out(progress)
        engine._hold(ready.proven.model, ready.settings, ready.device)
        remember(ready.proven.model, modes)
        return engine

    def _hold(self, model: nn.Module, settings: InferenceConfig, device: Device) -> None:
        """Take over the complete `model` and install the engine's hooks and methods on it."""
        if is_component(model):
            channels_last(model)  # weights that were cast or built anew
        for module in model.modules():  # else transformers initialises ours, when a model is composed with this one
            module._is_hf_initialized = True  # type: ignore[assignment]
        self.module = model
        self._name_as(model)
        self.eval()  # keeps engine.training in sync with the model
        self._times: ForwardTimes | None = None
        self._profiles: list[Profile] = []
        self._install(settings, device)
        install_changes(model, self.plan)

    def _get_name(self) -> str:
        return type(self).__qualname__

    @like_modules
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward."""
        return self._modules["module"](*args, **kwargs)  # type: ignore[misc]  # at once, without `__getattr__`

    @like_modules
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own generate, with our cache. Raises ContextLimitError beyond `max_out_tokens`."""
        if not hasattr(self.module, "generate"):
            raise InfuseError(f"{type(self.module).__name__} has no generate()")
        generate: Any = self.module.generate
        return generate(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self._modules:
                raise
            return getattr(self._modules["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        on_engine = name in vars(self) or name in self._modules or name.startswith("_") or hasattr(type(self), name)
        if (name == "config" or not on_engine) and hasattr(self._modules.get("module"), name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def config(self) -> Any:
        """The model's own config, None where it has none."""
        return getattr(self.module, "config", None)

    # -- profiling

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time each forward of the model from now on: by CUDA events, or by the wall clock without CUDA."""
        if self._times is None:
            self._times = ForwardTimes(self.module, use_cuda_events)

    def model_times(self) -> list[float]:
        """Milliseconds of each forward since the last call of this method. Raises InfuseError if profiling is off."""
        if self._times is None:
            raise InfuseError("model_times() needs profile_model_time() to have been called first")
        return self._times.read()

    @contextmanager
    def profile(self) -> Iterator[Profile]:
        """Profile the body: `with engine.profile() as p: ...`, then `print(p)`, `p.as_dict()`, `p.save_trace(path)`.

        Its hooks run every part separately, so parts that share a call or a kernel otherwise take longer.
        """
        with Profile(self.module, parameter_bytes(self.module)) as profile:
            yield profile
        self._profiles.append(profile)

    def report(self) -> Report:
        """The replaced layers, the memory before and after, and the profiles so far."""
        depths = Counter(step.depth for step in self.plan.steps)
        modules = f"{depths[MODULE]} modules, " if depths[MODULE] else ""
        done = f"{modules}{depths[BLOCK]} blocks and {depths[LINEAR]} linears replaced"
        done += f", and the experts of {depths[EXPERTS]} layers" if depths[EXPERTS] else ""
        now = f"memory: {self.plan.before_bytes / 1e6:,.1f} MB before, {parameter_bytes(self.module) / 1e6:,.1f} MB now"
        return Report.of(self.plan, [done, now, *map(str, self._profiles)])

    # -- later

    def load_model_with_checkpoint(self, r_module: nn.Module) -> None:
        """Load this engine's `checkpoint`, in the plan's dtype, into `r_module`: a model in which nothing was replaced.

        Raises ConfigError without a checkpoint or for a replaced model, CheckpointError for another model's checkpoint.
        """
        if self.settings.checkpoint_files[0] is None:
            raise ConfigError(
                "load_model_with_checkpoint: the engine was made without checkpoint=, so there is nothing to read"
            )
        if is_replaced(r_module):
            raise ConfigError(f"load_model_with_checkpoint: the layers of r_module are replaced already; {WAY_BACK}")
        with interrupts.held_back():
            load_values(r_module, self.settings, self.plan.dtype, device_of(self.module))

    def restore(self) -> nn.Module:
        """Put the original modules back, as `infuse.restore`; the engine then calls the original model."""
        if self._times is not None:
            self._times.stop()
            self._times = None
        restore(self.module)
        return self.module

    def destroy(self) -> None:
        """Free the memory even if the module is still referenced: it loses its weights, and calls raise InfuseError."""
        from infuse.generate.install import uninstall

        if self._times is not None:
            self._times.stop()
            self._times = None
        uninstall(self.module)
        vars(self.module).pop(BEFORE, None)
        self.module.to("meta")
        for name in ("forward", "generate", "generate_batch", "init_continuous_batching"):
            if hasattr(self.module, name):
                setattr(self.module, name, _after_destroy)
        self._profiles.clear()

    def _install(self, settings: InferenceConfig, device: Device) -> None:
        """Put generate, the caps, graphs and checks on the module."""
        from infuse.generate.install import install  # imports transformers' modelling, which takes seconds

        replaced = next((module for module in self.module.modules() if isinstance(module, InferenceModule)), None)
        if replaced is not None:
            replaced.warns_of_training = True
        install(
            self.module,
            limit_tokens=None if is_component(self.module) else settings.max_out_tokens,
            min_new_tokens=settings.min_out_tokens,
            caches=any(step.decodes for step in self.plan.steps),
            graphs=self._graphs(settings, device),
            group=self.group,
            kv_cache=settings.kv_cache,
        )

    def _graphs(self, settings: InferenceConfig, device: Device) -> GraphUse | None:
        """Choose the calls that become CUDA graphs. Adds a note to the plan if some cannot be captured."""
        from infuse.generate.install import GraphUse, routers_read_the_mask

        backend = backend_for(device.torch_device)
        if backend is None:
            return None
        steps, forward = settings.step_graphs, settings.enable_cuda_graph
        if (steps or forward) and (why := self.group.why_not_captured(device.torch_device)):
            self.plan = replace(self.plan, notes=(*self.plan.notes, f"no CUDA graphs: {why}"))
            steps = forward = False
        if steps and routers_read_the_mask(self.module):
            why = "routers read the mask of tokens, which covers the whole room of the cache there"
            self.plan = replace(self.plan, notes=(*self.plan.notes, f"no CUDA graphs of decode steps: {why}"))
        keep_bytes = device.memory_bytes // _KEPT_CACHES
        return GraphUse(backend, steps, forward, keep_bytes, inside=called_inside(self.module))


def tell(plans: Mapping[str, tuple[Plan, Plan]]) -> None:
    """Log plans, as decided and as executed, by component name ("" for a single model).

    Warn of each note once, of refused steps, and if no plan accelerates anything.
    """
    for note in dict.fromkeys(note for _, done in plans.values() for note in done.notes):
        warn(f"infuse: {note}", stacklevel=4)
    for name, (decided, done) in plans.items():
        of = f"{name}: " if name else ""
        counts = len(done.steps), len(decided.steps)
        log.info("%s%s: %d of %d replacements done, memory %s", of, title(done), *counts, memory(done))
        log.debug("%s", done)
        made = {(step.path, step.depth) for step in done.steps}
        # Counted by depth too: linears may have replaced the parts of a refused block.
        refused = sum((step.path, step.depth) not in made for step in decided.steps)
        if refused:
            why = next(left for left in done.left if left.why.startswith("refused"))
            total = len(decided.steps)
            text = f"infuse: {of}{refused} of {total} replacements were refused, e.g. {why.path}: {why.why}"
            warn(text, stacklevel=4)
    if not any(done.steps for _, done in plans.values()):
        for _, done in plans.values():
            if any(left.why == ALREADY_REPLACED for left in done.left):
                text = f"the layers of {done.model} are {ALREADY_REPLACED}: they keep their weights"
                warn(f"infuse: {text}", stacklevel=4)
                continue
            reasons = "; ".join(dict.fromkeys(left.why for left in done.left if left.why != OUTSIDE))
            reasons = reasons or "it has no layers that infuse knows"
            warn(f"infuse: NOTHING IS ACCELERATED in {done.model}: {reasons}", stacklevel=4)


def _after_destroy(*args: Any, **kwargs: Any) -> None:
    raise InfuseError("destroy() freed the weights of this engine: load the model and call init_inference again")


def check_model(model: Any) -> None:
    """Raise ConfigError for anything that is not a model."""
    if isinstance(model, nn.Module):
        return
    if isinstance(getattr(model, "model", None), nn.Module):
        raise ConfigError(
            f"a {type(model).__name__} was given; give its model: pipe.model = infuse.init_inference(pipe.model, ...)"
        )
    if isinstance(getattr(model, "components", None), dict):
        raise ConfigError(
            f"a {type(model).__name__} was given, a pipeline that is not diffusers' own: give one of its modules"
        )
    if isinstance(model, (str, PathLike)):
        load = f"AutoModelForCausalLM.from_pretrained({str(model)!r})"
        raise ConfigError(
            f"a torch.nn.Module is needed, the path {str(model)!r} was given; load it first, e.g. by {load}"
        )
    raise ConfigError(f"a torch.nn.Module is needed, {type(model).__name__} was given")


def check_replaced(model: nn.Module, dtype: torch.dtype) -> None:
    """Raise ConfigError if an earlier call replaced blocks in another dtype: they stay, and would not fit the rest."""
    for block in (module for module in model.modules() if isinstance(module, Block)):
        block_dtypes = {each.dtype for each in block.parameters() if each.is_floating_point()}
        if block_dtypes and dtype not in block_dtypes:
            dtypes = ", ".join(sorted(str(each).removeprefix("torch.") for each in block_dtypes))
            raise ConfigError(
                f"dtype: {str(dtype).removeprefix('torch.')} is asked for, and layers of this model were replaced in "
                f"{dtypes} by an earlier init_inference; ask for that, or put them back first: {WAY_BACK}"
            )


def check_weights(model: nn.Module, from_checkpoint: bool) -> None:
    if from_checkpoint:
        library = quantized_by(model)
        if library:
            raise ConfigError(
                f"checkpoint= cannot be read into a model that is already quantized by {library}: leave it out"
            )
        if is_replaced(model):
            raise ConfigError(
                "checkpoint= cannot be read into a model whose layers are replaced already: give the original model, "
                f"which may be on meta ({WAY_BACK}), or load values into this one with load_state_dict()"
            )
        return
    on_meta = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if on_meta and offloaded(model):
        raise ConfigError(
            f"accelerate has offloaded {len(on_meta)} parameters ({on_meta[0]}, ...) to the CPU or to disk: load the "
            "whole model without a device_map that offloads, or make it on meta and give checkpoint="
        )
    if on_meta:
        raise ConfigError(
            f"{len(on_meta)} parameters are on the meta device ({on_meta[0]}, ...): load the weights first, or give "
            "checkpoint=; infuse.plan works without"
        )
    if empty := [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]:
        raise ConfigError(
            f"{len(empty)} buffers are on the meta device ({empty[0]}, ...), which no state dict fills: make the model "
            "anew with its values, or give checkpoint=, which computes them"
        )


def _move(model: nn.Module, device: torch.device) -> None:
    """Move the model to `device` unless it is there: some quantized models refuse every move."""
    tensors = (*model.parameters(), *model.buffers())
    if any(tensor.device.type != device.type or device.index not in (None, tensor.device.index) for tensor in tensors):
        model.to(device)


def is_replaced(model: nn.Module) -> bool:
    """Whether any module of `model` is ours."""
    return any(isinstance(module, InferenceModule) for module in model.modules())
