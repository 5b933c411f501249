"""One step of the denoisers of Stable Diffusion 1.5, SDXL and Flux on a GPU, both halves of guidance in one batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch

import infuse
from on_gpu.models import Plan, Row, emptied
from on_gpu.runs import Bounds, Budget, wall_seconds

EAGER = "diffusers eager"
SECONDS_TO_RUN = {"sd15": 8.0, "sdxl": 15.0, "flux": 8.0}  # a guess, for the budget alone
ROWS = 2
_TINY_UNET = dict(
    block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    layers_per_block=1,
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=32,
    attention_head_dim=4,
    sample_size=8,
)


def denoisers(plan: Plan, bounds: Bounds, budget: Budget) -> Iterator[Row]:
    """Seconds of a step in bfloat16, the time of the host included; the share is that of the matmul rate."""
    if find_spec("diffusers") is None:
        budget.skipped.append("denoisers (they need the package diffusers)")
        return
    import diffusion

    cases = {name: diffusion.CASES[name] for name in SECONDS_TO_RUN}
    if plan.tiny:
        cases = {"sd15": diffusion.Case(cases["sd15"].title, partial(_tiny, diffusion), partial(_tiny_step, diffusion))}
    for name, case in cases.items():
        first = None
        for who in (EAGER, "infuse"):
            if not budget.allows(f"{case.title}, {who}", 0 if plan.tiny else SECONDS_TO_RUN[name]):
                continue
            torch.manual_seed(0)
            with torch.device(plan.device):
                model: Any = case.make().to(diffusion.DTYPE).eval()
                given = case.inputs(ROWS)
                given["timestep"] = torch.as_tensor(given["timestep"])  # as schedulers give it; a number is no graph's
            if who == "infuse":
                graphs = plan.device.type == "cuda"
                model = infuse.init_inference(
                    model, dtype=diffusion.DTYPE, enable_cuda_graph=graphs, progress=False
                ).module
                plan.install(model)
            seconds = wall_seconds(
                partial(diffusion.step, model, given, case.decodes), plan.device, plan.repeats, warm=3
            )
            row = Row(case.title, who, f"a step, {ROWS} rows", median(seconds), (min(seconds), max(seconds)))
            row.share = diffusion.operations(case, ROWS) / row.seconds / bounds.matmul_operations
            first = row.seconds if who == EAGER else first
            row.ratio = first / row.seconds if first else None
            yield row
            del model
            emptied(plan.device)


def _tiny(diffusion: Any) -> Any:
    return diffusion.empty(diffusion.diffusers.UNet2DConditionModel, **_TINY_UNET)


def _tiny_step(diffusion: Any, rows: int) -> dict[str, Any]:
    text = diffusion.values(rows, 7, 32)
    return dict(sample=diffusion.values(rows, 4, 8, 8), timestep=500, encoder_hidden_states=text)
