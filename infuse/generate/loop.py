"""The decode loop for greedy search and sampling, called by transformers' `generate` (its `custom_generate` hook).

It returns the same tokens as transformers' own loop, with less host time for each. transformers prepares the first two
steps. Later steps derive their inputs from the last step: the next token, the next position, one more mask column.
On CPUs, later steps may call the model's parts without its own forward: generate/direct.py. The loop knows nothing of
graphs: a GraphedCache among the model's arguments replays them, as in any other loop.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation import EosTokenCriteria, GenerationMixin
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)

from infuse.cache.kv_cache import KVCache
from infuse.generate.choose import Processed, ends_of, likeliest
from infuse.generate.direct import DirectStep, DirectSteps
from infuse.ground.authors import is_librarys
from infuse.ground.cache_names import CACHE_NAMES, FORMER, cache_argument, cache_in
from infuse.ground.questions import attribute
from infuse.layers.mixer import Mixer
from infuse.parallel.group import LOCAL, Group

# A prompt of more than twice this many tokens, over all rows, runs in parts of this size. Activations then take the
# memory of 4096 tokens, however long the prompt is, and products are as fast as over the whole prompt.
PART_TOKENS = 4096
# Models make a mask of each part's tokens over all tokens. Beyond 32,768 tokens parts are smaller, so that one of bools
# takes 128 MiB; none but the first has fewer tokens than LEAST_PART_TOKENS.
MASK_VALUES, LEAST_PART_TOKENS = 1 << 27, 512
_BY_LENGTH = {"dynamic", "longrope"}  # rotary frequencies that depend on the length of the call

UPDATE = "_update_model_kwargs_for_generation"  # not called before a step that follows
_PREPARE = "prepare_inputs_for_generation"  # likewise
# Methods that transformers' loops call and ours do not, or not in each step: these must be GenerationMixin's own.
_OF_LOOPS = (
    "_sample",
    "_assisted_decoding",
    "_prefill",
    "_has_unfinished_sequences",
    "_optimize_model_for_decode",
    "_get_candidate_generator",
    "_valid_auto_compile_criteria",
)
# What this version of transformers calls the cache in arguments and results of its loops.
CACHE_NAME = cache_argument(GenerationMixin.prepare_inputs_for_generation) or FORMER
# Inputs of a decode step from which the next step's can be derived. No others must be tensors but _KINDS.
_FOLLOWED = ("input_ids", "attention_mask", "position_ids")
# Those that tell a text's tokens from a picture's: transformers repeats the last ones, or gives zeros.
_KINDS = ("token_type_ids", "mm_token_type_ids")
_OF_DECODER = "decoder_"  # begins their names in a model with an encoder, whose own mask stays as it is


def loops_are_own(model: Any, *more: str) -> bool:
    """Whether the methods of transformers' loops, and `more`, are GenerationMixin's own: not overridden or patched.

    A library's class may override UPDATE unless `more` names it, because our loop calls it.
    """
    attributes = vars(model)
    for name in (*_OF_LOOPS, *more):
        method = getattr(GenerationMixin, name, None)  # not all are in all versions
        is_other = name in attributes or getattr(type(model), name, None) is not method
        if is_other or not (method is None or is_librarys(method)):
            return False
    return UPDATE not in attributes and is_librarys(getattr(type(model), UPDATE))


def prepares_alone(model: Any) -> bool:
    """Whether a user's own function prepares each step's inputs: it is called at every step."""
    return _PREPARE in vars(model) or not is_librarys(getattr(type(model), _PREPARE))


def rotates_by_length(model: Any, first_tokens: int = 0, last_tokens: float = math.inf) -> bool:
    """Whether rotations depend on the call's length while a text grows from `first_tokens` to `last_tokens`.

    Beyond the length of training, frequencies change once ("longrope") or with every token ("dynamic").
    """
    for module in model.modules():
        rope_type = attribute(module, "rope_type")
        kinds = set(rope_type.values() if isinstance(rope_type, dict) else [rope_type])  # a dict names layers' kinds
        if kinds.isdisjoint(_BY_LENGTH):
            continue
        trained_tokens = _trained_tokens(module)
        if trained_tokens is None:
            return True
        if last_tokens > trained_tokens and ("dynamic" in kinds or first_tokens <= trained_tokens):
            return True
    return False


def _trained_tokens(rotary: Any) -> int | None:
    """The length of training, None if the module's config does not tell it."""
    parameters = attribute(rotary, "config.rope_parameters")
    most_tokens = attribute(rotary, "config.max_position_embeddings")
    if not isinstance(parameters, dict) or most_tokens is None:
        return None
    inside = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    named = [section.get("original_max_position_embeddings") for section in inside]
    return min([most_tokens, *(number for number in named if number)])


