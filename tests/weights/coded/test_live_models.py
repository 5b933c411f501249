"""Live models that another library holds in codes: their linears are taken with these, and layers become blocks.

Stand-ins have the names and the tensors of bitsandbytes' classes, in both of the layouts that these have on CPUs. The
libraries themselves are tried where they are installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import infuse
from infuse.apply import load
from infuse.plan.bytes import parameter_bytes
from infuse.quant.parse import quant_format
from infuse.weights.in_model import CodesInModel, codes_in
from tests.models.families import BY_NAME
from tests.support.checkpoints import on_meta
from tests.support.libraries import stand_in
from tests.support.quantized_files import BY_CASE, ROOM, llama, publish
from tests.support.ranks import Ranks

IDS = torch.arange(5, 21)[None]
KEYS: dict[str, Any] = dict(progress=False, replace_with_kernel_inject=True)
CASES = ["nf4", "nf4-doubly", "fp4", "bitsandbytes-int8"]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


def far(given: Tensor, exact: Tensor) -> float:
    return float((given - exact).norm() / exact.norm())


def four_bits(linear: nn.Module, leaves: dict[str, Tensor], packed: bool) -> nn.Module:
    """A Linear4bit, as it is loaded, or `packed` as its first forward leaves it."""
    made = stand_in("bitsandbytes.nn.modules.Linear4bit", nn.Linear)(linear.in_features, linear.out_features, False)
    (kind,) = (leaf for leaf in leaves if "__" in leaf)
    told = json.loads(bytes(leaves[kind].tolist()))
    state = SimpleNamespace(
        quant_type=told["quant_type"], blocksize=told["blocksize"], shape=torch.Size(told["shape"]),
        code=leaves["weight.quant_map"], absmax=leaves["weight.absmax"], nested="nested_offset" in told,
    )  # fmt: skip
    if state.nested:
        state.offset = torch.tensor(told["nested_offset"])
        scales, table = leaves["weight.nested_absmax"], leaves["weight.nested_quant_map"]
        state.state2 = SimpleNamespace(absmax=scales, code=table, blocksize=told["nested_blocksize"])
    weight = leaves["weight"]
    if packed:
        out, inputs = state.shape
        codes = torch.stack((weight.flatten() >> 4, weight.flatten() & 15), dim=1).reshape(
            out // 32, 32, inputs // 2, 2
        )
        runs = codes.permute(0, 2, 1, 3).reshape(-1, 2, 32)  # 32 codes for low nibbles, 32 for high ones
        weight = (runs[:, 1] << 4 | runs[:, 0]).reshape(out, inputs // 2)
        state.absmax = state.absmax.reshape(out, -1).t().contiguous().bfloat16()
        state.packing_format_for_cpu = True
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.weight.quant_state = state  # type: ignore[attr-defined]
    return made


def eight_bits(linear: nn.Module, leaves: dict[str, Tensor], ran: bool) -> nn.Module:
    """A Linear8bitLt, whose scales its first forward moves from the weight to a state."""
    made: Any = stand_in("bitsandbytes.nn.modules.Linear8bitLt", nn.Linear)(
        linear.in_features, linear.out_features, False
    )
    made.weight = nn.Parameter(leaves["weight"], requires_grad=False)
    made.weight.SCB, made.state = (None if ran else leaves["SCB"]), SimpleNamespace(SCB=leaves["SCB"] if ran else None)
    return made


def held_in_codes(name: str, model: Any, ran: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """The model with stand-ins for its linears but the head, marked as transformers does; and the values of these."""
    values = model.state_dict()
    for path, linear in list(model.named_modules()):
        if type(linear).__name__ not in ("Linear", "Conv1D") or path == "lm_head":
            continue
        inputs_first = type(linear) is not nn.Linear
        leaves, matrix = BY_CASE[name].pack(linear.weight.detach().t() if inputs_first else linear.weight.detach())
        size = SimpleNamespace(out_features=len(matrix), in_features=matrix.shape[1])
        made = (eight_bits if "int8" in name else four_bits)(size, leaves, ran)  # type: ignore[arg-type]
        made.bias = linear.bias
        made.source_cls = type(linear)  # type: ignore[assignment]
        if ran and "int8" not in name:
            scale = leaves["weight.absmax"].reshape(-1, 1)
            shape = matrix.shape
            matrix = (matrix.reshape(len(scale), -1) / scale * scale.bfloat16().float()).reshape(shape)
        model.set_submodule(path, made)
        values[f"{path}.weight"] = matrix.t() if inputs_first else matrix
    model.is_quantized, model.quantization_method = True, "bitsandbytes"
    model.config.quantization_config = dict(BY_CASE[name].config)
    return model.eval(), values


@pytest.mark.parametrize("ran", [False, True], ids=["loaded", "run"])
@pytest.mark.parametrize("name", CASES)
def test_codes_are_taken_as_they_are(name: str, ran: bool) -> None:
    if ran and name == "nf4-doubly":
        pytest.skip("the first forward leaves plain scales")
    model, values = held_in_codes(name, llama(), ran)
    exact = llama().eval()
    exact.load_state_dict(values)
    planned = infuse.plan(model, dtype="fp32", **KEYS)
    assert type(model.model.layers[0].mlp.up_proj).__module__.startswith("bitsandbytes")
    assert model.is_quantized and model.config.quantization_config
    engine = infuse.init_inference(model, dtype="fp32", **KEYS)
    assert far(logits(engine), logits(exact)) < 1e-4
    assert sum(step.depth == "block" for step in engine.plan.steps) == 3
    assert [step.formats for step in engine.plan.steps] == [step.formats for step in planned.steps]
    assert {format for step in engine.plan.steps for format in step.formats.values()} == {BY_CASE[name].format}
    assert "taken as it is" in str(engine.plan) and "21 linears of bitsandbytes are taken in their codes" in str(
        planned
    )
    assert ("an earlier forward has rounded the scales" in str(engine.plan)) == (ran and "int8" not in name)
    assert engine.plan.after_bytes <= 1.01 * engine.plan.before_bytes
    assert "is_quantized" not in vars(model) and not hasattr(model.config, "quantization_config")
    assert engine.generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, IDS.shape[1] + 3)


def test_norms_in_16_bits_beside_codes() -> None:
    """The proof of the structure holds values of codes in float32, though other parameters have 16 bits."""
    model, _ = held_in_codes("nf4", llama())
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16() if parameter.is_floating_point() else parameter.data
    engine = infuse.init_inference(model, dtype="bf16", **KEYS)
    assert sum(step.depth == "block" for step in engine.plan.steps) == 3, str(engine.plan)


def test_a_lazy_part_of_packed_codes() -> None:
    model, _ = held_in_codes("nf4", llama(), ran=True)
    plain, _ = held_in_codes("nf4", llama())
    packed, stored = codes_in(model), codes_in(plain)
    assert isinstance(packed, CodesInModel) and isinstance(stored, CodesInModel)
    one, other = (codes.tensors["model.layers.1.mlp.up_proj.weight"].coded for codes in (packed, stored))
    assert one is not None and other is not None
    for part in ((slice(0, 1),), (slice(31, 70), slice(3, 9)), (slice(5, 5),), ()):
        assert torch.equal(one.buffers["data"].read(part), other.buffers["data"].read(part))


def test_weights_whose_inputs_come_first() -> None:
    changes = dict(n_embd=128, n_layer=2)
    model, values = held_in_codes("nf4", BY_NAME["gpt2"].make(**changes))
    exact = BY_NAME["gpt2"].make(**changes).eval()
    exact.load_state_dict(values)
    engine = infuse.init_inference(model, dtype="fp32", **KEYS)
    assert sum(step.depth == "block" for step in engine.plan.steps) == 2
    assert far(logits(engine), logits(exact)) < 1e-4


def test_another_format_is_said_to_round_twice() -> None:
    model, _ = held_in_codes("nf4", llama())
    plan = infuse.init_inference(model, dtype="fp32", quant="int8", **KEYS).plan
    assert "21 matrices are stored in nf4:64 and become int8, e.g." in str(plan) and "rounded twice" in str(plan)


def test_an_error_restores_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = held_in_codes("bitsandbytes-int8", llama())
    before = {path: (module, dict(module._parameters)) for path, module in model.named_modules()}
    marks = {**vars(model), **vars(model.config)}

    def fails(*args: Any) -> Any:
        assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
        raise MemoryError("no room")

    monkeypatch.setattr(load, "carry_out", fails)
    with pytest.raises(MemoryError):
        infuse.init_inference(model, dtype="fp32", **KEYS)
    after = {path: (module, dict(module._parameters)) for path, module in model.named_modules()}
    assert after.keys() == before.keys()
    for path, (module, parameters) in before.items():
        now, held = after[path]
        assert now is module and all(held[name] is one for name, one in parameters.items())
    assert {**vars(model), **vars(model.config)} == marks


def test_codes_that_cannot_be_read_are_left_with_the_reason() -> None:
    model, _ = held_in_codes("nf4", llama())
    linear = model.model.layers[1].mlp.up_proj
    linear.forward = lambda x: x
    planned = infuse.plan(model, dtype="fp32")
    assert not planned.steps and "already quantized by bitsandbytes, 4 bits" in str(planned)
    assert "not taken: model.layers.1.mlp.up_proj has a forward set on the instance" in str(planned)
    del linear.forward
    linear.weight.quant_state.absmax = linear.weight.quant_state.absmax[1:]
    assert "model.layers.1.mlp.up_proj.weight.absmax is float32" in str(infuse.plan(model, dtype="fp32"))
    model.model.layers[0].mlp.act_fn = stand_in("peft.tuners.lora.bnb.Linear4bit", nn.Module)()
    assert "model.layers.0.mlp.act_fn is peft's" in str(infuse.plan(model, dtype="fp32"))


def of_library(folder: Path, bits: int, dtype: torch.dtype) -> Any:
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(folder)
    four = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    config = t.BitsAndBytesConfig(**(four if bits == 4 else dict(load_in_8bit=True)))
    return t.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_of_bitsandbytes(bits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Its own forward rounds activations (8 bits) and values and scales (4 bits): 1 to 4 % of the logits here."""
    model = of_library(tmp_path, bits, dtype)
    fresh = codes_in(model)
    assert isinstance(fresh, CodesInModel)
    path, bnb = "model.layers.0.self_attn.k_proj", pytest.importorskip("bitsandbytes.functional")
    linear = model.get_submodule(path)
    if bits == 4:
        state = linear.weight.quant_state
        state.dtype = torch.float32
        values = bnb.dequantize_4bit(linear.weight.data, state)
        state.dtype = dtype
    else:
        values = linear.weight.data.float() * (linear.weight.SCB * (1 / 127))[:, None]
    assert torch.equal(fresh.tensors[f"{path}.weight"].read(), values)
    wanted = logits(model)
    ran = codes_in(model)
    assert isinstance(ran, CodesInModel)
    after = ran.tensors[f"{path}.weight"].read()
    assert far(after, values) < (3e-3 if bits == 4 else 1e-9)  # of scales in bfloat16, where the processor has that
    assert torch.equal(wanted, logits(model))
    engine = infuse.init_inference(model, dtype=dtype, **KEYS)
    assert sum(step.depth == "block" for step in engine.plan.steps) == 3
    assert far(logits(engine), wanted) < 0.06
    assert engine.generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, IDS.shape[1] + 3)


