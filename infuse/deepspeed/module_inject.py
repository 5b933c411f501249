"""`deepspeed.module_inject`: slice and quantize single tensors, and find the layers of a model.

init_inference replaces layers; functions for other ways validate their input and raise NotAvailable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from infuse.config.inference import InferenceConfig
from infuse.engine import init_inference
from infuse.engine.pipeline import is_pipeline
from infuse.ground.errors import ConfigError, NotAvailable
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
    """Copy a checkpoint's tensor into this rank's tensor; `out_dim` and `in_dim` are the axes of `dst`.

    If `src` is `mp_size` times as large along one axis, copy the part of this rank of `mp_group`. Raises ConfigError
    for other shapes that differ.
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
        """`dst` as a parameter with this rank's part of q, k and v, each one third of `src` along `out_dim`."""
        return self._copied(dst, src, split_into=3)

    def copy(
        self, dst: torch.Tensor, src: torch.Tensor | None, int8: bool = False, allocate_tensor: bool = False
    ) -> nn.Parameter | None:
        """`dst` as a parameter with this rank's part of `src`; None for None.

        int8: `src` is transposed, and the result has its shape. allocate_tensor: leave `dst` itself unchanged.
        """
        if int8 and src is not None and dst.dim() == 2:
            dst = dst.reshape(dst.shape[::-1])
        return self._copied(torch.empty_like(dst) if allocate_tensor else dst, src, split_into=1)

    def _copied(self, dst: torch.Tensor, src: torch.Tensor | None, split_into: int) -> nn.Parameter | None:
        if src is None:
            return None
        if dst.is_meta or src.is_meta:
            raise ConfigError("dst, src: found a tensor on meta; possible: tensors with values")
        with torch.no_grad():
            dst.copy_(src if dst.shape == src.shape else self._part(dst, src, split_into))
        copied = nn.Parameter(dst.detach(), requires_grad=False)
        if hasattr(src, "scale"):  # quantized by GroupQuantizer
            copied.scale = src.scale  # type: ignore[attr-defined]
        return copied

    def _part(self, dst: torch.Tensor, src: torch.Tensor, split_into: int) -> torch.Tensor:
        """This rank's part of each of the `split_into` equal pieces of `src`, cut along its larger axis."""
        alike = src.dim() == dst.dim() <= 2
        cut = [axis for axis in range(src.dim()) if src.shape[axis] != dst.shape[axis]] if alike else []
        if len(cut) != 1 or dst.shape[cut[0]] * self.mp_size != src.shape[cut[0]]:
            raise ConfigError(
                f"dst, src: found the shapes {tuple(dst.shape)} and {tuple(src.shape)}; possible: equal shapes of one "
                f"or two axes, or a src that is mp_size={self.mp_size} times as large along one axis"
            )
        (axis,) = cut
        if split_into > 1 and (dst.shape[axis] % split_into or (src.dim() == 2 and axis != self.out_dim)):
            sizes = f"{dst.shape[axis]} and {src.shape[axis]} along axis {axis}"
            raise ConfigError(f"dst, src: found {sizes}; q, k and v need thirds of out_dim")
        pieces = [piece.chunk(self.mp_size, dim=axis)[self.gpu_index] for piece in src.chunk(split_into, dim=axis)]
        return torch.cat(pieces, dim=axis)


