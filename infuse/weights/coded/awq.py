"""AWQ in three layouts, and AutoRound's files in the first one: codes and zeros of 4 bits, unsigned.

gemm       qweight int32 [in, out / 8], a word holds eight neighbouring outputs in the order 0 2 4 6 1 3 5 7; qzeros
           int32 [groups, out / 8], likewise; scales [groups, out]
gemv       qweight int32 [out, in / 8], inputs in order; qzeros int32 [out, groups / 8], likewise; scales [out, groups];
           groups are padded
gemv_fast  qweight int16 [out / 4, in], drawn in `_Interleaved`; scales and qzeros, float16 [groups, out], padded

weight = scale * (code - zero); of gemv_fast scale * code + qzeros
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from infuse.quant.integer import pack_nibbles, unpack_nibbles
from infuse.weights.coded.buffers import BITS, Kept, Rows, Turned, Window, mapped, scale_buffer
from infuse.weights.coded.form import FLOATS, Found, Members, Raw, ceil_div
from infuse.weights.coded.scaled import group_text
from infuse.weights.coded.settings import Size
from infuse.weights.coded.values import Values, of_int8, of_integers, regular_groups
from infuse.weights.lazy import LazyTensor, Shape, Slices, of_all_axes

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each nibble of a word, lowest bits first
_LOW = 0x0F0F0F0F  # the lower nibble of each byte
_LEAVES = ("qweight", "qzeros", "scales")
_LAYOUTS = ("gemm", "gemv", "gemv_fast")
_RUN = 64  # inputs of gemv_fast that four outputs have one after the other
_ACTIVATION = "act.scales"  # what activations are divided by, in families with gelu


class _Config(BaseModel):
    """The keys that we read; older files have the second names."""

    bits: int | None = None
    w_bit: int | None = None
    group_size: Size | None = None
    q_group_size: Size | None = None
    version: Any = "gemm"
    format: Any = None

    @property
    def layout(self) -> str:
        return str(self.format or self.version).rpartition(":")[2].rpartition(".")[2].lower()

    @property
    def code_bits(self) -> int:
        return self.bits or self.w_bit or 4

    @property
    def size(self) -> int:
        return self.group_size or self.q_group_size or 128


def awq(raw: Raw) -> Found:
    """Take the matrices of AWQ's packing, if the config names this method, or AutoRound's with this packing."""
    if raw.settings is None or raw.form != "awq":
        return Found("AWQ")
    is_of_auto_round = raw.settings.is_of_auto_round
    found = Found("AutoRound (AWQ)" if is_of_auto_round else "AWQ")
    config = raw.settings.read(_Config)
    paths = raw.paths(("qweight",), _LEAVES)
    layout = "gemm" if is_of_auto_round else config.layout
    if paths and layout not in _LAYOUTS:
        found.faults.append(
            f"{raw.settings.origin}: the layout {layout!r} is not read; possible: {', '.join(_LAYOUTS)}; convert the "
            "files with their library"
        )
        return found
    if paths and config.code_bits != 4:
        found.faults.append(f"{raw.settings.origin}: AWQ of {config.code_bits} bits is not read; possible: 4")
        return found
    for name in raw.tensors:
        if name.endswith(f"{_ACTIVATION}"):
            found.used.add(name)
            found.faults.append(
                f"{raw.tensors[name].file.path}: {name} divides activations before the next linear, which is not "
                "supported; quantize the model again without scaling its activations"
            )
    windows = (Window(), Window(), Window())
    for path in paths:
        members = Members(raw, path, found)
        if layout == "gemm":
            _add(found, members, config, windows)
        elif layout == "gemv":
            _add_gemv(found, members, config)
        else:
            _add_gemv_fast(found, members, config, windows)
    if paths:
        found.leave_cache(raw)
    return found


def _add(found: Found, members: Members, config: _Config, windows: tuple[Window, Window, Window]) -> None:
    qweight = members.take("qweight", (torch.int32,), (-1, -1))
    scales = members.take("scales", FLOATS, (-1, -1))
    if qweight is None or scales is None:
        members.take("qzeros", (torch.int32,))
        return
    inputs, out = qweight.shape[0], qweight.shape[1] * 8
    size = config.size if config.size > 0 else inputs
    groups = ceil_div(inputs, size)
    qzeros = members.take("qzeros", (torch.int32,), (groups, out // 8))
    if inputs % 2:
        members.fault("qweight", f"has {inputs} inputs; possible: even")
    if scales.shape != (groups, out):
        what = f"is {scales.shape}, not {(groups, out)}: {inputs} inputs in groups of {size}, as the config says"
        members.fault("scales", what)
    if qzeros is None or not members.are_sound:
        return
    data = Turned(qweight, (out, inputs // 2), torch.uint8, _nibbles, windows[0], high=8)
    scale = Kept(scales, (out, groups), scales.dtype, _turned, windows[1])
    zero = Kept(qzeros, (out, groups), torch.int8, _zeros, windows[2])

    def values() -> LazyTensor:
        return Values((out, inputs), data, of_integers(4), scale, regular_groups(inputs, size), zero)

    option, buffer = scale_buffer(scale, has_float16=True)
    sixteenths = mapped(zero, torch.int8, lambda read: read * 16)
    buffers: dict[str, LazyTensor] = {"data": data, "scale": buffer, "zero": sixteenths}
    format = f"int4:{'row' if groups == 1 else size}:asymmetric{option}"
    found.add(f"{members.path}.weight", (out, inputs), format, buffers, values)


def _add_gemv(found: Found, members: Members, config: _Config) -> None:
    """Add a matrix whose words hold neighbouring inputs."""
    qweight = members.take("qweight", (torch.int32,), (-1, -1))
    out = -1 if qweight is None else qweight.shape[0]
    scales = members.take("scales", FLOATS, (out, -1))
    qzeros = members.take("qzeros", (torch.int32,), (out, -1))
    if qweight is None or scales is None or qzeros is None:
        return
    inputs = qweight.shape[1] * 8
    size = config.size if config.size > 0 else inputs
    groups = ceil_div(inputs, size)
    if inputs % size or not scales.shape[1] == qzeros.shape[1] * 8 == _padded(groups, size):
        what = f"is {scales.shape} and qzeros {qzeros.shape} for {groups} groups of {size} of {inputs} inputs"
        members.fault("scales", what)
        return
    data = Rows(qweight, inputs // 2, torch.uint8, lambda words: words.contiguous().view(torch.uint8), 4)
    scale = Rows(scales, groups, scales.dtype, lambda read: read, 1)
    zero = Rows(qzeros, groups, torch.int8, _zeros_in_order, 8)
    values = Values((out, inputs), data, of_integers(4), scale, regular_groups(inputs, size), zero)
    option, buffer = scale_buffer(scale, has_float16=True)
    buffers: dict[str, LazyTensor] = {"data": data, "scale": buffer}
    buffers["zero"] = mapped(zero, torch.int8, lambda read: read * 16)
    format = f"int4:{group_text(size, inputs)}:asymmetric{option}"
    found.add(f"{members.path}.weight", (out, inputs), format, buffers, lambda: values)


def _add_gemv_fast(found: Found, members: Members, config: _Config, windows: tuple[Window, Window, Window]) -> None:
    """Add a matrix of interleaved outputs, whose zeros are multiplied by scales, and negative."""
    qweight = members.take("qweight", (torch.int16,), (-1, -1))
    out = -1 if qweight is None else qweight.shape[0] * 4
    scales = members.take("scales", FLOATS, (-1, out))
    qzeros = members.take("qzeros", FLOATS, *(() if scales is None else (scales.shape,)))
    if qweight is None or scales is None or qzeros is None:
        return
    inputs = qweight.shape[1]
    size = config.size if config.size > 0 else inputs
    groups = ceil_div(inputs, size)
    if inputs % _RUN or inputs % size or scales.shape[0] != _padded(groups, size):
        members.fault("scales", f"is {scales.shape} for {groups} groups of {size} of {inputs} inputs")
        return
    data = Rows(_Interleaved(qweight, (out, inputs)), inputs // 2, torch.uint8, pack_nibbles)
    scale = Kept(scales, (out, groups), scales.dtype, lambda read: _turned(read[:groups]), windows[1])
    zero = Kept(qzeros, (out, groups), qzeros.dtype, lambda read: _turned(read[:groups]), windows[2])
    offset = mapped(zero, BITS, lambda read: read.float().view(BITS))
    option, buffer = scale_buffer(scale, has_float16=True)
    buffers: dict[str, LazyTensor] = {"data": data, "scale": buffer, "offset": offset}

    def values() -> LazyTensor:
        codes = _Interleaved(qweight, (out, inputs))
        return Values((out, inputs), codes, of_int8, scale, regular_groups(inputs, size), offset=zero)

    format = f"int4:{group_text(size, inputs)}:offset{option}"
    found.add(f"{members.path}.weight", (out, inputs), format, buffers, values)


@dataclass(frozen=True)
class _Interleaved:
    """Codes [out, in], uint8, of int16 [out / 4, in].

    64 numbers hold 64 inputs of each of four outputs, output after output. Of every 32 inputs, these have the order
    0 8 16 24 1 9 17 25, then the same from 2, 4 and 6 on.
    """

    source: LazyTensor
    shape: Shape

    dtype, coded = torch.uint8, None

    def read(self, part: Slices = ()) -> Tensor:
        rows, columns = of_all_axes(part, 2)
        start, stop, _ = rows.indices(self.shape[0])
        first = start // 4
        read = self.source.read((slice(first, ceil_div(stop, 4)),)).contiguous().view(torch.uint8)
        runs, quads = self.shape[1] // _RUN, len(read)
        four = unpack_nibbles(read).reshape(quads, runs, 4, _RUN).transpose(1, 2)  # each output's runs
        # Of 32 codes [pairs, odd, eights], from the fastest: inputs are 8 * eights + 2 * pairs + odd.
        ordered = four.reshape(quads * 4, runs * 2, 4, 2, 4).permute(0, 1, 4, 2, 3)
        return ordered.reshape(quads * 4, self.shape[1])[start - first * 4 : stop - first * 4, columns]


def _padded(groups: int, size: int) -> int:
    """The number of groups with padding, as the kernels of gemv want it: whole words, and more for short groups."""
    words = ceil_div(128, size) if size in (16, 32, 64) else 1
    return ceil_div(ceil_div(groups, 8), words) * words * 8


def _zeros_in_order(words: Tensor) -> Tensor:
    """Zeros less 8 of words."""
    return unpack_nibbles(words.contiguous().view(torch.uint8)).to(torch.int8) - 8


def _turned(read: Tensor) -> Tensor:
    return read.t().contiguous()


def _nibbles(words: Tensor) -> Tensor:
    """Rows of nibbles of neighbouring inputs, uint8 [8n, in / 2], of words [in, n]."""
    inputs, count = words.shape
    of_two = words.t().contiguous().view(count, inputs // 2, 2)
    even, odd = of_two[..., 0], of_two[..., 1]
    lower = even & _LOW | (odd & _LOW) << 4  # a byte of each has the nibbles of both inputs
    higher = even >> 4 & _LOW | odd & ~_LOW
    rows = torch.empty(count, 8, inputs // 2, dtype=torch.uint8)
    for byte in range(4):
        rows[:, _ORDER[2 * byte]] = (lower >> 8 * byte).to(torch.uint8)
        rows[:, _ORDER[2 * byte + 1]] = (higher >> 8 * byte).to(torch.uint8)
    return rows.flatten(0, 1)


def _zeros(words: Tensor) -> Tensor:
    """Zeros less 8, int8 [8n, groups], of words [groups, n]."""
    rows = torch.empty(words.shape[1], 8, words.shape[0], dtype=torch.int8)
    for place, output in enumerate(_ORDER):
        rows[:, output] = ((words >> 4 * place & 15) - 8).to(torch.int8).t()
    return rows.flatten(0, 1)
