"""Graphs of a callable, on a recorder that keeps and loses what a CUDA graph does: values, copies, keys, eviction,
fallback.
"""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from infuse.graphs.capture import FilledNumbers, backend_for
from infuse.graphs.runner import GraphRunner, LocalGraph, WeightAddresses
from infuse.graphs.signature import Unsupported, blank, rebuilt, signature
from infuse.ground.modes import Transparent
from tests.support.fake_graph import FakeBackend

Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    value: Tensor
    name: str


def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor + 1


def random(*shape: int) -> Tensor:
    return torch.randn(*shape)


# ---- the recorder itself: a fake that forgave mistakes would let them pass


def test_a_capture_runs_nothing() -> None:
    state, x = torch.zeros(3), torch.ones(3)
    before = torch.get_rng_state()

    def run() -> Tensor:
        state.add_(x)
        return torch.rand(3) + state

    captured, result = FakeBackend().capture(run)
    assert torch.equal(state, torch.zeros(3)) and torch.equal(torch.get_rng_state(), before)
    assert result.isnan().all(), "results hold nothing before the first replay"
    captured.replay()
    captured.replay()
    assert torch.equal(state, torch.full((3,), 2.0)) and not result.isnan().any()


@pytest.mark.parametrize("reads", [
    lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x[x > 0], lambda x: torch.equal(x, x),
    lambda x: x + torch.tensor([1.0, 2.0, 3.0]), lambda x: x.nonzero(),
])  # fmt: skip
def test_what_needs_the_host_cannot_be_captured(reads: Callable) -> None:
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        FakeBackend().capture(lambda: reads(torch.ones(3)))


def assigned(x: Tensor, value: Any, axes: int = 1) -> Tensor:
    x = x * 1.0
    mask = x > 0 if axes == x.dim() else x.flatten(axes).sum(-1) > 0
    x[mask] = value
    return x


@pytest.mark.parametrize(
    ("value", "axes"), [(5.0, 1), (2, 2), (torch.tensor(7.0), 2), (torch.arange(3.0), 1), (torch.ones(1), 1)]
)
def test_one_value_may_be_assigned_under_a_mask(value: Any, axes: int) -> None:
    runner = GraphRunner(assigned, FakeBackend())
    for seed in range(5):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(runner(x, value, axes), assigned(x, value, axes))
    assert len(runner.backend.captures) == 1


def test_rows_for_the_places_of_a_mask_are_assigned_without_a_graph() -> None:
    runner = GraphRunner(assigned, backend := FakeBackend())
    rows = torch.arange(6.0).view(2, 3)
    x = torch.tensor([[1.0, 1, 1], [-1, -1, -1], [2, 2, 2]])
    with pytest.warns(UserWarning, match="index_put_ is not permitted"):
        for _ in range(4):
            assert torch.equal(runner(x, rows), torch.tensor([[0.0, 1, 2], [-1, -1, -1], [3, 4, 5]]))
    assert not backend.captures


def test_what_is_frozen_in_a_capture_stays_frozen() -> None:
    """Guards the tests below: a number of the host that changes is not seen by a replay."""
    factor = [1.0]
    x = torch.ones(2)
    captured, result = FakeBackend().capture(lambda: x * factor[0])
    factor[0] = 5.0
    captured.replay()
    assert torch.equal(result, torch.ones(2))


# ---- values


def test_each_call_gets_its_own_values() -> None:
    backend = FakeBackend()
    graphs = GraphRunner(scaled, backend)
    given = [random(2, 3) for _ in range(7)]
    found = [graphs(x) for x in given]  # all are kept: a later call must not write to an earlier result
    for x, result in zip(given, found, strict=True):
        assert torch.equal(result, scaled(x))
    assert len(backend.captures) == 1 and backend.replays == 5 and graphs.captured() == 1


def test_what_a_caller_does_to_a_result_or_an_argument_stays_with_the_caller() -> None:
    graphs = GraphRunner(scaled, FakeBackend())
    x = random(4)
    for _ in range(4):
        result = graphs(x)
        result.fill_(-1)
        x.add_(1)
        assert torch.equal(graphs(x), scaled(x))


