"""compressed-tensors (llm-compressor), and AutoRound's files in it: integers packed or plain, fp8, nvfp4, mxfp4, mxfp8.

weight_packed      int32 [out, in * bits / 32], code + 2**(bits - 1), dense along inputs; with weight_shape int64 [2]
                   uint8 [out, in / 2], two e2m1 codes; with weight_global_scale, or with exponents as scales
weight             int8 or e4m3 [out, in]
weight_scale       [1], [out, 1], [out, groups] or [tiles of rows, tiles of inputs]
weight_zero_point  int8 like the scales; of packed weights int32 [out * bits / 32, groups], dense along outputs
weight_g_idx       int32 [in], the group of each input (older files with act-order)

weight = scale * (code - zero), and 1 / weight_global_scale times that
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor

from infuse.quant.integer import range_of
from infuse.quant.packing import pack_bits
from infuse.weights.coded.buffers import Kept, Rows, Window, mapped, scale_buffer, unpacked
from infuse.weights.coded.form import FLOATS, Found, Members, Raw, ceil_div
from infuse.weights.coded.patterns import pattern_fault
from infuse.weights.coded.scaled import add_fp8, add_int8, add_mxfp4, add_nvfp4, group_text, scale_shapes, spread
from infuse.weights.coded.settings import MOST, Size
from infuse.weights.coded.values import (
    Values,
    has_regular_sizes,
    inputs_by_group,
    is_regular,
    of_integers,
    regular_groups,
)
from infuse.weights.lazy import FileTensor, LazyTensor, Shape

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip
_LEAVES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale", "weight_g_idx")
_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
_PATTERN = "re:"
_INDICES = (torch.int32, torch.int64)
_OF_GROUPS = ("group", "tensor_group")
_WHOLE = {"channel": (1, MOST), "tensor": (MOST, MOST)}


class _Numbers(BaseModel):
    """How weights or activations are quantized."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: Size | None = None
    block_structure: Any = None
    actorder: Any = None  # "weight" or "static" changes nothing in a file

    @model_validator(mode="after")
    def _has_a_tile(self) -> _Numbers:
        if self.strategy == "block" and self.tile is None:
            raise ValueError(f"block_structure is {self.block_structure!r:.60}; possible: [128, 128]")
        if self.strategy in _OF_GROUPS and self.tile is None:
            raise ValueError(f"group_size is {self.group_size} for the strategy {self.strategy!r}; possible: 1 or more")
        return self

    @property
    def is_in_act_order(self) -> bool:
        """Whether files have the group of each input."""
        return str(self.actorder).lower() in ("group", "dynamic", "true")

    @property
    def tile(self) -> tuple[int, int] | None:
        """Rows and inputs of one scale, where the config tells. A block is [128, 128], or "128x128" in older files."""
        size = self.group_size or 0
        if self.strategy in _OF_GROUPS or (self.strategy is None and size > 0):
            return (1, size) if size > 0 else None
        if self.strategy in _WHOLE:
            return _WHOLE[self.strategy]
        if self.strategy != "block" or self.block_structure is None:
            return (128, 128) if self.strategy == "block" else None
        sizes = [int(size) for size in re.findall(r"\d+", str(self.block_structure)[:80])]
        return (sizes[0], sizes[1]) if len(sizes) == 2 and min(sizes) > 0 and max(sizes) <= MOST else None


class _Scheme(BaseModel):
    """One of `config_groups`."""

    targets: list[str] = Field(default_factory=list)
    weights: _Numbers | None = None
    input_activations: _Numbers | None = None
    format: str | None = None

    @property
    def options(self) -> str:
        """:a8 if the library rounds activations to 8-bit integers."""
        inputs = self.input_activations
        return ":a8" if inputs is not None and inputs.type == "int" and inputs.num_bits == 8 else ""


