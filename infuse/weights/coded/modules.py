"""Tensors of modules that hold their weights in codes, under the names and in the layouts of files.

Modules are those of bitsandbytes, compressed-tensors, quanto and gptqmodel, and linears with weights of torchao's
classes; they are known by names, and none of these libraries is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infuse.architectures.foreign.plain import patched
from infuse.weights.coded.form import ceil_div
from infuse.weights.coded.settings import Settings
from infuse.weights.coded.tinygemm import PackedForCPU, TilePacked, offsets
from infuse.weights.lazy import InMemory, LazyTensor, Shape, Slices, Stored

BITSANDBYTES, COMPRESSED, TORCHAO, QUANTO = "bitsandbytes", "compressed-tensors", "torchao", "quanto"
GPTQMODEL = "gptqmodel"
# Its classes that hold what files have until their first forward; others repack it when it is loaded.
_GPTQ = ("TorchLinear", "TorchFusedLinear", "TorchAtenLinear", "TorchCpuAvx512Linear", "TritonV2Linear")
_AWQ = (
    "AwqTorchLinear", "TorchFusedAwqLinear", "TorchAtenAwqLinear", "TorchCpuAvx512AwqLinear", "AwqGEMMLinear",
    "AwqGEMMTritonLinear",
)  # fmt: skip
_OF_GPTQ = ("qweight", "qzeros", "scales", "g_idx")
_UNPACKING = ("wf_unsqueeze_zero", "wf_unsqueeze_neg_one")  # of gptqmodel: how far words are shifted
_FOUR, _EIGHT = ("Linear4bit", "LinearNF4", "LinearFP4"), ("Linear8bitLt",)
_PACKAGE, _OF_QUANTO = "compressed_tensors", "optimum.quanto."
_BAND, _PAIRS = 32, 32  # bitsandbytes packs bands of 32 rows for its kernel, in pieces of 32 bytes of two codes each
_KINDS_OF_QUANTO = ("WeightQBytesTensor", "WeightQBitsTensor")  # others are packed for one kernel
_CODES = (torch.int8, torch.uint8, torch.float8_e4m3fn)


class UnreadableCodes(Exception):
    """Why a module's codes cannot be read."""


