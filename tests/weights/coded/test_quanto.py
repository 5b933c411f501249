"""quanto's folders and live models: types, activations, shapes that only the model tells, and the library itself."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import infuse
from infuse.ground.errors import CheckpointError
from infuse.native import kernels
from infuse.quant.parse import quant_format
from infuse.weights.checkpoint import Checkpoint
from infuse.weights.in_model import CodesInModel, codes_in
from infuse.weights.model_tensors import ModelTensors, model_tensors
from infuse.weights.sources import find_files
from tests.support.checkpoints import on_meta
from tests.support.libraries import stand_in
from tests.support.quantized_files import BY_CASE, ROOM, llama, publish, quanto, quanto_groups, write
from tests.support.quantized_models import logits, with_values
from tests.support.ranks import Ranks

KEYS: dict[str, Any] = dict(progress=False, replace_with_kernel_inject=True)
ONE = dict(ROOM, num_hidden_layers=1)
AT = "model.layers.0.mlp.up_proj"
WIDE = dict(hidden_size=256, intermediate_size=384)  # groups of 128, with several in a row


def published(folder: Path, name: str, types: Any) -> str:
    """A folder of a model of one layer with the file of types beside it, and no other config."""
    publish(folder, BY_CASE[name], llama(**ONE))
    (folder / "config.json").unlink()
    (folder / "quanto_qmap.json").write_text(json.dumps(types))
    return str(folder)


def opened(folder: str | Path, **changes: Any) -> ModelTensors:
    return model_tensors(on_meta("llama", **(changes or ONE)), Checkpoint(find_files(str(folder))))


def far(given: Tensor, exact: Tensor) -> float:
    return float((given.float() - exact.float()).norm() / exact.float().norm())


# ---- files ----


def test_the_file_of_types_agrees(tmp_path: Path) -> None:
    types = {AT: {"weights": "qint4", "activations": "none"}, "lm_head": {"weights": "none", "activations": "none"}}
    tensor = opened(published(tmp_path, "quanto-qint4", types)).tensors[f"{AT}.weight"]
    assert tensor.coded is not None and tensor.coded.format == "int4:32:offset"


@pytest.mark.parametrize(("types", "told"), [
    ({AT: {"weights": "qint8", "activations": "none"}}, "holds qint4, the file of types says qint8"),
    ({AT: {"weights": "qint4", "activations": "qint8"}}, "has activations in qint8, with one scale for all"),
    ({AT: {"weights": 4}}, "weights: Input should be a valid string"),
    ({AT: "qint4"}, "quanto_qmap.json: of quanto: modules"),
    ([], "quanto_qmap.json: of quanto: modules"),
])  # fmt: skip
def test_the_file_of_types_contradicts(types: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="quanto") as caught:
        opened(published(tmp_path, "quanto-qint4", types))
    assert told in str(caught.value)


@pytest.mark.parametrize("leaf", ["input_scale", "output_scale"])
def test_quantized_activations_are_refused(leaf: str, tmp_path: Path) -> None:
    leaves, _ = quanto(torch.randn(256, 128))
    leaves[leaf] = torch.tensor(0.25)
    with pytest.raises(CheckpointError, match=rf"a.b.{leaf} is not 1: activations are quantized with one scale"):
        Checkpoint(find_files(write(tmp_path, {f"a.b.{name}": one for name, one in leaves.items()}, None)))


@pytest.mark.parametrize("shape", [(24, 96), (3, 32), (30, 64), (1, 128)])  # numbers of groups that fill no byte, too
@pytest.mark.parametrize("bits", [4, 2])
def test_the_models_shape_tells_the_groups_of_a_row(shape: tuple[int, int], bits: int, tmp_path: Path) -> None:
    leaves, values = quanto_groups(torch.randn(shape), bits=bits)
    checkpoint = Checkpoint(find_files(write(tmp_path, {f"a.b.{name}": one for name, one in leaves.items()}, None)))
    for rows, width in (shape, (shape[0] * shape[1] // 32, 32)):
        read = checkpoint.joined("a.b.weight", (rows, width))
        assert read is not None and read.coded is not None and torch.equal(read.read(), values.reshape(rows, width))
        part = (slice(rows // 2, rows), slice(width // 2, width))
        assert torch.equal(read.read(part), values.reshape(rows, width)[part])
    for wrong in ((shape[0] + 1, shape[1]), (shape[0] * 2, shape[1] // 2 + 1), shape[:1]):
        assert checkpoint.joined("a.b.weight", wrong) is None


def test_odd_groups_become_values(tmp_path: Path) -> None:
    leaves, values = quanto_groups(torch.randn(16, 99), size=33)
    checkpoint = Checkpoint(find_files(write(tmp_path, {f"a.b.{name}": one for name, one in leaves.items()}, None)))
    read = checkpoint.joined("a.b.weight", (16, 99))
    assert read is not None and read.coded is None and torch.equal(read.read(), values)
    assert "codes become plain values (groups of 33 are odd)" in "".join(checkpoint.notes)


def test_groups_of_two_bits_that_fill_no_bytes_take_four(tmp_path: Path) -> None:
    leaves, values = quanto_groups(torch.randn(16, 68), bits=2, size=34)
    checkpoint = Checkpoint(find_files(write(tmp_path, {f"a.b.{name}": one for name, one in leaves.items()}, None)))
    read = checkpoint.joined("a.b.weight", (16, 68))
    assert read is not None and read.coded is not None and read.coded.format == "int4:34:offset"
    assert torch.equal(read.read(), values)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("groups", [64, 128])  # groups of 32 take 1.17 times their file with 2 bits
def test_codes_take_little_more_than_their_file(bits: int, groups: int, tmp_path: Path) -> None:
    leaves, _ = quanto_groups(torch.randn(64, 512), bits=bits, size=groups)
    checkpoint = Checkpoint(find_files(write(tmp_path, {f"a.b.{name}": one for name, one in leaves.items()}, None)))
    read = checkpoint.joined("a.b.weight", (64, 512))
    assert read is not None and read.coded is not None
    stored = sum(one.nbytes for name, one in leaves.items() if name.startswith("weight."))
    assert quant_format(read.coded.format).nbytes(64, 512) <= 1.15 * stored


def test_zeros_beyond_two_bits_take_four(tmp_path: Path) -> None:
    leaves, _ = quanto_groups(torch.randn(16, 64), bits=2, zeros=True)
    leaves["weight._shift"][3] = 4
    checkpoint = Checkpoint(find_files(write(tmp_path, {f"a.b.{name}": one for name, one in leaves.items()}, None)))
    read = checkpoint.joined("a.b.weight", (16, 64))
    assert read is not None and read.coded is not None and read.coded.format == "int4:32:asymmetric"


def test_zeros_that_are_no_codes(tmp_path: Path) -> None:
    leaves, _ = quanto_groups(torch.randn(16, 64), zeros=True)
    leaves["weight._shift"][3] = 16
    with pytest.raises(CheckpointError, match=r"a\.b\.weight\._shift holds \d+ to 16; possible.*0 to 15"):
        Checkpoint(find_files(write(tmp_path, {f"a.b.{name}": one for name, one in leaves.items()}, None)))


@pytest.mark.parametrize("name", ["quanto-qint4", "quanto-qint2", "quanto-qint8", "quanto-qfloat8"])
def test_a_model_from_a_folder(name: str, tmp_path: Path) -> None:
    exact = with_values(llama(), publish(tmp_path, BY_CASE[name], llama()))
    engine = infuse.init_inference(on_meta("llama", **ROOM), checkpoint=str(tmp_path), dtype="fp32", **KEYS)
    assert far(logits(engine), logits(exact)) < 1e-5
    assert {each for step in engine.plan.steps for each in step.formats.values()} == {
        str(quant_format(BY_CASE[name].format))
    }
    assert "taken as it is" in str(engine.plan)
    assert "21 matrices of the checkpoint are quantized: quanto" in str(engine.plan)


# ---- live models ----


def packed_as(kind: str, data: Tensor) -> Tensor:
    """A tensor of the class `kind` around packed codes."""
    cls = stand_in(f"optimum.quanto.tensor.{kind}", Tensor, __tensor_flatten__=lambda self: (["_data"], None))
    made: Any = torch.empty(0).as_subclass(cls)
    made._data = data
    return made


def weight_of(kind: str, parts: dict[str, Any], shape: tuple[int, ...]) -> nn.Parameter:
    """A parameter of the class `kind` that has these parts, and nothing else of the library."""
    cls = stand_in(f"optimum.quanto.tensor.{kind}", Tensor, __tensor_flatten__=lambda self: ([*parts], None))
    weight: Any = torch.empty(shape).as_subclass(cls)
    made = nn.Parameter(weight, requires_grad=False)
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def standard(weight: Tensor, pack: Any) -> tuple[nn.Parameter, Tensor]:
    """A weight in the layout of files."""
    leaves, values = pack(weight)
    parts = {name: leaves[f"weight.{name}"] for name in ("_data", "_scale", "_shift") if f"weight.{name}" in leaves}
    if "_data" in parts:
        return weight_of("weights.qbytes.WeightQBytesTensor", parts, weight.shape), values
    data = packed_as("packed.PackedTensor", leaves["weight._data._data"])
    return weight_of("weights.qbits.WeightQBitsTensor", {"_data": data, **parts}, weight.shape), values


def for_cpus(codes: Tensor) -> Tensor:
    """Codes as PyTorch packs them on this CPU."""
    return torch._convert_weight_to_int4pack_for_cpu(codes.int(), 2)


def for_gpus(codes: Tensor) -> Tensor:
    """Codes as PyTorch packs them on GPUs, two tiles of 16 inputs in a word: int32 [out / 8, in / 32, threads, 1]."""
    out, inputs = codes.shape
    words = torch.zeros(out // 8, inputs // 32, 32, 1, dtype=torch.int64)
    for tile in range(out // 8):
        for outer in range(inputs // 32):
            for thread in range(32):
                row = codes[8 * tile + thread // 4, 32 * outer :].tolist()
                first = 2 * (thread % 4)
                eight = [row[first + more] for more in (0, 8, 16, 24, 1, 9, 17, 25)]
                words[tile, outer, thread, 0] = sum(code << 4 * place for place, code in enumerate(eight))
    return words.to(torch.int32)


def tinygemm(weight: Tensor, pack: Any) -> tuple[nn.Parameter, Tensor]:
    """A weight as quanto keeps it in bfloat16: scale * (code - 8) + zero."""
    out, inputs = weight.shape
    groups = weight.reshape(out, -1, 32)
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    scale = ((high - low) / 15).bfloat16()
    zero = (low + 8 * scale.float()).bfloat16()
    codes = ((groups - zero.float()) / scale.float() + 8).round().clamp(0, 15)
    data = packed_as("weights.tinygemm.TinyGemmPackedTensor", pack(codes.reshape(out, inputs).to(torch.uint8)))
    both = torch.cat((scale, zero), dim=-1).transpose(0, 1).contiguous()
    values = scale.float() * (codes - 8) + zero.float()
    made = weight_of("weights.tinygemm.TinyGemmWeightQBitsTensor", {"_data": data, "_scale_shift": both}, weight.shape)
    return made, values.reshape(out, inputs)


MADE: dict[str, tuple[Any, Any, str]] = {
    "qint8": (standard, quanto, "int8:row:f32"),
    "qint4": (standard, quanto_groups, "int4:32:offset"),
    "qint2": (standard, partial(quanto_groups, bits=2), "int2:32:offset"),
    "tinygemm-cpu": (tinygemm, for_cpus, "int4:32:offset"),
    "tinygemm-gpu": (tinygemm, for_gpus, "int4:32:offset"),
}


def held(kind: str, **changes: Any) -> tuple[Any, Any]:
    """A model whose linears but the head are stand-ins for quanto's, and one with their values."""
    made, pack, _ = MADE[kind]
    model, exact = llama(**changes).eval(), llama(**changes).eval()
    for path, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and path != "lm_head":
            one: Any = stand_in("optimum.quanto.nn.qlinear.QLinear", nn.Linear)(
                linear.in_features, linear.out_features, False
            )
            one.weight, values = made(linear.weight.detach(), pack)
            one.register_buffer("input_scale", torch.ones(())), one.register_buffer("output_scale", torch.ones(()))
            one.activation_qtype = None
            model.set_submodule(path, one)
            exact.get_submodule(path).weight.data.copy_(values)
    model.is_quantized, model.quantization_method = True, "quanto"
    return model, exact


