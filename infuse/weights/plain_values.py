"""Notes on matrices that a checkpoint stores in codes and that become plain values: why, and their bytes in both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from infuse.quant.parse import quant_format
from infuse.weights.lazy import Composite, LazyTensor

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_PLAIN_BYTES = 2  # of a value in bfloat16 or float16; float32 has twice as many


def dequantized(names: Sequence[str], why: str, values: int, coded_bytes: int) -> str:
    """The note for tensors with so many `values`, whose codes and scales take `coded_bytes`."""
    what = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
    sizes = f"{_in_bytes(values * _PLAIN_BYTES)} in 16 bits, {_in_bytes(coded_bytes)} in codes"
    return f"{what}, e.g. {names[0]}: codes become plain values ({why}): {sizes}"


def without_codes(tensors: Mapping[str, LazyTensor]) -> Iterator[str]:
    """Yield a note for each reason why tensors that are made of coded ones have no codes, and for fp8 without scales.

    Matrices that a form could not keep have notes of their own.
    """
    names: dict[str, list[str]] = {}
    values: dict[str, int] = {}
    coded_bytes: dict[str, int] = {}
    for name, tensor in {id(tensor): (name, tensor) for name, tensor in tensors.items()}.values():
        found = _made_of_codes(tensor)
        if found is None:
            continue
        why, size = found
        names.setdefault(why, []).append(name)
        values[why] = values.get(why, 0) + math.prod(tensor.shape)
        coded_bytes[why] = coded_bytes.get(why, 0) + size
    for why in names:
        yield dequantized(names[why], why, values[why], coded_bytes[why])


def _made_of_codes(tensor: LazyTensor) -> tuple[str, int] | None:
    """Why a tensor has no codes, and the bytes of those that it is made of; None if it has them, or is made of none."""
    if tensor.coded is not None:
        return None
    if tensor.dtype in _FP8:
        return f"stored in {str(tensor.dtype).removeprefix('torch.')} without a scale", math.prod(tensor.shape)
    parts = list(_coded_parts(tensor))
    return (_reason(parts), sum(map(_coded_bytes, parts))) if parts else None


def _coded_parts(tensor: LazyTensor) -> Iterator[LazyTensor]:
    """Yield the tensors with codes that `tensor` is made of."""
    if tensor.coded is not None:
        yield tensor
    elif isinstance(tensor, Composite):
        for part in tensor.made_of:
            yield from _coded_parts(part)


def _reason(parts: Sequence[LazyTensor]) -> str:
    if any(part.coded is not None and part.coded.order is not None for part in parts):
        return "parts of one matrix are stored in act-order, each in its own"
    formats = list(dict.fromkeys(part.coded.format for part in parts if part.coded is not None))
    if len(formats) > 1:
        return f"made of parts in {', '.join(formats)}"
    return f"made of parts in {formats[0]} that cannot be joined in their codes"


def _coded_bytes(tensor: LazyTensor) -> int:
    assert tensor.coded is not None
    *outer, inputs = tensor.shape
    return quant_format(tensor.coded.format).nbytes(math.prod(outer), inputs)


def _in_bytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"
