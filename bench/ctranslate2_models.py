"""CTranslate2 as a contestant of seq2seq.py: the same random weights in its int8, through its converters' specs.

pip install ctranslate2
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import transformers as converters

_LOADERS = {"t5": converters.T5Loader, "opus": converters.MarianMTLoader, "whisper": converters.WhisperLoader}
_SPECIAL = {50257: "<|endoftext|>", 50258: "<|startoftranscript|>", 50361: "<|nocaptions|>", 50363: "<|notimestamps|>"}


class CTranslate2:
    """A model in int8. The encoder of texts cannot be called alone."""

    def __init__(self, name: str, model: Any):
        self.reads_sound = name.startswith("whisper")
        spec = _LOADERS[name.partition("-")[0]]().get_model_spec(model.float())
        words = [f"w{index}" for index in range(model.config.vocab_size)]
        if self.reads_sound:
            for index, word in _SPECIAL.items():
                words[index] = word
            spec.register_vocabulary(words)
        else:
            words = words[: 65000 if name == "opus-mt" else None]
            spec.register_source_vocabulary(words)
            spec.register_target_vocabulary(words)
            spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "w2"
            spec.config.decoder_start_token = "w0"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.mkdir()
            spec.validate()
            spec.optimize(quantization="int8")
            spec.save(str(path))
            kind: Any = ctranslate2.models.Whisper if self.reads_sound else ctranslate2.Translator
            self.model = kind(str(path), device="cpu", compute_type="int8", inter_threads=1,
                              intra_threads=torch.get_num_threads())  # fmt: skip

    def encode(self, given: dict[str, torch.Tensor]) -> None:
        self.model.encode(_sound(given))

    def generate(self, given: dict[str, torch.Tensor], tokens: int, beams: int) -> None:
        """Generate so many tokens; the encoder runs, too."""
        if self.reads_sound:
            prompt = [[50258, 50363]]  # beside which at most half of the length is made
            answer = self.model.generate(_sound(given), prompt, beam_size=beams, max_length=2 * tokens,
                                         suppress_blank=False, suppress_tokens=[50257])  # fmt: skip
            made = len(answer[0].sequences_ids[0])
        else:
            words = [[f"w{index}" for index in row] for row in given["input_ids"].tolist()]
            answer = self.model.translate_batch(words, beam_size=beams, max_decoding_length=tokens,
                                                min_decoding_length=tokens)  # fmt: skip
            made = len(answer[0].hypotheses[0])
        assert made == tokens, f"{made} tokens were made, not {tokens}"


def _sound(given: dict[str, torch.Tensor]) -> Any:
    return ctranslate2.StorageView.from_array(np.ascontiguousarray(given["input_features"].float().numpy()))
