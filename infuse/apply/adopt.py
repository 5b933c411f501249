"""Let a new module replace an old one: take over its attributes, hooks, requires_grad and, for a block, its class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from infuse.architectures.inner_call import InnerCall
from infuse.architectures.packing import Fill
from infuse.architectures.part import named
from infuse.architectures.parts.experts import experts_in
from infuse.layers.block import Block
from infuse.layers.calls.shown_outside import OUTER_CONFIG, shown_outside
from infuse.layers.gradient import PLAIN, Settled
from infuse.layers.linear import TransposedLinear
from infuse.layers.mixer import Mixer
from infuse.layers.mixture.experts import Experts
from infuse.layers.mixture.moe import MoE
from infuse.layers.mixture.named_experts import NamedExperts
from infuse.layers.replaced import ASK_BEFORE, KEEPS_LAYERS, Replaced
from infuse.plan.step import Step
from infuse.reading.inner_calls import in_rows, inner_calls
from infuse.reading.keywords import unread_by


def adopt(new: nn.Module, old: nn.Module) -> None:
    """Give `new` the attributes, hooks, requires_grad and, for a block and a Conv1D, the class of `old`.

    transformers records hidden states, attentions and router logits by the class of layers, attention modules and
    routers, so those of a block must be instances of the classes that they replace. Models also read attributes such as
    `attention_type` from their layers.
    """
    _take_over(new, old)
    require_grad(new, old)
    if isinstance(new, TransposedLinear):
        _mix_in(new, old)
    if isinstance(new, Block):
        _mix_in(new, old)
        _settle(new, old)
        for part, originals in _parts(new, old):
            for original in originals:
                _take_over(part, original)
            _mix_in(part, *originals)
            _settle(part, *originals)
        for name, mixer in new.shape.mixers.items():
            _lead_inwards(new, old, name, mixer.replaces)
        for mixture in (part for part in new.children() if isinstance(part, MoE)):
            original = old.get_submodule(next(iter(experts_in(old))).rpartition(".")[0])
            _settle(mixture, original)
            routers = [path.rpartition(".")[2] for path in new.shape.recorded.values()]
            mixture.routes_texts = bool(routers) and not in_rows(original, routers[0])
        _keep_settings(new, old)
    for experts, place in zip(_experts(new), experts_in(old), strict=False):  # DeepSpeed's own are not called by name
        original = old.get_submodule(place)
        experts.named = NamedExperts.of(original)
        _settle(experts, original)


def _parts(new: Block, old: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """The mixers and routers of a block, each with the modules of the layer that it replaces."""
    for part, paths in stands_for(new).items():
        yield new.get_submodule(part), [old.get_submodule(path) for path in paths]


def stands_for(new: nn.Module) -> dict[str, tuple[str, ...]]:
    """Path of each mixer and router of a block → the paths of those that it replaces; empty for other modules."""
    if not isinstance(new, Block):
        return {}
    replaced = {name: mixer.replaces for name, mixer in new.shape.mixers.items()}
    return replaced | {part: (path,) for part, path in new.shape.recorded.items()}


def remember(new: nn.Module, old: nn.Module, whole: str, fills: Iterable[Fill], *, is_layer: bool) -> None:
    """Let each part of `new`, which replaces `old` at `whole`, tell what became of the modules and tensors that the
    module in its place had.
    """
    sources = tuple(dict.fromkeys(source for fill in fills for source in fill.sources))
    kept_by, places = KEEPS_LAYERS if is_layer else ASK_BEFORE, stands_for(new)
    modules = dict(old.named_modules(remove_duplicate=False))
    for place, part in new.named_modules():
        names: dict[str, str] = {}
        for path in (place, *places.get(place, ())):
            if (stood := modules.get(path)) is not None:
                held = (*stood._modules, *stood._parameters, *stood._buffers)
                names |= {name: named(path, name) for name in held}
        if names and isinstance(part, Settled):
            part._replaced = Replaced(whole, type(old).__name__, names, sources, kept_by)


def _lead_inwards(new: Block, old: nn.Module, name: str, paths: tuple[str, ...]) -> None:
    """Let the part `name`, which is named as a module around the one that it replaces, answer for the inner one, too.

    Models read attributes there, such as `attention.self.image_patch_tokens`.
    """
    part = new.get_submodule(name)
    for outer, _, inner in (path.partition(".") for path in paths):
        if outer == name and inner and "." not in inner and inner not in part._modules:
            object.__setattr__(part, inner, part)  # not a child of its own
            object.__setattr__(new, name, shown_outside(part, name, inner, type(old.get_submodule(name))))


def as_part(new: nn.Module, old: nn.Module, step: Step) -> None:
    """`adopt`, for a linear, an embedding or experts."""
    adopt(new, old)


def as_block(new: nn.Module, old: nn.Module, step: Step) -> None:
    """`adopt`, and make the block take keywords that the layer never reads, and call its parts as the layer does."""
    assert isinstance(new, Block), new
    new.ignore(unread_by(old))
    new.call_parts(_calls(new, old, step.fills))
    adopt(new, old)


def _calls(new: Block, old: nn.Module, fills: Sequence[Fill]) -> dict[str, InnerCall | None]:
    """Find how the layer calls the modules that the block's parts stand for; None if that is unclear."""
    modules = dict(old.named_modules())
    places = {name: mixer.replaces[0] for name, mixer in new.shape.mixers.items() if mixer.replaces}
    places |= {name: name for name, _ in new.shape.held if name not in new.shape.mixers and name in modules}
    calls: dict[str, InnerCall | None] = dict.fromkeys(places)
    if new.shape.call.ends:  # the block calls parts for each text, the layer for all texts at once
        return calls
    over = {step.part: step.over for step in new.shape.program if step.over in new.shape.call.values}
    for name, call in inner_calls(old, places.values()).items():
        for part in (part for part, place in places.items() if place == name):
            outside = _made_outside(part, old, name, fills)
            factors = getattr(new.shape.mixers.get(part), "factors", None) is not None
            unfinished = bool(outside) or factors
            stops = hasattr(new.get_submodule(part), "mix_inside")
            if outside <= {"out"} and not (outside and factors) and (stops or not unfinished):
                calls[part] = replace(call, unfinished=unfinished, over=over.get(part, ""))
    return calls


