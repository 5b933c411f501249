"""The proof: a new module against the one that it would replace, on inputs that the model itself makes.

The model runs up to the layer on random tokens, in each of the ways that users call it (alone, padded, with the caches
and masks that they bring; then further tokens on the cache), and what it passes to the layer is recorded. Two
comparisons follow. Structure: old and new in float32, same weights, which must agree closely. Result: the new module as
it will run, in the target dtype and format, whose distance from the original in float32 may be at most twice that of
the original itself run in that dtype.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache

from infuse import interrupts
from infuse.architectures.part import Matrix
from infuse.dtype_cast import in_dtype
from infuse.errors import CheckpointError, RankError, UnsupportedCall
from infuse.layers.cache import KVCache
from infuse.plan.step import BLOCK, Step
from infuse.quant.parse import quant_format

TOKENS, PADDING, SEED = 12, 3, 2026  # 12 divides into the chunks of chunked feed-forward layers
LATER = (1, 2)  # new tokens of the calls after the first one: a step of decoding, then several tokens at once
WINDOW = 5  # a sliding window that TOKENS more than fill
# Relative to the largest value. float32: two orders of summation over some thousand terms. 16 bits: half a unit in the
# last place.
STRUCTURE_TOLERANCE = 5e-5
_FLOOR = {torch.float32: 5e-5, torch.float64: 5e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@dataclass(frozen=True)
class Call:
    """What the model passed to a layer once: hidden states, arguments, and which positions are real (None: all)."""

    hidden: Tensor
    args: tuple
    kwargs: dict[str, Any]
    real: Tensor | None


@dataclass(frozen=True)
class Case:
    """Calls in order on one cache: a prompt, then further tokens where there is a cache. Each of `caches` makes a fresh
    one: the original runs on the first, what is to replace it on all of them. Where `refusable`, the new module may
    refuse the calls by name instead of computing them (UnsupportedCall).
    """

    label: str
    calls: tuple[Call, ...]
    caches: tuple[Callable[[], Cache] | None, ...]
    refusable: bool = False


_CACHE = object()  # stands in a call for the model's cache: each run has one of its own, and that one may go


class _Reached(Exception):
    """Raised by a hook once the last layer of interest has run."""


# --- recording ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Session:
    """A few calls of the model in a row, as some user makes them; what its layers are passed becomes a case.

    `tokens` are the new tokens of each call. The model runs on a cache of `make_cache`, and new modules on those of
    `also` as well, where the same arguments mean the same. `texts`: two texts in each row, by a 4-d mask; `paged`: as a
    step of continuous batching packs them, with the cache that it passes to the attention function. `window`: sliding
    windows are that short. An `optional` session that the model itself refuses makes no case.
    """

    label: str
    tokens: tuple[int, ...]
    make_cache: Callable[[], Cache] | None = None
    also: tuple[Callable[[], Cache], ...] = ()
    padded: bool = False
    texts: bool = False
    paged: bool = False
    window: int | None = None
    optional: bool = True

    @property
    def batch(self) -> int:
        """Unpadded so many rows that kernels for many take the first call (more than 28), padded those for few."""
        return 1 if self.paged else 2 if self.padded or self.texts else 3


def _sessions(config: Any, decodes: bool) -> list[_Session]:
    """The calls by which a layer is judged; those without a cache alone where it takes none."""
    first, most = _first_tokens(config), _most_tokens(config)
    texts = _Session("two texts in a row", (min(first, 4),), texts=True)
    if not decodes:
        return [
            _Session("alone", (first,), optional=False), _Session("padded", (first,), padded=True, optional=False), texts,
        ]  # fmt: skip
    later = tuple(count for i, count in enumerate(LATER) if first + sum(LATER[: i + 1]) <= most)
    sessions = [
        _Session("alone", (first, *later), lambda: DynamicCache(config=config), (_our_cache,), optional=False),
        _Session("padded", (first, *later), _our_cache, padded=True, optional=False),
        _Session(
            "a static cache", (WINDOW, *later), lambda: StaticCache(config=config, max_cache_len=TOKENS), padded=True
        ),
        texts,
        replace(texts, label="a continuous batch", paged=True),
    ]
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and window > WINDOW:  # a shorter one is full in the sessions above
        short = copy.copy(config)
        short.sliding_window = WINDOW
        sessions.append(_Session("a full window", (first, *later), lambda: DynamicCache(config=short), window=WINDOW))
        sessions.append(_Session("a full window", (first, *later), _our_cache, padded=True, window=WINDOW))
    return sessions


def _most_tokens(config: Any) -> int:
    return (getattr(config, "max_position_embeddings", None) or TOKENS + sum(LATER) + 1) - 1


def _first_tokens(config: Any) -> int:
    return min(TOKENS, _most_tokens(config))


def recorded_cases(owner: nn.Module, layers: Mapping[str, nn.Module], decodes: bool) -> dict[str, list[Case]]:
    """For each path in `layers` (layers of the model `owner`): the cases that `owner` makes of random inputs."""
    cases: dict[str, list[Case]] = {path: [] for path in layers}
    for session in _sessions(getattr(owner, "config", None), decodes):
        if session.texts and _reads_pixels(owner):
            continue
        cache = session.make_cache() if session.make_cache else None
        seen: dict[str, list[Call]] = {path: [] for path in layers}
        try:
            with _short_window(owner, session.window):
                for inputs, real in _model_inputs(owner, cache, session):
                    run_and_record(owner, layers, inputs, real, seen)
        except (CheckpointError, RankError):
            raise
        except Exception:
            if session.optional:  # the model does not take such a cache or mask, so that nobody can make these calls
                continue
            raise
        for path, calls in seen.items():
            if calls:
                also = session.also if _sees_all(calls) else ()
                cases[path].append(Case(session.label, tuple(calls), (session.make_cache, *also), session.optional))
    return cases


def _our_cache() -> Cache:
    return KVCache(limit_tokens=TOKENS + sum(LATER))  # no larger than it need be


def _sees_all(calls: list[Call]) -> bool:
    """Whether each call's mask, if it has one, has a column for every token so far, as on our cache."""
    seen_tokens = 0
    for call in calls:
        seen_tokens += call.hidden.shape[1]
        masks = [
            value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor) and value.dim() == 4
        ]
        if any(mask.shape[-1] != seen_tokens for mask in masks):
            return False
    return True


