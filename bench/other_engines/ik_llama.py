"""ik_llama.cpp through the package `ik-llama-cpp-python`, as a contestant of bench/hub.py: its tensors are repacked as
they are loaded, and attention is fused."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch


class IkLlama:
    """A model that is called as bench/other_engines/llama.py calls its own: greedy search over rows of equal length."""

    def __init__(self, path: Path, rows: int, tokens: int):
        from ik_llama_cpp import _ctypes_api as api

        self.api, self.rows = api, rows
        api.llama_backend_init()
        model = api.llama_model_default_params()
        model.repack_tensors, model.use_mmap = True, False
        self.model = api.llama_model_load_from_file(str(path).encode(), model)
        given = api.llama_context_default_params()
        given.n_ctx, given.n_seq_max, given.n_batch, given.n_ubatch = rows * tokens, rows, rows * tokens, 512
        given.n_threads = given.n_threads_batch = torch.get_num_threads()
        given.flash_attn = True
        self.context = api.llama_init_from_model(self.model, given)
        assert self.model and self.context, path
        self.words = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(rows * tokens, 0, 1)

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int) -> None:
        self.api.llama_kv_cache_clear(self.context)
        logits = self._step(input_ids, 0)
        for step in range(max_new_tokens - 1):
            logits = self._step(logits.argmax(dim=-1, keepdim=True), input_ids.shape[1] + step)

    def _step(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Add tokens [rows, n] from `position` on to the caches; return the logits of the last ones."""
        batch, (rows, count) = self.batch, ids.shape
        for row, of_row in enumerate(ids.tolist()):
            for i, token in enumerate(of_row):
                at = row * count + i
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position + i, 1
                batch.seq_id[at][0], batch.logits[at] = row, i + 1 == count
        batch.n_tokens = rows * count
        if failed := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with {failed} for {rows} x {count} tokens")
        wanted = [(row + 1) * count - 1 for row in range(rows)]
        found = [self.api.llama_get_logits_ith(self.context, at) for at in wanted]
        kind = ctypes.POINTER(ctypes.c_float * self.words)
        values: list[Any] = [ctypes.cast(one, kind).contents for one in found]
        return torch.stack([torch.frombuffer(one, dtype=torch.float32) for one in values])
