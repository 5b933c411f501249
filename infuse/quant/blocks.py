"""The block formats of GGUF files, and nvfp4: blocks with scales of their own, or super-blocks with scales of scales.

    weight = scale * value(code) - shift        one scale and shift for each `group` of a block's inputs

    data    uint8: the codes, unsigned, as many of a row as fill whole bytes:
            4 bits  [out, in / 2]       input 2j is the low nibble, input 2j + 1 the high one
            5 bits  [out, in / 32 * 20] for each 32 inputs 16 bytes of their lower 4 bits, in this order, then their
                                        highest bits as a 32-bit little-endian word, input i at bit i
            6 bits  [out, in / 4 * 3]   input 4j + k takes bits 6k to 6k + 5 of the 24-bit little-endian word j
            3 bits  [out, in / 8 * 3]   input 8j + k takes bits 3k to 3k + 2 of it
            2 bits  [out, in / 4]       input 4j + k takes bits 2k and 2k + 1 of byte j
    scale   uint8 [out, blocks * bytes]: for each block the fields of its row in BLOCKS, little-endian

Where `d` and `sc` are fields, a group's scale is their product in float32; a shift is dmin * mn, or -m. The bytes are
those of the file, except that scales of 6 bits take a byte each. `sc_mn` are both in one byte, sc in its low nibble.

Source: ggml, whose structs block_q4_K and so on these are; nvfp4: NVIDIA's, with e4m3 scales times a float32 number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from infuse.ground.errors import ConfigError
from infuse.quant.floating import pack_fp6, unpack_fp6
from infuse.quant.format import Buffer, QuantFormat
from infuse.quant.integer import pack_nibbles, unpack_nibbles
from infuse.quant.microscaling import E2M1
from infuse.quant.packing import pack_bits, unpack_bits

# The values of iq4_nl and iq4_xs, in steps of the scale.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
SMALLEST = 2.0**-24  # the smallest magnitude of float16: the scale of blocks of zeros


@dataclass(frozen=True)
class Field:
    """`count` numbers of `dtype` among a block's bytes."""

    name: str
    dtype: torch.dtype
    count: int = 1

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Block:
    """One format: `values[code]` for each code, `inputs` of a block and of a `group`, and the fields of its bytes.

    `most`: the largest number that `sc` and `mn` are rounded to, in steps of the block's d and dmin. `error`: the
    relative RMS error of a round trip, measured on 2**20 values of N(0,1). A test measures it again.
    """

    bits: int
    inputs: int
    group: int
    values: tuple[float, ...]
    fields: tuple[Field, ...]
    error: float
    most: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of a block's fields."""
        return sum(field.nbytes for field in self.fields)

    def has(self, name: str) -> bool:
        return any(name in field.name.split("_") for field in self.fields)


def _steps(bits: int, zero: int = 0) -> tuple[float, ...]:
    return tuple(float(code - zero) for code in range(2**bits))


_D, _DMIN, _M = (Field(name, torch.float16) for name in ("d", "dmin", "m"))


def _scales(count: int, dtype: torch.dtype = torch.int8) -> Field:
    return Field("sc", dtype, count)


def _both(count: int) -> tuple[Field, ...]:
    return (_D, _DMIN, _scales(count, torch.uint8), Field("mn", torch.uint8, count))


BLOCKS: Mapping[str, Block] = MappingProxyType(
    {
        "q4_1": Block(4, 32, 32, _steps(4), (_D, _M), 0.0783),
        "q5_0": Block(5, 32, 32, _steps(5, 16), (_D,), 0.0453),
        "q5_1": Block(5, 32, 32, _steps(5), (_D, _M), 0.0378),
        "iq4_nl": Block(4, 32, 32, tuple(map(float, IQ4)), (_D,), 0.0893),
        "q2_k": Block(2, 256, 16, _steps(2), (_D, _DMIN, Field("sc_mn", torch.uint8, 16)), 0.3286, most=15),
        "q3_k": Block(3, 256, 16, _steps(3, 4), (_D, _scales(16)), 0.1988, most=127),
        "q4_k": Block(4, 256, 32, _steps(4), _both(8), 0.0784, most=63),
        "q5_k": Block(5, 256, 32, _steps(5), _both(8), 0.0382, most=63),
        "q6_k": Block(6, 256, 16, _steps(6, 32), (_D, _scales(16)), 0.0193, most=127),
        "iq4_xs": Block(4, 256, 32, tuple(map(float, IQ4)), (_D, _scales(8)), 0.0893, most=127),
        "nvfp4": Block(4, 64, 16, E2M1, (Field("d", torch.float32), _scales(4, torch.float8_e4m3fn)), 0.0948, 448),
    }
)


