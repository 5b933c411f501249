"""The parts of a transformer layer in the words of its checkpoint, and the numbers that they come to.

A `LayerSpec` declares what is *meant* (which norm, which residual shape, which packing); `bind` in `spec/bind.py`
reads what is *found* (biases, widths, a qk-norm, eps) and makes a `LayerShape`. Data only: no tensors, picklable.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from infuse.architectures.packing import BLOCKS

RMS, LAYER = "rms", "layer"

# Residual shapes, drawn in layers/block.py.
PRE, POST, PARALLEL, SANDWICH = "pre", "post", "parallel", "sandwich"

TENSOR, TUPLE = "tensor", "tuple"  # what the layer's forward returns


# --- what is declared ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """A norm at `path`. `offset` is added to its weight (Gemma, LayerNorm1P). A `*` in the path: one norm for each
    head.
    """

    path: str
    kind: str
    offset: float = 0.0


@dataclass(frozen=True)
class Separate:
    """Query, key and value each in a linear of its own."""

    q: str
    k: str
    v: str


@dataclass(frozen=True)
class Packed:
    """Query, key and value in one linear, in the order of `packing`."""

    path: str
    packing: str = BLOCKS


@dataclass(frozen=True)
class NoPosition:
    """Positions are in the embeddings, or nowhere."""


@dataclass(frozen=True)
class Rotary:
    """The model passes `position_embeddings=(cos, sin)`. `switch`: a config list that says for each layer if it
    rotates.
    """

    interleaved: bool = False
    switch: str | None = None


@dataclass(frozen=True)
class RotaryTable:
    """The layer owns a buffer [positions, sin | cos] and looks its rows up by the `position_ids` that it is passed."""

    buffer: str


@dataclass(frozen=True)
class Alibi:
    """The model passes a bias as the keyword `argument`: [B H, 1, L], or [H, 1, S] of which the last L columns count."""

    argument: str


Position = NoPosition | Rotary | RotaryTable | Alibi


@dataclass(frozen=True)
class Window:
    """Layers whose entry in the config list `types` is `value` see `size` (a config key) tokens, and the mask does not
    say so.
    """

    types: str
    value: str
    size: str


@dataclass(frozen=True)
class Attention:
    """Self-attention. `module` is the attention module (transformers records attentions by its class).

    `kv_heads`: a config key, a number, or None for as many as query heads. `scale`: an attribute of `module`, a number,
    or None for 1/sqrt(head width). `softcap` and `clip`: attributes of `module`. `inverted_mask`: True in the mask
    hides.
    `passes`: pairs of a keyword that the module passes to its attention function, and the attribute (or config key)
    that it passes.
    """

    module: str
    qkv: Separate | Packed
    out: str
    position: Position = NoPosition()
    kv_heads: str | int | None = None
    heads: str = "num_attention_heads"
    scale: str | float | None = "scaling"
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    softcap: str | None = None
    clip: str | None = None
    window: Window | None = None
    causal: bool = True
    inverted_mask: bool = False
    passes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Act:
    """An activation by its own name, where no config key names it."""

    name: str


@dataclass(frozen=True)
class MLP:
    """down(act(up(x)))."""

    up: str
    down: str
    activation: str | Act = "hidden_act"


@dataclass(frozen=True)
class GatedMLP:
    """down(act(gate(x)) * up(x))."""

    gate: str
    up: str
    down: str
    activation: str | Act = "hidden_act"


@dataclass(frozen=True)
class PackedGatedMLP:
    """The same with [gate | up] in one linear."""

    gate_up: str
    down: str
    activation: str | Act = "hidden_act"


@dataclass(frozen=True)
class LayerSpec:
    """A transformer layer. `when` chooses among specs of one class by config values; `expect` are values that must
    hold.

    `norm1` and `norm2` stand before (PRE, PARALLEL) or after (POST) attention and MLP; SANDWICH has `post1` and `post2`
    on the outputs as well. PARALLEL without `norm2` feeds both from `norm1`. `repeated` are arguments that say again
    what the mask says.
    """

    layer: str
    attn: Attention
    mlp: MLP | GatedMLP | PackedGatedMLP
    norm1: Norm | None = None
    norm2: Norm | None = None
    post1: Norm | None = None
    post2: Norm | None = None
    residual: str = PRE
    residual_scale: str | None = None
    transposed: bool = False
    returns: str = TENSOR
    when: tuple[tuple[str, Any], ...] = ()
    expect: tuple[tuple[str, Any], ...] = ()
    repeated: tuple[str, ...] = ()

    def but(self, **changes: Any) -> LayerSpec:
        """A variant; a dict for `attn` or `mlp` changes those fields of the part."""
        for name in ("attn", "mlp"):
            if isinstance(changes.get(name), dict):
                changes[name] = replace(getattr(self, name), **changes[name])
        return replace(self, **changes)


# --- what it comes to ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormShape:
    """`weight` is the shape of the weight, None without one.

    A norm over all heads that ranks share goes over `whole` values (0: one rank has them all); as many ranks have the
    same of them as `copies` says.
    """

    kind: str
    width: int
    eps: float
    offset: float
    weight: tuple[int, ...] | None
    bias: bool
    whole: int = 0
    copies: int = 1


@dataclass(frozen=True)
class AttentionShape:
    """Numbers of one attention. `argument` is the keyword that carries an ALiBi bias; `name` the child's name in the
    block.

    Where ranks share it, these are one rank's: its query heads begin at `first_head`, and `head_counts` are those of
    all ranks.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    qkv_bias: bool
    out_bias: bool
    position: Position
    scale: float
    softcap: float
    clip: float
    window: int
    causal: bool
    inverted_mask: bool
    q_norm: NormShape | None
    k_norm: NormShape | None
    first_head: int = 0
    head_counts: tuple[int, ...] = ()
    passes: tuple[tuple[str, str], ...] = field(
        default=(), repr=False
    )  # not in the fingerprint of shards: it moves no weight

    @property
    def all_heads(self) -> int:
        return sum(self.head_counts) or self.heads


@dataclass(frozen=True)
class MLPShape:
    """Numbers of one MLP; `gated` has [gate | up] merged into its first linear."""

    hidden: int
    inner: int
    gated: bool
    activation: str
    in_bias: bool
    out_bias: bool


@dataclass(frozen=True)
class LayerShape:
    """All that a block is built from. `arguments` are the layer's positional arguments after the hidden states,
    `repeated` those that say nothing new.
    """

    attn: AttentionShape
    mlp: MLPShape
    norm1: NormShape | None
    norm2: NormShape | None
    post1: NormShape | None
    post2: NormShape | None
    residual: str
    residual_scale: float
    returns: str
    arguments: tuple[str, ...]
    repeated: tuple[str, ...] = ()
