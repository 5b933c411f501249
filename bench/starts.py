"""Starts in fresh processes, by turns: loading a model of a real shape from its files, and its first steps; alone and
beside busy processes; infuse beside llama.cpp and ik_llama.cpp on the same GGUF, and beside another checkout of infuse.

    python bench/starts.py [--cases bf16 int8 int4 Q8_0 Q4_0 Q4_K_M "shards int8"] [--busy 0 1 2] [--repeats 7]
                           [--peers ik_llama.cpp llama.cpp] [--python ik_llama.cpp=OTHER/bin/python]
                           [--checkout now=. old=FOLDER] [--keep FOLDER] [--out FILE.md]

`load` is `init_inference`, and of 16-bit files `from_pretrained` before it; imports are not counted. The files are in
the page cache, and the first start of each case, which proves, is counted apart. `step` is the median of --new tokens
after a prompt of 32. `read` is the same file's bytes, read into new memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

FOLDER = Path(__file__).parent
BUSY = "while True: pass"
PLAIN = ("bf16", "int8", "int4")


def started(case: str, folder: Path, new: int) -> dict[str, float]:
    """In a process of its own: load, generate; the seconds of each part."""
    import torch
    import transformers

    import infuse

    wanted, files = case.split()[-1], folder_of(case, folder)
    taken = {}
    kind = transformers.LlamaForCausalLM  # looked up here: imports are not counted
    begun = time.perf_counter()
    if case in PLAIN:
        model = kind.from_pretrained(files, dtype=torch.bfloat16)
        settings: dict[str, Any] = {} if wanted == "bf16" else {"quant": wanted}
    else:
        config = transformers.LlamaConfig.from_pretrained(folder / "bf16")
        with torch.device("meta"):
            model = kind(config)
        settings = {"checkpoint": str(files)}
    taken["open"] = time.perf_counter() - begun
    engine = infuse.init_inference(model, dtype=torch.bfloat16, progress=False, **settings)
    taken["load"] = time.perf_counter() - begun
    taken["receipts"] = len(engine.plan.receipts)
    engine.module.generation_config.eos_token_id = None
    ids, stamps = torch.arange(3, 35)[None], []

    class Clock(transformers.generation.streamers.BaseStreamer):
        def put(self, value: object) -> None:
            stamps.append(time.perf_counter())

        def end(self) -> None:
            pass

    for _ in range(2):  # the first warms up
        stamps.clear()
        engine.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, streamer=Clock()
        )
    taken["step"] = median(after - before for before, after in zip(stamps[1:], stamps[2:], strict=False))
    return taken


def folder_of(case: str, folder: Path) -> Path:
    """The files of a case."""
    if case in PLAIN:
        return folder / "bf16"
    return folder / case.replace(" ", "-") / ("" if case.startswith("shards") else "model.gguf")


def prepare(case: str, folder: Path, shape: str, quantize: str | None) -> None:
    """Write the files of a case, in this process's infuse, unless they are there."""
    import torch
    import transformers

    import infuse
    from hub import file_of
    from models import SHAPES, made

    if not (folder / "bf16" / "config.json").exists():
        made(SHAPES[shape], torch.bfloat16).save_pretrained(folder / "bf16", max_shard_size="100GB")
    files = folder_of(case, folder)
    if files.suffix == ".gguf":
        file_of(SHAPES[shape], case, folder, quantize)
    elif case not in PLAIN and not files.exists():
        model = transformers.LlamaForCausalLM.from_pretrained(folder / "bf16", dtype=torch.bfloat16)
        infuse.init_inference(
            model, dtype=torch.bfloat16, quant=case.split()[-1], verify="off", save_mp_checkpoint_path=str(files)
        )


