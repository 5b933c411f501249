"""Quantized weights on a CPU without kernels: dequantize them once if memory allows, and note it in the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from infuse import native, ops
from infuse.ground.device import Device
from infuse.plan.step import Step
from infuse.quant.parse import quant_format


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
    if choice is None or not formats or device.kind != "cpu" or choice.body not in (*ops.HELD, ops.REFERENCE):
        return []
    declined, notes = dict(choice.declined), list[str]()
    why = f"No kernels: {declined.get('cpu')}"
    if native.needs(device, torch.float32) is not None:  # otherwise only this dtype has no kernels
        why += ". `infuse env` says what there is, `infuse build` builds them"
    held = [format for format in formats if choice.body in ops.HELD and quant_format(format).has_nearest]
    if held:
        dtype, rounds = choice.body.removeprefix("dequantized_"), any(step.rounded for step in steps)
        made = "rounded to the format" if rounds else "dequantized"
        told = f"the weights are {made} and held in {dtype}: as fast as the original, but not smaller"
        notes.append(f"{', '.join(dict.fromkeys(held))}: {told}. {why}")
    if slow := dict.fromkeys(format for format in formats if format not in held):
        reasons = (declined[body] for body in ops.HELD if body in declined)
        reason = next(reasons, "its codes cannot be found again from values" if choice.body in ops.HELD else "")
        room = f", and it is not held dequantized: {reason}" if reason else ""
        told = f"each call dequantizes every weight, up to 45 times slower than without quant{room}"
        notes.append(f"SLOW: {', '.join(slow)}: {told}. {why}")
    return notes
