"""The way back: put the original modules back into a model, with the values that it has today."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infuse.apply.adopt import stands_for
from infuse.ground import interrupts
from infuse.ground.device import device_of
from infuse.ground.errors import UnsupportedCall
from infuse.ground.instance_method import InstanceMethod
from infuse.ground.logs import warn
from infuse.ground.modes import PLAIN
from infuse.layers.attention.hook import uninstall_hook
from infuse.layers.calls.model_methods import forget_replaced
from infuse.layers.gradient import InferenceModule
from infuse.unknown.install import places_of
from infuse.weights.skeleton import Tensors, Was
from infuse.weights.state import Original, forget_names, originals_in
from infuse.weights.way_back import WayBack

BEFORE = "_infuse_before"  # attribute of a model
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")  # how the names of a module's dicts of hooks end
_UNSET = object()


@dataclass(frozen=True)
class Cast:
    """A tensor of a module that stays: what it was before its cast, and the version of the cast one."""

    module: nn.Module
    leaf: str
    was: Was | Tensor
    version: int

    def undo(self) -> bool:
        """Put the tensor back in its dtype. True if its values keep the rounding of the cast."""
        is_parameter = isinstance(self.was, Was)
        held: Any = self.module._parameters if is_parameter else self.module._buffers
        now = held.get(self.leaf)
        if now is None or now.dtype == self.was.dtype:  # someone cast it since
            return False
        unwritten = now._version == self.version
        if isinstance(self.was, Tensor):
            held[self.leaf] = self.was if unwritten and self.was.device == now.device else now.to(self.was.dtype)
            return held[self.leaf] is not self.was
        exact = self.was.as_it_is(now.device) if unwritten else None
        held[self.leaf] = self.was.with_values(now) if exact is None else exact
        return exact is None and self.was.loses(now)


@dataclass(frozen=True)
class Modes:
    """The paths of a model's modules in training mode, and whether convolutions have their channels last in memory."""

    training: frozenset[str]
    channels_last: bool

    @classmethod
    def of(cls, model: nn.Module) -> Modes:
        modules = model.named_modules(remove_duplicate=False)
        training = frozenset(path for path, module in modules if module.training)
        return cls(training, any(map(_is_last, model.parameters())))

    def put_back(self, model: nn.Module) -> None:
        """Set them on `model`, unless someone has set it to training."""
        if not self.channels_last:
            for parameter in filter(_is_last, model.parameters()):
                parameter.data = parameter.data.contiguous()
        if not model.training:
            for path, module in model.named_modules(remove_duplicate=False):
                module.training = path in self.training


def _is_last(parameter: Tensor) -> bool:
    return parameter.dim() == 4 and not parameter.is_contiguous()


@dataclass
class Before:
    """Keeps what else `init_inference` changed in a model, besides replacing modules: casts and modes."""

    casts: list[Cast]
    modes: Modes | None = None
    codes: str = ""  # the library whose codes were taken

    @classmethod
    def of(cls, model: nn.Module, tensors: Tensors) -> Before:
        """Note the casts in a model whose modules are all replaced, beside those of an earlier call."""
        earlier: Before | None = vars(model).get(BEFORE)
        casts = [] if earlier is None else earlier.casts
        known = {(id(cast.module), cast.leaf) for cast in casts}
        for module, leaf, was in tensors.casts(model):
            if (id(module), leaf) not in known:
                now: Any = module._parameters.get(leaf) if isinstance(was, Was) else module._buffers.get(leaf)
                casts.append(Cast(module, leaf, was, now._version))
        return cls(casts) if earlier is None else earlier


def remember(model: nn.Module, modes: Modes, codes: str = "") -> None:
    """Note what a complete model is now, to see what is changed later, and the modes that it had.

    `codes`: the library whose codes were taken.
    """
    before: Before = vars(model)[BEFORE]
    before.modes = before.modes or modes
    before.codes = before.codes or codes
    for new, original in originals_in(model):
        back = original.way_back
        if back is not None and not back.is_noted:  # else by an earlier call: what was changed since is still a change
            back.note(original, new)
            back.attributes = {path: _attributes(part) for path, part in new.named_modules()}


def restore(model: nn.Module) -> None:
    """Put back the original modules of `model`, or of any model inside of it, with today's values.

    Raise UnsupportedCall, with nothing changed, if they cannot be had again. If memory runs out, the modules that are
    left stay replaced, and another call goes on.
    """
    roots = [module for module in model.modules() if BEFORE in vars(module)]
    _check(model, roots)
    with interrupts.held_back(), torch.inference_mode(False), torch.no_grad(), ExitStack() as done:
        for root in roots:
            _take_off_methods(root)
        rounded = list(_put_back(model, done))
        for root in roots:
            before: Before = vars(root)[BEFORE]
            rounded += _undo_casts(before.casts, done)
            if before.modes is not None:
                before.modes.put_back(root)
            delattr(root, BEFORE)
    if rounded:
        warn(
            f"infuse: restore: {len(rounded)} tensors have the rounding of the formats and dtypes that they had while "
            f"their modules were replaced, e.g. {rounded[0]}; Parameters that you hold keep their values",
            stacklevel=3,
        )


def _attributes(module: nn.Module) -> dict[str, Any]:
    """List what is set on the module, besides what nn.Module and our own classes keep there."""
    own = (name for name in vars(module) if not name.startswith("_") and not hasattr(InferenceModule, name))
    return {name: vars(module)[name] for name in own}


