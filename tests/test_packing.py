"""How q, k, v lie in one matrix: rows are taken as their shapes say, and cut where the layers of transformers cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import BY_NAME
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from infuse.architectures import bind_any, specs_for
from infuse.architectures.packing import BLOCKS, FOUR_PARTS, PACKINGS, PER_GROUP, PER_HEAD, Fill, Heads, spans
from infuse.parallel.slices import Cut

HEADS = {
    BLOCKS: (Heads(4, 4, 6), Heads(6, 2, 5), Heads(5, 1, 3)),
    PER_HEAD: (Heads(4, 4, 6), Heads(3, 3, 5), Heads(1, 1, 4)),
    PER_GROUP: (Heads(4, 4, 6), Heads(6, 2, 5), Heads(5, 1, 3)),
    FOUR_PARTS: (Heads(4, 4, 6), Heads(8, 8, 3), Heads(12, 12, 2)),
}
PACKED = [(packing, heads) for packing in PACKINGS for heads in HEADS[packing]]


def split_qkv(packed: Tensor, packing: str, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Query rows [H D, ...], key rows [K D, ...] and value rows [K D, ...], by the shapes of a packed matrix or bias
    alone.
    """
    assert packed.shape[0] == heads.rows, (packed.shape, heads)
    tail, (h, k, d) = packed.shape[1:], (heads.query, heads.key, heads.width)
    if packing == BLOCKS:
        q, key, value = packed.split((h * d, k * d, k * d))
        return q, key, value
    if packing == PER_HEAD:
        assert h == k, "per-head packing has a key head for each query head"
        parts = packed.view(h, 3, d, *tail)
        return tuple(parts[:, i].reshape(h * d, *tail) for i in range(3))  # type: ignore[return-value]
    if packing == PER_GROUP:
        parts = packed.view(k, h // k + 2, d, *tail)
        return (
            parts[:, :-2].reshape(h * d, *tail),
            parts[:, -2].reshape(k * d, *tail),
            parts[:, -1].reshape(k * d, *tail),
        )
    assert packing == FOUR_PARTS and h == k, packing
    parts = packed.view(4, 3, h * d // 4, *tail)
    q, value, key = (parts[:, i].reshape(h * d, *tail) for i in range(3))
    return q, key, value


def by_spans(packed: Tensor, packing: str, heads: Heads, cut: Cut | None = None) -> Tensor:
    found = spans(Fill("qkv.weight", ("qkv.weight",), packing=packing, heads=heads, cut=cut))
    assert found is not None
    return torch.cat([packed[span.start : span.stop] for span in found])


@pytest.mark.parametrize("tail", [(), (7,)], ids=["bias", "weight"])
@pytest.mark.parametrize(("packing", "heads"), PACKED)
def test_rows_are_taken_in_the_order_of_queries_keys_values(packing: str, heads: Heads, tail: tuple[int, ...]) -> None:
    packed = torch.arange(heads.rows * max(1, *tail, 1)).reshape(heads.rows, *tail)
    parts = split_qkv(packed, packing, heads)
    assert [part.shape for part in parts] == [(n * heads.width, *tail) for n in (heads.query, heads.key, heads.key)]
    assert torch.equal(by_spans(packed, packing, heads), torch.cat(parts))


@pytest.mark.parametrize(("packing", "heads"), PACKED)
def test_a_cut_takes_its_ranges_of_the_whole(packing: str, heads: Heads) -> None:
    packed = torch.arange(heads.rows)
    whole = torch.cat(split_qkv(packed, packing, heads))
    ranges = ((1, heads.width + 1), (heads.rows - 2 * heads.width, heads.rows))
    taken = by_spans(packed, packing, heads, Cut(0, ranges, (heads.rows,)))
    assert torch.equal(taken, torch.cat([whole[start:stop] for start, stop in ranges]))


def of_interface(model: nn.Module, attention: nn.Module, caught: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catch what a layer hands to transformers' attention functions."""

    def spy(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        caught.append((query, key, value))
        return query.transpose(1, 2).contiguous(), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, model.config._attn_implementation, spy)


def of_method(name: str, made: bool) -> Callable[..., None]:
    """Catch what a method of the attention makes, or what it is given."""

    def install(model: nn.Module, attention: nn.Module, caught: list, monkeypatch: pytest.MonkeyPatch) -> None:
        own = getattr(attention, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            caught.append((result if made else args)[:3])
            return result

        monkeypatch.setattr(attention, name, spy)

    return install


SLICED = {
    **dict.fromkeys(("gpt2", "bigcode", "bigcode-heads", "phi3", "gpt-neox", "modernbert"), of_interface),
    **dict.fromkeys(("falcon-7b", "falcon-40b", "falcon-rw"), of_method("_split_heads", made=True)),
    "bloom": of_method("_reshape", made=True),
    "codegen": of_method("_attn", made=False),
}


def first_layer(model: nn.Module) -> tuple[nn.Module, nn.Module, Fill]:
    """The first layer, its attention and the fill of its qkv."""
    layer = next(module for module in model.modules() if specs_for(module))
    found = bind_any(specs_for(layer), layer, model.config)
    return (
        layer,
        layer.get_submodule(found.attn),
        next(fill for fill in found.fills if fill.target.endswith(".qkv.weight")),
    )


@pytest.mark.parametrize("name", SLICED)
def test_packing_is_the_layers_own_slicing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token at position 0, where rotary turns nothing: what the original's attention sees are the split rows,
    exactly.
    """
    model = BY_NAME[name].make()
    layer, attention, fill = first_layer(model)
    assert len(fill.sources) == 1 and fill.heads is not None
    fused: list[Tensor] = []
    packed = layer.get_submodule(fill.sources[0].removesuffix(".weight"))
    packed.register_forward_hook(lambda module, args, output: fused.append(output))
    caught: list[tuple[Tensor, ...]] = []
    SLICED[name](model, attention, caught, monkeypatch)
    with torch.no_grad():
        model(input_ids=torch.tensor([[17]]))
    parts = split_qkv(fused[0].flatten(), fill.packing or BLOCKS, fill.heads)
    for part, seen, heads in zip(parts, caught[0], (fill.heads.query, fill.heads.key, fill.heads.key), strict=True):
        seen = seen.reshape(-1, fill.heads.width)
        seen = seen[:: seen.shape[0] // heads]  # Falcon repeats its key heads
        assert torch.equal(part.view(heads, -1), seen)


def test_every_packing_is_compared_with_a_layer() -> None:
    assert {first_layer(BY_NAME[name].make())[2].packing or BLOCKS for name in SLICED} == set(PACKINGS)
