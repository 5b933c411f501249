"""State dict of a replaced module in the names, shapes and packing of the original.

Hooks on the new module convert its tensors: `source_tensors` when saving, `filled` when loading. `state_dict`,
`save_pretrained` and `load_state_dict` of any enclosing model therefore work unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.foreign.adapters import is_adapter
from infuse.architectures.packing import Fill
from infuse.architectures.part import named
from infuse.ground.errors import WAY_BACK, UnsupportedCall
from infuse.weights.fill import ORDER, filled, quantized, shared_values, source_tensors, source_view
from infuse.weights.lazy import InMemory, LazyTensor, Lookup, OnDevice, place_of
from infuse.weights.names import placed
from infuse.weights.skeleton import Skeleton, Tensors
from infuse.weights.way_back import WayBack
from infuse.weights.written_back import Link, is_same_memory, ordinary

Put = Callable[[MutableMapping[Any, Any], Any, Any], None]
_ANEW = "Load the model again, and let the other library change it before init_inference"
_KEY = "infuse"  # our key among a module's hooks; torch's own keys are integers


@dataclass(frozen=True)
class _Held:
    """The values of a source in the target of `fill`, of which it is the `number`th source."""

    fill: Fill
    number: int
    target: Tensor


@dataclass
class Original:
    """The replaced module at `path`: `shapes` of its tensors by its own names, and the fills made from them.

    `stored`: the names of each target in our module's own state dict; a quantized weight has several, codes first.
    `buffers`: which of these tensors are no parameters.
    `dequantized` is set while quantized weights may be saved in `dtype`. It maps the address of their codes to the
    dequantized tensors, so that tied weights stay tied. `way_back`: how the module is put back.
    """

    path: str
    fills: tuple[Fill, ...]
    stored: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    bodies: Mapping[str, str]
    buffers: frozenset[str] = frozenset()
    dequantized: WeakValueDictionary[int, Tensor] | None = None
    way_back: WayBack | None = None
    _given: WeakValueDictionary[str, Tensor] = field(default_factory=WeakValueDictionary, init=False, compare=False)
    _links: WeakValueDictionary[str, Link] = field(default_factory=WeakValueDictionary, init=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_given", "_links")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _given=WeakValueDictionary(), _links=WeakValueDictionary())

    def save(self, module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        """State-dict hook: replace our tensors in `state` with the original's."""
        if torch.is_inference_mode_enabled():  # its tensors would have no version, by which writes are seen
            with torch.inference_mode(False), torch.no_grad():
                return self.save(module, state, prefix, metadata)
        self._refuse_parts("A state dict")
        if any(self.stored[fill.target][0] not in self.shapes or fill.transposed for fill in self.fills):
            _refuse_accelerate()
        held: dict[str, list[_Held]] = {}
        gone: set[str] = set()
        for fill in self.fills:
            target = self._target(fill, module, state, prefix)
            if target is None:
                gone.update(fill.sources)
                continue
            for number, name in enumerate(fill.sources):
                held.setdefault(name, []).append(_Held(fill, number, target))
        there = [name for name in self.shapes if name in held and name not in gone]
        state.update({prefix + name: self._source(name, held[name]) for name in there})

    def _source(self, name: str, held: list[_Held]) -> Tensor:
        """Return the tensor `name` of the original, of which each of `held` has values: a view if that is possible."""
        first = held[0]
        try:
            view = source_view(first.fill, first.number, first.target, self.shapes)
        except NotImplementedError as error:
            raise UnsupportedCall(
                f"{named(self.path, first.fill.target)} is a {type(first.target).__name__} by now, of which a state "
                f"dict cannot have {name}. {_ANEW}"
            ) from error
        formats = [each.fill.format for each in held if each.fill.format is not None]
        if view is not None and len(held) == 1 and not formats:
            return self.on_its_own(name, view)
        link = self._links.get(name)
        if link is not None and link.is_of([each.target for each in held]):
            link.read()
            return link.tensor()
        values = first.target.new_empty(self.shapes[name]) if view is None else self.on_its_own(name, view)
        pairs: list[tuple[Tensor, Tensor]] = []
        for each in reversed(held):  # a view of the first has its values
            for ours, layers in shared_values(each.fill, each.number, values, each.target, self.shapes):
                if view is None:
                    ours.copy_(layers)
                pairs.append((ours.data, layers.detach()))
        if values.is_meta or type(first.target) not in (Tensor, nn.Parameter):
            return values
        if formats:
            return Link(values, refused=_refused(named(self.path, name), formats[0]), keeps=view).tensor()
        self._links[name] = link = Link(values, pairs, [each.target for each in held])
        return link.tensor()

    def values(self, module: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
        """Today's values of these tensors of the original. Quantized ones are dequantized to float32."""
        state = {name: tensor.detach() for name, tensor in placed(module).items()}
        fills = tuple(fill for fill in self.fills if not set(fill.sources).isdisjoint(names))
        wanted = replace(self, fills=fills, dtype=torch.float32, dequantized=WeakValueDictionary())
        wanted.save(module, state, "", None)
        return {name: ordinary(state[name]) for name in names}

    def tensor(self, module: nn.Module, name: str) -> Tensor | None:
        """Return the tensor `name` of the original, a parameter if it was one; None if it is not there as a whole."""
        held: list[_Held] = []
        for fill in (fill for fill in self.fills if name in fill.sources):
            place, leaf = place_of(module, fill.target)
            target = place._parameters.get(leaf, place._buffers.get(leaf))
            if target is None or fill.format is not None or fill.cut is not None:
                return None
            numbers = [number for number, source in enumerate(fill.sources) if source == name]
            held += [_Held(fill, number, target.detach()) for number in numbers]
        if not held:
            return None
        made = self._source(name, held)
        return made if name in self.buffers else nn.Parameter(made, target.requires_grad)

    def on_its_own(self, name: str, tensor: Tensor) -> Tensor:
        """Give a piece of a merged matrix a storage of its own over the same memory.

        Libraries take tensors of one storage for one tensor: accelerate and safetensors' `save_model` drop all but one.
        A module that is held in several places gives the same storage in each.
        """
        if tensor.requires_grad or tensor.is_meta or type(tensor) is not Tensor:
            return tensor
        given = self._given.get(name)
        if given is not None and is_same_memory(given, tensor):
            return given.detach()
        self._given[name] = own = _with_own_storage(tensor)
        return own

    def _target(self, fill: Fill, module: nn.Module, state: dict[str, Tensor], prefix: str) -> Tensor | None:
        """Pop the target of `fill` from `state`; None if another module has replaced the one that held it."""
        names = self.stored[fill.target]
        if prefix + names[0] not in state:
            self._refuse_exchanged(fill, module)
            return None
        target, *_ = [state.pop(prefix + name, None) for name in names]
        if fill.format is None:
            return target
        if self.dequantized is None:
            raise UnsupportedCall(
                f"{self.path or 'the model'}: the weights are quantized ({fill.format}), so a state dict cannot have "
                f"them as {', '.join(fill.sources)}. Either save our shards, which keep them quantized: init_inference"
                "(..., save_mp_checkpoint_path=FOLDER) or `infuse shard`. Or save them dequantized, with the rounding "
                f"that they have: `with infuse.dequantized(model): model.save_pretrained(FOLDER)`. {WAY_BACK}"
            )
        place, _ = place_of(module, fill.target)
        address = next(place.buffers(recurse=False)).data_ptr()
        value = self.dequantized.get(address)
        if value is None:
            value = self.dequantized[address] = place.dequantized(self.dtype)
        return value

    def _refuse_exchanged(self, fill: Fill, module: nn.Module) -> None:
        """Raise UnsupportedCall if a part was exchanged that the original does not have, such as a merged matrix.

        Adapters may be around it: PEFT looks for the names that it gave.
        """
        part, path = module, ""
        for name in fill.target.rpartition(".")[0].split("."):
            child, path = part._modules.get(name), named(path, name)
            if child is not None and type(child).__module__.partition(".")[0] == "infuse":
                part = child
                continue
            is_originals = any(source.startswith(f"{path}.") for source in fill.sources)
            if child is None or is_adapter(child) or is_originals:
                return
            raise UnsupportedCall(
                f"{named(self.path, path)} has been exchanged for a {type(child).__name__} since init_inference, so a "
                f"state dict cannot have {', '.join(fill.sources)}. {_ANEW}"
            )

    @torch.no_grad()
    def load(
        self, module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """Load hook: replace the original's tensors in `state` with ours, and requantize quantized weights in place."""
        self._refuse_parts("load_state_dict")
        tensors = {name: state.pop(prefix + name) for name in self.shapes if prefix + name in state}
        self._rename_ours(module, state, prefix)
        for name, wanted in self.shapes.items():
            if name in tensors and tuple(tensors[name].shape) != wanted:
                shapes = f"the given shape is {tuple(tensors.pop(name).shape)}, the model's is {wanted}"
                errors.append(f"size mismatch for {prefix}{name}: {shapes}.")
            elif name not in tensors and not self._is_given_as_ours(name, state, prefix):
                missing.append(prefix + name)
        for fill in self.fills:
            if any(name in tensors for name in fill.sources):
                self._fill(fill, module, state, prefix, tensors)
            else:
                self._keep(fill, module, state, prefix)

    def _fill(
        self, fill: Fill, module: nn.Module, state: dict[str, Tensor], prefix: str, tensors: Mapping[str, Tensor]
    ) -> None:
        """Put the target of `fill` into `state`; sources missing from `tensors` keep the module's current values."""
        place, leaf = place_of(module, fill.target)
        if any(name not in tensors for name in fill.sources):
            plain = fill.format is None
            target = place._parameters[leaf] if plain else place.dequantized(self.dtype)
            tensors = {**source_tensors(fill, target, self.shapes), **tensors}
        if fill.format is None:
            state[prefix + fill.target] = filled(fill, _in_memory(tensors, None), None)
            return
        before = dict(place._buffers)
        quantize = ops.quantize.body(self.bodies.get("quantize", ops.REFERENCE))
        device = next(buffer.device for buffer in place.buffers(recurse=False))
        order = place._buffers.get(ORDER)
        place.hold(quantized(fill, _in_memory(tensors, device), quantize, place.part_rows, order=order))
        for name, old in before.items():  # reuse the memory: tied embeddings and CUDA graphs refer to it
            new = place._buffers[name]
            if old is not None and new is not None and old.shape == new.shape:
                place._buffers[name] = old.copy_(new)
        self._keep(fill, module, state, prefix)

    def _keep(self, fill: Fill, module: nn.Module, state: dict[str, Tensor], prefix: str) -> None:
        """Put the module's current target of `fill` into `state` unless it is already present."""
        for name in self.stored[fill.target]:
            place, leaf = place_of(module, name)
            tensor = place._parameters.get(leaf, place._buffers.get(leaf))
            if tensor is not None:
                state.setdefault(prefix + name, tensor.detach())

    def _rename_ours(self, module: nn.Module, state: dict[str, Tensor], prefix: str) -> None:
        """Rename our tensors in `state`, which torch.distributed names as `module.named_children` names their parts."""
        places = {id(part): place for place, part in module._modules.items()}
        shown = {places[id(part)]: path for path, part in module.named_children() if path != places[id(part)]}
        for name in (name for names in self.stored.values() for name in names):
            place, _, rest = name.partition(".")
            if place in shown and (key := f"{prefix}{shown[place]}.{rest}") in state:
                state[prefix + name] = state.pop(key)

    def _is_given_as_ours(self, name: str, state: Mapping[str, Tensor], prefix: str) -> bool:
        """True if `state` has, under our own name, the target made from `name`."""
        fill = next(fill for fill in self.fills if name in fill.sources)
        return prefix + self.stored[fill.target][0] in state

    def _refuse_parts(self, what: str) -> None:
        if any(fill.cut is not None for fill in self.fills):
            raise UnsupportedCall(
                f"{what} needs whole tensors, and this rank holds a part of {self.path or 'the model'}. Save with "
                "init_inference(..., save_mp_checkpoint_path=FOLDER) or `infuse shard`; as many ranks "
                "load it with checkpoint=FOLDER"
            )


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory whose storage covers it alone; writes still count in the whole's version."""
    whole, begin = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
    if whole.nbytes() == tensor.nbytes or not tensor.is_contiguous():
        return tensor
    own = whole[begin : begin + tensor.nbytes]
    if tensor.is_inference():
        return tensor.new_empty(0).set_(own, 0, tensor.shape, tensor.stride())
    piece = tensor[:]
    with torch.autograd._unsafe_preserve_version_counter(piece):  # nothing is written
        return piece.set_(own, 0, tensor.shape, tensor.stride())


def _refused(name: str, format: str) -> str:
    return (
        f"{name} is quantized ({format}), and nothing reads what is written to its dequantized values; "
        "model.load_state_dict({name: values}, strict=False) quantizes new values; .clone() is a tensor of your own"
    )


def _stored(fill: Fill, module: nn.Module) -> tuple[str, ...]:
    if fill.format is None:
        return (fill.target,)
    place, _ = place_of(module, fill.target)
    return tuple(named(fill.target.rpartition(".")[0], leaf) for leaf in place._buffers)


def _refuse_accelerate() -> None:
    """Raise UnsupportedCall if accelerate is the caller and goes on to set tensors of modules by these names.

    It would not find our merged weights there, after it has dropped or overwritten others.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "load_checkpoint_in_model":
            if frame.f_locals.get("device_map") is None:
                return  # it loads a whole state dict
            raise UnsupportedCall(
                "accelerate cannot place a checkpoint by a device map in a model whose layers were replaced: their "
                "weights are merged. Leave device_map out, or call model.load_state_dict, or "
                f"init_inference(..., checkpoint=FOLDER). {WAY_BACK}"
            )
        if frame.f_code.co_name == "check_device_map" and len({*frame.f_locals["device_map"].values()}) == 1:
            return  # it reads the names, and moves the whole model next
        if frame.f_globals.get("__name__") == "accelerate.big_modeling":
            raise UnsupportedCall(
                "accelerate cannot offload a model whose layers were replaced: their weights are merged. Keep the "
                "model in memory, with smaller weights (quant=...) or over several ranks, or offload the original: "
                f"{WAY_BACK}"
            )
        frame = frame.f_back


def _in_memory(tensors: Mapping[str, Tensor], device: torch.device | None) -> Lookup:
    """Look up tensors of a state dict, moved to `device` if it is given."""

    def lookup(name: str) -> LazyTensor:
        tensor = InMemory(tensors[name].detach())
        return tensor if device is None else OnDevice(tensor, device)

    return lookup


def keep_names(
    new: nn.Module,
    old: nn.Module,
    path: str,
    fills: Iterable[Fill],
    *,
    dtype: torch.dtype,
    bodies: Mapping[str, str],
    put: Put,
    before: Tensors | None = None,
) -> None:
    """Make `new`, which replaces `old` at `path` and was filled by `fills`, save and load state dicts in `old`'s form.

    Each hook is set by `put(mapping, key, value)`, so that the caller can undo it. `before`: the tensors of the model,
    for the way back.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in placed(old).items()}
    saved = tuple(fill for fill in fills if all(name in shapes for name in fill.sources))
    sources = {name for fill in saved for name in fill.sources}
    stored = {fill.target: _stored(fill, new) for fill in saved}
    shapes = {name: shape for name, shape in shapes.items() if name in sources}
    buffers = frozenset(name for name, _ in old.named_buffers(remove_duplicate=False))
    original = Original(path, saved, stored, shapes, dtype, bodies, buffers)
    if before is not None:
        original.way_back = WayBack(Skeleton(old, before, shapes))
        original.way_back.share_memory(original, new)
    handle = new.register_load_state_dict_pre_hook(original.load)
    put(new._load_state_dict_pre_hooks, _KEY, new._load_state_dict_pre_hooks.pop(handle.id))
    put(new._state_dict_hooks, _KEY, original.save)
    # Ours runs first: the user's hooks expect the original's names.
    new._state_dict_hooks.move_to_end(_KEY, last=False)  # type: ignore[attr-defined]


def original_of(module: nn.Module) -> Original | None:
    """Return what was replaced by `module`; None if it was not put in by us."""
    hook: Any = module._state_dict_hooks.get(_KEY)  # type: ignore[call-overload]
    return None if hook is None else hook.__self__


def originals_in(model: nn.Module) -> Iterator[tuple[nn.Module, Original]]:
    """The modules of `model` that replaced others, each with what it replaced."""
    for module in model.modules():
        if (original := original_of(module)) is not None:
            yield module, original


def forget_names(module: nn.Module) -> None:
    """Take our hooks out of the dicts of hooks, which `module` shares with what it replaced."""
    module._state_dict_hooks.pop(_KEY, None)  # type: ignore[call-overload]
    module._load_state_dict_pre_hooks.pop(_KEY, None)  # type: ignore[call-overload]


@contextmanager
def dequantized(model: nn.Module) -> Iterator[None]:
    """Inside the `with`, `model.state_dict()`, `save_pretrained()` etc. dequantize the weights to the plan's dtype.

    The values keep the rounding of the format. The whole state dict is in memory at once.
    """
    originals = [original for _, original in originals_in(model)]
    made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
    try:
        for original in originals:
            original.dequantized = made
        yield
    finally:
        for original in originals:
            original.dequantized = None
