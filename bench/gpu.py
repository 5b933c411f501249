"""Everything there is to measure on one NVIDIA GPU, in one command and under eight minutes; random weights made on the
device.

    python bench/gpu.py --out bench/results/DATE-gpu.md [--quick] [--minutes 8]
                        [--parts tests encoders denoisers decoders pairs]

Writes the report as Markdown to FILE and all figures as JSON beside it. What does not fit into the time is left out,
and said.
--dry-run goes through all of it on a CPU, with tiny shapes and a recorder for graphs: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import infuse
from infuse.generate.install import GraphUse, install, uninstall
from on_gpu import models
from on_gpu.diffusion import denoisers
from on_gpu.kernels import Matrix, kernels, matrices, prompt_kernels
from on_gpu.models import Plan, Row
from on_gpu.pairs import pairs
from on_gpu.runs import Bounds, Budget, bounds
from report import markdown, show

ROOT = Path(__file__).parent.parent
PARTS = ("tests", "encoders", "denoisers", "decoders", "pairs")
TEST_SECONDS = 120.0


def main() -> None:
    args = arguments()
    start = time.monotonic()
    budget = Budget(args.minutes * 60)
    device = torch.device("cpu" if args.dry_run else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "bench/gpu.py needs an NVIDIA GPU and a PyTorch that sees it; --dry-run goes through it on a CPU"
        )
    if device.type == "cuda":
        torch.cuda.init()
    plan = planned(args, device)
    measured = bounds(device, plan.tiny)
    results: dict[str, Any] = {"rows": [], "matrices": {}, "kernels": {}, "tests": None}
    tables: list[Table] = []

    def take(rows: Iterable[Row]) -> None:
        """Write the figures after each row: a run that is cut off leaves what it measured."""
        for row in rows:
            results["rows"].append(row)
            if args.out:
                write_json(args.out.with_suffix(".json"), device, measured, results, budget)

    if "tests" in args.parts:
        results["tests"] = tested(budget, plan.tiny)
    if "encoders" in args.parts:
        bert = transformers.BertConfig(**(models.TINY_BERT if plan.tiny else models.BERT_LARGE))
        take(models.encoders(plan, bert, measured, budget))
    if "denoisers" in args.parts:
        take(denoisers(plan, measured, budget))
    if "decoders" in args.parts:
        looks = partial(look_at, plan, measured, results, tables)
        for name, kind, config in decoders(plan.tiny, args.quick):
            if name not in (args.models or [name]):
                continue
            look = partial(looks, name) if not name.startswith("GPT") else lambda format, model: None
            small = plan
            if name.startswith("Qwen"):
                small = replace(plan, batches=plan.batches[:2], compiles=False)
            elif name.startswith("GPT"):
                small = replace(plan, formats=(), batches=(1,), compiles=False)
            take(models.decoders(small, name, kind, config, bounds=measured, budget=budget, look=look))
    if "pairs" in args.parts:
        take(pairs(plan, budget))
    tables = [*row_tables(results["rows"]), *tables]
    remarks = "\n".join(
        [f"device: {device_name(device)}; measured: {measured}", *remarks_of(results, budget, time.monotonic() - start)]
    )
    show("\n\n".join(text_of(tables, remarks)), args.out)
    if args.out:
        write_json(args.out.with_suffix(".json"), device, measured, results, budget)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, help="append the report to this file; figures go to the same name with .json"
    )
    parser.add_argument(
        "--quick", action="store_true", help="bfloat16 and int8 alone, one repeat, nothing compiled, no GPT-2-XL"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", help="of the decoders, these alone")
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, tiny: does the script work?")
    return parser.parse_args()


def planned(args: argparse.Namespace, device: torch.device) -> Plan:
    tiny = args.dry_run
    return Plan(
        device=device,
        tiny=tiny,
        batches=(1, 2) if tiny else (1, 8, 32),
        prefill_tokens=16 if tiny else 2048,
        new_tokens=(4, 12) if tiny else (16, 80),
        context=8 if tiny else 128,
        repeats=1 if tiny or args.quick else 3,
        formats=("int8",) if args.quick else ("int8", "int4", "fp8"),
        compiles=not args.quick,
        install=recorded if tiny else lambda model: None,
    )


def decoders(tiny: bool, quick: bool) -> list[tuple[str, Callable, Any]]:
    llama, gpt, hybrid = transformers.LlamaForCausalLM, transformers.GPT2LMHeadModel, transformers.Qwen3_5ForCausalLM
    shapes = [
        ("Llama-3-8B", llama, transformers.LlamaConfig(**(models.TINY if tiny else models.LLAMA_8B))),
        ("Llama-3.2-1B", llama, transformers.LlamaConfig(**(models.TINY if tiny else models.LLAMA_1B))),
        ("Qwen3.5-1B", hybrid, transformers.Qwen3_5TextConfig(**models.qwen3_5(tiny))),
        ("GPT-2-XL", gpt, transformers.GPT2Config(**(models.TINY_GPT2 if tiny else models.GPT2_XL))),
    ]
    return shapes[:3] if quick else shapes


def recorded(model: Any) -> None:
    """The recorder of the tests in the place of CUDA graphs, on a model of the CPU."""
    sys.path.append(str(ROOT))
    from tests.support.fake_graph import FakeBackend

    uninstall(model)
    generates = hasattr(model, "can_generate") and model.can_generate()
    install(
        model,
        limit_tokens=None,
        min_new_tokens=1,
        caches=generates,
        graphs=GraphUse(FakeBackend(), steps=True, forward=True),
    )


def tested(budget: Budget, tiny: bool) -> dict[str, Any]:
    """The GPU suite in processes of its own, several where pytest-xdist is there: most of its time compiles. A dry run
    only collects it.
    """
    if not tiny and not budget.allows("the GPU tests", 30):
        return {"summary": "left out"}
    limit = min(TEST_SECONDS, max(budget.left() - 60, 30))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--full",
        "-q",
        "-m",
        "gpu",
        "--no-header",
        "-p",
        "no:cacheprovider",
        str(ROOT / "tests" / "gpu"),
    ]
    more = ["--collect-only"] if tiny else ["-n", "8"] if find_spec("xdist") else []
    try:
        done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return {"summary": f"not done after {limit:.0f} s", "output": printed[-4000:]}
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"summary": lines[-1] if lines else done.stderr[-400:], "failed": failed, "exit": done.returncode}


def look_at(
    plan: Plan, measured: Bounds, results: dict[str, Any], tables: list[Table], name: str, format: str, model: Any
) -> None:
    """Tables of a model of ours: its matrices beside their bound, and the kernels of a step; a prompt's in bfloat16."""
    who = f"{name}, {format}"
    found = matrices(model, 1, measured, plan.device)
    ran = {f"{who}: kernels of one step, batch 1": kernels(model, 1, 4 if plan.tiny else 32, plan.device)}
    if format == "bfloat16":
        ran[f"{who}: kernels of a prompt"] = prompt_kernels(model, plan.prefill_tokens, plan.device)
    results["matrices"][who] = [matrix.as_dict() for matrix in found]
    tables.append(matrix_table(f"{who}: matrices of one step, batch 1", found))
    for title, rows in ran.items():
        results["kernels"][title] = [{"name": key, "calls": calls, "seconds": seconds} for key, calls, seconds in rows]
        tables.append(kernel_table(title, rows[:24]))


