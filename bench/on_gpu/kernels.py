"""Where the time of one decode step goes: each kind of matrix beside the time that its bytes need, and every kernel by
name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from infuse.layers.linear import Linear, QuantizedLinear
from on_gpu.runs import Bounds, device_seconds


@dataclass(frozen=True)
class Matrix:
    """One kind of matrix in a step: how many there are, seconds for all of them, the seconds that their bytes need, and
    the share.
    """

    kind: str
    count: int
    seconds: float
    bound_seconds: float

    @property
    def share(self) -> float:
        return self.bound_seconds / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


def matrices(model: nn.Module, batch: int, bounds: Bounds, device: torch.device) -> list[Matrix]:
    """All matrices of a kind one after the other, as a step reads them, so that no cache serves them; the costliest
    first.
    """
    by_kind: dict[str, list[tuple[Any, Tensor]]] = defaultdict(list)
    dtype = next(p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    for name, module in model.named_modules():
        if isinstance(module, (Linear, QuantizedLinear)):
            kind = ".".join(part for part in name.split(".")[-2:] if not part.isdigit())
            by_kind[kind].append((module, torch.randn(batch, 1, module.in_features, dtype=dtype, device=device)))
    found = []
    for kind, group in by_kind.items():

        def run(group: Any = group) -> None:
            for module, x in group:
                module(x)

        moved = sum(
            x.nbytes
            + batch * module.out_features * x.element_size()
            + sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
            for module, x in group
        )
        with torch.inference_mode():
            found.append(Matrix(kind, len(group), device_seconds(run, device, 10), moved / bounds.read_bytes))
    return sorted(found, key=lambda matrix: -matrix.seconds)


def kernels(model: Any, batch: int, steps: int, device: torch.device) -> list[tuple[str, float, float]]:
    """(name, calls for each step, seconds for each step) of what runs while `model` generates; the costliest first."""
    ids = torch.randint(3, 250, (batch, 8), device=device)

    def run() -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, do_sample=False)

    return _profiled(run, steps, device)


def prompt_kernels(model: Any, tokens: int, device: torch.device) -> list[tuple[str, float, float]]:
    """The same of a prompt of so many tokens: what is missing of its seconds, the device waits for the host."""
    ids = torch.randint(3, 250, (1, tokens), device=device)

    def run() -> None:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return _profiled(run, 1, device)


def _profiled(run: Callable[[], None], times: int, device: torch.device) -> list[tuple[str, float, float]]:
    cuda = device.type == "cuda"
    run()
    with profile(activities=[ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]) as profiled:
        run()
        if cuda:
            torch.cuda.synchronize(device)
    rows = []
    for event in profiled.key_averages():
        micros = event.self_device_time_total if cuda else event.self_cpu_time_total
        if micros > 0:
            rows.append((event.key, event.count / times, micros / 1e6 / times))
    return sorted(rows, key=lambda row: -row[2])
