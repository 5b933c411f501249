"""Files that the libraries themselves write, where they are installed: the values that they give them, bit by bit.

The libraries compute in 16 bits; they are made to compute in float32 by scales and values widened to it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from torch import Tensor

from infuse.quant.parse import quant_format
from infuse.weights.checkpoint import Checkpoint
from infuse.weights.coded import Decoded
from infuse.weights.lazy import LazyTensor
from infuse.weights.sources import find_files
from tests.support.quantized_files import llama, write

WEIGHT = torch.randn(96, 256, generator=torch.Generator().manual_seed(2)) * 0.05


def opened(folder: Path | str) -> Checkpoint:
    return Checkpoint(find_files(str(folder)))


def canonical(format: str) -> str:
    return str(quant_format(format))


def _compressor(scheme: Any, stored: str) -> Any:
    from compressed_tensors.compressors.base import BaseCompressor

    return BaseCompressor.get_value_from_registry(stored)


COMPRESSED = [
    ("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=32), None, "int4:32"),
    ("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False), None,
     "int4:32:asymmetric"),
    ("pack-quantized", dict(num_bits=8, type="int", strategy="channel"), None, "int8:row"),
    ("pack-quantized", dict(num_bits=8, type="int", strategy="group", group_size=64, symmetric=False), None,
     "int8:64:asymmetric"),
    ("pack-quantized", dict(num_bits=3, type="int", strategy="group", group_size=32), None, "int3:32"),
    ("pack-quantized", dict(num_bits=5, type="int", strategy="group", group_size=32, symmetric=False), None,
     "int8:32:asymmetric"),
    ("int-quantized", dict(num_bits=8, type="int", strategy="channel"), "int", "int8:row:a8"),
    ("int-quantized", dict(num_bits=8, type="int", strategy="tensor"), "int", "int8:row:a8"),
    ("float-quantized", dict(num_bits=8, type="float", strategy="channel"), "float", "fp8:row"),
    ("float-quantized", dict(num_bits=8, type="float", strategy="tensor"), "float", "fp8:row"),
    ("float-quantized", dict(num_bits=8, type="float", strategy="block", block_structure=[128, 128]), "float",
     "fp8:128"),
]  # fmt: skip


@pytest.mark.parametrize(("stored", "weights", "inputs", "format"), COMPRESSED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_compressed_tensors(
    stored: str, weights: dict[str, Any], inputs: str | None, format: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    activations = None if inputs is None else QuantizationArgs(num_bits=8, type=inputs, strategy="token", dynamic=True)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=activations, format=stored
    )
    compressor = _compressor(scheme, stored)
    scale, zero = _observed(scheme.weights, dtype)
    state = {"weight": WEIGHT.to(dtype), "weight_scale": scale, "weight_zero_point": zero}
    made = compressor.compress(state, scheme)
    wide = {name: one.float() if one.dtype == dtype else one for name, one in made.items()}
    values = compressor.decompress(wide, scheme)["weight"]
    config = dict(quant_method="compressed-tensors", format=stored, quantization_status="compressed")
    config["config_groups"] = {"group_0": json.loads(scheme.model_dump_json())}
    read = opened(write(tmp_path, {f"m.{name}": one for name, one in made.items()}, config)).pieces["m.weight"].first
    option = {torch.bfloat16: "", torch.float32: ":f32"}[dtype]
    wanted = format.replace(":a8", "") + option + (":a8" if ":a8" in format else "")
    assert read.coded is not None and read.coded.format == canonical(wanted)
    assert values.dtype == torch.float32 and torch.equal(read.read(), values)


def _observed(args: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales and zeros as an observer of minima and maxima would choose them."""
    from compressed_tensors.quantization.utils import calculate_qparams

    if args.strategy == "block":
        tiles = WEIGHT.new_zeros(128, 256)
        tiles[: len(WEIGHT)] = WEIGHT
        split = tiles.reshape(1, 128, 2, 128).transpose(1, 2).flatten(-2)
    elif args.strategy == "group":
        split = WEIGHT.reshape(96, -1, args.group_size)
    else:
        split = WEIGHT.reshape(96, 1, -1) if args.strategy == "channel" else WEIGHT.reshape(1, 1, -1)
    low, high = (bound.to(dtype) for bound in torch.aminmax(split, dim=-1))
    scale, zero = calculate_qparams(low, high, args)
    single = args.strategy == "tensor"
    return scale.to(dtype).reshape(-1) if single else scale.to(dtype), zero.reshape(-1) if single else zero


