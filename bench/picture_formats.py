"""A whole pipeline of Stable Diffusion 1.5's shape, random weights, in each number format: time, size and quality.

Run `python bench/picture_formats.py [FORMAT ...]` for times, with `--quality` for the errors of latents and pictures.
Times: one step of the denoiser with guidance (two rows) and a whole picture. Errors: against the float32 original on
the same weights, from the same noise; the original in bfloat16 is the yardstick.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import diffusers
import torch
from rich.table import Table
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import infuse
from diffusion import CASES, DTYPE, empty
from infuse.ground.memory import channels_last
from infuse.plan.bytes import parameter_bytes
from infuse.profile.probe import matmul_rate
from report import markdown, show

ORIGINAL = "diffusers"
FORMATS = ("bfloat16", "int8", "int8:a8", "fp8", "int4")


def pipeline() -> Any:
    """Stable Diffusion 1.5 with random weights, and a tokenizer of single letters."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    sizes = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
    last = len(tokens) - 1
    config = CLIPTextConfig(**sizes, bos_token_id=last - 1, eos_token_id=last, pad_token_id=last)
    pipe = diffusers.StableDiffusionPipeline(
        unet=CASES["sd15"].make().eval(),
        vae=CASES["vae"].make().eval(),
        text_encoder=text_encoder(config),
        tokenizer=CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=77),
        scheduler=diffusers.DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    for model in (pipe.unet, pipe.vae, pipe.text_encoder):
        fill(model)
    return pipe


def fill(model: nn.Module) -> None:
    """Normal weights that keep the size of activations, so that every linear counts.

    They repeat one run of numbers, each from a place of its own: a billion new ones take half a minute.
    """
    numbers = torch.randn(1 << 22).to(DTYPE)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            continue
        first = int(torch.randint(len(numbers), ()))
        repeated = numbers.roll(first).repeat(-(-parameter.numel() // len(numbers)))[: parameter.numel()]
        parameter.data.copy_(repeated.view(parameter.shape)).mul_((parameter.numel() / len(parameter)) ** -0.5)


def text_encoder(config: CLIPTextConfig) -> nn.Module:
    made = empty(CLIPTextModel, config=config).eval()
    for name, buffer in made.named_buffers():
        if name.endswith("position_ids"):
            buffer.copy_(torch.arange(buffer.shape[-1]))
    return made


def drawn(pipe: Any, size: int, steps: int, **more: Any) -> Tensor:
    """A picture, [3, size, size] from 0 to 1, always from the same noise."""
    generator = torch.Generator().manual_seed(1)
    given = dict(num_inference_steps=steps, height=size, width=size, generator=generator, output_type="pt", **more)
    return pipe("a photo of a red cat", **given).images[0].float()


def copied(pipe: Any) -> Any:
    """A pipeline of copies of the models, which share their weights with the originals."""
    parts = dict(pipe.components)
    for name, one in parts.items():
        if isinstance(one, nn.Module):
            parts[name] = copy.deepcopy(one, {id(parameter): parameter for parameter in one.parameters()})
    made = type(pipe)(**parts, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


def versions(formats: list[str], pipe: Any, verify: str) -> dict[str, Callable[[], tuple[Any, int]]]:
    """By name: what makes a pipeline and the bytes of its weights."""

    def original() -> tuple[Any, int]:
        return pipe, sum(parameter_bytes(one) for one in pipe.components.values() if isinstance(one, nn.Module))

    def injected(format: str) -> tuple[Any, int]:
        given = {} if format == "bfloat16" else {"quant": format}
        engine = infuse.init_inference(copied(pipe), dtype=DTYPE, verify=verify, **given)
        return engine, engine.plan.after_bytes

    return {ORIGINAL: original, **{format: lambda format=format: injected(format) for format in formats}}


def timed(pipe: Any, size: int, steps: int) -> tuple[float, float]:
    """Seconds of one step of the denoiser, the median of all but the first, and of the whole picture."""
    ends: list[float] = []

    def note(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        ends.append(time.perf_counter())
        return given

    start = time.perf_counter()
    drawn(pipe, size, steps, callback_on_step_end=note)
    whole = time.perf_counter() - start
    return median(b - a for a, b in zip(ends, ends[1:], strict=False)), whole


def errors(pipe: Any, size: int, steps: int, exact: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Relative error of the latents, and the picture's peak signal-to-noise ratio in dB."""
    latents, picture = both(pipe, size, steps)
    off = (latents - exact[0]).square().mean().sqrt() / exact[0].square().mean().sqrt()
    return float(off), -10 * math.log10(float((picture - exact[1]).square().mean()))


def both(pipe: Any, size: int, steps: int) -> tuple[Tensor, Tensor]:
    """Latents and picture of one call."""
    kept: list[Tensor] = []

    def keep(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        kept[:] = [given["latents"].float().clone()]
        return given

    picture = drawn(pipe, size, steps, callback_on_step_end=keep)
    return kept[0], picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("formats", nargs="*", default=[*FORMATS])
    parser.add_argument("--quality", action="store_true", help="errors instead of times")
    parser.add_argument("--size", type=int, help="pixels of each side: 512 for times, 256 for errors")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--verify", default="off", help="sample: with the proofs")
    parser.add_argument("--out", type=Path, help="append the report to this file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    size = args.size or (256 if args.quality else 512)
    pipe = pipeline()
    for model in (pipe.unet, pipe.vae):
        channels_last(model)
    headings = ("latents' error", "PSNR, dB") if args.quality else ("step, ms", "x", "picture, s", "x")
    table = Table(title=f"SD 1.5's shape, {size} x {size}, {args.steps} steps with guidance, bfloat16")
    for heading in ("", "weights, MB", *headings):
        table.add_column(heading, justify="right" if heading else "left")
    exact = both(pipe.to(torch.float32), size, args.steps) if args.quality else None
    pipe.to(DTYPE)
    first: tuple[float, float] | None = None
    for name, make in versions(args.formats, pipe, args.verify).items():
        made, held = make()
        if exact is not None:
            off, ratio = errors(made, size, args.steps, exact)
            cells = [f"{off:.1e}", f"{ratio:.1f}"]
        else:
            step, whole = timed(made, size, args.steps)
            first = first or (step, whole)
            cells = [f"{step * 1e3:.0f}", f"{first[0] / step:.2f}", f"{whole:.2f}", f"{first[1] / whole:.2f}"]
        table.add_row(name, f"{held / 1e6:,.0f}", *cells)
        print(name, *cells, flush=True)  # a run may be stopped
        del made
    rate = "" if args.quality else f"; bfloat16 matmul {matmul_rate(DTYPE) / 1e12:.2f} TFLOP/s"
    show(markdown(table, f"diffusers {diffusers.__version__}{rate}"), args.out)


if __name__ == "__main__":
    main()
