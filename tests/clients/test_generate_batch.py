"""transformers' continuous batching (`generate_batch`, `transformers serve --continuous-batching`) gives the original's
tokens.

Requests of different lengths are packed into one row and read a paged cache: more requests than fit, shared prefixes,
sliding windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as t
from transformers.generation.continuous_batching import ContinuousBatchingManager, continuous_api

import infuse
from tests.models.families import BY_NAME
from tests.support.published import empty, publish

NEW = 10
PREFIX = [5, 6, 7, 8, 9, 10, 11, 12]
REQUESTS = [PREFIX, [5, 6, 7, 8, 3], [20], [7] * 17, [*PREFIX, 13, 4], [*PREFIX, 13, 5, 60, 61]]
ROOMY = dict(page_size=4, num_blocks=64, max_batch_tokens=64)
# 16 blocks of 4 tokens hold two or three of the requests at once; a batch takes a part of a prompt.
TIGHT = dict(page_size=4, num_blocks=16, max_batch_tokens=12)
FAMILIES = [
    "llama", "mistral", "qwen2-window", "gemma2", "gemma3", "gpt2", "gpt-neox", "opt", "cohere", "mixtral", "gpt-oss",
]  # fmt: skip


def settings(**more: Any) -> t.GenerationConfig:
    return t.GenerationConfig(
        **{"max_new_tokens": NEW, "eos_token_id": -1, "pad_token_id": 0, "do_sample": False, **more}
    )


def batch(model: Any, requests: Any = REQUESTS, room: dict[str, int] = ROOMY, **more: Any) -> list[list[int]]:
    """The new tokens of each request."""
    config = t.ContinuousBatchingConfig(**room)
    found = model.generate_batch(requests, generation_config=settings(**more), continuous_batching_config=config)
    assert len(found) == len(requests) * more.get("num_return_sequences", 1)
    assert not [one.error for one in found.values() if one.error]
    return [one.generated_tokens for one in found.values()]


def tokens_or_error(model: Any, room: dict[str, int]) -> list[list[int]] | str:
    try:
        return batch(model, room=room)
    except AssertionError as error:
        return str(error)


def alone(model: Any, ids: list[int]) -> list[int]:
    found = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return found[0, len(ids) :].tolist()


def replaced(name: str, **config: Any) -> Any:
    engine = infuse.init_inference(BY_NAME[name].make(), **{"dtype": "fp32", **config})
    assert "block" in {step.depth for step in engine.plan.steps}
    return engine


@pytest.fixture(autouse=True)
def garbage_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers searches for it twice in each batch: here, among all that the tests have imported, that takes longer
    than the batch.
    """
    monkeypatch.setattr(continuous_api, "gc", SimpleNamespace(collect=lambda: 0))


@pytest.fixture(scope="module")
def llama() -> Iterator[tuple[Any, Any]]:
    yield BY_NAME["llama"].make(), replaced("llama")


@pytest.mark.parametrize(("name", "room"), [("llama", ROOMY), *((name, TIGHT) for name in FAMILIES)])
def test_tokens(name: str, room: dict[str, int]) -> None:
    original, engine = BY_NAME[name].make(), replaced(name)
    wanted, found = tokens_or_error(original, room), tokens_or_error(engine.module, room)
    if isinstance(wanted, str):  # transformers 5.24 does not batch GPT-NeoX and OPT continuously itself
        wanted = found if isinstance(found, str) else [alone(original, ids) for ids in REQUESTS]
    assert found == wanted
    assert engine.module.config._attn_implementation == original.config._attn_implementation


def test_tokens_of_eager_attention(llama: Any) -> None:
    found = []
    for model in (llama[0], llama[1].module):
        model.set_attn_implementation("eager")
        found.append(batch(model, room=TIGHT))
        model.set_attn_implementation("sdpa")
    assert found[0] == found[1]


def test_generate_gives_the_same_tokens(llama: Any) -> None:
    """The engine passes `generate_batch` on; `generate` before and after it is not disturbed."""
    alone = []
    for ids in REQUESTS:
        alone.append(
            llama[1].generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist()
        )
    assert batch(llama[1]) == alone
    assert (
        llama[1].generate(torch.tensor([PREFIX]), max_new_tokens=NEW, do_sample=False)[0, len(PREFIX) :].tolist()
        == alone[0]
    )


@pytest.mark.parametrize("quant", ["int8", "int4:16", "fp8"])
def test_quantized(quant: str) -> None:
    """Against the same engine's `generate`, one prompt at a time."""
    engine = replaced("llama", quant=quant)
    alone = [
        engine.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist()
        for ids in REQUESTS
    ]
    assert batch(engine, room=TIGHT) == alone


