"""Faults that users of comparable libraries reported, in the words of the reports: engines, memory, threads,
environments.

What is compared with is always transformers' own model with the same weights. More of them in test_faults.py.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_NAME, inputs
from side_by_side import assert_close, ids, injected, logits
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

import infuse
from infuse.layers.linear import QuantizedLinear

ROOT = Path(__file__).parent.parent


def tensors(model: nn.Module) -> list[Tensor]:
    """All parameters and buffers, those that are not saved included."""
    return [*model.parameters(), *model.buffers()]


def resident_bytes(model: nn.Module) -> int:
    """Bytes of the storages behind a model's parameters and buffers, shared ones once: what memory it really holds."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors(model)}
    return sum(storages.values())


# ---- two engines in one process ----


def test_two_engines_in_one_process() -> None:
    """Of one class, with different weights, sizes and configurations; in turns, and after one of them is gone."""
    small, large = (
        BY_NAME["llama"].make(seed=1),
        BY_NAME["llama"].make(seed=2, num_key_value_heads=4, num_hidden_layers=2),
    )
    first = injected(BY_NAME["llama"].make(seed=1), max_out_tokens=30)
    second = injected(BY_NAME["llama"].make(seed=2, num_key_value_heads=4, num_hidden_layers=2))
    untouched = BY_NAME["llama"].make(seed=1)  # of the same class, made afterwards, not injected
    for _ in range(2):
        assert_close(logits(first, ids(2, 9)), logits(small, ids(2, 9)))
        assert_close(logits(second, ids(2, 40)), logits(large, ids(2, 40)))
        assert torch.equal(logits(untouched, ids(2, 40)), logits(small, ids(2, 40)))
    assert "generate" not in vars(untouched) and type(untouched.model.layers[0]) is type(small.model.layers[0])
    first.destroy()
    assert torch.equal(second.generate(ids(2, 9), max_new_tokens=6), large.generate(ids(2, 9), max_new_tokens=6))


# ---- dtype=torch.int8 raises or saves nothing ----


WIDE: dict[str, dict[str, Any]] = {
    "llama": dict(hidden_size=128, intermediate_size=256),
    "gpt2": dict(n_embd=128),
    "bloom": dict(hidden_size=128),
}


@pytest.mark.parametrize("name", WIDE)
def test_int8_works_and_saves_memory(name: str) -> None:
    """int8 weights with floating-point activations need fewer resident bytes than the original or than that dtype."""
    original, model = BY_NAME[name].make(**WIDE[name]), BY_NAME[name].make(**WIDE[name])
    before = resident_bytes(model)
    engine = infuse.init_inference(model, dtype=torch.int8)
    quantized = [module for module in engine.module.modules() if isinstance(module, QuantizedLinear)]
    assert len(quantized) >= 12 and all(module.data.dtype == torch.int8 for module in quantized)
    assert engine.plan.dtype.is_floating_point
    unquantized = injected(BY_NAME[name].make(**WIDE[name]), dtype=engine.plan.dtype)
    assert resident_bytes(engine.module) < 0.7 * resident_bytes(unquantized.module) <= 0.7 * before
    exact, found = logits(original, ids(2, 9)), logits(engine, ids(2, 9)).float()
    error = (found - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < error < 0.1
    assert engine.generate(ids(2, 9), max_new_tokens=4).shape == (2, 13)


# ---- one CUDA graph for one shape; outputs overwritten ----


def test_cuda_graph_where_there_is_no_cuda_costs_nothing_but_a_word() -> None:
    model = BY_NAME["llama"].make()
    with pytest.warns(UserWarning, match="enable_cuda_graph: no effect here: a CPU has no CUDA graphs"):
        engine = infuse.init_inference(model, dtype="fp32", enable_cuda_graph=True, device="cpu")
    original = BY_NAME["llama"].make()
    kept = [(given, logits(engine, given)) for given in (ids(1, 5), ids(3, 5), ids(1, 8), ids(1, 5, seed=2))]
    for given, found in kept:
        assert_close(found, logits(original, given))


# ---- KV heads, fused QKV, uneven heads ----


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", dict(num_attention_heads=3, num_key_value_heads=1)),
        ("llama", dict(num_attention_heads=6, num_key_value_heads=3, head_dim=10)),
        ("phi3", dict(num_attention_heads=6, num_key_value_heads=2)),
        ("gpt2", dict(n_head=3, n_inner=50)),
        ("bigcode", dict(n_head=6)),
        ("gpt-neox", dict(num_attention_heads=3)),
        ("bloom", dict(n_head=3)),
        ("falcon-40b", dict(num_attention_heads=6, num_kv_heads=3)),
    ],
)
def test_uneven_heads_and_every_packing_of_qkv(name: str, changes: dict[str, Any]) -> None:
    original, engine = BY_NAME[name].make(**changes), injected(BY_NAME[name].make(**changes))
    given = inputs(BY_NAME[name], padding="left")
    real = given["attention_mask"].bool()
    assert_close(logits(engine, **given)[real], logits(original, **given)[real])
    assert torch.equal(engine.generate(**given, max_new_tokens=4), original.generate(**given, max_new_tokens=4))


# ---- meta tensors left, tied weights lost ----


