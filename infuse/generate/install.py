"""Install on a model: `generate` with our cache, the cap on tokens, and moving inputs to the model's device.

transformers' own `generate` prepares, loops and returns; all of its modes run over our blocks. Everything here is an
attribute or a hook of the module itself, so it works however the module is called, and is copied with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin

from infuse.architectures.foreign.quantized_elsewhere import QUANTIZERS
from infuse.cache.kv_cache import OF_NOTHING, KVCache, counting_states, first_counts, tokens_in
from infuse.cache.recurrence_slot import StateSlot
from infuse.generate.continuous_batching import NAMES, install_continuous
from infuse.generate.direct import DirectSteps
from infuse.generate.loop import CACHE_NAME, UPDATE, decode, loops_are_own, rotates_by_length
from infuse.generate.pairs.cache import PREPARES, encoders_in, install_pair, is_pair
from infuse.generate.pairs.loop import decode_pair
from infuse.generate.pairs.steps import PairSteps
from infuse.generate.same_inputs import check_before_forward, check_before_generate
from infuse.generate.speculation import speculate
from infuse.graphs.capture import Backend
from infuse.graphs.forward import Forward, explained
from infuse.graphs.graphed_cache import GraphedCache
from infuse.graphs.pool import PREPARED_TOKENS, BucketPool
from infuse.graphs.rank_backend import RankBackend
from infuse.graphs.runner import WeightAddresses
from infuse.ground import interrupts
from infuse.ground.authors import LIBRARIES, LibraryCalls, is_librarys, users_hooks, with_wrapped
from infuse.ground.cache_names import cache_in
from infuse.ground.device import device_of
from infuse.ground.errors import ContextLimitError, OutOfMemory, UnsupportedCall
from infuse.ground.instance_method import REDUCE, InstanceMethod, rebind_in_copies, while_it_has
from infuse.ground.questions import attribute, parameters, returned
from infuse.inputs.component import is_component
from infuse.layers.attention.named_attention import names_ours
from infuse.layers.block import Block
from infuse.layers.calls.model_methods import answer_for_replaced
from infuse.layers.linear import has_global_hooks
from infuse.layers.mixer import Mixer
from infuse.layers.mixture.experts import Experts
from infuse.parallel.group import LOCAL, Group
from infuse.weights.by_name import find_by_name

_DEFAULT_NEW_TOKENS = 20  # transformers' default


# Arguments for which transformers' own loops run. Those that need the tokenizer are included, because transformers'
# `generate` drops it if a callable decodes.
_NOT_OURS = (
    "penalty_alpha", "dola_layers", "constraints", "force_words_ids", "prefill_chunk_size", "is_assistant", "use_mtp",
    "speculation_type", "assistant_ensemble_weight", "synced_gpus", "stop_strings", "token_healing",
    "output_attentions", "output_hidden_states",
)  # fmt: skip
_NOT_OURS_OF_PAIRS = tuple(name for name in _NOT_OURS if not name.startswith("output_"))
# Models of diffusers that round a time step given as a number down to an integer; the others keep fractions.
_WHOLE_STEPS = frozenset({"PriorTransformer", "UNet1DModel", "UNet2DModel"})
_FIRST_ARGUMENT = ("inputs",)  # of generate
_SPECULATE = ("prompt_lookup_num_tokens", "assistant_early_exit", "assistant_model")
_ASSISTANT, _LOOP = "assistant_model", "custom_generate"
_ASSISTANTS = (_ASSISTANT, "tokenizer", "assistant_tokenizer")
_STATEFUL = "_is_stateful"  # an attribute of models that transformers lets no candidates be verified for


# Layers of transformers' caches that hold keys and values, or nothing: these take another layer's.
_OF_KEYS_ALONE = ("DynamicLayer", "DynamicSlidingWindowLayer", OF_NOTHING)
# Packages whose modules a graph may replay. Not peft: its adapters are switched between calls, unseen by a replay.
_REPLAYED = LIBRARIES | QUANTIZERS.keys() | {"accelerate"}


@dataclass(frozen=True)
class Installed:
    """Settings that `install` stores on a module. `limit_tokens` caps prompt + answer; `min_new_tokens` must fit in."""

    limit_tokens: int | None
    min_new_tokens: int
    caches: bool
    buckets: BucketPool | None = None
    group: Group = LOCAL
    kv_cache: str | None = None  # format of our cache
    direct: DirectSteps | None = None
    are_replayed: LibraryCalls = field(default_factory=partial(LibraryCalls, _REPLAYED))


@dataclass(frozen=True)
class GraphUse:
    """Which calls `backend` captures: decode steps of `generate`, with caches kept up to `keep_bytes`, and the forward.

    `inside`: paths of modules whose forward is captured instead of the model's, such as a VAE's encoder and decoder.
    """

    backend: Backend
    steps: bool
    forward: bool
    keep_bytes: int = 1 << 30
    inside: tuple[str, ...] = ()


def routers_read_the_mask(module: nn.Module) -> bool:
    """Whether a mixture depends on the mask of tokens, which covers the whole room of a captured step's cache."""
    return any(isinstance(part, Block) and part.shape.reads_mask for part in module.modules())


