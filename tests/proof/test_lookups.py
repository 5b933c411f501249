"""Lookups out of range are errors of one call, also where the device could not report them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import infuse
from infuse.ground.lookups import CheckedLookups, lookups_in_range
from tests.models.families import BY_NAME, inputs

TABLE = torch.arange(12.0).view(4, 3)
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda index: torch.nn.functional.embedding(index, TABLE),
    "index_select": lambda index: TABLE.index_select(0, index),
    "gather": lambda index: TABLE.gather(0, index[:, None]),
    "scatter": lambda index: TABLE.scatter(0, index[:, None], 1.0),
    "index_copy": lambda index: TABLE.clone().index_copy_(0, index, TABLE[: len(index)]),
    "index": lambda index: TABLE[index],
    "index of a later axis": lambda index: TABLE.t()[:, index],
    "index after a mask": lambda index: TABLE.t()[torch.tensor([True, False, True]), index],
    "index_put": lambda index: TABLE.clone().index_put_((index,), torch.ones(())),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_index_out_of_range(name: str) -> None:
    inside = torch.tensor([0, 3])
    with CheckedLookups():
        assert torch.equal(WRONG[name](inside), WRONG[name](inside))
        for wrong in (4, -5, -(1 << 62)):
            with pytest.raises(IndexError, match=rf"index {wrong} is out of range for 4 entries"):
                WRONG[name](torch.tensor([0, wrong]))
        if "index" in name and "_" not in name:
            assert torch.equal(WRONG[name](torch.tensor([-4, 1])), WRONG[name](torch.tensor([0, 1])))
        assert TABLE[torch.tensor([], dtype=torch.long)].shape == (0, 3)


def test_a_cpu_needs_no_checks() -> None:
    with lookups_in_range(torch.device("cpu")) as checked:
        assert checked is None
    with pytest.raises(IndexError, match="for 4 entries"), lookups_in_range(torch.device("cuda")):
        WRONG["embedding"](torch.tensor([4]))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_proofs_under_checks(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT reads positions off a mask of two texts, which has none: its session is left out, here and on a CPU alike."""
    family, entered = BY_NAME[name], []

    def made() -> infuse.InferenceEngine:
        model = family.make()
        if compiled:  # as transformers compiles its flex attention
            embed = model.get_input_embeddings()
            embed.forward = torch.compile(embed.forward, backend="eager", fullgraph=True)
        return infuse.init_inference(model, dtype=torch.float32)

    def checked(device: torch.device) -> CheckedLookups:
        entered.append(device)
        return CheckedLookups()

    plain = made()
    monkeypatch.setattr("infuse.apply.apply.lookups_in_range", checked)
    engine = made()
    assert entered and "block" in str(plain.plan) and str(engine.plan) == str(plain.plan)
    given = inputs(family)
    with torch.no_grad():
        assert torch.equal(engine(**given).logits, plain(**given).logits)
