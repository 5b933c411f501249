"""A trace has every operation whole, with the sizes that vary as variables; what it cannot show, it names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infuse.ground.errors import SpecMismatch
from infuse.reading import sizes
from infuse.reading.calls import LayerCall
from infuse.reading.graph import Numbers, op_name
from infuse.reading.trace import NO_LAYER, traced

BATCH, TOKENS, WIDTH = 5, 13, 8


class Doubles(nn.Module):
    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        return hidden * 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device="meta")
        self.inner = Doubles()

    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        batch, tokens, width = hidden.shape
        heads = self.linear(hidden).view(batch, tokens, 2, width // 2).transpose(1, 2)
        scores = heads @ heads.transpose(-1, -2)
        mixed = scores.softmax(-1) @ heads
        return self.inner(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Dict(dict):
    """A dict of a class of its own, which PyTorch does not look into."""


class Attributes:
    seen = 0


class Writes(Layer):
    """Leaves something in what it is given."""

    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        for value in given.values():
            if isinstance(value, dict):
                value["last"] = hidden
            elif isinstance(value, list):
                value.append(hidden)
            elif isinstance(value, Attributes):
                vars(value)["seen"] = hidden
        return super().forward(hidden)


class ReadsWhatIsLeft(Layer):
    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        return super().forward(hidden) + given["shared"]["last"]


class AsksForTokens(Layer):
    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        return super().forward(hidden if hidden.shape[1] < 4096 else -hidden)


class Compares(Layer):
    """What `compare` makes of the numbers of texts and tokens is a bool, as operations want it, or a branch."""

    def __init__(self, compare: Callable[[Any, Any], Any]):
        super().__init__()
        self.compare = compare

    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        batch, tokens, _ = hidden.shape
        return super().forward(torch.dropout(hidden, 0.5, self.compare(batch, tokens)))


class Merges(nn.Module):
    """Four tokens become one, as in mergers of patches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH, device="meta"), nn.Linear(4 * WIDTH, WIDTH, device="meta")

    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        return self.linear(self.norm(hidden).view(-1, 4 * WIDTH))