def _made_outside(part: str, old: nn.Module, place: str, fills: Sequence[Fill]) -> set[str]:
    """The matrices and parameters of a part that the module at `place` does not hold, and of the block those that it
    holds beside them: where there are more than the last matrix, their results differ.
    """
    inside, own = f"{place}.", f"{part}."
    outside = set[str]()
    for fill in fills:
        is_own, targets = fill.target.startswith(own), fill.target.removeprefix(own).rpartition(".")[0]
        if is_own != all(source.startswith(inside) for source in fill.sources):
            outside.add(targets if is_own else fill.target)
    return outside


def as_module(new: nn.Module, old: nn.Module, step: Step) -> None:
    """`adopt`, for a whole module of diffusers, which looks up blocks by their class."""
    adopt(new, old)
    new.replaces = type(old)  # type: ignore[assignment]
    _keep_settings(new, old)


def nothing(new: nn.Module, old: nn.Module, step: Step) -> None:
    """Do nothing: the layer keeps its forward, and its new linears adopt the old ones when they are put in."""


def _experts(module: nn.Module) -> list[Experts]:
    return [part for part in module.modules() if isinstance(part, Experts)]


def _keep_settings(new: nn.Module, old: nn.Module) -> None:
    """Let the part of `new` at each path have the settings of the module of `old` that stood there."""
    originals = dict(old.named_modules(remove_duplicate=False))
    for path, part in new.named_modules():
        original = originals.get(path)
        if original is None or type(part) is type(original):
            continue
        for name, value in vars(original).items():
            is_free = name not in vars(part) and not hasattr(type(part), name)
            if name == "config" and isinstance(part, Mixer):  # which would compute by the function that it names
                name = OUTER_CONFIG
            if is_free and not name.endswith("_hooks") and _holds_no_module(value):
                object.__setattr__(part, name, value)
        if isinstance(part, Settled):
            _settle(part, original)