def test_results_that_are_arguments_or_weights_are_copies() -> None:
    weight = random(3)
    graphs = GraphRunner(lambda x: (x, weight, x[:1]), FakeBackend())
    for _ in range(4):
        x = random(3)
        found = graphs(x)
    assert torch.equal(found[0], x) and torch.equal(found[1], weight) and torch.equal(found[2], x[:1])
    found[1].zero_()
    assert bool(weight.any())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_of_autograd(mode: Callable) -> None:
    graphs = GraphRunner(scaled, FakeBackend())
    x = random(3)
    for _ in range(3):  # captured in another mode than it is replayed in
        graphs(x)
    with mode():
        y = random(3)
        assert torch.equal(graphs(y), scaled(y))
        assert not graphs(y).requires_grad


def test_random_numbers_go_on() -> None:
    graphs = GraphRunner(lambda x: x + torch.rand(3), FakeBackend())
    torch.manual_seed(3)
    found = [graphs(torch.zeros(3)) for _ in range(2)]
    warmed = torch.get_rng_state()
    drawn = [graphs(torch.zeros(3)) for _ in range(3)]
    assert len({tuple(x.tolist()) for x in (*found, *drawn)}) == 5
    assert not torch.equal(torch.get_rng_state(), warmed)


# ---- keys


def test_structures_come_back_as_they_were() -> None:
    def function(batch: dict[str, Any], pair: Pair, *, name: str) -> Any:
        x = batch["x"][0]
        record = Record(x * 2, name)
        return {
            "output": BaseModelOutput(last_hidden_state=x + 1, hidden_states=(x, pair.second)),
            "pair": Pair(record, [x, None, 3]),
        }

    graphs = GraphRunner(function, FakeBackend())
    for _ in range(4):
        x, y = random(2), random(3)
        found = graphs({"x": [x]}, Pair(1, y), name="n")
    output, pair = found["output"], found["pair"]
    assert (
        isinstance(output, BaseModelOutput)
        and torch.equal(output.last_hidden_state, x + 1)
        and torch.equal(output[1][1], y)
    )
    assert output.attentions is None and output.to_tuple()[0] is output.last_hidden_state
    assert (
        isinstance(pair, Pair)
        and isinstance(pair.first, Record)
        and pair.first.name == "n"
        and torch.equal(pair.first.value, x * 2)
    )
    assert pair.second[1:] == [None, 3]


