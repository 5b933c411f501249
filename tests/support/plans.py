"""Plans on a device that is no machine's own, and models without a spec to plan for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as t
from torch import Tensor, nn

from infuse.apply.apply import apply
from infuse.config.inference import InferenceConfig
from infuse.ground.device import Device
from infuse.parallel.mesh import Mesh
from infuse.plan.decide import make_plan
from infuse.plan.plan import Plan
from infuse.plan.stored import StoredFormats
from tests.models import families

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = Device("cpu", None, "without extensions", (), 8 * 2**30, DTYPES)  # no machine's own: texts are equal everywhere


def seeded(model: Callable[[Any], nn.Module], config: Any) -> Callable[..., nn.Module]:
    """A maker of an enlarged, evaluating model, as the families have."""

    def make(**changes: Any) -> nn.Module:
        torch.manual_seed(0)
        own = copy.deepcopy(config)  # the choice of an attention is written to a model's config
        for key, value in changes.items():
            setattr(own, key, value)
        made = model(own).eval()
        families.enlarge(made)
        return made

    return make


class Stack(nn.Module):
    """PyTorch's own encoder; built here because it wants more than one argument."""

    def __init__(self, width: int):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


_DEBERTA = dict(families.ENCODER, num_hidden_layers=2, relative_attention=True, pos_att_type=["p2c", "c2p"])
_T5 = dict(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=96)
T5 = seeded(t.T5ForConditionalGeneration, t.T5Config(**_T5))
_LONG = dict(_T5, local_radius=4, initializer_factor=0.7, is_encoder_decoder=False)
LONG_T5 = seeded(t.LongT5EncoderModel, t.LongT5Config(**_LONG))
MIXTRAL = seeded(t.MixtralForCausalLM, t.MixtralConfig(**{**families.GQA, "num_hidden_layers": 2}, num_local_experts=4))
OLMO = seeded(t.OlmoForCausalLM, t.OlmoConfig(**{**families.GQA, "num_hidden_layers": 2}))
UNKNOWN: dict[str, Callable[..., nn.Module]] = {
    "long-t5": LONG_T5,
    "deberta": seeded(t.DebertaModel, t.DebertaConfig(**_DEBERTA)),
    "olmo": OLMO,
    "sequential": seeded(lambda width: nn.Sequential(nn.Linear(width, 96), nn.ReLU(), nn.Linear(96, 5)), 64),
    "pytorch-encoder": seeded(Stack, 64),
}


def plan_of(model: nn.Module, mesh: Mesh | None = None, stored: dict[str, str] | None = None, **keys: Any) -> Plan:
    """`stored`: the formats of a checkpoint's tensors."""
    return make_plan(model, InferenceConfig(**keys), PLAIN, mesh or Mesh(), stored=StoredFormats(stored or {}))


def applied(model: nn.Module, **keys: Any) -> Plan:
    return apply(plan_of(model, **keys), model, InferenceConfig(**keys))


def outputs(model: nn.Module) -> Tensor:
    """The model's logits or hidden states for fixed inputs."""
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if not hasattr(model, "config"):
            out = model(torch.linspace(-1, 1, 2 * 9 * 64).view(2, 9, 64))
        elif model.config.is_encoder_decoder:
            out = model(input_ids=ids, decoder_input_ids=ids[:, :4])
        else:
            out = model(ids)
    return out if isinstance(out, Tensor) else out[0]
