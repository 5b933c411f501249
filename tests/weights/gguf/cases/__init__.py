"""Cases of all families, by their names."""

from __future__ import annotations

from tests.weights.gguf.cases.gemma4 import GEMMA4
from tests.weights.gguf.cases.hybrids import HYBRIDS
from tests.weights.gguf.cases.mixtures import MIXTURES
from tests.weights.gguf.cases.plain import PLAIN

CASES = PLAIN | GEMMA4 | HYBRIDS | MIXTURES
