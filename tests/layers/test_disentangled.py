"""Disentangled attention (layers/attention/disentangled.py): buckets, masks, arguments, float16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor

import infuse
from infuse.layers.attention import disentangled
from infuse.layers.attention.disentangled import _line, _placed
from infuse.layers.block import Block
from tests.models.families import BY_NAME
from tests.support.side_by_side import TOLERANCE

NAMES = ("deberta-v3", "deberta-v2")


def ids(batch: int = 2, tokens: int = 11) -> Tensor:
    return torch.randint(3, 96, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


def replaced(original: Any) -> Any:
    """A copy of the model whose layers are all blocks, else it would be compared with itself."""
    engine = infuse.init_inference(copy.deepcopy(original), dtype="fp32")
    encoder = next(module for name, module in engine.module.named_modules() if name.endswith("encoder"))
    assert all(isinstance(layer, Block) for layer in encoder.layer)
    return engine


def error(found: Any, wanted: Any) -> float:
    return float((found[0] - wanted[0]).abs().max() / wanted[0].abs().max())


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_products_with_distances_are_those_with_pairs(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x, y = torch.randn(2, 3, tokens, 4, generator=generator), torch.randn(3, 4, 9, generator=generator)
    line = torch.randint(9, (2 * tokens - 1,), generator=generator)
    places = torch.arange(tokens)
    pairs = line[tokens - 1 - (places[:, None] - places)]
    assert torch.equal(_line(pairs), line)  # type: ignore[arg-type]
    by_distance, by_pair = _placed(x, y, line, is_line=True), _placed(x, y, pairs, is_line=False)
    wanted = torch.einsum("bhtd,hdtk->bhtk", x, y[..., pairs])
    assert torch.allclose(by_distance, wanted, atol=1e-5) and torch.allclose(by_pair, wanted, atol=1e-5)


def test_pairs_that_depend_on_more_than_the_distance_have_no_line() -> None:
    pairs = torch.arange(9).view(3, 3)
    assert _line(pairs) is None


@pytest.mark.parametrize("name", NAMES)
def test_both_ways_give_what_the_original_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = BY_NAME[name].make()
    engine = replaced(original)
    with torch.no_grad():
        for tokens in (1, 2, 11, 40):
            wanted = original(ids(tokens=tokens))
            assert error(engine(ids(tokens=tokens)), wanted) < TOLERANCE
            with monkeypatch.context() as patched:
                patched.setattr(disentangled, "_line", lambda pairs: None)
                assert error(engine(ids(tokens=tokens)), wanted) < TOLERANCE


@pytest.mark.parametrize("types", [["c2p"], ["p2c"], []], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_each_kind_of_scores(types: list[str], shared: bool) -> None:
    family = BY_NAME["deberta-v2"]
    if shared and not types:
        pytest.skip("nothing is shared")
    original = family.make(pos_att_type=types, share_att_key=shared)
    engine = replaced(original)
    with torch.no_grad():
        assert error(engine(ids()), original(ids())) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_masks_of_two_and_three_axes(name: str) -> None:
    original = BY_NAME[name].make()
    engine = replaced(original)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, 6:] = 0
    pairs = (mask[:, None] * mask[:, :, None]).clone()
    pairs[1, 3, 7] = 0
    x = torch.randn(2, 11, 48, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for given in (mask, mask.float()):  # never added to the scores
            wanted = original(ids(), attention_mask=given)
            assert error(engine(ids(), attention_mask=given), wanted) < TOLERANCE
        if original.deberta.encoder.conv is None:  # whose masks have two axes
            wanted, found = (model.deberta.encoder(x, pairs) for model in (original, engine.module))
            assert error(found, wanted) < TOLERANCE


def test_a_layer_names_what_it_lacks_or_does_not_take() -> None:
    engine = replaced(BY_NAME["deberta-v3"].make())
    encoder: Any = engine.module.deberta.encoder
    layer, x = encoder.layer[0], torch.randn(1, 5, 48)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.long)
    given = dict(relative_pos=encoder.get_rel_pos(x), rel_embeddings=encoder.get_rel_embedding())
    layer(x, mask, **given)
    for name in given:
        with pytest.raises(infuse.UnsupportedCall, match=f"without {name}"):
            layer(x, mask, **{**given, name: None})
    with pytest.raises(infuse.UnsupportedCall, match=r"relative_pos has shape \[1, 4, 4\]"):
        layer(x, mask, **{**given, "relative_pos": given["relative_pos"][:, :4, :4]})
    with pytest.raises(infuse.UnsupportedCall, match="rel_embeddings has shape"):
        layer(x, mask, **{**given, "rel_embeddings": given["rel_embeddings"][:3]})
    with pytest.raises(infuse.UnsupportedCall, match="query_states"):
        layer(x, mask, **given, query_states=x)


@pytest.mark.parametrize("name", ["mpnet", *NAMES])
def test_weights_of_attention_are_returned_if_they_are_asked_for(name: str) -> None:
    original = BY_NAME[name].make()
    engine = replaced(original)
    with torch.no_grad():
        wanted, found = (model(ids(), output_attentions=True).attentions for model in (original, engine))
    assert len(found) == len(wanted) == 3
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() < 1e-6


@pytest.mark.parametrize("types", [None, ["p2c", "c2p"]], ids=str)
def test_without_distances(types: list[str] | None) -> None:
    """The scale counts the kinds of scores all the same."""
    original = BY_NAME["deberta-v2"].make(relative_attention=False, pos_att_type=types)
    engine = replaced(original)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, 6:] = 0
    with torch.no_grad():
        assert error(engine(ids(), attention_mask=mask), original(ids(), attention_mask=mask)) < TOLERANCE


def test_mpnet_without_a_bias_adds_none() -> None:
    original = t.MPNetModel(BY_NAME["mpnet"].config(**BY_NAME["mpnet"].values)).eval()
    engine = replaced(original)
    x = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, found = (model.encoder.layer[0](x)[0] for model in (original, engine.module))
    assert (found - wanted).abs().max() < 1e-5
