"""`deepspeed.module_inject` as scripts know it: slicing and quantizing single tensors, and finding the layers of a
model.

Replacing layers is init_inference's work; what would need parts that this version does not have validates its input and
raises NotAvailable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from infuse.config.inference import InferenceConfig
from infuse.errors import ConfigError, NotAvailable
from infuse.unknown.roles import row_names

__all__ = [
    "AutoTP",
    "GroupQuantizer",
    "ReplaceWithTensorSlicing",
    "generic_injection",
    "get_transformer_name",
    "replace_transformer_layer",
]


class ReplaceWithTensorSlicing:
    """Copies a checkpoint's tensor into this rank's tensor; `out_dim` and `in_dim` are the axes of `dst`.

    Equal shapes are copied. Where `src` is `mp_size` times as large along one axis, the part of this rank of `mp_group`
    is.
    ConfigError: any other shapes.
    """

    def __init__(self, mp_group: Any = None, mp_size: int = 1, out_dim: int = 1, in_dim: int = 0):
        if not isinstance(mp_size, int) or mp_size < 1:
            raise ConfigError(f"mp_size: found {mp_size!r}; possible: an integer of at least 1")
        if {out_dim, in_dim} != {0, 1}:
            raise ConfigError(f"out_dim, in_dim: found {out_dim!r}, {in_dim!r}; possible: 0 and 1, or 1 and 0")
        self.mp_size, self.out_dim, self.in_dim = mp_size, out_dim, in_dim
        self.gpu_index = 0 if mp_group is None else torch.distributed.get_rank(mp_group)
        if not 0 <= self.gpu_index < mp_size:
            raise ConfigError(f"mp_group, mp_size: found rank {self.gpu_index} of the group, and mp_size={mp_size}")

    def qkv_copy(self, dst: torch.Tensor, src: torch.Tensor | None) -> nn.Parameter | None:
        """`dst` as a parameter with this rank's part of q, k and v of `src`, which hold one third each of `out_dim`."""
        return self._copied(dst, src, split_into=3)

    def copy(
        self, dst: torch.Tensor, src: torch.Tensor | None, int8: bool = False, allocate_tensor: bool = False
    ) -> nn.Parameter | None:
        """`dst` as a parameter with this rank's part of `src`; None for None.

        int8: `src` lies transposed to `dst`, and the result has its shape. allocate_tensor: `dst` itself stays
        untouched.
        """
        if int8 and src is not None and dst.dim() == 2:
            dst = dst.reshape(dst.shape[::-1])
        return self._copied(torch.empty_like(dst) if allocate_tensor else dst, src, split_into=1)

    def _copied(self, dst: torch.Tensor, src: torch.Tensor | None, split_into: int) -> nn.Parameter | None:
        if src is None:
            return None
        if dst.is_meta or src.is_meta:
            raise ConfigError("found a tensor on meta, which holds no values; possible: tensors with values")
        with torch.no_grad():
            dst.copy_(src if dst.shape == src.shape else self._part(dst, src, split_into))
        copied = nn.Parameter(dst.detach(), requires_grad=False)
        if hasattr(src, "scale"):  # a quantized tensor carries its scale along, as GroupQuantizer gives it
            copied.scale = src.scale  # type: ignore[attr-defined]
        return copied

    def _part(self, dst: torch.Tensor, src: torch.Tensor, split_into: int) -> torch.Tensor:
        """This rank's part of `src` along the axis on which it is larger: of each of its `split_into` equal pieces,
        side by side.
        """
        cut = [axis for axis in range(src.dim()) if src.dim() == dst.dim() and src.shape[axis] != dst.shape[axis]]
        if (
            src.dim() != dst.dim()
            or src.dim() > 2
            or len(cut) != 1
            or dst.shape[cut[0]] * self.mp_size != src.shape[cut[0]]
        ):
            raise ConfigError(
                f"dst, src: found the shapes {tuple(dst.shape)} and {tuple(src.shape)}; possible: equal shapes of one or two axes, "
                f"or a src that is mp_size={self.mp_size} times as large along one axis"
            )
        (axis,) = cut
        if split_into > 1 and (dst.shape[axis] % split_into or (src.dim() == 2 and axis != self.out_dim)):
            found = f"{dst.shape[axis]} and {src.shape[axis]} along axis {axis}"
            raise ConfigError(f"dst, src: found {found}; q, k and v need thirds of out_dim")
        pieces = [piece.chunk(self.mp_size, dim=axis)[self.gpu_index] for piece in src.chunk(split_into, dim=axis)]
        return torch.cat(pieces, dim=axis)


