"""Fill → tensor: read the parts that are needed → merge → cast → quantize. The only path that a weight takes to its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from infuse import ops, pages
from infuse.parallel.shard import Cut
from infuse.quant.format import QuantizedWeight, quant_format
from infuse.spec.packing import STACK, Fill, strips
from infuse.weights.reader import Reader, tensor_at


def moves(fill: Fill) -> bool:
    """Whether the target is the source itself: the parameter is handed on, and whoever shares it goes on sharing it."""
    alone = len(fill.sources) == 1 and fill.merge != STACK and fill.cut is None
    return alone and not fill.transposed and fill.packing is None and fill.format is None


def is_there(fill: Fill, source: nn.Module) -> bool:
    """Whether `source` has what the target is made from: a table that it computes, or a weight that it shares with others."""
    return not tensor_at(source, fill.sources[0]).is_meta


def filled(fill: Fill, reader: Reader, dtype: torch.dtype | None, quantize: Callable) -> Tensor | QuantizedWeight:
    """The target tensor of `fill` in `dtype` (None: as it is), or quantized in its format by a body of ops.quantize.

    A lone source is moved, not copied.
    """
    sources = _sources(fill, reader)
    if fill.transposed:  # kernels take weights that are contiguous; the quantizer copies in parts
        sources = [source.t() if fill.format else source.t().contiguous() for source in sources]
    if fill.merge == STACK:
        tensor = torch.stack(sources)
    else:
        tensor = sources[0] if len(sources) == 1 else _joined(sources, fill.cut.axis if fill.cut else 0)
    if fill.format is not None:
        data, scale, zero = quantize(tensor, fill.format)
        return QuantizedWeight(data, scale, zero, (tensor.size(0), tensor.size(1)), quant_format(fill.format))
    if fill.cut is not None and len(sources) == 1:  # a view would keep all of the source
        copy = pages.empty(tensor.shape, dtype or tensor.dtype, tensor.device)
        return copy.copy_(tensor)
    return tensor if dtype is None else tensor.to(dtype)


def _sources(fill: Fill, reader: Reader) -> list[Tensor]:
    """What the target is put together from, as it lies in the sources: of each no more is read than is needed."""
    found = strips(fill)
    if found is None:
        return [reader.read(name) for name in fill.sources]
    if fill.merge == STACK:
        return [reader.read(fill.sources[strip.source]) for strip in found]
    inputs = fill.cut is not None and fill.cut.axis == 1
    before = (slice(None),) if inputs != fill.transposed else ()
    return [reader.read(fill.sources[strip.source], (*before, slice(strip.start, strip.stop))) for strip in found]


def _joined(sources: list[Tensor], axis: int) -> Tensor:
    shape = list(sources[0].shape)
    shape[axis] = sum(source.shape[axis] for source in sources)
    return torch.cat(sources, dim=axis, out=pages.empty(shape, sources[0].dtype, sources[0].device))


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


def fill_saved(
    module: nn.Module, path: str, fills: Iterable[Fill], read: Callable[..., Tensor | None], dtype: torch.dtype
) -> None:
    """As fill_module, from the targets themselves as they were saved under `path`; `read(name, cut, group)` gives a
    part, with a scale for each `group`, None for what is not there.
    """
    for fill in fills:
        owner, _, leaf = fill.target.rpartition(".")
        place = module.get_submodule(owner)
        if fill.format is not None:
            at = ".".join(part for part in (path, owner) if part)
            format = quant_format(fill.format)
            data = read(f"{at}.data", fill.cut)
            scale, zero = (read(f"{at}.{name}", fill.cut, format.group_size) for name in ("scale", "zero"))
            assert data is not None and scale is not None, fill
            shape = (place.out_features, place.in_features)
            place.hold(QuantizedWeight(data, scale, zero, shape, format))  # type: ignore[operator,arg-type]
        elif leaf in place._parameters:
            value = read(f"{path}.{fill.target}", fill.cut)
            assert value is not None, fill
            place._parameters[leaf] = nn.Parameter(value.to(dtype), requires_grad=False)


def saved_tensors(module: nn.Module, path: str, fills: Iterable[Fill]) -> dict[str, tuple[tuple[int, ...], Cut | None]]:
    """Name → shape of what `fill_saved` reads for `module`, on meta, and how it is cut."""
    shapes: dict[str, tuple[tuple[int, ...], Cut | None]] = {}
    for fill in fills:
        owner, _, leaf = fill.target.rpartition(".")
        place = module.get_submodule(owner)
        if fill.format is not None:
            like: Any = torch.empty((place.out_features, place.in_features), device="meta")  # type: ignore[arg-type]
            weight = quant_format(fill.format).quantize(like)
            at = ".".join(part for part in (path, owner) if part)
            parts = {"data": weight.data, "scale": weight.scale, "zero": weight.zero}
            shapes |= {f"{at}.{name}": (tuple(tensor.shape), fill.cut) for name, tensor in parts.items() if tensor is not None}
        elif leaf in place._parameters:
            shapes[f"{path}.{fill.target}"] = (tuple(place.get_parameter(leaf).shape), fill.cut)
    return shapes