@pytest.mark.parametrize("kind", MADE)
def test_codes_of_a_live_model_are_taken_as_they_are(kind: str) -> None:
    model, exact = held(kind)
    found = codes_in(model)
    assert isinstance(found, CodesInModel)
    wanted = exact.get_submodule(AT).weight
    tensor = found.tensors[f"{AT}.weight"]
    assert torch.equal(tensor.read(), wanted)
    for part in ((slice(3, 70),), (slice(63, 65), slice(32, 64)), (slice(5, 5),)):
        assert torch.equal(tensor.read(part), wanted[part]), part
    engine = infuse.init_inference(model, dtype="fp32", **KEYS)
    assert far(logits(engine), logits(exact)) < 1e-5
    assert sum(step.depth == "block" for step in engine.plan.steps) == 3
    assert {each for step in engine.plan.steps for each in step.formats.values()} == {MADE[kind][2]}
    assert "taken as it is" in str(engine.plan) and "21 linears of quanto are taken in their codes" in str(engine.plan)
    if not isinstance(kernels(), str):
        assert engine.plan.after_bytes <= 1.15 * engine.plan.before_bytes


@pytest.mark.parametrize("out", [16, 48, 80, 112, 64, 128])  # blocks of 64 outputs, and what is left of them
def test_blocks_that_cpus_pack(out: int) -> None:
    linear: Any = stand_in("optimum.quanto.nn.qlinear.QLinear", nn.Linear)(96, out, False)
    linear.weight, values = tinygemm(torch.randn(out, 96), for_cpus)
    found = codes_in(nn.Sequential(linear))
    assert isinstance(found, CodesInModel) and torch.equal(found.tensors["0.weight"].read(), values)


