"""Latent attention: a layer's decode step on a full cache and its prefill, against transformers' layer.

    python bench/latent.py [--contexts 512 4096] [--heads 16] [--dtype bfloat16] [--repeats 20] [--out FILE.md]

One layer of DeepSeek-V2-Lite's attention with V3's rotation, random weights and a small MLP. Both layers are called
directly, in turn, with what the model would pass; a step is dropped from the cache again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

import infuse
from infuse.cache.kv_cache import KVCache
from infuse.ground.cache_names import CACHE
from report import in_turns, markdown, show

HIDDEN = 2048


def made(heads: int, dtype: torch.dtype, tokens: int) -> Any:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=None,
        intermediate_size=64, vocab_size=64, first_k_dense_replace=1, max_position_embeddings=tokens,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config).eval().to(dtype)


class Layer:
    """The first layer of a model, called as the model calls it."""

    def __init__(self, model: Any, ours: bool):
        self._layer, self._rotary, self._config = model.model.layers[0], model.model.rotary_emb, model.config
        self._ours = ours
        self._cache = self._empty()

    def _empty(self) -> Any:
        return KVCache() if self._ours else DynamicCache(config=self._config)

    @torch.inference_mode()
    def _call(self, x: Tensor, cache: Any, start: int) -> Tensor:
        positions = torch.arange(start, start + x.shape[1])[None]
        turned = self._rotary(x, positions)
        return self._layer(x, position_embeddings=turned, position_ids=positions, attention_mask=None, **{CACHE: cache})

    def prefill(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: self._call(x, self._empty(), 0)

    def step(self, context: Tensor, x: Tensor) -> Callable[[], Tensor]:
        self._cache = self._empty()
        self._call(context, self._cache, 0)

        def run() -> Tensor:
            out = self._call(x, self._cache, context.shape[1])
            self._cache.crop(-x.shape[1])
            return out

        return run


def report(args: argparse.Namespace) -> tuple[Table, str]:
    dtype = getattr(torch, args.dtype)
    model = made(args.heads, dtype, 2 * max(args.contexts))
    layers = [Layer(model, False)]
    replaced = made(args.heads, dtype, 2 * max(args.contexts))
    layers.append(Layer(infuse.init_inference(replaced, dtype=dtype, verify="off", progress=False).module, True))
    rows = Table("what", "context", "transformers, ms", "infuse, ms", "of transformers'", "difference, rms")
    for length in args.contexts:
        context = torch.randn(1, length, HIDDEN, dtype=dtype)
        new = torch.randn(1, 1, HIDDEN, dtype=dtype)
        for what, runs in (
            ("step", [layer.step(context, new) for layer in layers]),
            ("prefill", [layer.prefill(context) for layer in layers]),
        ):
            exact, found = (run().float() for run in runs)
            error = float((found - exact).norm() / exact.norm())
            theirs, ours = (median(each) for each in in_turns(runs, args.repeats if what == "step" else 3))
            rows.add_row(
                what, str(length), f"{1e3 * theirs:.2f}", f"{1e3 * ours:.2f}", f"1/{theirs / ours:.1f}", f"{error:.1e}"
            )
    return rows, f"{args.heads} heads, {args.dtype}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="append the report to this file")
    args = parser.parse_args()
    rows, remarks = report(args)
    show(markdown(rows, remarks), args.out)


if __name__ == "__main__":
    main()
