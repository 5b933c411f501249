"""The tiny model of a case, and the keys and tensors that llama.cpp's converter writes for it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.gguf_files import permuted, renamed
from tests.weights.gguf.cases.case import SIZES, Case


def model_of(case: Case) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(case.model_type, **{**SIZES, **case.changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.normal_(0, 0.1 if parameter.dim() > 1 else 0.3)
            if "norm" in name and not case.shifted:
                parameter.add_(1)
    for name, buffer in model.named_buffers():
        if name.endswith(("bias", "layer_scalar")):
            buffer.normal_(float(name.endswith("scalar")), 0.1)
    return model


def keys_of(case: Case, config: Any) -> dict[str, Any]:
    rope, kind = config.rope_parameters, "" if case.layer_norm and "rms" not in case.norm else "rms_"
    keys = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": value_of(config, "num_key_value_heads"),
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        f"attention.layer_norm_{kind}epsilon": getattr(config, case.norm),
    }
    head_dim = value_of(config, "head_dim")
    if head_dim and head_dim != config.hidden_size // config.num_attention_heads:
        keys["attention.key_length"] = keys["attention.value_length"] = head_dim
    partial = rope.get("full_attention", rope).get("partial_rotary_factor", 1.0)
    keys["rope.dimension_count"] = int(partial * (head_dim or config.hidden_size // config.num_attention_heads))
    ids = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.padding_token_id": 0}
    return {f"{case.architecture}.{key}": value for key, value in {**keys, **case.keys}.items()} | ids


def value_of(config: Any, key: str) -> Any:
    """A value of a config, whose layers may have another one."""
    values = config.to_dict()
    return values[key] if key in values else getattr(config, key, None)


def tensors_of(case: Case, model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors as llama.cpp's converter writes them."""
    state = model.state_dict()
    experts = {name: tensor for name, tensor in state.items() if ".experts." in name}
    of_heads = {name: tensor for name, tensor in state.items() if ".norms." in name}
    tensors = renamed(model, case.layer, case.top, without=experts.keys() | of_heads.keys())
    for name, tensor in of_heads.items():  # one after another
        layer, leaf = name.split(".")[2], name.split(".")[4][0]
        target = f"blk.{layer}.attn_{leaf}_norm.weight"
        tensors[target] = torch.cat([*([tensors[target]] if target in tensors else []), tensor[None]])
    for name, tensor in tensors.items():
        heads = {"attn_q": model.config.num_attention_heads, "attn_k": value_of(model.config, "num_key_value_heads")}
        if case.permuted and name.split(".")[2:3] and name.split(".")[2] in heads:
            tensors[name] = permuted(tensor, heads[name.split(".")[2]])
        if case.shifted and name.endswith("norm.weight") and "ssm_norm" not in name:
            tensors[name] = tensor + 1
        if name.endswith("ffn_gate_inp_shexp.weight"):
            tensors[name] = tensor[0]
    for name, tensor in experts.items():
        number, leaf = name.split(".")[2], name.rpartition(".")[2]
        kind = "bias" if leaf.endswith("_bias") else "weight"
        if case.architecture == "gpt-oss" and kind == "weight":
            tensor = tensor.transpose(1, 2)
        if leaf.startswith("down"):
            tensors[f"blk.{number}.ffn_down_exps.{kind}"] = tensor
            continue
        half = tensor.shape[1] // 2
        pair = (tensor[:, :half], tensor[:, half:])
        if case.architecture == "gpt-oss":
            pair = (tensor[:, 0::2], tensor[:, 1::2])
        for part, value in zip(("gate", "up"), pair, strict=True):
            tensors[f"blk.{number}.ffn_{part}_exps.{kind}"] = value.contiguous()
    case.written(tensors, model.config)
    return tensors
