"""Decode of vision-language models: a token after a picture, against the same text model's token without one.

    python bench/vision_language.py [--layers 8] [--tokens 48] [--repeats 5] [--out FILE.md]

Random weights of Qwen2.5-VL-3B's and Qwen3-VL-2B's widths with few layers, bfloat16, one prompt of a picture of 256
tokens and some text. The text model gets a prompt of the same length. Answers are compared with transformers' own in
float32: in bfloat16, random weights make many logits nearly equal.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers as t
from rich.table import Table
from torch import Tensor

import infuse
from report import in_turns, markdown, show

PICTURE, BEGIN, END = 990, 992, 993
SIDE = 32  # patches of a side of the picture, of which 2 x 2 become a token
_IDS = dict(image_token_id=PICTURE, video_token_id=991, vision_start_token_id=BEGIN, vision_end_token_id=END)
_READING = dict(Qwen2_5_VL="Qwen2ForCausalLM", Qwen3VL="Qwen3ForCausalLM")
_TOWER = dict(depth=2, num_heads=16, patch_size=14, spatial_merge_size=2, temporal_patch_size=2)


def _models(name: str, layers: int) -> tuple[Any, Any]:
    """A vision-language model and a text model of the same widths, with random weights."""
    qwen3 = name == "Qwen3VL"
    text = dict(
        vocab_size=1000, hidden_size=2048, intermediate_size=6144 if qwen3 else 11008, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8 if qwen3 else 2, head_dim=128,
    )  # fmt: skip
    rotated = dict(rope_type="default", rope_theta=1e6)
    in_three = dict(rotated, mrope_section=[24, 20, 20] if qwen3 else [16, 24, 24])
    vision = dict(_TOWER, hidden_size=1024, out_hidden_size=2048, intermediate_size=4096)
    if qwen3:
        vision |= dict(patch_size=16, num_position_embeddings=2304, deepstack_visual_indexes=[0])
    else:
        vision |= dict(window_size=112, fullatt_block_indexes=[1])
    torch.manual_seed(0)
    config = getattr(t, f"{name}Config")(text_config=dict(text, rope_parameters=in_three), vision_config=vision, **_IDS)
    seeing = getattr(t, f"{name}ForConditionalGeneration")(config)
    reading = getattr(t, _READING[name])(getattr(t, f"{name[:5]}Config")(**text, rope_parameters=rotated))
    for model in (seeing, reading):
        model.eval()
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return seeing, reading


def _given(model: Any) -> dict[str, Tensor]:
    patch = model.config.vision_config.patch_size
    pictured = SIDE * SIDE // 4
    ids = torch.tensor([[5, 6, BEGIN, *[PICTURE] * pictured, END, *range(20, 44)]])
    values = torch.randn(SIDE * SIDE, 3 * 2 * patch * patch)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": values}
    given |= {"image_grid_thw": torch.tensor([[1, SIDE, SIDE]]), "mm_token_type_ids": (ids == PICTURE).long()}
    return given


def _answer(model: Any, given: dict[str, Tensor], tokens: int) -> Callable[[], Tensor]:
    return lambda: model.generate(**given, max_new_tokens=tokens, do_sample=False)


def _token_ms(model: Any, given: dict[str, Tensor], tokens: int, repeats: int) -> float:
    """Milliseconds of a token after the first."""
    runs = [_answer(model, given, 1), _answer(model, given, 1 + tokens)]
    short, long = map(median, in_turns(runs, repeats))
    return 1e3 * (long - short) / tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    table = Table("model", "transformers, ms", "with a picture, ms", "text model alone, ms", "ratio", "equal tokens")
    for name in ("Qwen2_5_VL", "Qwen3VL"):
        seeing, reading = _models(name, options.layers)
        given = _given(seeing)
        text = {"input_ids": torch.randint(5, 900, given["input_ids"].shape)}
        with torch.no_grad():
            wanted = _answer(seeing, given, 12)()
            exact = infuse.init_inference(copy.deepcopy(seeing), dtype=torch.float32)
            equal = torch.equal(_answer(exact, given, 12)(), wanted)
            del exact
            given["pixel_values"] = given["pixel_values"].bfloat16()
            plain = _token_ms(seeing.bfloat16(), given, options.tokens, 1)
            engines = [infuse.init_inference(each, dtype=torch.bfloat16) for each in (seeing, reading.bfloat16())]
            pairs = zip(engines, (given, text), strict=True)
            times = [_token_ms(engine, each, options.tokens, options.repeats) for engine, each in pairs]
        cells = (plain, *times)
        table.add_row(name, *(f"{cell:.2f}" for cell in cells), f"{times[0] / times[1]:.2f}", str(equal))
    show(markdown(table, f"{options.layers} layers, bfloat16"), options.out)


if __name__ == "__main__":
    main()
