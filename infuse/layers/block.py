"""A transformer layer as one module. It consumes what the model passes to it: positions, mask and cache are the
model's.

PRE                POST               PARALLEL             SANDWICH
x ----+            x ----+            x --+------+----+    x ----+
norm1 |            attn  |            norm1    norm2  |    norm1 |        (PARALLEL without norm2 feeds
attn  |              + --+            attn      mlp   |    attn  |         both from norm1; SANDWICH may
  + --+            norm1               +---------+----+    post1 |         lack norm1 and norm2)
x ----+            x ----+                                   + --+
norm2 |            mlp   |                                 x ----+
mlp   |              + --+                                 norm2, mlp, post2 likewise
  + --+            norm2

Where a body fuses, few tokens take each norm into the product after it and each sum into the product before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from infuse import ops
from infuse.architectures.layer import PARALLEL, POST, PRE, SANDWICH, TUPLE, Alibi, LayerShape
from infuse.layers.attention import Attention
from infuse.layers.cache import KVCache, self_attention_cache
from infuse.layers.combine import Sum
from infuse.layers.contract import NEUTRAL, SERVED, check_mask, named
from infuse.layers.encoder_call import make_encoder_call
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.inputs import Inputs, Packed
from infuse.layers.linear import all_are_heard, direct, fuses, untouched
from infuse.layers.mlp import MLP
from infuse.layers.named_attention import arguments_of_named, names_ours
from infuse.layers.norm import Norm
from infuse.layers.one_call import make_one_call
from infuse.layers.parts import make_part
from infuse.layers.surroundings import Surroundings
from infuse.parallel.group import LOCAL, Group

# Taking the tokens out and putting them back costs 1 to 2 % of a small encoder's layer.
LEAST_PADDING = 1 / 16


def block_ops(shape: LayerShape) -> tuple[str, ...]:
    """The names of the ops that a block of this shape calls, its linears aside."""
    fused = shape.residual in (PRE, POST) and shape.residual_scale == 1.0
    alone = [name for norm in (shape.norm1, shape.norm2, shape.post1, shape.post2) if norm for name in norm.ops]
    norms = [each for name in alone for each in ((name, f"add_{name}") if fused else (name,))]
    return tuple(dict.fromkeys((*norms, *shape.attn.ops, *shape.mlp.ops)))


class Block(InferenceModule):
    """Built on meta from a LayerShape; weights are filled in by `weights.fill`."""

    def __init__(
        self,
        shape: LayerShape,
        index: int | None,
        formats: Mapping[str, str],
        bodies: Mapping[str, str],
        group: Group = LOCAL,
        path: str = "",
        layer: str = "the layer",
        *,
        skips_padding: bool = False,
    ):
        super().__init__()
        self.shape, self._skips_padding = shape, skips_padding and not shape.attn.causal
        self._sum = Sum(group, f"{path}: attention and MLP")
        of_attention, of_mlp = None, None
        if group.size > 1 and shape.residual != PARALLEL:  # there both are added up at once
            of_attention, of_mlp = Sum(group, f"{path}.{shape.attn.name}"), Sum(group, f"{path}.mlp")
        for name in ("norm1", "norm2", "post1", "post2"):
            norm = getattr(shape, name)
            self.add_module(name, None if norm is None else Norm(norm, bodies))
        self._attention_name = shape.attn.name
        name = shape.attn.name
        attention: Any = make_part(shape.attn, Surroundings(name, formats, bodies, group, of_attention, index))
        self.add_module(name, attention)
        self.mlp = make_part(shape.mlp, Surroundings("mlp", formats, bodies, group, of_mlp, index))
        self._run = _fused if fuses(bodies) and shape.residual in _FUSED else _RESIDUALS[shape.residual]
        self._one_call = make_one_call(shape, formats, index, bodies, attention.positions.interleaved)
        self._encoder_call = make_encoder_call(shape, formats, bodies)
        self._heads = shape.attn.all_heads
        self._bias_argument = shape.attn.position.argument if isinstance(shape.attn.position, Alibi) else None
        self._index, self._layer = index, layer
        self._served = (
            SERVED | NEUTRAL | set(shape.repeated) | ({self._bias_argument} if self._bias_argument else set())
        )

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's own signature and result; `hidden_states` [B, T, C]. UnsupportedCall for what it does not serve."""
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            return unrecorded(Block.forward, self, hidden_states, *args, **kwargs)
        if args:
            kwargs = named(self.shape.arguments, args, kwargs, self._layer)
        attention = self._modules[self._attention_name]
        assert attention is not None
        more = None
        if not (kwargs.keys() <= self._served and names_ours(attention)):
            more = arguments_of_named(attention, kwargs, self._served, self.shape.arguments, self._layer)
        given = kwargs.get
        cache = given("past_key_values")
        if cache is None:
            cache = given("layer_past")
        if cache is not None and (self._index is None or not isinstance(cache, KVCache)):
            cache = self_attention_cache(cache, self._layer, self._index)
        mask = given("attention_mask")
        if mask is not None and more is None:
            check_mask(mask, self._layer)
        inputs = Inputs(  # by position, which is the quicker way
            mask,
            cache,
            given("position_embeddings"),
            given("position_ids"),
            given(self._bias_argument) if self._bias_argument else None,
            given("is_causal"),
            bool(given("output_attentions")) or _weights_are_recorded(attention),
            self._heads,
            None,
            more,
        )
        if is_compiling():  # graphs have the parts as ops, and nothing that depends on the values in a mask
            result = self._run(self, attention, hidden_states, inputs)
            return result if self.shape.returns == TUPLE else result[0]
        ours = more is None
        if (
            ours
            and self._one_call is not None
            and (out := self._one_call(self, attention, hidden_states, inputs)) is not None
        ):
            return (out, None) if self.shape.returns == TUPLE else out
        skips = ours and self._skips_padding
        packed = real_tokens(inputs.mask, self.shape.attn.inverted_mask, hidden_states) if skips else None
        if packed is None and ours and self._encoder_call is not None:
            out = self._encoder_call(self, attention, hidden_states, inputs)
            if out is not None:
                return (out, None) if self.shape.returns == TUPLE else out
        if packed is None:
            out, weights = self._run(self, attention, hidden_states, inputs)
        else:
            out, weights = self._run(self, attention, packed.taken(hidden_states), inputs._replace(packed=packed))
            out = packed.spread(out)
        return (out, weights) if self.shape.returns == TUPLE else out


