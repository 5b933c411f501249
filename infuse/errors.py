"""Every error that infuse raises on purpose. What PyTorch or transformers raise themselves passes through unchanged.

InfuseError
├── ConfigError (ValueError)        a configuration key or value; raised before any weight is touched
├── SpecMismatch                    a layer is not what its spec says: all differences at once
├── ProofError                      a replaced layer disagrees with the original, under verify="strict"
├── CheckpointError                 a checkpoint that is missing, broken, or another model's; the model is as it was
├── RankError                       ranks that share a model disagree, one is gone, or one did not come in time
├── UnsupportedCall (ValueError)    an argument, cache or mask that a replaced layer does not serve; raised before
anything is computed ├── ContextLimitError (ValueError)  more tokens than an explicit cap allows; raised before any
kernel runs ├── OutOfMemory (torch.OutOfMemoryError)  the device has no memory for a call; the engine works on └──
NotAvailable (NotImplementedError)  valid input for a part that this version does not have
"""

import torch


class InfuseError(Exception):
    """The root: `except infuse.InfuseError` catches all of them."""


class ConfigError(InfuseError, ValueError):
    """A key or value of the configuration is wrong; the text says what is possible."""


class SpecMismatch(InfuseError):
    """A layer's parameters or config differ from its spec; `differences` lists all of them."""

    def __init__(self, spec: str, differences: list[str]):
        self.spec = spec
        self.differences = tuple(differences)
        super().__init__(f"{spec}: " + "; ".join(differences))

    def __reduce__(self):
        return type(self), (self.spec, list(self.differences))


class ProofError(InfuseError):
    """A step's new module disagrees with the module that it would replace."""


class CheckpointError(InfuseError):
    """A checkpoint cannot be read into the model: the text names the files, or lists all keys that are wrong."""


class RankError(InfuseError):
    """An operation of several ranks failed: the text names this rank, the operation, the other ranks and what happened
    to them.
    """


class UnsupportedCall(InfuseError, ValueError):
    """A replaced module was called in a way that it does not serve: the text names the argument, what is served, and
    what to do.
    """


class ContextLimitError(InfuseError, ValueError):
    """The call needs more tokens than `max_out_tokens` allows."""


class OutOfMemory(InfuseError, torch.OutOfMemoryError):
    """The device has no memory left for a call; the text says what was freed and what to do."""


class NotAvailable(InfuseError, NotImplementedError):
    """The input is valid, but the part that would serve it is not in this version."""
