"""How a layer calls its modules, read from one run of its forward on placeholders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infuse.architectures.inner_call import BIAS, CONSTANT, HIDDEN, OUTPUT, RESIDUAL, WEIGHTS
from infuse.reading.inner_calls import inner_calls, returns_of
from tests.models.families import BY_NAME


class Attention(nn.Module):
    def forward(self, hidden_states: Tensor, mask: Any = None, residual: Any = None, **kwargs: Any) -> Any:
        weights = hidden_states.softmax(dim=-1)
        return hidden_states, weights


class Layer(nn.Module):
    def __init__(self, *, is_scaled: bool = False, uses_numbers: bool = False):
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(4), Attention(), nn.Linear(4, 4)
        self.is_scaled, self.uses_numbers = is_scaled, uses_numbers

    def forward(self, x: Tensor, attention_mask: Any = None, use_cache: bool = False, **kwargs: Any) -> Any:
        y = self.norm(x) * 0.5 if self.is_scaled else self.norm(x)
        mask = attention_mask.sum() if self.uses_numbers else attention_mask
        y, _ = self.attention(y, mask, x, use_cache=use_cache, causal=True, **kwargs)
        return self.mlp(x + y)


def test_the_call_of_a_layer_of_ones_own() -> None:
    calls = inner_calls(Layer(), ["attention", "mlp"])
    call = calls["attention"]
    found = [(each.name, each.source, each.by_name, each.value) for each in call.arguments]
    assert found == [
        ("hidden_states", HIDDEN, False, None),
        ("mask", "attention_mask", False, None),
        ("residual", RESIDUAL, False, None),
        ("use_cache", "use_cache", True, False),
        ("causal", CONSTANT, True, True),
    ]
    assert call.rest and call.always_weights and call.returns == (OUTPUT, WEIGHTS)
    x, residual, mask = torch.ones(1), torch.zeros(1), torch.ones(2)
    args, kwargs = call.passed(x, residual, {"attention_mask": mask, "more": 1})
    assert args == [x, mask, residual] and kwargs == {"use_cache": False, "causal": True, "more": 1}
    assert call.received(tuple(args), kwargs) == (x, residual, {"attention_mask": mask, "use_cache": False, "more": 1})
    with pytest.raises(TypeError, match="multiple values for argument 'mask'"):
        call.received((x, mask), {"mask": mask})
    with pytest.raises(TypeError, match="4 were given"):
        call.received((x, mask, residual, 1), {})
    with pytest.raises(TypeError, match="without hidden_states"):
        call.received((), {"mask": mask})


@pytest.mark.parametrize("how", ["is_scaled", "uses_numbers"])
def test_what_is_computed_from_arguments_is_unclear(how: str) -> None:
    assert "attention" not in inner_calls(Layer(**{how: True}), ["attention"])


def test_conditions_on_the_layer_are_followed() -> None:
    """BERT's attention hands its own mask on, or that of states, as its settings say."""
    layer = BY_NAME["bert"].make().get_submodule("bert.encoder.layer.0")
    call = inner_calls(layer, ["attention.self"])["attention.self"]
    assert {each.name: each.source for each in call.arguments} == {
        "hidden_states": HIDDEN,
        "encoder_hidden_states": CONSTANT,
        "attention_mask": "attention_mask",
        "cache": "cache",
    }


def _of_two_lengths(x: Any, asked: bool) -> Any:
    outputs = (x, x) if asked else (x,)
    return outputs


def _with_bias(x: Any, position_bias: Any) -> Any:
    return x, position_bias, None


def _alone(x: Any) -> Any:
    def inner() -> Any:
        return 1, 2

    return inner


def test_results_are_told_by_the_source() -> None:
    assert returns_of(_of_two_lengths) is None
    assert returns_of(_with_bias) == ((OUTPUT, BIAS, WEIGHTS), False, False)
    assert returns_of(_alone) == ((OUTPUT,), True, False)
    assert returns_of(torch.relu) is None
