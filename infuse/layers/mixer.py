"""Mixer: base class of attentions and recurrences, with their access to the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

from torch import Tensor

from infuse import ops
from infuse.architectures.part import MixerShape
from infuse.cache.encoded_slot import MadeSlot
from infuse.cache.kv_cache import KVCache
from infuse.cache.recurrence_slot import ForeignStates, StateSlot
from infuse.cache.slot import Filler
from infuse.ground.errors import UnsupportedCall
from infuse.ground.modes import is_dispatched
from infuse.layers.attention.named_attention import attribute
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.called_part import CalledPart
from infuse.layers.calls.inputs import Inputs

Shape = TypeVar("Shape", bound=MixerShape)


class Mixer(CalledPart, Generic[Shape]):
    """An attention or a recurrence of a block.

    `mix` takes the new tokens [B, T, C] and the call's other inputs, and returns (output [B, T, C], attention weights
    [B, H, T, L] or None), or the output alone. A step over another value, such as encoder states, passes it as a third
    argument. State between calls is in the slot of `index` in the cache.
    """

    calls_named: ClassVar[bool] = False  # whether it calls the attention function that the model's config names
    by_name = True  # whether the original does; else it computes its scores itself
    _attend: ops.Bound  # of attentions

    def __init__(self, shape: Shape, context: BuildContext):
        super().__init__()
        self.shape: Shape = shape
        self._index, self._group, self._name = context.index, context.group, context.name
        self.filler = Filler(uuid4().hex)  # in a KVCache: copies of the model may continue it, other models may not

    @property
    def attend(self) -> Callable[..., Tensor]:
        """The op of attention; under a mode, which may count products, by products where the original does so."""
        if is_dispatched() and (not self.by_name or attribute(self, "_attn_implementation") in (None, "eager")):
            return ops.attention.reference
        return self._attend

    @property
    def index(self) -> int:
        assert self._index is not None
        return self._index

    def append(
        self, inputs: Inputs, keys_BKTD: Tensor, values_BKTD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        """Append the new tokens' keys and values to the cache, if there is one.

        Return those of all tokens, the mask over them, and whether causal order applies besides.
        """
        cache, mask, tokens = inputs.cache, inputs.mask, keys_BKTD.shape[2]
        causal, keys, values = self.shape.causal if inputs.causal is None else inputs.causal, keys_BKTD, values_BKTD
        if isinstance(cache, KVCache):
            slot = cache.slot(self.index)
            keys, values = slot.update(keys, values, filler=self.filler)
            mask = ops.both_masks(mask, slot.seen(tokens) if slot.place is None else slot.allowed(0), keys.dtype)
        elif cache is not None:
            keys, values = cache.update(keys, values, self.index)
            if mask is None and causal and 1 < tokens < keys.shape[2]:
                keys, values = keys[:, :, :tokens], values[:, :, :tokens]  # beyond a static cache's first prompt
        if mask is not None and mask.shape[-1] not in (1, keys.shape[2]):
            raise UnsupportedCall(
                f"attention_mask has shape {list(mask.shape)}, and this call has {keys.shape[2]} keys: its last axis "
                f"must be {keys.shape[2]}"
            )
        return keys, values, mask, mask is None and causal

    def check_named(self, cache: Any, *, over_ranks: bool) -> None:
        """Raise UnsupportedCall if the attention function that the config names cannot serve this call."""
        named = f'the attention "{attribute(self, "config")._attn_implementation}"'
        if over_ranks:  # such functions read the unsplit head counts from the module
            raise UnsupportedCall(
                f"the config names {named} for this call, which is not served over several ranks: "
                'call model.set_attn_implementation("sdpa") and generate(), or use one rank'
            )
        if isinstance(cache, KVCache) and self._index is not None:
            slot = cache.slot(self._index)
            if slot.row_lengths is not None or slot.place is not None:
                raise UnsupportedCall(
                    f"a KVCache with rows of different lengths was passed, and the config names {named}, which does "
                    'not know them: call model.set_attn_implementation("sdpa"), or pass a padded batch with its mask'
                )

    def states(self, inputs: Inputs) -> StateSlot | ForeignStates | None:
        """Return the recurrent states in the cache; None without a cache.

        UnsupportedCall for a cache that holds keys and values for this layer.
        """
        cache = inputs.cache
        if cache is None:
            return None
        if isinstance(cache, KVCache):
            return self.states_in(cache, self.index)
        layer = cache.layers[self.index] if self.index < len(cache.layers) else None
        if not hasattr(layer, "recurrent_states"):
            raise UnsupportedCall(
                f"past_key_values: layer {self.index} of this {type(cache).__name__} is a {type(layer).__name__} and "
                "holds no state of a recurrence; leave the cache to generate(), or make it with config=model.config"
            )
        return ForeignStates(layer)

    def states_in(self, cache: KVCache, index: int) -> StateSlot:
        """The slot of the states of layer `index` in our cache."""
        return cache.slot_of(index, self._name, StateSlot) if self.shape.beside else cache.slot(index, StateSlot)

    def made_once(
        self, inputs: Inputs, source: Tensor, make: Callable[[Tensor], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Return make(source), computed once per sequence if our cache stores it."""
        cache = inputs.cache
        if not isinstance(cache, KVCache):
            return make(source)
        return cache.slot_of(self.index, self._name, MadeSlot).made(source, make)
