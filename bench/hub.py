"""Files as the hub has them: infuse on a GGUF beside llama.cpp and ik_llama.cpp on the same file, in turns; and on GPTQ
and AWQ folders, beside its own int4 in the same groups.

    python bench/hub.py [--files Q8_0 Q4_0 Q4_K_M GPTQ AWQ] [--python llama.cpp=OTHER/bin/python]
                        [--quantize PROGRAM] [--keep FOLDER] [--out FILE.md]

Random weights in the shape of --shape, written by the `gguf` package; llama.cpp's own quantizer makes the mixed files
from bf16 (from the package ik-llama-cpp-python or llama.cpp; --quantize names it). Peers run in processes of their own,
in another environment if one is given. "ours" is the same model quantized by infuse in the nearest format of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

import infuse
from infuse.plan.bytes import parameter_bytes
from infuse_cli.bench import multiplications
from models import SHAPES
from other_engines.llama import write
from peers import PROGRAM, Generate, Peer, measured, ours
from report import show

PEERS = ("llama.cpp", "ik_llama.cpp")
# Of each file, in infuse's own formats; int4 for the others.
NEAREST = {
    "Q8_0": "int8:32:f16", "Q4_0": "int4:32:f16", "GPTQ": "int4:128:f16", "AWQ": "int4:128:asymmetric:f16",
}  # fmt: skip
PLAIN = ("BF16", "Q8_0", "Q4_0")  # what the gguf package quantizes itself
GROUP = 128  # of GPTQ and AWQ
SETTINGS = {
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def file_of(shape: dict[str, Any], kind: str, folder: Path, quantize: str | None) -> Path:
    """The file of `kind`, written unless it is there."""
    path = folder / kind / "model.gguf"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind in PLAIN:
        write(shape, kind, path)
        return path
    source = file_of(shape, "BF16", folder, quantize)
    command = [quantizer(quantize), str(source), str(path), kind]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return path


def folder_of(shape: dict[str, Any], kind: str, folder: Path) -> Path:
    """A folder of GPTQ or AWQ with random codes, zeros of 8 and scales of one size, by their published layouts."""
    path = folder / kind
    if (path / "config.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    config = transformers.LlamaConfig(**shape)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "embed" in name or "lm_head" in name:
            value = torch.ones(parameter.shape) if parameter.dim() == 1 else torch.randn(parameter.shape) * 0.02
            state[name] = value.bfloat16()
            continue
        rows, inputs = parameter.shape
        packed = (inputs // 8, rows) if kind == "GPTQ" else (inputs, rows // 8)
        owner, zeros = name.removesuffix("weight"), 0x77777777 if kind == "GPTQ" else -0x77777778
        state[f"{owner}qweight"] = torch.randint(-(2**31), 2**31, packed, dtype=torch.int32)
        state[f"{owner}qzeros"] = torch.full((inputs // GROUP, rows // 8), zeros, dtype=torch.int32)
        state[f"{owner}scales"] = torch.full((inputs // GROUP, rows), 0.2 / inputs**0.5, dtype=torch.float16)
        if kind == "GPTQ":
            state[f"{owner}g_idx"] = torch.arange(inputs, dtype=torch.int32) // GROUP
    save_file(state, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": SETTINGS[kind]}))
    return path


def quantizer(given: str | None) -> str:
    """The program llama-quantize: as given, from a package, or of the path."""
    spec = importlib.util.find_spec("ik_llama_cpp")
    packaged = Path(spec.origin).parent / "bin" / "llama-quantize" if spec and spec.origin else None
    for found in (given, str(packaged) if packaged and packaged.exists() else None, shutil.which("llama-quantize")):
        if found:
            return found
    raise SystemExit("no llama-quantize: give --quantize PROGRAM, or install ik-llama-cpp-python")


def read_seconds(path: Path, repeats: int = 3) -> float:
    """Seconds to read a file from the page cache into memory, on as many threads as PyTorch has."""
    size, threads = path.stat().st_size, torch.get_num_threads()
    room = memoryview(bytearray(size))

    def read(start: int, stop: int) -> None:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while start < stop:
                start += file.readinto(room[start : min(stop, start + (1 << 22))])

    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda i: read(size * i // threads, size * (i + 1) // threads), range(threads)))
        seconds.append(time.perf_counter() - begun)
    return median(seconds)


def loaded(shape: dict[str, Any], **settings: Any) -> tuple[Any, float]:
    """An engine on a model on meta, and the seconds that it took."""
    kind = getattr(transformers, shape.get("architecture", "LlamaForCausalLM"))
    with torch.device("meta"):
        model = kind(kind.config_class(**{key: value for key, value in shape.items() if key != "architecture"}))
    start = time.perf_counter()
    engine = infuse.init_inference(model, dtype=torch.bfloat16, **settings)
    seconds = time.perf_counter() - start
    engine.module.generation_config.eos_token_id = None
    return engine, seconds


def reports(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Yield the report of each file as soon as it is measured."""
    shape = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
    pythons = dict(given.split("=", 1) for given in args.python)
    tokens = max(args.prefill, args.context) + args.new + 1
    for kind in args.files:
        is_folder, remarks = kind in SETTINGS, []
        path = folder_of(shape, kind, folder) if is_folder else file_of(shape, kind, folder, args.quantize)
        runs: dict[str, Generate] = {}
        sizes: dict[str, tuple[int, float]] = {}
        settings = {"infuse on the file": {"checkpoint": str(path)}}
        if not args.alone:
            bf16 = file_of(shape, "BF16", folder, args.quantize)
            settings["infuse, its own"] = {"checkpoint": str(bf16), "quant": NEAREST.get(kind, "int4")}
        for name, given in settings.items():
            engine, seconds = loaded(shape, **given)
            runs[name], sizes[name] = ours(engine.module), (parameter_bytes(engine.module), seconds)
        weights = path / "model.safetensors" if is_folder else path
        reading, size = read_seconds(weights), weights.stat().st_size
        held, seconds = sizes["infuse on the file"]
        remarks.append(
            f"{kind}: the file has {size / 1e9:.3f} GB, resident are {held / 1e9:.3f}; loading takes "
            f"{seconds / reading:.1f} times reading it from the page cache ({reading:.2f} s)"
        )
        peers = []
        for peer in () if is_folder else args.peers:
            told = [peer, kind, folder / "none", path.parent, args.batch, tokens]
            started = Peer([pythons.get(peer, sys.executable), str(PROGRAM), *map(str, told)])
            if started.why:
                remarks.append(started.why)
                continue
            peers.append(started)
            runs[peer], sizes[peer] = started, (size, started.loaded["seconds_to_load"])
        products = multiplications(engine.module)
        yield measured(runs, sizes, args, shape | {"products": products}, remarks)
        for started in peers:
            started.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-1b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--files", nargs="*", default=["Q8_0", "Q4_0", "Q4_K_M", "GPTQ", "AWQ"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--python", nargs="*", default=[], metavar="PEER=PYTHON", help="interpreters of the peers")
    parser.add_argument("--quantize", help="llama.cpp's program llama-quantize")
    parser.add_argument("--alone", action="store_true", help="without infuse's own formats")
    parser.add_argument("--keep", type=Path, help="folder for the files, read again the next time")
    for name, value in dict(prefill=512, context=128, new=16, batch=8, repeats=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write the figures to this file, for bench/plot.py")
    parser.add_argument("--out", type=Path, help="append the report to this file")
    args = parser.parse_args()
    with TemporaryDirectory(prefix="infuse-hub-") as temporary:
        for text in reports(args, args.keep or Path(temporary)):
            show(text, args.out)


if __name__ == "__main__":
    main()