@contextmanager
def _short_window(owner: Any, window: int | None) -> Iterator[None]:
    """The model masks by a sliding window of `window` tokens for a while."""
    if window is None:
        yield
        return
    kept = owner.config.sliding_window
    try:
        owner.config.sliding_window = window
        yield
    finally:
        owner.config.sliding_window = kept


def _model_inputs(
    owner: nn.Module, cache: Cache | None, session: _Session
) -> Iterator[tuple[dict[str, Any], Tensor | None]]:
    """Arguments of the model's forward, one for each call, with the mask [B, T] of real positions."""
    generator = torch.Generator().manual_seed(SEED)
    sample, batch = like(owner), session.batch
    config: Any = getattr(owner, "config", None)
    if _reads_pixels(owner):
        size = (
            config.image_size
            if isinstance(config.image_size, (tuple, list))
            else (config.image_size, config.image_size)
        )
        pixels = torch.randn(batch, config.num_channels, *size, generator=generator)
        yield {"pixel_values": pixels.to(sample)}, None
        return
    mask = torch.ones(batch, session.tokens[0], dtype=torch.long)
    if session.padded and cache is not None:
        mask[0, :PADDING] = 0  # on the left, as generation pads
    elif session.padded:
        mask[0, -PADDING:] = 0
    caching: dict[str, Any] = {"use_cache": False} if session.texts else {}
    if session.paged:
        caching |= _packed(session.tokens[0], sample.device)
    if cache is not None:
        caching = {"past_key_values": cache, "use_cache": True}
    for i, tokens in enumerate(session.tokens):
        if i:
            mask = torch.cat((mask, torch.ones(batch, tokens, dtype=torch.long)), dim=1)
        given = _two_texts(mask, sample.dtype) if session.texts else mask
        text = _text(owner, (batch, tokens), generator)
        yield text | {"attention_mask": given.to(sample.device)} | caching, None if i else mask.bool()


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


def _reads_pixels(owner: nn.Module) -> bool:
    return getattr(owner, "main_input_name", "input_ids") == "pixel_values"


