"""Time what reading layers from their graphs costs, and compare blocks that are read with written ones.

    python bench/reading.py [--rounds 9]

Prints the seconds to read each kind of layer once in a fresh process, and, for a Llama shape of 4 layers, the time of a
decode step, a prompt and an encoder's batch by the written spec and by the reading, in turns within one process.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers as t

import infuse
from infuse.plan.readings import Readings
from infuse.reading.kind import read_once

SMALL = dict(hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, vocab_size=512)
READ = ("Qwen3", "Gemma3Text", "Phi3", "Glm4", "Cohere2", "Bert", "ViT")
SHAPE = dict(
    hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=4,
    vocab_size=32000, max_position_embeddings=2048,
)  # fmt: skip


def model_of(name: str) -> Any:
    config = getattr(t, f"{name}Config")(**SMALL)
    config.num_hidden_layers, config.pad_token_id = 2, 0
    cls = getattr(t, f"{name}ForCausalLM", None) if name != "Bert" else None
    with torch.device("meta"):
        return (cls or getattr(t, f"{name}Model"))(config).eval()


def seconds_to_read(name: str) -> tuple[int, float]:
    """Kinds of layers in a model on meta, and the seconds to read all of them."""
    readings = Readings(model_of(name), torch.bfloat16, ())
    paths = list(readings.layers)
    before, start = read_once.cache_info().misses, time.perf_counter()
    for path in paths:
        readings.of(path)
    return read_once.cache_info().misses - before, time.perf_counter() - start


@contextmanager
def without_spec() -> Iterator[None]:
    """Context in which Llama has no written spec."""
    decide: Any = importlib.import_module("infuse.plan.decide")
    own = decide.specs_for
    decide.specs_for = lambda layer: ()
    try:
        yield
    finally:
        decide.specs_for = own


def llama() -> Any:
    torch.manual_seed(0)
    return t.LlamaForCausalLM(t.LlamaConfig(**SHAPE)).to(torch.bfloat16).eval()


@torch.no_grad()
def steps(engine: Any) -> dict[str, Callable[[], Any]]:
    ids = torch.randint(3, 32000, (1, 512), generator=torch.Generator().manual_seed(1))

    def decode() -> None:
        engine.generate(ids[:, :16], max_new_tokens=33, min_new_tokens=33, do_sample=False)

    def prefill() -> None:
        with torch.no_grad():
            engine(ids)

    return {"decode of 33 tokens": decode, "prompt of 512 tokens": prefill}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(f"torch {torch.__version__}, transformers {t.__version__}, {torch.get_num_threads()} threads, bfloat16")
    seconds_to_read("Arcee")  # imports, and what PyTorch makes once
    for name in READ:
        kinds, seconds = seconds_to_read(name)
        print(f"{name:<12} {kinds} kinds, {seconds / kinds:.2f} s each")
    written = infuse.init_inference(llama(), dtype=torch.bfloat16, progress=False)
    with without_spec():
        read = infuse.init_inference(llama(), dtype=torch.bfloat16, progress=False)
    assert {step.why for step in read.plan.steps if step.depth == "block"} == {
        "read from the graph of LlamaDecoderLayer"
    }
    calls = {"written": steps(written), "read": steps(read)}
    for what in calls["read"]:
        times: dict[str, list[float]] = {"written": [], "read": []}
        for _ in range(rounds + 1):
            for which, call in calls.items():
                start = time.perf_counter()
                call[what]()
                times[which].append(time.perf_counter() - start)
        a, b = (statistics.median(times[which][1:]) for which in ("written", "read"))
        print(f"{what:<22} written {a * 1e3:.1f} ms, read {b * 1e3:.1f} ms, ratio {b / a:.3f}")


if __name__ == "__main__":
    main()