@pytest.mark.parametrize("factor", [512.0, 700.0])
def test_nvfp4_of_compressed_tensors(factor: float, tmp_path: Path) -> None:
    """A block's scale is e4m3 times the reciprocal of the global scale, which the library divides by: an ulp or two."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    weights = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format="nvfp4-pack-quantized")
    of_all = torch.tensor([factor])
    largest = WEIGHT.reshape(96, -1, 16).abs().amax(dim=-1)
    scale = (largest * factor / 6).to(torch.float8_e4m3fn).float()
    state = {"weight": WEIGHT, "weight_scale": scale, "weight_global_scale": of_all}
    made = _compressor(scheme, "nvfp4-pack-quantized").compress(state, scheme)
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    codes = unpack_fp4_from_uint8(made["weight_packed"], 96, 256, dtype=torch.float32)
    values = dequantize(x_q=codes, scale=made["weight_scale"].float(), args=weights, global_scale=of_all)
    config = dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized")
    config["config_groups"] = {"group_0": json.loads(scheme.model_dump_json())}
    read = opened(write(tmp_path, {f"m.{name}": one for name, one in made.items()}, config)).pieces["m.weight"].first
    assert read.coded is not None and read.coded.format == "nvfp4"
    if factor == 512:
        assert torch.equal(read.read(), values)
    torch.testing.assert_close(read.read(), values, rtol=2.5e-7, atol=0)
    # The library's own decompress computes the same and rounds to bfloat16, which no argument of it prevents.
    rounded = _compressor(scheme, "nvfp4-pack-quantized").decompress(made, scheme)["weight"]
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, values.bfloat16())


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("doubly", [False, True])
@pytest.mark.parametrize(("shape", "block"), [((96, 256), 64), ((96, 256), 128), ((30, 80), 64), ((3, 33), 64)])
def test_bitsandbytes_in_4_bits(kind: str, doubly: bool, shape: tuple[int, int], block: int, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 0.05
    data, state = functional.quantize_4bit(weight, blocksize=block, quant_type=kind, compress_statistics=doubly)
    # As one row, since the kernel for CPUs begins each row with a block, which quantizing does not.
    row = functional.QuantState.from_dict(state.as_dict(), torch.device("cpu"))
    row.shape = torch.Size((weight.numel(),))
    values = functional.dequantize_4bit(data, row).reshape(shape)
    made = {"m.weight": data} | {f"m.weight.{name}": one for name, one in state.as_dict(packed=True).items()}
    checkpoint = opened(write(tmp_path, made, None))
    read = checkpoint.pieces["m.weight"].first
    assert list(checkpoint.pieces) == ["m.weight"] and values.dtype == torch.float32
    group = math.gcd(shape[1], block)  # of 80 inputs 16, of 33 one
    assert (read.coded.format if read.coded else None) == (f"{kind}:{group}" if group >= 16 else None)
    assert ("cross rows" in "".join(checkpoint.notes)) == (group < 16)
    assert torch.equal(read.read(), values)
    for part in ((slice(1, 3),), (slice(2, 3), slice(0, 64))):
        assert torch.equal(read.read(part), values[part])


def test_bitsandbytes_in_8_bits(tmp_path: Path) -> None:
    """The library multiplies code and SCB first, then by 1 / 127; a format's scale is SCB / 127: an ulp apart."""
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, scale, _ = functional.int8_vectorwise_quant(WEIGHT.half())
    made = {"m.weight": codes, "m.SCB": scale, "m.weight_format": torch.tensor(0, dtype=torch.uint8)}
    read = opened(write(tmp_path, made, None)).pieces["m.weight"].first
    values = functional.int8_vectorwise_dequant(codes, scale)
    assert read.coded is not None and read.coded.format == "int8:row:f32"
    torch.testing.assert_close(read.read(), values.float(), rtol=2**-22, atol=0)


TORCHAO = [
    ("Int8WeightOnlyConfig", {}, "int8:row:f32"),
    ("Int8WeightOnlyConfig", {"granularity": 32}, "int8:32:f32"),
    ("Int8DynamicActivationInt8WeightConfig", {}, "int8:row:f32:a8"),
    ("Float8WeightOnlyConfig", {}, "fp8:row:f32"),
    ("IntxWeightOnlyConfig", {"weight_dtype": torch.int4, "granularity": 32}, "int4:32"),
    ("IntxWeightOnlyConfig", {"weight_dtype": torch.int8, "granularity": 64}, "int8"),
    ("Int8DynamicActivationIntxWeightConfig", {"weight_dtype": torch.int4, "weight_granularity": 32}, "int4:32:a8"),
    ("IntxWeightOnlyConfig", {"weight_dtype": torch.int4, "granularity": 32, "mapping_type": "ASYMMETRIC"},
     "int4:32:asymmetric"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "format"), TORCHAO)
