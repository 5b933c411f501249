"""Candidate interpretations of the linears of a layer without a spec; the proof picks one.

The roles are known. Unknown are how q, k and v (or gate and up) are packed in one matrix, and which attributes of the
layer count something that ranks split.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from infuse.architectures.foreign.plain import LinearShape, linear_shape
from infuse.architectures.packing import BLOCKS, FOUR_PARTS, PER_GROUP, PER_HEAD, Heads
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
    """One way to understand a chain: by attention heads, or by inner features, each treated as a head of width 1.

    `packing` applies to matrices that hold several. For gate and up (by features), BLOCKS means one after the other and
    PER_HEAD alternating rows. `widths`: attributes equal to a width are scaled to the rank's part. `config`: so are
    head counts in configs that modules hold.
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
        """Return an attribute's value on a rank with `query` and `key` heads; None if it does not change."""
        heads, of_kv = self.heads, _has_word(name, _KV_WORDS)
        if not self.by_features and _counts_heads(name):
            if value == heads.key and of_kv and "group" not in name:
                return key
            if value == heads.query and not of_kv:
                return query
        if not self.by_features and ("group" in name or "rep" in name) and value == heads.query // heads.key:
            return query // key
        if self.widths and _has_word(name, _WIDTH_WORDS):
            count = {heads.key: key, heads.query: query}.get(value // heads.width)
            return count * heads.width if count is not None and value % heads.width == 0 else None
        return None


@dataclass(frozen=True)
class LayerChain(Chain):
    """A chain with its layer, the `shapes` of the layer's linears, and the config of the enclosing model."""

    layer: nn.Module
    shapes: Mapping[str, LinearShape]
    config: Any

    @property
    def width(self) -> int:
        """Number of inputs of the row linears."""
        return self.shapes[self.rows[0]].inputs

    def interpretations(self) -> list[Interpretation]:
        """Return the interpretations that fit, most likely first; empty if none does.

        By heads if the columns output more values than the rows read; by features if each column outputs as many values
        or twice as many.
        """
        width, outputs = self.width, [self.shapes[path].outputs for path in self.columns]
        if any(self.shapes[path].inputs != width for path in self.rows):
            return []
        candidates: list[Interpretation] = []
        heads = self._heads(outputs)
        if heads is not None and sum(outputs) > width and all(_fits(heads, rows) for rows in outputs):
            packings = [BLOCKS]
            if any(_is_packed(heads, rows) for rows in outputs):
                packings.append(PER_HEAD if heads.query == heads.key else PER_GROUP)
                packings += [FOUR_PARTS] if heads.query == heads.key and heads.query % 4 == 0 else []
            follow = [(True, False), (False, False)] + [(True, True)] * any(self._config_counts())
            candidates = [
                Interpretation(heads, packing, *also) for also, packing in itertools.product(follow, packings)
            ]
        if all(rows in (width, 2 * width) for rows in outputs) and not (candidates and len(outputs) > 2):
            features = Heads(width, width, 1)
            for packing, widths in itertools.product((BLOCKS, PER_HEAD), (True, False)):
                if packing == BLOCKS or 2 * width in outputs:
                    candidates.append(Interpretation(features, packing, widths, by_features=True))
        return candidates

    def misfit(self) -> str:
        """Explain why no interpretation fits."""
        made = ", ".join(f"{path} ({self.shapes[path].outputs})" for path in self.columns)
        read = ", ".join(f"{path} ({self.shapes[path].inputs})" for path in self.rows)
        return f"the outputs of {made} are neither heads nor features of the inputs of {read}"

    def _heads(self, outputs: list[int]) -> Heads | None:
        """Infer the head counts from the modules or the config; None if neither has them."""
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
        """Yield the modules of the chain that are not plain linears, with their paths in the layer."""
        top = owner_of((*self.columns, *self.rows))
        for name, module in self.layer.get_submodule(top).named_modules(prefix=top):
            if linear_shape(module) is None:
                yield name, module

    def counts(self, config: bool = False) -> Iterator[tuple[str, str, int]]:
        """Yield the int attributes of the chain's modules (module path, name, value); with `config`, of configs too."""
        yield from self._config_counts() if config else ()
        for path, module in self.modules():
            for name, value in vars(module).items() if not isinstance(module, (nn.Embedding, nn.LayerNorm)) else ():
                if type(value) is int and not name.startswith("_"):
                    yield path, name, value

    def _config_counts(self) -> Iterator[tuple[str, str, int]]:
        """Yield the head counts of configs that modules hold."""
        for path, module in self.modules():
            for key in (*_HEAD_KEYS, *_KV_KEYS):
                if (value := _number(vars(module).get("config"), key)) is not None:
                    yield path, f"config.{key}", value


def owner_of(paths: Iterable[str]) -> str:
    """Path of the smallest module that contains everything at `paths`."""
    owners = [path.split(".")[:-1] for path in paths]
    same = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*owners, strict=False))
    return ".".join(names[0] for names in same)


def _number(config: Any, key: str) -> int | None:
    try:
        value = getattr(config, key, None)
    except Exception:  # transformers raises its own error if the value differs between layers
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
