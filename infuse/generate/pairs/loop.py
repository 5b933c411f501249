"""Decoding with a model that has an encoder: our loop, or transformers' own loops over steps without its forward.

transformers' `generate`, also that of a model's own class (Whisper), prepares everything and calls `decode_pair` (its
`custom_generate` hook).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from infuse.generate.direct import DirectStep, DirectSteps
from infuse.generate.loop import decode, prepares_alone
from infuse.generate.pairs.cache import PairCache
from infuse.graphs.graphed_cache import GraphedCache
from infuse.graphs.pool import PREPARED_TOKENS, BucketPool
from infuse.ground.cache_names import CACHE_NAMES, cache_in
from infuse.parallel.group import LOCAL, Group


def decode_pair(
    model: Any, input_ids: Tensor, generation_config: Any, streamer: Any = None, group: Group = LOCAL,
    direct: DirectSteps | None = None, buckets: BucketPool | None = None, **given: Any,
) -> Any:  # fmt: skip
    """Return what transformers' own loop for this generation config returns, for decoder ids [B, T].

    `given`: the processors, the criteria, and the model's arguments. With `buckets` its steps are CUDA graphs.
    """
    pair, name = cache_in(given), next((name for name in CACHE_NAMES if given.get(name) is not None), None)
    if buckets is None or name is None or type(pair) is not PairCache or pair.get_seq_length():
        return _decoded(model, input_ids, generation_config, streamer, group, direct, given)
    most, prompt_tokens = generation_config.max_length, input_ids.shape[1]
    prepared = prompt_tokens + PREPARED_TOKENS
    graphed = GraphedCache(buckets, len(input_ids), prepared if most is None else min(most, prepared))
    given[name], result = PairCache(graphed, pair.cross_attention_cache), None
    try:
        result = _decoded(model, input_ids, generation_config, streamer, group, direct, given)
        return result
    finally:
        graphed.end(keep=cache_in(result if isinstance(result, Mapping) else {}) is given[name])


def _decoded(
    model: Any, input_ids: Tensor, generation_config: Any, streamer: Any, group: Group, direct: DirectSteps | None,
    given: dict[str, Any],
) -> Any:  # fmt: skip
    beams = (generation_config.num_beams or 1) > 1
    given["generation_config"] = generation_config
    if not beams:
        given["streamer"] = streamer
    ours = type(cache_in(given)) is PairCache and generation_config.use_cache
    if ours and not beams and not generation_config.return_dict_in_generate:
        return decode(model, input_ids, group=group, direct=direct, **given)
    loop = type(model)._beam_search if beams else type(model)._sample
    shown = generation_config.output_attentions or generation_config.output_hidden_states
    follows = ours and direct is not None and not shown and not prepares_alone(model)
    return loop(Follower(model, direct) if follows else model, input_ids, **given)


class Follower:
    """Stands for a model in transformers' loops: its steps of one new token a row are made without its forward."""

    def __init__(self, model: Any, direct: Any):
        self._model, self._direct = model, direct
        self._step: DirectStep | None = None
        self._outputs: Any = None  # of the last step
        self._prepared: tuple[Tensor, dict[str, Any]] | None = None  # arguments of a step that is not prepared

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """The inputs of a step: none but the ids [B, 1] if it is made without the model's forward."""
        if self._step is None:
            return self._model.prepare_inputs_for_generation(input_ids, **kwargs)
        self._prepared = input_ids, kwargs
        return {self._direct.ids: input_ids[:, -1:].contiguous()}

    def __call__(self, **inputs: Any) -> Any:
        if self._step is not None and self._prepared is not None:
            logits = self._step(inputs[self._direct.ids])
            if logits is not None:
                self._outputs.logits = logits
                return self._outputs
            input_ids, kwargs = self._prepared
            self._step, self._prepared = None, None
            inputs = self._model.prepare_inputs_for_generation(input_ids, **kwargs) | {"return_dict": True}
            return self._model(**inputs)
        ids, cache = inputs.get(self._direct.ids), cache_in(inputs)
        if (
            self._outputs is None
            and cache is not None
            and cache.get_seq_length()
            and ids is not None
            and ids.shape[1] == 1
        ):
            inputs.pop("return_dict", None)
            self._outputs, self._step = self._direct.traced(self._model, inputs)
            return self._outputs
        return self._model(**inputs)
