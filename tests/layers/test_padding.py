"""Padded batches of encoders: every row equals the original's; with `skip_padding`, linears see only real tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import infuse
from infuse.layers.block import Block, real_tokens
from tests.models.families import BY_NAME, FAMILIES
from tests.support.side_by_side import pair

LENGTHS = (3, 11, 7)
ENCODERS = [family.name for family in FAMILIES if family.kind == "encoder"]
SIDES, ATTENTIONS = ("right", "left"), ("sdpa", "eager")
# Both sides and both attentions of each encoder, in turn one with the other.
PADDED = [
    (name, SIDES[turn], ATTENTIONS[(family + turn) % 2] if BY_NAME[name].model._supports_sdpa else "eager")
    for family, name in enumerate(ENCODERS)
    for turn in range(2)
]
TOLERANCE = 2e-5


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Token ids and their mask, [3, 11] each, with rows of LENGTHS."""
    ids = torch.randint(3, 96, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    places = torch.arange(max(LENGTHS))
    lengths = torch.tensor(LENGTHS)[:, None]
    mask = places < lengths if side == "right" else places >= max(LENGTHS) - lengths
    return ids, mask.long()


def rows_seen(model: nn.Module, ids: Tensor, mask: Tensor) -> tuple[list[int], Tensor]:
    """How many rows the first linear of each MLP was given, and the model's output."""
    seen: list[int] = []
    for block in model.modules():
        if isinstance(block, Block):
            block.mlp.up.register_forward_hook(
                lambda module, args, output: seen.append(args[0].numel() // args[0].shape[-1])
            )
    with torch.no_grad():
        return seen, model(input_ids=ids, attention_mask=mask)[0]


def error(model: nn.Module, original: nn.Module, ids: Tensor, mask: Tensor) -> float:
    """How far the model is from the original over all rows, padding included; relative to the largest value."""
    with torch.no_grad():
        found, wanted = (one(input_ids=ids, attention_mask=mask)[0] for one in (model, original))
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(("name", "side", "attention"), PADDED)
def test_rows_of_padding_are_the_originals(name: str, side: str, attention: str) -> None:
    original = BY_NAME[name].make(attn_implementation=attention)
    model = infuse.init_inference(BY_NAME[name].make(attn_implementation=attention), dtype="fp32").module
    ids, mask = padded(side)
    assert error(model, original, ids, mask) < TOLERANCE
    mask[1] = 0  # a sequence of padding alone
    assert error(model, original, ids, mask) < TOLERANCE


def test_hidden_states_and_attentions_of_padding_are_the_originals() -> None:
    ids, mask = padded("right")
    with torch.no_grad():
        wanted, found = (one(ids, attention_mask=mask, output_hidden_states=True) for one in pair("bert"))
    for a, b in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert (a - b).abs().max() < TOLERANCE * b.abs().max()


@pytest.mark.parametrize(
    ("name", "side", "attention"),
    [
        ("bert", "right", "sdpa"),
        ("bert", "left", "eager"),
        ("distilbert", "right", "eager"),
        ("distilbert", "left", "sdpa"),
    ],
)
def test_padding_is_not_computed_where_it_is_to_be_skipped(name: str, side: str, attention: str) -> None:
    original = BY_NAME[name].make(attn_implementation=attention)
    model = infuse.init_inference(
        BY_NAME[name].make(attn_implementation=attention), dtype="fp32", skip_padding=True
    ).module
    ids, mask = padded(side)
    seen, found = rows_seen(model, ids, mask)
    firsts = int((mask[:, 0] == 0).sum())  # of padded rows: what a pooler takes
    assert seen and set(seen) == {int(mask.sum()) + firsts}
    for row in range(len(LENGTHS)):
        with torch.no_grad():
            exact = original(input_ids=ids[row : row + 1], attention_mask=mask[row : row + 1])[0][0]
        real = mask[row].bool()
        assert (found[row][real] - exact[real]).abs().max() < TOLERANCE * exact.abs().max()


def test_a_layer_that_skips_padding_returns_zeros_there() -> None:
    model = infuse.init_inference(BY_NAME["albert"].make(), dtype="fp32", skip_padding=True).module
    ids, mask = padded("right")
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask)[0]
    assert torch.equal(hidden.any(-1), mask.bool())


def test_the_plan_says_whether_padding_is_skipped() -> None:
    plans = {skip: infuse.plan(BY_NAME["bert"].make(), dtype="fp32", skip_padding=skip) for skip in (False, True)}
    assert "padding" not in str(plans[False])
    assert "rows of padding are skipped: their output is zero" in str(plans[True])
    assert plans[False].digest() != plans[True].digest(), "ranks must skip the same rows"
    causal = str(infuse.plan(BY_NAME["llama"].make(), dtype="fp32", skip_padding=True))
    assert "rows of padding are skipped" not in causal and "skip_padding: no effect here" in causal


def test_skipped_padding_is_a_choice_of_each_run_not_of_the_shards(tmp_path: Path) -> None:
    infuse.init_inference(
        BY_NAME["bert"].make(), dtype="fp32", skip_padding=True, save_mp_checkpoint_path=str(tmp_path)
    )
    ids, mask = padded("right")
    for skip in (False, True):
        with torch.device("meta"):
            empty = BY_NAME["bert"].make()
        loaded = infuse.init_inference(empty, checkpoint=str(tmp_path), skip_padding=skip)
        assert ("rows of padding are skipped" in str(loaded.plan)) == skip
        seen, _ = rows_seen(loaded.module, ids, mask)
        assert set(seen) == {int(mask.sum()) if skip else ids.numel()}


@pytest.mark.parametrize("value", ["maybe", 3, None])
def test_skip_padding_is_a_bool(value: object) -> None:
    with pytest.raises(infuse.ConfigError, match="skip_padding"):
        infuse.plan(BY_NAME["bert"].make(), skip_padding=value)


def test_batches_without_padding_are_left_as_they_are() -> None:
    model = infuse.init_inference(BY_NAME["bert"].make(), dtype="fp32", skip_padding=True).module
    ids, mask = padded("right")
    seen, _ = rows_seen(model, ids, torch.ones_like(mask))
    assert set(seen) == {ids.numel()}


def test_what_is_a_mask_of_padding_alone() -> None:
    hidden = torch.zeros(2, 8, 4)
    keep = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    assert real_tokens(keep, False, hidden) is None  # nothing to save
    keep[1, :, :, 4:] = False
    found = real_tokens(keep, False, hidden)
    assert found is not None and found.rows.tolist() == [*range(8), *range(8, 12)]
    inverted = real_tokens(~keep, True, hidden)
    assert inverted is not None and torch.equal(inverted.rows, found.rows)
    added = real_tokens(torch.zeros(2, 1, 8, 8).masked_fill(~keep, torch.finfo(torch.float32).min), False, hidden)
    assert added is not None and torch.equal(added.rows, found.rows)
    window = keep.tril()
    assert real_tokens(window, False, hidden) is None  # tokens see different ones
    assert real_tokens(None, False, hidden) is None
    assert real_tokens(keep[:, :, :1, :6], False, hidden) is None  # of other lengths
