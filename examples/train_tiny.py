"""Train the bundled example model: a small Llama that completes Python code.

It learns from the source of the running interpreter's standard library; see `examples/tiny_llama/README.md`.

Run `python examples/train_tiny.py --out examples/tiny_llama`.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import random
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from perplexity import perplexity, total_nats

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
CONTEXT = 1024
TOKENS_PER_STEP = 4096
CHARACTERS_PER_PIECE = 300
STEPS = 3000
# Tables, generated files and copies of other modules teach little; tests are left out for their size.
SKIPPED = {"site-packages", "test", "tests", "idle_test", "encodings", "lib2to3", "pydoc_data", "__phello__"}
LONGEST_HELDOUT = 64_000
PROMPTS = [
    "    def __repr__(self):\n",
    "class TestError(Exception):\n",
    "def main():\n    parser = argparse.ArgumentParser(",
    "with open(filename, 'rb') as f:\n",
    "try:\n    import ",
]


@dataclass
class Files:
    """The texts to learn from, and the held-out texts with their names."""

    train: list[str]
    heldout: dict[str, str]


def standard_library() -> Files:
    """Read the standard library's source; a hash of its name decides whether a file is held out (about 4 %)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = Files([], {})
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIPPED & set(name.split("/")) or name.startswith(("_sysconfigdata", "config-")):
            continue
        text = path.read_text(encoding="utf-8")
        if int(hashlib.sha256(name.encode()).hexdigest(), 16) % 25:
            files.train.append(text)
        elif len(text) <= LONGEST_HELDOUT:
            files.heldout[name] = text
    return files


def train_tokenizer(texts: list[str], vocabulary: int = 4096) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE tokenizer that puts the beginning-of-text token before every text."""
    bpe = Tokenizer(models.BPE())
    line_starts = pre_tokenizers.Split(
        Regex(r"\n+|^ +"), "isolated"
    )  # line breaks and indentation are tokens of their own
    bpe.pre_tokenizer = pre_tokenizers.Sequence([line_starts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[BOS, EOS, PAD], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build the untrained model: 6 layers, 4 query heads that share 2 key-value heads, tied embeddings."""
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        **special,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=False, **special)
    return model


class Rows:
    """Endless training rows cut from the files, which are shuffled anew for every pass.

    Now and then a file is encoded in two pieces, parted at a random character: so the model also meets texts that
    end in a space or within a word, as prompts do.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: list[str], seed: int):
        self.tokenizer, self.texts = tokenizer, texts
        self.random = random.Random(seed)
        self.left = torch.empty(0, dtype=torch.long)

    def pieces(self) -> Iterator[str]:
        """Yield all files in a new order, each in pieces of random length followed by the end-of-text token."""
        for text in self.random.sample(self.texts, len(self.texts)):
            while text:
                cut = 1 + int(self.random.expovariate(1 / CHARACTERS_PER_PIECE))
                yield text[:cut]
                text = text[cut:]
            yield EOS

    def take(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs, each row beginning with the beginning-of-text token, and the tokens to predict."""
        while len(self.left) < rows * length:
            encoded = self.tokenizer(list(self.pieces()), add_special_tokens=False, verbose=False).input_ids
            self.left = torch.cat([self.left, torch.tensor(list(chain.from_iterable(encoded)))])
        target, self.left = self.left[: rows * length].view(rows, length), self.left[rows * length :]
        return torch.cat([torch.full((rows, 1), self.tokenizer.bos_token_id), target[:, :-1]], dim=1), target


