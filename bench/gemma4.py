"""Decode of Gemma 4: each block's step in one call of C++, against the same blocks part by part, and transformers.

    python bench/gemma4.py [--layers 12] [--tokens 40] [--repeats 5] [--out FILE.md]

Random weights of E2B's widths (layers that borrow keys and values, an input for each layer) and of a mixture with
26B-A4B's experts but fewer of them; one text, milliseconds a token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers as t
from rich.table import Table
from torch import Tensor

import infuse
from infuse.layers.block import Block
from report import in_turns, markdown, show

VOCABULARY, PROMPT = 1000, 64
_MIXTURE = dict(
    hidden_size=2816, intermediate_size=2112, hidden_size_per_layer_input=0, num_kv_shared_layers=0,
    enable_moe_block=True, num_experts=16, top_k_experts=8, moe_intermediate_size=704, num_attention_heads=16,
    num_key_value_heads=8,
)  # fmt: skip


def _model(layers: int, **changes: Any) -> Any:
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * (layers // 4)
    values = dict(
        vocab_size=VOCABULARY, hidden_size=1536, intermediate_size=6144, num_hidden_layers=len(kinds),
        num_attention_heads=8, num_key_value_heads=1, head_dim=256, global_head_dim=512, sliding_window=512,
        hidden_size_per_layer_input=256, vocab_size_per_layer_input=VOCABULARY, num_kv_shared_layers=len(kinds) // 2,
        layer_types=kinds,
    )  # fmt: skip
    torch.manual_seed(0)
    model = t.Gemma4ForCausalLM(t.Gemma4TextConfig(**{**values, **changes})).eval().to(torch.bfloat16)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def _token_ms(models: Sequence[Callable[[int], object]], tokens: int, repeats: int) -> list[float]:
    """Milliseconds of a token after the first, of each way to answer with so many tokens."""
    runs = [partial(answer, count) for answer in models for count in (1, 1 + tokens)]
    medians = [*map(median, in_turns(runs, repeats))]
    return [1e3 * (long - short) / tokens for short, long in zip(medians[::2], medians[1::2], strict=True)]


def _answers(model: Any, ids: Tensor) -> Callable[[int], object]:
    return lambda count: model.generate(input_ids=ids, max_new_tokens=count, do_sample=False)


def _apart(engine: infuse.InferenceEngine, ids: Tensor) -> Callable[[int], object]:
    """The same without calls of whole blocks."""

    def answer(count: int) -> None:
        blocks = [block for block in engine.module.modules() if isinstance(block, Block)]
        calls = [block._one_call for block in blocks]
        for block in blocks:
            block._one_call = None
        _answers(engine, ids)(count)
        for block, call in zip(blocks, calls, strict=True):
            block._one_call = call

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="a multiple of four")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append the report to this file")
    options = parser.parse_args()
    table = Table("model", "format", "transformers bfloat16, ms", "part by part, ms", "one call a block, ms", "ratio")
    ids = torch.randint(5, VOCABULARY - 10, (1, PROMPT))
    for name, changes in (("E2B", {}), ("mixture", _MIXTURE)):
        with torch.no_grad():
            (plain,) = _token_ms([_answers(_model(options.layers, **changes), ids)], options.tokens // 2, 2)
            for quant in (None, "int8", "int4"):
                engine = infuse.init_inference(
                    _model(options.layers, **changes), dtype=torch.bfloat16, **({"quant": quant} if quant else {})
                )
                ways = [_apart(engine, ids), _answers(engine, ids)]
                apart, together = _token_ms(ways, options.tokens, options.repeats)
                times = (f"{each:.2f}" for each in (plain, apart, together, apart / together))
                table.add_row(name, quant or "bfloat16", *times)
    show(markdown(table, f"{options.layers} layers"), options.out)


if __name__ == "__main__":
    main()
