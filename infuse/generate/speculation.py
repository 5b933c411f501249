"""Speculative decoding: one step of the model verifies several candidates (Leviathan et al. 2023, algorithm 1).

Candidates come from transformers' generators (generate/candidates.py). The cache is cropped in place where they are
rejected. Greedy search returns the tokens of plain decoding; sampling draws from the same distribution.

Suffixes: B batch (1), T tokens, N candidates + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from infuse.generate.candidates import keep_schedule, make_generator, most_candidates
from infuse.generate.choose import Processed, ends_of
from infuse.generate.loop import CACHE_NAME, Steps
from infuse.ground.cache_names import cache_in
from infuse.parallel.group import LOCAL, Group


@torch.no_grad()
def speculate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    inputs_tensor: Tensor | None = None,
    streamer: Any = None,
    group: Group = LOCAL,
    assistants: Mapping[str, Any] | None = None,
    **model_kwargs: Any,
) -> Any:
    """Return prompt [1, T] and answer, or transformers' record of them. `generate` calls this last.

    `assistants`: assistant_model, tokenizer and assistant_tokenizer as given to `generate`.
    """
    if input_ids.shape[0] > 1:
        raise ValueError("assisted generate is only supported for batch_size = 1")
    arguments = {name: value for name, value in (assistants or {}).items() if value is not None}
    # transformers leaves this out if a callable decodes.
    mode = generation_config.get_generation_mode(arguments.get("assistant_model"))
    model._validate_generation_mode(mode, generation_config, arguments)
    generator = make_generator(
        model,
        input_ids,
        logits_processor,
        generation_config=generation_config,
        inputs_tensor=inputs_tensor,
        model_kwargs=model_kwargs,
        assistant_model=arguments.get("assistant_model"),
        target_tokenizer=arguments.get("tokenizer"),
        assistant_tokenizer=arguments.get("assistant_tokenizer"),
    )
    limit_tokens, ends, asked = ends_of(stopping_criteria)
    search = _Search(model, input_ids, model_kwargs, limit_tokens, logits_processor, generation_config, group)
    done = False
    while not done:
        candidates_BT, draft_BTV = search.candidates(generator)
        tokens = search.tokens(candidates_BT, draft_BTV)
        tokens, done = search.append(tokens, ends, asked)
        if streamer is not None:
            streamer.put(torch.tensor([tokens]))
        generator.update_candidate_strategy(search.ids, search.scores_BNV, len(tokens) - 1)
    if streamer is not None:
        streamer.end()
    keep_schedule(generator)
    return search.result()


class _Search:
    """The tokens so far, and the step that verifies candidates for the next ones."""

    scores_BNV: Tensor  # float32, of the last step

    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        kwargs: dict[str, Any],
        limit_tokens: int | None,
        processors: Any,
        config: Any,
        group: Group,
    ):
        self.ids, self._limit_tokens, self._config, self._group = input_ids, limit_tokens, config, group
        self._steps = Steps(model, input_ids, kwargs, limit_tokens, speculates=True)
        self._cache, self._processed = cache_in(kwargs), Processed(processors)
        self._most, self._device, self._begun = most_candidates(model), model.device, False
        self._dropped = 0  # accepted tokens that are no longer in the cache
        self._rows: list[Tensor] = []  # processed scores of the last step, [1, V] each
        self._raw_BNV: Tensor | None = None
        self._scores: list[Tensor] = []
        self._logits: list[Tensor] = []

    def candidates(self, generator: Any) -> tuple[Tensor, Tensor | None]:
        """Return candidates [1, T], T may be 0, and the scores that they were drawn from, if any."""
        length = self.ids.shape[1]
        ids, draft_BTV = generator.get_candidates(self.ids)
        most = ids.shape[1] - length
        for bound in (self._most, None if self._limit_tokens is None else self._limit_tokens - length - 1):
            most = most if bound is None else min(most, bound)
        candidates = self._group.broadcast_object(ids[0, length : length + most].tolist(), "the candidates")
        ids = torch.tensor([candidates], dtype=torch.long, device=self._device)
        return ids, None if draft_BTV is None else draft_BTV[:, :most].to(self._device)

    def tokens(self, candidates_BT: Tensor, draft_BTV: Tensor | None) -> list[int]:
        """Run the step; return the accepted candidates and the token after them. Rank 0 decides for all ranks."""
        ids, candidates = torch.cat((self.ids, candidates_BT), dim=1), candidates_BT[0].tolist()
        logits_BNV = self._verify(ids, candidates)
        if self._config.output_logits:
            self._raw_BNV = logits_BNV.float()
        scores_BNV = logits_BNV.to(torch.float32, copy=bool(self._processed) or self._config.output_scores)
        self.scores_BNV, self._rows = scores_BNV, []
        tokens: list[int] = []
        if not self._config.do_sample:
            tokens = self._likeliest(ids, candidates)
        else:
            p_NV = torch.cat([self._row(ids, n) for n in range(len(candidates) + 1)]).softmax(dim=-1)
            if self._group.rank == 0 and draft_BTV is not None and candidates:
                tokens = accepted(p_NV, draft_BTV[0].softmax(dim=-1), candidates_BT[0])
            elif self._group.rank == 0:
                tokens = _until_differs(torch.multinomial(p_NV, num_samples=1)[:, 0].tolist(), candidates)
        return self._group.broadcast_object(tokens, "the tokens")

    def _verify(self, ids: Tensor, candidates: list[int]) -> Tensor:
        """Return the logits after the last token and after each candidate, [1, N, V]."""
        count = len(candidates)
        if self._begun:
            self._cache.snapshot(each=True)
            self._steps.advance(ids[:, -count - 1 - self._dropped :], ids)
            return self._steps.logits(count + 1)[:, -count - 1 :]
        self._begun = True
        logits_BNV = self._steps.logits()[:, -1:]  # the prompt runs alone, so that it rounds as in plain decoding
        certain = not self._config.do_sample and not self._processed and self._group.size == 1
        if not candidates or (certain and int(logits_BNV.argmax()) != candidates[0]):
            return logits_BNV
        self._cache.snapshot(each=True)
        self._steps.advance(ids[:, -count:], ids)
        return torch.cat((logits_BNV, self._steps.logits(count)[:, -count:]), dim=1)

    def _row(self, ids: Tensor, n: int) -> Tensor:
        """The processed scores of the token after `n` candidates, [1, V]."""
        row = self.scores_BNV[:, n]
        if self._processed:
            row = self._processed(ids[:, : self.ids.shape[1] + n], row)
        self._rows.append(row)
        return row

    def _likeliest(self, ids: Tensor, candidates: list[int]) -> list[int]:
        if not self._processed and not self._config.output_scores:
            return _until_differs(self.scores_BNV[0].argmax(dim=-1).tolist(), candidates)
        tokens: list[int] = []
        while tokens == candidates[: len(tokens)] and len(tokens) <= len(candidates):
            tokens.append(int(self._row(ids, len(tokens)).argmax()))
        return tokens

    def append(self, tokens: list[int], ends: set[int], asked: list[Any]) -> tuple[list[int], bool]:
        """Append tokens up to one that ends the answer. Return those, and whether the answer has ended.

        Criteria run after each token, as in plain decoding; transformers runs them after several. If one writes into
        the ids, later tokens are dropped: they were chosen for other ids.
        """
        before, done, count = self.ids.shape[1], False, 0
        ids = torch.cat((self.ids, torch.tensor([tokens], device=self.ids.device)), dim=1)
        chosen = ids.clone() if asked else ids
        while not done:
            count += 1
            done = tokens[count - 1] in ends or before + count == self._limit_tokens
            for criterion in asked:
                done = bool(criterion(ids[:, : before + count], self._scores_until(count))) or done
            if count == len(tokens) or not (chosen is ids or torch.equal(chosen, ids)):
                break
        self.ids = ids[:, : before + count]
        if rejected := self.scores_BNV.shape[1] - count:
            wanted = self._cache.get_seq_length() - rejected
            self._dropped = wanted - self._cache.rewind(wanted)  # further, if a part keeps one state of several tokens
        else:
            self._dropped = 0
        if self._config.return_dict_in_generate and self._config.output_scores:
            self._scores += [row.clone() for row in self._rows[:count]]
        if self._config.return_dict_in_generate and self._raw_BNV is not None:
            self._logits += [self._raw_BNV[:, n].clone() for n in range(count)]
        return tokens[:count], done

    def _scores_until(self, count: int) -> tuple[Tensor, ...] | None:
        """Scores of all tokens up to the step's first `count`; None unless they are recorded, as in transformers."""
        recorded = self._config.return_dict_in_generate and self._config.output_scores
        return (*self._scores, *self._rows[:count]) if recorded else None

    def result(self) -> Any:
        """The token ids, or transformers' record of them with scores and logits if they were asked for."""
        config = self._config
        self._cache.snapshot()  # states before it are not kept any longer
        if not config.return_dict_in_generate:
            return self.ids.clone()
        made: dict[str, Any] = {"sequences": self.ids.clone(), CACHE_NAME: self._cache}
        if config.output_scores:
            made["scores"] = tuple(self._scores)
        if config.output_logits:
            made["logits"] = tuple(self._logits)
        return GenerateDecoderOnlyOutput(**made)


def _until_differs(chosen: list[int], candidates: list[int]) -> list[int]:
    """Return the chosen tokens up to and including the first that differs from its candidate."""
    same = 0
    while same < len(candidates) and chosen[same] == candidates[same]:
        same += 1
    return chosen[: same + 1]


def accepted(p_NV: Tensor, q_TV: Tensor, candidates_T: Tensor) -> list[int]:
    """Accept each candidate x with probability p(x) / q(x) up to the first rejection, then draw from max(p - q, 0).

    The tokens are distributed as p if the candidates are as q. Draws the same random numbers as transformers.
    """
    index = candidates_T[:, None]
    ratio_T = (p_NV[:-1].gather(1, index) / q_TV.gather(1, index))[:, 0]
    rejected = (torch.rand_like(ratio_T) > ratio_T).nonzero()[:, 0].tolist()
    count = rejected[0] if rejected else len(candidates_T)
    rest_V = p_NV[count]
    if rejected:
        lacking_V = (rest_V - q_TV[count]).clamp(min=0)
        total = lacking_V.sum()
        if bool(total > 0):  # else p and q differ by rounding only
            rest_V = lacking_V / total
    return [*candidates_T[:count].tolist(), int(torch.multinomial(rest_V, num_samples=1))]
