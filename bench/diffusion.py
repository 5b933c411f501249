"""One step of each diffusion model, random weights: diffusers eager in channels-last and infuse in turns.

Run `python bench/diffusion.py sd15 sdxl flux sd3 vae [--formats int8:a8] [--compile]`. The models have the sizes of
Stable Diffusion 1.5 and XL, Flux and Stable Diffusion 3; of the last two, one block of each kind. Text encoders:
`t5`, 512 tokens. Both run on the same weights, so that a model of 5 GB fits into memory twice.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import diffusers
import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import infuse
from infuse.ground.memory import channels_last
from infuse.profile.probe import matmul_rate
from report import in_turns, markdown, show

DTYPE = torch.bfloat16
_SD_BLOCKS = dict(
    block_out_channels=(320, 640, 1280, 1280), cross_attention_dim=768, attention_head_dim=8, sample_size=64
)
_SDXL = dict(
    block_out_channels=(320, 640, 1280), cross_attention_dim=2048, attention_head_dim=(5, 10, 20), sample_size=128,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"), use_linear_projection=True,
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), transformer_layers_per_block=(1, 2, 10),
    addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
)  # fmt: skip
_VAE = dict(
    block_out_channels=(128, 256, 512, 512),
    down_block_types=("DownEncoderBlock2D",) * 4,
    layers_per_block=2,
    up_block_types=("UpDecoderBlock2D",) * 4,
    sample_size=512,
)


@dataclass(frozen=True)
class Case:
    """`make` builds the model, `inputs` the arguments of one step for a number of rows."""

    title: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    decodes: bool = False


def _sd15(rows: int) -> dict[str, Any]:
    return dict(sample=values(rows, 4, 64, 64), timestep=500, encoder_hidden_states=values(rows, 77, 768))


def _sdxl(rows: int) -> dict[str, Any]:
    added = dict(text_embeds=values(rows, 1280), time_ids=values(rows, 6))
    text = values(rows, 77, 2048)
    return dict(sample=values(rows, 4, 64, 64), timestep=500, encoder_hidden_states=text, added_cond_kwargs=added)


def _flux(rows: int) -> dict[str, Any]:
    grid = torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(32.0), torch.arange(32.0), indexing="ij"), dim=-1)
    return dict(
        hidden_states=values(rows, 1024, 64),
        encoder_hidden_states=values(rows, 512, 4096),
        timestep=torch.ones(rows),
        pooled_projections=values(rows, 768),
        guidance=torch.full((rows,), 3.5),
        img_ids=grid.reshape(1024, 3),
        txt_ids=torch.zeros(512, 3),
    )


def _sd3(rows: int) -> dict[str, Any]:
    text = values(rows, 333, 4096)
    pooled = values(rows, 2048)
    time_steps = torch.full((rows,), 500.0)
    latents = values(rows, 16, 64, 64)
    return dict(hidden_states=latents, encoder_hidden_states=text, pooled_projections=pooled, timestep=time_steps)


def _t5() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    sizes = dict(d_model=4096, d_kv=64, d_ff=10240, num_layers=2, num_heads=64, feed_forward_proj="gated-gelu")
    return T5EncoderModel(T5Config(**sizes, is_encoder_decoder=False, use_cache=False))


CASES: Mapping[str, Case] = {
    "sd15": Case("SD 1.5 UNet, 64 x 64", lambda: empty(diffusers.UNet2DConditionModel, **_SD_BLOCKS), _sd15),
    "sdxl": Case("SDXL UNet, 64 x 64", lambda: empty(diffusers.UNet2DConditionModel, **_SDXL), _sdxl),
    "flux": Case(
        "Flux: one double and one single block, 1024 + 512 tokens",
        lambda: empty(diffusers.FluxTransformer2DModel, num_layers=1, num_single_layers=1, guidance_embeds=True),
        _flux,
    ),
    "sd3": Case(
        "SD3: two blocks, 1024 + 333 tokens",
        lambda: diffusers.SD3Transformer2DModel(
            num_layers=2, num_attention_heads=24, caption_projection_dim=1536, pos_embed_max_size=192
        ),
        _sd3,
    ),
    "vae": Case(
        "VAE, decoding to 512 x 512",
        lambda: empty(diffusers.AutoencoderKL, **_VAE),
        lambda rows: dict(z=values(rows, 4, 64, 64)),
        decodes=True,
    ),
    "t5": Case(
        "T5-XXL encoder: two layers, 512 tokens", _t5, lambda rows: dict(input_ids=torch.ones(rows, 512).long())
    ),
}

KINDS: Mapping[str, tuple[str, ...]] = {
    "convolution": ("conv",),
    "attention": ("attention", "sdpa"),
    "norm": ("norm",),
    "product": ("linear", "mm", "bmm", "product", "experts"),
    "activation": ("silu", "gelu", "activation", "sigmoid"),
}


def values(*shape: int) -> Tensor:
    return torch.randn(shape).to(DTYPE)


def empty(kind: Any, **settings: Any) -> nn.Module:
    """A model with random weights, made without the time that its own initialisation takes."""
    wanted = torch.get_default_device()
    with torch.device("meta"):
        model = kind(**settings).to(DTYPE)
    if wanted.type == "meta":
        return model
    model = model.to_empty(device=wanted)
    for parameter in model.parameters():
        parameter.data.uniform_(-0.03, 0.03)
        if parameter.dim() == 1:
            parameter.data += 1
    return model


def step(model: Any, given: dict[str, Any], decodes: bool) -> Tensor:
    with torch.no_grad():
        return (model.decode(**given) if decodes else model(**given))[0]


def operations(case: Case, rows: int) -> int:
    """Floating-point operations of the products, convolutions and attention of one step."""
    with torch.device("meta"):
        model = case.make().to("meta").to(DTYPE).eval()
    given = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), case.inputs(rows))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # whose products are counted
        step(model, given, case.decodes)
    return counter.get_total_flops()


def shares(run: Callable[[], object]) -> dict[str, float]:
    """Shares of the time of one run by kind of work, from 0 to 1."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    spent = dict.fromkeys((*KINDS, "other"), 0.0)
    for event in found.key_averages():
        name = event.key.lower()
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")
        spent[kind] += event.self_cpu_time_total
    total = sum(spent.values())
    return {kind: time / total for kind, time in spent.items()}


