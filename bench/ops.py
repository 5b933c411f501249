"""Every op, every body, interleaved: the op's own cases and the shapes of Llama-3.2-1B, beside the probed bounds.

    python bench/ops.py [--op linear attention] [--dtype bfloat16] [--set llama] [--out bench/results/FILE.md]

Arguments beyond a megabyte are taken in turn from copies that no cache holds together, as a model's weights are; their
share is the time that the bound needs (the bytes at the bandwidth probed in the same turns, or the operations at the
probed rate: the longer) of the time that the body takes. What is smaller comes from the cache and has no bound here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from infuse.ground.device import Device
from infuse.ops import REFERENCE, Case, Op, registered
from infuse.profile.probe import Bandwidth, MemoryReader, matmul_rate, read_bandwidth
from llama_cases import LLAMA_CASES
from report import in_turns, markdown, probed, show

CPU = torch.device("cpu")
FROM_CACHE_BYTES = 1 << 20
COLD_BYTES = 256 << 20  # the copies of one case together: several times the L3 cache of one socket
BODY_SECONDS = 0.3  # for each body of a case, as far as the repeats allow


@dataclass(frozen=True)
class Timed:
    """One body on one case: the bytes of the arguments and the result, the operations of the products, the bandwidth
    meanwhile.
    """

    op: str
    case: str
    body: str
    seconds: list[float]
    bytes: int
    operations: int
    bandwidth: Bandwidth | None


def tensors(values: Any) -> list[Tensor]:
    flat = (one for value in (values if isinstance(values, tuple) else (values,)) for one in listed(value))
    return [value for value in flat if isinstance(value, Tensor)]


def listed(value: Any) -> list[Any]:
    """The buffers of a quantized weight, or the value alone."""
    return value if isinstance(value, list) else [value]


def moved_bytes(op: Op, case: Case) -> int:
    """Each argument read once and the result written once; of a cache that is appended to, only the new rows."""
    result = op.reference(*copied(case.args))
    read = tensors(case.args)
    if op.name == "rotary_append":
        qkv, cos, sin = case.args[:3]
        return 2 * qkv.nbytes + sum(turn.nbytes for turn in (cos, sin) if turn is not None)
    return sum(tensor.nbytes for tensor in (*read, *tensors(result)))


def operations(op: Op, args: tuple) -> int:
    """Multiplications and additions of the matrix products; nothing else is counted."""
    if op.name == "linear":
        return 2 * args[0].numel() * args[1].shape[0]
    if op.name == "quantized_linear":
        return 2 * args[0].numel() * args[3]
    if op.name == "attention":
        (batch, heads, tokens, width), length = args[0].shape, args[1].shape[2]
        hidden = tokens * (tokens - 1) // 2 if args[6] else 0  # causal: keys behind the query are not needed
        return 4 * batch * heads * width * (tokens * length - hidden)
    return 0


def copied(args: tuple) -> tuple:
    return tuple(
        [one.clone() for one in arg] if isinstance(arg, list) else arg.clone() if isinstance(arg, Tensor) else arg
        for arg in args
    )


def runs(op: Op, case: Case, size: int) -> tuple[list[str], list[Callable[[], object]]]:
    """The bodies that run here, and for each a function that calls it on the next copy of the arguments, in the body's
    own layout.
    """
    copies = 1 if size < FROM_CACHE_BYTES else -(-COLD_BYTES // size)
    inputs = [case.args, *(copied(case.args) for _ in range(copies - 1))]
    dtype = case.args[0].dtype if case.args[0].is_floating_point() else case.args[-1]
    names = [name for name, body in op.bodies.items() if body.needs(Device.of(CPU), dtype) is None]
    following = cycle(range(copies))  # one for all: a body must not find in the cache what the one before has read

    def over(name: str) -> Callable[[], object]:
        function, _ = op.prepared(name, inputs[0])
        prepared = inputs if op.bodies[name].layout is None else [op.prepared(name, args)[1] for args in inputs]
        return lambda: function(*prepared[next(following)])

    return names, [over(name) for name in names]


def timed(op: Op, case: Case, repeats: int, reader: MemoryReader) -> Iterator[Timed]:
    size = moved_bytes(op, case)
    names, functions = runs(op, case, size)
    if size >= FROM_CACHE_BYTES:
        functions.append(reader)
    with torch.no_grad():
        slowest = max(seconds[0] for seconds in in_turns(functions, 1))
        found = in_turns(functions, min(repeats, max(3, int(BODY_SECONDS / slowest))))
    bandwidth = reader.bandwidth(found.pop()) if size >= FROM_CACHE_BYTES else None
    for name, seconds in zip(names, found, strict=True):
        yield Timed(op.name, case.label, name, seconds, size, operations(op, case.args), bandwidth)


def cases(op: Op, dtype: torch.dtype, sets: list[str]) -> Iterator[Case]:
    if "cases" in sets and op.case_maker:
        yield from op.case_maker(dtype, CPU)
    if "llama" in sets and op.name in LLAMA_CASES:
        yield from LLAMA_CASES[op.name](dtype)


def row(one: Timed, reference: Timed, rate: float) -> tuple[str, ...]:
    """A line of the table; `x` is how many times faster than the reference."""
    seconds = median(one.seconds)
    low, *_, high = quantiles(one.seconds, n=10) if len(one.seconds) > 1 else one.seconds * 2
    bound = max(one.bytes / one.bandwidth.best, one.operations / rate) if one.bandwidth else 0.0
    return (
        one.case if one is reference else "",
        one.body,
        f"{seconds * 1e6:.1f}",
        f"{low * 1e6:.1f}-{high * 1e6:.1f}",
        f"{median(reference.seconds) / seconds:.2f}",
        f"{one.bytes / seconds / 1e9:.2f}",
        f"{one.operations / seconds / 1e12:.3f}" if one.operations else "",
        f"{bound / seconds:.3f}" if bound else "",
    )


def report(args: argparse.Namespace, dtype: torch.dtype) -> str:
    table = Table(title=str(dtype)[6:], title_justify="left")
    for heading in ("case", "body", "median, µs", "10-90 %, µs", "x", "GB/s", "TFLOP/s", "share"):
        table.add_column(heading, justify="left" if heading in ("case", "body") else "right", no_wrap=True)
    reader, rate = MemoryReader(size_bytes=COLD_BYTES), matmul_rate(dtype)
    ops = [registered()[name] for name in args.op or sorted(registered())]
    groups = [list(timed(op, case, args.repeats, reader)) for op in ops for case in cases(op, dtype, args.set)]
    before = ""
    for group in groups:
        if group[0].op != before:
            before = group[0].op
            table.add_section()
            table.add_row(f"[bold]{before}[/bold]")
        reference = next(one for one in group if one.body == REFERENCE)
        for one in group:
            table.add_row(*row(one, reference, rate))
    return markdown(table, probed(read_bandwidth(), {dtype: rate}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=sorted(registered()), help="default: all")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--set", nargs="+", default=["cases", "llama"], choices=["cases", "llama"], help="which cases")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, help="append the report to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    for name in args.dtype:
        show(report(args, getattr(torch, name)), args.out)


if __name__ == "__main__":
    main()