def _holds_no_module(value: Any) -> bool:
    """Whether a value, which may be a function or a list, keeps no tensor and no module of the original."""
    kept = [getattr(each, "__self__", each) for each in tree_leaves(value)]
    return not any(isinstance(each, (Tensor, nn.Module)) for each in kept)


def _settle(new: Any, *originals: nn.Module) -> None:
    """Copy the plain settings of the modules that `new` replaces, and make `new` refuse other values for them."""
    settled = set(new.settled)
    for name, value in (item for original in originals for item in vars(original).items()):
        if not _is_setting(name, value):
            continue
        if name not in vars(new):
            object.__setattr__(new, name, value)
        if not name.startswith("_") and name not in new.followed and vars(new)[name] == value:
            settled.add(name)
    object.__setattr__(new, "settled", frozenset(settled))


def _is_setting(name: str, value: Any) -> bool:
    return (isinstance(value, PLAIN) or name == "processor") and not _of_training(name)


def _of_training(name: str) -> bool:
    return name in ("training", "gradient_checkpointing") or "dropout" in name


def _take_over(new: nn.Module, old: nn.Module) -> None:
    for name, value in vars(old).items():
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            object.__setattr__(new, name, value)  # same dict, so that the user's handles can still remove their hooks
        elif name not in vars(new):  # includes attributes that hooks read, such as a steering vector
            object.__setattr__(new, name, value)


def require_grad(new: nn.Module, old: nn.Module) -> None:
    """Set requires_grad on new parameters if any old one had it, so that backward raises instead of stopping short."""
    handed_on = {id(parameter) for parameter in old.parameters()}
    required = any(parameter.requires_grad for parameter in old.parameters())
    for parameter in new.parameters():
        if id(parameter) not in handed_on and parameter.is_floating_point():
            parameter.requires_grad_(required)


def _mix_in(new: nn.Module, *old: nn.Module) -> None:
    ours: Any = type(new)
    theirs = tuple(map(type, old))
    named = {name for cls in theirs for kind in cls.__mro__ if kind is not nn.Module for name in vars(kind)}
    own = tuple(sorted(named & {*new._modules, *new._parameters, *new._buffers}))
    new.__class__ = mixed(ours, *theirs, own=own)


@cache
def mixed(ours: type, *theirs: type, own: tuple[str, ...] = ()) -> type:
    """Return a subclass of `ours`, named as the first of `theirs`, whose instances are also instances of `theirs`.

    `own`: names of modules and tensors of `ours`, for which `theirs` have attributes of the class, too.
    """
    attributes: dict[str, Any] = {name: _held(name) for name in own}
    attributes |= {"__module__": ours.__module__, "__reduce_ex__": _reduced, "_own_names": own}
    made = type(theirs[0].__name__, (ours, *theirs), attributes)
    made.forward = ours.forward  # type: ignore[attr-defined]  # undo wrappers that `theirs` adds to its subclasses
    return made


def _held(name: str) -> property:
    """The module or tensor that an instance holds as `name`."""
    return property(lambda self: nn.Module.__getattr__(self, name))


def _reduced(self: nn.Module, protocol: Any) -> tuple:
    """Pickle by the base classes, because the mixed class cannot be imported by name."""
    return partial(_empty, own=type(self)._own_names), type(self).__bases__, self.__getstate__()  # type: ignore[attr-defined]


def _empty(ours: Any, *theirs: Any, own: tuple[str, ...] = ()) -> Any:
    return object.__new__(mixed(ours, *theirs, own=own))
