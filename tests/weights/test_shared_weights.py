"""A parameter, a module or an MLP that several layers share stays shared: the same memory, and a change of one is a
change of all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import infuse
from infuse.layers.linear import Linear
from infuse.plan.bytes import parameter_bytes
from tests.models.encoder_decoders import BY_NAME as PAIRS
from tests.models.encoder_decoders import made
from tests.models.families import BY_NAME, inputs
from tests.models.unknown import make
from tests.support.over_ranks import TOLERANCE, distance
from tests.support.ranks import Ranks, same

LLAMA = BY_NAME["llama"]


def mlp(model: Any) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


def linear(model: Any) -> None:
    model.model.layers[1].mlp.down_proj = model.model.layers[0].mlp.down_proj


def parameter(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight


def norm(model: Any) -> None:
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm


def all_matrices(model: Any) -> None:
    first, second = model.model.layers[0], model.model.layers[1]
    for name, module in first.named_modules():
        if isinstance(module, nn.Linear):
            second.get_submodule(name).weight = module.weight


def layer(model: Any) -> None:
    model.model.layers[2] = model.model.layers[0]


def llama(share: Callable[[Any], None]) -> Any:
    model = LLAMA.make()
    share(model)
    return model


def outputs(model: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs(LLAMA), use_cache=False).logits  # layers that are one would share a place in the cache


WAYS = [mlp, linear, parameter, norm, all_matrices, layer]


@pytest.mark.parametrize("keys", [{}, {"dtype": "bf16"}, {"quant": "int8:4"}], ids=str)
@pytest.mark.parametrize("share", WAYS)
def test_what_is_shared_stays_shared(share: Callable[[Any], None], keys: dict) -> None:
    """Sharing saves the same part of the memory as before, by each kind of weight; the plan knows; the values are
    right.
    """
    keys = {"dtype": "fp32", "progress": False, **keys}
    model, unshared = llama(share), LLAMA.make()
    wanted, saved = outputs(model), parameter_bytes(model) / parameter_bytes(unshared)
    decided = infuse.plan(model, **keys)
    engine = infuse.init_inference(model, **keys)
    infuse.init_inference(unshared, **keys)
    assert decided.after_bytes == parameter_bytes(model) == engine.plan.after_bytes
    assert not [note for note in engine.plan.notes if "shared" in note]
    if "quant" not in keys:
        assert parameter_bytes(model) / parameter_bytes(unshared) == pytest.approx(saved, rel=0.01)
    elif share is not norm:
        assert parameter_bytes(model) < parameter_bytes(unshared)
    if keys["dtype"] == "fp32":
        alone = infuse.init_inference(untied(llama(share)), **keys)
        assert distance(outputs(model), wanted if "quant" not in keys else outputs(alone)) < TOLERANCE


def untied(model: Any) -> Any:
    """The same values, nothing shared."""
    fresh = LLAMA.make()
    fresh.load_state_dict(model.state_dict())
    return fresh


@pytest.mark.parametrize("quant", [None, "int8:4"])
def test_a_change_of_one_is_a_change_of_all(quant: str | None) -> None:
    model = llama(mlp)
    infuse.init_inference(model, dtype="fp32", quant=quant, progress=False)
    first, second = (
        list(part.state_dict(keep_vars=True).values())
        for part in (model.model.layers[0].mlp, model.model.layers[1].mlp)
    )
    assert first and [tensor.data_ptr() for tensor in first] == [tensor.data_ptr() for tensor in second]


def test_what_cannot_stay_shared_is_told() -> None:
    """The gates of two MLPs are one, but each is merged with an `up` of its own."""
    model: Any = LLAMA.make()
    model.model.layers[1].mlp.gate_proj.weight = model.model.layers[0].mlp.gate_proj.weight
    plan = infuse.plan(model, dtype="fp32")
    assert [note for note in plan.notes if "model.layers.0.mlp.gate_proj.weight" in note and "not shared now" in note]
    wanted = outputs(model)
    with pytest.warns(UserWarning, match="not shared now"):
        engine = infuse.init_inference(model, dtype="fp32", progress=False)
    assert parameter_bytes(model) == plan.after_bytes and distance(outputs(engine), wanted) < TOLERANCE


def test_a_head_that_shares_a_table_of_another_kind_is_replaced_and_not_quantized() -> None:
    """T5Gemma 2's embedding has a row of its own for one token: the head keeps its plain weight, in our linear."""
    exact = made(PAIRS["t5gemma2"])
    model = copy.deepcopy(exact)
    table = model.get_input_embeddings().weight
    engine = infuse.init_inference(model, dtype="fp32", quant="int8:16", progress=False)
    head = engine.module.get_output_embeddings()
    assert isinstance(head, Linear) and head.weight.data_ptr() == table.data_ptr()
    assert "which is no plain embedding, so it is not quantized" in str(engine.plan)
    x = torch.randn(2, 48)
    assert torch.allclose(head(x), exact.get_output_embeddings()(x), atol=1e-5)