def install(
    module: nn.Module,
    *,
    limit_tokens: int | None,
    min_new_tokens: int,
    caches: bool,
    graphs: GraphUse | None = None,
    group: Group = LOCAL,
    kv_cache: str | None = None,
) -> None:
    """Install generate, the cap, device moves, graphs and, for several ranks, the check of inputs.

    `caches`: the blocks support our cache; `kv_cache` is its format. Pass `graphs` only if the collectives of `group`
    can be captured. A previous installation on `module` is replaced; a cache format that its layers were not proven
    with has no effect.
    """
    before: Installed | None = vars(module).get("_infuse")
    caches = caches and _holds_all_states(module)
    if before is not None:
        uninstall(module)
        if before.caches and not caches:
            caches, kv_cache = True, kv_cache if kv_cache == before.kv_cache else None
    buckets = None
    if graphs is not None:
        backend = graphs.backend if group.size == 1 else RankBackend(graphs.backend, group)
        if graphs.steps and caches and not routers_read_the_mask(module):
            buckets = BucketPool(backend, graphs.keep_bytes, limit_tokens, WeightAddresses(module), group, kv_cache)
        for part in map(module.get_submodule, graphs.inside or ("", *encoders_in(module))):
            forward: Any = vars(part).get("forward")
            part.forward = Forward(part, forward, backend if graphs.forward else None)  # type: ignore[assignment]
            part._infuse = Installed(limit_tokens, min_new_tokens, caches, None, group)  # type: ignore[assignment]
    direct = _direct_steps(module) if caches and buckets is None and group.size == 1 else None
    installed = Installed(limit_tokens, min_new_tokens, caches, buckets, group, kv_cache, direct)
    module._infuse = installed  # type: ignore[assignment]
    # A generate that the user's class defines is kept, with its own arguments: there only the hooks enforce the cap.
    if getattr(type(module), "generate", None) is GenerationMixin.generate:
        module.generate = InstanceMethod(generate, module, "generate")  # type: ignore[assignment]
        if caches and attribute(module, _STATEFUL):
            setattr(module, _STATEFUL, False)
    elif is_pair(module) and (direct is not None or buckets is not None) and _passes_on(type(module)):
        module.generate = InstanceMethod(_generate_own, module, "generate")  # type: ignore[assignment]
    if caches:
        install_pair(module)
    install_continuous(module)
    rebind_in_copies(module)
    answer_for_replaced(module)
    find_by_name(module)
    if graphs is not None and graphs.forward and (place := _place_of_time_step(module)) is not None:
        module.register_forward_pre_hook(partial(_time_step_as_tensor, *place), with_kwargs=True)
    if device_of(module).type != "cpu":
        module.register_forward_pre_hook(_moved, with_kwargs=True)
    if limit_tokens is not None:
        module.register_forward_pre_hook(partial(_refuse_too_long, limit_tokens), with_kwargs=True)
    if group.size > 1:
        module.register_forward_pre_hook(partial(_begin_forward, group))
        module.register_forward_pre_hook(partial(check_before_forward, group), with_kwargs=True)
        module.register_forward_hook(partial(_end_forward, group), always_call=True)


@interrupts.held_back()
def uninstall(module: nn.Module) -> None:
    """Remove everything that `install` has installed. A method that someone has put around ours stays."""
    _drop_hooks(module)
    for name in ("_infuse", _STATEFUL):
        vars(module).pop(name, None)
    for name in ("generate", PREPARES, REDUCE, *NAMES):
        if type(vars(module).get(name)) is InstanceMethod:
            delattr(module, name)
    for part in module.modules():
        forward = vars(part).get("forward")
        if isinstance(forward, Forward):
            del part.forward
            vars(part).pop("_infuse", None)
            if forward.own is not None:
                part.forward = forward.own  # type: ignore[method-assign]


