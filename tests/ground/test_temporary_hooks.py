"""No hook of ours is left on a model, however what placed it ends."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import infuse
from infuse.generate.direct import DirectSteps
from infuse.ground.temporary_hooks import TemporaryHooks
from tests.models.families import BY_NAME, inputs


def hooks_of(model: nn.Module) -> list[tuple[str, str, int]]:
    """How many hooks, and settings of hooks, each module holds, by path and kind."""
    return [
        (path, name, len(value))
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name.startswith(("_forward_hooks", "_forward_pre_hooks")) and value
    ]


class Stop(Exception):
    pass


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Registering a hook raises once, as its n-th call, with the hook in place. The list counts down to it."""
    left = [-1]
    for name in ("register_forward_hook", "register_forward_pre_hook"):
        own = getattr(nn.Module, name)

        def register(self: Any, *args: Any, own: Any = own, **kwargs: Any) -> Any:
            handle = own(self, *args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                raise Stop
            return handle

        monkeypatch.setattr(nn.Module, name, register)
    yield left


@pytest.mark.slow
@pytest.mark.parametrize(("name", "keys"), [
    ("llama", {}), ("mixtral", dict(replace_with_kernel_inject=False)), ("qwen2-moe", {}), ("bert", {}),
    ("llama", dict(dtype="bf16", replace_with_kernel_inject=False)),
], ids=str)  # fmt: skip
@torch.no_grad()
def test_a_start_that_ends_while_a_hook_is_placed(name: str, keys: dict[str, Any], refusing: list[int]) -> None:
    family = BY_NAME[name]
    original: Any = family.make()
    given, before = inputs(family), hooks_of(original)
    wanted = original(**given)[0]
    at = ended = 0
    while True:
        at += 1
        model = copy.deepcopy(original)
        refusing[0] = at
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                infuse.init_inference(model, progress=False, **{"dtype": "fp32", **keys})
            except Stop:
                ended += 1
        placed, refusing[0] = refusing[0] <= 0, -1
        assert hooks_of(model) == before
        atol = 1e-4 if keys.get("dtype") is None else 0.1
        torch.testing.assert_close(model(**given)[0].float(), wanted, rtol=0, atol=atol * float(wanted.abs().max()))
        if not placed:  # no hook is left to refuse
            break
    assert at > 3


@torch.no_grad()
def test_steps_profiles_and_times_that_end_while_a_hook_is_placed(refusing: list[int]) -> None:
    family = BY_NAME["llama"]
    engine = infuse.init_inference(family.make(), dtype="fp32", progress=False)
    given, before = inputs(family), hooks_of(engine.module)
    wanted = engine.generate(**given, max_new_tokens=4)
    for at in (1, 2, 3):
        for run in (lambda: engine.profile().__enter__(), engine.profile_model_time):
            refusing[0] = at
            try:
                run()
            except Stop:
                assert hooks_of(engine.module) == before
            refusing[0] = -1
            if engine._times is not None:
                engine._times.stop()
                engine._times = None
        engine.module._infuse.direct.proven = False
        refusing[0] = at
        with pytest.raises(Stop):
            engine.generate(**given, max_new_tokens=4)
        assert hooks_of(engine.module) == before
        refusing[0] = -1
        assert torch.equal(engine.generate(**given, max_new_tokens=4), wanted)
    assert isinstance(engine.module._infuse.direct, DirectSteps)


def test_a_hook_that_a_module_keeps_elsewhere_does_nothing_afterwards() -> None:
    kept: list[Any] = []

    class Keeps(nn.Linear):
        def register_forward_hook(self, hook: Any, **how: Any) -> Any:  # type: ignore[override]
            kept.append(hook)

    module, called = Keeps(2, 2), []
    with TemporaryHooks() as hooks:
        hooks.after(module, lambda *args: called.append(args))
        kept[0](module, (), None)
        assert len(called) == 1
    assert kept[0](module, (), None) is None and len(called) == 1
