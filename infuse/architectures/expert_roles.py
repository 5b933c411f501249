"""Which linears of one expert are gate, up and down, and its activation: found by what small weights give."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from infuse.activations import ACTIVATIONS, ExpertGate
from infuse.architectures.plain import LinearShape, linears
from infuse.errors import in_brief

_TOKENS, _HIDDEN, _INNER = 6, 5, 7  # of the small weights
_TOLERANCE = 1e-9  # of the largest value, in float64; different activations differ by 1e-4


def roles_of(expert: nn.Module, hidden: int) -> tuple[ExpertGate, tuple[str, ...]] | str:
    """The gate of an expert and its linears, [gate,] up, down, by which ours gives what it gives; or a reason."""
    found = dict(linears(expert))
    in_linears = {f"{name}.{leaf}" for name in found for leaf in ("weight", "bias")}
    others = [name for name, _ in expert.named_parameters() if name not in in_linears]
    if others or len(found) not in (2, 3) or any(shape.transposed for shape in found.values()):
        return f"an expert has {', '.join(others or found) or 'no linears'}; only two or three linears are understood"
    fitting = [names for names in permutations(found) if _fits([found[name] for name in names], hidden)]
    was_training = [module for module in expert.modules() if module.training]
    expert.eval()
    reason = "an expert is none of ours: down(act(up(x))) or down(act(gate(x)) * up(x))"
    try:
        for names in fitting:
            try:
                gate = _alike(expert, found, names)
            except Exception as error:  # the module is the user's; our weights are not what it computes with
                reason = f"an expert cannot be tried: {in_brief(error)}"
                continue
            if gate is not None:
                return gate, names
    finally:
        for module in was_training:
            module.training = True
    return reason


def _fits(shapes: list[LinearShape], hidden: int) -> bool:
    """Whether linears of these shapes can be [gate,] up, down."""
    *ups, down = shapes
    same = {(up.inputs, up.outputs, up.bias) for up in ups}
    return down.outputs == hidden and same == {(hidden, down.inputs, ups[0].bias)}


def _alike(expert: nn.Module, shapes: dict[str, LinearShape], names: tuple[str, ...]) -> ExpertGate | None:
    """The gate with which the linears `names` give what the expert gives, on small weights; None if none does."""
    generator = torch.Generator().manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    x, held = made(1, 1, _TOKENS, _HIDDEN), dict[str, Tensor]()
    for name in names:
        outputs, inputs = (_HIDDEN, _INNER) if name == names[-1] else (_INNER, _HIDDEN)
        held[f"{name}.weight"] = made(outputs, inputs)
        if shapes[name].bias:
            held[f"{name}.bias"] = made(outputs)
    with torch.no_grad(), torch.device("cpu"):
        given: Any = torch.func.functional_call(expert, held, (x,))
        wanted = given[0] if isinstance(given, tuple) else given
        inner = torch.cat([_product(held, name, x) for name in names[:-1]], dim=-1)
        for activation in dict.fromkeys(ACTIVATIONS.values()):
            gate = ExpertGate(activation, gated=len(names) == 3)
            found = _product(held, names[-1], gate.inner(inner))
            if wanted.shape == found.shape and (found - wanted).abs().max() <= _TOLERANCE * wanted.abs().max():
                return gate
    return None


def _product(held: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return nn.functional.linear(x, held[f"{name}.weight"], held.get(f"{name}.bias"))