def test_what_tells_calls_apart() -> None:
    backend = FakeBackend()
    graphs = GraphRunner(lambda x, k=None: x.float() * (2 if k is True else 1), backend)
    calls: list[tuple[Any, Any]] = [
        (torch.ones(2, 3), True), (torch.ones(2, 3), 1), (torch.ones(2, 3), 1.0), (torch.ones(3, 2), 1),
        (torch.ones(3, 2).T, 1), (torch.ones(2, 3, dtype=torch.long), 1), (torch.ones(2, 3), "1"),
        (torch.ones(2, 3), None), (torch.ones(2, 3), [1]), (torch.ones(2, 3), (1,)), (torch.ones(2, 3), {"k": 1}),
        (torch.ones(2, 3), slice(1)), (torch.ones(2, 3), torch.float16),
    ]  # fmt: skip
    for x, k in calls * 3:
        assert torch.equal(graphs(x, k=k), x.float() * (2 if k is True else 1))
    assert len(backend.captures) == len(calls)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: random(3, 4).T,
    "every second column": lambda: random(4, 6)[:, ::2],
    "expanded": lambda: random(1, 4).expand(3, 4),
    "axis of one": lambda: random(2, 1, 3).transpose(0, 1),
    "empty": lambda: random(0, 3),
    "number": lambda: torch.tensor(2.0),
    "overlapping": lambda: random(24).as_strided((4, 4), (2, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    backend = FakeBackend()
    graphs = GraphRunner(lambda x: x.reshape(-1) * 3, backend)
    for _ in range(4):
        x = LAYOUTS[layout]()
        assert blank(x).shape == x.shape
        assert torch.equal(graphs(x), x.reshape(-1) * 3)
    assert len(backend.captures) == 1


def test_axes_of_one_have_no_stride() -> None:
    x = torch.ones(4, 1, 3)
    odd = x.as_strided((4, 1, 3), (3, 77, 1))
    assert signature(x, []) == signature(odd, [])


def test_a_signature_lists_tensors_in_the_order_that_puts_them_back() -> None:
    value = ({"b": torch.ones(1), "a": [torch.zeros(2), (torch.full((3,), 2.0),)]}, torch.ones(4))
    tensors: list[Tensor] = []
    signature(value, tensors)
    again = rebuilt(value, iter(tensors))
    assert torch.equal(again[0]["a"][1][0], value[0]["a"][1][0]) and list(again[0]) == ["b", "a"]  # type: ignore[index]
    with pytest.raises(Unsupported, match="DynamicCache"):
        signature([DynamicCache()], [])


# ---- what is not captured


def fallback(function: Callable, *args: Any, calls: int = 5) -> tuple[FakeBackend, list[str]]:
    backend = FakeBackend()
    graphs = GraphRunner(function, backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            found = graphs(*args)
    assert repr(found) == repr(function(*args))
    assert not backend.captures and graphs.captured() == 0
    return backend, [str(warning.message) for warning in caught]


def test_a_failed_capture_runs_as_it_is_and_says_so_once() -> None:
    backend, said = fallback(lambda x: x * 2 if x.sum() > 0 else x, torch.ones(2))
    assert len(said) == 1 and "is not permitted when stream is capturing" in said[0] and backend.warmed == 1


def test_the_warning_names_the_line() -> None:
    backend = FakeBackend(fail=RuntimeError("operation not permitted when stream is capturing"))
    graphs = GraphRunner(scaled, backend)
    with pytest.warns(UserWarning, match=r"stream is capturing \(at fake_graph.py:\d+ in capture: raise self.fail\)"):
        for _ in range(3):
            graphs(torch.ones(2))
    backend.fail = None
    assert torch.equal(graphs(torch.ones(2)), scaled(torch.ones(2))) and not backend.captures, "it was tried before"
    for _ in range(3):
        graphs(torch.ones(3))
    assert len(backend.captures) == 1, "other signatures are tried"


def test_arguments_changed_in_place() -> None:
    backend = FakeBackend()
    graphs = GraphRunner(lambda x: x.add_(1), backend)
    x = torch.zeros(2)
    with pytest.warns(UserWarning, match="changes its arguments in place"):
        for _ in range(5):
            graphs(x)
    assert torch.equal(x, torch.full((2,), 5.0))


@pytest.mark.parametrize(
    "function, argument",
    [
        (lambda c: c.get_seq_length(), DynamicCache()),
        (lambda x: object, torch.ones(1)),
        (lambda x: (x, DynamicCache()), torch.ones(1)),
    ],
)
def test_what_a_key_cannot_describe_runs_as_it_is(function: Callable, argument: Any) -> None:
    backend, graphs = FakeBackend(), GraphRunner(function, FakeBackend())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            graphs(argument)
    assert not backend.captures


# ---- memory


def test_the_least_recently_used_goes_first() -> None:
    backend = FakeBackend()
    graphs = GraphRunner(scaled, backend, limit_graphs=2)

    def call(n: int) -> None:
        x = random(n)
        assert torch.equal(graphs(x), scaled(x))

    for n in (1, 2):
        for _ in range(3):
            call(n)
    call(1)
    for _ in range(3):
        call(3)  # 2 goes
    assert graphs.captured() == 2 and len(backend.captures) == 3
    call(1)
    assert len(backend.captures) == 3
    for _ in range(3):
        call(2)
    assert len(backend.captures) == 4 and graphs.captured() == 2


def test_the_bound_on_memory() -> None:
    graphs = GraphRunner(scaled, FakeBackend(), limit_bytes=40_000)
    for n in (1000, 1001, 1002, 1003):
        for _ in range(3):
            x = random(n)
            assert torch.equal(graphs(x), scaled(x))
    assert 0 < graphs.nbytes() <= 40_000 and graphs.captured() == 2  # 4 tensors of 4 kB each: in, twice inside, out
    for _ in range(4):
        x = random(100_000)  # larger than the bound: it alone is kept
        assert torch.equal(graphs(x), scaled(x))
    assert graphs.captured() == 1
    graphs.clear()
    assert graphs.captured() == graphs.nbytes() == 0
    assert torch.equal(graphs(x), scaled(x))


def test_lengths_that_never_come_again_capture_nothing() -> None:
    backend = FakeBackend()
    graphs = GraphRunner(scaled, backend)
    for n in range(600):
        graphs(torch.ones(n % 300))
    assert not backend.captures and len(graphs._entries) <= 256


def test_a_failed_capture_names_the_callers_line() -> None:
    """Not that of a mode in which the capture runs, which passes every call on."""

    def reads(x: Tensor) -> Tensor:
        with FilledNumbers():
            return x * 2 if x.sum().item() else x  # the line

    graphs = GraphRunner(reads, FakeBackend())
    with pytest.warns(UserWarning, match=r"no CUDA graph could be captured.*in reads: .*# the line"):
        for _ in range(3):
            graphs(torch.ones(4))


# ---- modules


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def test_weights_are_read_where_they_lie() -> None:
    model, backend = Model(), FakeBackend()
    graphs = GraphRunner(model, backend, state=WeightAddresses(model))
    x = random(2, 4)
    for _ in range(3):
        graphs(x)
    with torch.no_grad():
        model.first.weight.mul_(2)
    assert torch.equal(graphs(x), model(x)) and len(backend.captures) == 1
    model.double()
    for _ in range(3):
        assert torch.equal(graphs(x.double()), model(x.double()))
    assert len(backend.captures) == 2 and graphs.captured() == 1
    model.load_state_dict({name: torch.randn_like(p) for name, p in model.state_dict().items()})
    assert torch.equal(graphs(x.double()), model(x.double()))
    model.first.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.double))
    assert torch.equal(graphs(x.double()), model(x.double())), "another tensor took the weight's place"


def test_local_graphs_inside_a_model() -> None:
    model, backend = Model().eval(), FakeBackend()
    exact = copy.deepcopy(model)
    model.first = LocalGraph(model.first, backend)  # type: ignore[assignment]
    for _ in range(5):
        x = random(3, 4)
        assert torch.equal(model(x), exact(x))
    assert len(backend.captures) == 1
    whole = GraphRunner(model, backend)
    for _ in range(5):
        x = random(3, 4)
        assert torch.equal(whole(x), exact(x))
    assert len(backend.captures) == 2, "inside a larger graph it is a part of that"


def test_copies_capture_their_own() -> None:
    backend = FakeBackend()
    local = LocalGraph(Model(), backend)
    x = random(2, 4)
    for _ in range(4):
        local(x)
    other = copy.deepcopy(local)
    with torch.no_grad():
        other.module.last.bias.add_(5)  # type: ignore[union-attr, operator]
    for _ in range(4):
        assert torch.equal(other(x), other.module(x)) and torch.equal(local(x), local.module(x))
    assert len(backend.captures) == 2


def test_on_a_device_without_graphs() -> None:
    assert backend_for("cpu") is None and backend_for("meta") is None
    local = pickle.loads(pickle.dumps(LocalGraph(Model())))
    x = random(2, 4)
    for _ in range(4):
        assert torch.equal(local(x), local.module(x))


def test_threads_take_turns() -> None:
    graphs = GraphRunner(scaled, FakeBackend())
    wrong: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for step in range(40):
            x = torch.randn(2 + step % 3, generator=generator)
            if not torch.equal(graphs(x), scaled(x)):
                wrong.append(f"{seed}, {step}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_capture_reads_the_weights_and_not_the_copies_of_autocast() -> None:
    """Which are freed when its block ends."""
    linear, x, backend = nn.Linear(8, 8), random(2, 8), FakeBackend()
    call = GraphRunner(linear, backend)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            call(x)
        assert torch.is_autocast_cache_enabled()
    with torch.no_grad():
        linear.weight.copy_(random(8, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(x), linear(x))
    assert len(backend.captures) == 1 and backend.replays == 3


def test_numbers_are_filled_on_the_device() -> None:
    """A capture cannot copy them from the host, as torch.tensor does for a device."""
    made: list[str] = []

    class Seen(Transparent, TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            made.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    for number, dtype in ((0.5, None), (3, None), (True, None), (2, torch.bfloat16), (float("-inf"), torch.float16)):
        exact = torch.tensor(number, dtype=dtype)
        with FilledNumbers(), Seen():
            found = torch.tensor(number, dtype=dtype, device="cpu")
        assert found.dtype == exact.dtype and torch.equal(found, exact) and found.shape == ()
    assert set(made) == {"aten::full"}
    with FilledNumbers():
        assert torch.tensor([1, 2]).tolist() == [1, 2] and torch.tensor(1.0, requires_grad=True).requires_grad