@dataclass(frozen=True)
class BlockFormat(QuantFormat):
    """A format of BLOCKS. Files are read into it; quantizing rounds to nearest, without a search for better scales."""

    def __post_init__(self) -> None:
        if self.activation_bits != 16:
            raise ConfigError(f"{self.name} has no options; possible: {self.name}")

    def __str__(self) -> str:
        return self.name

    @property
    def block(self) -> Block:
        return BLOCKS[self.name]

    @property
    def expected_error(self) -> float:
        return self.block.error

    @property
    def largest_weight(self) -> float:
        """No scale of a block exceeds float16."""
        return 2.0**15

    def buffers(self, in_features: int) -> tuple[Buffer, ...]:
        if reason := self.fits(in_features):
            raise ConfigError(reason)
        inputs = 32 if self.bits == 5 else 8 // math.gcd(8, self.bits)
        codes = Buffer("data", torch.uint8, inputs, inputs * self.bits // 8)
        return codes, Buffer("scale", torch.uint8, self.block.inputs, self.block.nbytes)

    def fits(self, in_features: int) -> str | None:
        if in_features % self.block.inputs:
            return f"{self}: blocks of {self.block.inputs} do not divide {in_features} inputs"
        return None

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        block, scale = self.block, self.fields(tensors["scale"])
        codes = unpack_codes(tensors["data"], self.bits)
        values = torch.tensor(block.values, device=codes.device)[codes.long()]
        groups = block.inputs // block.group
        values_RSGN = values.reshape(len(codes), -1, groups, block.group)
        values_RSGN *= _expanded(scale["d"], scale.get("sc")).unsqueeze(-1)
        if "mn" in scale:
            values_RSGN -= _expanded(scale["dmin"], scale["mn"]).unsqueeze(-1)
        if "m" in scale:
            values_RSGN += scale["m"].float().unsqueeze(-1)
        return values_RSGN.flatten(1)

    def fields(self, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields of rows of scale bytes [R, blocks * bytes]: name → [R, blocks, count]."""
        bytes_RSB = scale.reshape(len(scale), -1, self.block.nbytes)
        fields = self.block.fields
        parts = bytes_RSB.split([field.nbytes for field in fields], dim=-1)
        named = {field.name: part.contiguous().view(field.dtype) for field, part in zip(fields, parts, strict=True)}
        if (both := named.pop("sc_mn", None)) is not None:
            named |= {"sc": both & 15, "mn": both >> 4}
        return named

    def encode(self, w_RI: torch.Tensor) -> Iterable[torch.Tensor]:
        block = self.block
        w_RSGN = w_RI.reshape(len(w_RI), -1, block.inputs // block.group, block.group)
        fields = self._fields_of(w_RSGN)
        scale_RSG1 = _expanded(fields["d"], fields.get("sc")).unsqueeze(-1)
        steps = w_RSGN
        if "mn" in fields:
            steps = w_RSGN + _expanded(fields["dmin"], fields["mn"]).unsqueeze(-1)
        if "m" in fields:
            steps = w_RSGN - fields["m"].float().unsqueeze(-1)
        steps = torch.where(scale_RSG1 != 0, steps / scale_RSG1, 0.0)
        values = torch.tensor(block.values, device=w_RI.device)
        ordered, order = values.sort(stable=True)
        codes = order[torch.bucketize(steps, (ordered[1:] + ordered[:-1]) / 2)].to(torch.uint8)
        yield pack_codes(codes.reshape(len(w_RI), -1), self.bits)
        if block.fields[-1].name == "sc_mn":
            fields["sc_mn"] = fields["sc"] | fields["mn"] << 4
        parts = [fields[field.name].contiguous().view(torch.uint8) for field in block.fields]
        yield torch.cat(parts, dim=-1).flatten(1)

    def _fields_of(self, w_RSGN: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields of each block: the step of a group from its largest value, or from its span if it has a shift."""
        block = self.block
        dtypes = {field.name: field.dtype for field in block.fields}
        if block.has("mn") or block.has("m"):
            low, high = torch.aminmax(w_RSGN, dim=-1)
            low = low.clamp_max(0)
            step = (high.clamp_min(0) - low) / (len(block.values) - 1)
        else:
            step = w_RSGN.abs().amax(dim=-1) / max(block.values)
        if block.has("m"):
            return {"d": _at_least(step, torch.float16), "m": low.to(torch.float16)}
        if not block.has("sc"):
            return {"d": _at_least(step, torch.float16)}
        d, sc = _factors(step, dtypes["d"], dtypes.get("sc", torch.uint8), block.most)
        if not block.has("mn"):
            return {"d": d, "sc": sc}
        dmin, mn = _factors(-low, torch.float16, torch.uint8, block.most)
        return {"d": d, "dmin": dmin, "sc": sc, "mn": mn}


def _expanded(d: torch.Tensor, of_groups: torch.Tensor | None) -> torch.Tensor:
    """d, or its product with the number of each group, in float32."""
    return d.float() if of_groups is None else d.float() * of_groups.float()


def _at_least(step: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return step.clamp_min(SMALLEST).to(dtype)


def _factors(
    step: torch.Tensor, dtype: torch.dtype, of_groups: torch.dtype, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the numbers of groups into one for the block and a small one for each group."""
    d = _at_least(step.amax(dim=-1, keepdim=True) / most, dtype)
    parts = (step / d.float()).clamp_(max=most)
    return d, (parts if of_groups.is_floating_point else parts.round_()).to(of_groups)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned codes, uint8 [R, inputs], into the bytes of `data`."""
    if bits < 4:
        return pack_bits(codes, bits)
    if bits == 4:
        return pack_nibbles(codes)
    if bits == 6:
        return pack_fp6(codes)
    codes_RU = codes.reshape(len(codes), -1, 32)
    bits_RU = (codes_RU >> 4).reshape(*codes_RU.shape[:2], 4, 8) << torch.arange(
        8, dtype=torch.uint8, device=codes.device
    )
    return torch.cat((pack_nibbles(codes_RU & 15), bits_RU.sum(-1, dtype=torch.uint8)), dim=-1).flatten(1)


def unpack_codes(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of pack_codes."""
    if bits < 4:
        return unpack_bits(data, bits)
    if bits == 4:
        return unpack_nibbles(data)
    if bits == 6:
        return unpack_fp6(data)
    data_RU = data.reshape(len(data), -1, 20)
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    highest = (data_RU[..., 16:].unsqueeze(-1) >> shifts & 1).flatten(-2)
    return (unpack_nibbles(data_RU[..., :16]) | highest << 4).flatten(1)
