"""Prove a new module against the one it would replace, on calls that the model itself makes.

Structure: both in float32 with the same weights must agree closely. Result: the new module runs as it will be used, in
the target dtype and format. Its distance from the original in float32 may be at most twice that of the original run in
that dtype.
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from infuse.architectures.parts.experts import ExpertsShape
from infuse.ground.dtype_cast import in_dtype
from infuse.ground.errors import CheckpointError, RankError, UnsupportedCall, in_brief
from infuse.ground.modes import Transparent
from infuse.plan.bytes import has_state
from infuse.plan.step import Step
from infuse.proof.cases import CACHE, Case
from infuse.proof.routes import Route, fed, recorded, repeated, routes_mismatch
from infuse.proof.sessions import hook_sessions, of_tokens, our_cache, our_int8_cache, session_inputs
from infuse.quant.parse import quant_format

# Relative to the root mean square of the values. float32: difference between two summation orders over some thousand
# terms. 16 bits: half a unit in the last place.
STRUCTURE_TOLERANCE = 5e-5
# Error that an int8 cache may add: keys and values are rounded like a matrix of int8, independently.
_OF_INT8_CACHE = math.sqrt(2) * quant_format("int8").proof_tolerance
_CALLS = ("prefill", "decode", "several tokens")
_CACHES: dict[Any, str] = {our_cache: ", our cache", our_int8_cache: ", our int8 cache"}
_ONEDNN_VALUES = 1 << 22  # of a weight; oneDNN keeps 12 MB for its own code, which smaller models notice
_FLOOR = {torch.float32: 5e-5, torch.float64: 5e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def cast_value(value: Any, dtype: torch.dtype, cache: Any, only: torch.dtype | None = None) -> Any:
    """Cast a recorded argument to `dtype`, if it has the dtype `only`, and replace CACHE by this run's `cache`."""
    if isinstance(value, Tensor) and value.is_floating_point() and only in (None, value.dtype):
        lowest = max(torch.finfo(dtype).min, torch.finfo(value.dtype).min)  # a mask's lowest value must not become -inf
        return value.clamp(min=lowest).to(dtype)
    if value is CACHE:
        return cache
    if isinstance(value, dict):
        return {name: cast_value(entry, dtype, cache, only) for name, entry in value.items()}
    if isinstance(value, UserDict):  # in which layers lend states to later ones: each run has its own
        own = copy(value)
        own.data = cast_value(value.data, dtype, cache, only)
        return own
    return type(value)(cast_value(v, dtype, cache, only) for v in value) if isinstance(value, (tuple, list)) else value


class Results(list[Tensor]):
    """Tensors of the calls of a case. `kinds`: for each call, how many values it returned in a tuple; 0 without one."""

    def __init__(self, tensors: Iterable[Tensor] = (), kinds: Iterable[int] = ()):
        super().__init__(tensors)
        self.kinds = [*kinds]


def outputs(layer: nn.Module, case: Case, dtype: torch.dtype, make_cache: Callable[[], Any] | None) -> Results:
    """Run the case's calls in order and return for each the hidden states of the real positions [N, C].

    After these come the states that the layer lends to later ones. For a whole module, return all results of each call.
    """
    cache = make_cache() if make_cache else None
    results = Results()
    for call in case.calls:
        only = call.hidden.dtype if case.whole else None
        args = [cast_value(arg, dtype, cache, only) for arg in call.args]
        kwargs = {name: cast_value(value, dtype, cache, only) for name, value in call.kwargs.items()}
        # An embedding takes indices, which keep their dtype.
        original = call.hidden.to(dtype) if call.hidden.is_floating_point() else call.hidden
        hidden = original.clone()
        shared = [(value, dict(value)) for value in (*args, *kwargs.values()) if isinstance(value, UserDict)]
        out = layer(hidden, *args, **kwargs)
        if not torch.equal(hidden, original):
            raise ValueError("the hidden states that were passed in were written to")
        if case.whole:
            tensors = [tensor for tensor in (out if isinstance(out, tuple) else (out,)) if isinstance(tensor, Tensor)]
            if not tensors:
                raise TypeError(f"it returned {type(out).__name__}, not tensors")
            results += tensors
            continue
        results.kinds.append(len(out) if isinstance(out, tuple) else 0)
        out = out[0] if isinstance(out, tuple) else out
        results.append(out.flatten(0, -2) if call.real is None else out[call.real.to(out.device)])
        for states, before in shared:
            lent = [value for name, value in sorted(states.items()) if value is not before.get(name)]
            results += [tensor for value in lent for tensor in value]
    return results