@pytest.mark.parametrize("name", ["llama", "llama-bias", "gpt2", "gptj", "bloom", "albert", "modernbert", "clip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_nothing_is_left_on_meta(name: str, dtype: torch.dtype) -> None:
    engine = infuse.init_inference(BY_NAME[name].make(), dtype=dtype)
    assert {tensor.device.type for tensor in tensors(engine.module)} == {"cpu"}
    logits_or_states = engine(**inputs(BY_NAME[name]))[0]
    assert bool(torch.isfinite(logits_or_states).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-bias", "gpt2", "bloom", "opt"])
def test_tied_weights_stay_tied(name: str, dtype: torch.dtype) -> None:
    engine = infuse.init_inference(BY_NAME[name].make(), dtype=dtype)
    assert engine.get_output_embeddings().weight is engine.get_input_embeddings().weight


# ---- concurrent calls corrupt each other ----


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results of `calls`, each made several times in a thread of its own, all of them at once."""
    results: list[list[Any]] = [[] for _ in calls]
    together = threading.Barrier(len(calls))

    def work(call: Callable[[], Any], out: list[Any]) -> None:
        together.wait()
        for _ in range(4):
            out.append(call())

    threads = [threading.Thread(target=work, args=pair) for pair in zip(calls, results, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(out) == 4 for out in results), "a thread died"
    return results


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_concurrent_calls_equal_those_one_after_another(name: str) -> None:
    original, engine = BY_NAME[name].make(), injected(BY_NAME[name].make())
    prompts = [ids(1, 7), ids(3, 4, seed=2), ids(2, 12, seed=3)]
    calls: list[Callable[[], Any]] = [lambda given=given: engine.generate(given, max_new_tokens=6) for given in prompts]
    calls.append(lambda: logits(engine, prompts[1]))
    calls.append(lambda: engine(prompts[0], output_hidden_states=True).hidden_states[1].detach())
    found = in_threads(calls)
    for given, answers in zip(prompts, found, strict=False):
        exact = original.generate(given, max_new_tokens=6)
        assert all(torch.equal(answer, exact) for answer in answers)
    for answer in found[3]:
        assert_close(answer, logits(original, prompts[1]))
    for state in found[4]:
        assert_close(state, original(prompts[0], output_hidden_states=True).hidden_states[1].detach())


# ---- broken by a release of transformers: what is not known is left alone, with a reason ----


def test_a_layer_that_gained_a_parameter_is_left_alone() -> None:
    """As a release of transformers may add one: the layer stays the model's own, and so do the results."""
    original, model = BY_NAME["llama"].make(), BY_NAME["llama"].make()
    for each in (original, model):
        each.model.layers[1].register_parameter("gate_of_a_later_release", nn.Parameter(torch.ones(3)))
    engine = infuse.init_inference(model, dtype="fp32")
    assert [step.path for step in engine.plan.steps if step.depth == "block"] == ["model.layers.0", "model.layers.2"]
    assert "gate_of_a_later_release" in dict(model.model.layers[1].named_parameters())
    assert any(left.path == "model.layers.1" and "gate_of_a_later_release" in left.why for left in engine.plan.left)
    assert_close(logits(engine, ids(2, 9)), logits(original, ids(2, 9)))
    assert torch.equal(engine.generate(ids(2, 9), max_new_tokens=5), original.generate(ids(2, 9), max_new_tokens=5))


# ---- config that lies ----

LIES: dict[str, tuple[str, dict[str, Any]]] = {
    "more heads": ("llama", dict(num_attention_heads=8)),
    "fewer key heads": ("llama", dict(num_key_value_heads=1)),
    "another width": ("llama", dict(hidden_size=64, intermediate_size=100)),
    "another eps": ("llama", dict(rms_norm_eps=0.5)),
    "another activation": ("llama", dict(hidden_act="relu")),
    "other heads of GPT-2": ("gpt2", dict(n_head=2)),
    "another activation of GPT-2": ("gpt2", dict(activation_function="relu")),
    "one key head of Falcon": ("falcon-40b", dict(num_kv_heads=1)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_config_that_lies_does_no_harm(lie: str) -> None:
    """What the config says changed after the model was built: the results are the module's, whatever was decided."""
    name, claims = LIES[lie]
    original, model = BY_NAME[name].make(), BY_NAME[name].make()
    for each in (original, model):
        each.config = copy.deepcopy(each.config)
        for key, value in claims.items():
            setattr(each.config, key, value)
        for module in each.modules():
            if hasattr(module, "config"):
                module.config = each.config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that little or nothing is accelerated then
        engine = infuse.init_inference(model, dtype="fp32")
    given, past = ids(2, 9), [DynamicCache(), DynamicCache()]
    for start, stop in ((0, 8), (8, 9)):
        exact, found = (
            logits(m, given[:, start:stop], past_key_values=p) for m, p in zip((original, engine), past, strict=True)
        )
        assert_close(found, exact)


# ---- no compiler, wrong compiler ----


def test_without_a_compiler() -> None:
    """An empty PATH, and a compiler that cannot be run: infuse is imported, and a model injected, all the same."""
    code = "\n".join(
        (
            "import torch, transformers, infuse",
            "small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, "
            "vocab_size=16)",
            "model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).eval()",
            "exact = model(torch.arange(6)[None]).logits.detach()",
            "engine = infuse.init_inference(model, dtype='fp32')",
            "assert [step.depth for step in engine.plan.steps][:1] == ['block']",
            "assert torch.allclose(engine(torch.arange(6)[None]).logits, exact, atol=1e-5)",
        )
    )
    environment = {**os.environ, "PATH": "", "CC": "/nowhere/cc", "CXX": "/nowhere/c++", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
