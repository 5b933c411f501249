"""Towers and encoders alone, at their own shapes with few layers and random weights: transformers and infuse in turns.

    python bench/towers.py [--layers 2] [--batches 1 16] [--repeats 7] [--out FILE.md]

bfloat16; the rows are models, the columns transformers' milliseconds and infuse's ratios to them.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers as t
from rich.table import Table
from torch import Tensor

import infuse
from report import in_turns, markdown, show


def pictures(size: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda batch: {"pixel_values": torch.randn(batch, 3, size, size, dtype=torch.bfloat16)}


def patches(side: int) -> Callable[[int], dict[str, Tensor]]:
    """Pictures of side x side patches of 16 x 16 pixels and two frames, in one row."""

    def given(batch: int) -> dict[str, Tensor]:
        grid = torch.tensor([[1, side, side]] * batch)
        return {"hidden_states": torch.randn(batch * side * side, 1536, dtype=torch.bfloat16), "grid_thw": grid}

    return given


def sounds(batch: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch, 16000, dtype=torch.bfloat16)}


def words(batch: int) -> dict[str, Tensor]:
    ids = torch.randint(5, 1000, (batch, 128))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# Name → class, config and inputs. The shapes are the configs' own: those of the base models.
TOWERS: dict[str, tuple[Any, Any, Callable[[int], dict[str, Tensor]]]] = {
    "SigLIP base, 196 patches": (t.SiglipVisionModel, t.SiglipVisionConfig(), pictures(224)),
    "DINOv2 base, 257 patches": (t.Dinov2Model, t.Dinov2Config(image_size=224, patch_size=14), pictures(224)),
    "DINOv3 base, 201 patches": (
        t.DINOv3ViTModel,
        t.DINOv3ViTConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072, num_register_tokens=4),
        pictures(224),
    ),
    "Qwen3-VL's tower, 256 patches": (
        t.Qwen3VLVisionModel,
        t.Qwen3VLVisionConfig(deepstack_visual_indexes=[0]),
        patches(16),
    ),
    "HuBERT base, 1 s": (t.HubertModel, t.HubertConfig(), sounds),
    "NomicBERT, 128 tokens": (t.NomicBertModel, t.NomicBertConfig(), words),
    "MPNet base, 128 tokens": (t.MPNetModel, t.MPNetConfig(), words),
    "DeBERTa v3 base, 128 tokens": (
        t.DebertaV2Model,
        t.DebertaV2Config(
            hidden_size=768,
            num_attention_heads=12,
            intermediate_size=3072,
            relative_attention=True,
            position_buckets=256,
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            norm_rel_ebd="layer_norm",
            position_biased_input=False,
            type_vocab_size=0,
            max_position_embeddings=512,
        ),
        words,
    ),
}


@torch.inference_mode()
def run(model: Any, inputs: dict[str, Tensor]) -> Any:
    return model(**inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--formats", nargs="*", default=["", "int8:a8"])
    parser.add_argument("--out", type=Path, help="append the report to this file")
    args = parser.parse_args()
    table = Table(title=f"towers of {args.layers} layers in bfloat16: milliseconds, and times as fast as transformers")
    names = [format or "bfloat16" for format in args.formats]
    headings = [(batch, name) for batch in args.batches for name in ("ms", *names)]
    for heading in ("", *(f"batch {batch}, {name}" for batch, name in headings)):
        table.add_column(heading, justify="right" if heading else "left")
    for label, (model, config, made) in TOWERS.items():
        for key in ("num_hidden_layers", "depth"):
            if hasattr(config, key):
                setattr(config, key, args.layers)
        torch.manual_seed(0)
        original = model(config).to(torch.bfloat16).eval()
        runs = [original]
        for format in args.formats:
            quant = {"quant": format} if format else {}
            engine = infuse.init_inference(copy.deepcopy(original), dtype=torch.bfloat16, **quant)
            blocks = sum(step.depth == "block" for step in engine.plan.steps)
            assert blocks >= args.layers, f"{label}: {blocks} blocks"
            runs.append(engine.module)
        row = [label]
        for batch in args.batches:
            inputs = made(batch)
            seconds = [median(taken) for taken in in_turns([partial(run, one, inputs) for one in runs], args.repeats)]
            row += [f"{seconds[0] * 1e3:.2f}", *(f"{seconds[0] / one:.2f}" for one in seconds[1:])]
        table.add_row(*row)
    show(markdown(table, "random weights; the shapes are the configs' own"), args.out)


if __name__ == "__main__":
    main()
