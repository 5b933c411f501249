"""Parts of blocks that match no module of the original, so that hooks on them would see other values."""

from __future__ import annotations

from typing import Any, NoReturn

from infuse.ground.errors import WAY_BACK, UnsupportedCall
from infuse.layers.gradient import Settled


class Unheard(Settled):
    """Raise UnsupportedCall for hooks on this part and for assigning its forward."""

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("register_forward_hook()")

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("register_forward_pre_hook()")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            self._refuse("forward = ...")
        super().__setattr__(name, value)

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedCall(
            f"{type(self).__name__}.{what}: this part of a replaced block computes something else than the original's "
            "modules do, and is not called as they are; put hooks on the block, or on the original's modules and call "
            f"init_inference then, which leaves such blocks as they are ({WAY_BACK})"
        )
