"""Matrices in act-order: their codes are kept, sorted by group, and linears take inputs in that order."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import infuse
from infuse import native
from infuse.layers.joined_linear import JoinedLinear
from infuse.layers.linear import Linear, QuantizedLinear
from tests.models.families import BY_NAME
from tests.support.checkpoints import on_meta
from tests.support.quantized_files import BY_CASE, ROOM, gptq, llama, publish, write
from tests.support.quantized_models import loaded, logits, with_values
from tests.support.ranks import Ranks

NAME = "gptq-4-asym-v1-order"
POLICY = {"LlamaDecoderLayer": ("o_proj", "down_proj")}
FORMAT = "int4:32:asymmetric:f16 in act-order"


def publish_orders(folder: Path, seed_of: dict[str, int | None], name: str = NAME) -> dict[str, Tensor]:
    """Write a Llama in GPTQ. `seed_of`: part of a name → seed of its order (None: not in act-order); others: 3."""
    config = BY_CASE[name].config
    state, stored = llama().state_dict(), {}
    for key, tensor in list(state.items()):
        if not key.endswith("_proj.weight"):
            stored[key] = tensor
            continue
        seed = next((seed for part, seed in seed_of.items() if part in key), 3)
        leaves, state[key] = gptq(
            tensor, bits=config["bits"], sym=config["sym"], order=seed is not None, seed=seed or 0
        )
        stored |= {f"{key.removesuffix('weight')}{leaf}": one for leaf, one in leaves.items()}
    write(folder, stored, config)
    return state


def close(given: Tensor, wanted: Tensor) -> bool:
    return bool((given - wanted).norm() < 1e-4 * wanted.norm())


def codes_of(engine: infuse.InferenceEngine) -> dict[str, Tensor]:
    """The buffers of all quantized linears."""
    quantized = {path: part for path, part in engine.module.named_modules() if isinstance(part, QuantizedLinear)}
    return {f"{path}.{name}": one for path, part in quantized.items() for name, one in part.named_buffers()}


@pytest.mark.parametrize("name", [NAME, "gptq-8-sym-v1-order", "compressed-w4a16-order"])
def test_codes_are_kept(name: str, tmp_path: Path) -> None:
    exact = logits(with_values(llama(), publish(tmp_path, BY_CASE[name], llama())))
    engine = loaded(tmp_path)
    layer = engine.module.model.layers[0]
    assert all(
        type(part) is QuantizedLinear for part in (*layer.modules(),) if isinstance(part, (Linear, JoinedLinear))
    )
    assert [part.is_ordered for part in layer.modules() if isinstance(part, QuantizedLinear)] == [True] * 4
    assert f"{BY_CASE[name].format} in act-order, taken as it is, " in str(engine.plan)
    assert "dequantized" not in str(engine.plan)
    assert close(logits(engine), exact)
    held = {id(one): one.nbytes for one in (*engine.module.parameters(), *engine.module.buffers())}
    assert sum(held.values()) == engine.plan.after_bytes
    keys: dict[str, Any] = dict(dtype="fp32", replace_with_kernel_inject=True)
    dry = infuse.plan(on_meta("llama", **ROOM), checkpoint=str(tmp_path), **keys)
    assert dry.steps == engine.plan.steps and dry.after_bytes == engine.plan.after_bytes


ORDERS: dict[str, tuple[dict[str, int | None], int, int]] = {
    "alike": ({}, 1, 1),
    "v differs": ({"v_proj": 4}, 2, 1),
    "all differ": ({"q_proj": 1, "k_proj": 2, "up_proj": 5}, 3, 2),
    "k is not in act-order": ({"k_proj": None}, 3, 1),
    "gate is not in act-order": ({"gate_proj": None}, 1, 2),
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_matrices_of_several_orders_are_kept_apart(name: str, dtype: str, tmp_path: Path) -> None:
    seeds, qkv, up = ORDERS[name]
    exact = logits(with_values(llama(), publish_orders(tmp_path, seeds)))
    engine = loaded(tmp_path, dtype=dtype)
    counts = [0, 0]
    for path, part in engine.module.model.layers[1].named_modules():
        if isinstance(part, QuantizedLinear):
            counts[0] += ".qkv" in path
            counts[1] += ".up" in path
    assert counts == [qkv, up]
    given = logits(engine).float()
    assert (given - exact).norm() < (1e-4 if dtype == "fp32" else 0.05) * exact.norm()
    sizes = {id(one): one.nbytes for one in (*engine.module.parameters(), *engine.module.buffers())}
    assert sum(sizes.values()) == engine.plan.after_bytes


def test_steps_with_a_cache_give_what_prompts_give(tmp_path: Path) -> None:
    """The one call in C++ declines, so steps run part by part."""
    state = publish_orders(tmp_path, {"v_proj": 4})
    engine, ids = loaded(tmp_path), torch.arange(5, 13)[None]
    wanted = with_values(llama(), state).generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(engine.generate(ids, max_new_tokens=8, do_sample=False), wanted)
    assert "act-order" in engine.module.model.layers[0].extra_repr()


def test_values_that_are_held_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = logits(with_values(llama(), publish_orders(tmp_path, {"v_proj": 4})))
    monkeypatch.setattr(native, "kernels", lambda: "not built here")
    engine = loaded(tmp_path)
    assert close(logits(engine), exact) and close(logits(copy.deepcopy(engine.module)), exact)
    sizes = {id(one): one.nbytes for one in (*engine.module.parameters(), *engine.module.buffers())}
    assert sum(sizes.values()) == engine.plan.after_bytes


def test_linears_alone(tmp_path: Path) -> None:
    exact = logits(with_values(llama(), publish_orders(tmp_path, {"v_proj": 4})))
    engine = loaded(tmp_path, replace_with_kernel_inject=False)
    made = [part for part in engine.module.modules() if isinstance(part, QuantizedLinear)]
    assert len(made) == 7 * len(engine.module.model.layers) and all(part.is_ordered for part in made)
    assert close(logits(engine), exact)


def test_another_format_that_is_asked_for(tmp_path: Path) -> None:
    """Values are quantized anew, also to the format of the codes, whose groups then are neighbours."""
    exact = logits(with_values(llama(), publish_orders(tmp_path, {})))
    by_name = {"weight": {"post_init_quant": {"_proj": "int8"}}}
    for format, quant in (("int8", "int8"), ("int8", by_name), ("int4:32:asymmetric:f16", "int4:32:asymmetric:f16")):
        engine = loaded(tmp_path, quant=quant)
        assert not any(part.is_ordered for part in engine.module.modules() if isinstance(part, QuantizedLinear))
        assert f"stored in {FORMAT} and become {format}" in str(engine.plan)
        assert (logits(engine) - exact).norm() < 0.3 * exact.norm()


@pytest.mark.parametrize("seeds", [{}, {"v_proj": 4}], ids=["alike", "v differs"])
@pytest.mark.parametrize("as_block", [True, False])
def test_shards_keep_orders(seeds: dict[str, int | None], as_block: bool, tmp_path: Path) -> None:
    publish_orders(tmp_path / "files", seeds)
    keys: dict[str, Any] = {"replace_with_kernel_inject": as_block}
    saved = loaded(tmp_path / "files", save_mp_checkpoint_path=str(tmp_path / "shards"), **keys)
    again = loaded(tmp_path / "shards", **keys)
    before, after = codes_of(saved), codes_of(again)
    assert before.keys() == after.keys() and sum(name.endswith(".order") for name in before) > 3
    assert all(torch.equal(after[name], one) for name, one in before.items())
    assert torch.equal(logits(again), logits(saved))


def test_state_dicts_have_inputs_in_their_own_order(tmp_path: Path) -> None:
    state = publish_orders(tmp_path, {"v_proj": 4}, "gptq-8-sym-v1-order")
    engine = loaded(tmp_path)
    with infuse.dequantized(engine.module):
        given = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    assert given.keys() == state.keys()
    assert all(torch.allclose(given[name], state[name], rtol=1e-5, atol=1e-7) for name in state)
    before = logits(engine)
    other = {name: tensor * 2 if "v_proj" in name else tensor for name, tensor in given.items()}
    engine.module.load_state_dict(other)
    exact = logits(with_values(llama(), other))
    assert (logits(engine) - before).norm() > 0.1 * exact.norm()
    assert (logits(engine) - exact).norm() < 0.01 * exact.norm()


def of_rank(folder: str) -> tuple[Tensor, str, list[bool]]:
    engine = loaded(folder, tensor_parallel={"tp_size": 2})
    made = [part.is_ordered for part in engine.module.modules() if isinstance(part, QuantizedLinear)]
    return logits(engine), str(engine.plan), made


def of_saved(folders: tuple[str, str]) -> list[Tensor]:
    keys: dict[str, Any] = {"tensor_parallel": {"tp_size": 2}}
    saved = loaded(folders[0], save_mp_checkpoint_path=folders[1], **keys)
    return [logits(saved), logits(loaded(folders[1], **keys))]


def test_ranks_keep_matrices_that_they_cut_by_outputs(tmp_path: Path, ranks: Ranks) -> None:
    exact = logits(with_values(llama(), publish_orders(tmp_path / "files", {"v_proj": 4})))
    layers = len(llama().model.layers)
    for given, plan, made in ranks.run(2, of_rank, str(tmp_path / "files")):
        assert close(given, exact)
        assert made == [True] * 3 * layers  # q and k, v, gate and up
        assert f"though stored in {FORMAT}: ranks share its inputs" in plan
    for saved, again in ranks.run(2, of_saved, (str(tmp_path / "files"), str(tmp_path / "shards"))):
        assert torch.equal(saved, again) and close(saved, exact)
    assert close(logits(loaded(tmp_path / "shards")), exact)  # one rank joins the parts of two


def of_split(folders: tuple[str, str]) -> tuple[list[Tensor], list[bool]]:
    keys: dict[str, Any] = {"tensor_parallel": {"tp_size": 2}, "injection_policy": POLICY}
    saved = loaded(folders[0], save_mp_checkpoint_path=folders[1], **keys)
    again = loaded(folders[1], **keys)
    made = [part.is_ordered for part in again.module.modules() if isinstance(part, QuantizedLinear)]
    return [logits(saved), logits(again)], made


def test_layers_whose_linears_ranks_share(tmp_path: Path, ranks: Ranks) -> None:
    """They keep their forward: each linear has a place in the index of our shards."""
    exact = logits(with_values(llama(), publish_orders(tmp_path / "files", {"v_proj": 4})))
    for (saved, again), made in ranks.run(2, of_split, (str(tmp_path / "files"), str(tmp_path / "shards"))):
        assert close(saved, exact) and torch.equal(saved, again)
        assert made == [True] * 5 * len(llama().model.layers)
    assert close(logits(loaded(tmp_path / "shards")), exact)


def test_shards_of_one_rank_are_not_cut_along_inputs(tmp_path: Path, ranks: Ranks) -> None:
    publish_orders(tmp_path / "files", {})
    loaded(tmp_path / "files", save_mp_checkpoint_path=str(tmp_path / "shards"))
    for told in ranks.run(2, refusal, str(tmp_path / "shards")):
        assert "down.weight: saved in act-order, so its inputs cannot be shared" in told


def refusal(folder: str) -> str:
    with pytest.raises(infuse.CheckpointError) as refused:
        loaded(folder, tensor_parallel={"tp_size": 2})
    return str(refused.value)


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_experts_become_values(family: str, tmp_path: Path) -> None:
    changes = dict(hidden_size=128, intermediate_size=128)
    if family == "qwen3-moe":
        changes["moe_intermediate_size"] = 128
    BY_NAME[family].make(**changes).save_pretrained(tmp_path / "plain")
    values, stored = load_file(tmp_path / "plain" / "model.safetensors"), {}
    for key, tensor in list(values.items()):
        path = key.removesuffix(".weight")
        if path.endswith(("_proj", ".w1", ".w2", ".w3")):
            leaves, values[key] = gptq(tensor, sym=False, order=True, seed=len(stored))
            stored |= {f"{path}.{leaf}": one for leaf, one in leaves.items()}
        else:
            stored[key] = tensor
    write(tmp_path / "coded", stored, BY_CASE[NAME].config)
    write(tmp_path / "exact", values, None)
    engine = loaded(tmp_path / "coded", family, changes=changes)
    told = "codes become plain values (parts of one matrix are stored in act-order, each in its own)"
    assert told in str(engine.plan)
    assert "refused" not in str(engine.plan)  # as it would be with codes that are taken in another order
    assert any(part.is_ordered for part in engine.module.modules() if isinstance(part, QuantizedLinear))
    assert close(logits(engine), logits(loaded(tmp_path / "exact", family, changes=changes)))


def test_heads_that_share_their_weight_with_a_table_become_values(tmp_path: Path) -> None:
    """Rows of a table are looked up in the codes as they are."""
    make = partial(llama, tie_word_embeddings=True)
    state, stored = make().state_dict(), {}
    del state["lm_head.weight"]
    leaves, state["model.embed_tokens.weight"] = gptq(state["model.embed_tokens.weight"] + 0.01, sym=False, order=True)
    stored = {key: tensor for key, tensor in state.items() if "embed_tokens" not in key}
    stored |= {f"lm_head.{leaf}": one for leaf, one in leaves.items()}
    write(tmp_path, stored, BY_CASE[NAME].config)
    engine = infuse.init_inference(
        on_meta("llama", **ROOM, tie_word_embeddings=True), checkpoint=str(tmp_path), dtype="fp32", progress=False
    )
    assert not any(part.is_ordered for part in engine.module.modules() if isinstance(part, QuantizedLinear))
    assert f"2 matrices are stored in {FORMAT} and become float32" in str(engine.plan)
    exact = with_values(make(), {**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    assert close(logits(engine), logits(exact))
