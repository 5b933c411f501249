"""Measure how well a causal language model predicts a text.

Run `python examples/perplexity.py MODEL_DIR [TEXT_FILE]`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F


@torch.no_grad()
def total_nats(model: Callable[..., Any], tokenizer: Any, text: str, window: int, stride: int) -> tuple[float, int]:
    """Return the summed negative log-likelihood of the text in nats and the number of tokens scored.

    Windows of `window` tokens move on by `stride`, and each scores only the tokens that are new in it, so every
    token is counted once. Every window begins with the beginning-of-text token if the tokenizer has one;
    without it the very first token has nothing to be predicted from and is not scored.
    """
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size = window - len(bos)
    if not 0 < stride < window:
        raise ValueError(f"stride must be between 1 and window - 1 = {window - 1}, not {stride}")
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    device = getattr(model, "device", "cpu")
    first = scored = 0 if bos else 1
    nats, end = 0.0, min(size, len(ids))
    while scored < end:
        chunk = torch.tensor(bos + ids[max(0, end - size) : end], device=device)
        new = end - scored
        logits = model(chunk[None]).logits[0, -new - 1 : -1]
        nats += F.cross_entropy(logits.float(), chunk[-new:].to(logits.device), reduction="sum").item()
        scored, end = end, min(end + stride, len(ids))
    return nats, max(scored - first, 0)


def perplexity(model: Callable[..., Any], tokenizer: Any, text: str, window: int = 512, stride: int = 256) -> float:
    """Return the perplexity per token of a text; `model(input_ids)` has to return an object with `.logits`."""
    nats, tokens = total_nats(model, tokenizer, text, window, stride)
    return math.exp(nats / tokens)


def bits_per_byte(model: Callable[..., Any], tokenizer: Any, text: str, window: int = 512, stride: int = 256) -> float:
    """Return the bits needed per UTF-8 byte of a text, which compares models with different tokenizers."""
    nats, _ = total_nats(model, tokenizer, text, window, stride)
    return nats / math.log(2) / len(text.encode())


def main() -> None:
    """Print perplexity and bits per byte of a saved model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory with model and tokenizer")
    parser.add_argument("text", type=Path, nargs="?", help="text file (default: heldout.txt in the model's directory)")
    parser.add_argument("--window", type=int, default=512, help="tokens per window (default: 512)")
    parser.add_argument("--stride", type=int, default=256, help="tokens between windows (default: 256)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="type to calculate in")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    text = (args.text or args.model / "heldout.txt").read_text(encoding="utf-8")
    nats, tokens = total_nats(model, tokenizer, text, args.window, args.stride)
    bits = nats / math.log(2) / len(text.encode())
    print(f"{tokens} tokens: perplexity {math.exp(nats / tokens):.3f}, {bits:.4f} bits per byte")


if __name__ == "__main__":
    main()
