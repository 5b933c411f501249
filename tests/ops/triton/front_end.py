"""`python -m tests.ops.triton.front_end`: every launch in Triton's front end alone, of whichever Triton is on the path.

Prints its version, and the ops whose kernels it took.
"""

from __future__ import annotations

from itertools import chain

import torch

from infuse import ops
from tests.ops.triton.compiler import compiled_for, front_end_alone, version
from tests.ops.triton.launches import launches

# Every launch in one type; quantized products in float32, too, since their codes are decoded in another way there.
in_float32 = (launch for launch in launches(torch.float32, 0, 6) if launch[0] == "quantized_linear")

taken, refused = set(), []
with compiled_for(80) as found, front_end_alone():
    for name, arguments, keywords in chain(launches(torch.bfloat16, 0, 1), in_float32):
        before = len(found)
        try:
            ops.registered()[name].body("triton")(*arguments, **keywords)
        except Exception as error:
            refused.append(f"{name}: {error.__cause__ or error}")
        if len(found) > before:
            taken.add(name)
if refused:
    raise SystemExit(f"Triton {version()} refuses {len(refused)} launches; the first: {refused[0]}")
print(version(), *sorted(taken))