@torch.no_grad()
def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    group: Group = LOCAL,
    direct: DirectSteps | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Return the token ids of prompt [B, T] and answer. `generate` calls this after preparing everything."""
    prompt_tokens, processed = input_ids.shape[1], Processed(logits_processor)
    limit_tokens, ends, asked = ends_of(stopping_criteria)
    pads = bool(ends) or any(map(_ends_rows, asked))
    pad = generation_config._pad_token_tensor
    unfinished = torch.ones(input_ids.shape[0], dtype=torch.long, device=input_ids.device)
    all_run = not asked  # True while no row can have ended, so that `unfinished` need not be read
    steps = Steps(model, input_ids, model_kwargs, limit_tokens, direct=direct)
    answer: list[Tensor] = []  # tokens [B, N] not yet in `input_ids`, which is rarely read at every step
    columns = prompt_tokens
    alone = streamer is None and not asked and group.size == 1  # nothing reads a token before the next step

    def ids() -> Tensor:
        nonlocal input_ids
        if answer:
            input_ids = torch.cat((input_ids, *answer), dim=1)
            answer.clear()
        return input_ids

    while True:
        if processed or generation_config.do_sample:
            tokens = _chosen(steps, processed, ids, generation_config.do_sample)
        else:
            left = sys.maxsize if limit_tokens is None else limit_tokens - columns
            tokens = steps.likeliest(left if alone and all_run else 1, list(ends))
        tokens = group.broadcast(tokens, "the tokens")  # rank 0 decides, since ranks may round differently
        if pads and not all_run:
            tokens = tokens * unfinished[:, None] + pad.to(tokens.device) * (1 - unfinished[:, None])
        answer.append(tokens)
        columns += tokens.shape[1]
        if streamer is not None:
            streamer.put(tokens.view(-1).clone().cpu())
        done = limit_tokens is not None and columns >= limit_tokens
        for criterion in asked:
            unfinished = unfinished & ~criterion(ids(), None)
        if ends and not ends.isdisjoint(row := [each[-1] for each in tokens.tolist()]):
            unfinished = unfinished & torch.tensor([token not in ends for token in row], device=unfinished.device)
            all_run = False
        if done or (not all_run and not bool(unfinished.any())):
            break
        last = _last(ids() if asked else tokens)  # criteria may have written into the ids
        if steps.follows:
            steps.follow(last, columns)
        else:
            steps.advance(last, ids())
    if streamer is not None:
        streamer.end()
    assert columns > prompt_tokens
    return ids()


def _ends_rows(criterion: Any) -> bool:
    """Whether the criterion lets rows of a batch end one by one."""
    return isinstance(criterion, EosTokenCriteria) or hasattr(criterion, "eos_token_id")


def _last(tokens_BT: Tensor) -> Tensor:
    """The last token of each row, [B, 1]."""
    return tokens_BT if tokens_BT.shape[1] == 1 else tokens_BT[:, -1:].contiguous()


def _chosen(steps: Steps, processed: Processed, ids: Callable[[], Tensor], samples: bool) -> Tensor:
    """Run a step and return its next tokens [B, 1]."""
    scores = steps.scores(copy=bool(processed))
    if processed:
        scores = processed(ids(), scores)
    if samples:
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1)
    return scores.argmax(dim=-1, keepdim=True)


class Steps:
    """The model's inputs, updated step by step. A step runs the tokens that the cache does not hold yet.

    `speculates`: the cache may be cropped between steps, so that a step's tokens may begin before the last one's end.
    """

    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        kwargs: dict[str, Any],
        limit_tokens: int | None,
        *,
        speculates: bool = False,
        direct: DirectSteps | None = None,
    ):
        self.model, self.kwargs, self._limit_tokens, self._speculates = model, kwargs, limit_tokens, speculates
        self._direct = direct
        self._step: DirectStep | None = None
        self._prepares_alone = prepares_alone(model)
        self._reads = bool(attribute(model, "config.is_encoder_decoder"))  # an encoder's states
        prefix = _OF_DECODER if self._reads else ""
        self._ids, self._mask, self._positions = (prefix + name for name in _FOLLOWED)
        self.inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **kwargs)
        self.follows = False  # whether inputs are derived from the last step without the model's preparation
        self.mask: Tensor | None = None
        self._begun = False
        self._columns = 0  # of ids and of what comes before them, in a step that follows
        self._traced_after: float = -1  # the next step of more columns is traced for direct ones
        self._first_position: Tensor | None = None  # of each row
        # Columns of the mask minus columns of ids: more than none for a prompt of embeddings.
        sized = [kwargs[name] for name in (self._mask, self._positions) if isinstance(kwargs.get(name), Tensor)]
        self._more_columns = sized[0].shape[-1] - input_ids.shape[1] if sized else 0

    def scores(self, copy: bool) -> Tensor:
        """Run the step and return the next token's float32 scores [B, vocabulary]; `copy`: they may be changed."""
        return self.logits().select(1, -1).to(dtype=torch.float32, copy=copy)

    def logits(self, tokens: int = 1) -> Tensor:
        """Run the step and return logits of at least its last `tokens`, [B, tokens or more, vocabulary]."""
        if tokens != self.inputs.get("logits_to_keep", tokens):
            self.inputs["logits_to_keep"] = tokens
        if not self._begun:
            self._begun = True
            self._run_first_parts()
        if self._step is not None:
            logits = self._step(self.inputs[self._ids])
            if logits is not None:
                return logits
            self._traced_after, self._step = self._step.traced_after, None
            self._place()
        if self.follows and self._direct is not None and self._columns > self._traced_after:
            outputs, self._step = self._direct.traced(self.model, self.inputs)
            self._traced_after = math.inf
        else:
            outputs = self.model(**self.inputs, return_dict=True)
        if not self.follows:
            self.kwargs = self.model._update_model_kwargs_for_generation(
                outputs, self.kwargs, is_encoder_decoder=self._reads
            )
        return outputs.logits

    def likeliest(self, count: int, ends: list[int]) -> Tensor:
        """Run up to `count` greedy steps, each on the last one's token, and return the tokens [B, steps].

        Stop after a token in `ends`.
        """
        if self._step is not None:
            tokens = self._step.tokens(self.inputs[self._ids], count, ends)
            if tokens is not None:
                return tokens
        return likeliest(self.logits()).unsqueeze(1)

    def _run_first_parts(self) -> None:
        """Run all parts of a long prompt but the last, which becomes the step's input."""
        inputs = self.inputs
        ids, mask, positions = inputs.get("input_ids"), inputs.get("attention_mask"), inputs.get("position_ids")
        if not isinstance(ids, Tensor) or ids.numel() <= 2 * PART_TOKENS or not self._divides():
            return
        rows, count = ids.shape
        before = 0 if mask is None else mask.shape[1] - count  # columns of tokens that the cache holds already
        fitting = max(MASK_VALUES // (before + count), LEAST_PART_TOKENS)
        part = max(min(PART_TOKENS, fitting) // rows, 1)
        ends: Sequence[int] = range((count - 1) % part + 1, count + 1, part)  # the first part is the shorter one
        if mask is not None and any(mixer.state_values for mixer in _mixers(self.model)):
            # Models mask what layers with states see in the first part alone: it takes all of the padding.
            padded = (mask[:, before:] == 0).any(0).nonzero().flatten().tolist()
            ends = [end for end in ends if end > max(padded, default=0) or end == count]
        for begin, end in pairwise((0, *ends)):
            self.inputs = {**inputs, "input_ids": ids[:, begin:end]}
            if mask is not None:
                self.inputs["attention_mask"] = mask[:, : before + end]
            if positions is not None:
                self.inputs["position_ids"] = positions[:, begin:end]
            if end < count:
                self.model(**self.inputs, return_dict=True)

    def _divides(self) -> bool:
        """Whether the prompt may run in parts with the same result: over our cache, in a model of transformers."""
        inputs = self.inputs
        if not isinstance(cache_in(inputs), KVCache):
            return False
        if self._prepares_alone:
            return False
        sizes = {"input_ids": 2, "attention_mask": 2, "position_ids": 2}
        tensors = {name: value.dim() for name, value in inputs.items() if isinstance(value, Tensor)}
        mixers = _mixers(self.model)
        # Models of nothing but states take a mask of the new tokens alone.
        if not all(mixer.continues for mixer in mixers) or (mixers and all(mixer.state_values for mixer in mixers)):
            return False
        # Hybrids' own preparation asks for fewer logits; Phi3's begins anew where its frequencies change.
        prepare, states = type(self.model).prepare_inputs_for_generation, any(mixer.state_values for mixer in mixers)
        if prepare is not GenerationMixin.prepare_inputs_for_generation and not states:
            return False
        return all(sizes.get(name) == dims for name, dims in tensors.items()) and not rotates_by_length(self.model)

    def advance(self, tokens_BT: Tensor, input_ids: Tensor) -> None:
        """Prepare the next step: it runs `tokens_BT`, the last of `input_ids`. The cache holds all before them."""
        if self.follows:
            return self.follow(tokens_BT, input_ids.shape[1])
        columns = input_ids.shape[1] + self._more_columns
        if self._speculates:
            self.kwargs = _resized(self.kwargs, columns)
        tokens = tokens_BT.shape[1]
        self.inputs = self.model.prepare_inputs_for_generation(input_ids, next_sequence_length=tokens, **self.kwargs)
        self.follows = self._can_follow(tokens_BT, columns)

    def follow(self, tokens_BT: Tensor, columns: int) -> None:
        """Advance to the last of `columns` ids without the model's preparation."""
        self.inputs[self._ids], self._columns = tokens_BT, columns + self._more_columns
        if self._step is None:  # a direct step derives them itself
            self._place()

    def _place(self) -> None:
        """Derive positions and mask of the present tokens."""
        tokens_BT, columns = self.inputs[self._ids], self._columns
        if self._first_position is not None:
            indices = torch.arange(columns - tokens_BT.shape[1], columns, device=tokens_BT.device)
            self.inputs[self._positions] = self._first_position + indices
        if self.mask is not None:
            self.inputs[self._mask] = self.mask = F.pad(self.mask, (0, columns - self.mask.shape[1]), value=1)

    def _can_follow(self, tokens_BT: Tensor, columns: int) -> bool:
        """Whether the next steps' inputs can be derived from those that the model prepared for this decode step."""
        inputs = self.inputs
        prepare = type(self.model).prepare_inputs_for_generation
        if self._prepares_alone or getattr(type(self.model), UPDATE) is not getattr(GenerationMixin, UPDATE):
            return False
        if prepare is not GenerationMixin.prepare_inputs_for_generation:
            # Phi3 recomputes the cache when it switches to the frequencies for long prompts.
            short = attribute(self.model, "config.original_max_position_embeddings")
            if short is not None and (self._limit_tokens is None or self._limit_tokens > short):
                return False
        known = {self._ids, self._mask, self._positions, *CACHE_NAMES, *(["attention_mask"] if self._reads else [])}
        if not self._speculates:  # of one token a row, they stay as they are
            known.update(name for name in _KINDS if getattr(inputs.get(name), "shape", None) == tokens_BT.shape)
        unknown = [name for name, value in inputs.items() if name not in known and isinstance(value, Tensor)]
        ids, mask, positions = inputs.get(self._ids), inputs.get(self._mask), inputs.get(self._positions)
        if unknown or not isinstance(ids, Tensor) or not torch.equal(ids, tokens_BT):
            return False
        if positions is not None and (not isinstance(positions, Tensor) or positions.shape[-1] != ids.shape[1]):
            return False
        if isinstance(mask, Tensor):
            if mask.dim() != 2:
                return False
            # Drop a mask that hides nothing: the model then skips building its own from it.
            self.mask = None if bool(mask.all()) and positions is not None else mask
            inputs[self._mask] = self.mask
        self._first_position = None if positions is None else positions[..., -1:] - (columns - 1)
        return True


def _mixers(model: Any) -> list[Any]:
    """The shapes of a model's attentions and recurrences."""
    return [part.shape for part in model.modules() if isinstance(part, Mixer)]


def _resized(kwargs: dict[str, Any], columns: int) -> dict[str, Any]:
    """Extend masks, positions and token types to `columns`, or cut them, as transformers' assisted decoding does."""
    positions = kwargs.get("position_ids")
    if isinstance(positions, Tensor):  # which has [3, B, T] for images, and is not cut along its last axis there
        kwargs = {**kwargs, "position_ids": positions[..., :columns]}
    kwargs = _prepare_attention_mask(kwargs, columns, is_encoder_decoder=False)
    kwargs = _prepare_position_ids(kwargs, columns, is_encoder_decoder=False)
    return _prepare_token_type_ids(kwargs, columns)
