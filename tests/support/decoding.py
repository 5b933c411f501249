"""What tests of decode steps ask of `generate`, and whether an engine's tokens are the original's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as t
from torch import Tensor, nn

from tests.models.families import BY_NAME, inputs
from tests.support.asked_of_generate import OddTokensOnly, StopAtLength

NAMES = (
    "llama", "gpt2", "bloom", "gemma2", "qwen3", "falcon-7b", "falcon-rw", "mistral", "opt", "gpt-neo", "gptj",
    "llama-yarn", "phi", "bigcode", "bert-decoder",
)  # fmt: skip
PROMPT = 9
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": dict(do_sample=False),
    "top-k": dict(do_sample=True, top_k=12, temperature=0.8),
    "top-p": dict(do_sample=True, top_p=0.7, top_k=0, temperature=1.3),
    "min-p": dict(do_sample=True, min_p=0.05, top_k=0),
    "typical": dict(do_sample=True, typical_p=0.8),
    "epsilon": dict(do_sample=True, epsilon_cutoff=0.01),
    "repetition penalty": dict(repetition_penalty=1.5),
    "sampled with penalty": dict(
        do_sample=True, repetition_penalty=1.3, renormalize_logits=True, remove_invalid_values=True
    ),
}


def made(name: str) -> nn.Module:
    untied = {} if name == "bert-decoder" else dict(tie_word_embeddings=False)
    return BY_NAME[name].make(**untied)


@cache
def original(name: str) -> nn.Module:
    return made(name)


def padded(
    name: str = "llama", batch: int = 3, tokens: int = PROMPT, padding: str | None = "left", seed: int = 11
) -> dict[str, Tensor]:
    return inputs(BY_NAME[name], batch=batch, tokens=tokens, padding=padding, seed=seed)


def seeded(model: Any, **kwargs: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(**{"max_new_tokens": 14, **kwargs})


def same(name: str, engine: Any, **kwargs: Any) -> Tensor:
    """The tokens of `engine`, once they are those of the original."""
    exact, found = seeded(original(name), **kwargs), seeded(engine, **kwargs)
    assert torch.equal(found, exact)
    assert not found.is_inference()
    return found


def rows_of(name: str, **kwargs: Any) -> list[list[int]]:
    return seeded(original(name), **kwargs)[:, PROMPT:].tolist()


ON_HOST: dict[str, Callable[[], dict[str, Any]]] = {
    "no repeated n-gram": lambda: dict(no_repeat_ngram_size=2),
    "bad words": lambda: dict(bad_words_ids=[[5], [9], [29], [60]]),
    "least new tokens": lambda: dict(min_new_tokens=9, eos_token_id=[3, 8, 40, 77], pad_token_id=0),
    "own processor": lambda: dict(logits_processor=t.LogitsProcessorList([OddTokensOnly()])),
    "own criterion": lambda: dict(stopping_criteria=t.StoppingCriteriaList([StopAtLength(PROMPT + 6)]), pad_token_id=0),
    "time": lambda: dict(max_time=1000.0),
    "sampled": lambda: dict(do_sample=True, no_repeat_ngram_size=2),
}