# ---- the report


def row_tables(rows: list[Row]) -> list[Table]:
    tables = []
    for name in dict.fromkeys(row.model for row in rows):
        table = Table(
            title=f"{name}: ratio to the first, share of the bound (decode: read bandwidth; else: matmul rate)"
        )
        for heading in ("", "", "ms", "spread", "x", "share", "tokens/s", "first call, s", "init, s"):
            table.add_column(heading, justify="right" if heading else "left")
        for row in (row for row in rows if row.model == name):
            decode = row.what.startswith("decode")
            batch = int(row.what.rpartition(" ")[2]) if decode else 0
            table.add_row(
                row.what,
                row.who,
                f"{row.seconds * 1e3:.3f}",
                f"{row.spread[0] * 1e3:.3f}-{row.spread[1] * 1e3:.3f}",
                f"{row.ratio:.2f}" if row.ratio else "",
                f"{row.share:.2f}" if row.share else "",
                f"{batch / row.seconds:,.0f}" if decode else "",
                *(
                    f"{row.notes[key]:.1f}" if key in row.notes else ""
                    for key in ("first_call_seconds", "init_seconds")
                ),
            )
        tables.append(table)
    return tables


def matrix_table(title: str, found: list[Matrix]) -> Table:
    table = Table(title=title)
    for heading in ("", "of them", "us in all", "us at the bound", "share"):
        table.add_column(heading, justify="right" if heading else "left")
    for matrix in found:
        micros, bound = matrix.seconds * 1e6, matrix.bound_seconds * 1e6
        table.add_row(matrix.kind, str(matrix.count), f"{micros:.1f}", f"{bound:.1f}", f"{matrix.share:.2f}")
    return table


def kernel_table(title: str, ran: list[tuple[str, float, float]]) -> Table:
    total = sum(seconds for _, _, seconds in ran) or 1.0
    table = Table(title=f"{title} ({total * 1e6:.0f} us)")
    for heading in ("", "calls", "us", "share"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, calls, seconds in ran:
        table.add_row(name[:70], f"{calls:.1f}", f"{seconds * 1e6:.1f}", f"{seconds / total:.2f}")
    return table


def remarks_of(results: dict[str, Any], budget: Budget, seconds: float) -> list[str]:
    lines = []
    if results["tests"] is not None:
        lines.append("GPU tests: " + "; ".join([results["tests"]["summary"], *results["tests"].get("failed", [])]))
    if budget.skipped:
        lines.append("left out for want of time: " + "; ".join(budget.skipped))
    return [*lines, f"{seconds:.0f} s in all"]


def text_of(tables: list[Table], remarks: str) -> list[str]:
    """Markdown: the head stands above the first table only."""
    if not tables:
        return [remarks]
    rest = []
    for table in tables[1:]:
        console = Console(width=150, no_color=True)
        with console.capture() as captured:
            console.print(table)
        rest.append(f"```\n{captured.get()}```")
    return [markdown(tables[0], remarks), *rest]


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return "a CPU, tiny shapes, nothing here is a measurement"
    properties = torch.cuda.get_device_properties(device)
    memory = f"{properties.total_memory / 1e9:.0f} GB"
    return f"{properties.name}, {memory}, {properties.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}"


def write_json(path: Path, device: torch.device, measured: Bounds, results: dict[str, Any], budget: Budget) -> None:
    content = {
        "date": str(date.today()),
        "command": " ".join(sys.argv),
        "device": device_name(device),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "infuse": infuse.__version__,
        },
        "read_bytes_per_second": measured.read_bytes,
        "matmul_operations_per_second": measured.matmul_operations,
        **results,
        "rows": [row.as_dict() for row in results["rows"]],
        "skipped": budget.skipped,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