@contextmanager
def beside(count: int) -> Iterator[None]:
    """Busy processes beside what runs in this context."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(process.kill)
        yield


def of_ours(case: str, folder: Path, checkout: Path, new: int) -> dict[str, float]:
    from loading import plain_read

    command = [sys.executable, __file__, "--one", case, "--keep", str(folder), "--new", str(new)]
    environment = os.environ | {"PYTHONPATH": f"{checkout.resolve()}:{FOLDER}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case} failed in {checkout}:\n{done.stderr}")
    return {**json.loads(done.stdout.splitlines()[-1]), "read": plain_read(folder_of(case, folder))}


def of_peer(peer: str, python: str, case: str, folder: Path) -> dict[str, float] | None:
    """The seconds of a peer's loading; None if its packages are missing."""
    from peers import PROGRAM, Peer

    told = [peer, case, folder / "none", folder_of(case, folder).parent, 1, 512]
    process = Peer([python, str(PROGRAM), *map(str, told)])
    if process.why:
        return None
    process.close()
    return {"load": process.loaded["seconds_to_load"]}


def report(asked: argparse.Namespace, folder: Path) -> str:
    from rich.table import Table

    from report import markdown

    pythons = dict(given.split("=", 1) for given in asked.python)
    checkouts = dict(given.split("=", 1) for given in asked.checkout)
    table = Table(title=f"{asked.shape}: seconds, medians of {asked.repeats} starts by turns")
    for heading in ("", "busy beside", "open", "load", "first load", "x alone", "load / read", "step, ms", "x alone"):
        table.add_column(heading)
    for case in asked.cases:
        prepare(case, folder, asked.shape, asked.quantize)
        runs = {name: partial(of_ours, case, folder, Path(to), asked.new) for name, to in checkouts.items()}
        if folder_of(case, folder).suffix == ".gguf":
            for peer in asked.peers:
                runs[peer] = partial(of_peer, peer, pythons.get(peer, sys.executable), case, folder)
        first = {name: run() for name, run in runs.items()}
        taken: dict[tuple[str, int], list[dict[str, float]]] = {}
        for _ in range(asked.repeats):
            for busy in asked.busy:
                with beside(busy):
                    for name, run in runs.items():
                        if first[name] is not None:
                            taken.setdefault((name, busy), []).append(run())
        middle = {
            key: {what: median(one[what] for one in starts) for what in starts[0]} for key, starts in taken.items()
        }
        for (name, busy), figures in middle.items():
            alone = middle.get((name, 0), {})
            cells = [f"{case}, {name}", str(busy)]
            cells += [_seconds(figures, "open"), _seconds(figures, "load"), _seconds(first[name], "load")]
            cells += [_ratio(figures, alone, "load")]
            cells += [f"{figures['load'] / figures['read']:.2f}" if "read" in figures else ""]
            steps = "step" in figures
            cells += [f"{figures['step'] * 1e3:.1f}" if steps else ""]
            table.add_row(*cells, _ratio(figures, alone, "step"))
            print(*cells, flush=True)
    return markdown(table, "")


def _ratio(figures: dict[str, float], alone: dict[str, float], what: str) -> str:
    return f"{figures[what] / alone[what]:.2f}" if what in alone else ""


def _seconds(figures: dict[str, float], what: str) -> str:
    return f"{figures[what]:.2f}" if what in figures else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--cases", nargs="*", default=[*PLAIN, "Q8_0", "Q4_0", "Q4_K_M", "shards int8"])
    parser.add_argument("--busy", nargs="*", type=int, default=[0])
    parser.add_argument("--peers", nargs="*", default=["ik_llama.cpp", "llama.cpp"])
    parser.add_argument("--python", nargs="*", default=[], metavar="PEER=PYTHON", help="interpreters of the peers")
    parser.add_argument("--checkout", nargs="*", default=[f"now={FOLDER.parent}"], metavar="NAME=FOLDER")
    parser.add_argument("--quantize", help="llama.cpp's program llama-quantize")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--keep", type=Path, help="folder for the files, read again the next time")
    parser.add_argument("--out", type=Path, help="append the report to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a start in this process
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(started(asked.one, asked.keep, asked.new)))
        return
    from report import show

    with TemporaryDirectory(prefix="infuse-starts-") as temporary:
        show(report(asked, asked.keep or Path(temporary)), asked.out)


if __name__ == "__main__":
    main()
