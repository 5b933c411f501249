"""Padded batches of encoders: the linears see the real tokens alone, and every row is what it is by itself."""

from __future__ import annotations

import pytest
import torch
from families import BY_NAME
from torch import Tensor, nn

import infuse
from infuse.layers.block import Block, real_tokens

LENGTHS = (3, 11, 7)
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
            block.mlp.up.register_forward_hook(lambda module, args, output: seen.append(args[0].numel() // args[0].shape[-1]))
    with torch.no_grad():
        return seen, model(input_ids=ids, attention_mask=mask)[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_padding_is_not_computed(name: str, side: str, attention: str) -> None:
    original = BY_NAME[name].make(attn_implementation=attention)
    model = infuse.init_inference(BY_NAME[name].make(attn_implementation=attention), dtype="fp32").module
    ids, mask = padded(side)
    seen, found = rows_seen(model, ids, mask)
    firsts = int((mask[:, 0] == 0).sum())  # of padded rows: what a pooler takes
    assert seen and set(seen) == {int(mask.sum()) + firsts}
    for row in range(len(LENGTHS)):
        with torch.no_grad():
            exact = original(input_ids=ids[row : row + 1], attention_mask=mask[row : row + 1])[0][0]
        real = mask[row].bool()
        assert (found[row][real] - exact[real]).abs().max() < TOLERANCE * exact.abs().max()


def test_batches_without_padding_are_left_as_they_are() -> None:
    model = infuse.init_inference(BY_NAME["bert"].make(), dtype="fp32").module
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