def optimizers_of(model: LlamaForCausalLM, rate: float) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for the rest: fewer tokens than AdamW alone needs for the same
    loss.
    """
    matrices = [p for p in model.model.layers.parameters() if p.dim() > 1]
    rest = [model.model.embed_tokens.weight, *(p for p in model.parameters() if p.dim() == 1)]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return muon, torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, files: Files, args: argparse.Namespace, backup: Path
) -> None:
    """Train for args.steps steps; every 200 of them, and at the end, the model is saved to `backup`."""
    optimizers = optimizers_of(model, args.lr)
    # Compiling pays off after a few hundred steps and needs a C++ compiler.
    forward = torch.compile(model, dynamic=False) if args.steps >= 500 and shutil.which("g++") else model
    rows = Rows(tokenizer, files.train, args.seed)
    sample = "\n".join(files.heldout.values())[:40_000]
    warmup = min(100, args.steps // 10 + 1)
    heldout = average = math.nan
    bar = tqdm(range(args.steps), unit="step", mininterval=2)
    for step in bar:
        progress = step / args.steps
        length = CONTEXT // 2 if progress < 0.8 else CONTEXT  # short rows first: they are cheaper
        inputs, target = rows.take(TOKENS_PER_STEP // length, length)
        for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
            group["lr"] = args.lr * min(1, (step + 1) / warmup) * max(0.01, 1 - progress)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = forward(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        average = loss.item() if step == 0 else 0.95 * average + 0.05 * loss.item()
        if (step + 1) % 200 == 0:
            heldout = math.log(perplexity(model.eval(), tokenizer, sample, 512, 511))
            model.train().save_pretrained(backup)
            bar.write(f"step {step + 1}: training loss {average:.3f}, held-out loss {heldout:.3f}")
        bar.set_postfix(loss=f"{average:.3f}", heldout=f"{heldout:.3f}", refresh=False)
    model.save_pretrained(backup)


@dataclass
class Score:
    """Perplexity per token and bits per byte of the held-out text."""

    perplexity: float
    bits: float


def score(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str) -> Score:
    """Measure the model on the held-out text with the windows the model card names."""
    nats, tokens = total_nats(model.eval(), tokenizer, text, CONTEXT // 2, CONTEXT // 4)
    return Score(math.exp(nats / tokens), nats / math.log(2) / len(text.encode()))


def complete(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """Continue a prompt greedily and return prompt and continuation."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    return tokenizer.decode(
        model.generate(**inputs, max_new_tokens=64, repetition_penalty=1.15)[0], skip_special_tokens=True
    )


def model_card(
    facts: dict[str, str], command: str, scores: dict[str, Score], samples: list[str], names: list[str]
) -> str:
    """Return the text of the model's README."""
    table = "\n".join(f"| {kind} | {s.perplexity:.3f} | {s.bits:.4f} |" for kind, s in scores.items())
    listed = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    completions = "\n\n".join(f"```python\n{sample.rstrip()}\n```" for sample in samples)
    return f"""# tiny_llama

A small Llama model that completes Python code, with its tokenizer. It is meant for demos and tests only:
it is real enough for perplexity and quantization figures to mean something, and too small to write code for anyone.

{listed}

## Data and licence

The model learned from the source files of Python's standard library, without tests, encoding tables, `lib2to3` and
generated files. About 4 % of the files, chosen by a hash of their names, were held out; those of at most
{LONGEST_HELDOUT:,} characters are joined in `heldout.txt`.

The standard library and therefore `heldout.txt` are under the Python Software Foundation License Version 2 (PSF-2.0),
© Python Software Foundation, all rights reserved; a few modules carry further notices in their text. The licence is
in `PSF-LICENSE.txt`. The weights were learned from this text and can reproduce parts of it.

Held out: {", ".join(f"`{name}`" for name in names)}.

## Training

Muon for the layers' matrices (weight decay 0.1) and AdamW for the rest, learning rate with warm-up and linear decay,
gradients clipped at 1, {TOKENS_PER_STEP} tokens per step in bfloat16 autocast, rows of {CONTEXT // 2} tokens \
and for the last fifth
of {CONTEXT}. Files are encoded in pieces parted at random characters, so that prompts may end in a space \
or within a word.
The command was

    {command}

## Quality on `heldout.txt`

Windows of {CONTEXT // 2} tokens, {CONTEXT // 4} apart (`python examples/perplexity.py examples/tiny_llama`).

| Weights | Perplexity per token | Bits per byte |
|---|---|---|
{table}

## Sample completions

Greedy with a repetition penalty of 1.15, 64 new tokens; the first line or lines are the prompt.

{completions}
"""


