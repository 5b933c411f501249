"""A layout of checkpoints that lives here alone: codes under names of its own, read as they are by a recogniser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

import infuse
from infuse.architectures.packing import PER_HEAD, Fill, Heads, StackedExperts
from infuse.ground.errors import CheckpointError
from infuse.layers.linear import QuantizedLinear
from infuse.parallel.slices import Cut
from infuse.quant.format import QuantizedWeight
from infuse.quant.parse import quant_format
from infuse.weights import foreign
from infuse.weights.fill import filled, quantized, target_of
from infuse.weights.foreign.layout import Recognised, Unread
from infuse.weights.foreign.merged import Merged
from infuse.weights.lazy import Coded, CodedTensor, InMemory, LazyTensor, Transposed, coded_fault
from tests.models.families import BY_NAME
from tests.support.checkpoints import on_meta
from tests.support.ranks import Ranks

# The layout: PATH.codes [out, width] as ours, PATH.steps [groups, out] and, if asymmetric, PATH.offsets [groups, out].
NAMES = {"data": "codes", "scale": "steps", "zero": "offsets"}
FORMATS = ["int8:4", "int4:4:asymmetric"]  # groups of 4 inputs are whole on each of two ranks


def in_steps(unread: Unread) -> Recognised:
    """The recogniser."""
    tensors: dict[str, LazyTensor] = {}
    faults: dict[str, str] = {}
    used: set[str] = set()
    for name in unread.names:
        path, _, leaf = name.rpartition(".")
        targets = [target for target in unread.naming.variants(f"{path}.weight") if target in unread.missing]
        if leaf != "codes" or not targets:
            continue
        stored = {buffer: f"{path}.{ours}" for buffer, ours in NAMES.items() if f"{path}.{ours}" in unread.names}
        used |= set(stored.values())
        buffers = {buffer: unread.whole(name) for buffer, name in stored.items()}
        buffers = {buffer: one if buffer == "data" else Transposed(one) for buffer, one in buffers.items()}
        coded = Coded("int4:4:asymmetric" if "zero" in buffers else "int8:4", buffers)
        shape = unread.missing[targets[0]]
        if fault := coded_fault(shape, coded):
            faults[targets[0]] = fault
        else:
            tensors[targets[0]] = CodedTensor(shape, torch.float32, coded)
    return Recognised(tensors, used, faults)


@contextmanager
def registered() -> Iterator[None]:
    take_back = foreign.register(in_steps)
    try:
        yield
    finally:
        take_back()


def random_codes(shape: tuple[int, int], format: str, seed: int) -> QuantizedWeight:
    """Codes that quantizing again would change: they do not use the ends of their range."""
    generator = torch.Generator().manual_seed(seed)
    coder, (rows, inputs) = quant_format(format), shape
    tensors = {}
    for buffer in coder.buffers(inputs):
        size = (rows, buffer.width(inputs))
        if buffer.dtype.is_floating_point:
            tensors[buffer.name] = (torch.rand(size, generator=generator) * 1e-3 + 1e-3).to(buffer.dtype)
        else:
            high = 90 if buffer.name == "data" else 5
            tensors[buffer.name] = torch.randint(0, high, size, generator=generator).to(buffer.dtype)
    return QuantizedWeight.of(tensors, shape, coder)


def publish(folder: Path, format: str) -> tuple[dict[str, Tensor], dict[str, QuantizedWeight]]:
    """What a checkpoint in this layout holds, and its coded matrices by the model's names."""
    state, weights = {}, {}
    for number, (name, tensor) in enumerate(BY_NAME["llama"].make().state_dict().items()):
        if "_proj.weight" not in name:
            state[name] = tensor
            continue
        weights[name] = random_codes((tensor.shape[0], tensor.shape[1]), format, number)
        for buffer, stored in weights[name].tensors.items():
            path = name.removesuffix("weight") + NAMES[buffer]
            state[path] = (stored if buffer == "data" else stored.t()).contiguous()
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors")
    return state, weights


def dequantized(weights: dict[str, QuantizedWeight]) -> Any:
    """transformers' model with the values that the codes stand for."""
    model = BY_NAME["llama"].make()
    values = {name: weight.format.dequantize(weight) for name, weight in weights.items()}
    model.load_state_dict({**model.state_dict(), **values})
    return model.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(5, 15)[None]).logits


def loaded(folder: str, **keys: Any) -> infuse.InferenceEngine:
    with registered():
        return infuse.init_inference(
            on_meta("llama"), checkpoint=folder, **{"dtype": "fp32", "progress": False, **keys}
        )


def parts(engine: infuse.InferenceEngine) -> dict[str, tuple[dict[str, Tensor], Cut | None, list[str]]]:
    """The tensors of each quantized linear in the blocks, its cut, and the model's matrices that it is made from."""
    made = {}
    for step in engine.plan.steps:
        for fill in step.fills if step.depth == "block" else ():
            place = engine.module.get_submodule(f"{step.path}.{fill.target}".rpartition(".")[0])
            if isinstance(place, QuantizedLinear) and fill.format is not None:
                sources = [f"{step.path}.{name}" for name in fill.sources]
                made[f"{step.path}.{fill.target}"] = place.held().tensors, fill.cut, sources
    return made