def _keep(results: dict[int, Tensor], number: int, run: Callable[[], Tensor]) -> None:
    results[number] = run()


def measured(case: Case, args: argparse.Namespace, rate: float, table: Table) -> list[dict[str, Any]]:
    """Add the rows of one case to the table, and return them as bench/pictures.py reads them."""
    torch.manual_seed(0)
    eager = case.make().to(DTYPE).eval()
    channels_last(eager)
    models: dict[str, Any] = {"diffusers, eager": eager}
    for format in ("", *args.formats):
        shared = {id(parameter): parameter for parameter in eager.parameters()}
        start = time.perf_counter()
        given = dict(quant=format) if format else {}
        engine = infuse.init_inference(copy.deepcopy(eager, shared), dtype=DTYPE, verify=args.verify, **given)
        name = f"infuse {format or 'bfloat16'} (made in {time.perf_counter() - start:.0f} s)"
        models[name] = engine.module
        if args.plan:
            print(engine.plan)
    if args.compile:
        models["diffusers, compiled"] = torch.compile(copy.deepcopy(eager, {id(p): p for p in eager.parameters()}))
    given = case.inputs(args.rows)
    runs = [partial(step, model, given, case.decodes) for model in models.values()]
    results: dict[int, Tensor] = {}
    kept = [partial(_keep, results, number, run) for number, run in enumerate(runs)]
    seconds = in_turns(kept, args.repeats)
    work, wanted = operations(case, args.rows), results[0].float()
    rows = []
    for number, (name, run, taken) in enumerate(zip(models, runs, seconds, strict=True)):
        error = float((results[number].float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
        spent = shares(run) if args.shares else {}
        table.add_row(
            case.title,
            name,
            f"{median(taken) * 1e3:.0f}",
            f"{max(taken) / min(taken):.2f}",
            f"{median(seconds[0]) / median(taken):.2f}",
            f"{work / median(taken) / rate:.2f}",
            f"{error:.1e}",
            ", ".join(f"{kind} {part:.0%}" for kind, part in spent.items() if part >= 0.005),
        )
        rows.append(dict(case=case.title, name=name.partition(" (")[0], ms=median(taken) * 1e3, shares=spent))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES], default=[*CASES])
    parser.add_argument("--rows", type=int, default=1, help="2: both halves of classifier-free guidance")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--formats", nargs="*", default=["int8:a8"])
    parser.add_argument("--verify", default="sample", help="off: save the time of the proofs")
    parser.add_argument("--compile", action="store_true", help="torch.compile of diffusers' model beside it")
    parser.add_argument("--shares", action="store_true", help="the time by kind of work")
    parser.add_argument("--json", type=Path, help="write times and shares to this file, for bench/pictures.py")
    parser.add_argument("--plan", action="store_true", help="print the plans")
    parser.add_argument("--out", type=Path, help="append the report to this file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rate = matmul_rate(DTYPE)
    what = f"one step, {args.rows} rows, bfloat16: x is the ratio to the first row, share that of the matmul rate"
    found: list[dict[str, Any]] = []
    for name in args.cases:  # each is shown as soon as it is measured
        table = Table(title=what)
        for heading in ("model", "", "ms", "spread", "x", "share", "error", "time by kind"):
            table.add_column(heading, justify="left" if heading in ("model", "", "time by kind") else "right")
        found += measured(CASES[name], args, rate, table)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        remarks = f"diffusers {diffusers.__version__}; bfloat16 matmul {rate / 1e12:.2f} TFLOP/s"
        show(markdown(table, remarks), args.out)


if __name__ == "__main__":
    main()
