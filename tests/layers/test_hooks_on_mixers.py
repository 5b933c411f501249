"""Hooks on a mixer with states get what the original's get: its class's result, a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse.layers.recurrent.convolved import Recurrent
from tests.models.families import BY_NAME
from tests.support.side_by_side import logits
from tests.support.states import NAMES, close, ids_of


def mixers(engine: Any) -> list[str]:
    return [path for path, module in engine.module.named_modules() if isinstance(module, Recurrent)]


def halved(_: nn.Module, __: Any, out: Any) -> Any:
    return (out[0] * 0.5, *out[1:]) if isinstance(out, tuple) else out * 0.5


@pytest.mark.parametrize("name", NAMES)
def test_hooks_on_mixers(name: str) -> None:
    original, ids = BY_NAME[name].make(), ids_of(name)
    engine = infuse.init_inference(BY_NAME[name].make(), dtype="fp32", progress=False)
    paths = mixers(engine)
    assert paths
    before = BY_NAME[name].make()
    for path in paths:
        before.get_submodule(path).register_forward_hook(halved)
    hooked = infuse.init_inference(before, dtype="fp32", progress=False)
    assert mixers(hooked) == paths, "a hook that changes the result leaves the layer a block"
    seen: list[list[type]] = [[], []]
    for model, kinds in zip((original, engine.module), seen, strict=True):
        for path in paths:
            hear = model.get_submodule(path).register_forward_hook
            hear(lambda _, __, out, kinds=kinds: kinds.append(type(out)))
            hear(halved)
    exact = logits(original, input_ids=ids, use_cache=False)
    for model in (hooked, engine):
        close(logits(model, input_ids=ids, use_cache=False), exact)
    assert seen[0] == seen[1] and set(seen[0]) == {Tensor if name != "kimi_linear" else seen[0][0]}
    plain = logits(BY_NAME[name].make(), input_ids=ids, use_cache=False)
    assert not torch.allclose(plain, exact), "the hooks change nothing"
