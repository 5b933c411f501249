"""Hybrids: decode and prefill of models that keep states, against the machine's limits and transformers.

    python bench/hybrids.py [--models qwen3_5 granite lfm2] [--formats bfloat16 int8 int4] [--contexts 128 32768]
                            [--batches 1 8] [--prompt 2048] [--tokens 48] [--plain] [--out FILE.md]
    python bench/hybrids.py --models qwen3_5 --save FOLDER    # for llama.cpp's convert_hf_to_gguf.py
    python bench/hybrids.py --gguf FOLDER/model.gguf [--peers llama.cpp ik_llama.cpp]    # beside them on the same file
    python bench/hybrids.py --models qwen3_5 --formats bfloat16 --peak 100000    # memory that a long prompt takes

Random weights of about 1 B: Qwen 3.5's gated delta rule, a state-space mixture like Granite 4 H, and LFM2 1.2B; and
of 0.35 to 0.6 B, with --prompt 0: falcon_h1, mamba2, falcon_mamba, jamba, kimi_linear, and of latent attention alone
deepseek. A token's bound are the bytes of weights
(of mixtures: those of the chosen experts), states and cached keys and values over the rate at which memory is read
before and after it; a prompt's are its operations over the rate of a bfloat16 matmul before and after it.
`--plain` also times transformers in bfloat16.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers as t
from rich.table import Table
from torch import Tensor

import infuse
from hub import PEERS as HUB_PEERS
from infuse.architectures.layer import LayerShape
from infuse.architectures.parts.moe import MoEShape
from infuse.architectures.parts.short_conv import ShortConvShape
from infuse.profile.probe import MemoryReader, matmul_rate
from infuse_cli.gguf_file import read_gguf_config
from peers import PROGRAM, Peer, ours, prefill
from report import in_turns, markdown, memory_bytes, show

_COMMON = dict(vocab_size=65536, max_position_embeddings=65536, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def _qwen3_5(layers: int = 24) -> Any:
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)
    config = t.Qwen3_5TextConfig(
        **_COMMON, hidden_size=1536, intermediate_size=5632, num_hidden_layers=len(kinds), num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, layer_types=kinds,
    )  # fmt: skip
    return t.Qwen3_5ForCausalLM(config)


def _granite(layers: int = 24) -> Any:
    kinds = ["linear_attention"] * layers
    kinds[5::10] = ["full_attention"] * len(kinds[5::10])
    config = t.GraniteMoeHybridConfig(
        **_COMMON, hidden_size=1536, num_hidden_layers=layers, num_attention_heads=12, num_key_value_heads=4,
        layer_types=kinds, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, mamba_expand=2,
        num_local_experts=16, num_experts_per_tok=4, intermediate_size=512, shared_intermediate_size=1024,
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=6.0, attention_multiplier=0.0078125,
        position_embedding_type=None,
    )  # fmt: skip
    return t.GraniteMoeHybridForCausalLM(config)


def _lfm2(layers: int = 16) -> Any:
    kinds = ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(layers)]
    config = t.Lfm2Config(
        **_COMMON, hidden_size=2048, intermediate_size=12288, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, layer_types=kinds, block_auto_adjust_ff_dim=True,
    )  # fmt: skip
    return t.Lfm2ForCausalLM(config)


def _falcon_h1() -> Any:
    return t.FalconH1ForCausalLM(t.FalconH1Config(
        **_COMMON, hidden_size=1024, intermediate_size=2048, num_hidden_layers=36, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64, mamba_d_state=128,
        mamba_n_groups=1, mamba_rms_norm=False, mamba_norm_before_gate=False,
    ))  # fmt: skip


def _mamba2() -> Any:
    return t.Mamba2ForCausalLM(t.Mamba2Config(
        **_COMMON, hidden_size=1024, num_hidden_layers=48, num_heads=32, head_dim=64, state_size=128, n_groups=1
    ))  # fmt: skip


def _falcon_mamba() -> Any:
    return t.FalconMambaForCausalLM(t.FalconMambaConfig(
        **_COMMON, hidden_size=1536, num_hidden_layers=24, state_size=16, time_step_rank=96
    ))  # fmt: skip


def _jamba() -> Any:
    return t.JambaForCausalLM(t.JambaConfig(
        **_COMMON, hidden_size=1536, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=4, attn_layer_period=8, attn_layer_offset=4, num_experts=1, num_experts_per_tok=1,
        mamba_dt_rank=96,
    ))  # fmt: skip


_LATENT = dict(
    q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_group=1,
    topk_group=1, moe_intermediate_size=512, n_shared_experts=2, num_experts_per_tok=4,
)  # fmt: skip


def _kimi_linear() -> Any:
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 4
    return t.KimiLinearForCausalLM(t.KimiLinearConfig(
        **_COMMON, **_LATENT, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=8, layer_types=kinds, linear_num_heads=8, linear_head_dim=128, num_experts=16,
        mlp_layer_types=["dense"] + ["sparse"] * 15,
    ))  # fmt: skip


def _deepseek() -> Any:
    return t.DeepseekV2ForCausalLM(t.DeepseekV2Config(
        **_COMMON, **_LATENT, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=8, n_routed_experts=16, first_k_dense_replace=1,
    ))  # fmt: skip


MODELS = {"qwen3_5": _qwen3_5, "granite": _granite, "lfm2": _lfm2}
OTHERS = {"falcon_h1": _falcon_h1, "mamba2": _mamba2, "falcon_mamba": _falcon_mamba, "jamba": _jamba}
OTHERS |= {"kimi_linear": _kimi_linear, "deepseek": _deepseek}


def made(name: str) -> Any:
    torch.manual_seed(0)
    if name in OTHERS:
        torch.set_default_dtype(torch.bfloat16)
        model = OTHERS[name]().eval()
        torch.set_default_dtype(torch.float32)
        model.generation_config.eos_token_id = None
        return model
    with torch.device("meta"):
        model = MODELS[name]()
    model = model.to(torch.bfloat16).to_empty(device="cpu").eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(0.5 if "dt_bias" in path else 1.0)
    fresh = MODELS[name](4) if name != "lfm2" else None  # of the rotary frequencies
    for path, buffer in () if fresh is None else fresh.named_buffers():
        model.get_buffer(path).copy_(buffer)
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):
            rotary = type(module)(model.config)
            module.inv_freq, module.original_inv_freq = rotary.inv_freq, rotary.original_inv_freq
    model.generation_config.eos_token_id = None
    return model


class _Turns(t.StoppingCriteria):
    """Asked after each token: notes how long it took, and how long reading a buffer takes just then."""

    def __init__(self, reader: MemoryReader):
        self._reader, self.seconds, self.reads = reader, [], []
        self._begun = time.perf_counter()

    def __call__(self, input_ids: Tensor, *_: object, **__: object) -> Tensor:
        arrived = time.perf_counter()
        self._reader()
        self._begun, begun = time.perf_counter(), self._begun
        self.seconds.append(arrived - begun)
        self.reads.append(self._begun - arrived)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Timed(NamedTuple):
    """Seconds until the first token; of each later one, seconds and bytes per second that memory gave around it."""

    first: float
    steps: list[tuple[float, float]]

    @property
    def seconds(self) -> float:
        return median(seconds for seconds, _ in self.steps)

    @property
    def rate(self) -> float:
        return median(rate for _, rate in self.steps)

    @property
    def readable(self) -> float:
        """Bytes that memory would have given in a step: machines change within seconds."""
        return median(seconds * rate for seconds, rate in self.steps)


def timed(model: Any, ids: Tensor, tokens: int, reader: MemoryReader) -> Timed:
    turns = _Turns(reader)
    model.generate(ids, max_new_tokens=tokens, do_sample=False, stopping_criteria=t.StoppingCriteriaList([turns]))
    around = [2 * reader.size_bytes / (before + after) for before, after in pairwise(turns.reads)]
    return Timed(turns.seconds[0], [*zip(turns.seconds[1:], around, strict=True)][2:])  # the first ones are traced


def bytes_of(engine: Any, batch: int, context: int) -> float:
    """Bytes that a step of `batch` texts reads: weights, of experts those that are chosen; states; keys and values."""
    module = engine.module
    read = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
    embedding = module.get_input_embeddings()
    if module.get_output_embeddings().weight is not getattr(embedding, "weight", None):
        read -= sum(each.nbytes for each in (*embedding.parameters(), *embedding.buffers()))
    for step in engine.plan.steps:
        if not isinstance(step.shape, LayerShape):
            continue
        for name, part in step.shape.held:
            if isinstance(part, MoEShape):
                experts = module.get_submodule(step.path)._modules[name].experts
                whole = sum(each.nbytes for each in (*experts.parameters(), *experts.buffers()))
                unseen = (1 - part.router.top_k / part.experts.count) ** batch
                read -= whole * unseen
        for mixer in step.shape.mixers.values():
            rows = sum(heads * width for heads, width in mixer.cached_rows)
            state_bytes = (2 if isinstance(mixer, ShortConvShape) else 4) * mixer.state_values
            read += batch * (2 * rows * context + state_bytes)
    return read


def operations_of(model: Any, tokens: int) -> float:
    """Multiplications and additions of a prompt: products, and attention in causal order; of a mixture's experts those
    that are chosen.
    """
    config, embedding = model.config, model.get_input_embeddings()
    total = 0.0
    for path, parameter in model.named_parameters():
        if parameter.dim() < 2 or parameter is embedding.weight or "conv" in path:
            continue
        share = config.num_experts_per_tok / len(parameter) if parameter.dim() == 3 else 1.0
        total += 2 * parameter.numel() * share * (1 if "lm_head" in path else tokens)
    attentions = [kind for kind in config.layer_types if kind == "full_attention"]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    total += len(attentions) * 2 * tokens * tokens * config.num_attention_heads * width
    states = [kind for kind in config.layer_types if kind == "linear_attention"]
    names = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    if not hasattr(config, names[0]):
        names = ("mamba_n_heads", "mamba_d_head", "mamba_d_state")
    of_state = math.prod(getattr(config, name, 0) for name in names)
    return total + len(states) * tokens * 6 * of_state


def _row(table: Table, *cells: str) -> None:
    print(*cells, file=sys.stderr, flush=True)
    table.add_row(*cells)


def measure(
    name: str, format: str, args: argparse.Namespace, decode: Table, prefill: Table, reader: MemoryReader
) -> None:
    model = made(name)
    operations = operations_of(model, args.prompt) if args.prompt else 0.0
    quant = {} if format == "bfloat16" else {"quant": format}
    engine = infuse.init_inference(model, dtype=torch.bfloat16, progress=False, verify="off", **quant)
    generator = torch.Generator().manual_seed(0)

    def ids(batch: int, length: int) -> Tensor:
        return torch.randint(5, 60000, (batch, length), generator=generator)

    timed(engine, ids(1, 64), 8, reader)
    alone = 0.0
    for batch in args.batches:
        for context in args.contexts if batch == 1 else args.contexts[:1]:
            run = timed(engine, ids(batch, context), args.tokens, reader)
            read = bytes_of(engine, batch, context)
            alone = run.readable if batch == 1 and context == args.contexts[0] else alone
            _row(decode, name, format, f"{batch}", f"{context}", f"{1e3 * run.seconds:.2f}", f"{read / 1e6:.0f}",
                f"{run.rate / 1e9:.1f}", f"{read / run.readable:.2f}", f"{run.readable / alone:.2f}" if alone else "",
            )  # fmt: skip
    pairs = []
    for _ in range(args.repeats if args.prompt else 0):
        rate = matmul_rate(torch.bfloat16)
        seconds = timed(engine, ids(1, args.prompt), 2, reader).first
        pairs.append((operations / seconds / (rate + matmul_rate(torch.bfloat16)) * 2, seconds, rate))
    if not pairs:
        return
    share, seconds, rate = sorted(pairs)[len(pairs) // 2]
    _row(
        prefill, name, format, f"{args.prompt}", f"{1e3 * seconds:.0f}", f"{operations / 1e12:.2f}",
        f"{rate / 1e9:.0f}", f"{share:.2f}",
    )  # fmt: skip


def peak(name: str, format: str, tokens: int, table: Table) -> None:
    """The most memory that the process has while a prompt is answered, beyond weights and cached keys and values."""
    model = made(name)
    model.config.max_position_embeddings = max(model.config.max_position_embeddings, tokens + 8)
    quant = {} if format == "bfloat16" else {"quant": format}
    engine = infuse.init_inference(model, dtype=torch.bfloat16, progress=False, verify="off", **quant)
    engine.generate(torch.randint(5, 60000, (1, 64)), max_new_tokens=8, do_sample=False)
    cached = bytes_of(engine, 1, tokens) - bytes_of(engine, 1, 0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size again
    before, begun = memory_bytes("VmRSS"), time.perf_counter()
    engine.generate(torch.randint(5, 60000, (1, tokens)), max_new_tokens=2, do_sample=False)
    seconds, beyond = time.perf_counter() - begun, memory_bytes("VmHWM") - before - cached
    _row(table, name, format, f"{tokens}", f"{seconds:.0f}", f"{before / 1e9:.2f}", f"{cached / 1e9:.2f}",
        f"{beyond / 1e9:.2f}",
    )  # fmt: skip


def plain(name: str, args: argparse.Namespace, decode: Table, prefill: Table, reader: MemoryReader) -> None:
    """transformers' own figures, in bfloat16."""
    model = made(name)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 60000, (1, max(args.prompt, args.contexts[0])), generator=generator)
    with torch.inference_mode():
        timed(model, ids[:, :64], 4, reader)
        run = timed(model, ids[:, : args.contexts[0]], 9, reader)
        _row(decode, name, "transformers bfloat16", "1", f"{args.contexts[0]}", f"{1e3 * run.seconds:.2f}", "",
            f"{run.rate / 1e9:.1f}", "", "",
        )  # fmt: skip
        first = timed(model, ids, 4, reader).first if args.prompt else 0.0
    if args.prompt:
        _row(prefill, name, "transformers bfloat16", f"{args.prompt}", f"{1e3 * first:.0f}", *[""] * 3)


