"""`infuse bench`: time a model, compute the bounds, and make the table of both."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    import torch

PROBE_BYTES = 1 << 28  # larger than any cache; a quarter of what bench/probe.py reads


@dataclass(frozen=True)
class Speed:
    """Seconds to the first token, and seconds of each later step."""

    prefill_seconds: float
    step_seconds: float


def timed(model: Any, ids: torch.Tensor, new_tokens: int) -> Speed:
    first = _seconds(model, ids, 1)
    return Speed(first, (_seconds(model, ids, new_tokens) - first) / (new_tokens - 1))


def _seconds(model: Any, ids: torch.Tensor, new_tokens: int) -> float:
    """The time of one greedy generation of exactly `new_tokens`."""
    import torch

    start = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens
    )
    if ids.device.type == "cuda":
        torch.cuda.synchronize(ids.device)
    return time.perf_counter() - start


def middle(speeds: list[Speed]) -> Speed:
    return Speed(median(speed.prefill_seconds for speed in speeds), median(speed.step_seconds for speed in speeds))


def multiplications(model: Any) -> int:
    """The multiplications of one token in the layers' matrices. Takes the original model, as packing changes shapes."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {id(module.weight) for module in ends if module is not None}
    return sum(weight.numel() for weight in model.parameters() if weight.dim() > 1 and id(weight) not in tables)


def bound(model: Any, multiplications: int) -> Speed:
    """Prefill: `multiplications` at the probed matmul rate. Step: all weights read once at the probed bandwidth."""
    from infuse.profile.probe import matmul_rate, read_bandwidth

    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if getattr(head, "weight", None) is not table:
        tensors.pop(id(table), None)  # a step reads one row of an untied table
    step_bytes = sum(tensor.nbytes for tensor in tensors.values())
    bandwidth = read_bandwidth(device=model.device, size_bytes=PROBE_BYTES).best
    return Speed(2 * multiplications / matmul_rate(model.dtype, device=model.device), step_bytes / bandwidth)


def table(title: str, speeds: dict[str, Speed], batch: int) -> Table:
    """A row for each model and one for the bound. The ratio is how many times faster infuse is than the row."""
    ours = speeds["infuse"]
    columns = ("", "prefill", "ratio", "decode, tokens/s", "ratio")
    made = Table(*columns, title=title, title_justify="left", caption_justify="left")
    for name, speed in speeds.items():
        decode = f"{batch / speed.step_seconds:,.1f}" if speed.step_seconds > 0 else "too short to time"
        prefill_ratio = _ratio(speed.prefill_seconds, ours.prefill_seconds)
        step_ratio = _ratio(speed.step_seconds, ours.step_seconds)
        made.add_row(name, _duration(speed.prefill_seconds), prefill_ratio, decode, step_ratio)
    made.caption = "ratio: how many times faster infuse is. bound: the probed matmul rate (prefill), "
    made.caption += "all weights read once a step (decode)"
    if any(speed.step_seconds <= 0 for speed in speeds.values()):
        made.caption += ". too short to time: give more --new-tokens or --repeats"
    return made


def _duration(seconds: float) -> str:
    """Three digits, in a unit that suits them."""
    unit, scale = next(((unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e-3)) if seconds >= scale), ("us", 1e-6))
    value = seconds / scale
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def _ratio(theirs: float, ours: float) -> str:
    if theirs <= 0 or ours <= 0:
        return "-"
    ratio = theirs / ours
    if ratio < 0.001:
        return "below 0.001"
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"
