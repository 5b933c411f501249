"""Candidates for speculative decoding (generate/speculation.py), by transformers' candidate generators.

An assistant whose layers were replaced drafts in our own steps. transformers calls `generate` for each draft, and
preparing that takes longer than the steps of a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation import LogitsProcessorList, MinNewTokensLengthLogitsProcessor
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from infuse.cache.kv_cache import KVCache
from infuse.generate.choose import Processed
from infuse.generate.loop import CACHE_NAME, UPDATE, Steps, loops_are_own
from infuse.ground.authors import is_librarys
from infuse.layers.linear import rounds_activations
from infuse.native import isa, limits


def make_generator(model: Any, input_ids: Tensor, processors: Any, **settings: Any) -> Any:
    """Make transformers' candidate generator; an assistant with our layers drafts through `Draft`."""
    processors = processors or None  # prompt lookup would apply an empty list to each candidate
    generator = model._get_candidate_generator(input_ids=input_ids, logits_processor=processors, **settings)
    if not isinstance(generator, AssistedCandidateGenerator):
        return generator
    if (most := most_candidates(model)) is not None:
        generator._calculate_new_tokens = partial(_at_most, most, generator._calculate_new_tokens)  # type: ignore[method-assign]
    if type(generator) is AssistedCandidateGenerator and _can_draft(generator.assistant_model):
        generator.get_candidates = Draft(generator, input_ids)  # type: ignore[assignment, method-assign]
    return generator


def most_candidates(model: Any) -> int | None:
    """Return the number of candidates beyond which the C++ kernels use another algorithm. None: no limit.

    Up to there a step reads the weights once and computes each row exactly as it would alone.
    """
    if model.device.type != "cpu" or isa() is None:
        return None
    few = limits()
    rows = min(few.few_tokens, few.code_rows_integer) if rounds_activations(model) else few.few_tokens
    return rows - 1


def keep_schedule(generator: Any) -> None:
    """Write the scheduled number of candidates back to the assistant's config, as transformers does."""
    if isinstance(generator, AssistedCandidateGenerator):
        config = generator.assistant_model.generation_config
        if config.num_assistant_tokens_schedule == "heuristic":
            config.num_assistant_tokens = generator.num_assistant_tokens


def _at_most(most: int, count: Callable[[Any], tuple[int, int]], input_ids: Tensor) -> tuple[int, int]:
    fewest, new = count(input_ids)
    return min(fewest, most), min(new, most)


def _can_draft(assistant: Any) -> bool:
    """Whether our steps can run the assistant: over our cache, with the library's methods, without decode graphs."""
    attributes = vars(assistant)
    installed, generates = attributes.get("_infuse"), (attributes.get("generate"), type(assistant).generate)
    if installed is None or not installed.caches or installed.buckets is not None:
        return False
    return loops_are_own(assistant, UPDATE) and all(method is None or is_librarys(method) for method in generates)


class Draft:
    """Replaces `get_candidates` of transformers' generator and drafts in our steps, with its settings and schedules."""

    def __init__(self, generator: Any, input_ids: Tensor):
        self._generator, self._config, model = generator, generator.generation_config, generator.assistant_model
        installed, capacity_tokens = model._infuse, generator.main_model_max_length
        self._cache, self._group = KVCache(capacity_tokens, installed.limit_tokens, installed.kv_cache), installed.group
        self._device = model.device
        kept = [
            processor
            for processor in generator.logits_processor
            if not isinstance(processor, MinNewTokensLengthLogitsProcessor)
        ]
        self._processed = Processed(LogitsProcessorList(kept))
        ends = self._config._eos_token_tensor
        self._ends = set() if ends is None else set(ends.reshape(-1).tolist())
        kwargs = {**generator.assistant_kwargs, CACHE_NAME: self._cache, "use_cache": True}
        self._steps = Steps(model, input_ids.to(self._device), kwargs, capacity_tokens, speculates=True)

    def __call__(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return `input_ids` [1, T] with candidates and, if sampled, their scores [1, candidates, vocabulary]."""
        _, count = self._generator._calculate_new_tokens(input_ids)
        if count <= 0:
            return input_ids, None
        ids = input_ids.to(self._device)
        if cached_tokens := self._cache.get_seq_length():  # else the step was prepared for the prompt
            kept = self._cache.rewind(min(cached_tokens, ids.shape[1] - 1))
            self._steps.advance(ids[:, kept:], ids)
        drawn_from: list[Tensor] = []
        while True:
            scores_BV = self._steps.scores(copy=bool(self._processed))
            if self._processed:
                scores_BV = self._processed(ids, scores_BV)
            tokens_BT, last = self._choose(scores_BV)
            ids = torch.cat((ids, tokens_BT), dim=1)
            drawn_from.append(scores_BV)
            if len(drawn_from) == 1:  # later tokens may be rejected
                self._cache.snapshot(each=True)
            if last or len(drawn_from) == count:
                break
            self._steps.advance(tokens_BT, ids)
        return ids, torch.stack(drawn_from, dim=1) if self._config.do_sample else None

    def _choose(self, scores_BV: Tensor) -> tuple[Tensor, bool]:
        """Return the next token [1, 1], and whether the draft ends with it. Rank 0 decides for all ranks."""
        samples, threshold = self._config.do_sample, self._config.assistant_confidence_threshold
        token = scores_BV.argmax(dim=-1)
        chance = 1.0
        if samples or threshold:
            weights_BV = F.softmax(scores_BV, dim=-1)
            if samples:
                token = torch.multinomial(weights_BV, num_samples=1)[:, 0]
            if threshold:
                chance = float(weights_BV[0, token])
        if threshold and hasattr(self._generator, "probs"):  # transformers adapts the threshold from these
            self._generator.probs.append(chance)
        last = int(token) in self._ends or (bool(threshold) and chance < threshold)
        if self._group.size > 1:
            token, last = self._group.broadcast_object((token, last), "the draft")
        return token[:, None], last
