"""Blocks that go in one call of C++ (layers/one_call.py): without it for a while, and whether it was taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor, nn

from infuse.layers.block import Block
from infuse.layers.one_call import BlockCall


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