class InWindows(Layer):
    """Returns as many tokens as a window has, of one window for each four tokens."""

    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        tokens = hidden.shape[1]
        return super().forward(hidden)[:, : tokens // (tokens // 4)]


class MovesToNumbers(Layer):
    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        return super().forward(hidden) * len(hidden[0, 0].tolist())


def call(varies: bool = True, **arguments: Any) -> LayerCall:
    hidden = torch.empty(BATCH, TOKENS, WIDTH, device="meta")
    return LayerCall("a prompt", hidden, arguments, sizes_vary=varies)


@pytest.mark.parametrize("varies", [True, False])
def test_the_graph_computes_what_the_layer_does_at_other_sizes(varies: bool) -> None:
    graph, _ = traced(Layer(), call(varies))
    names = [op_name(node) for node in graph.operations()]
    assert names.count("matmul") == 2 and "linear" in names and "softmax" in names, "operations are whole"
    sizes = graph.shape(graph.hidden)
    assert sizes == ((2, 3, WIDTH) if varies else (BATCH, TOKENS, WIDTH))
    layer = Layer().to_empty(device="cpu").double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    weights = {node: layer.get_parameter(name) for node, name in graph.parameters.items()}
    hidden = torch.randn(sizes, dtype=torch.float64)
    found = Numbers(graph, {graph.hidden: hidden, **weights})(graph.outputs[0])
    torch.testing.assert_close(found, layer(hidden))


def test_nodes_know_their_module_and_line() -> None:
    graph, _ = traced(Layer(), call())
    (product,) = [node for node in graph.operations() if op_name(node) == "linear"]
    (doubled,) = [node for node in graph.operations() if op_name(node) == "mul"]
    assert (graph.module(product), graph.module(doubled)) == ("linear", "inner")
    assert re.fullmatch(r" at test_trace\.py:\d+ \(from test_trace\.py:\d+\)", graph.where(doubled))


@pytest.mark.parametrize(
    "given", [{}, Dict(), [], Attributes(), {"inside": Dict()}], ids=lambda one: type(one).__name__
)
def test_what_a_call_leaves_in_its_arguments_is_state(given: Any) -> None:
    with pytest.raises(SpecMismatch, match="keeps state: a call changes its arguments"):
        traced(Writes(), call(shared=given))


def test_a_tensor_from_elsewhere_is_state() -> None:
    shared = Dict(last=torch.empty(BATCH, TOKENS, WIDTH, device="meta"))
    with pytest.raises(SpecMismatch, match="keeps state: reads a tensor that is no argument, parameter or buffer"):
        traced(ReadsWhatIsLeft(), call(shared=shared))


def test_a_branch_far_from_the_sizes_of_the_call_is_seen() -> None:
    with pytest.raises(SpecMismatch, match=r"has a branch on a size: test_trace\.py:\d+, from 2 to 4095"):
        traced(AsksForTokens(), call())
    traced(AsksForTokens(), call(varies=False))


SETTLED: dict[str, Callable[[Any, Any], Any]] = {
    "one": lambda batch, tokens: tokens < 1,
    "negated": lambda batch, tokens: not tokens > 1,
    "of a sum": lambda batch, tokens: tokens + 7 == tokens,
    "from the left": lambda batch, tokens: 3 - tokens > 2,
    "both": lambda batch, tokens: (tokens > 1) & (batch == 0),
    "either": lambda batch, tokens: (tokens == 1) | (tokens * batch < tokens),
    "in a chain": lambda batch, tokens: 0 < tokens < 2,
    "of a bool": lambda batch, tokens: (tokens > 1) == (batch == 1),
    "of floats": lambda batch, tokens: tokens / 2 < 1 / 2,
    "an index": lambda batch, tokens: (True, False)[tokens > 1],
    "a key": lambda batch, tokens: {True: False}[tokens != 0],
    "a number": lambda batch, tokens: int(tokens < 1) + (tokens == 1) > 0,
    "in a text": lambda batch, tokens: f"{tokens > 1}" == "False",
}
OPEN: dict[str, Callable[[Any, Any], Any]] = {
    "many tokens": lambda batch, tokens: tokens > 4096,
    "many of both": lambda batch, tokens: batch * tokens > 4096,
    "both": lambda batch, tokens: (tokens > 1) & (batch > 4096),
    "unlike": lambda batch, tokens: tokens % 64 == 0,
    "rounded": lambda batch, tokens: tokens // 4096 == 1,
}


@pytest.mark.parametrize("name", SETTLED)
def test_a_condition_that_all_sizes_answer_alike_is_a_bool(name: str) -> None:
    graph, _ = traced(Compares(SETTLED[name]), call())
    assert "dropout" not in [op_name(node) for node in graph.operations()], "one that drops nothing is passed over"


@pytest.mark.parametrize("name", OPEN)
def test_any_other_condition_is_no_bool(name: str) -> None:
    with pytest.raises(SpecMismatch, match="must be bool, not SymBool"):
        traced(Compares(OPEN[name]), call())
    with pytest.raises(SpecMismatch, match=r"has a branch on a size: test_trace\.py:\d+"):
        traced(Compares(lambda batch, tokens: bool(OPEN[name](batch, tokens))), call())


def test_a_size_that_few_tokens_have_not_is_named() -> None:
    with pytest.raises(SpecMismatch, match="has no size .* for few tokens"):
        traced(InWindows(), call())


def test_a_mask_of_other_tokens_is_named() -> None:
    """As BLT's layers get, which mix patches beside a cache of bytes."""
    hidden, mask = torch.empty(2, 16, WIDTH, device="meta"), torch.empty(2, 1, 16, 1, device="meta")
    with pytest.raises(SpecMismatch, match="gets a mask of fewer tokens than there are"):
        traced(Layer(), LayerCall("bytes", hidden, {"attention_mask": mask}, past=3, sizes_vary=True))


@pytest.mark.parametrize("varies", [True, False])
def test_what_returns_other_sizes_is_no_layer(varies: bool) -> None:
    hidden = torch.empty(1, 24, WIDTH, device="meta")
    with pytest.raises(SpecMismatch, match=NO_LAYER):
        traced(Merges(), LayerCall("pictures", hidden, {}, sizes_vary=varies))


@pytest.mark.parametrize("varies", [True, False])
def test_values_that_are_read_are_named_with_their_line(varies: bool) -> None:
    with pytest.raises(SpecMismatch, match=r"has a branch on values: `\w+` at test_trace\.py:\d+"):
        traced(MovesToNumbers(), call(varies))


def test_sizes_of_a_view_of_something_larger_vary_too() -> None:
    whole = torch.empty(TOKENS, BATCH, 2 * WIDTH, device="meta")[..., :WIDTH].transpose(0, 1)
    graph, _ = traced(Layer(), LayerCall("a prompt", whole, {}, sizes_vary=True))
    assert graph.shape(graph.outputs[0]) == (2, 3, WIDTH)


@pytest.mark.parametrize("file", ["/home/u/torch/proj/model.py", "<ipython-input-1-abc>", "/home/u/model.pyc"])
def test_a_branch_counts_wherever_the_layers_file_is(file: str) -> None:
    """Also in a folder that is called as PyTorch's, and where there is no file."""
    source = "def forward(self, x, **given):\n    return x * 2 if x.shape[1] % 64 == 0 else x"
    scope: dict[str, Any] = {}
    exec(compile(source, file, "exec"), scope)
    layer = type("FromElsewhere", (nn.Module,), scope)()
    with pytest.raises(SpecMismatch, match="branch on a size"):
        traced(layer, call())


class Windows(Layer):
    """Cuts tokens into windows of 3, 5 and 7, with padding, one after the other."""

    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        batch, _, width = hidden.shape
        for size in (3, 5, 7) * 4:
            padded = nn.functional.pad(hidden, (0, 0, 0, -hidden.shape[1] % size))
            hidden = padded.view(batch, padded.shape[1] // size, size, width).flip(2).reshape(batch, -1, width)
        return hidden


def test_a_layer_with_many_branches_on_sizes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of SAM 2's layers took PyTorch 7 s each to tell 160 branches apart, of which one refuses the layer."""
    hidden = torch.empty(BATCH, TOKENS, WIDTH, device="meta")
    asked: list[int] = []
    monkeypatch.setattr(sizes, "MOST_BRANCHES", 4)
    of = sizes._Settled.of
    noted = staticmethod(lambda node: (asked.append(len(node.shape_env.guards)), of(node))[1])
    monkeypatch.setattr(sizes._Settled, "of", noted)
    with pytest.raises(SpecMismatch, match=r"has a branch on a size: more than 4 up to test_trace.py:\d+"):
        traced(Windows(), LayerCall("pictures", hidden, {}, sizes_vary=True))
    assert max(asked) == 5
