"""Which ranks share experts, and how: numbers, given groups, what is refused; dense layers beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infuse
from infuse.architectures.parts.experts import ExpertsShape, bind_experts
from infuse.architectures.ranks import experts_part
from infuse.layers.mixture.experts import Experts
from infuse.parallel.join import AskedRanks, join
from infuse.parallel.mesh import Mesh
from infuse.plan.experts import share_text
from infuse.weights.fill import fill_module
from infuse.weights.lazy import live
from tests.models.experts import LEFT, classes, made
from tests.models.families import BY_NAME
from tests.models.mixtures import OVER_RANKS
from tests.support.checkpoints import outputs
from tests.support.over_ranks import distance, engine_of
from tests.support.ranks import Ranks, same

TOLERANCE = 5e-5


@pytest.mark.parametrize(("tp", "ep", "world", "within"), [
    (1, 4, 4, False), (1, 2, 4, False), (2, 2, None, False), (2, 2, 8, False), (4, 1, 4, False), (1, 3, 3, False),
    (2, 2, 2, True), (4, 2, 4, True), (4, 4, 8, True),
])  # fmt: skip
def test_every_expert_slice_is_on_one_rank_and_neighbours_have_other_experts(
    tp: int, ep: int, world: int | None, within: bool
) -> None:
    """DeepSpeed's groups: blocks of neighbours share the experts; ranks `ep` apart have slices of the same ones."""
    mesh = AskedRanks(tp_size=tp, ep_size=ep).mesh(world)
    ranks = mesh.ranks()
    assert (mesh.within, mesh.size) == (within, tp if within else tp * ep)
    assert [rank.rank for rank in ranks] == list(range(mesh.size))
    assert [rank.ep_rank for rank in ranks] == [number % ep for number in range(mesh.size)]
    assert [rank.slice_rank for rank in ranks] == [number // ep for number in range(mesh.size)]
    assert mesh.slices * ep == mesh.size
    assert sorted(rank.tp_rank for rank in ranks if not rank.is_copy) == list(range(tp))


@pytest.mark.parametrize(("tp", "ep", "world", "text"), [
    (1, 4, 2, "moe.ep_size: found 4, more than the world of 2 ranks; possible: up to 2, or start 4 ranks: torchrun"),
    (1, 2, 3, "moe.ep_size: found 2 and tensor_parallel.tp_size 1, and a world of 3 ranks, which is no multiple of 2"),
    (2, 4, 4, "which is no multiple of 8; possible: start 8 ranks"),
    (2, 1, 3, "tensor_parallel.tp_size: found 2, which does not divide the world of 3 ranks"),
])  # fmt: skip
def test_numbers_that_do_not_fit_the_world(tp: int, ep: int, world: int, text: str) -> None:
    with pytest.raises(ValueError) as error:
        AskedRanks(tp_size=tp, ep_size=ep).mesh(world)
    assert isinstance(error.value, infuse.ConfigError) and text in str(error.value)


def groups(of: list[list[int]]) -> Any:
    """This rank's group among `of`, or the first where it is in none."""
    made = [dist.new_group(ranks) for ranks in of]
    return next((group for group, ranks in zip(made, of, strict=True) if dist.get_rank() in ranks), made[0])


def joined(ep: Any, tp: Any, ep_mp: Any, numbers: dict[str, int]) -> Mesh | str:
    given = {key: groups(of) for key, of in (("ep_group", ep), ("tp_group", tp), ("ep_mp_group", ep_mp)) if of}
    try:
        return join(AskedRanks(**numbers, **given), torch.device("cpu"), 60.0)[0]
    except infuse.ConfigError as error:
        return str(error)


LINES, COLUMNS, ALL = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize(("ep", "tp", "ep_mp", "numbers", "wanted"), [
    (LINES, None, None, {}, [Mesh(ep=2, ep_rank=rank % 2) for rank in range(4)]),
    (LINES, None, COLUMNS, {}, list(Mesh(tp=2, ep=2).ranks())),
    (LINES, COLUMNS, COLUMNS, {"ep_size": 2, "tp_size": 2}, list(Mesh(tp=2, ep=2).ranks())),
    (COLUMNS, LINES, None, {}, list(Mesh(tp=2, ep=2, tp_first=True).ranks())),
    (LINES, ALL, None, {}, list(Mesh(tp=4, ep=2, within=True).ranks())),
    (None, ALL, None, {"ep_size": 4}, list(Mesh(tp=4, ep=4, within=True).ranks())),
    (LINES, None, COLUMNS, {"ep_size": 4}, ["moe.ep_size: found 4; the given group has 2 ranks: leave it out"] * 4),
    (LINES, COLUMNS, LINES, {}, ["moe.ep_mp_group: has ranks [0, 1], tensor_parallel.tp_group has [0, 2]"]),
    (COLUMNS, ALL, None, {}, ["moe.ep_group: ranks [0, 2] are no block of neighbours"]),
    (LINES, None, None, {"tp_size": 2}, ["beside tensor_parallel.tp_size=2; give tensor_parallel.tp_group too"] * 4),
    ([[0, 1]], None, None, {}, [*Mesh(ep=2).ranks(), "moe.ep_group: this rank is not in the given group"]),
])  # fmt: skip
def test_given_groups_are_the_ranks(
    ep: Any, tp: Any, ep_mp: Any, numbers: dict[str, int], wanted: list[Mesh | str], ranks: Ranks
) -> None:
    found = ranks.run(4, joined, ep, tp, ep_mp, numbers)
    for one, other in zip(found, wanted, strict=False):
        assert other in one if isinstance(other, str) else one == other


def beside_experts(tp: int, ep: int) -> tuple[int, str, torch.Tensor]:
    """A model without experts, on ranks that would share them."""
    engine = engine_of("falcon-40b", tensor_parallel={"tp_size": tp}, ep_size=ep)
    return engine.group.dense.size, str(engine.plan), outputs(engine, "falcon-40b")


@pytest.mark.parametrize(("size", "tp", "ep", "dense"), [(4, 2, 2, 2), (2, 2, 2, 2), (2, 1, 2, 1)])
def test_layers_without_experts_are_sliced_by_tp_size_alone(
    size: int, tp: int, ep: int, dense: int, ranks: Ranks
) -> None:
    results = ranks.run(size, beside_experts, tp, ep)
    exact = outputs(BY_NAME["falcon-40b"].make(), "falcon-40b")
    assert same([found for _, _, found in results]) and distance(results[0][2], exact) < TOLERANCE
    assert all(found == dense and f"of {size}; experts on {ep}" in text for found, text, _ in results)


@pytest.mark.parametrize(
    ("counts", "slices", "text"),
    [
        ([32] * 4, 1, "32 of 128 experts on a rank"),
        ([64] * 2, 2, "64 of 128 experts on a rank in 2 slices"),
        ([8], 4, "each expert in 4 slices"),
        ([3, 3, 2], 1, "2 or 3 of 8 experts on a rank"),
    ],
)
def test_the_share_of_experts_in_words(counts: list[int], slices: int, text: str) -> None:
    assert share_text(counts, slices) == text


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"moe": {"num_experts": 8}}, "found 8; MixtralForCausalLM has 5 in model.layers.{0-2}.mlp.experts"),
        ({"moe_experts": [5, 4, 5]}, "found [5, 4, 5]; MixtralForCausalLM has 5 in"),
        ({"moe_experts": [5, 5, 5]}, None),
        ({"moe": {"num_experts": 5}}, None),
        ({"moe": {"num_experts": [1]}}, None),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_numbers_of_experts_are_the_models(keys: dict[str, Any], text: str | None) -> None:
    model = OVER_RANKS["mixtral"].make()
    if text is None:
        assert infuse.plan(model, dtype="fp32", **keys).model == "MixtralForCausalLM"
        return
    with pytest.raises(infuse.ConfigError) as error:
        infuse.plan(model, dtype="fp32", **keys)
    assert text in str(error.value)


