"""Fill → tensor: read → split packing → merge → cast → quantize. The only path that a weight takes to its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from infuse import ops
from infuse.quant.format import QuantizedWeight, quant_format
from infuse.spec.packing import STACK, Fill, split_qkv
from infuse.weights.reader import Reader


def moves(fill: Fill) -> bool:
    """Whether the target is the source itself: the parameter is handed on, and whoever shares it goes on sharing it."""
    return len(fill.sources) == 1 and not fill.transposed and fill.packing is None and fill.merge != STACK and fill.format is None


def filled(fill: Fill, reader: Reader, dtype: torch.dtype | None, quantize: Callable) -> Tensor | QuantizedWeight:
    """The target tensor of `fill` in `dtype` (None: as it is), or quantized in its format by a body of ops.quantize.

    A lone source is moved, not copied.
    """
    sources = [reader.read(name) for name in fill.sources]
    if fill.transposed:
        sources = [source.t() for source in sources]
    if fill.packing is not None:
        assert fill.heads is not None and len(sources) == 1, fill
        sources = list(split_qkv(sources[0].contiguous(), fill.packing, fill.heads))
    if fill.merge == STACK:
        tensor = torch.stack(sources)
    else:
        tensor = sources[0] if len(sources) == 1 else torch.cat(sources)
    if fill.format is not None:
        data, scale, zero = quantize(tensor, fill.format)
        return QuantizedWeight(data, scale, zero, (tensor.size(0), tensor.size(1)), quant_format(fill.format))
    return tensor if dtype is None else tensor.to(dtype)


def fill_module(module: nn.Module, fills: Iterable[Fill], reader: Reader, dtype: torch.dtype, bodies: Mapping[str, str]) -> None:
    """Give each fill's tensor its place in `module`, which was built on meta or empty. `bodies`: op → body."""
    quantize = ops.quantize.body(bodies.get("quantize", ops.REFERENCE))
    for fill in fills:
        owner, _, leaf = fill.target.rpartition(".")
        place = module.get_submodule(owner)
        value = filled(fill, reader, None if leaf in place._buffers and fill.format is None else dtype, quantize)
        if isinstance(value, QuantizedWeight):
            place.hold(value)  # type: ignore[operator]
        elif leaf in place._parameters:
            place._parameters[leaf] = value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach(), requires_grad=False)
        else:
            assert leaf in place._buffers, f"{fill.target} has no place in {type(module).__name__}"
            place._buffers[leaf] = value
