"""Shards of layers without a spec that ranks share: quantized or not, read by as many ranks from their own files, and
by other numbers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import infuse
from infuse.plan.kinds import SPLIT
from infuse.weights.names import placed
from tests.models.families import BY_NAME, inputs
from tests.models.unknown import continued, make, t5
from tests.support.checkpoints import bart_by_rank, changed, state_of
from tests.support.over_ranks import distance
from tests.support.ranks import Ranks, same

TOLERANCE = 5e-5  # over the root mean square of what the engine gave that saved
SPLITTING = ["blocks", "per head", "per group", "grouped", "one key head"]
# Groups of 4 inputs are whole in every part of these models, whatever the number of ranks.
INT8, INT4 = {"quant": "int8:4"}, {"quant": "int4:4:asymmetric"}
POLICIES: dict[str, Any] = {
    "gpt2": {"GPT2Block": ("c_proj",)}, "roberta": {"RobertaLayer": ("output.dense",)},
    "t5": {"T5Block": ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")},
}  # fmt: skip


def original(name: str) -> Any:
    return t5() if name == "t5" else BY_NAME[name].make() if name in BY_NAME else make(name)


def engine_of(name: str, source: str | None, keys: dict[str, Any], model: Any = None) -> infuse.InferenceEngine:
    """From the live model, or from the shards in `source` into one on meta."""
    given: dict[str, Any] = {"progress": False, "injection_policy": POLICIES.get(name), **keys}
    if dist.is_initialized() and dist.get_world_size() > 1:
        given["tensor_parallel"] = {
            **keys.get("tensor_parallel", {}),
            "tp_size": dist.get_world_size(),
            "timeout_s": 30,
        }
    if source is None:
        return infuse.init_inference(original(name), **{"dtype": "fp32", **given})
    if model is None:
        with torch.device("meta"):
            model = original(name)
    return infuse.init_inference(model, checkpoint=source, **given)


def answers(model: Any, name: str) -> tuple[Tensor, Tensor]:
    """Logits, and greedy tokens of models that make them."""
    if name in ("t5", *BY_NAME):
        ids = torch.arange(5, 15)[None]
        given = {"input_ids": ids, "decoder_input_ids": ids} if name == "t5" else inputs(BY_NAME[name])
        with torch.no_grad():
            logits = model(**given).logits
        return logits[:, -1:], logits[:, -1:].argmax(-1)
    return continued(model)


def saved_by_rank(name: str, folder: str, keys: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return answers(engine_of(name, None, {"save_mp_checkpoint_path": folder, **keys}), name)


def read_by_rank(name: str, folder: str, wanted: dict[str, Any]) -> tuple[Tensor, Tensor, list[str], str, int]:
    """Answers, what differs by a bit from what is made of the live model, the plan, and how many layers ranks share."""
    engine, fresh = engine_of(name, folder, {}), engine_of(name, None, wanted)
    assert not [n for n, x in (*engine.module.named_parameters(), *engine.module.named_buffers()) if x.is_meta]
    state, made = placed(engine.module), placed(fresh.module)
    differing = [
        key
        for key in {**state, **made}
        if key not in state or key not in made or not torch.equal(state[key], made[key])
    ]
    return *answers(engine, name), differing, str(engine.plan), sum(step.depth == SPLIT for step in engine.plan.steps)


def on(size: int, ranks: Ranks, function: Any, *args: Any) -> list[Any]:
    return ranks.run(size, function, *args) if size > 1 else [function(*args)]


def saved(name: str, folder: Path, size: int, ranks: Ranks, keys: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What the engine gives whose shards are in `folder` now."""
    found = on(size, ranks, saved_by_rank, name, str(folder), keys)
    assert same([logits for logits, _ in found]) and len(list(folder.glob("*.safetensors"))) == size
    return found[0]


# Each layer in half of the ways, with both formats; each way with several layers: a third of these with --variants.
WAYS = [(2, 2, INT8), (2, 2, INT4), (2, 1, INT8), (2, 4, INT4), (4, 2, INT8), (3, 4, INT4)]