def _text(owner: nn.Module, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    """Random token ids where the embeddings are a table, else random embeddings."""
    try:
        embedding = owner.get_input_embeddings()  # type: ignore[operator]
    except AttributeError:  # some users delete the table and pass embeddings alone
        embedding = None
    sample = like(owner)
    if isinstance(embedding, nn.Embedding):
        ids = torch.randint(3, max(embedding.num_embeddings, 4), shape, generator=generator)
        padding = getattr(getattr(owner, "config", None), "pad_token_id", None)
        ids[ids == padding] = 3 if padding != 3 else 4  # some models count positions by what is not padding
        return {"input_ids": ids.to(sample.device)}
    width: int = getattr(embedding, "embedding_dim", None) or owner.config.hidden_size  # type: ignore[union-attr,assignment]
    return {"inputs_embeds": torch.randn(*shape, width, generator=generator).to(sample.device, sample.dtype)}


def cache_maker(model: nn.Module) -> Callable[[], Cache] | None:
    """What makes a cache of transformers' that the model's forward takes, None where it takes none."""
    config: Any = getattr(model, "config", None)
    takes = "past_key_values" in inspect.signature(type(model).forward).parameters
    if not takes or not getattr(config, "use_cache", False):
        return None
    if getattr(config, "is_encoder_decoder", False):
        return lambda: EncoderDecoderCache(DynamicCache(), DynamicCache())
    return lambda: DynamicCache(config=config)


def like(owner: nn.Module) -> Tensor:
    """A parameter whose device and dtype are the model's: while a checkpoint is being placed, layers are on meta."""
    return min(owner.parameters(), key=lambda parameter: parameter.is_meta)


def run_and_record(
    owner: nn.Module,
    layers: Mapping[str, nn.Module],
    inputs: dict[str, Any],
    real: Tensor | None,
    seen: dict[str, list[Call]],
) -> None:
    remaining = set(layers)
    handles = []

    def record(path: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            interrupts.check()
            if path in remaining:  # a shared layer runs several times: its first call speaks for it
                kwargs = {name: _CACHE if isinstance(value, Cache) else value for name, value in kwargs.items()}
                args = tuple(_CACHE if isinstance(value, Cache) else value for value in args)
                hidden = args[0] if args else kwargs.pop("hidden_states")
                seen[path].append(Call(hidden.clone(), args[1:], kwargs, real))

        return hook

    def reached(path: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            remaining.discard(path)
            if not remaining:
                raise _Reached

        return hook

    for path, layer in layers.items():
        handles.append(layer.register_forward_pre_hook(record(path), with_kwargs=True))
        handles.append(layer.register_forward_hook(reached(path)))
    try:
        owner(**inputs)
    except _Reached:
        pass
    finally:
        for handle in handles:
            handle.remove()


# --- running ------------------------------------------------------------------------------------------------------


def _cast(value: Any, dtype: torch.dtype, cache: Cache | None) -> Any:
    """An argument of the recorded call for a run in `dtype`, on a cache of its own."""
    if isinstance(value, Tensor) and value.is_floating_point():
        lowest = max(torch.finfo(dtype).min, torch.finfo(value.dtype).min)  # a mask's lowest value must not become -inf
        return value.clamp(min=lowest).to(dtype)
    if value is _CACHE:
        return cache
    return type(value)(_cast(v, dtype, cache) for v in value) if isinstance(value, (tuple, list)) else value


def outputs(layer: nn.Module, case: Case, dtype: torch.dtype, make_cache: Callable[[], Cache] | None) -> list[Tensor]:
    """What the layer makes of the case's calls, in order; hidden states only, real positions only [N, C]."""
    cache = make_cache() if make_cache else None
    results = []
    for call in case.calls:
        args = [_cast(arg, dtype, cache) for arg in call.args]
        kwargs = {name: _cast(value, dtype, cache) for name, value in call.kwargs.items()}
        given = (
            call.hidden.to(dtype) if call.hidden.is_floating_point() else call.hidden
        )  # an embedding is given indices
        hidden = given.clone()
        out = layer(hidden, *args, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        if not torch.equal(hidden, given):
            raise ValueError("the hidden states that were passed in were written to")
        results.append(out.flatten(0, 1) if call.real is None else out[call.real.to(out.device)])
    return results


@dataclass(frozen=True)
class Expected:
    """The original's outputs for each case: in float32, and how far it is from them in the target dtype."""

    exact: list[list[Tensor]]
    own_error: list[list[float]]


def expected(layer: nn.Module, cases: list[Case], dtype: torch.dtype) -> Expected:
    with in_dtype(layer, torch.float32):
        exact = [outputs(layer, case, torch.float32, case.caches[0]) for case in cases]
    if dtype == torch.float32:
        return Expected(exact, [[0.0] * len(row) for row in exact])
    with in_dtype(layer, dtype):
        rounded = [outputs(layer, case, dtype, case.caches[0]) for case in cases]
    errors = [[distance(a, b) for a, b in zip(x, y, strict=True)] for x, y in zip(rounded, exact, strict=True)]
    return Expected(exact, errors)


def distance(found: Tensor, exact: Tensor) -> float:
    """The root mean square of the difference over that of `exact`; infinite where shapes differ or a value is not
    finite.
    """
    if found.shape != exact.shape:
        return float("inf")
    if exact.numel() == 0:
        return 0.0
    error = (found.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp(min=1e-30)
    return float(error) if bool(torch.isfinite(error)) else float("inf")


# --- judging ------------------------------------------------------------------------------------------------------


def structure_fault(old: nn.Module, new: nn.Module, cases: list[Case], wanted: Expected) -> str | None:
    """Why `new` (reference bodies, weights not quantized) is not the same function as the original; None if it is."""
    with in_dtype(new, torch.float32):
        for case, exact in zip(cases, wanted.exact, strict=True):
            for cache, i, error in _distances(new, case, torch.float32, exact):
                if error > STRUCTURE_TOLERANCE:
                    return _too_far(error, torch.float32, case, cache, i, STRUCTURE_TOLERANCE)
    return None


def result_fault(new: nn.Module, step: Step, cases: list[Case], wanted: Expected, dtype: torch.dtype) -> str | None:
    """Why `new`, as it will run, is too far from the original in float32; None if it is near enough."""
    # Matrices are rounded independently of each other: their errors add up in squares.
    quantized = math.hypot(*(quant_format(f).proof_tolerance for f in step.formats.values()))
    for case, exact, own in zip(cases, wanted.exact, wanted.own_error, strict=True):
        for cache, i, error in _distances(new, case, dtype, exact):
            allowed = max(2 * own[i], _FLOOR[dtype]) + quantized
            if error > allowed:
                return _too_far(error, dtype, case, cache, i, allowed)
    return None


def _distances(new: nn.Module, case: Case, dtype: torch.dtype, exact: list[Tensor]) -> Iterator[tuple[str, int, float]]:
    """Of each call on each cache: the cache, which call it is, and how far `new` is from `exact` in it."""
    for make_cache in case.caches:
        try:
            found = outputs(new, case, dtype, make_cache)
        except UnsupportedCall:
            if case.refusable:  # its user will be told the same, by name
                continue
            raise
        errors = [distance(a, b) for a, b in zip(found, exact, strict=True)]
        cache = ", our cache" if make_cache is _our_cache else ""
        yield from ((cache, i, error) for i, error in enumerate(errors))


def _too_far(error: float, dtype: torch.dtype, case: Case, cache: str, call: int, allowed: float) -> str:
    which = ("prefill", "decode", "several tokens")[call]
    place = f"{str(dtype).removeprefix('torch.')} ({case.label}{cache}, {which}; {allowed:.1e} is allowed)"
    return f"differs from the original by {error:.1e} of its size in {place}"


def model_outputs(model: nn.Module) -> list[tuple[Tensor, torch.dtype]]:
    """The first output of the whole model for random inputs, alone and padded: real positions in float32, and their
    dtype.
    """
    outputs = []
    for padded in (False, True):
        session = _Session("", (_first_tokens(model.config),), padded=padded)
        for inputs, real in _model_inputs(model, None, session):
            if getattr(model.config, "is_encoder_decoder", False):  # type: ignore[union-attr]
                inputs["decoder_input_ids"] = inputs["input_ids"]
            out = next(value for value in model(**inputs).values() if isinstance(value, Tensor) and value.dim() > 1)
            fits = real is not None and out.shape[:2] == real.shape
            outputs.append(((out[real.to(out.device)] if fits else out).float(), out.dtype))  # type: ignore[union-attr]
    return outputs


def hook_fault(found: list[tuple[Tensor, torch.dtype]], wanted: list[tuple[Tensor, torch.dtype]]) -> str | None:
    """Why the model is too far from itself with another attention: both ran in one dtype, whose rounding is allowed
    twice.
    """
    for (a, dtype), (b, _) in zip(found, wanted, strict=True):
        if (error := distance(a, b)) > 2 * _FLOOR[dtype]:
            return f"the model differs from itself by {error:.1e} of its size in {dtype} ({2 * _FLOOR[dtype]:.1e} is allowed)"
    return None


def matrix_cases(matrix: Matrix, device: torch.device) -> list[Case]:
    """For a table, random rows of it and its first and last one; for a linear, random inputs: one, some, and more rows
    than kernels for few rows take.
    """
    generator = torch.Generator().manual_seed(SEED)
    if matrix.op == "embedding":
        index = torch.randint(matrix.outputs, (1, 30), generator=generator)
        return [_one_call(torch.cat((torch.tensor([[0, matrix.outputs - 1]]), index), dim=1), device)]
    return [_one_call(torch.randn(1, rows, matrix.inputs, generator=generator), device) for rows in (1, 7, 33)]


def _one_call(x: Tensor, device: torch.device) -> Case:
    return Case(f"{x.shape[1]} rows", (Call(x.to(device), (), {}, None),), (None,))


def decodes(step: Step) -> bool:
    """Whether the step's module works on a cache."""
    return step.depth == BLOCK and step.index is not None and step.shape.attn.causal  # type: ignore[union-attr]
