"""A block over a few new tokens, as decoding has them, in one call: where all of its ops are the C++ bodies and nobody
listens inside.

The block's parts are called one by one otherwise, with the same result; here is what the call needs to know of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

from torch import Tensor, nn

from infuse.architectures.layer import RMS, LayerShape, MLPShape, NormShape
from infuse.layers.attention import Attention
from infuse.layers.cache import KVCache
from infuse.layers.inputs import Inputs
from infuse.layers.linear import Linear, QuantizedLinear, all_are_heard, untouched
from infuse.layers.mlp import MLP
from infuse.layers.norm import Norm
from infuse.ops.cpu.layer import MOST_STEP_ROWS, LayerForm, LinearForm, NormForm, layer_step
from infuse.quant.parse import quant_format


class OneCall:
    """What of a block does not change from call to call."""

    def __init__(self, shape: LayerShape, formats: Mapping[str, str], index: int, interleaved: bool):
        self._shape, self._index = shape, index
        self._places: list[
            tuple[int, str, str]
        ] = []  # of each tensor of the call: which part has it, among what, and its name
        self._absent: list[tuple[int, str]] = []  # parameters that are not there
        self._types: list[Any] = []  # of each part
        attn, mlp = shape.attn, shape.mlp
        assert isinstance(mlp, MLPShape), mlp
        given = (shape.norm1, shape.norm2, shape.post1, shape.post2, attn.q_norm, attn.k_norm)
        norms = tuple(self._norm(part, norm) for part, norm in enumerate(given))
        rows = (attn.heads + 2 * attn.kv_heads) * attn.head_width
        sizes = (
            (f"{attn.name}.qkv", rows, attn.qkv_bias), (f"{attn.name}.out", attn.hidden, attn.out_bias),
            ("mlp.up", mlp.inner * (2 if mlp.gated else 1), mlp.in_bias), ("mlp.down", mlp.hidden, mlp.out_bias),
        )  # fmt: skip
        self._numbers = LayerForm(
            shape.residual, attn.heads, attn.kv_heads, attn.head_width, mlp.activation, interleaved, mlp.gated, attn.scale, attn.softcap,
            norms, tuple(self._linear(6 + i, formats.get(f"{name}.weight"), rows, bias) for i, (name, rows, bias) in enumerate(sizes)),
        ).numbers()  # fmt: skip

    def _place(self, part: int, name: str, buffer: bool = False) -> int:
        self._places.append((part, "_buffers" if buffer else "_parameters", name))
        return len(self._places) - 1

    def _parameter(self, part: int, name: str, there: bool) -> int:
        if there:
            return self._place(part, name)
        self._absent.append((part, name))
        return -1

    def _norm(self, part: int, norm: NormShape | None) -> NormForm | None:
        self._types.append(NoneType if norm is None else Norm)
        if norm is None:
            return None
        weight = self._parameter(part, "weight", norm.weight is not None)
        bias = self._parameter(part, "bias", norm.weight is not None and norm.bias)
        return NormForm(norm.kind != RMS, norm.eps, norm.offset, weight, bias)

    def _linear(self, part: int, format: str | None, outputs: int, has_bias: bool) -> LinearForm:
        self._types.append(QuantizedLinear if format else Linear)
        weight, scale, zero = -1, -1, -1
        if format is None:
            weight = self._place(part, "weight")
        else:
            weight, scale = self._place(part, "data", True), self._place(part, "scale", True)
            zero = -1 if quant_format(format).symmetric else self._place(part, "zero", True)
        return LinearForm(format, outputs, weight, scale, zero, self._parameter(part, "bias", has_bias))

    def __call__(self, block: nn.Module, attention: Any, x_BTC: Tensor, inputs: Inputs) -> Tensor | None:
        """The block's result; None where it has to go part by part. `inputs` are those of a block whose attention is
        causal.
        """
        batch, tokens, _ = x_BTC.shape
        cache = inputs.cache
        if (
            batch * tokens > MOST_STEP_ROWS
            or not isinstance(cache, KVCache)
            or inputs.want_weights
            or inputs.causal is False
        ):
            return None
        slot, tensors = cache.slot(self._index), self._tensors(block, attention)
        if tensors is None or slot.place is not None or slot.row_lengths is not None:
            return None
        shape = self._shape.attn
        start = slot.reserve(batch, tokens, shape.kv_heads, shape.head_width, x_BTC)
        assert slot.key_storage is not None and slot.value_storage is not None
        turns, mask, bias = (
            attention.positions.turns(inputs),
            inputs.mask,
            attention.positions.bias(inputs, batch, start + tokens),
        )
        if mask is not None:
            mask = attention.allowed(mask, start + tokens)
        out = layer_step(
            x_BTC, tensors, turns, mask, bias, (slot.key_storage, slot.value_storage), start,
            mask is None or shape.window > 0, shape.window, self._numbers,
        )  # fmt: skip
        if out is not None:
            slot.advance(tokens)
        return out

    def _tensors(self, block: nn.Module, attention: nn.Module) -> list[Tensor] | None:
        """The tensors of the call; None where a part is not the one that was put in, or someone listens to it."""
        mlp = block._modules["mlp"]
        if type(attention).forward is not Attention.forward or type(mlp) is not MLP:
            return None
        of_block, of_attention, of_mlp = block._modules, attention._modules, mlp._modules
        parts: list[Any] = [
            of_block["norm1"], of_block["norm2"], of_block["post1"], of_block["post2"], of_attention["q_norm"], of_attention["k_norm"],
            of_attention["qkv"], of_attention["out"], of_mlp["up"], of_mlp["down"],
        ]  # fmt: skip
        for part, wanted in zip(parts, self._types, strict=True):
            if type(part) is not wanted:
                return None
            if part is None:
                continue
            own = part.__dict__  # `untouched`, whose call alone costs more, eight times in each step of each layer
            if (
                own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or "forward" in own
                or (wanted is QuantizedLinear and not part.prepared)
            ):
                return None
        if not untouched(attention) or not untouched(mlp) or all_are_heard():
            return None
        for i, name in self._absent:
            if parts[i]._parameters[name] is not None:
                return None
        tensors = []
        for i, held, name in self._places:
            tensor = parts[i].__dict__[held][name]
            if tensor is None:
                return None
            tensors.append(tensor)
        return tensors


def make_one_call(
    shape: LayerShape, formats: Mapping[str, str], index: int | None, bodies: Mapping[str, str], interleaved: bool
) -> OneCall | None:
    """None for blocks that go part by part: where one of `bodies` is not the C++ one, a part has no kernel, or ranks
    share the block.
    """
    if index is None or not shape.attn.causal or not one_call_takes(shape, bodies):
        return None
    return OneCall(shape, formats, index, interleaved)


def one_call_takes(shape: LayerShape, bodies: Mapping[str, str]) -> bool:
    """Whether all parts of such a block have a kernel, its own body, and no rank shares it."""
    attn = shape.attn
    norms = [
        norm
        for norm in (shape.norm1, shape.norm2, shape.post1, shape.post2, attn.q_norm, attn.k_norm)
        if norm is not None
    ]
    taken = all(norm.weight is None or len(norm.weight) == 1 for norm in norms) and not any(
        norm.whole for norm in norms
    )
    return (
        isinstance(shape.mlp, MLPShape)
        and taken
        and not attn.clip
        and not attn.head_counts
        and shape.residual_scale == 1.0
        and set(bodies.values()) == {"cpu"}
    )
