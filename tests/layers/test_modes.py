"""Modes, transforms and other libraries' classes of tensors see PyTorch's operations, with the original's results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import infuse
from infuse.ground import modes
from infuse.layers.block import Block
from infuse.layers.linear import Linear, QuantizedLinear
from infuse.layers.mixture.experts import Experts
from infuse.ops import registered
from tests.models.families import BY_NAME
from tests.support.side_by_side import arguments, first, ids, logits
from tests.support.tolerance import assert_near

NAMES = ("llama", "gpt2", "bert", "mixtral", "t5")
INTERLEAVED = ("gpt-neox", "bloom", "codegen", "deepseek-v3")
FORMATS = (None, "int8:16", "int4:16")
TIMES = 8  # a few hundred sums of another order
BATCHED = ("llama", "bert", "mixtral", "t5", "codegen")  # the models around GPT-2's and Bloom's blocks ask for values


@cache
def pair(name: str, quant: str | None = None, attention: str = "sdpa") -> tuple[Any, Any]:
    """The original and a replaced copy of it, which tests must not change."""
    original = BY_NAME[name].make(**({"attn_implementation": attention} if name != "bloom" else {}))
    if name in ("mixtral", "deepseek-v3"):
        original.set_experts_implementation("eager")  # PyTorch counts no grouped products
    keys = {"quant": quant} if quant else {}
    return original, infuse.init_inference(copy.deepcopy(original), dtype="fp32", **keys).module


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = set[Any]()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


class Halved(Tensor):
    """Holds no memory: twice the values of `held`."""

    held: Tensor

    @staticmethod
    def of(held: Tensor) -> Halved:
        made = Tensor._make_wrapper_subclass(Halved, held.shape, dtype=held.dtype, device=held.device)  # type: ignore[attr-defined]
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls.of(args[0].held)
        assert func.namespace == "aten", func
        return func(*tree_map_only(Halved, lambda each: each.held * 2, args), **(kwargs or {}))


def counted(model: Callable, given: dict[str, Any]) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**given)
    return counter.get_total_flops()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("name", (*NAMES, *INTERLEAVED))
def test_a_counter_says_what_it_says_over_the_original(name: str, quant: str | None, attention: str) -> None:
    original, model = pair(name, quant, attention)
    given = arguments(name)
    assert counted(model, given) == counted(original, given) > 0
    assert counted(model, given) == counted(model, given)


@pytest.mark.parametrize("quant", FORMATS)
def test_a_counter_over_an_answer(quant: str | None) -> None:
    original, model = pair("llama", quant)
    given = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False)
    wanted = model.generate(ids(2, 6), **given)
    counts = []
    for each in (original, model):
        with FlopCounterMode(display=False) as counter:
            answer = each.generate(ids(2, 6), **given)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0 and torch.equal(answer, wanted)


@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("name", ["llama", "bert", "mixtral"])
def test_a_counter_over_a_traced_graph(name: str, quant: str | None) -> None:
    """Of the ops themselves: attention, which PyTorch does not count in its own kernel for CPUs, as products."""
    original, model = pair(name, quant, "eager")
    given = {name: value for name, value in arguments(name).items() if name != "attention_mask"}
    program = torch.export.export(model, (), given, strict=False).module()
    assert counted(program, given) == counted(original, given)


@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("name", (*NAMES, *INTERLEAVED))
def test_fake_tensors(name: str, quant: str | None) -> None:
    original, model = pair(name, quant)
    given = {name: value for name, value in arguments(name).items() if name != "attention_mask"}
    wanted = first(original, given)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = tree_map_only(Tensor, mode.from_tensor, given)
        found = first(model, fakes)
        flops = counted(model, fakes)
    assert isinstance(found, FakeTensor) and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert flops == counted(original, given)


@pytest.mark.parametrize(
    ("name", "sizes", "rest"),
    [("rms_norm", [(2, 22), (22,)], (1.5e-5, 0.0)), ("rotary", [(2, 3, 4, 22), (2, 3, 22), (2, 3, 22)], (False,))],
)
def test_an_op_keeps_no_fake_tensor(name: str, sizes: list[tuple[int, ...]], rest: tuple) -> None:
    """No other test has these widths: what the ops keep for them is made here, first under the mode."""
    given = [torch.randn(size) for size in sizes]
    op = registered()[name]
    with FakeTensorMode() as mode:
        fake = op.in_operations(*map(mode.from_tensor, given), *rest)
    assert isinstance(fake, FakeTensor)
    found = op.in_operations(*given, *rest)
    assert type(found) is Tensor
    torch.testing.assert_close(found, op.reference(*given, *rest))
    with FakeTensorMode() as mode:
        op.in_operations(*map(mode.from_tensor, given), *rest)


@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_tensors_on_meta(name: str, quant: str | None) -> None:
    original, model = pair(name, quant)
    given = tree_map_only(Tensor, lambda each: each.to("meta"), {"input_ids": ids(2, 7)})
    if name == "t5":
        given["decoder_input_ids"] = given["input_ids"]
    wanted, found = (first(copy.deepcopy(each).to("meta"), given) for each in (original, model))
    assert found.is_meta and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("name", (*NAMES, *INTERLEAVED))
def test_modes_see_operations_of_pytorch(name: str, quant: str | None) -> None:
    _, model = pair(name, quant)
    given = arguments(name)
    wanted = first(model, given)
    with Recorder() as recorded:
        assert_near(first(model, given), wanted, torch.float32, name, TIMES)
    assert {each.partition(".")[0] for each in recorded.seen} <= {"aten", "prim"}
    assert {"aten.mm.default", "aten.addmm.default"} & recorded.seen
    with Called() as called:
        assert_near(first(model, given), wanted, torch.float32, name, TIMES)
    assert nn.functional.linear in called.seen


def test_a_default_device_and_modes_of_ours_are_no_ones_mode() -> None:
    class Own(modes.Transparent, TorchDispatchMode): ...

    _, model = pair("llama")
    given = arguments("llama")
    wanted = first(model, given)
    with torch.device("cpu"), Own():
        assert not modes.is_any_on()
    with torch.device("cpu"):
        assert torch.equal(first(model, given), wanted)


@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("name", BATCHED)
def test_vmap_over_a_model(name: str, quant: str | None) -> None:
    original, model = pair(name, quant)

    def called(model: Any, rows: Tensor) -> Tensor:
        given = {"input_ids": rows} | ({"decoder_input_ids": rows} if name == "t5" else {})
        return model(**given)[0]  # type: ignore[no-any-return]

    rows = ids(6, 5).view(3, 2, 5)
    with torch.no_grad():
        found = vmap(lambda each: called(model, each))(rows)
        assert_near(found, torch.stack([called(model, each) for each in rows]), torch.float32, name, TIMES)
        if quant is None and name != "mixtral":  # whose experts, of the eager kind, ask for values
            assert_near(found, vmap(lambda each: called(original, each))(rows), torch.float32, name, TIMES)


@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("kind", [Block, (Linear, QuantizedLinear), Experts])
def test_vmap_over_a_part(kind: Any, quant: str | None) -> None:
    _, model = pair("mixtral", quant)
    part: Any = next(each for each in model.modules() if isinstance(each, kind))
    x = torch.randn(3, 2, 4, 48)
    keywords, given = {}, (x,)
    if kind is Block:
        keywords = {"position_embeddings": (torch.rand(1, 4, 12), torch.rand(1, 4, 12))}
    elif kind is Experts:
        given = x[:, 0], torch.randint(4, (3, 4, 2)), torch.rand(3, 4, 2)
    with torch.no_grad():
        found = vmap(lambda *each: part(*each, **keywords))(*given)
        wanted = torch.stack([part(*(each[i] for each in given), **keywords) for i in range(3)])
    assert_near(found, wanted, torch.float32, times=TIMES)


def test_vmap_over_weights() -> None:
    _, model = pair("bert")
    linear: Any = next(each for each in model.modules() if isinstance(each, Linear))
    x, weights = torch.randn(4, linear.in_features), torch.randn(3, *linear.weight.shape)
    with torch.no_grad():
        found = vmap(lambda weight: functional_call(linear, {"weight": weight}, (x,)))(weights)
    assert_near(found, x @ weights.mT + linear.bias, torch.float32, times=TIMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_of_another_class(name: str) -> None:
    """torchao's, for one: it multiplies in its own way, alone and inside of a block."""
    _, replaced = pair(name)
    wanted, model = copy.deepcopy(replaced), copy.deepcopy(replaced)
    places = [path for path, each in model.named_modules() if isinstance(each, Linear)]
    assert len(places) > 3
    for path in places:
        linear, plain = model.get_submodule(path), wanted.get_submodule(path)
        linear.weight = nn.Parameter(Halved.of(linear.weight.detach() / 2), requires_grad=False)
        assert type(linear.weight) is Halved and type(plain.weight) is nn.Parameter
    given = arguments(name)
    assert_near(first(model, given), first(wanted, given), torch.float32, name, TIMES)


def test_an_answer_with_weights_of_another_class() -> None:
    _, replaced = pair("llama")
    model = copy.deepcopy(replaced)
    linears = [each for each in model.modules() if isinstance(each, Linear)]
    for linear in linears:
        linear.weight = nn.Parameter(Halved.of(linear.weight.detach() / 2), requires_grad=False)
    given = dict(max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(ids(2, 6), **given), replaced.generate(ids(2, 6), **given))


@pytest.mark.parametrize("quant", FORMATS)
def test_an_input_of_another_class(quant: str | None) -> None:
    _, model = pair("llama", quant)
    embedded = torch.randn(2, 5, 48)
    found = logits(model, inputs_embeds=Halved.of(embedded / 2), use_cache=False)
    assert_near(found, logits(model, inputs_embeds=embedded, use_cache=False), torch.float32, times=TIMES)
