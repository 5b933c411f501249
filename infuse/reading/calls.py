"""The calls that a model makes of its layers, recorded while its outline runs on meta: a prompt, a padded text on a
cache, one token.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers.cache_utils import Cache, DynamicCache

from infuse.ground.cache_names import FORMER, cache_argument
from infuse.ground.errors import in_brief
from infuse.ground.temporary_hooks import StopModel, watched
from infuse.inputs.model import model_inputs
from infuse.reading.results import RESULTS

CACHE = object()  # stands for the cache among the arguments of a call
BATCH, TOKENS, FIRST = 5, 13, 7  # sizes that are rarely those of anything else
_CPU = torch.device("cpu")
_EARLIER = 22  # before a step
_PROMPT, _PADDED, _STEP = "a prompt", "several tokens", "one token"
_TEXT, _STEPS = "a prompt of one text", "one token of several texts"
NOT_REACHED = "no run of the model on meta, on a cache if it takes one, reaches it"


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer. `arguments`: by name, tensors on meta. `past`: tokens on the cache before it, None without
    one. `sizes_vary`: batch and tokens are read as variables, so that a branch on them shows.
    """

    label: str
    hidden: Tensor
    arguments: Mapping[str, Any]
    past: int | None = None
    sizes_vary: bool = False

    def but(self, names: Collection[str], value: Any) -> LayerCall:
        """The call with `value` for these arguments."""
        return replace(self, arguments={**self.arguments, **dict.fromkeys(names, value)})

    def in_dtype(self, dtype: torch.dtype) -> LayerCall:
        """The call with hidden states in `dtype`, and all other tensors that had theirs."""
        wide = self.hidden.dtype

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.dtype == wide else value

        return replace(self, hidden=cast(self.hidden), arguments=tree_map(cast, dict(self.arguments)))

    @property
    def text(self) -> str:
        """The call in words: "a prompt, without a cache, without a mask"."""
        has_mask = any(isinstance(value, Tensor) for name, value in self.arguments.items() if "mask" in name)
        cache, mask = ("without" if self.past is None else "on"), ("with" if has_mask else "without")
        return f"{self.label}, {cache} a cache, {mask} a mask"


class Untouched:
    """Stands for an argument that a layer hands on at most: what looks at it raises."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return Untouched
        raise TypeError(f"an argument is looked at: {name}")


def _look(self: Untouched, *args: Any) -> Any:
    raise TypeError("an argument is looked at")


_LOOKS = "bool eq ne hash len iter getitem contains int float index add radd sub rsub mul rmul lt le gt ge"
for _name in _LOOKS.split():
    setattr(Untouched, f"__{_name}__", _look)
UNTOUCHED = Untouched()


def attention_function(config: Any) -> Any:
    """The name and the function of the attention that a config names."""
    name = getattr(config, "_attn_implementation", None)
    modelling = sys.modules.get("transformers.modeling_utils")
    return name, None if modelling is None else modelling.ALL_ATTENTION_FUNCTIONS.get(name)


@dataclass
class _Session:
    """A model's calls in order, of so many tokens each. The last one that reaches a layer is the one to read."""

    label: str
    tokens: tuple[int, ...]
    batch: int = BATCH
    padded: bool = False
    cached: bool = False
    sizes_vary: bool = False
    calls: dict[str, LayerCall] = field(default_factory=dict)
    ended: dict[str, LayerCall] = field(default_factory=dict)  # calls in runs that something raised in


