"""Our own shards: written packed and quantized, read back bit for bit, without quantizer and without proof."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import infuse
from infuse.layers.linear import QuantizedLinear
from infuse.plan.bytes import parameter_bytes
from infuse.quant.format import QuantizedWeight
from infuse.quant.integer import IntegerFormat
from infuse.shards.files import Bundle, write_safetensors
from infuse.shards.index import FORMAT, SEAL
from infuse.weights import fill, safetensors_file
from infuse.weights.names import placed
from infuse.weights.safetensors_file import SafetensorsFile, block_checksums, bytes_of
from tests.models.families import BY_NAME
from tests.support.checkpoints import changed, loaded, on_meta, outputs, refused, state_of, truncate

FAMILIES = ["llama", "gpt2", "bloom", "falcon-40b", "bert"]
FORMATS = [
    dict(dtype="fp32"),
    dict(dtype="bf16"),
    dict(dtype="fp32", quant="int8:16"),
    dict(dtype="bf16", quant="int4:16:asymmetric"),
]
BY_NAME_QUANT = {"weight": {"post_init_quant": {"mlp": {"num_bits": 8, "group_size": 16, "symmetric": True}}}}
MORE = [dict(dtype="bf16", quant="fp8"), dict(dtype="bf16", quant="fp6:16"), dict(dtype="fp32", quant=BY_NAME_QUANT)]


def saved(name: str, folder: Path, **keys: Any) -> infuse.InferenceEngine:
    """The engine whose shards are in `folder` now."""
    given = {"progress": False, "verify": "off", **keys}
    return infuse.init_inference(BY_NAME[name].make(), save_mp_checkpoint_path=str(folder), **given)


def read_back(name: str, folder: Path, **keys: Any) -> infuse.InferenceEngine:
    return infuse.init_inference(on_meta(name), checkpoint=str(folder), **{"progress": False, **keys})


def no_quantizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, weight: torch.Tensor) -> Any:
        assert weight.is_meta, "quantized again"
        return quantize(self, weight)

    quantize = IntegerFormat.quantize
    monkeypatch.setattr(IntegerFormat, "quantize", refuse)


@pytest.mark.parametrize("keys", FORMATS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_shards_read_back_bit_for_bit(name: str, keys: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = saved(name, tmp_path, **keys)
    no_quantizer(monkeypatch)
    second = read_back(name, tmp_path)
    assert torch.equal(outputs(second, name), outputs(first, name))
    assert second.plan.dtype == first.plan.dtype and parameter_bytes(second.module) == parameter_bytes(first.module)
    assert [(step.path, step.formats) for step in second.plan.steps] == [
        (step.path, step.formats) for step in first.plan.steps
    ]
    assert [dict(step.bodies) for step in second.plan.steps] == [dict(step.bodies) for step in first.plan.steps]
    assert placed(second.module).keys() == placed(first.module).keys()
    assert not [n for n, x in (*second.module.named_parameters(), *second.module.named_buffers()) if x.is_meta]
    head, table = second.module.get_output_embeddings(), second.module.get_input_embeddings()
    assert (head.weight is table.weight) == second.module.config.tie_word_embeddings


@pytest.mark.parametrize("name", ["gptj", "gemma3", "qwen3", "albert", "opt-350m", "vit"])
def test_tables_norms_and_shared_layers_read_back(name: str, tmp_path: Path) -> None:
    first = saved(name, tmp_path, dtype="fp32", quant="int8:16")
    assert torch.equal(outputs(read_back(name, tmp_path), name), outputs(first, name))


@pytest.mark.parametrize("keys", MORE, ids=str)
def test_other_formats_and_formats_by_name_read_back(keys: dict, tmp_path: Path) -> None:
    first = saved("llama", tmp_path, **keys)
    assert any(step.formats for step in first.plan.steps)
    second = read_back("llama", tmp_path)
    assert [step.formats for step in second.plan.steps] == [step.formats for step in first.plan.steps]
    assert torch.equal(outputs(second, "llama"), outputs(first, "llama"))


def test_into_a_live_model_and_by_the_index_itself(tmp_path: Path) -> None:
    first = saved("llama", tmp_path, dtype="fp32", quant="int8:16")
    engine = infuse.init_inference(BY_NAME["llama"].make(), checkpoint=str(tmp_path / "infuse.json"), progress=False)
    assert torch.equal(outputs(engine, "llama"), outputs(first, "llama"))


def test_shards_of_shards_and_of_a_checkpoint(tmp_path: Path) -> None:
    """A checkpoint becomes shards without a live model; shards of shards are the same bytes."""
    BY_NAME["llama"].make().save_pretrained(tmp_path / "hub")
    first = read_back(
        "llama", tmp_path / "hub", dtype="bf16", quant="int4:16", save_mp_checkpoint_path=str(tmp_path / "one")
    )
    second = read_back("llama", tmp_path / "one", ckpt_config={"save_mp_checkpoint_path": str(tmp_path / "two")})
    assert torch.equal(outputs(second, "llama"), outputs(first, "llama"))
    for file in ("infuse.json", "rank-00-of-01.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert sorted(os.listdir(tmp_path / "one")) == ["infuse.json", "rank-00-of-01.safetensors"]


def test_dtype_int8_reads_back(tmp_path: Path) -> None:
    first = saved("llama", tmp_path, dtype="int8", quant="int8:16")
    for keys in ({}, {"dtype": "int8", "quant": "int8:16"}):
        assert torch.equal(outputs(read_back("llama", tmp_path, **keys), "llama"), outputs(first, "llama"))


def test_a_linear_outside_of_blocks_keeps_the_layout_of_its_model(tmp_path: Path) -> None:
    """GPT-2's linears are stored transposed; replaced alone and unquantized they are stored as GPT-2 has them."""
    first = saved("gpt2", tmp_path, dtype="fp32", replace_with_kernel_inject=False)
    engine = read_back("gpt2", tmp_path, replace_with_kernel_inject=False)
    assert torch.equal(outputs(engine, "gpt2"), outputs(first, "gpt2"))
    with safe_open(tmp_path / "rank-00-of-01.safetensors", "pt") as file:
        assert file.get_slice("transformer.h.0.attn.c_attn.weight").get_shape() == [48, 144]


