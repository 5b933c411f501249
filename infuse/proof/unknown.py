"""The proof of a layer whose linears ranks share while its forward stays: what the whole model gives it, encoder and
decoder alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from infuse.proof.proof import PADDING, SEED, Call, Case, cache_maker, like, run_and_record
from infuse.unknown.trace import model_inputs


def split_cases(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, list[Case]]:
    """For each path in `layers`: what `model` passes to that layer for random inputs, alone and on a cache, then
    padded.
    """
    cases: dict[str, list[Case]] = {path: [] for path in layers}
    for label, padded in (("alone", False), ("padded", True)):
        make_cache = cache_maker(model) if not padded else None
        seen: dict[str, list[Call]] = {path: [] for path in layers}
        inputs = random_inputs(model, padded)
        mask = inputs["attention_mask"].bool().cpu() if "attention_mask" in inputs else None
        cache: dict[str, Any] = {} if make_cache is None else {"past_key_values": make_cache(), "use_cache": True}
        run_and_record(model, layers, inputs | cache, mask, seen)
        if cache:
            run_and_record(model, layers, _one_more(model, inputs) | cache, None, seen)
        for path, calls in seen.items():
            if calls:
                cases[path].append(Case(label, tuple(_fitting(call) for call in calls), (make_cache,)))
    return cases


def random_inputs(model: nn.Module, padded: bool = False) -> dict[str, Tensor]:
    """Random arguments of the model's forward, by name."""
    generator = torch.Generator().manual_seed(SEED)
    sample, rows = like(model), _rows(model)

    def make(kind: str, shape: tuple[int, ...]) -> Tensor:
        if kind == "values":
            return torch.randn(shape, generator=generator).to(sample)
        if kind == "ids":
            return torch.randint(min(3, rows - 1), rows, shape, generator=generator).to(sample.device)
        mask = torch.ones(shape, dtype=torch.long)
        if padded:
            mask[0, -PADDING:] = 0
        return mask.to(sample.device)

    return model_inputs(model, make)


def _one_more(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arguments of the next step of decoding: one more token, and a mask that counts it; what an encoder reads
    stays.
    """
    step = dict(inputs)
    if "decoder_input_ids" in inputs:
        step["decoder_input_ids"] = inputs["decoder_input_ids"][:, :1]
        return step
    for name, value in inputs.items():
        step[name] = torch.cat((value, value[:, :1]), dim=1) if name == "attention_mask" else value[:, :1]
    return step


def _rows(model: Any) -> int:
    """How many token ids the model knows."""
    try:
        table = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        table = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    return getattr(table, "num_embeddings", 4)


def _fitting(call: Call) -> Call:
    """The call, without a mask of real positions where it counts other rows than the layer's."""
    fits = call.real is not None and call.hidden.shape[:2] == call.real.shape
    return Call(call.hidden, call.args, call.kwargs, call.real if fits else None)