def wrong_parts(folder: str, format: str, size: int) -> list[str]:
    """The matrices of this rank whose codes and scales are not those of the file, on the rows or inputs that it has."""
    keys: dict[str, Any] = {"tensor_parallel": {"tp_size": size}} if size > 1 else {}
    _, weights = publish(Path(folder) / f"of {dist.get_rank() if size > 1 else 0}", format)
    engine, wrong = loaded(folder, quant=format, **keys), []
    linears = parts(engine)
    assert len(linears) == 3 * 4 and sum(len(sources) == 3 for _, _, sources in linears.values()) == 3
    for name, (tensors, cut, sources) in linears.items():
        for buffer in quant_format(format).buffers(weights[sources[0]].shape[1]):
            whole = torch.cat([weights[source].tensors[buffer.name] for source in sources])
            for_each = 1 if cut is None or cut.axis == 0 else buffer.inputs
            ranges = [(0, len(whole))] if cut is None else cut.ranges
            every = (
                [slice(a // for_each * buffer.columns, b // for_each * buffer.columns) for a, b in ranges]
                if (cut is not None and cut.axis == 1)
                else [slice(a, b) for a, b in ranges]
            )
            axis = cut.axis if cut is not None else 0
            expected = torch.cat([whole[:, one] if axis else whole[one] for one in every], axis)
            if not torch.equal(tensors[buffer.name], expected):
                wrong.append(f"{name}.{buffer.name}")
    return wrong


@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_kept_bit_for_bit(format: str, tmp_path: Path) -> None:
    _, weights = publish(tmp_path, format)
    assert not wrong_parts(str(tmp_path), format, 1)
    engine, exact = loaded(str(tmp_path), quant=format), logits(dequantized(weights))
    assert "are stored in" not in str(engine.plan)
    assert (logits(engine) - exact).norm() < 0.1 * exact.norm()  # the head is quantized besides


@pytest.mark.parametrize("format", FORMATS)
def test_two_ranks_keep_the_codes_of_their_parts(format: str, tmp_path: Path, ranks: Ranks) -> None:
    publish(tmp_path, format)
    assert ranks.run(2, wrong_parts, str(tmp_path), format, 2) == [[], []]


@pytest.mark.parametrize(
    ("quant", "becomes"),
    [
        ({"weight": {"post_init_quant": {"_proj": None}}}, "float32, e.g. {}: dequantized"),
        ("int8:8", "int8:8, e.g. {}: rounded twice; leave quant out to keep their codes"),
    ],
)
def test_values_are_taken_for_other_formats(quant: Any, becomes: str, tmp_path: Path) -> None:
    _, weights = publish(tmp_path, "int8:4")
    engine = loaded(str(tmp_path), quant=quant)
    live = infuse.init_inference(dequantized(weights), dtype="fp32", progress=False, quant=quant)
    assert torch.equal(logits(engine), logits(live))
    told = "21 matrices are stored in int8:4 and become " + becomes.format("model.layers.0.mlp.down_proj.weight")
    assert told in str(engine.plan)


def test_all_faults_are_in_one_error(tmp_path: Path) -> None:
    state, _ = publish(tmp_path, "int8:4")
    state["model.layers.0.self_attn.k_proj.steps"] = state["model.layers.0.self_attn.k_proj.steps"][:5].clone()
    state["model.layers.1.mlp.up_proj.codes"] = state["model.layers.1.mlp.up_proj.codes"].float()
    state["model.layers.2.input_layernorm.weight"] = torch.ones(3)
    del state["model.layers.2.mlp.down_proj.codes"], state["model.norm.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not this model's: 2 missing, 1 unexpected, 3 misshaped") as caught:
        loaded(str(tmp_path), quant="int8:4")
    for told in (
        "k_proj.weight: int8:4: scale is torch.bfloat16 (24, 5), not torch.bfloat16 (24, 12)",
        "up_proj.weight: int8:4: data is torch.float32 (80, 48), not torch.int8 (80, 48)",
        "input_layernorm.weight: (3,), the model has (48,)",
        "missing  model.layers.2.mlp.down_proj.weight",
        "missing  model.norm.weight",
        "unexpected  model.layers.2.mlp.down_proj.steps",
    ):
        assert told in str(caught.value)


def test_a_recogniser_that_is_taken_back_is_not_asked(tmp_path: Path) -> None:
    publish(tmp_path, "int8:4")
    loaded(str(tmp_path))
    with pytest.raises(CheckpointError, match="21 missing, 42 unexpected"):
        infuse.init_inference(on_meta("llama"), checkpoint=str(tmp_path), progress=False)


# ---- which codes are taken as they are ----

HEADS = Heads(2, 2, 6)
FILLS = {
    "rows": (Fill("linear.weight", ("a", "b")), True),
    "some rows": (Fill("linear.weight", ("a", "b"), cut=Cut(0, ((3, 20), (40, 50)), (36, 36))), True),
    "rows of heads": (Fill("linear.weight", ("a",), packing=PER_HEAD, heads=HEADS), True),
    "inputs": (Fill("linear.weight", ("a",), cut=Cut(1, ((0, 8), (16, 32)), (32,))), True),
    "inputs and rows": (Fill("linear.weight", ("a",), cut=Cut(1, ((8, 24),), (32,), (6, 12))), True),
    "inputs of sources below one another": (Fill("linear.weight", ("a", "b"), cut=Cut(1, ((8, 24),), (32,))), True),
    "a part of a group": (Fill("linear.weight", ("a",), cut=Cut(1, ((0, 12), (20, 32)), (32,))), False),
    "another format": (Fill("linear.weight", ("a", "other")), False),
    "values beside codes": (Fill("linear.weight", ("a", "plain")), False),
    "transposed": (Fill("linear.weight", ("turned",), transposed=True), True),
}


@pytest.mark.parametrize("format", ["int8:8", "int4:8:asymmetric", "fp8:8", "int8:row"])
@pytest.mark.parametrize("label", FILLS)
def test_codes_are_taken_where_no_group_is_cut(label: str, format: str) -> None:
    fill, taken = FILLS[label]
    taken = taken or (format == "int8:row" and label == "a part of a group")
    weights = {name: quant_format(format).quantize(torch.randn(36, 32)) for name in ("a", "b", "turned")}
    weights["other"] = quant_format("int8:4").quantize(torch.randn(36, 32))
    sources: dict[str, LazyTensor] = {"plain": InMemory(torch.randn(36, 32))}
    for name, weight in weights.items():
        buffers = {key: InMemory(tensor) for key, tensor in weight.tensors.items()}
        sources[name] = CodedTensor((36, 32), torch.float32, Coded(str(weight.format), buffers))
    sources["turned"] = Transposed(sources["turned"])
    values = {name: InMemory(source.read()) for name, source in sources.items()}
    wanted = filled(fill, values.__getitem__, torch.float32)
    assert torch.equal(filled(fill, sources.__getitem__, torch.float32), wanted)
    coded = target_of(fill, sources.__getitem__).coded
    assert (coded is not None) == taken
    if coded is None:
        return
    fill = Fill(**{**vars(fill), "format": coded.format})

    def refuse(*_: Any) -> Any:
        raise AssertionError("quantized again")

    pieces = list(quantized(fill, sources.__getitem__, refuse, 1))
    back = torch.cat([piece.format.dequantize(piece) for piece in pieces])
    assert torch.equal(back, wanted)


@pytest.mark.parametrize("cut", [None, Cut(0, ((36, 108),), (144,)), Cut(1, ((8, 24),), (32,), (72, 144))], ids=str)
def test_codes_of_experts_in_files_of_their_own(cut: Cut | None) -> None:
    """Gate and up of two experts, each coded on its own."""
    weights = [[quant_format("int8:8").quantize(torch.randn(36, 32)) for _ in range(2)] for _ in range(2)]
    stored = [[{key: InMemory(tensor) for key, tensor in weight.tensors.items()} for weight in row] for row in weights]
    parts = [[CodedTensor((36, 32), torch.float32, Coded("int8:8", buffers)) for buffers in row] for row in stored]
    fill = Fill("up.weight", ("experts",), stacked=StackedExperts(), format="int8:8", cut=cut)
    (part,) = quantized(fill, lambda name: Merged(parts), lambda *_: None, None)
    whole = {key: torch.cat([weight.tensors[key] for row in weights for weight in row]) for key in part.tensors}
    for buffer in part.format.buffers(32):
        rows = slice(*(cut.rows or cut.ranges[0])) if cut is not None else slice(None)
        columns = buffer.of_inputs(*cut.ranges[0]) if cut is not None and cut.axis == 1 else slice(None)
        assert torch.equal(part.tensors[buffer.name], whole[buffer.name][rows, columns])


def test_parts_of_a_coded_tensor_are_read_alone() -> None:
    weight = quant_format("int4:8").quantize(torch.randn(12, 32))
    read: list[tuple[str, Any]] = []

    class Counted(InMemory):
        def read(self, part: Any = ()) -> Tensor:
            read.append(part)
            return super().read(part)

    buffers = {name: Counted(tensor) for name, tensor in weight.tensors.items()}
    tensor = CodedTensor((12, 32), torch.float32, Coded("int4:8", buffers))
    rows, columns = slice(2, 5), slice(10, 20)
    assert torch.equal(tensor.read((rows, columns)), weight.format.dequantize(weight)[rows, columns])
    assert read == [(rows, slice(4, 12)), (rows, slice(1, 3))]
