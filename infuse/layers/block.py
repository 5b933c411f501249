"""A transformer layer as one module, which runs a program (layers/program.py).

Positions, mask and cache are the model's own: the block uses what the model passes and derives none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from infuse import ops
from infuse.architectures.attention import Alibi, RelativeBias
from infuse.architectures.layer import BIASED, PARALLEL, TUPLE, LayerShape
from infuse.architectures.program import ADD_NORM, ADD_NORM_STREAM, Program, folded, merged, program_of
from infuse.errors import UnsupportedCall
from infuse.layers import autocast
from infuse.layers.attention import Attention
from infuse.layers.cache import KVCache, self_attention_cache
from infuse.layers.contract import NEUTRAL, SERVED, check_mask, named
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.inputs import Inputs, Packed
from infuse.layers.linear import all_are_heard, fuses, untouched
from infuse.layers.mlp import MLP
from infuse.layers.moe import MoE
from infuse.layers.named_attention import arguments_of_named, names_ours
from infuse.layers.norm import Norm
from infuse.layers.one_call import make_one_call
from infuse.layers.parts import make_part
from infuse.layers.position import LearnedBias
from infuse.layers.program import run
from infuse.layers.recorders import is_heard
from infuse.layers.surroundings import Surroundings
from infuse.parallel.group import LOCAL, Group

# Share of padding from which it is skipped: gathering and scattering tokens costs 1 to 2 % of a small encoder's layer.
LEAST_PADDING = 1 / 16
_FUSED = (MLP, MoE)  # parts that take norm and residual


def block_ops(shape: LayerShape) -> tuple[str, ...]:
    """Return the names of the ops that a block of this shape calls, except those of its linears."""
    fused = any(step.does in (ADD_NORM, ADD_NORM_STREAM) for step in merged(program_of(shape)))
    alone = [name for norm in (shape.norm1, shape.norm2, shape.post1, shape.post2) if norm for name in norm.ops]
    norms = [each for name in alone for each in ((name, f"add_{name}") if fused else (name,))]
    return tuple(dict.fromkeys((*norms, *shape.attn.ops, *shape.mlp.ops)))


class Block(InferenceModule):
    """A layer built on meta from a LayerShape. `weights.fill` fills in its weights."""

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
        all_ranks, group = group, group.dense
        self.reduce = group.adds(f"{path}: attention and MLP")
        of_attention, of_mlp = None, None
        if group.size > 1 and shape.residual != PARALLEL:  # PARALLEL reduces both branches at once
            of_attention, of_mlp = group.adds(f"{path}.{shape.attn.name}"), group.adds(f"{path}.mlp")
        if shape.mlp.expert_count and all_ranks.size > 1 and shape.residual != PARALLEL:
            of_mlp = all_ranks.adds(f"{path}.mlp")
        for name in ("norm1", "norm2", "post1", "post2"):
            norm = getattr(shape, name)
            self.add_module(name, None if norm is None else Norm(norm, bodies))
        self._attention_name = name = shape.attn.name
        self.add_module(name, make_part(shape.attn, Surroundings(name, formats, bodies, group, of_attention, index)))
        self.mlp = make_part(shape.mlp, Surroundings("mlp", formats, bodies, group, of_mlp, index))
        program = program_of(shape, group.size)
        self._program = merged(program)
        self._of_few: Program | None = None
        if type(self.mlp) in _FUSED and fuses(bodies):
            self._of_few = merged(folded(program))
            norms = [step.norm for step in self._of_few if step.norm]
            self._passed_by = {"mlp", *(norm for norm in norms if norms.count(norm) > 1)}
        self._one_call = make_one_call(self, self._program, bodies, index)
        self._heads = shape.attn.all_heads
        position = shape.attn.position
        self._bias_argument = position.argument if isinstance(position, (Alibi, RelativeBias)) else None
        self._index, self._layer = index, layer
        self._served = SERVED | NEUTRAL | {*shape.repeated, *filter(None, (self._bias_argument,))}

    def ignore(self, keywords: frozenset[str]) -> None:
        """Take these keywords, too, which the original ignores."""
        self._served |= keywords

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take and return what the original layer does; `hidden_states` [B, T, C].

        Raise UnsupportedCall for arguments, caches and masks that the block does not support.
        """
        if hidden_states.dim() != 3:
            raise UnsupportedCall(f"{self._layer} was given {[*hidden_states.shape]}, not [batch, tokens, width]")
        if autocast.is_any_on() and autocast.is_left_out(self, hidden_states):
            return autocast.without(Block.forward, self, hidden_states, *args, **kwargs)
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
        bias = given(self._bias_argument) if self._bias_argument else None
        positions = attention._modules.get("positions")  # a user's own attention has none
        if bias is None and isinstance(positions, LearnedBias):
            bias = positions(hidden_states)
            more = None if more is None else {**more, "position_bias": bias}
        inputs = Inputs(  # positional arguments are faster here
            mask,
            cache,
            given("position_embeddings"),
            given("position_ids"),
            bias,
            given("is_causal"),
            bool(given("output_attentions")) or _weights_are_recorded(attention),
            self._heads,
            None,
            more,
        )
        packed = None
        # A traced graph needs the parts as separate ops and must not depend on a mask's values.
        if more is None and not is_compiling():
            if self._skips_padding:
                packed = real_tokens(inputs.mask, self.shape.attn.inverted_mask, hidden_states)
            if packed is None and self._one_call is not None:
                out = self._one_call(self, attention, hidden_states, inputs)
                if out is not None:
                    return self._returned(out, None, bias)
        x = hidden_states
        if packed is not None:
            x, inputs = packed.taken(x), inputs._replace(packed=packed)
        out, weights = run(self._chosen(attention, x), self, attention, x, inputs)
        if packed is not None:
            out = packed.spread(out)
        return self._returned(out, weights, bias)

    def _returned(self, out: Tensor, weights: Tensor | None, bias: Tensor | None) -> Any:
        """What the original returns: BIASED hands its bias on to the next layer, and has no cross attention."""
        returns = self.shape.returns
        if returns == BIASED:
            return out, bias, None
        return (out, weights) if returns == TUPLE else out

    def _chosen(self, attention: nn.Module, x: Tensor) -> Program:
        """Choose the folded program for few tokens, unless a module that it bypasses has hooks."""
        few, parts = self._of_few, self._modules
        if few is None or x.numel() > ops.FEW_ROWS * x.shape[-1] or all_are_heard():
            return self._program
        if type(attention).forward is not Attention.forward or type(parts["mlp"]) not in _FUSED:
            return self._program
        passed_by: Any = (attention, *(parts[name] for name in self._passed_by))
        return few if all(map(untouched, passed_by)) else self._program


