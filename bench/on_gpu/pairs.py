"""Encoder-decoders on a GPU: seconds until the first token, and of each later one, beside eager transformers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch

import infuse
import seq2seq
from on_gpu.models import EAGER, Plan, Row, emptied
from on_gpu.runs import Budget, wall_seconds

MODELS = ("t5-base", "opus-mt", "whisper-small")
SECONDS_TO_RUN = 8.0  # a guess, for the budget alone


def pairs(plan: Plan, budget: Budget) -> Iterator[Row]:
    """Rows of answers in bfloat16 to one text of 40 tokens, or to 30 seconds of sound; the time of the host included.

    A token's seconds are those of a long answer less those of a short one.
    """
    short, long = plan.new_tokens
    for name in MODELS[:1] if plan.tiny else MODELS:
        first: dict[str, float] = {}
        for who in (EAGER, "infuse"):
            if not budget.allows(f"{name}, {who}", 0 if plan.tiny else SECONDS_TO_RUN):
                continue
            with torch.device(plan.device):
                model: Any = seq2seq.made("t5-small" if plan.tiny else name)
            if who == "infuse":
                graphs = plan.device.type == "cuda"
                model = infuse.init_inference(model, dtype="bf16", enable_cuda_graph=graphs, progress=False).module
                plan.install(model)
            given = {key: value.to(plan.device) for key, value in seq2seq.inputs(name).items()}
            times = {}
            for tokens in (1, short, long):
                answer = partial(model.generate, **given, max_new_tokens=tokens, do_sample=False)
                warm = 3 if tokens == 1 else 1  # an encoder's graph is captured after two calls
                times[tokens] = wall_seconds(answer, plan.device, plan.repeats, warm)
            steps = [max(seconds - median(times[short]), 1e-9) / (long - short) for seconds in times[long]]
            for what, seconds in (("until the first token", times[1]), ("a later token", steps)):
                row = Row(name, who, what, median(seconds), (min(seconds), max(seconds)))
                row.ratio = first.setdefault(what, row.seconds) / row.seconds if who == EAGER or what in first else None
                yield row
            del model, answer
            emptied(plan.device)
