"""Loading: a checkpoint of a real shape from the page cache into a model on meta, and our own shards of it; each beside
the plain read of its file.

    python bench/loading.py [--shape llama-1b] [--formats int8 int4] [--out bench/results/FILE.md]

The bound of a 16-bit load is twice the plain read into fresh memory; a quantized load is bound by the quantizer: the
table says at how many bytes of the source per second it runs. Turns are interleaved.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
import transformers
from rich.table import Table

import infuse
from infuse.ground import memory
from infuse.plan.bytes import parameter_bytes
from models import SHAPES, made
from report import markdown, memory_bytes, show

CHUNK_BYTES = 1 << 24


def plain_read(folder: Path, large_pages: bool = False) -> float:
    """Seconds to read a file or a folder of them into fresh memory: on pages of 4 KiB, or of 2 MiB as a load has them,
    which Linux may first have to make by moving others.
    """
    empty = memory.empty if large_pages else torch.empty
    start = time.perf_counter()
    for path in [folder] if folder.is_file() else sorted(folder.glob("*.safetensors")):
        held = empty((path.stat().st_size,), dtype=torch.uint8)
        view = memoryview(held.numpy())
        with open(path, "rb", buffering=0) as file:
            at = 0
            while read := file.readinto(view[at : at + CHUNK_BYTES]):
                at += read
    return time.perf_counter() - start


def load(folder: Path, shape: str, format: str, **keys: str) -> float:
    """Seconds of init_inference on a model on meta."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPES[shape]))
    gc.collect()  # the model of the turn before is not given back while the clock runs
    start = time.perf_counter()
    infuse.init_inference(
        model, checkpoint=str(folder), dtype=torch.bfloat16, **keys, **({"quant": format} if format else {})
    )
    return time.perf_counter() - start


def peak(pipe: Connection, folder: Path, shape: str, format: str) -> None:
    """In a process of its own: the bytes of the result, and of the memory beyond what the process had before, the most
    and what stays.
    """
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPES[shape]))
    before = memory_bytes("VmRSS")
    infuse.init_inference(
        model, checkpoint=str(folder), dtype=torch.bfloat16, verify="off", **({"quant": format} if format else {})
    )
    gc.collect()
    pipe.send((parameter_bytes(model), memory_bytes("VmHWM") - before, memory_bytes("VmRSS") - before))


def peaks(folder: Path, shape: str, formats: list[str]) -> str:
    """One line: for each format what the result takes, the peak of loading it, and what is resident afterwards."""
    context, told = multiprocessing.get_context("spawn"), []
    for format in formats:
        ours, theirs = context.Pipe()
        process = context.Process(target=peak, args=(theirs, folder, shape, format))
        process.start()
        result, most, stays = ours.recv()
        process.join()
        told.append(f"{format or 'bf16'} {result / 1e9:.2f} GB, peak {most / 1e9:.2f} GB, then {stays / 1e9:.2f} GB")
    return "memory of a load without proof, in a fresh process: " + "; ".join(told)


def main() -> None:
    asked = arguments()
    with tempfile.TemporaryDirectory(prefix="infuse-loading-") as name:
        folder = Path(name)
        made(SHAPES[asked.shape], torch.bfloat16).save_pretrained(folder, max_shard_size="100GB")
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        runs = {"plain read": lambda: plain_read(folder)}
        plain = dict.fromkeys(runs, "plain read")  # what each run is compared with
        for format in ("", *asked.formats):
            for verify in ("off", "sample"):
                label = f"init_inference {format or 'bf16'}, verify={verify!r}"
                runs[label] = lambda format=format, verify=verify: load(folder, asked.shape, format, verify=verify)
                plain[label] = "plain read"
        for format in asked.formats:
            shards = folder / format
            load(folder, asked.shape, format, verify="off", save_mp_checkpoint_path=str(shards))
            read, label = f"plain read of our {format} shard", f"init_inference of our {format} shard"
            runs[read] = lambda shards=shards: plain_read(shards)
            runs[label] = lambda shards=shards: load(shards, asked.shape, "")
            plain[read] = plain[label] = read
            runs[f"{read}, large pages"] = lambda shards=shards: plain_read(shards, large_pages=True)
            plain[f"{read}, large pages"] = read
        seconds: dict[str, list[float]] = {label: [] for label in runs}
        for repeat in range(asked.repeats + 1):
            for label, run in runs.items():
                taken = run()
                if repeat:  # the first turn brings the file into the page cache
                    seconds[label].append(taken)
        taken_bytes = peaks(folder, asked.shape, ["", *asked.formats])
    table = Table(
        "",
        "seconds",
        "of the plain read",
        "source, GB/s",
        "spread",
        title=f"{asked.shape}, {size / 1e9:.2f} GB in bfloat16",
    )
    for label, taken in seconds.items():
        middle, spread = median(taken), f"{min(taken):.2f} to {max(taken):.2f}"
        rate = f"{size / middle / 1e9:.2f}" if plain[label] == "plain read" else ""
        table.add_row(label, f"{middle:.2f}", f"{middle / median(seconds[plain[label]]):.2f}", rate, spread)
    show(markdown(table, f"seconds are medians of {asked.repeats} turns; {taken_bytes}"), asked.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--formats", nargs="*", default=["int8", "int4"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
