"""Quantized weights on a CPU without kernels: dequantize them once if memory allows, and note it in the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from infuse import native, ops
from infuse.device import Device
from infuse.plan.step import Step


def refused_bodies(model: nn.Module, device: Device, dtype: torch.dtype, ranks: int) -> dict[str, str]:
    """Bodies that keep dequantized weights → reason, if the weights would need over half of the device's memory."""
    value_bytes = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize // ranks
    if 2 * value_bytes <= device.memory_bytes:
        return {}
    values, memory = f"{value_bytes / 1e9:,.1f} GB", f"{device.memory_bytes / 1e9:,.1f} GB"
    return dict.fromkeys(ops.HELD, f"the values would take {values}, more than half of the {memory} of memory")


def without_kernels(choices: Mapping[str, ops.Choice | None], steps: Iterable[Step], device: Device) -> list[str]:
    """Return a note if this CPU has no kernels for the formats of `steps`."""
    experts = choices.get("quantized_experts")
    if experts is not None and experts.body == ops.REFERENCE:
        why = dict(experts.declined).get("cpu", f"there are none for {device.kind}")
        return [
            f"SLOW: experts: each call dequantizes the experts that it uses. No kernels: {why}",
            *without_kernels({**choices, "quantized_experts": None}, steps, device),
        ]
    choice, formats = choices.get("quantized_linear"), [format for step in steps for format in step.formats.values()]
    if choice is None or not formats or device.kind != "cpu":
        return []
    declined, what = dict(choice.declined), ", ".join(dict.fromkeys(formats))
    why = f"No kernels: {declined.get('cpu')}"
    if native.needs(device, torch.float32) is not None:  # otherwise only this dtype has no kernels
        why += ". `infuse env` says what there is, `infuse build` builds them"
    if choice.body in ops.HELD:
        dtype = choice.body.removeprefix("dequantized_")
        told = f"the weights are rounded to the format and held in {dtype}: as fast as the original, but not smaller"
        return [f"{what}: {told}. {why}"]
    if choice.body == ops.REFERENCE:
        reasons = (declined[body] for body in ops.HELD if body in declined)
        room = next((f", and it is not held dequantized: {reason}" for reason in reasons), "")
        told = f"each call dequantizes every weight, up to 45 times slower than without quant{room}"
        return [f"SLOW: {what}: {told}. {why}"]
    return []
