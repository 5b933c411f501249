"""Lazy tensors of GGUF files: parts of them, the bytes that are read, and what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

import infuse
from infuse.architectures.packing import StackedExperts
from infuse.ground.errors import CheckpointError
from infuse.weights.foreign.merged import Merged
from infuse.weights.gguf.config import config_values
from infuse.weights.gguf.file import GGUFFile
from infuse.weights.gguf.names import FREQUENCIES, named_tensors
from infuse.weights.gguf.parts import open_parts
from infuse.weights.gguf.rotary import rope_parameters
from infuse.weights.gguf.tensors import Alternating, matrix
from infuse.weights.lazy import Coded, CodedTensor, InMemory, Order, Stacked
from infuse.weights.stacked_experts import TallMatrix
from tests.support.gguf_files import llama_tensors, llama_values, matrices_in, permuted, write

KEYS = {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.expert_count": 2}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("at_once", (1 << 20, 1024))  # values: all rows, or two
@pytest.mark.parametrize("type", ("F16", "Q8_0", "Q4_K", "Q5_K", "Q6_K"))
def test_parts_of_a_matrix(path, type, at_once, monkeypatch):
    monkeypatch.setattr("infuse.weights.gguf.tensors.PART_VALUES", at_once)
    stored = write(path, "llama", KEYS, {"output.weight": torch.randn(12, 512)}, matrices_in(type))["output.weight"]
    tensor = named_tensors(open_parts([path]))["lm_head.weight"]
    for rows, columns in ((slice(None), slice(None)), (slice(3, 7), slice(256, 512)), (slice(11, 12), slice(10, 300))):
        assert torch.equal(tensor.read((rows, columns)).float(), stored[rows, columns])
    assert torch.equal(tensor.read((slice(4, 4),)).float(), stored[4:4])


def test_only_the_rows_that_are_asked_for_are_read_and_only_once(path):
    write(path, "llama", KEYS, {"output.weight": torch.randn(64, 512)}, matrices_in("Q4_K"))
    (file,) = open_parts([path])
    tensor = matrix(file, "output.weight")
    assert tensor.coded is not None and tensor.coded.format == "q4_k"
    before = file.bytes_read
    data, scale = (tensor.coded.buffers[name].read((slice(8, 16),)) for name in ("data", "scale"))
    assert file.bytes_read - before == 8 * 288
    whole = [tensor.coded.buffers[name].read() for name in ("scale", "data")]
    assert torch.equal(whole[1][8:16], data) and torch.equal(whole[0][8:16], scale)
    assert file.bytes_read - before == (8 + 64) * 288
    tensor.read((slice(0, 4), slice(256, 512)))
    assert file.bytes_read - before == (8 + 64 + 4) * 288


@pytest.mark.parametrize("type", ("F32", "Q4_0"))
def test_rows_of_q_are_unpermuted_in_any_part(path, type):
    weight = torch.randn(64, 32)
    stored_as = {"blk.0.attn_q.weight": permuted(weight, 4), "blk.0.attn_q.bias": permuted(weight[:, 0], 4)}
    stored = write(path, "llama", KEYS, stored_as, matrices_in(type))["blk.0.attn_q.weight"]
    tensors = named_tensors(open_parts([path]))
    tensor = tensors["model.layers.0.self_attn.q_proj.weight"]
    wanted = torch.empty_like(stored)
    order = permuted(torch.arange(64), 4)
    wanted[order] = stored
    assert type != "F32" or torch.equal(wanted, weight)
    for start, stop in ((0, 64), (16, 32), (5, 6), (7, 41), (9, 9)):
        assert torch.equal(tensor.read((slice(start, stop),)), wanted[start:stop])
    assert torch.equal(tensors["model.layers.0.self_attn.q_proj.bias"].read((slice(3, 60),)), weight[3:60, 0])


def test_heads_may_differ_between_layers(path):
    weights = {f"blk.{layer}.attn_q.weight": torch.randn(64, 32) for layer in (0, 1)}
    stored_as = {name: permuted(weight, heads) for (name, weight), heads in zip(weights.items(), (4, 2), strict=True)}
    write(path, "llama", {"llama.attention.head_count": [4, 2]}, stored_as)
    for (name, tensor), weight in zip(named_tensors(open_parts([path])).items(), weights.values(), strict=True):
        assert torch.equal(tensor.read(), weight), name
    write(path, "llama", {"llama.attention.head_count": [4]}, stored_as)
    with pytest.raises(CheckpointError, match="blk.1.attn_q.weight in model.gguf: llama.attention.head_count is None"):
        named_tensors(open_parts([path]))


@pytest.mark.parametrize("type", ("F32", "F16", "BF16"))
def test_norms_stored_plus_1_lose_no_bits(path, type):
    """A sum in 16 bits would round those below a half."""
    name, kept = "blk.0.attn_norm.weight", torch.linspace(-3, 3, 32)
    stored = write(path, "gemma", {}, {name: kept + 1, "output.weight": torch.ones(2, 32)}, lambda *_: type)
    made = named_tensors(open_parts([path]))
    assert torch.equal(made["model.layers.0.input_layernorm.weight"].read(), stored[name].float() - 1)
    assert torch.equal(made["lm_head.weight"].read().float(), torch.ones(2, 32))


def test_up_besides_gate_and_up_in_one(path):
    experts = torch.randn(2, 6, 64)
    write(path, "llama", KEYS, {"blk.0.ffn_up_exps.weight": experts, "blk.0.ffn_gate_up_exps.weight": experts})
    with pytest.raises(CheckpointError, match="two tensors map to model.layers.0.block_sparse_moe.experts.0.w3"):
        named_tensors(open_parts([path]))


def test_gate_and_up_in_one_tensor(path):
    experts = torch.randn(2, 6, 64)
    stored = write(path, "qwen3moe", {}, {"blk.0.ffn_gate_up_exps.weight": experts}, matrices_in("Q8_0"))
    (file,) = open_parts([path])
    tensors, before = named_tensors((file,)), file.bytes_read
    up = tensors["model.layers.0.mlp.experts.1.up_proj.weight"]
    assert torch.equal(up.read(), stored["blk.0.ffn_gate_up_exps.weight"][1, 3:])
    assert torch.equal(
        tensors["model.layers.0.mlp.experts.0.gate_proj.weight"].read(), next(iter(stored.values()))[0, :3]
    )
    assert file.bytes_read - before == 6 * 68


def test_rows_of_plain_experts_are_read_alone(path):
    experts = torch.randn(2, 6, 64)
    write(path, "qwen3moe", {}, {"blk.0.ffn_gate_up_exps.weight": experts})
    (file,) = open_parts([path])
    tensors, before = named_tensors((file,)), file.bytes_read
    up = tensors["model.layers.0.mlp.experts.1.up_proj.weight"]
    assert torch.equal(up.read((slice(1, 2), slice(3, 9))), experts[1, 4:5, 3:9])
    assert file.bytes_read - before == 64 * 4
    assert torch.equal(up.read(), experts[1, 3:]) and up.read((slice(2, 2),)).shape == (0, 64)


JOINED = {
    "stacked": lambda one: Stacked([one, one]),
    "merged": lambda one: Merged([[one], [one]]),
    "tall": lambda one: TallMatrix(StackedExperts(flat=2), one),
    "alternating": lambda one: Alternating(one, one),
}


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("has_order", (True, False))
def test_joined_matrices_keep_no_codes_in_an_order(has_order, name):
    """Their codes would be read as if they lay in the order of the inputs."""
    order = Order.of(torch.arange(32).flip(0)) if has_order else None
    data = InMemory(torch.randint(-127, 128, (4, 32), dtype=torch.int8))
    coded = Coded("int8:32", {"data": data, "scale": InMemory(torch.ones(4, 1, dtype=torch.bfloat16))}, order)
    joined = JOINED[name](CodedTensor((4, 32), torch.float32, coded))
    assert (joined.coded is None) == has_order
    row = data.tensor[1 if name == "alternating" else 3].float()
    assert torch.equal(joined.read().flatten(0, -2)[3], row.flip(0) if has_order else row)


@pytest.mark.parametrize("types", (("Q8_0", "Q8_0"), ("Q8_0", "Q4_0")))
def test_gate_and_up_that_alternate_in_one_tensor(path, types):
    """gpt-oss: codes of two types cannot alternate, so they become values."""
    pair = {f"blk.0.ffn_{name}_exps.weight": torch.randn(2, 6, 64) for name in ("gate", "up")}
    stored = write(path, "gpt-oss", {}, pair, lambda name, tensor: types["_up_" in name])
    tensor = named_tensors(open_parts([path]))["model.layers.0.mlp.experts.gate_up_proj"]
    assert (tensor.coded is None) == (types[0] != types[1])
    wanted = torch.stack(tuple(stored.values()), dim=2).flatten(1, 2).transpose(1, 2)
    assert torch.equal(tensor.read(), wanted)
    assert torch.equal(tensor.read((slice(1, 2), slice(32, 64), slice(3, 8))), wanted[1:2, 32:64, 3:8])


def test_nvfp4_with_a_scale_of_its_own(path):
    tensors = {
        "blk.0.attn_v.weight": torch.randn(8, 64), "blk.0.attn_v.scale": torch.tensor([0.375]),
        "blk.0.ffn_down.weight": torch.randn(8, 64),
    }  # fmt: skip
    stored = write(path, "llama", KEYS, tensors, lambda name, tensor: "NVFP4" if "weight" in name else "F32")
    made = named_tensors(open_parts([path]))
    assert set(made) == {"model.layers.0.self_attn.v_proj.weight", "model.layers.0.mlp.down_proj.weight"}
    v = made["model.layers.0.self_attn.v_proj.weight"]
    assert v.coded is not None and v.coded.format == "nvfp4"
    assert torch.equal(v.read(), stored["blk.0.attn_v.weight"] * 0.375)
    assert torch.equal(made["model.layers.0.mlp.down_proj.weight"].read(), stored["blk.0.ffn_down.weight"])


@pytest.mark.parametrize("architecture", ("qwen3moe", "gpt-oss"))
def test_nvfp4_with_a_scale_for_each_expert(path, architecture):
    scales = torch.tensor([0.5, 3.0, 0.125])
    tensors = {}
    for number, name in enumerate(("gate", "up", "down")):
        tensors |= {f"blk.0.ffn_{name}_exps.weight": torch.randn(3, 64, 64)}
        tensors |= {f"blk.0.ffn_{name}_exps.scale": scales.roll(number)}
    stored = write(path, architecture, {}, tensors, lambda name, tensor: "NVFP4" if "weight" in name else "F32")
    made = named_tensors(open_parts([path]))
    values = [stored[f"blk.0.ffn_{name}_exps.weight"] * scales.roll(number)[:, None, None]
              for number, name in enumerate(("gate", "up", "down"))]  # fmt: skip
    if architecture == "gpt-oss":
        assert torch.equal(made["model.layers.0.mlp.experts.down_proj"].read(), values[2].transpose(1, 2))
        both = torch.stack(values[:2], dim=2).flatten(1, 2).transpose(1, 2)
        assert torch.equal(made["model.layers.0.mlp.experts.gate_up_proj"].read(), both)
        return
    for value, name in zip(values, ("gate", "up", "down"), strict=True):
        for expert in range(3):
            tensor = made[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"]
            assert tensor.coded is not None and torch.equal(tensor.read(), value[expert])


REFUSED = {
    "another architecture": ("rwkv", {}, {"a": torch.ones(1)}, "F32", "general.architecture 'rwkv'; possible: llama"),
    "no heads": ("llama", {}, {"blk.0.attn_q.weight": torch.ones(8, 8)}, "F32", "head_count is None"),
    "heads": (
        "llama", {"llama.attention.head_count": 3}, {"blk.0.attn_q.weight": torch.ones(8, 8)}, "F32",
        "blk.0.attn_q.weight in model.gguf: 8 rows are not 3 heads",
    ),
    "experts without an axis": ("qwen3moe", {}, {"blk.0.ffn_up_exps.weight": torch.ones(8, 8)}, "F32", "no experts"),
    "experts of a dense model": ("qwen2", {}, {"blk.0.ffn_up_exps.weight": torch.ones(2, 8, 8)}, "F32", "no experts"),
    "gate without up": ("gpt-oss", {}, {"blk.0.ffn_gate_exps.weight": torch.ones(2, 8, 32)}, "F32", "ffn_up_exps"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_tensor_cannot_be(path, name):
    architecture, keys, tensors, type, match = REFUSED[name]
    write(path, architecture, keys, tensors, lambda *_: type)
    with pytest.raises(CheckpointError, match=match):
        named_tensors(open_parts([path]))


def test_types_without_a_format_are_named_together(path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    kind = gguf.GGMLQuantizationType
    for name, type, shape in (
        ("a", kind.IQ2_XXS, (2, 66)),
        ("b", kind.TQ1_0, (2, 54)),
        ("c", kind.IQ2_XXS, (2, 66)),
        ("d", kind.Q8_0, (34,)),
    ):
        writer.add_tensor(name, torch.zeros(shape, dtype=torch.uint8).numpy(), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    match = "2 tensors of IQ2_XXS, e.g. a in .*; 1 tensors of TQ1_0, e.g. b in .*; 1 tensors of Q8_0 with one axis"
    with pytest.raises(CheckpointError, match=match):
        open_parts([path])


def test_an_exponent_that_is_no_number(path):
    write(path, "llama", KEYS, {"output.weight": torch.ones(4, 32)}, matrices_in("MXFP4"))
    file = GGUFFile(path)
    content = bytearray(path.read_bytes())
    content[file.entries["output.weight"].start + 17] = 255
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="model.gguf: output.weight, from row 0 on: an exponent is 255"):
        named_tensors(open_parts([path]))["lm_head.weight"].read()


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def scaled_llama(parameters):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, head_dim=32,
        num_key_value_heads=2, max_position_embeddings=131072, rope_parameters=parameters, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def factors_of(model):
    """As llama.cpp's converter writes them: how much longer each wave is."""
    plain = 1.0 / 5e5 ** (torch.arange(16) / 16)
    return plain / model.model.rotary_emb.inv_freq


