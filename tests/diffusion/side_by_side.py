"""Modules and pipelines of diffusers beside what replaces them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import infuse
from infuse.diffusion.layers.derived import Derived
from infuse.diffusion.layers.image_attention import ImageAttention
from infuse.diffusion.modules import module_spec
from infuse.diffusion.parts import make_part
from infuse.ground.device import Device
from infuse.inputs.component import GUIDED, component_inputs
from infuse.inputs.model import RandomTensors
from infuse.layers.build_context import BuildContext
from infuse.ops import registered
from infuse.weights.fill import fill_module
from infuse.weights.lazy import live
from tests.diffusion.tiny_pipelines import images, made

CPU = Device.of("cpu")
CLOSE = 1e-4  # of the range of a pixel, which is 1


def injected(pipe: Any, **settings: Any) -> Any:
    return infuse.init_inference(pipe, **{"dtype": torch.float32, "verify": "strict", **settings})


@cache
def original(name: str, **options: Any) -> torch.Tensor:
    """The images of the pipeline `name` of diffusers."""
    return images(pristine(name), name, **options)


@cache
def pristine(name: str) -> Any:
    return made(name)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


def replaced(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The module that replaces `module`, with the bodies that run here."""
    spec = module_spec(module)
    assert spec is not None
    bound = spec.bind(module)
    names = {*bound.shape.ops, "linear"}
    bodies = {name: registered()[name].choose(CPU, dtype).body for name in names}
    with torch.device("meta"):
        new = make_part(bound.shape, BuildContext("", {}, bodies))
    with torch.no_grad():
        fill_module(new, bound.fills, live(module), dtype, bodies)
    assert not any(parameter.is_meta for parameter in new.parameters())
    return new.eval()


def same(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Both modules compute the same of these arguments, twice, and change none of them."""
    module.eval()
    with torch.no_grad():
        wanted = module(*args, **kwargs)
        new = replaced(module)
        before = [arg.clone() for arg in args if isinstance(arg, Tensor)]
        for _ in range(2):
            torch.testing.assert_close(new(*args, **kwargs), wanted, rtol=1e-4, atol=2e-5)
        after = [arg for arg in args if isinstance(arg, Tensor)]
        assert all(map(torch.equal, before, after))


def masks(rows: int, length: int, heads: int) -> dict[str, Tensor]:
    hidden = torch.zeros(rows, length)
    hidden[:, -2:] = -10000.0
    return {
        "[B, L]": hidden,
        "[B, 1, L]": hidden[:, None],
        "[B N, 1, L]": hidden[:, None].repeat_interleave(heads, 0),
        "[B, T, L]": hidden[:, None] + torch.randn(rows, 9, 1) * torch.arange(length),
    }


class Counting(Derived):
    """Notes each value that is computed."""

    def __init__(self, calls: list[int]):
        super().__init__()
        self.calls = calls

    def of(self, tensors: tuple[Tensor, ...], make: Callable[[], Any]) -> Any:
        return super().of(tensors, lambda: (self.calls.append(1), make())[1])


def counted(module: ImageAttention) -> list[int]:
    """Note each projection of a text."""
    calls: list[int] = []
    module._of_text = Counting(calls)
    return calls


def run(model: nn.Module, size: Any = GUIDED) -> Tensor:
    with torch.no_grad():
        out = model(**component_inputs(model, RandomTensors(model), size))
        return out.sample.float() if hasattr(out, "sample") else out.down_block_res_samples[-1].float()
