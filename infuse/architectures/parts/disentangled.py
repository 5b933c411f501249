"""Scores by distance, disentangled from those by content (He et al. 2021), beside those of a layer's attention."""

from __future__ import annotations

from dataclasses import dataclass

from infuse.architectures.bind import Binder


@dataclass(frozen=True)
class Disentangled:
    """Scores of queries with keys of distances, and of keys with queries of distances (He et al. 2021, section 3).

    The layer is called with `relative_pos`, the bucket of each distance [1, T, T], and `rel_embeddings`, a vector for
    each bucket. `keys` and `queries` are the paths of the linears that make a distance's key and query of its vector,
    unless the attention shares those of the tokens. See DisentangledShape.
    """

    keys: str
    queries: str

    def bind(self, binder: Binder, name: str, attention: str) -> DisentangledShape:
        """Bind to the settings of the module at the path `attention`."""
        types = binder.attribute(attention, "pos_att_type") or ()
        terms = 1 + ("c2p" in types) + ("p2c" in types)
        if not binder.attribute(attention, "relative_attention"):
            return DisentangledShape(False, False, 1, False, None, None, terms)
        span, shared = binder.attribute(attention, "pos_ebd_size"), binder.attribute(attention, "share_att_key")
        if not isinstance(span, int) or span < 1:
            binder.differ(f"{attention}.pos_ebd_size is {span!r}, not a number of buckets")
        bias: dict[str, bool | None] = {}
        for kind, target, path in (("c2p", "pos_key", self.keys), ("p2c", "pos_query", self.queries)):
            linear = None if shared or kind not in types else binder.linear(path)
            if linear is not None:
                binder.fill_linear(f"{name}.{target}", (path,), linear.bias)
            bias[target] = None if linear is None else linear.bias
        by_key, by_query = "c2p" in types, "p2c" in types
        return DisentangledShape(by_key, by_query, span, bool(shared), bias["pos_key"], bias["pos_query"], terms)


@dataclass(frozen=True)
class DisentangledShape:
    """A bound Disentangled. `by_key`, `by_query`: whether there are keys and queries of distances.

    `span`: half the number of buckets. `is_shared`: the linears of the tokens make them. `key_bias`, `query_bias`:
    whether the linears of their own have a bias; None without one. `terms`: how many the scale counts.
    """

    by_key: bool
    by_query: bool
    span: int
    is_shared: bool
    key_bias: bool | None
    query_bias: bool | None
    terms: int

    values = ("relative_pos", "rel_embeddings")
