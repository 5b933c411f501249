"""On an NVIDIA GPU: graphs beside the same calls without, streams, engines, sizes that change, memory that runs out."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import infuse
from infuse.graphs.capture import CudaBackend
from infuse.graphs.pool import BucketPool
from infuse.graphs.runner import GraphRunner, LocalGraph
from tests.models import encoder_decoders
from tests.models.families import BY_NAME, inputs
from tests.support.decoding import NAMES
from tests.support.on_gpu import CUDA, moved, needs_gpu
from tests.support.states import ONE_OF_EACH

pytestmark = needs_gpu


def llama(**changes: Any) -> nn.Module:
    return BY_NAME["llama"].make(tie_word_embeddings=False, **changes).to(CUDA)


def buckets(engine: Any) -> BucketPool:
    return engine.module._infuse.buckets


def test_graphs_against_eager() -> None:
    linear = nn.Linear(64, 64, device=CUDA)
    graphs = GraphRunner(lambda x, y: {"a": linear(x) + y, "b": [x.sum()]}, CudaBackend(CUDA))
    kept = []
    with torch.no_grad():
        for step in range(20):
            x, y = torch.randn(3 + step % 2, 64, device=CUDA), torch.randn(64, device=CUDA)
            kept.append((graphs(x, y), linear(x) + y, x.sum()))
    for found, a, b in kept:
        assert torch.equal(found["a"], a) and torch.equal(found["b"][0], b)
    assert graphs.captured() == 2


def test_a_failed_capture_leaves_the_device_usable() -> None:
    graphs = GraphRunner(lambda x: x * 2 if bool(x.sum() > 0) else x, CudaBackend(CUDA))
    x = torch.ones(4, device=CUDA)
    with pytest.warns(UserWarning, match=r"no CUDA graph could be captured.*test_graphs.py:\d+ in <lambda>"):
        for _ in range(5):
            assert torch.equal(graphs(x), x * 2)
    other = LocalGraph(nn.Linear(8, 8, device=CUDA))
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 8, device=CUDA)
            assert torch.equal(other(x), other.module(x))
    assert other._graphs is not None and other._graphs.captured() == 1


def test_streams_and_threads() -> None:
    graphs = GraphRunner(lambda x: torch.relu(x @ x) + 1, CudaBackend(CUDA))
    wrong: list[int] = []

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        generator = torch.Generator(CUDA).manual_seed(seed)
        with torch.cuda.stream(stream):
            for step in range(50):
                x = torch.randn(128, 128, device=CUDA, generator=generator)
                if not torch.allclose(graphs(x), torch.relu(x @ x) + 1, atol=1e-3):
                    wrong.append(step)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("name", NAMES)
def test_decode_steps_are_captured(name: str) -> None:
    untied = BY_NAME[name].make(tie_word_embeddings=False).to(CUDA)
    engine = infuse.init_inference(untied, dtype="fp32")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no CUDA graph.*")
        for padding in ("left", None):
            given = moved(inputs(BY_NAME[name], batch=3, padding=padding))
            engine.generate(**given, max_new_tokens=20)
    (bucket,) = buckets(engine).idle
    assert bucket.graphs.captured() and all(captured for _, captured, _ in bucket.graphs.standing())


def test_batches_lengths_and_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infuse.generate.install.PREPARED_TOKENS", 20)
    original, engine = llama(), infuse.init_inference(llama(), dtype="fp32")
    for batch, tokens, new in ((2, 5, 20), (1, 40, 9), (3, 3, 110), (1, 70, 12), (2, 5, 3), (3, 60, 60), (2, 5, 1)):
        given = moved(inputs(BY_NAME["llama"], batch=batch, tokens=tokens, padding="left"))
        assert torch.equal(engine.generate(**given, max_new_tokens=new), original.generate(**given, max_new_tokens=new))


@pytest.mark.parametrize("mode", [dict(num_beams=3, num_return_sequences=2), dict(no_repeat_ngram_size=2)], ids=str)
def test_loops_that_are_not_ours(mode: dict[str, Any]) -> None:
    """Beams are reordered under the graph; a processor needs the host."""
    original, engine = llama(), infuse.init_inference(llama(), dtype="fp32")
    for padding in ("left", None, "left"):
        given = moved(inputs(BY_NAME["llama"], batch=2, padding=padding))
        assert torch.equal(
            engine.generate(**given, **mode, max_new_tokens=40), original.generate(**given, **mode, max_new_tokens=40)
        )
    (bucket,) = buckets(engine).idle
    assert bucket.graphs.captured() == len(bucket.graphs.standing()) == 1


@pytest.mark.parametrize("name", ["bart", "m2m-100", "t5", "whisper", "vit-gpt2"])
def test_models_with_an_encoder(name: str) -> None:
    """One graph of the encoder, one of steps, one of steps of beams; texts of other lengths share them."""
    family = encoder_decoders.BY_NAME[name]
    original = encoder_decoders.made(family).to(CUDA)
    engine = infuse.init_inference(encoder_decoders.made(family).to(CUDA), dtype="fp32", enable_cuda_graph=True)
    for seed in range(4):
        given = moved(encoder_decoders.encoded(family, padding="right", seed=seed))
        for asked in ({}, dict(num_beams=3)):
            exact = original.generate(**given, **asked, max_new_tokens=20)
            assert torch.equal(engine.generate(**given, **asked, max_new_tokens=20), exact)
    assert sum(bucket.graphs.captured() for bucket in buckets(engine).idle) == 2
    assert engine.module.get_encoder().forward.graphs.captured() == 1


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "mamba2", "falcon_h1", "nemotron_h"])
def test_models_with_states(name: str) -> None:
    """One graph of a step, one of a step of beams; neither adds a token to the states twice."""
    original = BY_NAME[name].make().to(CUDA)
    engine = infuse.init_inference(BY_NAME[name].make().to(CUDA), dtype="fp32")
    for seed, padding in ((11, "left"), (12, None)):
        given = moved(inputs(BY_NAME[name], batch=3, padding=padding, seed=seed))
        for asked in ({}, dict(num_beams=3)):
            exact = original.generate(**given, **asked, max_new_tokens=20, pad_token_id=0)
            assert torch.equal(engine.generate(**given, **asked, max_new_tokens=20, pad_token_id=0), exact)
    assert sum(bucket.graphs.captured() for bucket in buckets(engine).idle) == 2


def test_hooks_inside_run_in_each_step() -> None:
    engine, heard = infuse.init_inference(llama(), dtype="fp32"), []
    handle = engine.module.model.layers[0].register_forward_hook(lambda *args: heard.append(1))
    given = moved(inputs(BY_NAME["llama"], batch=2))
    engine.generate(**given, max_new_tokens=9)
    assert len(heard) == 9 and not sum(bucket.graphs.captured() for bucket in buckets(engine).idle)
    handle.remove()
    engine.generate(**given, max_new_tokens=9)
    assert sum(bucket.graphs.captured() for bucket in buckets(engine).idle) == 1


def test_ends_and_streamers() -> None:
    class Collected:
        def __init__(self) -> None:
            self.tokens: list[list[int]] = []

        def put(self, value: Tensor) -> None:
            self.tokens.append(value.flatten().tolist())

        def end(self) -> None:
            self.tokens.append([])

    original, engine = llama(), infuse.init_inference(llama(), dtype="fp32")
    given = moved(inputs(BY_NAME["llama"], batch=3, padding="left"))
    rows = original.generate(**given, max_new_tokens=40)[:, 11:].tolist()
    for at in (0, 3, 11, 25):
        ends = [rows[0][at], rows[1][at // 2], rows[2][at]]
        ours, theirs = Collected(), Collected()
        exact = original.generate(**given, max_new_tokens=40, eos_token_id=ends, pad_token_id=0, streamer=theirs)
        assert torch.equal(
            engine.generate(**given, max_new_tokens=40, eos_token_id=ends, pad_token_id=0, streamer=ours), exact
        )
        assert ours.tokens == theirs.tokens


def test_two_engines_beside_each_other() -> None:
    names = ("llama", "gpt2")
    originals = [BY_NAME[name].make(tie_word_embeddings=False).to(CUDA) for name in names]
    engines = [
        infuse.init_inference(BY_NAME[name].make(tie_word_embeddings=False).to(CUDA), dtype="fp32") for name in names
    ]
    for _ in range(3):
        for name, original, engine in zip(names, originals, engines, strict=True):
            given = moved(inputs(BY_NAME[name], padding="left"))
            assert torch.equal(
                engine.generate(**given, max_new_tokens=20), original.generate(**given, max_new_tokens=20)
            )
    engines[0].destroy()
    assert torch.equal(
        engines[1].generate(**given, max_new_tokens=20), originals[1].generate(**given, max_new_tokens=20)
    )


def test_tensors_of_the_cpu_are_brought() -> None:
    original, engine = llama(), infuse.init_inference(llama(), dtype="fp32", enable_cuda_graph=True)
    given = inputs(BY_NAME["llama"], padding="left")
    exact = original.generate(**moved(given), max_new_tokens=12)
    assert torch.equal(engine.module.generate(**given, max_new_tokens=12), exact)
    with torch.no_grad():
        for _ in range(4):
            assert engine.module(**given).logits.device.type == "cuda"


def test_out_of_memory_is_told_and_over() -> None:
    """This process may have 256 MB more: a large batch does not fit, a small one does, before and after."""
    config = LlamaConfig(
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=1024,
        vocab_size=1000,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config).to(CUDA).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    engine = infuse.init_inference(model, dtype="bf16", enable_cuda_graph=True)
    small = torch.randint(3, 900, (2, 16), device=CUDA)
    exact = engine.generate(small, max_new_tokens=20)
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    large = torch.randint(3, 900, (256, 2048), device=CUDA)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (256 << 20)) / total)
    try:
        with pytest.raises(infuse.OutOfMemory, match="no memory left for this call.*Give fewer rows"):
            engine.generate(large, max_new_tokens=20)
        with pytest.raises(infuse.OutOfMemory), torch.no_grad():
            engine.module(large, use_cache=False)
        assert torch.equal(engine.generate(small, max_new_tokens=20), exact)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.generate(large[:8], max_new_tokens=4).shape == (8, 2052)
