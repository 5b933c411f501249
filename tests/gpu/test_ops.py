"""The tests of the Triton bodies on a GPU, compiled: those of ops/triton/cases.py, run by the interpreter on a CPU."""

from __future__ import annotations

import os

import pytest
import torch

from tests.ops.triton.cases import *  # noqa: F403  (its tests are these)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="there is no GPU"
    ),
]
