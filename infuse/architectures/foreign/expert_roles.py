"""Find which linears of an expert are gate, up and down, and its activation, by running it with small weights."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from infuse.architectures.foreign.plain import LinearShape, linears
from infuse.ground.activations import ACTIVATIONS, ExpertGate
from infuse.ground.errors import in_brief

_TOKENS, _HIDDEN, _INNER = 6, 5, 7  # of the small weights
_TOLERANCE = 1e-9  # of the largest value, in float64; different activations differ by 1e-4


def roles_of(expert: nn.Module, hidden: int) -> tuple[ExpertGate, tuple[str, ...]] | str:
    """The expert's gate, and its linears as [gate,] up, down, for which our output equals the expert's; or a reason."""
    shapes = dict(linears(expert))
    in_linears = {f"{name}.{leaf}" for name in shapes for leaf in ("weight", "bias")}
    others = [name for name, _ in expert.named_parameters() if name not in in_linears]
    if others or len(shapes) not in (2, 3) or any(shape.transposed for shape in shapes.values()):
        return f"an expert has {', '.join(others or shapes) or 'no linears'}; only two or three linears are understood"
    fitting = [names for names in permutations(shapes) if _fits([shapes[name] for name in names], hidden)]
    was_training = [module for module in expert.modules() if module.training]
    expert.eval()
    reason = "an expert is none of ours: down(act(up(x))) or down(act(gate(x)) * up(x))"
    try:
        for names in fitting:
            try:
                gate = _alike(expert, shapes, names)
            except Exception as error:  # a user's module need not run with weights of our sizes
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
    """The gate for which the linears `names` compute the expert's output, on small weights; None if there is none."""
    generator = torch.Generator().manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    x, parameters = made(1, 1, _TOKENS, _HIDDEN), dict[str, Tensor]()
    for name in names:
        outputs, inputs = (_HIDDEN, _INNER) if name == names[-1] else (_INNER, _HIDDEN)
        parameters[f"{name}.weight"] = made(outputs, inputs)
        if shapes[name].bias:
            parameters[f"{name}.bias"] = made(outputs)
    with torch.no_grad(), torch.device("cpu"):
        output: Any = torch.func.functional_call(expert, parameters, (x,))
        wanted = output[0] if isinstance(output, tuple) else output
        inner = torch.cat([_product(parameters, name, x) for name in names[:-1]], dim=-1)
        for activation in dict.fromkeys(ACTIVATIONS.values()):
            gate = ExpertGate(activation, gated=len(names) == 3)
            ours = _product(parameters, names[-1], gate.inner(inner))
            if wanted.shape == ours.shape and (ours - wanted).abs().max() <= _TOLERANCE * wanted.abs().max():
                return gate
    return None


def _product(parameters: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return nn.functional.linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))
