"""Every Triton kernel through Triton's own compiler, for Ampere and Hopper, at the shapes of models: no GPU is needed
for that.

The interpreter is more lenient than the compiler; registers that spill and shared memory that no GPU has are seen only
here.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from infuse import ops
from tests.ops.triton.launches import TARGETS, launches
from tests.support.oldest import installed, lower_bounds, requirement, run_with, same_version

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
        reason="Triton's compiler is not there",
    ),
]
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}  # that one program may have


@pytest.mark.parametrize(("dtype", "capability", "which", "of"), TARGETS, ids=str)
def test_every_kernel_compiles(dtype: torch.dtype, capability: int, which: int, of: int) -> None:
    from tests.ops.triton.compiler import compiled_for  # imports triton

    seen = set()
    with compiled_for(capability) as found:
        for name, args, keywords in launches(dtype, which, of):
            before = len(found)
            ops.registered()[name].body("triton")(*args, **keywords)
            if not (dtype is torch.float32 and name == "linear"):  # more rows are PyTorch's in float32
                assert len(found) > before, f"{name}: nothing was launched"
            for kernel in found[before:]:
                seen.add(kernel.metadata.name)
                assert kernel.metadata.shared <= SHARED_BYTES[capability], (
                    f"{name}: {kernel.metadata.shared} bytes of shared memory"
                )
    assert seen >= {
        "norm_rows",
        "rotate_append",
        "attend",
        "combine_splits",
        "plain_row",
        "quantized_row",
        "product_tiles",
        "up_rows",
        "down_rows",
        "up_tiles",
        "down_tiles",
        "sum_routes",
        "join_heads",
        "modulated_rows",
        "convolve",
        "decays",
        "scan_tokens",
        "scan_channels",
        "gated_norm_rows",
    }


def test_the_oldest_triton_takes_every_kernel(request: pytest.FixtureRequest) -> None:
    """The one that pyproject.toml declares: what a function may return, for instance, differs between versions."""
    folder = installed(request.config, requirement("triton"), dependencies=False)
    used, *taken = run_with(folder, "-m", "tests.ops.triton.front_end").split()
    assert same_version(used, lower_bounds()["triton"]), used
    assert set(taken) >= {name for name, op in ops.registered().items() if "triton" in op.bodies}
