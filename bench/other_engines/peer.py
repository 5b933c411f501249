"""One peer in a process of its own, for bench/peers.py: it reads prompts as lines of JSON and answers with seconds.

    PYTHON bench/other_engines/peer.py openvino int4 MODEL FOLDER

PYTHON may be of another environment than infuse's, because peers ask for other versions of transformers. MODEL is a
folder of transformers; the converted model is written to FOLDER once, and read from there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

THREADS = int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count() or 1
NEEDS = {
    "openvino": ("torch", "openvino", "openvino_genai", "optimum.intel", "nncf"),
    "llama.cpp": ("torch", "llama_cpp", "gguf"),
    "ik_llama.cpp": ("torch", "ik_llama_cpp"),
}
FORMATS = {"openvino": ("bf16", "int8", "int4"), "llama.cpp": ("BF16", "Q8_0", "Q4_0")}  # of bench/peers.py
Generate = Callable[[list[list[int]], int], object]  # prompts of equal length, new tokens; greedy, never ends early


def missing(peer: str) -> str | None:
    """Why a peer cannot run here; None if it can."""
    absent = [name for name in NEEDS[peer] if not _is_there(name)]
    return f"{peer}: without the packages {', '.join(absent)}" if absent else None


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def export_openvino(model: Path, format: str, folder: Path) -> None:
    """Convert the model as `optimum-cli export openvino` does."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    bits = {"int8": 8, "int4": 4}.get(format)
    quantized = OVWeightQuantizationConfig(bits=bits) if bits else None
    more: dict[str, Any] = {"quantization_config": quantized} if quantized else {"load_in_8bit": False}
    made = OVModelForCausalLM.from_pretrained(model, export=True, compile=False, **more)
    made.save_pretrained(folder)


def open_openvino(folder: Path, rows: int, tokens: int) -> Generate:
    import numpy as np
    import openvino
    import openvino_genai

    settings = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": THREADS}
    pipeline = openvino_genai.LLMPipeline(str(folder), openvino_genai.Tokenizer(str(folder)), "CPU", **settings)

    def generate(ids: list[list[int]], new: int) -> object:
        prompts = np.array(ids, dtype=np.int64)
        config = openvino_genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(prompts), openvino.Tensor(np.ones_like(prompts)))
        return pipeline.generate(inputs, config)

    return generate


def export_llama_cpp(model: Path, format: str, folder: Path) -> None:
    from llama import write

    folder.mkdir(parents=True, exist_ok=True)
    write(json.loads((model / "config.json").read_text()), format, folder / "model.gguf")


def open_llama_cpp(folder: Path, rows: int, tokens: int) -> Generate:
    import torch
    from llama import LlamaCpp

    torch.set_num_threads(THREADS)
    model = LlamaCpp(folder / "model.gguf", rows, tokens)

    class Nothing:
        def put(self, tokens: Any) -> None:
            pass

        end = lambda self: None  # noqa: E731

    return lambda ids, new: model.generate(torch.tensor(ids), new, Nothing())


def open_ik_llama_cpp(folder: Path, rows: int, tokens: int) -> Generate:
    import torch
    from ik_llama import IkLlama

    torch.set_num_threads(THREADS)
    model = IkLlama(folder / "model.gguf", rows, tokens)
    return lambda ids, new: model.generate(torch.tensor(ids), new)


EXPORT = {"openvino": export_openvino, "llama.cpp": export_llama_cpp}
OPEN = {"openvino": open_openvino, "llama.cpp": open_llama_cpp, "ik_llama.cpp": open_ik_llama_cpp}


def main() -> None:
    peer, format, model, folder, rows, tokens = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the peer prints is no answer
    into = Path(folder)
    if why := missing(peer):
        answers.write(json.dumps({"missing": why}) + "\n")
        return
    try:
        if not into.exists():
            EXPORT[peer](Path(model), format, into)
        start = time.perf_counter()
        generate = OPEN[peer](into, int(rows), int(tokens))
        seconds = time.perf_counter() - start
    except Exception as error:  # the peer's own, of whatever kind: the others are measured nevertheless
        answers.write(json.dumps({"missing": f"{peer} {format}: {type(error).__name__}: {error}"[:300]}) + "\n")
        return
    size = sum(path.stat().st_size for path in into.iterdir() if path.suffix in (".bin", ".gguf"))
    answers.write(json.dumps({"seconds_to_load": seconds, "bytes": size}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        generate(asked["ids"], asked["new"])
        answers.write(json.dumps({"seconds": time.perf_counter() - start}) + "\n")


if __name__ == "__main__":
    main()
