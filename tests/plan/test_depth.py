"""Depths below the whole block: a refused block falls to its linears, layers without a spec get linears and our
attention.

Bodies are stood in for where a test needs one, so that it holds on machines without a compiler as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse import native
from infuse.architectures.parts.attention import Rotary
from infuse.ground.errors import ProofError
from infuse.layers.attention import hook
from infuse.layers.block import Block
from infuse.layers.linear import Linear, QuantizedLinear
from infuse.native import build
from infuse.ops import Body, registered
from infuse.plan.kinds import ATTENTION, BLOCK, LINEAR
from infuse.plan.plan import Plan
from tests.models.families import BY_NAME, inputs
from tests.support.formerly_written import specs_for
from tests.support.plans import PLAIN, UNKNOWN, applied, outputs, plan_of
from tests.support.tolerance import assert_near

pytestmark = pytest.mark.usefixtures("unread")  # a spec that is broken would be replaced by a reading
PLAN = importlib.import_module("infuse.plan.decide")  # `infuse.plan` as an attribute is the function
LAYERS = {f"model.layers.{i}" for i in range(3)}
ROUNDING = 1e-5  # of the largest value: float32, other orders of summation in some ten linears


def stand_in(monkeypatch: pytest.MonkeyPatch, op: str, wrong: bool = False) -> list[str]:
    """A "cpu" body for `op`, right or wrong; returns the list of its calls."""
    calls: list[str] = []

    def body(*args: Any) -> Any:
        calls.append(op)
        out = registered()[op].reference(*args)
        return out.roll(1, -1) if wrong else out

    monkeypatch.setitem(registered()[op].bodies, "cpu", Body("cpu", body, lambda device, dtype: None))
    return calls


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= ROUNDING * float(wanted.abs().max())


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs(BY_NAME["llama"]))[0]


def refused(plan: Plan) -> set[str]:
    return {left.path for left in plan.left if left.why.startswith("refused: ")}


# ---- a refused block falls to its linears ----


@pytest.fixture
def wrong_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary pairs that lie wrongly: shapes fit, numbers do not."""
    wrong = Rotary(interleaved=True)
    monkeypatch.setattr(
        PLAN, "specs_for", lambda layer: tuple(spec.but(attn=dict(position=wrong)) for spec in specs_for(layer))
    )


@pytest.mark.parametrize("verify", ["sample", "all"])
def test_a_refused_block_falls_to_its_linears(verify: str, wrong_spec: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch, "linear")
    model = BY_NAME["llama"].make()
    wanted, names = logits(model), {name for name, module in model.named_modules() if type(module) is nn.Linear}
    done = applied(model, dtype="fp32", verify=verify)
    assert {step.depth for step in done.steps} == {LINEAR}
    assert {step.path for step in done.steps} == names
    assert len(names) == 22
    assert refused(done) == LAYERS and not any(isinstance(module, Block) for module in model.modules())
    assert all(isinstance(model.get_submodule(name), Linear) for name in names)
    calls.clear()
    assert_close(logits(model), wanted)
    assert len(calls) == 22


def test_a_refused_block_falls_to_quantized_linears(wrong_spec: None) -> None:
    model = BY_NAME["llama"].make()
    wanted = logits(model)
    done = applied(model, dtype="fp32", quant="int8:16")
    assert refused(done) == LAYERS and {step.depth for step in done.steps} == {LINEAR}
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == len(done.steps) == 22
    assert 0 < float((logits(model) - wanted).norm() / wanted.norm()) < 0.06


def test_linears_that_are_wrong_too_are_refused_and_nothing_is_left(
    wrong_spec: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "linear", wrong=True)
    model = BY_NAME["llama"].make()
    wanted = logits(model)
    done = applied(model, dtype="fp32")
    assert done.steps == () and refused(done) > LAYERS and "lm_head" in refused(done)
    assert torch.equal(logits(model), wanted)


def test_the_engine_warns_of_blocks_though_linears_took_their_place(
    wrong_spec: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More linears than blocks are put in: their number must not hide what was refused."""
    stand_in(monkeypatch, "linear")
    with pytest.warns(
        UserWarning, match=r"3 of 4 replacements were refused, e\.g\. model\.layers\.0: refused: differs"
    ):
        engine = infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32", device="cpu")
    assert "0 blocks and 22 linears replaced" in engine.report()


def test_a_wrong_body_for_quantized_weights_is_refused(no_other_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(x: Tensor, buffers: list[Tensor], *rest: Any) -> Tensor:
        data, scale = buffers
        each_its_neighbours = [data, scale.roll(1, -1)]
        return registered()["quantized_linear"].reference(x, each_its_neighbours, *rest)

    model = BY_NAME["llama"].make()
    monkeypatch.setitem(registered()["quantized_linear"].bodies, "cpu", Body("cpu", body, lambda device, dtype: None))
    done = applied(model, dtype="fp32", quant="int8:16")
    assert not done.steps and "differs" in str(done)


# ---- layers without a spec ----


@pytest.mark.parametrize("name", ["long-t5", "deberta", "olmo", "sequential"])
def test_linears_of_an_unknown_model_run_through_kernels(name: str) -> None:
    """The real body where there is one: the results are the original's within rounding."""
    if reason := registered()["linear"].bodies["cpu"].needs(PLAIN, torch.float32):
        pytest.skip(reason)
    model = UNKNOWN[name]()
    wanted = outputs(model)
    done = applied(model, dtype="fp32")
    assert LINEAR in {step.depth for step in done.steps} <= {LINEAR, ATTENTION} and not refused(done)
    assert_close(outputs(model), wanted)


def attention_steps(plan: Plan) -> list[str]:
    return [step.layer for step in plan.steps if step.depth == ATTENTION]


def test_attention_goes_in_by_transformers_own_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch, "attention")
    model, other = UNKNOWN["olmo"](), UNKNOWN["olmo"]()
    wanted = outputs(model)
    done = applied(model, dtype="fp32")
    assert attention_steps(done) == [type(model).__name__] and "attention of layers that stay" in str(done)
    assert model.config._attn_implementation == "infuse_cpu" and other.config._attn_implementation == "sdpa"
    calls.clear()
    assert_close(outputs(model), wanted)
    assert len(calls) == 2, "one call in each of its layers"
    calls.clear()
    outputs(other)
    assert not calls, "a model that did not ask keeps its own"