def _check(model: nn.Module, roots: list[nn.Module]) -> None:
    if not roots and any(True for _ in originals_in(model)):
        raise UnsupportedCall("restore: this is a part of a model; give the model that was given to init_inference")
    for root in roots:
        before: Before = vars(root)[BEFORE]
        if "_infuse" in vars(root) and vars(root)["_infuse"].group.size > 1:
            raise UnsupportedCall("restore: each rank holds a part of the weights; load the original model again")
        if before.codes:
            raise UnsupportedCall(
                f"restore: the linears of {before.codes}, whose codes were taken over, are gone; load the model again"
            )
    for new, original in originals_in(model):
        back = original.way_back
        if back is None:
            raise UnsupportedCall(f"restore: what {original.path} was is not known; load the model again")
        if others := [type(each).__name__ for each in new.parameters() if type(each) not in PLAIN]:
            raise UnsupportedCall(
                f"restore: {original.path} has a weight of class {others[0]} since init_inference; load the model again"
            )
        for path, part, places in _counterparts(new, back):
            what = f"{original.path}.{path}".strip(".") or "the model"
            if back.is_exchanged(path, part):
                raise UnsupportedCall(
                    f"restore: {what} has another module, or a forward of its own, since init_inference; take it out "
                    "first, and put it into the restored model"
                )
            if not places and any(hooks for name, hooks in vars(part).items() if name.endswith(_HOOKS)):
                raise UnsupportedCall(f"restore: {what} has hooks, and the original no such module; remove them first")


def _take_off_methods(root: nn.Module) -> None:
    from infuse.generate.install import uninstall  # imports transformers' modelling, which takes seconds

    uninstall(root)
    forget_replaced(root)
    for module in root.modules():
        uninstall_hook(module)
        for name, value in list(vars(module).items()):
            if type(value) is InstanceMethod:  # of adapters and of diffusers' models
                delattr(module, name)


def _undo_casts(casts: list[Cast], done: ExitStack) -> Iterator[str]:
    for cast in casts:
        if isinstance(cast.was, Was):
            done.callback(cast.was.release)
        if cast.undo():
            yield f"{cast.leaf} of {type(cast.module).__name__}"


def _put_back(model: nn.Module, done: ExitStack) -> Iterator[str]:
    """Put back all modules, one after the other, and yield the names of tensors whose values are rounded."""
    waiting = list(originals_in(model))
    places = places_of([new for new, _ in waiting], model)
    while waiting:
        interrupts.tell("the modules are being put back")
        new, original = waiting.pop()
        old, rounded = _rebuilt(new, original, done)
        for holder, name in places[id(new)]:
            holder._modules[name] = old
        yield from rounded
        del new  # its memory is free before the next one needs some


def _rebuilt(new: nn.Module, original: Original, done: ExitStack) -> tuple[nn.Module, list[str]]:
    """The module that `new` replaced, with its values, and the names of those that are rounded."""
    back = original.way_back
    assert back is not None
    skeleton, written, is_trained = back.skeleton, back.written(original, new), back.is_trained(new)
    parameters = _held(new, original, back, written, done)
    buffers = dict(skeleton.buffers)
    left = [name for name in skeleton.parameters if name not in parameters]
    quantized = {name for fill in original.fills if fill.format is not None for name in fill.sources}
    rounded = []
    for name, value in original.values(new, [*left, *written.intersection(buffers)]).items():
        if name in buffers:
            buffers[name] = value.to(buffers[name].dtype, copy=True)
            continue
        was = skeleton.parameters[name]
        parameters[name] = was.with_values(value)
        if name in quantized or was.loses(value):
            rounded.append(f"{original.path}.{name}".lstrip("."))
    if is_trained is not None:
        for parameter in parameters.values():
            parameter.requires_grad_(is_trained)
    old = skeleton.rebuilt(parameters, buffers)
    forget_names(new)
    _hand_over(new, old, back)
    return old, rounded


def _held(
    new: nn.Module, original: Original, back: WayBack, written: set[str], done: ExitStack
) -> dict[str, nn.Parameter]:
    """The Parameters that need no values of `new`: those that it has itself, and those that someone else holds."""
    held, device = back.handed_on(original, new), device_of(new)
    for name, was in back.skeleton.parameters.items():
        done.callback(was.release)
        if name not in held and name not in written and (parameter := was.as_it_is(device)) is not None:
            held[name] = parameter
    return held


def _counterparts(new: nn.Module, back: WayBack) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """The parts of `new` by path, with the paths of the modules that each stands for; none for one of ours alone."""
    stand, there = stands_for(new), back.skeleton.paths
    for path, part in new.named_modules():
        yield path, part, stand.get(path, (path,) if path in there else ())


def _hand_over(new: nn.Module, old: nn.Module, back: WayBack) -> None:
    """Give the modules that are put back the hooks, and the attributes that have been set, of those in their places."""
    for path, part, places in _counterparts(new, back):
        before, modules = back.attributes.get(path, {}), [old.get_submodule(place) for place in places]
        mine = {name: value for name, value in _attributes(part).items() if value is not before.get(name, _UNSET)}
        for module in modules:
            vars(module).update(mine)
        for name, hooks in vars(part).items() if modules else ():
            if name.endswith(_HOOKS) and hooks and all(hooks is not vars(module)[name] for module in modules):
                _add_hooks(modules[0], name, hooks)


def _add_hooks(module: nn.Module, name: str, hooks: dict[int, Any]) -> None:
    """Give the module these hooks: the dict itself where it has none, so that handles still remove them."""
    own: dict[int, Any] = vars(module)[name]
    if own:
        own.update(hooks)
    else:
        object.__setattr__(module, name, hooks)