def test_adapters_on_a_model_of_bitsandbytes_leave_it_alone(tmp_path: Path) -> None:
    peft, model = pytest.importorskip("peft"), of_library(tmp_path, 4, torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=4)).eval()
    wanted = logits(adapted)
    engine = infuse.init_inference(adapted, dtype="fp32", **KEYS)
    assert not engine.plan.steps and "peft's, which adapts quantized linears" in str(engine.plan)
    assert torch.equal(logits(engine), wanted)


@pytest.mark.parametrize("name", ["compressed-w4a16", "compressed-fp8", "compressed-w8a16"])
def test_a_model_of_compressed_tensors(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    exact, values = llama().eval(), publish(tmp_path, BY_CASE[name], llama())
    config = dict(exact.config.to_dict(), architectures=["LlamaForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(dict(config, quantization_config=dict(BY_CASE[name].config))))
    exact.load_state_dict(values)
    model = t.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    engine = infuse.init_inference(model, dtype="fp32", **KEYS)
    assert sum(step.depth == "block" for step in engine.plan.steps) == 3
    assert far(logits(engine), logits(exact)) < 1e-4
    assert not model._forward_pre_hooks or "decompress" not in str(model._forward_pre_hooks)

    model = t.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    wanted = logits(model)  # makes plain values of the codes
    engine = infuse.init_inference(model, dtype="fp32", **KEYS)
    assert not engine.plan.steps and "call init_inference before the first forward" in str(engine.plan)
    assert torch.equal(logits(engine), wanted)


TORCHAO = {
    "Int8Tensor": ("int8:row:f32", torch.int8, ROOM["hidden_size"], None),
    "Float8Tensor": ("fp8:row:f32", torch.float8_e4m3fn, ROOM["hidden_size"], None),
    "IntxUnpackedToInt8Tensor": ("int4:32:asymmetric", torch.int8, 32, torch.int4),
}


def weight_of_torchao(kind: str, weight: Tensor) -> tuple[Any, Tensor]:
    """A tensor of the class that has the parts of torchao's, and the values of its codes."""
    _, dtype, group, few = TORCHAO.get(kind, TORCHAO["Int8Tensor"])
    group = group if few else weight.shape[1]
    groups = weight.unflatten(1, (-1, group))
    most = 7 if few else 100
    scale = groups.abs().amax(-1) / most
    scale = scale.bfloat16() if few else scale.float()
    codes = (groups / scale.float()[..., None]).round().clamp(-8 if few else -128, most)
    parts = {"qdata": codes.flatten(1).to(dtype), "scale": scale}
    zero = torch.zeros_like(scale)
    if few:
        zero = torch.arange(scale.numel()).view_as(scale) % 3 - 1
        parts["zero_point"] = zero.to(torch.int8)
    made: Any = nn.Parameter(weight.as_subclass(stand_in(
        f"torchao.quantization.{kind}", Tensor, __tensor_flatten__=lambda self: ([*parts], None)
    )), requires_grad=False)  # fmt: skip
    for name, value in {**parts, "block_size": (1, group), "target_dtype": few, "act_quant_kwargs": None}.items():
        setattr(made, name, value)
    values = (parts["qdata"].float().view_as(groups) - zero[..., None]) * scale.float()[..., None]
    return made, values.flatten(1)


def of_torchao(kind: str) -> tuple[Any, Any]:
    """A model whose linears but the head have such weights, and one with their values."""
    model, exact = llama().eval(), llama().eval()
    for path, linear in model.named_modules():
        if type(linear) is nn.Linear and path != "lm_head":
            linear.weight, values = weight_of_torchao(kind, linear.weight.detach())
            exact.get_submodule(path).weight.data.copy_(values)
    return model, exact


@pytest.mark.parametrize("kind", TORCHAO)
def test_weights_of_torchao(kind: str) -> None:
    model, exact = of_torchao(kind)
    codes = [getattr(one, part) for one in model.parameters() if type(one).__name__ == kind
             for part in one.__tensor_flatten__()[0]]  # fmt: skip
    plain = [one for name, one in exact.named_parameters() if "proj" in name]
    engine = infuse.init_inference(model, dtype="fp32", **KEYS)
    assert far(logits(engine), logits(exact)) < 1e-4
    assert sum(step.depth == "block" for step in engine.plan.steps) == 3
    formats = {format for step in engine.plan.steps for format in step.formats.values()}
    assert formats == {str(quant_format(TORCHAO[kind][0]))}, formats
    assert "taken as it is" in str(engine.plan) and "21 linears of torchao are taken in their codes" in str(engine.plan)
    wanted = parameter_bytes(exact) - sum(one.nbytes for one in plain) + sum(one.nbytes for one in codes)
    assert engine.plan.before_bytes == wanted
    assert not any(type(one).__name__ == kind for one in engine.module.parameters())


@pytest.mark.parametrize("kind", ["Int4PreshuffledTensor", "AffineQuantizedTensor"])
def test_other_classes_of_torchao_are_left_alone(kind: str) -> None:
    model, _ = of_torchao(kind)
    for one in model.parameters():  # of earlier versions, with their codes in a tensor of another class
        if type(one).__name__ == "AffineQuantizedTensor":
            type(one).__tensor_flatten__, one.tensor_impl = (lambda self: (["tensor_impl"], None)), one.qdata
    engine = infuse.init_inference(model, dtype="fp32", **KEYS)
    assert not engine.plan.steps and kind in str(engine.plan) and "not read" in str(engine.plan)


CONFIGS = [
    ("Int8WeightOnlyConfig", {}, "int8:row:f32"),
    ("Int8DynamicActivationInt8WeightConfig", {}, "int8:row:f32:a8"),
    ("Float8WeightOnlyConfig", {}, "fp8:row:f32"),
    ("IntxWeightOnlyConfig", {"weight_dtype": torch.int4, "granularity": 32}, "int4:32"),
]


@pytest.mark.parametrize(("name", "options", "format"), CONFIGS)
def test_a_model_of_torchao(name: str, options: dict[str, Any], format: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    options = {key: quantization.PerGroup(each) if key == "granularity" else each for key, each in options.items()}
    llama().save_pretrained(tmp_path)
    asked = t.TorchAoConfig(getattr(quantization, name)(**options))
    model = t.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=asked, dtype=torch.bfloat16).eval()
    wanted = logits(model)
    engine = infuse.init_inference(model, dtype="bf16", **KEYS)
    assert sum(step.depth == "block" for step in engine.plan.steps) == 3
    assert {str(quant_format(format))} == {each for step in engine.plan.steps for each in step.formats.values()}
    assert far(logits(engine), wanted) < (0.06 if ":a8" in format else 0.02)  # activations are rounded otherwise
    assert engine.generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, IDS.shape[1] + 3)


def on_rank() -> Tensor:
    keys: dict[str, Any] = dict(KEYS, tensor_parallel={"tp_size": 2})
    return logits(infuse.init_inference(held_in_codes("nf4", llama())[0], dtype="fp32", **keys))


def test_codes_over_ranks(ranks: Ranks) -> None:
    exact = llama().eval()
    exact.load_state_dict(held_in_codes("nf4", llama())[1])
    for given in ranks.run(2, on_rank):
        assert far(given, logits(exact)) < 1e-4


def test_codes_in_shards(tmp_path: Path) -> None:
    model, _ = held_in_codes("nf4", llama())
    wanted = logits(infuse.init_inference(model, dtype="fp32", save_mp_checkpoint_path=str(tmp_path), **KEYS))
    engine = infuse.init_inference(on_meta("llama", **ROOM), dtype="fp32", checkpoint=str(tmp_path), **KEYS)
    assert torch.equal(logits(engine), wanted)