@dataclass(eq=False)
class Memory:
    """Tensors in memory as those of a file, on the CPU. `metadata`: as that of a file of safetensors."""

    tensors: Mapping[str, LazyTensor]
    path: Path = Path("the model in memory")
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def stored(self) -> Mapping[str, Stored]:
        return {name: Stored(tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}

    def read(self, name: str, part: Slices = ()) -> Tensor:
        return self.tensors[name].read(part).cpu()


@dataclass(frozen=True, eq=False)
class Unpacked:
    """Bytes [rows * width, 1] of two codes each, row by row, the first code in the high nibble.

    `packed`, uint8 [rows, width], is what the first forward of bitsandbytes makes of them on CPUs with AVX-512.
    """

    packed: Tensor

    dtype, coded = torch.uint8, None

    @property
    def shape(self) -> Shape:
        return (self.packed.numel(), 1)

    def read(self, part: Slices = ()) -> Tensor:
        start, stop, _ = (part[0] if part else slice(None)).indices(self.packed.numel())
        width = self.packed.shape[1]
        first, last = start // width // _BAND * _BAND, ceil_div(ceil_div(stop, width), _BAND) * _BAND
        pieces = self.packed[first:last].reshape(-1, _PAIRS)
        codes = torch.cat((pieces & 15, pieces >> 4), dim=1)
        pairs = codes.reshape(-1, width, _BAND, 2).transpose(1, 2).reshape(-1, 2)
        joined = pairs[:, 0] << 4 | pairs[:, 1]
        return joined[start - first * width : stop - first * width, None]


_Leaves = dict[str, Tensor | Unpacked | TilePacked | PackedForCPU]


def coded_by(module: nn.Module) -> str | None:
    """The library, of those whose modules are read, that holds this module's weights in codes; None for any other."""
    if type(module).__module__.partition(".")[0] == BITSANDBYTES and type(module).__name__ in (*_FOUR, *_EIGHT):
        return BITSANDBYTES
    if type(vars(module).get("quantization_scheme")).__module__.partition(".")[0] == _PACKAGE:
        return COMPRESSED
    if type(module).__module__.partition(".")[0] == GPTQMODEL and "qweight" in module._buffers:
        return GPTQMODEL
    if type(module).__module__.startswith(_OF_QUANTO) and type(module).__name__ == "QLinear":
        return QUANTO
    return TORCHAO if type(module._parameters.get("weight")).__module__.partition(".")[0] == TORCHAO else None


def file_tensors(path: str, module: nn.Module) -> dict[str, LazyTensor]:
    """The tensors that a file has for the module at `path`, except its bias. UnreadableCodes says why there are none.

    For modules with a `coded_by`.
    """
    library = coded_by(module)
    if library == COMPRESSED:
        leaves = _of_compressed(path, module)
    elif patched(module):
        raise UnreadableCodes(f"{path} has a forward set on the instance")
    elif library == TORCHAO:
        leaves = _of_torchao(path, module)
    elif library == QUANTO:
        leaves = _of_quanto(path, module)
    elif library == GPTQMODEL:
        leaves = _of_gptqmodel(path, module)
    else:
        leaves = _of_four_bits(path, module) if type(module).__name__ in _FOUR else _of_eight_bits(path, module)
    return {f"{path}.{leaf}": InMemory(one) if isinstance(one, Tensor) else one for leaf, one in leaves.items()}


def file_metadata(path: str, module: nn.Module) -> dict[str, str]:
    """What the metadata of a file has for the module at `path`: of torchao's weights their class and blocks."""
    if coded_by(module) != TORCHAO:
        return {}
    weight: Any = module.weight
    told = {name: getattr(weight, name, None) for name in ("block_size", "target_dtype", "activation_quantization")}
    rounds: dict[str, Any] | None = None if getattr(weight, "act_quant_kwargs", None) is None else {}
    data = {**told, "shape": list(weight.shape), "target_dtype": str(told["target_dtype"]), "act_quant_kwargs": rounds}
    return {f"{path}.weight": json.dumps({"_type": type(weight).__name__, "_data": data}, default=str)}


def is_rounded(module: nn.Module) -> bool:
    """True if a forward of bitsandbytes has rounded the scales of this module to bfloat16."""
    return bool(getattr(_state_of(module), "packing_format_for_cpu", False))


def _state_of(module: Any) -> Any:
    state = getattr(module.weight, "quant_state", None)
    return getattr(module, "quant_state", None) if state is None else state


def _of_four_bits(path: str, module: Any) -> _Leaves:
    """Of a Linear4bit. Its own state dict would quantize scales again that its first forward has dequantized."""
    state, weight = _state_of(module), _plain(module.weight)
    if state is None or state.shape is None or weight.is_floating_point():
        raise UnreadableCodes(f"{path} has no codes yet: move the model to its device first")
    told = {"quant_type": state.quant_type, "blocksize": state.blocksize, "shape": list(state.shape)}
    leaves: _Leaves = {"weight": weight, "weight.quant_map": _plain(state.code)}
    absmax = _plain(state.absmax)
    if is_rounded(module):
        out, inputs = state.shape
        if weight.shape != (out, inputs // 2) or out % _BAND or absmax.shape != (inputs // state.blocksize, out):
            raise UnreadableCodes(f"{path} is packed in an unknown way, {tuple(weight.shape)} for {tuple(state.shape)}")
        leaves["weight"], absmax = Unpacked(weight), absmax.t().reshape(-1).float()
    elif state.nested:
        told |= {"nested_blocksize": state.state2.blocksize, "nested_offset": float(state.offset)}
        leaves["weight.nested_absmax"] = _plain(state.state2.absmax)
        leaves["weight.nested_quant_map"] = _plain(state.state2.code)
    leaves["weight.absmax"] = absmax
    text = json.dumps(told).encode()
    leaves[f"weight.quant_state.bitsandbytes__{state.quant_type}"] = torch.tensor(list(text), dtype=torch.uint8)
    return leaves


def _of_eight_bits(path: str, module: Any) -> _Leaves:
    """Of a Linear8bitLt, whose scales move from the weight to the module's state in the first forward."""
    state = getattr(module, "state", None)
    scale = getattr(module.weight, "SCB", None)
    scale = getattr(state, "SCB", None) if scale is None else scale
    weight = _plain(module.weight)
    if scale is None or weight.dtype != torch.int8:
        raise UnreadableCodes(f"{path} has no codes, but weights in {str(weight.dtype).removeprefix('torch.')}")
    return {"weight": weight, "SCB": _plain(scale)}


def _of_compressed(path: str, module: nn.Module) -> _Leaves:
    """Of a linear of compressed-tensors before the first forward of the model, which makes plain values of codes."""
    if type(module) is not nn.Linear:
        raise UnreadableCodes(f"compressed-tensors quantizes {path} ({type(module).__name__}), not linears alone")
    forward = vars(module).get("forward")
    code: Any = getattr(forward, "__func__", forward)
    if forward is not None and getattr(code, "__globals__", {}).get("__name__", "").partition(".")[0] != _PACKAGE:
        raise UnreadableCodes(f"{path} has a forward set on the instance")
    held = {**module._parameters, **module._buffers}
    tensors = {leaf: _plain(one) for leaf, one in held.items() if one is not None and leaf != "bias"}
    weight = tensors.get("weight")
    if "weight_packed" not in tensors and (weight is None or weight.dtype not in _CODES):
        raise UnreadableCodes(
            "compressed-tensors has made plain values of its codes, as the first forward does; its linears round "
            "activations where the config says so: call init_inference before the first forward"
        )
    return dict(tensors)


def _of_torchao(path: str, module: nn.Module) -> _Leaves:
    """Of a linear whose weight is of a class of torchao: its parts."""
    weight: Any = module.weight
    parts = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else ()
    if type(module) is not nn.Linear or "qdata" not in parts:
        kind = f"{type(weight).__name__} of torchao in a {type(module).__name__}"
        raise UnreadableCodes(f"{path} holds a {kind}, which is not read")
    return {f"_weight_{part}": getattr(weight, part) for part in parts}


def gptqmodel_settings(modules: Sequence[Any], settings: Settings | None) -> Settings:
    """What a config would say of these modules of gptqmodel, which may have converted their zeros when it loaded them.

    `settings`: those of the model's config. UnreadableCodes if modules of both methods, or versions, are there.
    """
    if any(type(module).__name__ in _AWQ for module in modules):
        sizes = {module.group_size for module in modules}
        if len(sizes) > 1 or not all(type(module).__name__ in _AWQ for module in modules):
            raise UnreadableCodes("linears of AWQ have other groups, or are beside others")
        values = dict(bits=modules[0].bits, group_size=sizes.pop(), version="gemm")
        return Settings("the model in memory", "awq", values)
    formats = {module.qzero_format() for module in modules}
    if len(formats) > 1:
        raise UnreadableCodes("linears of GPTQ have zeros of both versions")
    told = {"sym": modules[0].sym, **({} if settings is None else settings.values)}
    kinds = dict.fromkeys((module.bits, module.group_size) for module in modules)
    (bits, size), *others = kinds
    dynamic = {f"+:{place}": dict(bits=bits, group_size=size) for place, (bits, size) in enumerate(others)}
    values = dict(bits=bits, group_size=size, sym=told["sym"], desc_act=False, dynamic=dynamic)
    return Settings("the model in memory", "gptq", {**values, "format": "gptq" if formats == {1} else "gptq_v2"})


def _of_gptqmodel(path: str, module: Any) -> _Leaves:
    """Of a linear of gptqmodel, before its first forward, which packs the codes for its product."""
    kind = type(module).__name__
    names = _OF_GPTQ[: 3 if kind in _AWQ else 4]
    if kind not in (*_AWQ, *_GPTQ):
        raise UnreadableCodes(f"{path} is a {kind} of gptqmodel, which packs codes for one kernel")
    held = {name: one for name, one in {**module._buffers, **module._parameters}.items() if one is not None}
    if getattr(module, "linear_mode", None) == "inference" or held["qweight"].dtype is not torch.int32:
        raise UnreadableCodes(f"{path} was packed by a forward: call init_inference before the first one")
    if more := sorted(held.keys() - {*names, *_UNPACKING, "bias"}):
        raise UnreadableCodes(f"{path} has {', '.join(more)}, which is not read")
    if getattr(module, "adapter", None) is not None:
        raise UnreadableCodes(f"{path} has an adapter")
    return {name: _plain(held[name]) for name in names if name in held}


def _of_quanto(path: str, module: Any) -> _Leaves:
    """Of a QLinear of quanto whose weight is frozen: the parts of its weight."""
    if (rounds := getattr(module, "activation_qtype", None)) is not None:
        what = f"rounds activations to {getattr(rounds, 'name', rounds)} with one scale for all"
        raise UnreadableCodes(f"{path} {what}, which is not supported: quantize the weights alone")
    weight = module.weight
    if not hasattr(weight, "__tensor_flatten__"):
        raise UnreadableCodes(f"{path} has plain weights that each forward quantizes: call quanto's freeze first")
    (out, inputs), parts = weight.shape, weight.__tensor_flatten__()[0]
    if parts == ["_data", "_scale_shift"]:
        return _of_tinygemm(path, weight._data._data, weight._scale_shift, (out, inputs))
    kind = type(weight).__name__
    if kind not in _KINDS_OF_QUANTO or getattr(weight, "axis", 0) not in (0, None):
        raise UnreadableCodes(f"{path} holds a {kind} of quanto, which is not read")
    data = weight._data
    leaves = {"weight._data": data} if type(data) is Tensor else {"weight._data._data": data._data}
    return {**leaves, **{f"weight.{part}": getattr(weight, part) for part in parts if part != "_data"}}


def _of_tinygemm(path: str, data: Tensor, both: Tensor, shape: tuple[int, int]) -> _Leaves:
    """Of codes that are packed for PyTorch's own product: weight = scale * (code - 8) + zero, of `both` [G, out, 2]."""
    packed = InMemory(data)
    codes = TilePacked(packed, shape) if data.dim() == 4 else PackedForCPU(packed, shape)
    scale, zero = (part.t().reshape(-1, 1).contiguous() for part in both.unbind(-1))
    if (offset := offsets(scale, zero)) is None:
        raise UnreadableCodes(f"{path} has zeros that are too small beside its scales")
    return {"weight._data": codes, "weight._scale": scale, "weight._shift": -offset}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().as_subclass(Tensor)