@while_it_has("_infuse", "generate")
def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call transformers' `generate` on this model, with our cache unless the caller chose one.

    Raise ContextLimitError before any kernel runs if prompt and answer do not fit `max_out_tokens`, and OutOfMemory if
    they do not fit the device's memory.
    """
    with self._infuse.group.call():
        return _generate(self, args, kwargs)


def _generate(self: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    args, kwargs = _moved(self, tuple(args), kwargs)
    names = _names_of_arguments(type(self).generate)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if (assistant := arguments.get(_ASSISTANT)) is not None:
        arguments[_ASSISTANT] = getattr(assistant, "module", assistant)  # unwrap an engine
        args, kwargs = _replaced(args, kwargs, names, _ASSISTANT, arguments[_ASSISTANT])
    installed: Installed = self._infuse
    if installed.group.size > 1:
        settings = (attribute(self, "generation_config"), installed.limit_tokens, installed.min_new_tokens)
        check_before_generate(installed.group, arguments, settings, installed.buckets)
        installed.group.share_random_state()
    if not names or len(args) > len(names):  # not recognizable as transformers' own generate
        return type(self).generate(self, *args, **kwargs)
    asked = _GenerateRequest(self, arguments)
    prompt, total = asked.prompt_tokens(), asked.total_tokens()
    if installed.limit_tokens is not None:
        needed = max(prompt + max(installed.min_new_tokens, 1), total)
        if needed > installed.limit_tokens:
            raise ContextLimitError(
                f"{prompt} tokens were given and {needed - prompt} more are asked for, but "
                f"max_out_tokens={installed.limit_tokens} caps both together; ask for fewer new tokens, or raise "
                "max_out_tokens (None lets the cache grow)"
            )
    graphed = None
    asked.refuse_candidates()
    _begin_anew(self, cache_in(arguments))
    if installed.caches and asked.takes_our_cache():
        prepared = min(total, prompt + PREPARED_TOKENS)
        if installed.buckets is not None and _can_replay(self, installed.are_replayed):
            graphed = GraphedCache(installed.buckets, asked.rows(), prepared)
        capacity, limit = installed.limit_tokens or prepared, installed.limit_tokens
        cache = KVCache(capacity, limit, installed.kv_cache) if graphed is None else graphed
        kwargs[CACHE_NAME] = cache
        if loop := asked.own_loop():
            streamer, assistants = arguments.get("streamer"), {name: arguments.get(name) for name in _ASSISTANTS}
            more: dict[str, Any] = {"assistants": assistants} if loop is speculate else {"direct": installed.direct}
            decoding = partial(loop, streamer=streamer, group=installed.group, **more)
            args, kwargs = _replaced(args, kwargs, names, _LOOP, decoding)
    elif loop := asked.loop_of_pair(installed):
        args, kwargs = _replaced(args, kwargs, names, _LOOP, loop)
    result = None
    try:
        with counting_states(cache_in({**arguments, **kwargs})):
            result = type(self).generate(self, *args, **kwargs)
        return result
    except torch.OutOfMemoryError as error:
        forward = vars(self).get("forward")
        clear = [part.clear for part in (installed.buckets, forward) if isinstance(part, (BucketPool, Forward))]
        graphed = None  # drop its bucket instead of returning it
        args = ()
        kwargs.clear()
        arguments.clear()
        raise explained(error, self, *clear) from (None if isinstance(error, OutOfMemory) else error)
    finally:
        if graphed is not None:
            graphed.end(keep=getattr(result, CACHE_NAME, None) is graphed)


def _passes_on(cls: type) -> bool:
    """Whether a library's class has a `generate` of its own that passes what it does not know to transformers'."""
    if not is_librarys(getattr(cls, "generate", None)):
        return False
    own = [kind for kind in cls.__mro__ if issubclass(kind, GenerationMixin) and kind is not GenerationMixin]
    methods = (value for kind in own for value in vars(kind).values())
    codes = [
        function.__code__ for value in methods for function in with_wrapped(value) if isinstance(function, FunctionType)
    ]
    passes = any("generate" in code.co_names and "__class__" in code.co_freevars for code in codes)
    return passes and not any("_sample" in code.co_names for code in codes)


def _direct_steps(module: nn.Module) -> DirectSteps:
    return (PairSteps if is_pair(module) else DirectSteps)(_is_ours)


@while_it_has("_infuse", "generate")
def _generate_own(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the `generate` that a library's class defines, which passes our loop to transformers' own."""
    names = [*inspect.signature(type(self).generate).parameters][1:]
    decoding = _GenerateRequest(self, {**dict(zip(names, args, strict=False)), **kwargs}).loop_of_pair(self._infuse)
    return type(self).generate(self, *args, **kwargs, **({_LOOP: decoding} if decoding else {}))


