"""The contract of a call: which arguments, caches and masks a replaced layer supports.

No argument is ever dropped. An argument that a layer does not understand raises UnsupportedCall before anything is
computed, or is passed on to transformers' own attention function, which does understand it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from infuse.ground.cache_names import CACHE_NAMES
from infuse.ground.errors import UnsupportedCall

# The arguments that a block computes with, under the names that families use.
SERVED = frozenset(
    {"attention_mask", *CACHE_NAMES, "position_embeddings", "position_ids", "is_causal", "output_attentions"}
)
# Arguments that do not change what a layer computes. Names that start with "output_" do not either.
NEUTRAL = frozenset({
    "use_cache", "cache_position", "return_dict", "output_hidden_states", "output_router_logits", "num_items_in_batch",
    "tokenizer", "assistant_tokenizer", "assistant_model",  # passed along by transformers' decoding loops
    "labels", "shift_labels", "ignore_index",  # meant for the loss
    "logits_to_keep",  # meant for the head; GOT-OCR 2 passes it to every module below
    "return_shared_kv_states",  # meant for the model, which has what its layers lend
    "token_type_ids",  # made by many tokenizers; models read them in their embeddings and masks
    # How answers are made: models of connectionist temporal classification pass what `generate` is given to all layers.
    "max_new_tokens", "min_new_tokens", "max_length", "min_length", "num_beams", "do_sample", "num_return_sequences",
    "return_dict_in_generate", "generation_config",
})  # fmt: skip


def named(arguments: tuple[str, ...], args: tuple, kwargs: dict[str, Any], layer: str) -> dict[str, Any]:
    """Map all arguments of a call to their names. Raise TypeError as Python does for too many or repeated ones."""
    if len(args) > len(arguments):
        raise TypeError(f"{layer} takes {len(arguments) + 1} positional arguments, {len(args) + 1} were given")
    if twice := kwargs.keys() & arguments[: len(args)]:
        raise TypeError(f"{layer} got multiple values for argument {min(twice)!r}")
    return dict(zip(arguments, args, strict=False)) | kwargs


def unserved(kwargs: Mapping[str, Any], served: Container[str]) -> dict[str, Any]:
    """Return the arguments that are not None, not in `served` and not neutral."""
    return {
        name: value
        for name, value in kwargs.items()
        if value is not None and name not in served and not name.startswith("output_")
    }


def refuse_arguments(layer: str, arguments: Mapping[str, Any], served: frozenset[str]) -> None:
    """Raise UnsupportedCall naming the `arguments`."""
    names = ", ".join(sorted(arguments))
    raise UnsupportedCall(
        f"{layer} was called with {names}, which its replacement does not support; it supports "
        f"{', '.join(sorted(served - NEUTRAL))}. "
        "Leave the argument out, or keep the original layers with replace_with_kernel_inject=False"
    )


def refuse_unknown(module: str, args: tuple, kwargs: Mapping[str, Any], served: tuple[str, ...] = ()) -> None:
    """Raise UnsupportedCall for positional arguments, and for keywords that are neither None nor `served`.

    For modules that take arguments by name: pass the remaining arguments of a call.
    """
    arguments = unserved(kwargs, frozenset(served))
    more = {f"{len(args)} more positional arguments"} if any(arg is not None for arg in args) else set()
    if names := ", ".join(sorted({*arguments, *more})):
        raise UnsupportedCall(
            f"{module} was called with {names}, which its replacement does not support; it supports "
            f"{', '.join(('hidden_states', *served))}. "
            "Leave the argument out, or keep the original modules with replace_with_kernel_inject=False"
        )


def check_mask(mask: Any, layer: str) -> None:
    """Raise UnsupportedCall unless `mask` is a boolean or additive mask [batch, heads or 1, queries or 1, keys]."""
    if isinstance(mask, Tensor) and mask.dim() == 4 and (mask.dtype.is_floating_point or mask.dtype.itemsize == 1):
        return
    description = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    raise UnsupportedCall(
        f"{layer} was given {description} as attention_mask; its replacement supports "
        "[batch, heads or 1, queries or 1, keys], either boolean (True: may attend) or added to the scores"
    )
