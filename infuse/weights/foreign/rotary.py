"""Compare rotary frequencies that a checkpoint holds, GGUF's `rope_freqs`, with those that the model computes."""

from __future__ import annotations

import torch
from torch import Tensor

from infuse.weights.computed import computed_tensors
from infuse.weights.foreign.layout import Recognised, Unread
from infuse.weights.gguf.names import FREQUENCIES
from infuse.weights.gguf.rotary import rope_parameters
from infuse.weights.gguf.tensors import Frequencies

_CLOSE = 1e-3  # relative; models compute them in several ways, and scaling starts at a quarter


def frequencies(unread: Unread) -> Recognised:
    """Use the frequencies up. A model that rotates otherwise is a fault: its config lacks the scaling of the file."""
    if FREQUENCIES not in unread.names:
        return Recognised()
    stored = unread.whole(FREQUENCIES)
    names = [name for name in unread.naming.variants(FREQUENCIES) if _owner(unread, name) is not None]
    used = {FREQUENCIES}
    if not names or not isinstance(stored, Frequencies):
        return Recognised(used=used)
    ours, theirs = _computed(unread, names[0]), stored.read()
    if ours is None or (ours.shape == theirs.shape and torch.allclose(ours.float(), theirs, rtol=_CLOSE, atol=0)):
        return Recognised(used=used)
    parameters = rope_parameters(stored.factors.read(), stored.base, stored.context)
    what = f"the file scales rotation by rope_freqs, the model does not; set rope_parameters={parameters} in its config"
    return Recognised(used=used, faults={names[0]: what})


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
