"""What llama.cpp does to single tensors comes back as it was; what cannot be undone is named."""

from __future__ import annotations

import pytest
import torch

from infuse.ground.errors import CheckpointError
from infuse.weights.gguf.names import named_tensors
from infuse.weights.gguf.parts import open_parts
from tests.support.gguf_files import write
from tests.weights.gguf.cases.hybrids import tiled

KEYS = {
    "block_count": 1, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 512,
}  # fmt: skip
LAYER = "model.layers.0.linear_attn"


def read(path, tensors, type="F32", **changes):
    """The tensors of a file of a qwen35, and the values that are stored in it."""
    keys = {f"qwen35.{key}": value for key, value in {**KEYS, **changes}.items()}
    stored = write(path / "model.gguf", "qwen35", keys, tensors, lambda name, tensor: type)
    return named_tensors(open_parts([path / "model.gguf"])), stored


@pytest.mark.parametrize(("type", "in_order"), (("Q8_0", False), ("Q4_0", False), ("Q4_K", True), ("Q6_K", True)))
def test_columns_of_heads(tmp_path, type, in_order):
    """Heads of 128 columns: blocks of 32 move with them, those of 256 stay, and the matrix says its order."""
    torch.manual_seed(0)
    tensors, stored = read(tmp_path, {"blk.0.ssm_out.weight": torch.randn(8, 512)}, type)
    out = tensors[f"{LAYER}.out_proj.weight"]
    assert out.coded is not None and (out.coded.order is not None) == in_order
    torch.testing.assert_close(tiled(out.read(), 4, 2, axis=1), stored["blk.0.ssm_out.weight"])
    part = (slice(2, 5), slice(64, 320))
    torch.testing.assert_close(out.read(part), out.read()[part])


def test_rows_of_heads(tmp_path):
    torch.manual_seed(0)
    tensors, stored = read(tmp_path, {"blk.0.attn_qkv.weight": torch.randn(64 + 512, 32)}, "Q8_0")
    qkv = tensors[f"{LAYER}.in_proj_qkv.weight"]
    assert qkv.coded is not None and qkv.coded.order is None
    values, wanted = qkv.read(), stored["blk.0.attn_qkv.weight"]
    torch.testing.assert_close(values[:64], wanted[:64])
    torch.testing.assert_close(tiled(values[64:], 4, 2), wanted[64:])
    torch.testing.assert_close(qkv.read((slice(60, 300),)), values[60:300])


def test_rows_of_two_types(tmp_path):
    """As Q4_K_M stores queries, keys and values, and the gate: the matrix of both has no one code, so it has values."""
    torch.manual_seed(0)
    tensors = {"blk.0.attn_qkv.weight": torch.randn(64 + 512, 32), "blk.0.attn_gate.weight": torch.randn(512, 32)}
    keys = {f"qwen3next.{key}": value for key, value in KEYS.items()}
    types = {"attn_qkv": "Q8_0", "attn_gate": "Q4_0"}
    stored = write(tmp_path / "model.gguf", "qwen3next", keys, tensors, lambda name, _: types[name.split(".")[2]])
    found = named_tensors(open_parts([tmp_path / "model.gguf"]))[f"{LAYER}.in_proj_qkvz.weight"]
    assert found.coded is None and found.shape == (64 + 2 * 512, 32)
    qkv, gate = stored.values()
    heads = [torch.cat([qkv[16 * h :][:16], qkv[32 + 16 * h :][:16], qkv[64 + 256 * h :][:256], gate[256 * h :][:256]])
             for h in range(2)]  # fmt: skip
    torch.testing.assert_close(found.read(), torch.cat(heads))


@pytest.mark.parametrize("value", (0.5, float("nan")))
def test_a_decay_that_grows(tmp_path, value):
    decay = torch.tensor([-1.0, -2.0, value, 0.0])
    tensors, _ = read(tmp_path, {"blk.0.ssm_a": decay})
    with pytest.raises(CheckpointError, match=r"blk.0.ssm_a in .*model.gguf: has decays above 0"):
        tensors[f"{LAYER}.A_log"].read()


