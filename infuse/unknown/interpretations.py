"""Candidate interpretations of the linears of a layer without a spec; the proof picks one.

Roles are known. What a layer does not tell is how q, k and v (or gate and up) are packed in one matrix, and which of
its attributes count what a rank has a part of.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from infuse.architectures.packing import BLOCKS, FOUR_PARTS, PER_GROUP, PER_HEAD, Heads
from infuse.architectures.plain import LinearShape, linear_shape
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
_WIDTH_WORDS = ("dim", "size", "width", "embed", "hidden", "inner", "channels", "d_model", "d_ff")
_KV_WORDS = ("kv", "key_value")


@dataclass(frozen=True)
class Interpretation:
    """One way to understand a chain: by attention heads, or by inner features, each like a head of width 1.

    `packing` is that of matrices that are several in one; of two by features, BLOCKS is one after the other, PER_HEAD
    row by row. `widths`: attributes that equal a width are a rank's; `config`: so are the head counts of the config
    that a module holds.
    """

    heads: Heads
    packing: str
    widths: bool
    config: bool = False
    by_features: bool = False

    def __str__(self) -> str:
        heads = self.heads
        what = f"{heads.query} features" if self.by_features else f"{heads.query}/{heads.key} heads of {heads.width}"
        return f"{what}, {self.packing}{', widths' * self.widths}{', config' * self.config}"

    def own_count(self, name: str, value: int, query: int, key: int) -> int | None:
        """What an attribute is on a rank with so many query and key/value heads, None where it stays."""
        heads, of_kv = self.heads, _has_word(name, _KV_WORDS)
        if not self.by_features and _counts_heads(name):
            if value == heads.key and of_kv and "group" not in name:
                return key
            if value == heads.query and not of_kv:
                return query
        if not self.by_features and ("group" in name or "rep" in name) and value == heads.query // heads.key:
            return query // key
        if self.widths and _has_word(name, _WIDTH_WORDS):
            own = {heads.key: key, heads.query: query}.get(value // heads.width)
            return own * heads.width if own is not None and value % heads.width == 0 else None
        return None


@dataclass(frozen=True)
class LayerChain(Chain):
    """A chain in its layer, whose linears are `shapes`, and the config of the model around it."""

    layer: nn.Module
    shapes: Mapping[str, LinearShape]
    config: Any

    @property
    def width(self) -> int:
        """What the rows read."""
        return self.shapes[self.rows[0]].inputs

    @property
    def top(self) -> str:
        """The path of the smallest module that holds all linears."""
        return owner_of((*self.columns, *self.rows))

    def interpretations(self) -> list[Interpretation]:
        """By heads where the columns make more than one value for each that the rows read, by features where they make
        one or two. Likely ones first.
        """
        width, outputs = self.width, [self.shapes[path].outputs for path in self.columns]
        if any(self.shapes[path].inputs != width for path in self.rows):
            return []
        found: list[Interpretation] = []
        heads = self._heads(outputs)
        if heads is not None and sum(outputs) > width and all(_fits(heads, rows) for rows in outputs):
            packings = [BLOCKS]
            if any(_is_packed(heads, rows) for rows in outputs):
                packings.append(PER_HEAD if heads.query == heads.key else PER_GROUP)
                packings += [FOUR_PARTS] if heads.query == heads.key and heads.query % 4 == 0 else []
            follow = [(True, False), (False, False)] + [(True, True)] * any(self._config_counts())
            found = [Interpretation(heads, packing, *also) for also, packing in itertools.product(follow, packings)]
        if all(rows in (width, 2 * width) for rows in outputs) and not (found and len(outputs) > 2):
            features = Heads(width, width, 1)
            for packing, widths in itertools.product((BLOCKS, PER_HEAD), (True, False)):
                if packing == BLOCKS or 2 * width in outputs:
                    found.append(Interpretation(features, packing, widths, by_features=True))
        return found

    def misfit(self) -> str:
        """Why there is no interpretation."""
        made = ", ".join(f"{path} ({self.shapes[path].outputs})" for path in self.columns)
        read = ", ".join(f"{path} ({self.shapes[path].inputs})" for path in self.rows)
        return f"the outputs of {made} are neither heads nor features of the inputs of {read}"

    def _heads(self, outputs: list[int]) -> Heads | None:
        """The head counts, None where neither the modules nor the config tell them."""
        width, told = self.width, _number(self.config, "head_dim")
        of_model = _number(self.config, "hidden_size") or width
        counts = [n for _, name, n in self.counts() if _counts_heads(name) and not _has_word(name, _KV_WORDS)]
        of_config = [n for key in _HEAD_KEYS if (n := _number(self.config, key))]
        counts += [n for n in of_config if width == n * (told or of_model // n)]
        query = next((n for n in counts if n > 0 and width % n == 0), None)
        if query is None:
            return None
        d = width // query
        key = min(outputs) // d if len(outputs) > 2 and min(outputs) % d == 0 else query
        for rows in outputs:
            if len(outputs) == 1 and rows % d == 0 and rows > width and (rows // d - query) % 2 == 0:
                key = (rows // d - query) // 2
            elif len(outputs) == 2 and rows % (2 * d) == 0 and rows != width:
                key = rows // d // 2
        return Heads(query, key, d) if 0 < key <= query and query % key == 0 else None

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules around the chain that are no plain linears, by their paths in the layer."""
        for name, module in self.layer.get_submodule(self.top).named_modules():
            if linear_shape(module) is None:
                yield ".".join(part for part in (self.top, name) if part), module

    def counts(self, config: bool = False) -> Iterator[tuple[str, str, int]]:
        """The whole numbers that the modules around the chain hold: module, name, value. `config`: their configs' too."""
        yield from self._config_counts() if config else ()
        for path, module in self.modules():
            for name, value in vars(module).items() if not isinstance(module, (nn.Embedding, nn.LayerNorm)) else ():
                if type(value) is int and not name.startswith("_"):
                    yield path, name, value

    def _config_counts(self) -> Iterator[tuple[str, str, int]]:
        """The head counts of the configs that modules hold."""
        for path, module in self.modules():
            for key in (*_HEAD_KEYS, *_KV_KEYS):
                if (value := _number(vars(module).get("config"), key)) is not None:
                    yield path, f"config.{key}", value


def owner_of(paths: Iterable[str]) -> str:
    """The path of the smallest module that holds what is at `paths`."""
    owners = [path.split(".")[:-1] for path in paths]
    same = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*owners, strict=False))
    return ".".join(names[0] for names in same)


def _number(config: Any, key: str) -> int | None:
    try:
        value = getattr(config, key, None)
    except Exception:  # transformers raises an error of its own where layers differ in it
        return None
    return value if isinstance(value, int) else None


def _fits(heads: Heads, rows: int) -> bool:
    return rows == heads.key * heads.width or rows % heads.query == 0 or _is_packed(heads, rows)


def _is_packed(heads: Heads, rows: int) -> bool:
    return rows in (heads.rows, 2 * heads.key * heads.width)


def _has_word(name: str, words: Iterable[str]) -> bool:
    return any(word in name.lower() for word in words)


def _counts_heads(name: str) -> bool:
    return ("head" in name or name in ("h", "n_h", "nh")) and not _has_word(name, _WIDTH_WORDS)
