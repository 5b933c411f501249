"""What stands before and after a decoder's blocks (generate/ends.py), by the values of one step."""

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from infuse.generate.ends import Begin, Call

WIDTH = 64


def found(x: torch.Tensor, factor: float, config: PretrainedConfig, row: torch.Tensor | None = None) -> Begin | None:
    """For an embedding x that a model multiplies, and to which it adds the row of token 3."""
    embedding, places = nn.Embedding(4, WIDTH), nn.Embedding(8, WIDTH)
    ids = torch.tensor([[1]])
    calls, made = [Call(embedding, (ids,), {}, x)], x * factor
    if row is not None:
        places.weight.data[3] = row
        calls.append(Call(places, (ids,), {}, row[None, None]))
        made = made + row
    return Begin.of(calls, made, embedding, config, 3)


def test_a_row_of_zeros_tells_no_factor() -> None:
    """It may have been multiplied by the root of the width, with places and without."""
    rows, row = torch.randn(1, 1, WIDTH), torch.randn(WIDTH)
    zeros, config = torch.zeros_like(rows), PretrainedConfig()
    for added in (None, row):
        made = found(rows, WIDTH**0.5, config, added)
        assert made is not None and made.factor.number == WIDTH**0.5
        assert found(zeros, WIDTH**0.5, config, added) is None
    assert found(rows * 1e-30, WIDTH**0.5, config, row) is None, "too small to be seen beside the row"


class OfIds(nn.Embedding):
    """As FSMT's places: a table whose rows are chosen by counting the ids that are no padding."""


@pytest.mark.parametrize(
    ("kind", "is_given_ids", "padding"), [(nn.Embedding, False, None), (OfIds, False, None), (OfIds, True, 2)]
)
def test_a_table_that_is_given_the_ids_may_count_them(
    kind: type[nn.Embedding], is_given_ids: bool, padding: int | None
) -> None:
    embedding, places, x = nn.Embedding(4, WIDTH), kind(8, WIDTH, padding_idx=2), torch.randn(1, 1, WIDTH)
    ids, row = torch.tensor([[1]]), places.weight[3].detach()
    given = ids.view(-1, 1) if is_given_ids else torch.tensor([[3]])
    calls = [Call(embedding, (ids,), {}, x), Call(places, (), {"input": given}, row[None, None])]
    begin = Begin.of(calls, x + row, embedding, PretrainedConfig(), 3)
    assert begin is not None and begin.padding == padding and begin.is_looked_up == (padding is None)


def test_a_named_number_is_preferred_to_the_same_one_of_the_width() -> None:
    config = PretrainedConfig()
    config.embedding_multiplier = WIDTH**0.5
    made = found(torch.randn(1, 1, WIDTH), WIDTH**0.5, config)
    assert made is not None and made.factor.number == WIDTH**0.5
