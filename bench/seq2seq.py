"""Encoder-decoders: the encoder and the steps of an answer, beside transformers in bfloat16.

    python bench/seq2seq.py [--models t5-small t5-base opus-mt t5gemma2-270m whisper-tiny whisper-base ...]
                            [--formats bfloat16 int8 int8:a8 int8+kv] [--ctranslate2] [--beams 4] [--tokens 32]
                            [--rounds 5] [--out FILE.md]

Random weights; a sentence of 40 tokens, or 30 seconds of sound. Contestants take turns. A token's bound are the bytes
that it reads: the decoder's matrices but those of the states' keys and values, the head, and these keys and values,
over the rate at which memory is read between the rounds. `int8+kv`: with an int8 cache, of the states' keys, too.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers as t
from rich.table import Table

import infuse
from infuse.profile.probe import MemoryReader
from report import markdown, show

SENTENCE = 40
FIRST = "transformers bfloat16"


def _t5(width: int, layers: int, heads: int, inner: int) -> Callable[[], Any]:
    config = t.T5Config(vocab_size=32128, d_model=width, d_kv=64, d_ff=inner, num_layers=layers, num_heads=heads,
                        decoder_start_token_id=0)  # fmt: skip
    return lambda: t.T5ForConditionalGeneration(config)


def _opus_mt() -> Any:
    sizes = dict(encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8)
    return t.MarianMTModel(t.MarianConfig(
        d_model=512, encoder_ffn_dim=2048, decoder_ffn_dim=2048, vocab_size=65001, pad_token_id=65000,
        decoder_start_token_id=65000, max_position_embeddings=512, **sizes))  # fmt: skip


def _whisper(width: int, layers: int) -> Callable[[], Any]:
    heads, inner = width // 64, 4 * width
    config = t.WhisperConfig(
        d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=inner, decoder_ffn_dim=inner, suppress_tokens=None,
        begin_suppress_tokens=None)  # fmt: skip
    return lambda: t.WhisperForConditionalGeneration(config)


def _t5gemma2() -> Any:
    text = dict(hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
                num_key_value_heads=1, head_dim=256, query_pre_attn_scalar=256, vocab_size=65536,
                sliding_window=512)  # fmt: skip
    pictures = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    tokens = dict(image_token_index=65000, eoi_token_index=65001)
    encoder = dict(text_config=text, vision_config=pictures, boi_token_index=65002, **tokens)
    return t.T5Gemma2ForConditionalGeneration(t.T5Gemma2Config(encoder=encoder, decoder=text, **tokens))


MODELS: dict[str, Callable[[], Any]] = {
    "t5-small": _t5(512, 6, 8, 2048), "t5-base": _t5(768, 12, 12, 3072), "opus-mt": _opus_mt,
    "t5gemma2-270m": _t5gemma2,
    "whisper-tiny": _whisper(384, 4), "whisper-base": _whisper(512, 6), "whisper-small": _whisper(768, 12),
}  # fmt: skip


def made(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().to(torch.bfloat16).eval()
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


def inputs(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name.startswith("whisper"):
        return {"input_features": torch.randn(1, 80, 3000, generator=generator).bfloat16()}
    return {"input_ids": torch.randint(3, 30000, (1, SENTENCE), generator=generator)}


def bytes_of_token(name: str, model: Any, bytes_of_state: int) -> int:
    """Bytes of a step: the decoder without the matrices of the states' keys and values, the head, these keys."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    of_states = (
        ".encoder_attn.k",
        ".encoder_attn.v",
        ".EncDecAttention.k",
        ".EncDecAttention.v",
        ".cross.k",
        ".cross.v",
    )
    table = {id(each) for each in (*decoder.get_input_embeddings().parameters(),
                                   *decoder.get_input_embeddings().buffers())}  # fmt: skip
    tensors = {id(each): each for part in (decoder, head) for path, each in (*part.named_parameters(),
               *part.named_buffers()) if not any(name in f".{path}" for name in of_states)}  # fmt: skip
    owned = {id(each) for each in (*head.parameters(), *head.buffers())}
    read = sum(each.nbytes for key, each in tensors.items() if key not in table or key in owned)
    config, states = model.config, 1500 if name.startswith("whisper") else SENTENCE
    if (own := getattr(config, "decoder", None)) is not None:
        return read + own.num_hidden_layers * 2 * states * own.num_key_value_heads * own.head_dim * bytes_of_state
    layers = getattr(config, "decoder_layers", None) or config.num_decoder_layers
    width = getattr(config, "d_kv", 0) * getattr(config, "num_heads", 0) or config.d_model
    return read + layers * 2 * states * width * bytes_of_state