def test_rotary_factors_of_llama_3(path):
    model = scaled_llama(LLAMA3)
    factors = factors_of(model)
    assert factors[0] == 1 and factors[-1] == 8
    assert rope_parameters(factors, 5e5, 131072) == LLAMA3
    write(path, "llama", llama_values(model.config), llama_tensors(model) | {"rope_freqs.weight": factors})
    values = config_values(open_parts([path]))
    assert values["rope_parameters"] == LLAMA3
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    ids = torch.arange(50).unsqueeze(0)
    with torch.device("meta"):
        empty = LlamaForCausalLM(config)
    engine = infuse.init_inference(empty.eval(), checkpoint=str(path), dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(engine(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_other_rotary_factors(path):
    """No formula: they become longrope's, which transformers computes with."""
    factors = torch.linspace(1, 3, 16)
    parameters = rope_parameters(factors, 5e5, 131072)
    assert parameters["rope_type"] == "longrope"
    model = scaled_llama(parameters)
    torch.testing.assert_close(factors_of(model), factors)
    assert model.model.rotary_emb.attention_scaling == 1
    assert rope_parameters(torch.ones(16), 5e5, 8192) == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize("on_meta", (True, False))
def test_a_model_that_rotates_otherwise_is_refused(path, on_meta):
    """Transformers' own config from a file lacks the factors: answers to long texts would be wrong."""
    model = scaled_llama(LLAMA3)
    tensors = llama_tensors(model) | {"rope_freqs.weight": factors_of(model)}
    write(path, "llama", llama_values(model.config), tensors)
    with torch.device("meta" if on_meta else "cpu"):
        other = scaled_llama({"rope_type": "default", "rope_theta": 5e5})
    with pytest.raises(CheckpointError, match="model.rotary_emb.inv_freq: the file scales rotation.*'llama3'"):
        infuse.init_inference(other, checkpoint=str(path), dtype=torch.float32)


@pytest.mark.parametrize("is_scaled", (True, False))
def test_a_model_whose_frequencies_cannot_be_compared(path, is_scaled):
    model = scaled_llama(LLAMA3)
    factors = factors_of(model) if is_scaled else torch.ones(16)
    write(path, "llama", llama_values(model.config), llama_tensors(model) | {"rope_freqs.weight": factors})
    other = scaled_llama({"rope_type": "default", "rope_theta": 5e5})
    other.model.rotary_emb.register_buffer("frequencies", other.model.rotary_emb.inv_freq, persistent=False)
    del other.model.rotary_emb.inv_freq
    if not is_scaled:
        infuse.init_inference(other, checkpoint=str(path), dtype=torch.float32)
        return
    with pytest.raises(CheckpointError, match="by rope_freqs; this model's frequencies cannot be compared with it"):
        infuse.init_inference(other, checkpoint=str(path), dtype=torch.float32)


@pytest.mark.parametrize("of_model", ("plain", "other", "same"))
def test_factors_for_short_and_long_texts(path, of_model):
    model = scaled_llama(LLAMA3)
    scaled = {name: torch.linspace(1, end, 16) for name, end in (("short", 2), ("long", 4))}
    tensors = {f"rope_factors_{name}.weight": value for name, value in scaled.items()}
    write(path, "llama", llama_values(model.config), llama_tensors(model) | tensors)
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    if of_model != "plain":
        long = scaled["long" if of_model == "same" else "short"].tolist()
        parameters |= {"rope_type": "longrope", "original_max_position_embeddings": 4096, "attention_factor": 1.0}
        parameters |= {"short_factor": scaled["short"].tolist(), "long_factor": long}
    other = scaled_llama(parameters)
    if of_model == "same":
        engine = infuse.init_inference(other, checkpoint=str(path), dtype=torch.float32)
        assert not any("rope_factors_long.weight" in note for note in engine.plan.notes if "no place" in note)
        return
    match = "rope_factors_long.weight: the file scales rotation by rope_factors_long.weight, the model does not"
    with pytest.raises(CheckpointError, match=match):
        infuse.init_inference(other, checkpoint=str(path), dtype=torch.float32)


def test_frequencies_are_a_tensor(path):
    write(path, "llama", KEYS | {"llama.rope.freq_base": 100.0}, {"rope_freqs.weight": torch.tensor([1.0, 2.0])})
    made = named_tensors(open_parts([path]))
    torch.testing.assert_close(made[FREQUENCIES].read(), torch.tensor([1.0, 0.05]))
    assert not isinstance(made[FREQUENCIES], InMemory)
