"""What runs a model to learn about it leaves it as it was: attributes, modules, buffers, hooks, configs."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import infuse
from infuse.ground.undisturbed import undisturbed
from tests.models.families import BY_NAME, SMALL, enlarge


class Restless(nn.Module):
    """Changes everything that it holds when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("counted", torch.zeros(1))
        self.register_buffer("exchanged", torch.zeros(1), persistent=False)
        self.state: Any = None
        self.seen: list[int] = []
        self.by_name: dict[str, int] = {"first": 1}
        self.config = t.LlamaConfig(num_hidden_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        self.counted.add_(1)
        self.exchanged = torch.ones(1)
        self.state = x
        self.seen.append(len(x))
        self.by_name["second"] = 2
        self.config.num_hidden_layers = 7
        self.config.added = True
        y = self.inner(x)
        self.inner = nn.Linear(4, 4)
        self.more = nn.Identity()
        self.inner.register_forward_hook(lambda *_: None)
        self.train()
        return y


@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_put_back(raises: bool) -> None:
    model = Restless().eval()
    inner, exchanged, seen, config = model.inner, model.exchanged, model.seen, model.config.to_dict()
    before = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    try:
        with undisturbed(model):
            model(torch.ones(2, 4))
            assert model.counted == 1 and model.inner is not inner
            if raises:
                raise KeyError("whatever")
    except KeyError:
        assert raises
    assert model.inner is inner and model.exchanged is exchanged and model.seen is seen
    assert model.counted == 0 and exchanged == 0 and seen == [] and model.by_name == {"first": 1}
    assert {name: value for name, value in vars(model).items() if not name.startswith("_")} == before
    assert list(model._modules) == ["inner"] and not inner._forward_hooks and not model.training
    assert model.config.to_dict() == config and not hasattr(model.config, "added")


def test_attributes_that_go_with_changed_weights_stay() -> None:
    """RWKV scales its weights once and remembers that it did: both stay, or neither."""
    model = Restless()
    with undisturbed(model):
        model.inner.weight.data.mul_(2)
        model.state = "scaled"
    assert model.state == "scaled"


def big_bird() -> Any:
    torch.manual_seed(0)
    sizes = dict(SMALL, max_position_embeddings=256, block_size=4, num_random_blocks=1)
    model = t.BigBirdForMaskedLM(t.BigBirdConfig(**sizes, attention_type="block_sparse")).eval()
    enlarge(model)
    return model


@pytest.mark.parametrize("verify", ["sample", "all"])
def test_big_bird_keeps_its_block_sparse_attention(verify: str) -> None:
    model = big_bird()
    ids = torch.randint(3, 96, (2, 96), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = copy.deepcopy(model)(ids).logits
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = infuse.init_inference(model, dtype="fp32", verify=verify, progress=False)
        assert engine.module.bert.encoder.attention_type == "block_sparse"
        found = engine(ids).logits
    assert engine.plan.steps and float((found - wanted).norm() / wanted.norm()) < 5e-5


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_leaves_no_trace(ranks: int) -> None:
    model = BY_NAME["llama"].make()
    for layer in model.model.layers:
        layer.register_buffer("steering", torch.ones(1))  # so that it stays, and is traced for ranks
    before = [dict(vars(module)) for module in model.modules()]
    infuse.plan(model, dtype="fp32", tensor_parallel={"tp_size": ranks})
    after = [dict(vars(module)) for module in model.modules()]
    assert all(
        a.keys() == b.keys() and all(a[name] is b[name] for name in a) for a, b in zip(before, after, strict=True)
    )
