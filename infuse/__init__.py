"""infuse makes a PyTorch or Hugging Face model that you already hold run near the limit of the hardware.

engine = infuse.init_inference(model, dtype=torch.bfloat16)
engine(**inputs); engine.generate(**inputs)
"""

import gc

_collects = gc.isenabled()
gc.disable()  # nothing that is imported is garbage: searches for some took a third of the import
try:
    from infuse.config.inference import InferenceConfig
    from infuse.engine import InferenceEngine, explain, inference, init_inference, plan, restore
    from infuse.ground.errors import (
        CheckpointError,
        ConfigError,
        ContextLimitError,
        InfuseError,
        NotAvailable,
        OutOfMemory,
        ProofError,
        RankError,
        SpecMismatch,
        UnsupportedCall,
    )
    from infuse.weights.state import dequantized
finally:
    if _collects:
        gc.enable()

__version__ = "0.2.0"

__all__ = [
    "CheckpointError", "ConfigError", "ContextLimitError", "InferenceConfig", "InferenceEngine", "InfuseError",
    "NotAvailable", "OutOfMemory", "ProofError", "RankError", "SpecMismatch", "UnsupportedCall", "dequantized",
    "explain", "inference", "init_inference", "plan", "restore",
]  # fmt: skip
