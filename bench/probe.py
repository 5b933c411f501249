"""The bounds of this machine: read bandwidth and matmul rates. Every other benchmark compares its figures with these.

python bench/probe.py [--device cuda]
"""

from __future__ import annotations

import argparse
import platform
import sys

import torch
from rich.console import Console
from rich.table import Table

from infuse.ground.device import Device
from infuse.profile.probe import matmul_rate, read_bandwidth

DTYPES = (torch.float32, torch.bfloat16)


def table(device: str) -> Table:
    """Run every probe on `device` and return the figures."""
    described = Device.of(device)
    threads = f", {torch.get_num_threads()} threads" if described.kind == "cpu" else ""
    title = f"{described.name}{threads}, torch {torch.__version__}"
    rows = Table("probe", "what is timed", "best", "median", title=title, title_justify="left")
    for huge_pages in (True, False) if described.kind == "cpu" else (True,):
        read = read_bandwidth(device=device, huge_pages=huge_pages)
        pages = "" if described.kind != "cpu" else ", huge pages" if huge_pages else ", pages as PyTorch gets them"
        rows.add_row(
            f"read bandwidth{pages}",
            f"1 GiB by {read.reader}",
            f"{read.best / 1e9:.1f} GB/s",
            f"{read.median / 1e9:.1f} GB/s",
        )
    for dtype in DTYPES:
        rate = matmul_rate(dtype, device=device)
        rows.add_row(
            f"matmul {dtype}".replace("torch.", ""), "F.linear, 2048 × 2048 × 2048", "", f"{rate / 1e12:.3g} TFLOP/s"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    console = Console()
    console.print(
        f"python {' '.join(sys.argv)}  ({platform.system()} {platform.machine()}, Python {platform.python_version()})"
    )
    console.print(table(args.device))


if __name__ == "__main__":
    main()
