"""Every body of every op against its reference over the op's own cases; the registrations; the choice of a body.

The registrations are enumerated: a body or an op that is added is tested without a line here. What the references mean
is tested in test_by_hand.py.
"""

from __future__ import annotations

import math
import os
import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from infuse import ops
from infuse.ground.device import Device
from infuse.ground.errors import ConfigError
from infuse.ops import HELD, PREFERENCE, REFERENCE, Case, Op, registered
from tests.ops.other_sizes import RECURRENT, assert_other_sizes_are_those_of_the_reference
from tests.ops.recurrence import assert_damage_stays_in_its_heads
from tests.ops.strides import own, planted
from tests.support.op_cases import assert_unchanged, cases, in_float32, results, widened, written
from tests.support.prepared import run_body
from tests.support.tolerance import assert_near, assert_same_quantization

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = sorted(registered())
BODIES = [(name, body) for name in OPS for body in registered()[name].bodies if body != REFERENCE]


def runs(name: str, body: str, dtype: torch.dtype) -> None:
    """Skip the test where the body cannot run here, with its own reason."""
    reason = registered()[name].bodies[body].needs(Device.of("cpu"), dtype)
    if reason is not None:
        pytest.skip(f"{body}: {reason or 'the op leaves this dtype to other bodies'}")


def times_of(case: Case) -> int:
    """Of the tolerance: act(gate) * up has the roundings of both."""
    return 2 if " gated" in case.label else 1


def compare(name: str, body: str, case: Case, dtype: torch.dtype) -> None:
    op, mutated = registered()[name], written(name)
    given = own(case.args, mutated)
    measure = own(given, [])
    if "experts" in name:  # two products in a row: in 16 bits the reference rounds between them, which bodies need not
        measure = in_float32(measure, dtype)
    try:
        wanted = results(op.reference, measure, mutated)
    except ConfigError as refusal:
        with pytest.raises(ConfigError, match=f"^{re.escape(str(refusal))}$"):
            op.body(body)(*given)
        return
    function, given = op.prepared(body, given)
    found = results(function, given, mutated)
    assert len(found) == len(wanted)
    if name == "quantize":
        assert_same_quantization(found, wanted, *given, f"{body}, {case.label}")
        return
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == (dtype if "experts" in name else b.dtype), case.label
        assert_near(a, b, dtype, f"{name}, {body}, {case.label}", times_of(case))
    _, before_all = op.prepared(body, case.args)
    for i, (before, after) in enumerate(zip(before_all, given, strict=True)):
        if i not in mutated:
            assert_unchanged(before, after, f"{case.label}: argument {i} was changed")


# ---- bodies against references ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "body"), BODIES)
def test_body_is_the_reference(name: str, body: str, dtype: torch.dtype) -> None:
    runs(name, body, dtype)
    # Fresh values each time; once at lower levels, where cpu/test_attention.py runs this.
    for _ in range(1 if "INFUSE_CPU_ISA" in os.environ else 2):
        for case in cases(name, dtype):
            compare(name, body, case, dtype)


# Bodies whose functions are PyTorch's and not as strict as the reference, see test_damage_stays_in_its_row_and_head,
# and those that compute several tokens at once, of which the earlier ones multiply a later one's infinity by zero, see
# test_damage_in_linear_attention_stays_in_its_row_and_head.
NOT_STRICT = {("attention", "torch"), ("group_norm", "torch"), ("linear_attention", "torch")}
NOT_STRICT_IN_INFINITY = {("linear_attention", "cpu")}
NOT_FINITE = pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)


WIDE = ("linear", "quantized_linear", "experts", "quantized_experts", "router", "rms_norm", "layer_norm")


