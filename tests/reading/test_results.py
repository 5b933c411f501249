"""What operations give on meta is the same when it is looked up."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode

from infuse.reading import results
from infuse.reading.results import Results
from infuse.reading.sizes import Variables

aten = torch.ops.aten


def _meta(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


class _Looked(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.results = Results()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return self.results.of(func, args, kwargs or {})


def _traits(made: Any) -> list[tuple]:
    tensors = made if isinstance(made, tuple) else (made,)
    return [(type(one), one.shape, one.stride(), one.dtype, one.device) for one in tensors]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x * x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.transpose(1, 2) + 1,
        lambda x: x.to(torch.bfloat16),
        lambda x: torch.cat((x, x), 1),
        lambda x: torch.topk(x, 2),
        lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
        lambda x: torch.nn.functional.linear(x, _meta(7, 6), _meta(7)),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda x: torch.arange(x.shape[1], device="meta"),
        lambda x: torch.split(x, 2, dim=1),
    ],
)
def test_results_are_those_of_the_call(make: Callable[[Tensor], Any], inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        x = _meta(3, 4, 6)
        wanted = _traits(make(x))
        with _Looked():
            assert [_traits(make(x)) for _ in range(3)] == [wanted] * 3


def test_what_is_looked_up_is_not_called_again() -> None:
    kept, called = Results(), list[Any]()

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    x = _meta(3, 4)
    with torch.no_grad(), Noted():
        first, second = (kept.of(aten.mul.Tensor, (x, x), {}) for _ in range(2))
    assert called.count(aten.mul.Tensor) == 1
    assert first is not second and _traits(first) == _traits(second)


def test_scalars_of_other_types_are_other_arguments() -> None:
    x, kept = _meta(3, dtype=torch.long), Results()
    found = [kept.of(aten.mul.Tensor, (x, factor), {}).dtype for factor in (1, 1.0, True, 1.0, 1)]
    assert found == [torch.int64, torch.float32, torch.int64, torch.float32, torch.int64]


def test_the_default_dtype_counts() -> None:
    x, kept = _meta(3, dtype=torch.long), Results()
    found = [kept.of(aten.mul.Tensor, (x, 2.5), {}).dtype]
    torch.set_default_dtype(torch.float64)
    try:
        found += [kept.of(aten.mul.Tensor, (x, 2.5), {}).dtype]
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.float64]


def test_an_argument_that_is_returned_stays_that_argument() -> None:
    """A dropout that drops nothing returns its input, which its signature does not tell."""
    x, kept = _meta(3, 4), Results()
    with torch.inference_mode():
        assert all(kept.of(aten.dropout.default, (x, 0.5, False), {}) is x for _ in range(3))


def test_what_is_written_is_written() -> None:
    x, kept = _meta(3, 4), Results()
    assert all(kept.of(aten.add_.Tensor, (x, 1), {}) is x for _ in range(2))
    views = [kept.of(aten.view.default, (x, [12]), {}) for _ in range(2)]
    assert all(view._base is x for view in views)


def test_values_are_computed() -> None:
    kept = Results()
    found = [kept.of(aten.add.Tensor, (torch.tensor([n]), n), {}).item() for n in range(3)]
    assert found == [0, 2, 4]


def test_no_more_are_kept_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_MOST", 2)
    kept = Results()
    found = [kept.of(aten.mul.Tensor, (_meta(n), 2), {}).shape for n in (1, 2, 3, 3, 1)]
    assert [tuple(shape) for shape in found] == [(1,), (2,), (3,), (3,), (1,)]
    assert len(kept._known) == 2


def test_sizes_that_are_variables() -> None:
    """Those of equal expressions are equal, and what is looked up assumes nothing of them."""
    variables, kept = Variables([5, 7], []), Results()
    x, y = (variables.tensor(_meta(5, 7, 6), range(count)) for count in (2, 1))
    with torch.inference_mode(), enable_python_dispatcher():
        found = [kept.of(aten.mul.Tensor, (one, one), {}) for one in (x, y, x, y)]
        batch, tokens = x.shape[:2]
        wider = [kept.of(aten.mul.Tensor, (x.view(batch * tokens, 6), scale), {}) for scale in (tokens, batch)]
    assert [str(one.shape) for one in found] == [str(one.shape) for one in (x, y, x, y)]
    assert [str(one.shape) for one in wider] == [f"torch.Size([{batch * tokens}, 6])"] * 2
    assert len(kept._known) == 4
    assert variables.branches() == ""
