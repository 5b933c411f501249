"""Notes on matrices that a checkpoint stores in a number format, unless the steps of a plan keep their codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from infuse.architectures.part import named
from infuse.plan.step import Step
from infuse.plan.stored import StoredFormats
from infuse.weights.lazy import stored_alike


def lost_codes(stored: StoredFormats, steps: Iterable[Step], dtype: torch.dtype) -> Iterator[str]:
    """Yield one note for each stored format and what its matrices become."""
    fills = ((step.path, fill) for step in steps for fill in step.fills)
    planned = {named(path, name): fill for path, fill in fills for name in fill.sources}
    plain = str(dtype).removeprefix("torch.")
    lost: dict[tuple[str, str, bool], list[str]] = {}  # (stored format, new one, whether it is one) → names
    for name, format in sorted(stored.formats.items()):
        fill = planned.get(name)
        if fill is None or fill.format is None:
            lost.setdefault((stored.text(name), plain, False), []).append(name)
        elif not (fill.as_stored and stored_alike(format, fill.format)) or fill.ordered != (name in stored.orders):
            lost.setdefault((stored.text(name), fill.format, True), []).append(name)
    for (format, now, rounds), names in lost.items():
        of_experts = stored.stacked.issuperset(names)
        what = f"{len(names)} {'matrices' if len(names) > 1 else 'matrix'}{' of experts' if of_experts else ''}"
        are, become = ("are", "become") if len(names) > 1 else ("is", "becomes")
        why = "rounded twice; leave quant out to keep their codes" if rounds else "dequantized"
        yield f"{what} {are} stored in {format} and {become} {now}, e.g. {names[0]}: {why}"