@dataclass(frozen=True)
class Expected:
    """The original's outputs for each case in float32, and its own error against them in the target dtype.

    `routers`: path in the new module → path in the original. `routes` are the calls of the original's routers in
    float32, `rounded_routes` the same calls in the target dtype.
    """

    exact: list[Results]
    own_error: list[list[float]]
    routers: Mapping[str, str]
    routes: list[list[Route]]
    rounded_routes: list[list[Route]]


def expected(
    layer: nn.Module,
    cases: list[Case],
    dtype: torch.dtype,
    routers: Mapping[str, str] | None = None,
    exact_names: Collection[str] = (),
) -> Expected:
    """Run the original. Parameters of `exact_names` stay in float32 in any `dtype`."""
    return with_own_error(expected_exact(layer, cases, routers), layer, cases, dtype, exact_names)


def expected_exact(layer: nn.Module, cases: list[Case], routers: Mapping[str, str] | None = None) -> Expected:
    """Run the original in float32, in which it has no error of its own."""
    routers = routers or {}
    paths, exact, routes = routers.values(), [], []
    together = _together(cases)
    with in_dtype(layer, torch.float32), _large_products(layer):
        for case in [together] if together else cases:
            with recorded(layer, paths) as seen:
                exact.append(outputs(layer, case, torch.float32, case.caches[0]))
            routes.append(seen)
    if together:  # without routers
        (((whole,), kinds),) = ((results, results.kinds) for results in exact)
        exact = [Results([rows], kinds) for rows in whole.split([case.calls[0].hidden.shape[1] for case in cases])]
        routes *= len(cases)
    return Expected(exact, [[0.0] * len(row) for row in exact], routers, routes, routes)


def _large_products(module: nn.Module) -> AbstractContextManager[Any]:
    """Context in which a module with large weights multiplies by these as is fastest."""
    has_large = any(parameter.numel() >= _ONEDNN_VALUES for parameter in module.parameters())
    return _LargeProductsByOneDNN() if has_large else nullcontext()


class _LargeProductsByOneDNN(Transparent, TorchFunctionMode):
    """Multiply with large float32 weights by oneDNN, as `in_dtype` does with those that it casts.

    On AMD, MKL, which F.linear calls, takes 1.3 times as long for some dozen rows, and twice as long for a few.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and _favours_onednn(*args[:2]):
            x, weight, bias = (*args, None)[:3]
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return func(*args, **(kwargs or {}))


def _favours_onednn(x: Tensor, weight: Tensor) -> bool:
    fits = x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu"
    fits = fits and type(weight) in (Tensor, nn.Parameter)  # other libraries' classes have products of their own
    return fits and weight.numel() >= _ONEDNN_VALUES and torch.backends.mkldnn.is_available()


def with_own_error(
    wanted: Expected, layer: nn.Module, cases: list[Case], dtype: torch.dtype, exact_names: Collection[str] = ()
) -> Expected:
    """Run the original in `dtype`, too, to measure its own error."""
    if dtype == torch.float32:
        return wanted
    rounded, paths = [], wanted.routers.values()
    with in_dtype(layer, dtype, exact_names):
        for case, seen in zip(cases, wanted.routes, strict=True):
            with fed(layer, paths, seen):
                rounded.append(outputs(layer, case, dtype, case.caches[0]))
        rounded_routes = [repeated(layer, paths, seen, dtype) for seen in wanted.routes]
    return replace(wanted, own_error=_own_errors(rounded, wanted.exact), rounded_routes=rounded_routes)


def expected_of_parts(parts: Iterable[nn.Linear], cases: list[Case], dtype: torch.dtype) -> Expected:
    """Run a linear that comes as linears of some of its rows each, in order; each is cast in place to `dtype`.

    The results are those of the whole linear, so that its proof compares every row.
    """
    exact: list[list[Tensor]] = [[] for _ in cases]
    rounded: list[list[Tensor]] = [[] for _ in cases]
    for part in parts:
        for columns, (tensor,) in zip(exact, expected_exact(part, cases).exact, strict=True):
            columns.append(tensor)
        if dtype == torch.float32:
            continue
        part.to(dtype)
        for columns, case in zip(rounded, cases, strict=True):
            (tensor,) = outputs(part, case, dtype, None)
            columns.append(tensor)
    wanted = [_joined(columns) for columns in exact]
    errors = [[0.0] for _ in cases]
    if dtype != torch.float32:
        errors = _own_errors([_joined(columns) for columns in rounded], wanted)
    return Expected(wanted, errors, {}, [[] for _ in cases], [[] for _ in cases])


def _joined(columns: list[Tensor]) -> Results:
    return Results([torch.cat(columns, dim=-1)], [0])


def _own_errors(rounded: list[Results], exact: list[Results]) -> list[list[float]]:
    return [[distance(a, b) for a, b in zip(x, y, strict=True)] for x, y in zip(rounded, exact, strict=True)]


def _together(cases: list[Case]) -> Case | None:
    """Merge the calls of all cases into one, to cast the weights once; None if their rows are not independent."""
    if not all(case.rows for case in cases):
        return None
    calls = [call for case in cases for call in case.calls]
    hidden = torch.cat([call.hidden for call in calls], dim=1)
    return replace(cases[0], calls=(replace(calls[0], hidden=hidden),))


def attempted(look: Callable[[], str | None]) -> str | None:
    """Return the mismatch that `look` returns. Any exception of the user's model or of a body counts as one."""
    try:
        return look()
    except (CheckpointError, RankError):
        raise
    except Exception as error:
        return f"not proven: {in_brief(error)}"


