"""Sessions: several consecutive calls of a model, as users make them; the calls of its layers become cases."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from infuse.architectures.families.encoder_decoder import STATES_MASK
from infuse.cache.encoded_slot import StatesCache
from infuse.cache.kv_cache import KVCache, first_counts, tokens_in
from infuse.ground.cache_names import CACHE_NAMES, FORMER, cache_argument
from infuse.inputs.model import TOKENS, RandomTensors, first_tokens, like, model_inputs, most_tokens, reads_images

PADDING = 3
LATER = (1, 2)  # new tokens of the calls after the first: a decode step, then several tokens at once
FIRST_TEXT = 3  # of two texts in a row, the first has a third of the tokens
ENCODED = 7  # states of an encoder
WINDOW = 5  # a sliding window shorter than TOKENS
_LONGEST = 256  # tokens of a text longer than windows; longer attention is slow and rounds more


@dataclass(frozen=True)
class Session:
    """Consecutive calls of the model; `tokens` are the new tokens of each call, `batch` the number of rows.

    The model runs on a cache from `make_cache`. New modules also run on caches from `also`, if the same arguments
    mean the same there. `texts`: each row holds two texts, separated by a 4-d mask. `paged`: they are packed as in
    continuous batching, with the cache that it passes to the attention function. `window`: length of sliding windows.
    `states`: arguments that receive encoder states, and their widths, 0 for the model's. `frames`: a third of the
    frames is padding, the last of one row and the first of another. An `optional` session that the model refuses yields
    no case.
    """

    label: str
    tokens: tuple[int, ...]
    batch: int
    make_cache: Callable[[], Cache] | None = None
    also: tuple[Callable[[], Cache], ...] = ()
    padded: bool = False
    texts: bool = False
    paged: bool = False
    window: int | None = None
    states: tuple[tuple[str, int], ...] = ()
    frames: bool = False
    optional: bool = True


MANY, FEW = 3, 2  # batch sizes: MANY exceeds 28 rows, to use kernels for many rows; FEW, with padding, does not


def plain_sessions(config: Any) -> list[Session]:
    """One call without a cache, and one with padding."""
    first = first_tokens(config)
    return [
        Session("alone", (first,), MANY, optional=False),
        Session("padded", (first,), FEW, padded=True, optional=False),
    ]


def block_sessions(
    model: nn.Module,
    decodes: bool,
    kv_cache: str | None = None,
    states: tuple[tuple[str, int], ...] = (),
    *,
    recurs: bool = False,
    convolves: bool = False,
    pairs: bool = False,
) -> list[Session]:
    """Return the sessions to prove a block on; those with a cache only if it `decodes`.

    `kv_cache`: format of our cache to prove it on as well. `states`: as in Session. `recurs`: a
    block has a recurrent state, which originals do not keep in our cache. `convolves`: the blocks read the frames
    around each. `pairs`: states have a cache of their own.
    """
    config: Any = getattr(model, "config", None)
    sessions = [replace(session, states=states) for session in _block_sessions(model, decodes, kv_cache)]
    sessions = [_over_states(session, config) if pairs else session for session in sessions]
    if convolves:
        sessions.append(Session("padded frames", (first_tokens(getattr(model, "config", None)),), FEW, frames=True))
    theirs = partial(DynamicCache, config=getattr(model, "config", None))
    recurs = recurs or not _fits_ours(theirs)
    for i, session in enumerate(sessions):
        if recurs and session.make_cache is our_cache:
            sessions[i] = replace(session, make_cache=theirs, also=(our_cache, *session.also))
    return sessions


def _over_states(session: Session, config: Any) -> Session:
    """The session of a model that is given an encoder's states, whose keys a second cache keeps."""
    if not session.states or session.make_cache is None:
        return session
    caches = (partial(_beside_states, make_cache, config) for make_cache in (session.make_cache, *session.also))
    make_cache, *also = caches
    return replace(session, make_cache=make_cache, also=tuple(also))


def of_tokens(make_cache: Any) -> Any:
    """The function that makes the cache of tokens, where `make_cache` makes it with one of states."""
    is_pair = isinstance(make_cache, partial) and make_cache.func is _beside_states
    return make_cache.args[0] if is_pair else make_cache