def _with_activations(linear: Any) -> None:
    linear.activation_qtype = SimpleNamespace(name="qint8")


def _not_frozen(linear: Any) -> None:
    linear.weight = nn.Parameter(torch.randn(linear.weight.shape))


def _for_one_kernel(linear: Any) -> None:
    parts = dict(_data=torch.zeros(1), _scale=torch.ones(1), _shift=torch.ones(1))
    linear.weight = weight_of("weights.awq.AWQWeightQBitsTensor", parts, linear.weight.shape)


@pytest.mark.parametrize(("change", "told"), [
    (_with_activations, f"{AT} rounds activations to qint8 with one scale for all, which is not supported"),
    (_not_frozen, f"{AT} has plain weights that each forward quantizes: call quanto's freeze first"),
    (_for_one_kernel, f"{AT} holds a AWQWeightQBitsTensor of quanto, which is not read"),
])  # fmt: skip
def test_models_that_are_left_alone(change: Any, told: str) -> None:
    model, _ = held("qint8")
    change(model.get_submodule(AT))
    plan = infuse.plan(model, dtype="fp32")
    assert not plan.steps and "already quantized by quanto" in str(plan) and told in str(plan)


# ---- the library ----


def in_float32(weight: Any) -> Tensor:
    """What the library makes of its codes, with scales and shifts widened."""
    if hasattr(weight, "_scale_shift"):  # packed for the product, whose zeros its own way back would round
        scale, zero = weight._scale_shift.float().transpose(0, 1).unsqueeze(-2).unbind(-1)
        codes = weight._data.unpack().float()
        return (scale * (codes.reshape(*scale.shape[:2], -1) - 8) + zero).reshape(weight.shape)
    inner = weight.data
    for name in ("_scale", "_shift"):
        if getattr(inner, name, None) is not None:
            setattr(inner, name, getattr(inner, name).float())
    return inner.dequantize().float()