@pytest.mark.parametrize(
    ("name", "writers", "readers", "keys"),
    [
        pytest.param(name, *WAYS[(layer + turn) % 6], marks=[pytest.mark.variants] if turn == 1 else [])
        for layer, name in enumerate(SPLITTING)
        for turn in (0, 1, 3)
    ],
    ids=str,
)
def test_quantized_layers_that_ranks_share(
    name: str, writers: int, readers: int, keys: dict[str, Any], tmp_path: Path, ranks: Ranks
) -> None:
    """Quantized and then cut is, bit for bit, cut and then quantized; a linear beside them, which ranks have whole, is
    as it was saved.
    """
    logits, tokens = saved(name, tmp_path, writers, ranks, keys)
    for found, others, differing, plan, shared in on(readers, ranks, read_by_rank, name, str(tmp_path), keys):
        assert distance(found, logits) < TOLERANCE and torch.equal(others, tokens)
        assert "refused" not in plan and shared == (2 if readers > 1 else 0)
        assert not [key for key in differing if "token_gate" not in key]
        gates = {key.rpartition(".")[2] for key in differing}
        assert not gates or (readers == 1 and {"weight", "data", "scale"} <= gates)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "writers", "readers"),
    [("t5", 2, 2), ("t5", 2, 1), ("t5", 2, 4), ("gpt2", 2, 2), ("gpt2", 2, 1), ("gpt2", 2, 4), ("roberta", 2, 1)],
)
def test_tables_of_heads_transposed_weights_and_layers_that_have_a_spec(
    name: str, writers: int, readers: int, tmp_path: Path, ranks: Ranks
) -> None:
    """With one rank a layer that a policy split is a block, of linears that were saved one by one: they stay so."""
    logits, _ = saved(name, tmp_path, writers, ranks, INT8)
    for found, _, _, plan, shared in on(readers, ranks, read_by_rank, name, str(tmp_path), INT8):
        assert distance(found, logits) < TOLERANCE and "refused" not in plan
        assert (shared > 0) == (readers > 1)


@pytest.mark.parametrize("name", ["blocks", "gpt2"])
def test_what_did_not_fit_then_stays_plain(name: str, tmp_path: Path, ranks: Ranks) -> None:
    """With two ranks the matrix that closes the attention has 24 inputs, which groups of 16 do not divide."""
    logits, _ = saved(name, tmp_path, 2, ranks, {"quant": "int8:16"})
    found, *_, plan, _ = on(1, ranks, read_by_rank, name, str(tmp_path), {"quant": "int8:16"})[0]
    assert distance(found, logits) < TOLERANCE and "not replaced then" in plan
    assert all(
        distance(one[0], logits) < TOLERANCE
        for one in on(2, ranks, read_by_rank, name, str(tmp_path), {"quant": "int8:16"})
    )


@pytest.mark.parametrize("keys", [{}, INT4], ids=str)
@pytest.mark.parametrize("name", ["per group"])
def test_what_one_rank_saved_is_whole_on_each_rank(
    name: str, keys: dict[str, Any], tmp_path: Path, ranks: Ranks
) -> None:
    """How ranks share it was never proven; the plan says what to do."""
    logits, tokens = saved(name, tmp_path, 1, ranks, keys)
    for found, others, _, plan, shared in on(2, ranks, read_by_rank, name, str(tmp_path), keys):
        assert distance(found, logits) < TOLERANCE and torch.equal(others, tokens) and shared == 0
        assert "as it was saved: whole on each rank" in plan and "load the original checkpoint, or shard" in plan


@pytest.mark.parametrize(("quant", "writers", "readers"), [
    ("int8:row", 2, 4), ("int4:row", 2, 4), ("fp8", 2, 4), ("fp6:row", 2, 4),
    ("int8:groups=4", 2, 1), ("int8:groups=4", 2, 4), ("int8:groups=4", 3, 2), ("int8:groups=4", 4, 3),
])  # fmt: skip
def test_other_formats(quant: str, writers: int, readers: int, tmp_path: Path, ranks: Ranks) -> None:
    keys = {"quant": quant}
    logits, tokens = saved("per head", tmp_path, writers, ranks, keys)
    for found, others, *_, plan, shared in on(readers, ranks, read_by_rank, "per head", str(tmp_path), keys):
        assert distance(found, logits) < TOLERANCE and torch.equal(others, tokens)
        assert "refused" not in plan and shared == (2 if readers > 1 else 0)


