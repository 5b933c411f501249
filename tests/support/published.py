"""A tiny gpt-oss in the form in which it is published: experts as blocks of mxfp4, everything else in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers as t
from safetensors.torch import save_file
from torch import Tensor

from infuse.quant.microscaling import BLOCK
from infuse.quant.parse import quant_format
from tests.models.families import Family

OSS = Family(
    "gpt-oss", t.GptOssConfig, t.GptOssForCausalLM,
    values=dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=96, num_local_experts=4, num_experts_per_tok=2, sliding_window=5, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    ),
)  # fmt: skip
# What the published config.json says, shortened.
_CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def tensors() -> dict[str, Tensor]:
    """The tensors of OSS as files hold them: blocks and exponents of experts are rounded by our own format."""
    format, made = quant_format("mxfp4"), {}
    for name, value in OSS.make().state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            made[name] = value.bfloat16().contiguous()
            continue
        experts, inputs, rows = value.shape
        held = format.quantize(value.transpose(1, 2).reshape(-1, inputs))
        made[f"{name}_blocks"] = held.tensors["data"].view(experts, rows, inputs // BLOCK, BLOCK // 2)
        exponents = held.tensors["scale"].float().log2() + 127
        made[f"{name}_scales"] = exponents.to(torch.uint8).view(experts, rows, inputs // BLOCK)
    return made


def publish(folder: Path, given: dict[str, Tensor] | None = None) -> None:
    """Write config.json and model.safetensors with these tensors."""
    config = OSS.config(**OSS.values).to_dict() | {"quantization_config": _CONFIG, "dtype": "bfloat16"}
    config["architectures"] = ["GptOssForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors() if given is None else given, folder / "model.safetensors", metadata={"format": "pt"})


def empty(folder: Path) -> torch.nn.Module:
    """The model on meta, made from the folder's config."""
    with torch.device("meta"):
        return t.AutoModelForCausalLM.from_config(t.AutoConfig.from_pretrained(folder)).eval()
