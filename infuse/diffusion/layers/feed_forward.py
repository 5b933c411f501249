"""The feed-forward module of diffusers: an MLP with the original's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infuse.diffusion.shapes.feed_forward import FeedForwardShape
from infuse.layers.build_context import BuildContext
from infuse.layers.calls.contract import refuse_unknown
from infuse.layers.gradient import InferenceModule, is_recorded, unrecorded
from infuse.layers.mlp import MLP


class FeedForward(InferenceModule, MLP):
    """forward(hidden_states [..., C]) -> [..., C]. The deprecated `scale` has no effect in the original either."""

    def __init__(self, shape: FeedForwardShape, context: BuildContext):
        super().__init__(shape.mlp, context)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        if args or kwargs:
            refuse_unknown("FeedForward", args, kwargs)
        if torch.is_grad_enabled() and is_recorded(self, hidden_states):
            return unrecorded(FeedForward.forward, self, hidden_states)
        return self.fused(hidden_states, None, None)