def test_torchao(name: str, options: dict[str, Any], format: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    options = {
        key: quantization.PerGroup(value) if "granularity" in key
        else quantization.MappingType[value] if key == "mapping_type" else value
        for key, value in options.items()
    }  # fmt: skip
    linear = torch.nn.Linear(256, 96, bias=False, dtype=torch.bfloat16)
    linear.weight.data.copy_(WEIGHT)
    model = torch.nn.ModuleDict({"m": linear})
    quantization.quantize_(model, getattr(quantization, name)(**options))
    tensors, metadata = support.flatten_tensor_state_dict(model.state_dict())
    save_file({key: one.contiguous() for key, one in tensors.items()}, tmp_path / "model.safetensors", metadata)
    checkpoint = opened(tmp_path)
    assert list(checkpoint.pieces) == ["m.weight"]
    read, parts = checkpoint.pieces["m.weight"].first, load_file(tmp_path / "model.safetensors")
    assert read.coded is not None and read.coded.format == canonical(format)
    zero = parts.get("m._weight_zero_point", torch.zeros(()))
    scale = parts["m._weight_scale"].float()
    codes = parts["m._weight_qdata"].float().reshape(96, scale.shape[1], -1)
    values = (codes - zero.float().reshape(*zero.shape, 1)) * scale.unsqueeze(-1)
    assert torch.equal(read.read(), values.reshape(96, 256))
    assert torch.equal(read.read().bfloat16(), model["m"].weight.dequantize())


def test_a_model_of_bitsandbytes_as_transformers_saves_it(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path / "plain")
    config = t.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = t.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "coded")
    checkpoint = opened(tmp_path / "coded")
    coded = {name: one.first.coded for name, one in checkpoint.pieces.items()}
    assert sum(one is not None and one.format == "nf4:64" for one in coded.values()) == 21
    assert set(checkpoint.titles.values()) == {"bitsandbytes"} and not checkpoint.notes


def test_the_stage_leaves_plain_files_alone(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    checkpoint = opened(tmp_path)
    assert not checkpoint.titles and not checkpoint.notes
    first: LazyTensor = checkpoint.pieces["model.embed_tokens.weight"].first
    assert first.coded is None and Decoded() == Decoded()


@pytest.mark.parametrize(("version", "size"), [
    ("gemv", 64), ("gemv", 128), ("gemv_fast", 32), ("gemv_fast", 64), ("gemv_fast", 128),
])  # fmt: skip
def test_awq_by_rows(version: str, size: int, tmp_path: Path) -> None:
    module, name = {"gemv": ("gemv_awq", "AwqGEMVLinear"), "gemv_fast": ("gemv_fast_awq", "AwqGEMVFastLinear")}[version]
    pytest.importorskip("gptqmodel")
    library = pytest.importorskip(f"gptqmodel.nn_modules.qlinear.{module}")
    weight = WEIGHT[:64]  # gemv's kernel wants multiples
    scales = (weight.reshape(64, -1, size).abs().amax(dim=-1) / 8).half()
    zeros = torch.arange(scales.numel()).view_as(scales) % 16
    codes = (weight.reshape(64, -1, size) / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    values = ((codes - zeros[..., None]) * scales.float()[..., None]).reshape(64, 256)
    if version == "gemv_fast":  # which multiplies scales with zeros, in float16
        less = (scales.float() * zeros).half().float()
        values = (codes * scales.float()[..., None] - less[..., None]).reshape(64, 256)
    linear = torch.nn.Linear(256, 64, bias=False)
    linear.weight.data.copy_(((codes - zeros[..., None]) * scales.float()[..., None]).reshape(64, 256))
    made = getattr(library, name)(
        bits=4, group_size=size, sym=False, desc_act=False, in_features=256, out_features=64, register_buffers=False
    )
    made.pack(linear, scales.float(), zeros.float())
    tensors = {f"m.{leaf}": getattr(made, leaf) for leaf in ("qweight", "qzeros", "scales")}
    config = dict(quant_method="awq", bits=4, group_size=size, version=version)
    read = opened(write(tmp_path, tensors, config)).pieces["m.weight"].first
    kind = "offset" if version == "gemv_fast" else "asymmetric"
    assert read.coded is not None and read.coded.format == f"int4:{size}:{kind}:f16"
    assert torch.equal(read.read(), values)