@pytest.mark.parametrize(
    ("keys", "values"), (((3, 32, 16), (2, 16, 32)), ((2, 16, 32), (2, 16, 32)), ((2, 32, 16), (2, 32, 16)))
)
def test_keys_and_values_of_no_latent(tmp_path, keys, values):
    tensors = {"blk.0.attn_k_b.weight": torch.ones(keys), "blk.0.attn_v_b.weight": torch.ones(values)}
    given = {"deepseek2.attention.head_count": 2, "deepseek2.attention.kv_lora_rank": 32}
    path = tmp_path / "model.gguf"
    write(path, "deepseek2", given, tensors)
    with pytest.raises(CheckpointError, match=r"attn_k_b.weight in model.gguf: .* are not 2 heads of keys and values"):
        named_tensors(open_parts([path]))
    write(path, "deepseek2", given, {"blk.0.attn_k_b.weight": torch.ones(2, 32, 16)})
    with pytest.raises(CheckpointError, match="blk.0.attn_v_b.weight is not there"):
        named_tensors(open_parts([path]))


HALVES = {
    "inputs": ({"ffn_gate.weight": (32, 16), "ffn_up.weight": (32, 8)}, r"ffn_gate.weight in .*not the same inputs"),
    "half": ({"ffn_up.weight": (32, 16)}, r"ffn_up.weight in .*: blk.0.ffn_gate.weight is not there"),
    "experts": ({"ffn_gate_exps.weight": (2, 8, 16), "ffn_up_exps.weight": (3, 8, 16)}, "gate and up are "),
    "half of experts": ({"ffn_up_exps.weight": (3, 8, 16)}, "blk.0.ffn_gate_exps.weight is not there"),
}  # fmt: skip


@pytest.mark.parametrize("name", HALVES)
def test_halves_that_do_not_fit(tmp_path, name):
    shapes, match = HALVES[name]
    tensors = {f"blk.0.{leaf}": torch.ones(shape) for leaf, shape in shapes.items()}
    write(tmp_path / "model.gguf", "granitehybrid", {}, tensors)
    with pytest.raises(CheckpointError, match=match):
        named_tensors(open_parts([tmp_path / "model.gguf"]))


UNLIKE = {
    "rows": ({"blk.0.attn_qkv.weight": torch.ones(600, 32)}, {}, r"attn_qkv.weight in .*600 rows are neither 512"),
    "columns": ({"blk.0.ssm_out.weight": torch.ones(8, 256)}, {}, r"ssm_out.weight in .*a column for each of 512"),
    "heads": ({"blk.0.ssm_dt.bias": torch.ones(3)}, {}, r"ssm_dt.bias in .*3 rows are not one for each of 4 heads"),
    "keys": (
        {"blk.0.ssm_dt.bias": torch.ones(4)}, {"ssm.group_count": 3},
        "4 heads of values are no multiple of 3 heads of keys",
    ),
    "width": (
        {"blk.0.attn_gate.weight": torch.ones(510, 32)}, {"ssm.inner_size": 510}, "510 values are not 4 heads of one"
    ),
    "no key": ({"blk.0.ssm_a": torch.ones(4)}, {"ssm.time_step_rank": "x"}, "qwen35.ssm.time_step_rank is 'x', not a"),
    "codes": ({"blk.0.ssm_norm.weight": torch.ones(2, 32)}, {"type": "Q8_0"}, r"ssm_norm.weight in .*in plain numbers"),
    "taps": ({"blk.0.ssm_conv1d.weight": torch.ones(576)}, {}, r"ssm_conv1d.weight in .*no convolution"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
def test_what_a_tensor_cannot_be(tmp_path, name):
    tensors, changes, match = UNLIKE[name]
    with pytest.raises(CheckpointError, match=match) as raised:
        read(tmp_path, tensors, **changes)
    assert "model.gguf" in str(raised.value)
