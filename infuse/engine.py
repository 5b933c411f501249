"""InferenceEngine: what the user holds. It is the model, with its layers replaced; everything is installed on `module`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from infuse.apply import apply
from infuse.config import InferenceConfig
from infuse.device import Device
from infuse.errors import ConfigError, NotAvailable
from infuse.plan import Plan, make_plan
from infuse.runtime.decode import install


def plan(model: nn.Module, config: Any = None, **kwargs: Any) -> Plan:
    """What `init_inference` would do to `model`, live or on meta, without doing it."""
    settings = InferenceConfig.make(config, **kwargs)
    return make_plan(model, settings, Device.of(settings.device or _device_of(model)))


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Make `model` fast in place and return it wrapped: same `forward()`, same `generate()`."""
    return InferenceEngine(model, config, **kwargs)


class InferenceEngine(nn.Module):
    def __init__(self, model: nn.Module, config: Any = None, **kwargs: Any):
        super().__init__()
        settings = InferenceConfig.make(config, **kwargs)
        if missing := settings.not_available():
            raise NotAvailable("; ".join(missing))
        if settings.device is not None:
            model.to(settings.device)
        decided = make_plan(model, settings, Device.of(_device_of(model)))
        model.eval()
        self.plan = apply(decided, model, settings)
        install(model, settings)
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.generate(*args, **kwargs)


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