def finish(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    files: Files,
    facts: dict[str, str],
    command: str,
    folder: Path,
) -> None:
    """Write model, tokenizer, held-out text, licence and model card to a folder."""
    text = "\n".join(files.heldout.values())
    scores = {"float32, as trained": score(model, tokenizer, text)}
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "heldout.txt").write_text(text, encoding="utf-8")
    licence = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    if licence.exists():
        shutil.copyfile(licence, folder / "PSF-LICENSE.txt")

    (folder / "model.safetensors").chmod(0o644)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for kind, dtype in {"bfloat16, calculated in float32": torch.float32, "bfloat16": torch.bfloat16}.items():
        scores[kind] = score(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), tokenizer, text)
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    samples = [complete(saved, tokenizer, prompt) for prompt in PROMPTS]
    (folder / "README.md").write_text(
        model_card(facts, command, scores, samples, list(files.heldout)), encoding="utf-8"
    )


def replace_folder(new: Path, out: Path) -> None:
    """Put a finished folder in the place of another in one step, so that `out` is never half written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    staged, old = out.with_name(f".{out.name}.new"), out.with_name(f".{out.name}.old")
    shutil.copytree(new, staged)
    if out.exists():
        out.rename(old)
    staged.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def main() -> None:
    """Train, evaluate and save the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write, replaced if it exists")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps (default: {STEPS})")
    parser.add_argument("--lr", type=float, default=5e-3, help="highest learning rate (default: 0.005)")
    parser.add_argument("--init", type=Path, help="directory of a model to train further (default: a new one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    files = standard_library()
    tokenizer = train_tokenizer(files.train)
    model = LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32) if args.init else new_model(tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    work = Path(tempfile.mkdtemp(prefix="train_tiny_"))
    print(f"{parameters:,} parameters, {len(files.train)} training files; checkpoints go to {work / 'checkpoint'}")

    start = time.monotonic()
    train(model, tokenizer, files, args, work / "checkpoint")
    config, tokens, minutes = model.config, args.steps * TOKENS_PER_STEP, (time.monotonic() - start) / 60
    facts = {
        "Architecture": f"Llama (`LlamaForCausalLM`), {config.num_hidden_layers} layers, "
        f"hidden size {config.hidden_size}, inner size {config.intermediate_size}, "
        f"{config.num_attention_heads} query and {config.num_key_value_heads} key-value heads "
        f"of {config.head_dim}, tied embeddings, {CONTEXT} positions",
        "Parameters": f"{parameters:,}, stored in bfloat16",
        "Tokenizer": f"byte-level BPE, {len(tokenizer)} tokens, learned from the training files",
        "Training data": f"{len(files.train)} files, {sum(map(len, files.train)) / 1e6:.1f} million characters, "
        f"of the standard library of Python {platform.python_version()}",
        "Training": f"{args.steps} steps, {tokens / 1e6:.1f} million tokens, {minutes:.0f} minutes "
        f"with {args.threads} CPU threads, seed {args.seed}",
    }
    settings = {name: getattr(args, name) for name in ("steps", "lr", "seed", "threads", "init")}
    given = " ".join(f"--{name} {value}" for name, value in settings.items() if value is not None)
    command = f"python examples/train_tiny.py --out examples/tiny_llama {given}"
    finish(model, tokenizer, files, facts, command, work / "result")
    replace_folder(work / "result", args.out)
    shutil.rmtree(work)
    print(f"saved to {args.out}")


if __name__ == "__main__":
    main()
