"""Whole models on a GPU: random weights made there, every contestant alone, ratios to the first, shares of the measured
bounds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import transformers

import infuse
from on_gpu.runs import Bounds, Budget, read_bytes, wait, wall_seconds

LLAMA_8B = dict(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=8192,
    rope_theta=500000.0,
)
LLAMA_1B = dict(
    hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
    intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True, max_position_embeddings=8192,
)  # fmt: skip
GPT2_XL = dict(n_embd=1600, n_layer=48, n_head=25, n_positions=1024)
BERT_LARGE = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
TINY = dict(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    vocab_size=256,
)
TINY_GPT2 = dict(n_embd=64, n_layer=2, n_head=4, n_positions=128, vocab_size=256)
TINY_BERT = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=256)


def qwen3_5(tiny: bool) -> dict[str, Any]:
    """A hybrid of about 1 B: three layers of gated delta rule, then one of attention; the sizes of bench/hybrids.py."""
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * (1 if tiny else 6)
    if tiny:
        heads = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
        return {**TINY, **heads, "head_dim": 16, "num_hidden_layers": len(kinds), "layer_types": kinds}
    heads = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
                 linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128)  # fmt: skip
    return dict(
        **heads, hidden_size=1536, intermediate_size=5632, num_hidden_layers=len(kinds), layer_types=kinds,
        vocab_size=65536, max_position_embeddings=65536,
    )  # fmt: skip


EAGER, COMPILED = "transformers eager", "transformers static cache + compile"
# A guess, for the budget alone.
SECONDS_TO_MAKE = {"Llama-3-8B": 12.0, "Llama-3.2-1B": 5.0, "GPT-2-XL": 6.0, "Qwen3.5-1B": 12.0}


@dataclass
class Row:
    """One figure: seconds (for each token in decode), the ratio to the first contestant, and the share of the bound
    that it is near.
    """

    model: str
    who: str
    what: str
    seconds: float
    spread: tuple[float, float]
    ratio: float | None = None
    share: float | None = None
    notes: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """Settings of a run: sizes, repeats, and the stand-in for CUDA graphs (`install` adds a recorder on CPUs)."""

    device: torch.device
    tiny: bool
    batches: tuple[int, ...]
    prefill_tokens: int
    new_tokens: tuple[int, int]
    context: int
    repeats: int
    formats: tuple[str, ...]
    compiles: bool
    install: Callable[[Any], None]


def made(kind: Callable, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with random weights, made on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = kind(config).eval()
    finally:
        torch.set_default_dtype(before)
    if hasattr(model, "generation_config") and model.can_generate():
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model


Look = Callable[[str, Any], None]


def decoders(
    plan: Plan, name: str, kind: Callable, config: Any, *, bounds: Bounds, budget: Budget, look: Look
) -> Iterator[Row]:
    """Rows of one decoder: every contestant is made, measured and dropped; eager transformers first, whom the ratios
    are to.

    `look(format, model)` may see each of ours before it goes.
    """
    first: dict[str, float] = {}
    contestants = [EAGER, *(["bfloat16", *plan.formats]), *([COMPILED] if plan.compiles else [])]
    for who in contestants:
        needed = SECONDS_TO_MAKE.get(name, 5.0) * (8 if who == COMPILED else 1)
        if not budget.allows(f"{name}, {who}", 0 if plan.tiny else needed):
            continue
        model = made(kind, config, torch.bfloat16, plan.device)
        notes = {}
        if who not in (EAGER, COMPILED):
            start = time.perf_counter()
            quant = {} if who == "bfloat16" else {"quant": who}
            model = infuse.init_inference(model, dtype=torch.bfloat16, progress=False, **quant).module
            plan.install(model)
            wait(plan.device)
            notes["init_seconds"] = time.perf_counter() - start
        label = who if who in (EAGER, COMPILED) else f"infuse {who}"
        for row in _decoder_rows(plan, name, label, model, bounds, budget):
            first.setdefault(row.what, row.seconds)
            row.ratio = first[row.what] / row.seconds
            row.notes |= notes
            notes = {}
            yield row
        if who not in (EAGER, COMPILED):
            look(who, model)
        del model
        emptied(plan.device)


def _decoder_rows(plan: Plan, name: str, who: str, model: Any, bounds: Bounds, budget: Budget) -> Iterator[Row]:
    compiled = who == COMPILED
    for batch in plan.batches if not compiled else plan.batches[:1]:
        if budget.left() < 5 and not plan.tiny:
            return
        seconds, first_call = decode_seconds(plan, model, batch, who)
        share = read_bytes(model) / median(seconds) / bounds.read_bytes
        yield Row(name, who, f"decode, batch {batch}", median(seconds), (min(seconds), max(seconds)), share=share,
                  notes={"first_call_seconds": first_call})  # fmt: skip
    if not compiled:
        tokens = min(plan.prefill_tokens, model.config.max_position_embeddings)
        seconds = prefill_seconds(plan, model, tokens)
        share = None
        if not hasattr(model.config, "linear_key_head_dim"):  # a rule over a state has other operations
            share = prefill_operations(model.config, tokens) / median(seconds) / bounds.matmul_operations
        yield Row(name, who, f"prefill {tokens}", median(seconds), (min(seconds), max(seconds)), share=share)


def decode_seconds(plan: Plan, model: Any, batch: int, who: str) -> tuple[list[float], float]:
    """Seconds for each token of a long answer less a short one, so that the prompt cancels out; and the first call's,
    which warms up.
    """
    short, long = plan.new_tokens
    ids = torch.randint(3, 250, (batch, plan.context), device=plan.device)
    asked: dict[str, Any] = dict(attention_mask=torch.ones_like(ids), do_sample=False)
    if who == COMPILED:
        asked["cache_implementation"] = "static"
    repeats = 1 if who == EAGER else plan.repeats  # it takes as long as all others together

    def run(tokens: int) -> Callable[[], object]:
        return lambda: model.generate(ids, max_new_tokens=tokens, **asked)

    first_call = wall_seconds(run(long), plan.device, 1, warm=0)[0]
    shorts = wall_seconds(run(short), plan.device, repeats, warm=0)
    longs = wall_seconds(run(long), plan.device, repeats, warm=0)
    return [max(seconds - median(shorts), 1e-9) / (long - short) for seconds in longs], first_call


def prefill_seconds(plan: Plan, model: Any, tokens: int) -> list[float]:
    ids = torch.randint(3, 250, (1, tokens), device=plan.device)

    def run() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return wall_seconds(run, plan.device, plan.repeats, warm=2)


def prefill_operations(config: Any, tokens: int) -> float:
    """Of the layers' matrices, and of causal attention; the head looks at one token."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads = config.num_attention_heads
    kv_heads, width = (
        getattr(config, "num_key_value_heads", heads),
        getattr(config, "head_dim", None) or hidden // heads,
    )
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    gated = 3 if hasattr(config, "intermediate_size") else 2
    matrices = hidden * width * (2 * heads + 2 * kv_heads) + gated * hidden * inner
    return 2 * tokens * layers * matrices + 2 * 2 * layers * heads * width * tokens * tokens / 2