def test_a_model_without_experts_is_told() -> None:
    model = BY_NAME["gpt2"].make()
    with pytest.raises(infuse.ConfigError, match="found 8; GPT2LMHeadModel has no experts that infuse knows"):
        infuse.plan(model, moe={"num_experts": 8})
    assert "moe.ep_size=2: no effect: the model has no experts" in str(infuse.plan(model, moe={"ep_size": 2}))


ALONE = (Mesh(ep=3), Mesh(tp=3), Mesh(tp=4, ep=2, within=True))


@pytest.mark.parametrize(("number", "name"), [*enumerate(sorted(set(classes()) - {*LEFT, "Inkling2Experts"}))])
def test_the_parts_of_ranks_add_up(number: int, name: str) -> None:
    """Of every class of experts, by two ways to share them: each value is on one rank, and the sum is the whole."""
    experts = made(name)
    bound = bind_experts(experts, nn.Module())
    x, index, weights = torch.randn(9, 24), torch.rand(9, 5).argsort(dim=1)[:, :2], torch.rand(9, 2)
    with torch.no_grad():
        wanted = experts(x, index, weights)
        for mesh in (Mesh(tp=2, ep=2, tp_first=number % 2 == 0), ALONE[number % len(ALONE)]):
            parts = [experts_part(bound.shape, bound.fills, rank, grain=1, multiples={}) for rank in mesh.ranks()]
            found, held = torch.zeros_like(wanted), 0
            for part in parts:
                assert isinstance(part.shape, ExpertsShape)
                new = Experts(part.shape, {}, {})
                fill_module(new, part.fills, live(experts), torch.float32, {})
                found += new(x, index, weights)
                held += sum(parameter.numel() for parameter in new.parameters())
            torch.testing.assert_close(found, wanted, rtol=0, atol=5e-5)
            assert held == sum(parameter.numel() for parameter in experts.parameters())


def test_more_ranks_than_experts_or_features() -> None:
    bound = bind_experts(made("MixtralExperts"), nn.Module())
    for mesh, why in (
        (Mesh(ep=6), "5 experts are too few for 6 ranks"),
        (Mesh(tp=13), "12 inner features are too few"),
    ):
        with pytest.raises(infuse.ground.errors.SpecMismatch, match=why):
            experts_part(bound.shape, bound.fills, mesh, grain=1, multiples={})