class GroupQuantizer:
    """Symmetric integer quantization of one tensor, in the layout of DeepSpeed's kernels.

    Groups are cut along the first axis: `num_groups` of them, or groups of `group_size` rows if num_groups is 0.
    q_int8=False: `quantize` returns its input as a parameter with an empty scale.
    """

    def __init__(self, q_int8: bool = True, group_size: int = 1, num_bits: int = 8, num_groups: int = 0):
        if not 2 <= num_bits <= 8:
            raise ConfigError(f"num_bits: found {num_bits!r}; possible: 2 to 8, the result is held in int8")
        if group_size < 1 or num_groups < 0:
            numbers = f"{group_size!r}, {num_groups!r}"
            raise ConfigError(f"group_size, num_groups: found {numbers}; possible: from 1, and from 0")
        self.q_int8, self.group_size, self.num_bits, self.num_groups = q_int8, group_size, num_bits, num_groups

    def quantize(self, inputs: torch.Tensor, qkv: bool = True, count: int = 1, parallel_dim: int = 0) -> nn.Parameter:
        """`inputs` as an int8 parameter of the same shape and device, with `scale`: float32 (groups, 3).

        value = int × scale. Flat, `scale` holds the scales of the whole tensor, which the integers use, then those of
        its first half along `parallel_dim`, then those of its second half. A group of zeros has scale 0. `count` has no
        effect, as in DeepSpeed; qkv=False leaves the tensor unchanged.
        """
        if not self.q_int8 or not qkv:
            unchanged = nn.Parameter(inputs, requires_grad=False)
            unchanged.scale = torch.empty(1)  # type: ignore[attr-defined]
            return unchanged
        groups = self.num_groups or inputs.shape[0] // self.group_size
        if inputs.shape[parallel_dim] % 2 or groups < 1 or (inputs.numel() // 2) % groups:
            raise ConfigError(
                f"inputs: found the shape {tuple(inputs.shape)} for {groups} groups; possible: an even axis "
                f"{parallel_dim}, and halves that divide into the groups"
            )
        source = inputs.detach().float()
        most = 2 ** (self.num_bits - 1)
        parts = (source, *source.chunk(2, dim=parallel_dim))
        scales = [part.reshape(groups, -1).abs().amax(dim=1) / most for part in parts]
        divisor = torch.where(scales[0] == 0, 1.0, scales[0])
        integers = (source.reshape(groups, -1) / divisor[:, None]).round().clamp(-most, most - 1)
        quantized = nn.Parameter(integers.reshape(inputs.shape).to(torch.int8), requires_grad=False)
        quantized.scale = torch.cat(scales).reshape(groups, 3)  # type: ignore[attr-defined]
        return quantized


class AutoTP:
    """Find the row-parallel linears of a model by its structure."""

    @staticmethod
    def tp_parser(model: nn.Module) -> list[tuple[type[nn.Module], list[str]]]:
        """[(layer class, names of its row-parallel linears)], for `injection_policy=dict(...)`; live or on meta.

        Names start after the last number in their path, so that they hold in every layer. Classes without row-parallel
        linears are left out.
        """
        _check_model(model)
        return row_names(model)


def get_transformer_name(replaced_module: nn.Module) -> str:
    """Dotted path of the ModuleList with the most parameters, which holds the model's layers; "" if there is none."""
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
    """Replaces layers of class `orig_layer_impl` in DeepSpeed. Raises NotAvailable here: use init_inference."""
    _check_model(model)
    is_class = isinstance(orig_layer_impl, type) and issubclass(orig_layer_impl, nn.Module)
    if orig_layer_impl is not None and not is_class:
        raise ConfigError(f"orig_layer_impl: found {orig_layer_impl!r}; possible: a class of nn.Module, or None")
    InferenceConfig.make(config)
    raise NotAvailable("replace_transformer_layer: layers are replaced through infuse.init_inference(model, ...) only")


def generic_injection(module: Any, dtype: Any = None, enable_cuda_graph: bool = True) -> None:
    """Replace the layers of a diffusers pipeline in place. Does nothing for an nn.Module, as in DeepSpeed.

    Raises ConfigError for anything else.
    """
    settings = InferenceConfig.make(dtype=dtype, enable_cuda_graph=enable_cuda_graph)
    if is_pipeline(module):
        init_inference(module, settings)
    elif not isinstance(module, nn.Module):
        raise ConfigError(
            f"module: found {type(module).__name__}; possible: a pipeline of diffusers, or an nn.Module, which stays"
        )


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: found {type(model).__name__}; possible: an nn.Module")