def test_tied_models_are_told_nothing() -> None:
    for name in ("llama", "gpt2", "bert", "t5", "albert"):
        if name in BY_NAME:
            for keys in ({}, {"quant": "int8:4"}):
                assert not [
                    note for note in infuse.plan(BY_NAME[name].make(), dtype="fp32", **keys).notes if "shared" in note
                ]


@pytest.mark.parametrize("quant", [None, "int8:4"])
def test_a_checkpoint_is_read_into_what_is_shared(quant: str | None, tmp_path: Path) -> None:
    untied(llama(mlp)).save_pretrained(tmp_path)
    model = llama(mlp)
    infuse.init_inference(model, checkpoint=str(tmp_path), dtype="fp32", quant=quant, progress=False)
    live = llama(mlp)
    infuse.init_inference(live, dtype="fp32", quant=quant, progress=False)
    assert torch.equal(outputs(model), outputs(live)) and parameter_bytes(model) == parameter_bytes(live)


# ---- ranks ----


def on_ranks(quant: str | None) -> tuple[Tensor, bool]:
    model = llama(mlp)
    infuse.init_inference(
        model, dtype="fp32", quant=quant, progress=False, tensor_parallel={"tp_size": dist.get_world_size()}
    )
    first, second = (part.mlp.state_dict(keep_vars=True).values() for part in model.model.layers[:2])
    return outputs(model), all(a.data_ptr() == b.data_ptr() for a, b in zip(first, second, strict=True))


def test_ranks_share_their_parts(ranks: Ranks) -> None:
    results = ranks.run(2, on_ranks, None)
    assert same([found for found, _ in results]) and all(shares for _, shares in results)
    assert distance(results[0][0], outputs(llama(mlp))) < TOLERANCE


def unknown(share: bool) -> Any:
    model: Any = make("grouped")
    if share:
        model.layers[1].down = model.layers[0].down
        model.layers.append(make("grouped").layers[0])  # which ranks can share, and which is traced on meta
    return model


def unknown_on_ranks() -> tuple[Tensor, list[str], list[str]]:
    model = unknown(share=True)
    engine = infuse.init_inference(
        model, dtype="fp32", progress=False, tensor_parallel={"tp_size": dist.get_world_size()}
    )
    with torch.no_grad():
        found = engine(torch.arange(14).view(2, 7))
    return (
        found,
        [left.why for left in engine.plan.left],
        [step.path for step in engine.plan.steps if step.depth == "split"],
    )


def test_a_layer_without_a_spec_that_shares_a_linear_stays_whole(ranks: Ranks) -> None:
    """Else the second layer would cut what the first has cut."""
    model = unknown(share=True)
    with torch.no_grad():
        wanted = model(torch.arange(14).view(2, 7))
    for found, left, split in ranks.run(2, unknown_on_ranks):
        assert split == ["layers.2"]
        assert distance(found, wanted) < TOLERANCE
        assert any("it shares weights with layers.1.down" in why for why in left)