class _Config(BaseModel):
    """The keys that we read."""

    config_groups: dict[str, _Scheme] = Field(default_factory=dict)
    format: str | None = None
    ignore: list[str] | None = None
    quantization_status: str | None = None
    sparsity_config: Any = None
    transform_config: Any = None

    def refused(self) -> list[str]:
        """What is in the config that is not read."""
        named = (self.format, *(scheme.format for scheme in self.config_groups.values()))
        lines = [f"the format {name!r}" for name in dict.fromkeys(named) if name is not None and name not in _FORMATS]
        sparse = self.sparsity_config.get("format") if isinstance(self.sparsity_config, dict) else self.sparsity_config
        if sparse not in (None, "", "dense"):
            lines.append(f"sparsity_config with the format {sparse!r}")
        transforms = self.transform_config
        if transforms.get("config_groups", transforms) if isinstance(transforms, dict) else transforms:
            lines.append("transform_config, whose rotations the model would need")
        if self.quantization_status not in (None, "compressed"):
            lines.append(f"quantization_status {self.quantization_status!r}, whose files hold no codes")
        return lines

    def unreadable_patterns(self) -> list[str]:
        """Patterns whose matching could take forever, and why."""
        targets = dict.fromkeys(target for scheme in self.config_groups.values() for target in scheme.targets)
        texts = [target.removeprefix(_PATTERN) for target in targets if target.startswith(_PATTERN)]
        return [f"the target {text!r:.80} {why}" for text in texts if (why := pattern_fault(text))]

    def scheme(self, path: str) -> _Scheme | None:
        """The group that names the module `path`, else the only one or the one for a class; None if none does."""
        schemes = list(self.config_groups.values())
        first: dict[str, _Scheme] = {}  # so that a pattern is matched once
        for scheme in schemes:
            for target in scheme.targets:
                first.setdefault(target, scheme)
        if (named := next((target for target in first if _names(target, path)), None)) is not None:
            return first[named]
        of_class = [one for one in schemes if any(target.isidentifier() for target in one.targets)]
        return schemes[0] if len(schemes) == 1 else of_class[0] if of_class else None


def compressed(raw: Raw) -> Found:
    """Take the matrices of compressed-tensors, if the config names it, or AutoRound with its packing."""
    found = Found("compressed-tensors")
    if raw.settings is None or raw.form != "compressed-tensors":
        return found
    config = raw.settings.read(_Config)
    paths = raw.paths(("weight_packed", "weight_scale"), _LEAVES)
    if paths and (refused := config.refused()):
        found.faults.append(f"{raw.settings.origin}: has {'; '.join(refused)}; possible: {', '.join(_FORMATS)}")
        return found
    if paths and (patterns := config.unreadable_patterns()):
        found.faults.append(f"{raw.settings.origin}: {'; '.join(patterns)}; name the modules in another way")
        return found
    window = Window()
    for path in paths:
        members = Members(raw, path, found)
        scheme = _scheme(config, members)
        if scheme is not None:
            _add(found, members, scheme, window)
    unused = (name for name in raw.tensors if name.rpartition(".")[2] in _ACTIVATIONS)
    found.leave(raw, unused, "scales of activations")
    found.leave_cache(raw)
    return found


def _scheme(config: _Config, members: Members) -> _Scheme | None:
    """The scheme of a matrix; None after a fault."""
    leaf = "weight_packed" if members.has("weight_packed") else "weight_scale"
    scheme = config.scheme(members.path)
    if members.path in (config.ignore or ()):
        members.fault(leaf, "is quantized, but the config lists this module in `ignore`")
    elif scheme is None or scheme.weights is None:
        members.fault(leaf, "is quantized, but no group of the config has weights for this module")
    else:
        return scheme
    return None


def _names(target: str, path: str) -> bool:
    """True if a target of the config is this module's name or a pattern of it. Names may lack a prefix."""
    if target.startswith(_PATTERN):
        try:
            return re.match(target.removeprefix(_PATTERN), path) is not None
        except (re.error, OverflowError, RecursionError):
            return False
    return path == target or ("." in target and path.endswith(f".{target}"))


