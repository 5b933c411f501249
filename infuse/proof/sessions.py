"""Sessions: a few calls of the model in a row, as users make them. What its layers are passed then becomes a case."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from infuse.architectures.model_inputs import (
    TOKENS,
    RandomTensors,
    first_tokens,
    like,
    model_inputs,
    most_tokens,
    reads_images,
)
from infuse.layers.cache import KVCache
from infuse.plan.step import BLOCK, Step

PADDING = 3
LATER = (1, 2)  # new tokens of the calls after the first one: a step of decoding, then several tokens at once
WINDOW = 5  # a sliding window that TOKENS more than fill


@dataclass(frozen=True)
class Session:
    """Calls of the model in a row; `tokens` are the new tokens of each, `batch` the rows of all.

    The model runs on a cache of `make_cache`, and new modules on those of `also` as well, where the same arguments mean
    the same. `texts`: two texts in each row, by a 4-d mask; `paged`: as a step of continuous batching packs them, with
    the cache that it passes to the attention function. `window`: sliding windows are that short. An `optional` session
    that the model itself refuses makes no case.
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
    optional: bool = True


MANY, FEW = 3, 2  # texts: without padding more than 28 rows, which kernels for many rows take, with padding fewer


def plain_sessions(config: Any) -> list[Session]:
    """One call without a cache, then one that is padded."""
    first = first_tokens(config)
    return [
        Session("alone", (first,), MANY, optional=False),
        Session("padded", (first,), FEW, padded=True, optional=False),
    ]


def block_sessions(model: nn.Module, decodes: bool) -> list[Session]:
    """The calls by which a layer is judged; those without a cache alone where it takes none."""
    config: Any = getattr(model, "config", None)
    first, most = first_tokens(config), most_tokens(config)
    texts = Session("two texts in a row", (min(first, 4),), FEW, texts=True)
    if not decodes:
        return [*plain_sessions(config)] + [texts] * (not reads_images(model))
    later = tuple(count for i, count in enumerate(LATER) if first + sum(LATER[: i + 1]) <= most)
    tokens = (first, *later)
    sessions = [
        Session("alone", tokens, MANY, lambda: DynamicCache(config=config), (our_cache,), optional=False),
        Session("padded", tokens, FEW, our_cache, padded=True, optional=False),
        Session(
            "a static cache",
            (WINDOW, *later),
            FEW,
            lambda: StaticCache(config=config, max_cache_len=TOKENS),
            padded=True,
        ),
        texts,
        replace(texts, label="a continuous batch", batch=1, paged=True),
    ]
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and window > WINDOW:  # a shorter one is full in the sessions above
        short = copy.copy(config)
        short.sliding_window = WINDOW
        full = Session("a full window", tokens, MANY, lambda: DynamicCache(config=short), window=WINDOW)
        sessions += [full, replace(full, batch=FEW, make_cache=our_cache, padded=True)]
    return sessions


def model_sessions(model: nn.Module) -> list[Session]:
    """The calls by which layers without a spec are judged: on a cache of transformers' where the model takes one."""
    alone, padded = plain_sessions(getattr(model, "config", None))
    make_cache = _cache_maker(model)
    later = (1,) if make_cache else ()
    return [replace(alone, tokens=(*alone.tokens, *later), batch=FEW, make_cache=make_cache), padded]


def our_cache() -> Cache:
    return KVCache(limit_tokens=TOKENS + sum(LATER))  # no larger than it need be


def _cache_maker(model: nn.Module) -> Callable[[], Cache] | None:
    """What makes a cache of transformers' that the model's forward takes, None where it takes none."""
    config: Any = getattr(model, "config", None)
    takes = "past_key_values" in inspect.signature(type(model).forward).parameters
    if not takes or not getattr(config, "use_cache", False):
        return None
    if getattr(config, "is_encoder_decoder", False):
        return lambda: EncoderDecoderCache(DynamicCache(), DynamicCache())
    return lambda: DynamicCache(config=config)


@contextmanager
def short_window(model: Any, window: int | None) -> Iterator[None]:
    """The model masks by a sliding window of `window` tokens for a while; None leaves it as it is."""
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
    """Arguments of the model's forward, one for each call, with the mask [B, T] of real positions (None: all)."""
    make, sample = RandomTensors(model), like(model)
    mask = torch.ones(session.batch, session.tokens[0], dtype=torch.long)
    if session.padded and cache is not None:
        mask[0, :PADDING] = 0  # on the left, as generation pads
    elif session.padded:
        mask[0, -PADDING:] = 0
    more: dict[str, Any] = {"use_cache": False} if session.texts else {}
    if session.paged:
        more |= _packed(session.tokens[0], sample.device)
    if cache is not None:
        more = {"past_key_values": cache, "use_cache": True}
    given: dict[str, Tensor] = {}
    for i, tokens in enumerate(session.tokens):
        new = model_inputs(model, make, session.batch, tokens)
        if i and "decoder_input_ids" in new:  # what the encoder reads stays
            new = given | {"decoder_input_ids": new["decoder_input_ids"]}
        elif i:
            mask = torch.cat((mask, torch.ones(session.batch, tokens, dtype=torch.long)), dim=1)
        given = new
        real = None
        if "attention_mask" in given:
            told = _two_texts(mask, sample.dtype) if session.texts else mask
            given["attention_mask"] = told.to(sample.device)
            real = None if i else mask.bool()
        yield given | more, real


def _first_text(tokens: int) -> int:
    """How many tokens of a row are its first text."""
    return tokens // 3


def _packed(tokens: int, device: torch.device) -> dict[str, Any]:
    """What continuous batching tells the model of two texts in one row, with a paged cache that holds nothing yet."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache  # here: it takes long to import

    class Empty(PagedAttentionCache):
        def __init__(self) -> None:
            pass

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return key_states, value_states

    first = _first_text(tokens)
    positions = torch.cat((torch.arange(first), torch.arange(tokens - first)))[None]
    ends = torch.tensor([0, first, tokens], dtype=torch.int32)
    return {
        "position_ids": positions.to(device),
        "cu_seq_lens_q": ends.to(device),
        "max_length_q": tokens - first,
        "cache": Empty(),
    }


def _two_texts(mask_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, T, T] to be added to scores: the first third of each row is a text, the rest another; each in causal
    order.
    """
    text = torch.arange(mask_BT.shape[1]) >= _first_text(mask_BT.shape[1])
    allowed = (text[:, None] == text[None, :]).tril()
    hidden = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    return hidden.expand(mask_BT.shape[0], 1, -1, -1)


def decodes(step: Step) -> bool:
    """Whether the step's module works on a cache."""
    return step.depth == BLOCK and step.index is not None and step.shape.attn.causal  # type: ignore[union-attr]