@pytest.mark.parametrize("readers", [1, 2, pytest.param(4, marks=pytest.mark.variants)])
def test_in_bfloat16(readers: int, tmp_path: Path, ranks: Ranks) -> None:
    for writers in (1, 2):
        logits, _ = saved("per group", tmp_path / str(writers), writers, ranks, {**INT4, "dtype": "bf16"})
        for found, *_, plan, _ in on(
            readers, ranks, read_by_rank, "per group", str(tmp_path / str(writers)), {**INT4, "dtype": "bf16"}
        ):
            assert (
                found.dtype == torch.bfloat16
                and distance(found.float(), logits.float()) < 0.1
                and "refused" not in plan
            )


def test_encoders_and_decoders(tmp_path: Path, ranks: Ranks) -> None:
    first = ranks.run(2, bart_by_rank, str(tmp_path), True, INT8)
    for size in (2, 3):
        found = ranks.run(size, bart_by_rank, str(tmp_path), False, {"dtype": None})
        assert all(distance(one, first[0]) < TOLERANCE for one in found)


# ---- at the same degree ----


def read_alone(name: str, folder: str) -> tuple[Tensor, Tensor]:
    """Where no other rank's file is; nothing is quantized, nothing is proven."""
    import infuse.apply.mismatch
    from infuse.quant.integer import IntegerFormat

    own = Path(folder) / f"only-{dist.get_rank()}"
    own.mkdir()
    for file in ("infuse.json", f"rank-{dist.get_rank():02d}-of-02.safetensors"):
        shutil.copyfile(Path(folder) / file, own / file)
    quantize, proven = IntegerFormat.quantize, infuse.apply.mismatch.proven

    def refuse(self: Any, weight: Tensor) -> Any:
        assert weight.is_meta, "quantized again"
        return quantize(self, weight)

    def never(*args: Any) -> Any:
        raise AssertionError("proven again")

    IntegerFormat.quantize, infuse.apply.mismatch.proven = refuse, never  # type: ignore[method-assign]
    try:
        return answers(engine_of(name, str(own), {}), name)
    finally:
        IntegerFormat.quantize, infuse.apply.mismatch.proven = quantize, proven  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("name", "keys"),
    [(name, INT8) for name in (*SPLITTING, "t5", "gpt2")]
    + [(name, {}) for name in ("blocks", "grouped", "t5")]
    + [(name, {"quant": "int8:16"}) for name in ("per head", "per group", "gpt2")],
    ids=str,
)
def test_each_rank_reads_its_own_file_alone(name: str, keys: dict[str, Any], tmp_path: Path, ranks: Ranks) -> None:
    logits, tokens = saved(name, tmp_path, 2, ranks, keys)
    for found, others in ranks.run(2, read_alone, name, str(tmp_path)):
        assert torch.equal(found, logits) and torch.equal(others, tokens)


