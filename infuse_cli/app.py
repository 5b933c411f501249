"""The command line: infuse plan | generate | bench | shard | build | env | clear-cache.

A client of the library: `--help`, `--version` and wrong arguments answer without infuse, PyTorch and transformers,
which commands import.
Exit codes: 0 success, 1 failure, 2 wrong use (an option, a path, a folder without the needed files).
Results go to standard output; progress, remarks and errors to standard error.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from infuse_cli.bench import Speed, bound, middle, multiplications, table, timed
from infuse_cli.messages import FAILED, WRONG_USE, Counted, bar, fail, refusals_of_generate, remarks, without_tracebacks
from infuse_cli.model_folder import (
    copy_rest,
    empty_model,
    load_generative,
    plan_of_folder,
    quantization,
    read_config,
    read_tokenizer,
    start_engine,
)
from infuse_cli.ranks import as_ranks, rank_device

if TYPE_CHECKING:
    import torch

# Threads that wait by computing slow each other where another process uses a core. PyTorch's OpenMP reads this when it
# is loaded, which no command has done yet.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

app = typer.Typer(
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make a Hugging Face model run near the limit of the hardware, and see what was done to it.",
)

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL_DIR", help="Folder with config.json, or a GGUF file; generate and bench need weights."
    ),
]
DtypeName = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16, float16, int8. Default: the best for the device.")
]
QuantName = Annotated[
    str | None, typer.Option("--quant", help='Format of the weights: int8, fp8, fp6, int4, "int4:128", or "int8:a8".')
]
Verify = Annotated[
    Literal["sample", "all", "strict", "off"],
    typer.Option(help="Which layers are proven against the original before they are swapped."),
]
KvCache = Annotated[
    Literal["int8"] | None,
    typer.Option("--kv-cache", help="Format of keys and values while generating. Default: the dtype."),
]
Explain = Annotated[
    str | None,
    typer.Option("--explain", metavar="PATH", help="A layer: print its graph in units, and which part has each."),
]
Ranks = Annotated[
    int | None, typer.Option("--tp", min=1, help="Ranks that share each layer, started here. Default: one process.")
]
ExpertRanks = Annotated[
    int | None, typer.Option("--ep", min=1, help="Ranks that divide the experts of mixtures; with --tp: tp * ep ranks.")
]
Seed = Annotated[
    int | None, typer.Option(min=-(2**63), max=2**64 - 1, help="With --sample: the same seed gives the same text.")
]
DeviceName = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1. Default: the GPU if there is one.")
]


@app.callback()
def without_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Make a Hugging Face model run near the limit of the hardware, and see what was done to it."""
    if version:
        print(f"infuse {_own_version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("plan")
def show_plan(
    model_dir: Folder,
    tp: Ranks = None,
    ep: ExpertRanks = None,
    dtype: DtypeName = None,
    quant: QuantName = None,
    kv_cache: KvCache = None,
    verify: Verify = "sample",
    device: DeviceName = None,
    explain: Explain = None,
) -> None:
    """Print what would be done to a model and why, without reading its weights. With --tp or --ep: rank 0's."""
    config = read_config(model_dir)
    with without_tracebacks():
        import infuse

        if explain is not None:
            print(
                infuse.explain(
                    empty_model(model_dir, config), explain, **_settings(dtype, quant, verify, device, None, None)
                )
            )
            return
        settings = _settings(dtype, quant, verify, device, tp, ep, kv_cache)
        plan = plan_of_folder(model_dir, config, settings)
        print(plan)
        if not plan.stored.formats and (told := quantization(model_dir, config)):
            print(f"  files  {told}: no weights were read, so this is the plan for dense weights")


@app.command()
def generate(
    model_dir: Folder,
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    sample: Annotated[
        bool, typer.Option("--sample", help="Draw each token instead of taking the likeliest one.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(min=0.01, help="With --sample: below 1 sharper, above 1 flatter.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="With --sample: draw from the likeliest of this mass.")
    ] = None,
    seed: Seed = None,
    lookup: Annotated[
        int | None, typer.Option(min=1, help="Verify up to so many tokens at once that followed the same words before.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(metavar="MODEL_DIR", help="Folder of a faster model that proposes tokens to verify.")
    ] = None,
    draft_quant: Annotated[
        str | None, typer.Option(help="Format of the draft's weights. The model itself in int4 is a good draft.")
    ] = None,
    tp: Ranks = None,
    ep: ExpertRanks = None,
    dtype: DtypeName = None,
    quant: QuantName = None,
    kv_cache: KvCache = None,
    verify: Verify = "sample",
    device: DeviceName = None,
) -> None:
    """Continue a prompt; the text appears as it comes."""
    if not sample and (temperature, top_p, seed) != (None, None, None):
        fail("--temperature, --top-p and --seed need --sample", WRONG_USE)
    if (draft_quant and draft is None) or (draft is not None and (lookup or tp or ep)):
        fail("--draft-quant needs --draft, and --draft excludes --lookup, --tp and --ep", WRONG_USE)
    config = read_config(model_dir, weights=True)
    if not as_ranks((tp or 1) * (ep or 1)):
        return
    with without_tracebacks():
        import torch
        import transformers

        tokenizer = read_tokenizer(model_dir)
        inputs = _tokens_of(prompt, tokenizer)
        prompt_tokens = inputs["input_ids"].shape[1]
        engine = start_engine(model_dir, config, _settings(dtype, quant, verify, device, tp, ep, kv_cache))
        more: dict[str, Any] = {"prompt_lookup_num_tokens": lookup}
        if draft is not None:
            more = _assisted(draft, config, tokenizer, _settings(dtype, draft_quant, verify, device, tp, ep, kv_cache))
        if seed is not None:
            torch.manual_seed(seed)
        more |= {"temperature": temperature, "top_p": top_p, "do_sample": sample, "max_new_tokens": max_new_tokens}
        more = {name: value for name, value in more.items() if value is not None}
        streamer = Counted(transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
        start = time.perf_counter()
        with refusals_of_generate(engine.module, prompt_tokens + max_new_tokens):
            ids = engine.generate(**inputs.to(engine.module.device), **more, streamer=streamer)
        _tell_speed(ids.shape[1] - prompt_tokens, time.perf_counter() - start, streamer.pieces)


def _tokens_of(prompt: str, tokenizer: Any) -> Any:
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # bytes that Python could not decode
        fail("the prompt is not valid UTF-8", WRONG_USE)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if inputs["input_ids"].shape[1] == 0:
        fail("the prompt has no tokens; give at least one character", WRONG_USE)
    return inputs


def _tell_speed(new_tokens: int, seconds: float, pieces: int) -> None:
    """`pieces`: pieces of text that the streamer got; the first is the prompt."""
    rate = f"{new_tokens / seconds:.1f} tokens/s, the prompt included"
    if new_tokens > pieces - 1:
        rate += f"; {new_tokens / (pieces - 1):.2f} tokens a step"
    remarks().print(f"{new_tokens} tokens in {seconds:.2f} s: {rate}")


def _assisted(draft: Path, config: Any, tokenizer: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` for a draft model. One of another vocabulary needs both tokenizers."""
    draft_config = read_config(draft, weights=True)
    more: dict[str, Any] = {"assistant_model": start_engine(draft, draft_config, settings)}
    if draft_config.get_text_config().vocab_size != config.get_text_config().vocab_size:
        more |= {"tokenizer": tokenizer, "assistant_tokenizer": read_tokenizer(draft)}
    return more


@app.command()
def bench(
    model_dir: Folder,
    against: Annotated[
        Literal["eager"] | None, typer.Option(help="Time transformers' own layers too. Needs memory for both.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at once.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")] = 3,
    tp: Ranks = None,
    ep: ExpertRanks = None,
    dtype: DtypeName = None,
    quant: QuantName = None,
    kv_cache: KvCache = None,
    verify: Verify = "sample",
    device: DeviceName = None,
) -> None:
    """Time prefill and decode on random tokens, and compare with the bounds of this machine's memory and arithmetic.

    With --tp or --ep: rank 0's times, and the bounds for its part while all ranks probe.
    """
    config = read_config(model_dir, weights=True)
    if against and (tp or ep):
        fail(f"--against with {'--tp' if tp else '--ep'}: transformers alone runs on one rank", WRONG_USE)
    if not as_ranks((tp or 1) * (ep or 1)):
        return
    with without_tracebacks():
        import torch

        products = multiplications(empty_model(model_dir, config))
        engine = start_engine(model_dir, config, _settings(dtype, quant, verify, device, tp, ep, kv_cache))
        model: Any = engine.module
        engine.group.share_random_state()  # all ranks draw the same prompts
        models = {"infuse": model}
        if against == "eager":
            models["transformers eager"] = load_generative(model_dir, config, dtype=model.dtype).to(model.device)
        ids = torch.randint(config.get_text_config().vocab_size, (batch, prompt_tokens), device=model.device)
        runs: dict[str, list[Speed]] = {name: [] for name in models}
        with refusals_of_generate(model, prompt_tokens + new_tokens):
            for _ in bar(range(1 + repeats), "timing"):
                for name, timed_model in models.items():  # in turns, so that a slowdown of the machine affects both
                    runs[name].append(timed(timed_model, ids, new_tokens))
        speeds = {name: middle(several[1:]) for name, several in runs.items()}  # the first run warms up
        speeds["bound"] = bound(model, products * batch * prompt_tokens // engine.group.size)
        what = f"{type(model).__name__}, {_short(model.dtype)}, weights {quant or 'as they are'}"
        Console().print(table(f"{what}; batch {batch}, {prompt_tokens} + {new_tokens} tokens", speeds, batch))


@app.command()
def shard(
    model_dir: Folder,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder for the shards; config and tokenizer are copied to it.")
    ],
    tp: Ranks = None,
    ep: ExpertRanks = None,
    dtype: DtypeName = None,
    quant: QuantName = None,
    verify: Verify = "sample",
    device: DeviceName = None,
) -> None:
    """Replace and quantize a model once, and save it: `infuse generate OUT` then reads it at the speed of the disk."""
    config = read_config(model_dir, weights=True)
    if out.resolve() == model_dir.resolve():
        fail("OUT is MODEL_DIR; give another folder for the shards", WRONG_USE)
    if not as_ranks((tp or 1) * (ep or 1)):
        return
    with without_tracebacks():
        import infuse

        paths = {"checkpoint": str(model_dir), "save_mp_checkpoint_path": str(out)}
        settings = _settings(dtype, quant, verify, device, tp, ep)
        engine = infuse.init_inference(empty_model(model_dir, config), **paths, **settings)
        if engine.group.rank == 0:
            copy_rest(model_dir, config, out)
        print(engine.plan)
        remarks().print(f"{sum(file.stat().st_size for file in out.glob('*.safetensors')) / 1e6:,.1f} MB in {out}")


@app.command()
def build(
    again: Annotated[bool, typer.Option("--again", help="Build even if there are kernels already.")] = False,
) -> None:
    """Build the C++ kernels for CPUs now instead of at their first use, into INFUSE_CACHE_DIR or ~/.cache."""
    with without_tracebacks():
        from infuse.native import first_use, installed

        if (binary := installed()) and not again:
            print(f"the kernels came with the installation: {binary}")
            return
        path = first_use.obtain(again=again or first_use.kept() is None)
        if isinstance(path, str):
            fail(path, FAILED)
        print(path)
        if binary:
            remarks().print(f"the kernels that came with the installation are taken first: {binary}", soft_wrap=True)


@app.command("clear-cache")
def clear_cache() -> None:
    """Remove receipts of proofs and readings of layers, so that each is proven and read anew. Built kernels stay."""
    with without_tracebacks():
        from infuse.ground.cache_folder import READINGS, RECEIPTS

        print(f"{RECEIPTS.clear()} receipts and {READINGS.clear()} readings removed")


@app.command()
def env() -> None:
    """Print what this machine offers: devices, instruction sets, compiler, versions."""
    with without_tracebacks():
        import torch

        from infuse.ground.cache_folder import READINGS, RECEIPTS
        from infuse.ground.device import Device
        from infuse.native import described

        table = Table("what", "found", show_header=False, box=None)
        for device in [Device.of("cpu"), *(Device.of(f"cuda:{index}") for index in range(torch.cuda.device_count()))]:
            label = device.kind if device.index is None else f"{device.kind}:{device.index}"
            table.add_row(label, f"{device.name}, {device.memory_bytes / 2**30:.1f} GiB")
            table.add_row("  instruction sets", ", ".join(device.features) or "none that kernels use")
            table.add_row("  default dtype", _short(device.default_dtype))
        table.add_row("threads", str(torch.get_num_threads()))
        compilers = [name for name in ("c++", "g++", "clang++", "cl", "nvcc") if shutil.which(name)]
        table.add_row("compilers on PATH", ", ".join(compilers) or "none; everything works with PyTorch's operations")
        for what, found_out in described().items():
            table.add_row(what, found_out)
        table.add_row("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
        kept = f"{RECEIPTS.count()} receipts of proofs, {READINGS.count()} readings of layers"
        table.add_row("kept for later starts", f"{kept}; infuse clear-cache removes them")
        for package in ("infuse", "torch", "transformers", "triton", "diffusers"):
            table.add_row(package, _version(package))
        Console().print(table)


def _settings(
    dtype: str | None,
    quant: str | None,
    verify: str,
    device: str | None,
    tp: int | None,
    ep: int | None,
    kv_cache: str | None = None,
) -> dict[str, Any]:
    """The options as keyword arguments of init_inference and plan."""
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else None)
    settings: dict[str, Any] = {"dtype": dtype, "quant": quant, "verify": verify, "device": device}
    if tp or ep:
        settings["device"] = rank_device(device)
    if kv_cache:
        settings["kv_cache"] = kv_cache
    if tp:
        settings["tensor_parallel"] = {"tp_size": tp}
    if ep:
        settings["moe"] = {"ep_size": ep}
    return {name: value for name, value in settings.items() if value is not None}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _own_version() -> str:
    """infuse.__version__, without importing infuse."""
    spec = find_spec("infuse")
    assert spec is not None and spec.origin is not None
    found = re.search(r'^__version__ = "(.+)"$', Path(spec.origin).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found.group(1)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    app()
