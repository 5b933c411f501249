"""AWQ in its gemm layout, and AutoRound's files in it: codes of 4 bits in words along outputs.

qweight  int32 [in, out / 8], a word holds eight neighbouring outputs in the order 0 2 4 6 1 3 5 7
qzeros   int32 [groups, out / 8], likewise
scales   [groups, out]

weight = scale * (code - zero), codes and zeros unsigned
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from infuse.weights.coded.buffers import Kept, Turned, Window, mapped, scale_buffer
from infuse.weights.coded.form import FLOATS, Found, Members, Raw, ceil_div
from infuse.weights.coded.settings import Size
from infuse.weights.coded.values import Values, of_int4, regular_groups
from infuse.weights.lazy import LazyTensor

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each nibble of a word, lowest bits first
_LOW = 0x0F0F0F0F  # the lower nibble of each byte
_LEAVES = ("qweight", "qzeros", "scales")
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
    if not is_of_auto_round and paths and config.layout != "gemm":
        found.faults.append(
            f"{raw.settings.origin}: the layout {config.layout!r} is not read; possible: gemm; convert the files with "
            "their library"
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
        _add(found, Members(raw, path, found), config, windows)
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
        return Values((out, inputs), data, of_int4, scale, regular_groups(inputs, size), zero)

    option, buffer = scale_buffer(scale, has_float16=True)
    sixteenths = mapped(zero, torch.int8, lambda read: read * 16)
    buffers: dict[str, LazyTensor] = {"data": data, "scale": buffer, "zero": sixteenths}
    format = f"int4:{'row' if groups == 1 else size}:asymmetric{option}"
    found.add(f"{members.path}.weight", (out, inputs), format, buffers, values)


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
