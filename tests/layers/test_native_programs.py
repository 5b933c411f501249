"""Programs that are held in C++ (layers/native/part.py): read by name, and held anew where tensors changed."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse.architectures.parts.mlp import MLPShape
from infuse.architectures.program import NORM, Step
from infuse.cache.kv_cache import KVCache
from infuse.layers.block import Block
from infuse.layers.build_context import BuildContext
from infuse.layers.mlp import MLP
from infuse.layers.native.one_call import StepCall
from infuse.layers.native.part import FEW_TOKENS, NativePart, PartWriter, ProgramText
from infuse.layers.parts import register
from infuse.native import kernels, step_words
from infuse.ops.cpu.activation import ACTIVATION_NUMBERS
from infuse.ops.cpu.program import NativeProgram
from tests.models.families import BY_NAME, inputs
from tests.support.one_calls import blocks, part_by_part

pytestmark = pytest.mark.skipif(isinstance(kernels(), str), reason=str(kernels()))
NORM_FIELDS = {"kind": "rms", "weight": "t0", "bias": "none", "eps": "r0", "offset": "r1"}


def norm_program(fields: dict[str, str], does: str = "norm", kind: str = "norm") -> NativeProgram:
    """A program of one step, over one tensor of ones and the reals 0 and 0."""
    part = " ".join(f"{name}={value}" for name, value in fields.items())
    step = f"step=step{{ does={does} scale=r0 part={kind}{{ {part} }} }}"
    return NativeProgram(f"machine=steps whole=false steps=list{{ {step} }}", [0.0, 0.0], [torch.ones(8)])


def test_a_program_is_read_by_name_in_any_order() -> None:
    x = torch.randn(1, 2, 8)
    fields = dict(reversed(NORM_FIELDS.items()))
    found = norm_program(fields, "norm_stream").run(
        x, None, None, -1, None, None, None, None, 0, None, None, None, None
    )
    torch.testing.assert_close(found, nn.functional.rms_norm(x, (8,), eps=0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (3, 77), (5, 200)])
def test_a_layer_scale_multiplies_alone(rows: int, columns: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(1, rows, columns).to(dtype), torch.randn(columns).to(dtype)
    part = " ".join(f"{name}={value}" for name, value in (NORM_FIELDS | {"kind": "scale"}).items())
    step = f"step=step{{ does=norm_stream scale=r0 part=norm{{ {part} }} }}"
    program = NativeProgram(f"machine=steps whole=false steps=list{{ {step} }}", [0.0, 0.0], [weight])
    assert torch.equal(program.run(x, None, None, -1, *[None] * 4, 0, *[None] * 4), x * weight)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"epsilon": "r0"}, "norm has no field epsilon"),
        ({"eps": ""}, "norm lacks the field eps"),
        ({"kind": "batch"}, "kind cannot be batch"),
        ({"weight": "t1"}, "weight cannot be t1"),
        ({"weight": "r0"}, "weight cannot be r0"),
        ({"eps": "1e-5"}, "eps cannot be 1e-5"),
    ],
)
def test_an_unknown_or_missing_field_is_an_error_that_names_it(change: dict[str, str], why: str) -> None:
    fields = {name: value for name, value in {**NORM_FIELDS, **change}.items() if value}
    with pytest.raises(RuntimeError, match=why):
        norm_program(fields)


@pytest.mark.parametrize(
    ("changed", "why"), [({"does": "sing"}, "does cannot be sing"), ({"kind": "choir"}, "part cannot be choir")]
)
def test_steps_and_parts_that_have_no_struct_are_errors(changed: dict[str, str], why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        norm_program(NORM_FIELDS, **changed)
    with pytest.raises(RuntimeError, match="ends within a part"):
        NativeProgram("machine=steps whole=false steps=list{ ", [], [])


@pytest.fixture
def engine() -> Any:
    return infuse.init_inference(BY_NAME["llama"].make(), dtype=torch.float32)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """The programs that are held from now on."""
    found: list[weakref.ref] = []
    make = NativeProgram.__init__

    def noted(self: NativeProgram, *args: Any) -> None:
        make(self, *args)
        found.append(weakref.ref(self))

    monkeypatch.setattr(NativeProgram, "__init__", noted)
    return found


@torch.no_grad()
def steps(engine: Any, count: int = 2) -> Tensor:
    cache = KVCache()
    out = engine(**inputs(BY_NAME["llama"]), past_key_values=cache, use_cache=True)
    for token in range(count):
        out = engine(input_ids=torch.tensor([[token + 3]] * 2), past_key_values=cache, use_cache=True)
    return out.logits


def test_a_program_is_held_once_and_anew_when_a_tensor_is_another(engine: Any, made: list[weakref.ref]) -> None:
    found, layers = blocks(engine.module), 3
    assert len(found) == layers
    before = steps(engine)
    steps(engine)
    assert len(made) in (0, layers)  # the proof may have held them already
    made.clear()
    up = found[1].mlp.up
    up.weight = nn.Parameter(-up.weight, requires_grad=False)
    changed = steps(engine)
    assert len(made) == 1 and not torch.allclose(changed, before, atol=1e-3)
    up.weight.data = -up.weight.data  # other memory of the same tensor
    assert torch.equal(steps(engine), before) and len(made) == 1


def test_memory_that_a_tensor_had_is_not_read_again(engine: Any) -> None:
    before = steps(engine)
    for block in blocks(engine.module):
        for parameter in block.parameters():
            parameter.data = parameter.data.clone()
    gc.collect()
    torch.full((1 << 20,), torch.nan)
    assert torch.equal(steps(engine), before)


def test_copies_and_pickles_hold_nothing(engine: Any, made: list[weakref.ref]) -> None:
    before = steps(engine)
    found = [block._one_call for block in blocks(engine.module)]
    assert all(call is not None and call._native is not None for call in found)
    made.clear()
    for other in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
        calls = [block._one_call for block in blocks(other)]
        assert all(call is not None and call._native is None for call in calls)
        assert torch.equal(steps(other), before)
    del other, calls
    gc.collect()
    assert len(made) == 2 * len(found) and all(program() is None for program in made)


class Unwritten(MLP):
    """A subclass with a forward of its own, of which C++ knows nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Foreign(nn.Module):
    """A part without a struct in C++."""

    def __init__(self, shape: MLPShape, context: BuildContext):
        super().__init__()
        self.own = MLP(shape, context)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x)


