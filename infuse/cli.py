"""The command line: infuse plan | generate | bench | shard | env. Reads model folders, prints; decides nothing.

torch and transformers are imported inside the commands, so that `--help` and wrong arguments answer at once.
Exit codes: 0 done, 1 the work failed, 2 the command was wrong (an option, a path, a folder without the needed files).
Results go to standard output; progress, remarks and errors to standard error.
"""

from __future__ import annotations

import platform
import shutil
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from infuse.cli_folder import (
    WRONG_USE,
    bar,
    copy_rest,
    empty_model,
    fail,
    load_generative,
    read_config,
    read_tokenizer,
    remarks,
    start_engine,
    told_errors,
)
from infuse.cli_ranks import as_ranks, rank_device

if TYPE_CHECKING:
    import torch

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Make a Hugging Face model run near the limit of the hardware, and see what was done to it.",
)

PROBE_BYTES = 1 << 28  # a quarter of what bench/probe.py reads: large beside any cache, and quick

Folder = Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Folder with config.json; generate and bench need weights in it too.")]
DtypeName = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, float16, int8. Default: what the device is best at.")]
QuantName = Annotated[str | None, typer.Option("--quant", help='Format of the weights: int8, fp8, fp6, int4, "int4:128", or "int8:a8".')]
Verify = Annotated[
    Literal["sample", "all", "strict", "off"], typer.Option(help="Which layers are proven against the original before they are swapped.")
]
Ranks = Annotated[int | None, typer.Option("--tp", min=1, help="Ranks that share each layer, started here. Default: one process.")]
DeviceName = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1. Default: the GPU if there is one.")]


@app.command("plan")
def show_plan(
    model_dir: Folder, tp: Ranks = None, dtype: DtypeName = None, quant: QuantName = None, verify: Verify = "sample",
    device: DeviceName = None,
) -> None:
    """Print what would be done to a model and why. Reads config.json alone: no weights, no memory. Of ranks: what rank 0 does."""
    config = read_config(model_dir)
    with told_errors():
        import infuse

        print(infuse.plan(empty_model(model_dir, config), **_settings(dtype, quant, verify, device, tp)))


