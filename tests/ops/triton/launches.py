"""What is compiled in test_compiler.py: calls of the bodies in Triton, at the shapes of models."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from infuse import ops
from infuse.quant.parse import quant_format

# Dtype, compute capability, and which quantized products are compiled for it: one in how many, from which on. Together:
# every format and every shape of a product for 8.0, which has less shared memory, in a type of 16 bits; some in float32
# and for 9.0; the other kernels everywhere.
TARGETS = [(torch.float32, 80, 0, 6), (torch.bfloat16, 80, 0, 2), (torch.float16, 80, 1, 2), (torch.bfloat16, 90, 1, 6)]


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def launches(dtype: torch.dtype, which: int, of: int) -> Iterator[tuple[str, tuple, dict]]:
    """Name, arguments and keywords of bodies to call, of Llama-3's and Gemma-2's shapes mostly; some are odd.

    Of the quantized products, which take most of the time, one in `of`, beginning with number `which`.
    """
    x, width, one = empty(1, 1, 4096, dtype=dtype), empty(4096, dtype=dtype), torch.tensor([5])
    yield "rms_norm", (x, width, 1e-6, 0.0), {}
    yield "add_rms_norm", (x, x, width, 1e-6, 0.0), {}
    yield "add_layer_norm", (x, x, width, width, 1e-6, 1.0), {}
    yield "layer_norm", (empty(3, 1021, dtype=dtype), empty(1021, dtype=dtype), None, 1e-6, 1.0), {}
    yield "gated_activation", (x, "silu"), {}
    for name in ("gelu", "gelu_tanh"):
        yield "activation", (x, name), {}
    cos_sin, cache = empty(1, 1, 128, dtype=dtype), empty(1, 8, 2048, 128, dtype=dtype)
    yield "rotary", (empty(1, 7, 40, 128, dtype=dtype), cos_sin, cos_sin, True), {}
    yield "rotary_append", (empty(1, 1, 48, 128, dtype=dtype), cos_sin, cos_sin, cache, cache, 5, 32, False), {}
    yield "rotary_append", (empty(1, 1, 48, 128, dtype=dtype), cos_sin, cos_sin, cache, cache, one, 32, False), {}
    q, mask = empty(1, 32, 1, 128, dtype=dtype), torch.ones(1, 1, 1, 2048, dtype=torch.bool)
    yield "attention", (q, cache, cache, None, None, 0.1, True, 0, 0.0), {}
    yield "attention", (q, cache, cache, mask, None, 0.1, False, 512, 0.0), {"length": one}
    rows = empty(1, 8, 2048, 132, dtype=torch.int8)
    yield "attention", (q, rows, rows, mask, None, 0.1, False, 0, 0.0), {"length": one}
    long, wide = empty(1, 16, 500, 256, dtype=dtype), empty(1, 8, 500, 256, dtype=dtype)
    yield "attention", (long, wide, wide, None, None, 0.1, True, 0, 50.0), {}
    alibi = empty(1, 32, 64, 80, dtype=dtype)
    yield (
        "attention",
        (alibi, alibi, alibi, torch.ones(1, 1, 64, 64).bool(), empty(1, 32, 1, 64, dtype=dtype), 0.1, True, 0, 0.0),
        {},
    )
    keys, sinks = empty(1, 8, 300, 64, dtype=dtype), empty(64, dtype=dtype)
    for tokens in (1, 300):  # gpt-oss
        q = empty(1, 64, tokens, 64, dtype=dtype)
        yield "attention", (q, keys, keys, None, None, 0.1, True, 128, 0.0, sinks), {}
    yield from of_diffusion(dtype)
    yield from of_recurrence(dtype)
    weight, bias = empty(6144, 4096, dtype=dtype), empty(6144, dtype=dtype)
    for rows in (1, 5):
        yield "linear", (empty(rows, 4096, dtype=dtype), weight, bias), {}
        yield "linear", (empty(rows, 4096, dtype=dtype), weight, None, *ops.NO_NORM, "silu", True), {}
    gate_up, down, residual = (
        empty(28672, 4096, dtype=dtype),
        empty(4096, 14336, dtype=dtype),
        empty(5, 4096, dtype=dtype),
    )
    rms, layer, none = ("rms", width, None, 1e-6, 0.0), ("layer", width, width, 1e-6, 1.0), ops.NO_NORM
    for rows in (1, 5):
        some = empty(rows, 4096, dtype=dtype)
        yield "linear", (some, weight, bias, *layer, None, False, None), {}
        yield "linear", (some, gate_up, None, *rms, "silu", True, None), {}
        yield "linear", (empty(rows, 14336, dtype=dtype), down, None, *none, None, False, residual[:rows]), {}
    yield "linear", (empty(1, 1001, dtype=dtype), empty(1000, 1001, dtype=dtype), None), {}
    texts = (
        "int8",
        "int4",
        "fp8",
        "fp6",
        "int4:32:asymmetric",
        "mxfp4",
        "q4_k",
        "q6_k",
        "q2_k",
        "q5_1",
        "int3:32:offset",
    )
    for i, text in enumerate(texts):
        held = quant_format(text).quantize(torch.empty(4096, 4096, device="meta"))
        codes, *of_groups = held.tensors.values()
        data = torch.empty(4096, codes.shape[1] // 4, dtype=torch.int32)
        buffers = [data, *(torch.empty_like(each, device="cpu") for each in of_groups)]
        products = []
        for rows in (1, 3, 100):
            given = (empty(rows, 4096, dtype=dtype), buffers, None, 4096, 4096, text)
            around = (*rms, "silu", True, None) if rows < 100 else (*none, None, False, empty(rows, 4096, dtype=dtype))
            products += [("quantized_linear", given, {}), ("quantized_linear", (*given, *around), {})]
        yield from products[(which + i) % of :: of]  # of another format other ones
        yield "quantized_embedding", (torch.zeros(3, dtype=torch.int64), buffers, 4096, 4096, text, dtype), {}
    yield from of_experts(dtype)


def of_diffusion(dtype: torch.dtype) -> Iterator[tuple[str, tuple, dict]]:
    """Of Stable Diffusion's UNet and of Flux."""
    image, channels = empty(2, 320, 64, 64, dtype=dtype), empty(320, dtype=dtype)
    last = image.contiguous(memory_format=torch.channels_last)
    yield "group_norm", (last, channels, channels, empty(2, 320, dtype=dtype), 32, 1e-5, True), {}
    yield "group_norm", (image, channels, channels, None, 32, 1e-6, False), {}
    tokens, row = empty(2, 100, 3072, dtype=dtype), empty(2, 3072, dtype=dtype)
    yield "modulated_norm", (tokens, row, row, 1e-6, True), {}
    yield "gated_add", (tokens, row, tokens), {}
    yield "gated_add_norm", (tokens, row, tokens, row, row, 1e-6, False), {}
    first, second, norm = (
        empty(2, 100, 72, 128, dtype=dtype),
        empty(2, 77, 72, 128, dtype=dtype),
        empty(128, dtype=dtype),
    )
    cos_sin = torch.empty(177, 128)
    yield "joined_heads", (first, second, norm, norm, norm, norm, cos_sin, cos_sin, 1e-6), {}
    yield "joined_heads", (first, None, None, None, None, None, None, None, 1e-6), {}


