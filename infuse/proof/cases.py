"""Cases to prove a layer on: calls recorded while its model runs, or random rows for linears and embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from transformers.cache_utils import Cache

from infuse.architectures.part import Matrix
from infuse.architectures.parts.experts import BATCHES, EVERY, ONE_HOT, ExpertsShape
from infuse.ground import interrupts
from infuse.ground.errors import CheckpointError, RankError
from infuse.ground.temporary_hooks import StopModel, watched
from infuse.inputs.model import SEED
from infuse.proof.sessions import Session, session_inputs, short_window

CACHE = object()  # placeholder for the model's cache in a call: each run uses its own, and the recorded one is freed


@dataclass(frozen=True)
class Call:
    """One recorded call of a layer: hidden states, other arguments, and which positions are real (None: all)."""

    hidden: Tensor
    args: tuple
    kwargs: dict[str, Any]
    real: Tensor | None


@dataclass(frozen=True)
class Case:
    """Calls in order on one cache: a prompt, then further tokens if there is a cache.

    Each of `caches` creates a fresh cache: the original runs on the first, its replacement on all of them. If
    `refusable`, the new module may refuse the calls by name (UnsupportedCall) instead of computing them. `whole`: calls
    of a whole module, with all its results compared; arguments keep dtypes that differ from the first's. `rows`: one
    call [1, N, ...] of a module that computes the N rows independently.
    """

    label: str
    calls: tuple[Call, ...]
    caches: tuple[Callable[[], Cache] | None, ...]
    refusable: bool = False
    whole: bool = False
    rows: bool = False


def recorded_cases(
    model: nn.Module, layers: Mapping[str, nn.Module], sessions: Iterable[Session]
) -> dict[str, list[Case]]:
    """For each path in `layers` (layers of `model`), record the cases that a run on random inputs produces."""
    cases: dict[str, list[Case]] = {path: [] for path in layers}
    for session in sessions:
        cache = session.make_cache() if session.make_cache else None
        seen: dict[str, list[Call]] = {path: [] for path in layers}
        try:
            with short_window(model, session.window):
                for inputs, real in session_inputs(model, cache, session):
                    record_run(partial(model, **inputs), layers, real, seen)
        except (CheckpointError, RankError):
            raise
        except Exception:
            if not session.optional:
                raise
            continue  # the model refuses such a cache or mask, so these calls cannot occur
        for path, calls in seen.items():
            if calls:
                also = session.also if _sees_all(calls) else ()
                cases[path].append(Case(session.label, tuple(calls), (session.make_cache, *also), session.optional))
    return cases


def _sees_all(calls: list[Call]) -> bool:
    """True if each call's mask, if any, has a column for every token so far, as on our cache."""
    seen_tokens = 0
    for call in calls:
        seen_tokens += call.hidden.shape[1]
        tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]
        if any(mask.shape[-1] != seen_tokens for mask in tensors if mask.dim() == 4):
            return False
    return True


def record_run(
    run: Callable[[], Any], layers: Mapping[str, nn.Module], real: Tensor | None, seen: dict[str, list[Call]]
) -> None:
    """Run a model until each layer has run, and append each layer's call to its list in `seen`."""
    remaining = set(layers)

    def record(path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        interrupts.check()
        if path not in remaining:  # a shared layer runs several times; record only the first
            return
        seen[path].append(recorded_call(args, kwargs, real))

    def reached(path: str, args: tuple, output: Any) -> None:
        remaining.discard(path)
        if not remaining:
            raise StopModel

    with watched(layers, record, reached):
        run()


def recorded_call(args: tuple, kwargs: dict[str, Any], real: Tensor | None) -> Call:
    """Record the call of a layer with these arguments; `real` marks tokens that are not padding."""
    kwargs = {name: CACHE if isinstance(value, Cache) else value for name, value in kwargs.items()}
    hidden, *others = args or (kwargs.pop("hidden_states"),)
    others = [CACHE if isinstance(value, Cache) else value for value in others]
    # Otherwise the mask belongs to other rows.
    fits = real is not None and hidden.dim() == 3 and hidden.shape[:2] == real.shape
    return Call(hidden.clone(), tuple(others), kwargs, real if fits else None)


def matrix_cases(matrix: Matrix, device: torch.device) -> list[Case]:
    """Random cases for one matrix.

    For an embedding: random indices plus the first and last row. For a linear: one row, a few, and more than the
    kernels for few rows take.
    """
    generator = torch.Generator().manual_seed(SEED)
    if matrix.op == "embedding":
        index = torch.randint(matrix.outputs, (1, 30), generator=generator)
        return [_one_call(torch.cat((torch.tensor([[0, matrix.outputs - 1]]), index), dim=1), device)]
    xs = (torch.randn(1, rows, matrix.inputs, generator=generator) for rows in (1, 7, 33))
    return [replace(_one_call(x, device), rows=True) for x in xs]


def expert_cases(shape: ExpertsShape, device: torch.device) -> list[Case]:
    """Random cases for experts, [T, H] with routes: one token, a few, and enough for several per expert.

    Weights are the output of a softmax. In the last case one expert gets all tokens.
    """
    generator = torch.Generator().manual_seed(SEED)
    routes, cases = min(4, shape.count), []
    for tokens in (1, 7, max(33, 2 * shape.count // routes), 20):
        x = torch.randn(tokens, shape.hidden, generator=generator)
        index = torch.rand(tokens, shape.count, generator=generator).argsort(dim=1)[:, :routes]
        if tokens == 20:
            index = index[:, :1].mul(0) + shape.count - 1
        elif tokens > 7:
            index = (torch.arange(tokens * routes) % shape.count).view(tokens, routes)
        weights = torch.randn(index.shape, generator=generator).softmax(dim=1)
        call = _as_called(shape, x.to(device), (index + shape.gate.first).to(device), weights.to(device))
        cases.append(Case(f"{tokens} tokens", (call,), (None,)))
    return cases


def _as_called(shape: ExpertsShape, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Call:
    """Build the call of such experts with these routes; experts that take one route per token get the first."""
    if shape.call == BATCHES:
        return Call(x_TH[None], (index_TK, weights_TK), {}, None)
    if shape.call == ONE_HOT:
        selected_T1E = one_hot(index_TK[:, :1], shape.count)
        selected_T1E[-1] = 0  # beyond the expert's capacity
        return Call(x_TH, (selected_T1E, weights_TK[:, :1]), {}, None)
    if shape.call == EVERY:
        scores_TE = x_TH.new_zeros(len(x_TH), shape.count).scatter(1, index_TK, weights_TK)
        return Call((x_TH * scores_TE.t().unsqueeze(-1)).flatten(0, 1), (), {}, None)
    return Call(x_TH, (index_TK, weights_TK), {}, None)


def routed_cases(hidden: int, device: torch.device) -> list[Case]:
    """Random cases for a DeepSpeed mixture: two rows of tokens, without a used_token mask."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = [torch.randn(2, tokens, hidden, generator=generator) for tokens in (2, 5, 17)]
    calls = [Call(x.to(device), (None,), {}, None) for x in inputs]
    return [Case(f"{call.hidden.shape[1]} tokens", (call,), (None,)) for call in calls]


def _one_call(x: Tensor, device: torch.device) -> Case:
    return Case(f"{x.shape[1]} rows", (Call(x.to(device), (), {}, None),), (None,))
