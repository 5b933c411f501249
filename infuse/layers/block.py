"""A transformer layer as one module, which runs a program (layers/program.py).

Positions, mask and cache are the model's own: the block uses what the model passes and derives none of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.architectures.inner_call import BIAS, InnerCall
from infuse.architectures.layer import BIASED, LISTED, NOTHING_UNREAD, READING, SINGLE, TUPLE, LayerShape, Unread
from infuse.architectures.packing import Part
from infuse.architectures.program import MLP as MLP_STEP
from infuse.architectures.program import NORM_OF_WIDE, folded, merged, on_ranks, reduces, without_branch
from infuse.cache.kv_cache import KVCache, keys_in, pair_of, reads_keywords, self_attention_cache
from infuse.ground.cache_names import CACHE_NAMES, cache_in
from infuse.ground.errors import UnsupportedCall
from infuse.ground.modes import Operations, has_address, is_traced
from infuse.layers.attention.named_attention import arguments_of_named, is_paged, names_ours, paged_cache
from infuse.layers.attention.position import LearnedBias, PassedCosSin, missing
from infuse.layers.attention.self_attention import Attention
from infuse.layers.build_context import BuildContext
from infuse.layers.calls import autocast
from infuse.layers.calls.called_part import CalledPart, has_listeners
from infuse.layers.calls.contract import NEUTRAL, SERVED, check_mask, named, refuse_arguments, unserved
from infuse.layers.calls.inputs import Inputs, Packed
from infuse.layers.calls.recorders import has_active_hooks
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.linear import fuses, has_global_hooks, has_no_hooks
from infuse.layers.mixer import Mixer
from infuse.layers.mixture.moe import MoE
from infuse.layers.mlp import MLP
from infuse.layers.native.one_call import make_one_call
from infuse.layers.parts import make_part
from infuse.layers.program import Run, compiled, run
from infuse.parallel.group import LOCAL, Group

# Share of padding from which it is skipped: gathering and scattering tokens costs 1 to 2 % of a small encoder's layer.
LEAST_PADDING = 1 / 16
_FUSED = (MLP, MoE)  # parts that take norm and residual
_OF_ONE_TEXT = frozenset({"attention_mask", "is_causal", *CACHE_NAMES})  # what layers of several texts do not take
_NO_VALUES: Mapping[str, Any] = MappingProxyType({})


class Block(InferenceModule):
    """A layer built on meta from a LayerShape. `weights.fill` fills in its weights."""

    _calls: Mapping[str, InnerCall | None] = MappingProxyType({})

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
        apart: Mapping[str, tuple[Part, ...]] = MappingProxyType({}),
        ordered: frozenset[str] = frozenset(),
    ):
        super().__init__()
        self.shape = shape
        self._skips_padding = skips_padding and not shape.whole_rows
        self.reduce = group.dense.adds(f"{path}: attention and MLP")
        for name, part in shape.held:
            ranks = group if part.expert_count else group.dense
            adds = part.matrices and not reduces(shape.program)  # else the block adds up all branches at once
            combine = ranks.adds(f"{path}.{name}") if adds and ranks.size > 1 else None
            context = BuildContext(name, formats, bodies, group.dense, combine, index, apart=apart, ordered=ordered)
            self.add_module(name, make_part(part, context))
        program = on_ranks(shape.program, group.dense.size)
        self._program = merged(program)
        self._steps = compiled(self._program, self.reduce)
        self._steps_of_few: tuple[Run, ...] | None = None
        readers = [name for name, mixer in shape.mixers.items() if mixer.reads_states and not mixer.merges]
        self._states = next((step.over for step in program if step.part in readers), "")
        self._steps_without_states: tuple[Run, ...] = ()
        for name in readers:
            self._steps_without_states = compiled(merged(without_branch(program, name)), self.reduce)
        self._mixers = tuple(shape.mixers)
        self._products = tuple(step.part for step in program if step.does == MLP_STEP)
        parts: dict[str, Any] = self._modules
        takes_norms = all(type(parts[name]) is Attention for name in self._mixers)
        takes_norms = takes_norms and all(type(parts[name]) in _FUSED for name in self._products)
        takes_norms = takes_norms and not any(step.over or step.does == NORM_OF_WIDE for step in program)
        if fuses(bodies) and takes_norms:
            of_few = merged(folded(program))
            norms = [step.norm for step in of_few if step.norm]
            self._steps_of_few = compiled(of_few, self.reduce)
            self._passed_by = {*self._mixers, *self._products, *(norm for norm in norms if norms.count(norm) > 1)}
            computing = [*product(self._mixers, ("forward", "mix")), *((name, "forward") for name in self._products)]
            self._computations = [(name, how, getattr(type(parts[name]), how)) for name, how in computing]
        self._one_call, self._runs_in_parts = make_one_call(self, self._program, bodies, index)
        mixers = shape.mixers.values()
        self._heads = max((mixer.all_heads for mixer in mixers), default=1)
        self._inverted_mask = any(mixer.inverted_mask for mixer in mixers)
        self._takes_scores_mask = all(mixer.takes_scores_mask or mixer.mask_argument for mixer in mixers)
        self._mask_of_numbers = any(mixer.mask_of_numbers for mixer in mixers)
        self._bias_argument = next((mixer.bias_argument for mixer in mixers if mixer.bias_argument), None)
        self._index, self._layer, self._values = index, layer, shape.call.values
        self._cuts_mask = shape.call.cuts_mask
        self._may_be_asked = "output_attentions" in shape.call.arguments
        self._returns_weights = shape.call.returns == TUPLE and not self._may_be_asked
        self._served = SERVED | NEUTRAL | {*shape.call.repeated, *shape.call.values, *shape.call.unread}
        self._served |= {*filter(None, (self._bias_argument, shape.call.ends))}
        self._unread = NOTHING_UNREAD

    def extra_repr(self) -> str:
        return f"part by part: {self._runs_in_parts}" if self._runs_in_parts else ""

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The parts, attentions under the paths that they had in the layer: transformers' recorders look there."""
        paths = {name: mixer.replaces[0] for name, mixer in self.shape.mixers.items() if mixer.replaces}
        for name, part in super().named_children():
            yield paths.get(name, name), part

    def __deepcopy__(self, memo: dict[int, Any]) -> Block:
        """Copy. The copy of a layer alone, not of its model, is another layer to a cache."""
        is_alone = not memo
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(vars(self), memo))
        for part in made.modules() if is_alone else ():
            if isinstance(part, Mixer):
                part.filler = replace(part.filler, layer=f"a copy of {part.filler.layer or self._layer}")
        return made

    def ignore(self, unread: Unread) -> None:
        """Take these keywords, too, which the original never reads."""
        self._unread = unread

    def ignores(self, name: str, value: Any) -> bool:
        """Whether this value of a keyword changes nothing that the block computes."""
        return value is None or name in NEUTRAL or name.startswith("output_") or name in self._unread

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take and return what the original layer does; `hidden_states` [B, T, C], or [tokens of all texts, C].

        Raise UnsupportedCall for arguments, caches and masks that the block does not support.
        """
        ends = self.shape.call.ends
        if hidden_states.dim() != (2 if ends else 3):
            wanted = "[tokens, width]" if ends else "[batch, tokens, width]"
            raise UnsupportedCall(f"{self._layer} was given {[*hidden_states.shape]}, not {wanted}")
        if autocast.is_any_on() and autocast.is_left_out(self, hidden_states):
            return autocast.without(Block.forward, self, hidden_states, *args, **kwargs)
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            return unrecorded(Block.forward, self, hidden_states, *args, **kwargs)
        if args:
            kwargs = named(self.shape.call.arguments, args, kwargs, self._layer)
        if ends:
            return self._returned(self._of_texts(hidden_states, kwargs, ends), (), None)
        return self._returned(*self._out(hidden_states, kwargs))

    def _of_texts(self, hidden_states: Tensor, kwargs: dict[str, Any], name: str) -> Tensor:
        """Compute consecutive texts of one length as a batch: only attention looks beyond a token."""
        given = dict(kwargs)
        ends, turns = given.pop(name, None), given.pop("position_embeddings", None)
        if ends is None:
            raise missing(name)
        if others := {each: given[each] for each in _OF_ONE_TEXT if given.get(each) is not None}:
            refuse_arguments(self._layer, others, self._served - _OF_ONE_TEXT)
        lengths = ends.diff().tolist()
        if sum(lengths) != len(hidden_states) or min(lengths, default=0) < 0:
            raise UnsupportedCall(f"{self._layer} was given texts of {lengths} tokens, and {len(hidden_states)} tokens")
        outs, start = [hidden_states[:0]], 0
        for length, texts in groupby(filter(None, lengths)):
            count = sum(1 for _ in texts)
            tokens = slice(start, start + count * length)
            x, *parts = (value[tokens].unflatten(0, (count, length)) for value in (hidden_states, *(turns or ())))
            out, _, _ = self._out(x, given | {"position_embeddings": tuple(parts) or None})
            outs.append(out.flatten(0, 1))
            start = tokens.stop
        return outs[1] if len(outs) == 2 else torch.cat(outs)

    def _out(
        self, hidden_states: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Sequence[Tensor | None], Tensor | None]:
        """The new hidden states, the weights of each attention if they are wanted, and the bias that is handed on."""
        inputs = self._inputs(hidden_states, kwargs)
        packed = None
        # A traced graph needs the parts as separate ops and must not depend on a mask's values.
        if not has_address(hidden_states):
            if not is_traced():
                with Operations():
                    return self._out(hidden_states, kwargs)
        elif inputs.more is None:
            if self._skips_padding and not any(map(has_listeners, self.children())):
                packed = real_tokens(inputs.mask, self._inverted_mask, hidden_states)
            if packed is None and self._one_call is not None:
                mixer = self._modules[self._mixers[0]] if self._mixers else None
                out = self._one_call(self, mixer, hidden_states, inputs)
                if out is not None:
                    return out, [None] * self._count(inputs), inputs.bias
        x = hidden_states
        if packed is not None:
            x, inputs = packed.taken(x), inputs._replace(packed=packed)
        steps = self._chosen(x) if self._count(inputs) == len(self._mixers) else self._steps_without_states
        out, weights, bias = run(steps, self._modules, x, inputs)
        if packed is not None:
            out = packed.spread(out)
        return out, weights, bias

    def _inputs(self, hidden_states: Tensor, kwargs: dict[str, Any], part: Any = None) -> Inputs:
        """Pick what the parts take of a call's arguments, or this part alone."""
        parts: dict[str, Any] = self._modules
        first, more = part, None
        if part is None and self._mixers:
            first = parts[self._mixers[0]]
        if not (kwargs.keys() <= self._served and (first is None or names_ours(first))):
            more = self._arguments_of_named(kwargs)
        given = kwargs.get
        cache = None
        for name in CACHE_NAMES:
            if cache is None:
                cache = given(name)
        pair = pair_of(cache)
        if cache is not None and (self._index is None or not isinstance(cache, KVCache)):
            cache = self._other_cache(cache, kwargs)
        mask = given("attention_mask")
        if self._mask_of_numbers and isinstance(mask, Tensor):
            mask = mask.bool()
        if self._cuts_mask and isinstance(mask, Tensor):
            mask = mask[..., : keys_in(cache, self._index, hidden_states.shape[1])[1]]
        if mask is not None and more is None and self._takes_scores_mask:
            check_mask(mask, self._layer)
        bias = given(self._bias_argument) if self._bias_argument else None
        positions = None if first is None else first._modules.get("positions")  # a user's own attention has none
        if bias is None and isinstance(positions, LearnedBias):
            bias = positions(hidden_states, *keys_in(cache, self._index, hidden_states.shape[1]))
            more = None if more is None else {**more, "position_bias": bias}
        turns = given("position_embeddings")
        if turns is not None and isinstance(positions, PassedCosSin) and positions.prefix:
            turns = positions.completed(turns, hidden_states.shape[1])
        recorded = False
        for name in self._mixers:
            recorded = recorded or _weights_are_read(parts[name], returned=self._returns_weights)
        return Inputs(  # positional arguments are faster here
            mask,
            cache,
            turns,
            given("position_ids"),
            bias,
            given("is_causal"),
            bool(given("output_attentions")) or recorded,
            self._heads,
            None,
            more,
            {name: given(name) for name in self._values} if self._values else _NO_VALUES,
            pair,
            kwargs,
            self._calls,
        )

    def call_parts(self, calls: Mapping[str, InnerCall | None]) -> None:
        """Let parts be called as the original calls the modules in whose place they are; None if that is unclear."""
        self._calls = dict(calls)
        for name, call in calls.items():
            part = self._modules[name]
            if call is not None and isinstance(part, (CalledPart, MoE)):
                part.be_called(call, self)

    def of_part(self, part: Any, hidden_states: Tensor, residual: Any, kwargs: dict[str, Any]) -> Any:
        """Compute what the original's module in place of `part` returns for these arguments of the layer."""
        call = part.inner_call
        assert call is not None
        inputs = self._inputs(hidden_states, kwargs, part)
        if call.always_weights and not (has_global_hooks() and has_no_hooks(part)):  # counters hook all modules
            inputs = inputs._replace(want_weights=True)
        over = (inputs.values[call.over],) if call.over else ()
        returned = (part.mix_inside if call.unfinished else part.mix)(hidden_states, inputs, *over)
        output, *weights = returned if isinstance(returned, tuple) else (returned,)
        bias = inputs.bias
        if call.over and BIAS in call.returns:  # T5 has none for states
            bias = output.new_zeros(1, part.shape.all_heads, hidden_states.shape[1], inputs.values[call.over].shape[1])
        return call.returned(output if residual is None else output + residual, weights, bias)

    def _other_cache(self, cache: Any, kwargs: dict[str, Any]) -> Any:
        """The cache that the parts take, if it is not ours alone. UnsupportedCall for one that is none."""
        if is_paged(cache):
            return paged_cache(cache)
        if self._index is None and all(name in self._unread for name in CACHE_NAMES if kwargs.get(name) is not None):
            return None
        return self_attention_cache(cache, self._layer, self._index)

    def _arguments_of_named(self, kwargs: dict[str, Any]) -> Mapping[str, Any] | None:
        """The arguments for attention functions that the config names; None to compute all of the block ourselves.

        UnsupportedCall if a part does not call any such function.
        """
        found, unread, arguments = None, self._unread, self.shape.call.arguments
        if unread.to_cache and reads_keywords(cache_in(kwargs)):
            unread = NOTHING_UNREAD
        if not unread.names.isdisjoint(kwargs):  # the original hands nothing on that it takes by name
            kwargs = {name: value for name, value in kwargs.items() if name not in unread.names or name not in unread}
        if not self._mixers:
            unknown = {
                name: value for name, value in unserved(kwargs, self._served).items() if not unread.by_plain(name)
            }
            if unknown:
                refuse_arguments(self._layer, unknown, self._served)
        for name in self._mixers:
            mixer: Any = self._modules[name]
            more = arguments_of_named(mixer, kwargs, self._served, arguments, self._layer, unread)
            if more is not None and not mixer.calls_named:
                refuse_arguments(self._layer, more, self._served)
            found = more if found is None else found
        return {name: value for name, value in found.items() if name not in self._values} if found else found

    def _count(self, inputs: Inputs) -> int:
        """How many mixers run: one that reads states does not if none are given."""
        return len(self._mixers) - bool(self._states and inputs.values[self._states] is None)

    def _returned(self, out: Tensor, weights: Sequence[Tensor | None], bias: Tensor | None) -> Any:
        """What the original returns: BIASED hands its bias on to the next layer, and has no cross attention."""
        returns, first = self.shape.call.returns, weights[0] if weights else None
        if returns == BIASED:
            return out, bias, None
        if returns == LISTED:
            return (out, bias, first, *(each for other in weights[1:] for each in (None, other)))
        if returns in (SINGLE, READING) and (first is None or not self._may_be_asked):
            return (out,)
        if returns == READING:
            return (out, first, weights[1] if len(weights) > 1 else None)
        return (out, first) if returns in (TUPLE, SINGLE) else out

    def _chosen(self, x: Tensor) -> tuple[Run, ...]:
        """Choose the folded program for few tokens, unless a module that it bypasses has hooks."""
        few, parts = self._steps_of_few, self._modules
        if few is None or x.numel() > ops.FEW_ROWS * x.shape[-1] or has_global_hooks():
            return self._steps
        for name, how, function in self._computations:
            if getattr(type(parts[name]), how, None) is not function:
                return self._steps
        passed_by: Any = (parts[name] for name in self._passed_by)
        return few if all(map(has_no_hooks, passed_by)) else self._steps


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


def _weights_are_read(attention: nn.Module, *, returned: bool) -> bool:
    """Whether a hook, or the model to which they are `returned`, may read attention weights that nobody asked for.

    Eager attention returns them always.
    """
    config = getattr(attention, "config", None)
    return (returned or has_active_hooks(attention)) and getattr(config, "_attn_implementation", None) == "eager"