@pytest.mark.parametrize(("name", "body"), [each for each in BODIES if each[0] in WIDE])
def test_an_input_of_another_width_is_refused(name: str, body: str) -> None:
    """A kernel that took the rest of a row from the next one, or from beyond the tensor, would say nothing."""
    runs(name, body, torch.float32)
    for case in cases(name, torch.float32):
        function, (x, *more) = registered()[name].prepared(body, case.args)
        if x.shape[-1] < 2 or not x.numel() or (name.endswith("norm") and more[0] is None):
            continue
        if function is registered()[name].reference:  # the body's layout declines the weight
            continue
        for other in (x[..., :-1], x[..., : x.shape[-1] // 2], x.repeat_interleave(2, -1)):
            with pytest.raises((RuntimeError, ValueError, AssertionError)):
                function(other.contiguous(), *more)


@pytest.mark.parametrize(("name", "body"), [each for each in BODIES if each[0] in RECURRENT])
def test_arguments_of_another_size_are_refused_or_taken_as_in_the_reference(name: str, body: str) -> None:
    """A kernel that read beyond a tensor would say nothing, or end the process."""
    runs(name, body, torch.float32)
    assert_other_sizes_are_those_of_the_reference(name, registered()[name].body(body), cases(name, torch.float32))


@pytest.mark.parametrize("body", registered()["gated_norm"].bodies)
def test_without_a_weight_the_width_does_not_matter(body: str) -> None:
    runs("gated_norm", body, torch.float32)
    x, gate = torch.randn(2, 3, 40), torch.randn(2, 3, 40)
    for width in (0, 7, 40, 80):
        found = ops.gated_norm.body(body)(x, gate, None, width, 0.0, True, True)
        assert_near(found, x * gate.sigmoid(), torch.float32, f"width {width}")


@NOT_FINITE
@pytest.mark.parametrize(("name", "body"), [pair for pair in BODIES if pair not in NOT_STRICT])
def test_what_is_not_finite_passes_through_as_in_the_reference(name: str, body: str, value: float) -> None:
    runs(name, body, torch.float32)
    if (name, body) in NOT_STRICT_IN_INFINITY and not math.isnan(value):
        pytest.skip("infinity may become NaN where several tokens are computed at once")
    for _, case in planted(name, value):
        if "gelu" in case.label and body not in HELD:  # those take PyTorch's own activation
            # PyTorch's gelu of infinity is NaN in float32 tensors and infinity, as it should be, in float64: that is
            # the measure here.
            wanted = registered()[name].reference(*widened(case.args)).float()
            assert_near(run_body(name, body, *case.args), wanted, torch.float32, case.label)
            continue
        compare(name, body, case, torch.float32)


@NOT_FINITE
def test_damage_stays_in_its_row_and_head(value: float) -> None:
    """PyTorch's attention on CPUs gives zeros for a NaN query without a mask, and adds -inf to hidden scores, which NaN
    survives.

    What belongs to other rows of the batch and to heads of another key head is as in the reference all the same.
    """
    for i, case in planted("attention", value):
        if i < 3:
            heads, kv_heads = case.args[0].shape[1], case.args[1].shape[1]
            wanted, found = (ops.attention.body(body)(*case.args) for body in (REFERENCE, "torch"))
            assert_near(found[:-1], wanted[:-1], torch.float32, case.label)
            others = slice(0, heads - heads // kv_heads)
            assert_near(found[-1, :, others], wanted[-1, :, others], torch.float32, case.label)


@NOT_FINITE
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("body", registered()["linear_attention"].bodies)
def test_damage_in_linear_attention_stays_in_its_row_and_head(
    body: str, by_channel: bool, delta: bool, value: float
) -> None:
    runs("linear_attention", body, torch.float32)
    function = ops.linear_attention.body(body)
    for tokens in (1, 9, 70):
        assert_damage_stays_in_its_heads(function, value, tokens, delta=delta, by_channel=by_channel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_reference_in_16_bits_is_the_reference_in_float32_rounded(name: str, dtype: torch.dtype) -> None:
    op, mutated = registered()[name], written(name)
    for case in cases(name, dtype):
        given = own(case.args, mutated)
        wide = in_float32(given, dtype)
        found, wanted = results(op.reference, given, mutated), results(op.reference, wide, mutated)
        for a, b in zip(found, wanted, strict=True):
            expected = dtype if b.is_floating_point() and name != "quantize" else b.dtype
            if name == "decay" or (name in ("linear_attention", "selective_scan") and b is wanted[1]):
                expected = torch.float32  # decays and states
            assert a.dtype == expected, case.label
            assert_near(a, b, dtype, f"{name}, {case.label}", times_of(case))


@pytest.mark.parametrize("body", registered()["rotary_append"].bodies)
def test_append_writes_its_own_tokens_and_nothing_else(body: str) -> None:
    runs("rotary_append", body, torch.float32)
    for case in cases("rotary_append", torch.float32):
        args = own(case.args, [3, 4])
        registered()["rotary_append"].body(body)(*args)
        start, end = args[5], args[5] + args[0].shape[1]
        for storage in args[3:5]:
            assert torch.isfinite(storage[:, :, start:end]).all(), case.label
            others = torch.cat((storage[:, :, :start], storage[:, :, end:]), dim=2)
            assert (others.isnan() if others.is_floating_point() else others == 77).all(), case.label


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("body", registered()["rotary_append"].bodies)
def test_append_at_a_place_in_a_tensor(body: str, dtype: torch.dtype) -> None:
    runs("rotary_append", body, dtype)
    for case in cases("rotary_append", dtype):
        wanted = results(ops.rotary_append.reference, own(case.args, [3, 4]), [3, 4])
        for start in (torch.tensor(case.args[5]), torch.tensor([case.args[5]])):
            args = own(case.args, [3, 4])
            found = results(registered()["rotary_append"].body(body), (*args[:5], start, *args[6:]), [3, 4])
            for a, b in zip(found, wanted, strict=True):
                assert_near(a, b, dtype, case.label)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("body", registered()["attention"].bodies)
def test_attention_over_the_first_keys_of_a_storage(body: str, dtype: torch.dtype) -> None:
    """As many as a tensor says: what the others hold, and mask and bias over them, does not matter."""
    runs("attention", body, dtype)
    for case in cases("attention", dtype):
        length, more = case.args[1].shape[2], 3
        unused = float("nan") if case.args[1].is_floating_point() else -1  # rows of -1 have NaN as their scale
        k, v = (F.pad(tensor, (0, 0, 0, more), value=unused) for tensor in case.args[1:3])
        mask, bias = (None if tensor is None else F.pad(tensor, (0, more), value=1) for tensor in case.args[3:5])
        args = (case.args[0], k, v, mask, bias, *case.args[5:])
        found = registered()["attention"].body(body)(*args, length=torch.tensor([length]))
        assert_near(found, ops.attention.reference(*case.args), dtype, case.label)


# ---- registrations ----


@pytest.mark.parametrize("name", OPS)
def test_op_is_complete(name: str) -> None:
    op = registered()[name]
    assert op.name == name and hasattr(torch.ops.infuse, name)
    assert op.bodies[REFERENCE].function is op.reference
    assert set(op.bodies) <= set(PREFERENCE)
    assert op.fake_function is not None and op.__doc__
    made = cases(name, torch.float32)
    assert made and len({case.label for case in made}) == len(made), "each case has a label of its own"
    arguments = getattr(torch.ops.infuse, name).default._schema.arguments
    assert arguments[-1].name == "body" and all(len(case.args) == len(arguments) - 1 for case in made)
    assert arguments[-1].kwarg_only


def test_preference_ends_with_the_reference() -> None:
    assert PREFERENCE[-1] == REFERENCE and len(set(PREFERENCE)) == len(PREFERENCE)


@pytest.mark.parametrize(("name", "body"), [*BODIES, *((name, REFERENCE) for name in OPS)])
def test_registered_form(name: str, body: str) -> None:
    """Its schema is true of the body (what is written to, no result that is a view), and its fake has the body's shapes
    and strides.
    """
    runs(name, body, torch.float32)
    op, registered_form = registered()[name], getattr(torch.ops.infuse, name).default
    made = cases(name, torch.float32)
    few = {0, 1, len(made) // 2, len(made) - 1}
    for i in few:
        function, given = op.prepared(body, made[i].args)
        taken = body if function is op.body(body) else REFERENCE  # the body's layout may decline the weight
        tests = {} if i == 1 else {"test_utils": ("test_schema", "test_faketensor")}
        torch.library.opcheck(registered_form, given, {"body": taken}, **tests)


@pytest.mark.parametrize("name", OPS)
def test_a_traced_graph_has_the_registered_form(name: str) -> None:
    """What layers hold is the body in eager mode, and in a graph one node that names it and gives what it gives."""
    graphs: list[Any] = []

    def recorded(graph: Any, given: Any) -> Any:
        graphs.append(graph.graph)
        return graph.forward

    case, bound, mutated = cases(name, torch.float32)[1], registered()[name].bound(REFERENCE), written(name)
    found = results(
        torch.compile(lambda *args: bound(*args), fullgraph=True, backend=recorded), own(case.args, []), mutated
    )
    for a, b in zip(found, results(registered()[name].reference, own(case.args, []), mutated), strict=True):
        assert torch.equal(a, b)
    (node,) = (node for node in graphs[0].nodes if "infuse" in str(node.target))
    assert node.target is getattr(torch.ops.infuse, name).default and node.kwargs["body"] == REFERENCE
    again = pickle.loads(pickle.dumps(bound))
    assert again._function is bound._function is registered()[name].reference


# ---- the choice of a body ----

SMALL = Device("cpu", None, "a small CPU", ("avx2",), 2**30, DTYPES)


def private_op() -> Op:
    """An op that is in no registry."""

    def reference(x: Tensor) -> Tensor:
        """Twice x."""
        return x * 2

    return Op("twice(Tensor x) -> Tensor", reference)


def test_who_declines_is_listed_and_the_next_is_taken() -> None:
    op = private_op()
    op.implement("torch")(lambda x: x + x)
    op.implement("cpu", lambda device, dtype: None if "amx_bf16" in device.features else "needs amx_bf16")(lambda x: x)
    op.implement("triton", lambda device, dtype: None if device.kind == "cuda" else f"needs a GPU, not {device.name}")(
        lambda x: x
    )
    choice = op.choose(SMALL, torch.float32)
    assert choice.op == "twice" and choice.body == "torch"
    assert choice.declined == (("triton", "needs a GPU, not a small CPU"), ("cpu", "needs amx_bf16"))
    assert op.choose(replace(SMALL, features=("amx_bf16",)), torch.float32).body == "cpu"
    assert op.choose(replace(SMALL, kind="cuda"), torch.float32).declined == ()
    assert op.body("torch")(torch.ones(1)).item() == 2 == op(torch.ones(1)).item()


def test_the_reference_is_taken_where_all_decline() -> None:
    op = private_op()
    op.implement("torch", lambda device, dtype: f"not in {dtype}" if dtype == torch.float16 else None)(lambda x: x + x)
    assert op.choose(SMALL, torch.float16) == ops.Choice("twice", REFERENCE, (("torch", "not in torch.float16"),))
    assert op.choose(SMALL, torch.bfloat16).body == "torch"


def test_a_body_outside_the_order_of_preference_is_refused() -> None:
    with pytest.raises(AssertionError, match="order of preference"):
        private_op().implement("cuda")
