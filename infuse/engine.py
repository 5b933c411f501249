"""InferenceEngine: what the user holds. It is the model, with its layers replaced; everything is installed on `module`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import nn

from infuse import interrupts
from infuse.apply.apply import Progress, apply
from infuse.apply.load import load, load_values
from infuse.architectures.quantized_elsewhere import offloaded, quantized_by
from infuse.config.inference import InferenceConfig
from infuse.device import Device
from infuse.errors import ConfigError, InfuseError, NotAvailable
from infuse.graphs.capture import backend_for
from infuse.layers.block import Block
from infuse.layers.gradient import InferenceModule
from infuse.layers.linear import QuantizedLinear
from infuse.logs import log, warn
from infuse.parallel.join import all_or_none, join
from infuse.parallel.mesh import Mesh
from infuse.plan.bytes import parameter_bytes
from infuse.plan.decide import make_plan
from infuse.plan.plan import Plan, Report, memory, title
from infuse.plan.step import BLOCK, LINEAR
from infuse.profile.profiler import ForwardTimes, Profile
from infuse.proof.proof import decodes
from infuse.shards.save import check_folder, save

if TYPE_CHECKING:
    from infuse.generate.install import GraphUse

# this part of a GPU's memory may be caches that wait for the next call: 9 GB of an H200, where an 8B model's take 1 to
# 2
_KEPT_CACHES = 16


def plan(model: nn.Module, config: Any = None, **kwargs: Any) -> Plan:
    """What `init_inference` would do to `model` (live or on meta), without doing it; `str` of it is a table. Of ranks:
    rank 0's.
    """
    settings = InferenceConfig.make(config, **kwargs)
    _check_model(model)
    with interrupts.held_back():  # layers without a spec are run on meta, with hooks on them
        return make_plan(model, settings, Device.of(settings.device or _device_of(model)), Mesh(tp=settings.tp_size))


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Make `model` fast in place and return it as an engine with the same `forward()` and `generate()`.

    The configuration is that of `deepspeed.init_inference` (see InferenceConfig): nothing, a dict, a JSON path,
    keywords, or both. With `checkpoint` the values come from there, and the model may be on meta. Raises ConfigError
    for wrong configuration, NotAvailable for what this version lacks, CheckpointError for files that are missing,
    broken or another model's, and ProofError under verify="strict"; the model is unharmed after any of them. Gradients
    do not pass through replaced layers.
    """
    return InferenceEngine(model, config, **kwargs)