@pytest.mark.parametrize("name", ["blocks", "grouped"])
def test_shards_of_shards_are_the_same_bytes(name: str, tmp_path: Path, ranks: Ranks) -> None:
    saved(name, tmp_path / "one", 2, ranks, INT4)
    ranks.run(2, saved_again, name, str(tmp_path / "one"), str(tmp_path / "two"))
    for file in ("infuse.json", "rank-00-of-02.safetensors", "rank-01-of-02.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def saved_again(name: str, source: str, folder: str) -> None:
    engine_of(name, source, {"save_mp_checkpoint_path": folder}, original(name))


@pytest.mark.parametrize(("writers", "readers"), [(2, 2), (2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("name", ["fixed", "normed"])
def test_layers_that_cannot_be_shared_are_whole_in_each_file(
    name: str, writers: int, readers: int, tmp_path: Path, ranks: Ranks
) -> None:
    logits, tokens = saved(name, tmp_path, writers, ranks, INT8)
    for found, others, differing, plan, shared in on(readers, ranks, read_by_rank, name, str(tmp_path), INT8):
        assert not differing and distance(found, logits) < TOLERANCE and torch.equal(others, tokens) and shared == 0
        assert ("as it was saved: whole on each rank" in plan) == (readers > 1)


# ---- what is refused ----


def refused_by_rank(name: str, folder: str) -> tuple[str, bool]:
    """What is told, and whether the model is as it was."""
    model = original(name)
    before, held = state_of(model), {path: set(vars(module)) for path, module in model.named_modules()}
    logits, _ = answers(model, name)
    with pytest.raises(infuse.InfuseError) as caught:
        engine_of(name, folder, {}, model)
    unharmed = state_of(model) == before and {path: set(vars(module)) for path, module in model.named_modules()} == held
    return str(caught.value), unharmed and torch.equal(answers(model, name)[0], logits)


def test_what_would_cut_a_group_is_refused_with_its_numbers(tmp_path: Path, ranks: Ranks) -> None:
    saved(
        "blocks", tmp_path, 2, ranks, {"quant": "int8:8"}
    )  # 24 inputs on each rank, of which four ranks would have 12
    for told, unharmed in ranks.run(4, refused_by_rank, "blocks", str(tmp_path)):
        assert unharmed and "layers.1.proj.weight: int8:8: groups of 8 inputs would be cut at [" in told
        assert "possible: a multiple of 8" in told and "load the original checkpoint" in told


@pytest.mark.parametrize("quant", ["int8:row", "fp8"])
def test_scales_of_rows_of_several_ranks_are_not_merged(quant: str, tmp_path: Path, ranks: Ranks) -> None:
    saved("grouped", tmp_path, 2, ranks, {"quant": quant})
    told, unharmed = refused_by_rank("grouped", str(tmp_path))
    assert unharmed and f"layers.0.o.weight: {quant}: inputs of 2 ranks, each with a scale for its rows" in told


def test_several_interpretations_are_refused(tmp_path: Path, ranks: Ranks) -> None:
    """They come to the same on the ranks that saved, and not on those that read."""
    saved("per head", tmp_path, 2, ranks, INT8)
    interpretations = json.loads((tmp_path / "infuse.json").read_text())["interpretations"]
    plan = infuse.plan(make("per head"), dtype="fp32", tensor_parallel={"tp_size": 2})
    step = next(step for step in plan.steps if step.path == "layers.0")
    names = [name for one in (step, *step.others) for name in one.whole.interpretations]  # type: ignore[union-attr]
    assert set(interpretations["layers.0"]) < set(names)
    changed(tmp_path, interpretations=dict.fromkeys(interpretations, names))
    for told, unharmed in ranks.run(2, refused_by_rank, "per head", str(tmp_path)):
        assert unharmed and "or not one alone for so many ranks: layers.0, layers.1; load the original" in told


def test_an_index_of_other_interpretations_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    saved("blocks", tmp_path, 2, ranks, INT8)
    index = json.loads((tmp_path / "infuse.json").read_text())
    assert index["interpretations"].keys() == {"layers.0", "layers.1"}
    assert index["steps"].keys() == {
        "head",
        *(f"layers.{layer}.{name}" for layer in (0, 1) for name in ("qkv", "proj", "up", "down")),
    }
    changed(tmp_path, interpretations={"layers.0": ["0"], "layers.1": ["0"]})
    for told, unharmed in ranks.run(2, refused_by_rank, "blocks", str(tmp_path)):
        assert (
            unharmed and "2 layers that ranks share were saved in an interpretation that is not this version's" in told
        )
    changed(tmp_path, interpretations=["layers.0"])
    assert all(
        "corrupt" in told and unharmed for told, unharmed in ranks.run(2, refused_by_rank, "blocks", str(tmp_path))
    )
    changed(tmp_path, interpretations=index["interpretations"])
    for told, unharmed in ranks.run(2, refused_by_rank, "grouped", str(tmp_path)):
        assert unharmed and "not this model's" in told