def real_tokens(mask: Tensor | None, inverted: bool, hidden_BTC: Tensor) -> Packed | None:
    """Find the tokens that all tokens attend to, and the first of each row, which poolers read.

    Return None if too few of the others are padding (LEAST_PADDING), if the mask hides more than padding, and on
    devices other than CPUs, because counting would make the host wait there.
    """
    batch, tokens, _ = hidden_BTC.shape
    if mask is None or mask.device.type != "cpu" or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[-1] != tokens:
        return None
    of_all = mask[:, :, :1]
    # Rows of the mask that differ hide more than padding.
    if mask.stride(-2) != 0 and not torch.equal(mask, of_all.expand_as(mask)):
        return None
    seen_BL = (of_all ^ inverted if mask.dtype == torch.bool else of_all > torch.finfo(mask.dtype).min / 2)[:, 0, 0]
    real_BT = seen_BL.expand(batch, tokens).clone()
    real_BT[:, :1] = True
    rows = real_BT.view(-1).nonzero()[:, 0]
    enough = rows.shape[0] <= batch * tokens * (1 - LEAST_PADDING)
    return Packed(rows, batch, tokens) if enough else None


def _weights_are_recorded(attention: nn.Module) -> bool:
    """Whether a hook may read attention weights, which eager attention returns even without output_attentions."""
    return is_heard(attention) and getattr(getattr(attention, "config", None), "_attn_implementation", None) == "eager"