def of_recurrence(dtype: torch.dtype) -> Iterator[tuple[str, tuple, dict]]:
    """Of Qwen3-Next, Kimi Linear (a decay for each channel), Mamba-2 and LFM2: steps and prompts; one of odd sizes."""
    for tokens in (1, 300):
        rows = empty(1, tokens, 12352, dtype=dtype)
        yield "causal_conv", (rows[..., :8192], empty(8192, 4, dtype=dtype), None, None, None, None, True), {}
        gate, out_gate, x = rows[..., :6144].chunk(3, dim=-1)
        taps, state = empty(2048, 3, dtype=dtype), empty(1, 3, 2048, dtype=dtype)
        yield "causal_conv", (x, taps, None, state, gate, out_gate, False), {}
        q, k, v, z = (part.unflatten(-1, (-1, 128)) for part in rows[..., :12288].split((2048, 2048, 4096, 4096), -1))
        of_head, of_channel = torch.empty(1, tokens, 32), torch.empty(1, tokens, 32, 128)
        state = torch.empty(1, 32, 128, 128)
        yield "linear_attention", (q, k, v, of_head, of_head, None, state, 0.1, True, True), {}
        yield "linear_attention", (q, k, v, of_channel, of_head, None, state, 0.1, True, True), {}
        of_step, of_beta, of_weights = rows[..., :32], rows[..., 32:64], torch.empty(32)
        yield "decay", (of_step, of_beta, of_weights, of_weights, 0.0, math.inf, 1.0), {}
        yield "decay", (of_step, None, of_weights, of_weights, 0.001, 0.1, 1.0), {}
        y, norm = empty(1, tokens, 4096, dtype=dtype), empty(128, dtype=dtype)
        yield "gated_norm", (y, z.flatten(2), norm, 128, 1e-6, False, False), {}
        yield "gated_norm", (y, z.flatten(2), empty(4096, dtype=dtype), 4096, 1e-6, True, True), {}
        v, of_head, skip = rows[..., :5120].unflatten(-1, (80, 64)), torch.empty(1, tokens, 80), torch.empty(80)
        yield "linear_attention", (q[:, :, :1], k[:, :, :1], v, of_head, of_head, skip, None, 1.0, False, False), {}
        odd, of_head = empty(1, tokens, 4, 100, dtype=dtype), torch.empty(1, tokens, 4)
        yield "linear_attention", (odd, odd, odd[..., :72], of_head, of_head, None, None, 0.1, True, True), {}
        x, gate, dt = rows[..., :4096], rows[..., 4096:8192], rows[..., 8192:12288]  # Jamba, FalconMamba
        keys, queries, of_channel = rows[..., 12288:12304], rows[..., 12304:12320], empty(4096, dtype=dtype)
        a_log, state = empty(4096, 16, dtype=dtype), torch.empty(1, 4096, 16)
        yield "selective_scan", (x, dt, keys, queries, gate, a_log, of_channel, of_channel, state), {}
        odd, keys, a_log = empty(1, tokens, 33, dtype=dtype), empty(1, tokens, 5, dtype=dtype), torch.empty(33, 5)
        exact = (a_log, torch.empty(33), torch.empty(33))
        yield "selective_scan", (odd, odd, keys, keys, None, *exact, None), {}


