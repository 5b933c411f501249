"""Compare rotary frequencies that a checkpoint holds, GGUF's `rope_freqs` and `rope_factors_*`, with the model's."""

from __future__ import annotations

import torch
from torch import Tensor

from infuse.weights.computed import computed_tensors
from infuse.weights.foreign.layout import Recognised, Unread
from infuse.weights.gguf.names import FREQUENCIES
from infuse.weights.gguf.rotary import FACTORS, rope_parameters
from infuse.weights.gguf.tensors import Frequencies

_CLOSE = 1e-3  # relative; models compute them in several ways, and scaling starts at a quarter


def frequencies(unread: Unread) -> Recognised:
    """Use the frequencies up. A model that rotates otherwise, or in an unknown way, is a fault."""
    of_both_lengths = _of_both_lengths(unread)
    if FREQUENCIES not in unread.names:
        return of_both_lengths
    stored = unread.whole(FREQUENCIES)
    used = {FREQUENCIES, *of_both_lengths.used}
    faults = dict(of_both_lengths.faults)
    if isinstance(stored, Frequencies) and bool((stored.factors.read() != 1).any()):
        names = [name for name in unread.naming.variants(FREQUENCIES) if _owner(unread, name) is not None]
        ours, theirs = _computed(unread, names[0]) if names else None, stored.read()
        if ours is None:
            what = "the file scales rotation by rope_freqs; this model's frequencies cannot be compared with it"
            faults[FREQUENCIES] = what
        elif ours.shape != theirs.shape or not torch.allclose(ours.float(), theirs, rtol=_CLOSE, atol=0):
            parameters = rope_parameters(stored.factors.read(), stored.base, stored.context)
            what = "the file scales rotation by rope_freqs, the model does not"
            faults[names[0]] = f"{what}; set rope_parameters={parameters} in its config"
    return Recognised(used=used, faults=faults)


def _of_both_lengths(unread: Unread) -> Recognised:
    """Use phi3's factors for short and for long texts up. They must be those of the model's config."""
    found = {key: name for key, name in FACTORS.items() if name in unread.names}
    parameters = getattr(getattr(unread.model, "config", None), "rope_parameters", None) or {}
    faults = {}
    for key, name in found.items():
        theirs = unread.whole(name).read().double()
        ours = parameters.get(f"{key}_factor") if parameters.get("rope_type") == "longrope" else None
        ours = torch.ones_like(theirs) if ours is None else torch.tensor(ours, dtype=torch.float64)
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=_CLOSE, atol=0):
            what = f"the file scales rotation by {name}, the model does not, or otherwise"
            wanted = {"rope_type": "longrope", f"{key}_factor": theirs.tolist()}
            faults[name] = f"{what}; set rope_parameters with {wanted} in its config"
    return Recognised(used=set(found.values()), faults=faults)


def _owner(unread: Unread, name: str) -> object:
    path, _, leaf = name.rpartition(".")
    module = dict(unread.model.named_modules()).get(path)
    return None if module is None else module._buffers.get(leaf)


def _computed(unread: Unread, name: str) -> Tensor | None:
    """The model's frequencies; on meta, those of a model that is made anew from its config."""
    path, _, leaf = name.rpartition(".")
    module = unread.model.get_submodule(path)
    value = module._buffers[leaf]
    if value is not None and not value.is_meta:
        return value.cpu()
    owner = module._buffers
    return next((again for place, key, again in computed_tensors(unread.model) if place is owner and key == leaf), None)