def beside(path: Path, args: argparse.Namespace) -> Table:
    """Seconds of infuse and its peers on a GGUF file, in turns: a prompt, and steps of each batch."""
    batch, tokens = max(args.batches), max(args.prompt, args.contexts[0]) + args.tokens + 1
    with torch.device("meta"):
        model = t.AutoModelForCausalLM.from_config(read_gguf_config((path,)))
    engine = infuse.init_inference(model, dtype=torch.bfloat16, checkpoint=str(path), progress=False)
    engine.module.generation_config.eos_token_id = None
    peers = {}
    for name in args.peers:
        told = [name, path.suffix, "none", path.parent, batch, tokens]
        peers[name] = Peer([sys.executable, str(PROGRAM), *map(str, told)])
        if why := peers[name].why:
            raise SystemExit(why)
    runs = {"infuse": ours(engine.module), **peers}
    firsts = in_turns([partial(prefill, run, args.prompt) for run in runs.values()], args.repeats)
    rows = {name: [name, f"{median(seconds):.2f}"] for name, seconds in zip(runs, firsts, strict=True)}
    for each in args.batches:
        ids = torch.randint(5, 60000, (each, args.contexts[0]))
        one, more = (
            in_turns([partial(run, ids, new) for run in runs.values()], args.repeats) for new in (1, 1 + args.tokens)
        )
        for name, a, b in zip(runs, one, more, strict=True):
            rows[name].append(f"{1e3 * (median(b) - median(a)) / args.tokens:.2f}")
    for peer in peers.values():
        peer.close()
    table = Table(path.name, f"prompt of {args.prompt}, s", *(f"batch {each}, ms a step" for each in args.batches))
    for row in rows.values():
        table.add_row(*row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *OTHERS], default=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=["bfloat16", "int8", "int4"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 32768])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument(
        "--prompt", type=int, default=2048, help="0: steps alone, as for the models beside the default ones"
    )
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="time transformers, too")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="save the models there, and measure nothing")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="measure this file alone")
    parser.add_argument("--peers", nargs="*", choices=HUB_PEERS, default=["ik_llama.cpp"], help="with --gguf")
    parser.add_argument("--peak", type=int, metavar="TOKENS", help="measure the memory of such a prompt alone")
    parser.add_argument("--out", type=Path, help="append the report to this file")
    args = parser.parse_args()
    if args.gguf is not None:
        return show(markdown(beside(args.gguf, args), "A GGUF file"), args.out)
    if args.save is not None:
        for name in args.models:
            made(name).save_pretrained(args.save / name)
        return None
    if args.peak:
        table = Table("model", "format", "tokens", "s", "before, GB", "keys and values, GB", "beyond both at most, GB")
        for name in args.models:
            for format in args.formats:
                peak(name, format, args.peak, table)
        return show(markdown(table, "Memory of a prompt"), args.out)
    decode = Table("model", "format", "batch", "context", "ms a step", "MB", "GB/s", "of the bandwidth", "of batch 1")
    prefill = Table("model", "format", "tokens", "ms", "10^12 operations", "10^9/s", "of the matmul rate")
    reader = MemoryReader(size_bytes=1 << 28)
    for name in args.models:
        if args.plain:
            plain(name, args, decode, prefill, reader)
        for format in args.formats:
            measure(name, format, args, decode, prefill, reader)
    show(markdown(decode, "A step"), args.out)
    show(markdown(prefill, "A prompt"), args.out)


if __name__ == "__main__":
    main()