def _names_of_arguments(generate: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional arguments of transformers' `generate`, looking through generic wrappers.

    Empty if the class has another function, or if a wrapper takes certain arguments only.
    """
    functions = [function for function in with_wrapped(generate) if isinstance(function, FunctionType)]
    if not functions or not functions[0].__code__.co_flags & inspect.CO_VARKEYWORDS:
        return ()
    codes = [function.__code__ for function in functions if is_librarys(function)]
    signatures = (code.co_varnames[1 : code.co_argcount] for code in codes)
    wrapped = next((names for names in signatures if names[:1] == _FIRST_ARGUMENT), ())
    return wrapped or (_FIRST_ARGUMENT if generate is GenerationMixin.generate else ())


def _replaced(
    args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str], name: str, value: Any
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Replace the value of the argument `name` where it was passed, by position or by keyword."""
    place = names.index(name) if name in names[: len(args)] else None
    if place is None:
        return args, {**kwargs, name: value}
    return (*args[:place], value, *args[place + 1 :]), kwargs


def _drop_hooks(module: nn.Module) -> None:
    before = [id for id, hook in module._forward_pre_hooks.items() if _is_ours(hook)]
    after = [id for id, hook in module._forward_hooks.items() if _is_ours(hook)]
    for id in before:
        del module._forward_pre_hooks[id]
        module._forward_pre_hooks_with_kwargs.pop(id, None)
    for id in after:
        del module._forward_hooks[id]
        module._forward_hooks_always_called.pop(id, None)


def _can_replay(module: nn.Module, are_replayed: LibraryCalls) -> bool:
    """Whether decode steps may be replayed. Not under torch.compile, nor if hooks or a user's class need them run."""
    forward = vars(module).get("forward")
    compiled = hasattr(forward, "_torchdynamo_orig_callable")
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    others = [hook for hook in hooks if not _is_ours(hook)]  # which a replay would skip
    parts = list(module.modules())
    named = [part.named for part in parts if isinstance(part, Experts) and part.named is not None]
    ours_only = names_ours(module) and all(experts.is_ours for experts in named)
    if compiled or others or not ours_only or has_global_hooks() or users_hooks(parts[1:]):
        return False
    users_forward = forward.own if isinstance(forward, Forward) else None  # set on the instance before
    return (users_forward is None or is_librarys(users_forward, _REPLAYED)) and are_replayed(parts)


def _is_ours(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "func", hook) in _HOOKS


class _GenerateRequest:
    """Settings of one call of `generate`: from its arguments, else the passed generation config, else the model's."""

    def __init__(self, model: Any, kwargs: Mapping[str, Any]):
        self._model, self._kwargs = model, kwargs
        self._configs = (kwargs.get("generation_config"), attribute(model, "generation_config"))
        prompts = [kwargs.get(name) for name in ("inputs_embeds", "input_ids", "inputs")]
        self._prompt = next((value for value in prompts if isinstance(value, Tensor) and value.dim() >= 2), None)

    def value(self, name: str) -> Any:
        """Return the first value given for `name`; None if there is none."""
        values = (self._kwargs.get(name), *(attribute(config, name) for config in self._configs))
        return next((value for value in values if value is not None), None)

    def takes_our_cache(self) -> bool:
        """Whether the caller has not configured the cache, and the mode supports a passed one."""
        if cache_in(self._kwargs) is not None or is_pair(self._model):
            return False
        # Attentions have a column for each cached key, and transformers' own caches drop keys outside the window.
        if self._kwargs.get(_LOOP) is not None or self.value("output_attentions") or not _accepts_cache(self._model):
            return False
        if self.value("use_cache") is False or self.value("cache_implementation") is not None:
            return False
        if not _has_states(self._model):
            return True
        # transformers' own loops crop into the prompt, and states inside it are not kept.
        verifies = any(self.value(name) is not None for name in _SPECULATE)
        return not self.value("is_assistant") and (not verifies or self.own_loop() is not None)

    def own_loop(self) -> Callable[..., Any] | None:
        """Return our loop for this: greedy search or sampling, speculative or plain; None for transformers' loops."""
        single_beam = all(self.value(name) in (None, 1) for name in ("num_beams", "num_beam_groups"))
        if not single_beam or any(self.value(name) for name in _NOT_OURS) or not loops_are_own(self._model):
            return None
        # The processor of guidance_scale runs the model over a cache of its own, which rejected candidates would spoil.
        guided = self.value("guidance_scale") not in (None, 1)
        if not guided and any(self.value(name) is not None for name in _SPECULATE):
            # If rotations depend on the call's length, each step would need the same tokens as in transformers' loop.
            by_length = rotates_by_length(self._model, self.prompt_tokens(), self.total_tokens())
            embeds = self._kwargs.get("inputs_embeds") is not None
            return None if by_length or embeds or not loops_are_own(self._model, UPDATE) else speculate
        return None if self.value("return_dict_in_generate") else decode

    def loop_of_pair(self, installed: Installed) -> Callable[..., Any] | None:
        """Return our loop for a model with an encoder: for greedy search, sampling and beams."""
        direct, buckets = installed.direct, installed.buckets
        buckets = buckets if buckets is not None and _can_replay(self._model, installed.are_replayed) else None
        if not is_pair(self._model) or not (isinstance(direct, PairSteps) or buckets is not None):
            return None
        if not loops_are_own(self._model, "_beam_search"):
            return None
        if any(self.value(name) for name in (*_NOT_OURS_OF_PAIRS, *_SPECULATE)) or self._kwargs.get(_LOOP) is not None:
            return None
        streamer, beams = self._kwargs.get("streamer"), self.value("num_beams") or 1
        if (self.value("num_beam_groups") or 1) > 1 or (streamer is not None and beams > 1):
            return None  # transformers refuses them, and would not if it were given a loop
        return partial(decode_pair, streamer=streamer, group=installed.group, direct=direct, buckets=buckets)

    def refuse_candidates(self) -> None:
        """Raise UnsupportedCall for candidates that transformers' loops would refuse in the middle of an answer."""
        cache, assistant = cache_in(self._kwargs), self._kwargs.get(_ASSISTANT)
        verifies = any(self.value(name) is not None for name in _SPECULATE)
        if verifies and isinstance(cache, KVCache) and _has_states(self._model):
            raise UnsupportedCall(
                "past_key_values: this cache holds states, from which the candidates of prompt lookup or an assistant "
                "cannot be taken back; give the whole text without a cache, or ask for no candidates"
            )
        if assistant is not None and not hasattr(assistant, "_infuse") and not _counts_tokens(assistant):
            raise UnsupportedCall(
                f"assistant_model: {type(assistant).__name__} keeps nothing but states, whose tokens transformers does "
                "not count, so its candidates cannot be taken back; inject the assistant, too (infuse.init_inference)"
            )

    def rows(self) -> int:
        """Return the batch size: prompts times the larger of beams and returned sequences for each."""
        prompts = 1 if self._prompt is None else self._prompt.shape[0]
        return prompts * max(self.value("num_beams") or 1, self.value("num_return_sequences") or 1)

    def prompt_tokens(self) -> int:
        """Return the length of the prompt in tokens, including those in a passed cache, which only the mask counts."""
        mask = self._kwargs.get("attention_mask") if cache_in(self._kwargs) is not None else None
        seen = mask.shape[-1] if isinstance(mask, Tensor) else 0
        return max(1 if self._prompt is None else self._prompt.shape[1], seen)

    def total_tokens(self) -> int:
        """Return the largest length of prompt and answer together, as transformers computes it."""
        prompt, new, total = self.prompt_tokens(), self.value("max_new_tokens"), self.value("max_length")
        if new is None and total is not None:
            return total
        return prompt + (_DEFAULT_NEW_TOKENS if new is None else new)


def _has_states(model: Any) -> bool:
    return any(isinstance(part, Mixer) and part.shape.state_values for part in model.modules())


def _counts_tokens(model: Any) -> bool:
    """Whether the cache that transformers makes for a model knows how many tokens it has seen."""
    try:
        return tokens_in(DynamicCache(config=model.config.get_text_config(decoder=True))) is not None
    except Exception:  # of a config that transformers makes no cache for
        return True


def _begin_anew(model: Any, cache: Any) -> None:
    """Empty a cache of ours of which transformers' `generate` would run the whole text again.

    It counts no tokens in caches of nothing but states, and layers like Mamba's begin several tokens without a state.
    """
    slots = cache.slots if isinstance(cache, KVCache) else ()
    if slots and all(isinstance(slot, StateSlot) for slot in slots):
        mixers = (part for part in model.modules() if isinstance(part, Mixer))
        if not all(mixer.shape.continues for mixer in mixers):
            cache.reset()


def _holds_all_states(model: Any) -> bool:
    """Whether our cache can stand for the one that transformers' `generate` makes for the model.

    A layer of that cache that holds more than keys and values, such as the state of a convolution, must be a block's.
    """
    if not returned(model, "_supports_default_dynamic_cache"):
        return False
    try:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    except Exception:  # transformers' `generate` raises it, too, unless the caller gives a cache
        return False
    ours = {part._index for part in model.modules() if isinstance(part, Mixer)}
    kinds = enumerate(type(layer).__name__ for layer in cache.layers)
    return first_counts(cache) and all(kind in _OF_KEYS_ALONE or index in ours for index, kind in kinds)


def _accepts_cache(model: Any) -> bool:
    """Whether transformers lets `generate` pass the model a cache; it reads this from signatures."""
    names = parameters(model, "prepare_inputs_for_generation")
    if not names.isdisjoint({"kwargs", "model_kwargs"}):
        names |= parameters(model, "forward")
    return CACHE_NAME in names


def _refuse_too_long(limit_tokens: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: raise ContextLimitError beyond the cap, before any kernel runs."""
    inputs = kwargs.get("inputs_embeds")
    inputs = kwargs.get("input_ids", args[0] if args else None) if inputs is None else inputs
    # cu_seq_lens_q: requests of a continuous batch, which are checked when they are added.
    if not isinstance(inputs, Tensor) or inputs.dim() < 2 or kwargs.get("cu_seq_lens_q") is not None:
        return
    caches = [value for value in (*args, *kwargs.values()) if hasattr(value, "get_seq_length")]
    cached_tokens = max([0, *(tokens_in(cache) or 0 for cache in caches)])
    if isinstance(cached_tokens, Tensor):  # in a capture: its bucket is no larger than the cap
        return
    if cached_tokens + inputs.shape[1] > limit_tokens:
        raise ContextLimitError(
            f"{cached_tokens} tokens are in the cache and {inputs.shape[1]} more were given, "
            f"but max_out_tokens={limit_tokens} caps them"
        )


def _moved(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook: move tensors to the model's device."""
    device = device_of(module)

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) and value.device != device else value

    return tuple(moved(arg) for arg in args), {name: moved(value) for name, value in kwargs.items()}


def _begin_forward(group: Group, module: nn.Module, args: tuple) -> None:
    """Forward pre-hook: wait for other threads' calls."""
    group.begin_forward()


def _end_forward(group: Group, module: nn.Module, args: tuple, result: Any) -> None:
    """Forward hook: let other threads call."""
    group.end_forward()


def _place_of_time_step(module: nn.Module) -> tuple[int, str] | None:
    """Return the position and name of a diffusers model's time step, which may be a number; None without one."""
    names = list(inspect.signature(type(module).forward).parameters)[1:] if is_component(module) else []
    return next(((names.index(name), name) for name in ("timestep", "timesteps") if name in names), None)


def _time_step_as_tensor(
    position: int, name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook: convert a numeric time step to a tensor, as the model itself does inside its graph.

    One graph then serves all time steps, and capturing it copies nothing from the host.
    """
    time_step = args[position] if position < len(args) else kwargs.get(name)
    if isinstance(time_step, bool) or not isinstance(time_step, (int, float)):
        return args, kwargs
    whole = isinstance(time_step, int) or type(module).__name__ in _WHOLE_STEPS
    device = device_of(module)
    tensor = torch.tensor([time_step], dtype=torch.int64 if whole else torch.float64, device=device)
    if position < len(args):
        return (*args[:position], tensor, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: tensor}


_HOOKS = (_moved, _refuse_too_long, check_before_forward, _begin_forward, _end_forward, _time_step_as_tensor)