def recorded_calls(
    model: nn.Module, layers: Mapping[str, nn.Module], dtype: torch.dtype
) -> tuple[dict[str, list[LayerCall]], str | None]:
    """Run the outline `model` and record the calls of its `layers`, by path, and what ended the last run early.

    Layers that a run on meta does not reach are left out. Those that it reaches without the cache that the model takes
    have no calls: what they append is not known.
    """
    takes_cache = reads_on_cache(model)
    text = (FIRST, TOKENS) if takes_cache else (TOKENS,)
    one = (_EARLIER, 1) if takes_cache else (1,)
    sessions = [
        _Session(_PADDED, text, padded=True, cached=takes_cache, sizes_vary=True),
        _Session(_PROMPT, (TOKENS,)),
        _Session(_STEP, one, batch=1, cached=takes_cache),
        _Session(_TEXT, (TOKENS,), batch=1, cached=takes_cache),
        _Session(_STEPS, one, cached=takes_cache),
    ]
    knows = (True,) if _has_known(model) else (False, True)
    ended = None
    for session in sessions:
        for attempt in product(dict.fromkeys((dtype, torch.bfloat16, torch.float32)), knows):
            if session.calls.keys() != layers.keys():
                ended = _run(model, layers, session, *attempt) or ended
    of_layer = {path: [_call_of(path, layers, session) for session in sessions] for path in layers}
    found = {path: [call for call in calls if call is not None] for path, calls in of_layer.items()}
    on_cache = {path: not takes_cache or any(call.past is not None for call in calls) for path, calls in found.items()}
    found = {path: _without_repetition(calls) if on_cache[path] else [] for path, calls in found.items() if calls}
    return found, ended


def _call_of(path: str, layers: Mapping[str, nn.Module], session: _Session) -> LayerCall | None:
    """The call of a layer in a session, and where that ended early the one of a layer of its class.

    What a layer cannot answer counts, too, for itself and for those behind it: its trace says why.
    """
    known = {**session.ended, **session.calls}
    if path in known or not session.ended:
        return known.get(path)
    alike = (call for other, call in known.items() if type(layers[other]) is type(layers[path]))
    return next(alike, None)


def reads_on_cache(model: nn.Module) -> bool:
    """Whether calls of a model's layers are recorded on a cache."""
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return cache_argument(type(model).forward) is not None and not is_encoder_decoder


def _has_known(model: nn.Module) -> bool:
    """Whether a model is given numbers that it branches on."""
    try:
        inputs = model_inputs(model, partial(_on_meta, torch.float32))
    except Exception:  # of a config without a number
        return False
    return not all(value.is_meta for value in inputs.values() if isinstance(value, Tensor))


def _on_meta(dtype: torch.dtype, kind: str, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=dtype if kind == "values" else torch.long, device="meta")


def _without_repetition(calls: list[LayerCall]) -> list[LayerCall]:
    """Drop calls of the same shapes, which a model makes whose inputs are of one size, such as pictures."""
    if not any(call.sizes_vary for call in calls):
        calls = [LayerCall(calls[0].label, calls[0].hidden, calls[0].arguments, calls[0].past, True), *calls[1:]]
    shapes: dict[tuple, LayerCall] = {}
    for call in calls:
        tensors = {name: value is None or value is CACHE for name, value in call.arguments.items()}
        shapes.setdefault((call.hidden.shape, call.past, *sorted(tensors.items())), call)
    return list(shapes.values())


def _run(
    model: nn.Module, layers: Mapping[str, nn.Module], session: _Session, dtype: torch.dtype, knows: bool
) -> str | None:
    """Run the calls of a session as far as they go, and record each layer's. Return what ended it early.

    `knows`: see `_Known`.
    """
    seen = 0
    try:
        cache = DynamicCache(config=getattr(model, "config", None)) if session.cached else None
        for tokens in session.tokens:
            past = seen if cache is not None else None
            calls, error = _one_run(model, layers, session, dtype, cache, tokens, seen, knows)
            made = {path: LayerCall(session.label, *call, past, session.sizes_vary) for path, call in calls.items()}
            if error is not None and cache is not None:  # the next call would lack what this one appends
                session.ended = made | session.ended
                return in_brief(error)
            seen += tokens
            if tokens == session.tokens[-1]:
                session.calls = made | session.calls
    except Exception as error:  # a config without a cache: the layers that it reached are read
        return in_brief(error)
    return None