def _add(found: Found, members: Members, scheme: _Scheme, window: Window) -> None:
    """Add one matrix in the form that its tensors have, checked against its scheme."""
    numbers = scheme.weights
    assert numbers is not None
    packed = members.dtype("weight_packed")
    if packed is torch.int32:
        _add_packed(found, members, scheme, numbers, window)
    elif packed is not None:
        _add_e2m1(found, members, numbers)
    elif members.dtype("weight") is torch.float8_e4m3fn:
        _check(members, "weight", numbers, "float", 8)
        weight, scale = members.take("weight", (torch.float8_e4m3fn,), (-1, -1)), _scale(members, torch.uint8)
        if weight is not None and scale is not None and members.are_sound:
            add_fp8(found, members, weight, scale, numbers.tile)
    else:
        weight, scale, zero = members.take("weight", (torch.int8,), (-1, -1)), _scale(members), None
        if weight is None or scale is None:
            return
        if members.has("weight_zero_point") or not numbers.symmetric:
            zero = members.take("weight_zero_point", (torch.int8,), scale.shape)
        _check(members, "weight", numbers, "int", 8)
        if members.are_sound:
            add_int8(found, members, weight, scale, zero, numbers.tile, scheme.options)


def _scale(members: Members, *others: torch.dtype) -> FileTensor | None:
    return members.take("weight_scale", (*FLOATS, *others))


def _check(members: Members, leaf: str, numbers: _Numbers, kind: str, bits: int) -> None:
    """Report codes of another kind than the config says."""
    if (numbers.type, numbers.num_bits) != (kind, bits):
        members.fault(leaf, f"holds {kind} codes of {bits} bits, the config says {numbers.type} of {numbers.num_bits}")


def _add_e2m1(found: Found, members: Members, numbers: _Numbers) -> None:
    """Add nvfp4 or mxfp4."""
    data = members.take("weight_packed", (torch.uint8,), (-1, -1))
    if data is None:
        return
    _check(members, "weight_packed", numbers, "float", 4)
    out, inputs = data.shape[0], data.shape[1] * 2
    is_mx = members.dtype("weight_scale") is torch.uint8
    size, dtype = (32, torch.uint8) if is_mx else (16, torch.float8_e4m3fn)
    scale = members.take("weight_scale", (dtype,), (out, ceil_div(inputs, size)))
    of_all = None if is_mx else members.take("weight_global_scale", (torch.float32,), (1,), ())
    if scale is None or not members.are_sound:
        return
    name = f"{members.path}.weight"
    if of_all is None:
        add_mxfp4(found, name, data, scale)
    else:
        add_nvfp4(found, name, data, scale, of_all, inverse=True)


def _add_packed(found: Found, members: Members, scheme: _Scheme, numbers: _Numbers, window: Window) -> None:
    """Add integers of 1 to 8 bits in words, in the shortest format that has them."""
    data, scale = members.take("weight_packed", (torch.int32,), (-1, -1)), _scale(members)
    shape_tensor = members.take("weight_shape", _INDICES, (2,))
    if data is None or scale is None or shape_tensor is None:
        return
    out, inputs = (int(size) for size in shape_tensor.read().tolist())
    bits = numbers.num_bits
    if numbers.type != "int" or not 1 <= bits <= 8:
        members.fault("weight_packed", f"holds integers, the config says {numbers.type} of {bits} bits")
        return
    if out < 1 or inputs < 1 or data.shape != (out, ceil_div(inputs * bits, 32)):
        what = f"is {data.shape}, not {(out, ceil_div(inputs * bits, 32))} for {(out, inputs)}"
        members.fault("weight_packed", f"{what} of {bits} bits, as the config and weight_shape say")
        return
    spread_out = spread(scale, (out, inputs), numbers.tile)
    if spread_out is None:
        members.fault("weight_scale", f"is {scale.shape}; possible: {scale_shapes((out, inputs), numbers.tile)}")
        return
    rows, size = spread_out
    zero = _zeros(members, numbers, (out, inputs), scale, window)
    groups = _groups(members, numbers, inputs, size)
    if not members.are_sound or groups is None:
        return
    kept = _kept(bits)
    dtype = torch.int8 if kept == 8 else torch.uint8
    codes = Rows(data, ceil_div(inputs * kept, 8), dtype, partial(_codes, bits), 4 if kept == bits else 0)

    def values() -> LazyTensor:
        return Values((out, inputs), codes, of_integers(kept), rows, groups, zero)

    name = f"{members.path}.weight"
    order = None if is_regular(groups, size) else inputs_by_group(groups, size)
    if order is None and not is_regular(groups, size):
        found.dequantize(name, "groups differ in their numbers of inputs (actorder)", values())
        return
    option, buffer = scale_buffer(rows, has_float16=True)
    buffers: dict[str, LazyTensor] = {"data": codes, "scale": buffer}
    if zero is not None:
        buffers["zero"] = mapped(zero, torch.int8, lambda read: read * (256 >> kept))
    kind = "" if zero is None else ":asymmetric"
    format = f"int{kept}:{group_text(size, inputs)}{kind}{option}{scheme.options if kept > 3 else ''}"
    found.add(name, (out, inputs), format, buffers, values, order)