def _beside_states(make_cache: Callable[[], Cache], config: Any) -> Cache:
    cache = make_cache()
    if isinstance(cache, KVCache):
        return EncoderDecoderCache(cache, StatesCache(cache.format))
    static = isinstance(cache, StaticCache)
    return EncoderDecoderCache(cache, StaticCache(config=config, max_cache_len=ENCODED) if static else DynamicCache())


def _block_sessions(model: nn.Module, decodes: bool, kv_cache: str | None) -> list[Session]:
    config: Any = getattr(model, "config", None)
    first, most = first_tokens(config), most_tokens(config)
    texts = Session("two texts in a row", (min(first, 4),), FEW, texts=True)
    if not decodes:
        return [*plain_sessions(config)] + [texts] * (not reads_images(model))
    later = tuple(count for i, count in enumerate(LATER) if first + sum(LATER[: i + 1]) <= most)
    tokens = (first, *later)
    static = partial(StaticCache, config=config, max_cache_len=TOKENS)
    coded = (our_int8_cache,) if kv_cache else ()
    sessions = [
        Session("alone", tokens, MANY, partial(DynamicCache, config=config), (our_cache, *coded), optional=False),
        Session("padded", tokens, FEW, our_cache, coded, padded=True, optional=False),
        Session("a static cache", (WINDOW, *later), FEW, static, padded=True),
        texts,
        replace(texts, label="a continuous batch", batch=1, paged=True),
    ]
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and window > WINDOW:  # a shorter one is already full in the sessions above
        short = copy.copy(config)
        short.sliding_window = WINDOW
        full = Session("a full window", tokens, MANY, partial(DynamicCache, config=short), window=WINDOW)
        sessions += [full, replace(full, batch=FEW, make_cache=our_cache, padded=True)]
    return sessions


def model_sessions(model: nn.Module) -> list[Session]:
    """Return the sessions to prove layers without a spec on, with a transformers cache if the model takes one."""
    alone, padded = plain_sessions(getattr(model, "config", None))
    make_cache = _cache_maker(model)
    later = (1,) if make_cache else ()
    return [replace(alone, tokens=(*alone.tokens, *later), batch=FEW, make_cache=make_cache), padded]


def hook_sessions(model: nn.Module) -> list[Session]:
    """Return the sessions to prove another attention function on."""
    config: Any = getattr(model, "config", None)
    sessions = plain_sessions(config)
    if reads_images(model):
        return sessions
    longest = min(max([0, *_budgets(config)]) + PADDING, most_tokens(config), _LONGEST)
    if longest > TOKENS:
        sessions.append(Session("longer than its windows", (longest,), FEW, padded=True))
    names = inspect.signature(type(model).forward).parameters
    if not names.keys().isdisjoint(CACHE_NAMES) and not getattr(config, "is_encoder_decoder", False):
        static = partial(StaticCache, config=config, max_cache_len=TOKENS + sum(LATER))
        sessions.append(Session("a static cache", (first_tokens(config), *LATER), FEW, static, padded=True))
    return sessions


def _budgets(config: Any) -> Iterator[int]:
    """Yield a config's window, chunk and budget lengths, beyond which the model attends to fewer tokens."""
    for name, value in vars(config).items():
        if type(value) is int and any(word in name for word in ("window", "chunk", "topk", "block_size")):
            yield value


def our_cache() -> Cache:
    return KVCache(limit_tokens=TOKENS + sum(LATER))


def our_int8_cache() -> Cache:
    return KVCache(limit_tokens=TOKENS + sum(LATER), format="int8")


def _cache_maker(model: nn.Module) -> Callable[[], Cache] | None:
    """Return a function that makes a transformers cache for the model's forward; None if it takes no cache."""
    config: Any = getattr(model, "config", None)
    if cache_argument(type(model).forward) is None or not getattr(config, "use_cache", False):
        return None
    if getattr(config, "is_encoder_decoder", False):
        return lambda: EncoderDecoderCache(DynamicCache(), DynamicCache())
    return lambda: DynamicCache(config=config)