@pytest.mark.parametrize(("layer", "why"), [(Unwritten, "a forward of its own"), (Foreign, "has no struct in C\\+\\+")])
def test_a_part_without_a_struct_runs_in_python(engine: Any, layer: Any, why: str) -> None:
    shape = blocks(engine.module)[0].shape
    take_back = register(MLPShape, layer)
    try:
        block = Block(shape, 0, {}, dict.fromkeys((*shape.ops, "linear"), "cpu"))
    finally:
        take_back()
    assert block._one_call is None and why.replace("\\", "") in repr(block)


class Renamed(nn.Module, NativePart):
    """A part from outside that a struct of C++ describes, though its modules have other names."""

    struct = "mlp"

    def __init__(self, shape: MLPShape, context: BuildContext):
        super().__init__()
        own = MLP(shape, context)
        self.first, self.second = own.up, own.down

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.first(x).chunk(2, dim=-1)
        return self.second(nn.functional.silu(gate) * up)

    def native(self, to: PartWriter) -> None:
        to.put(act=ACTIVATION_NUMBERS["silu"], gated=True)
        to.part("first", as_field="up")
        to.part("second", as_field="down")
        to.part("norm")  # which there is none
        to.factors(None, ())


@torch.no_grad()
def test_a_part_from_outside_that_writes_a_struct_runs_in_cpp(engine: Any) -> None:
    shape = blocks(engine.module)[0].shape
    take_back = register(MLPShape, Renamed)
    try:
        block = Block(shape, 0, {}, dict.fromkeys((*shape.ops, "linear"), "cpu"))
    finally:
        take_back()
    generator = torch.Generator().manual_seed(0)
    block.to_empty(device="cpu")
    for parameter in block.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    x, width = torch.randn(2, 1, shape.mixers["self_attn"].hidden), shape.mixers["self_attn"].head_width
    cos_sin = (torch.ones(1, 1, width), torch.zeros(1, 1, width))
    found = block(x, position_embeddings=cos_sin, past_key_values=KVCache())
    assert block._one_call is not None and block._one_call._native is not None
    with part_by_part(block):
        wanted = block(x, position_embeddings=cos_sin, past_key_values=KVCache())
    torch.testing.assert_close(found, wanted)


def test_steps_that_cpp_does_not_know_and_values_of_a_call_run_in_python(engine: Any) -> None:
    block = blocks(engine.module)[0]
    bodies = dict.fromkeys((*block.shape.ops, "linear"), "cpu")
    over = tuple(step._replace(over="states") if step.part == "self_attn" else step for step in block.shape.program)
    for program, why in ((over, "goes over states"), ((*block.shape.program, Step("carry")), "no step of C++")):
        call = replace(block.shape.call, values=("states",))
        other = Block(replace(block.shape, program=program, call=call), 0, {}, bodies)
        assert other._one_call is None and why in repr(other)
    assert isinstance(Block(block.shape, 0, {}, bodies)._one_call, StepCall)


def test_all_steps_of_cpp_are_words_of_programs() -> None:
    from infuse.architectures import program

    around = {"place", "head", "scale", "divide"}  # a decoder's blocks
    words = {value for value in vars(program).values() if isinstance(value, str)} | around
    assert step_words() <= words


def test_a_part_writes_what_its_struct_has() -> None:
    class Odd(nn.Module, NativePart):
        struct = "norm"

        def forward(self, x: Tensor) -> Tensor:
            return x

        def native(self, to: PartWriter) -> None:
            to.put(size=3)

    root = nn.Module()
    root.odd = Odd()
    text = ProgramText(FEW_TOKENS, 1)
    text.step(Step(NORM, "odd"), 0, root)
    with pytest.raises(RuntimeError, match="norm lacks the field kind"):
        NativeProgram(text.text(), text.reals, [])