def test_the_file_is_a_safetensors_file(tmp_path: Path) -> None:
    """Read by the format's own library; it holds each quantized matrix as its format defines it, tied tables once, and
    no more.
    """
    engine = saved("llama-bias", tmp_path, dtype="bf16", quant="int4:16:asymmetric")
    with safe_open(tmp_path / "rank-00-of-01.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    matrices = {path: module for path, module in engine.module.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(matrices) == 12
    for path, module in matrices.items():
        assert [*module.held().tensors] == ["data", "scale", "zero"]
        for part, tensor in module.held().tensors.items():
            assert torch.equal(stored.pop(f"{path}.{part}"), tensor)
    left = {name: tensor for name, tensor in placed(engine.module).items() if name.rpartition(".")[0] not in matrices}
    left |= {name: p for name, p in engine.module.named_parameters() if name.endswith(".bias")}
    left.pop("lm_head.weight")
    assert stored.keys() == left.keys() and all(torch.equal(stored[name], left[name]) for name in left)


@pytest.mark.parametrize(
    ("written", "asked"), [("int4:16", "int4:16:a8"), ("int4:16:a8", "int4:16"), ("int4:16:a8", None)]
)
def test_activations_are_as_they_are_asked_for(written: str, asked: str | None, tmp_path: Path) -> None:
    """Shards are the same with and without 8-bit activations; by default they are read as they were written."""
    saved("llama", tmp_path, dtype="bf16", quant=written)
    found = read_back("llama", tmp_path, **({"quant": asked} if asked else {}))
    live = infuse.init_inference(
        BY_NAME["llama"].make(), dtype="bf16", quant=asked or written, progress=False, verify="off"
    )
    formats = [(step.path, step.formats) for step in found.plan.steps]
    assert formats == [(step.path, step.formats) for step in live.plan.steps]
    assert {format for _, targets in formats for format in targets.values()} == {asked or written}
    assert torch.equal(outputs(found, "llama"), outputs(live, "llama"))


# ---- what is refused ----


def test_another_format_is_refused_and_another_dtype_casts(tmp_path: Path) -> None:
    first = saved("llama", tmp_path, dtype="bf16", quant="int8:16")
    meta = on_meta("llama")
    before = state_of(meta)
    for quant, found in (("int4", "'int4'"), (BY_NAME_QUANT, "formats by name"), ({"enabled": False}, "enabled=False")):
        with pytest.raises(infuse.ConfigError, match=f"quant: found {found}, and the shards hold int8:16"):
            infuse.init_inference(meta, checkpoint=str(tmp_path), quant=quant, progress=False)
    assert state_of(meta) == before
    engine = read_back("llama", tmp_path, dtype="fp32", quant="int8:16")
    assert engine.plan.dtype == torch.float32 and (outputs(engine, "llama") - outputs(first, "llama")).abs().max() < 0.2


def test_broken_shards_are_named(tmp_path: Path) -> None:
    shard = tmp_path / "rank-00-of-01.safetensors"
    saved("llama", tmp_path, dtype="fp32", quant="int8:16")
    files = json.loads((tmp_path / "infuse.json").read_text())["files"]
    changed(tmp_path, files=files * 2)
    refused(str(tmp_path), "corrupt: : Value error, a file stands twice", dtype="fp32")
    changed(tmp_path, files=files, format="infuse-3")
    refused(str(tmp_path), "not an index of this version: its format is 'infuse-3', infuse-5 is read", dtype="fp32")
    changed(tmp_path, format=FORMAT, steps={"model.layers.0": {"kind": "0", "formats": {}}})
    refused(
        str(tmp_path),
        "1 layers were saved in a form that is not this version's, or not this model's: model.layers.0",
        dtype="fp32",
    )
    saved("llama", tmp_path, dtype="fp32", quant="int8:16")
    refused(
        str(tmp_path),
        "were saved in a form that is not this version's, or not this model's",
        name="qwen3",
        dtype="fp32",
    )
    truncate(shard)
    refused(str(tmp_path), "rank-00-of-01.safetensors: truncated", dtype="fp32")
    shard.unlink()
    refused(str(tmp_path), "1 files are missing: .*rank-00-of-01.safetensors", dtype="fp32")


def resigned(folder: Path) -> None:
    """Write the checksums of what the file holds now into the index."""
    (file,) = json.loads((folder / "infuse.json").read_text())["files"]
    state = load_file(folder / file["name"])
    found = {name: f"{zlib.crc32(x.contiguous().view(torch.uint8).numpy()):08x}" for name, x in state.items()}
    changed(folder, files=[{**file, "checksums": found}])


def test_a_tensor_that_is_missing_in_the_shards_is_listed(tmp_path: Path) -> None:
    saved("llama", tmp_path, dtype="fp32", quant="int8:16")
    shard = tmp_path / "rank-00-of-01.safetensors"
    state = load_file(shard)
    del state["model.layers.1.mlp.up.scale"]
    state["model.layers.2.mlp.down.data"] = state["model.layers.2.mlp.down.data"][1:].clone()
    state["model.layers.0.mlp.down.scale"] = state["model.layers.0.mlp.down.scale"].float()
    state["model.layers.0.norm1.weight"] = state["model.layers.0.norm1.weight"].int()
    save_file(state, shard)
    refused(str(tmp_path), "is not the file that was saved: it differs in model.layers.1.mlp.up.scale", dtype="fp32")
    resigned(tmp_path)
    text = refused(str(tmp_path), "are not this model's", dtype="fp32")
    assert (
        "missing  model.layers.1.mlp.up.scale" in text and "misshaped  model.layers.2.mlp.down.data: (47, 80)" in text
    )
    assert "misshaped  model.layers.0.mlp.down.scale: torch.float32, the model has torch.bfloat16" in text
    assert "misshaped  model.layers.0.norm1.weight: torch.int32, the model has floating values" in text


def test_a_changed_byte_is_found_by_its_checksum(tmp_path: Path) -> None:
    """In every tensor, at its beginning and at its end; and a file of other values in the right place."""
    saved("llama", tmp_path, dtype="fp32", quant="int8:16")
    shard = tmp_path / "rank-00-of-01.safetensors"
    whole = shard.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    header.pop("__metadata__")
    model = on_meta("llama")
    for name, entry in header.items():
        first, stop = entry["data_offsets"]
        for at in (start + first, start + stop - 1):
            shard.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(
                infuse.CheckpointError, match=f"{name} is not what was saved: the checksum of its bytes"
            ):
                infuse.init_inference(model, checkpoint=str(tmp_path), progress=False)
    other = tmp_path / "other"
    torch.manual_seed(7)
    infuse.init_inference(
        on_meta("llama").to_empty(device="cpu").apply(noisy),
        quant="int8:16",
        dtype="fp32",
        progress=False,
        verify="off",
        save_mp_checkpoint_path=str(other),
    )
    shard.write_bytes((other / shard.name).read_bytes())
    refused(str(tmp_path), "is not what was saved: the checksum", dtype="fp32")


def noisy(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


def test_blocks_of_a_tensor_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part the blocks that hold it; a changed byte in another block is found when that is read."""
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 256)
    values = torch.arange(600.0).reshape(30, 20)
    write_safetensors(tmp_path / "a.safetensors", [Bundle(("x",), lambda: (values,))])
    checksums = {"x": block_checksums(bytes_of(values))}
    assert len(checksums["x"]) == 10 and len(set(checksums["x"])) == 10

    def opened() -> SafetensorsFile:
        return SafetensorsFile(tmp_path / "a.safetensors", checksums)

    data = bytearray((tmp_path / "a.safetensors").read_bytes())
    data[-2400 + 256 * 9 + 3] ^= 4
    (tmp_path / "a.safetensors").write_bytes(data)
    file = opened()
    for part in ((slice(0, 28),), (slice(2, 5), slice(3, 9)), (slice(4, 20), slice(19, 20))):
        assert torch.equal(file.read("x", part), values[part])
    read = os.preadv
    calls: list[int] = []
    monkeypatch.setattr(os, "preadv", lambda *given: calls.append(1) or read(*given))
    file.read("x", (slice(0, 28),))
    assert len(calls) == 9  # the blocks of the part, none of them for its checksum again
    for part in ((), (slice(29, 30),), (slice(0, 30), slice(5, 6)), (slice(0, 30), slice(0, 20))):
        with pytest.raises(infuse.CheckpointError, match="the checksum of its bytes from 2304 on differs"):
            opened().read("x", part)


def test_parts_in_a_row_read_their_blocks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But those at the ends of parts, of which the first reader checks all and the next one reads its bytes."""
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 256)
    values = torch.arange(600.0).reshape(30, 20)  # 80 bytes a row: blocks end inside rows
    write_safetensors(tmp_path / "a.safetensors", [Bundle(("x",), lambda: (values,))])
    file = SafetensorsFile(tmp_path / "a.safetensors", {"x": block_checksums(bytes_of(values))})
    read, counts = os.preadv, list[int]()

    def counted(file: int, buffers: list[memoryview], at: int) -> int:
        counts.append(len(buffers[0]))
        return read(file, buffers, at)

    monkeypatch.setattr(os, "preadv", counted)
    for first in range(0, 30, 10):
        assert torch.equal(file.read("x", (slice(first, first + 10),)), values[first : first + 10])
    # Rows 10 and 20 begin in blocks 3 and 6 at bytes 32 and 64: these are read once for their checksums, beside their
    # bytes in both parts.
    assert sum(counts) == values.nbytes + 2 * 256


def test_a_matrix_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same tensors as one that is read whole: laid out by the kernels part by part."""
    folder = str(tmp_path / "shards")
    infuse.init_inference(BY_NAME["llama"].make(), dtype="fp32", quant="int8:16", save_mp_checkpoint_path=folder)
    whole = loaded("llama", folder).module
    if not any(module.part_rows for module in whole.modules() if isinstance(module, QuantizedLinear)):
        pytest.skip("without kernels matrices are stored as they are")
    monkeypatch.setattr(fill, "SAVED_BYTES", 1024)
    parts: list[int] = []
    of = QuantizedWeight.of
    monkeypatch.setattr(QuantizedWeight, "of", lambda *given: parts.append(given[1][0]) or of(*given))
    again = loaded("llama", folder).module
    assert len(parts) > 2 * sum(isinstance(module, QuantizedLinear) for module in again.modules())
    for (name, one), (other, two) in zip(whole.named_buffers(), again.named_buffers(), strict=True):
        assert name == other and torch.equal(one, two), name


def test_shards_without_checksums_are_refused(tmp_path: Path) -> None:
    """As they were written before; the index says that they have to be made again."""
    saved("llama", tmp_path, dtype="fp32", quant="int8:16")
    path = tmp_path / "infuse.json"
    index = json.loads(path.read_text())
    del index["files"], index[SEAL]
    path.write_text(json.dumps({**index, "format": "infuse-1"}))
    refused(str(tmp_path), "not an index of this version.*; shard the model again", dtype="fp32")


def test_an_index_that_was_changed_is_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path, dtype="fp32", quant="int8:16")
    path = tmp_path / "infuse.json"
    path.write_text(path.read_text().replace('"int8:16"', '"int8:48"'))
    refused(str(tmp_path), "infuse.json: was changed after it was written", dtype="fp32")
    for changes, match in (
        ({"dtype": "nn"}, "corrupt: dtype: "),
        ({"quant": {"format": 5}}, "corrupt: quant.format"),
        ({"files": []}, "corrupt: files: "),
    ):
        saved("llama", tmp_path, dtype="fp32", quant="int8:16")
        changed(tmp_path, **changes)
        refused(str(tmp_path), match, dtype="fp32")
    for of_file, match in (
        ({"name": "../rank-00-of-01.safetensors"}, "names '../rank-00-of-01.safetensors'"),
        ({"cuts": {"lm_head.weight": "axis 0 of 96: -5:96"}}, "corrupt: files.0.cuts.lm_head.weight"),
        ({"cuts": {"lm_head.weight": "axis 0 of 96: 0:90"}}, "lm_head.weight: position 90 of 96 is on no rank"),
        ({"cuts": {"lm_head.weight": "axis 7 of 96: 0:96"}}, "cuts it on axis 7"),
    ):
        saved("llama", tmp_path, dtype="fp32", quant="int8:16")
        (file,) = json.loads(path.read_text())["files"]
        changed(tmp_path, files=[{**file, **of_file}])
        refused(str(tmp_path), match, dtype="fp32")


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = BY_NAME["llama"].make()
    before = state_of(model)
    with pytest.raises(infuse.CheckpointError, match="cannot be written"):
        infuse.init_inference(
            model, save_mp_checkpoint_path=str(tmp_path / "file" / "out"), dtype="fp32", progress=False
        )
    assert state_of(model) == before


def test_old_shards_are_gone_while_new_ones_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails in the middle leaves no index, so that nobody reads half of it."""
    saved("llama", tmp_path, dtype="fp32")
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(infuse.CheckpointError, match="cannot be written: No space left"):
        saved("llama", tmp_path, dtype="fp32")
    assert sorted(os.listdir(tmp_path)) == ["rank-00-of-01.safetensors"]


# ---- load_model_with_checkpoint ----


def test_an_engine_fills_another_model(tmp_path: Path) -> None:
    live = BY_NAME["llama"].make()
    live.save_pretrained(tmp_path)
    engine = infuse.init_inference(on_meta("llama"), checkpoint=str(tmp_path), dtype="fp32", progress=False)
    plain: Any = on_meta("llama")
    engine.load_model_with_checkpoint(plain)
    assert torch.equal(outputs(plain, "llama"), outputs(live, "llama"))
    with pytest.raises(infuse.ConfigError, match="layers of r_module are replaced already"):
        engine.load_model_with_checkpoint(engine.module)
    without = infuse.init_inference(nn.Linear(4, 4), dtype="fp32", progress=False, replace_with_kernel_inject=False)
    with pytest.raises(infuse.ConfigError, match="without checkpoint="):
        without.load_model_with_checkpoint(on_meta("llama"))
    saved("llama", tmp_path / "shards", dtype="fp32")
    engine = read_back("llama", tmp_path / "shards")
    with pytest.raises(infuse.CheckpointError, match="holds layers that were replaced"):
        engine.load_model_with_checkpoint(on_meta("llama"))