def test_experts_in_their_own_4_bits(tmp_path: Path) -> None:
    """gpt-oss from its files, with the codes kept, beside transformers' model, which dequantizes them."""
    publish(tmp_path)
    original: Any = t.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    kept = {"weight": {"post_init_quant": {"experts": "mxfp4"}}}
    engine = infuse.init_inference(empty(tmp_path), checkpoint=str(tmp_path), dtype="fp32", quant=kept, progress=False)
    assert "block" in {step.depth for step in engine.plan.steps}
    assert "mxfp4 for mlp.experts.up and mlp.experts.down" in str(engine.plan)
    assert batch(engine.module, room=TIGHT) == batch(original, room=TIGHT)


def test_16_bits() -> None:
    """Tokens are those of the same engine's `generate`, up to where two scores are as good as equal."""
    engine = replaced("llama", dtype="bf16")
    for ids, tokens in zip(REQUESTS, batch(engine), strict=True):
        with torch.no_grad():
            scores = engine(torch.tensor([ids + tokens[:-1]])).logits[0, len(ids) - 1 :].float()
        assert (scores.max(-1).values - scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]).max() < 0.15


@pytest.mark.usefixtures("unread")
def test_layers_that_stay() -> None:
    """Our attention hook (layers without a spec) makes room for the paged one, and comes back."""
    from tests.models.unknown import HOOKED, hooked

    assert "Cohere2" in HOOKED
    engine = infuse.init_inference(hooked("Cohere2"), dtype="fp32")
    hook = engine.module.config._attn_implementation
    assert hook.startswith("infuse_")
    assert batch(engine, room=TIGHT) == batch(hooked("Cohere2"), room=TIGHT)
    assert engine.module.config._attn_implementation == hook


def test_several_answers_to_one_prompt(llama: Any) -> None:
    found = [batch(model, num_return_sequences=2, do_sample=True, top_k=1) for model in llama]
    assert found[0] == found[1]


def test_a_manager_streams_from_its_thread(llama: Any) -> None:
    """What `transformers serve` does: requests that come while others run, heard token by token; one is cancelled."""
    heard: list[dict[str, list[int]]] = []
    for model in (llama[0], llama[1].module):
        manager: ContinuousBatchingManager = model.init_continuous_batching(
            settings(), t.ContinuousBatchingConfig(**ROOMY)
        )
        manager.start()
        try:
            for number, ids in enumerate(REQUESTS):
                manager.add_request(ids, request_id=str(number), max_new_tokens=NEW, streaming=True)
            manager.add_request([9, 9], request_id="cancelled", max_new_tokens=10_000, streaming=True)
            manager.cancel_request("cancelled")
            done: dict[str, list[int]] = {}
            steps = 0
            while len(done) < len(REQUESTS):
                result = manager.get_result(timeout=20)
                assert result is not None and not result.error
                steps += 1
                if result.is_finished() and result.request_id != "cancelled":
                    done[result.request_id] = result.generated_tokens
            assert steps > len(REQUESTS)
        finally:
            manager.stop(block=True)
        heard.append(done)
    assert heard[0] == heard[1]


def test_a_manager_is_kept(llama: Any) -> None:
    for model in (llama[0], llama[1].module):
        for _ in range(2):
            config = t.ContinuousBatchingConfig(**ROOMY)
            model.generate_batch(REQUESTS, settings(), config, persistent_manager=True)
        model.destroy_cached_continuous_batching_manager()
    assert batch(llama[1]) == batch(llama[0])


# ---- what is refused, before anything runs


def test_max_out_tokens_caps_each_request() -> None:
    """Not the packed row, which holds more tokens than one request may."""
    engine = replaced("llama", max_out_tokens=20)
    assert sum(map(len, REQUESTS[:3])) + len(PREFIX) > 20 - NEW
    short = [ids for ids in REQUESTS if len(ids) + NEW <= 20]
    assert batch(engine, short) == batch(BY_NAME["llama"].make(), short)
    with pytest.raises(
        infuse.ContextLimitError, match="a request has 17 tokens and 10 new ones, but max_out_tokens=20"
    ):
        batch(engine)
    manager = engine.init_continuous_batching(settings(), t.ContinuousBatchingConfig(**ROOMY))
    with pytest.raises(infuse.ContextLimitError, match="a request has 17 tokens"):
        manager.add_request(REQUESTS[3])
    manager.add_requests([PREFIX])


@pytest.mark.parametrize(
    ("name", "attention"), [("bloom", "BloomAttention"), ("mpt", "MptAttention"), ("falcon-7b", "FalconAttention")]
)
def test_attention_without_a_paged_cache_is_refused(name: str, attention: str) -> None:
    """The original runs on, with a cache that its layers never see."""
    with pytest.raises(infuse.UnsupportedCall, match=f"paged cache; {attention} has one of its own"):
        batch(replaced(name))


@pytest.mark.parametrize("name", ["generate", "generate_batch", "init_continuous_batching"])
def test_after_destroy_each_method_says_so(name: str) -> None:
    engine = replaced("llama", max_out_tokens=20)
    module = engine.module
    engine.destroy()
    with pytest.raises(infuse.InfuseError, match="destroy"):
        getattr(module, name)([[3, 4, 5]])
