"""Every class of experts in transformers, and one module of each with random weights."""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers as t
from torch import nn

# Classes whose experts our op does not compute, and the words of the plan that say so.
_GATE = "its gate is none that our experts"
LEFT = {"MuseSparkExperts": "a norm after its second product", "Inkling2Experts": _GATE, "Inkling2LoopExperts": _GATE}
SIZES = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 5)
SIZES |= dict.fromkeys(("hidden_size", "moe_hidden_size"), 24)
SIZES |= dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 12)
ACTS = dict.fromkeys(("hidden_act", "hidden_activation"), "silu") | {"mlp_hidden_act": "relu2"}
OTHERS = dict(swiglu_limit=1.5, swiglu_alpha=1.702, moe_latent_size=None, post_norm_eps=1e-6)
OTHERS |= dict(mlp_gate_softcap=2.0, mlp_up_softcap=2.0)


@cache
def classes() -> dict[str, str]:
    """Every class of experts in transformers → its module, read from the source."""
    found: dict[str, str] = {}
    for path in sorted(Path(t.__path__[0], "models").glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "use_experts_implementation" in text:
            for node in ast.parse(text).body:
                marked = isinstance(node, ast.ClassDef) and any(
                    "use_experts_implementation" in ast.unparse(one) for one in node.decorator_list
                )
                if marked:
                    found[node.name] = f"transformers.models.{path.parent.name}.{path.stem}"
    return found | {"Step3p7Experts": "transformers.models.step3p7.modeling_step3p7"}  # has no mark


def made(name: str) -> nn.Module:
    """One module of experts with random weights."""
    config = SimpleNamespace(**SIZES, **ACTS, **OTHERS, _experts_implementation="grouped_mm")
    experts = getattr(import_module(classes()[name]), name)(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return experts