def _one_run(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    session: _Session,
    dtype: torch.dtype,
    cache: Cache | None,
    tokens: int,
    seen: int,
    knows: bool,
) -> tuple[dict[str, tuple[Tensor, dict[str, Any]]], Exception | None]:
    """The calls of the layers that a run reaches, and what it ended with, such as code that needs values."""
    make = partial(_on_meta, dtype)
    inputs: dict[str, Any] = model_inputs(model, make, session.batch, tokens)
    if not session.padded and not _needs_mask(model):
        inputs.pop("attention_mask", None)
    elif "attention_mask" in inputs:
        inputs["attention_mask"] = make("mask", (session.batch, seen + tokens))
    if cache is not None:
        inputs |= {cache_argument(type(model).forward) or FORMER: cache, "use_cache": True}
    elif "use_cache" in inspect.signature(type(model).forward).parameters:
        inputs["use_cache"] = False
    calls: dict[str, tuple[Tensor, dict[str, Any]]] = {}
    remaining = set(layers)

    def enter(path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        if path not in calls and (named := _named(layers[path], args, kwargs)) is not None:
            calls[path] = named

    def leave(path: str, args: tuple, output: Any) -> None:
        remaining.discard(path)
        if not remaining:
            raise StopModel

    ended: Exception | None = None
    try:
        answers = (_Known if knows else _Answers)(not session.padded)
        with torch.no_grad(), warnings.catch_warnings(), watched(layers, enter, leave), answers:
            warnings.simplefilter("ignore")
            model(**inputs)
    except Exception as error:
        ended = error
    return tree_map(_to_meta, calls), ended


def _needs_mask(model: nn.Module) -> bool:
    mask = inspect.signature(type(model).forward).parameters.get("attention_mask")
    return mask is not None and mask.default is mask.empty


def _named(layer: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]] | None:
    """The hidden states of a call, and its other arguments by name; None if its first argument is no such tensor."""
    first, *names = [name for name in inspect.signature(type(layer).forward).parameters if name != "self"]
    arguments = {**dict(zip((first, *names), args, strict=False)), **kwargs}
    hidden = arguments.pop(first, None)
    if not isinstance(hidden, Tensor):
        return None
    named = {name: CACHE if isinstance(value, Cache) else value for name, value in arguments.items()}
    return hidden, named


class _Answers(TorchDispatchMode):
    """Answers questions about values, which tensors on meta do not have. `all_true`: what comparisons give."""

    def __init__(self, all_true: bool):
        super().__init__()
        self._all_true = all_true

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            if args[0].dtype == torch.bool:
                return self._all_true
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.long)
        return RESULTS.of(func, args, kwargs or {})


class _Known(_Answers):
    """Runs a model with integers and booleans that are real where they follow from its inputs' known numbers.

    What is made on meta in these types stays on the CPU; where it meets tensors on meta, its values are unknown.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            if func._schema.is_mutable and not all(tensor.is_meta for tensor in tensors):
                written = args[0] if args else None
                if isinstance(written, Tensor) and not written.is_meta:
                    raise NotImplementedError(f"{func} writes unknown values into known ones")
            if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
                args = (args[0], _places(args[1]), *args[2:])
            args, kwargs = tree_map(_to_meta, (args, kwargs))
        elif kwargs.get("device") == torch.device("meta"):
            made = func(*args, **kwargs)
            is_random = torch.Tag.nondeterministic_seeded in func.tags
            return made if made.is_floating_point() or is_random else func(*args, **{**kwargs, "device": _CPU})
        return super().__torch_dispatch__(func, types, args, kwargs)


def _places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices in which known booleans are replaced by the places of the true ones."""
    places: list[Tensor | None] = []
    for index in indices:
        is_known = index is not None and index.dtype == torch.bool and not index.is_meta
        places += index.nonzero().unbind(1) if is_known and index is not None else [index]
    return places


def _to_meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) and not value.is_meta else value