def test_tokens_generated_with_the_hook_are_the_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows, a cache, one query against many keys."""
    calls = stand_in(monkeypatch, "attention")
    given = inputs(BY_NAME["llama"], padding="left")
    exact = UNKNOWN["olmo"]().generate(**given, max_new_tokens=6, do_sample=False)
    engine = infuse.init_inference(UNKNOWN["olmo"](), dtype="fp32", device="cpu")
    assert len(attention_steps(engine.plan)) == 1
    calls.clear()
    assert torch.equal(engine.generate(**given, max_new_tokens=6, do_sample=False), exact) and calls


@pytest.mark.parametrize("verify", ["sample", "strict"])
def test_a_wrong_attention_is_refused(verify: str, no_other_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "attention", wrong=True)
    model = UNKNOWN["olmo"]()
    wanted = outputs(model)
    if verify == "strict":
        with pytest.raises(ProofError, match="the model differs from itself"):
            applied(model, dtype="fp32", verify=verify)
    else:
        done = applied(model, dtype="fp32", verify=verify)
        assert done.steps == () and refused(done) == {""} and "the model differs from itself by" in str(done)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(outputs(model), wanted)


def test_an_attention_that_the_model_never_calls_is_refused(
    no_other_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the plan would tell of a kernel that does nothing."""
    stand_in(monkeypatch, "attention")
    monkeypatch.setattr(hook, "_KNOWN", set())  # every argument is a reason to go to transformers'
    model = UNKNOWN["olmo"]()
    done = applied(model, dtype="fp32")
    assert done.steps == () and refused(done) == {""} and "does not come through it" in str(done)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (UNKNOWN["long-t5"], {}),
        (UNKNOWN["deberta"], {}),
        (UNKNOWN["sequential"], {}),
        (BY_NAME["llama"].make, {}),
        (UNKNOWN["olmo"], dict(replace_with_kernel_inject=False)),
    ],
    ids=["long-t5", "deberta", "no model of transformers", "every layer a block", "not asked for"],
)
def test_no_hook_where_there_is_nothing_to_hook(
    make: Callable, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "attention")
    assert attention_steps(plan_of(make(), dtype="fp32", **keys)) == []


def test_no_hook_for_another_attention_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "attention")
    model = UNKNOWN["olmo"]()
    model.set_attn_implementation("eager")
    assert attention_steps(plan_of(model, dtype="fp32")) == []


# ---- no kernels: the plan says why ----


@pytest.fixture
def no_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernels", lambda: "not built here")


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """`kernels` remembers its answer."""
    native.kernels.cache_clear()
    yield
    native.kernels.cache_clear()


@pytest.mark.parametrize(
    ("isa", "binary", "reason"),
    [
        ("off", None, "INFUSE_CPU_ISA=off"),
        ("", "absent.so", "the C++ kernels are not built: INFUSE_BUILD=0"),
        ("", "broken.so", "the C++ kernels do not load: "),
        ("", "older.so", "older.so was built from other sources than these"),
    ],
)
def test_kernels_that_cannot_run_decline(
    isa: str, binary: str | None, reason: str, asked_anew: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All bodies in C++ decline with the reason, and the model works without them."""
    monkeypatch.setenv("INFUSE_CPU_ISA", isa)
    if binary is not None:
        monkeypatch.setenv("INFUSE_BUILD", "0")
        monkeypatch.setenv("INFUSE_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(native, "BINARY", tmp_path / binary)
        (tmp_path / "older.so").write_bytes(f"no library, {build.MARK}0123456789abcdef".encode())
        (tmp_path / "broken.so").write_bytes(f"no library, {build.MARK}{build.sources()}".encode())
    model = BY_NAME["llama"].make()
    wanted = logits(model)
    done = applied(model, dtype="fp32")
    declined = {name: why for name, body, why in done.declined if body == "cpu"}
    assert {"linear", "rms_norm", "add_rms_norm"} <= set(declined)
    assert all(why.startswith(reason) for why in declined.values())
    assert not any(body == "cpu" for step in done.steps for _, body in step.bodies)
    assert f"declined  cpu, for {', '.join(sorted(declined))}: {reason}" in str(done)
    assert [step.depth for step in done.steps] == [BLOCK] * 3
    assert_near(logits(model), wanted, torch.float32)


def test_a_model_that_is_one_linear_stays() -> None:
    model = nn.Linear(8, 8)
    plan = infuse.plan(model, dtype=torch.float32)
    assert not plan.steps and "itself" in plan.left[0].why