def real_tokens(mask: Tensor | None, inverted: bool, hidden_BTC: Tensor) -> Packed | None:
    """The tokens that all tokens look at, where enough of the others are padding; the first of each row too, which
    poolers take.

    On CPUs alone: elsewhere counting them makes the host wait.
    """
    batch, tokens, _ = hidden_BTC.shape
    if mask is None or mask.device.type != "cpu" or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[-1] != tokens:
        return None
    of_all = mask[:, :, :1]
    if mask.stride(-2) != 0 and not torch.equal(
        mask, of_all.expand_as(mask)
    ):  # tokens see different ones: no mask of padding alone
        return None
    seen_BL = (of_all ^ inverted if mask.dtype == torch.bool else of_all > torch.finfo(mask.dtype).min / 2)[:, 0, 0]
    real_BT = seen_BL.expand(batch, tokens).clone()
    real_BT[:, :1] = True
    rows = real_BT.view(-1).nonzero()[:, 0]
    enough = rows.shape[0] <= batch * tokens * (1 - LEAST_PADDING)
    return Packed(rows, batch, tokens) if enough else None


def _weights_are_recorded(attention: nn.Module) -> bool:
    """Whether a hook may take the weights that transformers' eager attention always returns: some models ask their
    layers for none.
    """
    return (
        bool(attention._forward_hooks)
        and getattr(getattr(attention, "config", None), "_attn_implementation", None) == "eager"
    )


# The residual shapes read their parts from `_modules`: attribute access on an nn.Module costs 0.7 us each time.
Parts = dict[str, Any]
_Result = tuple[Tensor, Tensor | None]


def _pre(block: Block, attention: nn.Module, x: Tensor, inputs: Inputs) -> _Result:
    parts: Parts = block._modules
    scale = block.shape.residual_scale
    branch, weights = attention(_normed(parts["norm1"], x), inputs)
    norm2, mlp = parts["norm2"], parts["mlp"]
    if scale != 1.0 or norm2 is None:
        x = x + branch * scale
        return x + direct(mlp, _normed(norm2, x)) * scale, weights
    x, normed = _added(norm2, branch, x)
    return x + direct(mlp, normed), weights


