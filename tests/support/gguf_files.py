"""GGUF files for tests: tiny models, written by the gguf package as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from infuse.weights.gguf.blocks import FORMATS
from tests.support.gguf_blocks import random_blocks

QUANTIZED_BY_THE_PACKAGE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")


def permuted(rows: Tensor, heads: int) -> Tensor:
    """Rows of q or k as llama.cpp stores those of Llama: per head, those that rotate together are neighbours."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def write(
    path: Path,
    architecture: str,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    type_of: Callable[[str, Tensor], str] = lambda name, tensor: "F32",
    vocabulary: Mapping[str, Any] | None = None,
    most_tensors: int = 0,
) -> dict[str, Tensor]:
    """Write `tensors` by GGUF's names, in the types that `type_of` tells, and return their values as stored.

    Keys of `values` begin with the architecture, or with `general`. K-types get random blocks, whatever the tensor has.
    With `most_tensors` the file is split, and `path` is a stem.
    """
    gguf = pytest.importorskip("gguf")
    split = {"split_max_tensors": most_tensors} if most_tensors else {}
    writer = gguf.GGUFWriter(str(path), architecture, **split)
    for key, value in {**values, **(vocabulary or {})}.items():
        _add(writer, key, value)
    stored = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        type = type_of(name, tensor)
        stored[name] = _add_tensor(writer, gguf, name, tensor.detach().float(), type, number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(writer: Any, gguf: Any, name: str, tensor: Tensor, type: str, seed: int) -> Tensor:
    kind, array = gguf.GGMLQuantizationType[type], numpy.ascontiguousarray(tensor.numpy())
    if type in FORMATS:
        if type in QUANTIZED_BY_THE_PACKAGE:
            array = gguf.quantize(array, kind)
        else:
            *outer, inputs = tensor.shape
            rows = random_blocks(type, tensor.numel() // inputs, inputs, seed, std=0.05)
            array = rows.reshape(*outer, -1).numpy()
        writer.add_tensor(name, array, raw_dtype=kind)
        return torch.from_numpy(numpy.ascontiguousarray(gguf.dequantize(array, kind), dtype=numpy.float32))
    if type == "BF16":
        writer.add_tensor(name, tensor.bfloat16().view(torch.uint8).numpy(), raw_dtype=kind)
        return tensor.bfloat16().float()
    array = array.astype({"F32": numpy.float32, "F16": numpy.float16}[type])
    writer.add_tensor(name, array)
    return torch.from_numpy(array.astype(numpy.float32))


def matrices_in(type: str) -> Callable[[str, Tensor], str]:
    """All matrices in `type`, vectors, norms, biases of experts and routers in F32."""
    plain = ("ffn_gate_inp", ".bias", "norm", "ssm_conv1d", "ssm_a", "ssm_d", "shortconv.conv")
    return lambda name, tensor: type if tensor.dim() > 1 and not any(one in name for one in plain) else "F32"


def llama_tensors(model: Any) -> dict[str, Tensor]:
    """A Llama's tensors under GGUF's names, with q and k permuted."""
    config = model.config
    names = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    tensors = renamed(model, names)
    for name, tensor in tensors.items():
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            tensors[name] = permuted(tensor, heads)
    return tensors


def renamed(
    model: Any, layer: Mapping[str, str], top: Mapping[str, str] | None = None, without: Container[str] = ()
) -> dict[str, Tensor]:
    """A model's tensors by GGUF's names: `layer` has those within layers, of modules or of whole parameters.

    `top`: further names outside of layers. A tied head and `without` are left out.
    """
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", **(top or {})}
    tensors = {}
    for name, tensor in model.state_dict().items():
        path, _, leaf = name.rpartition(".")
        if name in without or (path == "lm_head" and model.config.tie_word_embeddings):
            continue
        whole = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if whole and whole[2] in layer:
            tensors[f"blk.{whole[1]}.{layer[whole[2]]}"] = tensor.detach()
            continue
        matched = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", path)
        to = f"blk.{matched[1]}.{layer[matched[2]]}" if matched else top[path]
        leaf = {"sinks": "weight"}.get(leaf, leaf)
        tensors[f"{to}.{leaf}"] = tensor.detach()
    return tensors


def llama_values(config: Any, architecture: str = "llama") -> dict[str, Any]:
    """The key-values of a Llama-like model."""
    values = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    return {f"{architecture}.{key}": value for key, value in values.items()}


def vocabulary_of(folder: Path) -> dict[str, Any]:
    """The keys of a folder's byte-level BPE, as llama.cpp's converter writes them."""
    content = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token == "<eos>" else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