def distance(actual: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference relative to that of `exact`; inf if shapes differ or values are not finite."""
    if actual.shape != exact.shape:
        return float("inf")
    if exact.numel() == 0:
        return 0.0
    error = (actual.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp(min=1e-30)
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def _exact(caches: Iterable[Any]) -> Iterator[Any]:
    """Those that store keys and values as they are."""
    return (make for make in caches if of_tokens(make) is not our_int8_cache)


def structure_mismatch(new: nn.Module, cases: list[Case], wanted: Expected) -> str | None:
    """Return why `new` (reference bodies, no quantization) is not the same function as the original; None if it is."""
    exact = [replace(case, caches=tuple(_exact(case.caches))) for case in cases]
    with in_dtype(new, torch.float32), _large_products(new):
        allowed = [[STRUCTURE_TOLERANCE] * len(row) for row in wanted.exact]
        return _mismatch(new, exact, wanted, torch.float32, allowed)


def result_mismatch(new: nn.Module, step: Step, cases: list[Case], wanted: Expected, dtype: torch.dtype) -> str | None:
    """Return why `new`, as it will run, is too far from the original in float32; None if it is close enough."""
    # Matrices are rounded independently, so the squares of their errors add up. Experts are nothing but products: the
    # errors of gate and up, which are one matrix, both count in full. Codes that are copied round nothing.
    formats = [*step.rounded.values()]
    if isinstance(step.shape, ExpertsShape) and step.shape.gate.gated:
        formats += [format for target, format in step.rounded.items() if target == "up.weight"]
    if has_state(step):  # what a state gives is a product of queries, keys and values, rounded in one matrix each
        formats += [format for target, format in step.rounded.items() if target.endswith(".in.weight")] * 2
    quantized = math.hypot(*(quant_format(format).proof_tolerance for format in formats))
    own = wanted.own_error
    if has_state(step):  # what a call rounds stays in the state, and may be seen in any later call
        own = [[max(row)] * len(row) for row in own]
    # A call of few tokens may happen to lose little: no call is held to less than calls lose as a rule.
    usual = median([error for row in own for error in row] or [0.0])
    allowed = [[max(2 * error, 2 * usual, _FLOOR[dtype]) + quantized for error in row] for row in own]
    return _mismatch(new, cases, wanted, dtype, allowed)


def _mismatch(
    new: nn.Module, cases: list[Case], wanted: Expected, dtype: torch.dtype, allowed: list[list[float]]
) -> str | None:
    """Return the first call of a case, on any of its caches, in which the error of `new` exceeds `allowed`."""
    for case, exact, most, routes in zip(cases, wanted.exact, allowed, wanted.routes, strict=True):
        for make_cache in case.caches:
            try:
                with fed(new, wanted.routers, routes):
                    tensors = outputs(new, case, dtype, make_cache)
            except UnsupportedCall:
                if case.refusable:  # the user gets the same named refusal
                    continue
                raise
            if tensors.kinds != exact.kinds:
                found, theirs = (_told(results.kinds) for results in (tensors, exact))
                return f"returns {found}, and the original {theirs} ({case.label})"
            errors = _errors(case, tensors, exact)
            if of_tokens(make_cache) is our_int8_cache:
                most = [limit + _OF_INT8_CACHE for limit in most]
            names = [f"result {n + 1}" for n in range(len(errors))] if case.whole else _names(case, len(errors))
            for which, error, limit in zip(names, errors, most, strict=True):
                if not error <= limit:
                    case_text = f"{case.label}{_CACHES.get(of_tokens(make_cache), '')}, {which}"
                    place = f"{str(dtype).removeprefix('torch.')} ({case_text}; {limit:.1e} is allowed)"
                    return f"differs from the original by {error:.1e} of its size in {place}"
    for routes, rounded in zip(wanted.routes, wanted.rounded_routes, strict=True):
        alike = routes if dtype == torch.float32 else rounded
        if mismatch := routes_mismatch(repeated(new, wanted.routers, routes, dtype), alike, _FLOOR[dtype]):
            return f"{mismatch} in {str(dtype).removeprefix('torch.')}"
    return None


def _told(kinds: Sequence[int]) -> str:
    return ", ".join(f"a tuple of {count}" if count else "one value" for count in dict.fromkeys(kinds))


def _errors(case: Case, tensors: list[Tensor], exact: list[Tensor]) -> list[float]:
    """How far each result is from the exact one.

    A rank lends the states of its own heads, [B, K, T, D]: they are compared with those of `exact` that are nearest.
    """
    found, each = [], len(exact) // len(case.calls)
    for n, (actual, wanted) in enumerate(zip(tensors, exact, strict=True)):
        heads = actual.shape[1] if not case.whole and n % each else 0
        places = range(wanted.shape[1] - heads + 1) if heads else ()
        found.append(
            min((distance(actual, wanted[:, at : at + heads]) for at in places), default=distance(actual, wanted))
        )
    return found


def _names(case: Case, results: int) -> list[str]:
    """What each result of a layer is, in the order of `outputs`."""
    each = results // len(case.calls)
    return [f"{call}{', what is lent' if n else ''}" for call in _CALLS[: len(case.calls)] for n in range(each)]


def model_outputs(model: nn.Module) -> list[tuple[Tensor, torch.dtype]]:
    """The whole model's first output on random inputs: real positions in float32, and their dtype.

    The inputs are plain and padded, as long as each window, chunk or budget that the config names, and on a static
    cache if the model takes one.
    """
    outputs = []
    for session in hook_sessions(model):
        cache = session.make_cache() if session.make_cache else None
        try:
            for inputs, real in session_inputs(model, cache, session):
                out = next(value for value in model(**inputs).values() if isinstance(value, Tensor) and value.dim() > 1)
                fits = real is not None and out.shape[:2] == real.shape
                hidden = out[real.to(out.device)] if fits else out  # type: ignore[union-attr]
                outputs.append((hidden.float(), out.dtype))
        except Exception:
            if not session.optional:
                raise
    return outputs


def hook_mismatch(actual: list[tuple[Tensor, torch.dtype]], wanted: list[tuple[Tensor, torch.dtype]]) -> str | None:
    """Return why the model's outputs with another attention differ too much; None if they do not.

    Both runs use one dtype, so twice its rounding error is allowed.
    """
    if len(actual) != len(wanted):
        return "the model does not run with it on all inputs on which it runs without"
    for (a, dtype), (b, _) in zip(actual, wanted, strict=True):
        error, allowed = distance(a, b), 2 * _FLOOR[dtype]
        if error > allowed:
            return f"the model differs from itself by {error:.1e} of its size in {dtype} ({allowed:.1e} is allowed)"
    return None
