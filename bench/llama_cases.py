"""The arguments that the layers of Llama-3.2-1B give to each op: decoding at batch 1 and 8, and a prompt of 512 tokens.

The norms and activations that this model does not have are taken at its widths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from infuse.ops import Case
from infuse.quant.parse import quant_format

HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, VOCABULARY = 2048, 8192, 32, 8, 64, 128256
ROWS = (1, 8, 512)
MATRICES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "qkv": (HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH),
        "out": (HEADS * WIDTH, HIDDEN),
        "gate_up": (HIDDEN, 2 * INNER),
        "down": (INNER, HIDDEN),
        "lm_head": (HIDDEN, VOCABULARY),
    }
)  # name → inputs, outputs
FORMATS = ("int8", "int4", "fp8", "fp6")
CONTEXTS = ((1, 1, 128), (8, 1, 128), (1, 1, 4096), (1, 512, 512))  # batch, new tokens, keys

CaseMaker = Callable[[torch.dtype], Iterator[Case]]


def matrices() -> Iterator[tuple[str, int, int, int]]:
    """Label, rows, inputs, outputs; the logits of a prompt are those of its last token."""
    for name, (inputs, outputs) in MATRICES.items():
        for rows in ROWS if name != "lm_head" else ROWS[:-1]:
            yield f"{name} {rows}x{inputs}->{outputs}", rows, inputs, outputs


def linear(dtype: torch.dtype) -> Iterator[Case]:
    for label, rows, inputs, outputs in matrices():
        weight = torch.randn(outputs, inputs, dtype=dtype) / inputs**0.5
        yield Case(label, (torch.randn(rows, inputs, dtype=dtype), weight, None))


def quantized_linear(dtype: torch.dtype) -> Iterator[Case]:
    for format in FORMATS:
        for label, rows, inputs, outputs in matrices():
            held = quant_format(format).quantize(torch.randn(outputs, inputs) / inputs**0.5)
            x = torch.randn(rows, inputs, dtype=dtype)
            yield Case(f"{format} {label}", (x, [*held.tensors.values()], None, outputs, inputs, format))


def norm(*, residual: bool, centred: bool) -> CaseMaker:
    def make(dtype: torch.dtype) -> Iterator[Case]:
        for rows in ROWS:
            x, weight = torch.randn(rows, HIDDEN, dtype=dtype), torch.randn(HIDDEN, dtype=dtype)
            first: tuple[Any, ...] = (x, torch.randn_like(x)) if residual else (x,)
            last = (torch.randn_like(weight), 1e-5, 0.0) if centred else (1e-5, 0.0)
            yield Case(f"{rows}x{HIDDEN}", (*first, weight, *last))

    return make


def activation(columns: int, name: str) -> CaseMaker:
    def make(dtype: torch.dtype) -> Iterator[Case]:
        for rows in ROWS:
            yield Case(f"{name} {rows}x{columns}", (torch.randn(rows, columns, dtype=dtype), name))

    return make


def cos_sin(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(1, tokens, WIDTH) * 6.28
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotary(dtype: torch.dtype) -> Iterator[Case]:
    for batch, tokens, _ in CONTEXTS:
        x = torch.randn(batch, tokens, HEADS + KV_HEADS, WIDTH, dtype=dtype)
        yield Case(f"{batch}x{tokens}", (x, *cos_sin(tokens, dtype), False))


def rotary_append(dtype: torch.dtype) -> Iterator[Case]:
    for batch, tokens, length in CONTEXTS:
        qkv = torch.randn(batch, tokens, HEADS + 2 * KV_HEADS, WIDTH, dtype=dtype)
        keys, values = (torch.zeros(batch, KV_HEADS, length, WIDTH, dtype=dtype) for _ in range(2))
        yield Case(
            f"{batch}x{tokens} at {length - tokens}",
            (qkv, *cos_sin(tokens, dtype), keys, values, length - tokens, HEADS, False),
        )


def attention(dtype: torch.dtype) -> Iterator[Case]:
    for batch, tokens, length in CONTEXTS:
        q = torch.randn(batch, HEADS, tokens, WIDTH, dtype=dtype)
        k, v = (torch.randn(batch, KV_HEADS, length, WIDTH, dtype=dtype) for _ in range(2))
        yield Case(f"{batch}x{tokens} over {length}", (q, k, v, None, None, WIDTH**-0.5, True, 0, 0.0))


LLAMA_CASES: Mapping[str, CaseMaker] = MappingProxyType(
    {
        "linear": linear,
        "quantized_linear": quantized_linear,
        "rms_norm": norm(residual=False, centred=False),
        "add_rms_norm": norm(residual=True, centred=False),
        "layer_norm": norm(residual=False, centred=True),
        "add_layer_norm": norm(residual=True, centred=True),
        "activation": activation(INNER, "silu"),
        "gated_activation": activation(2 * INNER, "silu"),
        "rotary": rotary,
        "rotary_append": rotary_append,
        "attention": attention,
    }
)