LIBRARY = [
    ("int8", torch.float32, "int8:row:f32"),
    ("int8", torch.bfloat16, "int8:row"),
    ("float8", torch.float16, "fp8:row:f32"),
    ("int4", torch.float32, "int4:128:offset:f32"),
    ("int4", torch.bfloat16, "int4:128:offset"),
    ("int2", torch.float32, "int2:128:offset:f32"),
    ("int2", torch.bfloat16, "int2:128:offset"),
    ("int2", torch.float16, "int2:128:offset:f16"),
]


@pytest.mark.parametrize(("weights", "dtype", "format"), LIBRARY)
def test_folders_of_the_library(weights: str, dtype: torch.dtype, format: str, tmp_path: Path) -> None:
    library = pytest.importorskip("optimum.quanto")
    kind = library.qfloat8 if weights == "float8" else getattr(library, f"q{weights}")
    made = library.QuantizedModelForCausalLM.quantize(llama(**WIDE).to(dtype), weights=kind, exclude="lm_head")
    made.save_pretrained(tmp_path)
    again = library.QuantizedModelForCausalLM.from_pretrained(tmp_path)._wrapped
    read = opened(tmp_path, **WIDE).tensors
    for name in (f"{AT}.weight", "model.layers.2.mlp.down_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
        coded, weight = read[name].coded, again.get_parameter(name)
        assert coded is not None and coded.format == str(quant_format(format))
        if not hasattr(weight, "_scale_shift"):  # which is packed again, with other zeros
            assert torch.equal(read[name].read(), in_float32(weight))


def test_the_library_repacks_what_its_file_has(tmp_path: Path) -> None:
    """In bfloat16 its product takes other zeros than the file's shifts: the file's are kept."""
    library = pytest.importorskip("optimum.quanto")
    weight = torch.randn(64, 256).bfloat16()
    scale, shift = library.MaxOptimizer()(weight, library.qint4, 0, 128)
    made = library.WeightQBitsTensor.quantize(weight, library.qint4, 0, 128, scale, shift, optimized=False)
    state: dict[str, Tensor] = {}
    made.save_to_state_dict(state, "m.weight.", False)
    read = Checkpoint(find_files(write(tmp_path, state, None))).joined("m.weight", (64, 256))
    assert read is not None and torch.equal(read.read(), in_float32(nn.Parameter(made, requires_grad=False)))


@pytest.mark.parametrize(("weights", "dtype", "format"), LIBRARY)
def test_live_models_of_the_library(weights: str, dtype: torch.dtype, format: str, tmp_path: Path) -> None:
    pytest.importorskip("optimum.quanto")
    llama(**WIDE).save_pretrained(tmp_path)
    asked = t.QuantoConfig(weights=weights)
    model = t.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=asked, dtype=dtype).eval()
    wanted, found = logits(model), codes_in(model)
    assert isinstance(found, CodesInModel)
    values = in_float32(model.get_parameter(f"{AT}.weight").data)
    assert torch.equal(found.tensors[f"{AT}.weight"].read(), values)
    model = t.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=asked, dtype=dtype).eval()
    engine = infuse.init_inference(model, dtype=dtype, **KEYS)
    assert sum(step.depth == "block" for step in engine.plan.steps) == 3
    assert {each for step in engine.plan.steps for each in step.formats.values()} == {str(quant_format(format))}
    assert far(logits(engine), wanted) < {torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.05}[dtype]
    if not isinstance(kernels(), str):
        assert engine.plan.after_bytes <= 1.15 * engine.plan.before_bytes


