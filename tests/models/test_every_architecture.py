"""Every architecture that can be made small: as the original in each way of calling it, and its own state untouched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig
from transformers.utils import ModelOutput

import infuse
from tests.models.every_architecture import PARTS, TOKENS, architectures, inputs_of, parts, tiny_model, with_pictures
from tests.models.families import enlarge

# Of a result's norm: an error of rounding in each layer, through two layers.
ALLOWED = 2e-4
PADDING = 5  # tokens
NEW = 3  # tokens
# What init_inference sets on a model on purpose.
STATEFUL = "_is_stateful"
OURS = frozenset({"_infuse", "_infuse_attention", "generate", "_is_hf_initialized"})
OUR_ATTENTION = "infuse_"


def calls(model: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Ways of calling a model like `model`, by name."""
    full = inputs_of(model, TOKENS)
    yield "forward", lambda m: m(**full)
    yield "hidden states", lambda m: m(**full, output_hidden_states=True)
    if not any(name in full for name in ("input_ids", "inputs_embeds", "input_features")):
        return
    short, one = inputs_of(model), inputs_of(model, 1)
    yield "few tokens", lambda m: m(**short)
    yield "one token", lambda m: m(**one)
    if (seen := with_pictures(model, full)) is not None:
        yield "pictures", lambda m: m(**seen)
    padded = {"padding on the left": _padded(full, left=True), "padding on the right": _padded(full, left=False)}
    for name, padded_inputs in padded.items():
        if padded_inputs is not None:
            yield name, lambda m, given=padded_inputs: m(**given)
    if not getattr(model, "can_generate", lambda: False)():
        return
    for name, given in {
        "": full,
        " from few tokens": short,
        " with padding": padded["padding on the left"],
        " from pictures": seen,
    }.items():
        if given is not None:
            yield f"greedy search{name}", lambda m, given=given: generated(m, given)
            yield f"a static cache{name}", lambda m, given=given: generated(m, given, **_STATIC)
    yield "beams", lambda m: generated(m, full, num_beams=2)
    yield "no cache", lambda m: generated(m, full, use_cache=False)


_STATIC: Mapping[str, Any] = {"cache_implementation": "static", "output_logits": True, "return_dict_in_generate": True}


def generated(model: Any, given: Mapping[str, Tensor], **settings: Any) -> Any:
    prompt = {key: value for key, value in given.items() if key != "decoder_input_ids"}
    return model.generate(**prompt, do_sample=False, max_new_tokens=NEW, disable_compile=True, **settings)


def _padded(inputs: dict[str, Tensor], left: bool) -> dict[str, Tensor] | None:
    """The inputs with padding in the first row; None if they have no mask."""
    if inputs.get("attention_mask") is None:
        return None
    mask = inputs["attention_mask"].clone()
    if mask.dim() != 2 or mask.shape[1] <= PADDING:
        return None
    row = mask[0, :PADDING] if left else mask[0, -PADDING:]
    row.zero_()
    return {**inputs, "attention_mask": mask}


@torch.no_grad()
def answer(call: Callable[[Any], Any], model: Any) -> dict[str, Any] | Exception:
    """All that a call returns, by place; or what it raises."""
    torch.manual_seed(1)
    try:
        return dict(_leaves(call(model), "", set()))
    except Exception as problem:
        return problem


def _leaves(value: Any, place: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values inside of an output; `seen`: ids of what contains it."""
    if isinstance(value, Tensor) or value is None or isinstance(value, (str, int, float)):
        yield place, value
        return
    if id(value) in seen:
        return
    seen = {*seen, id(value)}
    yield f"type of {place}", "a cache" if isinstance(value, Cache) else type(value).__name__
    if isinstance(value, Cache):
        parts: Any = {}  # each class stores tokens in its own way: what is made of them is compared
    elif isinstance(value, (ModelOutput, Mapping)):
        parts = dict(value)
    elif isinstance(value, (tuple, list)):
        parts = dict(enumerate(value))
    else:
        parts = vars(value)
    for name, part in parts.items():
        yield from _leaves(part, f"{place}.{name}" if place else str(name), seen)


def difference(found: Any, wanted: Any) -> str | None:
    """How an answer differs from the original's; None: it does not, or the original raises."""
    if isinstance(wanted, Exception):
        return None
    if isinstance(found, Exception):
        return f"raises {type(found).__name__}: {str(found)[:300]}"
    if found.keys() != wanted.keys():
        return f"other parts: {sorted(found.keys() ^ wanted.keys())}"
    for place, value in wanted.items():
        own = found[place]
        if not isinstance(value, Tensor) or not isinstance(own, Tensor):
            if type(own) is not type(value) or not _same(own, value):
                return f"{place} is {own!r} instead of {value!r}"
        elif (own.shape, own.dtype) != (value.shape, value.dtype):
            return f"{place}: {own.dtype} {tuple(own.shape)} instead of {value.dtype} {tuple(value.shape)}"
        elif not value.is_floating_point():
            if not torch.equal(own, value):
                return f"{place}: {own[..., -NEW:].tolist()} instead of {value[..., -NEW:].tolist()} at the end"
        elif not torch.equal(own.isfinite(), value.isfinite()):
            return f"{place}: finite at other places"
        else:
            own, value = (one.double().nan_to_num(0, 0, 0) for one in (own, value))
            error = float((own - value).norm() / value.norm().clamp(min=1e-9))
            if error > ALLOWED:
                return f"{place}: off by {error:.1e}"
    return None


def _same(found: Any, wanted: Any) -> bool:
    """Equal plain values; tensors by number."""
    if isinstance(wanted, Tensor):
        return isinstance(found, Tensor) and found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, (list, tuple)):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(_same, found, wanted))
    return bool(found == wanted)


