"""The search for faster launches of the matrix products, on the device itself: for `bench/gpu.py --tune`, whose rows
are committed in configurations.py, and for `triton_autotune`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from infuse.ops.linear import linear, quantized_linear
from infuse.ops.triton.configurations import (
    FOUND,
    Key,
    Tiles,
    key_of,
    plain_row,
    plain_tiles,
    quantized_row,
    quantized_tiles,
)
from infuse.ops.triton.words import CODES, segment_of
from infuse.quant.parse import quant_format

COLD_BYTES = 256 << 20  # the copies of a weight together: several times the 50 MiB L2 of an H200, as in a model
RUNS = 20
PLAIN = "plain"

Timer = Callable[[Callable[[], object]], float]


def search(
    weights: Iterable[tuple[str, int, int]], dtype: torch.dtype, device: torch.device, *, rows: tuple[int, ...] = (1, 8),
    timer: Timer | None = None,
) -> dict[Key, Tiles]:  # fmt: skip
    """The fastest launch for each weight (format or "plain", outputs, inputs) and number of rows, each also used from
    now on.

    A candidate that does not compile or does not fit the device is passed over. `timer` gives the seconds of one call.
    """
    timer = timer or _device_seconds
    best: dict[Key, Tiles] = {}
    for text, outputs, inputs in dict.fromkeys(weights):
        for count in rows:
            key, start = _start(text, count, outputs, inputs)
            call = _call(text, count, outputs, inputs, dtype, device)
            times: dict[Tiles, float] = {}
            for tiles in candidates(start):
                FOUND[key] = tiles
                try:
                    times[tiles] = timer(call)
                except Exception as error:  # Triton's own errors, whose classes are its affair
                    if "OutOfResources" not in type(error).__name__ and "Compil" not in type(error).__name__:
                        raise
            FOUND[key] = best[key] = min(times, key=times.__getitem__) if times else start
    return best


def candidates(start: Tiles) -> Iterator[Tiles]:
    """`start`, then its neighbours: outputs, depth with warps, and splits, each halved and doubled."""
    seen = set()
    for outputs in (start.outputs, start.outputs // 2, start.outputs * 2):
        for depth, warps in ((start.depth, start.warps), (start.depth // 2, start.warps // 2), (start.depth * 2, start.warps * 2),
                             (start.depth * 2, start.warps)):  # fmt: skip
            for splits in (start.splits, start.splits * 2, max(start.splits // 2, 1)):
                for stages in (start.stages, start.stages + 1) if start.rows > 1 else (start.stages,):
                    one = replace(start, outputs=outputs, depth=depth, warps=warps, splits=splits, stages=stages)
                    least = 16 if start.rows > 1 else 1
                    if outputs >= least and depth >= 1 and 1 <= warps <= 16 and one not in seen:
                        seen.add(one)
                        yield one


def _start(text: str, rows: int, outputs: int, inputs: int) -> tuple[Key, Tiles]:
    """The key of this product and what is launched without a search."""
    if text == PLAIN:
        key = key_of(PLAIN, rows, outputs, inputs)
        FOUND.pop(key, None)
        return key, plain_row(outputs, inputs, 2) if rows == 1 else plain_tiles(rows, outputs, inputs)
    format = quant_format(text)
    words = segment_of(inputs, format.group_count(inputs)) // CODES[format.name]
    key = key_of(format.name, rows, outputs, inputs)
    FOUND.pop(key, None)
    if rows == 1:
        return key, quantized_row(outputs, inputs, format.name, words)
    return key, quantized_tiles(rows, outputs, inputs, format.name, words)


def _call(
    text: str, rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """The product with the next of several copies of a weight; the values do not matter."""
    x = torch.ones(rows, inputs, dtype=dtype, device=device)
    if text == PLAIN:
        size = outputs * inputs * dtype.itemsize
        plain = [torch.ones(outputs, inputs, dtype=dtype, device=device) for _ in range(_copies(size, device))]
        return _in_turns(plain, lambda weight: linear.body("triton")(x, weight, None))
    format = quant_format(text)
    size, groups = outputs * inputs * format.bits // 8, format.group_count(inputs)
    words = [
        torch.ones(outputs, inputs * format.bits // 32, dtype=torch.int32, device=device)
        for _ in range(_copies(size, device))
    ]
    scale = torch.ones(outputs, groups, dtype=torch.bfloat16, device=device)
    zero = None if format.symmetric else torch.ones(outputs, groups, dtype=torch.int8, device=device)
    return _in_turns(
        words, lambda data: quantized_linear.body("triton")(x, data, scale, zero, None, outputs, inputs, text)
    )


def _copies(size: int, device: torch.device) -> int:
    return -(-COLD_BYTES // max(size, 1)) if device.type == "cuda" else 1


def _in_turns(weights: list[Tensor], run: Callable[[Tensor], object]) -> Callable[[], object]:
    turn = iter(range(1 << 62))
    return lambda: run(weights[next(turn) % len(weights)])


def _device_seconds(call: Callable[[], object]) -> float:
    """One call's time on the current CUDA device: of RUNS in a graph, so that the host's time does not count, the best
    of three.
    """
    call()  # compiles
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(RUNS):
            call()
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / RUNS)
    return min(times)