def _zeros(members: Members, numbers: _Numbers, shape: Shape, scale: FileTensor, window: Window) -> LazyTensor | None:
    """Zeros [out, groups] in steps, int8; None for symmetric weights, or after a fault."""
    out, bits = shape[0], numbers.num_bits
    if numbers.symmetric and not members.has("weight_zero_point"):
        return None
    if members.dtype("weight_zero_point") is torch.int8:
        stored = members.take("weight_zero_point", (torch.int8,), scale.shape)
        if stored is None:
            return None
        low, high = (int(bound) for bound in torch.aminmax(stored.read()))
        lowest, highest = range_of(_kept(bits))
        if low < lowest or high > highest:
            what = f"holds zeros {low} to {high}; possible, for codes of {bits} bits: {lowest} to {highest}"
            members.fault("weight_zero_point", what)
        spread_out = spread(stored, shape, numbers.tile)
        return None if spread_out is None else spread_out[0]
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    words = members.take("weight_zero_point", (torch.int32,), (ceil_div(out * bits, 32), groups))
    return None if words is None else Kept(words, (out, groups), torch.int8, partial(_of_outputs, bits, out), window)


def _groups(members: Members, numbers: _Numbers, inputs: int, size: int) -> Tensor | None:
    """The group of each input; None after a fault."""
    regular = regular_groups(inputs, size)
    if not members.has("weight_g_idx"):
        if numbers.is_in_act_order and size < inputs:
            members.fault("weight_g_idx", f"is missing, the config says actorder {numbers.actorder}")
            return None
        return regular
    stored = members.take("weight_g_idx", _INDICES, (inputs,))
    if stored is None:
        return None
    groups = stored.read().long()
    if bool((groups == -1).all()):  # no act-order
        return regular
    if int(groups.min()) < 0 or int(groups.max()) >= ceil_div(inputs, size):
        members.fault("weight_g_idx", f"names the groups {int(groups.min())} to {int(groups.max())}")
        return None
    if not has_regular_sizes(groups, size):
        members.fault("weight_g_idx", f"does not give each group {size} of the {inputs} inputs")
        return None
    return groups


def _kept(bits: int) -> int:
    """The bits of the format that keeps these codes."""
    return 8 if bits > 4 else max(bits, 2)


def _codes(bits: int, words: Tensor) -> Tensor:
    """The codes of `bits` bits in the format that keeps them."""
    if bits == 1:
        return pack_bits(unpacked(words, 1) + 1, 2)
    if bits <= 4:
        return words.contiguous().view(torch.uint8)
    return (unpacked(words, bits).to(torch.int16) - (1 << bits - 1)).to(torch.int8)


def _of_outputs(bits: int, out: int, words: Tensor) -> Tensor:
    """Zeros [out, groups], dense along outputs in words [n, groups]."""
    codes = unpacked(words.t().contiguous(), bits)[:, :out]
    return (codes.to(torch.int16) - (1 << bits - 1)).to(torch.int8).t().contiguous()