@app.command()
def generate(
    context: typer.Context,
    model_dir: Folder,
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    sample: Annotated[bool, typer.Option("--sample", help="Draw each token instead of taking the likeliest one.")] = False,
    temperature: Annotated[float | None, typer.Option(min=0.01, help="With --sample: below 1 sharper, above 1 flatter.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="With --sample: draw from the likeliest of this mass.")] = None,
    seed: Annotated[int | None, typer.Option(help="With --sample: the same seed gives the same text.")] = None,
    tp: Ranks = None, dtype: DtypeName = None, quant: QuantName = None, verify: Verify = "sample", device: DeviceName = None,
) -> None:
    """Continue a prompt; the text appears as it comes."""
    if not sample and (temperature, top_p, seed) != (None, None, None):
        fail("--temperature, --top-p and --seed have a meaning only with --sample", WRONG_USE)
    config = read_config(model_dir, weights=True)
    if not as_ranks(context, tp):
        return
    with told_errors():
        import torch
        import transformers

        tokenizer = read_tokenizer(model_dir)
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        prompt_tokens = inputs["input_ids"].shape[1]
        if prompt_tokens == 0:
            fail("the prompt holds no token; give at least one character", WRONG_USE)
        engine = start_engine(model_dir, config, _settings(dtype, quant, verify, device, tp))
        if seed is not None:
            torch.manual_seed(seed)
        sampling = {name: value for name, value in (("temperature", temperature), ("top_p", top_p)) if value is not None}
        streamer = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        start = time.perf_counter()
        ids = engine.generate(
            **inputs.to(engine.module.device), streamer=streamer, max_new_tokens=max_new_tokens, do_sample=sample, **sampling
        )
        seconds, new_tokens = time.perf_counter() - start, ids.shape[1] - prompt_tokens
        remarks().print(f"{new_tokens} tokens in {seconds:.2f} s: {new_tokens / seconds:.1f} tokens/s, the prompt included")


@app.command()
def bench(
    context: typer.Context,
    model_dir: Folder,
    against: Annotated[Literal["eager"] | None, typer.Option(help="Time transformers' own layers too. Needs memory for both.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at once.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")] = 3,
    tp: Ranks = None, dtype: DtypeName = None, quant: QuantName = None, verify: Verify = "sample", device: DeviceName = None,
) -> None:
    """Time prefill and decode on random tokens, beside the bounds that this machine's memory and arithmetic set.

    Of ranks, rank 0's times, and the bounds of its part while all ranks probe.
    """
    config = read_config(model_dir, weights=True)
    if against and tp:
        fail("--against with --tp: transformers alone has no ranks to be timed with", WRONG_USE)
    if not as_ranks(context, tp):
        return
    with told_errors():
        import torch

        products = _products(empty_model(model_dir, config))
        engine = start_engine(model_dir, config, _settings(dtype, quant, verify, device, tp))
        model: Any = engine.module
        engine.group.share_random_state()  # all ranks are given the same prompts
        models = {"infuse": model}
        if against == "eager":
            models["transformers eager"] = load_generative(model_dir, config, dtype=model.dtype).to(model.device)
        ids = torch.randint(config.get_text_config().vocab_size, (batch, prompt_tokens), device=model.device)
        runs: dict[str, list[Speed]] = {name: [] for name in models}
        for _ in bar(range(1 + repeats), "timing"):
            for name, timed in models.items():  # in turns: a machine that slows down slows both
                runs[name].append(_speed(timed, ids, new_tokens))
        speeds = {name: _median(timed[1:]) for name, timed in runs.items()}  # the first run warms up
        speeds["bound"] = _bound(model, products * batch * prompt_tokens // engine.group.size)
        what = f"{type(model).__name__}, {_short(model.dtype)}, weights {quant or 'as they are'}"
        Console().print(_bench_table(f"{what}; batch {batch}, {prompt_tokens} + {new_tokens} tokens", speeds, batch))


@app.command()
def shard(
    context: typer.Context,
    model_dir: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the shards; config and tokenizer are copied to it.")],
    tp: Ranks = None, dtype: DtypeName = None, quant: QuantName = None, verify: Verify = "sample", device: DeviceName = None,
) -> None:
    """Replace and quantize a model once, and save it so that `infuse generate OUT` reads it at the speed of the disk."""
    config = read_config(model_dir, weights=True)
    if out.resolve() == model_dir.resolve():
        fail("OUT is MODEL_DIR; the shards need a folder of their own", WRONG_USE)
    if not as_ranks(context, tp):
        return
    with told_errors():
        import infuse

        paths = {"checkpoint": str(model_dir), "save_mp_checkpoint_path": str(out)}
        engine = infuse.init_inference(empty_model(model_dir, config), **paths, **_settings(dtype, quant, verify, device, tp))
        if engine.group.rank == 0:
            copy_rest(model_dir, out)
        print(engine.plan)
        remarks().print(f"{sum(file.stat().st_size for file in out.glob('*.safetensors')) / 1e6:,.1f} MB in {out}")


@app.command()
def env() -> None:
    """Print what this machine offers: devices, instruction sets, compiler, versions."""
    with told_errors():
        import torch

        from infuse.device import Device
        from infuse.ops.cpu import described

        table = Table("what", "found", show_header=False, box=None)
        for found in [Device.of("cpu"), *(Device.of(f"cuda:{index}") for index in range(torch.cuda.device_count()))]:
            label = found.kind if found.index is None else f"{found.kind}:{found.index}"
            table.add_row(label, f"{found.name}, {found.memory_bytes / 2**30:.1f} GiB")
            table.add_row("  instruction sets", ", ".join(found.features) or "none that a kernel asks for")
            table.add_row("  default dtype", _short(found.default_dtype))
        table.add_row("threads", str(torch.get_num_threads()))
        compilers = [name for name in ("c++", "g++", "clang++", "cl", "nvcc") if shutil.which(name)]
        table.add_row("compilers on PATH", ", ".join(compilers) or "none; everything works, with PyTorch's own operations")
        for what, found_out in described().items():
            table.add_row(what, found_out)
        table.add_row("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
        for package in ("infuse", "torch", "transformers", "triton", "diffusers"):
            table.add_row(package, _version(package))
        Console().print(table)


@dataclass(frozen=True)
class Speed:
    """Seconds to the first token, and seconds of each later step."""

    prefill_seconds: float
    step_seconds: float


def _speed(model: Any, ids: torch.Tensor, new_tokens: int) -> Speed:
    first = _seconds(model, ids, 1)
    return Speed(first, max(_seconds(model, ids, new_tokens) - first, 1e-9) / (new_tokens - 1))


def _seconds(model: Any, ids: torch.Tensor, new_tokens: int) -> float:
    """The time of one greedy generation of exactly `new_tokens`."""
    import torch

    start = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens)
    if ids.device.type == "cuda":
        torch.cuda.synchronize(ids.device)
    return time.perf_counter() - start


def _median(speeds: list[Speed]) -> Speed:
    return Speed(median(speed.prefill_seconds for speed in speeds), median(speed.step_seconds for speed in speeds))


def _products(model: Any) -> int:
    """The multiplications that one token needs in the layers' matrices; asked of the original, before weights are packed."""
    tables = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None}
    return sum(weight.numel() for weight in model.parameters() if weight.dim() > 1 and id(weight) not in tables)


def _bound(model: Any, products: int) -> Speed:
    """`products` at the probed matmul rate; every weight read once for each step at the probed bandwidth."""
    from infuse.runtime.probe import matmul_rate, read_bandwidth

    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if getattr(head, "weight", None) is not table:
        tensors.pop(id(table), None)  # of a table that is only looked up, a step reads one row
    step_bytes = sum(tensor.nbytes for tensor in tensors.values())
    rate = matmul_rate(model.dtype, device=model.device)
    return Speed(2 * products / rate, step_bytes / read_bandwidth(device=model.device, size_bytes=PROBE_BYTES).best)


def _bench_table(title: str, speeds: dict[str, Speed], batch: int) -> Table:
    """A row for each model and one for the bound; a ratio above 1 says how many times faster infuse is than its row."""
    ours = speeds["infuse"]
    table = Table("", "prefill, s", "ratio", "decode, tokens/s", "ratio", title=title, title_justify="left", caption_justify="left")
    for name, speed in speeds.items():
        prefill, decode = speed.prefill_seconds / ours.prefill_seconds, speed.step_seconds / ours.step_seconds
        table.add_row(name, f"{speed.prefill_seconds:.4f}", f"{prefill:.3g}", f"{batch / speed.step_seconds:.1f}", f"{decode:.3g}")
    table.caption = "ratio: how many times faster infuse is. bound: the probed matmul rate (prefill), all weights read once a step (decode)"
    return table


def _settings(dtype: str | None, quant: str | None, verify: str, device: str | None, tp: int | None) -> dict[str, Any]:
    """The options as keyword arguments of init_inference and plan."""
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else None)
    ranks = {"tp_size": tp} if tp else None
    given = {"dtype": dtype, "quant": quant, "verify": verify, "device": rank_device(device) if ranks else device, "tensor_parallel": ranks}
    return {name: value for name, value in given.items() if value is not None}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    app()