@contextmanager
def short_window(model: Any, window: int | None) -> Iterator[None]:
    """Context in which the model masks with a sliding window of `window` tokens; None changes nothing."""
    if window is None:
        yield
        return
    kept = model.config.sliding_window
    try:
        model.config.sliding_window = window
        yield
    finally:
        model.config.sliding_window = kept


def session_inputs(
    model: nn.Module, cache: Cache | None, session: Session
) -> Iterator[tuple[dict[str, Any], Tensor | None]]:
    """Yield for each call the arguments of the model's forward and the mask [B, T] of real positions (None: all)."""
    make, sample = RandomTensors(model), like(model)
    mask = torch.ones(session.batch, session.tokens[0], dtype=torch.long)
    if session.padded and cache is not None:
        mask[0, :PADDING] = 0  # left padding, as in generation
    elif session.padded:
        mask[0, -PADDING:] = 0
    more: dict[str, Any] = {"use_cache": False} if session.texts else {}
    if session.paged:
        more |= _packed(session.tokens[0], sample.device)
    if cache is not None:
        more = {cache_argument(type(model).forward) or FORMER: cache, "use_cache": True}
    own = getattr(getattr(model, "config", None), "hidden_size", 1)
    more |= {name: make("values", (session.batch, ENCODED, width or own)) for name, width in session.states}
    if session.padded and STATES_MASK in inspect.signature(type(model).forward).parameters and session.states:
        of_states = torch.ones(session.batch, ENCODED, dtype=torch.long, device=sample.device)
        of_states[0, -PADDING:] = 0
        more[STATES_MASK] = of_states
    arguments: dict[str, Tensor] = {}
    for i, tokens in enumerate(session.tokens):
        new = model_inputs(model, make, session.batch, tokens)
        if i and "decoder_input_ids" in new:  # keep the encoder's inputs
            new = arguments | {"decoder_input_ids": new["decoder_input_ids"]}
        elif i:
            mask = torch.cat((mask, torch.ones(session.batch, tokens, dtype=torch.long)), dim=1)
        arguments = new
        if session.frames:
            shape = next(value.shape[:2] for value in new.values() if value.dim() == 3)
            mask = torch.ones(shape, dtype=torch.long)
            mask[0, -(shape[1] // 3) :] = mask[1, : shape[1] // 3] = 0
            yield arguments | {"attention_mask": mask.to(sample.device)} | more, mask.bool()
            continue
        real = None
        if "attention_mask" in arguments:
            told = _two_texts(mask, sample.dtype) if session.texts else mask
            arguments["attention_mask"] = told.to(sample.device)
            real = None if i else mask.bool()
            # Without a count, models (Mamba) take a mask of the new tokens alone, and `generate` passes none.
            if i and cache is not None and tokens_in(cache) is None:
                del arguments["attention_mask"]
        yield arguments | more, real


def _fits_ours(make_cache: Callable[[], Cache]) -> bool:
    """Whether the model's own layers can use our cache, in which they can keep no states."""
    try:
        cache = make_cache()
    except Exception:  # of a config that transformers makes no cache for
        return True
    return first_counts(cache) and not any(hasattr(layer, "recurrent_states") for layer in cache.layers)


def _packed(tokens: int, device: torch.device) -> dict[str, Any]:
    """Arguments that continuous batching passes for two texts in one row, with a paged cache that is still empty."""
    # Imported here because the import is slow.
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    class Empty(PagedAttentionCache):
        def __init__(self) -> None:
            pass

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return key_states, value_states

    first = tokens // FIRST_TEXT
    positions = torch.cat((torch.arange(first), torch.arange(tokens - first)))[None]
    ends = torch.tensor([0, first, tokens], dtype=torch.int32)
    return {
        "position_ids": positions.to(device),
        "cu_seq_lens_q": ends.to(device),
        "max_length_q": tokens - first,
        "cache": Empty(),
    }


def _two_texts(mask_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, T, T], causal within each of a row's two texts."""
    text = torch.arange(mask_BT.shape[1]) >= mask_BT.shape[1] // FIRST_TEXT
    allowed = (text[:, None] == text[None, :]).tril()
    hidden = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    return hidden.expand(mask_BT.shape[0], 1, -1, -1)
