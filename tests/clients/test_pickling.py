"""Pickling engines and their modules: pickle, torch.save, joblib, copy, and other processes."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import joblib
import pytest
import torch
import transformers
from torch import Tensor, nn

import infuse
from infuse import native
from infuse.cache.kv_cache import KVCache
from tests.models.families import BY_NAME, FAMILIES, RELATIVES, Family, inputs
from tests.support.copies import by_pickle, by_torch
from tests.support.forked import Program, start
from tests.support.ranks import Ranks
from tests.support.relatives import less

FORMATS = ["int8:16", "int8:16:a8", "int4:16:asymmetric", "fp8:16", "fp6:16"]
CASES = [
    *((family.name, None) for family in FAMILIES),
    *(("llama-bias", format) for format in FORMATS),
    *(("gpt2", format) for format in FORMATS[1::2]),
    *(("bert", format) for format in FORMATS[::2]),
]
# Of each kind of layer one, and each format.
SENT = [("llama-bias", format) for format in FORMATS]
SENT += [(name, None) for name in ("gemma2", "gpt2", "bloom", "falcon-40b", "gpt-neo", "bert", "albert", "clip", "vit")]
PROMPT = torch.tensor([[5, 7, 9, 11]])


def replaced(name: str, quant: str | None = None, **keys: Any) -> infuse.InferenceEngine:
    return infuse.init_inference(
        BY_NAME[name].make(), **{"dtype": torch.float32, "verify": "off", "progress": False, "quant": quant, **keys}
    )


@torch.no_grad()
def answers(model: nn.Module, family: Family) -> list[Tensor]:
    """Outputs of one call and, of a decoder, the tokens that it generates."""
    found = [value for value in model(**inputs(family)).values() if isinstance(value, Tensor)]
    if family.kind == "decoder":
        found.append(model.generate(PROMPT, max_new_tokens=4, do_sample=False))
    return found


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted) > 0
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def by_joblib(value: Any) -> Any:
    file = io.BytesIO()
    joblib.dump(value, file)
    file.seek(0)
    return joblib.load(file)


def by_cloudpickle(value: Any) -> Any:
    return pickle.loads(cloudpickle.dumps(value))


@pytest.mark.parametrize(("name", "quant"), less(RELATIVES, CASES))
def test_an_engine_comes_back(name: str, quant: str | None) -> None:
    engine = replaced(name, quant)
    wanted = answers(engine.module, BY_NAME[name])
    again = by_pickle(engine)
    assert type(again.module) is type(engine.module) and str(again.plan) == str(engine.plan)
    assert [type(module) for module in again.modules()] == [type(module) for module in engine.modules()]
    assert_equal(answers(again.module, BY_NAME[name]), wanted)


@pytest.mark.parametrize("way", [by_torch, by_joblib, by_cloudpickle, copy.deepcopy])
@pytest.mark.parametrize("part", ["engine", "module"])
def test_by_other_ways(way: Any, part: str) -> None:
    engine = replaced("llama-bias", "int4:16", max_out_tokens=20)
    wanted = answers(engine.module, BY_NAME["llama-bias"])
    again = way(engine if part == "engine" else engine.module)
    model = again.module if part == "engine" else again
    assert_equal(answers(model, BY_NAME["llama-bias"]), wanted)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight.data_ptr() == table.weight.data_ptr() != engine.module.get_output_embeddings().weight.data_ptr()
    with pytest.raises(infuse.ContextLimitError):
        model.generate(PROMPT, max_new_tokens=20)
    with pytest.raises(infuse.ContextLimitError):
        model(torch.ones(1, 21, dtype=torch.long))


def test_generate_has_our_cache_and_is_the_copys_own() -> None:
    engine = replaced("llama")
    again = by_pickle(engine.module)
    engine.destroy()
    found = again.generate(PROMPT, max_new_tokens=4, return_dict_in_generate=True, do_sample=False)
    assert isinstance(found.past_key_values, KVCache)


def test_state_dicts_of_what_comes_back() -> None:
    engine = replaced("llama", "int8:16")
    again = by_pickle(engine)
    with pytest.raises(infuse.UnsupportedCall, match="quantized"):
        again.module.state_dict()
    with infuse.dequantized(again), infuse.dequantized(engine):
        found, wanted = again.module.state_dict(), engine.module.state_dict()
    assert list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
    again.module.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in wanted.items()})
    assert not again.module(PROMPT).logits.any() and engine.module(PROMPT).logits.any()


calls: list[str] = []


def hear(module: nn.Module, args: Any) -> None:
    calls.append(type(module).__name__)


def test_hooks_and_their_handles_come_along() -> None:
    """Those of the user that were there before the swap, and those of profiles."""
    model = BY_NAME["llama"].make()
    handle = model.model.layers[1].self_attn.register_forward_pre_hook(hear)
    engine = infuse.init_inference(model, dtype=torch.float32, verify="off", progress=False)
    engine.profile_model_time()
    again, same_handle = by_pickle((engine, handle))
    calls.clear()
    again(PROMPT)
    assert calls == ["LlamaAttention"] and len(again.model_times()) == 1 and engine.model_times() == []
    same_handle.remove()
    again(PROMPT)
    assert calls == ["LlamaAttention"]
    engine(PROMPT)
    assert calls == ["LlamaAttention"] * 2


def glm() -> nn.Module:
    config = transformers.GlmConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        head_dim=8,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.GlmForCausalLM(config).eval()


def in_another_process(path: str, given: infuse.InferenceEngine, pipe: Any) -> None:
    """The answers of an engine that is an argument, those of the engines in a file, and the hooked attention of a layer
    that stays.
    """
    with open(path, "rb") as file:
        engines, hooked = pickle.load(file)
    found = [answers(engine.module, BY_NAME[name]) for (name, _), engine in zip(SENT, engines, strict=True)]
    pipe.send_bytes(pickle.dumps((answers(given.module, BY_NAME["llama-bias"]), found, hooked(PROMPT).logits)))


@pytest.mark.usefixtures("unread")
def test_another_process_reads_every_kind_of_layer(tmp_path: Path) -> None:
    given, engines = replaced("llama-bias", "int8:16"), [replaced(name, quant) for name, quant in SENT]
    hooked = infuse.init_inference(glm(), dtype=torch.float32, progress=False, quant="int8:16").module
    assert isinstance(native.kernels(), str) or hooked.config._attn_implementation == "infuse_cpu"
    (tmp_path / "engines").write_bytes(pickle.dumps((engines, hooked)))
    ours, theirs = multiprocessing.Pipe()
    process = start(in_another_process, str(tmp_path / "engines"), given, theirs)
    theirs.close()
    of_given, found, logits = pickle.loads(ours.recv_bytes())
    process.join()
    assert_equal(of_given, answers(given.module, BY_NAME["llama-bias"]))
    assert torch.equal(logits, hooked(PROMPT).logits)
    for case, engine, theirs_found in zip(SENT, engines, found, strict=True):
        wanted = answers(engine.module, BY_NAME[case[0]])
        # Another process may have another number of threads, and PyTorch's own products then add in another order.
        assert all(
            torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(theirs_found, wanted, strict=True)
        ), case


@pytest.mark.skipif(isinstance(native.kernels(), str), reason="there are no kernels")
def test_a_process_without_the_kernels_refuses(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(pickle.dumps(replaced("llama", "int8:16").module))
    code = "import pickle; pickle.load(open('model', 'rb'))"
    program = Program("-c", code, folder=tmp_path, environment={**os.environ, "INFUSE_CPU_ISA": "off"})
    _, err = program.communicate()
    said = err.strip().splitlines()[-1]
    assert program.returncode == 1
    assert said.startswith("infuse.ground.errors.UnsupportedCall: this model was pickled with the 'cpu' kernels of ")
    assert "which do not run here: INFUSE_CPU_ISA=off. Load it where they run; or" in said


def by_rank() -> list[str]:
    engine = replaced("llama", tensor_parallel={"tp_size": 2})
    said = []
    for way in (by_pickle, by_torch, by_joblib, by_cloudpickle):
        for part in (engine, engine.module, engine.module.model.layers[0]):
            with pytest.raises(TypeError) as raised:
                way(part)
            said.append(str(raised.value))
    assert copy.deepcopy(engine.module).model.layers[0].reduce.func.__self__ is engine.group
    return said


def test_ranks_refuse_by_name(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks.run(2, by_rank)):
        assert all(
            f"a model that 2 ranks share cannot be pickled: rank {rank} holds a part of it" in text for text in said
        ), said
        assert all("save_mp_checkpoint_path=FOLDER" in text for text in said)
