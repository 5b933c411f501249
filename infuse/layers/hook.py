"""The attention hook: our attention op behind transformers' attention interface, for layers without a spec.

The attention modules of such a model call the function that its config names. Ours is registered under a new name, so
other models are unaffected.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from infuse import ops
from infuse.layers.attention import in_order
from infuse.layers.contract import NEUTRAL, unserved
from infuse.layers.gradient import is_differentiated
from infuse.layers.named_attention import is_transformers_own

# Arguments that transformers' sdpa function ignores. Calls with any other argument go to that function.
_KNOWN = NEUTRAL | {"position_ids", "sliding_window"}
ran: Counter[str] = Counter()  # calls by body: the proof checks that the model really calls the hook


def hook_name(body: str) -> str:
    """Register attention by `body` of our op with transformers and return its name."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask  # imported when used: it takes seconds
    from transformers.modeling_utils import AttentionInterface

    name = f"infuse_{body}"
    AttentionInterface.register(name, partial(attend, body))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


@dataclass(frozen=True)
class HookedAttention:
    """Stored on the model, so that unpickling it in another process registers the hook there."""

    body: str

    def __reduce__(self) -> tuple:
        return _hooked, (self.body, ops.attention.bound(self.body))  # cannot be unpickled where the body does not run


def install_hook(model: Any, body: str, put: Callable[[MutableMapping[Any, Any], Any, Any], None]) -> None:
    """Make `model` use the hook. `put(mapping, key, value)` stores the HookedAttention, so that it can be undone."""
    model.set_attn_implementation(hook_name(body))
    put(vars(model), "_infuse_attention", HookedAttention(body))


def _hooked(body: str, bound: ops.Bound) -> HookedAttention:
    hook_name(body)
    return HookedAttention(body)


def attend(
    body: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, with transformers' signature: query [B, H, T, D], key and value [B, K, L, D] → ([B, T, H, D], None)."""
    recorded = torch.is_grad_enabled() and any(map(is_differentiated, (query, key, value)))
    uneven = query.shape[1] % key.shape[1] or key.shape[-1] != value.shape[-1]
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    if recorded or dropout or uneven or unserved(kwargs, _KNOWN) or not is_transformers_own(functions, "sdpa"):
        return functions["sdpa"](
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if is_compiling():  # the traced graph holds the op; nothing is counted
        run: Callable = ops.attention.bound(body)
    else:
        ran[body] += 1
        run = ops.attention.body(body)
    causal = attention_mask is None and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal:
        key, value = in_order(query.shape[2], key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return run(query, key, value, attention_mask, None, scale, causal, 0, 0.0), None
