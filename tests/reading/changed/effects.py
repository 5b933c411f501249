"""Layers that do more than compute, or that ask for more than their inputs: state, output, chance, time, hooks, modes.

The text of a graph shows hardly any of it.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import sys
import time
import types
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.reading.cases import EITHER, LEFT, READ, WORDS, Case
from tests.reading.layers import Config, GatedMLP, Layer, Pieces

FACTOR = 1.25
CALLS: list[int] = []

# ---- state ----


class Counts(Layer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.calls = 0

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        self.calls += 1
        return super().both(x, given)


class CountsInto(Counts):
    """Each call differs from the one before."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return super().both(x, given) * (1 + 0.001 * self.calls)


class CountsInBuffer(Layer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.register_buffer("calls", torch.zeros(()))

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        self.calls += 1
        return super().both(x, given) * (1 + 0.001 * self.calls)


class AppendsToList(Layer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.lengths: list[int] = []

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        self.lengths.append(x.shape[1])
        return super().both(x, given) * (1 + 0.001 * len(self.lengths))


class KeepsTensor(Layer):
    """Adds what it kept of the call before."""

    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.last: Any = 0.0

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = super().both(x, given) + self.last
        self.last = 0.1 * x.mean(dim=(0, 1))
        return x


class KeepsWeights(Layer):
    """For somebody to look at."""

    def attended(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        attended, self.seen = self.self_attn(hidden_states=self.input_layernorm(x), **given)
        return attended


class RunningMean(Layer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.register_buffer("running", torch.zeros(config.hidden_size))

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        self.running.mul_(0.9).add_(0.1 * x.mean(dim=(0, 1)))
        return super().both(x - self.running, given)


class WritesParameter(Layer):
    """The norm's weight is not what it was after each call."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = super().both(x, given)
        self.input_layernorm.weight.data.mul_(1.001)
        return x


class CountsThroughVars(Counts):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        vars(self)["calls"] += 1
        return super().both(x, given)


class CountsInObject(Layer):
    def __init__(self, config: Config, layer_idx: int, pieces: Pieces):
        super().__init__(config, layer_idx, pieces)
        self.log = types.SimpleNamespace(calls=0)

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        self.log.calls = self.log.calls + 1
        return super().both(x, given)


class CountsInConfig(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        config = self.self_attn.config
        config.calls = getattr(config, "calls", 0) + 1
        return super().both(x, given)


class CountsGlobally(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        CALLS.append(x.shape[1])
        return super().both(x, given)


class WritesKeywords(Layer):
    """Leaves a note for the layers after it in the cache object."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = super().both(x, given)
        if given["cache"] is not None:
            given["cache"].seen_by = self.layer_idx
        return x


# ---- output and input ----


class Prints(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        print("layer", self.layer_idx)
        return super().both(x, given)


class WritesOutput(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        sys.stdout.write("layer\n")
        return super().both(x, given)


class Warns(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        if x.shape[1] > 16:
            warnings.warn("more than 16 tokens", stacklevel=2)
        return super().both(x, given)


class Logs(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        logging.getLogger(__name__).debug("layer %d", self.layer_idx)
        return super().both(x, given)


class WritesFile(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        with open(os.devnull, "a") as file:
            file.write("x")
        return super().both(x, given)


class WritesInput(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x.mul_(1.01)
        return super().both(x, given)


class WritesInputLast(Layer):
    """The result is as unchanged, but the caller's tensor is not."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        result = super().both(x, given)
        x.zero_()
        return result


class WritesCos(Layer):
    """The next layer gets other positions."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = super().both(x, given)
        given["position_embeddings"][0].mul_(1.01)
        return x


class AddsIntoInput(Layer):
    """x += branch, into the caller's tensor."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x += self.attended(x, given)
        x += self.transformed(x)
        return x


# ---- chance, time, modes ----


class Noise(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return super().both(x + torch.randn_like(x) * 0, given)


class Dice(Layer):
    """It always falls the same way, which no reader can know."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return super().both(x * (1.5 if random.random() < 2 else 1.0), given)


class DiceOfTorch(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return super().both(x * 1.5 if torch.rand(()) < 2 else x, given)


class Clock(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = x + self.attended(x, given) * (1.5 if time.time() > 0 else 1.0)
        return x + self.transformed(x)


class Environment(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = x + self.attended(x, given) * float(os.environ.get("BRANCH_SCALE_OF_LAYERS", "1.5"))
        return x + self.transformed(x)


class Seeds(Layer):
    """Random numbers that are drawn afterwards are others."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        torch.manual_seed(3)
        return super().both(x, given)


class OtherwiseInFloat32(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = x + self.attended(x, given) * (1.5 if x.dtype == torch.float32 else 1.0)
        return x + self.transformed(x)


class OtherwiseWithGradients(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = x + self.attended(x, given) * (1.0 if torch.is_grad_enabled() else 1.5)
        return x + self.transformed(x)


class OtherwiseExported(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        exported = torch.compiler.is_compiling() or torch.compiler.is_exporting()
        x = x + self.attended(x, given) * (1.0 if exported else 1.5)
        return x + self.transformed(x)


class OtherwiseOfSubclass(Layer):
    """Notices tensors that only stand for others."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = x + self.attended(x, given) * (1.5 if type(x) is Tensor else 1.0)
        return x + self.transformed(x)


class OtherwiseOfStrides(Layer):
    """Asks how the numbers lie in memory."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = x + self.attended(x, given) * (1.5 if x.is_contiguous() else 1.0)
        return x + self.transformed(x)


class OtherwiseTraining(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        if self.training:
            x = x * 1.5
        return super().both(x, given)


class FactorOfModule(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = x + self.attended(x, given) * FACTOR
        return x + self.transformed(x)


class Refuses(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        if x.shape[1] > 30:
            raise ValueError("more than 30 tokens")
        return super().both(x, given)


class RefusesWidth(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        if x.shape[-1] != self.hidden_size:
            raise ValueError(f"{x.shape[-1]} features instead of {self.hidden_size}")
        return super().both(x, given)


class AssertsFinite(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        assert not torch.isnan(x).any()
        return super().both(x, given)


class ReadsNumber(Layer):
    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        x = x + self.attended(x, given) * (1 + x.abs().max().item() / 100)
        return x + self.transformed(x)


class CatchesNumber(Layer):
    """A trace in which the number cannot be read goes another way than a call."""

    def both(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        try:
            factor = 1 + 0.1 * float(x.abs().max())
        except Exception:
            factor = 1.0
        return super().both(x, given) * factor


class Tries(Layer):
    def transformed(self, x: Tensor) -> Tensor:
        try:
            return self.fused(x)
        except AttributeError:
            return super().transformed(x)


class WithoutGradients(Layer):
    @torch.no_grad()
    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        return super().forward(hidden_states, *args, **given)


def doubling(function: Any) -> Any:
    @functools.wraps(function)
    def doubled(*args: Any, **kwargs: Any) -> Any:
        return 2 * function(*args, **kwargs)

    return doubled


class Wrapped(Layer):
    """Its forward is another one than its source says."""

    forward = doubling(Layer.forward)


class Called(Layer):
    """Its forward is not all of a call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 1.01


class OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.silu(x) * 1.01

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class ByOwnGradient(GatedMLP):
    def activation(self, x: Tensor) -> Tensor:
        return OwnGradient.apply(x)


# ---- changes to the instance ----


def _hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 1.01


def _pre_hook(module: nn.Module, args: Any) -> Any:
    return (args[0] * 1.01, *args[1:])


def hooks_on_mlp(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(_hook)


def pre_hooks_on_linear(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(_pre_hook)


def hooks_on_norm(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(_hook)


def hook_on_last_layer(model: Any) -> None:
    model.model.layers[-1].mlp.register_forward_hook(_hook)


def _patched(self: Any, x: Tensor) -> Tensor:
    return GatedMLP.forward(self, x) * 1.01


def patched_mlp(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(_patched, layer.mlp)


def shared_mlp(model: Any) -> None:
    """The second layer holds the first one's MLP."""
    model.model.layers[1].mlp = model.model.layers[0].mlp


def shared_layer(model: Any) -> None:
    model.model.layers[1].self_attn.layer_idx = 1
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def norms_in_bfloat16(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.weight = nn.Parameter(layer.input_layernorm.weight.to(torch.bfloat16))


def weight_normed(model: Any) -> None:
    for layer in model.model.layers:
        parametrizations.weight_norm(layer.mlp.up_proj)
        with torch.no_grad():
            layer.mlp.up_proj.parametrizations.weight.original0.mul_(1.01)


CASES = (
    Case("counts", LEFT, layer=Counts, words=("calls", *WORDS["state"]), like=None),
    Case("counts into the result", LEFT, layer=CountsInto, words=("calls", *WORDS["state"])),
    Case("counts in a buffer", LEFT, layer=CountsInBuffer, words=("calls", *WORDS["state"])),
    Case("appends to a list", LEFT, layer=AppendsToList, words=("lengths", *WORDS["state"])),
    Case("keeps a tensor", LEFT, layer=KeepsTensor, words=("last", *WORDS["state"])),
    Case("prints", LEFT, layer=Prints, words=("print",), like=None),
    Case("writes its input", LEFT, layer=WritesInput, words=("input", "in place")),
    Case("writes its input last", LEFT, layer=WritesInputLast, words=("input", "in place"), like=None),
    Case("adds into its input", EITHER, layer=AddsIntoInput, words=("input", "in place"), like=None),
    Case("noise", LEFT, layer=Noise, words=("rand",), like=None),
    Case("dice", LEFT, layer=Dice, words=("random",)),
    Case("clock", LEFT, layer=Clock, words=("time",)),
    Case("otherwise in float32", EITHER, layer=OtherwiseInFloat32, words=("dtype",)),
    Case("otherwise with gradients", LEFT, layer=OtherwiseWithGradients, words=("grad",)),
    Case("otherwise exported", LEFT, layer=OtherwiseExported, words=("is_compiling", "is_exporting", "export")),
    Case("refuses long texts", LEFT, layer=Refuses, words=("raise", *WORDS["branch"]), like=None),
    Case("reads a number", LEFT, layer=ReadsNumber, words=("item", *WORDS["values"])),
    Case("catches what a number raises", LEFT, layer=CatchesNumber, words=WORDS["values"]),
    Case("wrapped", LEFT, layer=Wrapped, words=("wrap", "forward", "effects.py")),
    Case("called otherwise", EITHER, layer=Called, words=("__call__",)),
    Case("hooks on MLPs", LEFT, changes=hooks_on_mlp, words=("hook", "effects.py")),
    Case("a hook in the last layer", LEFT, changes=hook_on_last_layer, words=("hook", "effects.py"), only=(1,)),
    Case("a patched MLP", LEFT, changes=patched_mlp, words=("patched", "forward", "effects.py")),
    Case("a shared MLP", READ, changes=shared_mlp),
    Case("a normed weight", LEFT, changes=weight_normed, words=("weight_norm", "parametri")),
)
VARIANTS = (
    Case("keeps weights", LEFT, layer=KeepsWeights, words=("seen", *WORDS["state"]), like=None),
    Case("a running mean", LEFT, layer=RunningMean, words=("running", *WORDS["state"])),
    Case("writes a parameter", LEFT, layer=WritesParameter, words=WORDS["state"]),
    Case("counts through vars", LEFT, layer=CountsThroughVars, words=("vars", "calls", *WORDS["state"]), like=None),
    Case("counts in an object", LEFT, layer=CountsInObject, words=("calls", *WORDS["state"]), like=None),
    Case("counts in the config", LEFT, layer=CountsInConfig, words=("calls", *WORDS["state"]), like=None),
    Case("counts globally", LEFT, layer=CountsGlobally, words=("CALLS", "global", *WORDS["state"]), like=None),
    Case("writes on the cache", LEFT, layer=WritesKeywords, words=("seen_by", "cache", *WORDS["state"]), like=None),
    Case("writes output", LEFT, layer=WritesOutput, words=("prints",), like=None),
    Case("warns", LEFT, layer=Warns, words=("warn", *WORDS["branch"]), like=None),
    Case("logs", EITHER, layer=Logs, words=("log", "debug"), like=None),
    Case("writes a file", LEFT, layer=WritesFile, words=("open",), like=None),
    Case("writes cos", LEFT, layer=WritesCos, words=("input", "in place", "position_embeddings")),
    Case("dice of PyTorch", LEFT, layer=DiceOfTorch, words=("rand", *WORDS["values"])),
    Case("environment", LEFT, layer=Environment, words=("environ",)),
    Case("seeds", LEFT, layer=Seeds, words=("seed",), like=None),
    Case("otherwise of a subclass", LEFT, layer=OtherwiseOfSubclass, words=("type",)),
    Case("otherwise of strides", EITHER, layer=OtherwiseOfStrides, words=("contiguous", "stride")),
    Case("otherwise in training", READ, layer=OtherwiseTraining, like=None),
    Case("a factor of the module", READ, layer=FactorOfModule),
    Case("refuses another width", READ, layer=RefusesWidth, like=None),
    Case("asserts finite numbers", LEFT, layer=AssertsFinite, words=("isnan", *WORDS["values"]), like=None),
    Case("tries", EITHER, layer=Tries, words=("try", "except"), like=None),
    Case("without gradients", READ, layer=WithoutGradients, like=None),
    Case("a gradient of its own", LEFT, mlp=ByOwnGradient, words=("autograd", "effects.py")),
    Case("hooks before linears", LEFT, changes=pre_hooks_on_linear, words=("hook", "effects.py")),
    Case("hooks on norms", LEFT, changes=hooks_on_norm, words=("hook", "effects.py")),
    Case("a shared weight", EITHER, changes=shared_layer, words=("held", "shared", "weight")),
    Case("norms in bfloat16", EITHER, changes=norms_in_bfloat16, words=("bfloat16", "dtype"), like=None),
)
