"""Check that a GGUF file has the keys of a tokenizer, before transformers builds one of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from infuse.ground.errors import CheckpointError

_START = "tokenizer.ggml."
# By tokenizer.ggml.model: the keys of which one must be there. Gemma's architectures need none: transformers takes the
# order of their tokens.
_MADE_OF: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "gpt2": ("merges",), "llama": ("scores", "merges"), "gemma4": ("merges", "scores"), "t5": ("scores",),
})  # fmt: skip
_IN_ORDER = ("gemma", "gemma2", "gemma3")
_IDS = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
_REMEDY = (
    "put the original model's tokenizer.json and tokenizer_config.json beside the file and give the folder, or convert "
    "the model again with llama.cpp's convert_hf_to_gguf.py"
)


def check_vocabulary(values: Mapping[str, Any], path: object) -> None:
    """Raise CheckpointError for keys of the tokenizer that are missing, and for tokens that are not there.

    `values`: the keys of the file at `path`.
    """
    faults = _missing(values) or _wrong(values)
    if faults:
        raise CheckpointError(f"{path}: {'; '.join(faults)}: no tokenizer can be made of it; {_REMEDY}")


def _missing(values: Mapping[str, Any]) -> list[str]:
    model = values.get(f"{_START}model")
    absent = [f"{_START}{key}" for key in ("model", "tokens") if f"{_START}{key}" not in values]
    parts = _MADE_OF.get(str(model), ())
    in_order = model == "llama" and values.get("general.architecture") in _IN_ORDER
    if parts and not in_order and not any(f"{_START}{part}" in values for part in parts):
        absent.append(" or ".join(f"{_START}{part}" for part in parts))
    return [f"has no {', '.join(absent)}"] if absent else []


def _wrong(values: Mapping[str, Any]) -> list[str]:
    model, tokens = values[f"{_START}model"], values[f"{_START}tokens"]
    if model not in _MADE_OF:
        return [f"{_START}model is {model!r:.40} (possible: {', '.join(_MADE_OF)})"]
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        return [f"{_START}tokens is {tokens!r:.40} (possible: a list of texts)"]
    ids = {key: values.get(f"{_START}{key}") for key in _IDS}
    faults = [
        f"{_START}{key} is {one!r:.40} (possible: 0 to {len(tokens) - 1})"
        for key, one in ids.items()
        if one is not None and not (isinstance(one, int) and 0 <= one < len(tokens))
    ]
    for key in ("scores", "token_type"):
        of_tokens = values.get(f"{_START}{key}", tokens)
        if not isinstance(of_tokens, list) or len(of_tokens) != len(tokens):
            faults.append(f"{_START}{key} is {of_tokens!r:.40} (possible: a list of {len(tokens)}, as tokens)")
    return faults
