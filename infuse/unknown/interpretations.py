"""How the linears of a layer without a spec may be meant: by heads, in one of the packings, or by width. Pure.

What cannot be known from a layer (how q, k, v lie in one matrix, whether an attribute counts heads) becomes several
readings, of which the proof chooses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from infuse.architectures.packing import BLOCKS, FOUR_PARTS, PER_GROUP, PER_HEAD, Heads
from infuse.architectures.plain import LinearShape
from infuse.unknown.roles import Chain

_HEAD_KEYS = (
    "num_attention_heads",
    "num_heads",
    "n_head",
    "n_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
_KV_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
WIDTH_WORDS = ("dim", "size", "width", "embed", "hidden", "inner", "channels", "d_model", "d_ff")
KV_WORDS = ("kv", "key_value")


@dataclass(frozen=True)
class Reading:
    """One way to understand a chain: by `heads`, packed so where q, k, v are one matrix, or (None) by its inner width.

    `halves`: two matrices in one lie one after the other, else row by row. `widths`: attributes that equal the width
    follow it,
    `config`: so do the counts of the config that modules hold.
    """

    heads: Heads | None
    packing: str = BLOCKS
    halves: bool = True
    widths: bool = True
    config: bool = False


@dataclass(frozen=True)
class Layer:
    """What is read: a layer, its linears by path, and the config of the model around it."""

    module: nn.Module
    shapes: Mapping[str, LinearShape]
    config: Any
    name: str


def readings(layer: Layer, chain: Chain) -> Iterator[Reading]:
    """By heads where the chain makes more than one value for each that its rows read, else by width."""
    outputs = [layer.shapes[path].outputs for path in chain.columns]
    widths = {layer.shapes[path].inputs for path in chain.rows}
    if len(widths) != 1:
        return
    (width,) = widths
    heads = _heads(layer, chain, width)
    by_heads = heads is not None and sum(outputs) > width and all(_fits(heads, rows) for rows in outputs)
    if heads is not None and by_heads:
        packings = [BLOCKS, PER_HEAD if heads.query == heads.key else PER_GROUP]
        packings += [FOUR_PARTS] if heads.query == heads.key and heads.query % 4 == 0 else []
        fused = any(_is_packed(heads, rows) for rows in outputs)
        variants = [(True, False), (False, False)] + [(True, True)] * any(_config_counts(layer, chain))
        for (follow, config), packing in itertools.product(variants, packings if fused else packings[:1]):
            yield Reading(heads, packing, widths=follow, config=config)
    if all(rows in (width, 2 * width) for rows in outputs) and not (by_heads and len(outputs) > 2):
        for halves, follow in itertools.product((True, False) if 2 * width in outputs else (True,), (True, False)):
            yield Reading(None, halves=halves, widths=follow)


def _heads(layer: Layer, chain: Chain, width: int) -> Heads | None:
    """The head counts of a chain, None where neither its modules nor the config tell them."""
    counts = [
        value for _, name, value in attributes(layer, chain) if counts_heads(name) and not has_word(name, KV_WORDS)
    ]
    told = [count for key in _HEAD_KEYS if isinstance(count := getattr(layer.config, key, None), int) and count > 0]
    of_model = getattr(layer.config, "hidden_size", None) or width
    counts += [
        count for count in told if width == count * (getattr(layer.config, "head_dim", None) or of_model // count)
    ]
    query = next((count for count in counts if count > 0 and width % count == 0), None)
    if query is None:
        return None
    d, outputs = width // query, [layer.shapes[path].outputs for path in chain.columns]
    key = min(outputs) // d if len(outputs) > 2 and min(outputs) % d == 0 else query
    for rows in outputs:
        if len(outputs) == 1 and rows % d == 0 and rows > width and (rows // d - query) % 2 == 0:
            key = (rows // d - query) // 2
        elif len(outputs) == 2 and rows % (2 * d) == 0 and rows != width:
            key = rows // d // 2
    return Heads(query, key, d) if 0 < key <= query and query % key == 0 else None


def _fits(heads: Heads, rows: int) -> bool:
    return rows == heads.key * heads.width or rows % heads.query == 0 or _is_packed(heads, rows)


def _is_packed(heads: Heads, rows: int) -> bool:
    return rows in (heads.rows, 2 * heads.key * heads.width)


def misfit(layer: Layer, chain: Chain) -> str:
    makes = ", ".join(f"{path} {layer.shapes[path].outputs}" for path in chain.columns)
    reads = ", ".join(f"{path} reads {layer.shapes[path].inputs}" for path in chain.rows)
    return f"{makes} rows are not the heads or the width that {reads} of"


def around(layer: Layer, chain: Chain) -> str:
    """The path of the smallest module that holds all linears of a chain."""
    return owner_of((*chain.columns, *chain.rows))


def owner_of(paths: Iterable[str]) -> str:
    """The path of the smallest module that holds what is at `paths`."""
    owners = [path.split(".")[:-1] for path in paths]
    same = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*owners, strict=False))
    return ".".join(names[0] for names in same)


def attributes(layer: Layer, chain: Chain, config: bool = False) -> Iterator[tuple[str, str, int]]:
    """The whole numbers that the modules of a chain hold: module, name, value; of plain linears none. `config`: theirs
    too.
    """
    yield from _config_counts(layer, chain) if config else ()
    top = around(layer, chain)
    inner = layer.module.get_submodule(top)
    for name, module in inner.named_modules():
        path = ".".join(part for part in (top, name) if part)
        if path in layer.shapes or isinstance(module, (nn.Embedding, nn.LayerNorm)):
            continue
        for key, value in vars(module).items():
            if isinstance(value, int) and not isinstance(value, bool) and not key.startswith("_"):
                yield path, key, value


def _config_counts(layer: Layer, chain: Chain) -> Iterator[tuple[str, str, int]]:
    """The head counts of the configs that the modules of a chain hold."""
    top = around(layer, chain)
    for name, module in layer.module.get_submodule(top).named_modules():
        for key in (*_HEAD_KEYS, *_KV_KEYS):
            value = getattr(vars(module).get("config"), key, None)
            if isinstance(value, int):
                yield ".".join(part for part in (top, name) if part), f"config.{key}", value


def has_word(name: str, words: Iterable[str]) -> bool:
    return any(word in name.lower() for word in words)


def counts_heads(name: str) -> bool:
    return ("head" in name or name in ("h", "n_h", "nh")) and not has_word(name, WIDTH_WORDS)