def _post(block: Block, attention: nn.Module, x: Tensor, inputs: Inputs) -> _Result:
    parts: Parts = block._modules
    branch, weights = attention(x, inputs)
    _, x = _added(parts["norm1"], branch, x)
    _, x = _added(parts["norm2"], direct(parts["mlp"], x), x)
    return x, weights


def _parallel(block: Block, attention: nn.Module, x: Tensor, inputs: Inputs) -> _Result:
    parts: Parts = block._modules
    normed = _normed(parts["norm1"], x)
    branch, weights = attention(normed, inputs)
    other = direct(parts["mlp"], normed if parts["norm2"] is None else direct(parts["norm2"], x))
    return block._sum(branch + other) + x, weights


def _sandwich(block: Block, attention: nn.Module, x: Tensor, inputs: Inputs) -> _Result:
    parts: Parts = block._modules
    branch, weights = attention(_normed(parts["norm1"], x), inputs)
    x = x + direct(parts["post1"], branch)
    branch = direct(parts["mlp"], _normed(parts["norm2"], x))
    return x + direct(parts["post2"], branch), weights


def _added(norm: nn.Module, branch: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The sum and its norm, in one pass where nobody listens to the norm."""
    if type(norm) is Norm and untouched(norm):
        return norm.add(branch, x)
    x = x + branch
    return x, norm(x)


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else direct(norm, x)


_RESIDUALS: Mapping[str, Callable[[Block, nn.Module, Tensor, Inputs], _Result]] = MappingProxyType(
    {PRE: _pre, POST: _post, PARALLEL: _parallel, SANDWICH: _sandwich}
)


# ---- the same with norms in the products after them, and sums in the products before them


def _fused(block: Block, attention: nn.Module, x: Tensor, inputs: Inputs) -> _Result:
    """Fused for few tokens and while nothing listens to attention, MLP and a norm that both read."""
    parts: Parts = block._modules
    kind, mlp = block.shape.residual, parts["mlp"]
    ours = type(attention).forward is Attention.forward and type(mlp) is MLP and untouched(attention) and untouched(mlp)
    shared = parts["norm1"] if kind == PARALLEL and parts["norm2"] is None else None
    few = (
        ours
        and not all_are_heard()
        and x.numel() <= ops.FEW_ROWS * x.shape[-1]
        and (shared is None or untouched(shared))
    )
    return (_FUSED if few else _RESIDUALS)[kind](block, attention, x, inputs)


def _fused_pre(block: Block, attention: nn.Module, x: Tensor, inputs: Inputs) -> _Result:
    parts: Parts = block._modules
    scale = block.shape.residual_scale
    if scale == 1.0:
        x, weights = attention.forward(x, inputs, parts["norm1"], x)
        return parts["mlp"].fused(x, parts["norm2"], x), weights
    branch, weights = attention.forward(x, inputs, parts["norm1"])
    x = x + branch * scale
    return x + parts["mlp"].fused(x, parts["norm2"], None) * scale, weights


def _fused_parallel(block: Block, attention: nn.Module, x: Tensor, inputs: Inputs) -> _Result:
    parts: Parts = block._modules
    alone = block._sum.group.size == 1  # ranks add up both branches before x
    total, weights = attention.forward(x, inputs, parts["norm1"], x if alone else None)
    total = parts["mlp"].fused(x, parts["norm2"] or parts["norm1"], total)
    return total if alone else block._sum(total) + x, weights


def _fused_sandwich(block: Block, attention: nn.Module, x: Tensor, inputs: Inputs) -> _Result:
    parts: Parts = block._modules
    branch, weights = attention.forward(x, inputs, parts["norm1"])
    x = x + direct(parts["post1"], branch)
    return x + direct(parts["post2"], parts["mlp"].fused(x, parts["norm2"], None)), weights


_FUSED: Mapping[str, Callable[[Block, nn.Module, Tensor, Inputs], _Result]] = MappingProxyType(
    {
        PRE: _fused_pre,
        PARALLEL: _fused_parallel,
        SANDWICH: _fused_sandwich,
    }  # of POST a norm reads the sum: there is nothing to fuse
)
