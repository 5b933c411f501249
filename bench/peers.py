"""infuse beside OpenVINO GenAI and llama.cpp, in one sitting: the same shape, the same prompts, in turns.

    python bench/peers.py [--formats int8 int4] [--peers openvino llama.cpp] [--python openvino=OTHER/bin/python]
                          [--keep FOLDER] [--json FILE] [--out FILE.md]

Random weights. Each peer runs in a process of its own (bench/other_engines/peer.py), in another environment if one is
given; one whose packages are missing is left out, and the report says so. Waiting peers take memory, but no time. A
step is what `--new` tokens more take, each; prefill is generating one token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table

import infuse
from infuse.plan.bytes import parameter_bytes
from infuse.profile.probe import read_bandwidth
from infuse_cli.bench import multiplications
from models import SHAPES, Contestant, bounds, made
from other_engines.peer import FORMATS
from report import in_turns, markdown, probed, product_rates, save, show

PROGRAM = Path(__file__).parent / "other_engines" / "peer.py"
Generate = Callable[[torch.Tensor, int], object]


class Peer:
    """A process of bench/other_engines/peer.py. `why`: the reason why it does not run."""

    def __init__(self, command: list[str]):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.loaded = self._answer()
        self.why: str | None = self.loaded.get("missing")

    def __call__(self, ids: torch.Tensor, new: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": ids.tolist(), "new": new}) + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"missing": f"its process ended with code {self._process.wait()}"}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def ours(model: Any) -> Generate:
    return lambda ids, new: model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
    )


def report(args: argparse.Namespace, folder: Path) -> str:
    shape = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
    eager = made(shape, torch.bfloat16)
    if not (folder / "model").exists():
        eager.save_pretrained(folder / "model")
        copy_tokenizer(folder / "model")
    runs: dict[str, Generate] = {"transformers bf16": ours(eager)}
    loaded = {"transformers bf16": (parameter_bytes(eager), 0.0)}
    for format in ("", *args.formats):
        with torch.device("meta"):
            model = type(eager)(eager.config)
        start, name = time.perf_counter(), f"infuse {format or 'bf16'}"
        settings: dict[str, Any] = {"quant": format} if format else {}
        engine = infuse.init_inference(model, checkpoint=str(folder / "model"), dtype=torch.bfloat16, **settings)
        loaded[name] = (parameter_bytes(engine.module), time.perf_counter() - start)
        engine.module.generation_config = eager.generation_config
        runs[name] = ours(engine)
    pythons = dict(given.split("=", 1) for given in args.python)
    remarks, tokens = [], max(args.prefill, args.context) + args.new + 1
    peers = []
    for peer, format in ((one, format) for one in args.peers for format in FORMATS[one]):
        name = f"{peer} {format}"
        told = [peer, format, folder / "model", folder / name.replace(" ", "-"), args.batch, tokens]
        started = Peer([pythons.get(peer, sys.executable), str(PROGRAM), *map(str, told)])
        if started.why:
            if started.why not in remarks:
                remarks.append(started.why)
            continue
        peers.append(started)
        runs[name], loaded[name] = started, (started.loaded["bytes"], started.loaded["seconds_to_load"])
    text = measured(runs, loaded, args, shape | {"products": multiplications(eager)}, remarks)
    for started in peers:
        started.close()
    return text


def copy_tokenizer(folder: Path) -> None:
    """OpenVINO GenAI opens no model without a tokenizer; prompts are given as numbers."""
    for path in (Path(infuse.__file__).parents[1] / "examples" / "tiny_llama").glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())


def prefill(run: Generate, tokens: int) -> None:
    """A prompt that `run` has not had: OpenVINO GenAI keeps the keys and values of those that it has."""
    run(torch.randint(3, 250, (1, tokens)), 1)


def measured(
    runs: dict[str, Generate],
    loaded: dict[str, tuple[int, float]],
    args: argparse.Namespace,
    shape: dict[str, Any],
    remarks: list[str],
) -> str:
    """Measure all in turns; `shape` has also the "products" of a token."""
    prompts = {rows: torch.randint(3, 250, (rows, args.context)) for rows in (1, args.batch)}
    read, rates = read_bandwidth(), product_rates()
    prefills = in_turns([partial(prefill, run, args.prefill) for run in runs.values()], args.repeats)
    steps = {}
    for rows, ids in prompts.items():
        one = in_turns([partial(run, ids, 1) for run in runs.values()], args.repeats)
        more = in_turns([partial(run, ids, 1 + args.new) for run in runs.values()], args.repeats)
        steps[rows] = [(median(b) - median(a)) / args.new for a, b in zip(one, more, strict=True)]
    table = Table(title=f"{args.shape}, {args.context} + {args.new} tokens; x: ratios to the first row")
    heads = [head for rows in (1, args.batch) for head in (f"batch {rows}, ms", "tok/s", "x")]
    for heading in ("", f"prefill {args.prefill}, s", "x", *heads, "weights, GB", "load, s"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows = []
    for i, name in enumerate(runs):
        first, (size, seconds) = median(prefills[i]), loaded[name]
        cells = [name, f"{first:.3f}", f"{median(prefills[0]) / first:.2f}"]
        for batch, taken in steps.items():
            cells += [f"{taken[i] * 1e3:.2f}", f"{batch / taken[i]:.1f}", f"{taken[0] / taken[i]:.2f}"]
        table.add_row(*cells, f"{size / 1e9:.2f}", f"{seconds:.1f}")
        entry, around = Contestant(name, None, torch.bfloat16, size, seconds), dict.fromkeys(steps, read.median)
        least = bounds(entry, shape, shape["products"], args, rates, around)
        named = {batch or "prefill": (one.seconds, one.by) for batch, one in least.items()}
        decode = {batch: taken[i] for batch, taken in steps.items()}
        row = {"name": name, "prefill_s": first, "step_s": decode, "bounds": named}
        rows.append({**row, "weight_bytes": size, "load_s": seconds})
    save(args.json, args.shape, rows, {"read": read.best, **rates})
    return markdown(table, "; ".join([probed(read, rates), *remarks]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-1b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--formats", nargs="*", default=["int8", "int4"])
    parser.add_argument("--peers", nargs="*", choices=sorted(FORMATS), default=sorted(FORMATS))
    parser.add_argument("--python", nargs="*", default=[], metavar="PEER=PYTHON", help="interpreters of the peers")
    parser.add_argument("--keep", type=Path, help="folder for the converted models, read again the next time")
    for name, value in dict(prefill=512, context=128, new=16, batch=8, repeats=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write the figures to this file, for bench/plot.py")
    parser.add_argument("--out", type=Path, help="append the report to this file")
    args = parser.parse_args()
    with TemporaryDirectory(prefix="infuse-peers-") as temporary:
        show(report(args, args.keep or Path(temporary)), args.out)


if __name__ == "__main__":
    main()