class GroupQuantizer:
    """Symmetric integer quantization of one tensor, as DeepSpeed's kernels take it.

    The tensor is cut along its first axis into `num_groups` groups, or into groups of `group_size` rows where
    num_groups is 0.
    q_int8=False: `quantize` returns its input as a parameter with an empty scale.
    """

    def __init__(self, q_int8: bool = True, group_size: int = 1, num_bits: int = 8, num_groups: int = 0):
        if not 2 <= num_bits <= 8:
            raise ConfigError(f"num_bits: found {num_bits!r}; possible: 2 to 8, the result is held in int8")
        if group_size < 1 or num_groups < 0:
            raise ConfigError(
                f"group_size, num_groups: found {group_size!r}, {num_groups!r}; possible: from 1, and from 0"
            )
        self.q_int8, self.group_size, self.num_bits, self.num_groups = q_int8, group_size, num_bits, num_groups

    def quantize(self, inputs: torch.Tensor, qkv: bool = True, count: int = 1, parallel_dim: int = 0) -> nn.Parameter:
        """`inputs` in int8, a parameter of the same shape and device, with `scale`: float32 (groups, 3).

        value = int × scale. Read flat, `scale` is groups of the whole tensor, then groups of its first half along
        `parallel_dim`, then of its second half; the integers belong to the first of them. A group of zeros has scale 0.
        `count` is accepted without effect, as in DeepSpeed; qkv=False leaves the tensor as it is.
        """
        if not self.q_int8 or not qkv:
            unchanged = nn.Parameter(inputs, requires_grad=False)
            unchanged.scale = torch.empty(1)  # type: ignore[attr-defined]
            return unchanged
        groups = self.num_groups or inputs.shape[0] // self.group_size
        if inputs.shape[parallel_dim] % 2 or groups < 1 or (inputs.numel() // 2) % groups:
            raise ConfigError(
                f"inputs: found the shape {tuple(inputs.shape)} for {groups} groups; possible: an even axis {parallel_dim}, "
                "and halves that divide into the groups"
            )
        source = inputs.detach().float()
        scales = [self._scale(part.reshape(groups, -1)) for part in (source, *source.chunk(2, dim=parallel_dim))]
        divisor = torch.where(scales[0] == 0, 1.0, scales[0])
        most = 2 ** (self.num_bits - 1)
        integers = (source.reshape(groups, -1) / divisor[:, None]).round().clamp(-most, most - 1)
        quantized = nn.Parameter(integers.reshape(inputs.shape).to(torch.int8), requires_grad=False)
        quantized.scale = torch.cat(scales).reshape(groups, 3)  # type: ignore[attr-defined]
        return quantized

    def _scale(self, groups_GN: torch.Tensor) -> torch.Tensor:
        return groups_GN.abs().amax(dim=1) / 2 ** (self.num_bits - 1)


class AutoTP:
    """Which linears end in a sum over ranks, found from a model's structure."""

    @staticmethod
    def tp_parser(model: nn.Module) -> list[tuple[type[nn.Module], list[str]]]:
        """[(layer class, names of its row-parallel linears)], as `injection_policy=dict(...)` takes them; live or on
        meta.

        Names are told from the last number in their path on, so that they hold in each of the model's layers. A class
        whose linears have no such roles is not among them.
        """
        _check_model(model)
        return row_names(model)


def get_transformer_name(replaced_module: nn.Module) -> str:
    """The dotted path of the ModuleList that holds the model's repeated layers: the one with most parameters; ""
    without one.
    """
    _check_model(replaced_module)
    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in replaced_module.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    }
    return max(sizes, key=sizes.__getitem__, default="")  # the first of equals is the outermost


def replace_transformer_layer(
    orig_layer_impl: Any, model: nn.Module, checkpoint_dict: Any, config: Any, model_config: Any
) -> nn.Module:
    """DeepSpeed: `model` with its layers of class `orig_layer_impl` replaced. Raises NotAvailable; use init_inference."""
    _check_model(model)
    if orig_layer_impl is not None and not (
        isinstance(orig_layer_impl, type) and issubclass(orig_layer_impl, nn.Module)
    ):
        raise ConfigError(f"orig_layer_impl: found {orig_layer_impl!r}; possible: a class of nn.Module, or None")
    InferenceConfig.make(config)
    raise NotAvailable(
        "replace_transformer_layer: this version replaces layers through infuse.init_inference(model, ...) only"
    )


def generic_injection(module: Any, dtype: Any = None, enable_cuda_graph: bool = True) -> None:
    """DeepSpeed: replaces the parts of a diffusers pipeline in place; nothing to do for an nn.Module. Raises
    NotAvailable.
    """
    InferenceConfig.make(dtype=dtype, enable_cuda_graph=enable_cuda_graph)
    if not isinstance(module, nn.Module):
        raise NotAvailable(f"generic_injection: this version does not replace the parts of a {type(module).__name__}")


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: found {type(model).__name__}; possible: an nn.Module")