def state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The configs, plain attributes, buffers and parameters of all modules, copied, by path."""
    found: dict[str, dict[str, Any]] = {}
    for path, module in model.named_modules():
        values = {
            name: value
            for name, value in vars(module).items()
            if name not in OURS and not name.startswith("_forward") and name not in _HELD
        }
        plain = {name: copy.deepcopy(value) for name, value in values.items() if _is_plain(value)}
        tensors = {**module._buffers, **module._parameters}
        held = {f"tensor {name}": None if value is None else value.detach().clone() for name, value in tensors.items()}
        found[path] = {"class": type(module), **plain, **held}
        for name, value in values.items():
            if isinstance(value, PreTrainedConfig):
                found[path] |= dict(_settings(value, name))
        if path == "" and getattr(module, "generation_config", None) is not None:
            found[path]["generation_config"] = module.generation_config.to_dict()  # type: ignore[union-attr, operator]
    return found


# Of nn.Module itself: looked at apart.
_HELD = frozenset({"_parameters", "_buffers", "_modules"})


def _settings(config: PreTrainedConfig, name: str) -> Iterator[tuple[str, Any]]:
    """All attributes of a config and of those inside of it."""
    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _settings(value, f"{name}.{key}")
        elif _is_plain(value):
            yield f"{name}.{key}", copy.deepcopy(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (str, int, float, torch.dtype, torch.device, Tensor))


def changes(found: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is another value in modules of the same class, with our attention in place of sdpa allowed."""
    changed = []
    for path in wanted.keys() & found.keys():
        if found[path]["class"] is not wanted[path]["class"]:
            continue
        for name in wanted[path].keys() | found[path].keys():
            own, value = found[path].get(name, "nothing"), wanted[path].get(name, "nothing")
            if name == STATEFUL and own is False and getattr(wanted[path]["class"], STATEFUL):
                continue  # its states can be kept for each verified token now, so transformers may ask for candidates
            is_ours = name.endswith("_attn_implementation_internal") and str(own).startswith(OUR_ATTENTION)
            if not (is_ours and value == "sdpa") and not (type(own) is type(value) and _same(own, value)):
                changed.append(f"{path or 'the model'}: {name} is {str(own)[:80]} instead of {str(value)[:80]}")
    return sorted(changed)


def faults(model: nn.Module) -> list[str]:
    """What differs between a model and itself after init_inference."""
    original = copy.deepcopy(model)
    ways = list(calls(copy.deepcopy(model)))
    before = state(model)
    module = infuse.init_inference(model, dtype="fp32").module
    found = [f"after init_inference, {text}" for text in changes(state(module), before)]
    answered = 0
    for name, call in ways:
        wanted, own = answer(call, original), answer(call, module)
        answered += not isinstance(wanted, Exception)
        if text := difference(own, wanted):
            found.append(f"{name}: {text}")
    if not answered:
        found.append("nothing is compared: the original raises in each way of calling it")
    if not found:
        found += [f"after the calls, {text}" for text in changes(state(module), state(original))]
    return found


def made(config: type, model_class: type) -> nn.Module:
    """A tiny model with weights so large that positions and masks count, which generates NEW tokens."""
    model: Any = tiny_model(config, model_class).float()  # a buffer in another dtype would be cast to the one asked for
    enlarge(model)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        if model.generation_config.decoder_start_token_id is None:
            model.generation_config.decoder_start_token_id = 1
    return model


@pytest.mark.slow
@pytest.mark.parametrize("part", parts(always=0))
def test_every_architecture_is_as_the_original(part: int) -> None:
    """Each in float32, with texts longer than its windows, budgets and blocks."""
    found = architectures()
    report = []
    for kind in sorted(found)[part::PARTS]:
        if texts := faults(made(*found[kind])):
            report.append("\n  ".join((kind, *texts)))
    assert not report, "\n".join(report)
    assert len(found) >= 200
