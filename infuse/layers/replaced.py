"""WasReplaced: the error of code that asks for a module in whose place one of ours stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infuse.architectures.part import named
from infuse.ground.errors import WAY_BACK

KEEPS_LAYERS = (
    "to keep the layers and replace only linears, call init_inference with replace_with_kernel_inject=False; "
    f"{WAY_BACK}"
)
ASK_BEFORE = f"code that needs it should ask the model before init_inference; {WAY_BACK}"


class WasReplaced(AttributeError):
    """A module or tensor was asked for that is a part of one of ours now."""


@dataclass(frozen=True)
class Replaced:
    """`names`: the modules and tensors that were there → their paths in the module `whole`, which was replaced.

    `whole` is a path in the model, `kind` its class. `sources`: its tensors that ours are made of. `kept_by`: how to
    keep it.
    """

    whole: str
    kind: str
    names: Mapping[str, str]
    sources: Sequence[str]
    kept_by: str

    def told(self, name: str) -> str:
        """Where the attribute `name` went."""
        place = self.names[name]
        keys = [named(self.whole, key) for key in self.sources if key == place or key.startswith(f"{place}.")]
        values = "it has no tensors in the state dict"
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            values = (
                f"its values are in model.state_dict(): {keys[0]!r}{more} (if quantized, `with infuse.dequantized`)"
            )
        what = f"{self.whole or 'the model'} ({self.kind})"
        return f"infuse replaced {what} as a whole, {named(self.whole, place)} included; {values}; {self.kept_by}"
