"""A small Whisper with the generation config of a multilingual one, and sounds for it."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t
from torch import Tensor
from torch.nn.functional import interpolate

from tests.models.families import enlarge

# Whisper's vocabulary, with the bytes as its words and three languages.
END = 256
SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>", "<|transcribe|>",
           "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]  # fmt: skip
ID = {word: END + index for index, word in enumerate(SPECIAL)}
TIMES = END + len(SPECIAL)  # the token of 0.00 s
STATES = 100  # of a window, 2 s long
FRAMES = 2 * STATES
# Another temperature where an answer is poor.
FALLBACK = dict(temperature=(0.0, 0.2, 0.4), compression_ratio_threshold=1.2, logprob_threshold=-1.5)


def whisper(seed: int = 0, states: int = STATES, model: Any = t.WhisperForConditionalGeneration, **more: Any) -> Any:
    """A model with the generation config of a multilingual one: about half of what it says are times."""
    torch.manual_seed(seed)
    values: dict[str, Any] = dict(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=TIMES + states + 1, num_mel_bins=16,
        max_source_positions=states, max_target_positions=64, pad_token_id=END, bos_token_id=END, eos_token_id=END,
        decoder_start_token_id=ID["<|startoftranscript|>"], suppress_tokens=None, begin_suppress_tokens=None,
        median_filter_width=7,
    )  # fmt: skip
    made = model(t.WhisperConfig(**(values | more))).eval()
    enlarge(made)
    words = made.get_input_embeddings().weight
    with torch.no_grad():
        words.copy_(0.3 * torch.randn(words.shape))
        words[TIMES:] *= 0.3
        made.model.decoder.embed_positions.weight.mul_(20)  # else it says one word again and again
    config = made.generation_config
    config.pad_token_id = config.eos_token_id = END
    config.lang_to_id = {word: ID[word] for word in ("<|en|>", "<|de|>", "<|fr|>")}
    config.task_to_id = {word: ID[f"<|{word}|>"] for word in ("translate", "transcribe")}
    config.is_multilingual, config.no_timestamps_token_id = True, ID["<|notimestamps|>"]
    config.prev_sot_token_id, config.max_initial_timestamp_index = ID["<|startofprev|>"], 50
    config.alignment_heads = [[0, 1], [1, 0], [1, 3]]
    config.suppress_tokens = [ID[word] for word in SPECIAL if word not in ("<|endoftext|>", "<|notimestamps|>")]
    config.begin_suppress_tokens = [32, END]
    return made


def sounds(*frames: int, seed: int = 1) -> dict[str, Tensor]:
    """Features of sounds that change about every half second, padded to the longest, and their mask."""
    generator, longest = torch.Generator().manual_seed(seed), max(frames)
    features = interpolate(torch.randn(len(frames), 16, longest // 40, generator=generator), longest, mode="linear") * 2
    mask = (torch.arange(longest) < torch.tensor(frames)[:, None]).long()
    return {"input_features": features * mask[:, None], "attention_mask": mask}
