"""llama.cpp on the shapes of bench/moe.py and bench/models.py, through its Python binding, as a contestant there.

Needs the packages `llama-cpp-python` and `gguf`. The model is written as a GGUF file with random weights (qwen3moe, or
llama for a shape without experts).
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import torch

BYTES = {"BF16": 2.0, "Q8_0": 34 / 32, "Q4_0": 18 / 32}  # of a value in each format


def missing() -> str | None:
    """Why llama.cpp cannot run here; None if it can."""
    absent = [name for name in ("llama_cpp", "gguf") if importlib.util.find_spec(name) is None]
    return f"llama.cpp is left out, without the packages {' and '.join(absent)}" if absent else None


def write(shape: dict[str, Any], format: str, path: Path) -> None:
    """Write a model of `shape`. All layers have the same values, as these do not change the time."""
    import gguf
    import numpy as np

    width, heads, layers = shape["hidden_size"], shape["num_attention_heads"], shape["num_hidden_layers"]
    head, experts = shape["head_dim"], shape.get("num_experts")
    inner = shape["moe_intermediate_size" if experts else "intermediate_size"]
    shared = shape["num_key_value_heads"] * head
    kind, random = gguf.GGMLQuantizationType[format], np.random.default_rng(0)

    def matrix(*sizes: int) -> Any:
        values = random.standard_normal(sizes, dtype=np.float32) / np.float32(sizes[-1] ** 0.5)
        return gguf.quants.quantize(values, kind)

    file = gguf.GGUFWriter(path, "qwen3moe" if experts else "llama")
    file.add_context_length(shape["max_position_embeddings"])
    file.add_embedding_length(width)
    file.add_block_count(layers)
    file.add_feed_forward_length(inner)
    if experts:
        file.add_expert_feed_forward_length(inner)
        file.add_expert_count(experts)
        file.add_expert_used_count(shape["num_experts_per_tok"])
    else:
        file.add_rope_dimension_count(head)
    file.add_head_count(heads)
    file.add_head_count_kv(shape["num_key_value_heads"])
    file.add_key_length(head)
    file.add_value_length(head)
    file.add_rope_freq_base(10000.0)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_vocab_size(shape["vocab_size"])
    file.add_tokenizer_model("no_vocab")
    for name in ("token_embd.weight", *(() if shape.get("tie_word_embeddings") else ("output.weight",))):
        file.add_tensor(name, matrix(shape["vocab_size"], width), raw_dtype=kind)
    file.add_tensor("output_norm.weight", np.ones(width, np.float32))
    held = {
        "attn_q": matrix(heads * head, width),
        "attn_k": matrix(shared, width),
        "attn_v": matrix(shared, width),
        "attn_output": matrix(width, heads * head),
    }
    products = {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
    if experts:
        held |= {f"{name}_exps": matrix(experts, *sizes) for name, sizes in products.items()}
    else:
        held |= {name: matrix(*sizes) for name, sizes in products.items()}
    norms = {"attn_norm": width, "ffn_norm": width} | ({"attn_q_norm": head, "attn_k_norm": head} if experts else {})
    router = random.standard_normal((experts, width), dtype=np.float32) if experts else None
    for layer in range(layers):
        for name, values in held.items():
            file.add_tensor(f"blk.{layer}.{name}.weight", values, raw_dtype=kind)
        for name, size in norms.items():
            file.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, np.float32))
        if router is not None:
            file.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


class LlamaCpp:
    """A model in llama.cpp that is called as the benchmark calls ours: greedy search over rows of equal length."""

    def __init__(self, path: Path, rows: int, tokens: int):
        import llama_cpp

        self.llama, self.rows, self.tokens = llama_cpp, rows, tokens
        self.silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.silent, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        given = llama_cpp.llama_context_default_params()
        given.n_ctx, given.n_seq_max, given.n_batch, given.n_ubatch = rows * tokens, rows, rows * tokens, 512
        given.kv_unified = True  # any row may take all of the cache
        given.n_threads = given.n_threads_batch = torch.get_num_threads()
        self.context = llama_cpp.llama_init_from_model(self.model, given)
        assert self.model and self.context, path
        self.words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(rows * tokens, 0, 1)

    def __call__(self, input_ids: torch.Tensor, **ignored: Any) -> torch.Tensor:
        """Process prompts [rows, tokens] on empty caches; return the last logits [rows, vocabulary]."""
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)
        return self._step(input_ids, 0)

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, streamer: Any = None, **ignored: Any) -> None:
        put = streamer.put if streamer is not None else lambda tokens: None
        put(input_ids)
        logits = self(input_ids)
        for step in range(max_new_tokens):
            chosen = logits.argmax(dim=-1, keepdim=True)
            put(chosen)
            if step + 1 < max_new_tokens:
                logits = self._step(chosen, input_ids.shape[1] + step)
        if streamer is not None:
            streamer.end()

    def _step(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Add tokens [rows, n] from `position` on to the caches; return the logits of the last ones."""
        batch, (rows, count) = self.batch, ids.shape
        wanted = []
        for row, of_row in enumerate(ids.tolist()):
            for i, token in enumerate(of_row):
                at = row * count + i
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position + i, 1
                batch.seq_id[at][0], batch.logits[at] = row, i + 1 == count
            wanted.append((row + 1) * count - 1)
        batch.n_tokens = rows * count
        if failed := self.llama.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with {failed} for {rows} x {count} tokens")
        found = [self.llama.llama_get_logits_ith(self.context, at) for at in wanted]
        kind = ctypes.POINTER(ctypes.c_float * self.words)
        return torch.stack([torch.frombuffer(ctypes.cast(one, kind).contents, dtype=torch.float32) for one in found])