@dataclass
class Contestant:
    """A model of PyTorch, with the bytes of an entry of its cache."""

    model: Any
    bytes_of_state: int = 2

    def encode(self, given: Any) -> None:
        self.model.get_encoder()(**given)

    def generate(self, given: Any, tokens: int, beams: int) -> None:
        how = dict(num_beams=beams) if beams > 1 else {}
        self.model.generate(**given, **how, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens)


def seconds_of_token(contestant: Any, given: Any, tokens: int, beams: int) -> float:
    """Seconds of a later token: a long answer less a short one."""

    def run(count: int) -> float:
        start = time.perf_counter()
        contestant.generate(given, count, beams)
        return time.perf_counter() - start

    short = run(4)
    return (run(4 + tokens) - short) / tokens


def contestants_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {FIRST: Contestant(made(name))}
    for format in args.formats:
        quant, _, kv = format.partition("+")
        more: dict[str, Any] = {} if quant == "bfloat16" else {"quant": quant}
        more |= {"kv_cache": "int8"} if kv else {}
        engine = infuse.init_inference(made(name), dtype=torch.bfloat16, progress=False, **more)
        found[f"infuse {format}"] = Contestant(engine.module, 1 if kv else 2)
    if args.ctranslate2:
        from ctranslate2_models import CTranslate2

        found["CTranslate2 int8"] = CTranslate2(name, made(name))
    return found


def measure(name: str, args: argparse.Namespace, table: Table, reader: MemoryReader) -> None:
    contestants = contestants_of(name, args)
    given, figures = inputs(name), {who: ([], [], []) for who in contestants}
    reads: list[float] = []
    with torch.inference_mode():
        for turn in range(args.rounds + 1):
            for who, contestant in contestants.items():
                start = time.perf_counter()
                if isinstance(contestant, Contestant) or contestant.reads_sound:
                    contestant.encode(given)
                encoder = time.perf_counter() - start
                greedy = seconds_of_token(contestant, given, args.tokens, 1)
                beams = seconds_of_token(contestant, given, args.tokens, args.beams)
                start = time.perf_counter()
                reader()
                reads.append(reader.size_bytes / (time.perf_counter() - start))
                if turn:  # the first one warms up
                    for column, seconds in zip(figures[who], (encoder, greedy, beams), strict=True):
                        column.append(seconds)
    first = [median(column) for column in figures[FIRST]]
    for who, columns in figures.items():
        middle, contestant = [median(column) for column in columns], contestants[who]
        cells = [
            f"{seconds * 1e3:.2f} ({before / seconds:.2f} x)" for seconds, before in zip(middle, first, strict=True)
        ]
        share = ""
        if isinstance(contestant, Contestant):
            read = bytes_of_token(name, contestant.model, contestant.bytes_of_state)
            share = f"{read / middle[1] / median(reads):.2f}"
        elif not contestant.reads_sound:
            cells[0] = ""
        table.add_row(name, who, *cells, share)
        print(name, who, *cells, share, flush=True)
    contestants.clear()
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--ctranslate2", action="store_true", help="if it is installed")
    for name, value in dict(beams=4, tokens=32, rounds=5).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, help="append the report to this file")
    args = parser.parse_args()
    reader, table = MemoryReader(), Table(title="ms, ratios to transformers in bfloat16")
    for heading in ("", "", "encoder", "token, greedy", f"token, {args.beams} beams", "share of the read bandwidth"):
        table.add_column(heading)
    for name in args.models:
        measure(name, args, table, reader)
    show(markdown(table, f"sentences of {SENTENCE} tokens, 30 s of sound; median of {args.rounds} rounds"), args.out)


if __name__ == "__main__":
    main()
