"""Compare mixtures on equal routes: if two runs route a token to different experts, it differs by more than rounding.

The original's routers are recorded in float32, and every other run of the layer, old or new, is fed their routes. The
routers themselves are compared on the recorded inputs, where equal logits must lead to equal routes, ties included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from infuse.ground.temporary_hooks import TemporaryHooks
from infuse.layers.mixture.router import Router, routes_in, with_routes


@dataclass(frozen=True)
class Route:
    """One call of a router: its arguments and results: logits [T, E], weights [T, K] and index [T, K]."""

    args: tuple[Any, ...]
    logits: Tensor
    weights: Tensor
    index: Tensor


@contextmanager
def recorded(layer: nn.Module, routers: Collection[str]) -> Iterator[list[Route]]:
    """Inside the `with`, collect the calls of the routers at these paths, in order."""
    seen: list[Route] = []

    def record(router: nn.Module, args: tuple, output: tuple[Tensor, ...]) -> None:
        seen.append(Route(args, *_told(router, output)))

    with TemporaryHooks() as hooks:
        for path in routers:
            hooks.after(layer.get_submodule(path), record)
        yield seen


@contextmanager
def fed(layer: nn.Module, routers: Collection[str], routes: Sequence[Route]) -> Iterator[None]:
    """Inside the `with`, the routers at these paths return the recorded weights and index instead of their own."""
    remaining = iter(routes)
    modules = [layer.get_submodule(path) for path in routers]
    if len(modules) == 1 and isinstance(modules[0], Router):
        with _fed_by_itself(layer, modules[0], remaining):
            yield
        return

    def feed(router: nn.Module, args: tuple, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        route = next(remaining)
        return with_routes(output, route.weights, route.index)

    with TemporaryHooks() as hooks:
        for module in modules:
            hooks.after(module, feed)
        yield


@contextmanager
def _fed_by_itself(layer: nn.Module, router: Router, routes: Iterator[Route]) -> Iterator[None]:
    """The same with our router, which needs no hook: blocks with hooks inside do not run in C++."""

    def feed(layer: nn.Module, args: tuple) -> None:
        route = next(routes)
        router.feed(route.index, route.weights)

    with TemporaryHooks() as hooks:
        hooks.before(layer, feed)
        try:
            yield
        finally:
            router.feed()


def repeated(layer: nn.Module, routers: Collection[str], routes: Sequence[Route], dtype: torch.dtype) -> list[Route]:
    """Call the routers at these paths again with the recorded inputs in `dtype`.

    Arguments besides the hidden states belong to the original's routers; ours hold them, but for a mask.
    """
    calls = []
    modules = [layer.get_submodule(path) for path in routers]
    for router, route in zip(cycle(modules), routes, strict=False):
        x, *more = route.args
        holds_them = isinstance(router, Router) and not router.shape.reads_mask
        output = router(x.to(dtype), *([] if holds_them else more))
        calls.append(Route(route.args, *_told(router, output)))
    return calls


def _told(router: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    return routes_in(output, getattr(router, "top_k", 1))


def routes_mismatch(actual: Sequence[Route], wanted: Sequence[Route], tolerance: float) -> str | None:
    """Return why routers of two modules differ on the same inputs; None if they do not."""
    differences = (_mismatch(a, b, tolerance) for a, b in zip(actual, wanted, strict=True))
    return next((text for text in differences if text), None)


def _mismatch(actual: Route, wanted: Route, tolerance: float) -> str | None:
    """Return why one router's routes differ from another's on the same input; None if they do not.

    Logits may differ by `tolerance` of their size. Tokens with equal logits must have equal index and weights.
    """
    if actual.index.shape != wanted.index.shape:
        return f"the router chooses {actual.index.shape[1]} experts, not {wanted.index.shape[1]}"
    a, b = actual.logits.float(), wanted.logits.float()
    finite = torch.isfinite(b).all(dim=-1)  # hidden states at padding may be anything
    error = (a - b)[finite].square().mean().sqrt() / b[finite].square().mean().sqrt().clamp(min=1e-30)
    if not error <= tolerance:
        return f"the router's logits differ by {error:.1e} of their size ({tolerance:.1e} is allowed)"
    same = finite & (a == b).all(dim=-1)
    if actual.weights.dtype != wanted.weights.dtype:
        return f"the router's weights are {actual.weights.dtype}, not {wanted.weights.dtype}"
    order_a, order_b = (route.index[same].argsort(dim=-1) for route in (actual, wanted))
    if not torch.equal(actual.index[same].gather(1, order_a), wanted.index[same].gather(1, order_b)):
        return "the router chooses other experts from the same logits"
    if not torch.equal(actual.weights[same].gather(1, order_a), wanted.weights[same].gather(1, order_b)):
        return "the router weighs experts differently from the same logits"
    return None
