"""The attention hook: our attention op behind transformers' attention interface, for layers without a spec.

The attention modules of such a model call the function that their config names. Ours is registered under a new name, so
other models are unaffected. A config is renamed alone, not those inside it, and only from "sdpa"; models whose own code
compares that name keep it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from infuse import ops
from infuse.layers.attention.named_attention import is_transformers_own, names_ours
from infuse.layers.attention.self_attention import in_order
from infuse.layers.calls.contract import NEUTRAL, unserved
from infuse.layers.gradient import is_differentiated

# Arguments that transformers' sdpa function ignores. Calls with any other argument go to that function.
_KNOWN = NEUTRAL | {"position_ids", "sliding_window"}
_NAME = "_attn_implementation_internal"  # attribute with a config's own name, not those of inner configs
_READ = re.compile(r"\b_attn_implementation(_internal)?\b")
# Uses that do not distinguish sdpa's name from ours: function look-ups, copies, messages, comparisons with flash.
_BEFORE = re.compile(
    r"""(get_interface\(\s*|\bALL_\w+\[|_CLASSES\[|\{|_attn_implementation = |_requested\(\w+\) else |#[^\n]*)[\w.]*$"""
)
_AFTER = re.compile(r"""\s=\s+[\w.]+\b_attn_implementation\b|\s[!=]=\s"fl|\snot\sin\sALL_MASK_ATTENTION_FUNCTIONS\b""")
Put = Callable[[MutableMapping[Any, Any], Any, Any], None]


def hook_name(body: str) -> str:
    """Register attention by `body` of our op with transformers and return its name."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask  # imported when used: it takes seconds
    from transformers.modeling_utils import AttentionInterface

    name = f"infuse_{body}"
    AttentionInterface.register(name, partial(attend, body))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


@contextmanager
def counted(body: str) -> Iterator[list[str]]:
    """Collect, inside the `with`, the class of each attention module whose hook call our op computes."""
    from transformers.modeling_utils import AttentionInterface

    name, calls = hook_name(body), list[str]()
    AttentionInterface.register(name, partial(attend, body, calls=calls))
    try:
        yield calls
    finally:
        AttentionInterface.register(name, partial(attend, body))


@dataclass(frozen=True)
class HookedAttention:
    """Stored on the model, so that unpickling it in another process registers the hook there."""

    body: str

    def __reduce__(self) -> tuple:
        return _hooked, (self.body, ops.attention.bound(self.body))  # cannot be unpickled where the body does not run


def install_hook(model: Any, body: str, put: Put) -> None:
    """Make attention modules with the config of `model` use the hook; `put(mapping, key, value)` makes each change."""
    put(vars(model.config), _NAME, hook_name(body))
    put(vars(model), "_infuse_attention", HookedAttention(body))


def uninstall_hook(model: Any) -> None:
    """Give attention back its own function, unless the config names another one by now."""
    hooked = vars(model).pop("_infuse_attention", None)
    if hooked is not None and vars(model.config).get(_NAME) == hook_name(hooked.body):
        vars(model.config)[_NAME] = "sdpa"


def hookable(model: nn.Module, replaced: Sequence[str]) -> dict[str, str | None]:
    """Paths of the models in `model`, itself included, whose attention uses sdpa → why it has to keep it, or None.

    `replaced`: paths of layers whose attention is ignored.
    """
    inside = tuple(f"{path}." for path in replaced)
    named = [(path, module, vars(module).get("config")) for path, module in model.named_modules()]
    owners: dict[int, tuple[str, Any]] = {}
    for path, module, config in named:
        if hasattr(module, "set_attn_implementation"):
            owners.setdefault(id(config), (path, module))
    using = {
        id(config)
        for path, module, config in named
        if hasattr(module, "is_causal") and _is_sdpa(config) and not f"{path}.".startswith(inside)
    }
    reasons: dict[str, str | None] = {}
    for path, owner in (owners[key] for key in owners if key in using):
        if getattr(owner, "_supports_attention_backend", False):
            above = [model.get_submodule(".".join(path.split(".")[:end])) for end in range(path.count(".") + 1)]
            why = None if names_ours(owner) else "its config names an attention function that was registered anew"
            reasons[path] = why or compares_names({type(each) for each in (model, *above, *owner.modules())})
    return reasons


def compares_names(classes: Iterable[type]) -> str | None:
    """Return why attention of these classes has to keep its name: their code branches on it."""
    files = {kind.__module__ for cls in classes for kind in cls.__mro__}
    for file in sorted(files):
        package, _, room = file.partition(".")
        shared = package == "transformers" and not room.startswith("models.")  # where all registered names are equal
        if package not in ("torch", "infuse", "builtins") and not shared and _compares(sys.modules.get(file)):
            return f"{file.rpartition('.')[2]} compares the name of the attention implementation"
    return None


@lru_cache(maxsize=256)
def _compares(file: Any) -> bool:
    try:
        return reads_name(inspect.getsource(file))
    except (OSError, TypeError):  # no source: it may do anything
        return True


def reads_name(code: str) -> bool:
    """Whether code may behave differently under our name than under sdpa's."""
    return any(
        not _AFTER.match(code, read.end()) and not _BEFORE.search(code[max(0, read.start() - 80) : read.start()])
        for read in _READ.finditer(code)
    )


def _is_sdpa(config: Any) -> bool:
    return config is not None and getattr(config, "__dict__", {}).get(_NAME) == "sdpa"


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
    calls: list[str] | None = None,
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
    if calls is not None and not is_compiling():
        calls.append(type(module).__name__)
    causal = attention_mask is None and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal:
        key, value = in_order(query.shape[2], key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    run = ops.attention.bound(body)
    return run(query, key, value, attention_mask, None, scale, causal, 0, 0.0), None
