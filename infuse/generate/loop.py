"""The decode loop for greedy search and sampling, behind transformers' `generate` (its `custom_generate` hook).

Token-equal to transformers' own loop; less host time for each token. transformers prepares the first two steps; from
then on a step's inputs follow from the last step's: one more token, one more position, one more column of the mask.
Knows nothing of graphs: a GraphedCache among the model's arguments replays them, in this loop as in any other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation import EosTokenCriteria, GenerationMixin

from infuse.generate.choose import Processed, ends_of
from infuse.parallel.group import LOCAL, Group

# Inputs of a decode step that the next one follows from, or that stay as they are whatever their value.
_FOLLOWED = {"input_ids", "attention_mask", "position_ids", "past_key_values"}


@torch.inference_mode()
def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    group: Group = LOCAL,
    **model_kwargs: Any,
) -> Tensor:
    """The prompt [B, T] and its continuation, token ids. Called by `generate` once it has prepared everything."""
    prompt_tokens, processed = input_ids.shape[1], Processed(logits_processor)
    limit_tokens, ends, asked = ends_of(stopping_criteria)
    pads = bool(ends) or any(isinstance(one, EosTokenCriteria) or hasattr(one, "eos_token_id") for one in asked)
    pad = generation_config._pad_token_tensor
    unfinished = torch.ones(input_ids.shape[0], dtype=torch.long, device=input_ids.device)
    all_run = not asked  # no row has ended, as far as is known without a look at `unfinished`
    steps = _Steps(model, input_ids, model_kwargs, limit_tokens)
    while True:
        scores = steps.scores(copy=bool(processed))
        if processed:
            scores = processed(input_ids, scores)
        if generation_config.do_sample:
            tokens = torch.multinomial(F.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = scores.argmax(dim=-1)
        tokens = group.broadcast(tokens, "the tokens")  # rank 0's, whatever another one's rounding says
        if pads and not all_run:
            tokens = tokens * unfinished + pad.to(tokens.device) * (1 - unfinished)
        input_ids = torch.cat((input_ids, tokens[:, None]), dim=1)
        if streamer is not None:
            streamer.put(_ordinary(tokens).cpu())
        done = limit_tokens is not None and input_ids.shape[1] >= limit_tokens
        for criterion in asked:
            unfinished = unfinished & ~criterion(input_ids, None)
        if ends and not ends.isdisjoint(row := tokens.tolist()):
            unfinished = unfinished & torch.tensor([token not in ends for token in row], device=unfinished.device)
            all_run = False
        if done or (not all_run and not bool(unfinished.any())):
            break
        steps.advance(tokens, input_ids)
    if streamer is not None:
        streamer.end()
    assert input_ids.shape[1] > prompt_tokens
    return _ordinary(input_ids)


@torch.inference_mode(False)
def _ordinary(tensor: Tensor) -> Tensor:
    """A tensor that the caller may use in any way, unlike those made in inference mode."""
    return tensor.clone()


class _Steps:
    """The model's inputs, step by step."""

    def __init__(self, model: Any, input_ids: Tensor, kwargs: dict[str, Any], limit_tokens: int | None):
        self.model, self.kwargs, self._limit_tokens = model, kwargs, limit_tokens
        self.inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **kwargs)
        self.follows = False  # whether a step's inputs follow from the last one's without asking the model
        self.mask: Tensor | None = None

    def scores(self, copy: bool) -> Tensor:
        """Float32 scores of the next token, [B, vocabulary]; `copy`: they may be changed."""
        outputs = self.model(**self.inputs, return_dict=True)
        if not self.follows:
            self.kwargs = self.model._update_model_kwargs_for_generation(outputs, self.kwargs)
        return outputs.logits[:, -1].to(dtype=torch.float32, copy=copy)

    def advance(self, tokens: Tensor, input_ids: Tensor) -> None:
        """Make the inputs of the next step."""
        if self.follows:
            self.inputs["input_ids"] = tokens[:, None]
            if "position_ids" in self.inputs:
                self.inputs["position_ids"] = self.inputs["position_ids"] + 1
            if self.mask is not None:
                self.mask = F.pad(self.mask, (0, 1), value=1)
                self.inputs["attention_mask"] = self.mask
            return
        self.inputs = self.model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **self.kwargs)
        self.follows = self._can_follow(tokens)

    def _can_follow(self, tokens: Tensor) -> bool:
        """Whether what the model prepared for a decode step is understood well enough to continue it."""
        inputs = self.inputs
        prepare = type(self.model).prepare_inputs_for_generation
        if not prepare.__module__.startswith("transformers.") or "prepare_inputs_for_generation" in vars(self.model):
            return False  # a user's own preparation is asked at every step
        if prepare is not GenerationMixin.prepare_inputs_for_generation:  # Phi3 begins anew with other frequencies
            short = getattr(self.model.config, "original_max_position_embeddings", None)
            if short is not None and (self._limit_tokens is None or self._limit_tokens > short):
                return False
        unknown = [name for name, value in inputs.items() if name not in _FOLLOWED and isinstance(value, Tensor)]
        ids, mask, positions = inputs.get("input_ids"), inputs.get("attention_mask"), inputs.get("position_ids")
        if unknown or not isinstance(ids, Tensor) or not torch.equal(ids, tokens[:, None]):
            return False
        if positions is not None and (not isinstance(positions, Tensor) or positions.shape[-1] != 1):
            return False
        if isinstance(mask, Tensor):
            if mask.dim() != 2:
                return False
            # A mask that hides nothing says nothing: without it the model skips making one.
            self.mask = None if bool(mask.all()) and positions is not None else mask
            inputs["attention_mask"] = self.mask
        return True