# ---- shards and ranks ----


def on_rank(folder: str) -> Tensor:
    keys: dict[str, Any] = dict(KEYS, tensor_parallel={"tp_size": 2})
    return logits(infuse.init_inference(on_meta("llama", **ROOM), checkpoint=folder, dtype="fp32", **keys))


def test_offsets_over_ranks(ranks: Ranks, tmp_path: Path) -> None:
    exact = with_values(llama(), publish(tmp_path, BY_CASE["quanto-qint4"], llama()))
    for given in ranks.run(2, on_rank, str(tmp_path)):
        assert far(given, logits(exact)) < 1e-4


def test_offsets_in_shards(tmp_path: Path) -> None:
    publish(tmp_path / "coded", BY_CASE["quanto-qint4"], llama())
    keys = dict(KEYS, dtype="fp32", save_mp_checkpoint_path=str(tmp_path / "shards"))
    wanted = infuse.init_inference(on_meta("llama", **ROOM), checkpoint=str(tmp_path / "coded"), **keys)
    again = infuse.init_inference(on_meta("llama", **ROOM), checkpoint=str(tmp_path / "shards"), dtype="fp32", **KEYS)
    assert torch.equal(logits(again), logits(wanted))
    assert {each for step in again.plan.steps for each in step.formats.values()} == {"int4:32:offset"}
