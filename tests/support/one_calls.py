"""Blocks that go in one call of C++ (layers/native/one_call.py): without it for a while, and whether it was taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.layers.block import Block
from infuse.layers.native.one_call import BlockCall
from tests.models.families import Family, inputs


def blocks(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


@contextmanager
def part_by_part(model: nn.Module) -> Iterator[None]:
    """While the `with` runs, no block of the model goes in one call."""
    held = [(block, block._one_call) for block in blocks(model)]
    for block, _ in held:
        block._one_call = None
    yield
    for block, call in held:
        block._one_call = call


def calls_noted(kind: type[BlockCall], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each block that is asked for a call of this kind from now on, whether it goes in one."""
    found: list[bool] = []
    call = kind.__call__

    def noted(self: BlockCall, *args: object) -> Tensor | None:
        out = call(self, *args)  # type: ignore[arg-type]
        found.append(out is not None)
        return out

    monkeypatch.setattr(kind, "__call__", noted)
    return found


@torch.no_grad()
def decoded(
    engine: infuse.InferenceEngine, family: Family, padding: str | None = None, tokens: int = 1, batch: int = 2
) -> list[Tensor]:
    """Logits of three calls with `tokens` new tokens each, on a cache with a prompt; then its keys and values."""
    given = inputs(family, batch=batch, padding=padding)
    mask, cache, found = given["attention_mask"], KVCache(), []
    engine(**given, past_key_values=cache, use_cache=True)
    for call in range(3):
        ids = torch.randint(3, 90, (batch, tokens), generator=torch.Generator().manual_seed(call))
        mask = torch.cat((mask, mask.new_ones(batch, tokens)), dim=1)
        found.append(engine(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits)
    return found + [cache.slot(0).keys, cache.slot(0).values]  # type: ignore[list-item]


@contextmanager
def listening(part: nn.Module, way: str, tell: Callable[[], None]) -> Iterator[None]:
    """While the `with` runs, `tell` is called with each call of the part: by a hook after it, one before it, or its own
    forward.
    """
    forward = part.forward
    if way == "forward":

        def told(*args: object, **kwargs: object) -> object:
            tell()
            return forward(*args, **kwargs)

        part.forward = told  # type: ignore[method-assign]
        yield
        del part.forward
        return
    handle = getattr(part, way)(lambda *_: tell())
    yield
    handle.remove()