class InferenceEngine(nn.Module):
    """The model with its layers replaced. What the engine does not define itself, `module` answers.

    `module` is the user's model, `plan` what was done to it, `settings` the configuration, `group` the ranks that share
    it.
    """

    plan: Plan

    def __init__(self, model: nn.Module, config: Any = None, **kwargs: Any):
        from infuse.generate.install import (
            install,
        )  # here: it needs transformers' modelling, which takes seconds to import

        super().__init__()
        self.settings = settings = InferenceConfig.make(config, **kwargs)
        if missing := settings.not_available():
            raise NotAvailable("; ".join(missing))
        _check_model(model)
        source, _, save_path = settings.checkpoint_files
        if source is None:
            _check_weights(model)
        elif library := quantized_by(model):
            raise ConfigError(
                f"checkpoint= cannot be read into a model that is already quantized by {library}: leave it out"
            )
        device = Device.of(settings.device or _device_of(model))
        mesh, self.group = join(
            settings.tp_size, *settings.tp_given, device.torch_device, settings.tensor_parallel.timeout_s
        )
        if save_path:
            with all_or_none(self.group, "init_inference"):
                check_folder(save_path)
        with _bar(settings.progress) as progress:
            with interrupts.held_back():  # until the model is complete
                if source is None:
                    with all_or_none(self.group, "init_inference"):
                        decided = make_plan(model, settings, device, mesh)
                        _move(model, device.torch_device)
                        model.eval()
                        self.plan = apply(decided, model, settings, progress, group=self.group)
                else:
                    loaded = load(model, settings, device, mesh, self.group, progress)
                    decided, self.plan, settings = loaded.decided, loaded.done, loaded.config
                self.module = model
                self.eval()  # keeps engine.training in sync with the model
                replaced = next((one for one in model.modules() if isinstance(one, InferenceModule)), None)
                if replaced is not None:
                    replaced.warns_of_training = True
                caches = any(decodes(step) for step in self.plan.steps)
                graphs = self._graphs(settings, device)
                limit, least = settings.max_out_tokens, settings.min_out_tokens
                self._handles = install(
                    model, limit_tokens=limit, min_new_tokens=least, caches=caches, graphs=graphs, group=self.group
                )
            if save_path:
                save(model, self.plan, settings, save_path, self.group, progress)
        self._times: ForwardTimes | None = None
        self._profiles: list[Profile] = []
        self._tell(decided)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward."""
        return self.module(*args, **kwargs)

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

    @property
    def config(self) -> Any:
        """The model's own config, None where it has none."""
        return getattr(self.module, "config", None)

    # -- profiling

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time each forward of the model from now on; `use_cuda_events` as far as there is CUDA, else the wall clock."""
        if self._times is None:
            self._times = ForwardTimes(self.module, use_cuda_events)

    def model_times(self) -> list[float]:
        """Milliseconds of each forward since the last call of this method; an error where profiling is off."""
        if self._times is None:
            raise InfuseError("model_times() needs profile_model_time() to have been called first")
        return self._times.read()

    @contextmanager
    def profile(self) -> Iterator[Profile]:
        """Profile what runs inside: `with engine.profile() as p: ...`, then `print(p)`, `p.as_dict()`,
        `p.save_trace(path)`.

        Its hooks make every part run by itself: what otherwise is one call or one kernel for several parts takes longer
        meanwhile.
        """
        with Profile(self.module, parameter_bytes(self.module)) as profile:
            yield profile
        self._profiles.append(profile)

    def report(self) -> Report:
        """What was fused, the memory before and after, and the times of what was profiled so far."""
        blocks, linears = (sum(step.depth == depth for step in self.plan.steps) for depth in (BLOCK, LINEAR))
        now = f"memory: {self.plan.before_bytes / 1e6:,.1f} MB before, {parameter_bytes(self.module) / 1e6:,.1f} MB now"
        return Report.of(self.plan, [f"{blocks} blocks and {linears} linears replaced", now, *map(str, self._profiles)])

    # -- the end, and what comes later

    def load_model_with_checkpoint(self, r_module: nn.Module) -> None:
        """Give `r_module`, a model in which nothing was replaced, the values of this engine's `checkpoint`, in the
        plan's dtype.

        Raises ConfigError without a checkpoint or for a replaced model, CheckpointError for one that is not r_module's.
        """
        if self.settings.checkpoint_files[0] is None:
            raise ConfigError(
                "load_model_with_checkpoint: the engine was made without checkpoint=, which says what to read"
            )
        if any(isinstance(module, (Block, QuantizedLinear)) for module in r_module.modules()):
            raise ConfigError(
                "load_model_with_checkpoint: r_module is replaced already, and has its values; give a model as it was made"
            )
        with interrupts.held_back():
            load_values(r_module, self.settings, self.plan.dtype, _device_of(self.module))

    def destroy(self) -> None:
        """Give the memory back, also where others still hold the module: its weights are gone, and calls raise
        InfuseError.
        """
        if self._times is not None:
            self._times.stop()
            self._times = None
        from infuse.generate.install import uninstall

        uninstall(self.module, self._handles)
        self._handles = []
        self.module.to("meta")
        for name in ("forward", "generate", "generate_batch", "init_continuous_batching"):
            if hasattr(self.module, name):
                setattr(self.module, name, _after_destroy)
        self._profiles.clear()

    def _graphs(self, settings: InferenceConfig, device: Device) -> GraphUse | None:
        """What is to be graphs; the plan says so where ranks cannot have them."""
        backend = backend_for(device.torch_device)
        if backend is None:
            return None
        steps, forward = settings.step_graphs, settings.enable_cuda_graph
        if (steps or forward) and (why := self.group.why_not_captured(device.torch_device)):
            self.plan = replace(self.plan, notes=(*self.plan.notes, f"no CUDA graphs: {why}"))
            steps = forward = False
        from infuse.generate.install import GraphUse

        return GraphUse(backend, steps, forward, keep_bytes=device.memory_bytes // _KEPT_CACHES)

    def _tell(self, decided: Plan) -> None:
        """Log the plan. Warn, once, of refused steps, of keys without effect, and loudly where nothing was accelerated."""
        log.info(
            "%s: %d of %d replacements done, memory %s",
            title(self.plan),
            len(self.plan.steps),
            len(decided.steps),
            memory(self.plan),
        )
        log.debug("%s", self.plan)
        for note in self.plan.notes:
            warn(f"infuse: {note}", stacklevel=4)
        done = {(step.path, step.depth) for step in self.plan.steps}
        refused = sum(
            (step.path, step.depth) not in done for step in decided.steps
        )  # linears may have taken a block's place
        if refused:
            why = next(left for left in self.plan.left if left.why.startswith("refused"))
            warn(
                f"infuse: {refused} of {len(decided.steps)} replacements were refused, e.g. {why.path}: {why.why}",
                stacklevel=4,
            )
        if not self.plan.steps:
            reasons = (
                "; ".join(dict.fromkeys(left.why for left in self.plan.left)) or "it has no layers that infuse knows"
            )
            warn(f"infuse: NOTHING IS ACCELERATED in {self.plan.model}: {reasons}", stacklevel=4)


def _after_destroy(*args: Any, **kwargs: Any) -> None:
    raise InfuseError(
        "destroy() was called on this engine, so its weights are gone: load the model and call init_inference again"
    )


@contextmanager
def _bar(wanted: bool | None) -> Iterator[Progress]:
    """A progress callback that logs, with bars on standard error where `wanted` or, by default, on a terminal or in a
    notebook.

    Of ranks, only rank 0 shows them.
    """
    from tqdm.auto import tqdm  # here: its look depends on where it is imported

    console = Console(stderr=True)
    rank = (
        torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
    )
    shown = rank == 0 and (console.is_terminal or console.is_jupyter if wanted is None else wanted)
    bars: dict[str, Any] = {}

    def progress(done: int, total: int, what: str) -> None:
        log.debug("%s: %d of %d", what, done, total)
        if shown:
            if what not in bars:
                bars[what] = tqdm(desc=what, total=total, leave=False)
            bars[what].update(done - bars[what].n)

    try:
        yield progress
    finally:
        for bar in bars.values():
            bar.close()


def _check_model(model: Any) -> None:
    if isinstance(model, nn.Module):
        return
    if isinstance(getattr(model, "model", None), nn.Module):
        raise ConfigError(
            f"a {type(model).__name__} was given; give its model: pipe.model = infuse.init_inference(pipe.model, ...)"
        )
    if isinstance(getattr(model, "components", None), dict):
        raise NotAvailable(
            f"a {type(model).__name__} was given: diffusion pipelines are not in this version; give one of its modules"
        )
    raise ConfigError(f"a torch.nn.Module is needed, {type(model).__name__} was given")


def _check_weights(model: nn.Module) -> None:
    on_meta = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if on_meta and offloaded(model):
        raise ConfigError(
            f"accelerate has offloaded {len(on_meta)} parameters ({on_meta[0]}, ...) to the CPU or to disk: load the model whole, without "
            "a device_map that offloads, or make it on meta and give checkpoint="
        )
    if on_meta:
        raise ConfigError(
            f"{len(on_meta)} parameters are on the meta device ({on_meta[0]}, ...): load the weights first, or give checkpoint=; "
            "infuse.plan works without"
        )


def _move(model: nn.Module, device: torch.device) -> None:
    """Move the model to `device`, if it is not there: some quantized models refuse even that."""
    tensors = (*model.parameters(), *model.buffers())
    if any(tensor.device.type != device.type or device.index not in (None, tensor.device.index) for tensor in tensors):
        model.to(device)


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
