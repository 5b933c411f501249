"""Every error that infuse raises on purpose. Errors of PyTorch and transformers pass through unchanged.

InfuseError
├── ConfigError (ValueError)               wrong configuration; raised before any weight is touched
├── SpecMismatch                           a layer differs from its spec; lists all differences
├── ProofError                             a replaced layer disagrees with the original, under verify="strict"
├── CheckpointError                        a missing, broken or foreign checkpoint; the model is unchanged
├── RankError                              ranks that share a model disagree, or one is gone or late
├── UnsupportedCall (ValueError)           an argument, cache or mask that a replaced layer does not serve
├── ContextLimitError (ValueError)         more tokens than max_out_tokens allows; no kernel runs
├── OutOfMemory (torch.OutOfMemoryError)   the device has no memory for a call; the engine still works
└── NotAvailable (NotImplementedError)     valid input for a feature that this version lacks
"""

import torch

WAY_BACK = "infuse.restore(model) puts the original modules back"


class InfuseError(Exception):
    """The root: `except infuse.InfuseError` catches all of them."""


class ConfigError(InfuseError, ValueError):
    """A key or value of the configuration is wrong; the text lists the possible ones."""


class SpecMismatch(InfuseError):
    """A layer's parameters or config differ from its spec; `differences` lists all of them."""

    def __init__(self, spec: str, differences: list[str]):
        self.spec = spec
        self.differences = tuple(differences)
        super().__init__(f"{spec}: " + "; ".join(differences))

    def __reduce__(self):
        return type(self), (self.spec, list(self.differences))


class ProofError(InfuseError):
    """A new module disagrees with the module that it would replace."""


class CheckpointError(InfuseError):
    """A checkpoint cannot be read into the model: the text names the files, or lists all wrong keys."""


class RankError(InfuseError):
    """A collective failed: the text names this rank, the collective, the other ranks and the reason."""


class UnsupportedCall(InfuseError, ValueError):
    """A replaced module does not serve this call: the text names the argument, the possible ones, and what to do."""


class ContextLimitError(InfuseError, ValueError):
    """The call needs more tokens than `max_out_tokens` allows."""


class OutOfMemory(InfuseError, torch.OutOfMemoryError):
    """The device has no memory left for a call: the text says what was freed and what to do."""


class NotAvailable(InfuseError, NotImplementedError):
    """The input is valid, but this version lacks the feature."""


def in_brief(error: BaseException) -> str:
    """The class and the first line of the text of an error."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
