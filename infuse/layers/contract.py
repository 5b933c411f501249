"""The contract of a call: the arguments, caches and masks that a replaced layer serves.

Nothing that a caller passes is dropped. What a layer has no meaning for raises UnsupportedCall before anything is
computed, or goes on to transformers' own attention function, which does understand it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from infuse.errors import UnsupportedCall

# What a block computes with, by the names that families use for it.
SERVED = frozenset({
    "attention_mask", "past_key_values", "layer_past", "position_embeddings", "position_ids", "is_causal", "output_attentions",
})  # fmt: skip
# What a model tells its layers without changing what they compute; names with the prefix "output_" likewise.
NEUTRAL = frozenset({
    "use_cache", "cache_position", "return_dict", "output_hidden_states", "output_router_logits", "num_items_in_batch",
    "tokenizer", "assistant_tokenizer",  # transformers' decoding loops hand them on
    "logits_to_keep",  # of the head; models of images and text hand it on to all below (GOT-OCR 2)
})  # fmt: skip


def named(arguments: tuple[str, ...], args: tuple, kwargs: dict[str, Any], layer: str) -> dict[str, Any]:
    """All arguments of a call by name; TypeError as Python raises it for too many of them, or for one given twice."""
    if len(args) > len(arguments):
        raise TypeError(f"{layer} takes {len(arguments) + 1} positional arguments, {len(args) + 1} were given")
    if twice := kwargs.keys() & arguments[: len(args)]:
        raise TypeError(f"{layer} got multiple values for argument {min(twice)!r}")
    return dict(zip(arguments, args, strict=False)) | kwargs


def unserved(kwargs: Mapping[str, Any], served: frozenset[str]) -> dict[str, Any]:
    """The arguments beyond `served` that say something."""
    return {
        name: value
        for name, value in kwargs.items()
        if value is not None and name not in served and not name.startswith("output_")
    }


def refuse_arguments(layer: str, given: Mapping[str, Any], served: frozenset[str]) -> None:
    """Raise UnsupportedCall that names the arguments in `given`."""
    names = ", ".join(sorted(given))
    raise UnsupportedCall(
        f"{layer} was called with {names}, which its replacement does not serve; it serves {', '.join(sorted(served - NEUTRAL))}. "
        "Leave the argument out, or keep the original layers with replace_with_kernel_inject=False"
    )


def check_mask(mask: Any, layer: str) -> None:
    """Raise UnsupportedCall for a mask that is not [batch, heads or 1, queries or 1, keys] of booleans or of values to
    add.
    """
    if isinstance(mask, Tensor) and mask.dim() == 4 and (mask.dtype.is_floating_point or mask.dtype.itemsize == 1):
        return
    found = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    raise UnsupportedCall(
        f"{layer} was given {found} as attention_mask; its replacement serves [batch, heads or 1, queries or 1, keys] of "
        "booleans (True: may look) or of values to add to the scores"
    )