def of_experts(dtype: torch.dtype) -> Iterator[tuple[str, tuple, dict]]:
    """Of Qwen3-MoE's shape: one token, some tokens for each expert, many."""
    count, width, inner = 128, 2048, 768
    for text, some in (
        (None, (1, 32, 2048)),
        ("int8", (2048,)),
        ("fp6", (1, 2048)),
        ("int4:32:asymmetric", (2048,)),
        ("mxfp4", (1,)),
        ("q4_k", (1, 2048)),
    ):
        held: list[Tensor | list[Tensor] | None] = []
        for outputs, inputs in ((count * 2 * inner, width), (count * width, inner)):
            if text is None:
                held += [empty(outputs, inputs, dtype=dtype), None]
                continue
            part = quant_format(text).quantize(torch.empty(8, inputs, device="meta"))
            codes, *of_groups = part.tensors.values()
            data = torch.empty(outputs, codes.shape[1] // 4, dtype=torch.int32)
            held += [[data, *(torch.empty(outputs, t.shape[1], dtype=t.dtype) for t in of_groups)], None]
        name, formats = ("experts", ()) if text is None else ("quantized_experts", (inner, text, text))
        for tokens in some:
            index = torch.zeros(tokens, 8, dtype=torch.int64)
            routed = empty(tokens, width, dtype=dtype), index, torch.empty(tokens, 8)
            yield name, (*routed, *held, *formats, "silu", True, 0.0 if text else 7.0), {}