def encoders(plan: Plan, config: Any, bounds: Bounds, budget: Budget) -> Iterator[Row]:
    """BERT-large in float16: milliseconds of a forward, the time of the host included."""
    tokens = 16 if plan.tiny else 128
    dtype = torch.float32 if plan.tiny else torch.float16
    first: dict[str, float] = {}
    for who in (EAGER, "infuse"):
        if not budget.allows(f"BERT-large, {who}", 0 if plan.tiny else 4):
            continue
        model = made(transformers.BertModel, config, dtype, plan.device)
        if who == "infuse":
            model = infuse.init_inference(
                model, dtype=dtype, enable_cuda_graph=plan.device.type == "cuda", progress=False
            ).module
            plan.install(model)
        for batch in (1, 2 if plan.tiny else 32):
            ids = torch.randint(3, 250, (batch, tokens), device=plan.device)
            mask = torch.ones_like(ids)

            def run(model: Any = model, ids: Any = ids, mask: Any = mask) -> None:
                with torch.no_grad():
                    model(input_ids=ids, attention_mask=mask)

            seconds = wall_seconds(run, plan.device, 5 * plan.repeats, warm=5)
            operations = (
                2
                * batch
                * tokens
                * config.num_hidden_layers
                * (
                    4 * config.hidden_size**2
                    + 2 * config.hidden_size * config.intermediate_size
                    + 2 * tokens * config.hidden_size
                )
            )
            row = Row("BERT-large", who, f"{batch} x {tokens}", median(seconds), (min(seconds), max(seconds)))
            row.share = operations / row.seconds / bounds.matmul_operations
            row.ratio = first.setdefault(row.what, row.seconds) / row.seconds
            yield row
        del model
        emptied(plan.device)


def emptied(device: torch.device) -> None:
    """Give a dropped model's memory back before the next is made."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
